"""Simulates a plan by discrete events: when each action runs, the makespan, and how long ranks wait.

Note
----
The simulator runs the lists as schedule/plan.py defines them.  On each rank a resource is one lane, first in, first
out.  `compute` issues, so whatever stands after it in the list starts after it.  A message leaves when its SEND is
issued and its RECV posted.  It occupies its direction of the link for its seconds, and arrives `latency_s` later.  In
a plan without messages a need on another rank costs the same, without queueing.  Everything else is the longest path.

Host memory bandwidth is the one resource that lanes share.  While running actions request more than there is, each is
slowed down by the same factor.  Makespan is from the first start to the last end over all ranks.  With a synchronous
optimizer step the bubble is a share of it (reference: arXiv 2401.10241 section 2).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from colossal_lite.schedule.checker import Reading
from colossal_lite.schedule.plan import (
    COMPUTE,
    COMPUTE_KINDS,
    MESSAGES,
    SENDS,
    Action,
    ActionKind,
    Memory,
    Plan,
    Shape,
)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of compute actions by stage, of a message, and of any other kind (0 where left out).

    last: share of a full micro-batch that the last one has, of `micro_batches`.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    message_s: float = 0.0
    other_s: tuple[tuple[ActionKind, float], ...] = ()
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
        kind, stage = action.kind, action.stage
        is_last = action.micro_batch is not None and action.micro_batch == self.micro_batches - 1
        share = self.last if is_last else 1.0
        if kind in MESSAGES:
            return self.message_s * share
        if stage is None or kind not in COMPUTE_KINDS:
            return dict(self.other_s).get(kind, 0.0)
        if kind is ActionKind.F:
            return share * self.forward_s[stage]
        input_s = 0.0 if kind is ActionKind.W else self.input_s[stage]
        return share * (input_s + (0.0 if kind is ActionKind.I else self.weight_s[stage]))


@dataclass(frozen=True, slots=True)
class HostBandwidth:
    """Host memory bandwidth that all lanes share, and the bytes that an action moves through host memory."""

    bytes_per_s: float
    moved_bytes: Callable[[Action], float]


class ActionSpan(NamedTuple):
    """An action from start to end, in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Wait(NamedTuple):
    """A wait between two actions on the compute of a rank, in seconds, and the resource of its last need."""

    rank: int
    resource: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """The start and end of each action, predicted by `simulate` or measured by an executor."""

    ranks: int
    spans: tuple[ActionSpan, ...]
    waits: tuple[Wait, ...] = ()
    """Of a simulated run: what its computing waited for."""

    def __str__(self) -> str:
        told = f"{self.ranks} ranks, {len(self.spans)} actions"
        return f"{told}, {self.makespan_s:.6g} s, idle {self.idle_share():.1%}"

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

    def idle_share(self) -> float:
        """The bubble: idle part of `compute` over all ranks."""
        whole = self.makespan_s * self.ranks
        return sum(self.idle_s(COMPUTE)) / whole if whole else 0.0


def simulate(
    plan: Plan | Reading,
    seconds: Callable[[Action], float],
    *,
    latency_s: float = 0.0,
    host: HostBandwidth | None = None,
    shapes: Mapping[int, Shape] | None = None,
    memory: Memory | None = None,
) -> ScheduleTimeline:
    """Simulates a plan, or one that was read before. seconds: of an action alone on its lane; of a message, asked of
    its SEND, without `latency_s`. shapes, memory: as in `check`, of a plan. Raises PlanError if the plan breaks a rule
    or blocks."""
    reading = plan if isinstance(plan, Reading) else Reading(plan, shapes, memory)
    reading.refuse()
    return _Run(reading, seconds, latency_s, host).timeline()


class _Run:
    """Events in order of time: an action starts when the last of its needs is there."""

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

    def timeline(self) -> ScheduleTimeline:
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
            ActionSpan(self.reading.places[n][0], a, self.start_s[n], self.end_s[n])
            for n, a in enumerate(self.reading.actions)
        )
        return ScheduleTimeline(
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
