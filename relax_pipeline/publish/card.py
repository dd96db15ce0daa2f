"""The model card: what a published model is, where it comes from, how well it learnt, and how to load it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from relax_pipeline.metrics.svg import Point, line_chart

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_LICENCE_FIELDS = ("license", "license_name", "license_link")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    *,
    run_name: str,
    step: int,
    base_name: str,
    base_digest: str,
    base_readme: str | None,
    config: Mapping[str, Any],
    lora: Mapping[str, object] | None,
    data: Mapping[str, object],
    metrics: Mapping[str, Sequence[Point]],
) -> dict[str, str]:
    """Write the files that describe a model. The same arguments give the same text.

    Args:
        run_name: The training run.
        step: Training steps taken.
        base_name: Of the base model; linked where it is a Hub id, owner/name.
        base_digest: The base's identity by content.
        base_readme: Text of the base's README.md, for its licence; None: it has none.
        config: Content of the model's config.json: decides how it is loaded.
        lora: LoRA settings by name; None: all weights were trained.
        data: What it was trained on, by name: source, number of prompts, fingerprint.
        metrics: Names to (step, value); each gets a row and a curve.

    Returns:
        README.md and the curves it shows, by name: what `publish_model(card=...)` takes.
    """
    licence = base_licence(base_readme or "")
    curves = {f"curves/{_slug(name)}.svg": _curve(name, points) for name, points in metrics.items()}
    training = {"Run": run_name, "Steps": step, "Method": "LoRA, merged into the base" if lora else "all weights"}
    sections = [
        _front_matter(base_name, licence, config),
        f"# {run_name}, step {step}",
        f"{_linked(base_name)}, trained further with reinforcement learning. This is a standalone checkpoint: it needs "
        "no adapter and no base.",
        f"## How to load it\n\n{_loading(config)}",
        f"## Training\n\n{_table(training | dict(lora or {}))}",
        f"## Data\n\n{_table(data)}",
        f"## Metrics\n\n{_metrics(metrics, curves)}",
        f"## Base\n\n{_table({'Model': _linked(base_name), 'Content sha256': base_digest})}",
        f"## Licence\n\n{_licence_text(base_name, licence)}",
    ]
    return {"README.md": "\n\n".join(sections) + "\n", **curves}


def base_licence(readme: str) -> dict[str, str]:
    """Return the licence fields of a README's front matter: license, license_name, license_link, where given."""
    found = _FRONT_MATTER.match(readme)
    try:
        fields = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        fields = None  # someone else's file: the card then says that no licence was found
    if not isinstance(fields, dict):
        return {}
    return {name: str(fields[name]) for name in _LICENCE_FIELDS if fields.get(name)}


def _front_matter(base_name: str, licence: Mapping[str, str], config: Mapping[str, Any]) -> str:
    fields: dict[str, object] = dict(licence)
    if _HUB_ID.fullmatch(base_name):
        fields["base_model"] = base_name
    fields["library_name"] = "transformers"
    fields["pipeline_tag"] = "image-text-to-text" if _sees(config) else "text-generation"
    fields["tags"] = ["reinforcement-learning", "lora", "relax-pipeline"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _loading(config: Mapping[str, Any]) -> str:
    model, inputs = "AutoModelForCausalLM", "AutoTokenizer"
    if _sees(config):
        model, inputs = "AutoModelForImageTextToText", "AutoProcessor"
    remote = ", trust_remote_code=True" if "auto_map" in config else ""
    return (
        f"Download the folder, then:\n\n```python\nfrom transformers import {model}, {inputs}\n\n"
        f'folder = "path/to/this/folder"\nmodel = {model}.from_pretrained(folder, dtype="auto"{remote})\n'
        f"{inputs.removeprefix('Auto').lower()} = {inputs}.from_pretrained(folder{remote})\n```\n\n"
        "`manifest.json` lists every file with its size and SHA-256; "
        "`relax-pipeline published verify URI` compares them."
    )


def _metrics(metrics: Mapping[str, Sequence[Point]], curves: Iterable[str]) -> str:
    if not metrics:
        return "None were recorded."
    rows = ["| Metric | First | Last | Lowest | Highest |", "|---|---:|---:|---:|---:|"]
    for name, points in metrics.items():
        values = [value for _, value in points]
        cells = [values[0], values[-1], min(values), max(values)] if values else []
        rows.append(f"| {_cell(name)} | {' | '.join(f'{value:.4g}' for value in cells) or '| | |'} |")
    images = [f"![{_cell(name)} by step]({file})" for name, file in zip(metrics, curves, strict=True)]
    return "\n".join(rows) + "\n\n" + "\n\n".join(images)


def _curve(name: str, points: Sequence[Point]) -> str:
    return line_chart({name: points}, title=name, x_label="step", y_label=name)


def _licence_text(base_name: str, licence: Mapping[str, str]) -> str:
    if not licence:
        return f"The folder of {base_name} states no licence. Find out which one holds before you pass this model on."
    name = licence.get("license_name") or licence.get("license") or licence["license_link"]
    link = licence.get("license_link")
    return f"That of the base: {f'[{name}]({link})' if link else name}."


def _table(values: Mapping[str, object]) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _linked(base_name: str) -> str:
    return f"[{base_name}](https://huggingface.co/{base_name})" if _HUB_ID.fullmatch(base_name) else base_name


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _sees(config: Mapping[str, Any]) -> bool:
    return "vision_config" in config
