"""The trainers' fused arithmetic on a GPU beside the same functions as they stand, in the sizes of a 4 B model.

    python benchmarks/fused.py --results benchmarks/results

A micro-batch of 16,384 tokens, 13,000 of them of completions, bfloat16. Each is called with three lengths first, which
must take one compilation, then timed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from relax_pipeline.rl import logprobs
from relax_pipeline.trainer.megatron import rotary, swiglu

TOKENS, ANSWERS, VOCABULARY = 16384, 13000, 151936
WIDE, HEADS, HEAD_SIZE = 9728, (32, 8), 128
LENGTHS = (TOKENS, TOKENS - 1000, TOKENS - 2001)
REPEATS = 20
Tensors = tuple[torch.Tensor, ...]
Case = tuple[str, Callable[..., Any], Callable[[int], Tensors], int]
"""A name, a fused function, its arguments for a number of tokens, and the bytes that it has to move."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON of all figures goes into this folder")
    options = parser.parse_args()
    with torch.no_grad():
        rows = [compare(*case) for case in (*swiglu_cases(), *rotary_cases(), *logprob_cases())]
    facts = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "fused.json").write_text(json.dumps(facts, indent=2) + "\n")
    print("\n".join(table(rows)))


def swiglu_cases() -> Iterator[Case]:
    yield "SwiGLU, forward", swiglu.activate, lambda n: (randn(n, 2 * WIDE),), TOKENS * 3 * WIDE * 2
    yield (
        "SwiGLU, backward",
        swiglu.pull_back,
        lambda n: (randn(n, 2 * WIDE), randn(n, WIDE)),
        TOKENS * 5 * WIDE * 2,
    )


def rotary_cases() -> Iterator[Case]:
    for heads in HEADS:

        def arguments(n: int, heads: int = heads) -> Tensors:
            angles = torch.rand(n, 1, HEAD_SIZE // 2, device="cuda") * 6
            return randn(n, heads, HEAD_SIZE), angles.cos(), angles.sin()

        yield f"rotary, {heads} heads", rotary.rotate, arguments, TOKENS * (heads * HEAD_SIZE * 4 + HEAD_SIZE * 4)


def logprob_cases() -> Iterator[Case]:
    logits = torch.randn(TOKENS, VOCABULARY, dtype=torch.bfloat16, device="cuda")
    places, one = torch.randperm(TOKENS, device="cuda"), torch.ones((), device="cuda")

    def rows(n: int) -> torch.Tensor:
        return places[places < n][: ANSWERS - (TOKENS - n)]

    def backward(n: int) -> Tensors:
        factors = torch.full((len(rows(n)), 1), 12.0, device="cuda")
        return torch.empty_like(logits[:n]), logits[:n], rows(n), one, factors, factors / 12, torch.zeros_like(factors)

    yield "logprobs and entropy", logprobs.sums, lambda n: (logits[:n], rows(n), one), ANSWERS * VOCABULARY * 2
    yield "gradient of logits", logprobs.write_gradients, backward, 2 * ANSWERS * VOCABULARY * 2


def compare(name: str, function: Callable[..., Any], arguments: Callable[[int], Tensors], num_bytes: int) -> Any:
    counters.clear()
    begun = time.perf_counter()
    for length in LENGTHS:
        function(*arguments(length))
    torch.cuda.synchronize()
    first, tensors = time.perf_counter() - begun, arguments(TOKENS)
    plain, fused = milliseconds(inspect.unwrap(function), tensors), milliseconds(function, tensors)
    return {
        "name": name,
        "plain_ms": plain,
        "fused_ms": fused,
        "gigabytes_per_second": num_bytes / fused / 1e6,
        "compilations": counters["stats"]["unique_graphs"],
        "first_three_lengths_seconds": first,
    }


def milliseconds(function: Callable[..., Any], arguments: Tensors) -> float:
    for _ in range(2):
        function(*arguments)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        function(*arguments)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return (time.perf_counter() - begun) / REPEATS * 1e3


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | plain, ms | fused, ms | ratio | GB/s | compilations |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratio = f"{row['plain_ms'] / row['fused_ms']:.1f}"
        cells = row["name"], f"{row['plain_ms']:.3f}", f"{row['fused_ms']:.3f}", ratio
        lines.append(
            f"| {' | '.join(cells)} | {row['gigabytes_per_second']:,.0f} | {row['compilations']} |",
        )
    return lines


if __name__ == "__main__":
    main()
