"""Draws a pipeline schedule with its bubble, its peak activations and its messages."""

from __future__ import annotations

from math import isfinite

from colossal_lite.schedule.checker import check
from colossal_lite.schedule.drawing import grid
from colossal_lite.schedule.pipeline_schedules import auto, generate
from colossal_lite.schedule.simulator import StageCosts, simulate
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
