"""Which quantisation a config.json declares; anything whose arithmetic is not known here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.base import Base

CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Quantization:
    """What the quantised weights of a checkpoint have in common."""

    format: Literal["fp8", "int4"]
    block: tuple[int, int] | None
    """Rows and columns that share a scale; 0 stands for all of them. None: the scale's own shape tells."""
    symmetric: bool = True
    power_of_two: bool = False


def read_quantization(base: Base) -> Quantization | None:
    """Return the quantisation of a base, or None where it has none.

    Raises:
        MergeError: A method, format or setting that this software cannot compute with.
    """
    declared = [config[key] for config in (base.config, base.text_config) for key in CONFIG_KEYS if config.get(key)]
    if not declared:
        return None
    raw: Mapping[str, Any] = declared[0]
    method = raw.get("quant_method")
    if method == "fp8":
        block = raw.get("weight_block_size")
        return Quantization(
            "fp8", (block[0], block[1]) if block else None, power_of_two=raw.get("scale_fmt") == "ue8m0"
        )
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    raise MergeError(
        f"{base.folder} is quantised with quant_method {method!r}; fp8 and compressed-tensors can be merged into: use "
        "the unquantised base"
    )


def _compressed_tensors(raw: Mapping[str, Any]) -> Quantization:
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if raw.get(key) and raw[key] != {"format": "dense"} and any(raw[key].values()):
            raise MergeError(f"quantization_config.{key}={raw[key]} cannot be merged into; use the unquantised base")
    groups = list((raw.get("config_groups") or {}).values())
    schemes = {json.dumps(group.get("weights"), sort_keys=True) for group in groups}
    formats = {group.get("format") or raw.get("format") for group in groups}
    if len(schemes) != 1 or len(formats) != 1:
        raise MergeError(
            f"quantization_config mixes {len(schemes)} schemes in formats {sorted(map(str, formats))}; one can be"
        )
    weights, name = json.loads(schemes.pop()) or {}, formats.pop()
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    described = (
        f"format {name!r} with {bits}-bit {kind} weights, strategy {strategy!r}, actorder {weights.get('actorder')!r}"
    )
    if (
        name in ("float-quantized", "naive-quantized")
        and (kind, bits) == ("float", 8)
        and weights.get("symmetric", True)
    ):
        if strategy in ("tensor", "channel"):
            return Quantization("fp8", (0, 0) if strategy == "tensor" else (1, 0))
        if strategy == "block":
            rows, columns = weights["block_structure"]
            return Quantization("fp8", (rows, columns))
    if (
        name == "pack-quantized"
        and (kind, bits) == ("int", 4)
        and weights.get("actorder") in (None, "weight", "static")
    ):
        if strategy == "group":
            return Quantization("int4", (1, int(weights["group_size"])), symmetric=bool(weights.get("symmetric", True)))
        if strategy == "channel":
            return Quantization("int4", (1, 0), symmetric=bool(weights.get("symmetric", True)))
    raise MergeError(
        f"quantization_config: compressed-tensors {described} cannot be merged into; use the unquantised base"
    )


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model config without its quantisation, at all levels."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }
