"""Trainer to engines: send, read back, compare, and only then serve."""
