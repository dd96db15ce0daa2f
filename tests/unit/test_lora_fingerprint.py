"""Fingerprints of tensors: the same wherever they are computed, and different whenever anything is."""

from __future__ import annotations

import hashlib

import pytest
import torch

from relax_pipeline.lora.fingerprint import fingerprint, fingerprints, looked_at_in_batches

CHUNK = 1 << 17
"""Elements of bfloat16 in a chunk."""


def real(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.02).to(dtype)


def digest(tensor: torch.Tensor) -> str:
    return fingerprints({"t": tensor}).digests["t"]


def test_a_tensor_of_one_word_by_hand() -> None:
    keys = [-8358484668875865059, -7373244319742232501]  # the first of each row
    one = torch.tensor([1.0])  # the word 0x3F800000
    sums = b"".join(((key * 0x3F800000) % 2**64).to_bytes(8, "little") for key in keys)
    assert digest(one) == hashlib.sha256(b"torch.float32|(1,)|" + sums).hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, 3, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_batches_give_what_single_tensors_give(dtype: torch.dtype, numel: int) -> None:
    tensors = {str(seed): real(numel, seed=seed, dtype=torch.float32).mul(1e4).to(dtype) for seed in range(3)}
    found = looked_at_in_batches(tensors)
    for name, tensor in tensors.items():
        sums, finite = found[name]
        header = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
        assert hashlib.sha256(header + sums.tobytes()).hexdigest() == digest(tensor)
        assert finite


def test_tensors_larger_than_what_is_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": real(3 * CHUNK + 2), "b": real(3 * CHUNK + 2, seed=1), "c": real(7)}
    whole = looked_at_in_batches(tensors)
    monkeypatch.setattr("relax_pipeline.lora.fingerprint._AT_ONCE", CHUNK // 2)  # one chunk
    for name, (sums, _) in looked_at_in_batches(tensors).items():
        assert sums.tolist() == whole[name][0].tolist()


@pytest.mark.parametrize("place", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 6])
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_one_flipped_bit_is_seen(place: int, bit: int) -> None:
    changed = real(3 * CHUNK + 7)
    before = digest(changed)
    changed.view(torch.int16)[place] ^= -(1 << 15) if bit == 15 else 1 << bit
    assert digest(changed) != before


@pytest.mark.parametrize("places", [(0, 1), (3, 5), (0, CHUNK), (CHUNK, 2 * CHUNK), (7, 3 * CHUNK + 6)])
def test_two_swapped_elements_are_seen(places: tuple[int, int]) -> None:
    changed = real(3 * CHUNK + 7)
    before = digest(changed)
    changed[list(places)] = changed[list(places[::-1])]
    assert digest(changed) != before


def test_two_flipped_signs_are_seen() -> None:
    """A sum with odd keys would lose them: each changes nothing but its highest bit."""
    changed = real(64, dtype=torch.float32)
    before = digest(changed)
    changed[[3, 9]] *= -1
    assert digest(changed) != before


def test_a_negated_tensor_and_swapped_chunks_are_seen() -> None:
    tensor = real(2, CHUNK)
    assert len({digest(tensor), digest(-tensor), digest(tensor.flip(0)), digest(tensor.flip(1))}) == 4


def test_names_shapes_and_dtypes_are_seen() -> None:
    a, b = real(4, 6), real(4, 6, seed=1)
    sets = [{"a": a, "b": b}, {"a": b, "b": a}, {"a": a}, {"a": a.reshape(6, 4), "b": b}, {"a": a.view(torch.float16)}]
    assert len({fingerprint(tensors) for tensors in sets}) == len(sets)
    assert fingerprint({"b": b, "a": a}) == fingerprint({"a": a, "b": b})


def test_views_are_read_in_their_own_order() -> None:
    tensor = real(5, 7)
    assert digest(tensor.T) == digest(tensor.T.contiguous())
    assert digest(tensor.reshape(-1)[1:]) == digest(tensor.reshape(-1)[1:].clone())
    assert digest(torch.tensor(2.0)) != digest(torch.tensor([2.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensors_that_are_not_finite_are_named(value: float) -> None:
    tensors = {name: real(4, 6, seed=seed) for seed, name in enumerate("abc")}
    tensors["b"][3, 2] = value
    assert fingerprints(tensors).not_finite == ("b",)
    assert [name for name, (_, finite) in looked_at_in_batches(tensors).items() if not finite] == ["b"]
