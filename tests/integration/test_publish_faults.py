"""Publishing to a real S3 API through a network that fails: nobody ever sees a partial model, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_pipeline.errors import PublishError
from relax_pipeline.publish.published import find_problems, list_published, published_in, verify_published
from relax_pipeline.publish.upload import PublishReport, publish_to
from relax_pipeline.storage.s3 import S3Store
from tests.integration.fault_proxy import Call, Fault, FaultProxy

NUM_CALLS = 20
"""Requests of one publication when nothing fails."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small file, and one that goes up in three parts."""
    folder = tmp_path_factory.mktemp("merged")
    save_file({"weight": np.arange(7 * 90, dtype=np.float32).reshape(7, 90)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


@dataclass
class Lab:
    """A bucket, the failing way to it, and a reader's way on which nothing fails."""

    proxy: FaultProxy
    bucket: str
    reader: S3Store
    client: Any
    model: Path

    def store(self, *, deadline_s: float = 10.0, threads: int = 2) -> S3Store:
        options = {"deadline_s": deadline_s, "part_size": 1000, "threads": threads}
        return S3Store(self.bucket, "models", endpoint_url=self.proxy.url, **options)  # type: ignore[arg-type]

    def publish(self, store: S3Store | None = None, *, run_name: str = "demo", step: int = 1) -> PublishReport:
        return publish_to(store or self.store(), self.model, run_name=run_name, step=step)

    def assert_whole(self, run_name: str | None = None) -> None:
        """Whatever can be listed is complete."""
        for manifest in published_in(self.reader, run_name=run_name):
            assert find_problems(self.reader, manifest, prefix=f"{manifest.prefix}/") == []

    def watch(self, run_name: str | None = None) -> None:
        """Have a reader look after every call that may have changed something."""
        self.proxy.after = lambda call: None if call.method in ("GET", "HEAD") else self.assert_whole(run_name)

    def open_uploads(self) -> list[str]:
        return [upload["Key"] for upload in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])]


@pytest.fixture
def lab(s3_endpoint: str, bucket: str, model: Path) -> Iterator[Lab]:
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    with FaultProxy(s3_endpoint).running() as proxy:
        yield Lab(proxy, bucket, S3Store(bucket, "models", endpoint_url=s3_endpoint), client, model)


def is_part(call: Call) -> bool:
    return call.method == "PUT" and "partNumber" in call.path


def in_turn(fault: Fault, number: int) -> Callable[[Call], Fault | None]:
    return lambda call: fault if call.number == number else None


def dead_from(number: int) -> Callable[[Call], Fault | None]:
    """The call arrives, its answer does not, and nothing after it gets through."""
    return lambda call: "lost_answer" if call.number == number else "reset" if call.number > number else None


@pytest.mark.parametrize("fault", ["delay", "reset", "lost_answer", "cut_answer", "slow_down", "expired"])
def test_one_fault_at_every_call(lab: Lab, fault: Fault) -> None:
    store = lab.store()
    lab.publish(store, run_name="clean")
    num_calls = len(lab.proxy.calls)
    assert num_calls == NUM_CALLS
    for number in range(num_calls):
        lab.proxy.reset()
        lab.proxy.fault = in_turn(fault, number)
        lab.watch(f"{fault}-{number}")
        assert lab.publish(store, run_name=f"{fault}-{number}").outcome == "published"
    assert len(published_in(lab.reader)) == num_calls + 1
    lab.assert_whole()
    assert lab.open_uploads() == []


@pytest.mark.slow
def test_200_interruptions_lose_nothing(lab: Lab) -> None:
    """The network dies for good at a random call: as after SIGKILL, nothing can be tidied up."""
    chance = random.Random(7)
    store = lab.store(deadline_s=0)
    interruptions = models = 0
    while interruptions < 200:
        lab.proxy.reset()
        lab.proxy.fault = dead_from(chance.randrange(NUM_CALLS))
        lab.watch(f"run-{models}")
        try:
            complete = not lab.publish(store, run_name=f"run-{models}").notes
        except PublishError:
            complete = False
        models += complete
        interruptions += not complete
    assert models >= 5
    lab.proxy.reset()
    lab.publish(store, run_name=f"run-{models}")
    assert len(published_in(lab.reader)) == models + 1
    lab.assert_whole()
    assert lab.open_uploads() == []


@pytest.mark.parametrize("last", [2, 6, 9])
def test_killed_publisher_is_followed_by_one_that_finishes(lab: Lab, last: int) -> None:
    arguments = f"{str(lab.model)!r}), {lab.reader.uri!r}, run_name='demo', step=1, endpoint_url={lab.proxy.url!r}"
    imports = "from pathlib import Path; from relax_pipeline.publish.upload import publish_model"
    with subprocess.Popen([sys.executable, "-c", f"{imports}; publish_model(Path({arguments})"]) as child:
        lab.proxy.after = lambda call: os.kill(child.pid, signal.SIGKILL) if call.number == last else None
    assert child.returncode == -signal.SIGKILL
    lab.assert_whole()
    lab.proxy.reset()
    assert lab.publish().num_files == 2
    assert len(published_in(lab.reader)) == 1
    lab.assert_whole()
    assert lab.open_uploads() == []


