"""transformers models with PEFT adapters inside: what the fsdp trainer and the hf engine share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from relax_pipeline.config import LoraConfig, ModelConfig
from relax_pipeline.errors import ConfigError, ModelError
from relax_pipeline.lora.names import lora_key
from relax_pipeline.lora.scope import in_vision_region
from relax_pipeline.types import AdapterSpec


def resolve_device(device: str) -> torch.device:
    """Return the torch device behind a config value; `auto` takes the GPU this process may see, if any."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, and torch finds no GPU here; set device to auto or cpu")
    return torch.device(device)


def model_class(described: PretrainedConfig) -> Any:
    """Return the auto class that builds a model whole: with the part that sees, where it has one."""
    return (
        AutoModelForImageTextToText if type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    )


def load_model(config: ModelConfig, *, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model from a local folder, in evaluation mode, its weights frozen.

    Args:
        config: The folder and its dtype.
        device: Where the weights go.
        dtype: Instead of the config's.

    Raises:
        ModelError: The folder is missing, lacks weights, or is no checkpoint transformers can load.
    """
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path {config.path!r} is no Hugging Face checkpoint: {folder / 'config.json'} does not exist"
        )
    model: PreTrainedModel
    try:
        local: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
        model, found = model_class(AutoConfig.from_pretrained(folder, **local)).from_pretrained(
            folder,
            **local,
            dtype=dtype or getattr(torch, config.dtype),
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model.path {config.path!r} cannot be loaded: {error}") from error
    if missing := sorted(found["missing_keys"]):  # transformers makes them up at random
        raise ModelError(
            f"model.path {config.path!r} lacks {len(missing)} weights, e.g. {missing[:3]}; download it again"
        )
    return model.to(device).eval().requires_grad_(False)


def linear_leaf_names(model: nn.Module) -> tuple[str, ...]:
    """Return the sorted leaf names of all linear layers: what can carry an adapter."""
    return tuple(sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}))


def adaptable_shapes(model: nn.Module, *, experts: bool) -> dict[str, tuple[int, int]]:
    """Return what can carry an adapter: full module name to (in_features, out_features), in model order.

    Parts that see or hear are left out: prompts are text, so that no adapter there would ever train.

    Args:
        model: Weights may be on the meta device.
        experts: Also each expert of those that transformers packs into one parameter a layer.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if in_vision_region(name):
            continue
        if isinstance(module, nn.Linear):
            shapes[name] = module.in_features, module.out_features
        elif experts and (packed := _packed_experts(name, module)):
            shapes |= packed
    return shapes


def refuse_packed_experts(model: nn.Module, lora: LoraConfig) -> None:
    """Stop where adapters would silently leave out the experts, the bulk of a mixture's weights.

    Raises:
        ConfigError: The targets mean them, and they are packed.
    """
    expert_targets = [target for target in ("linear_fc1", "linear_fc2") if target in lora.target_modules]
    if lora.enabled and expert_targets and any(_packed_experts(*named) for named in model.named_modules()):
        raise ConfigError(
            f"lora.target_modules: {' and '.join(expert_targets)} mean this model's experts, to which trainer.kind "
            "fsdp gives no adapters: set trainer.kind to megatron, or remove them"
        )


def _packed_experts(name: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the experts of a layer, one by one; gate and up lie one below the other in a parameter [E, 2 I, H]."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        return {}
    count, hidden, intermediate = down.shape
    wide, narrow = (hidden, intermediate), (intermediate, hidden)
    leaves = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
    return {f"{name}.{expert}.{leaf}": shape for expert in range(count) for leaf, shape in leaves.items()}


def inject_adapter(model: nn.Module, *, name: str, spec: AdapterSpec, modules: Sequence[str]) -> None:
    """Put a LoRA adapter on the named modules and make it the active one; B starts at zero. Ends in evaluation mode.

    Args:
        model: Changed in place.
        name: Of the adapter, free of dots.
        spec: Rank, alpha, dropout.
        modules: Full module names.
    """
    config = PeftLoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=list(modules),
        bias="none",
    )
    inject_adapter_in_model(config, model, adapter_name=name)
    del model.peft_config  # or the next adapter warns of this one
    model.eval()  # new layers come in training mode, and dropout with them
    for _, layer in lora_layers(model):
        layer.set_adapter(name)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (module name, PEFT LoRA layer) in model order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def adapter_linears(model: nn.Module, name: str) -> dict[str, nn.Linear]:
    """Return the layers that hold the adapter's tensors, by the tensors' HF-PEFT names."""
    linears: dict[str, nn.Linear] = {}
    for module, layer in lora_layers(model):
        if name in layer.lora_A:
            linears[lora_key(module, "A")] = layer.lora_A[name]
            linears[lora_key(module, "B")] = layer.lora_B[name]
    return linears


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by HF-PEFT name."""
    return {key: cast(nn.Parameter, linear.weight) for key, linear in adapter_linears(model, name).items()}


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the bare base inside this block."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own weights by the name they have without adapters, not copied; tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", ()))  # names that only stand for another one
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name and name not in tied
    }
