"""Everything a merge refuses: each with the name of what is wrong, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_pipeline.errors import AdapterError, MergeError, ModelError, RelaxError
from relax_pipeline.merge.merge import merge_adapter
from tests.merging import CONFIG, PREFIX, Q, pair, whole, write_base, write_lora

K = "model.layers.0.self_attn.k_proj"
EXPERTS = "model.layers.0.mlp.experts"
BASE = {
    "model.embed_tokens.weight": whole(11, 6, seed=1),
    f"{Q}.weight": whole(8, 6, seed=2),
    "model.ids.weight": torch.zeros(8, 6, dtype=torch.int64),
    "model.conv.weight": whole(8, 6, 1, 1),
    "lm_head.weight": whole(11, 6, seed=5),
}
A, B = whole(2, 6, seed=10), whole(8, 2, seed=11)


def refused(
    tmp_path: Path,
    kind: type[RelaxError],
    message: str,
    adapter: dict[str, torch.Tensor] | None = None,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Merge, expect one error, and expect that nothing is left."""
    base = write_base(tmp_path / "base", BASE if tensors is None else tensors, config={**CONFIG, **(model or {})})
    folder = write_lora(tmp_path / "adapter", pair(Q, A, B) if adapter is None else adapter, **config)
    with pytest.raises(kind, match=message):
        merge_adapter(base, folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


# --- adapter tensors ---


@pytest.mark.parametrize(
    "key",
    [
        f"{Q}.lora_A.a.b.weight",
        f"{Q}.lora_B.bias",
        "model.embed_tokens.token_adapter.trainable_tokens_delta",
        f"{Q}.original_module.weight",
        f"{Q}.lora_E",
    ],
)
def test_a_tensor_of_an_unknown_kind_is_named(tmp_path: Path, key: str) -> None:
    refused(tmp_path, AdapterError, key, pair(Q, A, B) | {PREFIX + key: whole(2)})


def test_a_tensor_that_replaces_nothing_is_named(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, "model.extra.weight", pair(Q, A, B) | {f"{PREFIX}model.extra.weight": whole(2)})


def test_half_a_pair_is_named(tmp_path: Path) -> None:
    refused(tmp_path, AdapterError, f"{Q}.lora_A.weight", {f"{PREFIX}{Q}.lora_A.weight": A})


def test_one_module_under_two_names(tmp_path: Path) -> None:
    refused(tmp_path, AdapterError, "both are part A", pair(Q, A, B) | pair(Q, A, B, prefix=""))


def test_one_weight_from_two_modules(tmp_path: Path) -> None:
    other = Q.replace("model.", "model.language_model.")
    refused(tmp_path, MergeError, "both change", pair(Q, A, B) | pair(other, A, B))


def test_a_name_that_could_mean_two_weights(tmp_path: Path) -> None:
    names = (Q.replace("model.", prefix) for prefix in ("model.language_model.", "language_model.model."))
    refused(tmp_path, MergeError, "could be any of", tensors={f"{name}.weight": whole(8, 6) for name in names})


def test_a_tensor_that_no_pairing_uses(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_up_proj.weight": whole(8, 6)}
    adapter = pair("model.layers.0.mlp.up_proj", A, whole(4, 2))
    adapter["model.layers.0.mlp.up_proj.base_layer.weight"] = whole(4, 6)
    refused(tmp_path, MergeError, "would go unused", adapter, tensors=tensors, model={"model_type": "phi3"})


def test_a_weight_both_replaced_and_added_to(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, "both replaces", pair(Q, A, B) | {f"{PREFIX}{Q}.weight": whole(8, 6)})


def test_a_module_the_base_lacks(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, K, pair(K, A, B))


def test_factors_that_do_not_fit(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, r"do not fit .*q_proj.weight of shape \[8, 6\]", pair(Q, whole(2, 8), whole(6, 2)))


def test_a_rank_the_config_does_not_know(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, r"expected \[4, in\] and \[out, 4\]", rank=4)


def test_a_replacement_of_another_shape(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, r"\[12, 6\].*resize the base", {f"{PREFIX}lm_head.weight": whole(12, 6)})


def test_a_base_copy_that_is_not_the_base(tmp_path: Path) -> None:
    adapter = {
        "model.embed_tokens.lora_embedding_A": whole(2, 11),
        "model.embed_tokens.lora_embedding_B": whole(6, 2),
        "model.embed_tokens.base_layer.weight": whole(11, 6, seed=99),
    }
    refused(tmp_path, MergeError, "base_layer.weight is not what the base has", adapter)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_in_the_adapter_that_are_not_finite(tmp_path: Path, value: float) -> None:
    bad = B.clone()
    bad[3, 1] = value
    refused(tmp_path, MergeError, f"{Q}.lora_B.weight holds NaN", pair(Q, A, bad))


@pytest.mark.parametrize("name", [f"{Q}.weight", "model.embed_tokens.weight"])
def test_values_in_the_base_that_are_not_finite(tmp_path: Path, name: str) -> None:
    bad = BASE[name].clone()
    bad[2, 3] = float("nan")
    refused(tmp_path, MergeError, f"{name} holds NaN", tensors={**BASE, name: bad})


def test_a_sum_that_overflows_the_dtype(tmp_path: Path) -> None:
    base = {f"{Q}.weight": torch.full((8, 6), 65000.0, dtype=torch.float16)}
    refused(
        tmp_path,
        MergeError,
        f"{Q}.weight holds NaN or inf",
        pair(Q, torch.ones(1, 6), torch.ones(8, 1) * 1000),
        tensors=base,
        rank=1,
    )


def test_a_delta_that_rounding_takes_whole(tmp_path: Path) -> None:
    base = {f"{Q}.weight": torch.full((8, 6), 256, dtype=torch.bfloat16)}
    small = pair(Q, torch.ones(1, 6), torch.full((8, 1), 0.25))
    refused(tmp_path, MergeError, "did not change", small, tensors=base, rank=1, alpha=1)


def test_a_convolution(tmp_path: Path) -> None:
    adapter = pair("model.conv", whole(2, 6, 1, 1), whole(8, 2, 1, 1))
    refused(tmp_path, MergeError, "model.conv", adapter)


def test_a_weight_of_integers(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, r"model.ids.weight is I64", pair("model.ids", A, B))


# --- adapter_config.json ---


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"use_qalora": True}, "use_qalora"),
        ({"something_new": {"x": 1}}, "something_new"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ],
)
def test_settings_with_another_meaning_are_refused_by_name(
    tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    refused(tmp_path, AdapterError, message, **setting)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_keep_the_base_are_merged(tmp_path: Path, init: object) -> None:
    base = write_base(tmp_path / "base", BASE)
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(Q, A, B), init_lora_weights=init), tmp_path / "out")


