"""The demo: train a tiny model, kill its trainer half-way, watch the run go on, and use the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from relax_pipeline.metrics.log import StepLog, series
from relax_pipeline.metrics.text import seconds_text, sparkline

HERE = Path(__file__).parent
RUNS = Path("runs").resolve()
KILL_AT_STEP = 55
console = Console(soft_wrap=True, highlight=False)


def main() -> int:
    """Run the demo; return the exit status of the training command."""
    started = time.monotonic()
    run = RUNS / "demo"
    shutil.rmtree(run, ignore_errors=True)
    console.print(Rule("relax-pipeline demo: rollout > reward > train > sync > save, on this CPU"))
    config = HERE / "demo.yaml"
    settings = [f"output_dir={RUNS}", f"publish.destination=file://{RUNS / 'published'}"]
    command = [sys.executable, "-m", "flows.cli", "train", str(config)]
    command += [part for setting in settings for part in ("--set", setting)]
    console.print(f"$ relax-pipeline train {config.relative_to(Path.cwd())}\n")
    with subprocess.Popen(command) as training:
        killed = kill_trainer(run, training)
        status = training.wait()
    if status:
        console.print(f"[red]training ended with status {status}[/]")
        return status
    show_learning(run, killed_at=killed)
    show_model(Path(json.loads((run / "PUBLISHED.json").read_text())["uri"].removeprefix("file://")))
    console.print(f"\nDone in {seconds_text(time.monotonic() - started)}. Curves, completions: {run / 'report.html'}")
    return 0


def kill_trainer(run: Path, training: subprocess.Popen[bytes]) -> int | None:
    """SIGKILL the trainer's process in mid-run, once, and return the step it was at."""
    metrics = StepLog(run / "metrics.jsonl")
    while training.poll() is None:
        time.sleep(0.1)
        rows = metrics.rows()
        if rows and rows[-1]["step"] >= KILL_AT_STEP:
            pid = json.loads((run / "processes.json").read_text())["trainer"][0]
            os.kill(pid, signal.SIGKILL)
            console.print(
                f"\n[bold yellow]--- killed the trainer (process {pid}) in mid-run: an error, then a resume ---[/]\n"
            )
            return int(rows[-1]["step"])
    return None


def show_learning(run: Path, *, killed_at: int | None) -> None:
    """Print the curve of the reward, and the held-out accuracy before and after."""
    rows = StepLog(run / "metrics.jsonl").rows()
    rewards = [value for _, value in series(rows, "reward/mean")]
    heldout = series(rows, "eval/accuracy")
    console.print(Rule("what it learned"))
    console.print(f"reward             {rewards[0]:.2f} {sparkline(rewards, width=60)} {rewards[-1]:.2f}")
    (_, before), (_, after) = heldout[0], heldout[-1]
    console.print(f"held-out accuracy  {before:.2f} before, [bold]{after:.2f}[/] after {len(rewards)} steps")
    console.print(f"killed at step {killed_at}, resumed from the last checkpoint, and finished")


def show_model(folder: Path) -> None:
    """Load the published model with plain transformers and ask it something."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # noqa: PLC0415 - takes seconds, only here

    logging.disable_progress_bar()
    console.print(Rule("the published model, loaded with plain transformers"))
    console.print(f"model: {folder}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for line in (HERE / "prompts" / "heldout.jsonl").read_text().splitlines()[:3]:
        prompt = json.loads(line)["prompt"]
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        console.print(f"{prompt} [bold]{answer}[/]")


if __name__ == "__main__":
    sys.exit(main())
