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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.config.config import Config
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.precision import ChunkTypes, Precision
from colossal_lite.observe.memory_meter import StepMeter
from colossal_lite.observe.memory_timeline import Level, MemoryTimeline
from colossal_lite.observe.tables import Rows
from colossal_lite.schedule.update_rates import Rates
from colossal_lite.zero.budget_messages import Forecast
from colossal_lite.zero.build_chunks import sharding_of, slots_of
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.state_bytes import forecast
from colossal_lite.zero.user_optimizer import OwnOptimizer
from colossal_lite.zero.weight_slots import ShardedWeights


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


def rows_of_state(
    chunks: Sequence[Chunk],
    weights: ForwardGates,
    optimizer: ChunkOptimizer | OwnOptimizer,
    config: Config,
    device: str,
    frozen: Sequence[WeightChunk] = (),
    apart: Sequence[Tensor] = (),
) -> tuple[MemoryRow, ...]:
    """Rows of weights, masters, gradients and optimizer state on every tier. Rows of the buffers of gradients, gathered
    weights and streamed state. Rows of frozen parameters, in chunks (`frozen`) or in none (`apart`)."""
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
    if apart:
        now, numel = sum(p.nbytes for p in apart), sum(p.numel() for p in apart)
        rows.append(MemoryRow("frozen", device, now, now, types.resting_bytes(numel)))
    for tier, at_rest in ((device, False), ("host", True)):
        kept = [chunk for chunk in frozen if (chunk.weights_at_rest is not None) == at_rest]
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

    def __init__(
        self, optimizer: ChunkOptimizer | OwnOptimizer, rates: Callable[[], Rates | None] = lambda: None
    ) -> None:
        """`rates`: of the machine, where they are known."""
        self._optimizer, self._rates = optimizer, rates
        self.begin()

    def begin(self) -> None:
        self._marks = {link: (link.moved_bytes, link.waited_s, link.busy_s) for link in self._optimizer.links}
        self._updated = self._updates()

    def rows(self) -> Rows[LinkRow]:
        """The counts since then."""
        rates, rows = self._rates(), []
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
