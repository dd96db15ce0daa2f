"""What every engine must do. Another backend joins by a branch in `start`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import assert_drawn_from, make_samples, random_adapter, reference_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from relax_pipeline.config import HfEngineConfig, ModelConfig
from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.rollout.base import Engine
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.types import Adapter, Completion, GenerateRequest, SamplingParams

Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q0: (64, 32), DOWN1: (32, 48)}
Start = Callable[..., Engine]


@pytest.fixture(params=["hf"])
def start(request: pytest.FixtureRequest, tiny_model: Path) -> Start:
    """Start an engine on the tiny model; all backends take `batch_size`."""
    assert request.param == "hf"

    def hf(*, batch_size: int = 128) -> Engine:
        model = ModelConfig(path=str(tiny_model), dtype="float32")
        return HfEngine(engine_id="engine-0", model=model, config=HfEngineConfig(device="cpu", batch_size=batch_size))

    return hf


@pytest.fixture
def engine(start: Start) -> Engine:
    """An engine that serves versions 1 and 2."""
    return serving(start(), adapter(1), adapter(2))


def adapter(version: int) -> Adapter:
    return random_adapter([Q0, DOWN1], SHAPES, version=version)


def serving(engine: Engine, *adapters: Adapter) -> Engine:
    for item in adapters:
        engine.stage(item)
        engine.activate(item.info.version)
    return engine


def requests(count: int, *, seed: int = 0, **sampling: float) -> list[GenerateRequest]:
    """Prompts of different lengths."""
    params = SamplingParams(**({"max_new_tokens": 12} | sampling))  # type: ignore[arg-type]
    draw = np.random.default_rng(5)
    prompts = [tuple(draw.integers(4, 80, 1 + index % 5).tolist()) for index in range(count)]
    return [GenerateRequest(prompt, 1000 * seed + index, params) for index, prompt in enumerate(prompts)]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def folded(tiny_model: Path, item: Adapter) -> PreTrainedModel:
    """The base with an adapter added to its weights, by transformers alone."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for module in item.info.modules:
            lora_A = item.tensors[f"base_model.model.{module}.lora_A.weight"]
            lora_B = item.tensors[f"base_model.model.{module}.lora_B.weight"]
            model.get_submodule(module).weight += item.spec.alpha / item.spec.rank * lora_B @ lora_A  # type: ignore[operator]
    return model.eval()


# --- Generation ---


def test_same_requests_give_the_same_completions_whatever_ran_before(engine: Engine) -> None:
    first = engine.generate(requests(7), version=1)
    engine.generate(requests(3, seed=9), version=2)
    again = engine.generate(requests(7), version=1)
    assert tokens(again) == tokens(first)
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)


def test_another_seed_gives_other_completions(engine: Engine) -> None:
    first, second = (tokens(engine.generate(requests(7, seed=seed), version=1)) for seed in (0, 1))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_completions_of_one_prompt_differ_by_their_seeds(engine: Engine) -> None:
    [request] = requests(1)
    completions = engine.generate([replace(request, seed=seed) for seed in range(8)], version=1)
    assert len({tuple(row) for row in tokens(completions)}) == 8


def test_batching_changes_no_token(start: Start, engine: Engine) -> None:
    small = serving(start(batch_size=3), adapter(1))
    together, apart = (e.generate(requests(10), version=1) for e in (engine, small))
    assert tokens(together) == tokens(apart)
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rollout_logprobs_are_those_of_a_teacher_forced_pass(
    engine: Engine, tiny_model: Path, temperature: float
) -> None:
    model = folded(tiny_model, adapter(1))
    batch = requests(6, temperature=temperature)
    assert_drawn_from(model, batch, engine.generate(batch, version=1), tolerance=1e-5)


