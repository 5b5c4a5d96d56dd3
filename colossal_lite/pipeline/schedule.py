"""Pipeline schedules: the schema of `parallel.pipeline`, the generators of plans, and the passes over them.

Note
----
A generator takes (ranks p, micro-batches m, chunks v) and returns the compute of every rank: stages of v
chunks, placed in a loop (stage s on rank s mod p) or, for zb-v, folded once (stages r and 2p-1-r on rank r).
Any m works. Passes add what moves: `add_messages` SEND and RECV, `add_unshard` the gathers of ZeRO-3,
`add_step` REDUCE, TIED_REDUCE and UPDATE; `freeze`, `repeat` and `Plan.only` cut a plan to frozen stages,
accumulation, evaluation.

What a schedule costs stands beside its generator, with F, I, W the seconds of one rank's share of the
layers: seconds idle per rank with a synchronous optimizer step, the most micro-batches whose activations a
rank holds, in units of its layers, and how often a micro-batch crosses between ranks (each crossing is two
messages). 1f1b does not idle less than gpipe, it holds less; with latency between ranks it idles more. The
zero-bubble schedules idle less because W fills the gaps, as far as W is not shorter than I; attention has no
W. To add a schedule is one function and one line in SCHEDULES.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import inf, isfinite
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colossal_lite.plan import COMPUTE_KINDS, SENDS, Action, Kind, Plan, PlanError, Reading, Shape, check
from colossal_lite.simulate import StageCosts, grid, simulate

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto"]


class PipelineConfig(BaseModel):
    """`parallel.pipeline`; an int is the size alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size: Annotated[int, Field(ge=1)] = 1
    """Ranks on the `pipeline` axis."""
    schedule: ScheduleName = "1f1b"
    """Order of the work; `colossal-lite schedule` draws it. `auto` searches within activation_cap."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Parts of one batch in flight; None is 4 for each rank, or as many as there are samples."""
    chunks: Annotated[int, Field(ge=1)] = 1
    """Stages on each rank; left out, the least that the schedule is defined for."""
    partition: Literal["balanced", "profiled", "uniform"] | tuple[Annotated[int, Field(ge=1)], ...] = (
        "balanced"
    )
    """Units on each stage: balanced by cost, by formula or as one micro-batch shows it (profiled), equal counts, or the
    counts of all size x chunks stages."""
    activation_cap: Annotated[int, Field(ge=1)] | None = None
    """Most activations, of one stage and micro-batch each, that a rank may hold: `auto` searches within it, any other
    schedule that holds more is refused. None: what the schedule holds, and for auto size x chunks, as 1f1b does."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"size": value}
        if isinstance(value, dict) and "chunks" not in value and value.get("schedule") in SCHEDULES:
            value = value | {"chunks": SCHEDULES[value["schedule"]].chunks[0]}
        return value

    @model_validator(mode="after")
    def _rules(self) -> PipelineConfig:
        _check_chunks(self.schedule, self.chunks)
        if isinstance(self.partition, tuple) and len(self.partition) != self.stages:
            raise ValueError(
                f"partition: {len(self.partition)} counts for {self.stages} stages "
                f"(size {self.size} x chunks {self.chunks}); give one count for each stage"
            )
        return self

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.size * self.chunks

    def parts(self, samples: int) -> int:
        """Micro-batches for a batch of `samples` on one data rank. Raises ValueError if there are too few."""
        if self.micro_batches is None:
            return max(1, min(samples, 4 * self.size)) if self.size > 1 else 1
        if samples == 0:
            raise ValueError(
                f"micro_batches={self.micro_batches}: a data rank has no samples in a part of the batch, and needs one "
                f"for each micro-batch; use at least {self.micro_batches} samples for each data rank and accumulated "
                f"part, or micro_batches=None, which passes over what is empty"
            )
        if samples < self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches}: the batch has {samples} samples on this data rank; "
                f"use at most {samples} micro-batches or a larger global batch"
            )
        return self.micro_batches

    def parts_of(self, sizes: Sequence[int], turns: int) -> int:
        """Micro-batches of each of `turns` accumulated parts of a batch with so many samples on each data rank, the
        same on all of them. Raises ValueError as `parts`."""
        if self.size == 1:
            return 1
        return self.parts(-(-max(sizes) // turns) if self.micro_batches is None else min(sizes) // turns)

    def fewer_of(self, sizes: Sequence[int], turns: int) -> int:
        """For evaluation, which takes any batch: no more micro-batches than samples."""
        if self.size == 1:
            return 1
        return min(self.micro_batches or 4 * self.size, max(1, *(-(-size // turns) for size in sizes)))


# Generators ---------------------------------------------------------------------------------------


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return _by_rank(
        ranks, lambda r: _alternate(*_rounds(r, ranks, chunks, [micro_batches]), warm=micro_batches)
    )


def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int = 1) -> Plan:
    """1F1B: as many forwards as there are ranks behind, then in turn (PipeDream-Flush, arXiv 2006.09503)."""
    return _by_rank(
        ranks, lambda r: _alternate(*_rounds(r, ranks, chunks, [micro_batches]), warm=ranks - 1 - r)
    )


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Plan:
    """1F1B over several chunks, depth first (arXiv 2104.04473 section 2.2): two more forwards for each rank
    behind.

    The paper's rounds of p micro-batches are generalised to any m by rounds as even as possible and, where m
    allows, not smaller than p; smaller ones would block.
    """
    return _depth_first(ranks, micro_batches, chunks, ahead=2)


def _depth_first(ranks: int, micro_batches: int, chunks: int, ahead: int) -> Plan:
    count = max(1, micro_batches // ranks)
    sizes = [micro_batches // count + (i < micro_batches % count) for i in range(count)]

    def one(rank: int) -> list[Action]:
        warm = ahead * (ranks - 1 - rank) + (chunks - 1) * sizes[0]
        return _alternate(*_rounds(rank, ranks, chunks, sizes), warm=warm)

    return _by_rank(ranks, one)


def breadth_first(ranks: int, micro_batches: int, chunks: int) -> Plan:
    """All micro-batches through a chunk before the next one (arXiv 2211.05953): fewest gathers under
    ZeRO-3."""

    def one(rank: int) -> list[Action]:
        return _alternate(*_rounds(rank, ranks, chunks, [micro_batches]), warm=chunks * micro_batches)

    return _by_rank(ranks, one)


def zero_bubble_h1(ranks: int, micro_batches: int, chunks: int = 1) -> Plan:
    """1F1B whose W lags I by as many micro-batches as there are ranks before (arXiv 2401.10241 section 3)."""
    plan = one_forward_one_backward(ranks, micro_batches, chunks)
    return _split_all(plan)


def zero_bubble_v(ranks: int, micro_batches: int, chunks: int = 2) -> Plan:
    """Two chunks folded into a V, so that the rank that starts also ends (arXiv 2401.10241 section 6).

    The order is that of at least 2p-1 micro-batches; with fewer, those that do not exist are left out.
    """
    whole = max(2 * ranks - 1, micro_batches)

    def one(rank: int) -> list[Action]:
        stages = rank, 2 * ranks - 1 - rank
        done: defaultdict[tuple[int, Kind], int] = defaultdict(int)
        actions: list[Action] = []

        def do(chunk: int, kinds: str) -> None:
            for kind in map(Kind, kinds):
                actions.append(Action(kind, stage=stages[chunk], micro_batch=done[chunk, kind]))
                done[chunk, kind] += 1

        for _ in range(2 * (ranks - rank) - 1):
            do(0, "F")
        for _ in range(rank):
            do(1, "F")
            do(0, "F")
        for _ in range(ranks - rank):
            do(1, "FIW")
        while done[1, Kind.F] < whole:
            do(0, "FIW" if done[0, Kind.F] < whole else "IW")
            do(1, "FIW")
        for _ in range(rank):
            do(0, "I")
            do(1, "I")
        for _ in range(ranks - rank):
            do(0, "IW")
        for chunk in (1, 0):
            do(chunk, "W" * (whole - done[chunk, Kind.W]))
        return [a for a in actions if a.micro_batch is not None and a.micro_batch < micro_batches]

    return _by_rank(ranks, one)


def _by_rank(ranks: int, one: Callable[[int], list[Action]]) -> Plan:
    return Plan(tuple(tuple(one(rank)) for rank in range(ranks)))


def _rounds(rank: int, ranks: int, chunks: int, sizes: list[int]) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards of a rank: rounds of micro-batches, in each chunk after chunk."""
    forwards, backwards, first = [], [], 0
    for size in sizes:
        for chunk, i in product(range(chunks), range(first, first + size)):
            forwards.append(Action(Kind.F, stage=chunk * ranks + rank, micro_batch=i))
            backwards.append(Action(Kind.B, stage=(chunks - 1 - chunk) * ranks + rank, micro_batch=i))
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
    """Each B becomes I, and W after the I that comes `lag` later."""
    queue: list[Action] = []
    out: list[Action] = []
    for action in actions:
        out.append(replace(action, kind=Kind.I) if action.kind is Kind.B else action)
        if action.kind is Kind.B:
            queue.append(replace(action, kind=Kind.W))
            out += [queue.pop(0)] if len(queue) > lag else []
    return out + queue


