"""Where the optimizer's state is while it is updated: the order of its copies and updates, as a plan.

Note: streaming.
State that rests on the host is brought to the device chunk by chunk: FETCH, UPDATE, EVICT.  With `ahead` chunks fetched
before the one that is updated, and one on its way back, `ahead + 2` slots hold what is on the device; the link is used
in both directions at once.  Bytes each way are those of the state, once a step: nothing is used twice, so no order of
eviction could do with less.
State that rests on disk passes through the host both ways.  A record has a slot there from its read to its copy up, and
another from its copy down to its write; the disk is read and written at once, each in the order of the updates.
"""

from __future__ import annotations

from collections.abc import Collection

from colossal_lite.plan import DISK, Action, Kind, Plan


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


def _next(chunk: int, ahead: int | None, num_chunks: int) -> range:
    """What is asked for before `chunk`, so that `ahead` chunks beyond it are: the first time it and those."""
    if ahead is None:
        return range(0)
    return range(chunk + ahead if chunk else 0, min(chunk + ahead + 1, num_chunks))


def _action(kind: Kind, chunk: int, resource: str = "") -> Action:
    return Action(kind, stage=0, chunk=chunk, resource=resource)
