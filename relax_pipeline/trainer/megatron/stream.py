"""The model under its Hugging Face names: complete over all ranks, copied, and never merged in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relax_pipeline.lora.names import PEFT_PREFIX, Half, lora_key, transformers_name
from relax_pipeline.lora.packed import packed_module
from relax_pipeline.safetensors_io.header import TensorInfo
from relax_pipeline.safetensors_io.read import read_tensor
from relax_pipeline.trainer.megatron.model import Model

_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_OUTPUT = "lm_head.weight"
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the whole model, without its values."""

    name: str
    num_bytes: int
    numel: int
    source: int
    """Which conversion yields it."""


class AdapterStream:
    """Streams the whole adapter by HF-PEFT name, from the parameters that the model holds when this is made.

    Megatron-Bridge plans its conversions anew for each export, which takes three times as long as these.
    """

    def __init__(self, model: Model) -> None:
        """Plan the conversions; all ranks together."""
        self._model = model
        self._conversions = model.bridge._model_bridge  # the public way to it knows no tasks
        planned = self._conversions.build_adapter_conversion_tasks(model.chunks)
        self._grouped = [task for base, tasks in planned.items() if _EXPERTS in base for task in tasks]
        others = {base: tasks for base, tasks in planned.items() if _EXPERTS not in base}
        self._conversions.build_adapter_conversion_tasks = lambda *_, **__: others

    @torch.no_grad()
    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter, on the device; all ranks together.

        What no ranks share is the parameter itself: it is not copied, and changes with it. A fused module's lora_A
        appears under each of the HF modules it stands for. A layer's experts are one tensor, as `lora.packed`
        describes; Megatron-Bridge would name them one by one.
        """
        for weight in self._conversions.stream_adapter_weights_megatron_to_hf(
            self._model.chunks, cpu=False, show_progress=False
        ):
            yield f"{PEFT_PREFIX}{_name(weight.param_name, self._model)}", weight.weight.detach()
        for task in self._grouped:
            yield from self._experts(task)

    def _experts(self, task: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield both halves of the adapters of a layer's experts, gathered from the ranks that share them."""
        (materialized,) = self._conversions.materialize_adapter_weights([task])
        mapping = self._conversions.mapping_registry().megatron_to_hf_lookup(f"{task.global_base_prefix}.weight0")
        names = mapping.hf_param.values() if isinstance(mapping.hf_param, dict) else [mapping.hf_param]
        name = _name(next(iter(names)).removesuffix(".weight"), self._model)
        halves: tuple[tuple[Half, Any], ...] = (
            ("A", materialized.linear_in_weight),
            ("B", materialized.linear_out_weight),
        )
        for half, weight in halves:
            tensor = weight.weight.detach()
            shares = self._conversions._gather_expert_adapter_weight(tensor)
            yield lora_key(packed_module(name) or name, half), tensor if shares is None else torch.cat(shares)


class WeightStream:
    """Streams the base's weights, a few at a time, by the conversions Megatron-Bridge plans."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._conversions = _grouped(model.bridge.get_conversion_tasks(model.chunks))

    @torch.no_grad()
    def each(self) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield all weights, whole, on the device, maybe the model's own; all ranks together and to the end."""
        for source in range(len(self._conversions) + len(self._model.vision)):
            for name, tensor in self.some([source]):
                yield Weight(name, tensor.nbytes, tensor.numel(), source), tensor

    @torch.no_grad()
    def some(self, sources: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights by name, in the same way; many sources at once save Megatron-Bridge a millisecond for each."""
        from_megatron = len(self._conversions)
        yield from self._converted([task for s in sources if s < from_megatron for task in self._conversions[s]])
        for source in sources:
            if source >= from_megatron:
                yield from self._read(self._model.vision[source - from_megatron])

    def _converted(self, tasks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        if not tasks:
            return  # none would mean all
        exported = self._model.bridge.export_hf_weights(
            self._model.chunks, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
        )
        for weight in exported:
            name = _name(weight.param_name.replace(".base_layer.", ".").removesuffix(".base_layer"), self._model)
            tensor = weight.weight.detach()
            if name in (*_EMBEDDINGS, _OUTPUT):
                tensor = tensor[: self._model.vocabulary]
            if name == _OUTPUT and self._model.tied:
                continue  # it is the embedding
            yield name, tensor

    def _read(self, info: TensorInfo) -> Iterator[tuple[str, torch.Tensor]]:
        device = next(self._model.chunks[0].parameters()).device
        yield _name(info.name, self._model), read_tensor(info).to(device, self._model.dtype)


def _name(name: str, model: Model) -> str:
    return transformers_name(name) if model.vision else name


def _grouped(tasks: Sequence[Any]) -> list[list[Any]]:
    """Return the conversions; one that stacks a layer's experts takes the tasks of all of them at once."""
    stacked: dict[str, list[Any]] = {}
    conversions: list[list[Any]] = []
    for task in tasks:
        if getattr(task.mapping, "is_grouped_export", False):
            name = str(task.mapping.hf_param)
            if name not in stacked:
                stacked[name] = []
                conversions.append(stacked[name])
            stacked[name].append(task)
        else:
            conversions.append([task])
    return conversions
