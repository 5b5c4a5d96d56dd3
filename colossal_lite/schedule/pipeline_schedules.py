"""Generates pipeline schedules: the compute of every rank, and what each schedule costs.

Note ---- A generator takes (ranks p, micro-batches m, stages per rank v) and returns the compute of every rank.  Stages
are placed in a loop: stage s on rank s mod p.  For zb-v they are folded: stages r and 2p-1-r on rank r.  Any m works.
The passes of schedule/step_passes.py add what moves.

The cost of a schedule stands beside its generator.  F, I, W are the seconds of one rank's share of the layers.  It is
- the seconds idle per rank with a synchronous optimizer step;
- the most micro-batches whose activations a rank holds, in units of its layers;
- how often a micro-batch crosses between ranks (each crossing is two messages).
1f1b does not idle less than gpipe, it holds less.  With latency between ranks it idles more.  The zero-bubble schedules
idle less because W fills the gaps, as far as W is not shorter than I.  Attention has no W.  A new schedule is one
function and one line in SCHEDULES.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import inf

from colossal_lite.schedule.checker import Reading
from colossal_lite.schedule.plan import Action, ActionKind, Plan
from colossal_lite.schedule.simulator import StageCosts, simulate

# Generators ---------------------------------------------------------------------------------------


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Plan:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return _by_rank(
        ranks, lambda r: _alternate(*_rounds(r, ranks, stages_per_rank, [micro_batches]), warm=micro_batches)
    )


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Plan:
    """1F1B: as many forwards as there are ranks behind, then in turn (PipeDream-Flush, arXiv 2006.09503)."""
    return _by_rank(
        ranks, lambda r: _alternate(*_rounds(r, ranks, stages_per_rank, [micro_batches]), warm=ranks - 1 - r)
    )


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Plan:
    """1F1B over several chunks, depth first (arXiv 2104.04473 section 2.2): two more forwards for each rank
    behind.

    The paper has rounds of p micro-batches. For any m the rounds are as even as possible and, where m allows, not
    smaller than p; smaller ones would block.
    """
    return _depth_first(ranks, micro_batches, stages_per_rank, ahead=2)


def _depth_first(ranks: int, micro_batches: int, stages_per_rank: int, ahead: int) -> Plan:
    count = max(1, micro_batches // ranks)
    sizes = [micro_batches // count + (i < micro_batches % count) for i in range(count)]

    def one(rank: int) -> list[Action]:
        warm = ahead * (ranks - 1 - rank) + (stages_per_rank - 1) * sizes[0]
        return _alternate(*_rounds(rank, ranks, stages_per_rank, sizes), warm=warm)

    return _by_rank(ranks, one)


def breadth_first(ranks: int, micro_batches: int, stages_per_rank: int) -> Plan:
    """All micro-batches through a stage before the next one (arXiv 2211.05953): fewest gathers under ZeRO-3."""

    def one(rank: int) -> list[Action]:
        return _alternate(
            *_rounds(rank, ranks, stages_per_rank, [micro_batches]), warm=stages_per_rank * micro_batches
        )

    return _by_rank(ranks, one)


def zero_bubble_h1(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Plan:
    """1F1B whose W lags I by as many micro-batches as there are ranks before (arXiv 2401.10241 section 3)."""
    plan = one_forward_one_backward(ranks, micro_batches, stages_per_rank)
    return _split_all(plan)


def zero_bubble_v(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Plan:
    """Two chunks folded into a V, so that the rank that starts also ends (arXiv 2401.10241 section 6).

    The order is that of at least 2p-1 micro-batches; with fewer, those that do not exist are left out.
    """
    whole = max(2 * ranks - 1, micro_batches)

    def one(rank: int) -> list[Action]:
        stages = rank, 2 * ranks - 1 - rank
        done: defaultdict[tuple[int, ActionKind], int] = defaultdict(int)
        actions: list[Action] = []

        def do(chunk: int, kinds: str) -> None:
            for kind in map(ActionKind, kinds):
                actions.append(Action(kind, stage=stages[chunk], micro_batch=done[chunk, kind]))
                done[chunk, kind] += 1

        for _ in range(2 * (ranks - rank) - 1):
            do(0, "F")
        for _ in range(rank):
            do(1, "F")
            do(0, "F")
        for _ in range(ranks - rank):
            do(1, "FIW")
        while done[1, ActionKind.F] < whole:
            do(0, "FIW" if done[0, ActionKind.F] < whole else "IW")
            do(1, "FIW")
        for _ in range(rank):
            do(0, "I")
            do(1, "I")
        for _ in range(ranks - rank):
            do(0, "IW")
        for chunk in (1, 0):
            do(chunk, "W" * (whole - done[chunk, ActionKind.W]))
        return [a for a in actions if a.micro_batch is not None and a.micro_batch < micro_batches]

    return _by_rank(ranks, one)


def _by_rank(ranks: int, one: Callable[[int], list[Action]]) -> Plan:
    return Plan(tuple(tuple(one(rank)) for rank in range(ranks)))


def _rounds(
    rank: int, ranks: int, stages_per_rank: int, sizes: list[int]
) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards of a rank: rounds of micro-batches, in each chunk after chunk."""
    forwards, backwards, first = [], [], 0
    for size in sizes:
        for chunk, i in product(range(stages_per_rank), range(first, first + size)):
            forwards.append(Action(ActionKind.F, stage=chunk * ranks + rank, micro_batch=i))
            backwards.append(
                Action(ActionKind.B, stage=(stages_per_rank - 1 - chunk) * ranks + rank, micro_batch=i)
            )
        first += size
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], warm: int) -> list[Action]:
    """`warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    return [*forwards[:warm], *chain.from_iterable(pairs), *backwards[len(forwards) - warm :]]


def _split_all(plan: Plan) -> Plan:
    return Plan(tuple(tuple(_split(actions, lag=rank)) for rank, actions in enumerate(plan)))


def _split(actions: Sequence[Action], lag: int) -> list[Action]:
    """Split each B into I, and W after the I that comes `lag` later."""
    queue: list[Action] = []
    out: list[Action] = []
    for action in actions:
        out.append(action.of_kind(ActionKind.I) if action.kind is ActionKind.B else action)
        if action.kind is ActionKind.B:
            queue.append(action.of_kind(ActionKind.W))
            out += [queue.pop(0)] if len(queue) > lag else []
    return out + queue


def placements(ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage, in a loop and folded, which are the same for one stage on a rank."""
    loop = tuple(stage % ranks for stage in range(ranks * stages_per_rank))
    there_and_back = (*range(ranks), *reversed(range(ranks)))
    folded = tuple(there_and_back[stage % (2 * ranks)] for stage in range(ranks * stages_per_rank))
    return (loop, folded) if stages_per_rank > 1 else (loop,)


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """The rank of each stage."""
    return tuple(rank for _, rank in sorted(plan.placement().items()))


