"""Held-out evaluation of a checkpoint, apart from training: the policy reaches the engines by the same checked road."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from relax_pipeline.build import make_evaluation, make_probe
from relax_pipeline.checkpoint.store import CheckpointRef, in_use
from relax_pipeline.config import EvalConfig, RunConfig
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.errors import ConfigError
from relax_pipeline.inputs import load_tokenizer
from relax_pipeline.processes import open_cluster, open_processes
from relax_pipeline.remote.scoring import ScoringWorkers
from relax_pipeline.session.evaluate import answer_held_out
from relax_pipeline.session.sampler import Sampler


def evaluate_checkpoint(
    config: RunConfig, checkpoint: CheckpointRef, *, evaluation: EvalConfig | None = None
) -> dict[str, float]:
    """Answer held-out prompts from a checkpoint; the run's folder is only read.

    Args:
        config: Of the run.
        checkpoint: One of its checkpoints.
        evaluation: Other prompts, or another way to answer them, than the run's.

    Raises:
        ConfigError: There are no held-out prompts.
    """
    if evaluation is not None:
        config = config.model_copy(update={"evaluation": evaluation})
    tokenizer = load_tokenizer(config)
    held_out = make_evaluation(config, tokenizer)
    if held_out is None:
        raise ConfigError(f"run {config.run_name!r} has no `evaluation` section: name the prompts to evaluate on")
    probe = make_probe(PromptDataset(load_rows(config.data.train), tokenizer, config.data))
    with ExitStack() as stack:
        stack.enter_context(in_use(checkpoint))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(open_cluster(config))
        scorer = ScoringWorkers(config.rewards, startup_timeout=config.sync.timeout_seconds)
        stack.callback(scorer.close)
        processes = stack.enter_context(open_processes(config, folder, probe=probe))
        processes.trainer.load(checkpoint.path)
        processes.sync.sync()
        sampler = Sampler(
            pool=processes.pool,
            scorer=scorer,
            tokenizer=tokenizer,
            heal=processes.sync.heal,
            pinned=config.sync.mode == "adapter",
        )
        return answer_held_out(sampler, held_out, seed=config.seed)
