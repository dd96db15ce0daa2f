"""A digest of tensors that is computed where they lie, on a GPU as on a CPU, and is the same on both."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

_CHUNK = 1 << 16
"""Words of 32 bits that are summed together; on a CPU they stay in its cache."""
_AT_ONCE = 1 << 23
"""Words that a GPU works on at once; it needs 16 bytes for each."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What is to be known of tensors before they are passed on."""

    digests: dict[str, str]
    """By tensor name; `combine_digests` makes one of them."""
    not_finite: tuple[str, ...]
    """Tensors that hold NaN or infinity."""


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return the sha256 over names and their tensors' digests, in name order: parts may be computed apart."""
    return hashlib.sha256("".join(f"{name}|{digests[name]}|" for name in sorted(digests)).encode()).hexdigest()


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one digest of names, dtypes, shapes and bytes; the order of the tensors does not matter."""
    return combine_digests(fingerprints(tensors).digests)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> Fingerprints:
    """Look at every byte once, and wait for a GPU once.

    Each chunk of 2^16 words gives two sums of key * word modulo 2^64, with the same random keys everywhere; SHA-256
    makes a digest of a tensor's dtype, shape and sums. Two chunks that differ have the same sums with a probability
    below 2^-66. It is no defence against somebody who knows the keys.

    Source: multilinear hashing; Lemire and Kaser 2014, arXiv:1202.4961, theorem 3.1.
    """
    on_gpu = [name for name, tensor in tensors.items() if tensor.is_cuda]
    on_cpu = [name for name, tensor in tensors.items() if not tensor.is_cuda]
    found = _looked_at_in_threads({name: tensors[name] for name in on_cpu}) if on_cpu else {}
    if on_gpu:
        found |= looked_at_in_batches({name: tensors[name] for name in on_gpu})
    digests = {name: _digest(tensor, found[name][0]) for name, tensor in tensors.items()}
    return Fingerprints(digests, tuple(name for name in tensors if not found[name][1]))


def looked_at_in_batches(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[NDArray[np.int64], bool]]:
    """Return sums and whether all values are finite, tensors of one size at once; for a GPU, and right on a CPU."""
    names: list[str] = []
    sums: list[torch.Tensor] = []
    finite: list[torch.Tensor] = []
    for batch in _batches(tensors):
        rows_NE = torch.stack([tensors[name].detach().reshape(-1) for name in batch])
        names += batch
        sums.append(_sums(_words(rows_NE)))
        finite.append(_finite(rows_NE))
    sizes = [part[0].numel() for part in sums for _ in part]
    values = torch.cat([part.reshape(-1) for part in sums]).cpu().numpy()
    flags = torch.cat(finite).tolist()
    ends = np.cumsum(sizes)
    return {
        name: (values[end - size : end], flag) for name, size, end, flag in zip(names, sizes, ends, flags, strict=True)
    }


def _looked_at_in_threads(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[NDArray[np.int64], bool]]:
    """Return the same, tensor by tensor; numpy's integer products are ten times as fast as torch's on a CPU."""

    def one(tensor: torch.Tensor) -> tuple[NDArray[np.int64], bool]:
        row_1E = tensor.detach().reshape(1, -1)
        words = _words(row_1E)[0].numpy()
        keys = _keys()
        chunks = (words[start : start + _CHUNK].astype(np.int64) for start in range(0, len(words), _CHUNK))
        sums = [[np.dot(key[: len(chunk)], chunk) for key in keys] for chunk in chunks]
        return np.array(sums, dtype=np.int64), bool(_finite(row_1E))

    def some(names: list[str]) -> dict[str, tuple[NDArray[np.int64], bool]]:
        return {name: one(tensors[name]) for name in names}

    by_size = sorted(tensors, key=lambda name: tensors[name].nbytes)
    workers = min(8, os.cpu_count() or 1, len(by_size))
    if workers == 1:
        return some(by_size)
    with ThreadPoolExecutor(workers) as threads:
        shares = threads.map(some, [by_size[worker::workers] for worker in range(workers)])
        return {name: found for share in shares for name, found in share.items()}


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield names of tensors with as many elements of one dtype, as many as may be copied at once."""
    alike: dict[tuple[torch.dtype, int], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.numel()), []).append(name)
    for (dtype, numel), names in alike.items():
        size = max(1, 4 * _AT_ONCE // max(1, numel * dtype.itemsize))
        for start in range(0, len(names), size):
            yield names[start : start + size]


def _words(rows_NE: torch.Tensor) -> torch.Tensor:
    """Return the rows' bytes as int32, the last word filled up with zeros."""
    bytes_NB = rows_NE.contiguous().view(torch.uint8)
    if bytes_NB.shape[1] == 0:
        return bytes_NB.to(torch.int32)
    if missing := -bytes_NB.shape[1] % 4:
        bytes_NB = torch.cat([bytes_NB, bytes_NB.new_zeros(len(bytes_NB), missing)], dim=1)
    elif bytes_NB.storage_offset() % 4:
        bytes_NB = bytes_NB.clone()
    return bytes_NB.view(torch.int32)


def _sums(words_NW: torch.Tensor) -> torch.Tensor:
    """Return [rows, chunks, 2] sums."""
    keys_2C = _keys_on(words_NW.device)
    at_once = max(1, _AT_ONCE // (len(words_NW) * _CHUNK)) * _CHUNK
    parts = []
    for start in range(0, words_NW.shape[1], at_once):
        part_NW = words_NW[:, start : start + at_once]
        whole = part_NW.shape[1] // _CHUNK * _CHUNK
        if whole:
            parts.append((part_NW[:, :whole].reshape(len(part_NW), -1, 1, _CHUNK) * keys_2C).sum(-1))
        if rest := part_NW.shape[1] - whole:
            parts.append((part_NW[:, None, None, whole:] * keys_2C[:, :rest]).sum(-1))
    return torch.cat(parts, dim=1) if parts else words_NW.new_zeros((len(words_NW), 0, 2), dtype=torch.int64)


def _finite(rows_NE: torch.Tensor) -> torch.Tensor:
    """Return for each row whether it holds neither NaN nor infinity; the extremes tell, in one pass without a copy."""
    if not rows_NE.dtype.is_floating_point or rows_NE.shape[1] == 0:
        return rows_NE.new_ones(len(rows_NE), dtype=torch.bool)
    low, high = rows_NE.reshape(-1).aminmax() if len(rows_NE) == 1 else (rows_NE.amin(dim=1), rows_NE.amax(dim=1))
    return (low.isfinite() & high.isfinite()).reshape(-1)


def _digest(tensor: torch.Tensor, sums: NDArray[np.int64]) -> str:
    header = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    return hashlib.sha256(header + sums.astype("<i8").tobytes()).hexdigest()


@cache
def _keys() -> NDArray[np.int64]:
    """Return [2, chunk] keys; the bit generator's stream is part of numpy's promises."""
    return np.random.PCG64(2106_09685).random_raw(2 * _CHUNK).view(np.int64).reshape(2, _CHUNK)


@cache
def _keys_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_keys()).to(device)