def one_stage(micro_batches: int) -> Plan:
    """The serial step: F0 B0 F1 B1 ..., which holds the activations of one micro-batch."""
    return one_forward_one_backward(1, micro_batches)


def serial_plan(micro_batches: int, num_chunks: int, reduce: Literal["step", "micro_batch"] = "step") -> Plan:
    """`one_stage`, then REDUCE of each chunk, then UPDATE of each: a step without a pipeline."""
    return add_step(one_stage(micro_batches), {0: tuple(range(num_chunks))}, reduce)


# Passes -------------------------------------------------------------------------------------------


def add_messages(plan: Plan, seconds: Callable[[Action], float] | None = None, ahead: bool = True) -> Plan:
    """Adds SEND after what makes a message and RECV where it arrives, to a plan that has no messages.

    A simulation decides where (by `seconds` of each compute action; by default 1 for F, I and W): RECV
    stands before the compute that runs while the message is sent, so that the transfer hides under it;
    without `ahead` after that compute, and then the plan runs even if RECVs block. Raises PlanError if the
    plan cannot run.
    """
    reading = Reading(plan)
    cost = seconds or _unit_seconds
    # A stage that costs nothing, of a table alone, would send at the moment of what it waits for, and tell no order.
    least_s = 1e-6 * max((cost(a) for actions in plan for a in actions), default=0.0) or 1.0

    def positive_s(action: Action) -> float:
        return max(cost(action), least_s) if action.kind in COMPUTE_KINDS else cost(action)

    spans = {(span.rank, span.action): span for span in simulate(plan, positive_s).spans}
    compute = [[i for i, a in enumerate(actions) if a.kind in COMPUTE_KINDS] for actions in plan]
    # When the compute of each rank ends or starts; both ascend.
    times_s = [
        [span.end_s if ahead else span.start_s for span in (spans[rank, plan[rank][i]] for i in places)]
        for rank, places in enumerate(compute)
    ]
    sent_s = {hop: spans[reading.places[hop[0]][0], reading.actions[hop[0]]].end_s for hop in reading.hops}
    after: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    # In the order of sending, the same on both sides: that keeps blocking messages from waiting in a ring.
    for source, user in sorted(sent_s, key=lambda hop: (sent_s[hop], hop)):
        (sender, place), (receiver, _), use = (
            reading.places[source],
            reading.places[user],
            reading.actions[user],
        )
        until = compute[receiver][bisect_left(times_s[receiver], sent_s[source, user])]
        kind = Kind.RECV_F if use.kind is Kind.F else Kind.RECV_B
        after[sender, place].append(reading.hops[source, user])
        after[receiver, until - 1].append(replace(use, kind=kind, resource=""))
    return _insert(plan, after)


