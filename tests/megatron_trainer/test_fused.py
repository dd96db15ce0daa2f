"""What a GPU runs compiled, compiled for this CPU: the same results, and one compilation for all lengths."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from relax_pipeline.errors import TrainerError
from relax_pipeline.fused import compile_for_any_length
from relax_pipeline.rl.logprobs import sums, write_gradients

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled before, and compiling is not turned off, as it is where Megatron is imported with no GPU."""
    import relax_pipeline.trainer.megatron  # noqa: F401

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(
        {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}
    ):  # no probes of g++ first
        yield


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def assert_compiled_once(function: Callable[..., Tensors], arguments: Callable[[int], Tensors]) -> None:
    """For all lengths, with the results of the plain function in float32, rounded once."""
    plain = inspect.unwrap(function)
    compiled = compile_for_any_length(plain)
    for length in (6, 11, 5):
        torch.manual_seed(length)
        tensors = arguments(length)
        exact = [tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors]
        tolerance = 2**-8 if torch.bfloat16 in {tensor.dtype for tensor in tensors} else 2e-6
        torch.testing.assert_close(compiled(*tensors), plain(*exact), rtol=tolerance, atol=1e-6, check_dtype=False)
    assert counters["stats"]["unique_graphs"] == 1


def test_swiglu(dtype: torch.dtype) -> None:
    from relax_pipeline.trainer.megatron.swiglu import activate

    assert_compiled_once(activate, lambda n: (torch.randn(n, 48, dtype=dtype),))


def test_swiglu_backwards(dtype: torch.dtype) -> None:
    from relax_pipeline.trainer.megatron.swiglu import pull_back

    assert_compiled_once(pull_back, lambda n: (torch.randn(n, 48, dtype=dtype), torch.randn(n, 24, dtype=dtype)))


def test_rotary(dtype: torch.dtype) -> None:
    from relax_pipeline.trainer.megatron.rotary import rotate

    assert_compiled_once(
        rotate, lambda n: (torch.randn(n, 3, 16, dtype=dtype), torch.randn(n, 1, 6), torch.randn(n, 1, 6))
    )


def logits_and_rows(length: int, dtype: torch.dtype) -> Tensors:
    """Of all but three rows, without the last columns, which pad the vocabulary."""
    return 4 * torch.randn(length, 37, dtype=dtype)[:, :34], torch.randperm(length)[: length - 3], torch.tensor(0.7)


def test_sums_of_logits(dtype: torch.dtype) -> None:
    assert_compiled_once(sums, lambda n: logits_and_rows(n, dtype))


def test_gradients_of_logits(dtype: torch.dtype) -> None:
    def written(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, *factors: torch.Tensor) -> Tensors:
        gradient = torch.zeros_like(logits)
        write_gradients(gradient, logits, rows, temperature, *factors)
        return (gradient,)

    assert_compiled_once(
        written, lambda n: (*logits_and_rows(n, dtype), 9 + torch.rand(n - 3, 1), *torch.randn(2, n - 3, 1))
    )


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(TrainerError, match="found no C compiler"):
        compile_for_any_length(torch.neg)
