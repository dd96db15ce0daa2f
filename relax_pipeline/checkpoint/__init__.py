"""Resumable checkpoints: one immutable folder a save, whole or absent, portable as a PEFT adapter."""
