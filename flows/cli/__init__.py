"""The `relax-pipeline` command."""

from __future__ import annotations

from flows.cli.app import main

__all__ = ["main"]
