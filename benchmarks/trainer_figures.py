"""What is measured of a Megatron trainer, and the figures as a table."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import TrainingSample

REPEATS = 3
CHECKED_SAMPLES = 8
"""Whose logprobs are compared with those of transformers."""


def measure(trainer: Trainer, scratch: Path, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    tokens = sum(sample.num_tokens for sample in samples)
    logprobs = trainer.logprobs(samples[:CHECKED_SAMPLES], temperature=1.0)

    def step() -> dict[str, float]:
        return trainer.forward_backward(samples, temperature=1.0) | trainer.optim_step()

    first = step()
    reset_peak()
    train_s = median_seconds(step)
    peak = peak_gib()
    score_s = median_seconds(lambda: trainer.logprobs(samples, temperature=1.0))
    checkpoint = scratch / "checkpoint"
    save_s = median_seconds(lambda: trainer.save(checkpoint))
    load_s = median_seconds(lambda: trainer.load(checkpoint))
    return {
        "logprobs": logprobs,
        "tokens": tokens,
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "train_tokens_per_s": tokens / train_s,
        "logprob_tokens_per_s": tokens / score_s,
        "peak_gib": peak,
        "export_adapter_s": seconds(trainer.export_adapter),  # once: a second time it comes from memory
        "adapter_bytes": trainer.export_adapter().info.num_bytes,
        "export_merged_s": median_seconds(lambda: merge(trainer)),
        "save_s": save_s,
        "load_s": load_s,
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
        "release_s": seconds(trainer.release_memory),
        "released_gib": torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def resume(trainer: Trainer, folder: Path, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Take one step from the state in the folder, which is saved by the first who comes; return how it differs."""
    folder.mkdir(parents=True, exist_ok=True)
    state, expected = folder / "state", folder / "next_step.json"
    saved = expected.is_file()
    if saved:
        trainer.load(state)
    else:
        trainer.save(state)
    step = trainer.forward_backward(samples, temperature=1.0) | trainer.optim_step()
    if not saved:
        expected.write_text(json.dumps(step))  # every rank writes the same
        return {"saved_loss": step["loss"]}
    theirs = json.loads(expected.read_text())
    return {f"resumed_{key}_difference": abs(step[key] / theirs[key] - 1) for key in ("loss", "grad_norm")}


def merge(trainer: Trainer) -> None:
    for names in trainer.bucket_names(512 << 20):
        trainer.export_weights(names)


def median_seconds(work: Callable[[], object]) -> float:
    return statistics.median(seconds(work) for _ in range(REPEATS))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Of the GPU, or of this process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def table(name: str, figures: dict[str, Any]) -> list[str]:
    rows = [
        ("forward + backward + step, tokens/s", f"{figures['train_tokens_per_s']:,.0f}"),
        ("logprobs, tokens/s", f"{figures['logprob_tokens_per_s']:,.0f}"),
        ("peak memory of rank 0, GiB", f"{figures['peak_gib']:.2f}"),
        ("import / build, s", f"{figures['import_s']:.1f} / {figures['build_s']:.1f}"),
        ("export adapter, s (MiB)", f"{figures['export_adapter_s']:.3f} ({figures['adapter_bytes'] / 2**20:.1f})"),
        ("export merged, s", f"{figures['export_merged_s']:.2f}"),
        ("save / load, s (MiB)",
         f"{figures['save_s']:.2f} / {figures['load_s']:.2f} ({figures['checkpoint_bytes'] / 2**20:.0f})"),
        ("give memory back, s (GiB kept)", f"{figures['release_s']:.3f} ({figures['released_gib']:.2f})"),
        ("first step's loss / gradient norm", f"{figures['loss']:.6f} / {figures['grad_norm']:.5g}"),
        ("logprob difference to transformers, mean / max",
         f"{figures['logprob_diff_mean']:.2e} / {figures['logprob_diff_max']:.2e}"),
    ]  # fmt: skip
    if "resumed_loss_difference" in figures:
        differences = f"{figures['resumed_loss_difference']:.2e} / {figures['resumed_grad_norm_difference']:.2e}"
        rows.append(("after resuming another layout's state: loss / gradient norm differ by", differences))
    return [f"| {name} | value |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
