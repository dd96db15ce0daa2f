"""Which weights of the base each module of the adapter changes, decided from names, shapes and configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.adapter import AdapterFiles
from relax_pipeline.merge.base import Base
from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.keys import Part
from relax_pipeline.merge.names import find_name
from relax_pipeline.merge.weights import Weight

Parts = Mapping[Part, str]


@dataclass(frozen=True)
class Sides:
    """What is paired with what."""

    base: Base
    weights: Mapping[str, Weight]
    """By module name."""
    adapter: AdapterFiles

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of one adapter tensor."""
        return self.adapter.tensors.infos[key].shape


@dataclass(frozen=True)
class Pairing:
    """One adapter module and what it changes."""

    module: str
    kind: str
    """linear, fused, experts, embedding or replacement."""
    rank: int = 0
    scaling: float = 0.0
    deltas: Mapping[str, tuple[Delta, ...]] = field(default_factory=dict)
    """Base module name to the changes of it."""
    replaces: str = ""
    """Base module whose tensor the adapter's takes the place of."""
    replacement: str = ""
    """Key of that adapter tensor."""
    base_copy: str = ""
    """Key of an adapter tensor that repeats the base's, as peft saves beside an adapted embedding."""

    @property
    def keys(self) -> set[str]:
        """All adapter tensors that this uses."""
        used = {self.replacement, self.base_copy}
        for deltas in self.deltas.values():
            for delta in deltas:
                used |= {delta.a_key, delta.b_key, delta.magnitude or ""}
        return used - {""}


def pair_linear(module: str, parts: Parts, sides: Sides) -> Pairing | None:
    """Pair a 2-D LoRA module with the 2-D weight of the same name, or return None where there is no such weight.

    Raises:
        MergeError: Shapes do not agree.
    """
    target = find_name(module, sides.weights)
    if target is None or len(sides.weights[target].shape) == 3:
        return None
    A, B = sides.shape(parts["A"]), sides.shape(parts["B"])
    rank = checked_rank(module, sides, A, B)
    if (B[0], A[1]) != sides.weights[target].shape:
        raise shape_error(module, A, B, sides.weights[target])
    scaling = sides.adapter.config.scaling_of(module)
    delta = Delta(module, parts["A"], parts["B"], scaling, magnitude=_magnitude(module, parts, sides, B[0]))
    copy = _base_copy(parts, sides, sides.weights[target])
    return Pairing(module, "linear", rank, scaling, {target: (delta,)}, base_copy=copy)


def pair_embedding(module: str, parts: Parts, sides: Sides) -> Pairing:
    """Pair lora_embedding_A [R, vocabulary] and lora_embedding_B [hidden, R] with an embedding [vocabulary, hidden].

    Raises:
        MergeError: No such embedding, or shapes do not agree.
    """
    target = find_name(module, sides.weights)
    if target is None:
        raise no_target(module)
    if "magnitude" in parts:
        raise MergeError(f"{parts['magnitude']}: DoRA on an embedding cannot be merged; train it with plain LoRA")
    A, B = sides.shape(parts["embedding_A"]), sides.shape(parts["embedding_B"])
    rank = checked_rank(module, sides, A, B)
    if (A[1], B[0]) != sides.weights[target].shape:
        raise shape_error(module, A, B, sides.weights[target])
    scaling = sides.adapter.config.scaling_of(module)
    delta = Delta(module, parts["embedding_A"], parts["embedding_B"], scaling, swapped=True)
    copy = _base_copy(parts, sides, sides.weights[target])
    return Pairing(module, "embedding", rank, scaling, {target: (delta,)}, base_copy=copy)


def pair_replacement(name: str, key: str, sides: Sides) -> Pairing:
    """Pair a tensor that was trained whole (modules_to_save, biases) with the one it replaces.

    Raises:
        MergeError: The base has no such tensor, or one of another shape.
    """
    target = find_name(name.removesuffix(".weight"), sides.weights)
    if target is None:
        raise MergeError(f"adapter tensor {key} is no LoRA tensor, and the base has no {name} that it could replace")
    _check_same_shape(key, sides, sides.weights[target])
    return Pairing(name, "replacement", replaces=target, replacement=key)


def checked_rank(module: str, sides: Sides, A: tuple[int, ...], B: tuple[int, ...]) -> int:
    """Return a module's rank, which the config and both 2-D factors agree on.

    Raises:
        MergeError: They do not.
    """
    rank = sides.adapter.config.rank_of(module)
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


def refuse_dora(module: str, parts: Parts) -> None:
    """Fail on a magnitude vector where only plain LoRA can be folded.

    Raises:
        MergeError: With the key.
    """
    if "magnitude" in parts:
        raise MergeError(
            f"{parts['magnitude']}: DoRA of {module} cannot be split over the base's weights; use plain LoRA"
        )


def _magnitude(module: str, parts: Parts, sides: Sides, out_features: int) -> str | None:
    key = parts.get("magnitude")
    if sides.adapter.config.use_dora and key is None:
        raise MergeError(f"adapter_config.json says use_dora, and {module} has no lora_magnitude_vector")
    if key is not None and sides.shape(key) != (out_features,):
        raise MergeError(f"{key} has shape {list(sides.shape(key))}, expected [{out_features}]: one norm an output row")
    return key


def _base_copy(parts: Parts, sides: Sides, weight: Weight) -> str:
    key = parts.get("base_copy", "")
    if key:
        _check_same_shape(key, sides, weight)
    return key


def _check_same_shape(key: str, sides: Sides, weight: Weight) -> None:
    if sides.shape(key) != weight.shape:
        raise MergeError(
            f"adapter tensor {key} has shape {list(sides.shape(key))}, the base's {weight.name} has "
            f"{list(weight.shape)}; resize the base to what the adapter was trained on first"
        )
