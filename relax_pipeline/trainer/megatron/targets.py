"""Which of Megatron's modules get an adapter. All ranks decide, for a pipeline stage sees its own layers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from relax_pipeline.config import LoraConfig
from relax_pipeline.config.model import MEGATRON_TO_HF_MODULES
from relax_pipeline.errors import ConfigError
from relax_pipeline.lora.scope import in_vision_region
from relax_pipeline.trainer.megatron.parallel import Ranks


def resolve_targets(chunks: Sequence[nn.Module], lora: LoraConfig, ranks: Ranks) -> list[str]:
    """Return the full names, within their chunk, of this rank's modules to adapt; all ranks together.

    Raises:
        ConfigError: On all ranks, when a target matches no module of the whole model, or modules whose adapters
            Megatron-Bridge would never export.
    """
    modules = dict(_linear_modules(chunks))
    scoped = [name for name in modules if lora.scope == "all" or in_vision_region(name) == (lora.scope == "vision")]
    mine = [name for name in scoped if name.rpartition(".")[2] in lora.target_modules]
    plain = sorted(name for name in mine if isinstance(modules[name], nn.Linear))
    found = ranks.gather(({name.rpartition(".")[2] for name in scoped}, plain))
    leaves: set[str] = set().union(*(leaves for leaves, _ in found))
    for target in lora.target_modules:
        if target not in leaves:
            raise ConfigError(
                f"lora.target_modules: {target!r} ({', '.join(MEGATRON_TO_HF_MODULES[target])}) matches no linear "
                f"module in scope {lora.scope!r}; the model has {', '.join(sorted(leaves)) or 'none there'}"
            )
    if unexported := [name for _, names in found for name in names]:
        raise ConfigError(
            f"lora.scope {lora.scope!r} reaches {len(unexported)} modules that stay with transformers in Megatron, "
            f"e.g. {unexported[0]}, and whose adapters would train without ever being exported: set lora.scope to "
            "language, or trainer.kind to fsdp"
        )
    return mine


def _linear_modules(chunks: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield what could carry an adapter: modules by a name of the table, with weights of their own."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.rpartition(".")[2] in MEGATRON_TO_HF_MODULES and any(True for _ in module.parameters()):
                yield name, module
