"""Counts calls, payload bytes and waits of one rank's collectives, by operation and axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from colossal_lite.observe.clock import TimedSpans
from colossal_lite.observe.tables import Rows, seconds


@dataclass(frozen=True)
class LedgerRow:
    """Calls and logical payload bytes of one operation on one axis."""

    operation: str
    axis: str
    calls: int
    payload_bytes: int


@dataclass
class Ledger:
    """Counts the collectives of one rank since the last `clear`, and how long it waited for them."""

    waits: TimedSpans = field(default_factory=TimedSpans)
    shared_bytes: int = 0
    """On a recording communicator: the most bytes that two exchanges in a row have in shared memory."""
    _last_shared_bytes: int = 0
    _counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: reads of full tensors are not part of a step."""
        kept, waits, self.waits = dict(self._counts), self.waits, TimedSpans()
        yield
        self._counts, self.waits = kept, waits

    @property
    def waited_s(self) -> float:
        """Seconds that computing waited for other ranks: the host, or the device between two events."""
        return self.waits.seconds

    def add(self, operation: str, axis: str, payload_bytes: int, calls: int = 1) -> None:
        before, total = self._counts.get((operation, axis), (0, 0))
        self._counts[operation, axis] = (before + calls, total + payload_bytes)

    def share(self, posted_bytes: int) -> None:
        """Count bytes posted in shared memory. The peers have read them when the next are posted."""
        self.shared_bytes = max(self.shared_bytes, self._last_shared_bytes + posted_bytes)
        self._last_shared_bytes = posted_bytes

    def rows(self) -> Rows[LedgerRow]:
        return Rows(LedgerRow(*key, *value) for key, value in sorted(self._counts.items()))

    def __str__(self) -> str:
        return f"{self.rows() or 'nothing was sent'}\nwaited for other ranks: {seconds(self.waited_s)}"

    @property
    def payload_bytes(self) -> int:
        return sum(total for _, total in self._counts.values())

    def clear(self) -> None:
        self._counts.clear()
        self.waits = TimedSpans()
