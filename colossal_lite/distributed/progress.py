"""Records what one rank is doing: phase, step, collectives, what it waits for, and the errors that it has met.

Note: errors that one rank meets alone.
A call of the engine that raises leaves the other ranks waiting.  `raised` counts such calls.  Where every rank has
raised equally often, all have given up alike, and no rank waits in vain.  A rank that has raised more often than
another lets it wait, until it goes on (`went_on`).  It goes on with the next call, if no collective of the failed one
had begun.  Else it does when a later call has succeeded.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

KEPT = 32
"""descriptions recorded for each axis"""
REASON_CHARS = 500
LEFT = "left"
"""The phase of a rank that has left its context without an error."""


def reason_of(error: BaseException) -> str:
    """An error in one line for other ranks."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")[:REASON_CHARS]


@dataclass
class Progress:
    """What one rank is doing. Its main thread writes it, its watchdog reads it."""

    phase: str = "start"
    step: int = 0
    fault: str = ""
    """The error of the engine's last call, in one line; empty if there was none."""
    raised: int = 0
    """Calls of the engine that have raised an error of this rank's own."""
    went_on: int = 0
    """Of these, the ones that lie behind: no rank waits because of them."""
    broken: str = ""
    """Why no collective can follow, in one line; empty while all is well."""
    waiting_since_s: float | None = None
    """Since when the main thread waits in one collective, by `time.monotonic`; None if it does not."""
    waiting_limit_s: float | None = None
    """How long it may wait there; None for a wait that ends by itself."""
    calls: Counter[str] = field(default_factory=Counter)
    history: dict[str, deque[tuple[int, str]]] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each axis that has had a collective."""
    is_half_way: bool = False
    """Whether the last call has raised after it had begun collectives, which other ranks may have begun or not."""
    _began_with: int = 0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set a phase within another one. An error leaves it set, otherwise the outer one returns."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def waiting(self, limit_s: float | None = None) -> Iterator[None]:
        """Around a wait of the main thread for other ranks, which the watch ends after `limit_s`."""
        self.waiting_since_s, self.waiting_limit_s = time.monotonic(), limit_s
        try:
            yield
        finally:
            self.waiting_since_s = None

    def called(self, axis: str, ranks: tuple[int, ...], description: str) -> None:
        """Record that a collective of these ranks begins."""
        self.calls[axis] += 1
        self.groups[axis] = ranks
        self.history.setdefault(axis, deque(maxlen=KEPT)).append((self.calls[axis], description))

    def call_begins(self, *, gives_up: bool = False) -> None:
        """A call of the engine begins; `gives_up`: one that ends a step without its update."""
        self._began_with = self.calls.total()
        if not (self.is_half_way or gives_up):
            self.went_on = self.raised

    def call_raised(self, reason: str, *, is_own: bool) -> None:
        """It has raised; `is_own`: by itself, not because another rank did not come."""
        self.fault, self.waiting_since_s = reason, None
        if is_own:
            self.raised += 1
            self.is_half_way |= self.calls.total() > self._began_with and self.phase != "between steps"

    def call_succeeded(self) -> None:
        """It has returned."""
        self.fault, self.went_on, self.is_half_way, self.waiting_since_s = "", self.raised, False, None

    def breaks(self, reason: str) -> None:
        """No collective can follow. The first reason stays."""
        self.broken = self.broken or (reason.splitlines() or [""])[0]
