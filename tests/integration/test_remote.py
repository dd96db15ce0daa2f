"""Objects in processes of their own, on a real Ray: answers, errors, deadlines, deaths."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hosted import Misbehaving

from relax_pipeline.errors import AdapterError, EngineError, RelaxError, TrainerError, UnknownVersionError
from relax_pipeline.remote.cluster import num_cpus, num_gpus
from relax_pipeline.remote.engine import RemoteEngine
from relax_pipeline.remote.host import Host, put
from relax_pipeline.remote.logs import forwarded, logged
from relax_pipeline.remote.trainer import RemoteTrainer

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture
def start() -> Iterator[Callable[..., Host]]:
    hosts = []

    def start(build: Callable[[], object] = Misbehaving) -> Host:
        hosts.append(Host(build, name="engine 3", error=EngineError))
        return hosts[-1]

    yield start
    for host in hosts:
        host.kill()


def test_cluster_has_what_was_asked_for() -> None:
    assert (num_cpus(), num_gpus()) == (2, 0)


def test_object_lives_in_a_process_of_its_own(start: Callable[..., Host]) -> None:
    host = start()
    rank, pid = host.call("info", timeout=30)
    assert rank == 0
    assert pid == host.pid(timeout=30) != os.getpid()


def test_what_a_process_logs_is_logged_here(
    start: Callable[..., Host], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engine-3.log").write_text("2026-11-30 12:00:00,000 ERROR relax_pipeline: of an earlier attempt\n")
    with caplog.at_level(logging.DEBUG, logger="relax_pipeline"), forwarded(tmp_path):
        start(logged(Misbehaving, tmp_path / "engine-3.log")).call("tell", timeout=30)
    records = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "relax_pipeline.remote.logs"]
    assert records == [
        ("INFO", "engine-3: relax_pipeline.trainer: step 3"),
        ("INFO", "engine-3: of 5"),
        ("ERROR", "engine-3: megatron.core: rank 1 is late"),
    ]


def test_a_guest_runs_on_its_hosts_node_and_gpus(start: Callable[..., Host]) -> None:
    place = start().place(timeout=30)
    assert place.gpu_ids == ()
    guest = Host(Misbehaving, name="guest", error=EngineError, guest_of=replace(place, gpu_ids=("3", "5")))
    try:
        assert guest.call("visible_gpus", timeout=30) == "3,5"
        assert guest.place(timeout=30).node_id == place.node_id
    finally:
        guest.kill()


LATE = """
import ray
from relax_pipeline.config import ClusterConfig
from relax_pipeline.errors import EngineError
from relax_pipeline.remote.cluster import ray_cluster
from relax_pipeline.remote.host import Host
from hosted import Misbehaving

with ray_cluster(ClusterConfig(num_cpus=1, num_gpus=0), namespace="late"):
    host = Host(Misbehaving, name="engine 3", error=EngineError)
    pending = host.submit("echo", 5)
    assert host.result(pending, timeout=60) == 5
for late in (
    lambda: host.call("echo", 5, timeout=5),
    lambda: host.result(pending, timeout=5),
    lambda: Host(Misbehaving, name="engine 3", error=EngineError),
):
    try:
        late()
    except EngineError as error:
        assert str(error) == "engine 3: the run is over, and its Ray is gone"
    else:
        raise AssertionError("a late call was answered")
host.kill()
try:
    ray.put(1)
except Exception as error:
    assert not isinstance(error, AssertionError)