def test_resume_sends_only_what_is_missing(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "reset" if is_part(call) else None
    with pytest.raises(PublishError):
        lab.publish(lab.store(deadline_s=0))
    lab.proxy.reset()
    assert lab.publish().bytes_sent == (lab.model / "model.safetensors").stat().st_size


def test_failed_upload_is_aborted_and_the_cause_kept(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "slow_down" if is_part(call) else None
    with pytest.raises(PublishError, match=r"model\.safetensors.*SlowDown.*publish again") as caught:
        lab.publish(lab.store(deadline_s=0.5))
    assert caught.value.__cause__ is not None
    assert "tried" in caught.value.__cause__.__notes__[0]
    assert lab.open_uploads() == []


def test_abort_that_fails_does_not_hide_the_cause(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "denied" if is_part(call) or call.method == "DELETE" else None
    with pytest.raises(PublishError, match=r"UploadPart.*allow these credentials") as caught:
        lab.publish()
    assert "could not be removed" in caught.value.__notes__[0]
    assert len(lab.open_uploads()) == 1


def test_next_publisher_removes_what_a_failed_one_left(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "reset" if is_part(call) or call.method == "DELETE" else None
    with pytest.raises(PublishError):
        lab.publish(lab.store(deadline_s=0))
    assert len(lab.open_uploads()) == 1
    lab.proxy.reset()
    lab.publish()
    assert lab.open_uploads() == []


def test_tidying_up_may_be_forbidden(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "denied" if "?uploads" in call.path and call.method == "GET" else None
    report = lab.publish()
    assert report.outcome == "published"
    assert "leftovers of interrupted uploads were not removed" in report.notes[0]


def test_store_without_conditional_writes_is_refused(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "not_implemented" if "If-None-Match" in call.headers else None
    with pytest.raises(PublishError, match="lacks conditional writes"):
        lab.publish()
    assert published_in(lab.reader) == []


def test_object_that_arrives_damaged_is_sent_again(lab: Lab) -> None:
    parts: list[Call] = []

    def damage_first_part(call: Call) -> Fault | None:
        parts.extend([call] if is_part(call) else [])
        return "corrupt" if parts == [call] else None

    lab.proxy.fault = damage_first_part
    lab.watch()
    report = lab.publish(lab.store(threads=1))
    weights = (lab.model / "model.safetensors").stat().st_size
    assert report.bytes_sent == 2 * weights + (lab.model / "config.json").stat().st_size
    lab.assert_whole()


def test_store_that_always_damages_is_refused(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "corrupt" if call.method == "PUT" and call.path.endswith("config.json") else None
    with pytest.raises(PublishError, match=r"config\.json reads back as sha256"):
        lab.publish()
    assert published_in(lab.reader) == []


def test_renewed_credentials_are_picked_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(call: Call) -> Fault | None:
        if call.number < 6 or "Credential=fresh/" in call.headers["Authorization"]:
            return None
        os.environ["AWS_ACCESS_KEY_ID"] = "fresh"
        return "expired"

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stale")
    lab.proxy.fault = expire
    assert lab.publish().outcome == "published"


def test_expired_credentials_say_so(lab: Lab) -> None:
    lab.proxy.fault = lambda call: "expired"
    with pytest.raises(PublishError, match=r"ExpiredToken.*renew the credentials"):
        lab.publish(lab.store(deadline_s=0.3))


def test_of_two_publishers_one_wins_and_the_other_says_so(lab: Lab) -> None:
    both_at_the_manifest = threading.Barrier(2, timeout=120)

    def meet(call: Call) -> Fault | None:
        if call.method == "PUT" and call.path.endswith("manifest.json"):
            both_at_the_manifest.wait()
        return None

    lab.proxy.fault = meet
    lab.watch()
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lab.publish, [lab.store(), lab.store()]))
    assert sorted(report.outcome for report in reports) == ["published", "published_by_other"]
    assert reports[0].uri == reports[1].uri
    assert len(published_in(lab.reader)) == 1


def test_loser_whose_upload_the_winner_removed_still_succeeds(lab: Lab) -> None:
    """The winner tidies up while the loser is between two parts."""
    winner: list[PublishReport] = []

    def overtake(call: Call) -> None:
        if is_part(call) and not winner:
            winner.append(lab.publish(lab.reader))

    lab.proxy.after = overtake
    report = lab.publish(lab.store(threads=1))
    assert (winner[0].outcome, report.outcome) == ("published", "published_by_other")
    lab.assert_whole()


def test_upload_that_someone_else_aborts_is_an_error(lab: Lab) -> None:
    def abort(call: Call) -> None:
        if is_part(call):
            lab.reader.discard_partial("demo")

    lab.proxy.after = abort
    with pytest.raises(PublishError, match="another process aborted this upload"):
        lab.publish(lab.store(threads=1))


def test_pointer_that_another_publisher_moves_ahead_stays_ahead(lab: Lab) -> None:
    newer: list[PublishReport] = []

    def overtake(call: Call) -> Fault | None:
        if call.method == "PUT" and call.path.endswith("latest.json") and not newer:
            newer.append(lab.publish(lab.reader, step=9))
        return None

    lab.proxy.fault = overtake
    assert not lab.publish(step=3).latest_moved
    assert newer[0].latest_moved
    listed = list_published(lab.reader.uri, endpoint_url=lab.proxy.url)
    assert [(found.step, found.is_latest) for found in listed] == [(3, False), (9, True)]


def test_no_request_carries_what_other_stores_reject(lab: Lab) -> None:
    verify_published(lab.publish().uri, endpoint_url=lab.proxy.url)
    for call in lab.proxy.calls:
        assert call.path.startswith(f"/{lab.bucket}"), "path style"
        assert not {name.lower() for name in call.headers} & {"x-amz-trailer", "x-amz-sdk-checksum-algorithm"}
        assert "aws-chunked" not in call.headers.get("Content-Encoding", "")
