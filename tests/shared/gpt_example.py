"""Imports the scripts of examples/gpt as they import each other: by bare name, from their own folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "gpt"


@contextmanager
def gpt_example() -> Iterator[Callable[[str], ModuleType]]:
    """Gives the import of a script by name; at the end all of them are forgotten."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(FOLDER))
        for name in {path.stem for path in FOLDER.glob("*.py")} - before:
            sys.modules.pop(name, None)