def _unit_seconds(action: Action) -> float:
    return float(action.kind in COMPUTE_KINDS) + (action.kind is Kind.B)


def _insert(plan: Plan, after: Mapping[tuple[int, int], Sequence[Action]]) -> Plan:
    """Actions put in after the place (rank, i) of a plan; i = -1 is before the first."""

    def one(rank: int) -> Iterator[Action]:
        yield from after.get((rank, -1), ())
        for i, action in enumerate(plan[rank]):
            yield action
            yield from after.get((rank, i), ())

    return Plan(tuple(tuple(one(rank)) for rank in range(len(plan))))


def add_unshard(plan: Plan, prefetch: int = 1) -> Plan:
    """ZeRO-3: the weights of a stage are gathered before each run of its actions and dropped after it.

    The gather of a run is posted `prefetch` runs ahead, so that at most prefetch + 1 stages are gathered at
    once; what would be dropped only to be gathered again at once is kept. Gathers a rank: gpipe, 1f1b and
    zb-h1 1, bfs 2v - 1, the depth-first schedules about 2m.
    """
    after: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(plan):
        runs: list[tuple[int, int, int]] = []  # stage, first place, last place
        for i, action in enumerate(actions):
            if action.kind in COMPUTE_KINDS and action.stage is not None:
                same = bool(runs) and runs[-1][0] == action.stage
                runs[-1:] = [(action.stage, runs[-1][1], i)] if same else [*runs[-1:], (action.stage, i, i)]
        held: list[int] = []
        for n, (stage, first, last) in enumerate(runs):
            for ahead, _, _ in runs[n : n + 1 + prefetch]:
                if ahead not in held:
                    after[rank, first - 1].append(Action(Kind.UNSHARD, stage=ahead))
                    held.append(ahead)
            if stage not in (ahead for ahead, _, _ in runs[n + 1 : n + 2 + prefetch]):
                after[rank, _past_sends(actions, last)].append(Action(Kind.RESHARD, stage=stage))
                held.remove(stage)
    return _insert(plan, after)


