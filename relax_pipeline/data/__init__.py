"""Prompts: reading them, rendering them, and the order in which a run draws them."""
