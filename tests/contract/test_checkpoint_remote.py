"""Checkpoints in an object store: there whole or not at all, and one attempt at a time writes them."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_pipeline.checkpoint.manifest import Identity, Manifest
from relax_pipeline.checkpoint.mirror import fetch_changes, fetch_newest, open_mirror
from relax_pipeline.checkpoint.owner import Ownership
from relax_pipeline.checkpoint.remote import RemoteCheckpoints
from relax_pipeline.checkpoint.seal import verify
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import CheckpointConfig
from relax_pipeline.errors import CheckpointError, PublishError, RunLockedError
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.local import LocalStore
from relax_pipeline.storage.s3 import S3Store

IDENTITY = Identity(
    base_digest="b" * 64,
    rank=8,
    alpha=16.0,
    target_modules=("linear_qkv",),
    scope="all",
    saves_lora_only=True,
    seed=0,
    data_fingerprint="d" * 64,
    trainer="fsdp",
)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    endpoint, bucket = request.getfixturevalue("s3_endpoint"), request.getfixturevalue("bucket")
    return S3Store(bucket, "checkpoints", endpoint_url=endpoint, part_size=1000, threads=2)


@pytest.fixture
def here(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "here" / "checkpoints")


@pytest.fixture
def elsewhere(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "elsewhere" / "checkpoints")


def save(checkpoints: CheckpointStore, step: int, *, state: str = "s" * 2500) -> CheckpointRef:
    def fill(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "0.distcp").write_text(state)
        (folder / "adapter.bin").write_text(f"adapter {step}")

    numbers = {"step": step, "policy_version": step, "epoch": 0, "offset": step}
    return checkpoints.save(
        Manifest(run_name="run", identity=IDENTITY, base_digest=IDENTITY.base_digest, layout={}, **numbers), fill
    )


def upload(remote: RemoteCheckpoints, *refs: CheckpointRef) -> None:
    for ref in refs:
        remote.upload(ref, may_commit=lambda: None)


def content(ref: CheckpointRef) -> dict[str, bytes]:
    return {str(f.relative_to(ref.path)): f.read_bytes() for f in ref.path.rglob("*") if f.is_file()}


def refuse() -> None:
    raise RunLockedError("taken")


def test_a_checkpoint_comes_back_byte_for_byte(
    store: ObjectStore, here: CheckpointStore, elsewhere: CheckpointStore
) -> None:
    remote, saved = RemoteCheckpoints(store, "run"), save(here, 7)
    upload(remote, saved)
    fetched = fetch_newest(remote, elsewhere)
    assert fetched is not None
    verify(fetched.path)
    assert content(fetched) == content(saved)


def test_what_may_not_be_committed_is_not_there(store: ObjectStore, here: CheckpointStore) -> None:
    remote = RemoteCheckpoints(store, "run")
    with pytest.raises(RunLockedError):
        remote.upload(save(here, 7), may_commit=refuse)
    assert remote.committed() == []


def test_a_stopped_upload_is_not_there_and_goes_on_later(store: ObjectStore, here: CheckpointStore) -> None:
    def stop(done: int, total: int) -> None:
        raise PublishError("stopped")

    remote, saved = RemoteCheckpoints(store, "run"), save(here, 7)
    with pytest.raises(PublishError, match="stopped"):
        remote.upload(saved, may_commit=lambda: None, progress=stop)
    assert remote.committed() == []
    upload(remote, saved)
    assert [ref.step for ref in remote.committed()] == [7]


def test_nothing_is_fetched_where_as_new_a_checkpoint_is_intact(store: ObjectStore, here: CheckpointStore) -> None:
    remote = RemoteCheckpoints(store, "run")
    upload(remote, save(here, 7))
    assert fetch_newest(remote, here) is None


def test_a_damaged_local_checkpoint_is_replaced_by_the_stores(store: ObjectStore, here: CheckpointStore) -> None:
    remote, saved = RemoteCheckpoints(store, "run"), save(here, 7)
    upload(remote, saved)
    (saved.path / "adapter.bin").write_text("adapter 8")
    assert fetch_newest(remote, here) == saved
    verify(saved.path)


def test_an_object_that_has_changed_is_not_taken(
    store: ObjectStore, here: CheckpointStore, elsewhere: CheckpointStore
) -> None:
    remote = RemoteCheckpoints(store, "run")
    upload(remote, save(here, 7))
    store.put_bytes(f"{remote.committed()[0].prefix}/adapter.bin", b"adapter 8")
    with pytest.raises(CheckpointError, match=r"adapter\.bin is not the file that was sent"):
        fetch_newest(remote, elsewhere)
    assert elsewhere.committed() == []


def test_the_store_keeps_what_it_is_told_whatever_is_kept_here(store: ObjectStore, here: CheckpointStore) -> None:
    remote = RemoteCheckpoints(store, "run")
    for step in range(1, 8):
        upload(remote, save(here, step))
        here.prune(keep_last=1, keep_every=None)
    remote.prune(keep_last=2, keep_every=3)
    assert [ref.step for ref in here.committed()] == [7]
    assert [ref.step for ref in remote.committed()] == [3, 6, 7]
    assert len(store.keys("run/step-")) == 3 * 4


# --- Ownership. ---


def test_an_attempt_elsewhere_is_refused_while_the_owner_lives(store: ObjectStore, tmp_path: Path) -> None:
    owner = Ownership(store, "run", tmp_path / "a")
    other = Ownership(store, "run", tmp_path / "b", silence=5.0)
    owner.acquire()

    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            owner.renew()

    with ThreadPoolExecutor(1) as thread:
        living = thread.submit(live)
        with pytest.raises(RunLockedError, match=r"is being trained by process \d+ on .* in .*a; wait for it"):
            other.acquire()
        ended.set()
        living.result()


def test_a_silent_owner_is_replaced_and_finds_out(store: ObjectStore, tmp_path: Path) -> None:
    silent = Ownership(store, "run", tmp_path / "a")
    other = Ownership(store, "run", tmp_path / "b", silence=0.3)
    silent.acquire()
    other.acquire()
    other.renew()
    with pytest.raises(RunLockedError, match=r"was taken from this attempt: is now owned by process \d+ on .*b"):
        silent.renew()
    with pytest.raises(RunLockedError):
        silent.check()
    silent.release()
    other.renew()


def test_the_same_folder_on_the_same_host_need_not_wait(store: ObjectStore, tmp_path: Path) -> None:
    Ownership(store, "run", tmp_path).acquire()
    again = Ownership(store, "run", tmp_path, silence=3600)
    again.acquire()
    again.renew()


def test_a_released_run_is_free(store: ObjectStore, tmp_path: Path) -> None:
    first = Ownership(store, "run", tmp_path / "a")
    first.acquire()
    first.release()
    Ownership(store, "run", tmp_path / "b", silence=3600).acquire()


# --- All together. ---


@pytest.fixture
def config(bucket: str, s3_endpoint: str) -> CheckpointConfig:
    return CheckpointConfig(store=f"s3://{bucket}/runs", endpoint_url=s3_endpoint, remote_keep_last=2)


def test_saves_arrive_in_the_background_and_are_found_elsewhere(config: CheckpointConfig, tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    local = CheckpointStore(here / "checkpoints")
    with open_mirror(config, "run", here) as mirror:
        assert mirror is not None
        for step in (1, 2, 3):
            mirror.send(save(local, step))
        (here / "metrics.jsonl").write_text('{"step": 3}\n')
        mirror.send(save(local, 4))
        mirror.finish()
        assert [ref.step for ref in mirror.remote.committed()] == [3, 4]
    shutil.rmtree(here)
    with open_mirror(config, "run", elsewhere):
        assert [ref.step for ref in CheckpointStore(elsewhere / "checkpoints").committed()] == [4]
        assert (elsewhere / "metrics.jsonl").read_text() == '{"step": 3}\n'


def test_changes_made_at_pauses_hold_on_a_machine_that_is_behind(config: CheckpointConfig, tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with open_mirror(config, "run", here) as mirror:
        assert mirror is not None
        mirror.send(save(CheckpointStore(here / "checkpoints"), 1))
        (here / "changes.json").write_text("changed after step 1")
        mirror.send(save(CheckpointStore(here / "checkpoints"), 2))
        mirror.finish()
    fetch_changes(config, "run", elsewhere)
    assert (elsewhere / "changes.json").read_text() == "changed after step 1"
    (here / "changes.json").write_text("changed after step 2, and not sent yet")
    fetch_changes(config, "run", here)
    assert (here / "changes.json").read_text() == "changed after step 2, and not sent yet"


def test_a_run_that_was_taken_sends_nothing_more(config: CheckpointConfig, tmp_path: Path) -> None:
    here = tmp_path / "here"
    with open_mirror(config, "run", here) as mirror:
        assert mirror is not None
        taker = Ownership(mirror.remote.store, "run", tmp_path / "there", silence=0.0)
        taker.acquire()
        mirror.send(save(CheckpointStore(here / "checkpoints"), 1))
        with pytest.raises(RunLockedError, match="was taken from this attempt"):
            mirror.finish()
        assert mirror.remote.committed() == []


def test_the_last_save_has_to_arrive(config: CheckpointConfig, tmp_path: Path) -> None:
    here = tmp_path / "here"
    with open_mirror(config, "run", here) as mirror:
        assert mirror is not None
        ref = save(CheckpointStore(here / "checkpoints"), 1)
        shutil.rmtree(ref.path)
        mirror.send(ref)
        with pytest.raises(PublishError, match="step 1 was not sent to s3://"):
            mirror.finish()
