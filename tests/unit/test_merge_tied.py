"""Tied embeddings: where only one of embedding and head changes, both are written and the config says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_pipeline.merge.merge import merge_adapter
from tests.merging import PREFIX, Q, added, pair, read_model, whole, write_base, write_lora

EMBED = "model.embed_tokens"
TABLE = whole(11, 6, seed=1)
TENSORS = {f"{EMBED}.weight": TABLE, f"{Q}.weight": whole(8, 6, seed=2)}
TIED = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
DEFAULT = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
HEAD_A, HEAD_B = whole(2, 6, seed=3), whole(11, 2, seed=4)
EMBED_LORA = {
    f"{PREFIX}{EMBED}.lora_embedding_A": whole(2, 11, seed=5),
    f"{PREFIX}{EMBED}.lora_embedding_B": whole(6, 2, seed=6),
}
NEW_TABLE = added(TABLE, whole(6, 2, seed=6).T, whole(2, 11, seed=5).T)


def merged(
    tmp_path: Path,
    adapter: dict[str, torch.Tensor],
    *,
    config: dict[str, Any] = TIED,
    tensors: Any = TENSORS,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    base = write_base(tmp_path / "base", tensors, config=config, shards=2)
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter, **more), tmp_path / "out")
    return read_model(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("config", [TIED, DEFAULT])
def test_an_adapted_head_is_written_beside_the_embedding(tmp_path: Path, config: dict[str, Any]) -> None:
    result, written = merged(tmp_path, pair("lm_head", HEAD_A, HEAD_B), config=config)
    assert torch.equal(result["lm_head.weight"], added(TABLE, HEAD_A, HEAD_B))
    assert torch.equal(result[f"{EMBED}.weight"], TABLE)
    assert written == {**config, "tie_word_embeddings": False}


def test_an_adapted_embedding_leaves_the_head_as_it_was(tmp_path: Path) -> None:
    result, written = merged(tmp_path, EMBED_LORA)
    assert torch.equal(result[f"{EMBED}.weight"], NEW_TABLE)
    assert torch.equal(result["lm_head.weight"], TABLE)
    assert written["tie_word_embeddings"] is False


def test_both_adapted_are_both_written(tmp_path: Path) -> None:
    result, _ = merged(tmp_path, EMBED_LORA | pair("lm_head", HEAD_A, HEAD_B))
    assert torch.equal(result[f"{EMBED}.weight"], NEW_TABLE)
    assert torch.equal(result["lm_head.weight"], added(TABLE, HEAD_A, HEAD_B))


def test_ensure_weight_tying_keeps_the_tie(tmp_path: Path) -> None:
    result, written = merged(tmp_path, EMBED_LORA, ensure_weight_tying=True)
    assert torch.equal(result[f"{EMBED}.weight"], NEW_TABLE)
    assert "lm_head.weight" not in result
    assert written == TIED


def test_other_targets_keep_the_tie(tmp_path: Path) -> None:
    result, written = merged(tmp_path, pair(Q, whole(2, 6), whole(8, 2)))
    assert result.keys() == TENSORS.keys()
    assert written == TIED


def test_a_head_trained_whole_is_written_whole(tmp_path: Path) -> None:
    new = whole(11, 6, seed=9)
    result, written = merged(tmp_path, {f"{PREFIX}lm_head.weight": new}, modules_to_save=["lm_head"])
    assert torch.equal(result["lm_head.weight"], new)
    assert torch.equal(result[f"{EMBED}.weight"], TABLE)
    assert written["tie_word_embeddings"] is False


def test_a_head_that_is_stored_although_tied_is_not_written_twice(tmp_path: Path) -> None:
    stored = {**TENSORS, "lm_head.weight": TABLE.clone()}
    result, written = merged(tmp_path, pair("lm_head", HEAD_A, HEAD_B), tensors=stored)
    assert result.keys() == stored.keys()
    assert torch.equal(result["lm_head.weight"], added(TABLE, HEAD_A, HEAD_B))
    assert written["tie_word_embeddings"] is False


def test_the_tie_is_undone_at_all_levels_of_a_multimodal_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {"hidden_size": 6, "tie_word_embeddings": True},
    }
    tensors = {"model.language_model.embed_tokens.weight": TABLE}
    result, written = merged(
        tmp_path, pair("lm_head", HEAD_A, HEAD_B), config=config, tensors={**tensors, "x.weight": whole(3)}
    )
    assert torch.equal(result["lm_head.weight"], added(TABLE, HEAD_A, HEAD_B))
    assert written["tie_word_embeddings"] is False
    assert written["text_config"]["tie_word_embeddings"] is False


def test_the_index_names_the_new_head(tmp_path: Path) -> None:
    result, _ = merged(tmp_path, pair("lm_head", HEAD_A, HEAD_B))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == index["weight_map"][f"{EMBED}.weight"]
    assert sorted(index["weight_map"]) == sorted(result)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in result.values())
