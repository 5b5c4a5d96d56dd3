"""What a plan costs: a discrete-event simulator, and how a plan, predicted or measured, is drawn.

Note
----
The simulator runs the lists as `plan.py` says that they mean: on each rank one lane per resource, first in,
first out; `compute` issues, so whatever stands after it in the list starts after it; a message leaves when
its SEND is issued and its RECV posted, occupies its direction of the link for its seconds, and arrives
`latency_s` later. In a plan without messages a need on another rank costs the same, without queueing.
Everything else is the longest path.

Host memory bandwidth is the one resource that lanes share: while those that run ask for more than there is,
each of them is slowed down by the same factor. Makespan is from the first start to the last end over all
ranks; with a synchronous optimizer step that is what bubbles are a share of (reference: arXiv 2401.10241
section 2).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from math import inf
from typing import NamedTuple

from colossal_lite.plan import (
    COMPUTE,
    COMPUTE_KINDS,
    MESSAGES,
    SENDS,
    Action,
    Kind,
    Memory,
    Plan,
    Reading,
    Shape,
)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of compute actions by stage, of a message, and of any other kind (0 where left out).

    last: share of a whole micro-batch that the last one holds, of `micro_batches`.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    message_s: float = 0.0
    other_s: tuple[tuple[Kind, float], ...] = ()
    micro_batches: int = 0
    last: float = 1.0

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        message_s: float = 0.0,
    ) -> StageCosts:
        """The same for every stage."""
        return cls((forward_s,) * stages, (input_s,) * stages, (weight_s,) * stages, message_s)

    def __call__(self, action: Action) -> float:
        share = (
            self.last
            if action.micro_batch is not None and action.micro_batch == self.micro_batches - 1
            else 1.0
        )
        if action.kind in MESSAGES:
            return self.message_s * share
        if action.stage is None or action.kind not in COMPUTE_KINDS:
            return dict(self.other_s).get(action.kind, 0.0)
        parts = {
            Kind.F: (self.forward_s,),
            Kind.I: (self.input_s,),
            Kind.W: (self.weight_s,),
            Kind.B: (self.input_s, self.weight_s),
        }
        return share * sum(part[action.stage] for part in parts[action.kind])


@dataclass(frozen=True, slots=True)
class HostBandwidth:
    """Bytes a second that all lanes share, and the bytes that an action moves through host memory."""

    bytes_per_s: float
    moved_bytes: Callable[[Action], float]


class Span(NamedTuple):
    """An action from start to end, in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Wait(NamedTuple):
    """From the end of an action on the compute of a rank to the start of the next, in seconds, and the resource of what
    that needed last."""

    rank: int
    resource: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ran when, predicted by `simulate` or measured by an executor."""

    ranks: int
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...] = ()
    """Of a simulated run: what its computing waited for."""

    def waited_s(self, resource: str, start_s: float = 0.0, end_s: float = inf) -> float:
        """Seconds between two moments in which computing, on all ranks, waited for work of a resource."""
        times = ((max(w.start_s, start_s), min(w.end_s, end_s)) for w in self.waits if w.resource == resource)
        return sum(stop - start for start, stop in times if start < stop)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end over all ranks."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    def idle_s(self, resource: str = COMPUTE) -> tuple[float, ...]:
        """Seconds of the makespan in which a resource of each rank does nothing."""
        busy = [0.0] * self.ranks
        for span in self.spans:
            if span.action.resource == resource:
                busy[span.rank] += span.end_s - span.start_s
        return tuple(self.makespan_s - seconds for seconds in busy)

    def idle_share(self, resource: str = COMPUTE) -> float:
        """Idle part of a resource over all ranks; of `compute` this is the bubble."""
        whole = self.makespan_s * self.ranks
        return sum(self.idle_s(resource)) / whole if whole else 0.0

    def live(self) -> tuple[int, ...]:
        """Most activations (of one F each) that each rank holds, from its F to the last of I, W and B."""
        ends: dict[tuple[object, ...], Span] = {}
        for span in sorted(
            (s for s in self.spans if s.action.kind in COMPUTE_KINDS), key=lambda s: s.start_s
        ):
            ends[_subject(span)] = span
        peak, held = [0] * self.ranks, [0] * self.ranks
        for span in sorted(
            (s for s in self.spans if s.action.kind in COMPUTE_KINDS), key=lambda s: s.start_s
        ):
            if span.action.kind is Kind.F and ends[_subject(span)] is not span:
                held[span.rank] += 1
                peak[span.rank] = max(peak[span.rank], held[span.rank])
            elif ends[_subject(span)] is span and span.action.kind is not Kind.F:
                held[span.rank] -= 1
        return tuple(peak)


def _subject(span: Span) -> tuple[object, ...]:
    action = span.action
    return span.rank, action.task, action.stage, action.micro_batch, action.slice


def simulate(
    plan: Plan,
    seconds: Callable[[Action], float],
    *,
    latency_s: float = 0.0,
    host: HostBandwidth | None = None,
    shapes: Mapping[int, Shape] | None = None,
    memory: Memory | None = None,
) -> Timeline:
    """Runs a plan on paper. seconds: of an action alone on its lane; of a message, asked of its SEND, without
    `latency_s`. Raises PlanError if the plan breaks a rule or blocks."""
    reading = Reading(plan, shapes, memory)
    reading.refuse()
    return _Run(reading, seconds, latency_s, host).timeline()


class _Run:
    """Events in order of time: an action starts when the last thing that it waits for is there."""

    def __init__(
        self,
        reading: Reading,
        seconds: Callable[[Action], float],
        latency_s: float,
        host: HostBandwidth | None,
    ) -> None:
        self.reading, self.host = reading, host
        actions = reading.actions
        sends = {receive: actions[send] for receive, send in reading.sender.items()}
        self.seconds = [0.0 if a.kind in SENDS else seconds(sends.get(n, a)) for n, a in enumerate(actions)]
        self.then: list[list[tuple[int, float]]] = [[] for _ in actions]
        self.left = [0] * len(actions)
        for node, needs in enumerate(reading.needs):
            for other in needs:
                hop = reading.hops.get((other, node))
                delay = seconds(hop) + latency_s if hop is not None else latency_s if other in sends else 0.0
                self._wait(node, other, delay)
        self._queue()
        self.start_s, self.end_s = [0.0] * len(actions), [0.0] * len(actions)
        # Of those that run and use host memory: seconds left if undisturbed, and how many times rescheduled.
        self.running: dict[int, float] = {}
        self.version = [0] * len(actions)
        self.since_s, self.speed = 0.0, 1.0

    def _wait(self, node: int, other: int, delay_s: float = 0.0) -> None:
        self.then[other].append((node, delay_s))
        self.left[node] += 1

    def _queue(self) -> None:
        """Each after the one before on its lane and after the compute listed before it; a meeting after all
        of what its members wait for."""
        last: dict[tuple[object, ...], int] = {}
        before: list[set[int]] = []
        for node, action in enumerate(self.reading.actions):
            rank = self.reading.places[node][0]
            peer = self.reading.places[self.reading.sender[node]][0] if node in self.reading.sender else None
            lane = (rank, action.resource, action.kind in SENDS, peer)
            compute = (rank, COMPUTE, False, None)
            before.append({last[key] for key in (lane, compute) if key in last})
            last[lane] = node
        for nodes in self.reading.meets:
            together = set.union(*(before[n] | set(self.reading.needs[n]) for n in nodes))
            for node in nodes:
                before[node] = together
        for node, others in enumerate(before):
            for other in others:
                self._wait(node, other)

    def timeline(self) -> Timeline:
        ready_s = [0.0] * len(self.left)
        events = [(0.0, 0, node, 0) for node, n in enumerate(self.left) if n == 0]
        heapq.heapify(events)
        while events:
            now, is_end, node, version = heapq.heappop(events)
            if not is_end:
                self.start_s[node] = now
                self._begin(now, node, events)
            elif version == self.version[node]:
                self.end_s[node] = now
                if self.running.pop(node, None) is not None:
                    self._reshare(now, events)
                for other, delay_s in self.then[node]:
                    ready_s[other] = max(ready_s[other], now + delay_s)
                    self.left[other] -= 1
                    if self.left[other] == 0:
                        heapq.heappush(events, (ready_s[other], 0, other, 0))
        assert not any(self.left), "a checked plan runs to its end"
        spans = (
            Span(self.reading.places[n][0], a, self.start_s[n], self.end_s[n])
            for n, a in enumerate(self.reading.actions)
        )
        return Timeline(
            len(self.reading.plan),
            tuple(sorted(spans, key=lambda s: (s.start_s, s.rank, s.end_s))),
            tuple(self._waits()),
        )

    def _waits(self) -> Iterator[Wait]:
        ended_s: dict[int, float] = {}
        for node, action in enumerate(self.reading.actions):
            rank = self.reading.places[node][0]
            if action.resource != COMPUTE:
                continue
            before_s, needs = ended_s.get(rank, 0.0), self.reading.needs[node]
            if self.start_s[node] > before_s and needs:
                last = max(needs, key=lambda other: self.end_s[other])
                yield Wait(rank, self.reading.actions[last].resource, before_s, self.start_s[node])
            ended_s[rank] = self.end_s[node]

    def _begin(self, now: float, node: int, events: list[tuple[float, int, int, int]]) -> None:
        if self._demand(node) > 0:
            self._reshare(now, events, node)
        else:
            heapq.heappush(events, (now + self.seconds[node], 1, node, 0))

    def _demand(self, node: int) -> float:
        """Bytes a second of host memory that an action uses while it runs undisturbed."""
        moved = self.host.moved_bytes(self.reading.actions[node]) if self.host and self.seconds[node] else 0.0
        return moved / self.seconds[node] if moved else 0.0

    def _reshare(self, now: float, events: list[tuple[float, int, int, int]], new: int | None = None) -> None:
        assert self.host is not None
        for node in self.running:
            self.running[node] -= (now - self.since_s) * self.speed
        if new is not None:
            self.running[new] = self.seconds[new]
        asked = sum(self._demand(node) for node in self.running)
        self.since_s, self.speed = now, min(1.0, self.host.bytes_per_s / asked) if asked else 1.0
        for node, left_s in self.running.items():
            self.version[node] += 1
            heapq.heappush(events, (now + max(0.0, left_s) / self.speed, 1, node, self.version[node]))


def grid(timeline: Timeline, columns: int = 240) -> str:
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
    Kind.F: "#4c78a8",
    Kind.B: "#f58518",
    Kind.I: "#f58518",
    Kind.W: "#54a24b",
    Kind.UPDATE: "#b279a2",
}


def svg(predicted: Timeline, measured: Timeline | None = None, width: int = 960) -> str:
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


def trace(**timelines: Timeline) -> str:
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
    """A step as its plan foretold it and as it was measured, both from second 0."""

    predicted: Timeline
    measured: Timeline

    @classmethod
    def of(
        cls, plan: Plan, measured: Timeline, cost: Callable[[Action], float], shape: Shape
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
        return cls(predicted, Timeline(measured.ranks, tuple(spans)))

    def svg(self, width: int = 960) -> str:
        """As `svg`: of each rank the predicted and the measured compute, one under the other."""
        return svg(self.predicted, self.measured, width)

    def trace(self) -> str:
        """As `trace`: for Perfetto."""
        return trace(predicted=self.predicted, measured=self.measured)


def _meta(name: str, process: int, thread: int, value: str) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}
