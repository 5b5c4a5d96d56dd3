"""Times the AdamW op on a CPU beside torch's fused AdamW, on one flat buffer.

    PYTHONPATH=. python examples/benchmarks/cpu_optimizer.py                 # 50 million elements, 2 threads

First it checks that cutting the buffer changes no bit.  Then all sides take a step in turn, round after round, forth
and back, so that a drift of the machine affects all alike.  Two ratios of the peer's time to ours are printed: of the
best times (the speed of the kernels) and the median over rounds (the speed on this machine).

    float32            torch's fused AdamW, and the op: the same bytes
    bf16 in and out    the gradient arrives in bf16 and the weights leave in bf16: torch's fused AdamW between two casts
                       into buffers that are there already, the op, and the op as torch.compile makes it (where there is
                       a C++ compiler; compile="block" takes it)
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from colossal_lite.kernels import TORCH, Ops, select

ADAMW = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SIDES = {
    "torch fused, float32": "torch fused, float32",
    "the op, float32": "torch fused, float32",
    "torch fused between casts": "torch fused between casts",
    "the op, bf16 in and out": "torch fused between casts",
    "the op, by torch.compile": "torch fused between casts",
}
"""Each side and the one that it is compared with."""


class Buffers:
    """What a step of `numel` elements reads and writes."""

    def __init__(self, numel: int) -> None:
        self.param, self.grad, self.mean, self.square = (torch.rand(numel) for _ in range(4))
        self.half_grad, self.low = self.grad.bfloat16(), self.param.bfloat16()
        self.wide = torch.zeros(numel)
        self.steps = torch.full((), 3.0)

    def fused(self, grad: Tensor) -> None:
        torch._fused_adamw_(
            [self.param], [grad], [self.mean], [self.square], [], [self.steps], lr=3e-3, beta1=0.9, beta2=0.95,
            eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False,
        )  # fmt: skip

    def between_casts(self) -> None:
        self.wide.copy_(self.half_grad)
        self.fused(self.wide)
        self.low.copy_(self.param)

    def op(self, ops: Ops, half: bool) -> None:
        grad, low = (self.half_grad, self.low) if half else (self.grad, None)
        ops.adamw_(self.param, grad, self.mean, self.square, step=3, low=low, **ADAMW)


def same_bits_however_cut(ops: Ops, half: bool) -> bool:
    """One step of a whole buffer, and of its pieces, of 1, 999, 3,097 elements and the rest of 3 million."""
    torch.manual_seed(0)
    whole = Buffers(3_000_001)
    torch.manual_seed(0)
    cut = Buffers(3_000_001)
    whole.op(ops, half)
    for a, b in ((0, 1), (1, 1000), (1000, 4097), (4097, 3_000_001)):
        piece = object.__new__(Buffers)
        vars(piece).update({n: t[a:b] for n, t in vars(cut).items() if t.dim()})
        piece.op(ops, half)
    return all(torch.equal(getattr(whole, n), getattr(cut, n)) for n in ("param", "mean", "square", "low"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compiled = select("torch", compiled=True) if shutil.which("g++") or shutil.which("clang++") else None
    for name, ops in (("the op", TORCH), ("by torch.compile", compiled)):
        if ops is not None:
            bits = [same_bits_however_cut(ops, half) for half in (False, True)]
            print(
                f"{name}: the same bits however the buffer is cut: float32 {bits[0]}, bf16 in and out {bits[1]}"
            )
            if not all(bits):
                return 1
    held = Buffers(arguments.numel)
    sides: dict[str, Callable[[], None]] = {
        "torch fused, float32": lambda: held.fused(held.grad),
        "the op, float32": lambda: held.op(TORCH, half=False),
        "torch fused between casts": held.between_casts,
        "the op, bf16 in and out": lambda: held.op(TORCH, half=True),
    }
    if compiled is not None:
        sides["the op, by torch.compile"] = lambda: held.op(compiled, half=True)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for number in range(arguments.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - start)
    run_on = f"{arguments.threads} threads, {arguments.rounds} rounds, torch {torch.__version__}"
    print(f"\n{arguments.numel:,} elements, {run_on}")
    print(f"{'side':28} {'best ms':>8} {'median ms':>10} {'by the best':>12} {'by median':>10}  as")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[SIDES[name]], taken, strict=True))
        best, median = min(taken) * 1e3, statistics.median(taken) * 1e3
        of_best = min(times[SIDES[name]]) / min(taken)
        print(f"{name:28} {best:8.2f} {median:10.2f} {of_best:12.3f} {ratio:10.3f}  {SIDES[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
