"""Computes the memory of a rank and the longest sequence under a cap, for each sequence mode and number of ranks.

    python examples/benchmarks/longest_sequence.py                          # as planned, for 1 to 64 ranks
    python examples/benchmarks/longest_sequence.py --measure 1 2            # and a real step beside it, on that many

The cap is emulated: it is compared with the peak of tensors that `plan` forecasts for one rank.  Nothing is
allocated.  `--measure` runs a step of the longest sequence of each mode on real ranks (gloo, one thread each) and
counts the bytes of live tensors at its worst moment.  `1d`: tensor parallelism with activations cut along the sequence.
The model: Llama family, 4 layers, width 256, 8 heads, vocabulary 1024, one sequence, float32, AdamW, ZeRO-1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import colossal_lite as cl
from colossal_lite.config.memory_schema import parse_bytes
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.planner.planner import plan
from colossal_lite.planner.run_plan import RunPlan

MODEL = GPTConfig(
    vocabulary=1024,
    layers=4,
    heads=8,
    width=256,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
)
MODES = ("ring", "ulysses", "usp", "allgather_kv", "ring_full", "1d")
MIB = 2**20


def config_of(mode: str, ranks: int) -> dict[str, Any]:
    axis: dict[str, Any] = dict(size=ranks, mode=mode) | (dict(ulysses=2) if mode == "usp" else {})
    cut = {"tensor" if mode == "1d" else "sequence": axis}
    return dict(
        parallel=dict(data=1, **cut if ranks > 1 else {}),
        precision="fp32", optimizer=dict(type="adamw", lr=1e-3), zero=dict(stage=1),
    )  # fmt: skip


def model_of(mode: str, tokens: int) -> GPTConfig:
    return replace(MODEL, sequence=tokens, causal=mode != "ring_full")


def planned(mode: str, ranks: int, tokens: int) -> RunPlan:
    """One step of the last rank on one sequence of `tokens`."""
    config, model = config_of(mode, ranks), model_of(mode, tokens)
    return plan(config, model, batch=1, sequence=tokens, world_size=ranks, rank=ranks - 1)


def longest(mode: str, ranks: int, cap_bytes: int) -> int:
    """The most tokens, a multiple of 2 x ranks, whose peak is under the cap, to within one per cent; 0 if none.

    The peak is nearly linear in the tokens (quadratic for ring_full), so a few steps of the secant find it.
    """
    unit = 2 * ranks
    below, above = (0, 0), (0, 0)  # (units, bytes) that fit, and that do not
    at, step = max(1, 512 // unit), 0
    while step < 12:
        step, found = step + 1, planned(mode, ranks, at * unit).peak_bytes
        below, above = ((at, found), above) if found <= cap_bytes else (below, (at, found))
        if not above[0]:
            at *= 4
            continue
        if above[0] - below[0] <= max(1, below[0] // 100):
            break
        slope = (above[1] - below[1]) / (above[0] - below[0])
        guess = below[0] + (cap_bytes - below[1]) / slope if below[0] else above[0] / 2
        at = min(max(round(guess * (1.003 if step % 2 else 0.997)), below[0] + 1), above[0] - 1)
    return below[0] * unit


def is_legal(mode: str, ranks: int) -> bool:
    if mode in ("ulysses", "1d"):
        return ranks <= MODEL.heads
    return ranks > 1 if mode == "allgather_kv" else mode != "usp" or ranks > 2


def run_rank(mode: str, tokens: int, ranks: int) -> None:
    """On one rank: two steps, the second under a meter; rank 0 prints the worst peak of any, state included."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(MODEL.vocabulary, (1, tokens + 1), generator=generator)
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    with cl.launch(config_of(mode, ranks)) as context:
        engine = cl.initialize(lambda: GPT(model_of(mode, tokens)), context=context)
        engine.train_step(batch)
        state_bytes = sum(row.now_bytes for row in engine.memory_report())
        with LiveBytes() as meter:
            engine.train_step(batch)
        peaks = context.mesh.world.gather_json(state_bytes + meter.peak_bytes)
        if context.is_main:
            print(max(peaks))


def measured(mode: str, ranks: int, tokens: int) -> int:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [*start, __file__, "--rank-of", mode, "--tokens", str(tokens), "--world", str(ranks)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return int(ended.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cap", default="256MB", help="bytes of tensors that one rank may hold")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--measure", type=int, nargs="*", default=[], help="numbers of ranks to run for real")
    parser.add_argument("--tokens", type=int, default=2048, help="length at which activations are told")
    parser.add_argument("--rank-of", default="", help="set by this script for its ranks")
    parser.add_argument("--world", type=int, default=1, help="set by this script for its ranks")
    args = parser.parse_args()
    if args.rank_of:
        return run_rank(args.rank_of, args.tokens, args.world)
    cap_bytes = parse_bytes(args.cap)
    table = Table(
        title=f"one sequence, {cap_bytes / MIB:.0f} MiB a rank; activations at {args.tokens} tokens"
    )
    for column in ("mode", "ranks", "activations", "longest", "times", "peak planned", "peak measured"):
        table.add_column(column, justify="right")
    for mode in args.modes:
        first = 0
        for ranks in args.ranks:
            if not is_legal(mode, ranks):
                continue
            tokens = longest(mode, ranks, cap_bytes)
            first = first or tokens // ranks
            kept_bytes = planned(mode, ranks, args.tokens).bytes_of("activations")
            peak_bytes = planned(mode, ranks, tokens).peak_bytes
            real = f"{measured(mode, ranks, tokens) / MIB:.1f} MiB" if ranks in args.measure else ""
            table.add_row(
                mode, str(ranks), f"{kept_bytes / MIB:.2f} MiB", f"{tokens:,}", f"{tokens / first:.2f}",
                f"{peak_bytes / MIB:.1f} MiB", real,
            )  # fmt: skip
    Console(width=110).print(table)
    return None


if __name__ == "__main__":
    main()
