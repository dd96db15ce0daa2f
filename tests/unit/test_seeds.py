from __future__ import annotations

from relax_pipeline.seeds import derive_seed


def test_is_the_same_on_every_machine() -> None:
    # The first 8 bytes of sha256(b"3\x1frollout\x1f0"), shifted right by one bit.
    assert derive_seed(3, "rollout", 0) == 0x173ED8BC7CC05E7A


def test_depends_on_each_part_and_on_their_order() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 2), (2, 1), (1, 2, 0), (12,), (1, "2 "), (-1, 2))}
    assert len(seeds) == 6


def test_fits_torch_and_numpy() -> None:
    assert all(0 <= derive_seed("x", number) < 2**63 for number in range(1000))
