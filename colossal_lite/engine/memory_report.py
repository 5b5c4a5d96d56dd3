"""Measures the bytes that a rank holds and copies, by kind and tier, beside the forecast.

Note: when each row is measured.
State (weights, masters, gradients, optimizer) is allocated once: at the start, or when a budget chooses a placement.
Its rows are read from the chunks at any time, and their peak is the allocation.  For buffers (staging, gathered,
visiting, arena, passing, messages) `peak` is the bytes that steps used, not the allocation.  If the plan is right, both
are equal.  `arena` is one allocation that several kinds share (memory/arena.py).  With it `staging` and `visiting` are
allocations beyond the plan, normally none.  Activations and temporaries are measured only while a `Metering` is on:
torch's dispatcher then calls Python for each operation.  Otherwise they cost nothing.  From the beginning of a step,
links count the bytes of requested copies, and the seconds of waiting for them.  They count those of their work too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossal_lite.observe.memory_meter import StepMeter
from colossal_lite.observe.memory_timeline import Level, MemoryTimeline
from colossal_lite.observe.tables import Rows
from colossal_lite.zero.budget_messages import Forecast
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.update_choice import UpdateChoice
from colossal_lite.zero.user_optimizer import OwnOptimizer


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of state on one tier of this rank: allocated now, used at the peak, and forecast."""

    kind: str
    tier: str
    now_bytes: int
    peak_bytes: int
    forecast_bytes: int | None
    """None without a forecast."""


class MemoryReport(Rows[MemoryRow]):
    """Rows of memory, one for each kind and tier; prints as a table with the total of each tier.

    Kinds: weights, masters, gradients, optimizer state, frozen parameters, buffers, and pipeline messages. Buffers are
    those of staging, gathers and updates, or under a budget the arena that they share."""

    def __str__(self) -> str:
        totals = []
        for tier in dict.fromkeys(row.tier for row in self):
            here = [row for row in self if row.tier == tier]
            planned = [row.forecast_bytes for row in here if row.forecast_bytes is not None]
            totals.append(
                MemoryRow(
                    "total", tier, sum(row.now_bytes for row in here), sum(row.peak_bytes for row in here),
                    sum(planned) if len(planned) == len(here) else None,
                )
            )  # fmt: skip
        return str(Rows((*self, *totals)))


@dataclass(frozen=True)
class LinkRow:
    """One direction between two tiers, since the last step began: bytes of requested copies, and seconds that the
    computation waited for them. Seconds of its work are measured, and predicted by `memory.rates`. `cpu` are the
    updates on the host. Where rates are known, `device` are those on the device."""

    link: str
    moved_bytes: int
    waited_s: float
    busy_s: float = 0.0
    predicted_s: float | None = None
    """None where no rate is known."""


