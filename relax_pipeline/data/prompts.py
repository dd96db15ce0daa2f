"""Reads prompt files and checks each row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax_pipeline.config import PromptSource
from relax_pipeline.errors import DataError

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else the chat template knows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prompt file, checked and not yet rendered."""

    prompt: str | tuple[Message, ...]
    label: str
    metadata: Mapping[str, Any]
    """All other columns."""
    where: str
    """File and line or row, for messages."""


def load_rows(source: PromptSource) -> list[Row]:
    """Read JSONL, Parquet, or a folder written by `datasets.save_to_disk`.

    Raises:
        DataError: The path cannot be read, holds no rows, or a row is malformed; names the line or row, from 1.
    """
    path = Path(source.path)
    rows = [_check_row(values, where, source) for where, values in islice(_read(path), source.max_rows)]
    if not rows:
        raise DataError(f"{path} holds no rows; a run needs at least one prompt")
    return rows


def _read(path: Path) -> Iterator[tuple[str, object]]:
    if path.is_dir():
        return _read_saved_dataset(path)
    if not path.exists():
        raise DataError(f"no prompts at {path}: no such file or folder")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"{path}: prompts are a .jsonl or .parquet file, or a folder written by datasets.save_to_disk")


def _read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    """Yield one value for each line; blank lines hold no row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line.strip())
            except json.JSONDecodeError as error:
                problem = f"{error.msg} at column {error.colno}"
                raise DataError(f"{where}: not JSON: {problem}; write one object a line") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(path, rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _read_saved_dataset(path: Path) -> Iterator[tuple[str, object]]:
    import datasets  # noqa: PLC0415 - seconds of start-up that only this format needs

    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path} is a folder, but not one that datasets.save_to_disk wrote: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise DataError(f"{path} holds the splits {', '.join(dataset)}: name one, e.g. {path / next(iter(dataset))}")
    return _numbered(path, iter(dataset))


def _numbered(path: Path, rows: Iterator[object]) -> Iterator[tuple[str, object]]:
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))


def _check_row(values: object, where: str, source: PromptSource) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected an object with columns, found {type(values).__name__}")
    for setting, key in (("prompt_key", source.prompt_key), ("label_key", source.label_key)):
        if key not in values:
            raise DataError(
                f"{where}: no column {key!r}; found {', '.join(values) or 'none'}; set {setting} to one of them"
            )
    prompt = _check_prompt(values[source.prompt_key], f"{where}, {source.prompt_key}")
    label = _check_label(values[source.label_key], f"{where}, {source.label_key}")
    used = {source.prompt_key, source.label_key}
    return Row(prompt, label, {key: value for key, value in values.items() if key not in used}, where)


def _check_prompt(value: object, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        texts = [value]
    elif isinstance(value, list):
        texts = [_content(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]
    else:
        raise DataError(f"{where}: expected a string or a list of chat messages, found {type(value).__name__}")
    if not any(text.strip() for text in texts):
        raise DataError(f"{where}: the prompt is empty; give it text or remove the row")
    return value if isinstance(value, str) else tuple(value)


def _content(message: object, where: str) -> str:
    if not isinstance(message, dict):
        raise DataError(f"{where}: expected {{role, content}}, found {type(message).__name__}")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise DataError(f"{where}: {key} must be a string, found {type(message.get(key)).__name__}")
    return str(message["content"])


def _check_label(value: object, where: str) -> str:
    """Return a label as text: numbers and booleans as JSON writes them."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise DataError(
        f"{where}: expected a string, a number or a boolean, found {type(value).__name__}; convert it to text"
    )
