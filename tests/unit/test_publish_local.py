"""Publishing into a local folder: layout, no-op, resume, pointer, refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_pipeline.errors import ConfigError, PublishError
from relax_pipeline.publish.published import list_published, verify_published
from relax_pipeline.publish.upload import PublishReport, publish_model
from relax_pipeline.storage.local import LocalStore


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards, custom code in a sub-folder."""
    folder = tmp_path / "merged"
    (folder / "code").mkdir(parents=True)
    for number in (1, 2):
        tensors = {f"layer.{number}.weight": np.full((3, 5), number, np.float32)}
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors")
    names = {f"layer.{n}.weight": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# Base\n")
    (folder / "code" / "modeling.py").write_text("x = 1\n")
    return folder


def publish(model: Path, to: Path, *, step: int = 12, **options: object) -> PublishReport:
    return publish_model(model, to.as_uri(), run_name="demo", step=step, **options)  # type: ignore[arg-type]


def published_folder(report: PublishReport) -> Path:
    return Path(report.uri.removeprefix("file://"))


def test_every_file_arrives_under_an_immutable_name(model: Path, tmp_path: Path) -> None:
    report = publish(model, tmp_path / "store")
    folder = published_folder(report)
    assert folder == tmp_path / "store" / "demo" / f"step-0000012-{report.digest[:12]}"
    sent = {path.relative_to(model): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    arrived = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert arrived.keys() - sent.keys() == {Path("manifest.json")}
    assert all(arrived[name] == content for name, content in sent.items())


def test_manifest_lists_size_and_sha256_of_each_file(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    files = {file["name"]: file for file in json.loads((folder / "manifest.json").read_text())["files"]}
    assert len(files) == 6
    content = (model / "code" / "modeling.py").read_bytes()
    expected = {"name": "code/modeling.py", "size": 6, "sha256": hashlib.sha256(content).hexdigest()}
    assert files["code/modeling.py"] == expected


def test_again_sends_nothing(model: Path, tmp_path: Path) -> None:
    first = publish(model, tmp_path / "store")
    second = publish(model, tmp_path / "store")
    assert (first.outcome, second.outcome) == ("published", "already_published")
    assert (first.bytes_sent, second.bytes_sent) == (first.num_bytes, 0)
    assert second.uri == first.uri


def test_partial_upload_is_resumed(model: Path, tmp_path: Path) -> None:
    first = publish(model, tmp_path / "store")
    folder = published_folder(first)
    (folder / "manifest.json").unlink()
    (folder / "config.json").unlink()
    second = publish(model, tmp_path / "store")
    assert (second.outcome, second.bytes_sent) == ("published", len("{}"))


def test_damaged_leftover_is_replaced(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text("[]")
    publish(model, tmp_path / "store")
    assert (folder / "config.json").read_text() == "{}"


def test_leftover_of_a_killed_copy_is_removed(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    leftover = folder / ".config.json.0123.partial"
    leftover.write_text("{")
    assert verify_published(folder.as_uri()).num_files == 6
    publish(model, tmp_path / "store")
    assert not leftover.exists()


def test_without_manifest_nothing_is_listed(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    (folder / "manifest.json").unlink()
    assert list_published((tmp_path / "store").as_uri()) == []


def test_listing_orders_by_step_and_marks_the_latest(model: Path, tmp_path: Path) -> None:
    for step in (20, 3):
        publish(model, tmp_path / "store", step=step)
    listed = list_published((tmp_path / "store").as_uri())
    assert [(found.step, found.is_latest) for found in listed] == [(3, False), (20, True)]
    assert {found.run_name for found in listed} == {"demo"}


def test_latest_never_moves_backwards(model: Path, tmp_path: Path) -> None:
    newer = publish(model, tmp_path / "store", step=20)
    older = publish(model, tmp_path / "store", step=3)
    assert (newer.latest_moved, older.latest_moved) == (True, False)
    pointer = json.loads((tmp_path / "store" / "demo" / "latest.json").read_text())
    assert pointer["prefix"] == f"demo/step-0000020-{newer.digest[:12]}"


def test_a_second_model_of_a_step_becomes_latest_and_the_first_does_not_come_back(model: Path, tmp_path: Path) -> None:
    publish(model, tmp_path / "store")
    second = publish(model, tmp_path / "store", card={"README.md": "# Better\n"})
    again = publish(model, tmp_path / "store")
    assert (second.latest_moved, again.latest_moved) == (True, False)


def test_latest_can_be_left_alone(model: Path, tmp_path: Path) -> None:
    report = publish(model, tmp_path / "store", update_latest=False)
    assert not report.latest_moved
    assert not (tmp_path / "store" / "demo" / "latest.json").exists()


def test_card_replaces_the_readme_and_leaves_the_folder_alone(model: Path, tmp_path: Path) -> None:
    folder = published_folder(
        publish(model, tmp_path / "store", card={"README.md": "# Run\n", "curves/r.svg": "<svg/>"})
    )
    assert (folder / "README.md").read_text() == "# Run\n"
    assert (folder / "curves" / "r.svg").read_text() == "<svg/>"
    assert (model / "README.md").read_text() == "# Base\n"


def test_progress_ends_at_the_whole(model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = publish(model, tmp_path / "store", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (report.num_bytes, report.num_bytes)


def test_verify_names_everything_that_is_wrong(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    (folder / "config.json").unlink()
    (folder / "README.md").write_text("# Bass\n")
    (folder / "code" / "modeling.py").write_text("")
    (folder / "extra.txt").touch()
    with pytest.raises(PublishError) as caught:
        verify_published(folder.as_uri())
    message = str(caught.value)
    for problem in (
        "config.json is missing",
        "README.md has sha256",
        "modeling.py has 0 bytes instead of 6",
        "extra.txt is not",
    ):
        assert problem in message


def test_verify_accepts_a_copy_elsewhere(model: Path, tmp_path: Path) -> None:
    folder = published_folder(publish(model, tmp_path / "store"))
    copy = folder.rename(tmp_path / "copy")
    assert not verify_published(copy.as_uri()).is_latest


def test_verify_refuses_a_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"has no manifest.json"):
        verify_published(tmp_path.as_uri())


def test_unknown_manifest_format_is_refused(model: Path, tmp_path: Path) -> None:
    manifest = published_folder(publish(model, tmp_path / "store")) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(PublishError, match="newer version"):
        list_published((tmp_path / "store").as_uri())


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model-00002-of-00002.safetensors", "names shards that are not there")],
)
def test_incomplete_model_is_refused(model: Path, tmp_path: Path, missing: str, message: str) -> None:
    (model / missing).unlink()
    with pytest.raises(PublishError, match=message):
        publish(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_model_without_weights_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.glob("model*"):
        file.unlink()
    with pytest.raises(PublishError, match=r"no .*safetensors weights"):
        publish(model, tmp_path / "store")


def test_shard_cut_short_is_refused(model: Path, tmp_path: Path) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PublishError, match=r"00002-of-00002.*is not a whole"):
        publish(model, tmp_path / "store")


def test_manifest_name_in_the_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "manifest.json").write_text("{}")
    with pytest.raises(PublishError, match="rename or remove"):
        publish(model, tmp_path / "store")


@pytest.mark.parametrize("destination", ["/tmp/x", "file://relative/x", "gs://bucket"])
def test_other_destinations_are_refused(model: Path, destination: str) -> None:
    with pytest.raises(ConfigError, match="names no object store"):
        publish_model(model, destination, run_name="demo", step=1)


def test_run_name_must_be_a_folder_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder name"):
        publish_model(model, tmp_path.as_uri(), run_name="../up", step=1)


def test_store_refuses_keys_outside_its_folder(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="leaves"):
        LocalStore(tmp_path / "in").put_bytes("../out", b"")
