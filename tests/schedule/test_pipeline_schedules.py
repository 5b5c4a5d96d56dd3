"""Schedules: the clock tables, the formulas beside the generators, the passes, and torch's own lists."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.pipeline.step_plan import StepShape, compute_plan, plans_by_placement, step_plan
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.pipeline_schedules import SCHEDULES, auto, generate, ranks_of
from colossal_lite.schedule.plan import COMPUTE_KINDS, Action, ActionKind, Plan, PlanError, Shape
from colossal_lite.schedule.schedule_drawing import draw
from colossal_lite.schedule.simulator import StageCosts, simulate
from colossal_lite.schedule.stage_gathers import StageWeights, add_gathers
from colossal_lite.schedule.step_passes import add_messages, add_step, freeze, one_stage, repeat

STATIC = [name for name in SCHEDULES if name != "auto"]

# Clock tables -------------------------------------------------------------------------------------


def table(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> list[str]:
    return str(generate(name, ranks, micro_batches, chunks)).split("\n")


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert table("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_starts_its_backwards_as_early_as_it_can() -> None:
    assert table("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_goes_round_by_round() -> None:
    assert table("interleaved", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_breadth_first_finishes_a_chunk_before_the_next() -> None:
    assert table("bfs", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


def test_zb_h1_lets_w_lag_by_the_rank() -> None:
    assert table("zb-h1", 3, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_v_starts_and_ends_on_rank_0() -> None:
    assert table("zb-v", 2, 3) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


# Formulas -----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule, ranks, micro-batches and chunks: 8 stages or more on few ranks are covered by the
    chunks."""
    name = draw(st.sampled_from(STATIC))
    least, most = SCHEDULES[name].stages_per_rank
    chunks = draw(st.integers(least, min(4, most or 4)))
    return name, draw(st.integers(1, 8)), draw(st.integers(1, 24)), chunks


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from([(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.0, 1.0), (1.0, 1.25, 1.25)]))
def test_every_schedule_meets_its_formulas(
    case: tuple[str, int, int, int], cost: tuple[float, float, float]
) -> None:
    name, p, m, v = case
    schedule, plan = SCHEDULES[name], generate(name, p, m, v)
    footprint = check(plan, shapes={0: Shape(p * v, m)})
    assert schedule.idle_s and schedule.live and schedule.crossings
    assert footprint.live == tuple(round(v * schedule.live(p, r, m, v), 9) for r in range(p))
    timeline = simulate(plan, StageCosts.uniform(p * v, *(seconds / v for seconds in cost)))
    if name != "zb-v" or m >= 2 * p - 1:
        assert timeline.idle_s() == pytest.approx([schedule.idle_s(p, m, v, *cost)] * p, abs=1e-6)
    else:
        assert max(timeline.idle_s()) >= schedule.idle_s(p, m, v, *cost) - 1e-6


@settings(max_examples=60, deadline=None)
@given(cases())
def test_messages_are_two_for_each_crossing_and_cannot_block(case: tuple[str, int, int, int]) -> None:
    name, p, m, v = case
    plan = generate(name, p, m, v)
    crossings = SCHEDULES[name].crossings
    assert crossings
    want = 2 * m * crossings(p, v) if p > 1 else 0
    assert check(add_messages(plan, ahead=False), strict=True).messages == want
    assert check(add_messages(plan, ahead=True)).messages == want


@pytest.mark.parametrize("free", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", STATIC)
def test_messages_cannot_block_where_a_stage_costs_nothing(name: str, free: tuple[int, ...]) -> None:
    chunks = 2 if name in ("interleaved", "bfs", "zb-v") else 1
    seconds = tuple(float(stage not in free) for stage in range(2 * chunks))
    plan = generate(name, 2, 4, chunks)
    costs = StageCosts(seconds, seconds, seconds)
    check(add_messages(plan, costs, ahead=False), strict=True)
    check(add_messages(plan, costs, ahead=True))


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan_s"),
    [
        ("gpipe", 4, 8, 33),
        ("1f1b", 4, 8, 33),
        ("interleaved", 4, 8, 28.5),
        ("zb-h1", 4, 8, 27),
        ("zb-v", 4, 8, 25.5),
    ]
    + [("1f1b", 8, 32, 117), ("interleaved", 8, 32, 106.5), ("zb-h1", 8, 32, 103), ("zb-v", 8, 32, 99.5)],
)
def test_published_makespans(name: str, p: int, m: int, makespan_s: float) -> None:
    plan = generate(name, p, m)
    chunks = len(plan.placement()) // p
    assert simulate(plan, StageCosts.uniform(p * chunks, *(1 / chunks,) * 3)).makespan_s == pytest.approx(
        makespan_s
    )


