"""Checkpoints are whole or absent, whatever happens while they are written, kept and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_pipeline.checkpoint.manifest import Identity, Manifest, check_continues, read_manifest
from relax_pipeline.checkpoint.seal import verify
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore, in_use
from relax_pipeline.errors import CheckpointError, TrainerError

IDENTITY = Identity(
    base_digest="b" * 64,
    rank=8,
    alpha=16.0,
    target_modules=("linear_proj", "linear_qkv"),
    scope="all",
    saves_lora_only=True,
    seed=0,
    data_fingerprint="d" * 64,
    trainer="fsdp",
)


def manifest(step: int) -> Manifest:
    return Manifest(
        run_name="run",
        step=step,
        policy_version=step,
        identity=IDENTITY,
        base_digest=IDENTITY.base_digest,
        epoch=1,
        offset=3,
        layout={"kind": "fsdp"},
    )


def write(text: str = "state") -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "0.distcp").write_text(text)
        (folder / "adapter.bin").write_text("adapter")

    return fill


def steps(store: CheckpointStore) -> list[int]:
    return [ref.step for ref in store.committed()]


def forbidden(error: CheckpointError) -> None:
    raise AssertionError(error)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def two(store: CheckpointStore) -> CheckpointStore:
    """A store that holds steps 10 and 20."""
    for step in (10, 20):
        store.save(manifest(step), write(f"state {step}"))
    return store


# --- Saving ---


def test_saved_checkpoint_reads_back(store: CheckpointStore) -> None:
    ref = store.save(manifest(10), write())
    assert ref == CheckpointRef(10, store.folder / "step-0000010")
    assert store.committed() == [ref]
    found = verify(ref.path)
    assert found.model_copy(update={"files": {}}) == manifest(10)
    assert {name: entry.size for name, entry in found.files.items()} == {"adapter.bin": 7, "trainer/0.distcp": 5}
    assert store.newest_intact(forbidden) == ref


def test_size_is_that_of_all_files(store: CheckpointStore) -> None:
    ref = store.save(manifest(10), write())
    names = ("adapter.bin", "trainer/0.distcp", "manifest.json", "COMMITTED")
    assert ref.num_bytes == sum((ref.path / name).stat().st_size for name in names)


def test_no_folder_is_no_checkpoint(store: CheckpointStore) -> None:
    assert store.committed() == []
    assert store.newest_intact(forbidden) is None


def test_steps_are_in_order_beyond_seven_digits(store: CheckpointStore) -> None:
    for step in (12345678, 2, 9999999):
        store.save(manifest(step), write())
    assert steps(store) == [2, 9999999, 12345678]


def test_same_step_again_replaces(two: CheckpointStore) -> None:
    ref = two.save(manifest(20), write("other"))
    assert (ref.path / "trainer" / "0.distcp").read_text() == "other"
    verify(ref.path)
    assert steps(two) == [10, 20]
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CheckpointError("a rank failed")])
def test_failed_save_leaves_nothing_and_the_rest_as_it_was(two: CheckpointStore, error: Exception) -> None:
    def fail(folder: Path) -> None:
        write()(folder)
        raise error

    for step in (20, 30):
        with pytest.raises(
            CheckpointError, match=rf"step-00000{step} was not saved: .*earlier checkpoints are as they"
        ):
            two.save(manifest(step), fail)
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]
    assert (verify(two.committed()[1].path), two.newest_intact(forbidden)) == (
        read_manifest(two.folder / "step-0000020"),
        two.committed()[1],
    )


def test_a_trainer_that_is_lost_fails_as_a_trainer_and_leaves_nothing(two: CheckpointStore) -> None:
    def fail(folder: Path | None = None) -> None:
        if folder:
            write()(folder)
        raise TrainerError("trainer rank 0 died")

    with pytest.raises(TrainerError, match="trainer rank 0 died"):
        two.save(manifest(30), fail)
    two.begin(40, write())
    with pytest.raises(TrainerError, match="trainer rank 0 died"):
        two.commit(manifest(40), fail)
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]


def test_save_of_nothing_is_refused(two: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="nothing was written to"):
        two.save(manifest(30), lambda _: None)
    assert steps(two) == [10, 20]


def test_a_save_that_was_begun_counts_once_it_is_committed(two: CheckpointStore) -> None:
    two.begin(30, write())
    assert steps(two) == [10, 20]
    finished: list[int] = []
    ref = two.commit(manifest(30), lambda: finished.append(len(steps(two))))
    assert (finished, steps(two)) == ([2], [10, 20, 30])
    verify(ref.path)


def test_the_next_save_removes_one_that_was_never_committed(two: CheckpointStore) -> None:
    two.begin(30, write())
    two.save(manifest(40), write())
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020", "step-0000040"]


def test_save_that_fails_after_it_was_begun_leaves_nothing(two: CheckpointStore) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    two.begin(30, write())
    with pytest.raises(CheckpointError, match=r"step-0000030 was not saved: .*earlier checkpoints are as they"):
        two.commit(manifest(30), fail)
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]


KILLED_SAVE = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint_store import manifest, write
from relax_pipeline.checkpoint.store import CheckpointStore

calls = 0

def crash_at(name):
    original = getattr(os, name)
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == {crash}:
            os._exit(9)
        return original(*arguments, **options)
    setattr(os, name, call)

for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
    crash_at(name)
CheckpointStore(Path({folder!r})).save(manifest({step}), write("new"))
os._exit(0)
"""


