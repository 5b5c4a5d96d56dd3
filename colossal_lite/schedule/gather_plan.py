"""Plans when sharded weights are gathered and dropped in a micro-batch, and their offsets meanwhile.

Note: moments.
The weights of a model are read unit by unit: a block, or a module outside the blocks.  A *moment* lasts as long as one
unit computes.  A micro-batch has the moments of its forward, then those of its backward.  The first micro-batch shows
them (`Trace`).  The trace decides everything, once for a run.  Chunk c is resident at moment m if a moment from m to m
+ prefetch needs it.  So it is gathered `prefetch` moments before its use, and dropped when the next unit begins.  A
chunk that would be gathered again at once (at the turn from forward to backward) is not dropped.  Without
`reshard_after_forward` it is resident from its first use to its last.  A resident chunk has an interval of moments.
Packing these (schedule/interval_packing.py) gives its offset in one arena, whose size is the peak.

If `reshard_after_forward` is a number g, g neighbours each store a part of a chunk from its first drop on.  It applies
to chunks that a micro-batch gathers more than once.  Later gathers are over these g ranks, for P / g more elements,
which lie behind the slots.

A shard that is on the host is fetched into its part of the slot when its chunk becomes resident.  The shards of the
others are gathered beside it a moment before the use.  A chunk fetched only a moment before is gathered at its use.

Cost of a micro-batch in elements: P chunks are gathered once in forward.  Backward gathers
them again, except those that it does not read (embeddings) and those not dropped at the turn.  So k micro-batches move
at most 2 k w P bytes of w-byte weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from colossal_lite.schedule.interval_packing import LiveInterval, pack_intervals
from colossal_lite.schedule.plan import Action, ActionKind, net

FROM_NEAR = net("near")
"""Resource of a gather from the parts that neighbours store."""
Needs = frozenset[int]
"""Chunks that must be gathered at the same time."""


@dataclass(frozen=True)
class GatherMoment:
    """What one moment of computing reads. `launched`: how many chunks, counted from the last, have begun their sums."""

    needs: Needs
    launched: int = 0


@dataclass(frozen=True)
class Trace:
    """The moments of one micro-batch, the same on every rank."""

    forward: tuple[GatherMoment, ...]
    backward: tuple[GatherMoment, ...]

    def covering(self, contexts: Mapping[int, Needs], units: Mapping[int, Needs]) -> Trace:
        """Add moments for the chunks that were not read at all (a branch not taken).

        In forward such a moment follows those of earlier chunks of the model, in backward those of later ones.
        `contexts`: the chunks that each needs in forward. `units`: those gathered with it in backward, in the order of
        the model."""
        forward, backward = list(self.forward), list(self.backward)
        seen: Needs = frozenset(chunk for moment in self.forward for chunk in moment.needs)
        place = {chunk: number for number, chunk in enumerate(units)}
        for chunk in (chunk for chunk in units if chunk not in seen):
            first = {c: i for i, moment in reversed([*enumerate(forward)]) for c in moment.needs}
            if chunk not in first:
                at = 1 + max((i for c, i in first.items() if place[c] < place[chunk]), default=-1)
                forward.insert(at, GatherMoment(contexts[chunk]))
            last = {c: i for i, moment in enumerate(backward) for c in moment.needs}
            if chunk not in last:
                at = 1 + max((i for c, i in last.items() if place[c] > place[chunk]), default=-1)
                backward.insert(at, GatherMoment(units[chunk], backward[at - 1].launched if at else 0))
        return Trace(tuple(forward), tuple(backward))


@dataclass(frozen=True)
class GatherStep:
    """A moment as it is executed: first the actions, then the computing that needs `needs`.

    `resident`: chunks that are gathered or in flight after the actions, each with its offset in the arena.
    `launched`: number of chunks whose sums have started by then. A chunk that is complete sooner starts its sum sooner,
    but not before the previous step.
    """

    needs: Needs
    actions: tuple[Action, ...]
    resident: Mapping[int, int]
    launched: int = 0


@dataclass(frozen=True)
class GatherPlan:
    """A micro-batch: its steps, the elements of the arena, and the most that is resident at once."""

    forward: tuple[GatherStep, ...]
    backward: tuple[GatherStep, ...]
    arena_numel: int
    live_numel: int
    kept: Mapping[int, int] = field(default_factory=dict)
    """Chunks that neighbours store in parts from the first drop on, each with its part's offset in the arena."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions in order; chunks resident at the end are dropped."""
        steps = (*self.forward, *self.backward)
        last = steps[-1].resident if steps else {}
        return (
            *(a for step in steps for a in step.actions),
            *(chunk_action(ActionKind.RESHARD, c) for c in sorted(last)),
        )

    def gathers(self, *, near: bool | None = None) -> Mapping[int, int]:
        """How often a micro-batch gathers each chunk. `near`: only from neighbours; False: only from all ranks."""
        times: dict[int, int] = {}
        for action in self.actions:
            if action.kind is ActionKind.UNSHARD and action.chunk is not None:
                counts = near is None or near == (action.resource == FROM_NEAR)
                times[action.chunk] = times.get(action.chunk, 0) + counts
        return times

    def stays(self) -> Mapping[int, int]:
        """How often a micro-batch brings each chunk into a slot, from any tier."""
        times: dict[int, int] = {}
        before: Mapping[int, int] = {}
        for step in (*self.forward, *self.backward):
            for chunk in step.resident:
                times[chunk] = times.get(chunk, 0) + (chunk not in before)
            before = step.resident
        return times

    def read_late(self, num_chunks: int) -> frozenset[int]:
        """The trained chunks whose shard backward may still read after their gradients are complete.

        So their updates cannot run in backward. `num_chunks`: how many chunks train."""
        return frozenset(
            action.chunk
            for step in self.backward
            for action in step.actions
            if action.kind in (ActionKind.FETCH, ActionKind.UNSHARD) and action.resource != FROM_NEAR
            if action.chunk is not None and num_chunks - step.launched <= action.chunk < num_chunks
        )

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))


