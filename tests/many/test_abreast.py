"""Tasks over one base run breadth-first over tasks: the bits of each alone, and the base over the link once for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.engine.turn_taking import BY_ITSELF, turns_of
from colossal_lite.many.turnstile import Turnstile
from colossal_lite.memory.frozen_records import FrozenRecord
from colossal_lite.memory.frozen_slots import FrozenSlots
from colossal_lite.memory.link import Transfer
from colossal_lite.schedule.abreast import begins
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.zero.stage_weights import StageGather
from tests.memory.test_frozen_records import CASE, alone, assert_same, steps
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world

LORA = [
    replace(CASE, tied=False, adapters=rank, config={**CASE.config, "optimizer": dict(type="adamw", lr=lr)})
    for rank, lr in ((2, 1e-2), (2, 1e-3), (3, 1e-2), (2, 3e-3))
]


class Together:
    """The engines of these cases, in one store."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.store, self.cases = cl.HostStore(parks=False), cases
        self.contexts = [cl.launch(case.full_config, rank=0, world_size=1) for case in cases]
        self.engines = [
            start(case, context, store=self.store, task=str(i))
            for i, (case, context) in enumerate(zip(cases, self.contexts, strict=True))
        ]
        self.order: list[int] = []

    def abreast(self) -> list[Any]:
        """Losses of each."""
        turnstile: Turnstile[list[float]] = Turnstile()

        def turn(number: int) -> None:
            turnstile.turn(number)
            self.order.append(number)

        for number, engine in enumerate(self.engines):
            weights_of(engine).on_turn = partial(turn, number)
        pairs = zip(self.engines, self.cases, strict=True)
        return turnstile.run([lambda e=e, c=c: [*steps(e, c)] for e, c in pairs])  # type: ignore[misc]

    def close(self) -> None:
        for engine, context in zip(self.engines, self.contexts, strict=True):
            engine.close()
            context.__exit__(None, None, None)


def weights_of(engine: Engine) -> StageGather:
    weights = engine._parts.weights
    assert isinstance(weights, StageGather)
    return weights


def up_bytes(engine: Engine) -> int:
    return sum(row.moved_bytes for row in engine.link_report() if row.link == "h2d")


def base_loads(engine: Engine) -> int:
    """Bytes of the base for the fetches of one step of one task."""
    sizes = {chunk.spec.id: chunk.local_shard.nbytes for chunk in engine._parts.built.frozen}
    fetches = (a.chunk for a in weights_of(engine)._actions if a.kind is ActionKind.FETCH)
    return sum(sizes.get(chunk, 0) for chunk in fetches if chunk is not None)


