"""Measures a real run of the pipeline with emulated costs, for each schedule, beside the simulator's forecast.

    python examples/benchmarks/pipeline_bubble.py                     # 4 ranks, 8 micro-batches, 5 schedules
    python examples/benchmarks/pipeline_bubble.py --only zb-v --svg zb-v.svg

Each layer waits until a deadline instead of computing, 100 ms for each of its forward, input gradient and weight
gradient, so that any number of ranks runs undisturbed on few cores; all else is the engine's own step: messages over
gloo, receives posted ahead, weight gradients deferred.  A rank has two layers, on one stage or on two.  The makespan is
from the first start to the last end of compute over all ranks; the bubble is the share in which ranks are idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import Function

import colossal_lite as cl
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.observe.schedule_report import svg
from colossal_lite.pipeline.step_plan import StepShape, compute_plan
from colossal_lite.schedule.pipeline_schedules import SCHEDULES
from colossal_lite.schedule.plan import COMPUTE_KINDS
from colossal_lite.schedule.simulator import ScheduleTimeline, StageCosts, simulate
from colossal_lite.transforms.split_backward import WeightGradStore, deliver

LAYERS_PER_RANK, VOCABULARY, WIDTH, TOKENS = 2, 8, 64, 16
STEPS = 2
"""The first agrees on shapes, the last is measured."""


def until(deadline_s: float) -> None:
    """Wait, and not longer for having been woken late."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


class _Slow(Function):
    """x + weight, in so many seconds; and the same for each of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradStore | None, seconds: float) -> Tensor:
        ctx.weight, ctx.queue, ctx.seconds = weight, queue, seconds
        until(time.monotonic() + seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        def gradient() -> Tensor:
            until(time.monotonic() + ctx.seconds)
            return dy.flatten(0, -2).sum(0)

        until(time.monotonic() + ctx.seconds)
        if ctx.queue is None or not ctx.queue.is_open:
            return dy, gradient(), None, None
        ctx.queue.put(lambda: deliver([ctx.weight], [gradient()]), ctx.weight)
        return dy, None, None, None


class Slow(nn.Module):
    """A layer whose cost is known: ids [B, T] to [B, T, D], or [B, T, D] to itself."""

    def __init__(self, seconds: float, *, is_first: bool) -> None:
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.seconds = seconds
        self.table = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Slow.apply(
            x if self.table is None else self.table(x), self.weight, self.weight_grad_store, self.seconds
        )
        return y


def pipeline_of(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    stages_per_rank = min(2, SCHEDULES[name].stages_per_rank[1] or 2)
    stages = ranks * stages_per_rank
    counts = (ranks * LAYERS_PER_RANK // stages,) * stages
    return dict(
        size=ranks,
        schedule=name,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        partition=counts,
    )


def predicted(pipeline: dict[str, Any], seconds: float) -> ScheduleTimeline:
    """The same step on paper."""
    config = PipelineConfig(**pipeline)
    share = seconds * LAYERS_PER_RANK / config.stages_per_rank
    costs = StageCosts.uniform(config.stages, share, share, share)
    return simulate(compute_plan(config, StepShape(config.micro_batches or 1, costs=costs)), costs)


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    (name,) = args.only
    pipeline = pipeline_of(name, args.ranks, args.micro_batches)
    config = dict(parallel=dict(pipeline=pipeline), precision="fp32", optimizer=dict(type="sgd", lr=0.1))
    with cl.launch(config) as context:
        torch.manual_seed(0)
        layers = args.ranks * LAYERS_PER_RANK
        model = nn.Sequential(*(Slow(args.seconds, is_first=i == 0) for i in range(layers)))
        engine = cl.initialize(model, context=context)
        ids = torch.randint(VOCABULARY, (args.micro_batches, TOKENS + 1))
        for _ in range(STEPS):
            context.mesh.world.barrier()
            engine.train_step((ids[:, :-1], ids[:, 1:]))
        measured = engine.timeline()
        if context.is_main:
            compute = ScheduleTimeline(
                measured.ranks, tuple(span for span in measured.spans if span.action.kind in COMPUTE_KINDS)
            )
            Path(args.out).write_text(json.dumps([compute.makespan_s, compute.idle_share()]))
            if args.svg:
                Path(args.svg).write_text(svg(predicted(pipeline, args.seconds), compute))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each part of a layer")
    parser.add_argument("--only", nargs="*", default=["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
    parser.add_argument("--svg", default="", help="draw the last schedule, predicted and measured")
    parser.add_argument("--out", default="", help="where a rank writes (set by this script for its ranks)")
    args = parser.parse_args()
    if args.out:
        return run_rank(args)
    drawn = Table(title=f"{args.ranks} ranks, {args.micro_batches} micro-batches, {args.seconds:g} s a part")
    for column in ("schedule", "simulated s", "measured s", "ratio", "simulated bubble", "measured bubble"):
        drawn.add_column(column)
    for name in args.only:
        out = Path(f"pipeline_bubble_{name}.json").resolve()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.ranks}",
        ]
        options = dict(
            ranks=args.ranks, micro_batches=args.micro_batches, seconds=args.seconds, out=out, only=name
        )
        options |= dict(svg=args.svg) if args.svg else {}
        words = [
            word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        subprocess.run([*command, __file__, *words], check=True)
        told = predicted(pipeline_of(name, args.ranks, args.micro_batches), args.seconds)
        makespan_s, bubble = json.loads(out.read_text())
        out.unlink()
        drawn.add_row(
            name, f"{told.makespan_s:.2f}", f"{makespan_s:.2f}", f"{makespan_s / told.makespan_s:.3f}",
            f"{told.idle_share():.1%}", f"{bubble:.1%}",
        )  # fmt: skip
    Console(width=120).print(drawn)
    return None


if __name__ == "__main__":
    main()
