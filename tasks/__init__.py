"""Prefect tasks: each is one call of the library, with the retries it may have and nothing else.

A task that touches live processes is never cached, never persisted and never retried by itself: its effect is in the
processes, and the road back after a failure is the checkpoint.
"""