def crash(store: CheckpointStore, *, step: int, at: int) -> int:
    """Save in a process that dies at its n-th call to the file system; return its exit status."""
    program = KILLED_SAVE.format(tests=str(Path(__file__).parent), folder=str(store.folder), step=step, crash=at)
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


@pytest.mark.parametrize("at", range(1, 14))
def test_crash_anywhere_shows_the_old_or_the_new_and_the_next_save_cleans_up(two: CheckpointStore, at: int) -> None:
    status = crash(two, step=30, at=at)
    assert status in (0, 9)
    newest = two.newest_intact(forbidden)
    assert newest is not None
    assert steps(two) in ([10, 20], [10, 20, 30])
    if newest.step == 30:
        assert (newest.path / "trainer" / "0.distcp").read_text() == "new"
    else:
        assert status == 9
    two.save(manifest(40), write())
    assert all(path.name.startswith("step-") for path in two.folder.iterdir())


def test_the_crashes_above_cover_a_whole_save(two: CheckpointStore) -> None:
    assert crash(two, step=30, at=14) == 0


@pytest.mark.parametrize("at", range(1, 22))
def test_crash_while_replacing_never_shows_a_mixture(two: CheckpointStore, at: int) -> None:
    crash(two, step=20, at=at)
    for ref in two.committed():
        verify(ref.path)
    newest = two.newest_intact(forbidden)
    assert newest is not None
    assert (newest.path / "trainer" / "0.distcp").read_text() in ("state 10", "state 20", "new")
    two.save(manifest(20), write("later"))
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]
    assert verify(two.committed()[1].path)


# --- Damage ---


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[2] ^= 1
    file.write_bytes(content)


def edit_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"offset": 3', '"offset": 4'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f / "trainer" / "0.distcp"), "0.distcp has changed since it was written: its sha256 differs"),
        (lambda f: (f / "adapter.bin").write_text("adapter+"), "adapter.bin has 8 bytes, 7 were written"),
        (lambda f: (f / "adapter.bin").unlink(), "has missing or extra files: adapter.bin"),
        (lambda f: (f / "extra").touch(), "has missing or extra files: extra"),
        (lambda f: os.truncate(f / "manifest.json", 30), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "is no checkpoint: it has no manifest.json"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
        (edit_manifest, "manifest.json is not the one that was committed"),
        (lambda f: (f / "COMMITTED").write_text(""), "manifest.json is not the one that was committed"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(
    two: CheckpointStore, damage: Callable[[Path], object], message: str
) -> None:
    damage(two.folder / "step-0000020")
    passed_over: list[CheckpointError] = []
    newest = two.newest_intact(passed_over.append)
    assert newest is not None
    assert newest.step == 10
    [error] = passed_over
    assert message in str(error)
    assert str(two.folder / "step-0000020") in str(error)


def test_all_damaged_is_an_error(two: CheckpointStore) -> None:
    for ref in two.committed():
        flip(ref.path / "adapter.bin")
    passed_over: list[CheckpointError] = []
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints in .* are damaged"):
        two.newest_intact(passed_over.append)
    assert ["step-0000020" in str(passed_over[0]), "step-0000010" in str(passed_over[1])] == [True, True]


def test_uncommitted_folder_is_not_listed_and_can_be_saved_over(two: CheckpointStore) -> None:
    (two.folder / "step-0000020" / "COMMITTED").unlink()
    assert steps(two) == [10]
    two.save(manifest(20), write())
    assert steps(two) == [10, 20]


def test_other_names_are_not_listed(two: CheckpointStore) -> None:
    for name in ("step-20", "step-0000020.bak", "step-000003x"):
        (two.folder / name).mkdir()
        (two.folder / name / "COMMITTED").touch()
    assert steps(two) == [10, 20]


def test_newer_format_says_so(two: CheckpointStore) -> None:
    file = two.folder / "step-0000020" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 2, "novelty": 1}))
    with pytest.raises(CheckpointError, match=r"has checkpoint format 2; this version reads up to 1"):
        read_manifest(file.parent)


# --- Pruning ---


def test_last_ones_and_each_nth_stay(store: CheckpointStore) -> None:
    for step in range(1, 9):
        store.save(manifest(step), write())
    deleted = store.prune(keep_last=2, keep_every=3)
    assert [ref.step for ref in deleted] == [1, 2, 4, 5]
    assert steps(store) == [3, 6, 7, 8]
    assert len(list(store.folder.iterdir())) == 4


