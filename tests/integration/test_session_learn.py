"""From a scored rollout to optimizer steps: rollouts written by hand, a real trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import run_config

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError, TrainerError
from relax_pipeline.rl.groups import Rollout, RolloutGroup, make_samples
from relax_pipeline.session.learn import learn, refuse_unreached, rollout_metrics
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import Completion, DataPosition, FinishReason, Prompt, Score

Config = Callable[..., RunConfig]


def completion(length: int, *, seed: int, version: int = 0, reason: FinishReason = "stop") -> Completion:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(4, 80, length)
    logprobs = -np.abs(draw.normal(4, 1, length)).astype(np.float32)
    return Completion(tokens, logprobs, reason, version, "engine-0", "incarnation")


def group(index: int, lengths: tuple[int, ...], rewards: tuple[float, ...], **options: Any) -> RolloutGroup:
    completions = tuple(completion(n, seed=100 * index + place, **options) for place, n in enumerate(lengths))
    scores = tuple(Score(reward, {"accuracy": float(reward > 0)}) for reward in rewards)
    return RolloutGroup(Prompt(index, "p", (5, 6 + index), "l"), completions, ("t",) * len(lengths), scores)


def rollout(*groups: RolloutGroup, dropped: tuple[RolloutGroup, ...] = ()) -> Rollout:
    return Rollout(1, groups, dropped, DataPosition(0, 4), {"generate": 1.5, "score": 0.5})


FOUR = (
    group(0, (3, 5), (1.0, 0.0)),
    group(1, (4, 2), (0.0, 1.0)),
    group(2, (6, 3), (2.0, 0.0)),
    group(3, (2, 7), (0.0, 0.5)),
)


@pytest.fixture
def config(tiny_model: Path) -> Config:
    torch.set_num_threads(1)

    def make(**sections: Any) -> RunConfig:
        sections["rollout"] = {"prompts_per_step": 4, "max_new_tokens": 8} | sections.get("rollout", {})
        return run_config(tiny_model, **sections)

    return make


def digest(trainer: FsdpTrainer) -> str:
    return trainer.export_adapter().info.digest


def test_one_update_is_one_step_on_all_samples(config: Config) -> None:
    ours, theirs = FsdpTrainer(config()), FsdpTrainer(config())
    metrics = learn(ours, rollout(*FOUR), config())
    samples = make_samples(rollout(*FOUR), [g.rewards for g in FOUR], advantage="group", filter_overlong=False)
    loss = theirs.forward_backward([sample for group in samples for sample in group], temperature=1.0)
    theirs.optim_step()
    assert digest(ours) == digest(theirs)
    assert metrics["train/loss"] == loss["loss"]
    assert metrics["train/updates"] == 1
    assert metrics["train/tokens"] == 32
    assert {"adapter_norm/q_proj", "adapter_norm/down_proj", "train/grad_norm", "train/learning_rate"} <= metrics.keys()


def test_updates_share_the_policy_before_the_first_as_reference(config: Config) -> None:
    settings = config(algorithm={"updates_per_rollout": 2})
    ours, theirs = FsdpTrainer(settings), FsdpTrainer(settings)
    metrics = learn(ours, rollout(*FOUR), settings)
    samples = make_samples(rollout(*FOUR), [g.rewards for g in FOUR], advantage="group", filter_overlong=False)
    halves = [[*samples[0], *samples[1]], [*samples[2], *samples[3]]]
    before = [theirs.logprobs(half, temperature=1.0) for half in halves]
    losses = []
    for half, logprobs in zip(halves, before, strict=True):
        noted = [replace(sample, policy_logprobs=values) for sample, values in zip(half, logprobs, strict=True)]
        losses.append(theirs.forward_backward(noted, temperature=1.0)["loss"])
        theirs.optim_step()
    assert digest(ours) == digest(theirs)
    assert ours.policy_version() == 2
    assert metrics["train/updates"] == 2
    assert metrics["train/loss"] == pytest.approx(sum(losses) / 2, abs=1e-12)


def test_fewer_groups_than_updates_take_fewer_steps(config: Config) -> None:
    settings = config(algorithm={"updates_per_rollout": 4})
    trainer = FsdpTrainer(settings)
    assert learn(trainer, rollout(*FOUR[:3]), settings)["train/updates"] == 3
    assert trainer.policy_version() == 3


@pytest.mark.parametrize("empty", [rollout(), rollout(group(0, (8, 8), (1.0, 0.0), reason="length"))])
def test_nothing_to_learn_from_takes_no_step(config: Config, empty: Rollout) -> None:
    settings = config(rewards={"overlong": {"mode": "filter"}})
    trainer = FsdpTrainer(settings)
    before = digest(trainer)
    assert learn(trainer, empty, settings) == {"train/updates": 0.0}
    assert (trainer.policy_version(), digest(trainer)) == (0, before)


def test_cut_completions_train_no_token_under_the_filter(config: Config) -> None:
    cut = group(0, (3, 8), (1.0, 0.0))
    cut = replace(cut, completions=(cut.completions[0], replace(cut.completions[1], finish_reason="length")))
    for mode, tokens in (("off", 11), ("filter", 3)):
        settings = config(rewards={"overlong": {"mode": mode}})
        assert learn(FsdpTrainer(settings), rollout(cut), settings)["train/tokens"] == tokens


def test_penalty_shapes_rewards_before_advantages(config: Config) -> None:
    # Limit 8, buffer 4, factor 0.5: 3 tokens lose nothing, 6 lose 0.25, 8 lose 0.5.
    settings = config(rewards={"overlong": {"mode": "penalty", "buffer_tokens": 4, "factor": 0.5}})
    penalised, by_hand = FsdpTrainer(settings), FsdpTrainer(config())
    learn(penalised, rollout(group(0, (3, 6, 8), (1.0, 0.0, 1.0))), settings)
    learn(by_hand, rollout(group(0, (3, 6, 8), (1.0, -0.25, 0.5))), config())
    assert digest(penalised) == digest(by_hand)


@pytest.mark.parametrize(
    ("staleness", "updates", "version", "fits"),
    [(0, 1, 0, True), (0, 1, 1, False), (1, 1, 1, True), (1, 1, 2, False), (1, 2, 2, True), (1, 2, 3, False)],
)
def test_samples_may_be_as_old_as_was_asked_for(
    config: Config,
    staleness: int,
    updates: int,
    version: int,
    fits: bool,
) -> None:
    settings = config(rollout={"staleness": staleness}, algorithm={"updates_per_rollout": updates})
    trainer = FsdpTrainer(settings)
    trainer._updates = version
    if fits:
        metrics = learn(trainer, rollout(*FOUR), settings)
        assert (metrics["staleness/mean"], metrics["staleness/max"]) == (version, version)
        return
    message = rf"{version} to {version} versions behind policy version {version}; .* allows 0 to {staleness * updates}"
    with pytest.raises(TrainerError, match=message):
        learn(trainer, rollout(*FOUR), settings)


def test_samples_of_a_later_version_are_refused(config: Config) -> None:
    with pytest.raises(TrainerError, match="samples -1 to -1 versions behind"):
        learn(FsdpTrainer(config()), rollout(group(0, (3, 5), (1.0, 0.0), version=1)), config())


def test_target_behind_what_the_loss_does_not_reach_is_refused(config: Config) -> None:
    settings = config(optimizer={"warmup_steps": 4})
    trainer = FsdpTrainer(settings)
    for name, module in trainer._policy.model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(
        ConfigError,
        match=r"no gradient reaches k_proj, o_proj, q_proj, v_proj \(of linear_qkv, linear_proj\): after",
    ):
        learn(trainer, rollout(*FOUR), settings)


def test_step_without_a_gradient_says_nothing_of_targets(config: Config) -> None:
    flat = rollout(group(0, (3, 5), (1.0, 1.0)))  # advantages of zero
    metrics = learn(FsdpTrainer(config()), flat, config())
    assert (metrics["train/updates"], metrics["train/grad_norm"]) == (1, 0)
    assert {norm for name, norm in metrics.items() if name.startswith("adapter_norm/")} == {0.0}


@pytest.mark.parametrize(
    ("mode", "norms", "unreached"),
    [
        ("merge", {"in_proj_qkv": 0.1, "in_proj_a": 0.0, "o_proj": 2.0}, r"reaches in_proj_a \(of in_proj\): after"),
        ("adapter", {"in_proj_qkv": 0.1, "in_proj_a": 0.0, "in_proj_b": 0.0, "o_proj": 2.0}, None),
        (
            "adapter",
            {"in_proj_qkv": 0.0, "in_proj_a": 0.0, "o_proj": 2.0},
            r"reaches in_proj_qkv \(of in_proj\): after",
        ),
        ("adapter", {"in_proj_qkv": 1e-300, "o_proj": 0.0}, r"reaches o_proj \(of linear_proj\): after"),
        ("merge", {}, None),
    ],
)
def test_kinds_whose_norm_is_zero_are_unreached_unless_held(
    config: Config, mode: str, norms: dict[str, float], unreached: str | None
) -> None:
    settings = config(lora={"target_modules": ["in_proj", "linear_proj"]}, sync={"mode": mode})
    if unreached is None:
        refuse_unreached(norms, settings)
        return
    with pytest.raises(ConfigError, match=unreached):
        refuse_unreached(norms, settings)


def test_rollout_metrics_count_dropped_groups_too() -> None:
    kept = group(0, (3, 5), (1.0, 0.0))
    dropped = group(1, (8, 8), (0.0, 0.0), reason="length", version=1)
    slow = replace(dropped, scores=(Score(0.0, timed_out=True), dropped.scores[1]))
    assert rollout_metrics(rollout(kept, dropped=(slow,))) == {
        "reward/mean": 0.25,
        "reward/std": pytest.approx(0.1875**0.5),
        "reward/timed_out": 1.0,
        "reward/accuracy": pytest.approx(1 / 3),  # the one that timed out says nothing
        "rollout/zero_variance_share": 0.5,
        "rollout/completions": 4.0,
        "rollout/tokens": 24.0,
        "rollout/tokens_per_second": 16.0,
        "rollout/length_mean": 6.0,
        "rollout/cut_share": 0.5,
        "rollout/versions": 2.0,
        "seconds/generate": 1.5,
        "seconds/score": 0.5,
    }
