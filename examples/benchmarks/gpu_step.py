"""Times a full training step on one GPU: the op table, torch eager, torch.compile and the engine.

    PYTHONPATH=. python examples/benchmarks/gpu_step.py --out step.json        (124 M and 1.3 B; some 8 minutes)
    PYTHONPATH=. python examples/benchmarks/gpu_step.py --dry-run              (any machine: a tiny model)

Every side trains the same GPT from the same values on the same tokens: bf16 weights beside float32 masters, AdamW,
clipping at 1.0, no activation checkpointing.  `eager` and `compile` keep masters as a list and use torch's fused
AdamW; `kernels` keeps all weights in one flat buffer and takes model and update through the op table; `engine` is
`cl.initialize` with kernels="auto", and is left out where its packages are not installed.  Printed are tokens a
second, model FLOPs (6 N + 12 L D T a token, arXiv 2204.02311 appendix B) a second and as a share of a matrix product
measured in this run (MFU), peak memory, and the last loss, in which sides may differ by rounding only.  The JSON is
rewritten after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_lite.kernels import Ops, select
from colossal_lite.models import GPT, GPTConfig

Step = Callable[[Tensor, Tensor], Tensor]
"""Inputs and labels [B, T] to the mean loss, 0-d, after one optimizer step."""
ADAMW = dict(lr=3e-4, eps=1e-8, weight_decay=0.1)
BETAS = (0.9, 0.95)
CLIP = 1.0

MODELS: dict[str, tuple[GPTConfig, int]] = {
    "124M": (GPTConfig.gpt2("124M", vocabulary=50304), 32),
    "1.3B": (GPTConfig(vocabulary=50304, layers=24, heads=16, width=2048, sequence=4096), 4),
}
TINY = (GPTConfig(vocabulary=64, layers=2, heads=2, width=32, sequence=16), 2)


@dataclass(frozen=True)
class Row:
    """One side of one model."""

    model: str
    side: str
    step_ms: float
    tokens_per_s: float
    tflops: float
    mfu: float
    peak_gib: float
    loss: float
    note: str = ""


# -------------------------------------------------------------------------------------------------------- sides


def built(config: GPTConfig, device: str) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(device=device, dtype=torch.bfloat16)


def plain(config: GPTConfig, device: str, *, compiled: bool) -> Step:
    """The loop that anyone would write."""
    model = built(config, device)
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, betas=BETAS, fused=True, **ADAMW)  # type: ignore[arg-type]

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = run(inputs, labels)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([p.detach() for p in weights], [p.detach() for p in masters])
        return loss.detach()

    return step


def with_ops(config: GPTConfig, device: str, ops: Ops) -> Step:
    """Model and update through the op table; weights, gradients, masters and moments are flat."""
    model = built(config, device)
    for owner in model.modules():
        if hasattr(owner, "ops"):
            setattr(owner, "ops", ops)  # noqa: B010
    weights = list(model.parameters())
    low = torch.cat([p.detach().view(-1) for p in weights])
    gradient = torch.zeros_like(low)
    start = 0
    for p in weights:
        end = start + p.numel()
        p.data, p.grad = low[start:end].view(p.shape), gradient[start:end].view(p.shape)
        start = end
    master = low.float()
    mean, square = torch.zeros_like(master), torch.zeros_like(master)
    taken = 0

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        total, count = ops.cross_entropy(model(inputs), labels)
        loss = total / count
        loss.backward()
        norm = ops.square_sum([gradient]).sqrt().float()
        scale = torch.clamp((norm + 1e-6) / CLIP, min=1.0)
        ops.adamw_(
            master, gradient, mean, square, step=taken, beta1=BETAS[0], beta2=BETAS[1], grad_scale=scale, low=low,
            **ADAMW,
        )  # fmt: skip
        gradient.zero_()
        return loss.detach()

    return step


def through_engine(config: GPTConfig, device: str, stack: ExitStack) -> Step:
    import colossal_lite as cl

    setting = dict(
        precision="bf16",
        optimizer=dict(type="adamw", betas=BETAS, **ADAMW),
        clip_grad_norm=CLIP,
        kernels="auto",
    )
    context = stack.enter_context(cl.launch(setting))
    engine = cl.initialize(built(config, "cpu"), context=context)
    return lambda inputs, labels: engine.train_step((inputs, labels)).loss


# ---------------------------------------------------------------------------------------------------- measuring


def matmul_tflops(device: str, edge: int) -> float:
    """The ceiling: a square bf16 product of random numbers, median of ten."""
    a, b = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    times = []
    for _ in range(13):
        start = time.perf_counter()
        a @ b
        wait(device)
        times.append(time.perf_counter() - start)
    return 2 * edge**3 / statistics.median(times[3:]) / 1e12


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def flops_per_token(config: GPTConfig) -> float:
    with torch.device("meta"):
        model = GPT(config)
    tables = model.position.weight.numel() if model.position is not None else 0
    if not config.tied:
        tables += model.token.weight.numel()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - tables
    return 6.0 * matrices + 12.0 * config.layers * config.width * config.sequence


def measured(
    name: str, side: str, step: Step, config: GPTConfig, batch: int, device: str, steps: int, top: float
) -> Row:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocabulary, (batch, config.sequence + 1), generator=generator).to(device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        loss = step(inputs, labels)
    wait(device)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step(inputs, labels)
        wait(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    rate = batch * config.sequence / seconds
    tflops = rate * flops_per_token(config) / 1e12
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return Row(name, side, seconds * 1e3, rate, tflops, tflops / top, peak, float(loss))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model, without torch.compile; any machine"
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sides", nargs="*", default=["eager", "compile", "kernels", "engine"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.dry_run:
        print("gpu_step: no CUDA device is visible; legal here: --dry-run", file=sys.stderr)
        return 2
    top = matmul_tflops(device, 64 if arguments.dry_run else 8192)
    sizes = {"tiny": TINY} if arguments.dry_run else {name: MODELS[name] for name in arguments.models}
    wanted = [s for s in arguments.sides if not (arguments.dry_run and s == "compile")]
    rows: list[Row] = []
    for name, (config, batch) in sizes.items():
        for side in wanted:
            rows.append(
                one(name, side, config, batch, device, 2 if arguments.dry_run else arguments.steps, top)
            )
            print(line(rows[-1]), flush=True)
            if arguments.out:
                found = {"setting": setting(device), "matmul_tflops": top, "rows": [asdict(r) for r in rows]}
                arguments.out.write_text(json.dumps(found, indent=1))
    return 0


def one(name: str, side: str, config: GPTConfig, batch: int, device: str, steps: int, top: float) -> Row:
    """One row. When it returns nothing of its side is left, so that the peak of the next is its own."""
    try:
        return trained(name, side, config, batch, device, steps, top)
    finally:
        if side == "compile":
            torch.compiler.reset()  # compiled code holds weights
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def trained(name: str, side: str, config: GPTConfig, batch: int, device: str, steps: int, top: float) -> Row:
    """A side that does not fit or is not installed is a row that says so."""
    with ExitStack() as stack:
        try:
            if side == "engine":
                step = through_engine(config, device, stack)
            elif side == "kernels":
                step = with_ops(config, device, select("auto", device))
            else:
                step = plain(config, device, compiled=side == "compile")
            return measured(name, side, step, config, batch, device, steps, top)
        except (ImportError, torch.OutOfMemoryError) as error:
            note = f"{type(error).__name__}: {error}"[:200]
            return Row(name, side, 0.0, 0.0, 0.0, 0.0, 0.0, float("nan"), note)


def setting(device: str) -> dict[str, str]:
    """What a table of these figures has to say."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    triton = version("triton") if find_spec("triton") else "absent"
    python, date = platform.python_version(), time.strftime("%Y-%m-%d")
    return {"device": name, "torch": torch.__version__, "triton": triton, "python": python, "date": date}


def line(row: Row) -> str:
    if row.note:
        return f"{row.model:5} {row.side:8} {row.note}"
    return (
        f"{row.model:5} {row.side:8} {row.step_ms:9.2f} ms  {row.tokens_per_s:10.0f} tokens/s  "
        f"{row.tflops:7.3g} TFLOP/s  MFU {row.mfu:6.1%}  {row.peak_gib:6.2f} GiB  loss {row.loss:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