# Search -------------------------------------------------------------------------------------------


def auto(
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    *,
    costs: StageCosts | None = None,
    latency_s: float = 0.0,
    cap: int | None = None,
    placement: Sequence[int] | None = None,
) -> Plan:
    """The plan of the shortest simulated makespan among the schedules for so many chunks and greedy list
    schedules.

    - costs: by stage, uniform by default
    - cap: most activations (of one stage and micro-batch) that a rank may hold; by default ranks x stages_per_rank, as
      1f1b does
    - placement: rank of each stage, a loop or folded, by default whichever is faster

    Raises ValueError with the least cap that some schedule meets.
    """
    costs = costs or StageCosts.uniform(ranks * stages_per_rank)
    cap = ranks * stages_per_rank if cap is None else cap
    best: tuple[float, Plan] | None = None
    held = []
    for plan in _candidates(ranks, micro_batches, stages_per_rank):
        if placement is not None and ranks_of(plan) != tuple(placement):
            continue
        reading = Reading(plan)
        held.append(max(reading.footprint.live))
        makespan_s = simulate(reading, costs, latency_s=latency_s).makespan_s
        if held[-1] <= cap and (best is None or makespan_s < best[0]):
            best = makespan_s, plan
    for place in placements(ranks, stages_per_rank) if placement is None else [placement]:
        for deep, fill in product((True, False), (None, 0.0, 0.5, 1.0)):
            search = _Greedy(place, micro_batches, costs, costs.message_s + latency_s, cap, deep, fill)
            best = search.plan(best[0] if best else inf) or best
    if best is None:
        raise ValueError(
            f"no schedule found for {ranks} ranks, {micro_batches} micro-batches and {stages_per_rank} chunks that "
            f"holds at most {cap} activations on each rank; {min(held, default=ranks * stages_per_rank)} are enough"
        )
    return best[1]


def _candidates(ranks: int, micro_batches: int, stages_per_rank: int) -> Iterator[Plan]:
    """The schedules for so many chunks, and each that does not split B also with W apart."""
    for name, schedule in SCHEDULES.items():
        if name != "auto" and _defined(schedule, stages_per_rank):
            yield schedule.generate(ranks, micro_batches, stages_per_rank)
    for ahead in (1, 2):
        plan = _depth_first(ranks, micro_batches, stages_per_rank, ahead)
        yield plan
        yield _split_all(plan)


