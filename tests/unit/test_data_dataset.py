from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from relax_pipeline.config import DataConfig, PromptSource
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import Row
from relax_pipeline.errors import DataError
from relax_pipeline.types import Prompt

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ROWS = [
    Row("2+3", "5", {"level": 1}, "rows.jsonl line 1"),
    Row(({"role": "user", "content": "4-1"}, {"role": "assistant", "content": "3"}), "3", {}, "rows.jsonl line 2"),
]


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte; puts <s>, id 0, before a text unless told not to add special tokens."""
    symbols = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=chat_template)


def dataset(rows: list[Row] = ROWS, template: str | None = TEMPLATE, **settings: Any) -> PromptDataset:
    config = DataConfig(train=PromptSource(path="rows.jsonl"), **settings)
    return PromptDataset(rows, byte_tokenizer(template), config)


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer()(text, add_special_tokens=False).input_ids)


def test_a_string_becomes_a_user_message() -> None:
    assert dataset().prompt(0) == Prompt(0, "<s>u:2+3;a:", ids("<s>u:2+3;a:"), "5", {"level": 1})


def test_special_tokens_are_not_added_twice() -> None:
    assert dataset().prompt(0).token_ids.count(0) == 1


def test_messages_are_rendered_as_they_are() -> None:
    assert dataset(system_prompt="be brief").prompt(1).text == "<s>u:4-1;a:3;a:"


def test_the_system_prompt_comes_before_a_string() -> None:
    assert dataset(system_prompt="be brief").prompt(0).text == "<s>s:be brief;u:2+3;a:"


def test_a_bare_prompt_gets_the_special_tokens_of_the_tokenizer() -> None:
    assert dataset(ROWS[:1], None, chat_template=False).prompt(0) == Prompt(
        0, "2+3", (0, *ids("2+3")), "5", {"level": 1}
    )


def test_length() -> None:
    assert len(dataset()) == 2


def test_the_longest_prompt_allowed() -> None:
    assert len(dataset(max_prompt_tokens=9).prompt(0).token_ids) == 9


def test_a_longer_prompt_names_row_length_and_remedy() -> None:
    message = "rows.jsonl line 1: the prompt has 9 tokens, data.max_prompt_tokens is 8; raise it, or shorten"
    with pytest.raises(DataError, match=message):
        dataset(max_prompt_tokens=8).prompt(0)


def test_a_row_the_template_refuses_is_named() -> None:
    rows = [Row(({"role": "tool", "content": "x"},), "", {}, "rows.jsonl line 7")]
    with pytest.raises(DataError, match=r"rows.jsonl line 7: the tokenizer's chat template refuses .*no tools"):
        dataset(rows).prompt(0)


@pytest.mark.parametrize(
    ("rows", "template", "settings", "message"),
    [
        (ROWS, None, {}, "no chat template: set data.chat_template to false"),
        (ROWS, TEMPLATE, {"chat_template": False}, "line 2: chat messages need .*: set data.chat_template to true"),
    ],
)
def test_what_cannot_be_rendered_is_refused_at_once(
    rows: list[Row], template: str | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        dataset(rows, template, **settings)


def test_fingerprint_ignores_where_the_file_lies() -> None:
    moved = [dataclasses.replace(row, where="elsewhere") for row in ROWS]
    assert dataset(moved, max_prompt_tokens=500, shuffle=False).fingerprint == dataset().fingerprint


@pytest.mark.parametrize(
    "other",
    [
        dataset(ROWS[::-1]),
        dataset(ROWS[:1]),
        dataset([dataclasses.replace(ROWS[0], label="6"), ROWS[1]]),
        dataset([dataclasses.replace(ROWS[0], metadata={"level": 2}), ROWS[1]]),
        dataset(system_prompt="be brief"),
        dataset(template=TEMPLATE + " "),
    ],
)
def test_fingerprint_follows_content_and_rendering(other: PromptDataset) -> None:
    assert other.fingerprint != dataset().fingerprint


def test_fingerprint_tells_bare_prompts_from_rendered_ones() -> None:
    assert dataset(ROWS[:1], chat_template=False).fingerprint != dataset(ROWS[:1]).fingerprint
