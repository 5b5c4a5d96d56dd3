"""Partition: exact against brute force, exact cover, and the sizes of a transformer against their
formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.pipeline.partition import (
    FLOPS_PER_BYTE,
    Partition,
    Unit,
    partition,
    transformer_units,
)
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.simulator import StageCosts, simulate


@dataclass(frozen=True)
class Facts(ModelFacts):
    layers: int = 6
    heads: int = 8
    kv_heads: int = 8
    width: int = 256
    ffn: int = 1024
    vocabulary: int = 4096
    sequence: int = 256
    tied: bool = False


def units(costs: list[float]) -> list[Unit]:
    return [Unit(str(i), c / 4, c / 2, c / 4) for i, c in enumerate(costs)]


def every_cut(n: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(pairwise((0, *inner, n))) for inner in combinations(range(1, n), stages - 1)]


numbers = st.integers(1, 20).map(float)


@given(st.data(), st.integers(2, 9), st.integers(1, 4))
def test_the_cut_is_the_best_of_all_cuts(data: st.DataObject, n: int, stages: int) -> None:
    stages = min(stages, n)
    mine = units(data.draw(st.lists(numbers, min_size=n, max_size=n)))

    def score(cut: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        costs = [sum(u.cost for u in mine[a:b]) for a, b in cut]
        return max(costs), sum(c * c for c in costs)

    found = partition(mine, stages)
    assert score(found.bounds) == pytest.approx(min(map(score, every_cut(n, stages))))


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


def test_a_transformer_is_counted_as_its_formulas_say() -> None:
    facts, tokens = Facts(), 512
    h, s, f = facts.width, facts.sequence, facts.ffn
    parts = transformer_units(facts, tokens)
    assert [u.name for u in parts[:3]] == ["embedding", "0.attention", "0.mlp"] and parts[-1].name == "head"
    attention, mlp = parts[1], parts[2]
    assert f == 4 * h
    assert attention.forward + mlp.forward == 24 * tokens * h * h + 4 * tokens * s * h
    assert attention.input + mlp.input == 24 * tokens * h * h + 8 * tokens * s * h
    assert attention.weight + mlp.weight == 24 * tokens * h * h
    assert parts[-1].cost == 6 * tokens * facts.vocabulary * h
    rows_bytes, table_bytes = 4 * tokens * h, 4 * facts.vocabulary * h
    assert parts[0].forward == 2 * rows_bytes * FLOPS_PER_BYTE and parts[0].input == 0
    assert parts[0].weight == (3 * rows_bytes + 4 * table_bytes) * FLOPS_PER_BYTE


def test_grouped_heads_and_a_gated_mlp_are_counted() -> None:
    plain, grouped = (transformer_units(Facts(kv_heads=k), 8) for k in (8, 2))
    h = Facts().width
    assert plain[1].weight - grouped[1].weight == 2 * 8 * 2 * (h * h * 3 // 4)
    gated = transformer_units(Facts(), 8, gated=True)
    assert gated[2].weight == 1.5 * plain[2].weight


def test_half_blocks_balance_what_whole_blocks_cannot() -> None:
    parts = transformer_units(Facts(), 256)
    halves = partition(parts, 2)
    whole = Partition(halves.units, ((0, 7), (7, 14)))
    assert max(halves.costs()) < 0.92 * max(whole.costs())
    equal = partition(parts, 4, "uniform")
    assert max(partition(parts, 4).costs()) < 0.95 * max(equal.costs())


def test_costs_go_on_to_the_simulator() -> None:
    cut = partition(units([4.0, 4.0, 8.0]), 2)
    costs = replace(cut.stage_costs(), message_s=0.5)
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
def test_no_step_gets_longer_by_moving_units(costs: list[float], name: str, micro_batches: int) -> None:
    plan = generate(name, 2, micro_batches)
    mine, placement = units(costs), plan.placement()

    def makespan(costs: StageCosts) -> float:
        return simulate(plan, costs).makespan_s

    even = partition(mine, 4, placement=placement)
    chosen = partition(mine, 4, placement=placement, makespan=makespan)
    assert makespan(chosen.stage_costs()) <= makespan(even.stage_costs())
    assert [i for a, b in chosen.bounds for i in range(a, b)] == list(range(len(mine)))
