"""The fsdp trainer's model: the frozen base, the adapter on it, sharded over ranks, and what it exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import make_adapter
from relax_pipeline.lora.fingerprint import fingerprint, fingerprints
from relax_pipeline.lora.fold import fold
from relax_pipeline.lora.names import lora_key
from relax_pipeline.lora.norms import delta_norms
from relax_pipeline.lora.scope import in_vision_region, resolve_targets
from relax_pipeline.models import (
    adaptable_shapes,
    adapter_linears,
    adapter_parameters,
    base_state,
    inject_adapter,
    load_model,
    refuse_packed_experts,
)
from relax_pipeline.seeds import derive_seed
from relax_pipeline.trainer.base import Bucket
from relax_pipeline.types import Adapter, AdapterSpec

_ADAPTER = "policy"


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded over ranks; all ranks must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Policy:
    """A causal language model whose adapter trains, or, with rank 0, all of its weights.

    Attributes:
        model: The transformers model, adapters inside.
        parameters: What trains, by HF-PEFT name (by HF name without an adapter); float32, sharded like the model.
        frozen: The base's parameters by HF name that do not train: all with an adapter, else those of a part that sees.
        spec: The adapter's settings; None without one.
        modules: Full names of the adapted modules.
        base_tensors_digest: Of the base as loaded, in the dtype it is served in.
    """

    def __init__(self, config: RunConfig, *, device: torch.device, shard: bool, gradient_checkpointing: bool) -> None:
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        lora = config.lora
        # Without an adapter the base trains: float32 masters, autocast to the served dtype in the forward pass.
        self._autocast = not lora.enabled and self._dtype != torch.float32
        self.model = load_model(config.model, device=device, dtype=None if lora.enabled else torch.float32)
        self.base_tensors_digest = fingerprint({n: t.to(self._dtype) for n, t in base_state(self.model).items()})
        self.spec: AdapterSpec | None = None
        self.modules: tuple[str, ...] = ()
        if lora.enabled:
            refuse_packed_experts(self.model, lora)
            self.modules = resolve_targets(adaptable_shapes(self.model, experts=False), lora)
            leaves = tuple(sorted({name.rpartition(".")[2] for name in self.modules}))
            self.spec = AdapterSpec(lora.rank, lora.alpha, leaves, lora.dropout)
            torch.manual_seed(derive_seed(config.seed, "adapter"))
            inject_adapter(self.model, name=_ADAPTER, spec=self.spec, modules=self.modules)
            for linear in adapter_linears(self.model, _ADAPTER).values():
                linear.float()  # peft gives it the dtype of the base
        else:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(not in_vision_region(name))  # prompts are text
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if shard:
            _shard(self.model)
        named = {name.replace(".base_layer.", "."): p for name, p in self.model.named_parameters()}
        self.frozen = {name: p for name, p in named.items() if not p.requires_grad}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self.parameters = adapter_parameters(self.model, _ADAPTER) if self.spec else trained

    def logits(self, *, num_last: int, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last positions, [B, num_last, V]."""
        with torch.autocast(self.model.device.type, dtype=self._dtype, enabled=self._autocast):
            output: torch.Tensor = self.model(**inputs, use_cache=False, logits_to_keep=num_last).logits
        return output

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters whole, by name, detached and not copied; all ranks together."""
        return {name: full_tensor(parameter.detach()) for name, parameter in self.parameters.items()}

    def adapter(self, *, version: int, dtype: torch.dtype | None = None) -> Adapter:
        """Return a copy of the adapter, by default in the dtype engines serve; all ranks together."""
        assert self.spec is not None, "an adapter was asked for and lora.rank is 0"
        tensors = {n: t.to(dtype or self._dtype, copy=True) for n, t in self.full_parameters().items()}
        return make_adapter(tensors, spec=self.spec, version=version)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the trained parameters other values, by name; every rank is given them whole.

        Raises:
            AdapterError: A tensor has another shape.
        """
        for name, parameter in self.parameters.items():
            tensor = tensors[name]
            if tensor.shape != parameter.shape:
                raise AdapterError(f"{name} is {tuple(tensor.shape)}, this model's is {tuple(parameter.shape)}")
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                tensor = distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements)
            parameter.copy_(tensor)

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """Split the names of all weights into buckets of at most buffer_bytes; a larger tensor is alone."""
        buckets: list[list[str]] = [[]]
        filled = 0
        for name, tensor in base_state(self.model).items():
            size = tensor.numel() * self._dtype.itemsize
            if buckets[-1] and filled + size > buffer_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += size
        return buckets

    @torch.no_grad()
    def weights(self, names: Sequence[str]) -> Bucket:
        """Return copies of weights by HF name with the adapter folded in; all ranks together."""
        base = base_state(self.model)
        adapter = self.full_parameters() if self.spec else {}
        tensors: dict[str, torch.Tensor] = {}
        num_unmoved = torch.zeros((), dtype=torch.int64, device=self.model.device)
        num_folded = 0
        for name in names:
            weight_OI = full_tensor(base[name]).to(self._dtype)
            merged_OI = self._folded(name, weight_OI, adapter)
            if merged_OI is not None:
                num_folded += weight_OI.numel()
                num_unmoved += (merged_OI == weight_OI).sum()
            tensors[name] = weight_OI.clone() if merged_OI is None else merged_OI
        digests = fingerprints(tensors).digests
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return Bucket(digests, num_bytes, int(num_unmoved), num_folded, tensors)

    def adapter_norms(self) -> dict[str, float]:
        """Return the Frobenius norm of the delta per leaf name; all ranks together."""
        return delta_norms(self.full_parameters(), self.spec.scaling) if self.spec else {}

    def _folded(self, name: str, weight_OI: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the weight with its delta, or None where it has none."""
        module = name.removesuffix(".weight")
        lora_A_RI, lora_B_OR = adapter.get(lora_key(module, "A")), adapter.get(lora_key(module, "B"))
        if self.spec is None or lora_A_RI is None or lora_B_OR is None or not lora_B_OR.any():
            return None
        return fold(weight_OI, lora_A_RI=lora_A_RI, lora_B_OR=lora_B_OR, scaling=self.spec.scaling)


def _shard(model: nn.Module) -> None:
    """Shard each decoder layer, then the rest, over all ranks; gradients are summed, since losses are normalised."""
    block_names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    blocks = [module for module in model.modules() if type(module).__name__ in block_names]
    for module in (*blocks, model):
        sharded = fully_shard(module)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction than a sum
        sharded.set_gradient_divide_factor(1.0)
