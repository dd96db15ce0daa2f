"""A real SGLang server whose weights are replaced, against transformers."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_sglang import assert_drawn_from, folded, full_adapter, requests, tokens, whole_model

from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.rollout.sglang.engine import SglangEngine
from relax_pipeline.types import Ack, Completion, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


def load(engine: SglangEngine, weights: dict[str, torch.Tensor], version: int) -> Ack:
    """Send a model in two parts."""
    names = list(weights)
    for part in (names[:5], names[5:]):
        engine.load_weights({name: weights[name] for name in part}, version=version)
    return engine.activate(version)


def test_each_version_replaces_the_one_before_in_the_cache_too(merge_engine: SglangEngine, tiny_model: Path) -> None:
    prompt = tuple(np.random.default_rng(1).integers(4, 80, 60).tolist())
    batch = [replace(request, token_ids=prompt) for request in requests(2)]
    for version in (1, 2, 3):
        weights = whole_model(tiny_model, full_adapter(version))
        ack = load(merge_engine, weights, version)
        assert (ack.version, ack.modules, ack.digest) == (version, tuple(sorted(weights)), fingerprint(weights))
        completions = merge_engine.generate(batch, version=version)
        assert_drawn_from(folded(tiny_model, full_adapter(version)), batch, completions)
        assert {completion.policy_version for completion in completions} == {version}
    for gone in (2, None):
        with pytest.raises(UnknownVersionError):
            merge_engine.logprobs([[5, 6]], version=gone)


def test_part_of_a_model_is_never_served(merge_engine: SglangEngine, tiny_model: Path) -> None:
    weights = whole_model(tiny_model, full_adapter(4))
    load(merge_engine, weights, 4)
    merge_engine.load_weights({"lm_head.weight": weights["lm_head.weight"] + 1}, version=5)
    for version in (4, 5):
        with pytest.raises(UnknownVersionError):
            merge_engine.generate(requests(1), version=version)
    with pytest.raises(EngineError, match=r"version 5: never received \['model.embed_tokens.weight'"):
        merge_engine.activate(5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lm_head.bias", torch.ones(80), r"this model has no weights named \['lm_head.bias'\]"),
        (
            "lm_head.weight",
            torch.ones(32, 80),
            r"is torch.float32 \(32, 80\), the engine's is .* \(80, 32\)",
        ),
        ("lm_head.weight", torch.ones(80, 32).bfloat16(), r"is torch.bfloat16 \(80, 32\), the engine's is torch.float"),
        ("model.norm.weight", torch.full((32,), torch.nan), "model.norm.weight holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_leave_the_served_version_intact(
    merge_engine: SglangEngine, tiny_model: Path, name: str, value: torch.Tensor, message: str
) -> None:
    weights = whole_model(tiny_model, full_adapter(6))
    load(merge_engine, weights, 6)
    before = tokens(merge_engine.generate(requests(3), version=6))
    with pytest.raises(EngineError, match=message):
        merge_engine.load_weights(weights | {name: value}, version=7)
    assert tokens(merge_engine.generate(requests(3), version=6)) == before


def test_weights_are_not_replaced_under_a_running_request(merge_engine: SglangEngine, tiny_model: Path) -> None:
    weights = whole_model(tiny_model, full_adapter(8))
    load(merge_engine, weights, 8)
    long = [replace(request, sampling=SamplingParams(300)) for request in requests(2)]
    running: list[Completion] = []
    thread = threading.Thread(target=lambda: running.extend(merge_engine.generate(long, version=8)))
    thread.start()
    while not merge_engine.busy:
        assert thread.is_alive()
    with pytest.raises(EngineError, match="engine-0 cannot replace its weights while 1 requests run"):
        merge_engine.load_weights(weights, version=9)
    with pytest.raises(EngineError, match="engine-0 cannot sleep while 1 requests run"):
        merge_engine.sleep()  # SGLang would end
    thread.join()
    assert_drawn_from(folded(tiny_model, full_adapter(8)), long, running)
    assert len(merge_engine.generate(requests(1), version=8)) == 1


def test_server_for_whole_models_hosts_no_adapter(merge_engine: SglangEngine) -> None:
    assert merge_engine.info().leaf_modules == ()
    with pytest.raises(EngineError, match="started for merged weights, it hosts no adapters"):
        merge_engine.stage(full_adapter(1))


def test_engine_asleep_takes_no_requests_and_wakes_to_the_same(merge_engine: SglangEngine, tiny_model: Path) -> None:
    load(merge_engine, whole_model(tiny_model, full_adapter(11)), 11)
    before = tokens(merge_engine.generate(requests(3), version=11))
    merge_engine.sleep()
    with pytest.raises(EngineError, match="engine-0 is asleep"):
        merge_engine.generate(requests(3), version=11)
    merge_engine.wake()
    assert tokens(merge_engine.generate(requests(3), version=11)) == before
