from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config

from relax_pipeline.sync.transport import on_one_gpu, transport_kind

COLOCATED = {"cluster": {"colocate": True}}
ENGINE = {"engine": {"kind": "hf", "device": "auto"}}
TWO_RANKS = {"trainer": {"kind": "megatron", "data_parallel_size": 2}}


@pytest.mark.parametrize(
    ("sections", "on_gpus", "kind"),
    [
        (ENGINE, True, "nccl"),
        (ENGINE, False, "object_store"),
        (ENGINE | TWO_RANKS, True, "nccl"),
        (COLOCATED, True, "ipc"),
        (COLOCATED, False, "ipc"),
        # Engine 1 does not see the GPU of the trainer's first rank.
        (COLOCATED | TWO_RANKS, True, "object_store"),
        # How SGLang's other ranks read what lies on the first one's GPU has not been measured.
        ({"engine": {"kind": "sglang", "tensor_parallel_size": 2}}, True, "object_store"),
        ({"engine": ENGINE["engine"] | {"device": "cpu"}}, True, "object_store"),
        ({"sync": {"mode": "adapter", "transport": "disk"}}, True, "disk"),
    ],
)
def test_fastest_way_between_the_processes_is_taken_unless_one_is_named(
    sections: dict[str, Any], kind: str, *, on_gpus: bool
) -> None:
    assert transport_kind(run_config("unused", **sections), on_gpus=on_gpus) == kind


def test_several_gpus_are_not_one() -> None:
    assert on_one_gpu(run_config("unused", **COLOCATED))
    assert not on_one_gpu(run_config("unused", **COLOCATED, **TWO_RANKS))
    assert not on_one_gpu(run_config("unused"))
