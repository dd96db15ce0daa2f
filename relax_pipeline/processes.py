"""From configuration to the processes that train and generate, and the sync between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.inputs import run_folder
from relax_pipeline.remote.cluster import num_cpus, num_gpus, ray_cluster
from relax_pipeline.remote.engine import RemoteEngine
from relax_pipeline.remote.host import Place
from relax_pipeline.remote.logs import forwarded, logged
from relax_pipeline.remote.trainer import RemoteTrainer
from relax_pipeline.rollout.make import make_engine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.sync.outbox import make_outbox
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.base import RankLayout, Trainer

_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest probe difference that arithmetic alone explains, by compute dtype: two kernels in bfloat16 differ by about
0.03 nats in the mean on SmolLM2-135M, and by 0.25 on single tokens."""

_THREADS_BESIDE_GPU = 4


@dataclass(frozen=True, slots=True)
class Processes:
    """A trainer, its engines, and what keeps them equal."""

    trainer: RemoteTrainer
    pool: EnginePool
    sync: WeightSync


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[None]:
    """Have the run's Ray cluster inside the block, and what its processes log in the log of this one.

    Raises:
        ConfigError: The cluster has too few GPUs.
    """
    with forwarded(_log_folder(config)), ray_cluster(config.cluster, namespace=f"relax-{config.run_name}"):
        _check_gpus(config)
        yield


@contextmanager
def open_processes(config: RunConfig, folder: Path, *, probe: Sequence[Sequence[int]]) -> Iterator[Processes]:
    """Start trainer and engines on the open cluster, and end them at the end of the block, however it ends.

    Whatever else takes time to start is best started before: it then does so while the models load.

    Args:
        config: The run.
        folder: Where the ranks of a trainer may meet.
        probe: Token sequences on which trainer and engines are compared.
    """
    with ExitStack() as stack:
        trainer = _start_trainer(config, folder)
        stack.callback(trainer.close)
        pool = start_engines(config, trainer)
        stack.callback(pool.close)
        sync = make_sync(config, trainer, pool, probe=probe)
        sync.check_bases()
        yield Processes(trainer, pool, sync)


def start_engines(config: RunConfig, trainer: RemoteTrainer) -> EnginePool:
    """Start the engines, on the trainer's GPUs where the run is colocated."""
    engine = config.engine
    threads, gpus = _threads(config), _gpus(engine.device, engine.num_gpus)
    trainer_places = trainer.places() if config.cluster.colocate else []

    def spawn(index: int) -> RemoteEngine:
        return RemoteEngine(
            logged(
                partial(make_engine, config, engine_id=f"engine-{index}"), _log_folder(config) / f"engine-{index}.log"
            ),
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


def make_sync(config: RunConfig, trainer: Trainer, pool: EnginePool, *, probe: Sequence[Sequence[int]]) -> WeightSync:
    """Connect trainer and engines."""
    return WeightSync(
        trainer=trainer,
        pool=pool,
        config=config.sync,
        tolerance=probe_tolerance(config),
        probe=probe,
        keep_versions=config.rollout.versions_in_use,
    )


def probe_tolerance(config: RunConfig) -> float:
    """Return the largest probe difference that is not an error, in nats."""
    return config.sync.probe_tolerance or _TOLERANCES[config.model.dtype]


def _log_folder(config: RunConfig) -> Path:
    """Return where trainer ranks and engines log, a file each."""
    return run_folder(config) / "logs" / "processes"


def _start_trainer(config: RunConfig, folder: Path) -> RemoteTrainer:
    """Start all ranks; they meet through a file in the folder."""
    ranks = config.trainer.world_size
    rendezvous = f"file://{folder / f'.rendezvous-{uuid4().hex[:8]}'}" if ranks > 1 else None
    builds: list[Callable[[], Trainer]] = [
        logged(
            partial(make_outbox, config, RankLayout(rank, ranks, rendezvous)),
            _log_folder(config) / f"trainer-rank-{rank}.log",
        )
        for rank in range(ranks)
    ]
    return RemoteTrainer(
        builds,
        num_threads=_threads(config),
        num_gpus=_gpus(config.trainer.device, 1),
        timeout=config.trainer.step_timeout_seconds,
    )


def _check_gpus(config: RunConfig) -> None:
    """Refuse what Ray would wait for without a word."""
    there = num_gpus()
    trainer = _gpus(config.trainer.device, config.trainer.world_size)
    engines = _gpus(config.engine.device, config.engine.num_gpus * config.engine.replicas)
    if trainer + (0 if config.cluster.colocate else engines) > there:
        raise ConfigError(
            f"the Ray cluster has {there} GPUs, the trainer needs {trainer} and the engines {engines}: set "
            "cluster.colocate to true, lower engine.replicas or the trainer's size, or set trainer.device or "
            "engine.device to cpu"
        )


def _threads(config: RunConfig) -> int:
    """Return the torch threads of one process: trainer ranks and engines share the CPUs evenly.

    With GPUs the CPU only does small things, at which many threads wait for each other.
    """
    share = max(1, num_cpus() // (config.trainer.world_size + config.engine.replicas))
    return share if num_gpus() == 0 else min(share, _THREADS_BESIDE_GPU)


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
