"""Adds messages, reductions and updates to a plan of compute, and cuts plans to the needed actions.

Passes: `add_messages` adds SEND and RECV, `add_step` REDUCE, TIED_REDUCE and UPDATE; schedule/stage_gathers.py adds
the gathers of ZeRO-3.  `freeze` and `repeat` cut a plan to frozen stages and repeat it for accumulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Literal

from colossal_lite.schedule.checker import Reading
from colossal_lite.schedule.pipeline_schedules import one_forward_one_backward
from colossal_lite.schedule.plan import COMPUTE_KINDS, SENDS, Action, ActionKind, Plan, Shape
from colossal_lite.schedule.simulator import simulate


def one_stage(micro_batches: int) -> Plan:
    """The serial step: F0 B0 F1 B1 ..., which holds the activations of one micro-batch."""
    return one_forward_one_backward(1, micro_batches)


# Passes -------------------------------------------------------------------------------------------


def add_messages(
    plan: Plan,
    seconds: Callable[[Action], float] | None = None,
    ahead: bool = True,
    reading: Reading | None = None,
) -> Plan:
    """Adds SEND after what makes a message and RECV where it arrives, to a plan that has no messages.

    A simulation decides where, by `seconds` of each compute action (by default 1 for F, I and W). RECV stands before
    the compute that runs while the message is sent, so that the transfer hides under it. Without `ahead` it stands
    after that compute, and then the plan runs even if RECVs block. `reading`: of the plan, if there is one. Raises
    PlanError if the plan cannot run.
    """
    reading = reading or Reading(plan)
    cost = seconds or _unit_seconds
    # A stage of a table alone costs nothing. It would send when its input arrives, and give no order.
    least_s = 1e-6 * max((cost(a) for actions in plan for a in actions), default=0.0) or 1.0

    def positive_s(action: Action) -> float:
        return max(cost(action), least_s) if action.kind in COMPUTE_KINDS else cost(action)

    spans = {(span.rank, span.action): span for span in simulate(reading, positive_s).spans}
    compute = [[i for i, a in enumerate(actions) if a.kind in COMPUTE_KINDS] for actions in plan]
    # When the compute of each rank ends or starts; both ascend.
    times_s = [
        [span.end_s if ahead else span.start_s for span in (spans[rank, plan[rank][i]] for i in places)]
        for rank, places in enumerate(compute)
    ]
    sent_s = {hop: spans[reading.places[hop[0]][0], reading.actions[hop[0]]].end_s for hop in reading.hops}
    after: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    # In the order of sending, the same on both sides: so blocking messages never wait in a ring.
    for source, user in sorted(sent_s, key=lambda hop: (sent_s[hop], hop)):
        (sender, place), (receiver, _), use = (
            reading.places[source],
            reading.places[user],
            reading.actions[user],
        )
        until = compute[receiver][bisect_left(times_s[receiver], sent_s[source, user])]
        kind = ActionKind.RECV_F if use.kind is ActionKind.F else ActionKind.RECV_B
        after[sender, place].append(reading.hops[source, user])
        after[receiver, until - 1].append(use.of_kind(kind))
    return insert(plan, after)


def _unit_seconds(action: Action) -> float:
    return float(action.kind in COMPUTE_KINDS) + (action.kind is ActionKind.B)


def insert(plan: Plan, after: Mapping[tuple[int, int], Sequence[Action]]) -> Plan:
    """Insert actions after position (rank, i) of a plan; i = -1 is before the first."""

    def one(rank: int) -> Iterator[Action]:
        yield from after.get((rank, -1), ())
        for i, action in enumerate(plan[rank]):
            yield action
            yield from after.get((rank, i), ())

    return Plan(tuple(tuple(one(rank)) for rank in range(len(plan))))


def add_step(
    plan: Plan,
    chunks: Mapping[int, tuple[int, ...]] | None = None,
    reduce: Literal["step", "micro_batch", "visit"] = "step",
    update: Literal["step", "backward"] = "step",
) -> Plan:
    """Adds the end of a step: REDUCE of a stage's chunks after its last gradient, or with `micro_batch` after each.
    With `visit` it comes after the last of each run of neighbouring gradients of the stage. UPDATE of every chunk is at
    the end of the list. With update="backward" each UPDATE stands right behind its last REDUCE, in the order of
    gradients.

    chunks: those of each stage (its own number by default); frozen stages have none. A chunk of several stages is
    tied: summed over its ranks by TIED_REDUCE after all compute, and only then reduced, once for each rank.
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
        ends = [(i, a) for i, a in enumerate(actions) if a.kind in (ActionKind.W, ActionKind.B)]
        last = {a.stage: past_sends(actions, i) for i, a in ends if a.stage is not None}
        # Of a chunk's stages on this rank the one that ends last speaks for it.
        speaker: dict[int, int] = {}
        for stage in sorted(last, key=lambda s: last[s]):
            speaker |= dict.fromkeys(chunks.get(stage, ()), stage)
        late: list[Action] = []
        for chunk, stage in sorted(speaker.items(), key=lambda found: len(owners[found[0]]) > 1):
            action = Action(ActionKind.REDUCE, stage=stage, chunk=chunk)
            updated = Action(ActionKind.UPDATE, stage=stage, chunk=chunk)
            if chunk in tied:
                late += [action.of_kind(ActionKind.TIED_REDUCE), action]
            elif reduce == "step" or len(owners[chunk]) > 1:
                after[rank, last[stage]].append(action)
            else:
                for i, a in ends if reduce == "micro_batch" else _last_of_visits(ends):
                    if a.stage == stage:
                        place = rank, past_sends(actions, i)
                        after[place].append(Action(ActionKind.REDUCE, 0, stage, a.micro_batch, chunk=chunk))
            if update == "backward":
                (late if chunk in tied else after[rank, last[stage]]).append(updated)
        late.sort(key=_in_order)
        for number in range(len(actions)):
            after[rank, number].sort(key=_in_order)
        if update == "step":
            late += [Action(ActionKind.UPDATE, stage=speaker[c], chunk=c) for c in sorted(speaker)]
        after[rank, len(actions) - 1] += late
    return insert(plan, after)


