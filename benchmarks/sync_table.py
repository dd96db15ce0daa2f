"""The figures of sync.py as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def print_tables(title: str, facts: dict[str, Any], phases: Sequence[str]) -> None:
    """Print a table of syncs, and one of what is measured beside them."""
    print(f"{title}, {facts['machine']}\n")
    print("| mode | transport | MiB | link | " + " | ".join(phases) + " | step to serving | difference | moved |")
    print("|---" * (len(phases) + 7) + "|")
    for row in facts["rows"]:
        seconds = " | ".join(f"{row['seconds'][phase]:.3f}" for phase in (*phases, "all"))
        link = f"{row['link_seconds']:.4f}" if row["link_seconds"] else "-"
        parity = f"{row['difference_mean']:.2g} / {row['difference_max']:.2g} | {row['moved_mean']:.2g}"
        print(f"| {row['mode']} | {row['transport']} | {row['bytes'] / 2**20:.1f} | {link} | {seconds} | {parity} |")
    print("\n| beside a sync | |\n|---|---|")
    for link, rate in facts["links"].items():
        print(f"| {link}, GB/s | {rate / 1e9:,.0f} |")
    for row in facts["rows"]:
        print_decoding(row)
        for name, value in row.get("sleep", {}).items():
            print(f"| {row['mode']}: {name} | {value:,.3f} |")


def print_decoding(row: dict[str, Any]) -> None:
    before = "base" if row["mode"] == "merge" else "adapter of zeros"
    for what, rate in ((before, row.get("decode_version_0")), (row["mode"], row.get("decode"))):
        if rate:
            print(f"| decoding with {what}, tokens/s | {rate:,.0f} |")
