"""Measures how long a real step waits for optimizer state behind an emulated link, beside the simulator's forecast.

    python examples/benchmarks/offload_link.py                 # links that computing hides, and one that it cannot
    python examples/benchmarks/offload_link.py --records 2.5 8 # seconds of a record's copy, in units

Each layer waits until a deadline instead of computing: 2 units for its forward and 4 for its backward, so that few
cores are an undisturbed device; all else is the engine's own step, with AdamW's moments on the host
(`memory.placement="host"`, `memory.rates`), which are copied to the device for their update and back.  A
record is the state of one layer; its copy takes so many units each way, both ways at once.  Without gates (updates at
once) only the updates hide the link: that is the last column, by the simulator.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import Function

import colossal_lite as cl
from colossal_lite.schedule.optimizer_updates import run_of, update_plan
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.simulator import simulate
from colossal_lite.schedule.update_mix import ALL_ON_DEVICE
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


def measured(record_units: float, unit_s: float) -> tuple[float, float]:
    """Seconds of the last of some steps, and of them those that its computing waited for the link."""
    memory = dict(placement="host", rates=dict(up=round(RECORD_BYTES / (record_units * unit_s))))
    config = dict(precision="fp32", optimizer=dict(type="adamw", lr=0.1), memory=memory)
    ids = torch.arange(8).view(2, 4)
    with cl.launch(config) as context, patch.object(build, "CHUNK_BYTES", 4 * WIDTH):  # a chunk a layer
        engine = cl.initialize(Slow(unit_s), context=context)
        for _ in range(STEPS):
            start_s = time.monotonic()
            engine.train_step((ids, ids.roll(1)))
        step_s = time.monotonic() - start_s
        return step_s, sum(row.waited_s for row in engine.link_report())


def predicted(record_units: float) -> tuple[float, float, float]:
    """Units of a step and of its waits, and of the waits of updates at once."""

    def units(action: Action) -> float:
        return {ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.UPDATE: 0.0}.get(
            action.kind, record_units
        )

    plan, memory = run_of([[number] for number in range(LAYERS)], STEPS, ahead=ALL_ON_DEVICE.ahead)
    made = simulate(plan, units, memory=memory)
    last = {span.action.micro_batch: span.end_s for span in made.spans if span.action.kind is ActionKind.B}
    start, end = last[STEPS - 2], last[STEPS - 1]
    at_once = simulate(update_plan(LAYERS, ahead=ALL_ON_DEVICE.ahead), units, memory=memory).makespan_s
    return end - start, made.waited_s("h2d", start, end), at_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds")
    parser.add_argument(
        "--records", type=float, nargs="*", default=[1.0, 1.9, 4.0, 8.0], help="units of a copy"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        title=f"{LAYERS} layers of {FORWARD:g} and {BACKWARD:g} units of {args.unit:g} s; step {STEPS}"
    )
    for column in ("copy of a record", "step: simulated s", "measured s", "waited: simulated s", "measured s", "share",
                   "waited, updates at once: simulated s"):  # fmt: skip
        table.add_column(column)
    for record_units in args.records:
        step, waited, at_once = (value * args.unit for value in predicted(record_units))
        step_s, waited_s = measured(record_units, args.unit)
        table.add_row(
            f"{record_units * args.unit:g} s", f"{step:.2f}", f"{step_s:.2f}", f"{waited:.2f}", f"{waited_s:.2f}",
            f"{waited_s / step_s:.1%}", f"{at_once:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
