"""From a folder with a merged model to an immutable, verified copy in an object store."""