def add_step(
    plan: Plan,
    chunks: Mapping[int, tuple[int, ...]] | None = None,
    reduce: Literal["step", "micro_batch"] = "step",
    update: Literal["step", "backward"] = "step",
) -> Plan:
    """The end of a step: REDUCE of a stage's chunks when its last gradient is there, or with `micro_batch`
    when each is, and at the end of the list UPDATE of every chunk; with update="backward", of a plan of one rank,
    each right behind its REDUCE, in the order in which gradients come.

    chunks: those of each stage (its own number by default); frozen stages have none. A chunk of several
    stages is tied: summed over its ranks by TIED_REDUCE after all compute, and only then reduced, once for
    each rank.
    """
    chunks = chunks if chunks is not None else {stage: (stage,) for stage in plan.placement()}
    placement = plan.placement()
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for stage, mine in chunks.items():
        for chunk in mine:
            owners[chunk].add(stage)
    tied = {chunk for chunk, stages in owners.items() if len({placement[s] for s in stages}) > 1}
    after: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(plan):
        ends = [(i, a) for i, a in enumerate(actions) if a.kind in (Kind.W, Kind.B)]
        last = {a.stage: _past_sends(actions, i) for i, a in ends if a.stage is not None}
        # Of a chunk's stages on this rank the one that ends last speaks for it.
        speaker: dict[int, int] = {}
        for stage in sorted(last, key=lambda s: last[s]):
            speaker |= dict.fromkeys(chunks.get(stage, ()), stage)
        late: list[Action] = []
        for chunk, stage in sorted(speaker.items(), key=lambda found: len(owners[found[0]]) > 1):
            action = Action(Kind.REDUCE, stage=stage, chunk=chunk)
            if chunk in tied:
                late += [replace(action, kind=Kind.TIED_REDUCE, resource=""), action]
            elif reduce == "step" or len(owners[chunk]) > 1:
                after[rank, last[stage]].append(action)
            else:
                for i, a in ends:
                    if a.stage == stage:
                        place = rank, _past_sends(actions, i)
                        after[place].append(replace(action, micro_batch=a.micro_batch))
        late.sort(key=lambda a: a.kind is Kind.REDUCE)
        late += [Action(Kind.UPDATE, stage=speaker[chunk], chunk=chunk) for chunk in sorted(speaker)]
        after[rank, len(actions) - 1] += late
        if update == "backward":
            after[rank, len(actions) - 1] = _interleaved(after[rank, len(actions) - 1])
    return _insert(plan, after)


