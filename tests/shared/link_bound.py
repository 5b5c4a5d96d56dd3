"""Computes the least bytes that a step moves between host and device, under any placement policy.

Note: prices of device memory.
A step is a cycle of phases.  Across the boundary between two phases the device holds at most its capacity.  With a
price for device memory at each phase, the best choice for a byte does not depend on the others.  A byte is then on the
device across the boundaries where that is cheapest for it: price plus bytes over the link.  Sum what all bytes pay, and
subtract the price of the whole capacity.  By weak duality of linear programs that is at most what any policy moves,
whatever the prices.  The maximum over some prices is the bound.  It holds for Belady's rule (farthest next use first;
10.1147/sj.52.0078) with writing back, where that rule itself is not the best.
Cost: len(PRICES) ** phases, times the number of ways in which pieces are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from colossal_lite.offload.pieces import Name


@dataclass(frozen=True)
class Use:
    """A piece in one phase of a step: whether its bytes are needed when the phase first touches it, and whether it
    leaves the phase with new ones that a later phase needs."""

    bytes: int
    reads: bool
    writes: bool
    adds: bool = False
    """Whether what it writes is to be added to what was there: where that is, or where both come together later."""


Phase = Mapping[Name, Use]

PRICES = (0, 1, 2)
"""Of a byte's room across a boundary, in bytes over the link: it is worth no more than to go down and come up."""


@dataclass(frozen=True)
class Pattern:
    """How a byte is used: in each phase read, written, added to, or (None) not at all; and the phases at whose ends
    what was written is still needed."""

    uses: tuple[tuple[bool, bool, bool] | None, ...]
    alive: frozenset[int]


def link_bound(phases: Sequence[Phase], capacity: int) -> int:
    """Bytes, up and down together, that a step of these phases, repeated for ever, moves at the least where a device
    keeps `capacity` bytes between phases."""
    held = patterns_of(phases)
    return max(
        sum(size * _least(pattern, prices) for pattern, size in held.items()) - capacity * sum(prices)
        for prices in product(PRICES, repeat=len(phases))
    )


def patterns_of(phases: Sequence[Phase]) -> Mapping[Pattern, int]:
    """The bytes that are used in each way."""
    found: Counter[Pattern] = Counter()
    for name in {name for phase in phases for name in phase}:
        uses = [phase.get(name) for phase in phases]
        written = (_ends(phases, number, name) for number, use in enumerate(uses) if use and use.writes)
        pattern = Pattern(
            tuple((use.reads, use.writes, use.adds) if use else None for use in uses),
            frozenset[int]().union(*written),
        )
        found[pattern] += next(use.bytes for use in uses if use)
    return found


ABSENT, COPY, NEWER, PART = range(4)
"""The state of a byte on the device: absent, a copy of the host's, newer than the host's, or a part that is to be added
to the host's."""


def _least(pattern: Pattern, prices: Sequence[int]) -> int:
    """What one byte pays in a step at the least, that begins as it ends."""
    best: float = inf
    for start in (ABSENT, COPY, NEWER, PART):
        paid: dict[int, float] = {start: 0}
        for number, (use, price) in enumerate(zip(pattern.uses, prices, strict=True)):
            after: dict[int, float] = {}
            for state, cost in paid.items():
                reads, writes, adds = use or (False, False, False)
                if reads and state in (ABSENT, PART):
                    state, cost = COPY if state == ABSENT else NEWER, cost + 1
                if writes:
                    state = PART if adds and state in (ABSENT, PART) else NEWER
                gone = cost + (state in (NEWER, PART) and number in pattern.alive)
                after[ABSENT] = min(gone, after.get(ABSENT, inf))
                if state != ABSENT:
                    after[state] = min(cost + price, after.get(state, inf))
            paid = after
        best = min(best, paid.get(start, inf))
    assert best < inf, "to keep nothing is a way"
    return int(best)


def _ends(phases: Sequence[Phase], number: int, name: Name) -> frozenset[int]:
    """The phases at whose ends the bytes that phase `number` writes are still needed, until they are written anew."""
    last, count = number, len(phases)
    for later in range(number + 1, number + count + 1):
        use = phases[later % count].get(name)
        if use is not None and use.reads:
            last = later
        if use is not None and use.writes:
            if last == number and later < number + count:
                last = later  # a sum that is added to is needed until then, though nobody brings it
            break
    return frozenset(end % count for end in range(number, last))