def test_1f1b_holds_at_most_num_stages_activations() -> None:
    assert check(generate("1f1b", 5, 20)).live == (5, 4, 3, 2, 1)


def test_1f1b_loses_more_to_latency_than_gpipe() -> None:
    costs = StageCosts.uniform(4)
    slower = [simulate(generate(n, 4, 16), costs, latency_s=0.3).makespan_s for n in ("gpipe", "1f1b")]
    assert slower[0] < slower[1]


# Against torch ------------------------------------------------------------------------------------


def from_torch(kind: str, p: int, m: int, v: int) -> Plan:
    """The compute of one of torch's schedule classes, without the process groups that their constructors
    need."""
    cls = getattr(torch_schedules, kind)
    me = SimpleNamespace(
        pp_group_size=p,
        num_stages=p * v,
        _num_stages=p * v,
        _n_microbatches=m,
        n_local_stages=v,
        _stages=[None] * v,
    )
    me.microbatches_per_round = m // max(1, m // p)
    if hasattr(cls, "_calculate_single_rank_operations"):
        rows = [cls._calculate_single_rank_operations(me, rank) for rank in range(p)]
    elif hasattr(cls, "_get_pipeline_order"):
        rows = list(cls._get_pipeline_order(me).values())
    else:
        pytest.skip(f"this torch has no list for {kind}")
    # REDUCE_GRAD is communication of torch; the lists of a compute plan do not have it.
    words = ([str(a) for a in row if a is not None and "REDUCE_GRAD" not in str(a)] for row in rows)
    return Plan(tuple(tuple(map(Action.parse, row)) for row in words)).only(*COMPUTE_KINDS)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 2), (4, 8), (4, 3), (5, 15)])
def test_the_lists_are_torchs_where_torchs_are_right(p: int, m: int) -> None:
    assert from_torch("ScheduleGPipe", p, m, 1) == generate("gpipe", p, m)
    assert from_torch("ScheduleZBVZeroBubble", p, m, 2) == generate("zb-v", p, m)
    for v in (2, 3):
        assert from_torch("ScheduleInterleaved1F1B", p, m, v) == generate("interleaved", p, m, v)
        # Torch's breadth first runs the backwards of a chunk from the last micro-batch: other sums.
        assert from_torch("ScheduleLoopedBFS", p, m, v).only(ActionKind.F) == generate("bfs", p, m, v).only(
            ActionKind.F
        )


