"""Trains a model whose state is eight times the memory that its device may use, with the bits of a run without a limit.

PYTHONPATH=. python examples/many_models/larger.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import colossal_lite as cl
from examples.many_models.tasks import gpt, train

TIMES = 8
STATE_BYTES = 4 + 4 + 8
"""Of a parameter: float32 weight, gradient, and the moments of AdamW."""


def parameters(layers: int, width: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in gpt(layers, width).parameters())


def config(budget_bytes: int) -> dict[str, Any]:
    """What fits is planned when the task opens; the log of the worker shows the ways."""
    return dict(
        precision="fp32", gradient_accumulation=4, activation_checkpoint="full", zero=dict(sum_order="ordered"),
        memory=dict(placement="auto", device_budget=budget_bytes, update_on="host"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--directory", default="runs/larger")
    args = parser.parse_args()
    state_bytes = STATE_BYTES * parameters(args.layers, args.width)
    budget_bytes = state_bytes // TIMES
    task = cl.Task(
        "larger", partial(gpt, args.layers, args.width), data=train, steps=args.steps, global_batch=4
    )
    print(f"state of {state_bytes:,} bytes on a device of {budget_bytes:,}")
    print(cl.train_many([task], config=config(budget_bytes), directory=args.directory))


if __name__ == "__main__":  # workers import this file
    torch.set_num_threads(1)
    main()
