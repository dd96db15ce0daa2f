"""LoRA reinforcement-learning post-training as a workflow."""

from __future__ import annotations

__version__ = "0.1.0"
