"""Speed and memory of the Megatron trainer on a random model of Qwen3-0.6B's shape, in bfloat16.

    python benchmarks/megatron_trainer.py --folder /tmp/scratch --tp 2 --out benchmarks/results

A process and a GPU each rank. `--tiny` takes a small model, float32 and the CPU instead, to see that all of it works.
The last lines printed are a Markdown table; the same figures go into a JSON file in --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from relax_pipeline.config import RunConfig
from relax_pipeline.trainer.base import RankLayout, Trainer
from relax_pipeline.types import TrainingSample

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
TINY = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
REPEATS = 3
CHECKED_SAMPLES = 8
"""Whose logprobs are compared with those of transformers."""


def main() -> None:
    options = parse()
    scratch = options.folder / f"megatron-{uuid4().hex[:8]}"
    try:
        model = make_model(scratch / "model", TINY if options.tiny else SHAPE, options.dtype)
        figures = run_ranks(make_config(model, options), scratch, options)
        expected = transformers_logprobs(model, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    differences = np.abs(np.concatenate(figures.pop("logprobs")) - np.concatenate(expected))
    figures |= {"logprob_diff_mean": float(differences.mean()), "logprob_diff_max": float(differences.max())}
    layout = f"tp{options.tp}{f'-cp{options.cp}' if options.cp > 1 else ''}-dp{options.dp}"
    name = f"megatron-{layout}-{'te' if options.te else 'torch'}{'-tiny' if options.tiny else ''}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print("\n".join(table(name, figures)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="scratch space, 5 GB")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sp", action="store_true", help="sequence parallel, with --tp above 1")
    parser.add_argument("--cp", type=int, default=1, help="context parallel, with --no-te")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--te", action=argparse.BooleanOptionalAction, default=True, help="Transformer Engine's layers")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="longest sequence; the shortest has a quarter")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.length, options.sequences, options.micro_batch_tokens, options.te = 32, 8, 128, False
    options.dtype = "float32" if options.tiny else "bfloat16"
    return options


def make_model(folder: Path, shape: dict[str, Any], dtype: str) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**shape)).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def make_config(model: Path, options: argparse.Namespace) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_name": "benchmark",
            "steps": 100,
            "model": {"path": str(model), "dtype": options.dtype},
            "lora": {"rank": 32, "alpha": 32},
            "data": {"train": {"path": "unused.jsonl"}},
            "sync": {"mode": "adapter"},
            "trainer": {
                "kind": "megatron",
                "device": "cpu" if options.tiny else "cuda",
                "tensor_parallel_size": options.tp,
                "sequence_parallel": options.sp,
                "context_parallel_size": options.cp,
                "data_parallel_size": options.dp,
                "micro_batch_tokens": options.micro_batch_tokens,
                "recompute": options.recompute,
                "transformer_engine": "auto" if options.te else "off",
            },
        }
    )


def make_samples(options: argparse.Namespace) -> list[TrainingSample]:
    draw = np.random.default_rng(0)
    vocabulary = (TINY if options.tiny else SHAPE)["vocab_size"]
    samples = []
    for _ in range(options.sequences):
        length = int(draw.integers(options.length // 4, options.length + 1))
        prompt = length // 4
        samples.append(
            TrainingSample(
                prompt_ids=draw.integers(0, vocabulary, prompt),
                completion_ids=draw.integers(0, vocabulary, length - prompt),
                loss_mask=np.ones(length - prompt, dtype=bool),
                rollout_logprobs=np.full(length - prompt, -np.log(vocabulary), dtype=np.float32),
                advantage=float(draw.normal()),
                policy_version=0,
            )
        )
    return samples


def run_ranks(config: RunConfig, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks and return rank 0's figures."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    meeting = f"file://{scratch / 'meeting'}"
    size = config.trainer.world_size
    ranks = [
        context.Process(target=serve_rank, args=(config, RankLayout(rank, size, meeting), scratch, options, theirs))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        figures: dict[str, Any] = ours.recv()  # EOFError: rank 0 has died, and has said why
    finally:
        for rank in ranks:
            rank.join(timeout=30)
            rank.kill()
    return figures


def serve_rank(config: RunConfig, layout: RankLayout, scratch: Path, options: argparse.Namespace, pipe: Any) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(layout.world_size)))).split(",")
    if not options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[layout.rank]
    torch.set_num_threads(4 if not options.tiny else 1)
    started = time.perf_counter()
    from relax_pipeline.trainer.megatron import MegatronTrainer  # noqa: PLC0415 - after the device is chosen

    imported = time.perf_counter()
    trainer = MegatronTrainer(config, layout)
    figures = {"import_s": imported - started, "build_s": time.perf_counter() - imported}
    figures |= measure(trainer, scratch, options)
    trainer.close()
    if layout.rank == 0:
        pipe.send(figures)


def measure(trainer: Trainer, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    samples = make_samples(options)
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
        **colocation(trainer),
    }


def merge(trainer: Trainer) -> None:
    for names in trainer.bucket_names(512 << 20):
        trainer.export_weights(names)


def colocation(trainer: Any) -> dict[str, float]:
    """Seconds to leave the GPU and to come back, and what stays on it meanwhile."""
    started = time.perf_counter()
    trainer.sleep()
    slept = time.perf_counter()
    left = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    woken = time.perf_counter()
    trainer.wake()
    return {"sleep_s": slept - started, "wake_s": time.perf_counter() - woken, "asleep_gib": left}


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


def transformers_logprobs(folder: Path, options: argparse.Namespace) -> list[np.ndarray]:
    device = "cpu" if options.tiny else "cuda"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).to(device).eval()
    expected = []
    for sample in make_samples(options)[:CHECKED_SAMPLES]:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).to(device)
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        chosen = logits_TV.log_softmax(-1).gather(-1, ids[len(sample.prompt_ids) :, None])
        expected.append(chosen[:, 0].cpu().numpy())
    return expected


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
        ("sleep / wake, s (GiB left)",
         f"{figures['sleep_s']:.2f} / {figures['wake_s']:.2f} ({figures['asleep_gib']:.2f})"),
        ("first step's loss / gradient norm", f"{figures['loss']:.6f} / {figures['grad_norm']:.5g}"),
        ("logprob difference to transformers, mean / max",
         f"{figures['logprob_diff_mean']:.2e} / {figures['logprob_diff_max']:.2e}"),
    ]  # fmt: skip
    return [f"| {name} | value |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]


if __name__ == "__main__":
    main()
