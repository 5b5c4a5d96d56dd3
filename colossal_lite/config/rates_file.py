"""Reads and writes the file in which `colossal-lite calibrate` keeps the rates of a machine.

Note: JSON, `{"machine": ..., "made": ..., "rates": {...}, "measured": {...}}`.  `rates` are settings of `memory.rates`;
`measured` is for people.  A machine is its processor, threads and device, so machines of one kind share a file.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from colossal_lite.config.memory_schema import NEEDED, RatesConfig
from colossal_lite.config.whole_file import write_whole


@dataclass(frozen=True)
class RatesFile:
    """Rates of a machine, when they were measured, and the machine's name."""

    machine: str
    made: str
    rates: RatesConfig


def default_file(machine: str, cache: Path) -> Path:
    """Where `calibrate` keeps the rates of a machine, in the user's folder `cache`."""
    return cache / "colossal_lite" / f"rates-{re.sub(r'[^A-Za-z0-9.]+', '-', machine).strip('-')}.json"


def kept_file(machine: str) -> Path | None:
    """Where `calibrate` has kept the rates of a machine, for this user. None: nowhere that this user can see."""
    try:
        path = default_file(machine, Path.home() / ".cache")
        return path if path.is_file() else None
    except (RuntimeError, OSError):  # a user without a home, or with that of another user
        return None


def read_rates(path: Path) -> RatesFile:
    """The file at `path`. Raises ValueError for one that cannot be read, or lacks what an update needs."""
    why = ""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        rates = RatesConfig.model_validate(read["rates"], strict=True)
        found = RatesFile(str(read["machine"]), str(read["made"]), rates)
        missing = [name for name in NEEDED if getattr(found.rates, name) is None]
        why = f"lacks {', '.join(missing)}" if missing else ""
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"has {first['input']!r} as {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, KeyError, TypeError) as error:
        why = f"is no file of rates ({type(error).__name__}: {error})"
    if why:
        legal = "a file that `colossal-lite calibrate` has written"
        raise ValueError(f"memory.rates = {str(path)!r}: {why}; legal: {legal}")
    return found


def check_place(path: Path) -> None:
    """Make the folder of a file that `write_rates` is to write. Raises OSError if it cannot write there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.is_file() or not path.exists():
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            return


def write_rates(path: Path, found: RatesFile, measured: Mapping[str, Any]) -> None:
    """Write a file that `read_rates` reads; `measured`: further figures, for people."""
    content = {
        "machine": found.machine, "made": found.made,
        "rates": found.rates.model_dump(exclude_none=True), "measured": dict(measured),
    }  # fmt: skip
    check_place(path)
    text = json.dumps(content, indent=2) + "\n"
    if path.is_file() or not path.exists():
        writer = f".{platform.node()}.{os.getpid()}"  # ranks and hosts may calibrate at once
        write_whole(path.resolve(), text, by=writer)  # a link stays one
    else:  # a pipe or a device
        path.write_text(text, encoding="utf-8")
