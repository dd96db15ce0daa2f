"""What every trainer must do, in one process. Groups of ranks: test_trainer_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_model import write_tiny_model
from tiny_run import make_samples, reference_logprobs, run_config, train, with_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.errors import AdapterError, CheckpointError, ConfigError, TrainerError
from relax_pipeline.lora.fingerprint import combine_digests, fingerprint
from relax_pipeline.lora.fold import fold
from relax_pipeline.lora.names import lora_key
from relax_pipeline.trainer.base import Bucket, Trainer
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import Adapter

Q0 = "model.layers.0.self_attn.q_proj"
Start = Callable[[RunConfig], Trainer]


MEGATRON = pytest.param(
    "megatron",
    marks=[pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")],  # its import warns a lot
)


@pytest.fixture(params=["fsdp", MEGATRON])
def kind(request: pytest.FixtureRequest) -> str:
    """Which trainer. Another backend joins by its name here and a branch in `start`."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def start(kind: str) -> Iterator[Start]:
    """Start a trainer in this process."""
    torch.set_num_threads(1)
    if kind == "fsdp":
        yield FsdpTrainer
        return
    from relax_pipeline.trainer.megatron import MegatronTrainer

    def start_megatron(config: RunConfig) -> Trainer:
        settings = config.trainer.model_dump() | {"kind": "megatron"}
        recompute = "full" if settings.pop("gradient_checkpointing") else "none"
        del settings["num_processes"]
        trainer = MegatronTrainerConfig(**settings, recompute=recompute)
        trainers.append(MegatronTrainer(config.model_copy(update={"trainer": trainer})))
        return trainers[-1]

    trainers: list[Trainer] = []
    yield start_megatron
    for trainer in trainers[:1]:  # they share this process's groups
        trainer.close()


@pytest.fixture
def config(tiny_model: Path) -> RunConfig:
    return run_config(tiny_model)


@pytest.fixture
def trainer(start: Start, config: RunConfig) -> Trainer:
    return start(config)


