"""Partition: exact against brute force, exact cover, and the sizes of a transformer against their
formulas."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.pipeline.partition import (
    FLOPS_PER_BYTE,
    Partition,
    Unit,
    held,
    partition,
    transformer_units,
)
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.simulator import StageCosts, simulate


@dataclass(frozen=True)
class Facts:
    layers: int = 6
    heads: int = 8
    kv_heads: int = 8
    width: int = 256
    ffn: int = 1024
    vocabulary: int = 4096
    sequence: int = 256


def units(
    costs: list[float], states: list[float] | None = None, saved: list[float] | None = None
) -> list[Unit]:
    rows = zip(costs, states or [0.0] * len(costs), saved or [0.0] * len(costs), strict=True)
    return [Unit(str(i), c / 4, c / 2, c / 4, s, a) for i, (c, s, a) in enumerate(rows)]


def every_cut(n: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(pairwise((0, *inner, n))) for inner in combinations(range(1, n), stages - 1)]


numbers = st.integers(1, 20).map(float)


@given(st.data(), st.integers(2, 9), st.integers(1, 4))
def test_the_cut_is_the_best_of_all_cuts_within_the_cap(data: st.DataObject, n: int, stages: int) -> None:
    stages = min(stages, n)
    lists = [data.draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(3)]
    mine = units(*lists)
    live = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    cap = float(data.draw(st.integers(10, 400)))

    def rank_bytes(cut: tuple[tuple[int, int], ...]) -> float:
        return max(
            sum(u.states_bytes + k * u.saved_bytes for u in mine[a:b])
            for k, (a, b) in zip(live, cut, strict=True)
        )

    def score(cut: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        costs = [sum(u.cost for u in mine[a:b]) for a, b in cut]
        return max(costs), sum(c * c for c in costs)

    fitting = [cut for cut in every_cut(n, stages) if rank_bytes(cut) <= cap]
    if not fitting:
        with pytest.raises(ValueError, match="no cut of"):
            partition(mine, stages, live=live, cap_bytes=cap)
        return
    found = partition(mine, stages, live=live, cap_bytes=cap)
    assert rank_bytes(found.bounds) <= cap
    assert score(found.bounds) == pytest.approx(min(map(score, fitting)))


def test_stages_beside_the_slowest_are_even_too() -> None:
    assert partition(units([5, 1, 1, 1, 1]), 3).bounds == ((0, 1), (1, 3), (3, 5))


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_way_of_cutting_covers_each_unit_once(n: int, stages: int) -> None:
    if n < stages:
        with pytest.raises(ValueError, match=f"{stages} stages for {n} units"):
            partition(units([1.0] * n), stages)
        return
    for how in ("balanced", "uniform"):
        bounds = partition(units([1.0] * n), stages, how).bounds  # type: ignore[arg-type]
        assert [i for a, b in bounds for i in range(a, b)] == list(range(n))
        assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


def test_given_counts_are_kept_and_must_cover_exactly() -> None:
    mine = units([1.0] * 5)
    assert partition(mine, 2, (1, 4)).bounds == ((0, 1), (1, 5))
    for counts in ((2, 2), (3, 3), (5, 0), (1, 1, 3)):
        with pytest.raises(ValueError, match="give each stage at least 1 and 5 in all"):
            partition(mine, 2, counts)


def test_counts_over_the_cap_are_refused_with_what_they_need() -> None:
    mine = units([1.0] * 4, [10.0] * 4, [1.0] * 4)
    assert partition(mine, 2, (2, 2), live=(2, 1), cap_bytes=24).bounds
    with pytest.raises(ValueError, match="within 23 bytes; the best cut needs 24 on one rank"):
        partition(mine, 2, (2, 2), live=(2, 1), cap_bytes=23)
    with pytest.raises(ValueError, match="the best cut needs 36"):
        partition(mine, 2, (3, 1), live=(2, 1), cap_bytes=30)


def test_two_stages_of_a_rank_share_its_memory() -> None:
    # By cost alone rank 0 gets both heavy ends of the V, 16 + 16 bytes; half a cap a stage moves the cuts.
    mine = units([1.0] * 8, [8, 8, 1, 1, 1, 1, 8, 8])
    folded = {0: 0, 1: 1, 2: 1, 3: 0}
    free = partition(mine, 4, placement=folded)
    assert free.bounds == ((0, 2), (2, 4), (4, 6), (6, 8))
    tight = partition(mine, 4, placement=folded, cap_bytes=24)
    ranks = [0.0, 0.0]
    for stage, (a, b) in enumerate(tight.bounds):
        ranks[folded[stage]] += sum(u.states_bytes for u in mine[a:b])
    assert max(ranks) <= 24
    with pytest.raises(ValueError, match="no cut of 8 units"):
        partition(mine, 4, placement=folded, cap_bytes=17)


def test_a_transformer_is_counted_as_its_formulas_say() -> None:
    facts, tokens = Facts(), 512
    h, s, a, f = facts.width, facts.sequence, facts.heads, facts.ffn
    parts = transformer_units(facts, tokens)
    assert [u.name for u in parts[:3]] == ["embedding", "0.attention", "0.mlp"] and parts[-1].name == "head"
    attention, mlp = parts[1], parts[2]
    assert f == 4 * h and attention.states_bytes + mlp.states_bytes == 16 * (12 * h * h + 13 * h)
    assert attention.forward + mlp.forward == 24 * tokens * h * h + 4 * tokens * s * h
    assert attention.input + mlp.input == 24 * tokens * h * h + 8 * tokens * s * h
    assert attention.weight + mlp.weight == 24 * tokens * h * h
    assert attention.saved_bytes + mlp.saved_bytes == 2 * 32 * tokens * h + 4 * a * tokens
    assert parts[-1].cost == 6 * tokens * facts.vocabulary * h
    rows_bytes, table_bytes = 4 * tokens * h, 4 * facts.vocabulary * h
    assert parts[0].forward == 2 * rows_bytes * FLOPS_PER_BYTE and parts[0].input == 0
    assert parts[0].weight == (3 * rows_bytes + 4 * table_bytes) * FLOPS_PER_BYTE


def test_grouped_heads_and_a_gated_mlp_are_counted() -> None:
    plain, grouped = (transformer_units(Facts(kv_heads=k), 8) for k in (8, 2))
    h = Facts().width
    assert plain[1].states_bytes - grouped[1].states_bytes == 16 * (2 * (h * h * 3 // 4) + 2 * h * 3 // 4)
    gated = transformer_units(Facts(), 8, gated=True)
    assert gated[2].weight == 1.5 * plain[2].weight


def test_half_blocks_balance_what_whole_blocks_cannot() -> None:
    parts = transformer_units(Facts(), 256)
    halves = partition(parts, 2)
    whole = Partition(halves.units, ((0, 7), (7, 14)))
    assert max(halves.costs()) < 0.92 * max(whole.costs())
    equal = partition(parts, 4, "uniform")
    assert max(partition(parts, 4).costs()) < 0.95 * max(equal.costs())


def test_activations_held_by_a_stage_are_those_of_the_checker() -> None:
    for name, p, m in (("1f1b", 4, 8), ("zb-h1", 3, 5), ("gpipe", 2, 6)):
        assert held(generate(name, p, m)) == check(generate(name, p, m)).live
    folded = held(generate("zb-v", 4, 8))
    assert [max(a, b) for a, b in zip(folded, reversed(folded), strict=True)] != [] and len(folded) == 8


def test_costs_go_on_to_the_simulator() -> None:
    cut = partition(units([4.0, 4.0, 8.0]), 2)
    costs = cut.stage_costs(message=0.5)
    assert costs.forward_s == (2.0, 2.0) and costs.input_s == (4.0, 4.0) and costs.weight_s == (2.0, 2.0)
    assert simulate(generate("gpipe", 2, 1), costs).makespan_s == 16 + 2 * 0.5
    assert "stage 1: 2 to 2, 1 units, 50.0%" in str(cut)


GPT2 = Facts(layers=12, heads=12, kv_heads=12, width=768, ffn=3072, vocabulary=50304, sequence=1024)


@pytest.mark.parametrize(("name", "most"), [("zb-v", 0.85), ("interleaved", 1.0)])
def test_where_ranks_have_several_stages_the_schedule_decides_between_cuts(name: str, most: float) -> None:
    """Even stages beside a heavy head make one rank slow: a V gives that rank less in its other stage."""
    plan = generate(name, 4, 16)
    parts, placement = transformer_units(GPT2, 1024), plan.placement()

    def makespan(costs: StageCosts) -> float:
        return simulate(plan, costs).makespan_s

    even = partition(parts, 8, placement=placement)
    chosen = partition(parts, 8, placement=placement, makespan=makespan)
    assert makespan(chosen.stage_costs()) <= most * makespan(even.stage_costs())


@given(st.lists(numbers, min_size=4, max_size=9), st.sampled_from(["zb-v", "interleaved"]), st.integers(1, 6))
def test_no_step_gets_longer_by_moving_units_and_the_cap_is_kept(
    costs: list[float], name: str, micro_batches: int
) -> None:
    plan = generate(name, 2, micro_batches)
    mine, placement = units(costs, costs), plan.placement()

    def makespan(costs: StageCosts) -> float:
        return simulate(plan, costs).makespan_s

    def rank_bytes(cut: Partition) -> float:
        return max(
            sum(
                u.states_bytes
                for s, (a, b) in enumerate(cut.bounds)
                if placement[s] == rank
                for u in mine[a:b]
            )
            for rank in (0, 1)
        )

    even = partition(mine, 4, placement=placement)
    cap = rank_bytes(even)
    chosen = partition(mine, 4, placement=placement, cap_bytes=cap, makespan=makespan)
    assert makespan(chosen.stage_costs()) <= makespan(even.stage_costs()) and rank_bytes(chosen) <= cap
    assert [i for a, b in chosen.bounds for i in range(a, b)] == list(range(len(mine)))
