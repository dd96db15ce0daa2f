"""The model, built from a Hugging Face folder: split over the ranks, its base frozen, adapters on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import nn

from relax_pipeline.config import LoraConfig, MegatronTrainerConfig, RunConfig
from relax_pipeline.errors import ModelError, TrainerError
from relax_pipeline.safetensors_io.header import TensorInfo
from relax_pipeline.trainer.megatron.compat import Patch, patched
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.provider import configure
from relax_pipeline.trainer.megatron.sharding import initialise_adapters
from relax_pipeline.trainer.megatron.targets import resolve_targets
from relax_pipeline.trainer.megatron.vision import provide_language_part, sees, vision_tensors
from relax_pipeline.trainer.megatron_limits import check_model


@dataclass(frozen=True, slots=True)
class Model:
    """This rank's part of the model."""

    bridge: AutoBridge[Any]
    chunks: list[nn.Module]
    """One, or with virtual pipelining several pieces."""
    wrapped: list[DistributedDataParallel]
    """The same, with buffers for the gradients of what trains."""
    lora: LoRA | None
    vocabulary: int
    """Without the columns that make it divide by the ranks."""
    tied: bool
    """Whether the output layer is the embedding."""
    dtype: torch.dtype
    """Of the base."""
    vision: tuple[TensorInfo, ...]
    """Where the weights lie of the part that sees, which is not built; none without one."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what trains on this rank."""
        return {name: parameter for name, parameter in self._named() if parameter.requires_grad}

    def frozen(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of the frozen base."""
        return {name: parameter for name, parameter in self._named() if not parameter.requires_grad}

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Run the base without its adapter inside this block."""
        assert self.lora is not None, "there is no base beside the weights that train"
        with self.lora.disable_adapter(self.chunks):
            yield

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{number}.{name}", parameter


def build_model(config: RunConfig, settings: MegatronTrainerConfig, ranks: Ranks) -> Model:
    """Build this rank's part; all ranks together.

    Raises:
        ModelError: The folder is missing, or Megatron-Bridge does not know the architecture.
        ConfigError: As `check_model` and `resolve_targets`.
        TrainerError: Something other than the adapter would train.
    """
    bridge = _bridge(config)
    provider = bridge.to_megatron_provider(load_weights=True)
    configure(provider, config.model, settings, ranks.device)
    lora = _LoraHook(config.lora, ranks) if config.lora.enabled else None
    provider.finalize()
    reason = "prompts are text"
    text_only = [Patch(type(provider), "provide", provide_language_part, reason)] if sees(provider) else []
    with patched(text_only):
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=ranks.device.type == "cpu",
            mixed_precision_wrapper=None,  # all parameters have the model's dtype as they are built
            # The bridge's own loads the weights, by names without adapters. Ours is not registered with the provider,
            # which exports send between pipeline stages.
            pre_wrap_hook=[provider.pre_wrap_hook, *([lora] if lora else [])],
        )
    if lora is not None:
        _refuse_stray_parameters(chunks)
        initialise_adapters(chunks, ranks.groups, config.seed)
        if config.sync.mode == "adapter":
            _keep_gates_unadapted(chunks)
    model_config = chunks[0].config
    model_config.finalize_model_grads_func = _finalize_grads
    return Model(
        bridge=bridge,
        chunks=chunks,
        wrapped=[_with_gradient_buffers(chunk, number, ranks) for number, chunk in enumerate(chunks)],
        lora=lora.lora if lora else None,
        vocabulary=provider.vocab_size,
        tied=provider.share_embeddings_and_output_weights,
        dtype=getattr(torch, config.model.dtype),
        vision=vision_tensors(Path(config.model.path)) if sees(provider) else (),
    )


class _LoraHook:
    """Puts the adapters on the loaded model."""

    def __init__(self, config: LoraConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self.lora = LoRA(
            dim=config.rank,
            alpha=config.alpha,
            dropout=config.dropout,
            share_expert_adapters=False,  # shared ones would depend on how many ranks share the experts
        )

    def __call__(self, chunks: list[nn.Module]) -> list[nn.Module]:
        self.lora.target_modules = resolve_targets(chunks, self._config, self._ranks)
        if not self.lora.target_modules:  # this stage has none; an empty list would mean all modules
            self.lora.freeze_model(chunks)
            return chunks
        adapted: list[nn.Module] = self.lora(chunks, training=True)
        return adapted


def _bridge(config: RunConfig) -> AutoBridge[Any]:
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path {config.model.path!r} is no Hugging Face checkpoint: {folder / 'config.json'} does not exist"
        )
    check_model(config, json.loads((folder / "config.json").read_text()))
    try:
        return AutoBridge.from_hf_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path {config.model.path!r} is nothing Megatron-Bridge can load: {error}") from error


def _finalize_grads(model: list[nn.Module], _num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over the ranks, without dividing by a number of tokens once more."""
    finalize_model_grads(model, None, **kwargs)


def _with_gradient_buffers(chunk: nn.Module, number: int, ranks: Ranks) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=chunk.config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=chunk,
        disable_bucketing=number > 0,
        pg_collection=ranks.groups,
    )


def _keep_gates_unadapted(chunks: list[nn.Module]) -> None:
    """Let no gradient reach lora_B's rows for beta and alpha of gated delta nets: engines host no adapter for them."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GatedDeltaNet) and hasattr(module.in_proj, "adapter"):
                gates = sum(module.in_proj_split_sections[:4])  # after q, k, v and z
                weight = module.in_proj.adapter.linear_out.weight
                weight.register_hook(partial(_without_rows, first=gates))


def _without_rows(gradient_OR: torch.Tensor, first: int) -> torch.Tensor:
    gradient_OR = gradient_OR.clone()
    gradient_OR[first:] = 0
    return gradient_OR


def _refuse_stray_parameters(chunks: list[nn.Module]) -> None:
    stray = [n for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad and ".adapter." not in n]
    if stray:
        raise TrainerError(f"{len(stray)} parameters outside the adapter would train, e.g. {stray[:3]}")
