from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from relax_pipeline.checkpoint.manifest import Manifest
from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.inputs import check_backends, run_folder, run_identity
from relax_pipeline.plan import kept_checkpoints, make_plan
from relax_pipeline.plan_table import plan_rows
from relax_pipeline.sizes import measure_model
from relax_pipeline.trainer.fsdp import FsdpTrainer

# The tiny model, by hand. Per layer: q 32>64, k 32>32, v 32>32, o 64>32, gate 32>48, up 32>48, down 48>32.
LAYER_WEIGHTS = 2048 + 1024 + 1024 + 2048 + 1536 + 1536 + 1536
LAYER_NORMS = 32 + 32 + 16 + 16
EMBEDDING = 80 * 32
BASE = 2 * (LAYER_WEIGHTS + LAYER_NORMS) + 32 + 2 * EMBEDDING
IN_PLUS_OUT = 96 + 64 + 64 + 96 + 80 + 80 + 80


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(5)))
    return file


@pytest.fixture
def values(tiny_model: Path, prompts: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run_name": "planned",
        "output_dir": str(tmp_path / "runs"),
        "steps": 30,
        "model": {"path": str(tiny_model), "dtype": "bfloat16"},
        "lora": {"rank": 6, "alpha": 12},
        "data": {"train": {"path": str(prompts)}},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_new_tokens": 7},
        "sync": {"mode": "adapter"},
    }


def config(values: dict[str, Any], **changes: Any) -> RunConfig:
    return RunConfig.model_validate(values | changes)


def save_checkpoint(run: RunConfig, fingerprint: str, *, step: int) -> None:
    identity = run_identity(run, fingerprint)
    manifest = Manifest(
        run_name=run.run_name,
        step=step,
        policy_version=step,
        identity=identity,
        base_digest=identity.base_digest,
        epoch=0,
        offset=0,
        layout={},
    )
    store = CheckpointStore(run_folder(run) / "checkpoints")
    store.save(manifest, lambda folder: (folder / "state").write_text("0123456789"))


def test_adapter_is_rank_times_in_plus_out_of_every_target(values: dict[str, Any]) -> None:
    sizes = make_plan(config(values)).sizes
    assert sizes is not None
    assert (sizes.base_parameters, sizes.adapter_parameters) == (BASE, 2 * 6 * IN_PLUS_OUT)
    assert sizes.adapted_modules == 14


def test_syncs_carry_the_compute_dtype(values: dict[str, Any]) -> None:
    sizes = make_plan(config(values)).sizes
    assert sizes is not None
    assert (sizes.adapter_bytes, sizes.merged_bytes) == (2 * 2 * 6 * IN_PLUS_OUT, 2 * BASE)


def test_planned_bytes_are_those_a_trainer_exports(values: dict[str, Any]) -> None:
    run = config(values)
    sizes = make_plan(run).sizes
    assert sizes is not None
    torch.set_num_threads(1)
    trainer = FsdpTrainer(run)
    [names] = trainer.bucket_names(1 << 30)
    assert sizes.adapter_bytes == trainer.export_adapter().info.num_bytes
    assert sizes.merged_bytes == trainer.export_weights(names).num_bytes


def test_checkpoint_holds_masters_two_moments_and_the_peft_copy(values: dict[str, Any]) -> None:
    sizes = make_plan(config(values)).sizes
    assert sizes is not None
    assert sizes.checkpoint_bytes == 4 * 4 * 2 * 6 * IN_PLUS_OUT


def test_checkpoint_with_the_base_adds_it_in_the_compute_dtype(values: dict[str, Any]) -> None:
    sizes = make_plan(config(values, checkpoint={"save_lora_only": False})).sizes
    assert sizes is not None
    assert sizes.checkpoint_bytes == 4 * 4 * 2 * 6 * IN_PLUS_OUT + 2 * BASE


def test_without_adapters_the_base_and_its_moments_are_saved(values: dict[str, Any]) -> None:
    sizes = make_plan(config(values, lora={"rank": 0}, sync={"mode": "merge"})).sizes
    assert sizes is not None
    assert (sizes.adapter_parameters, sizes.checkpoint_bytes) == (0, 3 * 4 * BASE)


