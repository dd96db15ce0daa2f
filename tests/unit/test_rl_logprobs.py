from __future__ import annotations

import math

import pytest
import torch

from relax_pipeline.rl import logprobs as module
from relax_pipeline.rl.logprobs import token_logprobs as of_rows


def token_logprobs(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, temperature: float, **options):
    """All rows, in the shape of the tokens."""
    rows = torch.arange(token_ids_BT.numel())
    results = of_rows(logits_BTV.flatten(0, 1), rows, token_ids_BT.flatten(), temperature, **options)
    return [result if result is None else result.view(token_ids_BT.shape) for result in results]


@pytest.fixture(params=[1, 20, 1 << 20], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, a few rows at a time, all at once."""
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", request.param)


def logits_and_ids(rows: int, length: int, vocabulary: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, length, vocabulary, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(vocabulary, (rows, length), generator=generator)


def by_loops(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> tuple[list, list]:
    logprobs, entropies = [], []
    for row, ids in zip(logits.tolist(), token_ids.tolist(), strict=True):
        probabilities = []
        for position in row:
            weights = [math.exp(logit / temperature) for logit in position]
            probabilities.append([weight / math.fsum(weights) for weight in weights])
        logprobs.append([math.log(p[token]) for p, token in zip(probabilities, ids, strict=True)])
        entropies.append([-math.fsum(x * math.log(x) for x in p) for p in probabilities])
    return logprobs, entropies


def test_exact_numbers():
    logits = torch.tensor([[[0.0, math.log(3.0)]]], dtype=torch.float64)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[1]]), 1.0, with_entropy=True)
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-15)


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 200, 4), (300, 2, 3), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_agrees_with_loops(shape, temperature):
    logits, token_ids = logits_and_ids(*shape)
    logprobs, entropy = token_logprobs(logits, token_ids, temperature, with_entropy=True)
    expected_logprobs, expected_entropy = by_loops(logits, token_ids, temperature)
    torch.testing.assert_close(logprobs, torch.tensor(expected_logprobs, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, torch.tensor(expected_entropy, dtype=torch.float64), rtol=0, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    logits, token_ids = logits_and_ids(2, 3, 5)
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, token_ids, 0.7, with_entropy=True, entropy_grad=True), logits.requires_grad_()
    )


def test_gradients_agree_with_autograd():
    logits, token_ids = logits_and_ids(3, 211, 6)
    pull = torch.randn(3, 211, dtype=torch.float64)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (token_logprobs(ours, token_ids, 0.7)[0] * pull).sum().backward()
    scaled = torch.log_softmax(plain / 0.7, dim=-1)
    (scaled.gather(-1, token_ids[..., None])[..., 0] * pull).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-14)


def test_entropy_alone_has_a_gradient_when_asked():
    logits, token_ids = logits_and_ids(2, 3, 5)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    token_logprobs(ours, token_ids, 1.0, with_entropy=True, entropy_grad=True)[1].sum().backward()
    logprobs = torch.log_softmax(plain, dim=-1)
    (-(logprobs.exp() * logprobs)).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-14)


def test_entropy_is_detached_unless_asked():
    logits, token_ids = logits_and_ids(2, 3, 5)
    logprobs, entropy = token_logprobs(logits.requires_grad_(), token_ids, 1.0, with_entropy=True)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_entropy_unless_asked():
    assert token_logprobs(*logits_and_ids(2, 3, 5), 1.0)[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_input_is_left_alone_in_both_directions(dtype):
    logits, token_ids = logits_and_ids(2, 3, 5, dtype)
    before = logits.clone()
    logprobs, _ = token_logprobs(logits.requires_grad_(), token_ids, 1.0, with_entropy=True)
    logprobs.sum().backward()
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_computed_in_float32_and_get_bfloat16_gradients():
    logits, token_ids = logits_and_ids(2, 3, 5, torch.bfloat16)
    logprobs, _ = token_logprobs(logits.requires_grad_(), token_ids, 0.7)
    expected, _ = by_loops(logits.double(), token_ids, 0.7)
    torch.testing.assert_close(logprobs, torch.tensor(expected), rtol=0, atol=2e-6)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_rows_that_are_not_wanted_are_not_read_and_get_no_gradient():
    logits, token_ids = logits_and_ids(1, 9, 5)
    rows = torch.tensor([7, 0, 3])
    spoilt = torch.full((9, 5), torch.nan, dtype=torch.float64).index_copy(0, rows, logits[0, rows]).requires_grad_()
    logprobs, entropy = of_rows(spoilt, rows, token_ids[0, rows], 1.0, with_entropy=True, entropy_grad=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(logprobs, token_logprobs(logits, token_ids, 1.0)[0][0, rows])
    assert torch.equal(spoilt.grad[[1, 2, 4, 5, 6, 8]], torch.zeros(6, 5, dtype=torch.float64))
    assert spoilt.grad[rows].abs().sum(dim=-1).min() > 0.01


def test_an_impossible_token_does_not_spoil_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0]]), 1.0, with_entropy=True, entropy_grad=True)
    (logprobs + entropy).sum().backward()
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-7)
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.5, -0.5, 0.0]]]))
