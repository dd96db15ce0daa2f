from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b.weight": torch.arange(4.0),
    "c.weight": torch.arange(10, dtype=torch.float16).view(5, 2),
}


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """Megatron-Bridge's, of a checkpoint in two files."""
    from relax_pipeline.trainer.megatron.patches import SafeTensorsStateSource

    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: TENSORS[n] for n in ("b.weight", "c.weight")}, tmp_path / "model-00002-of-00002.safetensors")
    return SafeTensorsStateSource(tmp_path)


def test_tensors_are_those_megatron_bridge_reads(source: Any) -> None:
    from relax_pipeline.trainer.megatron.reading import load_tensors

    expected, found = source.load_tensors(list(TENSORS)), load_tensors(source, TENSORS)
    assert found.keys() == expected.keys() == TENSORS.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_headers_are_read_once(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_pipeline.trainer.megatron import reading

    read, folder_tensors = [], reading.folder_tensors
    monkeypatch.setattr(reading, "folder_tensors", lambda folder: read.append(folder) or folder_tensors(folder))
    for name in TENSORS:
        reading.load_tensors(source, [name])
    assert read == [source.path]


def test_a_tensor_that_is_not_there_is_named(source: Any) -> None:
    from relax_pipeline.trainer.megatron import reading

    with pytest.raises(KeyError, match=r"d\.weight"):
        reading.load_tensors(source, ["d.weight"])
