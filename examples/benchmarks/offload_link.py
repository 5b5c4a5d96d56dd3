"""Measures how long a real step waits for optimizer state behind an emulated link, beside the simulator's forecast.

    python examples/benchmarks/offload_link.py                 # links that computing hides, and one that it cannot
    python examples/benchmarks/offload_link.py --records 2.5 8 # seconds of a record's copy, in units
    python examples/benchmarks/offload_link.py --mixes 2 3 0.3 # updates on both sides: every k-th chunk, or a share

Each layer waits until a deadline instead of computing: 2 units for its forward and 4 for its backward, so that few
cores are an undisturbed device; all else is the engine's own step, with AdamW's moments on the host
(`memory.placement="host"`, `memory.rates`), which are copied to the device for their update and back.  A
record is the state of one layer; its copy takes so many units each way, both ways at once.  Without gates (updates at
once) only the updates hide the link: that is the last column, by the simulator.

With `--mixes` some layers are updated on the host (`memory.update_on`), by a thread that waits out `--host-update`
units for each. A gradient goes down, and weights come up, in half the time of a record.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import Function

import colossal_lite as cl
from colossal_lite.memory.copy_streams import LinkSpeed
from colossal_lite.schedule.optimizer_updates import ChunkPart, Crossing, run_of, update_plan
from colossal_lite.schedule.plan import CPU, Action, ActionKind
from colossal_lite.schedule.simulator import simulate
from colossal_lite.schedule.update_mix import ALL_ON_DEVICE, UpdateMix, mix_of
from colossal_lite.zero import build_chunks as build

LAYERS, VOCABULARY, WIDTH, STEPS = 8, 8, 2048, 4
FORWARD, BACKWARD = 2.0, 4.0
"""Units of a layer."""
RECORD_BYTES = 2 * 4 * WIDTH


class _Slow(Function):
    """x + weight, in so many seconds, and its gradients in so many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit_s: float) -> Tensor:
        ctx.seconds = BACKWARD * unit_s
        _pass(FORWARD * unit_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        _pass(ctx.seconds)
        return dy, dy.flatten(0, -2).sum(0), None


def _pass(seconds: float) -> None:
    """Wait, and not longer for having been woken late."""
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


class Slow(nn.Module):
    """ids [B, T] to logits [B, T, VOCABULARY] through layers whose cost is known."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.register_buffer("table", torch.randn(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table[ids]
        for layer in self.layers:
            x = layer(x, self.unit_s)
        return x[..., :VOCABULARY]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, unit_s: float) -> Tensor:
        y: Tensor = _Slow.apply(x, self.weight, unit_s)
        return y


@dataclass(frozen=True)
class Mixed:
    """Which updates run on the host, as `memory.update_on`, and the units of one of them."""

    update_on: str | dict[str, Any]
    host_units: float

    @property
    def mix(self) -> UpdateMix:
        if isinstance(self.update_on, str):
            return mix_of(Fraction(self.update_on == "host"), range(LAYERS))
        every, share = self.update_on.get("every"), self.update_on.get("host")
        return mix_of(Fraction(every - 1, every) if every else Fraction(str(share)), range(LAYERS))


ON_DEVICE = Mixed("device", 0.0)


def measured(record_units: float, unit_s: float, how: Mixed = ON_DEVICE) -> tuple[float, float]:
    """Seconds of the last of some steps, and of them those that its computing waited for the link."""
    rates = dict(up=round(RECORD_BYTES / (record_units * unit_s)))
    memory = dict(placement="host", rates=rates, update_on=how.update_on)
    config = dict(precision="fp32", optimizer=dict(type="adamw", lr=0.1), memory=memory)
    ids = torch.arange(8).view(2, 4)
    with cl.launch(config) as context, patch.object(build, "CHUNK_BYTES", 4 * WIDTH):  # a chunk a layer
        engine = cl.initialize(Slow(unit_s), context=context)
        if (host := engine._optimizer.host_updates) is not None:
            host.updates_link.executor.speed = LinkSpeed(latency_s=how.host_units * unit_s)
        for _ in range(STEPS):
            start_s = time.monotonic()
            engine.train_step((ids, ids.roll(1)))
        step_s = time.monotonic() - start_s
        return step_s, sum(row.waited_s for row in engine.link_report())


def predicted(record_units: float, how: Mixed = ON_DEVICE) -> tuple[float, float]:
    """Units of a step and of its waits."""
    mix = how.mix
    crossing = Crossing((ChunkPart.GRADIENT, ChunkPart.WEIGHTS))  # float32 weights are their own masters
    on_host = dict.fromkeys(sorted(mix.on_host), crossing)

    plan, memory = run_of(
        [[number] for number in range(LAYERS)], STEPS, ahead=mix.ahead, ahead_down=mix.ahead_down,
        on_host=on_host, early=True,
    )  # fmt: skip
    made = simulate(plan, partial(_units, record_units, how.host_units), memory=memory)
    last: dict[int | None, float] = {}
    for span in made.spans:
        first = (
            span.action.kind is ActionKind.UPDATE and not span.action.chunk and span.action.resource != CPU
        )
        if first or span.action.kind is ActionKind.B:
            last[span.action.micro_batch] = max(span.end_s, last.get(span.action.micro_batch, 0.0))
    start, end = last[STEPS - 2], last[STEPS - 1]
    waited = sum(made.waited_s(each, start, end) for each in {wait.resource for wait in made.waits})
    return end - start, waited


def _units(record_units: float, host_units: float, action: Action) -> float:
    if action.chunk is not None and action.chunk >= LAYERS:
        return record_units / 2  # a gradient or weights, where a record is two moments
    if action.resource == CPU:
        return host_units
    return {ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.UPDATE: 0.0}.get(
        action.kind, record_units
    )


def at_once(record_units: float) -> float:
    """Units of the updates of a step by themselves."""
    ahead = ALL_ON_DEVICE.ahead
    _, memory = run_of([[number] for number in range(LAYERS)], STEPS, ahead=ahead)
    units = partial(_units, record_units, 0.0)
    return simulate(update_plan(LAYERS, ahead=ahead), units, memory=memory).makespan_s


def mixes_table(args: argparse.Namespace) -> Table:
    table = Table(
        title=f"{LAYERS} layers of {FORWARD:g} and {BACKWARD:g} units of {args.unit:g} s, an update on the host of "
        f"{args.host_update:g}; step {STEPS}"
    )
    for column in ("copy of a record", "updates", "on the host", "step: simulated s", "measured s",
                   "measured / simulated", "waited: simulated s", "measured s"):  # fmt: skip
        table.add_column(column)
    for record_units in args.records:
        for told in args.mixes:
            update_on = told if told in ("host", "device") else _spread(told)
            how = Mixed(update_on, args.host_update)
            step, waited = (value * args.unit for value in predicted(record_units, how))
            step_s, waited_s = measured(record_units, args.unit, how)
            table.add_row(
                f"{record_units * args.unit:g} s", str(update_on), f"{len(how.mix.on_host)}", f"{step:.2f}",
                f"{step_s:.2f}", f"{step_s / step:.3f}", f"{waited:.2f}", f"{waited_s:.2f}",
            )  # fmt: skip
    return table


def _spread(told: str) -> dict[str, Any]:
    return dict(host=float(told)) if "." in told else dict(every=int(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds")
    parser.add_argument(
        "--records", type=float, nargs="*", default=[1.0, 1.9, 4.0, 8.0], help="units of a copy"
    )
    parser.add_argument(
        "--mixes", nargs="*", default=[], help="host, device, every k-th, or a share on the host"
    )
    parser.add_argument("--host-update", type=float, default=3.0, help="units of an update on the host")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.mixes:
        Console(width=140).print(mixes_table(args))
        return
    table = Table(
        title=f"{LAYERS} layers of {FORWARD:g} and {BACKWARD:g} units of {args.unit:g} s; step {STEPS}"
    )
    for column in ("copy of a record", "step: simulated s", "measured s", "waited: simulated s", "measured s", "share",
                   "waited, updates at once: simulated s"):  # fmt: skip
        table.add_column(column)
    for record_units in args.records:
        step, waited, updates = (
            units * args.unit for units in (*predicted(record_units), at_once(record_units))
        )
        step_s, waited_s = measured(record_units, args.unit)
        table.add_row(
            f"{record_units * args.unit:g} s", f"{step:.2f}", f"{step_s:.2f}", f"{waited:.2f}", f"{waited_s:.2f}",
            f"{waited_s / step_s:.1%}", f"{updates:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
