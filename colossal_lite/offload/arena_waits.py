"""Says what waits because its place in an arena is that of a copy on its way off the device."""

from __future__ import annotations

from collections import defaultdict

from colossal_lite.offload.pieces import LEAVING, VISITING, StateKind
from colossal_lite.schedule.interval_packing import ArenaPlan
from colossal_lite.schedule.optimizer_updates import ArenaWaits, ChunkPart
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.schedule.step_moments import ACCUMULATING, UPDATES, SharedInterval

RECORDS = VISITING[StateKind.OPTIMIZER].what
LEAVES = {
    RECORDS: ChunkPart.RECORD,
    VISITING[StateKind.WEIGHTS].what: ChunkPart.WEIGHTS,
    LEAVING.what: ChunkPart.GRADIENT,
}
"""Copies to the host, by the kind of their places."""
BACKWARD = (ActionKind.B, ChunkPart.RECORD)
COMES = {
    ACCUMULATING: (BACKWARD,),
    LEAVING.what: (BACKWARD,),
    SharedInterval.GRADIENTS: (BACKWARD,),
    RECORDS: ((ActionKind.FETCH, ChunkPart.RECORD),),
    VISITING[StateKind.GRADIENTS].what: ((ActionKind.FETCH, ChunkPart.GRADIENT),),
    SharedInterval.LAST_SUMS: ((ActionKind.FETCH, ChunkPart.GRADIENT),),
    VISITING[StateKind.WEIGHTS].what: (
        (ActionKind.FETCH, ChunkPart.WEIGHTS), (ActionKind.UPDATE, ChunkPart.RECORD)
    ),
    SharedInterval.WEIGHTS: ((ActionKind.UPDATE, ChunkPart.RECORD),),
}  # fmt: skip
"""What may be the first to write to a place of each kind. An action has the unit, or a part of the chunk."""


def early_records(arena: ArenaPlan) -> frozenset[int]:
    """The chunks whose records have places from a backward on, before their updates."""
    return frozenset(one.number for one in arena.live_ranges if one.what == RECORDS and one.start < UPDATES)


def waits_of(arena: ArenaPlan, num_chunks: int) -> ArenaWaits:
    """What waits for which copies, in a plan of units of one chunk each."""
    places = [
        (offset, offset + one.bytes, one.what, one.number)
        for one, offset in zip(arena.live_ranges, arena.offsets, strict=True)
    ]
    leaving = [place for place in places if place[2] in LEAVES]
    found: defaultdict[tuple[ActionKind, int], list[int]] = defaultdict(list)
    for start, stop, what, chunk in places:
        over = [
            LEAVES[other].of(number, num_chunks)
            for first, end, other, number in leaving
            if start < end and first < stop and (other, number) != (what, chunk)
        ]
        for kind, part in COMES.get(what, ()) if over else ():
            found[kind, part.of(chunk, num_chunks)] += over
    return ArenaWaits(dict(found), len(early_records(arena)))
