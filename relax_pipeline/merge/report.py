"""MERGE.json: what was merged into what, by content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from relax_pipeline.merge.execute import ShardRecord
from relax_pipeline.merge.files import REPORT_FILE
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.storage.files import write_atomic


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
    seconds: float


def write_report(report: MergeReport, folder: Path) -> None:
    """Write MERGE.json into a folder."""
    write_atomic(folder / REPORT_FILE, json.dumps(asdict(report), indent=2) + "\n")


def read_report(folder: Path) -> MergeReport | None:
    """Return the report in a merged folder, or None where there is none."""
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    raw = json.loads(file.read_text())
    for name in ("merged_adapters", "unchanged", "unmerged_weight_files"):
        raw[name] = tuple(raw[name])
    return MergeReport(**raw)


def merge_counts(plan: MergePlan, *, verified_rows: int, files_copied: int) -> dict[str, int]:
    """Return the counts that a report shows."""
    changed = len(plan.targeted)
    return {
        "adapter_tensors": len(plan.adapter.tensors),
        "adapter_modules": len(plan.pairings),
        "tensors_changed": changed,
        "tensors_copied": sum(len(shard.outputs) for shard in plan.shards) - changed,
        "shards": len(plan.shards),
        "files_copied": files_copied,
        "rows_verified": verified_rows,
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


def software_versions() -> dict[str, str]:
    """Return the versions of what computed a merge."""
    return {package: version(package) for package in ("relax-pipeline", "torch", "safetensors")}
