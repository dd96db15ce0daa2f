"""What a run reads before any process starts, and what makes it the same run when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from relax_pipeline.checkpoint.manifest import Identity
from relax_pipeline.config import RunConfig, VllmEngineConfig
from relax_pipeline.errors import ConfigError, ModelError
from relax_pipeline.safetensors_io.identity import model_digest


def run_folder(config: RunConfig) -> Path:
    """Return the folder of a run's files."""
    return Path(config.output_dir).expanduser().resolve() / config.run_name


def check_backends(config: RunConfig) -> None:
    """Refuse what can be configured and not yet be run.

    Raises:
        ConfigError: Names the setting and what to use instead.
    """
    if isinstance(config.engine, VllmEngineConfig):
        raise ConfigError("engine.kind 'vllm' is not available yet; use hf or sglang")
    if config.engine.sleeps and config.rollout.staleness:
        raise ConfigError(
            "engine.offload frees the engine while the trainer trains, and with rollout.staleness "
            f"{config.rollout.staleness} rollouts run meanwhile: set engine.offload to none, or rollout.staleness to 0"
        )
    sglang_adapters = config.engine.kind == "sglang" and config.sync.mode == "adapter" and config.lora.enabled
    if sglang_adapters and config.trainer.kind == "fsdp" and "in_proj" in config.lora.target_modules:
        raise ConfigError(
            "lora.target_modules 'in_proj' stands for several projections, of which SGLang adapts two by one lora_A, "
            "and trainer.kind fsdp trains one for each: set trainer.kind to megatron, remove in_proj, or set sync.mode "
            "to merge"
        )
    if config.sync.transport == "nccl" and config.cluster.colocate:
        raise ConfigError("sync.transport 'nccl' passes between GPUs, and cluster.colocate shares them: use ipc")


def check_model_folder(config: RunConfig) -> None:
    """Refuse a model folder that lacks its configuration or its weights.

    Raises:
        ModelError: Says what is missing.
    """
    folder = Path(config.model.path)
    remedy = "download the base model there, or correct the path"
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {folder} is no Hugging Face checkpoint, it has no config.json; {remedy}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path: {folder} has no *.safetensors weights; {remedy}")


def load_tokenizer(config: RunConfig) -> Any:
    """Load the base model's tokenizer.

    Raises:
        ModelError: The folder is no checkpoint, or holds no tokenizer.
    """
    check_model_folder(config)
    folder = Path(config.model.path)
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {folder} holds no tokenizer transformers can load: {error}") from error


def run_identity(config: RunConfig, data_fingerprint: str) -> Identity:
    """Return what must stay the same for a run to continue. Hashes the base's weights, once a process.

    Raises:
        ModelError: The base has no config.json or no safetensors weights.
    """
    return Identity(
        base_digest=model_digest(Path(config.model.path)),
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        target_modules=tuple(sorted(config.lora.target_modules)),
        scope=config.lora.scope,
        saves_lora_only=config.saves_lora_only,
        seed=config.seed,
        data_fingerprint=data_fingerprint,
        trainer=config.trainer.kind,
    )
