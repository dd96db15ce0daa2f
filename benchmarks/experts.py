"""A layer of experts in the Megatron trainer, forward and backward: one product for all beside one an expert.

    python benchmarks/experts.py --results benchmarks/results
    python benchmarks/experts.py --cpu    # small, to see that it works

In the sizes of 30B-A3B on two ranks: of 22,000 tokens that go to 8 of 128 experts each, half go to this rank's 64;
adapters of rank 32, bfloat16. Before: a product for each expert's frozen weight, adapters as Megatron-Bridge computes
them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

EXPERTS, TOKENS, SIZES, RANK = 64, 22_000 * 8 // 2, {"first": (2048, 1536), "second": (768, 2048)}, 32
REPEATS = 10
Pass = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON of all figures goes into this folder")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        rows = [row for name in SIZES for row in compare(name, options.cpu)]
        dist.destroy_process_group()
    machine = "CPU" if options.cpu else torch.cuda.get_device_name()
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        facts = {"machine": machine, "torch": torch.__version__, "rows": rows}
        (options.results / "experts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print("\n".join(table(rows)))


def compare(name: str, cpu: bool) -> list[dict[str, Any]]:
    """Return the rows of one of an expert's two linear layers."""
    from relax_pipeline.trainer.megatron.grouped import adapter_forward, grouped_linear  # noqa: PLC0415 - 10 s

    tokens, device = (64, "cpu") if cpu else (TOKENS, "cuda")
    read, written = SIZES[name]
    drawn = torch.bincount(torch.randint(EXPERTS, (tokens,), generator=torch.Generator().manual_seed(0)))
    sizes = functional.pad(drawn, (0, EXPERTS - len(drawn))).tolist()
    weight_EOI = torch.randn(EXPERTS, written, read, dtype=torch.bfloat16, device=device) / read**0.5
    adapter = make_adapter(read, written, device)

    def one_by_one(x_NI: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(x_NI, sizes), weight_EOI.unbind(), strict=True)
        return torch.cat([functional.linear(part, weight_OI) for part, weight_OI in parts])

    x_NI = torch.randn(tokens, read, dtype=torch.bfloat16, device=device, requires_grad=True)
    pairs: dict[str, tuple[Pass, Pass]] = {
        "weights": (one_by_one, lambda x: grouped_linear(x, weight_EOI, sizes)),
        "adapters": (lambda x: adapter(x, sizes), lambda x: adapter_forward(adapter, x, sizes)),
    }
    rows = []
    for what, (before, after) in pairs.items():
        trained = [x_NI, *(adapter.parameters() if what == "adapters" else ())]
        difference = largest_difference(results(before, x_NI, trained), results(after, x_NI, trained))
        figures = {"before": measure(before, x_NI), "after": measure(after, x_NI)}
        rows.append({"name": f"{what} of the {name} layer", "difference": difference, **figures})
    return rows


def results(run: Pass, x_NI: torch.Tensor, trained: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and all gradients."""
    output = run(x_NI)
    return [output.detach(), *torch.autograd.grad(output, trained, torch.ones_like(output))]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest one of any tensor, as a share of its largest value."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((one.float() - other.float()).abs().max() / other.float().abs().max()) for one, other in pairs)


def make_adapter(read: int, written: int, device: str) -> Any:
    from megatron.bridge.peft.utils import GroupedExpertLinearAdapter  # noqa: PLC0415
    from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: PLC0415

    alone: Any = SimpleNamespace(**dict.fromkeys(("tp", "ep", "expt_tp", "expt_dp"), dist.group.WORLD))
    return GroupedExpertLinearAdapter(
        read,
        written,
        RANK,
        num_local_experts=EXPERTS,
        base_linear_name="linear",
        activation="identity",
        row_init_method="normal",
        model_parallel_config=ModelParallelConfig(params_dtype=torch.bfloat16, use_cpu_initialization=True),
        alpha=RANK,
        pg_collection=alone,
    ).to(device)


def measure(run: Pass, x_NI: torch.Tensor) -> dict[str, float]:
    """Return milliseconds of a pass there and back, and what it needs beyond its input at its peak."""

    def there_and_back() -> None:
        output = run(x_NI)
        output.backward(torch.ones_like(output))
        x_NI.grad = None

    there_and_back()
    before, cuda = 0, x_NI.is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        there_and_back()
    if cuda:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - begun) / REPEATS * 1e3
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return {"milliseconds": milliseconds, "peak_gib": peak / 2**30}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | before, ms | after, ms | ratio | peak before, GiB | after | results differ by |", "|---" * 7 + "|"]
    for row in rows:
        before, after = row["before"], row["after"]
        ratio = before["milliseconds"] / after["milliseconds"]
        times = f"{before['milliseconds']:.2f} | {after['milliseconds']:.2f} | {ratio:.1f}"
        memory = f"{before['peak_gib']:.2f} | {after['peak_gib']:.2f}"
        lines.append(f"| {row['name']} | {times} | {memory} | {row['difference']:.1e} |")
    return lines


if __name__ == "__main__":
    main()
