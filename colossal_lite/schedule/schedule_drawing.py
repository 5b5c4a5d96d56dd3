"""Draws a pipeline schedule with its bubble, its peak activations and its messages."""

from __future__ import annotations

from math import isfinite

from colossal_lite.schedule.checker import check
from colossal_lite.schedule.pipeline_schedules import auto, generate
from colossal_lite.schedule.plan import COMPUTE
from colossal_lite.schedule.simulator import ScheduleTimeline, StageCosts, simulate
from colossal_lite.schedule.step_passes import add_messages


def draw(
    stages: int,
    micro_batches: int,
    name: str,
    stages_per_rank: int | None = None,
    *,
    cost: tuple[float, float, float] = (1.0, 1.0, 1.0),
    latency_s: float = 0.0,
) -> str:
    """A schedule over `stages` ranks, drawn, with its bubble, its peak activations and its messages.

    cost: seconds of F, I and W of one rank's layers. Raises ValueError as `generate` does, and for times that no clock
    shows.
    """
    if not all(map(isfinite, cost)) or min(cost) < 0 or max(cost) == 0:
        told = ", ".join(f"{seconds:g}" for seconds in cost)
        raise ValueError(f"cost {told} of F, I and W: give three finite seconds >= 0, at least one above 0")
    if not isfinite(latency_s) or latency_s < 0:
        raise ValueError(f"latency {latency_s:g}: give finite seconds >= 0")
    plan = generate(name, stages, micro_batches, stages_per_rank)
    if not isfinite(4.0 * (sum(cost) + latency_s) * micro_batches * stages):
        raise ValueError(
            f"cost {max(cost):g}, latency {latency_s:g}: all parts take no finite time; legal: less"
        )
    stages_per_rank = len(plan.placement()) // stages
    f, i, w = (seconds / stages_per_rank for seconds in cost)
    costs = StageCosts.uniform(stages * stages_per_rank, f, i, w)
    if name == "auto":
        plan = auto(stages, micro_batches, stages_per_rank, costs=costs, latency_s=latency_s)
    timeline = simulate(plan, costs, latency_s=latency_s)
    held = ", ".join(f"{live / stages_per_rank:g}" for live in check(plan).live)
    return "\n".join(
        [
            f"{name}: {stages} ranks, {micro_batches} micro-batches, chunks a rank: {stages_per_rank}; F, I, W take "
            f"{cost[0]:g}, {cost[1]:g}, {cost[2]:g} s a rank, a message {latency_s:g} s",
            grid(timeline),
            f"step {timeline.makespan_s:g} s, bubble {timeline.idle_share():.1%}",
            f"micro-batches held at most, in units of a rank's layers, by rank: {held}",
            f"messages: {check(add_messages(plan, costs)).messages} of one activation",
        ]
    )


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
