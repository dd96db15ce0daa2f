"""Gather the tensors of a base into logical weights, each quantised one with its scales."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.base import Base
from relax_pipeline.merge.quantization.config import Quantization, read_quantization
from relax_pipeline.merge.weights import Scheme, Weight, plain_weight
from relax_pipeline.safetensors_io.header import TensorInfo
from relax_pipeline.safetensors_io.read import read_tensor

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
PACKED = "_packed"
SCALE_SUFFIXES = ("_scale_inv", "_scale")


def read_weights(base: Base) -> dict[str, Weight]:
    """Return the base's weights by module name.

    Raises:
        MergeError: The tensors do not bear out what the config says of their quantisation.
    """
    quantization = read_quantization(base)
    quantized = [info for info in base.tensors.values() if info.dtype in FP8_DTYPES or info.name.endswith(PACKED)]
    if quantized and quantization is None:
        raise MergeError(
            f"{quantized[0].name} is {quantized[0].dtype}, and config.json has no quantization_config to say what its "
            "scales mean; use the unquantised base"
        )
    weights = {}
    for info in quantized:
        assert quantization is not None
        weight = _quantized_weight(info, quantization, base.tensors)
        weights[weight.module] = weight
    if quantization and not weights:
        raise MergeError("config.json has a quantization_config, and no tensor is quantised the way it says")
    taken = {info.name for weight in weights.values() for info in weight.stored}
    for info in base.tensors.values():
        if info.name not in taken:
            if info.name.endswith("_scale_inv"):
                raise MergeError(f"{info.name} is a scale, and the base has no fp8 weight that it belongs to")
            weights[info.name.removesuffix(".weight")] = plain_weight(info)
    return weights


def _quantized_weight(info: TensorInfo, quantization: Quantization, tensors: Mapping[str, TensorInfo]) -> Weight:
    packed = info.name.endswith(PACKED)
    if packed != (quantization.format == "int4"):
        raise MergeError(f"{info.name} is {info.dtype}, quantization_config describes {quantization.format} weights")
    name = info.name.removesuffix(PACKED)
    scale = next((tensors[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in tensors), None)
    if scale is None or scale.dtype not in SCALE_DTYPES:
        raise MergeError(f"{info.name} is quantised and has no scale of a known dtype beside it ({name}_scale…)")
    if f"{name}_g_idx" in tensors:
        raise MergeError(
            f"{name}_g_idx: weights quantised out of order cannot be merged into; use the unquantised base"
        )
    stored_shape = tensors.get(f"{name}_shape")
    shape = tuple(int(size) for size in read_tensor(stored_shape).tolist()) if stored_shape else info.shape
    if packed:
        _check_packed(info, shape)
    zero_point = tensors.get(f"{name}_zero_point")
    if packed and (zero_point is None) != quantization.symmetric:
        raise MergeError(
            f"{info.name}: symmetric={quantization.symmetric} and zero_point={zero_point} contradict each other"
        )
    scheme = Scheme(
        quantization.format,
        _block(name, shape, scale, quantization),
        scale,
        zero_point,
        power_of_two=quantization.power_of_two or scale.dtype == "F8_E8M0",
        activation_scales=_activation_scales(name, tensors),
        shape=stored_shape,
    )
    return Weight(name.removesuffix(".weight"), name, shape, info, scheme)


def _block(name: str, shape: tuple[int, ...], scale: TensorInfo, quantization: Quantization) -> tuple[int, int]:
    """Return rows and columns of one scale block, checked against the number of scales there are."""
    *experts, rows, columns = shape
    block_rows, block_columns = quantization.block or (0, 0)
    block = block_rows or rows, block_columns or columns
    grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    if math.prod(scale.shape) != math.prod(experts) * math.prod(grid):
        raise MergeError(
            f"{scale.name} has shape {list(scale.shape)}, expected {[*experts, *grid]} for blocks of {list(block)} in "
            f"{name} of shape {list(shape)}"
        )
    return block


def _check_packed(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or info.dtype != "I32" or info.shape != (shape[0], math.ceil(shape[1] / 8)):
        raise MergeError(
            f"{info.name} is {info.dtype}{list(info.shape)}, expected I32 with eight 4-bit values each for a matrix of "
            f"shape {list(shape)}"
        )


def _activation_scales(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[TensorInfo, ...]:
    module = name.removesuffix(".weight")
    names = (f"{module}.activation_scale", f"{module}.input_scale", f"{module}_activation_scale")
    return tuple(tensors[candidate] for candidate in names if candidate in tensors)