def _interleaved(ends: Sequence[Action]) -> list[Action]:
    """REDUCE and UPDATE of every chunk, chunk by chunk from the last to the first."""
    return sorted(ends, key=lambda a: (-(a.chunk or 0), a.kind is Kind.UPDATE))


def _past_sends(actions: Sequence[Action], i: int) -> int:
    """The last of the SENDs that follow place i: a neighbour waits for them, nobody for what comes behind."""
    while i + 1 < len(actions) and actions[i + 1].kind in SENDS:
        i += 1
    return i


def freeze(plan: Plan, trainable: Sequence[bool]) -> Plan:
    """A plan without the backward that frozen stages do not need: no W, and no I and no messages for it where
    no stage before trains. It comes after `add_messages`, and before `add_step`, which then skips them."""
    shape = Shape(len(trainable), 1, trainable=tuple(trainable))

    def one(action: Action) -> Iterator[Action]:
        stage = action.stage or 0
        owed = shape.backward_kinds(stage)
        if action.kind is Kind.B and len(owed) == 1:
            yield replace(action, kind=Kind.I)
        elif action.kind is Kind.SEND_B:
            yield from [action] if stage and shape.backward_kinds(stage - 1) else []
        elif action.kind is Kind.W:
            yield from [action] if action.kind in owed else []
        elif owed or action.kind not in (Kind.I, Kind.B, Kind.RECV_B):
            yield action

    return Plan(tuple(tuple(chain.from_iterable(map(one, actions))) for actions in plan))


