"""Compares the CPU seconds of a step with those of another checkout of this project, in paired blocks of steps.

    python examples/benchmarks/step_cost.py --against ../before                        (200 steps of each, by one rank)
    python examples/benchmarks/step_cost.py --against ../before --world 2 --modes data "zero 3"

Both checkouts train the same GPT, each in processes of its own that live for the whole run, one thread a rank.  They
take blocks of steps in turn, forth and back, so that a drift of the machine's speed meets both alike.  Told are CPU
milliseconds a step, summed over ranks, and the ratio with the 95 per cent interval of a bootstrap over pairs of blocks.
"""

from __future__ import annotations

import argparse
import random
import resource
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, dict[str, Any]] = {
    "data": {},
    "zero 1": dict(zero=dict(stage=1)),
    "zero 2": dict(zero=dict(stage=2)),
    "zero 3": dict(zero=dict(stage=3)),
    "bf16": dict(precision="bf16"),
    "accumulated": dict(gradient_accumulation=2),
    "recompute full": dict(activation_checkpoint="full"),
}
MODELS: dict[str, dict[str, int]] = {
    "tiny": dict(layers=4, width=64, heads=4, sequence=32, vocabulary=256),
    "small": dict(layers=4, width=256, heads=8, sequence=128, vocabulary=4096),
}
BASE: dict[str, Any] = dict(
    precision="fp32", optimizer=dict(type="adamw", lr=1e-3, weight_decay=0.1), clip_grad_norm=1.0, seed=0
)
WARM_STEPS = 3


class Trainer:
    """The ranks of one checkout."""

    def __init__(self, checkout: Path, mode: str, model: str, world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = dict(
            PYTHONPATH=checkout, OMP_NUM_THREADS=1, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )  # fmt: skip
        self.ranks = [
            subprocess.Popen(
                [
                    "env", *(f"{name}={value}" for name, value in (shared | dict(RANK=rank, LOCAL_RANK=rank)).items()),
                    sys.executable, __file__, "--rank", mode, "--model", model,
                ],
                cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]  # fmt: skip

    def block(self, steps: int) -> float:
        """CPU seconds of so many steps, summed over ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(steps, file=rank.stdin, flush=True)
        return sum(self._told(rank) for rank in self.ranks)

    @staticmethod
    def _told(rank: subprocess.Popen[str]) -> float:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("CPU "):
                return float(line.split()[1])
        raise RuntimeError(f"a rank has ended with {rank.wait()}; its error is above")

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


@contextmanager
def trainer(checkout: Path, mode: str, model: str, world: int) -> Iterator[Trainer]:
    made = Trainer(checkout, mode, model, world)
    try:
        yield made
        made.close()
    finally:
        for rank in made.ranks:
            rank.kill()
            rank.wait()


def train(mode: str, model: str) -> None:
    """In a rank: blocks of steps, as asked for."""
    import torch

    import colossal_lite as cl

    shape = cl.models.GPTConfig(**MODELS[model])
    size = (4, shape.sequence + 1)
    ids = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(0))
    with cl.launch(BASE | MODES[mode]) as context:
        engine = cl.initialize(lambda: cl.models.GPT(shape), context=context)
        ids = ids[context.rank :: context.world_size]
        batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        for asked in sys.stdin:
            begun_s = cpu_s()
            for _ in range(int(asked)):
                engine.train_step(batch)
            print("CPU", cpu_s() - begun_s, flush=True)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """The ratio of sums, and the 95 per cent interval of its bootstrap over pairs."""
    draw = random.Random(0)

    def ratio(some: list[tuple[float, float]]) -> float:
        return sum(ours for ours, _ in some) / sum(theirs for _, theirs in some)

    found = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(4000))
    return ratio(pairs), found[100], found[3900]


def compared(mode: str, model: str, against: Path, world: int, steps: int, block: int) -> str:
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(trainer(each, mode, model, world)) for each in (ROOT, against))
        for each in (ours, theirs):
            each.block(WARM_STEPS)
        pairs = []
        for number in range(steps // block):
            if number % 2:
                second = theirs.block(block)
                pairs.append((ours.block(block), second))
            else:
                pairs.append((ours.block(block), theirs.block(block)))
    ratio, low, high = interval(pairs)
    ms = [statistics.median(each) / block * 1e3 for each in zip(*pairs, strict=True)]
    return f"{mode:15} {ms[0]:8.2f} ms, before {ms[1]:8.2f}: {ratio:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--model", default="tiny", choices=list(MODELS), help="tiny: nearly all is overhead")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=200, help="of each checkout and mode")
    parser.add_argument("--block", type=int, default=5, help="steps in a block")
    parser.add_argument("--rank", choices=list(MODES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return train(given.rank, given.model)
    if given.against is None or not (given.against / "colossal_lite").is_dir():
        parser.error(f"--against {given.against}: legal: a folder that has colossal_lite/")
    for mode in given.modes:
        row = compared(mode, given.model, given.against.resolve(), given.world, given.steps, given.block)
        print(row, flush=True)


if __name__ == "__main__":
    main()