# --- DoRA ---


def test_dora_without_magnitudes(tmp_path: Path) -> None:
    refused(tmp_path, MergeError, "no lora_magnitude_vector", use_dora=True)


def test_dora_with_magnitudes_of_another_length(tmp_path: Path) -> None:
    adapter = pair(Q, A, B) | {f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(6)}
    refused(tmp_path, MergeError, r"expected \[8\]", adapter, use_dora=True)


def test_dora_of_a_projection_that_the_base_stores_fused(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_up_proj.weight": whole(8, 6)}
    adapter = pair("model.layers.0.mlp.up_proj", A, whole(4, 2))
    adapter["model.layers.0.mlp.up_proj.lora_magnitude_vector"] = torch.ones(4)
    refused(tmp_path, MergeError, "lora_magnitude_vector: DoRA", adapter, tensors=tensors, model={"model_type": "phi3"})


# --- experts ---


def test_experts_without_a_hidden_size_to_tell_their_orientation(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 8, 6), f"{EXPERTS}.down_proj": whole(3, 6, 4)}
    adapter = pair(f"{EXPERTS}.down_proj", whole(3, 2, 4), whole(3, 6, 2))
    refused(tmp_path, MergeError, "do not tell whether experts are stored", adapter, tensors=tensors)


def test_a_lone_square_expert_weight_is_ambiguous(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.down_proj": whole(3, 6, 6)}
    adapter = pair(f"{EXPERTS}.down_proj", whole(3, 2, 6), whole(3, 6, 2))
    refused(tmp_path, MergeError, "do not tell", adapter, tensors=tensors, model={"hidden_size": 6})


def test_square_flat_factors_of_an_unknown_peft_version(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 12, 6), f"{EXPERTS}.down_proj": whole(3, 6, 6)}
    adapter = pair(EXPERTS, whole(6, 6), whole(6, 6))
    refused(tmp_path, MergeError, "no peft_version", adapter, tensors=tensors, model={"hidden_size": 6})


