"""What goes to a server and what comes back: none of it may be wrong without a word. No server runs here."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_sglang import LEAVES, full_adapter, requests, sglang_config

from relax_pipeline.config import SglangEngineConfig
from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.lora.adapter import peft_config
from relax_pipeline.rollout.sglang.launch import LoraRoom, server_command
from relax_pipeline.rollout.sglang.requests import completion, generate_body, logprobs_body, sequence_logprobs
from relax_pipeline.rollout.sglang.versions import Versions
from relax_pipeline.rollout.sglang.wire import bucket, mappable

ANSWER: dict[str, Any] = {
    "output_ids": [7, 9],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        "input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [None, 8, None]],
        "weight_version": "99",
    },
}


def command(folder: Path, lora: LoraRoom | None) -> list[str]:
    """A server's command line."""
    config = sglang_config(folder, folder)
    assert isinstance(config.engine, SglangEngineConfig)
    return server_command(config.engine, config.model, lora=lora, port=1)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def changed(**meta: Any) -> dict[str, Any]:
    """The answer with other facts about it."""
    return ANSWER | {"meta_info": ANSWER["meta_info"] | meta}


def test_no_setting_is_sent_that_sglang_ignores_or_dies_from() -> None:
    sent = peft_config(full_adapter(1).spec, "base")
    assert sent.keys() == {
        *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha"),
        *("lora_dropout", "target_modules", "bias", "inference_mode"),
    }
    assert (sent["peft_type"], sent["bias"], sent["lora_dropout"]) == ("LORA", "none", 0.0)
    assert isinstance(sent["target_modules"], list)


def test_bucket_opens_without_anything_of_ours() -> None:
    tensors = full_adapter(1).tensors
    with mappable(tensors) as block:
        opened = pickle.loads(base64.b64decode(bucket(block, {next(iter(tensors)): "another name"})))
        assert opened.keys() == {"flattened_tensor", "metadata"}
        read = {
            item.name: opened["flattened_tensor"][item.start_idx : item.end_idx].view(item.dtype).view(item.shape)
            for item in opened["metadata"]
        }
    assert list(read) == ["another name", *list(tensors)[1:]]
    assert all(torch.equal(a, b) for a, b in zip(read.values(), tensors.values(), strict=True))


def test_server_has_room_for_all_versions_held_or_it_drops_one_unasked(tmp_path: Path) -> None:
    line = command(tmp_path, LoraRoom(rank=3, leaf_modules=LEAVES, versions=4))
    assert value(line, "--max-loaded-loras") == value(line, "--max-loras-per-batch") == "6"
    assert value(line, "--max-lora-rank") == "3"


def test_server_for_whole_models_is_told_nothing_of_adapters(tmp_path: Path) -> None:
    assert not [word for word in command(tmp_path, None) if "lora" in word]


def test_only_adapters_on_delta_nets_need_more_than_sglangs_own_command_line(tmp_path: Path) -> None:
    assert value(command(tmp_path, LoraRoom(3, LEAVES, versions=2)), "-m") == "sglang.launch_server"
    delta = command(tmp_path, LoraRoom(3, ("in_proj_qkv", "in_proj_z", "q_proj"), versions=2))
    assert value(delta, "-m") == "relax_pipeline.rollout.sglang.serve"
    assert delta[delta.index("--lora-target-modules") + 1 :] == ["in_proj_qkvz", "q_proj"]


def test_every_request_of_a_batch_names_its_adapter() -> None:
    assert generate_body(requests(3), adapter="policy@v2", seeded=True)["lora_path"] == ["policy@v2"] * 3
    assert logprobs_body([[5, 6], [7, 8]], adapter="policy@v2")["lora_path"] == ["policy@v2"] * 2


def test_adapter_that_the_server_does_not_list_is_not_served() -> None:
    versions = Versions("engine-0", "a", ["lm_head.weight"])
    versions.stage(1, digest="d", modules=("m",))
    with pytest.raises(EngineError, match="SGLang does not list relax_policy_lora-v1, which it was sent"):
        versions.activate(1, listed={"another"})
    with pytest.raises(UnknownVersionError):
        versions.adapter(1)


def test_samples_are_stamped_with_what_was_asked_for_and_not_with_what_the_server_says() -> None:
    done = completion(ANSWER, policy_version=3, engine_id="engine-0", incarnation="a")
    assert (done.policy_version, done.token_ids.tolist(), done.rollout_logprobs.tolist()) == (3, [7, 9], [-0.5, -0.25])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (changed(output_token_logprobs=[[-0.5, 7, None], [None, 9, None]]), "gave a logprob that is NaN"),
        (changed(output_token_logprobs=[[-0.5, 7, None], [-0.25, 8, None]]), "gave logprobs of other tokens"),
        (changed(finish_reason={"type": "abort", "message": "Aborted"}), "ended a request with .*Aborted"),
    ],
)
def test_answers_that_are_no_samples_are_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=f"engine engine-0: SGLang {message}"):
        completion(answer, policy_version=3, engine_id="engine-0", incarnation="a")


def test_null_among_a_probes_logprobs_is_nan() -> None:
    assert np.array_equal(sequence_logprobs(ANSWER), [-1.5, np.nan], equal_nan=True)
