"""Plans when gradients accumulate, are reduced and leave, for each ZeRO stage, and the payload that follows.

Note: one mechanism.
The stages of arXiv 1910.02054 are three booleans: is the optimizer state, the gradient, the weight of a chunk sharded
over the ranks that sum its gradient.  There are two ways of summing.  `by_step` accumulates micro-batches in a buffer
of the full gradient and reduces it once.  `by micro-batch` fills a slot, reduces it, and adds the result to this rank's
shard.  `ordered` always takes the second way and adds in rank order, at every stage, so stages agree in every bit.

Logical payload of a step with k micro-batches, P elements, r and w bytes per element of gradient and weight:

    stage 0     all-reduce r P                                 ordered: reduce-scatter k r P, all-gather r P
    stage 1, 2  reduce-scatter r P, all-gather w P             by micro-batch: reduce-scatter k r P, all-gather w P
    stage 3     reduce-scatter k r P, all-gather 2 k w P       not dropped between forward and backward: k w P

Hybrid sharding (arXiv 2304.11277, section 3.2.2): of the ranks that sum a gradient, S neighbours shard one copy of it.
Ranks with equal shards are copies.  All of the above is then over the S, and so are the bytes of sharded state.
Beside it, once a step whatever k:

    fast        all-reduce r P / S over the copies, chunk by chunk while the last backward runs
    ordered     one sum of all ranks in their order, so that no bit depends on S: reduce-scatter k r P over all, and
                all-gather r P over all, because a rank's elements are not contiguous in that order; weights over the S

Updates may run within the backward of a step's only micro-batch (`frees_gradient_on_update`). Then they read a gradient
in the slot where it was summed, at every stage.  The payload is as above.  If they run within a backward, 16 bytes are
summed before it (zero/deferred_updates.py).

Note: time-shared memory.
Between the last backward of a step and the update no code reads weights that have separate masters.  Between the update
and the next backward there is no gradient.  A device may have no room for both.  Instead of offloading them, it can
place both in one arena with the buffers of a step (memory/arena.py).  Their moments are planned (`SharedInterval`,
`shared_interval`).  Weights leave when the sum of their gradient starts in the last backward.  Gradients lie over
weights of later chunks.  An update writes weights where they were.  Example: a 124M GPT in bf16 on two ranks at
stage 3.  Under a device budget of 1 GB its plan moves 504 MB each way over the link in a step, instead of 669 with
resident weights.  Under 1.4 GB it moves 103 instead of 266.  It costs three things.  A skipped or discarded step
rebuilds these weights from their masters, whose records are copied as for updates.  Reading weights between backward
and step raises an error.  Modules must run in the order of the first step, once a backward.

In a pipeline P are the chunks of a rank's own stages, and k its micro-batches times the accumulated parts.  Chunks
that several stages use are summed over them first, once a step.  They have k = 1 and a full buffer for the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, StrEnum

from colossal_lite.schedule.interval_packing import LiveInterval, LiveRange

# Reductions on their way at once; a third waits for the first.
IN_FLIGHT = 2


def sums_in_flight(num_ranks: Iterable[int]) -> int:
    """How many sums of gradients may be on their way when another begins, for the ranks that make each. A sum of one
    rank is over as soon as it begins."""
    return IN_FLIGHT if any(count > 1 for count in num_ranks) else 0


def fill_intervals(
    order: Sequence[int], numels: Sequence[int], in_flight: int = IN_FLIGHT
) -> tuple[LiveInterval, ...]:
    """The interval in which each chunk has a slot for a gradient that is reduced by micro-batch. Its unit is chunks
    launched before.

    `order`: the chunk of each parameter, in forward order. Gradients come in the reverse order, and complete chunks
    are launched from the last to the first. A chunk accumulates from its first gradient on, and is in flight until
    `in_flight` more have been launched. Chunks of different packing keys accumulate beside each other.
    """
    missing = [0] * len(numels)
    for chunk in order:
        missing[chunk] += 1
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    launched = 0
    for chunk in reversed(order):
        start.setdefault(chunk, launched)
        missing[chunk] -= 1
        while launched < len(numels) and missing[last := len(numels) - 1 - launched] == 0:
            stop[last] = launched + in_flight
            launched += 1
    return tuple(LiveInterval(start[c], stop[c], numel) for c, numel in enumerate(numels))


def in_turn(groups: Sequence[Sequence[LiveInterval]]) -> Iterator[LiveInterval]:
    """The intervals of groups that are used one after the other."""
    clock = 0
    for group in groups:
        yield from (LiveInterval(clock + one.start, clock + one.stop, one.numel) for one in group)
        clock += 1 + max((one.stop for one in group), default=0)


def flight_intervals(numels: Sequence[int]) -> tuple[LiveInterval, ...]:
    """The interval in which each chunk has a slot for the parts that other ranks send of it: `numels`."""
    last = len(numels) - 1
    return tuple(LiveInterval(last - c, last - c + IN_FLIGHT - 1, numel) for c, numel in enumerate(numels))


# Kinds of what has a place in a backward.
ACCUMULATING = "accumulating"
INCOMING = "incoming"
LEAVING = "leaving"
UPDATES = 8
"""The moment of the first update in a step: a backward is over in the one before."""


def moments_of_step(
    live_ranges: Iterable[LiveRange], num_chunks: int = 1, in_flight: int = IN_FLIGHT
) -> tuple[LiveRange, ...]:
    """The live ranges of a backward in common moments, the same for any number of chunks.

    In an even moment 2 (n - `num_chunks` + 1) the last n chunks have been launched, and gradients accumulate. In the
    odd moment after it the oldest sum in flight has arrived and leaves its slot. That makes room for the next launch.
    `ACCUMULATING` and `INCOMING` are as in `fill_intervals` and `flight_intervals`, `LEAVING` as in `visits`, the last
    chunk first, and `in_flight` as `sums_in_flight`.
    """
    last = num_chunks - 1
    ways = {
        ACCUMULATING: lambda one: (2 * (one.start - last), 2 * (one.stop - last) + 1),
        INCOMING: lambda one: (2 * (one.start - last) + 2, 2 * (one.stop - last) + 2),
        LEAVING: lambda one: (2 * (one.start + in_flight) + 1, 2 * (one.stop + in_flight) + 1),
    }
    found = ((live_range, ways[live_range.what](live_range)) for live_range in live_ranges)
    return tuple(replace(live_range, start=start, stop=stop) for live_range, (start, stop) in found)


class Backwards(Enum):
    """The backwards of a step in which a buffer exists."""

    LAST = "last"
    EARLIER = "earlier"
    EACH = "each"

    def of(self, live_range: LiveRange, last: int) -> LiveRange:
        """A live range of the last backward in the moments of all backwards. The earlier ones count as one, which
        begins early enough to be over then. `last`: the highest chunk number, or more."""
        if self is Backwards.LAST:
            return live_range
        start, stop = (
            live_range.start - _moments_of_backward(last),
            live_range.stop - _moments_of_backward(last),
        )
        if self is Backwards.EARLIER:
            return replace(live_range, start=start, stop=stop)
        return replace(live_range, start=start, gap=range(stop + 1, live_range.start))


def _moments_of_backward(last: int) -> int:
    return UPDATES + 2 * last


class SharedInterval(StrEnum):
    """A buffer that exists for a part of a step only, and shares its bytes with others."""

    WEIGHTS = "resting weights"
    """Weights that no update reads: from their update until the gradients of their chunk are complete for the last
    time."""
    GRADIENTS = "resting gradients"
    """Gradients from their sum until the update, where a step has one micro-batch."""
    LAST_SUMS = "last sums"
    """Gradients that are on the host between micro-batches, where a step has several. From the launch of the last sum,
    when the earlier sums are copied up, until the update."""


def shared_interval(
    what: SharedInterval, chunk: int, size_bytes: int, last: int, in_flight: int = IN_FLIGHT
) -> LiveRange:
    """The live range of this buffer of `chunk`, by the moments of a step. `last`: the highest chunk number, or more.
    `in_flight`: as `sums_in_flight`.

    Chunks that are updated first come last in backward. So a gradient may lie over weights of any later chunk. These
    are not read any more when it arrives, and not written before it has been used.
    """
    complete, updated = 1 - 2 * chunk, UPDATES + chunk + 1
    if what is SharedInterval.GRADIENTS:
        return LiveRange(what, chunk, complete + 2 * in_flight, updated, size_bytes)
    if what is SharedInterval.LAST_SUMS:
        return LiveRange(what, chunk, complete, updated, size_bytes)
    begin = -2 * last - _moments_of_backward(last)
    return LiveRange(what, chunk, begin, UPDATES + last + 2, size_bytes, range(complete, updated))
