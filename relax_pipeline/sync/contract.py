"""Before the first weights are sent: what trainer wraps, exporter names, and engines can host must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax_pipeline.errors import SyncError
from relax_pipeline.lora.packed import leaves
from relax_pipeline.rollout.base import EngineInfo


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of module."""

    leaf: str
    trained: int
    """Modules of this kind that the trainer wraps."""
    exported: int
    """Of those, how many the exporter names."""
    hosted: bool
    """Whether every engine can host them."""


def check_contract(trained: Sequence[str], exported: Sequence[str], engines: Iterable[EngineInfo]) -> list[Row]:
    """Compare the three sides of an adapter's way, kind by kind.

    Args:
        trained: Full HF names of the modules that the trainer wraps.
        exported: Those of the first adapter that is to be sent.
        engines: All that are to get it.

    Returns:
        One row a kind of module, for people to read.

    Raises:
        SyncError: They disagree; lists every gap.
    """
    engines = list(engines)
    rows = _rows(trained, exported, engines)
    gaps = [f"{name} is trained and not exported" for name in _some(set(trained) - set(exported))]
    gaps += [f"{name} is exported and not trained" for name in _some(set(exported) - set(trained))]
    for engine in engines:
        gaps += [f"{engine.engine_id} {reason}" for reason in _refusals(engine, exported)]
    if gaps:
        raise SyncError("adapters would not reach the engines whole:\n" + table(rows) + "\n- " + "\n- ".join(gaps))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text in columns."""
    lines = [f"{'module':<20} {'trained':>8} {'exported':>9}  hosted"]
    lines += [f"{r.leaf:<20} {r.trained:>8} {r.exported:>9}  {'yes' if r.hosted else 'NO'}" for r in rows]
    return "\n".join(lines)


def _rows(trained: Iterable[str], exported: Iterable[str], engines: Sequence[EngineInfo]) -> list[Row]:
    wrapped, named = (Counter(leaf for name in names for leaf in leaves(name)) for names in (trained, exported))
    return [
        Row(leaf, wrapped[leaf], named[leaf], all(leaf in engine.leaf_modules for engine in engines))
        for leaf in sorted(wrapped | named)
    ]


def _refusals(engine: EngineInfo, modules: Sequence[str]) -> Iterable[str]:
    """Yield why an engine cannot host the adapter."""
    missing = sorted({leaf for name in modules for leaf in leaves(name)} - set(engine.leaf_modules))
    if missing:
        yield f"has no room for adapters on {', '.join(missing)}; it has for {', '.join(engine.leaf_modules)}"
    if engine.data_parallel_size != 1:
        yield f"has {engine.data_parallel_size} data-parallel replicas, and an adapter reaches one: set it to 1"
    if not engine.expert_adapters and any(".experts." in name for name in modules):
        yield "hosts no adapters on experts; leave linear_fc1 and linear_fc2 out, or set sync.mode to merge"


def _some(names: set[str]) -> list[str]:
    return sorted(names)[:4]