def test_fewer_than_the_last_ones_all_stay(two: CheckpointStore) -> None:
    assert two.prune(keep_last=3, keep_every=None) == []
    assert steps(two) == [10, 20]


def test_checkpoint_in_use_is_not_pruned_until_let_go(two: CheckpointStore) -> None:
    oldest = two.committed()[0]
    with in_use(oldest), in_use(oldest):
        assert two.prune(keep_last=1, keep_every=None) == []
        verify(oldest.path)
    assert two.prune(keep_last=1, keep_every=None) == [oldest]


def test_checkpoint_in_use_is_not_replaced(two: CheckpointStore) -> None:
    newest = two.committed()[1]
    with in_use(newest):
        with pytest.raises(CheckpointError, match="step-0000020 was not saved: another process is reading it"):
            two.save(manifest(20), write("other"))
        assert (newest.path / "trainer" / "0.distcp").read_text() == "state 20"
    two.save(manifest(20), write("other"))


def test_checkpoint_that_was_pruned_cannot_be_used(two: CheckpointStore) -> None:
    oldest = two.committed()[0]
    two.prune(keep_last=1, keep_every=None)
    with pytest.raises(CheckpointError, match="step-0000010 is gone"), in_use(oldest):
        pass


# --- Disks ---


def save_from(store: CheckpointStore, prelude: str = "", *, size: int = 100_000) -> str:
    """Save step 30 in a process of its own and return the error's message."""
    program = f"""
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint_store import manifest, write
from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.errors import CheckpointError
{prelude}
try:
    CheckpointStore(Path({str(store.folder)!r})).save(manifest(30), write("x" * {size}))
except CheckpointError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_file_that_grows_too_large_leaves_earlier_checkpoints(two: CheckpointStore) -> None:
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))"
    assert "step-0000030 was not saved: [Errno 27] File too large" in save_from(two, limit)
    assert steps(two) == [10, 20]
    assert len(list(two.folder.iterdir())) == 2


def test_full_disk_says_what_to_do_and_leaves_earlier_checkpoints(two: CheckpointStore) -> None:
    def fill(folder: Path) -> None:
        (folder / "trainer").symlink_to("/dev/full")
        (folder / "trainer").write_text("state")

    with pytest.raises(CheckpointError) as caught:
        two.save(manifest(30), fill)
    assert str(caught.value) == (
        "step-0000030 was not saved: [Errno 28] No space left on device; "
        f"free space on the disk of {two.folder}, or lower checkpoint.keep_last, and run again"
    )
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-0000010", "step-0000020"]
    assert two.newest_intact(forbidden) == two.committed()[1]


def test_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"step-0000010 was not saved: \[Errno 20\] Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(manifest(10), write())


def test_folder_that_must_not_be_written_says_what_to_do(two: CheckpointStore) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(CheckpointError, match=r"make .*checkpoints writable, or set output_dir to a folder that is"):
        two.save(manifest(30), refuse)


# --- Going on ---


def test_same_identity_goes_on(tmp_path: Path) -> None:
    check_continues(IDENTITY, IDENTITY.model_copy(), folder=tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("base_digest", "c", f"base_digest: checkpoint '{'b' * 64}', this run 'c'; model.path holds another model"),
        ("rank", 4, "rank: checkpoint 8, this run 4; set lora.rank back"),
        ("alpha", 8.0, "alpha: checkpoint 16.0, this run 8.0; set lora.alpha back"),
        (
            "target_modules",
            ("linear_qkv",),
            "target_modules: checkpoint ('linear_proj', 'linear_qkv'), this run ('linear_qkv',); set lora",
        ),
        ("scope", "language", "scope: checkpoint 'all', this run 'language'; set lora.scope back"),
        (
            "saves_lora_only",
            False,
            "saves_lora_only: checkpoint True, this run False; set checkpoint.save_lora_only back",
        ),
        ("seed", 1, "seed: checkpoint 0, this run 1; set seed back"),
        ("data_fingerprint", "e", "this run 'e'; the prompts or how they are rendered have changed"),
        ("trainer", "megatron", "trainer: checkpoint 'fsdp', this run 'megatron'; set trainer.kind back"),
    ],
)
def test_difference_is_told_with_both_values_and_the_remedy(
    tmp_path: Path, field: str, value: object, line: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_continues(IDENTITY, IDENTITY.model_copy(update={field: value}), folder=tmp_path)
    head, difference, last = str(caught.value).splitlines()
    assert head == f"{tmp_path} cannot be continued with this configuration:"
    assert line in difference
    assert last == "  or train under another run_name, or with --fresh"


def test_all_parts_of_the_identity_are_compared(tmp_path: Path) -> None:
    other = Identity(
        base_digest="x",
        rank=1,
        alpha=1.0,
        target_modules=("router",),
        scope="vision",
        saves_lora_only=False,
        seed=9,
        data_fingerprint="x",
        trainer="megatron",
    )
    with pytest.raises(CheckpointError) as caught:
        check_continues(IDENTITY, other, folder=tmp_path)
    named = {line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:-1]}
    assert named == set(Identity.model_fields)
