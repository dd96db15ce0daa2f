from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_pipeline.config import PromptSource
from relax_pipeline.data.prompts import Row, load_rows
from relax_pipeline.errors import DataError

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "2+3="}]
RECORDS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "label": "2", "level": 1},
    {"prompt": "2+2=", "label": "4", "level": None},
    {"prompt": "3+3=", "label": "6", "level": 3},
]


def write_jsonl(folder: Path, records: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(folder: Path, records: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def write_dataset(folder: Path, records: list[Any]) -> Path:
    datasets.Dataset.from_list(records).save_to_disk(str(folder / "rows"))
    return folder / "rows"


Writer = Callable[[Path, list[Any]], Path]
every_format = pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_dataset])


def load(path: Path, **settings: Any) -> list[Row]:
    return load_rows(PromptSource(path=str(path), **settings))


@every_format
def test_columns_become_prompt_label_and_metadata(write: Writer, tmp_path: Path) -> None:
    rows = load(write(tmp_path, RECORDS))
    assert [(row.prompt, row.label, row.metadata) for row in rows] == [
        ("1+1=", "2", {"level": 1}),
        ("2+2=", "4", {"level": None}),
        ("3+3=", "6", {"level": 3}),
    ]


@every_format
def test_chat_messages_stay_messages(write: Writer, tmp_path: Path) -> None:
    (row,) = load(write(tmp_path, [{"prompt": MESSAGES, "label": "5"}]))
    assert row.prompt == tuple(MESSAGES)


@every_format
def test_columns_are_chosen_by_key(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": "1+1=", "answer": "2", "prompt": "other"}])
    (row,) = load(path, prompt_key="question", label_key="answer")
    assert (row.prompt, row.label, row.metadata) == ("1+1=", "2", {"prompt": "other"})


@every_format
def test_max_rows_reads_only_the_first(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, [*RECORDS, {"prompt": "", "label": "the bad row is not read"}])
    assert [row.label for row in load(path, max_rows=3)] == ["2", "4", "6"]


@every_format
def test_a_bad_row_is_named_from_1(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, [*RECORDS, {"prompt": " \n", "label": "2"}])
    with pytest.raises(DataError, match=rf"{path} (line|row) 4, prompt: the prompt is empty"):
        load(path)


@every_format
def test_a_missing_column_lists_those_there_are(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(DataError, match="no column 'label'; found prompt, answer; set label_key"):
        load(path)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("two ", "two "),
        ("", ""),
        (12, "12"),
        (-3, "-3"),
        (34.0, "34.0"),
        (0.5, "0.5"),
        (True, "true"),
        (2**70, str(2**70)),
    ],
)
def test_a_scalar_label_becomes_text(label: object, text: str, tmp_path: Path) -> None:
    assert load(write_jsonl(tmp_path, [{"prompt": "1+1=", "label": label}]))[0].label == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1=", "label"', "not JSON: Expecting ':' delimiter at column 27; write one object a line"),
        ('{"prompt": "\xff", "label": "2"}', "not UTF-8: .*0xff"),
        ('["1+1=", "2"]', "expected an object with columns, found list"),
        ("{}", "no column 'prompt'; found none; set prompt_key"),
        ('{"prompt": 7, "label": "2"}', "prompt: expected a string or a list of chat messages, found int"),
        ('{"prompt": null, "label": "2"}', "prompt: expected a string .* found NoneType"),
        ('{"prompt": [], "label": "2"}', "prompt: the prompt is empty"),
        ('{"prompt": [{"role": "user", "content": ""}], "label": "2"}', "prompt: the prompt is empty"),
        ('{"prompt": ["1+1="], "label": "2"}', "prompt, message 1: expected {role, content}, found str"),
        ('{"prompt": [{"content": "1+1="}], "label": "2"}', "prompt, message 1: role must be a string, found NoneType"),
        (
            '{"prompt": [{"role": "user", "content": 2}], "label": "2"}',
            "message 1: content must be a string, found int",
        ),
        ('{"prompt": "1+1=", "label": null}', "label: expected a string, a number or a boolean, found NoneType"),
        ('{"prompt": "1+1=", "label": ["2"]}', "label: expected a string, a number or a boolean, found list"),
    ],
)
def test_malformed_rows_say_where_and_what(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "1+1=", "label": "2"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=rf"{path} line 3.*{message}"):
        load(path)


def test_blank_lines_and_a_byte_order_mark_hold_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": "2"}\r\n \r\n{"prompt": "b\xe2\x80\xa8c", "label": "3"}')
    assert [(row.prompt, row.where) for row in load(path)] == [("a", f"{path} line 1"), ("b\u2028c", f"{path} line 3")]


def test_a_parquet_column_keeps_its_types(tmp_path: Path) -> None:
    (row,) = load(write_parquet(tmp_path, [{"prompt": "a", "label": 2, "day": date(2025, 3, 1)}]))
    assert (row.label, row.metadata) == ("2", {"day": date(2025, 3, 1)})


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no rows"):
        load(write_jsonl(tmp_path, []))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", None, "no such file or folder"),
        ("rows.csv", b"prompt,label\n", r"a .jsonl or .parquet file, or a folder"),
        ("rows.parquet", b"not parquet", "not a readable Parquet file"),
    ],
)
def test_unreadable_files(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_a_folder_without_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not one that datasets.save_to_disk wrote"):
        load(tmp_path)


def test_a_folder_with_splits_asks_for_one(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(DataError, match=rf"splits train, test: name one, e.g. {tmp_path}/rows/train"):
        load(tmp_path / "rows")
    assert len(load(tmp_path / "rows" / "train")) == 3
