"""YAML file plus dotted overrides to a RunConfig, with errors that name the file, the key and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from relax_pipeline.config.run import RunConfig
from relax_pipeline.errors import ConfigError

_PATH_KEYS = (("model", "path"), ("lora", "start_from"), ("data", "train", "path"), ("evaluation", "source", "path"))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run configuration.

    Args:
        path: YAML file. Relative paths of models and prompts in it count from its folder.
        overrides: `section.key=value` each; the value is read as YAML.

    Raises:
        ConfigError: The file is missing or not YAML, or a setting is unknown or wrong; all problems at once.
    """
    file = Path(path)
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config file {file}; see deployments/recipes/ for examples") from None
    except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{file} is not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds {type(values).__name__}, not a mapping of settings")
    _resolve_paths(values, file.resolve().parent)
    for override in overrides:
        _apply(values, override)
    return check_config(values, source=str(file))


def check_config(values: dict[str, Any], *, source: str) -> RunConfig:
    """Turn settings into a run configuration.

    Args:
        values: Sections and settings.
        source: Where they are from, for the message.

    Raises:
        ConfigError: A setting is unknown or wrong; all problems at once.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    for keys in _PATH_KEYS:
        section: Any = values
        for key in keys[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(keys[-1]), str):
            section[keys[-1]] = str((folder / Path(section[keys[-1]]).expanduser()).resolve())


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: write section.key=value")
    *sections, leaf = key.split(".")
    target = values
    for name in sections:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override!r}: {name} is a value, not a section")
    try:
        target[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from error


def _explain(error: ValidationError, source: str) -> str:
    """Write pydantic's findings as one line each: key, problem, what was found, what to write."""
    lines = []
    for problem in error.errors():
        key, sections = _locate(problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key" + _suggest(str(problem["loc"][-1]), sections)
        elif problem["type"] == "missing":
            message = "required, and not set"
        elif problem["type"].startswith("union_tag"):
            kinds = [kind for s in _sections_behind(sections, key.rpartition(".")[2]) if (kind := _kind(s))]
            found = f"unknown kind {problem['ctx']['tag']!r}; " if "tag" in problem["ctx"] else ""
            message = f"{found}set {key}.kind to {', '.join(kinds[:-1])} or {kinds[-1]}"
        elif problem["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {problem['input']!r}"
        lines.append(f"  {key}: {message}" if key else f"  {message}")
    return f"{source}: {len(lines)} problem{'s' * (len(lines) > 1)}\n" + "\n".join(lines)


def _locate(location: tuple[int | str, ...]) -> tuple[str, list[type[BaseModel]]]:
    """Return a dotted key as the user writes it, and the sections that may hold it: one for each kind of backend."""
    parts: list[str] = []
    inner: list[type[BaseModel]] = [RunConfig]
    outer = inner
    for part in location:
        chosen = [section for section in inner if _kind(section) == part]
        if chosen and len(inner) > 1:  # pydantic names the kind as if it were a key
            inner = chosen
            continue
        parts.append(str(part))
        outer = inner
        if not isinstance(part, int):
            inner = _sections_behind(inner, part)
    return ".".join(parts), outer


def _sections_behind(sections: Iterable[type[BaseModel]], field: str) -> list[type[BaseModel]]:
    """Return the section classes a field of these sections may hold."""
    annotations = [section.model_fields[field].annotation for section in sections if field in section.model_fields]
    candidates = [c for annotation in annotations for c in (annotation, *getattr(annotation, "__args__", ()))]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def _kind(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get("kind")
    return field.default if field else None


def _suggest(name: str, sections: Iterable[type[BaseModel]]) -> str:
    known = [field for section in sections for field in section.model_fields]
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}" if known else ""
