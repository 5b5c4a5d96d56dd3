"""Writes a file as a whole or not at all: a kill leaves no half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, by: str = "") -> None:
    """Write `text` to a file beside `path`, and rename that. `by`: of several writers at once, the name of this one.
    Raises OSError."""
    part = path.with_name(f".{path.name}{by}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