def _last_of_visits(ends: Sequence[tuple[int, Action]]) -> list[tuple[int, Action]]:
    """Of W and B with their places, those behind which another stage comes, or none."""
    ended = {i for (i, a), (_, then) in pairwise(ends) if a.stage != then.stage} | {i for i, _ in ends[-1:]}
    return [(i, a) for i, a in ends if i in ended]


def _in_order(action: Action) -> tuple[bool, int, bool]:
    """Orders what stands at one place: TIED_REDUCEs, at which ranks meet, then REDUCE and UPDATE chunk by chunk. From
    the last to the first, as gradients come."""
    is_tied, chunk = action.kind is ActionKind.TIED_REDUCE, action.chunk or 0
    return not is_tied, chunk if is_tied else -chunk, action.kind is ActionKind.UPDATE


def past_sends(actions: Sequence[Action], i: int) -> int:
    """The last of the SENDs that follow position i: a neighbour waits for them."""
    while i + 1 < len(actions) and actions[i + 1].kind in SENDS:
        i += 1
    return i


def freeze(plan: Plan, trainable: Sequence[bool]) -> Plan:
    """Removes the backward that frozen stages do not need: no W, and no I and no messages for it where no stage
    before trains. It comes after `add_messages`, and before `add_step`, which then skips them."""
    shape = Shape(len(trainable), 1, trainable=tuple(trainable))

    def one(action: Action) -> Iterator[Action]:
        stage = action.stage or 0
        deferred = shape.backward_kinds(stage)
        if action.kind is ActionKind.B and len(deferred) == 1:
            yield action.of_kind(ActionKind.I)
        elif action.kind is ActionKind.SEND_B:
            yield from [action] if stage and shape.backward_kinds(stage - 1) else []
        elif action.kind is ActionKind.W:
            yield from [action] if action.kind in deferred else []
        elif deferred or action.kind not in (ActionKind.I, ActionKind.B, ActionKind.RECV_B):
            yield action

    return Plan(tuple(tuple(chain.from_iterable(map(one, actions))) for actions in plan))


def repeat(plan: Plan, times: int) -> Plan:
    """Repeats a plan of m micro-batches `times` times for gradient accumulation, with the next m micro-batches each
    time."""
    if times == 1:
        return plan
    shift = Shape.of(plan, 0).micro_batches

    def one(action: Action, turn: int) -> Action:
        return replace(action, micro_batch=(action.micro_batch or 0) + turn * shift)

    return Plan(tuple(tuple(one(a, turn) for turn in range(times) for a in actions) for actions in plan))
