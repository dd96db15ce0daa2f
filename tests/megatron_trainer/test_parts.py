"""Parts of the Megatron trainer in this process, with numbers worked out by hand or by other means."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_models import megatron_config, sample
from safetensors.torch import load_file
from tiny_run import make_samples, run_config, train, with_logprobs

from relax_pipeline.errors import TrainerError
from relax_pipeline.lora.names import lora_key
from relax_pipeline.rl.logprobs import SplitVocabulary, token_logprobs
from relax_pipeline.trainer.fsdp import FsdpTrainer

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


# --- Machines without CUDA or Transformer Engine ---


def test_nothing_is_patched_where_everything_is_there() -> None:
    from relax_pipeline.trainer.megatron.patches import patches

    assert patches(cuda=True, transformer_engine=True, delta_kernels=True) == []


def test_nothing_stays_patched() -> None:
    from relax_pipeline.trainer.megatron.patches import patches, runnable

    here = patches(cuda=False, transformer_engine=False, delta_kernels=False)
    before = [getattr(patch.owner, patch.name) for patch in here]
    with runnable(torch.device("cpu"), transformer_engine=False):
        within = [getattr(patch.owner, patch.name) for patch in here]
    assert [getattr(patch.owner, patch.name) for patch in here] == before
    assert not any(one is other for one, other in zip(before, within, strict=True) if one is not True)


def test_every_patch_says_why() -> None:
    from relax_pipeline.trainer.megatron.patches import patches

    assert all(patch.reason for patch in patches(cuda=False, transformer_engine=False, delta_kernels=False))


def test_importing_megatron_leaves_no_stand_in_and_tensors_readable_without_it() -> None:
    import relax_pipeline.trainer.megatron

    assert relax_pipeline.trainer.megatron.MegatronTrainer
    assert not any(name.startswith("transformer_engine") for name in sys.modules)
    assert b"megatron" not in pickle.dumps(torch.zeros(3))


# --- Packing ---


def test_samples_are_packed_without_padding_but_at_the_end() -> None:
    from relax_pipeline.trainer.megatron.batches import pack

    batch = pack([sample([11, 12], [13, 14, 15]), sample([21], [22])], torch.device("cpu"), length_multiple=4)
    assert batch.input_ids_1N.tolist() == [[11, 12, 13, 14, 15, 21, 22, 0]]
    assert batch.position_ids_1N.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert batch.packing.cu_seqlens_q.tolist() == [0, 5, 7, 8]
    assert batch.packing.max_seqlen_q == 5
    assert batch.predicts_BT.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch.answers_R.tolist() == [1, 2, 3, 5]
    assert batch.next_ids_N[batch.predicts_BT[0]].tolist() == [13, 14, 15]
    assert batch.next_ids_N[batch.predicts_BT[1, 0]].item() == 22
    assert batch.padded.mask_BT.tolist() == [[True, True, True], [True, False, False]]


def test_every_rank_gets_as_many_micro_batches_and_each_sample_is_in_one() -> None:
    from relax_pipeline.trainer.megatron.batches import rank_batches

    samples = make_samples(5)
    ranks = [
        rank_batches(samples, 20, rank=rank, world_size=2, device=torch.device("cpu"), count_multiple=4)
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    assert len(ranks[0]) % 4 == 0
    assert sorted(index for batches in ranks for batch in batches for index in batch.indices) == [0, 1, 2, 3, 4]
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.packed.input_ids_1N.shape[1] <= 20
        assert batch.packed.padded.mask_BT.any() == bool(batch.indices)


@pytest.mark.parametrize(
    ("tokens", "stages", "expected"), [(200, 1, 1), (200, 2, 2), (1600, 2, 8), (0, 2, 1), (350, 4, 3)]
)
def test_pipelines_are_filled_but_not_with_splinters(tokens: int, stages: int, expected: int) -> None:
    from relax_pipeline.config import MegatronTrainerConfig
    from relax_pipeline.trainer.megatron.batches import to_fill

    # A quarter of 400 tokens is the smallest micro-batch made for it: 2 of 200, 3 of 350, and 4 for each stage of 1600.
    settings = MegatronTrainerConfig(kind="megatron", micro_batch_tokens=400, pipeline_parallel_size=stages)
    assert to_fill(tokens, settings) == expected


# --- Logprobs ---


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_entropy_and_gradients_leave_padded_columns_out(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_SV = (4 * torch.randn(150, 13, generator=generator)).to(dtype)
    rows_R = torch.randperm(150, generator=generator)[:70]
    ids_R = torch.randint(0, 13, (70,), generator=generator)
    padded = torch.cat([logits_SV, torch.full((150, 3), 50.0, dtype=dtype)], dim=1).requires_grad_()
    whole = logits_SV.clone().requires_grad_()
    weights_R = torch.randn(2, 70, generator=generator)
    group = dist.group.WORLD
    assert group is not None
    logprobs_R, entropy_R = token_logprobs(
        padded, rows_R, ids_R, 0.7, split=SplitVocabulary(13, group), with_entropy=True, entropy_grad=True
    )
    expected_R, expected_entropy_R = token_logprobs(whole, rows_R, ids_R, 0.7, with_entropy=True, entropy_grad=True)
    assert entropy_R is not None
    assert expected_entropy_R is not None
    torch.testing.assert_close(logprobs_R, expected_R, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy_R, expected_entropy_R, rtol=0, atol=2e-6)
    (weights_R[0] @ logprobs_R + weights_R[1] @ entropy_R).backward()
    (weights_R[0] @ expected_R + weights_R[1] @ expected_entropy_R).backward()
    assert padded.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(padded.grad[:, :13], whole.grad, rtol=0, atol=2e-5 if dtype == torch.float32 else 2e-2)
    assert not padded.grad[:, 13:].any()


# --- Against the fsdp trainer ---


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("qwen3", {}),
        ("qwen3", {"kl_coef": 0.1, "entropy_coef": 0.01}),
        ("qwen3", {"loss": "gspo", "aggregation": "sequence"}),
        ("qwen3_vl", {}),
        ("qwen2_5_vl", {}),
    ],
)
def test_both_trainers_have_the_same_logprobs_loss_and_gradient(
    family: str, loss: dict[str, object], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from relax_pipeline.trainer.megatron import MegatronTrainer

    config = megatron_config(folder(family), algorithm=loss)
    megatron = MegatronTrainer(config)
    fsdp = FsdpTrainer(run_config(folder(family), lora={"rank": 4, "alpha": 8}, algorithm=loss))
    assert fsdp.info().base_tensors_digest == megatron.info().base_tensors_digest
    train(megatron, updates=2)
    megatron.save(tmp_path / "trained")
    trained = load_file(tmp_path / "trained" / "adapter" / "adapter_model.safetensors")
    assert trained.keys() == fsdp._policy.parameters.keys()
    with torch.no_grad():
        for name, parameter in fsdp._policy.parameters.items():
            parameter.copy_(trained[name])
    samples = make_samples(6, seed=31)
    samples = with_logprobs(samples, [s.rollout_logprobs / 2 for s in samples])
    one, other = (trainer.logprobs(samples, temperature=0.8) for trainer in (megatron, fsdp))
    for values, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    metrics = megatron.forward_backward(samples, temperature=0.8)
    assert metrics == pytest.approx(fsdp.forward_backward(samples, temperature=0.8), rel=1e-5, abs=1e-6)

    for master in megatron._optimizer.masters.values():  # exports are linear, so they name gradients as well
        master.data = master.grad  # type: ignore[assignment]
    megatron._exports.forget()
    megatron.save(tmp_path / "gradient")
    gradient = load_file(tmp_path / "gradient" / "adapter" / "adapter_model.safetensors")
    megatron.close()
    for name, parameter in fsdp._policy.parameters.items():
        assert parameter.grad is not None
        expected_grad = parameter.grad
        module, _, leaf = name.removeprefix("base_model.model.").partition(".lora_")[0].rpartition(".")
        for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if leaf in fused and ".lora_A." in name:  # one matrix for all of them in Megatron
                grads = [fsdp._policy.parameters[lora_key(f"{module}.{other}", "A")].grad for other in fused]
                expected_grad = torch.stack([grad for grad in grads if grad is not None]).sum(dim=0)
        torch.testing.assert_close(gradient[name], expected_grad, rtol=1e-4, atol=1e-6, msg=name)


# --- Steps ---


def test_an_adapter_written_behind_training_is_that_of_before(folder: Callable[[str], Path], tmp_path: Path) -> None:
    from relax_pipeline.trainer.megatron import MegatronTrainer

    trainer = MegatronTrainer(megatron_config(folder("qwen3")))
    train(trainer, updates=1)
    trainer._exports.adapter_writer(tmp_path / "at once", 1)()
    write = trainer._exports.adapter_writer(tmp_path / "behind", 1)
    train(trainer, updates=1, first=1)
    write()
    at_once, behind = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("at once", "behind"))
    trainer.close()
    assert at_once.keys() == behind.keys()
    for name, tensor in behind.items():
        torch.testing.assert_close(tensor, at_once[name], rtol=0, atol=0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(recompute: str, folder: Callable[[str], Path]) -> None:
    from relax_pipeline.trainer.megatron import MegatronTrainer

    plain = MegatronTrainer(megatron_config(folder("qwen3")))
    recomputing = MegatronTrainer(megatron_config(folder("qwen3"), trainer={"recompute": recompute}))
    assert train(recomputing, updates=2) == train(plain, updates=2)
    plain.close()


def test_lost_gradients_of_a_refused_step_do_not_return(folder: Callable[[str], Path]) -> None:
    from relax_pipeline.trainer.megatron import MegatronTrainer

    trainer, undisturbed = (MegatronTrainer(megatron_config(folder("qwen3"))) for _ in range(2))
    samples = make_samples(5)
    trainer.forward_backward(samples, temperature=1.0)
    with pytest.raises(TrainerError, match="the loss is nan"):
        trainer.forward_backward([replace(samples[0], advantage=float("nan")), *samples[1:]], temperature=1.0)
    assert train(trainer, updates=1) == train(undisturbed, updates=1)
    trainer.close()
