"""Reports the memory, traffic and schedule of an engine: memory rows, memory timeline, links, timelines.

Note: cost.
Memory rows and link counts are read off at any time and cost nothing in a step.  Only `metered` steps cost time.
`timeline` and `schedule_report` are collective over the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.engine.memory_report import LinkMarks, LinkRow, MemoryReport, MemoryRow, rows_of_state
from colossal_lite.engine.step_totals import OpenStep
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.observe.tables import Rows
from colossal_lite.pipeline.runtime import Runtime
from colossal_lite.pipeline.step_plans import report_of
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.zero.budget_messages import Forecast
from colossal_lite.zero.build_chunks import sharding_of


class EngineReports:
    """Reports of one engine. The methods have the names of those of `Engine`, which document them."""

    def __init__(
        self, parts: EngineParts, runtime: Runtime, step: OpenStep, forecast_batch: Forecast | None
    ) -> None:
        """`step` is read for its number alone. `forecast_batch`: the forecast of `plan` for a batch, if there is
        one."""
        self._parts, self._runtime, self._step = parts, runtime, step
        self._forecast_batch, self._metering = forecast_batch, parts.metering
        self._marks = LinkMarks(parts.optimizer, lambda: None if parts.choice is None else parts.choice.rates)

    def begin_step(self) -> None:
        """Start the counts of a step."""
        self._marks.begin()
        self._metering.begin()

    def memory_report(self) -> MemoryReport:
        parts, context = self._parts, self._parts.context
        device = context.device.type
        rows = rows_of_state(
            parts.built.chunks,
            parts.weights,
            parts.optimizer,
            context.config,
            device,
            parts.built.frozen,
            parts.apart,
        )
        if self._runtime.comm.size > 1:
            rows = (*rows, MemoryRow("messages", device, *self._runtime.slot_bytes))
        metered = self._metering.rows(self._forecast_batch, device, context.mesh.shared_bytes)
        return MemoryReport((*rows, *metered))

    @contextmanager
    def metered(self) -> Iterator[None]:
        steps, compiled = self._step.number, self._parts.context.config.compile
        if steps == 0 or compiled != "none":
            raise ValueError(
                f"metered: after {steps} steps, with compile={compiled!r}; legal: after the first step, with "
                f"compile='none'"
            )
        with self._metering.of(self._parts.built.model, self._parts.built.blocks):
            yield

    def memory_timeline(self) -> MemoryTimeline:
        return self._metering.timeline(self.memory_report())

    def timeline(self) -> ScheduleTimeline:
        return self._runtime.timeline()

    def schedule_report(self) -> ScheduleReport:
        if self._runtime.plan is None:
            raise ValueError("schedule_report: no step has run; legal: after train_step or eval_step")
        sharding = sharding_of(self._parts.context.config)
        return report_of(
            self._runtime.plan, self._parts.built.stages, self._runtime.timeline(), by_visit=sharding.by_visit
        )

    def link_report(self) -> Rows[LinkRow]:
        return self._marks.rows()