def test_torchs_1f1b_list_is_refused() -> None:
    with pytest.raises(PlanError, match="1F0 is never done|out of order|never done"):
        check(from_torch("Schedule1F1B", 2, 4, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_validator_accepts_ours(name: str) -> None:
    plan = generate(name, 4, 6)
    rows = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(plan)
    }
    placement = torch_schedules._validate_schedule(rows, 4, len(plan.placement()), 6)
    assert placement == plan.placement()


# auto ---------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_auto_is_no_slower_than_any_schedule_within_its_cap(data: st.DataObject) -> None:
    p, m, v = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    cost = st.lists(st.floats(0.2, 3.0), min_size=p * v, max_size=p * v)
    costs = StageCosts(*(tuple(data.draw(cost)) for _ in range(3)))
    latency_s = data.draw(st.sampled_from([0.0, 0.2]))
    cap = data.draw(st.integers(v, 2 * p * v))
    plan = auto(p, m, v, costs=costs, latency_s=latency_s, cap=cap)
    check(plan, shapes={0: Shape(p * v, m)}, cap=cap)
    check(add_messages(plan, costs, ahead=False), strict=True)
    best = simulate(plan, costs, latency_s=latency_s).makespan_s
    for name in STATIC:
        least, most = SCHEDULES[name].stages_per_rank
        if least <= v <= (most or v):
            other = generate(name, p, m, v)
            if max(check(other).live) <= cap:
                assert best <= simulate(other, costs, latency_s=latency_s).makespan_s + 1e-9


def test_auto_beats_every_formula_where_stages_differ_or_memory_allows() -> None:
    even = StageCosts.uniform(4, 1.0, 1.3, 0.7)
    uneven = StageCosts((1.0,) * 4, (1.3, 1.3, 1.0, 1.6), (0.7,) * 4)
    for costs, cap in ((even, 8), (uneven, 5)):
        fits = [
            plan
            for n in STATIC
            if SCHEDULES[n].stages_per_rank[0] == 1 and max(check(plan := generate(n, 4, 8)).live) <= cap
        ]
        best = min(simulate(plan, costs).makespan_s for plan in fits)
        assert simulate(auto(4, 8, 1, costs=costs, cap=cap), costs).makespan_s < best - 0.1


def test_auto_says_which_cap_would_do() -> None:
    with pytest.raises(ValueError, match="holds at most 1 activations on each rank; [0-9]+ are enough"):
        auto(2, 4, 2, cap=1)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_plan_of_a_run_has_the_placement_that_its_modules_were_laid_out_by(data: st.DataObject) -> None:
    """Whatever the cut made of the costs, however many micro-batches an evaluation has."""
    p, v = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    config = PipelineConfig(
        size=p, schedule="auto", stages_per_rank=v, micro_batches=data.draw(st.integers(1, 6))
    )
    laid = ranks_of(compute_plan(config, StepShape(config.micro_batches or 0)))
    cost = st.lists(st.floats(0.0, 3.0), min_size=p * v, max_size=p * v)
    shape = StepShape(
        data.draw(st.integers(1, 7)), data.draw(st.integers(1, 2)), tuple((i,) for i in range(p * v)),
        (True,) * (p * v), backward=data.draw(st.booleans()), ahead=data.draw(st.booleans()),
        costs=StageCosts(*(tuple(data.draw(cost)) for _ in range(3))), placement=laid,
    )  # fmt: skip
    assert ranks_of(step_plan(config, shape)) == laid


def test_auto_says_how_few_activations_are_enough_where_stages_lie_as_they_are_told() -> None:
    assert ranks_of(auto(2, 4, 2, placement=(0, 1, 0, 1))) == (0, 1, 0, 1)
    assert ranks_of(auto(2, 4, 2, placement=(0, 1, 1, 0))) == (0, 1, 1, 0)
    with pytest.raises(ValueError, match="holds at most 1 activations on each rank; 4 are enough"):
        auto(2, 4, 2, cap=1, placement=(0, 1, 1, 0))


def test_a_cap_of_the_config_is_what_auto_searches_within_and_what_the_others_are_held_to() -> None:
    within = compute_plan(PipelineConfig(size=4, schedule="auto", activation_cap=3), StepShape(8))
    assert max(check(within).live) == 3 < max(check(generate("1f1b", 4, 8)).live)
    free = compute_plan(PipelineConfig(size=4, schedule="auto", activation_cap=8), StepShape(8))
    costs = StageCosts.uniform(4)
    assert simulate(free, costs).makespan_s < simulate(within, costs).makespan_s
    with pytest.raises(
        ValueError,
        match=r"activation_cap=3: 1f1b holds more; legal: 4 or more(.|\n)*rank 0 holds 4(.|\n)*0F3",
    ):
        compute_plan(PipelineConfig(size=4, schedule="1f1b", activation_cap=3), StepShape(8))
    compute_plan(PipelineConfig(size=4, schedule="1f1b", activation_cap=4), StepShape(8))
    evaluation = StepShape(8, backward=False)
    compute_plan(PipelineConfig(size=4, schedule="1f1b", activation_cap=1), evaluation)  # nothing is kept


def test_only_auto_has_a_choice_of_where_several_stages_lie() -> None:
    several = PipelineConfig(size=2, schedule="auto", stages_per_rank=2)
    assert [ranks_of(p) for p in plans_by_placement(several, StepShape(3))] == [(0, 1, 0, 1), (0, 1, 1, 0)]
    for config in (PipelineConfig(size=2, schedule="auto"), PipelineConfig(size=2, schedule="zb-v")):
        assert plans_by_placement(config, StepShape(3)) == (compute_plan(config, StepShape(3)),)
    with pytest.raises(ValueError, match="at most 1 activations on each rank"):
        plans_by_placement(
            PipelineConfig(size=2, schedule="auto", stages_per_rank=2, activation_cap=1), StepShape(3)
        )


# Passes -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 3), st.booleans(), st.booleans())
def test_all_passes_together_leave_a_plan_that_runs(
    case: tuple[str, int, int, int], prefetch: int, ahead: bool, each: bool
) -> None:
    name, p, m, v = case
    m = min(m, 9)
    chunks = {stage: (2 * stage, 2 * stage + 1) for stage in range(p * v)}
    chunks[p * v - 1] += (0,) if p * v > 1 else ()
    weights = StageWeights(tuple(chunks.values()), prefetch)
    plan = add_gathers(add_messages(generate(name, p, m, v), ahead=ahead), weights)
    whole = add_step(plan, chunks, "micro_batch" if each else "step")
    check(whole, shapes={0: Shape(p * v, m)}, memory=weights.memory())
    assert whole.only(*COMPUTE_KINDS) == generate(name, p, m, v)
    simulate(whole, StageCosts.uniform(p * v))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_one_more_stage_than_the_prefetch_is_gathered(prefetch: int) -> None:
    for mine in add_gathers(generate("bfs", 2, 3, 4), StageWeights(tuple((s,) for s in range(8)), prefetch)):
        change = {ActionKind.UNSHARD: 1, ActionKind.RESHARD: -1}
        held = [sum(change.get(a.kind, 0) for a in mine[: i + 1]) for i in range(len(mine))]
        assert max(held) == prefetch + 1 and held[-1] == 0


def test_sums_follow_the_last_gradient_and_updates_come_last() -> None:
    plan = add_step(generate("1f1b", 2, 2), {0: (0, 1), 1: (2,)})
    assert str(plan) == (
        "0F0 0F1 0B0 0B1 0REDUCE#1 0REDUCE#0 0UPDATE#0 0UPDATE#1\n1F0 1B0 1F1 1B1 1REDUCE#2 1UPDATE#2"
    )
    each = add_step(generate("1f1b", 2, 2), {0: (0,), 1: (1,)}, "micro_batch")
    assert [str(a) for a in each[1]] == "1F0 1B0 1REDUCE0#1 1F1 1B1 1REDUCE1#1 1UPDATE#1".split()


def test_a_tied_chunk_is_summed_over_its_ranks_first_and_once_where_both_stages_are_on_one() -> None:
    across = add_step(generate("1f1b", 2, 1), {0: (0,), 1: (1, 0)})
    assert [str(a) for a in across[0]] == "0F0 0B0 0TIED_REDUCE#0 0REDUCE#0 0UPDATE#0".split()
    assert [str(a) for a in across[1]] == (
        "1F0 1B0 1REDUCE#1 1TIED_REDUCE#0 1REDUCE#0 1UPDATE#0 1UPDATE#1".split()
    )
    reduces: tuple[Literal["step", "micro_batch"], ...] = ("step", "micro_batch")
    for reduce in reduces:
        folded = add_step(generate("zb-v", 2, 2), {0: (0,), 1: (1,), 2: (2,), 3: (3, 0)}, reduce)
        assert [str(a) for a in folded[0] if a.chunk == 0] == ["0REDUCE#0", "0UPDATE#0"]


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("pattern", ["leading", "last", "middle", "all but one"])
def test_frozen_stages_do_only_what_others_need(name: str, pattern: str) -> None:
    plan = generate(name, 3, 4)
    n = len(plan.placement())
    frozen = {"leading": {0, 1}, "last": {n - 1}, "middle": {1}, "all but one": set(range(n)) - {1}}[pattern]
    trainable = tuple(stage not in frozen for stage in range(n))
    cut = freeze(add_messages(plan), trainable)
    shape = {0: Shape(n, 4, trainable=trainable)}
    check(cut, shapes=shape)
    weights = {a.stage for mine in cut for a in mine if a.kind in (ActionKind.W, ActionKind.B)}
    assert weights == {stage for stage in range(n) if trainable[stage]}
    first = trainable.index(True)
    assert not any(
        a.kind in (ActionKind.I, ActionKind.B, ActionKind.RECV_B) and a.stage < first
        for mine in cut
        for a in mine
    )
    check(add_step(cut), shapes=shape)


@pytest.mark.parametrize("name", STATIC)
def test_evaluation_is_the_forwards_and_holds_nothing(name: str) -> None:
    plan = add_messages(generate(name, 3, 5).only(ActionKind.F))
    footprint = check(plan, shapes={0: Shape(len(plan.placement()), 5, backward=False)})
    assert footprint.live == (0, 0, 0)
    with pytest.raises(PlanError, match="never done"):
        check(plan, shapes={0: Shape(len(plan.placement()), 5)})


def test_accumulation_runs_the_plan_again_on_the_next_micro_batches() -> None:
    assert str(repeat(one_stage(2), 2)) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    check(add_step(add_messages(repeat(generate("zb-v", 2, 3), 3))), shapes={0: Shape(4, 9)})


def test_receives_are_posted_before_the_compute_that_hides_them() -> None:
    plan = generate("1f1b", 2, 2)
    posted = str(add_messages(plan)).split("\n")
    assert posted[1] == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert str(add_messages(plan, ahead=False)).split("\n")[1].startswith("1RECV_F0 1F0 1RECV_F1 1B0")


def test_a_stage_that_is_alone_needs_no_messages() -> None:
    assert add_messages(generate("zb-v", 1, 3)) == generate("zb-v", 1, 3)


# Config and drawing -------------------------------------------------------------------------------


def test_the_schedules_chunks_are_the_default() -> None:
    assert {
        name: PipelineConfig.model_validate({"schedule": name}).stages_per_rank for name in SCHEDULES
    } == {name: s.stages_per_rank[0] for name, s in SCHEDULES.items()}
    assert PipelineConfig.model_validate(4) == PipelineConfig(size=4)
    assert PipelineConfig(size=4, schedule="zb-v").stages == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"schedule": "zb-v", "stages_per_rank": 3},
            "stages_per_rank=3: schedule 'zb-v' takes 2 on each rank",
        ),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "takes at least 2 on each rank"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "takes 1 on each rank"),
        ({"size": 2, "partition": (1, 2, 3)}, "3 counts for 2 stages"),
        ({"size": 0}, "greater than or equal to 1"),
        ({"micro_batches": 0}, "greater than or equal to 1"),
        ({"schedule": "dapple"}, "Input should be"),
        ({"stages": 2}, "Extra inputs"),
    ],
)
def test_a_config_that_no_schedule_can_run_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelineConfig.model_validate(fields)