class Metering:
    """Measures the activations and temporaries of metered steps."""

    def __init__(self) -> None:
        self._meter, self._is_on = StepMeter(), False

    @contextmanager
    def of(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Meter the steps within; drops earlier measurements. `blocks`: names of modules."""
        self._meter, self._is_on = StepMeter(), True
        hooks = list(self._hooks({name: model.get_submodule(name) for name in blocks}))
        try:
            with self._meter:
                yield
        finally:
            self._is_on = False
            for hook in hooks:
                hook.remove()

    def begin(self) -> None:
        """Start a step."""
        if self._is_on:
            self._meter.begin()

    def forward_ended(self, shapes: Sequence[Sequence[int]]) -> None:
        """Note that the forward of a micro-batch has ended; `shapes` of all micro-batches of the step."""
        if self._is_on and torch.is_grad_enabled():
            self._meter.forward_ended(shapes)
            self._meter.moment("output")

    def updated(self, chunk: int) -> None:
        """Note that a chunk was updated."""
        if self._is_on:
            self._meter.moment(f"update {chunk}")

    def rows(self, forecast_batch: Forecast | None, device: str, shared_bytes: int) -> tuple[MemoryRow, ...]:
        """The peaks beside the forecast of `plan` for such steps; `shared_bytes` of host memory for other ranks."""
        meter = self._meter
        if not meter.kept_bytes:
            return ()
        forecast_bytes = (forecast_batch(*meter.shape) if forecast_batch else None) or {}
        most = {"activations": meter.kept_bytes, "temporaries": meter.most_bytes - meter.kept_bytes}
        rows = [MemoryRow(kind, device, 0, peak, forecast_bytes.get(kind)) for kind, peak in most.items()]
        if shared_bytes:
            rows.append(
                MemoryRow("exchange", "host", shared_bytes, shared_bytes, forecast_bytes.get("exchange"))
            )
        return tuple(rows)

    def timeline(self, rows: Sequence[MemoryRow]) -> MemoryTimeline:
        """The metered step with the highest peak, over `rows`. Raises ValueError without `metered` steps."""
        moments = self._meter.moments
        if not moments:
            raise ValueError(
                "memory_timeline: no step was metered; legal: after a step within engine.metered()"
            )
        levels = []
        for row in rows:
            measured = tuple(row.now_bytes for _ in moments)
            if row.kind == "activations":
                measured = tuple(moment.live_bytes for moment in moments)
            elif row.kind == "temporaries":
                measured = tuple(moment.peak_bytes - moment.live_bytes for moment in moments)
            levels.append(Level(row.kind, row.tier, measured, row.forecast_bytes))
        return MemoryTimeline(tuple(moment.name for moment in moments), tuple(levels))

    def _hooks(self, blocks: Mapping[str, nn.Module]) -> Iterator[Any]:
        """Hooks that note the end of each block's forward, and of its gradients."""
        for name, block in blocks.items():
            yield block.register_forward_hook(lambda *_, name=name: self._meter.moment(f"forward {name}"))
            first = next((p for p in block.parameters() if p.requires_grad), None)
            if first is not None:
                yield first.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._meter.moment(f"backward {name}")
                )


class LinkMarks:
    """Counts of an optimizer's links, and of its updates, at the beginning of the last step."""

    def __init__(self, optimizer: ChunkOptimizer | OwnOptimizer, choice: UpdateChoice | None) -> None:
        """`choice`: of the mix of updates, which has the rates of the machine where they are known."""
        self._optimizer, self._choice = optimizer, choice
        self.begin()

    def begin(self) -> None:
        self._marks = {link: (link.moved_bytes, link.waited_s, link.busy_s) for link in self._optimizer.links}
        self._updated = self._updates()

    def rows(self) -> Rows[LinkRow]:
        """The counts since then."""
        rates, rows = None if self._choice is None else self._choice.rates, []
        on_host, calls, elsewhere, busy_s = (
            now - before for now, before in zip(self._updates(), self._updated, strict=True)
        )
        for link in self._optimizer.links:
            moved, waited, busy = self._marks.get(link, (0, 0.0, 0.0))
            size, due_s = link.moved_bytes - moved, None
            if rates is not None:
                due_s = {
                    "h2d": size / rates.up, "d2h": size / rates.down,
                    "cpu": on_host / rates.host_update + calls * rates.call_s,
                }.get(link.name)  # fmt: skip
            rows.append(LinkRow(link.name, size, link.waited_s - waited, link.busy_s - busy, due_s))
        if rates is not None and rows:
            rows.append(LinkRow("device", 0, 0.0, busy_s, elsewhere / rates.device_update))
        return Rows(rows)

    def _updates(self) -> tuple[float, ...]:
        """Elements updated on the host, and calls for that; elements updated elsewhere, and seconds of that."""
        optimizer = self._optimizer
        if not isinstance(optimizer, ChunkOptimizer):
            return 0.0, 0.0, 0.0, 0.0
        on_host, elsewhere = optimizer.updated[True], optimizer.updated[False]
        return on_host, optimizer.calls_on_host, elsewhere, optimizer.work_timer.seconds