def repeat(plan: Plan, times: int) -> Plan:
    """Gradient accumulation: a plan of m micro-batches run `times` times over, the next m micro-batches each
    time."""
    shift = Shape.of(plan, 0).micro_batches

    def one(action: Action, turn: int) -> Action:
        return replace(action, micro_batch=(action.micro_batch or 0) + turn * shift)

    return Plan(tuple(tuple(one(a, turn) for turn in range(times) for a in actions) for actions in plan))


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's plan follows from, beside the schedule.

    micro_batches: of each of `turns` parts (gradient accumulation); chunks: of each stage, none where nothing
    trains; trainable: for each stage whether anything of it trains; costs: for `auto`, and for where messages stand;
    ahead: RECVs are posted before the compute under which they hide, or block; placement: rank of each stage, once a
    model is laid out: by then `auto` has no choice of it, whatever the costs, the micro-batches or the direction.
    """

    micro_batches: int
    turns: int = 1
    chunks: tuple[tuple[int, ...], ...] = ((0,),)
    trainable: tuple[bool, ...] = (True,)
    reduce: Literal["step", "micro_batch"] = "step"
    backward: bool = True
    ahead: bool = True
    costs: StageCosts | None = None
    placement: tuple[int, ...] | None = None
    update: Literal["step", "backward"] = "step"


def step_plan(pipeline: PipelineConfig, step: StepShape) -> Plan:
    """All passes over a schedule, in their order, checked: what every rank of a pipeline executes in a step.

    One rank gives the serial step: F0 B0 F1 B1 ..., REDUCE, UPDATE.  Raises PlanError for a plan that must not run.
    """
    plan = compute_plan(pipeline, step)
    plan = repeat(plan, step.turns)
    if len(plan) > 1:
        plan = add_messages(plan, step.costs, ahead=step.ahead)
    if step.backward:
        plan = freeze(plan, step.trainable)
        plan = add_step(plan, dict(enumerate(step.chunks)), step.reduce, step.update)
    shape = Shape(
        pipeline.stages, step.micro_batches * step.turns, trainable=step.trainable, backward=step.backward
    )
    check(plan, shapes={0: shape}, strict=not step.ahead)
    return plan


def compute_plan(pipeline: PipelineConfig, step: StepShape) -> Plan:
    """The compute of one turn, before any pass. Raises ValueError, drawn, for one that holds more than the cap."""
    name, ranks, chunks, cap = pipeline.schedule, pipeline.size, pipeline.chunks, pipeline.activation_cap
    if ranks == 1:
        plan = one_stage(step.micro_batches)
    elif name == "auto":
        plan = auto(ranks, step.micro_batches, chunks, costs=step.costs, cap=cap, placement=step.placement)
    else:
        plan = generate(name, ranks, step.micro_batches, chunks)
        if cap is not None and step.backward:
            _refuse_over(cap, plan, name)
    assert step.placement is None or ranks_of(plan) == step.placement, "stages lie elsewhere"
    return plan if step.backward else plan.only(Kind.F)


def plans_by_placement(pipeline: PipelineConfig, step: StepShape) -> tuple[Plan, ...]:
    """The compute of one turn for each way in which stages may lie on ranks: two for `auto` with several stages on a
    rank, one for any other. Raises ValueError if no way has a plan."""
    if pipeline.schedule != "auto" or pipeline.chunks == 1:
        return (compute_plan(pipeline, step),)
    found, why = list[Plan](), ValueError()
    for placement in _placements(pipeline.size, pipeline.chunks):
        try:
            found.append(compute_plan(pipeline, replace(step, placement=placement)))
        except ValueError as error:  # within the cap there may be one of them only
            why = error
    if not found:
        raise why
    return tuple(found)


def _placements(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage, in a loop and folded, which are the same for one stage on a rank."""
    loop = tuple(stage % ranks for stage in range(ranks * chunks))
    there_and_back = (*range(ranks), *reversed(range(ranks)))
    folded = tuple(there_and_back[stage % (2 * ranks)] for stage in range(ranks * chunks))
    return (loop, folded) if chunks > 1 else (loop,)


def _refuse_over(cap: int, plan: Plan, name: str) -> None:
    """Raises ValueError if a rank holds more activations than `cap`, with the plan drawn."""
    try:
        check(plan, cap=cap)
    except PlanError as error:
        raise ValueError(
            f"parallel.pipeline.activation_cap={cap}: {name} holds more; legal: {max(check(plan).live)} or more, "
            f"fewer micro_batches where all are held, or schedule='auto', which searches within the cap\n{error}"
        ) from error


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """The rank of each stage."""
    return tuple(rank for _, rank in sorted(plan.placement().items()))


# Search -------------------------------------------------------------------------------------------


def auto(
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    costs: StageCosts | None = None,
    latency_s: float = 0.0,
    cap: int | None = None,
    placement: Sequence[int] | None = None,
) -> Plan:
    """The plan of the shortest simulated makespan among the schedules for so many chunks and greedy list
    schedules.

    costs: by stage, uniform by default; cap: most activations (of one stage and micro-batch) that a rank may
    hold, by default ranks x chunks, as 1f1b does; placement: rank of each stage, a loop or folded, by default
    whichever is faster. Raises ValueError with the least cap that some schedule meets.
    """
    costs = costs or StageCosts.uniform(ranks * chunks)
    cap = ranks * chunks if cap is None else cap
    best: tuple[float, Plan] | None = None
    held = []
    for plan in _candidates(ranks, micro_batches, chunks):
        if placement is not None and ranks_of(plan) != tuple(placement):
            continue
        held.append(max(Reading(plan).footprint.live))
        makespan_s = simulate(plan, costs, latency_s=latency_s).makespan_s
        if held[-1] <= cap and (best is None or makespan_s < best[0]):
            best = makespan_s, plan
    for place in _placements(ranks, chunks) if placement is None else [placement]:
        for deep, fill in product((True, False), (None, 0.0, 0.5, 1.0)):
            search = _Greedy(place, micro_batches, costs, costs.message_s + latency_s, cap, deep, fill)
            best = search.plan(best[0] if best else inf) or best
    if best is None:
        raise ValueError(
            f"no schedule found for {ranks} ranks, {micro_batches} micro-batches and {chunks} chunks that "
            f"holds at most {cap} activations on each rank; {min(held, default=ranks * chunks)} are enough"
        )
    return best[1]