def kept_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes that the fetches of a first and of a later step find, because nothing has come to their place since."""
    weights, found, places = weights_of(engine), [0, 0], dict[int, tuple[int, int]]()
    sizes = {chunk.spec.id: chunk.spec.numel for chunk in engine._parts.built.frozen}
    fetches = [a.chunk or 0 for a in weights._actions if a.kind is ActionKind.FETCH and a.chunk in sizes]
    for step in (0, 1):
        for chunk, begin in zip(fetches, weights._shared_offsets, strict=True):
            stop = begin + sizes[chunk]
            if places.get(chunk) == (begin, stop):
                found[step] += 8 * sizes[chunk]
            places = {c: at for c, at in places.items() if at[1] <= begin or stop <= at[0]}
            places[chunk] = (begin, stop)
    return found[0], found[1]


def run_abreast(env: RankEnv, cases: Sequence[Case]) -> Any:
    made, loaded, taken, take = Together(cases), list[int](), list[int](), FrozenSlots.take

    def counted(
        self: FrozenSlots, record: FrozenRecord, start_bytes: int, copy: Callable[[Tensor], Transfer]
    ) -> tuple[Tensor, Transfer]:
        def begun(slot: Tensor) -> Transfer:
            loaded.append(slot.nbytes)
            return copy(slot)

        taken.append(record.flat.nbytes)
        return take(self, record, start_bytes, begun)

    with patch.object(FrozenSlots, "take", counted):
        losses = made.abreast()
    found = [(each, engine.full_state_dict()) for each, engine in zip(losses, made.engines, strict=True)]
    slots, base = made.store.slots, base_loads(made.engines[0])
    arena = [weights_of(engine)._shared_numel * 8 for engine in made.engines]
    seen = dict(
        kept=kept_bytes(made.engines[0]),
        loaded=sum(loaded), found=sum(taken) - sum(loaded), base=base, arena=slots.bytes, planned=arena,
        order=made.order, up=[up_bytes(engine) for engine in made.engines],
    )  # fmt: skip
    made.close()
    return found, seen


def test_each_task_has_its_bits_and_the_base_is_loaded_once_a_visit_for_all() -> None:
    found, seen = run_world(run_abreast, 1, LORA)[0]
    assert_same(found, run_world(alone, 1, LORA)[0])
    tasks, count = len(LORA), CASE.steps
    assert seen["loaded"] <= count * seen["base"]
    assert seen["loaded"] + seen["found"] == tasks * count * seen["base"]
    assert seen["order"] == [*range(tasks)] * (len(seen["order"]) // tasks), (
        "each turn, one task after the other"
    )
    assert seen["planned"] == [seen["arena"]] * tasks, "the arena of one task serves all"


def by_itself(env: RankEnv, case: Case) -> tuple[int, int]:
    """Bytes up of a step of an engine without a store, and of them those of the base."""
    with cl.launch(case.full_config, rank=0, world_size=1) as context:
        engine = start(case, context)
        [*steps(engine, case)]
        return up_bytes(engine), base_loads(engine)


def test_sixteen_adapters_load_the_base_once_where_one_after_another_loads_it_sixteen_times() -> None:
    """By the counts of the links, of a step."""
    case = replace(LORA[0], steps=2)
    up, base = run_world(by_itself, 1, case)[0]
    _, seen = run_world(run_abreast, 1, [case] * 16)[0]
    own = up - base
    assert seen["up"][1:] == [own] * 15, "of the base nothing"
    first, later = seen["kept"]
    assert [seen["loaded"], seen["up"][0] - own] == [2 * base - first - later, base - later]
    assert 16 * (seen["up"][0] - own) <= 16 * base and 0 < first < later < base


def like(case: Case, stages: int, parts: int, optimizer: dict[str, Any], **more: Any) -> Case:
    """The case with other stages, micro-batches and optimizer, without a base."""
    pipeline = {**case.pipeline, "stages_per_rank": stages, "micro_batches": parts}
    config = {**case.config, "optimizer": optimizer, **more.pop("config", {})}
    return replace(case, adapters=0, pipeline=pipeline, config=config, **more)


APART = [
    like(CASE, 4, 2, dict(type="adamw", lr=1e-2), dropout=0.1),
    like(CASE, 2, 4, dict(type="sgd", lr=1e-2, momentum=0.9), family="llama", layers=3),
    like(
        CASE,
        3,
        1,
        dict(type="lion", lr=1e-3),
        dropout=0.2,
        tied=False,
        config=dict(seed=11, clip_grad_norm=1.0),
    ),
]


def run_apart(env: RankEnv, cases: Sequence[Case]) -> Any:
    made = Together(cases)
    losses = made.abreast()
    found = [(each, engine.full_state_dict()) for each, engine in zip(losses, made.engines, strict=True)]
    kinds = [turns_of(engine) for engine in made.engines]
    made.close()
    return found, made.order, kinds


def test_tasks_without_a_common_base_take_turns_stage_by_stage_with_their_own_bits() -> None:
    found, order, kinds = run_world(run_apart, 1, APART)[0]
    assert_same(found, run_world(alone, 1, APART)[0])
    assert kinds == [BY_ITSELF] * 3
    shortest = min(map(order.count, range(3)))
    assert order[: 3 * shortest] == [0, 1, 2] * shortest and {*order} == {0, 1, 2}


def test_a_turn_begins_with_each_group_of_fetches_and_gathers() -> None:
    words = "0FETCH#0 0UNSHARD#0 0F0 0RESHARD#0 1FETCH#1 1UNSHARD#1 1F0 1B0 1RESHARD#1"
    actions = [Action.parse(word) for word in words.split()]
    assert [*begins(actions)] == [True, False, False, True, False, False]


# ---- what goes wrong ----


def raises_in(env: RankEnv, cases: Sequence[Case]) -> Any:
    """One task raises in the middle of a step, and the others go on."""
    made = Together(cases)
    engine = made.engines[1]
    weights = weights_of(engine)
    plain, calls = weights.arrive, 0

    def arrive(stage: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 15:
            made.contexts[1].__exit__(ValueError, ValueError("no more"), None)
            raise ValueError("no more")
        plain(stage)

    weights.arrive = arrive  # type: ignore[method-assign]
    losses = made.abreast()
    others = [0, 2, 3]
    found = [(losses[i], made.engines[i].full_state_dict()) for i in others]
    for i in others:
        made.contexts[i].__exit__(None, None, None)
    return str(losses[1]), found


def test_a_task_that_raises_leaves_the_others_as_they_are() -> None:
    told, found = run_world(raises_in, 1, LORA)[0]
    assert told == "no more"
    assert_same(found, run_world(alone, 1, [LORA[i] for i in (0, 2, 3)])[0])


def steps_at_once(env: RankEnv, cases: Sequence[Case]) -> str:
    """Two engines that take no turns by a plan: one begins its step in the middle of the other's."""
    made = Together(cases)
    weights = weights_of(made.engines[0])
    inner = steps(made.engines[1], cases[1])
    turns_made = 0

    def turn() -> None:
        nonlocal turns_made
        turns_made += 1
        if turns_made == 2:
            next(inner)

    weights.on_turn = turn
    with pytest.raises(RuntimeError) as error:
        next(steps(made.engines[0], cases[0]))
    for context in made.contexts:
        context.__exit__(RuntimeError, error.value, None)
    return str(error.value)


def test_a_step_within_another_reads_no_wrong_bytes() -> None:
    cases = [replace(case, config={**case.config, "zero": dict(stage=3, prefetch=1)}) for case in LORA[:2]]
    assert (
        "frozen weights: another engine reads the place of a chunk" in run_world(steps_at_once, 1, cases)[0]
    )


def test_turns_are_taken_in_the_order_of_numbers_and_one_that_ends_is_left_out() -> None:
    turnstile: Turnstile[int] = Turnstile()
    seen: list[int] = []

    def work(number: int, count: int) -> int:
        for _ in range(count):
            turnstile.turn(number)
            seen.append(number)
        if number == 1:
            raise ValueError("ends")
        return number

    begun_s = time.monotonic()
    found = turnstile.run([partial(work, 0, 3), partial(work, 1, 1), partial(work, 2, 2)])
    assert 0 < sum(turnstile.ran_s) <= time.monotonic() - begun_s and all(turnstile.ran_s)
    assert seen == [0, 1, 2, 0, 2, 0]
    assert found[0] == 0 and isinstance(found[1], ValueError) and found[2] == 2
    turnstile.turn(5)  # of no thread: nothing
    assert torch.is_grad_enabled()
