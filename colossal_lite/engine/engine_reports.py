"""Reports the memory, traffic and schedule of an engine: memory rows, memory timeline, links, timelines.

Note: cost.
Memory rows and link counts are read off at any time and cost nothing in a step.  Only `metered` steps cost time.
`timeline` and `schedule_report` are collective over the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.engine.memory_report import LinkMarks, LinkRow, MemoryReport, MemoryRow
from colossal_lite.engine.step_totals import OpenStep
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.precision import ChunkTypes, Precision
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.observe.tables import Rows
from colossal_lite.pipeline.runtime import Runtime
from colossal_lite.pipeline.step_plans import report_of
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.zero.budget_messages import Forecast
from colossal_lite.zero.build_chunks import sharding_of, slots_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.state_bytes import forecast
from colossal_lite.zero.user_optimizer import OwnOptimizer
from colossal_lite.zero.weight_slots import ShardedWeights


class EngineReports:
    """Reports of one engine. The methods have the names of those of `Engine`, which document them."""

    def __init__(
        self, parts: EngineParts, runtime: Runtime, step: OpenStep, forecast_batch: Forecast | None
    ) -> None:
        """`step` is read for its number alone. `forecast_batch`: the forecast of `plan` for a batch, if there is
        one."""
        self._parts, self._runtime, self._step = parts, runtime, step
        self._forecast_batch, self._metering = forecast_batch, parts.metering
        self._marks = LinkMarks(parts.optimizer, parts.choice)

    def begin_step(self) -> None:
        """Start the counts of a step."""
        self._marks.begin()
        self._metering.begin()

    def memory_report(self) -> MemoryReport:
        context = self._parts.context
        device, rows = context.device.type, rows_of_state(self._parts)
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
        self._refuse_ended("timeline")
        return self._runtime.timeline()

    def schedule_report(self) -> ScheduleReport:
        self._refuse_ended("schedule_report")
        if self._runtime.plan is None:
            raise ValueError("schedule_report: no step has run; legal: after train_step or eval_step")
        sharding = sharding_of(self._parts.context.config)
        return report_of(
            self._runtime.plan, self._parts.built.stages, self._runtime.timeline(), by_visit=sharding.by_visit
        )

    def _refuse_ended(self, what: str) -> None:
        """Raises ValueError after the context has closed, where each rank of a pipeline knows its own actions alone."""
        mesh = self._parts.context.mesh
        if mesh.is_ended and mesh.size("pipeline") > 1:
            raise ValueError(
                f"{what}: the context is closed, and ranks of a pipeline no longer reach each other for their actions. "
                f"Legal: the same call within the with block of cl.launch"
            )

    def link_report(self) -> Rows[LinkRow]:
        return self._marks.rows()


def rows_of_state(parts: EngineParts) -> tuple[MemoryRow, ...]:
    """Rows of weights, masters, gradients and optimizer state on every tier. Rows of the buffers of gradients, gathered
    weights and streamed state. Rows of frozen parameters, in chunks or in none."""
    chunks, weights, optimizer = parts.built.chunks, parts.weights, parts.optimizer
    config, device = parts.context.config, parts.context.device.type
    precision = Precision.of(config.precision)
    types = ChunkTypes.of(precision)
    foresee = partial(
        forecast, sharding_of(config), weight=types.resting_bytes(1), master_bits=precision.master_copy_bits,
        gradient=precision.gradient.itemsize,
    )  # fmt: skip
    held: dict[str, Callable[[Chunk], int]] = {
        "weights": lambda c: c.resting_bytes,
        "masters": lambda c: c.master_bytes,
        "gradients": lambda c: (c.gradient if c.accumulating is None else c.accumulating).nbytes,
        "optimizer": lambda c: optimizer.bytes_of(c)[0],
    }
    rows = []
    for kind, held_by in held.items():
        for tier, here in _by_tier(chunks, kind, optimizer, device).items():
            foreseen = foresee(sum(chunk.spec.numel for chunk in here), _shard_numel(here))
            foreseen["optimizer"] = sum(optimizer.bytes_of(chunk)[1] for chunk in here)
            now = sum(map(held_by, here))
            rows.append(MemoryRow(kind, tier, now, now, foreseen[kind]))
    slots = slots_of(chunks)
    now, most, planned = (
        sum(each.bytes for each in slots),
        sum(each.most_bytes for each in slots),
        sum(each.planned_bytes for each in slots),
    )
    rows.append(MemoryRow("staging", device, now, most, planned))
    if isinstance(weights, ShardedWeights):
        rows.append(
            MemoryRow("gathered", device, weights.arena_bytes, weights.most_bytes, weights.forecast_bytes)
        )
    if parts.apart:
        now = sum(p.nbytes for p in parts.apart)
        planned = types.resting_bytes(sum(p.numel() for p in parts.apart if p.is_floating_point()))
        planned += sum(p.nbytes for p in parts.apart if not p.is_floating_point())
        rows.append(MemoryRow("frozen", device, now, now, planned))
    for tier, at_rest in ((device, False), ("host", True)):
        kept = [chunk for chunk in parts.built.frozen if (chunk.weights_at_rest is not None) == at_rest]
        now = sum(chunk.resting_bytes for chunk in kept)
        foreseen_bytes = types.resting_bytes(_shard_numel(kept))
        rows += [MemoryRow("frozen", tier, now, now, foreseen_bytes)] if kept else []
    visits = optimizer.visits
    return (
        *rows,
        *(MemoryRow(v.kind, v.tier or device, v.bytes, v.most_bytes, v.forecast_bytes) for v in visits),
    )


def _shard_numel(chunks: Sequence[WeightChunk]) -> int:
    """Elements of a rank's shards of these chunks, by the formula."""
    return sum(chunk.spec.numel // chunk.shards.size for chunk in chunks)


def _by_tier(
    chunks: Sequence[Chunk], kind: str, optimizer: ChunkOptimizer | OwnOptimizer, device: str
) -> Mapping[str, Sequence[Chunk]]:
    """The chunks by the tier of their own allocation for a kind of state. Weights and gradients always have a row on
    the device; the others have one there if there are no chunks."""
    tiers = {device: list[Chunk]()} if kind in ("weights", "gradients") or not chunks else {}
    for chunk in chunks:
        if kind in ("weights", "gradients"):
            if chunk.time_shared(kind):
                continue  # in the arena
            at_rest = chunk.weights_at_rest if kind == "weights" else chunk.gradient_at_rest
            tier = None if at_rest is None else "host"
        else:
            tier = optimizer.tier_of(chunk)
        tiers.setdefault(tier or device, []).append(chunk)
    return tiers
