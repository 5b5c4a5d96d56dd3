"""Model state beside a pipeline rests where shares and budgets say, and the run is the serial one, in planned bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from colossal_lite.config.config import ConfigError
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.offload.placement import place
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.plan import Action, ActionKind, Plan, PlanError, Shape
from colossal_lite.schedule.stage_gathers import StageWeights, add_gathers
from tests.pipeline.test_stage_gathers import SCHEDULES
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.parity import Case, assert_parity, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import on_tier, placement_of

SHARES = dict(weights=0.5, gradients=0.5, optimizer=0.5)
MEMORY: dict[str, dict[str, Any]] = {
    "half": dict(placement="static", host_fraction=SHARES),
    "half, updated on the host": dict(placement="static", host_fraction=SHARES, update_on="host"),
    "all": dict(placement="static", host_fraction=dict.fromkeys(SHARES, 1.0)),
    "all, updated on the host": dict(
        placement="static", host_fraction=dict.fromkeys(SHARES, 1.0), update_on="host"
    ),
    "under a host budget": dict(placement="host", host_budget="1GiB"),
    "under both budgets": dict(placement="auto", device_budget="1MB", host_budget="1GiB"),
}
FACTORS: dict[str, list[Any]] = dict(
    schedule=list(SCHEDULES),
    memory=list(MEMORY),
    stage=[1, 2, 3],
    prefetch=[0, 1],
    over=["data", "tensor"],
    tied=[True, False],
    recompute=["none", "full"],
    accumulation=[1, 2],
    frozen=[False, True],
    optimizer=["sgd", "adamw"],
    sum_order=["fast", "ordered"],
)


def case_of(row: Choice) -> Case:
    stages = 2 * SCHEDULES[row["schedule"]]
    zero = dict(stage=row["stage"], sum_order=row["sum_order"])
    zero |= dict(prefetch=row["prefetch"]) if row["stage"] == 3 else {}
    optimizer = dict(optimizer=dict(type="adamw", lr=0.01)) if row["optimizer"] == "adamw" else {}
    return Case(
        family="llama" if row["frozen"] else "gpt2", tied=row["tied"], layers=stages, world_size=4, tokens=6,
        steps=3, ragged=True, global_batch=7 * row["accumulation"], chunk_bytes=4096,
        pipeline=dict(
            size=2, schedule=row["schedule"], stages_per_rank=SCHEDULES[row["schedule"]], micro_batches=3
        ),
        frozen=("blocks.0.norm1.weight", "token.weight") * row["frozen"],
        tensor=2 if row["over"] == "tensor" else 1,
        config=dict(
            clip_grad_norm=0.05, zero=zero, gradient_accumulation=row["accumulation"], memory=MEMORY[row["memory"]],
            activation_checkpoint=row["recompute"],
        ) | optimizer,
    )  # fmt: skip


@pytest.mark.parametrize("row", covering_array(FACTORS, together=1), ids=name_of)
def test_every_gradient_is_the_serial_one(row: Choice) -> None:
    assert_parity(case_of(row))


@pytest.mark.campaign
@pytest.mark.parametrize("row", covering_array(FACTORS), ids=name_of)
def test_every_gradient_is_the_serial_one_for_each_two_choices(row: Choice) -> None:
    assert_parity(case_of(row))


@pytest.mark.parametrize("memory", ["all", "all, updated on the host", "under both budgets"])
def test_a_stage_that_is_frozen_whole_settles_beside_others(memory: str) -> None:
    case = Case(
        tied=False, frozen=("token.weight", "position.weight"), global_batch=4, steps=3,
        pipeline=dict(size=2, micro_batches=2, partition=(1, 5)),
        config=dict(zero=dict(stage=1), memory=MEMORY[memory]),
    )  # fmt: skip
    assert_parity(case)


# ---- what a run does ----


def looked_at(env: RankEnv, case: Case) -> dict[str, Any]:
    """Three steps: the most that any held on the device beside what `memory_report` tells, and what was moved."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        most = 0
        for number in range(case.steps):
            batch = tuple(part[cut] for part in case.batch(number))
            before = on_tier(engine, "cpu") if number else 0
            with LiveBytes() as meter:
                engine.forward_backward(batch)
            most = max(most, before + meter.peak_bytes) if number else 0
            with LiveBytes() as meter:
                engine.step()
            most = max(most, on_tier(engine, "cpu") + meter.peak_bytes)
        rows, moved = engine.memory_report(), {row.link: row.moved_bytes for row in engine.link_report()}
        placed = placement_of(engine)
        return dict(
            rows=[row for row in rows if not row.now_bytes == row.peak_bytes == row.forecast_bytes],
            fetched=[a for a in engine._runtime.plan[engine._runtime.comm.coord] if a.kind is ActionKind.FETCH],
            held=on_tier(engine, "cpu"), on_host=on_tier(engine, "host"), most=most, placed=placed, moved=moved,
            budgets=[place(placed.pieces, dict(placed.fixed), at, placed.beside).device_bytes for at in (1, 2**40)],
        )  # fmt: skip


