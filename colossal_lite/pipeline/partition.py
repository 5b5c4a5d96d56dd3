"""Assigns the units of a model to pipeline stages.

Note: the search.
A model is an ordered list of units: the embedding, an attention and an MLP half for each block, and the head with its
norm and loss.  Between any two passes one residual activation.  So a cut inside a block costs no more bytes than one
between blocks.  It halves the step of load balancing.  A stage is a run of units.  The slowest stage sets the pace: its
time is minimized exactly, by dynamic programming over the ends of the stages.  Among those cuts the sum of squares is
minimized, so that no other stage is slower than it must be.  If a rank has several stages, their sum counts too: units
move from one stage to another as long as the slowest rank and the slowest stage together get faster.  Of these cuts the
one with the shortest simulated step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, pairwise
from math import inf
from typing import Literal

from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.schedule.simulator import StageCosts


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest part that a stage can begin or end at.

    forward, input, weight: cost of F, I and W of one micro-batch, in seconds or FLOPs
    """

    name: str
    forward: float
    input: float
    weight: float

    @property
    def cost(self) -> float:
        """Of forward and backward."""
        return self.forward + self.input + self.weight


FLOPS_PER_BYTE = 10.0
"""What a byte that is moved costs, in FLOPs. Of one core of a CPU: a linear of 768 x 3072 ran at 43 GFLOP/s. The
gradient of a table was made and added at 3.6 GB/s; a GPU has more, and takes more tokens at once."""
ELEMENT_BYTES = 4
"""Of an activation, and of an entry of a table."""


def lookup_costs(tokens: float, numel: float, width: float) -> tuple[float, float, float]:
    """F, I and W of `tokens` lookups in a table of `numel` elements with rows of `width`. In FLOPs, from the bytes
    moved.

    F reads rows and writes them; there is no I; W reads the output gradients and adds them to the rows. It also makes
    and adds a gradient of the whole table: with a large vocabulary this is the largest part.
    """
    rows, table = tokens * width * ELEMENT_BYTES, numel * ELEMENT_BYTES
    return FLOPS_PER_BYTE * 2 * rows, 0.0, FLOPS_PER_BYTE * (3 * rows + 4 * table)


def transformer_units(
    facts: ModelFacts,
    tokens: int,
    *,
    gated: bool = False,
) -> tuple[Unit, ...]:
    """Embedding, two halves a block, and head of a transformer; costs in FLOPs (reference: arXiv
    2205.05198).

    tokens: of one micro-batch; gated: the MLP has three matrices. Attention has no weights, so its scores
    cost in F and twice that in I; a lookup costs what it moves (`lookup_costs`).
    """
    width, kv_width = facts.width, facts.width * facts.kv_heads // facts.heads
    mlp_matrices = 3 if gated else 2

    def unit(name: str, weights: int, scores: float = 0.0) -> Unit:
        linear = 2.0 * tokens * weights
        return Unit(name, linear + scores, linear + 2 * scores, linear)

    attention = 2 * width * width + 2 * width * kv_width
    scores = 4.0 * tokens * facts.sequence * width
    table = facts.vocabulary * width
    units = [Unit("embedding", *lookup_costs(tokens, table, width))]
    for i in range(facts.layers):
        units.append(unit(f"{i}.attention", attention, scores))
        units.append(unit(f"{i}.mlp", mlp_matrices * width * facts.ffn))
    return (*units, unit("head", table))


@dataclass(frozen=True, slots=True)
class Partition:
    """Units [start, stop) of each stage, in order."""

    units: tuple[Unit, ...]
    bounds: tuple[tuple[int, int], ...]

    def costs(self) -> tuple[float, ...]:
        """Of forward and backward of each stage."""
        return tuple(sum(unit.cost for unit in self.units[a:b]) for a, b in self.bounds)

    def stage_costs(self) -> StageCosts:
        """For the simulator, in the unit of time that the units' costs have."""
        mine = [self.units[a:b] for a, b in self.bounds]
        return StageCosts(
            tuple(sum(unit.forward for unit in units) for units in mine),
            tuple(sum(unit.input for unit in units) for units in mine),
            tuple(sum(unit.weight for unit in units) for units in mine),
        )

    def __str__(self) -> str:
        total = sum(self.costs()) or 1.0
        rows = enumerate(zip(self.bounds, self.costs(), strict=True))
        return "\n".join(
            f"stage {i}: {self.units[a].name} to {self.units[b - 1].name}, {b - a} units, {cost / total:.1%}"
            for i, ((a, b), cost) in rows
        )


