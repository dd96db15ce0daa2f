"""What trainer and engine processes log, in files of the run's folder and from there in this process's log."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"\S+ \S+ (?P<level>[A-Z]+) (?P<text>.*)")
_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def logged(build: Callable[[], T], file: Path) -> Callable[[], T]:
    """Return a `build` for a process of its own, which first has that process append its log to a file.

    Ours from INFO on, that of others from WARNING on.
    """
    return partial(_build, build, file)


@contextmanager
def forwarded(folder: Path) -> Iterator[None]:
    """Log here what processes append to the files of a folder meanwhile, under each file's name."""
    over = threading.Event()
    seen = {file: file.stat().st_size for file in folder.glob("*.log")}
    # With this context, or a flow run's log would not know that the lines are its own.
    thread = threading.Thread(target=copy_context().run, args=(_forward, folder, seen, over), daemon=True, name="logs")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_CLOSE_SECONDS)


def _build(build: Callable[[], T], file: Path) -> T:
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger("relax_pipeline").setLevel(logging.INFO)
    return build()


def _forward(folder: Path, seen: dict[Path, int], over: threading.Event) -> None:
    last = False
    while not last:
        last = over.wait(_POLL_SECONDS)  # once more after the end
        for file in sorted(folder.glob("*.log")):
            with file.open("rb") as stream:
                stream.seek(seen.get(file, 0))
                whole, newline, _ = stream.read().rpartition(b"\n")
            seen[file] = seen.get(file, 0) + len(whole + newline)
            _log(file.stem, whole.decode(errors="replace"))


def _log(process: str, text: str) -> None:
    """Log lines under their own levels; one that continues a record has that record's."""
    level = logging.INFO
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        level = logging.getLevelNamesMapping().get(match["level"], level) if match else level
        logger.log(level, "%s: %s", process, match["text"] if match else line)
