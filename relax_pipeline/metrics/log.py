"""JSON lines keyed by step: metrics.jsonl and samples.jsonl of a run, always written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16


class StepLog:
    """One JSON object a step. A resumed run forgets the steps it will do again."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a step's row."""
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, oldest first; a last line that a crash cut short is left out."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().split("\n")[:-1]]

    def tail(self, count: int) -> list[dict[str, Any]]:
        """Return the newest rows, oldest first, without reading the others."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            start, data = file.seek(0, os.SEEK_END), b""
            while start > 0 and data.count(b"\n") <= count:
                size = min(_BLOCK_BYTES, start)
                start = file.seek(start - size)
                data = file.read(size) + data
        lines = data.split(b"\n")[:-1]
        return [json.loads(line) for line in lines[-count:]]

    def rewind(self, step: int) -> None:
        """Forget the rows after a step."""
        kept = [row for row in self.rows() if row["step"] <= step]
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.replace(self.file)


def series(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of one metric, where it was measured."""
    return [(row["step"], row[name]) for row in rows if name in row]
