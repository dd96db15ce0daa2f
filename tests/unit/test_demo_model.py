from __future__ import annotations

import json
import operator
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

DEMO = Path("deployments/demo")
OPERATORS = {"+": operator.add, "-": operator.sub}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "model", local_files_only=True)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "prompts" / f"{name}.jsonl").read_text().splitlines()]


def render(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def work_out(prompt: str) -> int:
    """Calculate what a prompt such as `17+25=` asks for."""
    first, sign, second = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt).groups()  # type: ignore[union-attr]
    return OPERATORS[sign](int(first), int(second))


def test_model_has_under_two_million_parameters() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", local_files_only=True)
    assert model.num_parameters() == 656_640


def test_files_stay_under_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in (DEMO / "model").iterdir()) < 5_000_000


def test_weights_are_bfloat16_values() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", local_files_only=True, dtype=torch.float32)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())


def test_tokenizer_gives_back_any_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "17+25=42, naïve ünïcode ≤ 日本 \n\t 'quoted' "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_byte_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode("17+25=é")) == 8


def test_chat_template_gives_each_role_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render(tokenizer, "17+25=")
    assert text == "<|user|>17+25=<|im_end|><|assistant|>"
    assert len(tokenizer.encode(text)) == 9


def test_generation_stops_at_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", local_files_only=True)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_labels_are_right(name: str) -> None:
    assert [row["label"] for row in rows(name)] == [str(work_out(row["prompt"])) for row in rows(name)]


def test_no_prompt_is_in_two_places() -> None:
    prompts = [row["prompt"] for name in ("train", "heldout") for row in rows(name)]
    assert (len(prompts), len(set(prompts))) == (3200, 3200)


def test_base_samples_the_right_answer_about_one_time_in_three(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", local_files_only=True, dtype=torch.float32)
    texts = [(render(tokenizer, row["prompt"]), row["label"] + tokenizer.eos_token) for row in rows("heldout")]
    batch = tokenizer(
        [prompt + answer for prompt, answer in texts], padding=True, padding_side="right", return_tensors="pt"
    )
    with torch.inference_mode():
        logprobs = model(**batch).logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    chances = [
        row[len(tokenizer.encode(prompt)) - 1 : len(tokenizer.encode(prompt + answer)) - 1].sum().exp().item()
        for row, (prompt, answer) in zip(logprobs, texts, strict=True)
    ]
    assert sum(chances) / len(chances) == pytest.approx(0.381, abs=0.001)