class _Greedy:
    """List scheduling: of what each rank could do next, what starts first; I before F before W.

    deep: of two forwards the later stage first; fill: W only into a gap of at least so many times its length,
    None: no split. A slot is kept for each later stage of a rank, so that what went in can go through.
    """

    def __init__(
        self,
        place: Sequence[int],
        micro_batches: int,
        costs: StageCosts,
        hop_s: float,
        cap: int,
        deep: bool,
        fill: float | None,
    ) -> None:
        self.place, self.micro_batches, self.hop_s = place, micro_batches, hop_s
        self.cap, self.deep, self.fill = cap, deep, fill
        self.backward = ActionKind.B if fill is None else ActionKind.I
        kinds = (ActionKind.F, self.backward, ActionKind.W)
        self.seconds = {
            k: [[costs(a) for a in _stage(k, s, micro_batches)] for s in range(len(place))] for k in kinds
        }
        self.ends: dict[ActionKind, list[list[float]]] = {kind: [[] for _ in place] for kind in kinds}
        ranks = max(place) + 1
        self.mine = [[s for s, rank in enumerate(place) if rank == r] for r in range(ranks)]
        deferred = (ActionKind.F, ActionKind.B) if fill is None else kinds
        self.left_s = [sum(sum(self.seconds[k][s]) for k in deferred for s in mine) for mine in self.mine]
        self.free_s, self.live = [0.0] * ranks, [0] * ranks
        self.lists: list[list[Action]] = [[] for _ in range(ranks)]

    def plan(self, limit_s: float) -> tuple[float, Plan] | None:
        """Its makespan and plan; None if that is not below the limit, or if the cap blocks it."""
        choices = {rank: choice for rank in range(len(self.mine)) if (choice := self._best(rank))}
        while choices:
            rank = min(choices, key=lambda r: choices[r][0])
            start_s, kind, stage = choices[rank]
            if start_s + self.left_s[rank] >= limit_s:
                return None
            self._do(rank, start_s, kind, stage)
            for touched in {
                rank,
                *(self.place[s] for s in (stage - 1, stage + 1) if 0 <= s < len(self.place)),
            }:
                choices.pop(touched, None)
                if choice := self._best(touched):
                    choices[touched] = choice
        last = self.ends[ActionKind.B if self.fill is None else ActionKind.W]
        done = all(len(times) == self.micro_batches for times in last)
        return (max(self.free_s), Plan(tuple(map(tuple, self.lists)))) if done else None

    def _do(self, rank: int, start_s: float, kind: ActionKind, stage: int) -> None:
        i = len(self.ends[kind][stage])
        self.lists[rank].append(Action(kind, stage=stage, micro_batch=i))
        self.free_s[rank] = start_s + self.seconds[kind][stage][i]
        self.left_s[rank] -= self.seconds[kind][stage][i]
        self.ends[kind][stage].append(self.free_s[rank])
        self.live[rank] += (kind is ActionKind.F) - (kind in (ActionKind.W, ActionKind.B))

    def _best(self, rank: int) -> tuple[float, ActionKind, int] | None:
        """What a rank does next and when that starts."""
        free_s = self.free_s[rank]
        choices: list[tuple[float, bool, int, ActionKind, int]] = []
        spare: tuple[float, ActionKind, int] | None = None
        for n, stage in enumerate(self.mine[rank]):
            f, b, w = (len(self.ends[kind][stage]) for kind in self.ends)
            ready_s = self._arrival(self.backward, stage, stage + 1, b) if b < f else None
            if ready_s is not None:
                choices.append((max(free_s, ready_s), False, -stage, self.backward, stage))
            fits = f < self.micro_batches and self.live[rank] + len(self.mine[rank]) - n <= self.cap
            ready_s = self._arrival(ActionKind.F, stage, stage - 1, f) if fits else None
            if ready_s is not None:
                choices.append(
                    (max(free_s, ready_s), True, -stage if self.deep else stage, ActionKind.F, stage)
                )
            if self.backward is ActionKind.I and w < b and spare is None:
                spare = free_s, ActionKind.W, stage
        best = min(choices, default=None)
        if spare is not None and best is not None and best[0] > free_s:
            wait_s = (self.fill or 0.0) * self.seconds[ActionKind.W][spare[2]][0]
            return spare if best[0] - free_s >= wait_s else (best[0], *best[3:])
        return (best[0], *best[3:]) if best is not None else spare

    def _arrival(self, kind: ActionKind, stage: int, source: int, i: int) -> float | None:
        """When what an F or I needs is there, if it is known."""
        if not 0 <= source < len(self.place):
            return 0.0 if kind is ActionKind.F else self.ends[ActionKind.F][stage][i]
        times = self.ends[kind][source]
        hop_s = self.hop_s if self.place[source] != self.place[stage] else 0.0
        return times[i] + hop_s if i < len(times) else None