@pytest.mark.parametrize(
    ("policy", "count"),
    [({"every": 10}, 3), ({"every": 2}, 4), ({"every": 2, "keep_every": 10}, 7), ({"every": 7, "keep_last": 9}, 5)],
)
def test_checkpoints_on_disk_are_those_kept_and_the_one_being_written(
    values: dict[str, Any], policy: dict[str, int], count: int
) -> None:
    assert kept_checkpoints(config(values, checkpoint=policy)) == count


def test_prompts_are_counted_and_the_first_is_rendered(values: dict[str, Any], prompts: Path) -> None:
    plan = make_plan(config(values, evaluation={"source": {"path": str(prompts), "max_rows": 2}}))
    assert plan.prompts is not None
    assert (plan.prompts.train_rows, plan.prompts.eval_rows) == (5, 2)
    assert plan.prompts.first_prompt == "<|user|>0+1=<|end|><|assistant|>"
    assert plan.prompts.first_prompt_tokens == 7


def test_fresh_run_goes_from_the_base_and_writes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(config(values))
    assert (plan.refusals, plan.warnings, plan.resumes_from) == ((), (), None)
    assert (plan.steps_to_go, plan.tokens_per_step) == (30, 3 * 4 * 7)
    assert not (tmp_path / "runs").exists()


def test_resumes_from_the_newest_checkpoint(values: dict[str, Any]) -> None:
    run = config(values)
    prompts = make_plan(run).prompts
    assert prompts is not None
    for step in (10, 20):
        save_checkpoint(run, prompts.fingerprint, step=step)
    plan = make_plan(run)
    assert plan.resumes_from is not None
    assert (plan.resumes_from.step, plan.steps_to_go) == (20, 10)


def test_checkpoint_of_another_rank_is_refused(values: dict[str, Any]) -> None:
    prompts = make_plan(config(values)).prompts
    assert prompts is not None
    save_checkpoint(config(values), prompts.fingerprint, step=10)
    [refusal] = make_plan(config(values, lora={"rank": 8, "alpha": 12})).refusals
    assert "rank: checkpoint 6, this run 8; set lora.rank back" in refusal


def test_finished_run_has_nothing_to_train(values: dict[str, Any]) -> None:
    run = config(values)
    prompts = make_plan(run).prompts
    assert prompts is not None
    save_checkpoint(run, prompts.fingerprint, step=30)
    plan = make_plan(run)
    assert plan.steps_to_go == 0
    assert plan.warnings == ("nothing to train: step 30 of 30 is saved; raise steps to go on",)


def test_damaged_checkpoint_is_passed_over_with_a_warning(values: dict[str, Any]) -> None:
    run = config(values)
    prompts = make_plan(run).prompts
    assert prompts is not None
    for step in (10, 20):
        save_checkpoint(run, prompts.fingerprint, step=step)
    (run_folder(run) / "checkpoints" / "step-0000020" / "state").write_text("9876543210")
    plan = make_plan(run)
    assert plan.resumes_from is not None
    assert plan.resumes_from.step == 10
    assert "has changed since it was written" in plan.warnings[0]


def test_validation_warnings_are_listed(values: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="full fine-tuning"):
        run = config(values, optimizer={"learning_rate": 1e-6})
    [warning] = make_plan(run).warnings
    assert warning.startswith("optimizer.learning_rate 1e-06 is a rate for full fine-tuning")


