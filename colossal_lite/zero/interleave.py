"""Where the optimizer's state is while it is updated: the order of its copies and updates, as a plan.

Note: streaming.
State that rests on the host is brought to the device chunk by chunk: FETCH, UPDATE, EVICT.  With `ahead` chunks fetched
before the one that is updated, and one on its way back, `ahead + 2` slots hold what is on the device; the link is used
in both directions at once.  Bytes each way are those of the state, once a step: nothing is used twice, so no order of
eviction could do with less.
A step does not wait for its own updates (zero/owed.py): they run while the next forward does, each before the first
unit that reads its weights, and the moves that the plan has behind an update set out with it.  So a copy hides behind
the forward of whole units, and the first fetches behind a whole backward.  `run_of` is a run of such steps: what
it costs, and how long its computing waits, the simulator says.
State that rests on disk passes through the host both ways.  A record has a slot there from its read to its copy up, and
another from its copy down to its write; the disk is read and written at once, each in the order of the updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from colossal_lite.plan import DISK, Action, Kind, Memory, Plan


def update_plan(
    num_chunks: int,
    *,
    ahead: int | None = None,
    below: int | None = None,
    moving: Collection[int] | None = None,
) -> Plan:
    """One rank's updates in forward order; `ahead`: the state is fetched from the host so many chunks before its
    update, and evicted after it. None: it is on the device. `below`: it rests on disk, and is read so many chunks
    before it is fetched from the host. None: it rests on the host. `moving`: the chunks of which something rests off
    the device; None: all."""
    actions: list[Action] = []
    for chunk in range(num_chunks):
        for fetched in _next(chunk, ahead, num_chunks):
            actions += [_action(Kind.FETCH, c, DISK) for c in _next(fetched, below, num_chunks)]
            actions.append(_action(Kind.FETCH, fetched))
        actions.append(_action(Kind.UPDATE, chunk))
        actions += [_action(Kind.EVICT, chunk)] if ahead is not None else []
        actions += [_action(Kind.EVICT, chunk, DISK)] if below is not None else []
    return Plan((tuple(a for a in actions if a.kind is Kind.UPDATE or moving is None or a.chunk in moving),))


def run_of(
    units: Sequence[Sequence[int]], steps: int, *, ahead: int, below: int | None = None
) -> tuple[Plan, Memory]:
    """One rank's run of so many steps, the updates of each in the forward of the next, and the slots that it has.

    `units`: for each part of the model, in forward order, the chunks of which it is the first to read weights.  F and B
    of stage u and micro-batch i are its computing in step i.  A record weighs one slot."""
    num_chunks = sum(map(len, units))
    unit_of = {chunk: unit for unit, chunks in enumerate(units) for chunk in chunks}
    (made,) = update_plan(num_chunks, ahead=ahead, below=below)
    moves = [replace(action, stage=unit_of[action.chunk or 0]) for action in made]
    first = next((i for i, action in enumerate(moves) if action.kind is Kind.UPDATE), 0)
    actions: list[Action] = []
    owed: deque[Action] = deque()
    for step in range(steps):
        for unit in range(len(units)):
            while owed and (owed[0].kind is not Kind.UPDATE or owed[0].stage == unit):
                actions.append(owed.popleft())
            actions.append(Action(Kind.F, stage=unit, micro_batch=step))
        actions += moves[:first]
        actions += [Action(Kind.B, stage=unit, micro_batch=step) for unit in reversed(range(len(units)))]
        owed.extend(replace(a, micro_batch=step) if a.kind is Kind.UPDATE else a for a in moves[first:])
    records = [(0, chunk) for chunk in range(num_chunks)]
    home = dict.fromkeys(records, "host" if below is None else "disk")
    slots = {"device": ahead + 2} | ({} if below is None else {"host": below + 3})
    return Plan(((*actions, *owed),)), Memory(home, {}, dict.fromkeys(records, 1), budget_bytes=slots)


def _next(chunk: int, ahead: int | None, num_chunks: int) -> range:
    """What is asked for before `chunk`, so that `ahead` chunks beyond it are: the first time it and those."""
    if ahead is None:
        return range(0)
    return range(chunk + ahead if chunk else 0, min(chunk + ahead + 1, num_chunks))


def _action(kind: Kind, chunk: int, resource: str = "") -> Action:
    return Action(kind, stage=0, chunk=chunk, resource=resource)