def partition(
    units: Sequence[Unit],
    stages: int,
    how: Literal["balanced", "uniform"] | Sequence[int] = "balanced",
    *,
    placement: Mapping[int, int] | None = None,
    makespan: Callable[[StageCosts], float] | None = None,
) -> Partition:
    """Cuts units into stages: the slowest stage as fast as can be, equal counts, or the counts that are given.

    - placement: rank of each stage, each its own by default
    - makespan: seconds of a step with such costs, by which cuts are compared where ranks have several stages

    Raises ValueError for fewer units than stages, and for counts that do not cover the units exactly.
    """
    names = f"{units[0].name} to {units[-1].name}" if units else "none"
    if len(units) < stages:
        raise ValueError(
            f"{stages} stages for {len(units)} units ({names}): each needs one; use fewer ranks or chunks"
        )
    if how != "balanced":
        return Partition(tuple(units), _counts(units, stages, how, names))
    cuts = _balance(units, stages)
    if makespan is None or placement is None or len({*placement.values()}) == stages:
        return Partition(tuple(units), cuts)
    tried = (Partition(tuple(units), each) for each in _toward_even_ranks(units, cuts, placement))
    return min(tried, key=lambda each: makespan(each.stage_costs()))


Cuts = tuple[tuple[int, int], ...]


def _counts(units: Sequence[Unit], stages: int, how: str | Sequence[int], names: str) -> Cuts:
    n = len(units)
    counts = [n // stages + (i < n % stages) for i in range(stages)] if isinstance(how, str) else list(how)
    if len(counts) != stages or sum(counts) != n or min(counts) < 1:
        raise ValueError(
            f"partition={tuple(counts)}: {len(counts)} counts that sum to {sum(counts)}, for {stages} stages "
            f"of a model with {n} units ({names}); give each stage at least 1 and {n} in all"
        )
    return tuple(pairwise(accumulate(counts, initial=0)))


def _balance(units: Sequence[Unit], stages: int) -> Cuts:
    """The cut whose slowest stage is fastest, and of those the most even one."""
    ends = list(accumulate((unit.cost for unit in units), initial=0.0))
    slowest, _ = _best_cut(len(units), stages, lambda start, stop: ends[stop] - ends[start], max)
    limit = slowest * (1 + 1e-12)

    def square(start: int, stop: int) -> float:
        cost = ends[stop] - ends[start]
        return cost * cost if cost <= limit else inf

    return _best_cut(len(units), stages, square, lambda a, b: a + b)[1]


def _toward_even_ranks(units: Sequence[Unit], cuts: Cuts, rank_of: Mapping[int, int]) -> Iterator[Cuts]:
    """`cuts`, and those that follow when one unit at a time moves to another stage. The stages between shift by one. It
    ends when the slowest rank and the slowest stage together get no faster. O(stages^3) a step."""
    sums = list(accumulate((unit.cost for unit in units), initial=0.0))
    several = len({*rank_of.values()})

    def pace(cuts: Cuts) -> tuple[float, float]:
        """Of a step of as many micro-batches as ranks, roughly; then how uneven the stages are."""
        ranks, slowest, squares = dict.fromkeys(rank_of.values(), 0.0), 0.0, 0.0
        for stage, (start, stop) in enumerate(cuts):
            cost = sums[stop] - sums[start]
            ranks[rank_of[stage]] += cost
            slowest, squares = max(slowest, cost), squares + cost * cost
        return several * max(ranks.values()) + (several - 1) * slowest, squares

    best, now = pace(cuts), cuts
    while True:
        yield now
        found, cut = min(((pace(cut), cut) for cut in _moved(now)), default=(best, now))
        if found >= best:
            return
        best, now = found, cut


def _moved(cuts: Cuts) -> Iterator[Cuts]:
    """Every cut in which one stage has a unit more and another one less."""
    inner = [stop for _, stop in cuts[:-1]]
    for first, last in combinations_with_replacement(range(len(inner)), 2):
        for step in (1, -1):
            ends = [0, *inner, cuts[-1][1]]
            ends[first + 1 : last + 2] = [end + step for end in inner[first : last + 1]]
            if all(a < b for a, b in pairwise(ends)):
                yield tuple(pairwise(ends))


def _best_cut(
    n: int,
    stages: int,
    score: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, Cuts]:
    """Smallest joined score of a cut of n units into stages; best[stop] is over the first units for the
    stages so far, and `froms` remembers where the last of them begins. O(n^2 stages)."""
    best = [0.0] + [inf] * n
    froms: list[list[int]] = []
    for stage in range(stages):
        row, origin = [inf] * (n + 1), [0] * (n + 1)
        for stop in range(stage + 1, n - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                if best[start] < row[stop] and (total := join(best[start], score(start, stop))) < row[stop]:
                    row[stop], origin[stop] = total, start
        best = row
        froms.append(origin)
    cuts: list[tuple[int, int]] = []
    stop = n
    for origin in reversed(froms):
        cuts.append((origin[stop], stop))
        stop = origin[stop]
    return best[n], tuple(reversed(cuts))
