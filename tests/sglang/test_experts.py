"""Packed experts in SGLang's own classes: they become what it makes of experts that are named one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_sglang import sglang_config
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from relax_pipeline.errors import EngineError
from relax_pipeline.lora.adapter import make_adapter
from relax_pipeline.rollout.sglang import launch
from relax_pipeline.rollout.sglang.checks import check_adapter
from relax_pipeline.rollout.sglang.launch import LoraRoom
from relax_pipeline.rollout.sglang.make import lora_room
from relax_pipeline.types import Adapter, AdapterSpec

EXPERTS, INSIDE, INTERMEDIATE, RANK = 3, 7, 5, 2
LEAVES = ("down_proj", "gate_proj", "up_proj")
PARENT = "model.layers.0.mlp.experts"
LINEARS = {f"{PARENT}.gate_up_proj": (3, 10, 7), f"{PARENT}.down_proj": (3, 7, 5)}
ROOM = LoraRoom(rank=2, leaf_modules=LEAVES, versions=2)

_COMPARE = """
import torch
from types import SimpleNamespace
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name
from relax_pipeline.lora.packed import unpacked

packed = torch.load({path!r})
settings = SimpleNamespace(
    hf_config={{"peft_type": "LORA"}}, lora_alpha=4.0, r=2, target_modules={leaves!r}, lora_added_tokens_size=0
)
def layer(tensors):
    adapter = LoRAAdapter("v1", settings, SimpleNamespace(num_hidden_layers=1), None, None)
    adapter.initialize_weights_from_tensors(dict(tensors))
    return adapter.layers[0].weights

alone, together = layer(unpacked(packed)), layer(packed)
assert len(alone) == 12, sorted(alone)
assert len(together) == 4, sorted(together)
targets = get_normalized_target_modules(settings.target_modules)
pool = SimpleNamespace(moe_use_local_expert_ids=False)
for name, weights in together.items():
    for expert, weight, _ in LoRAMemoryPool._iter_local_expert_weights(pool, weights, name):
        single = name.replace(".experts.", f".experts.{{expert}}.")
        assert torch.equal(weight, alone.pop(single)), single
        assert get_target_module_name(name, targets) == get_target_module_name(single, targets)
assert not alone, sorted(alone)
print("the same")
"""


def packed_adapter(**changes: torch.Tensor) -> Adapter:
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "gate_up_proj.lora_A": (EXPERTS, RANK, INSIDE),
        "gate_up_proj.lora_B": (EXPERTS, 2 * INTERMEDIATE, RANK),
        "down_proj.lora_A": (EXPERTS, RANK, INTERMEDIATE),
        "down_proj.lora_B": (EXPERTS, INSIDE, RANK),
    }
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} | changes
    named = {f"base_model.model.{PARENT}.{name}.weight": tensor for name, tensor in tensors.items()}
    return make_adapter(named, spec=AdapterSpec(RANK, 4.0, LEAVES), version=1)


def test_sglang_makes_the_same_of_packed_experts(tmp_path: Path) -> None:
    torch.save(packed_adapter().tensors, tmp_path / "adapter.pt")
    script = _COMPARE.format(path=str(tmp_path / "adapter.pt"), leaves=list(LEAVES))
    path = os.pathsep.join([str(launch._CPU_STAND_IN), str(Path.cwd())])
    environment = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "the same"), done.stderr[-2000:]


def test_a_model_of_experts_gets_room_for_all_their_modules(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    room = lora_room(sglang_config(tmp_path, tmp_path, lora={"rank": 4, "alpha": 4}))
    assert room.leaf_modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def test_packed_experts_pass_the_checks() -> None:
    check_adapter(packed_adapter(), room=ROOM, linears=LINEARS)


def test_a_packed_half_of_another_number_of_experts_is_told() -> None:
    wrong = packed_adapter(**{"down_proj.lora_B": torch.ones(EXPERTS - 1, INSIDE, RANK)})
    with pytest.raises(
        EngineError, match=r"down_proj.lora_B.weight is torch.float32 \(2, 7, 2\).*floats of \(3, 7, 2\)"
    ):
        check_adapter(wrong, room=ROOM, linears=LINEARS)


def test_a_packed_module_needs_room_for_all_it_stands_for() -> None:
    room = LoraRoom(rank=2, leaf_modules=("down_proj", "gate_proj"), versions=2)
    with pytest.raises(EngineError, match=r"experts\.gate_up_proj is none of the modules the engine was started for"):
        check_adapter(packed_adapter(), room=room, linears=LINEARS)
