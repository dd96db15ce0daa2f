"""Speed and memory of the Megatron trainer on a random model of Qwen3's shape, in bfloat16.

    python benchmarks/megatron_trainer.py --folder /tmp/scratch --tp 2 --out benchmarks/results
    python benchmarks/megatron_trainer.py --folder /tmp/scratch --shape 4B --layers 18 --out benchmarks/results
    python benchmarks/megatron_trainer.py --folder /tmp/scratch --shape half-30B-A3B --ep 2 --dp 2 --resume /tmp/saved

A process and a GPU each rank. `--cpu` takes float32 and no GPU instead, to see with a tiny shape that all of it works.
The last lines printed are a Markdown table; the same figures go into a JSON file in --out. With --resume the first run
saves its state there and takes one step more; others, of any layout, load that and tell what their step differs by.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sync_models import SHAPES, make_model
from trainer_figures import CHECKED_SAMPLES, measure, resume, table
from transformers import AutoModelForCausalLM

from relax_pipeline.config import RunConfig
from relax_pipeline.trainer.base import RankLayout
from relax_pipeline.types import TrainingSample


def main() -> None:
    options = parse()
    model = make_model(options.folder, options.shape, layers=options.layers, dtype=options.dtype)
    with TemporaryDirectory(dir=options.folder) as scratch:
        figures = run_ranks(make_config(model, options), Path(scratch), options)
    expected = transformers_logprobs(model, options)
    differences = np.abs(np.concatenate(figures.pop("logprobs")) - np.concatenate(expected))
    figures |= {"logprob_diff_mean": float(differences.mean()), "logprob_diff_max": float(differences.max())}
    name = run_name(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print("\n".join(table(name, figures)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="models, which are kept, and scratch space")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sp", action="store_true", help="sequence parallel, with --tp above 1")
    parser.add_argument("--cp", type=int, default=1, help="context parallel, with --no-te")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="expert parallel, over the ranks of --tp, --cp and --dp")
    parser.add_argument("--te", action=argparse.BooleanOptionalAction, default=True, help="Transformer Engine's layers")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="longest sequence; the shortest has a quarter")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--resume", type=Path, help="save there, or load from there and compare")
    parser.add_argument("--cpu", action="store_true", help="with a tiny shape")
    options = parser.parse_args()
    if options.cpu:
        options.length, options.sequences, options.micro_batch_tokens, options.te = 32, 8, 128, False
    options.dtype = "float32" if options.cpu else "bfloat16"
    return options


def run_name(options: argparse.Namespace) -> str:
    sizes = {"tp": options.tp, "cp": options.cp, "pp": options.pp, "ep": options.ep, "dp": options.dp}
    layout = "-".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1 or kind in ("tp", "dp"))
    shape = "" if options.shape == "0.6B" else f"-{options.shape}"
    return f"megatron-{layout}-{'te' if options.te else 'torch'}{shape}"


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
                "device": "cpu" if options.cpu else "cuda",
                "tensor_parallel_size": options.tp,
                "sequence_parallel": options.sp,
                "context_parallel_size": options.cp,
                "pipeline_parallel_size": options.pp,
                "expert_parallel_size": options.ep,
                "data_parallel_size": options.dp,
                "micro_batch_tokens": options.micro_batch_tokens,
                "recompute": options.recompute,
                "transformer_engine": "auto" if options.te else "off",
            },
        }
    )


def make_samples(options: argparse.Namespace) -> list[TrainingSample]:
    draw = np.random.default_rng(0)
    vocabulary = SHAPES[options.shape]["vocab_size"]
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
    if not options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[layout.rank]
    torch.set_num_threads(4 if not options.cpu else 1)
    started = time.perf_counter()
    from relax_pipeline.trainer.megatron import MegatronTrainer  # noqa: PLC0415 - after the device is chosen

    imported = time.perf_counter()
    trainer = MegatronTrainer(config, layout)
    figures = {"import_s": imported - started, "build_s": time.perf_counter() - imported}
    figures |= measure(trainer, scratch, make_samples(options))
    if options.resume:
        figures |= resume(trainer, options.resume, make_samples(options))
    trainer.close()
    if layout.rank == 0:
        pipe.send(figures)


def transformers_logprobs(folder: Path, options: argparse.Namespace) -> list[np.ndarray]:
    device = "cpu" if options.cpu else "cuda"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).to(device).eval()
    expected = []
    for sample in make_samples(options)[:CHECKED_SAMPLES]:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).to(device)
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        chosen = logits_TV.log_softmax(-1).gather(-1, ids[len(sample.prompt_ids) :, None])
        expected.append(chosen[:, 0].cpu().numpy())
    return expected


if __name__ == "__main__":
    main()
