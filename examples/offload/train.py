"""Trains one model with its state on the device, on the host, on disk and within a budget: the same losses each time.

    python examples/offload/train.py
    torchrun --standalone --nproc-per-node 2 examples/offload/train.py --budget 20MiB

On a CPU the device is emulated: an arena of memory with a link to the rest.  Printed are the losses, the peak of the
device and the bytes over the links; `OUT/NAME.svg` draws the memory of a step, moment by moment.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import colossal_lite as cl
from colossal_lite.launcher import env, run

CONFIG: dict[str, Any] = dict(
    precision="fp32", optimizer=dict(type="adamw", lr=3e-3), clip_grad_norm=1.0, activation_checkpoint="full",
    zero=dict(stage=3, sum_order="ordered"),
)  # fmt: skip
SAMPLES = 4


@dataclass(frozen=True)
class Options:
    """Train one model in four places."""

    budget: str = "20MiB"
    """bytes of the device in the last of them"""
    layers: int = 16
    """blocks of the model, GPT-2 family"""
    width: int = 128
    """its width"""
    steps: int = 3
    """optimizer steps"""
    out: Path = Path("runs/offload")
    """where drawings go, and the file of state while a run lasts"""


def places(options: Options) -> dict[str, dict[str, Any]]:
    """Settings of `memory` by the name of a run."""
    return {
        "device": dict(placement="device"),
        "host": dict(placement="host"),
        "disk": dict(placement="disk", disk_dir=str(options.out)),
        "budget": dict(placement="auto", device_budget=options.budget),
    }


def train(
    options: Options, overrides: list[str], memory: dict[str, Any], name: str
) -> tuple[list[float], list[str], bool]:
    """Losses of all steps, what this rank tells of memory, and whether it is the one that tells."""
    model = cl.models.GPTConfig(
        vocabulary=256, layers=options.layers, heads=4, width=options.width, sequence=32
    )
    with cl.launch(CONFIG | dict(memory=memory), overrides=overrides) as context:
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        text = torch.randint(256, (SAMPLES, 33), generator=torch.Generator().manual_seed(0))
        part = text[context.local_batch(SAMPLES)]
        batch = part[:, :-1].contiguous(), part[:, 1:].contiguous()
        losses = [float(engine.train_step(batch).loss) for _ in range(options.steps - 1)]
        with engine.metered():
            losses.append(float(engine.train_step(batch).loss))
        held: dict[str, int] = {}
        for row in engine.memory_report():
            held[row.tier] = held.get(row.tier, 0) + row.peak_bytes
        told = [f"{held.get(tier, 0) / 2**20:.1f}" for tier in (context.device.type, "host", "disk")]
        told.append(f"{sum(link.moved_bytes for link in engine.link_report()) / 2**20:.1f}")
        if context.is_main:
            (options.out / f"{name}.svg").write_text(engine.memory_timeline().svg())
        engine.close()
        return losses, told, context.is_main


def main() -> None:
    speaks = env.speaks(env.environment())
    options, overrides = tyro.cli(Options, return_unknown_args=True, console_outputs=speaks)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = Table(
        title=f"{options.layers} layers of width {options.width}: MiB of rank 0, at the peak of a step"
    )
    for column in ("state on", "loss", "device", "host", "disk", "over links, a step"):
        drawn.add_column(column)
    found = {name: train(options, overrides, memory, name) for name, memory in places(options).items()}
    for name, (losses, told, _) in found.items():
        drawn.add_row(name, f"{losses[0]:.4f} to {losses[-1]:.4f}", *told)
    if all(is_main for *_, is_main in found.values()):
        Console(width=100).print(drawn)
        same = len({tuple(losses) for losses, *_ in found.values()}) == 1
        print(f"losses of all steps: {'the same bits in each' if same else 'they differ'}")


if __name__ == "__main__":
    sys.exit(run(main))
