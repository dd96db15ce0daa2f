"""Trainers: who owns the adapter, the optimizer and the policy version."""
