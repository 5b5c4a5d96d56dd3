"""Keeps the open engines of one context apart: where each saves, and where a loop over them stops.

Note: rounds.
A loop over a generator and its critic has made a round when both have made their steps.  A stop within a round would
save engines that do not go on together.  So a round begins with the engine that made the first step.  It ends with the
engine that stepped last before that one began again, after as many steps as then.  There a signal stops, and all
engines are saved.  An engine that steps on alone, more than twice as often as before, has no round to wait for.  Nor
has a loop whose rounds are longer than `LONGEST_ROUND`, such as phases of training: a signal leaves little time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from colossal_lite.engine.stopping import Stopped, StopPoint

LONGEST_ROUND = 16
"""Steps of all engines, for whose end a stop waits at most."""


class Saver(Protocol):
    """The state of an engine."""

    stop_point: StopPoint

    def stop(self) -> Stopped:
        """Save at the stop point."""


class OpenEngines:
    """The engines of one context that are not closed. All ranks call its methods in the same order."""

    def __init__(self) -> None:
        self._folders: dict[Path, Saver] = {}
        self._asked = False
        self._begin()

    def _begin(self) -> None:
        self._runs: dict[Saver, int] = {}  # steps of each in its last run of steps, in order of first steps
        self._running: Saver | None = None
        self._steps = 0
        self._closer: Saver | None = None

    def closed(self, engine: Saver) -> None:
        """Forget this engine."""
        self._folders = {folder: each for folder, each in self._folders.items() if each is not engine}
        if engine is self._running or engine in self._runs:
            self._begin()

    # ---- where each saves ----

    def takes(self, folder: Path, engine: Saver) -> None:
        """This engine has loaded a checkpoint of the folder, so it may save there."""
        self._folders[_whole(folder)] = engine

    def saves(self, what: str, folder: Path, engine: Saver) -> None:
        """Note that this engine saves there. Raises ValueError if another open engine does."""
        if self._folders.setdefault(_whole(folder), engine) is not engine:
            raise ValueError(
                f"{what}: {folder} has the checkpoints of another open engine of this context. A resume could not "
                f"tell whose they are; legal: a directory for each engine, or close() of the other before"
            )

    # ---- where a loop may stop ----

    def stepped(self, engine: Saver, *, stop: bool) -> bool:
        """Note a step of this engine, and whether a signal has come. Returns whether the loop stops now."""
        if engine is not self._running:
            if self._runs and engine is next(iter(self._runs)):
                self._closer = self._running
            if self._running is not None:
                self._runs[self._running] = self._steps
            self._running, self._steps = engine, 0
        self._steps += 1
        self._asked |= stop
        return self._asked and self._ends_round(engine)

    def _ends_round(self, engine: Saver) -> bool:
        if not self._runs.keys() - {engine} or sum(self._runs.values()) > LONGEST_ROUND:
            return True
        before = self._runs.get(engine, 0)
        if engine is self._closer and self._steps >= before:
            return True
        return self._steps > max(2 * before, 1)

    def others(self, engine: Saver) -> list[Saver]:
        """The other engines that have made steps and have a directory to save to."""
        return [each for each in self._runs if each is not engine and each.stop_point.directory]


def _whole(folder: Path) -> Path:
    return Path(os.path.realpath(folder))  # `resolve` raises for a link to itself