assert not ray.is_initialized()
"""


def test_a_late_call_starts_no_ray_of_its_own() -> None:
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=120, env=environment)


def test_own_errors_arrive_as_themselves(start: Callable[..., Host]) -> None:
    host = start()
    with pytest.raises(UnknownVersionError, match=r"^holds policy versions \[1\], not 2$"):
        host.call("refuse", timeout=30)
    assert host.call("echo", 5, timeout=30) == 5


def test_other_errors_name_the_process_and_show_the_trace(start: Callable[..., Host]) -> None:
    with pytest.raises(EngineError, match=r"(?s)^engine 3 failed: .*in stumble.*KeyError: 'weight'"):
        start().call("stumble", timeout=30)


def test_death_is_told_to_who_waits(start: Callable[..., Host]) -> None:
    host = start()
    with pytest.raises(EngineError, match=r"^engine 3 died: "):
        host.call("die", timeout=30)
    with pytest.raises(EngineError, match=r"^engine 3 died: "):
        host.call("echo", 5, timeout=30)


def test_failure_to_build_is_told_at_the_first_call(start: Callable[..., Host]) -> None:
    host = start(partial(Misbehaving, fault="build"))
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"^cannot be built$"):
            host.pid(timeout=30)


def test_deadline_ends_the_process(start: Callable[..., Host]) -> None:
    host = start()
    pid = host.pid(timeout=30)
    with pytest.raises(EngineError, match=r"^engine 3 gave no answer within 0\.5 s and was killed$"):
        host.call("wait", 60.0, timeout=0.5)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.1)
    pytest.fail("the process is still there")


def test_a_process_that_was_ended_answers_nothing_more(start: Callable[..., Host]) -> None:
    host = start()
    assert host.call("echo", 1, timeout=30) == 1
    host.kill()
    with pytest.raises(EngineError, match=r"died: it was ended by this run$"):
        host.call("echo", 2, timeout=30)


def test_placed_value_arrives_as_the_value(start: Callable[..., Host]) -> None:
    assert start().call("echo", put([1, 2]), timeout=30) == [1, 2]


def test_deadline_of_an_engine_counts_from_when_it_is_free() -> None:
    engine = RemoteEngine(
        Misbehaving,  # type: ignore[arg-type]
        name="engine 3",
        num_threads=None,
        num_gpus=0,
        control_timeout=30,
        generate_timeout=30,
    )
    engine.info()
    engine._control_timeout = 2.5
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda seconds: engine.control("wait", seconds), [1.0] * 4)) == ["done"] * 4
    engine.close()


@pytest.fixture
def group() -> Iterator[Callable[..., RemoteTrainer]]:
    """Start a group of ranks, each with its fault, and wait until all are there."""
    groups = []

    def start(*faults: str, timeout: float = 30) -> RemoteTrainer:
        builds = [partial(Misbehaving, rank, fault) for rank, fault in enumerate(faults)]
        trainer = RemoteTrainer(builds, num_threads=None, num_gpus=0, timeout=60)  # type: ignore[arg-type]
        trainer.pids()
        trainer._timeout = timeout
        groups.append(trainer)
        return trainer

    yield start
    for trainer in groups:
        trainer.close()


def test_rank_zero_answers_for_the_group(group: Callable[..., RemoteTrainer]) -> None:
    assert group("answer", "answer").optim_step() == {"rank": 0.0}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (("none", "raise"), "^trainer rank 1: this rank's adapter is broken$"),
        (("raise", "none"), "^trainer rank 0: this rank's adapter is broken$"),
        (("none", "bug"), "(?s)^trainer rank 1 failed: .*KeyError: 'weight'"),
        (("none", "die"), "^trainer rank 1 died: "),
        (("lost", "late"), "^trainer rank 1: this rank's adapter is broken$"),
    ],
)
def test_failure_of_a_rank_arrives_in_seconds_and_names_it(
    group: Callable[..., RemoteTrainer], faults: tuple[str, ...], message: str
) -> None:
    trainer = group(*faults)
    started = time.monotonic()
    with pytest.raises(RelaxError, match=message) as caught:
        trainer.optim_step()
    assert time.monotonic() - started < 10
    assert type(caught.value).__name__ == ("TrainerError" if {"bug", "die"} & set(faults) else "AdapterError")
    with pytest.raises(TrainerError, match="died"):  # no rank is left behind
        trainer.info()


def test_failure_of_a_single_rank_leaves_it_alive(group: Callable[..., RemoteTrainer]) -> None:
    trainer = group("raise")
    with pytest.raises(RelaxError, match=r"^this rank's adapter is broken$"):
        trainer.optim_step()
    assert trainer.info()[0] == 0  # type: ignore[index]


def test_group_that_gives_no_answer_is_ended(group: Callable[..., RemoteTrainer]) -> None:
    trainer = group("answer", "none", timeout=1)
    with pytest.raises(TrainerError, match=r"^trainer rank 1 gave no answer within 1 s; all ranks were killed$"):
        trainer.optim_step()
