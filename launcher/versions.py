"""States what this process runs: versions, and a hash of this package's source. Ranks compare it when they launch."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch

from colossal_lite import __version__


@functools.cache
def versions() -> dict[str, str]:
    """Facts that must be the same on every rank, by name."""
    return {
        "version of colossal_lite": __version__,
        "version of torch": torch.__version__,
        "version of python": platform.python_version(),
        "source of colossal_lite": source_hash(Path(__file__).resolve().parents[1]),
    }


def source_hash(root: Path) -> str:
    """A hash of the Python files of all rooms below `root`: names and bytes, 12 hexadecimal digits."""
    done = hashlib.sha256()
    # kernels/ and launcher/ are inside an installed package, and beside it in a source tree
    names = [""] if (root / "__init__.py").is_file() else ["colossal_lite", "kernels", "launcher"]
    found = (path for name in names for path in (root / name).rglob("*.py"))
    files = {path.relative_to(root).as_posix(): path for path in found}
    for name in sorted(files):
        text = files[name].read_bytes()
        done.update(f"{name}\0{len(text)}\0".encode() + text)
    return done.hexdigest()[:12]
