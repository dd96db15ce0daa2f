"""A variant of the learning runs: one `relax-pipeline train` in processes of its own, ended half-way where asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "deployments" / "recipes"
RECIPE = RECIPES / "smollm2-arithmetic.yaml"
ADAPTER, MERGE = ("sync.mode=adapter",), ("sync.mode=merge",)
FULL = ("lora.rank=0", "sync.mode=merge", "optimizer.learning_rate=5e-6")
AHEAD = (*ADAPTER, "rollout.staleness=1")
FSDP, MEGATRON = ("trainer.kind=fsdp",), ("trainer.kind=megatron",)
HF, SGLANG = ("engine.kind=hf", "engine.batch_size=512"), ("engine.kind=sglang",)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "fsdp-hf-adapter": FSDP + HF + ADAPTER,
    "fsdp-hf-merge": FSDP + HF + MERGE,
    "fsdp-hf-full": FSDP + HF + FULL,
    "fsdp-sglang-adapter": FSDP + SGLANG + ADAPTER,
    "fsdp-sglang-merge": FSDP + SGLANG + MERGE,
    "fsdp-sglang-full": FSDP + SGLANG + FULL,
    "megatron-hf-adapter": MEGATRON + HF + ADAPTER,
    "megatron-sglang-adapter": MEGATRON + SGLANG + ADAPTER,
    "megatron-sglang-ahead": MEGATRON + SGLANG + AHEAD,
    "megatron-sglang-merge": MEGATRON + SGLANG + MERGE,
    "megatron-sglang-full": MEGATRON + SGLANG + FULL,
}
Victim = Literal["run", "engine"]


def prepare(folder: Path) -> None:
    """Make the model and the problems, where they are not there yet."""
    for script, output in (("make_smollm2.py", folder / "smollm2"), ("make_prompts.py", folder / "arithmetic")):
        if not output.exists():
            subprocess.run([sys.executable, str(RECIPES / script), str(output)], check=True)


def overrides(name: str, folder: Path, settings: Sequence[str]) -> list[str]:
    """Return what a variant sets of the recipe; the settings have the last word."""
    return [
        f"run_name={name}",
        f"output_dir={folder / 'runs'}",
        f"model.path={folder / 'smollm2'}",
        f"data.train.path={folder / 'arithmetic' / 'train.jsonl'}",
        f"evaluation.source.path={folder / 'arithmetic' / 'heldout.jsonl'}",
        *VARIANTS[name],
        *settings,
    ]


def train(
    name: str,
    folder: Path,
    settings: Sequence[str],
    *,
    limit: float,
    kill_after: int | None = None,
    victim: Victim = "run",
) -> dict[str, object]:
    """Run one variant to its end; return its rows and how it went.

    After the step `kill_after` the victim is ended by SIGKILL: the run, which the same command starts again, or an
    engine, which the run itself has to replace.
    """
    command = [sys.executable, "-m", "flows.cli", "train", str(RECIPE)]
    command += [part for override in overrides(name, folder, settings) for part in ("--set", override)]
    log = folder / f"{name}.log"
    started = time.monotonic()
    kills = 0
    with log.open("w") as stream:
        process = start(command, stream)
        while process.poll() is None:
            time.sleep(0.5)
            rows = read_rows(folder, name)
            if kill_after and not kills and rows and rows[-1]["step"] >= kill_after:
                kills += 1
                if victim == "engine":
                    end_engine(folder, name)
                else:
                    end(process)
                    process = start(command, stream)
            if time.monotonic() - started > limit:
                end(process)
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-25:])
        print(f"--- {name} ended with {process.returncode}\n{tail}", flush=True)
    return {
        "status": process.returncode,
        "kills": kills,
        "seconds": time.monotonic() - started,
        "command": [part.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "") for part in command[1:]],
        "rows": read_rows(folder, name),
    }


def start(command: Sequence[str], stream: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_engine(folder: Path, name: str) -> None:
    """End the first engine; SGLang's server leads a group of its own, and takes its scheduler along."""
    pid = json.loads((folder / "runs" / name / "processes.json").read_text())["engines"][0]
    if os.getpgid(pid) == pid:
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)


def read_rows(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the run's rows so far, the last one of each step."""
    file = folder / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return list({row["step"]: row for row in map(json.loads, lines)}.values())


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "ray", "prefect", "megatron-core", "megatron-bridge", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


@contextmanager
def peak_memory(figures: dict[str, Any]) -> Iterator[None]:
    """Put into figures the most memory, in GiB, that the first visible GPU had in use meanwhile."""
    import torch  # noqa: PLC0415

    over = threading.Event()

    def watch() -> None:
        while torch.cuda.is_available() and not over.wait(0.2):
            figures["peak_gib"] = max(figures.get("peak_gib", 0.0), torch.cuda.device_memory_used() / 2**30)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
