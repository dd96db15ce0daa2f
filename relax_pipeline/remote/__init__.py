"""Ray: where processes live and how they are called. The only package that imports ray."""
