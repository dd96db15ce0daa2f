"""Which weights of the base each module of the adapter changes, decided from names, shapes and configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.adapter_config import AdapterConfig
from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.keys import Part
from relax_pipeline.merge.names import find_name
from relax_pipeline.merge.weights import Weight
from relax_pipeline.safetensors_io.header import TensorInfo

Shapes = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Pairing:
    """One adapter module and what it changes."""

    module: str
    kind: str
    """linear, embedding, experts, fused or replacement."""
    rank: int
    scaling: float
    deltas: Mapping[str, tuple[Delta, ...]] = field(default_factory=dict)
    """Base module name to the changes of it."""
    replaces: str | None = None
    """Base module whose tensor the adapter's takes the place of."""
    replacement: str | None = None
    """Key of that adapter tensor."""


def pair_linear(
    module: str, parts: Mapping[Part, str], *, tensors: Shapes, config: AdapterConfig, weights: Mapping[str, Weight]
) -> Pairing | None:
    """Pair a 2-D LoRA module with the 2-D weight of the same name, or return None where there is no such weight.

    Raises:
        MergeError: Shapes do not agree.
    """
    target = find_name(module, weights)
    if target is None or len(weights[target].shape) != 2:
        return None
    A, B = tensors[parts["A"]].shape, tensors[parts["B"]].shape
    rank = checked_rank(module, config, A, B)
    if (B[0], A[1]) != weights[target].shape:
        raise shape_error(module, A, B, weights[target])
    scaling = config.scaling_of(module)
    delta = Delta(module, parts["A"], parts["B"], scaling, magnitude=parts.get("magnitude"))
    return Pairing(module, "linear", rank, scaling, {target: (delta,)})


def pair_embedding(
    module: str, parts: Mapping[Part, str], *, tensors: Shapes, config: AdapterConfig, weights: Mapping[str, Weight]
) -> Pairing:
    """Pair lora_embedding_A [R, vocabulary] and lora_embedding_B [hidden, R] with an embedding [vocabulary, hidden].

    Raises:
        MergeError: No such embedding, or shapes do not agree.
    """
    target = find_name(module, weights)
    if target is None:
        raise no_target(module)
    A, B = tensors[parts["embedding_A"]].shape, tensors[parts["embedding_B"]].shape
    rank = checked_rank(module, config, A, B)
    if (A[1], B[0]) != weights[target].shape:
        raise shape_error(module, A, B, weights[target])
    scaling = config.scaling_of(module)
    delta = Delta(module, parts["embedding_A"], parts["embedding_B"], scaling, swapped=True)
    return Pairing(module, "embedding", rank, scaling, {target: (delta,)})


def pair_replacement(name: str, key: str, *, tensors: Shapes, weights: Mapping[str, Weight]) -> Pairing:
    """Pair a tensor that was trained whole (modules_to_save, biases) with the one it replaces.

    Raises:
        MergeError: The base has no such tensor, or one of another shape.
    """
    target = find_name(name.removesuffix(".weight"), weights)
    if target is None:
        raise MergeError(f"adapter tensor {key} is no LoRA tensor, and the base has no {name} that it could replace")
    if tensors[key].shape != weights[target].shape:
        raise MergeError(
            f"adapter tensor {key} has shape {list(tensors[key].shape)}, the base's {weights[target].name} has "
            f"{list(weights[target].shape)}; resize the base to what the adapter was trained on first"
        )
    return Pairing(name, "replacement", 0, 0.0, replaces=target, replacement=key)


def checked_rank(module: str, config: AdapterConfig, A: tuple[int, ...], B: tuple[int, ...]) -> int:
    """Return a module's rank, which the config and both 2-D factors agree on.

    Raises:
        MergeError: They do not.
    """
    rank = config.rank_of(module)
    if len(A) != 2 or len(B) != 2 or (A[0], B[1]) != (rank, rank):
        raise MergeError(
            f"adapter of {module}: A is {list(A)} and B is {list(B)}, expected [{rank}, in] and [out, {rank}] "
            "by r and rank_pattern of adapter_config.json"
        )
    return rank


def shape_error(module: str, A: tuple[int, ...], B: tuple[int, ...], weight: Weight) -> MergeError:
    """Return the error for factors that do not fit a weight."""
    return MergeError(
        f"adapter of {module}: A {list(A)} and B {list(B)} do not fit {weight.name} of shape {list(weight.shape)}; "
        "this is another base than the one it was trained on"
    )


def no_target(module: str) -> MergeError:
    """Return the error for an adapter module that the base does not have."""
    return MergeError(
        f"the base has no weight for adapter module {module}; check that --base is what it was trained on"
    )
