"""Draws timelines of a plan, predicted or measured: as text, as an SVG image, as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from colossal_lite.schedule.plan import COMPUTE, COMPUTE_KINDS, Action, ActionKind, Plan, Shape
from colossal_lite.schedule.simulator import ScheduleTimeline, simulate


def grid(timeline: ScheduleTimeline, columns: int = 240) -> str:
    """A row for each rank, a cell for each quantum of time: the compute actions, `-` where one goes on, `.`
    idle.

    The quantum is the shortest compute action, or longer if more than `columns` cells were needed.
    """
    spans = [span for span in timeline.spans if span.action.resource == COMPUTE and span.end_s > span.start_s]
    if not spans:
        return "\n".join(f"rank {rank} |" for rank in range(timeline.ranks))
    begin_s = min(span.start_s for span in spans)
    quantum_s = max(min(span.end_s - span.start_s for span in spans), timeline.makespan_s / columns)

    def cell_at(time_s: float) -> int:
        return int((time_s - begin_s) / quantum_s + 1e-6)

    cells = cell_at(begin_s + timeline.makespan_s)
    single = len({(span.rank, span.action.stage) for span in spans}) == timeline.ranks
    rows = [["."] * cells for _ in range(timeline.ranks)]
    for span in spans:
        first, stop = cell_at(span.start_s), cell_at(span.end_s)
        word = str(span.action)
        for cell in range(first, min(stop, cells)):
            rows[span.rank][cell] = (word.lstrip("0123456789") if single else word) if cell == first else "-"
    width = max(len(cell) for row in rows for cell in row)
    body = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
    return "\n".join(f"rank {rank} | {row}" for rank, row in enumerate(body))


_COLOURS = {
    ActionKind.F: "#4c78a8",
    ActionKind.B: "#f58518",
    ActionKind.I: "#f58518",
    ActionKind.W: "#54a24b",
    ActionKind.UPDATE: "#b279a2",
}


def svg(predicted: ScheduleTimeline, measured: ScheduleTimeline | None = None, width: int = 960) -> str:
    """The compute of each rank as one bar, and beneath it the measured one on the same scale of seconds.

    Each action is a rectangle with its name and seconds as a tooltip; odd micro-batches are drawn lighter.
    """
    pair = [predicted] if measured is None else [predicted, measured]
    longest_s = max((timeline.makespan_s for timeline in pair), default=0.0) or 1.0
    left, bar, gap, top = 110, 20, 8, 30
    scale = (width - left - 10) / longest_s
    lines, y = [], top
    for rank in range(predicted.ranks):
        for timeline, name in zip(pair, ("predicted", "measured"), strict=False):
            begin_s = min((span.start_s for span in timeline.spans), default=0.0)
            lines.append(f'<text x="4" y="{y + 14}">rank {rank} {name}</text>')
            for span in timeline.spans:
                if span.rank != rank or span.action.resource != COMPUTE or span.end_s <= span.start_s:
                    continue
                x, w = left + (span.start_s - begin_s) * scale, (span.end_s - span.start_s) * scale
                shade = 0.7 if (span.action.micro_batch or 0) % 2 else 1.0
                tip = f"{span.action} {span.end_s - span.start_s:.6g} s from {span.start_s - begin_s:.6g} s"
                lines.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{bar}" stroke="white" '
                    f'fill="{_COLOURS.get(span.action.kind, "#9d9d9d")}" fill-opacity="{shade}">'
                    f"<title>{escape(tip)}</title></rect>"
                )
            y += bar + 2
        y += gap
    states = " | ".join(
        f"{name}: {timeline.makespan_s:.6g} s, idle {timeline.idle_share():.1%}"
        for timeline, name in zip(pair, ("predicted", "measured"), strict=False)
    )
    return drawing(width, y, states, lines)


def drawing(width: int, height: int, title: str, elements: Iterable[str]) -> str:
    """An SVG image of these elements, in one font, with a title in its first line."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="monospace" font-size="11">',
            f'<text x="4" y="16">{escape(title)}</text>',
            *elements,
            "</svg>",
        ]
    )


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
        """cost: of a compute action, in any unit: it is scaled so that all compute takes the seconds that it took."""
        begin_s = min((span.start_s for span in measured.spans), default=0.0)
        spans = (
            span._replace(start_s=span.start_s - begin_s, end_s=span.end_s - begin_s)
            for span in measured.spans
        )
        busy_s = sum(s.end_s - s.start_s for s in measured.spans if s.action.kind in COMPUTE_KINDS)
        whole = sum(cost(a) for actions in plan for a in actions if a.kind in COMPUTE_KINDS) or 1.0
        predicted = simulate(plan, lambda action: cost(action) * busy_s / whole, shapes={0: shape})
        return cls(predicted, ScheduleTimeline(measured.ranks, tuple(spans)))

    def svg(self, width: int = 960) -> str:
        """As `svg`: the predicted and the measured compute of each rank, one under the other."""
        return svg(self.predicted, self.measured, width)

    def trace(self) -> str:
        """As `trace`: for Perfetto."""
        return trace(predicted=self.predicted, measured=self.measured)


def _meta(name: str, process: int, thread: int, value: str) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}
