"""The drawing, the trace and the table of a schedule hold every compute action, predicted beside measured."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from colossal_lite.observe.schedule_report import ScheduleReport, svg, trace
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.plan import Action, ActionKind, Plan, Shape
from colossal_lite.schedule.simulator import ActionSpan, ScheduleTimeline, StageCosts, simulate

SPACE = "{http://www.w3.org/2000/svg}"


def seconds(**by_kind: float) -> Callable[[Action], float]:
    """Seconds by kind, 0 elsewhere."""
    return lambda action: by_kind.get(action.kind, 0.0)


UNIT = seconds(F=1, I=1, W=1, B=2)


def boxes(drawn: str) -> list[ElementTree.Element]:
    """What stands for actions: they have tips."""
    return [
        r for r in ElementTree.fromstring(drawn).iter(f"{SPACE}rect") if r.find(f"{SPACE}title") is not None
    ]


def words(drawn: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(drawn).iter(f"{SPACE}text")]


def slower(timeline: ScheduleTimeline, factor: float = 1.1, later_s: float = 7) -> ScheduleTimeline:
    return ScheduleTimeline(
        timeline.ranks,
        tuple(
            ActionSpan(s.rank, s.action, s.start_s * factor + later_s, s.end_s * factor + later_s)
            for s in timeline.spans
        ),
    )


def test_the_drawing_holds_predicted_beside_measured_in_its_width() -> None:
    predicted = simulate(generate("zb-h1", 2, 3), UNIT)
    drawn = svg(predicted, slower(predicted))
    rects = boxes(drawn)
    assert len(rects) == 2 * len(predicted.spans) and len(boxes(svg(predicted))) == 12 + 6
    assert len({float(r.attrib["y"]) for r in rects}) == 4
    right = max(float(r.attrib["x"]) + float(r.attrib["width"]) for r in rects)
    assert right <= float(ElementTree.fromstring(drawn).attrib["width"]) == 960
    assert words(drawn)[0] == "predicted: 10 s, idle 10.0% | measured: 11 s, idle 10.0%"


def test_the_drawing_has_a_legend_an_axis_with_its_unit_and_numbers_in_the_boxes() -> None:
    drawn = svg(simulate(generate("zb-v", 2, 4), StageCosts.uniform(4, 0.01, 0.01, 0.01)))
    told = words(drawn)
    for name in ("F forward", "I gradient of inputs", "W gradient of weights", "idle", "time (ms)", "rank 1"):
        assert name in told
    assert "B backward" not in told and "paler: further stages of a rank" in told
    numbers = [word for word in told if word in ("0", "1", "2", "3")]
    assert len(numbers) == len(boxes(drawn)) + 1, "each box has its micro-batch; one more is the axis' 0"


def test_a_drawing_of_many_ranks_is_as_wide_as_its_numbers_need() -> None:
    drawn = svg(simulate(generate("1f1b", 16, 64), UNIT))
    assert 2000 < float(ElementTree.fromstring(drawn).attrib["width"]) <= 4000
    assert words(drawn).count("63") >= 2 * 16, "forward and backward of the last micro-batch on each rank"


def test_a_report_is_the_same_after_its_trace() -> None:
    predicted = simulate(generate("1f1b", 2, 3), UNIT)
    report = ScheduleReport(predicted, slower(predicted, later_s=0))
    again = ScheduleReport.parse(report.trace())
    for mine, other in ((report.predicted, again.predicted), (report.measured, again.measured)):
        times = [{(s.rank, s.action): (s.start_s, s.end_s) for s in each.spans} for each in (mine, other)]
        assert other.ranks == mine.ranks and times[1].keys() == times[0].keys()
        for key, span in times[0].items():
            assert times[1][key] == pytest.approx(span, abs=1e-9)


def test_the_trace_has_a_process_a_rank_and_a_thread_a_lane() -> None:
    plan = Plan.parse("0FETCH#0 0F0 0B0 0EVICT#0")
    timeline = simulate(plan, seconds(F=1, B=2, FETCH=0.5, EVICT=0.25))
    events = json.loads(trace(predicted=timeline, measured=timeline))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["predicted rank 0", "measured rank 0"]
    work = {(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert work == {("0FETCH#0", 0, 5e5), ("0F0", 5e5, 1e6), ("0B0", 15e5, 2e6), ("0EVICT#0", 35e5, 25e4)}
    assert len({e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 1}) == 3


def test_a_report_scales_what_was_foretold_to_the_seconds_that_compute_took_and_begins_at_0() -> None:
    plan = generate("1f1b", 2, 2)
    right = simulate(plan, seconds(F=3, B=6))
    slow = simulate(plan, lambda a: (4.0 if a.kind is ActionKind.B else 2.0) * (1 + (a.stage or 0)))
    measured = ScheduleTimeline(
        2, tuple(s._replace(start_s=s.start_s + 100, end_s=s.end_s + 100) for s in slow.spans)
    )
    report = ScheduleReport.of(plan, measured, seconds(F=1, B=2), Shape(2, 2))
    assert report.predicted.makespan_s == pytest.approx(right.makespan_s)
    assert [s.start_s for s in report.measured.spans] == pytest.approx([s.start_s for s in slow.spans])
    names = [
        e["args"]["name"] for e in json.loads(report.trace())["traceEvents"] if e["name"] == "process_name"
    ]
    assert names == [f"{name} rank {rank}" for name in ("predicted", "measured") for rank in range(2)]
    assert len(boxes(report.svg())) == 2 * 8
    assert str(report).splitlines()[-1].split() == ["step", "27", "s", f"{slow.makespan_s:g}", "s"]
