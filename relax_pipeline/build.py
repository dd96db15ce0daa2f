"""The one place that turns configuration into objects and processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import GenerationConfig

from relax_pipeline.checkpoint.lock import run_lock
from relax_pipeline.checkpoint.mirror import open_mirror
from relax_pipeline.config import RunConfig
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.errors import ConfigError
from relax_pipeline.inputs import load_tokenizer, run_folder, run_identity
from relax_pipeline.plan import make_plan
from relax_pipeline.remote.cluster import num_cpus, num_gpus, ray_cluster
from relax_pipeline.remote.engine import RemoteEngine
from relax_pipeline.remote.host import Place
from relax_pipeline.remote.scoring import ScoringWorkers
from relax_pipeline.remote.trainer import RemoteTrainer
from relax_pipeline.rollout.make import make_engine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.session.collect import Collector, Sampler
from relax_pipeline.session.session import Evaluation, TrainingSession
from relax_pipeline.storage.files import write_atomic
from relax_pipeline.sync.outbox import make_outbox
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.base import RankLayout, Trainer
from relax_pipeline.types import DataPosition, SamplingParams

_PROBE_TOKENS = 64
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest probe difference that arithmetic alone explains, by compute dtype; a missing adapter is far beyond."""


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
        stack.enter_context(ray_cluster(config.cluster, namespace=f"relax-{config.run_name}"))
        _check_gpus(config)
        scorer = ScoringWorkers(config.rewards, startup_timeout=config.sync.timeout_seconds)
        stack.callback(scorer.close)
        trainer = _start_trainer(config, folder)
        stack.callback(trainer.close)
        pool = _start_engines(config, trainer.places() if config.cluster.colocate else [])
        stack.callback(pool.close)
        sync = _make_sync(config, trainer, pool, dataset)
        sync.check_bases()
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
            evaluation=_evaluation(config, tokenizer),
            processes=partial(_processes, trainer.pids(), pool),
            mirror=mirror,
        )
        stack.callback(session.close)
        yield session


def _make_sync(config: RunConfig, trainer: Trainer, pool: EnginePool, dataset: PromptDataset) -> WeightSync:
    probe = [dataset.prompt(index % len(dataset)).token_ids[:_PROBE_TOKENS] for index in (0, 1)]
    return WeightSync(
        trainer=trainer,
        pool=pool,
        config=config.sync,
        tolerance=config.sync.probe_tolerance or _TOLERANCES[config.model.dtype],
        probe=probe,
        keep_versions=config.rollout.staleness + 2,
    )


def _processes(trainer_pids: list[int], pool: EnginePool) -> dict[str, Any]:
    return {"flow": os.getpid(), "trainer": trainer_pids, "engines": [slot.info.pid for slot in pool.slots]}


def _make_collector(
    config: RunConfig, dataset: PromptDataset, sampler: Sampler, sampling: SamplingParams, position: DataPosition
) -> Collector:
    stream = PromptStream(dataset, seed=config.seed, shuffle=config.data.shuffle, position=position)
    return Collector(sampler=sampler, stream=stream, config=config.rollout, sampling=sampling, seed=config.seed)


def _start_trainer(config: RunConfig, folder: Path) -> RemoteTrainer:
    ranks = config.trainer.world_size
    rendezvous = f"file://{folder / f'.rendezvous-{uuid4().hex[:8]}'}" if ranks > 1 else None
    builds: list[Callable[[], Trainer]] = [
        partial(make_outbox, config, RankLayout(rank, ranks, rendezvous)) for rank in range(ranks)
    ]
    return RemoteTrainer(
        builds,
        num_threads=_threads(config),
        num_gpus=_gpus(config.trainer.device, 1),
        timeout=config.trainer.step_timeout_seconds,
    )


def _start_engines(config: RunConfig, trainer_places: list[Place]) -> EnginePool:
    engine = config.engine
    threads, gpus = _threads(config), _gpus(engine.device, engine.num_gpus)

    def spawn(index: int) -> RemoteEngine:
        return RemoteEngine(
            partial(make_engine, config, engine_id=f"engine-{index}"),
            name=f"engine {index}",
            num_threads=threads,
            num_gpus=gpus,
            guest_of=_shared(trainer_places, index, engine.num_gpus) if trainer_places else None,
            streams=engine.streams,
            control_timeout=config.sync.timeout_seconds,
            generate_timeout=config.rollout.timeout_seconds,
        )

    return EnginePool(
        spawn,
        replicas=engine.replicas,
        restarts=engine.restarts,
        chunk_size=engine.batch_size,
        streams=engine.streams,
    )


def _threads(config: RunConfig) -> int:
    """Return the torch threads of one process: trainer ranks and engines share the CPUs evenly."""
    return max(1, num_cpus() // (config.trainer.world_size + config.engine.replicas))


def _check_gpus(config: RunConfig) -> None:
    """Refuse what Ray would wait for without a word.

    Raises:
        ConfigError: The cluster has too few GPUs.
    """
    there = num_gpus()
    trainer = _gpus(config.trainer.device, config.trainer.world_size)
    engines = _gpus(config.engine.device, config.engine.num_gpus * config.engine.replicas)
    if trainer + (0 if config.cluster.colocate else engines) > there:
        raise ConfigError(
            f"the Ray cluster has {there} GPUs, the trainer needs {trainer} and the engines {engines}: set "
            "cluster.colocate to true, lower engine.replicas or the trainer's size, or set trainer.device or "
            "engine.device to cpu"
        )


def _gpus(device: str, count: int) -> int:
    """Return the GPUs one process reserves."""
    return 0 if device == "cpu" or num_gpus() == 0 else count


def _shared(trainer: list[Place], index: int, count: int) -> Place:
    """Return where a colocated engine runs: on the GPUs of the next `count` trainer ranks, round and round."""
    ranks = [trainer[(index * count + offset) % len(trainer)] for offset in range(min(count, len(trainer)))]
    if len({place.node_id for place in ranks}) > 1:
        raise ConfigError(
            f"cluster.colocate: engine {index} needs {count} GPUs of one node, and the trainer ranks it would share "
            "them with are on several; lower engine.tensor_parallel_size"
        )
    return Place(ranks[0].node_id, tuple(gpu for place in ranks for gpu in place.gpu_ids))


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


def _evaluation(config: RunConfig, tokenizer: Any) -> Evaluation | None:
    if config.evaluation is None:
        return None
    settings = config.evaluation
    dataset = PromptDataset(load_rows(settings.source), tokenizer, config.data)
    sampling = SamplingParams(
        max_new_tokens=settings.max_new_tokens or config.rollout.max_new_tokens,
        temperature=settings.temperature,
        stop_token_ids=_stop_token_ids(config, tokenizer),
    )
    prompts = [dataset.prompt(index) for index in range(len(dataset))]
    return Evaluation(prompts, settings.completions_per_prompt, sampling)
