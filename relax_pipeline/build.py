"""The one place that turns configuration into objects and processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from relax_pipeline.checkpoint.lock import run_lock
from relax_pipeline.checkpoint.mirror import open_mirror
from relax_pipeline.config import RunConfig
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.inputs import load_tokenizer, run_folder, run_identity
from relax_pipeline.plan import make_plan
from relax_pipeline.processes import open_cluster, open_processes
from relax_pipeline.remote.scoring import ScoringWorkers
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.session.collect import Collector
from relax_pipeline.session.evaluate import Evaluation
from relax_pipeline.session.sampler import Sampler
from relax_pipeline.session.session import TrainingSession
from relax_pipeline.storage.files import write_atomic
from relax_pipeline.types import DataPosition, SamplingParams

_PROBE_TOKENS = 64


@contextmanager
def open_session(config: RunConfig) -> Iterator[TrainingSession]:
    """Start trainer, engines and reward workers, and end them all at the end of the block, however it ends.

    Raises:
        ConfigError: The plan of the run refuses it.
        RunLockedError: Another process trains this run.
    """
    folder = run_folder(config)
    with ExitStack() as stack:
        stack.enter_context(run_lock(folder))
        mirror = stack.enter_context(open_mirror(config.checkpoint, config.run_name, folder))
        make_plan(config).raise_if_refused()
        write_atomic(folder / "config.json", config.model_dump_json(indent=2) + "\n")
        tokenizer = load_tokenizer(config)
        dataset = PromptDataset(load_rows(config.data.train), tokenizer, config.data)
        stack.enter_context(open_cluster(config))
        scorer = ScoringWorkers(config.rewards, startup_timeout=config.sync.timeout_seconds)
        stack.callback(scorer.close)
        processes = stack.enter_context(open_processes(config, folder, probe=make_probe(dataset)))
        trainer, pool, sync = processes.trainer, processes.pool, processes.sync
        pinned = config.sync.mode == "adapter"
        sampler = Sampler(pool=pool, scorer=scorer, tokenizer=tokenizer, heal=sync.heal, pinned=pinned)
        session = TrainingSession(
            config=config,
            run_folder=folder,
            identity=run_identity(config, dataset.fingerprint),
            trainer=trainer,
            sync=sync,
            sampler=sampler,
            collector=partial(_make_collector, config, dataset, sampler, _sampling(config, tokenizer)),
            evaluation=make_evaluation(config, tokenizer),
            note_processes=partial(_note_processes, folder, trainer.pids(), pool),
            mirror=mirror,
        )
        stack.callback(session.close)
        yield session


def make_probe(dataset: PromptDataset) -> list[tuple[int, ...]]:
    """Return the first tokens of two prompts: what trainer and engines are compared on."""
    return [dataset.prompt(index % len(dataset)).token_ids[:_PROBE_TOKENS] for index in (0, 1)]


def _note_processes(run_folder: Path, trainer_pids: list[int], pool: EnginePool) -> None:
    """Write processes.json, where whoever looks after the run finds the processes that live."""
    pids = {"flow": os.getpid(), "trainer": trainer_pids, "engines": [slot.info.pid for slot in pool.slots]}
    (run_folder / "processes.json").write_text(json.dumps(pids) + "\n")


def _make_collector(
    config: RunConfig, dataset: PromptDataset, sampler: Sampler, sampling: SamplingParams, position: DataPosition
) -> Collector:
    stream = PromptStream(dataset, seed=config.seed, shuffle=config.data.shuffle, position=position)
    return Collector(sampler=sampler, stream=stream, config=config.rollout, sampling=sampling, seed=config.seed)


def _sampling(config: RunConfig, tokenizer: Any) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=_stop_token_ids(config, tokenizer),
    )


def _stop_token_ids(config: RunConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a completion: the run's, the model's, and the tokenizer's."""
    stops = set(config.rollout.stop_token_ids)
    if (Path(config.model.path) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(config.model.path).eos_token_id
        stops |= set(eos if isinstance(eos, list) else [eos])
    stops.add(tokenizer.eos_token_id)
    return tuple(sorted(stop for stop in stops if stop is not None))


def make_evaluation(config: RunConfig, tokenizer: Any) -> Evaluation | None:
    """Read the held-out prompts; None where the run has none."""
    if config.evaluation is None:
        return None
    settings = config.evaluation
    dataset = PromptDataset(load_rows(settings.source), tokenizer, config.data)
    sampling = SamplingParams(
        max_new_tokens=settings.max_new_tokens or config.rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        stop_token_ids=_stop_token_ids(config, tokenizer),
    )
    prompts = [dataset.prompt(index) for index in range(len(dataset))]
    return Evaluation(prompts, settings.completions_per_prompt, sampling)
