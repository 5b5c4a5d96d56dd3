"""Writes what a program makes of docs: settings, files, pictures. `python -m tests.shared.docs_pages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.shared import docs_configuration, docs_files
from tests.shared.docs_pictures import PICTURES
from tests.shared.pages import DOCS

MADE: Mapping[Path, Callable[[], str]] = {
    DOCS / "configuration.md": docs_configuration.page,
    docs_files.PAGE: docs_files.page,
    **{DOCS / "pictures" / f"{name}.svg": lambda draw=draw: draw() + "\n" for name, draw in PICTURES.items()},
}
"""File of docs -> the function that makes its text."""


def main() -> None:
    for path, make in MADE.items():
        text = make()
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
