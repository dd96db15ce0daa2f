"""A real SGLang server that hosts adapter versions side by side, against transformers."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import make_samples, reference_logprobs
from tiny_sglang import TOLERANCE, assert_drawn_from, folded, full_adapter, requests, tokens, without

from relax_pipeline.config import HfEngineConfig, ModelConfig
from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.sglang.engine import SglangEngine
from relax_pipeline.sync.disk import Disk
from relax_pipeline.sync.ipc import Ipc
from relax_pipeline.sync.nccl import Nccl
from relax_pipeline.sync.transport import Transport
from relax_pipeline.types import Completion, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

_versions = itertools.count(1)


@pytest.fixture
def versions(adapter_engine: SglangEngine) -> Iterator[tuple[int, int]]:
    """Two versions that no other test has used, served while the test runs."""
    pair = next(_versions), next(_versions)
    for version in pair:
        adapter_engine.stage(full_adapter(version))
        adapter_engine.activate(version)
    yield pair
    for version in pair:
        adapter_engine.retire(version)


# --- Generation ---


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}],
    ids=str,
)
def test_rollout_logprobs_are_those_of_the_whole_distribution(
    adapter_engine: SglangEngine, versions: tuple[int, int], tiny_model: Path, sampling: dict[str, float]
) -> None:
    batch = requests(6, **sampling)
    completions = adapter_engine.generate(batch, version=versions[0])
    assert_drawn_from(folded(tiny_model, full_adapter(versions[0])), batch, completions)


def test_greedy_and_sampled_requests_in_one_batch(
    adapter_engine: SglangEngine, versions: tuple[int, int], tiny_model: Path
) -> None:
    batch = [*requests(3, temperature=0.0), *requests(3, temperature=0.5)]
    completions = adapter_engine.generate(batch, version=versions[0])
    assert_drawn_from(folded(tiny_model, full_adapter(versions[0])), batch, completions)
    alone = adapter_engine.generate(batch[:3], version=versions[0])
    assert tokens(alone) == tokens(completions[:3])


def test_seeds_decide_whatever_else_runs(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    version, other = versions
    first = tokens(adapter_engine.generate(requests(8), version=version))
    with ThreadPoolExecutor(6) as threads:
        parts = [threads.submit(adapter_engine.generate, requests(8)[i : i + 2], version=version) for i in (0, 2, 4, 6)]
        noise = [threads.submit(adapter_engine.generate, requests(5, seed=9), version=other) for _ in range(2)]
    assert [row for part in parts for row in tokens(part.result())] == first
    assert tokens(noise[0].result()) == tokens(noise[1].result())
    others = tokens(adapter_engine.generate(requests(8, seed=1), version=version))
    assert all(a != b for a, b in zip(first, others, strict=True))


def test_completions_of_one_prompt_differ_by_their_seeds(
    adapter_engine: SglangEngine, versions: tuple[int, int]
) -> None:
    [request] = requests(1)
    group = adapter_engine.generate([replace(request, seed=seed) for seed in range(8)], version=versions[0])
    assert len({tuple(row) for row in tokens(group)}) == 8


def test_length_and_stop_tokens_end_a_completion(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    unstopped = tokens(adapter_engine.generate(requests(8), version=versions[0]))
    assert {len(row) for row in unstopped} == {12}
    stops = (3, unstopped[0][4])  # 3: this model's own end, which SGLang heeds once there are stop tokens
    completions = adapter_engine.generate(requests(8, stop_token_ids=stops), version=versions[0])
    for completion, row in zip(completions, unstopped, strict=True):
        end = min((row.index(token) for token in stops if token in row), default=None)
        assert completion.token_ids.tolist() == (row if end is None else row[: end + 1])
        assert completion.finish_reason == ("length" if end is None else "stop")


def test_completions_are_stamped(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    [completion] = adapter_engine.generate(requests(1), version=versions[1])
    stamp = completion.policy_version, completion.engine_id, completion.incarnation
    assert stamp == (versions[1], "engine-0", adapter_engine.info().incarnation)


# --- Versions ---


def test_base_is_the_one_transformers_loads(adapter_engine: SglangEngine, tiny_model: Path) -> None:
    model = ModelConfig(path=str(tiny_model), dtype="float32")
    hf = HfEngine(engine_id="hf", model=model, config=HfEngineConfig(device="cpu"))
    assert adapter_engine.info().base_tensors_digest == hf.info().base_tensors_digest
    sequences = [[5, 9, 30, 41, 77], [8, 20]]
    served, expected = (engine.logprobs(sequences, version=None) for engine in (adapter_engine, hf))
    for a, b in zip(served, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def test_versions_are_served_side_by_side(
    adapter_engine: SglangEngine, versions: tuple[int, int], tiny_model: Path
) -> None:
    [sample] = make_samples(1)
    ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
    for version in (versions[1], versions[0], None, versions[1]):
        [logprobs] = adapter_engine.logprobs([ids], version=version)
        model = folded(tiny_model, full_adapter(version) if version else None)
        expected = reference_logprobs(model, sample, temperature=1.0)
        np.testing.assert_allclose(logprobs[-len(expected) :], expected, rtol=0, atol=TOLERANCE)


def test_version_zero_is_exactly_the_base(adapter_engine: SglangEngine) -> None:
    item = full_adapter(0)
    for name, tensor in item.tensors.items():
        if "lora_B" in name:
            tensor.zero_()
    adapter_engine.stage(item)
    adapter_engine.activate(0)
    sequences = [[5, 9, 30, 41], [8, 20, 33]]
    zero, bare = (adapter_engine.logprobs(sequences, version=version) for version in (0, None))
    for a, b in zip(zero, bare, strict=True):
        assert np.array_equal(a, b)
    adapter_engine.retire(0)


def test_new_version_is_served_while_requests_run_on_the_old_one(
    adapter_engine: SglangEngine, tiny_model: Path
) -> None:
    old, new = next(_versions), next(_versions)
    adapter_engine.stage(full_adapter(old))
    adapter_engine.activate(old)
    long = [replace(request, sampling=SamplingParams(200)) for request in requests(4)]
    running: list[Completion] = []
    thread = threading.Thread(target=lambda: running.extend(adapter_engine.generate(long, version=old)))
    thread.start()
    adapter_engine.stage(full_adapter(new))
    adapter_engine.activate(new)
    batch = requests(4)
    assert_drawn_from(folded(tiny_model, full_adapter(new)), batch, adapter_engine.generate(batch, version=new))
    assert thread.is_alive()
    adapter_engine.retire(old)  # waits for what runs on it
    thread.join()
    assert_drawn_from(folded(tiny_model, full_adapter(old)), long, running)
    adapter_engine.retire(new)


def test_cache_of_one_version_never_serves_another(
    adapter_engine: SglangEngine, versions: tuple[int, int], tiny_model: Path
) -> None:
    prompt = tuple(np.random.default_rng(1).integers(4, 80, 60).tolist())
    batch = [replace(request, token_ids=prompt) for request in requests(2)]
    for version in (*versions, versions[0]):
        completions = adapter_engine.generate(batch, version=version)
        assert_drawn_from(folded(tiny_model, full_adapter(version)), batch, completions)


def test_adapter_may_be_changed_once_it_is_staged(adapter_engine: SglangEngine, tiny_model: Path) -> None:
    version = next(_versions)
    item = full_adapter(version)
    adapter_engine.stage(item)
    for tensor in item.tensors.values():
        tensor.zero_()  # SGLang reads what it was given at the first request, not before
    assert adapter_engine.activate(version).digest == item.info.digest
    batch = requests(2)
    completions = adapter_engine.generate(batch, version=version)
    assert_drawn_from(folded(tiny_model, full_adapter(version)), batch, completions)
    adapter_engine.retire(version)


@pytest.mark.parametrize("kind", ["ipc", "disk", "nccl"])
def test_packed_adapters_are_served(adapter_engine: SglangEngine, tiny_model: Path, tmp_path: Path, kind: str) -> None:
    transports: dict[str, Transport] = {
        "ipc": Ipc(same_gpu=False),
        "disk": Disk(tmp_path / "sync", base_model=str(tiny_model)),
        "nccl": Nccl(backend="gloo", buffer_bytes=1000, timeout=20),
    }
    version = next(_versions)
    packed = pickle.loads(pickle.dumps(transports[kind].adapter(full_adapter(version))))
    adapter_engine.stage(packed)
    assert adapter_engine.activate(version).digest == full_adapter(version).info.digest
    batch = requests(2)
    completions = adapter_engine.generate(batch, version=version)
    assert_drawn_from(folded(tiny_model, full_adapter(version)), batch, completions)
    adapter_engine.retire(version)
    for transport in transports.values():
        transport.close()


def test_acknowledgement_says_what_was_handed_over(adapter_engine: SglangEngine) -> None:
    version = next(_versions)
    item = full_adapter(version)
    adapter_engine.stage(item)
    with pytest.raises(UnknownVersionError, match=f"engine-0 holds policy versions .*, not {version}"):
        adapter_engine.generate(requests(1), version=version)
    ack = adapter_engine.activate(version)
    assert (ack.engine_id, ack.version, ack.digest, ack.modules) == (
        "engine-0",
        version,
        item.info.digest,
        item.info.modules,
    )
    assert adapter_engine.activate(version) == ack
    adapter_engine.retire(version)


def test_version_not_held_is_not_served(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    adapter_engine.retire(versions[0])
    for version in (versions[0], 999):
        with pytest.raises(UnknownVersionError):
            adapter_engine.generate(requests(1), version=version)
        with pytest.raises(UnknownVersionError):
            adapter_engine.logprobs([[5, 6]], version=version)
        with pytest.raises(UnknownVersionError, match=f"was never sent version {version}"):
            adapter_engine.activate(version)
    adapter_engine.retire(999)


def test_a_version_never_changes(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match=f"already holds version {versions[0]}; versions never change"):
        adapter_engine.stage(full_adapter(versions[0]))


def test_refused_adapter_leaves_the_server_as_it_was(adapter_engine: SglangEngine, versions: tuple[int, int]) -> None:
    before = tokens(adapter_engine.generate(requests(3), version=versions[0]))
    item = full_adapter(next(_versions))
    broken = replace(item, tensors=without(item.tensors, "layers.1.mlp.up_proj.lora_B"))
    with pytest.raises(EngineError, match=r"only one of lora_A and lora_B for \['model.layers.1.mlp.up_proj'\]"):
        adapter_engine.stage(broken)
    with pytest.raises(UnknownVersionError):
        adapter_engine.activate(item.info.version)
    assert tokens(adapter_engine.generate(requests(3), version=versions[0])) == before


def test_engine_that_frees_nothing_sleeps_through_nothing(
    adapter_engine: SglangEngine, versions: tuple[int, int]
) -> None:
    adapter_engine.sleep()
    assert len(adapter_engine.generate(requests(1), version=versions[0])) == 1
