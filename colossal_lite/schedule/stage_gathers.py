"""Adds the gathers of ZeRO-3 to the plan of a pipeline, and gives gathered weights their offsets in one arena.

Note: visits.
A *visit* is a run of neighbouring compute actions of one stage on one rank.  Weights are gathered once a visit, for all
its micro-batches (arXiv 2211.05953, section 4.2).  A chunk is gathered from `prefetch` visits ahead of its use until
the next visit that does not read it.  A gather right after its drop is left out, with the drop.  A chunk that two
stages of a rank read is there once.  If this rank's shard is on the host, a FETCH copies it to its slot as soon as the
slot is free.  The UNSHARD comes a visit before the use, or at the use.  Gathers of a chunk in a step without prefetch:
gpipe, 1f1b and zb-h1 1, bfs 2 (1 on the last stage of a rank), depth-first schedules about 2m.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from colossal_lite.schedule.gather_plan import FROM_NEAR, gathers_of, parts_behind, residents
from colossal_lite.schedule.interval_packing import LiveInterval, most_held, pack_intervals
from colossal_lite.schedule.plan import COMPUTE_KINDS, Action, ActionKind, Memory, Plan
from colossal_lite.schedule.step_passes import insert, past_sends


@dataclass(frozen=True)
class StageWeights:
    """The sharded chunks that each stage reads, and how long gathered weights stay.

    - prefetch: visits ahead of the one that computes
    - reshards: drop weights after each visit, or after the last of a step
    - near: chunks that neighbours store from their first drop on, and that are gathered from these afterwards
    - on_host: the ranks and chunks whose shards rest on the host
    """

    chunks: tuple[tuple[int, ...], ...]
    prefetch: int = 1
    reshards: bool = True
    near: frozenset[int] = frozenset()
    on_host: frozenset[tuple[int, int]] = frozenset()

    def memory(self, sizes_bytes: Mapping[int, int] | None = None) -> Memory:
        """What stages read, for the checker; `sizes_bytes` of the gathered chunks count as 0 where left out."""
        return Memory(
            {},
            {(0, stage): tuple((0, chunk) for chunk in some) for stage, some in enumerate(self.chunks)},
            {(0, chunk): size for chunk, size in (sizes_bytes or {}).items()},
            sharded=frozenset((0, chunk) for some in self.chunks for chunk in some),
            offloaded=frozenset((rank, (0, chunk)) for rank, chunk in self.on_host),
        )


def add_gathers(plan: Plan, weights: StageWeights) -> Plan:
    """Adds FETCH and UNSHARD of each chunk before the visits that read it, and RESHARD behind them. It comes after
    `freeze`, and before `add_step`."""
    after: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(plan):
        visits = _visits(actions)
        needs = [frozenset(weights.chunks[stage]) for stage, _, _ in visits]
        stage_of = {c: stage for stage, _, _ in sorted(visits, reverse=True) for c in weights.chunks[stage]}
        on_host = frozenset(chunk for where, chunk in weights.on_host if where == rank)
        resident = residents(needs, weights.prefetch, weights.reshards)
        gathers = gathers_of(needs, resident, on_host)
        before, seen = list[int](), set[int]()
        for visit, ((_, first, _), now) in enumerate(zip(visits, resident, strict=True)):
            place = after[rank, first - 1]
            place += [_action(ActionKind.RESHARD, stage_of[c], c) for c in before if c not in now]
            come = [c for c in now if c not in before and c in on_host]
            place += [_action(ActionKind.FETCH, stage_of[c], c) for c in come]
            for chunk in (c for c in now if (c, visit) in gathers):
                resource = FROM_NEAR if chunk in weights.near & seen else ""
                place.append(_action(ActionKind.UNSHARD, stage_of[chunk], chunk, resource))
            before, seen = now, seen | {*now}
        if visits:
            place = after[rank, past_sends(actions, visits[-1][2])]
            place += [_action(ActionKind.RESHARD, stage_of[c], c) for c in before]
    return insert(plan, after)


def _action(kind: ActionKind, stage: int, chunk: int, resource: str = "") -> Action:
    return Action(kind, stage=stage, chunk=chunk, resource=resource)


def _visits(actions: Sequence[Action]) -> list[tuple[int, int, int]]:
    """Stage, first place and last place of each visit in a list."""
    found: list[tuple[int, int, int]] = []
    for place, action in enumerate(actions):
        if action.kind in COMPUTE_KINDS and action.stage is not None:
            if found and found[-1][0] == action.stage:
                found[-1] = (action.stage, found[-1][1], place)
            else:
                found.append((action.stage, place, place))
    return found


@dataclass(frozen=True)
class GatherSlots:
    """Where the gathered weights of one rank's list lie, in elements.

    - offsets: in the arena, of each FETCH, and of each UNSHARD without one, in the order of the list
    - arena_numel, live_numel: elements of the arena, and the most that is gathered at once
    - kept: chunks that neighbours store in parts, each with its offset
    """

    offsets: tuple[int, ...] = ()
    arena_numel: int = 0
    live_numel: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)


def gather_slots(
    actions: Sequence[Action], numels: Mapping[int, int], parts: Mapping[int, int] | None = None
) -> GatherSlots:
    """The slots of a list; `numels` of whole chunks, `parts` of what this rank would store of those that neighbours
    store."""
    stays: list[LiveInterval] = []
    held: dict[int, int] = {}  # chunk -> its place in `stays`
    again: set[int] = set()
    kinds = (ActionKind.FETCH, ActionKind.UNSHARD, ActionKind.RESHARD)
    for moment, action in enumerate(action for action in actions if action.kind in kinds):
        assert action.chunk is not None
        if action.kind is ActionKind.RESHARD:
            place = held.pop(action.chunk)
            stays[place] = replace(stays[place], stop=moment)
        elif action.chunk not in held:
            held[action.chunk] = len(stays)
            stays.append(LiveInterval(moment, moment, numels[action.chunk]))
            again |= {action.chunk} if action.resource == FROM_NEAR else set()
    offsets, slots_numel = pack_intervals(stays)
    kept, arena_numel = parts_behind(slots_numel, again, parts or {})
    return GatherSlots(offsets, arena_numel, most_held(stays), kept)