def test_adapters_that_sglang_could_only_host_from_megatron_are_refused(values: dict[str, Any]) -> None:
    targets = {"engine": {"kind": "sglang"}, "lora": {"target_modules": ["linear_qkv", "in_proj"]}}
    with pytest.raises(ConfigError, match="'in_proj' stands for several projections, of which SGLang adapts two"):
        check_backends(config(values, **targets))
    check_backends(config(values, **targets, trainer={"kind": "megatron"}))
    check_backends(config(values, **targets, sync={"mode": "merge"}))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"engine": {"kind": "vllm"}}, "engine.kind 'vllm' is not available yet; use hf or sglang"),
        (
            {"sync": {"mode": "adapter", "transport": "nccl"}, "cluster": {"colocate": True}},
            "sync.transport 'nccl' passes between GPUs, and cluster.colocate shares them: use ipc",
        ),
        ({"lora": {"start_from": "/nowhere"}}, "lora.start_from: /nowhere holds no adapter_config.json"),
        ({"lora": {"target_modules": ["out_proj"]}}, "'out_proj' (out_proj) matches no linear module"),
        ({"rewards": {"scorers": [{"kind": "exakt"}]}}, "unknown scorer 'exakt'; did you mean exact?"),
        ({"data": {"train": {"path": "/nowhere.jsonl"}}}, "no prompts at /nowhere.jsonl"),
        (
            {"trainer": {"kind": "megatron", "tensor_parallel_size": 8}},
            "trainer.tensor_parallel_size 8 does not divide the model's num_attention_heads 4: choose another",
        ),
        ({"model": {"path": "/nowhere"}}, "model.path: /nowhere is no Hugging Face checkpoint"),
        (
            {"steps": 10**9, "checkpoint": {"every": 1, "keep_last": 10**9}},
            "free space, lower checkpoint.keep_last, or set another output_dir",
        ),
    ],
)
def test_what_cannot_work_is_refused_once(values: dict[str, Any], changes: dict[str, Any], refusal: str) -> None:
    [found] = make_plan(config(values, **changes)).refusals
    assert refusal in found


def test_output_below_a_file_is_refused(values: dict[str, Any], prompts: Path) -> None:
    [refusal] = make_plan(config(values, output_dir=str(prompts / "runs"))).refusals
    assert refusal.startswith(f"output_dir: {prompts / 'runs' / 'planned'} cannot be written, because of {prompts}")


def test_held_out_prompts_are_checked_too(values: dict[str, Any]) -> None:
    [refusal] = make_plan(config(values, evaluation={"source": {"path": "/nowhere.jsonl"}})).refusals
    assert refusal.startswith("no prompts at /nowhere.jsonl")


