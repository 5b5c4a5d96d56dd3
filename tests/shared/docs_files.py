"""Writes the end of docs/architecture.md: every file of the product, with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.test_layers import ORDER
from tests.shared.pages import DOCS, ROOT

PAGE = DOCS / "architecture.md"
HEAD = "## Every file, in one line\n"


def page() -> str:
    """The page as it stands up to HEAD, and behind it the section as the files say now."""
    written, head, _ = PAGE.read_text().partition(HEAD)
    return written + head + "\nHighest room first. The line is the file's own first sentence.\n" + sections()


def sections() -> str:
    """Room by room; a room of ORDER that is not built has no folder."""
    folders = {
        room: ROOT / room if room in ("kernels", "launcher") else ROOT / "colossal_lite" / room
        for room in ORDER
    }
    there = [(room, path) for room, path in reversed(folders.items()) if path.is_dir()]
    return "".join(f"\n### {room}\n\n{rows(path)}" for room, path in there)


def rows(room: Path) -> str:
    files = sorted(room.glob("*.py"))
    return "".join(
        f"- `{file.relative_to(ROOT)}`: {sentence(file)}\n" for file in files if file.name != "__init__.py"
    )


def sentence(file: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].removesuffix(".") + "."
