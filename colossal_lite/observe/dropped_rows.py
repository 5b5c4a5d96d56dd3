"""Writes rows of a log to files, and counts the rows that could not be written: a full disk ends no run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colossal_lite.config.whole_file import write_whole


@dataclass
class DroppedRows:
    """Counts the rows that were dropped, with the last reason. `tell` is called once, with the first reason."""

    tell: Callable[[str], object]
    count: int = 0
    reason: str = ""

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`; False, counted, if it raised OSError."""
        try:
            write()
        except OSError as error:
            if not self.count:
                self.tell(f"log: rows are dropped, the run goes on: {error}")
            self.count, self.reason = self.count + 1, str(error)
            return False
        return True

    def summary(self) -> str:
        """One line for the end of a run; "" if nothing was dropped."""
        return f"log: {self.count} rows were dropped: {self.reason}" if self.count else ""


class JsonLines:
    """Writes rows to a file, one JSON object a line, whole or not at all. Of an existing file, rows up to `keep_step`
    stay. A killed run's later rows are dropped, because the resumed run writes them again. Raises OSError."""

    def __init__(self, path: Path, keep_step: int = 0) -> None:
        kept = list(_rows_up_to(path, keep_step)) if keep_step and path.exists() else []
        write_whole(path, "".join(kept))  # a kill here loses no row
        self._file = path.open("ab", buffering=0)

    def write(self, row: Any) -> None:
        """Append a dataclass or dict. Raises OSError; then the file is as it was."""
        values: Mapping[str, Any] = row if isinstance(row, Mapping) else asdict(row)
        line = (json.dumps({key: _finite(value) for key, value in values.items()}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        self._file.close()


def _rows_up_to(path: Path, step: int) -> Iterator[str]:
    """Lines of rows up to `step`. Those that a kill cut short, or that no run wrote, are left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found = row.get("step") if isinstance(row, dict) else None
        if line.endswith("\n") and isinstance(found, int) and found <= step:
            yield line


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RankFile(logging.Handler):
    """Appends records to a file, opened for each. No record is buffered, and a failed write does not raise."""

    def __init__(self, path: Path, dropped: DroppedRows) -> None:
        super().__init__()
        self.path, self.dropped = path, dropped
        dropped.attempt(lambda: self._append(""))

    def emit(self, record: logging.LogRecord) -> None:
        self.dropped.attempt(lambda: self._append(self.format(record) + "\n"))

    def _append(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
