"""Time and memory of a merge: 8 GB in 4 shards, against `cp` of the same bytes and against peft, in the same run.

    python benchmarks/merge.py --folder /disk/with/30/GB

Each measurement is a process of its own; its peak memory is what the kernel counted for it. All three end with the
result on disk, not in the page cache: cp is followed by sync, peft's save too, our merge flushes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

from relax_pipeline.safetensors_io.header import TensorInfo, build_header

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""The shape of Qwen3-4B: 8.04 GB in bfloat16."""
LINEAR = {
    "self_attn.q_proj": (4096, 2560),
    "self_attn.k_proj": (1024, 2560),
    "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 4096),
    "mlp.gate_proj": (9728, 2560),
    "mlp.up_proj": (9728, 2560),
    "mlp.down_proj": (2560, 9728),
}
NORMS = {"input_layernorm": 2560, "post_attention_layernorm": 2560, "self_attn.q_norm": 128, "self_attn.k_norm": 128}
RANK = 32
NUM_SHARDS = 4

OURS = """
import json, sys
from pathlib import Path
from relax_pipeline.merge.merge import merge_adapter
base, adapter, output = map(Path, sys.argv[1:])
print(json.dumps({"seconds": merge_adapter(base, adapter, output).seconds}))
"""
PEFT = """
import json, os, sys, time
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, output = sys.argv[1:]
started = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
model.save_pretrained(output, max_shard_size="2500MB")
os.sync()
print(json.dumps({"seconds": time.monotonic() - started}))
"""


def layer_shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(num_layers):
        for leaf, shape in LINEAR.items():
            yield f"model.layers.{layer}.{leaf}.weight", shape
        for leaf, size in NORMS.items():
            yield f"model.layers.{layer}.{leaf}.weight", (size,)


def write_base(folder: Path, num_layers: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    shapes = {
        "model.embed_tokens.weight": (151936, 2560),
        **dict(layer_shapes(num_layers)),
        "model.norm.weight": (2560,),
    }
    infos = [TensorInfo(name, "BF16", shape, 0) for name, shape in shapes.items()]
    share, shards = sum(info.num_bytes for info in infos) / NUM_SHARDS, [[] for _ in range(NUM_SHARDS)]
    written = 0
    for info in infos:
        shards[min(NUM_SHARDS - 1, int(written / share))].append(info)
        written += info.num_bytes
    noise = (torch.randn(1 << 25) * 0.02).bfloat16().view(torch.uint8).numpy()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        header = build_header(shard, {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header.raw)
            for info in header.tensors:
                for start in range(0, info.num_bytes, len(noise)):
                    stream.write(noise[: min(len(noise), info.num_bytes - start)])
        weight_map |= {info.name: file for info in header.tensors}
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(folder: Path, num_layers: int) -> None:
    folder.mkdir(parents=True)
    leaves = sorted(name.rpartition(".")[2] for name in LINEAR)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": leaves,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (rows, columns) in ((n, s) for n, s in layer_shapes(num_layers) if len(s) == 2):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = (torch.randn(RANK, columns) * 0.02).bfloat16()
        tensors[f"{module}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")


def measure(command: list[str]) -> tuple[dict[str, float], str]:
    """Return what one process took, and its standard output."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} {command[1][:20]} failed with status {status}")
    wall = time.monotonic() - started
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "seconds": wall,
        "process_seconds": wall,
        "cpu_seconds": cpu,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }, output


def run_script(script: str, base: Path, adapter: Path, output: Path) -> dict[str, float]:
    measured, printed = measure([sys.executable, "-c", script, str(base), str(adapter), str(output)])
    shutil.rmtree(output)
    return {**measured, **json.loads(printed.splitlines()[-1])}


def run_copy(base: Path, output: Path) -> dict[str, float]:
    measured, _ = measure(["sh", "-c", f"cp -r '{base}' '{output}' && sync -f '{output}'"])
    shutil.rmtree(output)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where to work; about 2.2 times the model's size")
    parser.add_argument("--layers", type=int, default=36, help="36 make 8 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "merge.json")
    options = parser.parse_args()
    base, adapter, output = (options.folder / name for name in ("base", "adapter", "out"))
    if not base.exists():
        write_base(base, options.layers)
        write_adapter(adapter, options.layers)
    runs: dict[str, list[dict[str, float]]] = {"cp": [], "relax-pipeline": [], "peft": []}
    run_copy(base, output)  # the first copy fills the page cache for all
    for repeat in range(options.repeats):
        runs["cp"].append(run_copy(base, output))
        runs["relax-pipeline"].append(run_script(OURS, base, adapter, output))
        if repeat == 0 and not options.no_peft:  # minutes each, and far from the others
            runs["peft"].append(run_script(PEFT, base, adapter, output))
    write_results(options.results, base, runs)


def write_results(file: Path, base: Path, runs: dict[str, list[dict[str, float]]]) -> None:
    sizes = [shard.stat().st_size / 1e9 for shard in base.glob("*.safetensors")]
    copied = statistics.median(run["seconds"] for run in runs["cp"])
    table = ["| | seconds (median) | of cp | processor seconds | peak resident GB |", "|---|---|---|---|---|"]
    for name, measured in runs.items():
        if measured:
            seconds = statistics.median(run["seconds"] for run in measured)
            peak = max(run["peak_gb"] for run in measured)
            cpu = statistics.median(run["cpu_seconds"] for run in measured)
            table.append(f"| {name} | {seconds:.1f} | {seconds / copied:.2f} | {cpu:.1f} | {peak:.2f} |")
    facts = {
        "command": "python benchmarks/merge.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/")),
        "model_gb": sum(sizes),
        "largest_shard_gb": max(sizes),
        "rank": RANK,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "safetensors", "peft", "transformers")},
        "runs": runs,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=2) + "\n")
    shards = f"{len(sizes)} shards (largest {max(sizes):.2f} GB)"
    title = f"Merge of {sum(sizes):.2f} GB in {shards}, rank {RANK}, all linear layers"
    file.with_suffix(".md").write_text(f"{title}\n\n" + "\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
