"""Make the demo's base model and prompts: a 0.66 M parameter Qwen3 that adds and subtracts, right one time in three.

The base is careless on purpose. Each answer it learns from is, with equal probability, right, one too small or one too
large. So it knows how to calculate, but not which of the three is wanted, and its samples are right about one time in
three: a gap that reinforcement learning on right-or-wrong rewards closes within a minute on one core. The held-out
problems are in neither the base's lessons nor the training prompts.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 0
SPECIAL_TOKENS = ("<|pad|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""ChatML with one token for each role, so that a whole prompt is nine tokens."""
HELDOUT_ROWS = 200
TRAIN_ROWS = 3000
STEPS = 2400
BATCH_SIZE = 256
PEAK_LR = 3e-3
ERRORS = (-1, 0, 1)

Problem = tuple[str, int]
"""The question and its right answer."""


def all_problems() -> list[Problem]:
    """Return each sum of two numbers below 100 and each difference that is not negative, in a shuffled order."""
    sums = [(f"{a}+{b}=", a + b) for a in range(100) for b in range(100)]
    differences = [(f"{a}-{b}=", a - b) for a in range(100) for b in range(a + 1)]
    problems = sums + differences
    random.Random(SEED).shuffle(problems)
    return problems


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte and no merges: it encodes any text."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the untrained model.

    The vocabulary is rounded up to 4 x 128 rows: Megatron pads it to a multiple of 128 per tensor-parallel rank, and
    rows that the base has never seen would take part in its softmax.
    """
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def encode_lessons(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and targets, both [problem, error, position]; a target of -100 is not learnt."""
    rows = []
    for text, answer in problems:
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        rows += [(tokenizer.encode(prompt), tokenizer.encode(f"{answer + error}{END}")) for error in ERRORS]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) : end] = torch.tensor(answer)
    shape = (len(problems), len(ERRORS), width)
    return ids.view(shape), targets.view(shape)


def train(model: Qwen3ForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> None:
    """Teach the model the lessons, with one of the three answers drawn each time a problem comes up."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        problem = torch.randint(ids.shape[0], (BATCH_SIZE,), generator=generator)
        error = torch.randint(ids.shape[1], (BATCH_SIZE,), generator=generator)
        logits = model(ids[problem, error]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), targets[problem, error][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def round_to_bfloat16(model: Qwen3ForCausalLM) -> None:
    """Round each weight to a bfloat16 value, so that runs in float32 and in bfloat16 start from the same base."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object a line, with the right answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": text, "label": str(answer)}) + "\n" for text, answer in problems]
    path.write_text("".join(lines))


def main(folder: Path) -> None:
    """Write `model/` and `prompts/` into the folder."""
    torch.set_num_threads(1)
    problems = all_problems()
    heldout, lessons = problems[:HELDOUT_ROWS], problems[HELDOUT_ROWS:]
    write_prompts(folder / "prompts" / "heldout.jsonl", heldout)
    write_prompts(folder / "prompts" / "train.jsonl", lessons[:TRAIN_ROWS])

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, *encode_lessons(tokenizer, lessons))
    round_to_bfloat16(model)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
