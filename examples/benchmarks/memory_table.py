"""Measures weights and activations on a rank for each mode, for one small GPT, beside plan and formula.

    python examples/benchmarks/memory_table.py                # a table in markdown
    python examples/benchmarks/memory_table.py --only 2d ring

Each row is a real run (gloo, one thread a rank): the weights of its first rank, and the bytes alive at the end of a
metered forward, logits included, beside the forecast of `plan` for the same step.  A share is over the row of one
rank; the formula's (reference: 2205.05198, 2104.05343, 2105.14500, 2105.14450, 2311.09431, 2309.14509) is that of what
is cut: weights of norms and biases, which 1d keeps whole and a grid cuts once, and the ids are on top.
The model: GPT-2 family, 4 layers, width 128, 8 heads, vocabulary 1024, 8 samples of 128 tokens, float32, SGD.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

import colossal_lite as cl
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.planner.planner import plan

MODEL = GPTConfig(vocabulary=1024, layers=4, heads=8, width=128, sequence=128)
BATCH = 8


@dataclass(frozen=True)
class Row:
    """A mesh, and the shares of weights and of activations that its formula leaves on a rank."""

    parallel: dict[str, Any]
    ranks: int
    weights: Fraction
    activations: Fraction


def row(ranks: int, weights: Fraction | int, **parallel: Any) -> Row:
    return Row(dict(data=1) | parallel, ranks, Fraction(weights), Fraction(1, ranks))


def tensor(ranks: int, mode: str, **options: Any) -> Row:
    parts = ranks // options.get("depth", 1)
    return row(ranks, Fraction(1, parts), tensor=dict(size=ranks, mode=mode, **options))


ROWS = {
    "one rank": row(1, 1),
    "1d 2": tensor(2, "1d"),
    "1d 4": tensor(4, "1d"),
    "2d 4": tensor(4, "2d"),
    "2.5d 8 (depth 2)": tensor(8, "2.5d", depth=2),
    "3d 8": tensor(8, "3d"),
    "ring 2": row(2, 1, sequence=dict(size=2, mode="ring")),
    "ring 4": row(4, 1, sequence=dict(size=4, mode="ring")),
    "ulysses 2": row(2, 1, sequence=dict(size=2, mode="ulysses")),
    "ulysses 4": row(4, 1, sequence=dict(size=4, mode="ulysses")),
}


def config_of(name: str) -> dict[str, Any]:
    return dict(parallel=ROWS[name].parallel, precision="fp32", optimizer=dict(type="sgd", lr=0.1))


def run_rank(name: str, rank: int, store: str, told: Any) -> None:
    """A step, and one under the meter; the first rank tells its weights and its activations, in bytes."""
    text = torch.randint(
        MODEL.vocabulary, (BATCH, MODEL.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    ranks = ROWS[name].ranks
    place = dict(store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    with cl.launch(config_of(name), **place) as context:
        engine = cl.initialize(lambda: GPT(MODEL), context=context)
        engine.train_step(batch)
        with engine.metered():
            engine.train_step(batch)
        held = {row.kind: row.peak_bytes for row in engine.memory_report()}
    if rank == 0:
        told.put((held["weights"], held["activations"]))


def measured(name: str) -> tuple[int, int]:
    """Of a world of processes that are forked before this one has computed anything."""
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=run_rank, args=(name, rank, f"{folder}/store", told))
            for rank in range(ROWS[name].ranks)
        ]
        for process in ranks:
            process.start()
        try:
            weights_bytes, activations_bytes = told.get(timeout=240)
        finally:
            for process in ranks:
                process.join(timeout=60)
    return weights_bytes, activations_bytes


def planned(name: str) -> tuple[int, int]:
    made = plan(config_of(name), MODEL, batch=BATCH, sequence=MODEL.sequence, world_size=ROWS[name].ranks)
    return made.bytes_of("weights"), made.bytes_of("activations") + made.bytes_of("logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name holds one of these words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in ROWS if name == "one rank" or any(word in name for word in args.only)]
    print(
        "| mode, ranks | weights: KiB | planned | share | formula | activations: KiB | planned | share | formula |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found = {name: measured(name) for name in names}
    whole = found["one rank"]
    for name, real in found.items():
        predicted = planned(name)
        formulas = ROWS[name].weights, ROWS[name].activations
        cells = [
            f"{mine / 1024:,.1f} | {theirs / 1024:,.1f} | {mine / all_of_it:.3f} | {float(formula):.3f}"
            for mine, theirs, all_of_it, formula in zip(real, predicted, whole, formulas, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
