"""All files of a checkpoint that are not its weights: copied as they are, sub-folders and code included."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from relax_pipeline.merge.base import Base
from relax_pipeline.storage.files import write_atomic

REPORT_FILE = "MERGE.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def other_files(base: Base) -> Iterator[Path]:
    """Yield the paths, relative to the base, of everything but the shards that are merged and an older MERGE.json."""
    for folder, _, names in os.walk(base.folder, followlinks=True):
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(base.folder)
            if str(path) not in base.headers and str(path) != REPORT_FILE:
                yield path


def copy_other_files(base: Base, folder: Path, rewritten: Mapping[str, str]) -> int:
    """Copy every other file into a folder; return how many.

    Args:
        base: Where from.
        folder: Where to.
        rewritten: File name to new content, for those that cannot stay as they are.
    """
    count = 0
    for path in other_files(base):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if str(path) in rewritten:
            write_atomic(target, rewritten[str(path)])
        else:
            shutil.copy(base.folder / path, target)
            count += 1
    return count


def other_bytes(base: Base) -> int:
    """Return the size of all other files."""
    return sum((base.folder / path).stat().st_size for path in other_files(base))


def unmerged_weight_files(base: Base) -> tuple[str, ...]:
    """Return weight files that are copied without the adapter, such as a second copy of the model for another tool."""
    return tuple(str(path) for path in other_files(base) if path.suffix in WEIGHT_SUFFIXES)
