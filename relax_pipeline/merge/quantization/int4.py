"""Eight 4-bit integers in an int32, lowest bits first, each stored with 8 added: compressed-tensors' pack-quantized."""

from __future__ import annotations

import torch

OFFSET = 8


def unpack_int4(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return int8 values in [-8, 7].

    Args:
        packed: int32 [rows, ceil(num_columns / 8)].
        num_columns: Of the result.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(1)[:, :num_columns] - OFFSET).to(torch.int8)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Return int32 [rows, ceil(columns / 8)] of int8 values in [-8, 7]; the inverse of `unpack_int4`."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.to(torch.int64) + OFFSET, (0, -columns % 8))
    words = (padded.view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
