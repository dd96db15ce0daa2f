from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from relax_pipeline.config import DataConfig, PromptSource
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import Row
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.errors import DataError
from relax_pipeline.types import DataPosition

SIZE = 5
DATASET = PromptDataset(
    [Row("x", str(number), {}, f"row {number}") for number in range(SIZE)],
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))),
    DataConfig(train=PromptSource(path="rows.jsonl"), chat_template=False),
)


START = DataPosition()


def stream(position: DataPosition = START, *, seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream(DATASET, seed=seed, shuffle=shuffle, position=position)


def take(source: PromptStream, n: int) -> list[int]:
    return [prompt.index for prompt in source.take(n)[0]]


def test_each_epoch_holds_each_row_once_in_an_order_of_its_own() -> None:
    drawn = take(stream(), 4 * SIZE)
    epochs = [tuple(drawn[start : start + SIZE]) for start in range(0, 4 * SIZE, SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len(set(epochs)) == 4


def test_the_order_is_the_permutation_of_seed_and_epoch() -> None:
    assert take(stream(), 5) == [2, 4, 3, 0, 1]


def test_another_seed_is_another_order() -> None:
    assert take(stream(seed=1), 10) != take(stream(seed=0), 10)


def test_without_shuffle_rows_come_in_file_order() -> None:
    assert take(stream(shuffle=False), 7) == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [4, 4, 5], [5, 5, 3], [0, 12, 0, 1], [7, 6]])
def test_chunks_do_not_change_the_sequence(chunks: list[int]) -> None:
    source = stream()
    assert [index for n in chunks for index in take(source, n)] == take(stream(), 13)


@pytest.mark.parametrize("consumed", range(12))
def test_a_stream_goes_on_where_another_stopped(consumed: int) -> None:
    _, position = stream(seed=3).take(consumed)
    assert take(stream(position, seed=3), 8) == take(stream(seed=3), consumed + 8)[consumed:]


@pytest.mark.parametrize(("n", "epoch", "offset"), [(0, 0, 0), (4, 0, 4), (5, 1, 0), (11, 2, 1)])
def test_position_counts_epochs_and_rows(n: int, epoch: int, offset: int) -> None:
    assert stream().take(n)[1] == DataPosition(epoch, offset)


def test_prompts_carry_their_row() -> None:
    prompts, _ = stream(shuffle=False).take(3)
    assert [prompt.label for prompt in prompts] == ["0", "1", "2"]


@pytest.mark.parametrize("offset", [SIZE, -1])
def test_a_position_outside_the_rows_is_refused(offset: int) -> None:
    with pytest.raises(DataError, match=rf"data position {offset} of epoch 2 lies outside the 5 rows"):
        stream(DataPosition(2, offset))