@pytest.mark.parametrize("greedy", [{"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-9}])
def test_greedy_takes_the_likeliest_token(engine: Engine, tiny_model: Path, greedy: dict[str, float]) -> None:
    model = folded(tiny_model, adapter(1))
    batch = requests(4, **greedy)
    for request, row in zip(batch, tokens(engine.generate(batch, version=1)), strict=True):
        ids = list(request.token_ids)
        for token in row:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_top_p_keeps_to_the_nucleus(engine: Engine, tiny_model: Path) -> None:
    model = folded(tiny_model, adapter(1))
    batch = requests(8, top_p=0.5)
    for request, row in zip(batch, tokens(engine.generate(batch, version=1)), strict=True):
        ids = list(request.token_ids)
        for token in row:
            with torch.no_grad():
                probabilities = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            likelier = probabilities[probabilities > probabilities[token]].sum()
            assert likelier < 0.5
            ids.append(token)


def test_top_k_keeps_to_the_likeliest(engine: Engine, tiny_model: Path) -> None:
    model = folded(tiny_model, adapter(1))
    batch = requests(6, top_k=3, max_new_tokens=1)
    for request, [token] in zip(batch, tokens(engine.generate(batch, version=1)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.token_ids])).logits[0, -1]
        assert token in logits.topk(3).indices.tolist()


def test_length_limit_ends_a_completion(engine: Engine) -> None:
    batch = [
        replace(request, sampling=SamplingParams(max_new_tokens=1 + place)) for place, request in enumerate(requests(4))
    ]
    completions = engine.generate(batch, version=1)
    assert [len(completion.token_ids) for completion in completions] == [1, 2, 3, 4]
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_stop_token_ends_a_completion_and_is_part_of_it(engine: Engine) -> None:
    unstopped = tokens(engine.generate(requests(8), version=1))
    stop = unstopped[0][4]
    completions = engine.generate(requests(8, stop_token_ids=(2, stop)), version=1)  # type: ignore[arg-type]
    for completion, row in zip(completions, unstopped, strict=True):
        end = min((row.index(token) for token in (2, stop) if token in row), default=None)
        assert completion.token_ids.tolist() == (row if end is None else row[: end + 1])
        assert completion.finish_reason == ("length" if end is None else "stop")
        assert len(completion.rollout_logprobs) == len(completion.token_ids)


def test_stop_token_as_the_last_allowed_one_is_a_stop(engine: Engine) -> None:
    [row] = tokens(engine.generate(requests(1), version=1))
    length = 1 + row.index(row[5])
    [completion] = engine.generate(requests(1, max_new_tokens=length, stop_token_ids=(row[5],)), version=1)  # type: ignore[arg-type]
    assert (len(completion.token_ids), completion.finish_reason) == (length, "stop")


def test_completions_are_stamped(engine: Engine) -> None:
    info = engine.info()
    [completion] = engine.generate(requests(1), version=2)
    assert (completion.policy_version, completion.engine_id, completion.incarnation) == (
        2,
        "engine-0",
        info.incarnation,
    )


# --- Versions ---


def test_each_start_is_another_incarnation_of_the_same_base(start: Start) -> None:
    first, second = start().info(), start().info()
    assert first.incarnation != second.incarnation
    assert first.base_tensors_digest == second.base_tensors_digest


def test_activation_reads_back_what_was_sent(start: Start) -> None:
    engine, item = start(), adapter(3)
    engine.stage(item)
    ack = engine.activate(3)
    assert (ack.engine_id, ack.version, ack.modules) == ("engine-0", 3, (Q0, DOWN1))
    assert ack.digest == item.info.digest
    assert engine.activate(3) == ack


def test_versions_are_served_side_by_side(engine: Engine, tiny_model: Path) -> None:
    [sample] = make_samples(1)
    ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
    for version in (2, 1, 2):
        [logprobs] = engine.logprobs([ids], version=version)
        expected = reference_logprobs(folded(tiny_model, adapter(version)), sample, temperature=1.0)
        np.testing.assert_allclose(logprobs[-len(expected) :], expected, rtol=0, atol=1e-5)


def test_version_none_is_the_bare_base(engine: Engine, start: Start) -> None:
    [held], [bare] = (e.logprobs([[5, 9, 30, 41]], version=None) for e in (engine, start()))
    assert np.array_equal(held, bare)


def test_dropout_of_an_adapter_is_off(start: Start) -> None:
    item = adapter(1)
    engine = serving(start(), replace(item, spec=replace(item.spec, dropout=0.5)))
    plain = serving(start(), item)
    assert tokens(engine.generate(requests(5), version=1)) == tokens(plain.generate(requests(5), version=1))


@pytest.mark.parametrize("version", [0, 3])
def test_version_that_was_never_sent_is_not_served(engine: Engine, version: int) -> None:
    with pytest.raises(UnknownVersionError, match=rf"engine-0 holds policy versions \[1, 2\], not {version}"):
        engine.generate(requests(1), version=version)
    with pytest.raises(UnknownVersionError):
        engine.logprobs([[5, 6]], version=version)
    with pytest.raises(UnknownVersionError, match=f"was never sent version {version}"):
        engine.activate(version)


def test_staged_version_is_not_served_before_activation(engine: Engine) -> None:
    engine.stage(adapter(3))
    with pytest.raises(UnknownVersionError):
        engine.generate(requests(1), version=3)


def test_retired_version_is_not_served_and_the_others_stay(engine: Engine) -> None:
    before = tokens(engine.generate(requests(3), version=1))
    engine.generate(requests(1), version=2)
    engine.retire(2)
    with pytest.raises(UnknownVersionError):
        engine.generate(requests(1), version=2)
    assert tokens(engine.generate(requests(3), version=1)) == before


def test_retiring_what_is_not_held_is_nothing(engine: Engine) -> None:
    engine.retire(7)
    assert len(engine.generate(requests(1), version=1)) == 1


def test_a_version_never_changes(engine: Engine) -> None:
    before = tokens(engine.generate(requests(3), version=1))
    with pytest.raises(EngineError, match="already holds version 1; versions never change"):
        engine.stage(random_adapter([Q0], SHAPES, version=1))
    assert tokens(engine.generate(requests(3), version=1)) == before


@pytest.mark.parametrize(
    ("modules", "shapes", "message"),
    [
        (["model.layers.7.self_attn.q_proj"], (64, 32), "this model has no linear module model.layers.7"),
        ([Q0, "model.layers.7.self_attn.q_proj"], (64, 32), "this model has no linear module model.layers.7"),
        (["model.layers.0"], (64, 32), "this model has no linear module model.layers.0$"),
        ([Q0], (64, 31), r"q_proj has lora_B \(64, 3\) and lora_A \(3, 31\), its weight here is \(64, 32\)"),
        ([Q0], (32, 64), r"its weight here is \(64, 32\)"),
    ],
)
def test_adapter_that_does_not_fit_leaves_the_engine_as_it_was(
    engine: Engine, modules: list[str], shapes: tuple[int, int], message: str
) -> None:
    before = tokens(engine.generate(requests(3), version=1))
    wrong = random_adapter(modules, dict.fromkeys(modules, shapes), version=3)
    with pytest.raises(EngineError, match=message):
        engine.stage(wrong)
    assert tokens(engine.generate(requests(3), version=1)) == before
    with pytest.raises(UnknownVersionError):
        engine.activate(3)
    serving(engine, adapter(3))


def test_an_adapter_is_copied_in(start: Start) -> None:
    item = adapter(1)
    engine = start()
    engine.stage(item)
    for tensor in item.tensors.values():
        tensor.zero_()
    assert engine.activate(1).digest == adapter(1).info.digest


# --- Whole models ---


@pytest.fixture
def whole(tiny_model: Path) -> dict[str, torch.Tensor]:
    """All weights of another policy."""
    return {name: tensor.detach() for name, tensor in folded(tiny_model, adapter(5)).state_dict().items()}


def test_loaded_weights_are_served_and_read_back(
    start: Start, tiny_model: Path, whole: dict[str, torch.Tensor]
) -> None:
    engine = start()
    names = list(whole)
    for part in (names[:5], names[5:]):
        engine.load_weights({name: whole[name] for name in part}, version=5)
    ack = engine.activate(5)
    assert (ack.version, ack.modules, ack.digest) == (5, tuple(sorted(whole)), fingerprint(whole))
    [sample] = make_samples(1)
    [logprobs] = engine.logprobs([[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]], version=5)
    expected = reference_logprobs(folded(tiny_model, adapter(5)), sample, temperature=1.0)
    np.testing.assert_allclose(logprobs[-len(expected) :], expected, rtol=0, atol=1e-6)


def test_nothing_is_served_while_weights_are_loaded(start: Start, whole: dict[str, torch.Tensor]) -> None:
    engine = start()
    engine.load_weights(whole, version=5)
    engine.activate(5)
    engine.load_weights({"lm_head.weight": whole["lm_head.weight"] + 1}, version=6)
    for version in (5, 6):
        with pytest.raises(UnknownVersionError):
            engine.generate(requests(1), version=version)
        with pytest.raises(UnknownVersionError):
            engine.logprobs([[5, 6]], version=version)


def test_an_older_version_is_gone_once_weights_are_replaced(start: Start, whole: dict[str, torch.Tensor]) -> None:
    engine = start()
    for version in (5, 6):
        engine.load_weights(whole, version=version)
        engine.activate(version)
    with pytest.raises(UnknownVersionError):
        engine.activate(5)
    with pytest.raises(UnknownVersionError):
        engine.logprobs([[5, 6]], version=None)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lm_head.bias", lambda t: t, r"this model has no weights named \['lm_head.bias'\]"),
        ("lm_head.weight", lambda t: t.T.contiguous(), r"lm_head.weight is torch.float32 \(32, 80\), the engine's is"),
        ("lm_head.weight", lambda t: t.bfloat16(), r"is torch.bfloat16 \(80, 32\), the engine's is torch.float32"),
    ],
)
def test_weights_that_do_not_fit_leave_the_served_version_intact(
    start: Start,
    whole: dict[str, torch.Tensor],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    engine = start()
    engine.load_weights(whole, version=5)
    engine.activate(5)
    before = tokens(engine.generate(requests(3), version=5))
    wrong = {"model.norm.weight": whole["model.norm.weight"] + 1, name: change(whole["lm_head.weight"])}
    with pytest.raises(EngineError, match=message):
        engine.load_weights(wrong, version=6)
    assert tokens(engine.generate(requests(3), version=5)) == before


def test_logprobs_of_a_sequence_have_one_entry_a_token_after_the_first(engine: Engine) -> None:
    logprobs = engine.logprobs([[5, 6, 7], [8, 9]], version=1)
    assert [len(row) for row in logprobs] == [2, 1]
    assert all(math.isfinite(value) and value < 0 for row in logprobs for value in row)