def test_micro_batches_follow_the_batch_unless_given() -> None:
    assert [PipelineConfig(size=2).parts(n) for n in (0, 1, 3, 8, 100)] == [1, 1, 3, 8, 8]
    assert PipelineConfig().parts(32) == 1
    assert PipelineConfig(size=2, micro_batches=5).parts(7) == 5
    with pytest.raises(ValueError, match="micro_batches=8: the batch has 7 samples"):
        PipelineConfig(size=2, micro_batches=8).parts(7)


def test_by_default_micro_batches_have_whole_parts_for_a_grid() -> None:
    pipeline = PipelineConfig(size=2)
    for count_of in (pipeline.parts_of, pipeline.fewer_of):
        assert [count_of([n], 1, 2) for n in (2, 4, 8, 12, 16, 24, 7)] == [1, 2, 4, 6, 8, 6, 1]
        assert count_of([8, 4], 1, 2) == 2 and count_of([16], 2, 2) == 4
    assert PipelineConfig(size=2, micro_batches=4).parts_of([4], 1, 2) == 4, "what is given stays"


def test_a_drawing_states_bubble_peak_and_messages() -> None:
    text = draw(4, 8, "zb-v")
    assert "step 25.5 s, bubble 5.9%" in text
    assert "by rank: 4, 4, 4, 4" in text and "messages: 96" in text
    assert "bubble 27.3%" in draw(4, 8, "1f1b") and "by rank: 4, 3, 2, 1" in draw(4, 8, "1f1b")
    assert all(draw(3, 5, name) for name in SCHEDULES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 8, "pipedream"), "schedule 'pipedream': use one of gpipe, 1f1b"),
        ((0, 8, "1f1b"), "at least 1"),
        ((4, 0, "1f1b"), "at least 1"),
        ((4, 8, "zb-v", 3), "takes 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple[int, int, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw(*arguments)


@pytest.mark.parametrize("name", ["1f1b", "auto"])
@pytest.mark.parametrize(
    ("times", "words"),
    [
        (dict(cost=(-1.0, 1.0, 1.0)), "cost -1, 1, 1 of F, I and W: give three finite seconds >= 0"),
        (dict(cost=(nan, 1.0, 1.0)), "cost nan, 1, 1 of F"),
        (dict(cost=(1.0, 1.0, inf)), "cost 1, 1, inf of F"),
        (dict(cost=(0.0, 0.0, 0.0)), "at least one above 0"),
        (dict(latency_s=-5.0), "latency -5: give finite seconds >= 0"),
        (dict(latency_s=nan), "latency nan"),
    ],
)
def test_times_that_no_clock_shows_are_refused(name: str, times: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw(2, 3, name, **times)


def test_parts_that_take_no_time_are_drawn() -> None:
    assert "step 4 s" in draw(2, 3, "zb-h1", cost=(1.0, 0.0, 0.0))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_table_runs_every_stage_in_order(name: str) -> None:
    for mine in generate(name, 3, 7):
        for kind in COMPUTE_KINDS:
            for stage in {a.stage for a in mine}:
                order = [a.micro_batch for a in mine if a.kind is kind and a.stage == stage]
                assert all(a < b for a, b in pairwise(order))  # type: ignore[operator]


def test_the_words_of_a_plan_are_the_actions() -> None:
    assert generate("1f1b", 1, 1)[0] == (Action(ActionKind.F, 0, 0, 0), Action(ActionKind.B, 0, 0, 0))


def test_an_update_within_backward_stands_right_behind_its_sum() -> None:
    step = StepShape(1, stages_per_rank=((0, 1, 2),), reduce="micro_batch", update="backward")
    (actions,) = step_plan(PipelineConfig(), step)
    ends = [(a.kind, a.chunk) for a in actions if a.chunk is not None]
    assert ends == [(kind, chunk) for chunk in (2, 1, 0) for kind in (ActionKind.REDUCE, ActionKind.UPDATE)]


@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_update_within_backward_of_a_pipeline_comes_before_further_computing(
    name: str, reduce: Any
) -> None:
    """But that of a chunk of the first and the last stage, which all ranks sum at the end."""
    stages_per_rank = SCHEDULES[name].stages_per_rank[0]
    stages = 3 * stages_per_rank
    chunks = [(2 * stage + 1, 2 * stage + 2) for stage in range(stages)]
    own = ((0, *chunks[0]), *chunks[1:-1], (0, *chunks[-1]))
    pipeline = PipelineConfig(size=3, schedule=name, stages_per_rank=stages_per_rank)
    step = StepShape(
        5,
        stages_per_rank=own,
        reduce=reduce,
        update="backward",
        trainable=(True,) * stages,
        accumulation_steps=2,
    )
    for actions in step_plan(pipeline, step):
        for place, action in enumerate(actions):
            if action.kind is ActionKind.UPDATE and action.chunk:
                before = [a for a in actions[:place] if a.kind in COMPUTE_KINDS]
                assert before[-1].stage == action.stage and before[-1].micro_batch == 9
                assert not any(
                    a.kind is ActionKind.REDUCE and a.chunk == action.chunk for a in actions[place:]
                )
        updated = [a.chunk for a in actions if a.kind is ActionKind.UPDATE]
        assert sorted(updated) == sorted({a.chunk for a in actions if a.kind is ActionKind.REDUCE})
