"""What a verified sync costs, and what decoding costs afterwards: both modes, over each transport, on random weights.

    python benchmarks/sync.py --shape 0.6B --folder /disk/with/room --results benchmarks/results/sync.json
    python benchmarks/sync.py --shape tiny    # on a CPU, to see that it works

One trainer and one engine in processes of their own, on one GPU that they share (--gpus 2: on one each). Seconds are
medians over the syncs after the first; each follows an optimizer step and ends with the engine verified and serving.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_pipeline.config import RunConfig
from relax_pipeline.processes import Processes, open_processes
from relax_pipeline.sync_check import Mode, for_check, probe_sequences, take_random_step
from relax_pipeline.types import GenerateRequest, SamplingParams, TrainingSample

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
PHASES = ("export", "transfer", "activate", "verify")
SYNCS = 4
PROMPT_TOKENS, SEQUENCE_TOKENS, NUM_SEQUENCES = 32, 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, default=Path("sync-benchmark"), help="model and logs go here")
    parser.add_argument("--results", type=Path, help="JSON of all figures")
    parser.add_argument("--modes", nargs="+", choices=["adapter", "merge"], default=["adapter", "merge"])
    parser.add_argument("--transports", nargs="+", default=["object_store", "ipc", "disk"])
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--completions", type=int, default=256, help="decoded together")
    parser.add_argument("--tokens", type=int, default=256, help="decoded for each")
    parser.add_argument("--trainer", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--engine-args", nargs=argparse.REMAINDER, default=[], help="last: go to SGLang as they are")
    options = parser.parse_args()
    make_model(options.folder / "model", SHAPES[options.shape])
    rows = [
        measure(options, mode, transport, decode=place == 0)
        for mode in options.modes
        for place, transport in enumerate(options.transports)
    ]
    write_results(options, rows)


def make_model(folder: Path, shape: dict[str, int]) -> None:
    """Write a Qwen3 of random bfloat16 weights, unless it is there."""
    if (folder / "config.json").is_file():
        return
    tiny = shape["hidden_size"] < 1024
    config = Qwen3Config(
        **shape,
        vocab_size=512 if tiny else 151936,
        num_key_value_heads=min(8, shape["num_attention_heads"]),
        head_dim=16 if tiny else 128,
        initializer_range=0.15 if tiny else 0.05,  # with the usual 0.02 all tokens are about equally likely
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def run_config(options: argparse.Namespace, mode: Mode, transport: str) -> RunConfig:
    cuda = torch.cuda.is_available()
    engine: dict[str, Any] = {"kind": "sglang", "extra_args": options.engine_args, "memory_fraction": 0.5}
    if not cuda:
        engine |= {"device": "cpu", "max_running_requests": 32}
    values = {
        "run_name": f"{mode}-{transport}",
        "output_dir": str(options.folder / "runs"),
        "steps": 1,
        "model": {"path": str(options.folder / "model"), "dtype": "bfloat16" if cuda else "float32"},
        "lora": {"rank": options.rank, "alpha": options.rank},
        "data": {"train": {"path": "unused"}},
        "trainer": {"kind": options.trainer},
        "engine": engine,
        "sync": {"mode": mode, "transport": transport, "timeout_seconds": 600},
        "cluster": {"colocate": cuda and options.gpus == 1, "num_gpus": options.gpus if cuda else 0},
    }
    return for_check(RunConfig.model_validate(values), mode)


def measure(options: argparse.Namespace, mode: Mode, transport: str, *, decode: bool) -> dict[str, Any]:
    """Sync several versions one way; return the figures."""
    config = run_config(options, mode, transport)
    folder = options.folder / "runs" / config.run_name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with open_processes(config, folder, probe=probe_sequences(config)) as processes:
        first = processes.sync.sync()
        row: dict[str, Any] = {"mode": mode, "transport": transport, "start_seconds": time.perf_counter() - started}
        if decode:
            row["decode_version_0"] = decode_rate(options, processes)
        reports = []
        for _ in range(SYNCS):
            take_random_step(processes.trainer, config)
            begun = time.perf_counter()
            report = processes.sync.sync()
            reports.append(report.seconds | {"all": time.perf_counter() - begun})
        row |= {"bytes": report.num_bytes, "first": first.seconds, "quarantined": report.quarantined}
        row["seconds"] = {p: statistics.median(r.get(p, 0.0) for r in reports[1:]) for p in (*PHASES, "all")}
        row["difference_mean"], row["difference_max"], row["moved_mean"] = parity(config, processes)
        if decode:
            row["decode"] = decode_rate(options, processes)
    print(json.dumps(row), flush=True)
    return row


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


def decode_rate(options: argparse.Namespace, processes: Processes) -> float:
    """Return tokens a second, once warm."""
    sampling = SamplingParams(max_new_tokens=options.tokens)
    prompts = np.random.default_rng(3).integers(0, 500, (options.completions, PROMPT_TOKENS)).tolist()
    requests = [GenerateRequest(tuple(prompt), place, sampling) for place, prompt in enumerate(prompts)]
    for _ in range(2):
        begun = time.perf_counter()
        completions = processes.pool.generate(requests, version=None, heal=processes.sync.heal)
        seconds = time.perf_counter() - begun
    return sum(len(completion.token_ids) for completion in completions) / seconds


def write_results(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    facts = {
        "command": "python benchmarks/sync.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/")),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "gpus": options.gpus if torch.cuda.is_available() else 0,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "rows": rows,
    }
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"Qwen3 {options.shape}, rank {options.rank}, {options.trainer} trainer, {facts['machine']}\n")
    print("| mode | transport | MiB | " + " | ".join(PHASES) + " | step to serving | mean / max difference | moved |")
    print("|---" * (len(PHASES) + 6) + "|")
    for row in rows:
        seconds = " | ".join(f"{row['seconds'][phase]:.3f}" for phase in (*PHASES, "all"))
        parity_text = f"{row['difference_mean']:.2g} / {row['difference_max']:.2g} | {row['moved_mean']:.2g}"
        print(f"| {row['mode']} | {row['transport']} | {row['bytes'] / 2**20:.1f} | {seconds} | {parity_text} |")
    print("\n| decoding | tokens/s |\n|---|---|")
    for row in rows:
        if "decode" in row:
            before = "base" if row["mode"] == "merge" else "adapter of zeros"
            print(f"| {before} | {row['decode_version_0']:,.0f} |\n| {row['mode']} | {row['decode']:,.0f} |")


if __name__ == "__main__":
    main()
