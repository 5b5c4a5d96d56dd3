"""Draws timelines of a pipeline, predicted and measured: as an SVG image, as a Chrome trace, as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from colossal_lite.observe.svg import CHARACTER, Scale, box, drawing, legend, text, x_axis
from colossal_lite.observe.tables import SECONDS, seconds, table
from colossal_lite.schedule.plan import COMPUTE, COMPUTE_KINDS, Action, ActionKind, Plan, Shape
from colossal_lite.schedule.simulator import ActionSpan, ScheduleTimeline, simulate

LOOKS: Mapping[ActionKind, tuple[str, str, str]] = {
    ActionKind.F: ("F forward", "#7fb2ec", "#bcd8f7"),
    ActionKind.B: ("B backward", "#f4a862", "#fad6b3"),
    ActionKind.I: ("I gradient of inputs", "#f0cf5d", "#f8e8b1"),
    ActionKind.W: ("W gradient of weights", "#84c98a", "#c3e6c6"),
    ActionKind.UPDATE: ("update", "#c79fe0", "#e3cff0"),
}
"""Name, colour, and colour on the further stages of a rank."""
OTHER = ("other", "#b3b7bc", "#d6d9dc")
IDLE = "#80808038"


def svg(
    predicted: ScheduleTimeline, measured: ScheduleTimeline | None = None, width: int | None = None
) -> str:
    """The compute of each rank as a row of boxes. The measured row stands beneath, on the same axis of seconds.

    A box shows the number of its micro-batch where that fits; its tip has action and seconds. `width` None: as wide as
    the numbers need, 960 to 4,000 pixels.
    """
    named = {"predicted": predicted} | ({} if measured is None else {"measured": measured})
    drawn = {
        (rank, name): [s for s in timeline.spans if s.rank == rank and _is_drawn(s)]
        for rank in range(predicted.ranks)
        for name, timeline in named.items()
    }
    spans = [span for row in drawn.values() for span in row]
    words = {row: f"rank {row[0]}" + (f" {row[1]}" if measured else "") for row in drawn}
    left = 12 + CHARACTER * max(map(len, words.values()), default=0)
    width = width or _width(spans, max(timeline.makespan_s for timeline in named.values()), left)
    longest_s = max(timeline.makespan_s for timeline in named.values()) or 1.0
    scale = Scale(0.0, longest_s, left, width - 20.0, SECONDS)
    looks = dict(_look(span.action.kind, False)[:2] for span in spans)
    stages = {(span.rank, span.action.stage) for span in spans if span.action.stage is not None}
    if len(stages) > predicted.ranks:
        looks |= {"paler: further stages of a rank": next(iter(LOOKS.values()))[2]}
    lines, y = legend(looks | {"idle": IDLE, "numbers: micro-batches": "none"}, 24, 4, width)
    y += 6
    for rank in range(predicted.ranks):
        first = min((stage for of, stage in stages if of == rank), default=0)
        for name, timeline in named.items():
            begin_s = min((span.start_s for span in timeline.spans), default=0.0)
            lines += box(left, y, scale.stop - left, 20, IDLE)
            lines.append(text(4, y + 14, words[rank, name]))
            for span in drawn[rank, name]:
                lines += _span(span, begin_s, scale, y, further=(span.action.stage or first) != first)
            y += 22
        y += 8
    states = " | ".join(
        f"{name}: {seconds(timeline.makespan_s)}, idle {timeline.idle_share():.1%}"
        for name, timeline in named.items()
    )
    return drawing(width, y + 38, [text(4, 16, states), *lines, *x_axis(scale, y, "time")], states)


def _is_drawn(span: ActionSpan) -> bool:
    return span.action.resource == COMPUTE and span.end_s > span.start_s


def _width(spans: list[ActionSpan], longest_s: float, left: float) -> int:
    """A width at which the number of a micro-batch fits into nine boxes of ten."""
    lengths_s = sorted(span.end_s - span.start_s for span in spans if span.action.kind in COMPUTE_KINDS)
    if not lengths_s:
        return 960
    digits = len(str(max(span.action.micro_batch or 0 for span in spans)))
    needed = left + 20 + (digits * CHARACTER + 3) * longest_s / lengths_s[len(lengths_s) // 10]
    return round(min(4000.0, max(960.0, needed)))


def _look(kind: ActionKind, further: bool) -> tuple[str, str]:
    name, colour, paler = LOOKS.get(kind, OTHER)
    return name, paler if further else colour


def _span(span: ActionSpan, begin_s: float, scale: Scale, y: float, further: bool) -> list[str]:
    start_s, long_s = span.start_s - begin_s, span.end_s - span.start_s
    x, w = scale.at(start_s), scale.at(long_s) - scale.start
    tip = f"{span.action} {seconds(long_s)} from {seconds(start_s)}"
    number = "" if span.action.micro_batch is None else str(span.action.micro_batch)
    # a gap of a pixel separates neighbours of one colour
    return list(box(x, y, max(w - 1, w / 2), 20, _look(span.action.kind, further)[1], tip, number))


def trace(**timelines: ScheduleTimeline) -> str:
    """Chrome trace JSON (Perfetto opens it): one process for each timeline and rank, one thread for each
    lane."""
    events: list[dict[str, object]] = []
    process = 0
    for name, timeline in timelines.items():
        for rank in range(timeline.ranks):
            events.append(_meta("process_name", process, 0, f"{name} rank {rank}"))
            mine = [span for span in timeline.spans if span.rank == rank]
            lanes = sorted({span.action.resource for span in mine}, key=lambda lane: (lane != COMPUTE, lane))
            events += [_meta("thread_name", process, i, lane) for i, lane in enumerate(lanes)]
            for span in mine:
                place = {"pid": process, "tid": lanes.index(span.action.resource)}
                times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
                events.append(
                    {"name": str(span.action), "cat": str(span.action.kind), "ph": "X", **place, **times}
                )
            process += 1
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """A step as predicted by its plan and as measured, both from second 0."""

    predicted: ScheduleTimeline
    measured: ScheduleTimeline

    @classmethod
    def of(
        cls, plan: Plan, measured: ScheduleTimeline, cost: Callable[[Action], float], shape: Shape
    ) -> ScheduleReport:
        """`cost` of a compute action may have any unit. It is scaled so that all compute takes its measured seconds."""
        begin_s = min((span.start_s for span in measured.spans), default=0.0)
        spans = (
            span._replace(start_s=span.start_s - begin_s, end_s=span.end_s - begin_s)
            for span in measured.spans
        )
        busy_s = sum(s.end_s - s.start_s for s in measured.spans if s.action.kind in COMPUTE_KINDS)
        whole = sum(cost(a) for actions in plan for a in actions if a.kind in COMPUTE_KINDS) or 1.0
        predicted = simulate(plan, lambda action: cost(action) * busy_s / whole, shapes={0: shape})
        return cls(predicted, ScheduleTimeline(measured.ranks, tuple(spans)))

    @classmethod
    def parse(cls, text: str) -> ScheduleReport:
        """Reads the text that `trace` has written, to a nanosecond."""
        events = json.loads(text)["traceEvents"]
        places = {e["pid"]: e["args"]["name"].split() for e in events if e["name"] == "process_name"}
        found: dict[str, list[ActionSpan]] = {"predicted": [], "measured": []}
        for event in events:
            if event["ph"] == "X":
                name, _, rank = places[event["pid"]]
                start_s = event["ts"] / 1e6
                found[name].append(
                    ActionSpan(int(rank), Action.parse(event["name"]), start_s, start_s + event["dur"] / 1e6)
                )
        ranks = 1 + max((int(rank) for _, _, rank in places.values()), default=-1)
        return cls(*(ScheduleTimeline(ranks, tuple(spans)) for spans in found.values()))

    def __str__(self) -> str:
        """Idle seconds of each rank, then the step: predicted beside measured."""
        pair = (self.predicted, self.measured)
        idle = [timeline.idle_s() for timeline in pair]
        rows = [
            [f"rank {rank} idle", *(seconds(each[rank]) for each in idle)]
            for rank in range(self.measured.ranks)
        ]
        rows.append(["idle share of all", *(f"{timeline.idle_share():.1%}" for timeline in pair)])
        rows.append(["step", *(seconds(timeline.makespan_s) for timeline in pair)])
        return table(["", "predicted", "measured"], rows)

    def svg(self, width: int | None = None) -> str:
        """As `svg`: the predicted and the measured compute of each rank, one under the other."""
        return svg(self.predicted, self.measured, width)

    def trace(self) -> str:
        """As `trace`: for Perfetto."""
        return trace(predicted=self.predicted, measured=self.measured)


def _meta(name: str, process: int, thread: int, value: str) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}
