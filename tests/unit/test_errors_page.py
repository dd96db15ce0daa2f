"""docs/errors.md has every message the code can raise, and none that it cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "errors.md"
INTERNAL = {"AssertionError", "AttributeError", "InterruptedError", "OSError", "KeyError"}
"""Caught by whoever called, or never seen."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("relax_pipeline", "flows", "tasks"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            yield file.relative_to(REPOSITORY), ast.parse(file.read_text())


def text_of(node: ast.AST) -> str:
    """A string as it is written, on one line, with … for what is filled in; empty where it is made elsewhere."""
    return " ".join(_text_of(node).split())


def _text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text_of(part) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text_of(left) + _text_of(right)
    return ""


def raised() -> Iterator[tuple[str, str]]:
    """Where and what: the argument of every error that is made, wherever it is raised then."""
    for file, tree in trees():
        thrown = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or ast.unparse(node.func) in INTERNAL:
                continue
            text = text_of(node.args[0])
            named = ast.unparse(node.func).endswith("Error")
            if text and (named or (node in thrown and re.search("[a-z]", text))):
                yield f"{file}:{node.lineno}", text


def short_forms() -> list[str]:
    """What stands between backticks in the first column of the page's tables."""
    rows = [line for line in PAGE.read_text().split("\n") if line.startswith("| `")]
    return [form for row in rows for form in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def pattern(form: str) -> re.Pattern[str]:
    """Finds a short form in messages, one a line. A form without words of its own has to be all of a message."""
    found = ".*".join(re.escape(part) for part in form.split("…"))
    return re.compile(found if re.search(r"[A-Za-z]{3}", form) else f"^{re.escape(form)}$", re.MULTILINE)


def test_every_message_has_a_row() -> None:
    patterns = [pattern(form) for form in short_forms()]
    missing = [f"{where} {text}" for where, text in raised() if not any(found.search(text) for found in patterns)]
    assert not missing, "add to docs/errors.md, in short form:\n" + "\n".join(missing)


def test_every_row_is_of_a_message() -> None:
    strings = "\n".join({text_of(node) for _, tree in trees() for node in ast.walk(tree)})
    stale = [form for form in short_forms() if not pattern(form).search(strings)]
    assert not stale, f"docs/errors.md has messages that the code does not: {stale}"
