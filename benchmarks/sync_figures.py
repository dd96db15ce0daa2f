"""What is measured of a trainer and an engine that run: syncs, how far they differ, decoding, sleep."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from relax_pipeline.config import RunConfig
from relax_pipeline.processes import Processes
from relax_pipeline.sync_check import probe_sequences, take_random_step
from relax_pipeline.types import GenerateRequest, SamplingParams, TrainingSample

PHASES = ("export", "transfer", "activate", "verify", "pause")
SYNCS = 4
PROMPT_TOKENS, SEQUENCE_TOKENS, NUM_SEQUENCES = 32, 256, 8


def measure_syncs(config: RunConfig, processes: Processes) -> dict[str, Any]:
    """Return the medians of some syncs, each after an optimizer step, and how the engine compares after them."""
    reports = []
    for _ in range(SYNCS):
        take_random_step(processes.trainer, config)
        begun = time.perf_counter()
        report = processes.sync.sync()
        reports.append(report.seconds | {"all": time.perf_counter() - begun})
    seconds = {phase: statistics.median(r.get(phase, 0.0) for r in reports[1:]) for phase in (*PHASES, "all")}
    difference_mean, difference_max, moved_mean = parity(config, processes)
    return {
        "bytes": report.num_bytes,
        "seconds": seconds,
        "quarantined": report.quarantined,
        "difference_mean": difference_mean,
        "difference_max": difference_max,
        "moved_mean": moved_mean,
    }


def parity(config: RunConfig, processes: Processes) -> tuple[float, float, float]:
    """Return mean and largest |logprob| difference of trainer and engine, and the mean of policy and base."""
    draw = np.random.default_rng(7)
    limit = max(max(sequence) for sequence in probe_sequences(config))
    sequences = draw.integers(0, limit, (NUM_SEQUENCES, SEQUENCE_TOKENS))
    blank = np.zeros(SEQUENCE_TOKENS - 1, dtype=np.float32)
    samples = [TrainingSample(row[:1], row[1:], blank == 0, blank, 0.0, 0) for row in sequences]
    engine = processes.pool.ready()[0].engine
    served = np.stack(engine.logprobs(sequences.tolist(), version=processes.pool.serving_version))
    policy = np.stack(processes.trainer.logprobs(samples, temperature=1.0))
    base = np.stack(processes.trainer.logprobs(samples, temperature=1.0, adapter_enabled=False))
    difference = np.abs(served - policy)
    return float(difference.mean()), float(difference.max()), float(np.abs(policy - base).mean())


def decode_rate(processes: Processes, *, completions: int, tokens: int) -> float | None:
    """Return tokens a second, once warm."""
    if not completions:
        return None
    sampling = SamplingParams(max_new_tokens=tokens)
    prompts = np.random.default_rng(3).integers(0, 500, (completions, PROMPT_TOKENS)).tolist()
    requests = [GenerateRequest(tuple(prompt), place, sampling) for place, prompt in enumerate(prompts)]
    for _ in range(2):
        begun = time.perf_counter()
        decoded = processes.pool.generate(requests, version=None, heal=processes.sync.heal)
        seconds = time.perf_counter() - begun
    return sum(len(completion.token_ids) for completion in decoded) / seconds


def measure_sleep(processes: Processes) -> dict[str, float]:
    """Return the seconds that an engine takes to free its memory and to take it back, and how much it freed."""
    before, begun = torch.cuda.mem_get_info()[0], time.perf_counter()
    with processes.pool.asleep(before_waking=processes.trainer.release_memory):
        sleep = time.perf_counter() - begun
        freed = torch.cuda.mem_get_info()[0] - before
        begun = time.perf_counter()
    return {"sleep_seconds": sleep, "wake_seconds": time.perf_counter() - begun, "freed_bytes": freed}
