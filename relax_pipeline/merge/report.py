"""MERGE.json: what was merged into what, by content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.base import read_json
from relax_pipeline.merge.execute import ShardRecord
from relax_pipeline.merge.files import REPORT_FILE, unmerged_weight_files
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.storage.files import write_atomic


@dataclass(frozen=True)
class Identity:
    """What is merged into what, by content."""

    base_digest: str
    base_check: Literal["matched", "not recorded", "other base allowed"]
    adapter_digest: str


@dataclass(frozen=True)
class MergeReport:
    """The record of one finished merge."""

    base: str
    """Folder name only: the file travels with the model."""
    base_digest: str
    base_check: str
    """matched, not recorded, or other base allowed."""
    quantization: str
    """none, kept, or dequantised to bfloat16."""
    adapter_digest: str
    adapter_base_digest: str | None
    merged_adapters: tuple[str, ...]
    """Digests of all adapters in these weights, oldest first."""
    counts: Mapping[str, int]
    not_moved: Mapping[str, float]
    """Module kind to the share of targeted entries that rounding left as they were."""
    unchanged: tuple[str, ...]
    """Targeted tensors whose delta is all zero."""
    logits: Mapping[str, float] | None
    """Mean absolute logprob differences in nats; None where they were not asked for."""
    unmerged_weight_files: tuple[str, ...]
    """Weight files that were copied without the adapter."""
    files: Mapping[str, Mapping[str, Any]]
    """Weight file to its bytes and sha256."""
    versions: Mapping[str, str]
    seconds: float | None = field(default=None, compare=False)
    """None in a report that was read back."""


def write_report(report: MergeReport, folder: Path) -> None:
    """Write MERGE.json into a folder, without its time: the same merge, done again anywhere, is the same bytes."""
    lasting = {name: value for name, value in asdict(report).items() if name != "seconds"}
    write_atomic(folder / REPORT_FILE, json.dumps(lasting, indent=2) + "\n")


def read_report(folder: Path) -> MergeReport | None:
    """Return the report in a merged folder, or None where there is none."""
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    try:
        raw = read_json(file, MergeError)
        lists = {name: tuple(raw[name]) for name in ("merged_adapters", "unchanged", "unmerged_weight_files")}
        return MergeReport(**(raw | lists))
    except (TypeError, KeyError) as error:
        raise MergeError(f"{file} is of another version of this software or another tool: {error}") from error


def make_report(
    plan: MergePlan,
    identity: Identity,
    records: Sequence[ShardRecord],
    *,
    unchanged: tuple[str, ...],
    files_copied: int,
    rows_verified: int,
    logits: Mapping[str, float] | None,
    seconds: float,
) -> MergeReport:
    """Return the report of a merge from what its steps returned."""
    earlier = read_report(plan.base.folder)
    return MergeReport(
        base=plan.base.folder.resolve().name,
        base_digest=identity.base_digest,
        base_check=identity.base_check,
        quantization=plan.quantization,
        adapter_digest=identity.adapter_digest,
        adapter_base_digest=plan.adapter.base_digest,
        merged_adapters=(*(earlier.merged_adapters if earlier else ()), identity.adapter_digest),
        counts=_counts(plan, rows_verified=rows_verified, files_copied=files_copied),
        not_moved=not_moved_by_kind(records),
        unchanged=unchanged,
        logits=logits,
        unmerged_weight_files=unmerged_weight_files(plan.base),
        files={record.file: {"bytes": record.num_bytes, "sha256": record.sha256} for record in records},
        versions={package: version(package) for package in ("relax-pipeline", "torch", "safetensors")},
        seconds=round(seconds, 3),
    )


def _counts(plan: MergePlan, *, rows_verified: int, files_copied: int) -> dict[str, int]:
    changed = len(plan.targeted)
    return {
        "adapter_tensors": len(plan.adapter.tensors),
        "adapter_modules": len(plan.pairings),
        "tensors_changed": changed,
        "tensors_copied": sum(len(shard.outputs) for shard in plan.shards) - changed,
        "shards": len(plan.shards),
        "files_copied": files_copied,
        "rows_verified": rows_verified,
    }


def not_moved_by_kind(records: Iterable[ShardRecord]) -> dict[str, float]:
    """Return module kind (q_proj, experts.down_proj …) to the share of its entries that did not move."""
    totals: dict[str, tuple[int, int]] = {}
    for record in records:
        for name, (entries, moved) in record.moved.items():
            kind = module_kind(name)
            before = totals.get(kind, (0, 0))
            totals[kind] = before[0] + entries, before[1] + moved
    return {kind: 1 - moved / entries for kind, (entries, moved) in sorted(totals.items())}


def module_kind(name: str) -> str:
    """Return the leaf name of a tensor, with `experts.` before it where it belongs to one."""
    parts = name.removesuffix(".weight").split(".")
    return f"experts.{parts[-1]}" if "experts" in parts[:-1] else parts[-1]
