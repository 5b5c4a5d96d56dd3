"""Times every kernel beside its peers on one GPU, as a share of the measured bandwidth or matrix rate.

    PYTHONPATH=. python examples/benchmarks/gpu_kernels.py --out kernels.json       (at most 8 minutes)
    PYTHONPATH=. python examples/benchmarks/gpu_kernels.py --dry-run                (any machine: tiny sizes)

It needs torch and triton and nothing else.  First the ceilings of this run: a copy of 2 GiB, and a product of
8192-square bf16 matrices of random numbers.  Then each row: the result is compared with float64 on fewer rows of
the same width, and only a right one is timed.  Times are medians of device events, each sample after a write of
256 MiB that empties the second-level cache.  Peers are torch eager, torch.compile, torch's fused AdamW, and
liger-kernel where it can be imported.  Bytes are what the formula must move, whatever an implementation moves.  The
JSON is rewritten after every task, so that a run which is cut off is a shorter run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossal_lite.kernels import FULL, TORCH, Mask, Ops, Rows, select
from colossal_lite.kernels.optimizer import adamw_reference, lion_reference, sgd_reference

FLUSH_BYTES = 256 << 20
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Side = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """One op at one size.  `inputs(rows)` makes its tensors; a side computes from them.

    reference: the op in float64, on inputs of `few` rows.
    work: bytes (or, if `flops`, operations) of forward and of backward; no backward where that is None.
    """

    name: str
    inputs: Callable[[int], list[Tensor]]
    rows: int
    few: int
    ours: Side
    peers: Mapping[str, Side]
    reference: Side
    work: tuple[float, float | None]
    flops: bool = False


@dataclass
class Row:
    """What came of one direction of a task; times in milliseconds, by side."""

    name: str
    unit: str
    ms: dict[str, float] = field(default_factory=dict)
    rate: dict[str, float] = field(default_factory=dict)
    share_of_ceiling: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    note: str = ""


# ---------------------------------------------------------------------------------------------------- measuring


class Clock:
    """Medians on one device."""

    def __init__(self, device: str, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)

    def ms(self, run: Callable[[], Any]) -> float:
        """Median over as many calls as fit the budget, at least 3 and at most 100."""
        for _ in range(3):
            run()
        samples: list[float] = []
        end = time.perf_counter() + self.budget_s
        while len(samples) < 3 or (len(samples) < 100 and time.perf_counter() < end):
            self.flush.zero_()
            samples.append(self._once(run))
        return statistics.median(samples)

    def _once(self, run: Callable[[], Any]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))


def ceilings(clock: Clock, tiny: bool) -> dict[str, float]:
    """GB/s of a copy (read and written bytes) and TFLOP/s of a bf16 product, on random numbers."""
    numel, edge = (1 << 16, 64) if tiny else (1 << 30, 8192)
    x = torch.ones(numel, dtype=torch.bfloat16, device=clock.device)
    y = torch.empty_like(x)
    a, b = (torch.randn(edge, edge, device=clock.device).bfloat16() for _ in range(2))
    return {
        "GB/s": 4 * numel / clock.ms(lambda: y.copy_(x)) / 1e6,
        "TFLOP/s": 2 * edge**3 / clock.ms(lambda: a @ b) / 1e9,
    }


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for x in value or () if isinstance(x, Tensor)]


def error_of(task: Task, device: str) -> float:
    """Largest distance from the float64 reference, relative to its norm, over outputs and gradients of `few` rows."""
    torch.manual_seed(0)
    inputs = task.inputs(task.few)
    exact = [leaf(x.detach().double() if x.is_floating_point() else x) for x in inputs]
    got, want = tensors(task.ours(*inputs)), tensors(task.reference(*exact))
    pairs = list(zip(got, want, strict=True))
    if task.work[1] is not None:
        trained = [i for i, x in enumerate(inputs) if x.requires_grad]
        directions = [torch.randn_like(x) for x in got]
        ours = torch.autograd.grad(got, [inputs[i] for i in trained], directions)
        truth = torch.autograd.grad(want, [exact[i] for i in trained], [d.double() for d in directions])
        pairs += list(zip(ours, truth, strict=True))
    return max(
        float((a.detach().double() - b.detach()).norm() / b.detach().double().norm().clamp(min=1e-30))
        for a, b in pairs
    )


def leaf(x: Tensor) -> Tensor:
    return x.requires_grad_(x.is_floating_point())


def measured(
    task: Task, clock: Clock, limits: Mapping[str, float], with_compile: bool, deadline_s: float
) -> Iterator[Row]:
    """One row for forward and, if there is one, one for backward; no side begins after the deadline."""
    unit = "TFLOP/s" if task.flops else "GB/s"
    rows = [Row(f"{task.name} forward" if task.work[1] is not None else task.name, unit)]
    if task.work[1] is not None:
        rows.append(Row(f"{task.name} backward", unit))
    try:
        rows[0].error = error_of(task, clock.device)
        torch.manual_seed(0)
        inputs = task.inputs(task.rows)
    except Exception as error:  # a kernel that fails is a row that says so, and the others are measured
        rows[0].note = f"WRONG: {said(error)}"
        yield rows[0]
        return
    dtype = next(x.dtype for x in inputs if x.is_floating_point())
    if not rows[0].error <= TOLERANCE[dtype]:
        rows[0].note = f"WRONG: {rows[0].error:.1e} from the float64 reference; not timed"
        yield rows[0]
        return
    for side, run in sides(task, with_compile).items():
        if time.monotonic() > deadline_s:
            rows[0].note += f"{side}: out of time; "
            continue
        try:
            for row, ms in zip(rows, timed(run, inputs, clock, both=task.work[1] is not None), strict=True):
                work = task.work[0] if row is rows[0] else task.work[1]
                assert work is not None
                row.ms[side] = ms
                row.rate[side] = work / ms / (1e9 if task.flops else 1e6)
                row.share_of_ceiling[side] = row.rate[side] / limits[unit]
        except Exception as error:  # a peer that cannot do it has no column, whatever its compiler raises
            rows[0].note += f"{'WRONG: ' if side == 'ours' else ''}{side}: {said(error)}; "
    yield from rows


def said(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0][:100]}"


def sides(task: Task, with_compile: bool) -> dict[str, Side]:
    found = {"ours": task.ours, **task.peers}
    if with_compile and "eager" in found:
        found["compile"] = torch.compile(found["eager"], dynamic=False)
    return found


def timed(run: Side, inputs: list[Tensor], clock: Clock, *, both: bool) -> list[float]:
    if not both:
        with torch.no_grad():
            return [clock.ms(lambda: run(*inputs))]
    with torch.no_grad():
        forward = clock.ms(lambda: run(*inputs))
    out = [x for x in tensors(run(*inputs)) if x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    directions = [torch.randn_like(x) for x in out]
    backward = clock.ms(lambda: torch.autograd.grad(out, wanted, directions, retain_graph=True))
    return [forward, backward]


# -------------------------------------------------------------------------------------------------------- tasks


def liger(name: str) -> Side | None:
    """A function of liger-kernel, if that is installed."""
    try:
        found: Side = getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except (ImportError, AttributeError):
        return None
    return found


def peers(eager: Side, liger_name: str = "", order: Callable[[Side], Side] = lambda f: f) -> dict[str, Side]:
    found: dict[str, Side] = {"eager": eager}
    function = liger(liger_name) if liger_name else None
    return found if function is None else found | {"liger": order(function)}


def tasks(ops: Ops, best: Ops, device: str, tiny: bool) -> Iterator[Task]:
    """`ops`: every kernel in Triton; `best`: what kernels="auto" takes."""
    t = 64 if tiny else 16384

    def size(n: int) -> int:
        return max(16, n // 256 * 16) if tiny else n

    def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return leaf(torch.randn(*shape, device=device).to(dtype))

    yield from norms(ops, x, size, t)
    yield from pointwise(ops, x, size, t, device)
    yield from attention(ops, best, x, t, tiny, device)
    yield from losses(ops, x, size, t, device)
    yield from flat_passes(ops, x, tiny, device)


Make = Callable[..., Tensor]


def norms(ops: Ops, x: Make, size: Callable[[int], int], t: int) -> Iterator[Task]:
    for d in map(size, (4096, 16384)):
        rms = dict(reference=lambda a, w: TORCH.rms_norm(a, w, 1e-5), rows=t, few=min(t, 256))
        yield Task(
            f"rms_norm {t} x {d}", lambda n, d=d: [x(n, d), x(d)], ours=lambda a, w: ops.rms_norm(a, w, 1e-5),
            peers=peers(
                lambda a, w: F.rms_norm(a, w.shape, w, 1e-5), "liger_rms_norm", lambda f: lambda a, w: f(a, w, 1e-5)
            ),
            work=(4.0 * t * d, 6.0 * t * d), **rms,
        )  # fmt: skip
        yield Task(
            f"add_rms_norm {t} x {d}", lambda n, d=d: [x(n, d), x(n, d), x(d)],
            ours=lambda a, r, w: ops.add_rms_norm(a, r, w, 1e-5),
            peers=peers(
                lambda a, r, w: TORCH.add_rms_norm(a, r, w, 1e-5), "liger_fused_add_rms_norm",
                lambda f: lambda a, r, w: f(a, r, w, 1e-5),
            ),
            reference=lambda a, r, w: TORCH.add_rms_norm(a, r, w, 1e-5), rows=t, few=min(t, 256),
            work=(8.0 * t * d, 8.0 * t * d),
        )  # fmt: skip
    d = size(4096)
    yield Task(
        f"layer_norm {t} x {d}", lambda n: [x(n, d), x(d), x(d)], ours=lambda a, w, b: ops.layer_norm(a, w, b, 1e-5),
        peers=peers(
            lambda a, w, b: F.layer_norm(a, w.shape, w, b, 1e-5), "liger_layer_norm",
            lambda f: lambda a, w, b: f(a, w, b, 1e-5),
        ),
        reference=lambda a, w, b: TORCH.layer_norm(a, w, b, 1e-5), rows=t, few=min(t, 256),
        work=(4.0 * t * d, 6.0 * t * d),
    )  # fmt: skip


def pointwise(ops: Ops, x: Make, size: Callable[[int], int], t: int, device: str) -> Iterator[Task]:
    f, d = size(14336), size(4096)
    yield Task(
        f"bias + gelu {t} x {f}", lambda n: [x(n, f), x(f)], ours=lambda a, b: ops.gelu(a, b),
        peers=peers(lambda a, b: F.gelu(a + b, approximate="tanh")), reference=lambda a, b: TORCH.gelu(a, b),
        rows=t, few=min(t, 256), work=(4.0 * t * f, 6.0 * t * f),
    )  # fmt: skip
    yield Task(
        f"bias + exact gelu {t} x {f}", lambda n: [x(n, f), x(f)], ours=lambda a, b: ops.gelu(a, b, "none"),
        peers=peers(lambda a, b: F.gelu(a + b)), reference=lambda a, b: TORCH.gelu(a, b, "none"),
        rows=t, few=min(t, 256), work=(4.0 * t * f, 6.0 * t * f),
    )  # fmt: skip
    yield Task(
        f"swiglu {t} x {f}", lambda n: [x(n, f), x(n, f)], ours=lambda g, u: ops.swiglu(g, u),
        peers=peers(lambda g, u: F.silu(g) * u, "liger_swiglu"), reference=lambda g, u: TORCH.swiglu(g, u),
        rows=t, few=min(t, 256), work=(6.0 * t * f, 10.0 * t * f),
    )  # fmt: skip
    samples, heads = 4, max(2, size(640) // 16)
    yield Task(
        f"rotary {t} x {heads} x 128", lambda n: [x(samples, n // samples, heads, 128)],
        ours=lambda a: ops.rotary(a, torch.arange(a.shape[1], device=device)),
        peers=peers(lambda a: TORCH.rotary(a, torch.arange(a.shape[1], device=device))),
        reference=lambda a: TORCH.rotary(a, torch.arange(a.shape[1], device=device)), rows=t, few=min(t, 256),
        work=(512.0 * t * heads, 512.0 * t * heads),
    )  # fmt: skip

    def where(a: Tensor) -> Rows:
        places = [torch.arange(n, device=device) for n in a.shape[:2]]
        return Rows((1, 2), 3, places[0], places[1])

    yield Task(
        f"dropout_add {t} x {d}", lambda n: [x(samples, n // samples, d), x(samples, n // samples, d)],
        ours=lambda a, r: ops.dropout_add(a, r, 0.1, where(a)),
        peers={"eager": lambda a, r: r + F.dropout(a, 0.1)},
        reference=lambda a, r: TORCH.dropout_add(a, r, 0.1, where(a)), rows=t, few=min(t, 256),
        work=(6.0 * t * d, 4.0 * t * d),
    )  # fmt: skip


def attention(ops: Ops, best: Ops, x: Make, t: int, tiny: bool, device: str) -> Iterator[Task]:
    s, heads, groups = (32, 4, 2) if tiny else (4096, 32, 8)
    for k in (64, 128):
        for kind, seen in (
            ("causal", 0.5), ("full", 1.0), ("documents", 0.125), ("window of an eighth", 0.117), ("ring step", 1.0),
        ):  # fmt: skip
            options: dict[str, Any] = {
                "full": dict(mask=FULL), "ring step": dict(offsets=(s, 0)), "window of an eighth": dict(window=s // 8),
            }.get(kind, {})  # fmt: skip

            def of(table: Ops, kind: str = kind, options: dict[str, Any] = options) -> Side:
                def run(q: Tensor, key: Tensor, v: Tensor) -> Tensor:
                    more = options
                    if kind == "documents":
                        numbers = torch.arange(q.shape[1], device=q.device) * 4 // q.shape[1]
                        more = dict(mask=Mask(documents=numbers.expand(q.shape[0], -1).contiguous()))
                    out: Tensor = table.attend(q, key, v, **more)
                    return out

                return run

            others: dict[str, Side] = {"auto": of(best)}
            if kind in ("causal", "full"):
                others["sdpa"] = lambda q, key, v, causal=kind == "causal": F.scaled_dot_product_attention(
                    *(a.transpose(1, 2) for a in (q, key, v)), is_causal=causal, enable_gqa=True
                ).transpose(1, 2)  # fmt: skip
            flops = 4.0 * (t // s) * heads * s * s * k * seen
            yield Task(
                f"attend {kind} {t // s} x {s}, {heads}/{groups} heads of {k}",
                lambda n, k=k: [x(n // s, s, h, k) for h in (heads, groups, groups)], ours=of(ops), peers=others,
                reference=of(TORCH), rows=t, few=s if tiny else s, work=(flops, 2.5 * flops), flops=True,
            )  # fmt: skip


def losses(ops: Ops, x: Make, size: Callable[[int], int], t: int, device: str) -> Iterator[Task]:
    v, d, n_rows = size(131072), size(4096), t // 2

    def labels(n: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (n,), device=device)

    yield Task(
        f"cross_entropy {n_rows} x {v}", lambda n: [x(n, v), labels(n, v)],
        ours=lambda z, y: ops.cross_entropy(z, y)[0],
        peers=peers(
            lambda z, y: F.cross_entropy(z, y, reduction="sum"), "liger_cross_entropy",
            lambda f: lambda z, y: f(z, y, reduction="sum"),
        ),
        reference=lambda z, y: TORCH.cross_entropy(z, y)[0], rows=n_rows, few=min(n_rows, 128),
        work=(2.0 * n_rows * v, 4.0 * n_rows * v),
    )  # fmt: skip
    w = size(128256)
    yield Task(
        f"linear_cross_entropy {n_rows} x {d} x {w}, gradients made in forward",
        lambda n: [x(n, d), x(w, d), labels(n, w)],
        ours=lambda a, b, y: gradients(lambda p, q: ops.linear_cross_entropy(p, q, y)[0], a, b),
        peers={"eager": lambda a, b, y: gradients(lambda p, q: F.cross_entropy(p @ q.T, y, reduction="sum"), a, b)},
        reference=lambda a, b, y: gradients(lambda p, q: TORCH.linear_cross_entropy(p, q, y)[0], a, b),
        rows=n_rows, few=64, work=(6.0 * n_rows * d * w, None), flops=True,
    )  # fmt: skip
    rows = torch.randint(w, (t,), device=device)
    yield Task(
        f"embedding gradient {t} x {d} into {w}",
        lambda n: [torch.zeros(w, d, device=device), x(n, d).detach(), rows[:n]],
        ours=lambda total, dy, ids: (ops.embedding_grad_(total, dy, ids), total)[1],
        peers={"eager": lambda total, dy, ids: total.index_add_(0, ids, dy.float())},
        reference=lambda total, dy, ids: total.index_add(0, ids, dy), rows=t, few=64, work=(10.0 * t * d, None),
    )  # fmt: skip


def gradients(loss: Side, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        return torch.autograd.grad(loss(*inputs), inputs)


def flat_passes(ops: Ops, x: Make, tiny: bool, device: str) -> Iterator[Task]:
    n = 1 << 12 if tiny else 1 << 28
    full = dict(dtype=torch.float32)
    adamw = dict(step=3, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

    def make(low: bool) -> Callable[[int], list[Tensor]]:
        def inputs(numel: int) -> list[Tensor]:
            p, g, m, v = (x(numel, **full).detach() for _ in range(4))
            return [p, g.bfloat16() if low else g, m, v.abs_(), *([p.bfloat16()] if low else [])]

        return inputs

    def fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, low: Tensor | None = None) -> None:
        step = torch.ones((), device=device)
        torch._fused_adamw_(
            [p], [g.float()], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        if low is not None:
            low.copy_(p)

    def stepped(*b: Tensor) -> tuple[Tensor, ...]:
        """In place: the weights, the moments, and the narrow weights."""
        ops.adamw_(*b[:4], low=b[4] if b[4:] else None, **adamw)
        return b[0], *b[2:]

    def exactly(*b: Tensor) -> tuple[Tensor, ...]:
        found = adamw_reference(*b[:4], **adamw)
        return *found, *((found[0].bfloat16(),) if b[4:] else ())

    for low, name in ((False, "float32"), (True, "bf16 in, bf16 out")):
        yield Task(
            f"adamw {n} {name}", make(low), ours=stepped, peers={"torch fused": fused}, reference=exactly, rows=n,
            few=min(n, 1 << 20), work=(28.0 * n, None),
        )  # fmt: skip
    sgd, lion = dict(lr=1e-3, momentum=0.9), dict(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
    for name, step, truth in (
        ("sgd with momentum", partial(ops.sgd_, **sgd), partial(sgd_reference, **sgd)),
        ("lion", partial(ops.lion_, **lion), partial(lion_reference, **lion)),
    ):
        yield Task(
            f"{name} {n} float32", lambda k: make(low=False)(k)[:3],
            ours=lambda p, g, m, step=step: (step(p, g, m), (p, m))[1], peers={}, reference=truth, rows=n,
            few=min(n, 1 << 20), work=(20.0 * n, None),
        )  # fmt: skip
    yield Task(
        f"square_sum {n} bf16", lambda k: [x(k).detach()], ours=lambda a: ops.square_sum([a]),
        peers={"eager": lambda a: torch._foreach_norm([a], dtype=torch.float32)},
        reference=lambda a: TORCH.square_sum([a]), rows=n, few=min(n, 1 << 20), work=(2.0 * n, None),
    )  # fmt: skip
    m = n // 16
    yield Task(
        f"normal {m}", lambda k: [torch.empty(0, device=device)],
        ours=lambda _: ops.normal((1, 2), 0, m, device=device),
        peers={"torch.randn": lambda _: torch.randn(m, dtype=torch.float64, device=device)},
        reference=lambda _: TORCH.normal((1, 2), 0, m).to(device),
        rows=m, few=m, work=(8.0 * m, None),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no peers but eager; any machine")
    parser.add_argument("--only", default="", help="tasks whose name has this in it")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="no task starts in its last 40 s, no side in 20",
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    tiny = arguments.dry_run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        print("gpu_kernels: no CUDA device is visible; legal here: --dry-run", file=sys.stderr)
        return 2
    start = time.monotonic()
    clock = Clock(device, 0.01 if tiny else 0.5)
    limits = ceilings(clock, tiny)
    report: dict[str, Any] = {"setting": setting(device), "ceilings": limits, "rows": []}
    print(
        json.dumps(report["setting"]), {name: round(value, 1) for name, value in limits.items()}, flush=True
    )
    ops = TORCH if device == "cpu" else select("triton", device)
    wrong = 0
    for task in tasks(ops, select("auto", device), device, tiny):
        if arguments.only not in task.name:
            continue
        if time.monotonic() - start > 60 * arguments.minutes - 40:
            found = [Row(task.name, "", note="out of time")]
        else:
            compiles = not (tiny or arguments.no_compile)
            found = list(measured(task, clock, limits, compiles, start + 60 * arguments.minutes - 20))
        for row in found:
            wrong += row.note.startswith("WRONG")
            report["rows"].append(asdict(row))
            print(line(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))
        if device == "cuda":
            torch.cuda.empty_cache()
    return 1 if wrong else 0


def setting(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        triton = "absent"
    return {
        "device": name, "torch": torch.__version__, "triton": triton, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def line(row: Row) -> str:
    error = "" if row.error is None else f"  error {row.error:.0e}"
    cells = [
        f"{side} {row.rate[side]:.3g} {row.unit} ({row.share_of_ceiling[side]:.0%}, {ms:.3f} ms)"
        for side, ms in row.ms.items()
    ]
    return f"{row.name:58} {' | '.join(cells)}{error} {row.note}"


if __name__ == "__main__":
    sys.exit(main())
