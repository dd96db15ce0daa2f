"""What tests of the SGLang engine share: settings, adapters on all modules, and transformers to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
from tiny_run import random_adapter, run_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from relax_pipeline.config import RunConfig
from relax_pipeline.types import Adapter, Completion, GenerateRequest, SamplingParams

SHAPES = {
    f"model.layers.{layer}.{parent}": shape
    for layer in (0, 1)
    for parent, shape in {
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }.items()
}
"""(out, in) of the tiny model's linear modules."""
LEAVES = tuple(sorted({module.rpartition(".")[2] for module in SHAPES}))
TOLERANCE = 1e-4
assert_drawn_from = partial(tiny_run.assert_drawn_from, tolerance=TOLERANCE)


def sglang_config(folder: Path, output: Path, **sections: Any) -> RunConfig:
    """A run whose engine is an SGLang server that honours seeds."""
    engine = {"kind": "sglang", "device": "cpu", "deterministic": True, "max_running_requests": 32}
    return run_config(
        folder,
        output_dir=str(output),
        engine=engine | sections.pop("engine", {}),
        sync={"mode": "adapter"} | sections.pop("sync", {}),
        **sections,
    )


def full_adapter(version: int) -> Adapter:
    """A random adapter on every linear module, far from zero."""
    return random_adapter(list(SHAPES), SHAPES, version=version)


def folded(folder: Path, adapter: Adapter | None) -> PreTrainedModel:
    """The base with an adapter added to its weights, by transformers alone."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for module in adapter.info.modules if adapter else ():
            assert adapter is not None
            lora_A = adapter.tensors[f"base_model.model.{module}.lora_A.weight"]
            lora_B = adapter.tensors[f"base_model.model.{module}.lora_B.weight"]
            model.get_submodule(module).weight += adapter.spec.scaling * lora_B @ lora_A  # type: ignore[operator]
    return model.eval()


def whole_model(folder: Path, adapter: Adapter) -> dict[str, torch.Tensor]:
    """All weights of a policy."""
    return {name: tensor.detach() for name, tensor in folded(folder, adapter).state_dict().items()}


def requests(count: int, *, seed: int = 0, **sampling: Any) -> list[GenerateRequest]:
    """Prompts of one to five tokens."""
    params = SamplingParams(**({"max_new_tokens": 12} | sampling))
    draw = np.random.default_rng(5)
    prompts = [tuple(draw.integers(4, 80, 1 + index % 5).tolist()) for index in range(count)]
    return [GenerateRequest(prompt, 1000 * seed + index, params) for index, prompt in enumerate(prompts)]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    """What was sampled."""
    return [completion.token_ids.tolist() for completion in completions]


def without(tensors: Mapping[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    """The tensors whose names hold none of the parts."""
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}