def _candidates(ranks: int, micro_batches: int, chunks: int) -> Iterator[Plan]:
    """The schedules for so many chunks, and each that does not split B also with W apart."""
    for name, schedule in SCHEDULES.items():
        if name != "auto" and _defined(schedule, chunks):
            yield schedule.generate(ranks, micro_batches, chunks)
    for ahead in (1, 2):
        plan = _depth_first(ranks, micro_batches, chunks, ahead)
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
        self.backward = Kind.B if fill is None else Kind.I
        kinds = (Kind.F, self.backward, Kind.W)
        self.seconds = {
            k: [[costs(a) for a in _stage(k, s, micro_batches)] for s in range(len(place))] for k in kinds
        }
        self.ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in place] for kind in kinds}
        ranks = max(place) + 1
        self.mine = [[s for s, rank in enumerate(place) if rank == r] for r in range(ranks)]
        owed = (Kind.F, Kind.B) if fill is None else kinds
        self.left_s = [sum(sum(self.seconds[k][s]) for k in owed for s in mine) for mine in self.mine]
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
        last = self.ends[Kind.B if self.fill is None else Kind.W]
        done = all(len(times) == self.micro_batches for times in last)
        return (max(self.free_s), Plan(tuple(map(tuple, self.lists)))) if done else None

    def _do(self, rank: int, start_s: float, kind: Kind, stage: int) -> None:
        i = len(self.ends[kind][stage])
        self.lists[rank].append(Action(kind, stage=stage, micro_batch=i))
        self.free_s[rank] = start_s + self.seconds[kind][stage][i]
        self.left_s[rank] -= self.seconds[kind][stage][i]
        self.ends[kind][stage].append(self.free_s[rank])
        self.live[rank] += (kind is Kind.F) - (kind in (Kind.W, Kind.B))

    def _best(self, rank: int) -> tuple[float, Kind, int] | None:
        """What a rank does next and when that starts."""
        free_s = self.free_s[rank]
        choices: list[tuple[float, bool, int, Kind, int]] = []
        spare: tuple[float, Kind, int] | None = None
        for n, stage in enumerate(self.mine[rank]):
            f, b, w = (len(self.ends[kind][stage]) for kind in self.ends)
            ready_s = self._arrival(self.backward, stage, stage + 1, b) if b < f else None
            if ready_s is not None:
                choices.append((max(free_s, ready_s), False, -stage, self.backward, stage))
            fits = f < self.micro_batches and self.live[rank] + len(self.mine[rank]) - n <= self.cap
            ready_s = self._arrival(Kind.F, stage, stage - 1, f) if fits else None
            if ready_s is not None:
                choices.append((max(free_s, ready_s), True, -stage if self.deep else stage, Kind.F, stage))
            if self.backward is Kind.I and w < b and spare is None:
                spare = free_s, Kind.W, stage
        best = min(choices, default=None)
        if spare is not None and best is not None and best[0] > free_s:
            wait_s = (self.fill or 0.0) * self.seconds[Kind.W][spare[2]][0]
            return spare if best[0] - free_s >= wait_s else (best[0], *best[3:])
        return (best[0], *best[3:]) if best is not None else spare

    def _arrival(self, kind: Kind, stage: int, source: int, i: int) -> float | None:
        """When what an F or I needs is there, if it is known."""
        if not 0 <= source < len(self.place):
            return 0.0 if kind is Kind.F else self.ends[Kind.F][stage][i]
        times = self.ends[kind][source]
        hop_s = self.hop_s if self.place[source] != self.place[stage] else 0.0
        return times[i] + hop_s if i < len(times) else None


