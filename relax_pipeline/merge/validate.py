"""Checks that need more than headers, made before the first byte is written and after the last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.lora.adapter import tensors_digest
from relax_pipeline.merge.deltas import load_factors
from relax_pipeline.merge.execute import ShardRecord
from relax_pipeline.merge.outputs import Output, check_finite
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.merge.pool import worker_pool
from relax_pipeline.merge.report import Identity, read_report
from relax_pipeline.safetensors_io.identity import model_digest
from relax_pipeline.safetensors_io.read import read_tensor


def check_adapter_values(plan: MergePlan) -> None:
    """Fail where the adapter holds NaN or infinity, or repeats a base tensor otherwise than the base has it.

    Raises:
        MergeError: With the tensor's name.
    """
    tensors = plan.adapter.tensors
    with worker_pool() as pool:
        list(pool.map(lambda name: check_finite(tensors[name], name), tensors))
    for pairing in plan.pairings:
        for target in pairing.deltas if pairing.base_copy else ():
            weight, copy = plan.weights[target], plan.adapter.tensors[pairing.base_copy]
            base = read_tensor(weight.tensor)
            if weight.scheme is not None or not torch.equal(base, copy.to(base.dtype)):
                raise MergeError(
                    f"{pairing.base_copy} is not what the base has in {weight.name}: the adapter was "
                    "trained on a base with another embedding; merge into that one"
                )


def identify(plan: MergePlan, *, allow_other_base: bool) -> Identity:
    """Digest base and adapter; fail where the base is not the adapter's, or already contains it.

    Raises:
        MergeError: With both digests, or with the name of the folder that is merged already.
    """
    adapter_digest = tensors_digest(plan.adapter.tensors)
    merged = read_report(plan.base.folder)
    if merged and adapter_digest in merged.merged_adapters:
        raise MergeError(
            f"{plan.base.folder} already contains this adapter ({adapter_digest[:12]}); merge the original base"
        )
    base_digest, recorded = model_digest(plan.base.folder), plan.adapter.base_digest
    if recorded is None:
        return Identity(base_digest, "not recorded", adapter_digest)
    if recorded == base_digest:
        return Identity(base_digest, "matched", adapter_digest)
    if allow_other_base:
        return Identity(base_digest, "other base allowed", adapter_digest)
    raise MergeError(
        f"the adapter was trained on base {recorded[:12]}, {plan.base.folder} is {base_digest[:12]}; give its own base "
        "or allow another with --allow-other-base"
    )


def unchanged_tensors(plan: MergePlan, records: Sequence[ShardRecord]) -> tuple[str, ...]:
    """Return the targeted tensors that did not change because their delta is zero.

    Raises:
        MergeError: A tensor did not change although its delta is not zero: rounding took all of it.
    """
    moved = {name: count for record in records for name, (_, count) in record.moved.items()}
    unchanged = [output for output in plan.targeted if moved[output.info.name] == 0]
    swallowed = [output.info.name for output in unchanged if _has_delta(output, plan)]
    if swallowed:
        raise MergeError(
            f"{len(swallowed)} targeted tensors did not change, the first are {swallowed[:5]}: the deltas are "
            "smaller than a rounding step; train longer, serve it as an adapter, or merge without --keep-quantization"
        )
    return tuple(output.info.name for output in unchanged)


def _has_delta(output: Output, plan: MergePlan) -> bool:
    for matrix in range(output.source.matrices[0] if output.deltas else 0):
        for delta in output.deltas:
            factors = load_factors(delta, plan.adapter.tensors, matrix)
            if factors and factors.left.any() and factors.right.any():
                return True
    return False
