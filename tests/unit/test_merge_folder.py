"""The merged folder as a whole: identity, files beside the weights, interruption, and what MERGE.json says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relax_pipeline.errors import AdapterError, MergeError
from relax_pipeline.lora.adapter import tensors_digest
from relax_pipeline.merge.merge import merge_adapter
from relax_pipeline.merge.plan import plan_merge
from relax_pipeline.merge.report import read_report
from relax_pipeline.merge.verify import verify_merge
from relax_pipeline.merge.workspace import Workspace, check_disk_space, open_workspace
from relax_pipeline.safetensors_io.identity import model_digest
from tests.merging import Q, added, pair, read_model, whole, write_base, write_lora

BASE = {f"model.layers.{i}.self_attn.q_proj.weight": whole(8, 6, seed=i) for i in range(3)}
A, B = whole(2, 6, seed=10), whole(8, 2, seed=11)
FILES = {
    "tokenizer.json": "{}",
    "modeling_own.py": "x = 1\n",
    "code/deep/helper.py": "y = 2\n",
    "original/params.json": "[]",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", BASE, shards=3, files=FILES)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_lora(tmp_path / "adapter", pair(Q, A, B))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is in the folder ---


def test_all_other_files_are_copied_as_they_are(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "out")
    before, after = content(base), content(tmp_path / "out")
    assert after.keys() == before.keys() | {"MERGE.json"}
    assert {name for name in before if after[name] != before[name]} == {"model-00001-of-00003.safetensors"}


def test_links_of_a_download_cache_are_followed(base: Path, adapter: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in base.iterdir():
        (snapshot / path.name).symlink_to(path)
    merge_adapter(snapshot, adapter, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out/code/deep/helper.py").read_text() == "y = 2\n"


def test_weights_that_no_index_names_are_reported(base: Path, adapter: Path, tmp_path: Path) -> None:
    (base / "original/consolidated.00.pth").write_bytes(b"weights")
    assert merge_adapter(base, adapter, tmp_path / "out").unmerged_weight_files == ("original/consolidated.00.pth",)


def test_the_report_says_what_was_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    report = merge_adapter(base, adapter, tmp_path / "out")
    tensors = pair(Q, A, B)
    assert report == read_report(tmp_path / "out")
    assert (report.base, report.base_check, report.quantization) == ("base", "not recorded", "none")
    assert report.base_digest == model_digest(base)
    assert report.adapter_digest == tensors_digest(tensors)
    assert report.counts == {
        "adapter_tensors": 2,
        "adapter_modules": 1,
        "tensors_changed": 1,
        "tensors_copied": 2,
        "shards": 3,
        "files_copied": len(FILES) + 2,
        "rows_verified": 3,
    }
    for name, file in report.files.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert file == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_progress_counts_the_bytes_of_the_weights(base: Path, adapter: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    merge_adapter(base, adapter, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_plan_writes_nothing_and_prints_as_a_table(base: Path, adapter: Path) -> None:
    before = content(base)
    assert plan_merge(base, adapter).table() == [
        ("adapter module", "kind", "rank", "scaling", "base tensor", "shape", "stored as", "file"),
        (Q, "linear", "2", "2", f"{Q}.weight", "8x6", "BF16", "model-00001-of-00003.safetensors"),
    ]
    assert content(base) == before


# --- identity ---


def test_a_checkpoint_folder_stands_for_the_adapter_in_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-0000120"
    checkpoint.mkdir()
    adapter.rename(checkpoint / "adapter")
    (checkpoint / "manifest.json").write_text(json.dumps({"base_digest": model_digest(base)}))
    assert merge_adapter(base, checkpoint, tmp_path / "out").base_check == "matched"


@pytest.mark.parametrize("file", ["adapter/relax_lora_meta.json", "manifest.json"])
def test_another_base_is_refused_unless_allowed(base: Path, adapter: Path, tmp_path: Path, file: str) -> None:
    checkpoint = tmp_path / "step-0000120"
    checkpoint.mkdir()
    adapter.rename(checkpoint / "adapter")
    (checkpoint / file).write_text(json.dumps({"base_digest": "0123456789abcdef"}))
    with pytest.raises(MergeError, match=r"trained on base 0123456789ab.*--allow-other-base"):
        merge_adapter(base, checkpoint, tmp_path / "out")
    report = merge_adapter(base, checkpoint, tmp_path / "out", allow_other_base=True)
    assert (report.base_check, report.adapter_base_digest) == ("other base allowed", "0123456789abcdef")


def test_two_records_that_disagree_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "relax_lora_meta.json").write_text(json.dumps({"base_digest": "a"}))
    (adapter / "manifest.json").write_text(json.dumps({"base_digest": "b"}))
    with pytest.raises(AdapterError, match="different bases"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_the_same_adapter_is_never_merged_twice(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "once")
    other = write_lora(tmp_path / "other", pair(Q, A, whole(8, 2, seed=12)))
    both = merge_adapter(tmp_path / "once", other, tmp_path / "both")
    assert len(both.merged_adapters) == 2
    for merged in ("once", "both"):
        with pytest.raises(MergeError, match="already contains this adapter"):
            merge_adapter(tmp_path / merged, adapter, tmp_path / "twice", allow_other_base=True)


# --- the output folder ---


def test_merging_again_returns_the_report_that_is_there(base: Path, adapter: Path, tmp_path: Path) -> None:
    first = merge_adapter(base, adapter, tmp_path / "out")
    stamp = (tmp_path / "out/MERGE.json").stat().st_mtime_ns
    assert merge_adapter(base, adapter, tmp_path / "out") == first
    assert (tmp_path / "out/MERGE.json").stat().st_mtime_ns == stamp


def test_merging_from_scratch_elsewhere_gives_the_same_bytes(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "here")
    merge_adapter(base, adapter, tmp_path / "there")
    here, there = (
        {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}
        for name in ("here", "there")
    )
    assert here == there
    assert "MERGE.json" in here


def test_a_result_that_lost_a_shard_is_not_taken_for_one(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "out")
    (tmp_path / "out/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MergeError, match="not empty"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_merge_record_of_another_tool_is_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    (base / "MERGE.json").write_text('{"method": "slerp"}')
    with pytest.raises(MergeError, match=r"MERGE\.json is of another version"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_folder_with_something_else_is_not_touched(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(MergeError, match="not empty"):
        merge_adapter(base, adapter, tmp_path / "out")
    assert content(tmp_path / "out") == {"mine.txt": b"mine"}


def test_an_empty_folder_is_filled(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    merge_adapter(base, adapter, tmp_path / "out")
    assert (tmp_path / "out/MERGE.json").is_file()


def test_an_output_inside_the_base_is_refused(base: Path, adapter: Path) -> None:
    with pytest.raises(MergeError, match="lies inside the base"):
        merge_adapter(base, adapter, base / "merged")


def test_two_merges_into_one_output_exclude_each_other(base: Path, adapter: Path, tmp_path: Path) -> None:
    with open_workspace(tmp_path / "out", fingerprint="x"), pytest.raises(MergeError, match="another process"):
        merge_adapter(base, adapter, tmp_path / "out")
    merge_adapter(base, adapter, tmp_path / "out")


def test_too_little_room_is_noticed_first(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"needs 1000000000.00 GB"):
        check_disk_space(Workspace(tmp_path, tmp_path / "out"), 10**18)


# --- interruption ---

KILLED = """
import os, sys
from pathlib import Path
from relax_pipeline.merge.merge import merge_adapter

