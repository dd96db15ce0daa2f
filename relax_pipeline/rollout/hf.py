"""The reference engine: transformers in this process, several adapter versions side by side."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from relax_pipeline.config import HfEngineConfig, ModelConfig
from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.lora.names import adapted_modules, lora_key
from relax_pipeline.models import (
    adapter_linears,
    adapter_parameters,
    adapters_disabled,
    base_state,
    inject_adapter,
    linear_leaf_names,
    load_model,
    lora_layers,
    resolve_device,
)
from relax_pipeline.rollout.base import EngineInfo, adapter_name
from relax_pipeline.rollout.decode import Decoded, decode
from relax_pipeline.types import Ack, Adapter, Completion, GenerateRequest


class HfEngine:
    """Implements `Engine`. Sampling depends on the requests of a call only, never on what ran before."""

    def __init__(self, *, engine_id: str, model: ModelConfig, config: HfEngineConfig) -> None:
        self._device = resolve_device(config.device)
        self._model = load_model(model, device=self._device)
        self._batch_size = config.batch_size
        self._staged: set[int] = set()
        self._active: set[int] = set()
        self._weights_version: int | None = None
        self._info = EngineInfo(
            engine_id=engine_id,
            incarnation=uuid.uuid4().hex[:12],
            pid=os.getpid(),
            base_tensors_digest=fingerprint(base_state(self._model)),
            leaf_modules=linear_leaf_names(self._model),
        )

    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return self._info

    def stage(self, adapter: Adapter) -> None:
        """See `Engine.stage`."""
        version = adapter.info.version
        if version in self._staged | self._active:
            raise EngineError(f"engine {self._info.engine_id} already holds version {version}; versions never change")
        self._check_fits(adapter)
        name = adapter_name(version)
        inject_adapter(self._model, name=name, spec=adapter.spec, modules=adapter.info.modules)
        for key, linear in adapter_linears(self._model, name).items():
            linear.weight = nn.Parameter(adapter.tensors[key].to(self._device, copy=True), requires_grad=False)
        self._staged.add(version)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """See `Engine.load_weights`."""
        held = base_state(self._model)
        unknown = sorted(set(tensors) - set(held))
        if unknown:
            raise EngineError(f"version {version}: this model has no weights named {unknown[:4]}")
        for name, tensor in tensors.items():
            if held[name].shape != tensor.shape or held[name].dtype != tensor.dtype:
                raise EngineError(
                    f"version {version}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the engine's is {held[name].dtype} {tuple(held[name].shape)}"
                )
        self._weights_version = version
        self._active.clear()
        for name, tensor in tensors.items():
            held[name].copy_(tensor)

    def activate(self, version: int) -> Ack:
        """See `Engine.activate`."""
        if version not in self._staged | self._active and version != self._weights_version:
            raise UnknownVersionError(f"engine {self._info.engine_id} was never sent version {version}")
        if version == self._weights_version:
            held = base_state(self._model)
            modules = tuple(sorted(held))
        else:
            held = {name: p.detach() for name, p in adapter_parameters(self._model, adapter_name(version)).items()}
            modules = adapted_modules(held)
        self._staged.discard(version)
        self._active.add(version)
        return Ack(self._info.engine_id, self._info.incarnation, version, fingerprint(held), modules)

    def retire(self, version: int) -> None:
        """See `Engine.retire`."""
        if version in self._staged | self._active and version != self._weights_version:
            self._drop(adapter_name(version))
        self._staged.discard(version)
        self._active.discard(version)

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        """See `Engine.generate`."""
        completions: list[Completion] = []
        with self._serving(version):
            for start in range(0, len(requests), self._batch_size):
                batch = decode(self._model, requests[start : start + self._batch_size])
                completions += [self._stamp(decoded, version) for decoded in batch]
        return completions

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        """See `Engine.logprobs`."""
        results = []
        with self._serving(version):
            for sequence in sequences:
                ids_1S = torch.tensor([list(sequence)], device=self._device)
                logprobs_SV = torch.log_softmax(self._model(ids_1S).logits[0, :-1].float(), dim=-1)
                results.append(logprobs_SV.gather(-1, ids_1S[0, 1:, None])[:, 0].cpu().numpy())
        return results

    def sleep(self) -> None:
        """See `Engine.sleep`; nothing is let go."""

    def wake(self) -> None:
        """See `Engine.wake`."""

    def close(self) -> None:
        """See `Engine.close`."""
        del self._model

    def _stamp(self, decoded: Decoded, version: int) -> Completion:
        return Completion(
            token_ids=decoded.token_ids,
            rollout_logprobs=decoded.logprobs,
            finish_reason=decoded.finish_reason,
            policy_version=version,
            engine_id=self._info.engine_id,
            incarnation=self._info.incarnation,
        )

    def _check_fits(self, adapter: Adapter) -> None:
        """Refuse an adapter before anything of it is put on the model."""
        linears = {
            name.removesuffix(".base_layer"): module
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        }
        for module in adapter.info.modules:
            linear = linears.get(module)
            if linear is None:
                raise EngineError(f"version {adapter.info.version}: this model has no linear module {module}")
            lora_A_RI, lora_B_OR = adapter.tensors[lora_key(module, "A")], adapter.tensors[lora_key(module, "B")]
            if (lora_B_OR.shape[0], lora_A_RI.shape[1]) != (linear.out_features, linear.in_features):
                raise EngineError(
                    f"version {adapter.info.version}: {module} has lora_B {tuple(lora_B_OR.shape)} and lora_A "
                    f"{tuple(lora_A_RI.shape)}, its weight here is ({linear.out_features}, {linear.in_features})"
                )

    def _drop(self, name: str) -> None:
        for _, layer in lora_layers(self._model):
            layer.set_adapter([])  # peft warns when an active adapter goes
            layer.delete_adapter(name)

    def _serving(self, version: int | None) -> AbstractContextManager[None]:
        """Return the block in which the model is the given version; refuse any other."""
        if version is None and self._weights_version is None:
            return adapters_disabled(self._model)
        if version is None or version not in self._active:
            raise UnknownVersionError(
                f"engine {self._info.engine_id} holds policy versions {sorted(self._active)}, not {version}"
            )
        if version == self._weights_version:
            return adapters_disabled(self._model)
        for _, layer in lora_layers(self._model):
            layer.set_adapter(adapter_name(version), inference_mode=True)
        return nullcontext()