PAIR = Case(
    world_size=4, layers=4, tokens=6, steps=3, ragged=True, global_batch=8, chunk_bytes=4096,
    pipeline=dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=4),
    config=dict(clip_grad_norm=0.05, optimizer=dict(type="adamw", lr=0.01), zero=dict(stage=3)),
)  # fmt: skip


def placed_by(memory: dict[str, Any], case: Case = PAIR) -> list[dict[str, Any]]:
    return run_world(
        looked_at, case.world_size, replace(case, config=dict(case.config) | dict(memory=memory))
    )


def assert_as_planned(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        placed, fixed = seen["placed"], dict(seen["placed"].fixed)
        assert seen["rows"] == []
        assert seen["held"] == placed.device_bytes - fixed["activations"]
        assert seen["on_host"] == placed.host_bytes
        assert (seen["moved"]["h2d"], seen["moved"]["d2h"]) == (placed.up_bytes, placed.down_bytes)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_bytes_on_each_tier_and_over_the_link_are_those_of_the_placement(
    update_on: str, precision: str
) -> None:
    memory = dict(placement="static", host_fraction=dict(SHARES, weights=0.7), update_on=update_on)
    case = replace(PAIR, config=dict(PAIR.config) | dict(precision=precision))
    ranks = placed_by(memory, case)
    assert_as_planned(ranks)
    for seen in ranks:
        fetches = sum(
            seen["placed"].tier_of(p.name) == "host"
            for p in seen["placed"].pieces
            if p.name.kind == "weights"
        )
        assert fetches and {a.chunk for a in seen["fetched"]}


@pytest.mark.parametrize("update_on", ["host", dict(every=2)])
def test_so_they_are_without_stages_where_some_updates_are_on_the_host(update_on: Any) -> None:
    memory = dict(placement="static", host_fraction=dict(SHARES, weights=0.7), update_on=update_on)
    case = replace(PAIR, world_size=1, pipeline=1, config=dict(PAIR.config) | dict(precision="bf16"))
    assert_as_planned(placed_by(memory, case))


def test_no_step_holds_more_than_a_budget_that_is_close() -> None:
    free = placed_by(dict(placement="auto", device_budget=2**40))
    least, whole = (max(seen["budgets"][i] for seen in free) for i in (0, 1))
    budget = least + (whole - least) // 4
    ranks = placed_by(dict(placement="auto", device_budget=budget))
    assert_as_planned(ranks)
    assert all(seen["most"] <= budget for seen in ranks)
    assert any(seen["placed"].on_host for seen in ranks)


def refused(env: RankEnv, case: Case) -> str:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        batch = tuple(part[context.local_batch(case.global_batch)] for part in case.batch(0))
        with pytest.raises(ConfigError) as error:
            engine.train_step(batch)
        return str(error.value)


def test_a_budget_that_one_stage_does_not_keep_is_refused_on_every_rank() -> None:
    free = placed_by(dict(placement="auto", device_budget=2**40))
    needs = sorted({seen["budgets"][0] for seen in free})
    assert len(needs) == 2, "the stages differ"
    memory = dict(placement="auto", device_budget=needs[1] - 1)
    told = run_world(refused, PAIR.world_size, replace(PAIR, config=dict(PAIR.config) | dict(memory=memory)))
    assert len(set(told)) == 1 and "memory.device_budget" in told[0]


# ---- plans ----


def test_a_gather_without_the_fetch_of_its_shard_is_refused() -> None:
    plan = generate("bfs", 2, 3, 2)
    weights = StageWeights(tuple((stage,) for stage in range(4)), on_host=frozenset({(0, 2), (1, 1)}))
    made = add_gathers(plan, weights)
    sizes = dict.fromkeys(range(4), 8)
    check(made, shapes={0: Shape(4, 3)}, memory=weights.memory(sizes))
    fetches = [action for actions in made for action in actions if action.kind is ActionKind.FETCH]
    assert {action.chunk for action in fetches} == {1, 2}
    without = Plan(tuple(tuple(a for a in actions if a is not fetches[0]) for actions in made))
    with pytest.raises(PlanError, match="the shard of chunk 2 is on the host"):
        check(without, shapes={0: Shape(4, 3)}, memory=weights.memory(sizes))
    twice = Plan((made[0] + (Action(ActionKind.FETCH, stage=2, chunk=2),), made[1]))
    with pytest.raises(PlanError, match="chunk 2 is fetched for a gather that never comes"):
        check(twice, shapes={0: Shape(4, 3)}, memory=weights.memory(sizes))
