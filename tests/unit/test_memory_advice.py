from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config

from relax_pipeline.config import RunConfig
from relax_pipeline.memory import TrainerMemory
from relax_pipeline.memory_advice import unused_room
from relax_pipeline.memory_gpu import EngineMemory

GPU = 100_000
TRAINER = TrainerMemory(tokens=1000, weights=8000, trained=1000, activations=9000, logits=1000)  # 10 a token
ENGINE = EngineMemory(weights=10_000, adapters=0, cache_of_token=1, completions=32, cache=0)


def configured(*, colocate: bool = False, prompts: int = 8, **sections: Any) -> RunConfig:
    return run_config(
        "unused",
        data={"train": {"path": "unused"}, "max_prompt_tokens": 500},
        rollout={"prompts_per_step": prompts, "completions_per_prompt": 4, "max_new_tokens": 500},
        cluster={"colocate": colocate},
        trainer={"kind": "megatron", "micro_batch_tokens": 1000} | sections.pop("trainer", {}),
        engine={"kind": "sglang", "memory_fraction": 0.5} | sections.pop("engine", {}),
        **sections,
    )


def trainer_advice(config: RunConfig, engine: EngineMemory | None = None, *, sent: int = 0) -> list[str]:
    notes = unused_room(config, TRAINER, engine, sent=sent, gpu_bytes=GPU)
    return [note for note in notes if note.startswith("trainer.micro_batch_tokens is 1,000")]


def test_as_many_tokens_as_fit_beside_what_is_there() -> None:
    # 100,000, less a tenth, 9,000 of the trainer and 1,000 sent: 8,000 tokens, rounded down to 7 x 1,024.
    [note] = trainer_advice(configured(), sent=1000)
    assert "room for 7,168 of a step's tokens" in note
    # A colocated engine that stays awake has half of the GPU: 3,100 tokens.
    [note] = trainer_advice(configured(colocate=True), ENGINE)
    assert "room for 3,072 of" in note
    [note] = trainer_advice(configured(colocate=True, engine={"offload": "all"}), ENGINE)
    assert "room for 7,168 of" in note


def test_no_more_than_a_step_has_for_a_rank() -> None:
    [note] = trainer_advice(configured(prompts=1))  # 4 samples of 1,000 tokens
    assert "room for 3,072 of" in note
    assert not trainer_advice(configured(prompts=1, trainer={"data_parallel_size": 4}))


@pytest.mark.parametrize(
    ("engine", "at_once"),
    # (50,000 - 10,000) / 1,000 tokens each are 40, and 64 are wanted.
    [({}, 40), ({"memory_fraction": 0.6}, None), ({"replicas": 2}, None), ({"max_running_requests": 30}, 30)],
)
def test_completions_that_wait_for_others_are_told(engine: dict[str, Any], at_once: int | None) -> None:
    notes = unused_room(configured(prompts=16, engine=engine), None, ENGINE, sent=0, gpu_bytes=GPU)
    told = [] if at_once is None else [f"an engine generates {at_once} of its 64 completions of a step at once"]
    assert [note.partition(" if all")[0] for note in notes] == told
