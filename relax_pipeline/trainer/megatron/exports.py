"""What leaves the trainer: adapters, merged weights in buckets, norms and the description of what was built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import CheckpointError, ModelError, TrainerError
from relax_pipeline.lora.adapter import make_adapter, write_adapter
from relax_pipeline.lora.fingerprint import combine_digests, fingerprints
from relax_pipeline.lora.fold import fold
from relax_pipeline.lora.gates import adapted_gates
from relax_pipeline.lora.names import adapted_modules
from relax_pipeline.lora.norms import delta_norms
from relax_pipeline.lora.packed import leaves, packed_module, pair, unpacked
from relax_pipeline.lora.warm_start import read_warm_start
from relax_pipeline.safetensors_io.identity import model_digest
from relax_pipeline.trainer.base import Bucket, Payload, TrainerInfo
from relax_pipeline.trainer.megatron.model import Model
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.sharding import copies
from relax_pipeline.trainer.megatron.stream import AdapterStream, Weight, WeightStream
from relax_pipeline.types import Adapter, AdapterSpec, WeightsInfo


class Exports:
    """Exports from the masters. All ranks call alike; rank 0 holds the results.

    Attributes:
        info: What was built.
    """

    def __init__(self, config: RunConfig, model: Model, optimizer: MasterOptimizer, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._stream = WeightStream(model)
        with optimizer.held_in(model.chunks, optimizer.masters):
            self._adapter = AdapterStream(model)
        self._tensors: dict[str, torch.Tensor] = {}
        self._version = -1
        digests, self._weights = self._read_base()
        self._spec, modules = self._describe_adapter()
        names = {weight.name for weight in self._weights}
        self._refuse_gaps(modules, names)
        trained = optimizer.parameters.values()
        self.info = TrainerInfo(
            base_tensors_digest=ranks.on_first(lambda: combine_digests(digests)),
            modules=modules,
            num_trainable=round(sum(ranks.gather(sum(p.numel() / copies(p, ranks.groups) for p in trained)))),
            num_parameters=sum(weight.numel for weight in self._weights),
            device=str(ranks.device),
        )

    def adapter(self, version: int) -> Payload:
        """Return the adapter in the dtype engines compute in.

        Raises:
            TrainerError: On all ranks, when in adapter mode gates of gated delta nets are adapted.
        """
        tensors = self._full_precision(version)
        made: list[Adapter] = []

        def make() -> WeightsInfo:
            adapted = adapted_gates(tensors) if self._config.sync.mode == "adapter" else []
            if adapted:
                raise TrainerError(
                    f"the lora_B of {len(adapted)} gates is not zero, e.g. {adapted[0]}, and engines host no adapters "
                    "on gates: this policy was trained in merge mode; set sync.mode to merge"
                )
            made.append(self._stamped({n: t.to(self._dtype, copy=True) for n, t in tensors.items()}, version))
            return made[0].info

        info = self._ranks.on_first(make)
        return Payload(info, made[0] if made else None)

    def adapter_writer(self, folder: Path, version: int) -> Callable[[], None]:
        """Return what writes a PEFT folder with the masters, where there is an adapter: on rank 0, on any thread.

        Raises:
            AdapterError: On all ranks, when a value is not finite.
            CheckpointError: By what is returned.
        """
        if self._spec is None:
            return lambda: None
        whole = self._full_precision(version)
        info = self._ranks.on_first(lambda: self._stamped(whole, version).info)
        adapter = Adapter(info, self._spec, {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()})

        def write() -> None:
            path = self._config.model.path
            metadata = {"base_digest": model_digest(Path(path))}
            try:
                write_adapter(adapter, folder, base_model=path, metadata=metadata)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder} cannot be written: {error}") from error

        return write

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """Split the names of all weights into buckets of at most buffer_bytes; a larger tensor is alone."""
        buckets: list[list[str]] = [[]]
        filled = 0
        for weight in self._weights:
            if buckets[-1] and filled + weight.num_bytes > buffer_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(weight.name)
            filled += weight.num_bytes
        return buckets

    def weights(self, names: Sequence[str], version: int) -> Bucket:
        """Return copies of weights by HF name with the adapter folded in."""
        adapter = self._full_precision(version) if self._spec else {}
        wanted = set(names)
        sources = sorted({weight.source for weight in self._weights if weight.name in wanted})
        tensors: dict[str, torch.Tensor] = {}
        num_unmoved = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        num_folded = 0
        for name, tensor in self._stream.some(sources):
            if self._ranks.rank == 0 and name in wanted:
                merged = self._folded(name, tensor, adapter)
                if merged is not None:
                    num_folded += tensor.numel()
                    num_unmoved += (merged == tensor).sum()
                tensors[name] = tensor.to(self._ranks.device, copy=True) if merged is None else merged
        content = {name: tensors[name] for name in names if name in tensors}
        digests = fingerprints(content).digests
        return Bucket(digests, sum(tensor.nbytes for tensor in content.values()), int(num_unmoved), num_folded, content)

    def read_warm_start(self, folder: Path, version: int) -> dict[str, torch.Tensor]:
        """Return, on all ranks, the adapter in a folder that rank 0 sees, in PEFT's names.

        Raises:
            AdapterError: As `read_warm_start`, on all ranks.
        """
        spec, base = self._spec, Path(self._config.model.path)
        assert spec is not None, "lora.start_from needs an adapter"
        modules = adapted_modules(unpacked(self._full_precision(version)))
        return self._ranks.on_first(lambda: read_warm_start(folder, spec=spec, modules=modules, base=base))

    def norms(self, version: int) -> dict[str, float]:
        """Return the Frobenius norm of the delta per leaf name."""
        return delta_norms(self._full_precision(version), self._spec.scaling) if self._spec else {}

    def forget(self) -> None:
        """Hold nothing on the device; also where weights have changed under the same version."""
        self._tensors = {}
        self._version = -1

    def _full_precision(self, version: int) -> dict[str, torch.Tensor]:
        """Return the whole adapter in float32 on rank 0, gathered once a version; maybe the masters themselves."""
        if version != self._version:
            self._tensors = {name: tensor for name, tensor in self._adapter.each() if self._ranks.rank == 0}
            self._version = version
        return self._tensors

    def _stamped(self, tensors: dict[str, torch.Tensor], version: int) -> Adapter:
        assert self._spec is not None, "an adapter was asked for and lora.rank is 0"
        return make_adapter(tensors, spec=self._spec, version=version)

    def _folded(self, name: str, weight: torch.Tensor, adapter: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the weight with its delta, or None where it has none."""
        if self._spec is None:
            return None
        halves = pair(adapter, name.removesuffix(".weight"))
        if halves is None or not halves[1].any():
            return None
        lora_A, lora_B = (half.to(weight.device) for half in halves)
        return fold(weight, lora_A_RI=lora_A, lora_B_OR=lora_B, scaling=self._spec.scaling)

    def _read_base(self) -> tuple[dict[str, str], list[Weight]]:
        """Return each weight's digest, on rank 0, and what the weights are."""
        digests: dict[str, str] = {}
        weights = []
        for weight, tensor in self._stream.each():
            weights.append(weight)
            if self._ranks.rank == 0:
                digests |= fingerprints({weight.name: tensor}).digests
        return digests, weights

    def _describe_adapter(self) -> tuple[AdapterSpec | None, tuple[str, ...]]:
        lora = self._config.lora
        if not lora.enabled:
            return None, ()
        keys = self._full_precision(0)
        modules = self._ranks.on_first(lambda: adapted_modules(keys))
        targets = tuple(sorted({leaf for name in modules for leaf in leaves(name)}))
        return AdapterSpec(lora.rank, lora.alpha, targets, lora.dropout), modules

    def _refuse_gaps(self, modules: Sequence[str], names: set[str]) -> None:
        """Every adapter must belong to a weight that is exported, or merging would lose it."""
        names |= {packed for name in names if (packed := packed_module(name.removesuffix(".weight")))}
        lost = [module for module in modules if names.isdisjoint({f"{module}.weight", module})]
        if lost:
            raise ModelError(f"{len(lost)} adapters have no weight of that name in the export, e.g. {lost[:3]}")
