"""Times `initialize` and FSDP2 until a model is ready to train, each side in fresh ranks, in turn.

    python examples/benchmarks/initialize.py                                          # GPT-2 small, two CPU ranks
    python examples/benchmarks/initialize.py --model 1.3B --sides "ZeRO-3, bf16"      # bf16 weights, AdamW
    python examples/benchmarks/initialize.py --dry-run                                # a tiny model

Timed is from the line that builds the model to an optimizer that is ready; imports and rendezvous are not.  CPU
seconds are summed over ranks, wall seconds are of the slowest, one thread each.  Peak is the most resident memory of a
rank, less that of its imports.  FSDP2 builds the float32 model on every rank, shards blocks and rest, and makes AdamW.
"bf16" keeps bf16 weights beside float32 masters and moments.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import colossal_lite as cl
import colossal_lite.engine.initialize  # noqa: F401  (before the clock starts)
from colossal_lite.models import GPT, GPTConfig

MODELS = {
    "124M": GPTConfig.gpt2("124M"),
    "1.3B": GPTConfig(vocabulary=50304, layers=24, heads=16, width=2048, sequence=2048),
    "tiny": GPTConfig(vocabulary=64, layers=2, heads=2, width=32, sequence=16),
}
Side = Callable[[GPTConfig, cl.Context], Any]


def ours(model: GPTConfig, context: cl.Context) -> Any:
    return cl.initialize(lambda: GPT(model), context=context)


def fsdp2(model: GPTConfig, context: cl.Context) -> Any:
    torch.manual_seed(0)
    built = GPT(model)
    mesh = init_device_mesh("cpu", (context.world_size,))
    for block in built.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(built, mesh=mesh)
    return built, torch.optim.AdamW(built.parameters(), lr=1e-3)


SIDES: dict[str, tuple[Side, dict[str, Any]]] = {
    "FSDP2": (fsdp2, dict(precision="fp32")),
    "data": (ours, dict(precision="fp32")),
    "ZeRO-3": (ours, dict(precision="fp32", zero=dict(stage=3))),
    "ZeRO-3, bf16": (ours, dict(precision="bf16", zero=dict(stage=3))),
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_rank(model: str, side: str) -> None:
    """On one rank: make the model ready once; rank 0 prints CPU s, wall s and peak bytes."""
    torch.set_num_threads(1)
    make, settings = SIDES[side]
    with cl.launch(dict(optimizer=dict(type="adamw", lr=1e-3)) | settings) as context:
        context.mesh.world.barrier()
        imported, cpu, wall = peak_bytes(), time.process_time(), time.perf_counter()
        kept = make(MODELS[model], context)
        spent = time.process_time() - cpu, time.perf_counter() - wall, peak_bytes() - imported
        rows = context.mesh.world.gather_json(spent)
        del kept
        if context.is_main:
            cpus, walls, peaks = zip(*rows, strict=True)
            print(json.dumps([sum(cpus), max(walls), max(peaks)]))


def measured(model: str, side: str, world: int) -> list[float]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    ended = subprocess.run(
        [*start, __file__, "--model", model, "--rank-of", side], check=True, stdout=subprocess.PIPE, text=True
    )
    found: list[float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="124M", help="what is made ready")
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=["FSDP2", "data", "ZeRO-3"])
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=3, help="times that each side is started")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, every side once")
    parser.add_argument("--rank-of", choices=list(SIDES), help="set by this script for its ranks")
    args = parser.parse_args()
    if args.rank_of:
        return run_rank(args.model, args.rank_of)
    model, rounds = ("tiny", 1) if args.dry_run else (args.model, args.rounds)
    sides = list(SIDES) if args.dry_run else args.sides
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            found[side].append(measured(model, side, args.world))
    for side, rows in found.items():
        cpus, walls, peaks = zip(*rows, strict=True)
        ratios = [row[0] / first[0] for row, first in zip(rows, found[sides[0]], strict=True)]
        print(
            f"{side:14} {statistics.median(cpus):6.2f} CPU s ({min(cpus):.2f}-{max(cpus):.2f}), "
            f"{statistics.median(walls):6.2f} s, peak {max(peaks) / 1e6:6.0f} MB, "
            f"{statistics.median(ratios):.2f} of {sides[0]}"
        )


if __name__ == "__main__":
    main()
