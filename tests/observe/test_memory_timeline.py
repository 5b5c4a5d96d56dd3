"""The memory of a step over its moments: its highest column is the report's peak, and the plan's where that is told."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.observe.memory_meter import StepMeter
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.observe.tables import size
from tests.offload.test_optimizer_states import ADAMW
from tests.planner.test_planner import planned
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.shared.written_models import STYLES, TOKENS, WORDS

CASE = Case(
    layers=3, world_size=1, global_batch=16, tokens=16, sizes=dict(width=64, heads=4, vocabulary=256),
    config=dict(precision="fp32", optimizer=ADAMW),
)  # fmt: skip
CASES = {
    "one rank": CASE,
    "recomputed, in parts": replace(
        CASE, config=CASE.config | dict(activation_checkpoint="full", gradient_accumulation=2)
    ),
    "state on the host, bf16": replace(
        CASE, config=CASE.config | dict(memory=dict(placement="host"), precision="bf16")
    ),
    "ZeRO-3": replace(CASE, world_size=2, config=CASE.config | dict(zero=dict(stage=3))),
}


def metered(env: RankEnv, case: Case) -> tuple[str, dict[str, tuple[str, int, int | None]]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        batch = tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine.train_step(batch)
        with pytest.raises(
            ValueError, match="memory_timeline: no step was metered; legal: after a step within"
        ):
            engine.memory_timeline()
        with engine.metered():
            engine.train_step(batch)
        rows = {row.kind: (row.tier, row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()}
        return engine.memory_timeline().json(), rows


@pytest.mark.parametrize("name", CASES)
def test_the_highest_column_is_the_peak_of_the_report_and_of_the_plan(name: str) -> None:
    case = CASES[name]
    for rank, (text, rows) in enumerate(run_world(metered, case.world_size, case)):
        found = MemoryTimeline.parse(text)
        assert found.tiers == tuple(dict.fromkeys(tier for tier, _, _ in rows.values()))
        for tier in found.tiers:
            assert found.peak_bytes(tier) == sum(peak for where, peak, _ in rows.values() if where == tier)
        assert found.forecast_bytes("cpu") == planned(case, rank).peak_bytes
        assert found.peak_bytes("cpu") == pytest.approx(planned(case, rank).peak_bytes, rel=0.03)
        blocks = [f"blocks.{number}" for number in range(case.layers)]
        forward = [m.removeprefix("forward ") for m in found.moments if m.startswith("forward ")]
        backward = [m.removeprefix("backward ") for m in found.moments if m.startswith("backward ")]
        parts = case.config.get("gradient_accumulation", 1)
        assert forward == blocks * parts and backward == blocks[::-1] * parts
        assert sum(m.startswith("update ") for m in found.moments) >= 1


def metered_own(env: RankEnv) -> tuple[str, ...]:
    parallel = dict(pipeline=dict(size=2, micro_batches=2, partition=[3, 3]))
    with env.launch(dict(precision="fp64", optimizer=ADAMW, parallel=parallel)) as context:
        engine = cl.initialize(STYLES["interleaved, ALiBi"](layers=4), context=context)
        ids = torch.arange(4 * TOKENS).view(4, TOKENS) % WORDS
        engine.train_step((ids, (ids + 1) % WORDS))
        with engine.metered():
            engine.train_step((ids, (ids + 1) % WORDS))
        return engine.memory_timeline().moments


def test_in_a_pipeline_the_moments_of_a_rank_are_those_of_its_own_blocks_of_a_model_of_ones_own() -> None:
    for rank, moments in enumerate(run_world(metered_own, 2)):
        for passing in ("forward", "backward"):
            found = sorted(m for m in moments if m.startswith(passing))
            assert found == sorted(f"{passing} transformer.h.{2 * rank + n}" for n in (0, 0, 1, 1))
        assert moments.count("output") == 2


@pytest.fixture(scope="module")
def timeline() -> MemoryTimeline:
    ((text, _),) = run_world(metered, 1, CASES["state on the host, bf16"])
    return MemoryTimeline.parse(text)


def test_a_timeline_is_the_same_after_json(timeline: MemoryTimeline) -> None:
    assert MemoryTimeline.parse(timeline.json()) == timeline
    assert all(len(level.measured_bytes) == len(timeline.moments) for level in timeline.levels)


def test_the_drawing_has_a_box_for_each_moment_and_kind_and_a_line_for_each_forecast(
    timeline: MemoryTimeline,
) -> None:
    root = ElementTree.fromstring(timeline.svg(width=600))
    space = "{http://www.w3.org/2000/svg}"
    tips = [tip.text or "" for tip in root.iter(f"{space}title")]
    assert len(tips) == len(timeline.moments) * len(timeline.levels)
    for level in timeline.levels:
        for moment, held in zip(timeline.moments, level.measured_bytes, strict=True):
            assert f"{moment}: {level.kind} {size(held)}" in tips
    dashed = [each for each in root.iter(f"{space}line") if "stroke-dasharray" in each.attrib]
    assert len(dashed) == len(timeline.tiers) == 2
    words = [each.text for each in root.iter(f"{space}text")]
    assert {level.kind for level in timeline.levels if any(level.measured_bytes)} <= set(words), "the legend"
    assert (
        sum(word in ("held (KiB)", "held (MiB)") for word in words) == 2
        and sum(word in ("0", "0.0") for word in words) == 2
        and "F0" in words
        and "U0" in words
    )
    bottoms: dict[float, float] = {}
    for box in root.iter(f"{space}rect"):
        if box.find(f"{space}title") is not None:
            x, y, h = (float(box.attrib[key]) for key in ("x", "y", "height"))
            assert y >= 0 and x + float(box.attrib["width"]) <= 600
            bottoms[x] = max(bottoms.get(x, 0.0), y + h)
    assert len(bottoms) == len(timeline.moments)


def test_a_forecast_that_lacks_a_part_is_none(timeline: MemoryTimeline) -> None:
    (first, *rest) = timeline.levels
    lacking = replace(timeline, levels=(replace(first, forecast_bytes=None), *rest))
    assert lacking.forecast_bytes(first.tier) is None and timeline.forecast_bytes(first.tier) is not None
    ElementTree.fromstring(lacking.svg())


def test_of_several_steps_the_one_that_held_most_is_kept() -> None:
    meter: Any = StepMeter()
    for peaks in ((5, 9), (7, 8)):
        meter.begin()
        for number, peak in enumerate(peaks):
            meter.peak_bytes = peak
            meter.moment(f"{number} of {peaks}")
    assert [moment.peak_bytes for moment in meter.moments] == [5, 9] and meter.most_bytes == 9
