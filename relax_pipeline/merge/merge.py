"""Merge an adapter into its base: plan, validate, execute, verify, and only then a folder of the final name."""

from __future__ import annotations

import time
from pathlib import Path

from relax_pipeline.errors import MergeError
from relax_pipeline.lora.adapter import tensors_digest
from relax_pipeline.merge.execute import Progress, write_shards
from relax_pipeline.merge.files import copy_other_files, unmerged_weight_files
from relax_pipeline.merge.plan import MergePlan, plan_merge
from relax_pipeline.merge.report import (
    MergeReport,
    merge_counts,
    not_moved_by_kind,
    read_report,
    software_versions,
    write_report,
)
from relax_pipeline.merge.validate import check_adapter_values, check_base, unchanged_tensors
from relax_pipeline.merge.verify import verify_merge
from relax_pipeline.merge.workspace import Workspace, check_disk_space, open_workspace
from relax_pipeline.safetensors_io.identity import model_digest


def merge_adapter(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    allow_other_base: bool = False,
    keep_quantization: bool = False,
    check_logits: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge an adapter into its base and write a standalone Hugging Face checkpoint with a MERGE.json.

    The work is done in a hidden folder beside `output`, which appears in one rename when everything is verified.
    Called again after an interruption, it keeps the shards that are whole; called again after success, it returns
    the report that is there.

    Args:
        base: Hugging Face checkpoint folder.
        adapter: PEFT LoRA folder, or a checkpoint folder with one in `adapter/`.
        output: Folder to create; it may exist if it is empty.
        allow_other_base: Merge although the adapter records another base; the report says so.
        keep_quantization: Quantise changed weights again; otherwise a quantised base becomes bfloat16.
        check_logits: Also run the merged model and base + adapter on the same tokens; needs the memory of one of them
            in float32.
        progress: Called with (bytes written, bytes in all).

    Raises:
        ModelError: The base is incomplete or damaged.
        AdapterError: The adapter is incomplete or of a kind that cannot be merged.
        MergeError: The two do not fit, the result would be wrong, or there is no room for it.
    """
    started = time.monotonic()
    plan = plan_merge(base, adapter, keep_quantization=keep_quantization)
    check_adapter_values(plan)
    base_digest, adapter_digest = model_digest(base), tensors_digest(plan.adapter.tensors)
    base_check = check_base(plan, base_digest, adapter_digest, allow_other_base=allow_other_base)
    done = read_report(output)
    if done and (done.base_digest, done.adapter_digest, done.quantization) == (
        base_digest,
        adapter_digest,
        plan.quantization,
    ):
        return done
    _check_output(output, base)
    with open_workspace(output, fingerprint=f"{base_digest} {adapter_digest} {keep_quantization}") as workspace:
        check_disk_space(workspace, plan.num_bytes)
        records = write_shards(plan, workspace.folder, workspace.records, progress=progress)
        unchanged = unchanged_tensors(plan, records)
        files_copied = copy_other_files(plan.base, workspace.folder, plan.rewritten)
        rows = verify_merge(plan, workspace.folder)
        logits = _compare_logits(plan, workspace) if check_logits else None
        earlier = read_report(base)
        report = MergeReport(
            base=base.resolve().name,
            base_digest=base_digest,
            base_check=base_check,
            quantization=plan.quantization,
            adapter_digest=adapter_digest,
            adapter_base_digest=plan.adapter.base_digest,
            merged_adapters=(*(earlier.merged_adapters if earlier else ()), adapter_digest),
            counts=merge_counts(plan, verified_rows=rows, files_copied=files_copied),
            not_moved=not_moved_by_kind(records),
            unchanged=unchanged,
            logits=logits,
            unmerged_weight_files=unmerged_weight_files(plan.base),
            files={record.file: {"bytes": record.num_bytes, "sha256": record.sha256} for record in records},
            versions=software_versions(),
            seconds=round(time.monotonic() - started, 3),
        )
        write_report(report, workspace.folder)
        workspace.commit()
    return report


def _check_output(output: Path, base: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise MergeError(f"{output} exists and is not empty; choose another --output or remove it")
    if output.resolve().is_relative_to(base.resolve()):
        raise MergeError(f"{output} lies inside the base {base}; choose an --output beside it")


def _compare_logits(plan: MergePlan, workspace: Workspace) -> dict[str, float]:
    from relax_pipeline.merge.logits import compare_logits  # noqa: PLC0415 - loads transformers and peft

    return compare_logits(plan.base.folder, plan.adapter.folder, workspace.folder)