def test_flat_factors_that_fit_no_projection(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 8, 6), f"{EXPERTS}.down_proj": whole(3, 6, 4)}
    adapter = pair(EXPERTS, whole(6, 5), whole(7, 6))
    refused(tmp_path, MergeError, "fit none of", adapter, tensors=tensors, model={"hidden_size": 6})


def test_a_number_of_experts_the_base_does_not_have(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 8, 6), f"{EXPERTS}.down_proj": whole(3, 6, 4)}
    adapter = pair(f"{EXPERTS}.down_proj", whole(4, 2, 4), whole(4, 6, 2))
    refused(tmp_path, MergeError, r"expected \[3, 2, 4\]", adapter, tensors=tensors, model={"hidden_size": 6})


def test_an_expert_the_base_does_not_have(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 8, 6), f"{EXPERTS}.down_proj": whole(3, 6, 4)}
    adapter = pair(f"{EXPERTS}.3.down_proj", whole(2, 4), whole(6, 2))
    refused(tmp_path, MergeError, "the base has 3 experts", adapter, tensors=tensors, model={"hidden_size": 6})


def test_gate_and_up_apart_from_a_fused_base_of_unknown_layout(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj": whole(3, 8, 6), f"{EXPERTS}.down_proj": whole(3, 6, 4)}
    adapter = pair(f"{EXPERTS}.0.up_proj", whole(2, 6), whole(4, 2))
    model = {"hidden_size": 6, "model_type": "novel_moe"}
    refused(tmp_path, MergeError, "model_type 'novel_moe'", adapter, tensors=tensors, model=model)


def test_a_fused_qkv_whose_heads_do_not_add_up(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.qkv_proj.weight": whole(11, 6)}
    model = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1}
    refused(tmp_path, MergeError, r"heads make 6 \+ 2 \* 2", pair(Q, A, whole(6, 2)), tensors=tensors, model=model)


# --- folders ---


@pytest.mark.parametrize(
    ("remove", "kind", "message"),
    [
        ("base/config.json", ModelError, "no config.json"),
        ("base/model.safetensors", ModelError, "neither model.safetensors nor"),
        ("adapter/adapter_config.json", AdapterError, "no adapter_config.json"),
        ("adapter/adapter_model.safetensors", AdapterError, "no adapter_model.safetensors"),
    ],
)
def test_missing_files(tmp_path: Path, remove: str, kind: type[RelaxError], message: str) -> None:
    base, adapter = write_base(tmp_path / "base", BASE), write_lora(tmp_path / "adapter", pair(Q, A, B))
    (tmp_path / remove).unlink()
    with pytest.raises(kind, match=message):
        merge_adapter(base, adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "kind"), [("base/config.json", ModelError), ("adapter/adapter_config.json", AdapterError)]
)
@pytest.mark.parametrize(("content", "message"), [("{", "is no JSON"), ("[]", "holds a JSON list")])
def test_damaged_json(tmp_path: Path, file: str, kind: type[RelaxError], content: str, message: str) -> None:
    base, adapter = write_base(tmp_path / "base", BASE), write_lora(tmp_path / "adapter", pair(Q, A, B))
    (tmp_path / file).write_text(content)
    with pytest.raises(kind, match=message):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_pickled_adapter_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", BASE), write_lora(tmp_path / "adapter", pair(Q, A, B))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="load it with peft"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_an_adapter_without_tensors(tmp_path: Path) -> None:
    refused(tmp_path, AdapterError, "holds no tensors", {})


def test_a_shard_that_the_index_names_and_nobody_has(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", BASE, shards=3), write_lora(tmp_path / "adapter", pair(Q, A, B))
    (base / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003"):
        merge_adapter(base, adapter, tmp_path / "out")


@pytest.mark.parametrize(("change", "message"), [("forget", "does not list"), ("invent", "model.ghost.weight")])
def test_an_index_that_does_not_match_its_shards(tmp_path: Path, change: str, message: str) -> None:
    base, adapter = write_base(tmp_path / "base", BASE, shards=3), write_lora(tmp_path / "adapter", pair(Q, A, B))
    file = base / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    if change == "forget":
        del index["weight_map"][f"{Q}.weight"]
    else:
        index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_truncated_shard(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", BASE), write_lora(tmp_path / "adapter", pair(Q, A, B))
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ModelError, match="download it again"):
        merge_adapter(base, adapter, tmp_path / "out")