def gather_plan(
    trace: Trace,
    numels: Mapping[int, int],
    *,
    num_chunks: int,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    on_host: Needs = frozenset(),
    parts: Mapping[int, int] | None = None,
) -> GatherPlan:
    """The plan of a trace. `numels`: of the sharded chunks. `num_chunks`: all whose gradients are summed. `on_host`:
    chunks whose shard is fetched from the host. `parts`: elements that this rank would store of the chunks that
    neighbours store."""
    moments = (*trace.forward, *trace.backward)
    resident = residents([m.needs for m in moments], prefetch, reshard_after_forward)
    places = _places(resident, numels)
    gathers = gathers_of([m.needs for m in moments], resident, on_host)
    first: dict[int, int] = {}
    for chunk, moment_of in sorted(gathers, key=lambda found: found[1]):
        first.setdefault(chunk, moment_of)
    again = {chunk for chunk, moment_of in gathers if moment_of != first[chunk]}
    slots_numel = max((offset + numels[c] for place in places for c, offset in place.items()), default=0)
    kept, arena_numel = parts_behind(slots_numel, again, parts or {})
    steps: list[GatherStep] = []
    before: Mapping[int, int] = {}
    launched = 0
    for m, (moment, after) in enumerate(zip(moments, places, strict=True)):
        actions = [
            chunk_action(ActionKind.REDUCE, num_chunks - 1 - n) for n in range(launched, moment.launched)
        ]
        actions += [chunk_action(ActionKind.RESHARD, c) for c in before if c not in after]
        actions += [chunk_action(ActionKind.FETCH, c) for c in after if c not in before and c in on_host]
        actions += [
            chunk_action(ActionKind.UNSHARD, c, FROM_NEAR if c in kept and m != first[c] else "")
            for c in after
            if (c, m) in gathers
        ]
        before, launched = after, max(launched, moment.launched)
        steps.append(GatherStep(moment.needs, tuple(actions), after, launched))
    return GatherPlan(
        tuple(steps[: len(trace.forward)]),
        tuple(steps[len(trace.forward) :]),
        arena_numel,
        max((sum(numels[c] for c in place) for place in places), default=0),
        kept,
    )


def parts_behind(slots_numel: int, again: set[int], parts: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """The chunks gathered `again` that neighbours store in `parts`, each with its part's offset behind the slots. Also
    returns the elements of the whole arena."""
    kept, arena_numel = dict[int, int](), slots_numel
    for chunk in sorted(again & parts.keys()):
        kept[chunk] = arena_numel
        arena_numel += parts[chunk]
    return kept, arena_numel


def chunk_action(kind: ActionKind, chunk: int, resource: str = "") -> Action:
    """Of a list without stages."""
    return Action(kind, stage=0, chunk=chunk, resource=resource)


def residents(needs: Sequence[Needs], prefetch: int, reshard: bool) -> list[list[int]]:
    """The chunks that are resident at each moment, in the order of their use."""
    if reshard:
        # Moments that need the same, at the turn, count as one: nothing is gathered between them.
        distinct = [some for m, some in enumerate(needs) if m == 0 or some != needs[m - 1]]
        windows = [
            list(dict.fromkeys(c for some in distinct[m : m + prefetch + 1] for c in sorted(some)))
            for m in range(len(distinct))
        ]
        at = accumulate(int(m > 0 and some != needs[m - 1]) for m, some in enumerate(needs))
        return [windows[m] for m in at]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for m, some in enumerate(needs):
        for c in sorted(some):
            first.setdefault(c, m)
            last[c] = m
    return [[c for c in first if first[c] - prefetch <= m <= last[c]] for m in range(len(needs))]


def gathers_of(
    needs: Sequence[Needs], resident: Sequence[Sequence[int]], on_host: Needs
) -> set[tuple[int, int]]:
    """(chunk, moment) of every gather; of chunks `on_host` it comes after the fetch of this rank's shard."""
    found = set()
    for chunk, start, stop in _runs(resident):
        use = next((m for m in range(start, stop + 1) if chunk in needs[m]), stop)
        fetched_long_ago = use - start > 1
        found.add((chunk, (use - 1 if fetched_long_ago else use) if chunk in on_host else start))
    return found


def _places(resident: Sequence[Sequence[int]], numels: Mapping[int, int]) -> list[dict[int, int]]:
    """The offset of each resident chunk at each moment, the same while it is resident."""
    runs = list(_runs(resident))
    offsets, _ = pack_intervals([LiveInterval(start, stop, numels[chunk]) for chunk, start, stop in runs])
    at = {(chunk, m): o for (chunk, a, b), o in zip(runs, offsets, strict=True) for m in range(a, b + 1)}
    return [{chunk: at[chunk, m] for chunk in some} for m, some in enumerate(resident)]


def _runs(resident: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """(chunk, first moment, last moment) of every run of moments in which a chunk is resident."""
    begun: dict[int, int] = {}
    for m, some in enumerate((*resident, ())):
        for chunk in [c for c in begun if c not in some]:
            yield chunk, begun.pop(chunk), m - 1
        for chunk in some:
            begun.setdefault(chunk, m)
