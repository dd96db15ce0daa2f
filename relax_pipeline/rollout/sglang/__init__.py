"""The SGLang engine: a server process of its own, what is sent to it, and the checks before anything is sent."""