@pytest.fixture
def seeing_model(tiny_model: Path, tmp_path: Path) -> str:
    """The tiny model, with a config that declares a vision part."""
    folder = tmp_path / "seeing"
    shutil.copytree(tiny_model, folder)
    declared = json.loads((folder / "config.json").read_text()) | {"vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(declared))
    return str(folder)


def test_adapter_mode_does_not_adapt_all_of_a_multimodal_model(values: dict[str, Any], seeing_model: str) -> None:
    [refusal] = make_plan(config(values, model={"path": seeing_model})).refusals
    assert "declares vision_config" in refusal
    assert "set lora.scope to language, or sync.mode to merge" in refusal


@pytest.mark.parametrize(
    "changes", [{"lora": {"rank": 6, "alpha": 12, "scope": "language"}}, {"sync": {"mode": "merge"}}]
)
def test_multimodal_model_has_two_ways_out(values: dict[str, Any], seeing_model: str, changes: dict[str, Any]) -> None:
    assert make_plan(config(values, model={"path": seeing_model}, **changes)).refusals == ()


def test_vision_alone_is_no_scope_while_prompts_are_text(values: dict[str, Any], seeing_model: str) -> None:
    lora = {"rank": 6, "alpha": 12, "scope": "vision"}
    [refusal] = make_plan(config(values, model={"path": seeing_model}, lora=lora, sync={"mode": "merge"})).refusals
    assert refusal.endswith("no adapter there would ever train; set it to language")


def test_a_model_that_sees_is_told_to_train_on_text(values: dict[str, Any], seeing_model: str) -> None:
    notes = make_plan(config(values, model={"path": seeing_model}, sync={"mode": "merge"})).warnings
    assert "the base can see, and prompts are text so far: only its language part trains" in notes


def mixture(folder: Path, *, tied: bool = False) -> Path:
    """A mixture of 4 experts, 12 wide, on 32 features, in two layers."""
    shape = Qwen3MoeConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, num_experts=4, moe_intermediate_size=12,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    shape.architectures = ["Qwen3MoeForCausalLM"]
    shape.save_pretrained(folder)
    return folder


def test_every_expert_is_counted(values: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = mixture(shutil.copytree(tiny_model, tmp_path / "mixture"))
    run = config(
        values,
        model={"path": str(folder)},
        lora={"rank": 6, "alpha": 12, "target_modules": ["linear_fc1", "linear_fc2"]},
        trainer={"kind": "megatron"},
    )
    sizes = measure_model(run)
    assert sizes.adapted_modules == 2 * 4 * 3
    assert sizes.adapter_parameters == 2 * 4 * 3 * 6 * (32 + 12)


def test_experts_without_adapters_are_refused(values: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = mixture(shutil.copytree(tiny_model, tmp_path / "mixture"))
    run = config(
        values,
        model={"path": str(folder)},
        lora={"rank": 6, "alpha": 12, "target_modules": ["linear_qkv", "linear_fc1"]},
    )
    with pytest.raises(ConfigError, match=r"linear_fc1 mean this model's experts, .* set trainer\.kind to megatron"):
        measure_model(run)


@pytest.mark.parametrize(
    ("kind", "tied", "refused"), [("sglang", True, True), ("sglang", False, False), ("hf", True, False)]
)
def test_a_tied_head_that_sglang_would_not_load_is_refused(
    values: dict[str, Any], tiny_model: Path, tmp_path: Path, *, kind: str, tied: bool, refused: bool
) -> None:
    folder = mixture(shutil.copytree(tiny_model, tmp_path / "mixture"), tied=tied)
    plan = make_plan(
        config(
            values, model={"path": str(folder)}, trainer={"kind": "megatron"}, engine={"kind": kind, "device": "cpu"}
        )
    )
    assert any("ties its head to the embedding, and SGLang" in refusal for refusal in plan.refusals) is refused


def test_raise_if_refused_lists_all_refusals(values: dict[str, Any]) -> None:
    plan = make_plan(config(values, engine={"kind": "vllm"}, rewards={"scorers": [{"kind": "exakt"}]}))
    with pytest.raises(ConfigError, match=r"(?s)'planned' cannot start:\n  - engine\.kind.*\n  - unknown scorer"):
        plan.raise_if_refused()


def test_rows_tell_sizes_and_savings(values: dict[str, Any]) -> None:
    rows = dict(plan_rows(make_plan(config(values))))
    assert rows["base"] == "26,848 parameters"
    assert rows["adapter"] == "6,720 parameters (25.03%) on 14 modules"
    assert rows["sync, adapter mode"] == "13.1 KiB (4.0 times less than merge)"
    assert rows["sync, merge mode"] == "52.4 KiB"
    assert rows["checkpoint"] == "105.0 KiB, at most 3 at once"
    assert rows["starts from"] == "the base"
    assert rows["trainer, engines"] == "fsdp, 1 x hf"


def test_rows_tell_over_how_many_ranks_the_trainer_goes(values: dict[str, Any]) -> None:
    trainer = {"kind": "megatron", "tensor_parallel_size": 2, "context_parallel_size": 3}
    rows = dict(plan_rows(make_plan(config(values, trainer=trainer))))
    assert rows["trainer, engines"] == "megatron (tensor_parallel 2, context_parallel 3), 1 x hf"


def test_rows_end_with_what_is_refused(values: dict[str, Any]) -> None:
    rows = plan_rows(make_plan(config(values, engine={"kind": "vllm"})))
    assert rows[-1] == ("refused", "engine.kind 'vllm' is not available yet; use hf or sglang")


def test_long_first_prompt_is_cut_where_it_is_shown(values: dict[str, Any], prompts: Path) -> None:
    prompts.write_text(json.dumps({"prompt": "7" * 300, "label": "7"}) + "\n")
    rows = dict(plan_rows(make_plan(config(values))))
    assert rows["first prompt"] == f"'<|user|>{'7' * 192} ...' (303 tokens)"
