"""Sharded weights beside a pipeline are the serial run, gathered where the list says, in the bytes that are planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import colossal_lite as cl
from colossal_lite.memory.chunk import Chunk
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.gather_plan import FROM_NEAR
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.plan import Action, ActionKind, Plan, PlanError, Shape
from colossal_lite.schedule.simulator import StageCosts, simulate
from colossal_lite.schedule.stage_gathers import GatherSlots, StageWeights, add_gathers, gather_slots
from colossal_lite.schedule.step_passes import add_messages, add_step
from colossal_lite.zero import stage_weights
from colossal_lite.zero.stage_weights import StageGather
from tests.planner.test_planner import assert_predicted
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.held_at_once import held_at_once
from tests.shared.parity import (
    Case,
    Step,
    assert_no_further,
    assert_parity,
    compare,
    parallel_run,
    serial_run,
    start,
)
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import assert_same_state, loads, saves

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-v": 2, "auto": 2}
"""With the stages on a rank that each is tried with."""
ZERO: dict[str, dict[str, Any]] = {
    "dropped": dict(prefetch=0),
    "ahead": dict(),
    "kept": dict(reshard_after_forward=False),
    "ordered": dict(prefetch=0, sum_order="ordered"),
    "copies": dict(prefetch=0, shard_size=1),
}
FACTORS: dict[str, list[Any]] = dict(
    schedule=list(SCHEDULES),
    zero=list(ZERO),
    over=["data", "tensor"],
    tied=[True, False],
    recompute=["none", "full", "selective"],
    accumulation=[1, 2],
    memory=["device", "host"],
    frozen=[False, True],
    dropout=[0.0, 0.2],
    size=[2],
)


def case_of(row: Choice) -> Case:
    """Four ranks: weights are sharded over two of data, or the norms over two of tensor."""
    stages = row["size"] * SCHEDULES[row["schedule"]]
    over = dict(tensor=2) if row["over"] == "tensor" else dict()
    pipeline = dict(
        size=row["size"],
        schedule=row["schedule"],
        stages_per_rank=SCHEDULES[row["schedule"]],
        micro_batches=3,
    )
    placed = dict(memory=dict(placement="host")) if row["memory"] == "host" else dict()
    return Case(
        family="llama" if row["frozen"] else "gpt2", tied=row["tied"], dropout=row["dropout"], layers=stages,
        world_size=2 * row["size"], tokens=6, steps=2, ragged=True, global_batch=7 * row["accumulation"],
        pipeline=pipeline, chunk_bytes=4096, frozen=("blocks.0.norm1.weight", "token.weight") * row["frozen"],
        config=dict(
            clip_grad_norm=0.05, zero=dict(stage=3) | ZERO[row["zero"]], gradient_accumulation=row["accumulation"],
            activation_checkpoint=row["recompute"],
        ) | placed,
        **over,
    )  # fmt: skip


@pytest.mark.parametrize("row", covering_array(FACTORS, together=1), ids=name_of)
def test_every_gradient_is_the_serial_one(row: Choice) -> None:
    assert_parity(case_of(row))


@pytest.mark.campaign
@pytest.mark.parametrize("row", covering_array(FACTORS | dict(size=[2, 4])), ids=name_of)
def test_every_gradient_is_the_serial_one_for_each_two_choices(row: Choice) -> None:
    assert_parity(case_of(row))


PAIR = Case(
    world_size=4, layers=4, tokens=6, steps=2, ragged=True, global_batch=8, chunk_bytes=4096,
    pipeline=dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=2),
    config=dict(clip_grad_norm=0.05, zero=dict(stage=3, prefetch=0)),
)  # fmt: skip
DEEP = {
    "copies over two of four ranks": replace(
        PAIR, world_size=8, config=PAIR.config | dict(zero=dict(stage=3, prefetch=0, shard_size=2))
    ),
    "kept by two of four neighbours": replace(
        PAIR, world_size=8, config=PAIR.config | dict(zero=dict(stage=3, prefetch=0, reshard_after_forward=2))
    ),
    "tensor 2 x data 2, fewer samples than ranks": replace(
        PAIR, world_size=8, tensor=2, global_batch=3, dropout=0.1, config=PAIR.config | dict(clip_grad_norm=None)
    ),
    "2d": replace(PAIR, world_size=8, tensor=4, mode="2d", config=PAIR.config | dict(clip_grad_norm=0.1)),
    "ring": replace(PAIR, sequence=2, tokens=8),
    "adapters": replace(PAIR, adapters=2),
    "Llama of Hugging Face": replace(
        PAIR, family="hf-llama", build="module", tied=False, layers=2, tokens=12,
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["kept by two of four neighbours", "adapters"])
def test_every_gradient_is_the_serial_one_in_less_common_runs(name: str) -> None:
    assert_parity(DEEP[name])


@pytest.mark.campaign
@pytest.mark.parametrize("name", DEEP)
def test_every_gradient_is_the_serial_one_in_all_less_common_runs(name: str) -> None:
    assert_parity(DEEP[name])


@pytest.mark.campaign
def test_sixteen_bits_are_no_further_from_the_truth_than_a_plain_loop() -> None:
    assert_no_further(PAIR, config=dict(PAIR.config) | dict(precision="bf16"))


# ---- saved views ----


def elsewhere(original: Callable[..., GatherSlots], actions: Sequence[Action], *args: Any) -> GatherSlots:
    """Slots of which each second gather of a chunk is in other bytes than the first."""
    slots, seen, offsets = original(actions, *args), Counter[int | None](), list[int]()
    gathers = [action.chunk for action in actions if action.kind is ActionKind.UNSHARD]
    for chunk, offset in zip(gathers, slots.offsets, strict=True):
        offsets.append(offset + slots.arena_numel * (seen[chunk] % 2))
        seen[chunk] += 1
    assert max(seen.values()) > 1
    return replace(slots, offsets=tuple(offsets), arena_numel=2 * slots.arena_numel)


def moving(env: RankEnv, case: Case) -> list[Step]:
    """Every other gather lies elsewhere, and weights that are dropped are gone."""
    drop, slots = Chunk.reshard, stage_weights.gather_slots

    def spoil(chunk: Chunk) -> None:
        chunk.full_weight.fill_(math.nan)
        drop(chunk)

    with (
        patch.object(Chunk, "reshard", spoil),
        patch.object(stage_weights, "gather_slots", partial(elsewhere, slots)),
    ):
        return parallel_run(env, case)


def test_a_saved_view_is_right_though_weights_move_between_forward_and_backward() -> None:
    pipeline = dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=2)
    case = replace(PAIR, pipeline=pipeline, chunk_bytes=None, tied=False, steps=1)
    truth = serial_run(case)
    for rank, steps in enumerate(run_world(moving, case.world_size, case)):
        compare(case, truth, steps, rank)


# ---- what a run does ----


def looked_at(env: RankEnv, case: Case) -> dict[str, Any]:
    with env.launch(case.full_config) as context, held_at_once() as held_numel:
        engine = start(case, context)
        batch = tuple(part[context.local_batch(case.global_batch)] for part in case.batch(0))
        for _ in range(2):
            engine.train_step(batch)
        weights = engine._weights
        assert isinstance(weights, StageGather)
        rows = {(r.operation, r.axis): (r.calls, r.payload_bytes) for r in engine.ledger.rows()}
        listed = [str(a) for a in engine._runtime.plan[engine._runtime.comm.coord]]  # type: ignore[index]
        memory = {row.kind: (row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()}
        held = held_numel[weights], weights.slots.live_numel
        numels = {c.spec.id: (c.spec.numel, c.types.compute.itemsize) for c in engine._chunks}
        evaluated = float(engine.eval_step(batch))
        with pytest.raises(
            ValueError, match=r"zero.stage=3, .*legal: a callback that reads engine.full_state_dict"
        ):
            engine.on_step(lambda result: None, reads_weights=True)
        state = engine.full_state_dict()
        engine.close()
        whole = {n: float((p - state[n]).abs().max()) for n, p in engine.model.named_parameters()}
        return dict(
            rows=rows, listed=listed, ran=[str(span.action) for span in engine._runtime.spans], memory=memory,
            held=held, numels=numels, evaluated=evaluated, off=max(whole.values()),
        )  # fmt: skip


@pytest.mark.parametrize("schedule", ["bfs", "zb-v"])
def test_a_run_gathers_what_its_list_says_in_the_bytes_that_are_planned(schedule: str) -> None:
    """And it is whole again when the engine is closed."""
    pipeline = dict(size=2, schedule=schedule, stages_per_rank=2, micro_batches=4)
    case = replace(
        PAIR, pipeline=pipeline, tied=schedule == "zb-v", config=dict(zero=dict(stage=3, prefetch=0))
    )
    ranks = run_world(looked_at, 4, case)
    assert len({seen["evaluated"] for seen in ranks}) == 1
    for seen in ranks:
        done = [Action.parse(word) for word in seen["listed"]]
        gathers = Counter(a.chunk for a in done if a.kind is ActionKind.UNSHARD)
        if schedule == "bfs":
            assert set(gathers.values()) == {1, 2}, "a visit forward and one backward, the turn only once"
        moved = sum(
            times * seen["numels"][chunk][0] * seen["numels"][chunk][1] for chunk, times in gathers.items()
        )
        calls, payload = seen["rows"]["all_gather", "data"]
        assert (calls - 1, payload - 2 * 8) == (gathers.total(), moved), "and two batch sizes"
        assert seen["held"][0] == seen["held"][1]
        assert all(peak == forecast for peak, forecast in seen["memory"].values())
        assert seen["memory"]["gathered"][0] > 0 and seen["off"] == 0.0


PREDICTED = {
    "bfs, frozen, accumulation": replace(
        PAIR, frozen=("blocks.0.norm1.weight", "blocks.3.mlp.up.weight"),
        pipeline=dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=2),
        config=dict(zero=dict(stage=3, prefetch=0), gradient_accumulation=2, precision="bf16"),
    ),
    "kept by neighbours": replace(DEEP["kept by two of four neighbours"], tied=False),
    "1d": replace(PAIR, tensor=2, config=dict(zero=dict(stage=3))),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTED)
def test_bytes_and_state_of_each_rank_are_those_of_its_plan(name: str) -> None:
    assert_predicted(PREDICTED[name])


@pytest.mark.parametrize(("here", "there"), [("piped", "alone"), ("alone", "piped")])
def test_a_checkpoint_is_the_same_elsewhere(here: str, there: str, tmp_path: Path) -> None:
    adamw = dict(optimizer=dict(type="adamw", lr=1e-2), precision="bf16")
    cases = {
        "piped": replace(PAIR, config=adamw | dict(zero=dict(stage=3))),
        "alone": replace(PAIR, world_size=1, pipeline=1, config=adamw),
    }
    saved = run_world(saves, cases[here].world_size, cases[here], str(tmp_path))[0]
    for loaded in run_world(loads, cases[there].world_size, cases[there], str(tmp_path)):
        assert_same_state(loaded, saved)


# ---- plans ----


def gathered(
    name: str, micro_batches: int, stages_per_rank: int | None, **how: Any
) -> tuple[Plan, StageWeights]:
    """A step on four ranks: two chunks a stage, and one that the first and the last stage share."""
    plan = add_messages(generate(name, 4, micro_batches, stages_per_rank))
    stages = len(plan.placement())
    chunks = [(2 * stage, 2 * stage + 1) for stage in range(stages)]
    chunks[-1] = (*chunks[-1], 0)  # type: ignore[assignment]
    weights = StageWeights(tuple(chunks), **how)
    return add_step(add_gathers(plan, weights), dict(enumerate(chunks)), "micro_batch"), weights


PLANS = [(name, m, v) for name, v in zip(SCHEDULES, cycle([None])) if name != "auto" for m in (1, 5)]


@pytest.mark.parametrize(("name", "micro_batches", "stages_per_rank"), PLANS)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_a_list_holds_is_what_its_slots_are(
    name: str, micro_batches: int, stages_per_rank: int | None, prefetch: int
) -> None:
    plan, weights = gathered(name, micro_batches, stages_per_rank, prefetch=prefetch)
    stages = len(weights.chunks)
    numels = {chunk: 7 + 3 * chunk for chunk in range(2 * stages)}
    found = check(plan, shapes={0: Shape(stages, micro_batches)}, memory=weights.memory(numels))
    for rank, actions in enumerate(plan):
        slots = gather_slots(actions, numels)
        assert slots.live_numel == found.bytes[rank]["device"] <= slots.arena_numel
        held = Counter[int]()
        for action in actions:
            held[action.stage or 0] += {ActionKind.UNSHARD: 1, ActionKind.RESHARD: -1}.get(action.kind, 0)
        assert held.total() == 0


def test_a_compute_action_waits_for_the_weights_of_its_stage() -> None:
    plan, weights = gathered("1f1b", 2, None, prefetch=0)
    stages = len(weights.chunks)
    fast = StageCosts.uniform(stages)
    slow = replace(fast, other_s=((ActionKind.UNSHARD, 5.0),))
    late = simulate(plan, slow, memory=weights.memory()).makespan_s - simulate(plan, fast).makespan_s
    assert late == 12.0, "the last stage gathers three chunks in 15 s, and would have begun after 3"


def test_weights_that_are_not_gathered_are_refused_before_they_are_read() -> None:
    plan, weights = gathered("bfs", 3, 2, prefetch=0)
    stages = len(weights.chunks)
    tied = next(i for i, a in enumerate(plan[3]) if a.kind is ActionKind.UNSHARD and a.chunk == 0)
    without = Plan(
        (*plan.ranks[:3], tuple(a for a in plan[3] if a.chunk != 0 or a.kind is ActionKind.REDUCE))
    )
    assert plan[3][tied].stage == stages - 1
    with pytest.raises(PlanError, match="chunk 0 is not gathered"):
        check(without, shapes={0: Shape(stages, 3)}, memory=weights.memory())


def test_gathers_are_fewest_breadth_first() -> None:
    def gathers(name: str, v: int | None = None) -> int:
        plan = add_gathers(
            generate(name, 4, 16, v), StageWeights(tuple((s,) for s in range(4 * (v or 1))), prefetch=0)
        )
        return max(sum(a.kind is ActionKind.UNSHARD for a in mine) for mine in plan)

    assert gathers("1f1b") == gathers("gpipe") == 1
    assert [gathers("bfs", v) for v in (2, 3, 4)] == [3, 5, 7]
    assert gathers("interleaved", 2) > 16


def test_neighbours_give_what_they_have_kept_and_no_more() -> None:
    plan, _ = gathered("bfs", 3, 2, prefetch=0, near=frozenset(range(0, 16, 2)))
    for actions in plan:
        seen: set[int | None] = set()
        for action in actions:
            if action.kind is ActionKind.UNSHARD:
                again = action.chunk in seen and (action.chunk or 0) % 2 == 0
                assert (action.resource == FROM_NEAR) is again
                seen.add(action.chunk)
    numels = dict.fromkeys(range(16), 64)
    slots = gather_slots(plan[0], numels, dict.fromkeys(range(0, 16, 2), 16))
    assert set(slots.kept) == {a.chunk for a in plan[0] if a.resource == FROM_NEAR}
    assert slots.arena_numel == gather_slots(plan[0], numels).arena_numel + 16 * len(slots.kept)


def test_the_model_itself_gives_no_state_while_its_weights_are_sharded() -> None:
    run_world(state_asked_for, 4, PAIR)


def state_asked_for(env: RankEnv, case: Case) -> None:
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        with pytest.raises(ValueError, match="use engine.full_state_dict"):
            engine.model.state_dict()
