"""What a verified sync costs, and what decoding costs afterwards: both modes, over each transport, on random weights.

    python benchmarks/sync.py --shape 0.6B --folder /disk/with/room --results benchmarks/results/sync.json
    python benchmarks/sync.py --shape tiny    # on a CPU, to see that it works

A trainer and engines in processes of their own, on one GPU that they share (--gpus 2: on one each), started once a
mode. Whether seven engines take longer than one: --gpus 8 --engines 7. Seconds are medians over the syncs after a
transport's first; each follows an optimizer step and ends with all engines verified and serving. `link` is what one
engine's bytes take on the link that they cross, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from links import measure_links
from sync_figures import PHASES, decode_rate, measure_sleep, measure_syncs
from sync_models import SHAPES, make_model
from sync_table import print_tables

from relax_pipeline.config import RunConfig
from relax_pipeline.processes import Processes, make_sync, start_engines
from relax_pipeline.remote.cluster import ray_cluster
from relax_pipeline.remote.trainer import RemoteTrainer
from relax_pipeline.sync.outbox import Outbox, make_transport
from relax_pipeline.sync_check import Mode, for_check, probe_sequences
from relax_pipeline.trainer.base import RankLayout, Trainer
from relax_pipeline.trainer.make import make_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, default=Path("sync-benchmark"), help="model and logs go here")
    parser.add_argument("--results", type=Path, help="JSON of all figures")
    parser.add_argument("--modes", nargs="+", choices=["adapter", "merge"], default=["adapter", "merge"])
    parser.add_argument("--transports", nargs="+", default=["object_store", "ipc", "disk"])
    parser.add_argument("--gpus", type=int, default=1, help="1: all share it; else one each")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--completions", type=int, default=256, help="decoded together; 0: none")
    parser.add_argument("--tokens", type=int, default=256, help="decoded for each")
    parser.add_argument("--trainer", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--offload", choices=["none", "kv_cache", "all"], default="none", help="then sleep is measured")
    parser.add_argument("--engine-args", nargs=argparse.REMAINDER, default=[], help="last: go to SGLang as they are")
    options = parser.parse_args()
    options.model = make_model(options.folder, options.shape)
    facts: dict[str, Any] = describe(options)
    facts["rows"] = []
    for mode in options.modes:
        for row in measure(options, mode, facts["links"]):
            facts["rows"].append(row)
            if options.results:  # after each row: a run that is ended leaves what it has measured
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps(facts, indent=2) + "\n")
    title = f"Qwen3 {options.shape}, rank {options.rank}, {options.trainer} trainer, engines: {options.engines}"
    print_tables(title, facts, PHASES)


def describe(options: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    links = measure_links(1 << 30) if cuda else {}
    if cuda:
        torch.cuda.empty_cache()
    return {
        "command": "python benchmarks/sync.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/")),
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "gpus": options.gpus if cuda else 0,
        "engines": options.engines,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "sglang")},
        "links": links,
    }


def run_config(options: argparse.Namespace, mode: Mode, transport: str) -> RunConfig:
    cuda = torch.cuda.is_available()
    engine: dict[str, Any] = {"kind": "sglang", "replicas": options.engines, "memory_fraction": 0.5}
    engine["extra_args"] = options.engine_args
    if not options.completions:
        engine["cuda_graph_max_batch"] = 0  # capturing takes the longest part of a start, and serves decoding only
    engine |= {"offload": options.offload} if cuda else {"device": "cpu", "max_running_requests": 32}
    values = {
        "run_name": mode,
        "output_dir": str(options.folder / "runs"),
        "steps": 1,
        "model": {"path": str(options.model), "dtype": "bfloat16" if cuda else "float32"},
        "lora": {"rank": options.rank, "alpha": options.rank},
        "data": {"train": {"path": "unused"}},
        "trainer": {"kind": options.trainer},
        "rollout": {"staleness": 0},
        "engine": engine,
        "sync": {
            "mode": mode,
            "transport": transport,
            "timeout_seconds": 600,
            "probe_tolerance": 1.0 if cuda else None,
        },
        "cluster": {"colocate": cuda and options.gpus == 1, "num_gpus": options.gpus if cuda else 0},
    }
    return for_check(RunConfig.model_validate(values), mode)


class Switching(Outbox):
    """Packs by the transport it was told last, so that one trainer and one engine serve for all of them."""

    def use(self, config: RunConfig) -> None:
        if self._transport:
            self._transport.close()
        self._transport = make_transport(config)


def make_switching(config: RunConfig) -> Trainer:
    outbox: Any = Switching(make_trainer(config, RankLayout()), None, keep_versions=3)
    return outbox


@contextmanager
def started(config: RunConfig) -> Iterator[Processes]:
    threads = 4 if torch.cuda.is_available() else 1
    with ray_cluster(config.cluster, namespace="relax-sync-benchmark"):
        gpus = int(torch.cuda.is_available())
        trainer = RemoteTrainer([partial(make_switching, config)], num_threads=threads, num_gpus=gpus, timeout=600)
        pool = start_engines(config, trainer)
        yield Processes(trainer, pool, make_sync(config, trainer, pool, probe=probe_sequences(config)))
        pool.close()
        trainer.close()


def measure(options: argparse.Namespace, mode: Mode, links: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield a row a transport, measured one after the other on the same processes."""
    begun = time.perf_counter()
    decode = partial(decode_rate, completions=options.completions, tokens=options.tokens)
    with started(run_config(options, mode, options.transports[0])) as processes:
        for place, transport in enumerate(options.transports):
            config = run_config(options, mode, transport)
            processes.trainer._all("use", config)
            row: dict[str, Any] = {"mode": mode, "transport": transport}
            if place == 0:
                row["first"] = processes.sync.sync().seconds
                row["start_seconds"] = time.perf_counter() - begun
                row["decode_version_0"] = decode(processes)
            row |= measure_syncs(config, processes)
            row["link_seconds"] = link_seconds(options, transport, row["bytes"], links)
            if place == len(options.transports) - 1:
                row["decode"] = decode(processes)
                if options.offload != "none":
                    row["sleep"] = measure_sleep(processes)
            print(json.dumps(row), flush=True)
            yield row


def link_seconds(options: argparse.Namespace, transport: str, num_bytes: int, links: dict[str, float]) -> float | None:
    """Return what the bytes take on the narrowest link on their way."""
    on_gpu = {"ipc": "within_gpu" if options.gpus == 1 else None, "nccl": "gpu_to_gpu"}
    rate = links.get(on_gpu.get(transport) or "gpu_to_pinned_host")
    return num_bytes / rate if rate else None


if __name__ == "__main__":
    main()
