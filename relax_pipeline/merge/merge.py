"""Merge an adapter into its base: plan, validate, execute, verify, and only then a folder of the final name."""

from __future__ import annotations

import time
from pathlib import Path

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.execute import Progress, write_shards
from relax_pipeline.merge.files import copy_other_files, other_bytes
from relax_pipeline.merge.plan import MergePlan, plan_merge
from relax_pipeline.merge.report import Identity, MergeReport, make_report, read_report, write_report
from relax_pipeline.merge.validate import check_adapter_values, identify, unchanged_tensors
from relax_pipeline.merge.verify import verify_merge
from relax_pipeline.merge.workspace import Workspace, check_disk_space, open_workspace


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
    identity = identify(plan, allow_other_base=allow_other_base)
    finished = _finished(output, plan, identity)
    if finished is not None:
        return finished
    _check_output(output, base)
    fingerprint = f"{identity.base_digest} {identity.adapter_digest} {plan.quantization}"
    with open_workspace(output, fingerprint=fingerprint) as workspace:
        check_disk_space(workspace, plan.num_bytes + other_bytes(plan.base))
        records = write_shards(plan, workspace.folder, workspace.records, progress=progress)
        report = make_report(
            plan,
            identity,
            records,
            unchanged=unchanged_tensors(plan, records),
            files_copied=copy_other_files(plan.base, workspace.folder, plan.rewritten),
            rows_verified=verify_merge(plan, workspace.folder),
            logits=_compare_logits(plan, workspace) if check_logits else None,
            seconds=time.monotonic() - started,
        )
        write_report(report, workspace.folder)
        workspace.commit()
    return report


def _finished(output: Path, plan: MergePlan, identity: Identity) -> MergeReport | None:
    """Return the report of this very merge where its result is already there, every weight file in its full size."""
    report = read_report(output)
    if report is None or (report.base_digest, report.adapter_digest, report.quantization) != (
        identity.base_digest,
        identity.adapter_digest,
        plan.quantization,
    ):
        return None
    sizes = {name: (output / name).stat().st_size for name in report.files if (output / name).is_file()}
    return report if sizes == {name: file["bytes"] for name, file in report.files.items()} else None


def _check_output(output: Path, base: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise MergeError(f"{output} exists and is not empty; choose another --output or remove it")
    if output.resolve().is_relative_to(base.resolve()):
        raise MergeError(f"{output} lies inside the base {base}; choose an --output beside it")


def _compare_logits(plan: MergePlan, workspace: Workspace) -> dict[str, float]:
    from relax_pipeline.merge.logits import compare_logits  # noqa: PLC0415 - loads transformers and peft

    return compare_logits(plan.base.folder, plan.adapter.folder, workspace.folder)