def _stage(kind: ActionKind, stage: int, micro_batches: int) -> list[Action]:
    return [Action(kind, stage=stage, micro_batch=i) for i in range(micro_batches)]


# Table --------------------------------------------------------------------------------------------

Idle = Callable[[int, int, int, float, float, float], float]
Live = Callable[[int, int, int, int], float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A generator with what it costs; None where only the simulator knows.

    - stages_per_rank: fewest (the default) and most
    - idle_s(p, m, v, F, I, W): of each rank
    - live(p, r, m, v): micro-batches that rank r holds
    - crossings(p, v): between ranks, of one micro-batch one way, if p > 1
    """

    generate: Callable[[int, int, int], Plan]
    stages_per_rank: tuple[int, int | None]
    idle_s: Idle | None = None
    live: Live | None = None
    crossings: Callable[[int, int], int] | None = None
    splits: bool = False


def _loop(p: int, v: int) -> int:
    return p * v - 1


def _refill_s(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """Filling and draining; fewer micro-batches than ranks wait for the last one at each further chunk."""
    return (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w) / v


def _h1_s(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """With W <= F this is the paper's (p-1) max(F, F+I-W) for m >= p; its W > F lets the longer I show."""
    return max((p - 1) * f, (p - 1) * (f + i) - (min(p, m) - 1) * min(f, w))


def _v_s(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """Where F <= I, W <= I and m >= 2p-1; elsewhere it is more, and the simulator says how much."""
    return (p - 1) * max(f, i) / 2


def _interleaved_live(p: int, r: int, m: int, v: int) -> float:
    """Rounds have p micro-batches where p divides m, and at most this many elsewhere."""
    longest = -(-m // max(1, m // p))
    return min(m, (2 * (p - 1 - r) + (v - 1) * longest + 1) / v)


MOST_SUBJECTS = 40_000
"""Micro-batches times stages of a plan: more take minutes."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, (1, 1), _refill_s, lambda p, r, m, v: m, _loop),
    "1f1b": Schedule(one_forward_one_backward, (1, 1), _refill_s, lambda p, r, m, v: min(p - r, m), _loop),
    "interleaved": Schedule(interleaved, (2, None), _refill_s, _interleaved_live, _loop),
    "bfs": Schedule(breadth_first, (1, None), _refill_s, lambda p, r, m, v: m, _loop),
    "zb-h1": Schedule(zero_bubble_h1, (1, 1), _h1_s, lambda p, r, m, v: min(p, m), _loop, splits=True),
    "zb-v": Schedule(
        zero_bubble_v,
        (2, 2),
        _v_s,
        lambda p, r, m, v: min(p, (m + r + 1) / 2, m),
        lambda p, v: 2 * (p - 1),
        splits=True,
    ),
    "auto": Schedule(auto, (1, None), splits=True),
}


def _defined(schedule: Schedule, stages_per_rank: int) -> bool:
    least, most = schedule.stages_per_rank
    return least <= stages_per_rank and (most is None or stages_per_rank <= most)


def check_stages_per_rank(name: str, stages_per_rank: int, ranks: int = 1, counts: int | None = None) -> None:
    """Raises ValueError for stages on a rank that the schedule does not take. `counts`: how many counts a partition
    has, whose stages the message changes."""
    least, most = SCHEDULES[name].stages_per_rank
    if not _defined(SCHEDULES[name], stages_per_rank):
        legal = f"{least}" if most == least else f"at least {least}"
        others = ", ".join(n for n, each in SCHEDULES.items() if _defined(each, stages_per_rank))
        rule = f"schedule {name!r} takes {legal} on each rank"
        if counts not in (None, ranks * least):
            stages = ranks * least
            legal = f"{least} with {stages} count{'s' * (stages > 1)} in partition"
        raise ValueError(
            f"stages_per_rank={stages_per_rank}: {rule}; {legal}"
            + (f", or a schedule that takes {stages_per_rank}: {others}" if others else "")
        )


def generate(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Plan:
    """The compute of a schedule of the table. Raises ValueError if it is not there or not defined for
    `stages_per_rank`."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    stages_per_rank = SCHEDULES[name].stages_per_rank[0] if stages_per_rank is None else stages_per_rank
    check_stages_per_rank(name, stages_per_rank)
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"{ranks} stages and {micro_batches} micro-batches: give at least 1 of each")
    if (subjects := ranks * stages_per_rank * micro_batches) > MOST_SUBJECTS:
        raise ValueError(
            f"{ranks} ranks of {stages_per_rank} stages and {micro_batches} micro-batches: {subjects:,} forwards, and "
            f"as many backwards; legal: up to {MOST_SUBJECTS:,}"
        )
    return SCHEDULES[name].generate(ranks, micro_batches, stages_per_rank)
