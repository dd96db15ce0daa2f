"""What a run would do, how large it is, and why it would be refused: all that is known before anything starts."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from relax_pipeline.checkpoint.manifest import check_continues, read_manifest
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.errors import ConfigError, RelaxError
from relax_pipeline.inputs import check_backends, check_model_folder, load_tokenizer, run_folder, run_identity
from relax_pipeline.lora.adapter import CONFIG_FILE
from relax_pipeline.memory_advice import unused_room
from relax_pipeline.memory_gpu import check_room, sent_bytes, smallest_gpu
from relax_pipeline.metrics.text import bytes_text
from relax_pipeline.rewards.build import build_scorer
from relax_pipeline.sizes import ModelSizes, measure_model
from relax_pipeline.trainer.megatron_limits import check_model

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What the prompt files hold."""

    train_rows: int
    eval_rows: int
    """0 without an evaluation."""
    first_prompt: str
    """As the model reads it, chat template applied."""
    first_prompt_tokens: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run. A part that could not be worked out is None, and a refusal says why."""

    config: RunConfig
    run_folder: Path
    sizes: ModelSizes | None
    prompts: PromptFacts | None
    resumes_from: CheckpointRef | None
    """None: from the base."""
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def steps_to_go(self) -> int:
        """Steps that are not done yet."""
        return max(0, self.config.steps - (self.resumes_from.step if self.resumes_from else 0))

    @property
    def tokens_per_step(self) -> int:
        """Tokens sampled in a step, at most, without resampling."""
        rollout = self.config.rollout
        return rollout.completions_per_step * rollout.max_new_tokens

    def raise_if_refused(self) -> None:
        """Stop here where the run would stop later.

        Raises:
            ConfigError: Lists every refusal.
        """
        if self.refusals:
            lines = "\n".join(f"  - {refusal}" for refusal in self.refusals)
            raise ConfigError(f"run {self.config.run_name!r} cannot start:\n{lines}")


def make_plan(config: RunConfig) -> Plan:
    """Check everything that needs no process, no GPU and no weights in memory. Problems are collected, not raised."""
    refusals: list[str] = []
    notes = _config_warnings(config)

    def attempt(check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except RelaxError as error:
            if str(error) not in refusals:  # a missing model folder is found by more than one check
                refusals.append(str(error))
            return None

    attempt(check_backends, config)
    attempt(build_scorer, config.rewards)
    attempt(_check_trainer, config, notes)
    sizes = attempt(measure_model, config)
    attempt(_check_memory, config, sizes, notes)
    prompts = attempt(_read_prompts, config)
    checkpoint = attempt(_find_checkpoint, config, prompts, notes)
    attempt(_check_output, config, sizes)
    return Plan(config, run_folder(config), sizes, prompts, checkpoint, tuple(notes), tuple(refusals))


def kept_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints lie on the disk at most, the one being written included."""
    policy = config.checkpoint
    extra = config.steps // policy.keep_every if policy.keep_every else 0
    return min(math.ceil(config.steps / policy.every), policy.keep_last + 1 + extra)


def _config_warnings(config: RunConfig) -> list[str]:
    """Return what validation warns about, once more: whoever loaded the configuration may not have seen it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RunConfig.model_validate(config.model_dump())
    return [str(warning.message) for warning in caught]


def _check_trainer(config: RunConfig, notes: list[str]) -> None:
    """Refuse a model or a layout that the trainer cannot do, or an adapter to start from that is not there."""
    check_model_folder(config)
    hf_config = json.loads((Path(config.model.path) / "config.json").read_text())
    check_model(config, hf_config)
    if "vision_config" in hf_config:
        notes.append("the base can see, and prompts are text so far: only its language part trains")
    if config.lora.start_from and not (Path(config.lora.start_from) / CONFIG_FILE).is_file():
        raise ConfigError(
            f"lora.start_from: {config.lora.start_from} holds no {CONFIG_FILE}; give a PEFT folder, or the adapter/ "
            "folder of a checkpoint"
        )


def _check_memory(config: RunConfig, sizes: ModelSizes | None, notes: list[str]) -> None:
    """Refuse what no GPU of this machine can hold, where the run is to use them."""
    here = config.cluster.ray_address == "local" and "cpu" not in (config.trainer.device, config.engine.device)
    gpu_bytes = smallest_gpu() if here else None
    if sizes is None or gpu_bytes is None:
        return
    sent = sent_bytes(config, model_bytes=sizes.merged_bytes, adapter_bytes=sizes.adapter_bytes, gpu_bytes=gpu_bytes)
    note = check_room(config, sizes.trainer_memory, sizes.engine_memory, sent=sent, gpu_bytes=gpu_bytes)
    if note:
        notes.append(note)
    else:
        notes += unused_room(config, sizes.trainer_memory, sizes.engine_memory, sent=sent, gpu_bytes=gpu_bytes)


def _read_prompts(config: RunConfig) -> PromptFacts:
    tokenizer = load_tokenizer(config)
    train = PromptDataset(load_rows(config.data.train), tokenizer, config.data)
    first = train.prompt(0)
    held_out = 0
    if config.evaluation:
        evaluation = PromptDataset(load_rows(config.evaluation.source), tokenizer, config.data)
        evaluation.prompt(0)
        held_out = len(evaluation)
    return PromptFacts(len(train), held_out, first.text, len(first.token_ids), train.fingerprint)


def _find_checkpoint(config: RunConfig, prompts: PromptFacts | None, notes: list[str]) -> CheckpointRef | None:
    """Return where the run would go on; without readable prompts its identity is not known, and not compared."""
    ref = CheckpointStore(run_folder(config) / "checkpoints").newest_intact(lambda error: notes.append(str(error)))
    if ref and prompts:
        identity = run_identity(config, prompts.fingerprint)
        check_continues(read_manifest(ref.path).identity, identity, folder=ref.path)
    if ref and ref.step >= config.steps:
        notes.append(f"nothing to train: step {ref.step} of {config.steps} is saved; raise steps to go on")
    return ref


def _check_output(config: RunConfig, sizes: ModelSizes | None) -> None:
    """Refuse a folder that cannot be written, or a disk that cannot hold what the run keeps."""
    folder = run_folder(config)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {folder} cannot be written, because of {existing}; set one that can")
    if sizes is None:
        return
    count = kept_checkpoints(config)
    held = sum(ref.num_bytes for ref in CheckpointStore(folder / "checkpoints").committed())
    needed, free = sizes.checkpoint_bytes * count - held, shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"output_dir: {count:,} checkpoints of {bytes_text(sizes.checkpoint_bytes)} need {bytes_text(needed)} more "
            f"and {existing} has {bytes_text(free)}; free space, lower checkpoint.keep_last, or set another output_dir"
        )
