"""Names the movable pieces of model state, and counts the staging buffers that they need.

Note: a piece is one kind of state of one chunk: weights, gradient or optimizer record.  A piece on the host crosses the
link in a step (`LinkCrossing`). It passes through staging buffers on the device or the host (`StagingBuffer`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from colossal_lite.memory.disk_layout import whole_pages
from colossal_lite.schedule import step_moments
from colossal_lite.schedule.interval_packing import LiveRange, most_at_once, pack_live_ranges, visits
from colossal_lite.schedule.step_moments import IN_FLIGHT, UPDATES, Backwards, SharedInterval, moments_of_step


class StateKind(StrEnum):
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    FROZEN = "frozen"
    """Weights that do not train."""
    LAST_SUM = "last sum"
    """The sum of the last micro-batch, for a gradient on the host in a step with several sums. The others may be added
    to it on the device, so it need not be copied out."""


# One is updated, one is fetched, one is written back.
VISITORS = 3
# One is used up, one is fetched.
COMING = 2
# A sum of gradients is copied out of one while the next one is put into the other.
OUTGOING = 2
# Of records on disk one is read, one is copied to the device, one back, one is written.
PASSING = 4


class StagingBuffer(NamedTuple):
    """Buffers on a tier for pieces that are copied there, for up to `width` chunks in a row.

    In the form "places" each chunk has one of its own size, in the order of updates or the reverse. In the form
    "buffers in a row" each buffer is as large as the largest piece."""

    what: str
    tier: str
    width: int
    form: Literal["places", "places, last first", "buffers in a row"] = "places"
    late: int = 0
    """How many turns after the first fetch for it a chunk needs its place."""

    def buffers(self, chunks: Collection[int]) -> int:
        """How many, for these chunks."""
        return most_at_once(chunks, self.width)

    def wide(self, width: int) -> StagingBuffer:
        """The same for so many chunks in a row."""
        return self._replace(width=width)

    def live_ranges(self, sizes: Mapping[int, int]) -> tuple[LiveRange, ...]:
        """When places are needed, counted in updates, for these sizes: chunk -> bytes."""
        found = visits(sizes, self.width, self.what, last_first=self.form == "places, last first")
        return tuple(replace(one, start=one.start + self.late, stop=one.stop + self.late) for one in found)

    def in_step(
        self, sizes: Mapping[int, int], *, last: int = 0, backwards: Backwards = Backwards.LAST,
        in_flight: int = IN_FLIGHT,
    ) -> tuple[LiveRange, ...]:  # fmt: skip
        """As `live_ranges`, by the moments of a step (schedule/step_moments.py), in these `backwards`.
        `last`: the chunk of the highest number. `in_flight`: as `sums_in_flight`."""
        live_ranges = self.live_ranges(sizes)
        if self.form == "places, last first":
            ranges = moments_of_step(live_ranges, in_flight=in_flight)
            return tuple(backwards.of(live_range, last) for live_range in ranges)
        return tuple(
            replace(live_range, start=live_range.start + UPDATES, stop=live_range.stop + UPDATES)
            for live_range in live_ranges
        )

    def bytes(self, sizes: Mapping[int, int]) -> int:
        """Bytes of the buffers for these sizes: chunk -> bytes."""
        if self.form == "buffers in a row":
            return self.buffers(sizes) * max(sizes.values(), default=0)
        return pack_live_ranges(self.live_ranges(sizes), 1).bytes


VISITING = {
    StateKind.WEIGHTS: StagingBuffer("weights", "device", VISITORS),
    StateKind.GRADIENTS: StagingBuffer("gradients", "device", COMING),
    StateKind.OPTIMIZER: StagingBuffer("records", "device", VISITORS),
}
WRITTEN = StagingBuffer("weights", "device", VISITORS - 1, late=1)
"""Of weights that an update writes and does not read: none are fetched for it."""
LEAVING = StagingBuffer(step_moments.LEAVING, "device", OUTGOING, "places, last first")
STAGING = {
    StateKind.WEIGHTS: (VISITING[StateKind.WEIGHTS],),
    StateKind.GRADIENTS: (VISITING[StateKind.GRADIENTS], LEAVING),
    StateKind.OPTIMIZER: (VISITING[StateKind.OPTIMIZER],),
}
"""The staging buffers of a piece on the host, by kind; none for other kinds."""
# For updates on the host. A gradient is used up while another arrives. Weights that are copied both ways have as many
# slots as on the device. Of weights that are only written one is copied out while another is written.
GRADIENT_DOWN = StagingBuffer("gradient down", "host", COMING, "buffers in a row")
WEIGHTS_BOTH = StagingBuffer("weights down and up", "host", VISITORS, "buffers in a row")
WEIGHTS_UP = StagingBuffer("weights up", "host", 2, "buffers in a row")


def passing_bytes(records: Mapping[int, int]) -> int:
    """Of the slots on the host through which records on disk pass, chunk -> bytes: whole pages of the largest."""
    return min(PASSING, len(records)) * max(map(whole_pages, records.values()), default=0)


def unused_bytes(records: Mapping[int, int]) -> int:
    """Of a file of such records, at the ends of pages."""
    return sum(whole_pages(size) - size for size in records.values())


class Name(NamedTuple):
    """A kind of state of a chunk."""

    chunk: int
    kind: StateKind


class LinkCrossing(NamedTuple):
    """How often the bytes of a piece are copied to the device and back in a step, and its slots."""

    ups: int = 0
    downs: int = 0
    slots: tuple[StagingBuffer, ...] = ()


@dataclass(frozen=True)
class StatePiece:
    """State that may rest on device or host: its bytes, and how often they cross the link each way if on the host."""

    name: Name
    bytes: int
    ups: int
    downs: int
    beside: tuple[LinkCrossing, LinkCrossing] | None = None
    """Its crossings where the record of its chunk is updated on the host: if the piece is on the host, and if it is on
    the device. None: as elsewhere."""
    moves: bool = True
    """Whether it may rest on the host at all; if not, it is counted as fixed."""
    is_written: bool = False
    """Of weights: whether an update on the device only writes them."""
    shared: SharedInterval | None = None
    """When it is in the arena, where it shares memory with others; None: it has memory of its own."""
    sums: int = 1
    """Of a gradient: micro-batches of a step."""
    last_sum: bool = False
    """Of a gradient: whether the sum of the last micro-batch is a piece by itself."""
    in_flight: int = IN_FLIGHT
    """Of a gradient: sums that begin before its own is over (`sums_in_flight`)."""

    @property
    def resting_bytes(self) -> int:
        """Bytes on the tier that is chosen for it; 0 if nothing is to be chosen."""
        return self.bytes if self.moves and self.name.kind is not StateKind.LAST_SUM else 0

    @property
    def own_bytes(self) -> int:
        """As `resting_bytes`, on the device, where it has memory of its own."""
        return self.resting_bytes if self.shared is None else 0

    def crossing(self, on_host: frozenset[Name]) -> LinkCrossing:
        """How it crosses the link if the pieces `on_host` are on the host."""
        is_off_device = self.name in on_host and self._is_apart(on_host)
        if self.beside is not None and Name(self.name.chunk, StateKind.OPTIMIZER) in on_host:
            return self.beside[not is_off_device]
        if not is_off_device:
            return LinkCrossing()
        slots = STAGING.get(self.name.kind, ())
        slots = (LEAVING,) if self._stays_last(on_host) else (WRITTEN,) if self.is_written else slots
        return LinkCrossing(self.ups, self.downs, slots)

    def is_time_shared(self, on_host: frozenset[Name]) -> bool:
        """Whether it shares memory in an arena."""
        return self.shared is not None and self.name not in on_host and self._is_apart(on_host)

    def backwards(self, on_host: frozenset[Name]) -> Backwards:
        """The backwards in which its sums are copied out."""
        if self._stays_last(on_host):
            return Backwards.EARLIER
        return Backwards.EACH if self.sums > 1 else Backwards.LAST

    def _is_apart(self, on_host: frozenset[Name]) -> bool:
        """False for a last sum whose other sums are on the device: it is one with them."""
        return (
            self.name.kind is not StateKind.LAST_SUM or Name(self.name.chunk, StateKind.GRADIENTS) in on_host
        )

    def _stays_last(self, on_host: frozenset[Name]) -> bool:
        return self.last_sum and Name(self.name.chunk, StateKind.LAST_SUM) not in on_host
