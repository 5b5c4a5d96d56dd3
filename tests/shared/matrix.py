"""Writes and reads a table of outcomes in a page of docs: an error, or a number of a refusal whose words are below."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Matrix = Mapping[tuple[str, str], str]
"""(row, column) -> `exact 1.2e-15` or `refused WORDS`; a dot where there is no such cell."""


def write(found: Matrix, rows: Sequence[str], columns: Sequence[str]) -> str:
    """The table in Markdown, with the words of the refusals as a list behind it."""
    reasons = list(dict.fromkeys(state for state in found.values() if state.startswith("refused ")))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = []
        for column in columns:
            state = found.get((row, column), "")
            if state.startswith("refused "):
                cells.append(f"**R{reasons.index(state) + 1}**")
            else:
                cells.append(state.removeprefix("exact ") or "·")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- **R{i}** {reason.removeprefix('refused ')}" for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines).rstrip("\n") + "\n"


def read(text: str) -> dict[tuple[str, str], str]:
    """The inverse of `write`."""
    reasons = dict(re.findall(r"^- \*\*(R\d+)\*\* (.*)$", text, re.M))
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    columns = table[0][1:]
    found: dict[tuple[str, str], str] = {}
    for name, *cells in table[2:]:
        for column, cell in zip(columns, cells, strict=True):
            if cell.startswith("**R"):
                found[name, column] = f"refused {reasons[cell.strip('*')]}"
            elif cell != "·":
                found[name, column] = f"exact {cell}"
    return found