def base(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def adapter_of(trainer: Trainer) -> Adapter:
    content = trainer.export_adapter().content
    assert isinstance(content, Adapter)
    return content


def whole(trainer: Trainer) -> tuple[list[Bucket], dict[str, torch.Tensor]]:
    buckets = [trainer.export_weights(names) for names in trainer.bucket_names(1 << 14)]
    return buckets, {name: tensor for bucket in buckets for name, tensor in bucket.content.items()}


def folded(folder: Path, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The base's tensors with the adapter added, module by module."""
    tensors = load_file(folder / "model.safetensors")
    for module in adapter.info.modules:
        name = f"{module}.weight"
        lora_A_RI, lora_B_OR = adapter.tensors[lora_key(module, "A")], adapter.tensors[lora_key(module, "B")]
        tensors[name] = fold(
            tensors[name], lora_A_RI=lora_A_RI, lora_B_OR=lora_B_OR, scaling=adapter.spec.alpha / adapter.spec.rank
        )
    return tensors


def assert_logprobs_equal(trainer: Trainer, model: PreTrainedModel, *, temperature: float, atol: float) -> None:
    samples = make_samples(7, seed=99)
    for sample, logprobs in zip(samples, trainer.logprobs(samples, temperature=temperature), strict=True):
        expected = reference_logprobs(model, sample, temperature=temperature)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=atol)


# --- The policy ---


def test_info_says_what_was_built(trainer: Trainer, kind: str, tiny_model: Path) -> None:
    info = trainer.info()
    # Per layer, rank 3: q 32+64, k 32+32, v 32+32, o 64+32, gate 32+48, up 32+48, down 48+32.
    # Megatron has one lora_A for q, k and v, and one for gate and up.
    shared = 3 * 32 if kind == "megatron" else 0
    assert info.num_trainable == 2 * 3 * (96 + 64 + 64 + 96 + 80 + 80 + 80 - shared)
    assert info.num_parameters == sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    assert info.base_tensors_digest == fingerprint(load_file(tiny_model / "model.safetensors"))
    assert len(info.modules) == 14
    assert Q0 in info.modules


def test_new_policy_is_exactly_the_base(trainer: Trainer) -> None:
    samples = make_samples(6)
    adapted = trainer.logprobs(samples, temperature=1.0)
    bare = trainer.logprobs(samples, temperature=1.0, adapter_enabled=False)
    for a, b in zip(adapted, bare, strict=True):
        assert np.array_equal(a, b)
    assert trainer.policy_version() == 0
    assert set(trainer.adapter_norms().values()) == {0.0}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(trainer: Trainer, tiny_model: Path, temperature: float) -> None:
    assert_logprobs_equal(trainer, base(tiny_model), temperature=temperature, atol=1e-5)


def test_trained_logprobs_are_those_of_the_base_with_the_adapter_added(trainer: Trainer, tiny_model: Path) -> None:
    train(trainer, updates=3)
    model = base(tiny_model)
    model.load_state_dict(folded(tiny_model, adapter_of(trainer)))
    assert_logprobs_equal(trainer, model, temperature=1.0, atol=1e-5)


def test_base_stays_as_it_was_under_training(trainer: Trainer) -> None:
    samples = make_samples(6)
    before = trainer.logprobs(samples, temperature=1.0, adapter_enabled=False)
    train(trainer, updates=3)
    after = trainer.logprobs(samples, temperature=1.0, adapter_enabled=False)
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(after[0], trainer.logprobs(samples, temperature=1.0)[0])


def test_micro_batches_do_not_change_logprobs(start: Start, tiny_model: Path) -> None:
    one, many = (
        start(run_config(tiny_model, trainer={"micro_batch_tokens": tokens})).logprobs(make_samples(9), temperature=1.0)
        for tokens in (1, 10_000)
    )
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_adapter_norms_are_those_of_the_deltas(trainer: Trainer) -> None:
    train(trainer, updates=2)
    adapter = adapter_of(trainer)
    squares: dict[str, float] = {}
    for module in adapter.info.modules:
        delta = 2.0 * adapter.tensors[lora_key(module, "B")] @ adapter.tensors[lora_key(module, "A")]
        kind = module.rpartition(".")[2]
        squares[kind] = squares.get(kind, 0.0) + float(delta.square().sum())
    assert trainer.adapter_norms() == pytest.approx({kind: square**0.5 for kind, square in squares.items()}, rel=1e-5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["linear_qkv", "out_proj"]}, r"'out_proj' \(out_proj\) matches no linear module"),
        ({"scope": "vision"}, "in scope 'vision'; the model has none there"),
    ],
)
def test_targets_that_match_nothing_are_refused(
    start: Start, tiny_model: Path, lora: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(run_config(tiny_model, lora=lora))


# --- Steps ---


@pytest.mark.parametrize("tokens", [1, 12, 40])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_accumulated_gradients_are_those_of_the_whole_batch(
    start: Start, tiny_model: Path, tokens: int, aggregation: str
) -> None:
    def after_two_steps(budget: int) -> tuple[list[dict[str, float]], Adapter]:
        trainer = start(
            run_config(
                tiny_model,
                trainer={"micro_batch_tokens": budget},
                algorithm={"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01},
                optimizer={"learning_rate": 1e-3, "eps": 1e-3},
            )
        )
        return train(trainer, updates=2, count=9), adapter_of(trainer)

    (whole_metrics, whole_adapter), (metrics, adapter) = after_two_steps(100_000), after_two_steps(tokens)
    for step, whole_step in zip(metrics, whole_metrics, strict=True):
        assert step == pytest.approx(whole_step, rel=1e-5, abs=1e-6)
    for name, tensor in adapter.tensors.items():
        torch.testing.assert_close(tensor, whole_adapter.tensors[name], rtol=0, atol=1e-6)


def test_two_calls_before_a_step_add_their_gradients(start: Start, config: RunConfig) -> None:
    once, twice = start(config), start(config)
    samples = make_samples(5)
    once.forward_backward(samples, temperature=1.0)
    for _ in range(2):
        twice.forward_backward(samples, temperature=1.0)
    assert twice.optim_step()["grad_norm"] == pytest.approx(2 * once.optim_step()["grad_norm"], rel=1e-6)


def test_a_step_raises_the_version_and_follows_the_schedule(start: Start, tiny_model: Path) -> None:
    trainer = start(run_config(tiny_model, optimizer={"learning_rate": 1e-2, "warmup_steps": 4}))
    metrics = train(trainer, updates=3)
    assert [step["learning_rate"] for step in metrics] == pytest.approx([2.5e-3, 5e-3, 7.5e-3])
    assert trainer.policy_version() == 3


def test_training_on_a_completion_makes_it_likelier(trainer: Trainer) -> None:
    [sample] = make_samples(1, seed=4)
    sample = replace(sample, advantage=1.0, loss_mask=np.ones_like(sample.loss_mask))
    likelihood = []
    for _ in range(4):
        logprobs = trainer.logprobs([sample], temperature=1.0)
        likelihood.append(float(logprobs[0].sum()))
        trainer.forward_backward(with_logprobs([sample], logprobs), temperature=1.0)
        trainer.optim_step()
    assert likelihood == sorted(likelihood)
    assert likelihood[-1] - likelihood[0] > 1


def test_own_logprobs_as_rollout_logprobs_measure_no_mismatch(trainer: Trainer) -> None:
    samples = make_samples(6)
    samples = with_logprobs(samples, trainer.logprobs(samples, temperature=0.8))
    metrics = trainer.forward_backward(samples, temperature=0.8)
    assert metrics["rollout_logprob_abs_diff_max"] < 1e-5
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["tokens"] == sum(sample.loss_mask.sum() for sample in samples)


def test_kl_to_the_base_starts_at_zero_and_grows(start: Start, tiny_model: Path) -> None:
    metrics = train(start(run_config(tiny_model, algorithm={"kl_coef": 0.1})), updates=3)
    assert metrics[0]["kl_ref"] == 0
    assert metrics[2]["kl_ref"] > 1e-4


def test_gradient_checkpointing_changes_nothing(start: Start, tiny_model: Path) -> None:
    plain, checkpointed = (
        train(start(run_config(tiny_model, trainer={"gradient_checkpointing": on})), updates=2) for on in (False, True)
    )
    assert plain == checkpointed


@pytest.mark.parametrize("field", ["advantage", "rollout_logprobs"])
def test_loss_that_is_not_finite_changes_no_weight(
    trainer: Trainer, start: Start, config: RunConfig, field: str
) -> None:
    samples = make_samples(5)
    value = float("nan") if field == "advantage" else np.full_like(samples[2].rollout_logprobs, np.nan)
    before = adapter_of(trainer).info.digest
    with pytest.raises(TrainerError, match="the loss is nan at policy version 0; no weight has changed"):
        trainer.forward_backward([*samples[:2], replace(samples[2], **{field: value}), *samples[3:]], temperature=1.0)
    assert adapter_of(trainer).info.digest == before
    undisturbed = start(config)
    assert train(trainer, updates=2) == train(undisturbed, updates=2)


def test_nothing_to_train_on_is_refused(trainer: Trainer) -> None:
    samples = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in make_samples(3)]
    with pytest.raises(TrainerError, match="none of the 3 samples has a token to train on"):
        trainer.forward_backward(samples, temperature=1.0)


# --- Exports ---


def test_exported_adapter_is_a_copy_of_this_version(trainer: Trainer) -> None:
    train(trainer, updates=2)
    adapter = adapter_of(trainer)
    payload = trainer.export_adapter()
    assert payload.info == adapter.info
    assert (adapter.info.version, len(adapter.info.modules)) == (2, 14)
    assert adapter.info.digest == fingerprint(adapter.tensors)
    for tensor in adapter.tensors.values():
        tensor.zero_()
    assert adapter_of(trainer).info.digest == payload.info.digest


def test_exported_weights_are_the_folded_base_and_leave_the_trainer_as_it_was(
    trainer: Trainer, tiny_model: Path
) -> None:
    train(trainer, updates=2)
    samples = make_samples(4)
    before = adapter_of(trainer).info.digest, trainer.logprobs(samples, temperature=1.0)
    buckets, tensors = whole(trainer)
    expected = folded(tiny_model, adapter_of(trainer))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    digests = {name: digest for bucket in buckets for name, digest in bucket.digests.items()}
    assert combine_digests(digests) == fingerprint(tensors)
    assert adapter_of(trainer).info.digest == before[0]
    for a, b in zip(trainer.logprobs(samples, temperature=1.0), before[1], strict=True):
        assert np.array_equal(a, b)
    bare = trainer.logprobs(samples, temperature=1.0, adapter_enabled=False)
    assert_logprobs_equal_to(base(tiny_model), samples, bare)


def assert_logprobs_equal_to(model: PreTrainedModel, samples: list, logprobs: list[np.ndarray]) -> None:  # type: ignore[type-arg]
    for sample, values in zip(samples, logprobs, strict=True):
        np.testing.assert_allclose(values, reference_logprobs(model, sample, temperature=1.0), rtol=0, atol=1e-5)


def test_unmoved_entries_are_counted_where_a_delta_is(trainer: Trainer) -> None:
    buckets, _ = whole(trainer)
    assert sum(bucket.num_folded for bucket in buckets) == 0  # B is zero
    train(trainer, updates=1)
    buckets, _ = whole(trainer)
    assert sum(bucket.num_folded for bucket in buckets) == 2 * (2048 + 1024 + 1024 + 2048 + 1536 + 1536 + 1536)


def test_buckets_hold_each_name_once_and_keep_to_their_size(trainer: Trainer, tiny_model: Path) -> None:
    stored = load_file(tiny_model / "model.safetensors")
    buckets = trainer.bucket_names(9000)
    assert sorted(name for names in buckets for name in names) == sorted(stored)
    for names in buckets:
        assert sum(stored[name].nbytes for name in names) <= 9000 or len(names) == 1
    assert len(trainer.bucket_names(1 << 30)) == 1


def test_bucket_says_what_it_is(trainer: Trainer) -> None:
    names = trainer.bucket_names(9000)[0]
    bucket = trainer.export_weights(names)
    assert list(bucket.content) == list(bucket.digests) == names
    assert bucket.num_bytes == sum(tensor.nbytes for tensor in bucket.content.values())


# --- bfloat16 ---


@pytest.fixture
def half(start: Start, tiny_model: Path) -> Trainer:
    return start(
        run_config(tiny_model, model={"dtype": "bfloat16"}, optimizer={"learning_rate": 1e-4, "schedule": "constant"})
    )


def test_bfloat16_adapters_are_served_rounded_and_trained_in_float32(half: Trainer, tmp_path: Path) -> None:
    train(half, updates=3)
    served = adapter_of(half).tensors
    half.save(tmp_path)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for name, tensor in saved.items():
        assert torch.equal(tensor.bfloat16(), served[name])
        assert not torch.equal(tensor, served[name].float())


def test_small_steps_add_up_in_float32_masters(half: Trainer) -> None:
    # A step of 1e-4 is lost on most bfloat16 entries of size 0.1; on float32 masters twenty of them are not.
    before = adapter_of(half).tensors[lora_key(Q0, "A")]
    train(half, updates=20)
    after = adapter_of(half).tensors[lora_key(Q0, "A")]
    assert (before != after).float().mean() > 0.5


def test_rounding_of_merged_bfloat16_weights_is_counted(half: Trainer, tiny_model: Path) -> None:
    train(half, updates=1)
    buckets, tensors = whole(half)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    unmoved, moved = sum(b.num_unmoved for b in buckets), sum(b.num_folded for b in buckets)
    stored = {name: t.bfloat16() for name, t in load_file(tiny_model / "model.safetensors").items()}
    assert unmoved == sum(int((tensors[n] == stored[n]).sum()) for n in stored if n.endswith("proj.weight"))
    assert 0.5 < unmoved / moved < 1


def test_bfloat16_new_policy_is_exactly_the_base(half: Trainer) -> None:
    samples = make_samples(6)
    adapted = half.logprobs(samples, temperature=1.0)
    for a, b in zip(adapted, half.logprobs(samples, temperature=1.0, adapter_enabled=False), strict=True):
        assert np.array_equal(a, b)


# --- All weights ---


@pytest.fixture
def full_config(tiny_model: Path) -> RunConfig:
    return run_config(tiny_model, lora={"rank": 0}, sync={"mode": "merge"}, optimizer={"learning_rate": 1e-3}, model={})


def test_without_an_adapter_all_weights_train(start: Start, full_config: RunConfig, tiny_model: Path) -> None:
    trainer = start(full_config)
    info = trainer.info()
    assert info.num_trainable == info.num_parameters
    assert info.modules == ()
    train(trainer, updates=2)
    _, tensors = whole(trainer)
    stored = load_file(tiny_model / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert not any(torch.equal(tensors[name], stored[name]) for name in stored)
    model = base(tiny_model)
    model.load_state_dict(tensors)
    assert_logprobs_equal(trainer, model, temperature=1.0, atol=1e-5)


def test_full_training_in_bfloat16_keeps_float32_masters(start: Start, tiny_model: Path) -> None:
    trainer = start(
        run_config(
            tiny_model,
            model={"dtype": "bfloat16"},
            lora={"rank": 0},
            sync={"mode": "merge"},
            optimizer={"learning_rate": 1e-4},
        )
    )
    _, before = whole(trainer)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    train(trainer, updates=10)
    _, after = whole(trainer)
    assert (before["lm_head.weight"] != after["lm_head.weight"]).float().mean() > 0.3


def test_tied_weights_train_and_are_exported_once(start: Start, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, seed=0, tied=True)
    trainer = start(run_config(folder, lora={"rank": 0}, sync={"mode": "merge"}))
    train(trainer, updates=1)
    _, tensors = whole(trainer)
    assert "lm_head.weight" not in tensors
    model = base(folder)
    model.load_state_dict(tensors, strict=False)  # the embedding is the head
    assert_logprobs_equal(trainer, model, temperature=1.0, atol=1e-5)


# --- Starting from an adapter ---


def test_policy_starts_from_an_adapter_that_was_saved(start: Start, config: RunConfig, tmp_path: Path) -> None:
    trained, trainer = start(config), start(config)
    train(trained, updates=3)
    trained.save(tmp_path)
    trainer.start_from(tmp_path / "adapter")
    assert trainer.policy_version() == 0
    assert adapter_of(trainer).info.digest == adapter_of(trained).info.digest
    samples = make_samples(4)
    logprobs = (one.logprobs(samples, temperature=1.0) for one in (trainer, trained))
    for a, b in zip(*logprobs, strict=True):
        assert np.array_equal(a, b)
    train(trainer, updates=1)
    assert adapter_of(trainer).info.digest != adapter_of(trained).info.digest


def test_policy_does_not_start_from_an_adapter_on_other_modules(
    start: Start, config: RunConfig, tiny_model: Path, tmp_path: Path
) -> None:
    start(config).save(tmp_path)
    trainer = start(run_config(tiny_model, lora={"target_modules": ["linear_fc2"]}))
    with pytest.raises(
        AdapterError, match=r"adapts other modules than .*: it lacks \[\] and has \['model.layers.0.mlp."
    ):
        trainer.start_from(tmp_path / "adapter")


# --- Saving and loading ---


def test_saved_adapter_loads_with_peft_and_gives_the_same_logprobs(
    trainer: Trainer, tiny_model: Path, tmp_path: Path
) -> None:
    train(trainer, updates=3)
    trainer.save(tmp_path)
    model = PeftModel.from_pretrained(base(tiny_model), tmp_path / "adapter")
    assert_logprobs_equal(trainer, model.eval(), temperature=1.0, atol=1e-5)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"lora": {"dropout": 0.2}},
        {"optimizer": {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}},
        {"model": {"dtype": "bfloat16"}},
        {"checkpoint": {"save_lora_only": False}},
        {"lora": {"rank": 0}, "sync": {"mode": "merge"}},
    ],
    ids=["plain", "dropout", "schedule", "bfloat16", "whole", "full"],
)
def test_loaded_trainer_goes_on_bit_by_bit(
    start: Start, tiny_model: Path, tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    config = run_config(tiny_model, **sections)  # type: ignore[arg-type]
    uninterrupted, stopped, resumed = start(config), start(config), start(config)
    train(uninterrupted, updates=2)
    train(stopped, updates=2)
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.policy_version() == 2
    assert train(resumed, updates=3, first=2) == train(uninterrupted, updates=3, first=2)
    _, expected = whole(uninterrupted)
    _, got = whole(resumed)
    assert fingerprint(got) == fingerprint(expected)
    resumed.save(tmp_path / "again")
    uninterrupted.save(tmp_path / "straight")
    if resumed.info().modules:
        masters = (load_file(tmp_path / f / "adapter" / "adapter_model.safetensors") for f in ("again", "straight"))
        assert fingerprint(next(masters)) == fingerprint(next(masters))


def test_saving_does_not_disturb_training(start: Start, config: RunConfig, tmp_path: Path) -> None:
    saved, plain = start(config), start(config)
    train(saved, updates=1)
    train(plain, updates=1)
    saved.save(tmp_path)
    assert train(saved, updates=2, first=1) == train(plain, updates=2, first=1)


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 0}, "sync": {"mode": "merge"}}], ids=["adapter", "full"])
def test_a_save_behind_training_holds_what_was_there_when_it_began(
    start: Start, tiny_model: Path, tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    config = run_config(tiny_model, **sections)  # type: ignore[arg-type]
    saved, resumed = start(config), start(config)
    train(saved, updates=2)
    saved.save(tmp_path / "at_once")
    saved.begin_save(tmp_path / "behind")
    train(saved, updates=1, first=2)
    saved.finish_save()
    went_on = []
    for folder in ("at_once", "behind"):
        resumed.load(tmp_path / folder)
        went_on.append((train(resumed, updates=2, first=2), fingerprint(whole(resumed)[1])))
    assert went_on[0] == went_on[1]
    files = [sorted(path.name for path in (tmp_path / folder).rglob("*")) for folder in ("at_once", "behind")]
    assert files[0] == files[1]


def test_a_save_that_fails_behind_training_is_told_when_it_is_finished(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__0_0.distcp").symlink_to("/dev/full")
    trainer.begin_save(tmp_path)
    train(trainer, updates=1)
    with pytest.raises(CheckpointError, match="trainer cannot be written"):
        trainer.finish_save()
    trainer.save(tmp_path / "another")


def test_a_trainer_that_never_stepped_can_be_saved_and_loaded(start: Start, config: RunConfig, tmp_path: Path) -> None:
    start(config).save(tmp_path)
    resumed, fresh = start(config), start(config)
    resumed.load(tmp_path)
    assert train(resumed, updates=2) == train(fresh, updates=2)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rank": 4, "alpha": 6},
            {
                "fsdp": r"loaded: ValueError: Size mismatch between saved torch.Size\(\[3, 48\]\) and current",
                "megatron": r"loaded: CheckpointingException: Global shape mismatch .*\[3, 64\].* \(\(4, 64\)\)",
            },
        ),
        (
            {"target_modules": ["linear_qkv"]},
            {
                "fsdp": "differ in 48 parameters, e.g.",  # 2 layers, o gate up down, A and B, with 2 moments
                "megatron": "differ in 36 parameters, e.g.",  # gate and up are one there
            },
        ),
    ],
)
def test_other_adapters_are_not_loaded(
    start: Start, kind: str, tiny_model: Path, tmp_path: Path, *, lora: dict[str, object], message: dict[str, str]
) -> None:
    start(run_config(tiny_model)).save(tmp_path)
    with pytest.raises(CheckpointError, match=message[kind]):
        start(run_config(tiny_model, lora=lora)).load(tmp_path)


def test_folder_without_state_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="trainer cannot be loaded"):
        trainer.load(tmp_path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp"])
def test_full_disk_is_told_as_such(trainer: Trainer, kind: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / name).symlink_to("/dev/full")
    # Megatron's writers drop all of their error but its type.
    reason = "OSError" if kind == "megatron" else r": OSError: \[Errno 28\] No space left on device"
    with pytest.raises(CheckpointError, match=rf"trainer cannot be written.*{reason}"):
        trainer.save(tmp_path)
