"""What will be published: the files of a complete model folder and the ones generated for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from relax_pipeline.errors import PublishError
from relax_pipeline.publish.manifest import MANIFEST
from relax_pipeline.storage.files import sha256_file
from relax_pipeline.storage.sending import PayloadFile

_HASHING_THREADS = 4


def collect_payload(folder: Path, card: Mapping[str, str]) -> list[PayloadFile]:
    """Hash everything that will be published; a file of the card replaces the folder's of the same name.

    Args:
        folder: A merged model. Every file in it, at any depth, is published.
        card: Names to texts, as `model_card` returns them.

    Raises:
        PublishError: The folder is not a complete model, or uses the manifest's name.
    """
    check_model_folder(folder)
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if MANIFEST in {*paths, *card}:
        raise PublishError(f"{folder / MANIFEST}: this name is the published manifest's; rename or remove the file")
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        kept = [name for name in paths if name not in card]
        from_folder = [
            _from_path(name, paths[name], digest)
            for name, digest in zip(kept, pool.map(sha256_file, [paths[name] for name in kept]), strict=True)
        ]
    return sorted([*from_folder, *(_from_text(*item) for item in card.items())], key=lambda file: file.name)


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that is not a whole Hugging Face checkpoint.

    Raises:
        PublishError: config.json, the weights, or a shard that the index names is missing, or a shard is cut short.
    """
    if not (folder / "config.json").is_file():
        raise PublishError(f"{folder} has no config.json, so it is no merged model; run `relax-pipeline merge` first")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise PublishError(f"{folder} has no *.safetensors weights; run `relax-pipeline merge` first")
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    if missing := sorted(named - {shard.name for shard in shards}):
        raise PublishError(f"{index} names shards that are not there: {', '.join(missing)}; merge again")
    for shard in shards:
        try:
            with safe_open(shard, framework="np"):
                pass
        except SafetensorError as error:
            raise PublishError(f"{shard} is not a whole safetensors file ({error}); merge again") from error


def _from_path(name: str, path: Path, sha256: str) -> PayloadFile:
    return PayloadFile(name, path.stat().st_size, sha256, path)


def _from_text(name: str, text: str) -> PayloadFile:
    data = text.encode()
    return PayloadFile(name, len(data), hashlib.sha256(data).hexdigest(), data)
