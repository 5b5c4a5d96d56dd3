"""Where the optimizer's state is while it is updated: the order of its copies and updates, as a plan.

Note: streaming.
State that rests on the host is brought to the device chunk by chunk: FETCH, UPDATE, EVICT.  With `ahead` chunks fetched
before the one that is updated, and one on its way back, `ahead + 2` slots hold what is on the device; the link is used
in both directions at once.  Bytes each way are those of the state, once a step: nothing is used twice, so no order of
eviction could do with less.
"""

from __future__ import annotations

from colossal_lite.plan import Action, Kind, Plan


def update_plan(num_chunks: int, *, ahead: int | None = None) -> Plan:
    """One rank's updates in forward order; `ahead`: the state is fetched from the host so many chunks before its
    update, and evicted after it. None: it is on the device."""
    actions: list[Action] = []
    for chunk in range(num_chunks):
        if ahead is not None:
            first = 0 if chunk == 0 else chunk + ahead
            actions += [_action(Kind.FETCH, c) for c in range(first, min(chunk + ahead + 1, num_chunks))]
        actions.append(_action(Kind.UPDATE, chunk))
        if ahead is not None:
            actions.append(_action(Kind.EVICT, chunk))
    return Plan((tuple(actions),))


def _action(kind: Kind, chunk: int) -> Action:
    return Action(kind, stage=0, chunk=chunk)
