"""Lay the merged checkpoint out: which file holds which tensor, made from what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from relax_pipeline.merge.base import Base
from relax_pipeline.merge.changes import Changes
from relax_pipeline.merge.outputs import Output, Part
from relax_pipeline.merge.weights import Weight
from relax_pipeline.safetensors_io.header import Header, TensorInfo, build_header

DEQUANTISED_DTYPE = "BF16"


@dataclass(frozen=True)
class Shard:
    """One safetensors file to write."""

    file: str
    header: Header
    outputs: tuple[Output, ...]
    """In file order."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header.raw) + sum(tensor.num_bytes for tensor in self.header.tensors)


def plan_shards(
    base: Base, weights: Mapping[str, Weight], changes: Changes, *, keep_quantization: bool, new_head: Weight | None
) -> tuple[Shard, ...]:
    """Plan every file of the result; files keep their names, and their layout where their tensors stay the same kind.

    Args:
        base: What is merged into.
        weights: All its weights, by module.
        changes: What the adapter does to them.
        keep_quantization: Quantise again what is changed; otherwise everything becomes bfloat16.
        new_head: A head to write beside the embedding that it was so far, at the end of that file.
    """
    owners = {info.name: weight for weight in weights.values() for info in weight.stored}
    shards = []
    for file, header in base.headers.items():
        outputs = [
            output
            for info in header.tensors
            for output in _outputs(info, owners[info.name], changes, keep_quantization=keep_quantization)
        ]
        if new_head is not None and new_head.tensor.file.name == file:
            outputs.extend(_outputs(new_head.tensor, new_head, changes, keep_quantization=keep_quantization))
        shards.append(_shard(file, header, outputs))
    return tuple(shards)


def _shard(file: str, header: Header, outputs: list[Output]) -> Shard:
    kinds = [(output.info.name, output.info.dtype, output.info.shape) for output in outputs]
    if kinds != [(info.name, info.dtype, info.shape) for info in header.tensors]:
        header = build_header((output.info for output in outputs), header.metadata)
    by_name = {output.info.name: output for output in outputs}
    return Shard(file, header, tuple(replace(by_name[info.name], info=info) for info in header.tensors))


def _outputs(info: TensorInfo, weight: Weight, changes: Changes, *, keep_quantization: bool) -> Iterator[Output]:
    """Yield what becomes of one stored tensor: one output, or none for a scale that is no longer needed."""
    deltas = changes.deltas.get(weight.module, ())
    replacement = changes.replacements.get(weight.module, "")
    scheme = weight.scheme
    if scheme is None:
        part: Part = "replacement" if replacement else "values" if deltas else "copy"
        yield Output(replace(info, name=weight.name), part, info, weight, deltas, replacement)
    elif not keep_quantization:
        if info == weight.tensor:
            values = TensorInfo(weight.name, DEQUANTISED_DTYPE, weight.shape, 0)
            yield Output(values, "replacement" if replacement else "values", info, weight, deltas, replacement)
    else:
        parts: dict[str, Part] = {weight.tensor.name: "codes", scheme.scale.name: "scale"}
        if scheme.zero_point:
            parts[scheme.zero_point.name] = "zero_point"
        yield Output(info, parts.get(info.name, "copy") if deltas else "copy", info, weight, deltas)
