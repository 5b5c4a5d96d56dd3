"""Says where the turns of a list begin: tasks of one device take them by turns, and load each stage once for all.

Note: turns.  A list of gathered stages falls into *turns*: what it does from one group of FETCHes and UNSHARDs to the
next.  The RESHARDs before such a group end the turn before.  Tasks over one base have turns alike, but for their own
chunks.  They take turn 0 one after the other, then turn 1, and so on.  A shared chunk is fetched in the turn of the
first task and dropped in that of the last, and the others find it there (memory/frozen_slots.py).  So its copies cross
the link once a visit for all tasks.  At each moment no more shared chunks are on the device than in the list of one.
Cost: the boundaries of all tasks wait on the device, or where each task rests them.
Source: breadth-first over micro-batches, arXiv 2211.05953, section 4.2, here over tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colossal_lite.schedule.plan import Action, ActionKind

COMES = frozenset({ActionKind.FETCH, ActionKind.UNSHARD})
GATHERS = COMES | {ActionKind.RESHARD}


def begins(actions: Sequence[Action]) -> Iterator[bool]:
    """For each FETCH, UNSHARD and RESHARD of a list, whether it begins a turn."""
    before: Action | None = None
    for action in actions:
        if action.kind in GATHERS:
            yield action.kind in COMES and (before is None or before.kind not in COMES)
        before = action
