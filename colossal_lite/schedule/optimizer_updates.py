"""Plans the order in which optimizer state is copied and updated in a step.

Note: streaming.
State on the host is brought to the device chunk by chunk: FETCH, UPDATE, EVICT.  One chunk is updated, `ahead` others
are fetched, and one is copied back.  So `ahead + 2` slots hold the state on the device.  The link is used in both
directions at once.  Each byte of state crosses once each way in a step.  Nothing is used twice, so no order of eviction
moves less.  A step does not wait for its own updates (zero/deferred_updates.py).  They run during the next forward,
each before the first unit that reads its weights.  The moves behind an update in the plan start with it.  So a copy
hides behind the forward of several units, and the first fetches hide behind a full backward.  `run_of` is a run of such
steps: the simulator says what it costs, and how long its computing waits.  State on disk passes through the host both
ways.  A record has a slot there from its read to its copy up.  It has another from its copy down to its write.  The
disk is read and written at once, each in the order of the updates.  Where only some records are on disk, they are read
as if there were no others.  The next ones are read when one of them is updated, however many chunks lie between.  Their
updates and copies then hide a slow disk.  Weights and gradients that rest on the host go beside the record
(`streamed`), each a copy of its own.

Note: updates on the host.
A chunk may be updated on the host, where its state is (`on_host`), on one lane of the host's own.  Then its record is
not copied.  Its gradient comes down, and so do its weights if they are their own masters or half of them.  The new
weights go up.  These are chunks of their own in the plan: of n chunks with states, `#n+c` is the gradient of c and
`#2n+c` are its weights.  Such an update does not block the caller.  So all of them may start as soon as the norm is
known.  The forward waits for the weights that it reads.  Each chunk chooses where it is updated.  Others may be updated
on the device between them (arXiv 2410.21316; schedule/update_mix.py decides).  Then records are fetched `ahead` chunks
before their turn, and updates on the host begin `ahead_down` chunks before theirs.  With `early` a gradient is copied
down in backward, as soon as it is summed.  It has a slot of its own until its update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import count, takewhile, zip_longest
from typing import Any

from colossal_lite.schedule.gather_plan import chunk_action, residents
from colossal_lite.schedule.interval_packing import most_at_once
from colossal_lite.schedule.plan import COMPUTE, CPU, DISK, Action, ActionKind, Memory, Plan


class ChunkPart(IntEnum):
    """The part of a chunk that an action of a plan moves."""

    RECORD = 0
    GRADIENT = 1
    WEIGHTS = 2
    GATHERED = 3
    """The copy of weights at rest on the host that a forward or backward reads."""

    def of(self, chunk: int, num_chunks: int) -> int:
        """The number of this part of a chunk in a plan of so many chunks."""
        return self * num_chunks + chunk


def part_of(number: int, num_chunks: int) -> tuple[ChunkPart, int]:
    """The part that a number of the plan stands for, and its chunk."""
    return ChunkPart(number // num_chunks), number % num_chunks


@dataclass(frozen=True)
class Crossing:
    """The parts of a chunk that come down for its update on the host, and whether its weights go up."""

    down: tuple[ChunkPart, ...] = (ChunkPart.GRADIENT,)
    up: bool = True


@dataclass(frozen=True)
class Streaming:
    """The copies beside the record of a chunk that is updated on the device: to it before, and back after."""

    up: tuple[ChunkPart, ...] = ()
    down: tuple[ChunkPart, ...] = ()


ON_DEVICE: Mapping[int, Crossing] = {}
RECORDS_ALONE: Mapping[int, Streaming] = {}
Awaited = Mapping[tuple[ActionKind, int], Collection[int]]
"""The numbers that must have left the device, by the kind and number of the action that waits (`Memory.awaited`)."""


@dataclass(frozen=True)
class ArenaWaits:
    """What an arena delays in a step, because copies on their way have their places in the same bytes."""

    awaited: Awaited = field(default_factory=dict)
    prepares: int | None = None
    """So many of the first records have places in backward; None: all that come before an update."""


NO_ARENA = ArenaWaits()


def update_plan(
    num_chunks: int,
    *,
    ahead: int | None = None,
    ahead_down: int | None = None,
    below: int | None = None,
    on_disk: Collection[int] | None = None,
    moving: Collection[int] | None = None,
    on_host: Mapping[int, Crossing] = ON_DEVICE,
    streamed: Mapping[int, Streaming] = RECORDS_ALONE,
    early: bool = False,
    backward: bool = False,
) -> Plan:
    """One rank's updates in forward order, or, with `backward`, in the order of gradients.

    `ahead`: the state is fetched from the host so many chunks before its update, and evicted after it. None: it is on
    the device. `ahead_down`: the same of what comes down for an update on the host; None: `ahead`. `below`: the state
    of the chunks `on_disk` (None: of all) is on disk. It is read so many of those chunks before it would be fetched
    without the others. None: it is on the host. `moving`: the chunks with records off the device; None: all. `on_host`:
    chunks that are updated on the host, and what of them crosses the link. With `backward` none of it crosses before
    their turn, because their gradients come one after the other. `streamed`: further copies for the others.
    `early`: gradients for updates on the host have come in backward, before the plan begins."""
    if backward:
        disk, away = (_mirrored(num_chunks, some) for some in (on_disk, moving))
        host = {num_chunks - 1 - chunk: crossing for chunk, crossing in on_host.items()}
        beside = {num_chunks - 1 - chunk: parts for chunk, parts in streamed.items()}
        (actions_of,) = update_plan(
            num_chunks, ahead=ahead, ahead_down=0, below=below, on_disk=disk, moving=away, on_host=host,
            streamed=beside,
        )  # fmt: skip
        return Plan((tuple(_turned(action, num_chunks) for action in actions_of),))
    actions: list[Action] = []
    there = _there(num_chunks, below, on_disk)
    places = {chunk: place for place, chunk in enumerate(there)}
    for chunk in range(num_chunks):
        turns = _turns(chunk, places, ahead)
        for fetched, turn in zip_longest(_next(chunk, ahead, num_chunks), turns):
            reads = () if turn is None else _next(turn, below, len(there))
            actions += [chunk_action(ActionKind.FETCH, there[place], DISK) for place in reads]
            if fetched is not None and fetched not in on_host:
                copied: tuple[ChunkPart, ...] = (ChunkPart.RECORD, *streamed.get(fetched, Streaming()).up)
                actions += [chunk_action(ActionKind.FETCH, part.of(fetched, num_chunks)) for part in copied]
        for coming in _next(chunk, ahead if ahead_down is None else ahead_down, num_chunks):
            if coming in on_host:
                parts = [part for part in on_host[coming].down if not early or part is not ChunkPart.GRADIENT]
                actions += [chunk_action(ActionKind.EVICT, part.of(coming, num_chunks)) for part in parts]
                actions.append(chunk_action(ActionKind.UPDATE, coming, CPU))
        if chunk in on_host:
            weights = ChunkPart.WEIGHTS.of(chunk, num_chunks)
            actions += [chunk_action(ActionKind.FETCH, weights)] if on_host[chunk].up else []
        else:
            actions.append(chunk_action(ActionKind.UPDATE, chunk))
            copied = (ChunkPart.RECORD, *streamed.get(chunk, Streaming()).down) if ahead is not None else ()
            actions += [chunk_action(ActionKind.EVICT, part.of(chunk, num_chunks)) for part in copied]
        actions += [chunk_action(ActionKind.EVICT, chunk, DISK)] if chunk in places else []
    return Plan((tuple(a for a in actions if _moves(a, num_chunks, moving)),))


def _moves(action: Action, num_chunks: int, moving: Collection[int] | None) -> bool:
    """Whether the plan has this action: of records only those `moving`."""
    part, chunk = part_of(action.chunk or 0, num_chunks)
    is_record = part is ChunkPart.RECORD and action.kind is not ActionKind.UPDATE
    return not is_record or moving is None or chunk in moving


def run_of(
    units: Sequence[Sequence[int]],
    steps: int,
    *,
    ahead: int,
    ahead_down: int | None = None,
    below: int | None = None,
    moving: Collection[int] | None = None,
    on_host: Mapping[int, Crossing] = ON_DEVICE,
    streamed: Mapping[int, Streaming] = RECORDS_ALONE,
    early: bool = False,
    gathers_ahead: int = 0,
    gathers_again: bool = False,
    micro_batches: int = 1,
    returning: Collection[int] = (),
    arena: ArenaWaits = NO_ARENA,
) -> tuple[Plan, Memory]:
    """One rank's run of `steps` steps and its slots. The updates of a step run in the next forward. `gathers_ahead`: a
    unit's weights are gathered so many units before its forward. Those at rest on the host are fetched then, unless
    they have just been updated on the device. `gathers_again`: they are dropped after the forward, and backward fetches
    them again. `arena`: what its places delay. Gradients that rest on the host leave in every backward, and the step
    ends when they have. Those of the chunks `returning` stay on the device in the last backward, for an update there.
    Their earlier sums come back then, and backward goes on when they are added.

    `units`: for each part of the model, in forward order, the chunks whose weights it is the first to read. F and
    B of stage u and micro-batch i are its computing in step i. Of several `micro_batches` in a step, whose sums are
    accumulated, each is a task of its own. A record takes one slot, and so does a gradient for an
    update on the host.
    """
    num_chunks = sum(map(len, units))
    unit_of = {chunk: unit for unit, chunks in enumerate(units) for chunk in chunks}
    how: dict[str, Any] = dict(ahead=ahead, ahead_down=ahead_down, below=below, moving=moving, early=early)
    how |= dict(on_host=on_host, streamed=streamed)
    (made,) = update_plan(num_chunks, **how)
    moves = [replace(action, stage=unit_of[(action.chunk or 0) % num_chunks]) for action in made]
    prepared, late = _prepared(moves, num_chunks, arena.prepares)
    sums = _Sums.of(on_host, streamed, early=early, returning=returning if micro_batches > 1 else ())
    goes_home = {c for c, parts in streamed.items() if ChunkPart.WEIGHTS in parts.down}
    at_rest = {c for c, parts in on_host.items() if not parts.up} | goes_home
    in_turn = {ChunkPart.WEIGHTS.of(c, num_chunks) for c in on_host} if at_rest else ()

    def passes(here: Collection[int]) -> list[_Pass]:
        """The micro-batches of a step that begins with the weights of these chunks on the device."""
        found: list[_Pass] = []
        for number in range(micro_batches):
            fetched = at_rest.difference(() if number else here)
            gathers = _gathers(units, at_rest, fetched, gathers_ahead, gathers_again)
            moving_sums = sums.moves(units, is_last=number == micro_batches - 1)
            found.append(_Pass(number, gathers, moving_sums, () if number else prepared))
        return found

    actions = _steps([passes(())] + [passes(goes_home)] * (steps - 1), late, gathers_ahead, in_turn)
    memory = memory_of(num_chunks, **how)
    read_by = {c: max(0, unit_of[c] - gathers_ahead) for c in on_host if c not in at_rest}
    memory = _with_gathers(memory, num_chunks, read_by, at_rest, at_rest - goes_home, micro_batches)
    memory = _with_gradients(memory, num_chunks, unit_of, {*on_host}, sums, micro_batches)
    return Plan((actions,)), _awaiting(memory, arena.awaited, micro_batches)


def _prepared(
    moves: Sequence[Action], num_chunks: int, prepares: int | None
) -> tuple[list[Action], list[Action]]:
    """The first fetches of records, so many as come in backward, and the other moves."""
    first = list(takewhile(lambda action: action.kind is ActionKind.FETCH, moves))
    prepared = [action for action in first if (action.chunk or 0) < num_chunks or action.resource == DISK]
    prepared = prepared if prepares is None else prepared[:prepares]
    return prepared, [*(action for action in first if action not in prepared), *moves[len(first) :]]


@dataclass(frozen=True)
class _Sums:
    """The chunks whose gradients leave the device in backward. `resting`: in every one. `sent`: in the last.
    `returning`: in all but the last, in which they come back."""

    resting: frozenset[int]
    sent: frozenset[int]
    returning: frozenset[int]

    @staticmethod
    def of(
        on_host: Mapping[int, Crossing], streamed: Mapping[int, Streaming], *, early: bool,
        returning: Collection[int],
    ) -> _Sums:  # fmt: skip
        crosses = {c for c, parts in on_host.items() if ChunkPart.GRADIENT in parts.down}
        resting = {c for c, parts in streamed.items() if ChunkPart.GRADIENT in parts.up}
        resting |= on_host.keys() - crosses
        return _Sums(frozenset(resting), frozenset(crosses if early else ()), frozenset(returning))

    def moves(self, units: Sequence[Sequence[int]], *, is_last: bool) -> list[list[Action]]:
        """Of each unit, behind its backward, the last chunk first."""
        number = partial(ChunkPart.GRADIENT.of, num_chunks=sum(map(len, units)))
        leave = self.resting | (self.sent if is_last else self.returning)
        kinds = dict.fromkeys(leave, ActionKind.EVICT)
        kinds |= dict.fromkeys(self.returning if is_last else (), ActionKind.FETCH)
        return [
            [replace(chunk_action(kinds[c], number(c)), stage=unit) for c in reversed(chunks) if c in kinds]
            for unit, chunks in enumerate(units)
        ]


@dataclass(frozen=True)
class _Pass:
    """A micro-batch of a step, in a plan a task of its own. `gathers`: before each forward, each backward, and at the
    end. `moving`: the moves of gradients behind the backward of each unit. `early`: the first moves of updates."""

    number: int
    gathers: Sequence[Sequence[Action]]
    moving: Sequence[Sequence[Action]]
    early: Sequence[Action]

    def computes(self, kind: ActionKind, unit: int, step: int) -> Action:
        return Action(kind, self.number, stage=unit, micro_batch=step)

    def gathers_at(self, moment: int) -> Iterator[Action]:
        return (replace(action, task=self.number) for action in self.gathers[moment])

    def moves_sums(self, unit: int) -> Iterator[Action]:
        """The moves of its parts of sums, which have its number from the second on."""
        return (replace(action, micro_batch=self.number or None) for action in self.moving[unit])

    @property
    def last_fetch(self) -> int:
        """The moment of backward with the last fetch; its first if there is none."""
        moments = (m for m, some in enumerate(self.gathers) if any(a.kind is ActionKind.FETCH for a in some))
        return max(len(self.moving), *moments, 0)


def _with_gathers(
    memory: Memory, num_chunks: int, read_by: Mapping[int, int], at_rest: Collection[int],
    fetched: Collection[int], micro_batches: int,
) -> Memory:  # fmt: skip
    """The same with the units that read weights where an update has put them, and copies of those `at_rest`. Every copy
    of the weights `fetched` comes from the host."""
    tasks = range(micro_batches)
    weights, gathered = (
        {c: part.of(c, num_chunks) for c in range(num_chunks)}
        for part in (ChunkPart.WEIGHTS, ChunkPart.GATHERED)
    )
    return replace(
        memory,
        uses={
            (0, unit): tuple((0, weights[c]) for c, by in read_by.items() if by == unit)
            for unit in sorted({*read_by.values()})
        },
        reads={**memory.reads, **{(i, gathered[c]): ((0, weights[c]),) for c in at_rest for i in tasks}},
        sharded=frozenset((i, gathered[c]) for c in at_rest for i in tasks),
        offloaded=frozenset((0, (i, gathered[c])) for c in fetched for i in tasks),
    )


def _with_gradients(
    memory: Memory, num_chunks: int, unit_of: Mapping[int, int], on_host: Collection[int], sums: _Sums,
    micro_batches: int,
) -> Memory:  # fmt: skip
    """The same with the gradients of chunks `on_host`, and those that leave in backward. After the last backward those
    at rest have left. It makes none of those that return, but waits for them."""
    own = sorted({*on_host} | sums.resting | sums.returning)
    number = {c: (0, ChunkPart.GRADIENT.of(c, num_chunks)) for c in own}
    back = {c: number[c] for c in sorted(sums.returning)}
    last = micro_batches - 1
    made = {
        (task, unit): tuple(number[c] for c in own if unit_of[c] == unit and (task < last or c not in back))
        for unit in sorted({unit_of[c] for c in own})
        for task in range(micro_batches)
    }
    return replace(
        memory,
        home={**memory.home, **dict.fromkeys(back.values(), "host")},
        reads={**memory.reads, **{(0, c): (*memory.reads.get((0, c), ()), key) for c, key in back.items()}},
        spent=memory.spent.union(back.values()),
        apart={**memory.apart, **{(key, "host"): "at rest on the host" for key in back.values()}},
        made=made,
        flushed={(last, 0): tuple(number[c] for c in sorted(sums.resting))},
        blocking=frozenset(back.values()),
    )


def _awaiting(memory: Memory, awaited: Awaited, micro_batches: int) -> Memory:
    """The same with what further actions wait for."""
    waits = {
        (kind, (task, at)): tuple((0, number) for number in some)
        for (kind, at), some in awaited.items()
        for task in range(micro_batches if kind is ActionKind.B else 1)
    }
    return replace(memory, awaited=waits)


def _gathers(
    units: Sequence[Sequence[int]],
    at_rest: Collection[int],
    fetched: Collection[int],
    ahead: int,
    again: bool,
) -> list[list[Action]]:
    """The gathers and drops of weights `at_rest` on the host before each forward, each backward, and at the end.
    `fetched`: those that the first gather of a step fetches; every later one does. `again`: they are dropped
    after the forward and gathered again; else they stay until the step is over."""
    num_chunks = sum(map(len, units))
    unit_of = {chunk: unit for unit, chunks in enumerate(units) for chunk in chunks}
    needs = [frozenset(chunks) for chunks in units]
    after = residents([*needs, *reversed(needs)], ahead, again)
    seen: set[int] = set()
    found: list[list[Action]] = []
    before: Sequence[int] = ()
    for every in (*after, ()):
        there = [c for c in every if c in at_rest]
        kinds = [(ActionKind.RESHARD, c) for c in before if c not in there]
        coming = [c for c in there if c not in before]
        kinds += [(ActionKind.FETCH, c) for c in coming if c in fetched or c in seen]
        kinds += [(ActionKind.UNSHARD, c) for c in coming]
        seen.update(coming)
        found.append(
            [
                replace(chunk_action(kind, ChunkPart.GATHERED.of(c, num_chunks)), stage=unit_of[c])
                for kind, c in kinds
            ]
        )
        before = there
    return found


def _steps(
    steps: Sequence[Sequence[_Pass]], late: Sequence[Action], gathers_ahead: int, in_turn: Collection[int]
) -> tuple[Action, ...]:
    """The actions of a run. The `late` moves of a step run in the next forward, or at the end. Those that hold up the
    issuer, or move a number `in_turn`, run when their unit is gathered."""
    actions: list[Action] = []
    deferred: deque[Action] = deque()

    def waits(action: Action, unit: int) -> bool:
        in_its_turn = holds_up(action) or action.kind is ActionKind.FETCH and action.chunk in in_turn
        return in_its_turn and (action.stage or 0) > unit

    for step, passes in enumerate(steps):
        for one in passes:
            units, last_fetch = range(len(one.moving)), one.last_fetch
            for unit in units:
                while deferred and not waits(deferred[0], unit + gathers_ahead):
                    actions.append(deferred.popleft())
                actions += [*one.gathers_at(unit), one.computes(ActionKind.F, unit, step)]
            for moment, unit in enumerate(reversed(units), len(units)):
                actions += [*one.gathers_at(moment), *(one.early if moment == last_fetch else ())]
                actions += [one.computes(ActionKind.B, unit, step), *one.moves_sums(unit)]
            actions += one.gathers_at(2 * len(units))
        deferred.extend(replace(a, micro_batch=step) if a.kind is ActionKind.UPDATE else a for a in late)
    return (*actions, *deferred)


def holds_up(action: Action) -> bool:
    """Whether the issuer waits until it is done: an update on the device."""
    return action.kind is ActionKind.UPDATE and action.resource == COMPUTE


def memory_of(
    num_chunks: int, *, ahead: int, ahead_down: int | None = None, below: int | None = None,
    on_disk: Collection[int] | None = None, moving: Collection[int] | None = None,
    on_host: Mapping[int, Crossing] = ON_DEVICE, streamed: Mapping[int, Streaming] = RECORDS_ALONE,
    early: bool = False,
) -> Memory:  # fmt: skip
    """The memory of a step's updates: home tiers, places and slots. A record has its place on the device, and rests
    there if it is not `moving`. The gradient and weights of a chunk that is updated on the host take slots there, each
    of its kind. `streamed` parts rest there, without a limit."""
    gradients = {c: (0, ChunkPart.GRADIENT.of(c, num_chunks)) for c in on_host}
    weights = {c: (0, ChunkPart.WEIGHTS.of(c, num_chunks)) for c in on_host}
    there = _there(num_chunks, below, on_disk)
    records = [(0, chunk) for chunk in range(num_chunks)]
    home = dict.fromkeys(records, "host") | {(0, chunk): "disk" for chunk in there}
    home |= {key: "device" for key in records if moving is not None and key[1] not in moving}
    for chunk, crossing in on_host.items():
        home[gradients[chunk]] = "device" if ChunkPart.GRADIENT in crossing.down else "host"
        home[weights[chunk]] = "device" if crossing.up else "host"
    visitors = [chunk for chunk in range(num_chunks) if chunk not in on_host and home[0, chunk] != "device"]
    places = _places(visitors, ahead + 2)
    slots = dict.fromkeys((f"place {place} on the device" for place in places.values()), 1)
    if there or on_host:
        slots["host"] = num_chunks - len(there) + min(len(there), (below or 0) + max(ahead, 1) + 2)
    coming = (ahead if ahead_down is None else ahead_down) + 1
    down = num_chunks if early else coming
    kinds = {
        "gradients": (gradients, down, [c for c, way in on_host.items() if ChunkPart.GRADIENT in way.down]),
        "weights": (weights, coming + 1, [c for c, way in on_host.items() if ChunkPart.WEIGHTS in way.down]),
        "new weights": (
            weights, coming, [c for c, way in on_host.items() if way.up and ChunkPart.WEIGHTS not in way.down]
        ),
    }  # fmt: skip
    coming_of = {parts[chunk]: kind for kind, (parts, _, chunks) in kinds.items() for chunk in chunks}
    slots |= {
        f"{kind} on the host": most_at_once(chunks, width) for kind, (_, width, chunks) in kinds.items()
    }
    apart = {(key, "host"): f"{kind} on the host" for key, kind in coming_of.items()}
    apart |= {((0, chunk), "device"): f"place {place} on the device" for chunk, place in places.items()}
    memory = Memory(
        home,
        {},
        dict.fromkeys([*records, *coming_of], 1),
        budget_bytes=slots,
        reads={
            (0, c): (gradients[c], *((weights[c],) if ChunkPart.WEIGHTS in crossing.down else ()))
            for c, crossing in on_host.items()
        },
        writes={(0, c): (weights[c],) for c in on_host},
        spent=frozenset(gradients.values()),
        apart=apart,
    )
    return _with_streamed(memory, num_chunks, streamed) if streamed else memory


def _with_streamed(memory: Memory, num_chunks: int, streamed: Mapping[int, Streaming]) -> Memory:
    """The same with `streamed` parts, which rest on the host."""
    up = {(0, c): tuple((0, part.of(c, num_chunks)) for part in parts.up) for c, parts in streamed.items()}
    down = {
        (0, c): tuple((0, part.of(c, num_chunks)) for part in parts.down) for c, parts in streamed.items()
    }
    resting = {key for keys in (*up.values(), *down.values()) for key in keys}
    gradients = {key for key in resting if part_of(key[1], num_chunks)[0] is ChunkPart.GRADIENT}
    return replace(
        memory,
        home={**memory.home, **dict.fromkeys(resting, "host")},
        reads={**memory.reads, **up},
        writes={**memory.writes, **down},
        spent=memory.spent | gradients,
        apart={**memory.apart, **{(key, "host"): "at rest on the host" for key in resting}},
    )


def _places(chunks: Sequence[int], width: int) -> dict[int, int]:
    """The place of each chunk, the first that none of the `width` - 1 before it in a row has."""
    places: dict[int, int] = {}
    for chunk in chunks:
        taken = {places[other] for other in range(chunk - width + 1, chunk) if other in places}
        places[chunk] = next(place for place in count() if place not in taken)
    return places


def _there(num_chunks: int, below: int | None, on_disk: Collection[int] | None) -> tuple[int, ...]:
    """The chunks whose records are on disk, in the order of their updates."""
    if below is None:
        return ()
    return tuple(range(num_chunks) if on_disk is None else sorted(on_disk))


def _turns(chunk: int, places: Mapping[int, int], ahead: int | None) -> range:
    """The records on disk that would be fetched before the update of `chunk`, if there were no others. `places`: their
    order. At first those before the first of them is updated."""
    if ahead is None:
        return range(0)
    if (place := places.get(chunk)) is not None:
        return range(place + ahead if chunk else 0, min(place + ahead + 1, len(places)))
    return range(0 if chunk else min(ahead, len(places)))


def _mirrored(num_chunks: int, some: Collection[int] | None) -> Collection[int] | None:
    """The same chunks, counted from the last one."""
    return None if some is None else {num_chunks - 1 - chunk for chunk in some}


def _turned(action: Action, num_chunks: int) -> Action:
    """The same for the chunk with this number from the last one."""
    part, chunk = part_of(action.chunk or 0, num_chunks)
    return replace(action, chunk=part.of(num_chunks - 1 - chunk, num_chunks))


def _next(chunk: int, ahead: int | None, num_chunks: int) -> range:
    """The copies to request before `chunk`, so that `ahead` chunks beyond it are fetched: the first time it and
    those."""
    if ahead is None:
        return range(0)
    return range(chunk + ahead if chunk else 0, min(chunk + ahead + 1, num_chunks))
