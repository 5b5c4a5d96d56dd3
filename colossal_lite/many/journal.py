"""Keeps the decisions of a run of many on disk, and says whether another run can go on from them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossal_lite.many.task import Halving, Task
from colossal_lite.many.worker import saved_step

JOURNAL = "journal.jsonl"


class Journal:
    """Rows of JSON, each on disk before the next. A last row that a kill or a full disk cut short goes."""

    def __init__(self, directory: Path) -> None:
        self._path = path = directory / JOURNAL
        self._file = path.open("ab", buffering=0)
        whole = path.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole[0] + whole[1]))

    def write(self, **row: Any) -> None:
        """Raises ValueError where a row cannot be written."""
        left = (json.dumps(row) + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ValueError(
                f"directory: {self._path} cannot be written: {error.strerror}. Checkpoints and decisions before are "
                f"there; legal: a folder with room, and resume=True"
            ) from error

    def close(self) -> None:
        self._file.close()


def journal_rows(directory: Path) -> list[dict[str, Any]]:
    """What a journal says; a last line that a kill cut short is left out. Raises ValueError for a damaged one."""
    path = directory / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"{JOURNAL}: line {number} is damaged ({error}); legal: the journal as it was written"
                ) from None
    return rows


def stop_fault(directory: Path, tasks: Sequence[Task], stop: Halving | None) -> str:
    """Why this rule cannot go on from the rungs of a directory; "" if it can. The rows of old journals tell no rule."""
    try:
        rows = [row for row in journal_rows(directory) if row["decision"] == "rung"]
    except ValueError as error:
        return str(error)
    decided = sorted({row["rung"] for row in rows})
    rules = {(row["metric"], row["keep"]) for row in rows if "metric" in row}
    last = max(decided, default=0)
    rungs = [] if stop is None else [*stop.rungs]
    ours = set() if stop is None else {(stop.metric, float(stop.keep))}
    if [rung for rung in rungs if rung <= last] != decided or (rules and ours != rules):
        rule = "".join(f"metric={metric!r}, keep={keep!r}, " for metric, keep in sorted(rules))
        was = f"{rule}rungs that begin with {decided}"
        return f"stop={stop!r}: the rungs {decided} are decided there; legal: a cl.Halving with {was}"
    at = {task.name: saved_step(directory, task.name) for task in tasks}
    first, most = next((rung for rung in rungs if rung > last), 0), max(at.values())
    if first and (past := [name for name, step in at.items() if step > first]):
        none = f"the rungs {decided}" if decided else "stop=None"
        legal = f"{none}, or later ones from {most} on" if most < max(task.steps for task in tasks) else none
        return f"stop.rungs={tuple(rungs)}: {past[0]!r} is past step {first} there; legal: {legal}"
    return ""
