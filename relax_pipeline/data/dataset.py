"""The prompts of a run: rows rendered with the chat template and tokenised, one at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from relax_pipeline.config import DataConfig
from relax_pipeline.data.prompts import Row
from relax_pipeline.errors import DataError
from relax_pipeline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataset:
    """Rows and how they become prompts."""

    def __init__(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        """Check that the rows can be rendered as configured.

        Raises:
            DataError: The tokenizer has no chat template, or a setting or row needs one that is switched off.
        """
        if config.chat_template:
            if not tokenizer.chat_template:
                raise DataError(
                    "the tokenizer has no chat template: set data.chat_template to false to feed prompts as they are, "
                    "or use the tokenizer of a chat model"
                )
        elif row := next((row for row in rows if not isinstance(row.prompt, str)), None):
            raise DataError(f"{row.where}: chat messages need the chat template: set data.chat_template to true")
        self._rows = rows
        self._tokenizer = tokenizer
        self._config = config

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the rows and what decides how they read, wherever the file lies."""
        template = self._tokenizer.chat_template if self._config.chat_template else None
        digest = hashlib.sha256(_canonical([template, self._config.system_prompt]))
        for row in self._rows:
            digest.update(_canonical([row.prompt, row.label, row.metadata]))
        return digest.hexdigest()

    def prompt(self, index: int) -> Prompt:
        """Render and tokenise one row.

        Raises:
            DataError: The chat template refuses the row, or the prompt is longer than data.max_prompt_tokens.
        """
        row = self._rows[index]
        text = self._render(row) if self._config.chat_template else str(row.prompt)
        # A chat template writes the special tokens itself; a bare prompt gets those the tokenizer adds, e.g. BOS.
        token_ids = self._tokenizer(text, add_special_tokens=not self._config.chat_template).input_ids
        if len(token_ids) > self._config.max_prompt_tokens:
            raise DataError(
                f"{row.where}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is "
                f"{self._config.max_prompt_tokens}; raise it, or shorten or remove the row"
            )
        return Prompt(index, text, tuple(token_ids), row.label, row.metadata)

    def _render(self, row: Row) -> str:
        messages: list[Any] = list(row.prompt)
        if isinstance(row.prompt, str):
            messages = [{"role": "user", "content": row.prompt}]
            if self._config.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            raise DataError(f"{row.where}: the tokenizer's chat template refuses the messages: {error}") from error


def _canonical(value: object) -> bytes:
    """Return the same bytes for the same content; values JSON does not know count by their text."""
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