def _stage(kind: Kind, stage: int, micro_batches: int) -> list[Action]:
    return [Action(kind, stage=stage, micro_batch=i) for i in range(micro_batches)]


# Table --------------------------------------------------------------------------------------------

Idle = Callable[[int, int, int, float, float, float], float]
Live = Callable[[int, int, int, int], float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A generator with what it costs; None where only the simulator knows.

    chunks: fewest (the default) and most; idle_s(p, m, v, F, I, W): of each rank; live(p, r, m, v):
    micro-batches that rank r holds; crossings(p, v): between ranks, of one micro-batch one way, if p > 1.
    """

    generate: Callable[[int, int, int], Plan]
    chunks: tuple[int, int | None]
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


def _defined(schedule: Schedule, chunks: int) -> bool:
    least, most = schedule.chunks
    return least <= chunks and (most is None or chunks <= most)


def _check_chunks(name: str, chunks: int) -> None:
    least, most = SCHEDULES[name].chunks
    if not _defined(SCHEDULES[name], chunks):
        legal = f"{least}" if most == least else f"at least {least}"
        raise ValueError(f"chunks={chunks}: schedule {name!r} takes {legal} on each rank")


def splits_backward(pipeline: PipelineConfig) -> bool:
    """Whether a plan of this schedule may have I and W apart."""
    return pipeline.size > 1 and SCHEDULES[pipeline.schedule].splits


def generate(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Plan:
    """The compute of a schedule of the table. Raises ValueError if it is not there or not defined for
    `chunks`."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    chunks = SCHEDULES[name].chunks[0] if chunks is None else chunks
    _check_chunks(name, chunks)
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"{ranks} stages and {micro_batches} micro-batches: give at least 1 of each")
    return SCHEDULES[name].generate(ranks, micro_batches, chunks)


def draw(
    stages: int,
    micro_batches: int,
    name: str,
    chunks: int | None = None,
    *,
    cost: tuple[float, float, float] = (1.0, 1.0, 1.0),
    latency_s: float = 0.0,
) -> str:
    """A schedule over `stages` ranks, drawn, with its bubble, its peak activations and its messages.

    cost: seconds of F, I and W of one rank's layers. Raises ValueError as `generate` does, and for times that no clock
    shows.
    """
    if not all(map(isfinite, cost)) or min(cost) < 0 or max(cost) == 0:
        told = ", ".join(f"{seconds:g}" for seconds in cost)
        raise ValueError(f"cost {told} of F, I and W: give three finite seconds >= 0, at least one above 0")
    if not isfinite(latency_s) or latency_s < 0:
        raise ValueError(f"latency {latency_s:g}: give finite seconds >= 0")
    plan = generate(name, stages, micro_batches, chunks)
    chunks = len(plan.placement()) // stages
    f, i, w = (seconds / chunks for seconds in cost)
    costs = StageCosts.uniform(stages * chunks, f, i, w)
    if name == "auto":
        plan = auto(stages, micro_batches, chunks, costs=costs, latency_s=latency_s)
    timeline = simulate(plan, costs, latency_s=latency_s)
    held = ", ".join(f"{live / chunks:g}" for live in check(plan).live)
    return "\n".join(
        [
            f"{name}: {stages} ranks, {micro_batches} micro-batches, chunks a rank: {chunks}; F, I, W take "
            f"{cost[0]:g}, {cost[1]:g}, {cost[2]:g} s a rank, a message {latency_s:g} s",
            grid(timeline),
            f"step {timeline.makespan_s:g} s, bubble {timeline.idle_share():.1%}",
            f"micro-batches held at most, in units of a rank's layers, by rank: {held}",
            f"messages: {check(add_messages(plan, costs)).messages} of one activation",
        ]
    )
