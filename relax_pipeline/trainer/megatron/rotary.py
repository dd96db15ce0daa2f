"""Rotary embedding of packed sequences, all of them at once.

Megatron rotates one sequence after the other: two thirds of a step's time on an H200 with a model of 135 M parameters
and a dozen sequences a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

from relax_pipeline.trainer.megatron.context import Share, positions


def rotate_packed(
    x_NHD: torch.Tensor, cu_seqlens: torch.Tensor, freqs_S11D: torch.Tensor, *args: Any, cp_group: Any, **kwargs: Any
) -> torch.Tensor:
    """Return [N, H, D] with each sequence's positions counted from 0; stands for `_apply_rotary_pos_emb_thd`.

    Args:
        x_NHD: Queries or keys of this rank's tokens.
        cu_seqlens: int32, where whole sequences start; the last one is N times the ranks of cp_group.
        freqs_S11D: Of at least as many positions as the longest sequence has.
        args: For the rotation itself, as in Megatron.
        cp_group: Ranks that share each sequence.
        kwargs: As args.
    """
    positions_N = positions(cu_seqlens, x_NHD.shape[0], Share(cp_group.rank(), cp_group.size()))
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(
        x_NHD[:, None], freqs_S11D[positions_N], *args, **kwargs
    )
    return rotated[:, 0]
