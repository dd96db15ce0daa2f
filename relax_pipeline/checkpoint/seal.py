"""What makes a folder a checkpoint: a manifest over all its files and, written last, COMMITTED over the manifest."""

from __future__ import annotations

from pathlib import Path

from relax_pipeline.checkpoint.manifest import COMMITTED_FILE, MANIFEST_FILE, FileEntry, Manifest, read_manifest
from relax_pipeline.errors import CheckpointError
from relax_pipeline.storage.files import fsync_tree, sha256_file, write_atomic


def seal(folder: Path, manifest: Manifest) -> None:
    """Write the manifest over all files, flush everything, and commit.

    Raises:
        CheckpointError: There is no file.
    """
    entries = {
        name: FileEntry(size=f.stat().st_size, sha256=sha256_file(f)) for name, f in _payload_files(folder).items()
    }
    if not entries:
        raise CheckpointError(f"nothing was written to {folder}")
    sealed = manifest.model_copy(update={"files": entries})
    (folder / MANIFEST_FILE).write_text(sealed.model_dump_json(indent=2) + "\n")
    fsync_tree(folder)
    write_atomic(folder / COMMITTED_FILE, sha256_file(folder / MANIFEST_FILE))


def verify(folder: Path) -> Manifest:
    """Compare every file of a committed checkpoint with the manifest and return it.

    Raises:
        CheckpointError: A file is missing, extra, or differs in size or content; names it.
    """
    manifest = read_manifest(folder)
    if (folder / COMMITTED_FILE).read_text() != sha256_file(folder / MANIFEST_FILE):
        raise CheckpointError(f"{folder / MANIFEST_FILE} is not the one that was committed")
    found = _payload_files(folder)
    if found.keys() != manifest.files.keys():
        difference = sorted(found.keys() ^ manifest.files.keys())
        raise CheckpointError(f"{folder} has missing or extra files: {', '.join(difference[:5])}")
    for name, entry in manifest.files.items():
        size = found[name].stat().st_size
        if size != entry.size:
            raise CheckpointError(f"{found[name]} has {size:,} bytes, {entry.size:,} were written")
        if sha256_file(found[name]) != entry.sha256:
            raise CheckpointError(f"{found[name]} has changed since it was written: its sha256 differs")
    return manifest


def _payload_files(folder: Path) -> dict[str, Path]:
    own = {MANIFEST_FILE, COMMITTED_FILE}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {name: path for path in files if (name := path.relative_to(folder).as_posix()) not in own}
