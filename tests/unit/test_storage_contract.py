"""What every object store does, checked on each of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.local import LocalStore
from relax_pipeline.storage.s3 import S3Store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    endpoint, bucket = request.getfixturevalue("s3_endpoint"), request.getfixturevalue("bucket")
    return S3Store(bucket, "models", endpoint_url=endpoint, part_size=1000, threads=2)


def put(store: ObjectStore, key: str, path: Path) -> int:
    sent: list[int] = []
    store.put_file(key, path, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), sent=sent.append)
    return sum(sent)


@pytest.mark.parametrize("size", [0, 999, 1000, 1001, 4096])
def test_file_comes_back_as_it_was(store: ObjectStore, tmp_path: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(content)
    assert put(store, "a/b.bin", tmp_path / "file") == size
    assert store.get_bytes("a/b.bin") == content
    assert store.sha256("a/b.bin") == hashlib.sha256(content).hexdigest()
    store.get_file("a/b.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    info = store.head("a/b.bin")
    assert info is not None
    assert info.size == size


def test_what_is_not_there(store: ObjectStore, tmp_path: Path) -> None:
    assert store.head("none") is None
    assert store.get_bytes("none") is None
    assert store.keys() == []
    with pytest.raises(PublishError, match="is gone"):
        store.sha256("none")
    with pytest.raises(PublishError, match="is gone"):
        store.get_file("none", tmp_path / "copy")


def test_keys_are_relative_sorted_and_filtered(store: ObjectStore) -> None:
    for key in ("run/b", "run/a/c", "running"):
        store.put_bytes(key, b"x")
    assert store.keys() == ["run/a/c", "run/b", "running"]
    assert store.keys("run/") == ["run/a/c", "run/b"]


def test_delete_is_idempotent(store: ObjectStore) -> None:
    store.put_bytes("key", b"x")
    store.delete("key")
    store.delete("key")
    assert store.head("key") is None


def test_write_only_where_nothing_is(store: ObjectStore) -> None:
    assert store.put_bytes("key", b"first", if_none_match=True)
    assert not store.put_bytes("key", b"second", if_none_match=True)
    assert store.get_bytes("key") == b"first"


def test_write_only_over_the_version_seen(store: ObjectStore) -> None:
    store.put_bytes("key", b"first")
    seen = store.head("key")
    assert seen is not None
    assert store.put_bytes("key", b"second", if_match=seen.version)
    assert not store.put_bytes("key", b"third", if_match=seen.version)
    assert store.get_bytes("key") == b"second"


def test_version_of_a_deleted_object_no_longer_matches(store: ObjectStore) -> None:
    store.put_bytes("key", b"first")
    seen = store.head("key")
    assert seen is not None
    store.delete("key")
    assert not store.put_bytes("key", b"second", if_match=seen.version)