def stop(done, total):
    if done > total / 2:
        os._exit(9)

root = Path(sys.argv[1])
merge_adapter(root / "base", root / "adapter", root / "out", progress=stop)
"""


def test_a_killed_merge_leaves_no_output_and_can_be_run_again(base: Path, adapter: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert not (tmp_path / "out").exists()
    merge_adapter(base, adapter, tmp_path / "out")
    result = read_model(tmp_path / "out")
    assert torch.equal(result[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A, B))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def interrupted(base: Path, adapter: Path, tmp_path: Path) -> Path:
    """Stop a merge when all shards are written; return its working folder."""

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(base, adapter, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    return tmp_path / ".out.merging"


def test_whole_shards_are_kept_when_a_merge_resumes(base: Path, adapter: Path, tmp_path: Path) -> None:
    folder = interrupted(base, adapter, tmp_path)
    finished = [folder / note.stem for note in (folder / ".records").glob("*.json")]
    stamps = {file.name: file.stat().st_mtime_ns for file in finished}
    assert stamps
    merge_adapter(base, adapter, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in stamps} == stamps


def test_a_damaged_shard_is_written_again(base: Path, adapter: Path, tmp_path: Path) -> None:
    folder = interrupted(base, adapter, tmp_path)
    damaged = [folder / note.stem for note in (folder / ".records").glob("*.json")]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    report = merge_adapter(base, adapter, tmp_path / "out")
    for file in damaged:
        data = (tmp_path / "out" / file.name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == report.files[file.name]["sha256"]
    assert torch.equal(read_model(tmp_path / "out")[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A, B))


def test_what_another_adapter_left_is_not_taken_up(base: Path, adapter: Path, tmp_path: Path) -> None:
    interrupted(base, adapter, tmp_path)
    other = write_lora(tmp_path / "other", pair(Q, A, whole(8, 2, seed=12)))
    merge_adapter(base, other, tmp_path / "out")
    expected = added(BASE[f"{Q}.weight"], A, whole(8, 2, seed=12))
    assert torch.equal(read_model(tmp_path / "out")[f"{Q}.weight"], expected)


# --- verification ---


@pytest.mark.parametrize("layer", [0, 1])
def test_verification_notices_a_changed_byte(base: Path, adapter: Path, tmp_path: Path, layer: int) -> None:
    merge_adapter(base, adapter, tmp_path / "out")
    file = tmp_path / "out" / f"model-0000{layer + 1}-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-96:] = bytes(byte ^ 0x40 for byte in data[-96:])
    file.write_bytes(data)
    with pytest.raises(MergeError, match=f"model.layers.{layer}.self_attn.q_proj.weight"):
        verify_merge(plan_merge(base, adapter), tmp_path / "out")
