"""Write arithmetic word problems as train.jsonl and heldout.jsonl; no problem is in both."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_pipeline.data.arithmetic import WordProblem, word_problems

SEED = 0
TRAIN_ROWS = 2000
HELDOUT_ROWS = 100


def write_rows(path: Path, rows: Sequence[WordProblem]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write both files into the folder."""
    problems = word_problems(TRAIN_ROWS + HELDOUT_ROWS, SEED)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", problems[:TRAIN_ROWS])
    write_rows(folder / "heldout.jsonl", problems[TRAIN_ROWS:])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUTPUT_DIR")
    main(Path(sys.argv[1]))
