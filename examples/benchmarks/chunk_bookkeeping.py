"""Measures the CPU time that a step spends on each chunk whose state is off the device, beside its computing.

    python examples/benchmarks/chunk_bookkeeping.py                    # 100 and 3,200 chunks, each way
    python examples/benchmarks/chunk_bookkeeping.py --chunks 100 800   # other numbers

A chunk is one parameter of 8 numbers, so nothing but bookkeeping takes time.  A row is the CPU time of all threads in a
step, less that of the same model in plain torch, over the chunks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.zero import build_chunks as build

WIDTH, STEPS = 8, 3
WAYS: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "state on the host": dict(placement="host"),
    "updates on the host": dict(placement="host", update_on="host"),
    "all on the host": dict(
        placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0), update_on="host"
    ),
}


class Many(nn.Module):
    """Tokens [B, T] to logits [B, T, WIDTH] through so many sums with a weight each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(_Layer() for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table[tokens]
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def step_s(step: Callable[[], object]) -> float:
    """CPU seconds of all threads in the fastest of some steps, after two."""
    seconds = []
    for _ in range(2 + STEPS):
        start_s = time.process_time()
        step()
        seconds.append(time.process_time() - start_s)
    return min(seconds[2:])


def plain_s(count: int) -> float:
    """CPU seconds of a step in plain torch."""
    tokens, model = torch.arange(8).view(2, 4), Many(count)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten()).backward()
        optimizer.step()

    return step_s(step)


def measured_s(count: int, memory: dict[str, Any]) -> float:
    """CPU seconds of a step with a chunk for each weight."""
    tokens = torch.arange(8).view(2, 4)
    config = dict(
        precision="fp32", optimizer=dict(type="adamw", lr=0.1), memory=memory,
        zero=dict(stage=3 if memory.get("placement") == "static" else 0),
    )  # fmt: skip
    with cl.launch(config) as context, patch.object(build, "CHUNK_BYTES", 4 * WIDTH):
        engine = cl.initialize(Many(count), context=context)
        return step_s(lambda: engine.train_step((tokens, tokens.roll(1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, nargs="*", default=[100, 3200])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'ms of CPU a chunk':<24}" + "".join(f"{count:>10,}" for count in args.chunks))
    plain = {count: plain_s(count) for count in args.chunks}
    print(f"{'plain torch':<24}" + "".join(f"{1e3 * plain[n] / n:>10.3f}" for n in args.chunks))
    for way in args.ways:
        row = [1e3 * (measured_s(count, WAYS[way]) - plain[count]) / count for count in args.chunks]
        print(f"{way:<24}" + "".join(f"{ms:>10.3f}" for ms in row), flush=True)


if __name__ == "__main__":
    main()
