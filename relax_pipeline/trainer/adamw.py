"""The optimizer of all trainers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from relax_pipeline.config import OptimizerConfig


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over parameters, of which there is at least one; whoever steps it sets the learning rate."""
    return torch.optim.AdamW(
        parameters, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
    )
