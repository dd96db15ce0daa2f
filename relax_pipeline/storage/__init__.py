"""Bytes at rest: local files and object stores."""
