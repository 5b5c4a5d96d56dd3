"""Draws what each device does for many jobs, planned or measured: as an SVG image, and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from colossal_lite.many.timetable import Span
from colossal_lite.observe.svg import CHARACTER, PALETTE, Scale, box, drawing, legend, text, x_axis
from colossal_lite.observe.tables import SECONDS, seconds

LANES = {"RUN": 20, "FETCH": 6, "EVICT": 6}
"""Height of each kind in the drawing, in pixels."""
IDLE = "#80808038"


def svg(spans: Sequence[Span], devices: int, title: str, width: int = 960) -> str:
    """The compute of each device as a row of boxes in the task's colour. Copies are a thin line beneath."""
    tasks = sorted({span.action.task for span in spans})
    colours = {task: PALETTE[n % len(PALETTE)] for n, task in enumerate(tasks)}
    left = 12 + CHARACTER * len(f"device {devices - 1}")
    end_s = max((span.end_s for span in spans), default=0.0) or 1.0
    scale = Scale(0.0, end_s, left, width - 20.0, SECONDS)
    lines, y = legend(colours | {"idle": IDLE}, 24, 4, width)
    y += 6
    for device in range(devices):
        lines += [*box(left, y, scale.stop - left, 20, IDLE), text(4, y + 14, f"device {device}")]
        for name, first, last in _joined([span for span in spans if span.device == device]):
            kind, task = first.action.kind, first.action.task
            x, wide = scale.at(first.start_s), scale.at(last.end_s) - scale.at(first.start_s)
            tip = f"{name} {seconds(last.end_s - first.start_s)} from {seconds(first.start_s)}"
            words = task if kind == "RUN" else ""
            at = y if kind == "RUN" else y + 21
            lines += box(x, at, max(wide - 0.5, wide / 2), LANES[kind], colours[task], tip, words)
        y += 34
    return drawing(width, y + 38, [text(4, 16, title), *lines, *x_axis(scale, y, "time")], title)


def trace(spans: Sequence[Span], devices: int) -> str:
    """Chrome trace JSON (Perfetto opens it): a process for each device, a thread for each kind; times in us."""
    events: list[dict[str, object]] = []
    for device in range(devices):
        events.append(_named("process_name", device, 0, f"device {device}"))
        events += [_named("thread_name", device, n, kind) for n, kind in enumerate(LANES)]
        for name, first, last in _joined([span for span in spans if span.device == device]):
            lane = list(LANES).index(first.action.kind)
            times = {"ts": first.start_s * 1e6, "dur": (last.end_s - first.start_s) * 1e6}
            events.append(
                {"ph": "X", "name": name, "cat": first.action.task, "pid": device, "tid": lane, **times}
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _joined(spans: Sequence[Span]) -> Iterator[tuple[str, Span, Span]]:
    """Actions of one kind and task that follow one another without a gap: their name, the first and the last."""
    for kind in LANES:
        open_spans: list[Span] = []
        for span in (span for span in spans if span.action.kind == kind):
            last = open_spans[-1] if open_spans else None
            if last and (last.action.task != span.action.task or span.start_s - last.end_s > 1e-6):
                yield _name(open_spans), open_spans[0], last
                open_spans = []
            open_spans.append(span)
        if open_spans:
            yield _name(open_spans), open_spans[0], open_spans[-1]


def _name(spans: Sequence[Span]) -> str:
    first, last = spans[0].action, spans[-1].action
    return str(first) if first == last else f"{first} .. {last}"


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
