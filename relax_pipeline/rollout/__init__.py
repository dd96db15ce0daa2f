"""Engines: who samples completions, from which policy version."""
