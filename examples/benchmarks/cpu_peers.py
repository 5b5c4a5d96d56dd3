"""Times our step and the peers' steps in turn, in one process on a CPU: overhead of the engine, gain of each mode.

    python examples/benchmarks/cpu_peers.py                     # both tables
    python examples/benchmarks/cpu_peers.py --world 2 --only "one rank" "data" "tensor"
    python examples/benchmarks/cpu_peers.py --world 2 4 --model small --only "one rank" "tensor"
    python examples/benchmarks/cpu_peers.py --world 2 --only "one rank" "ZeRO" "FSDP2" --memory

Every rank holds all models and takes blocks of steps with each in turn, forth and back (A B C, C B A, ...), one thread
a rank, so that a drift of the machine's speed meets all alike.  A row's ratio is the median over rounds of its block to
the peer's block of the same round.  Quoted are CPU seconds summed over ranks, which other work on the machine changes
little, and wall time of the slowest rank.  "one rank" is the plain loop on rank 0 with the whole batch while the others
wait: what the speed-up is counted from; "same parts" are CPU seconds over those of one rank that takes the samples one
by one, as a pipeline's micro-batches.  MB sent are what went through the loopback device meanwhile, a rank and step
(everything else on the machine that uses it is counted too), and what a rank laid in shared memory for the others.
`--memory` starts each side alone and adds its peak resident memory, less that of a process that has imported torch.
The model: GPT-2 family, 6 layers, width 384, 6 heads, sequence 256, vocabulary 2048, tied, batch 4, float32, AdamW,
clipping at 1.0; with `--model small` width 256, 8 heads, vocabulary 4096, untied, batch 8.  DTensor gets the same sizes
with separate q, k and v, which is the form it can cut, and no clipping, which it refuses for a model with plain and cut
parameters.  DeepSpeed's sides are there where it can be imported (DS_ACCELERATOR=cpu where there is a GPU); the first
of its runs compiles for some minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import colossal_lite as cl
from colossal_lite.models import GPT, GPTConfig

CONFIG: dict[str, Any] = dict(
    precision="fp32", optimizer=dict(type="adamw", lr=1e-3, weight_decay=0.1), clip_grad_norm=1.0
)
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Work:
    """What is trained: a model, on samples of its whole sequence, by `world` ranks."""

    model: GPTConfig
    global_batch: int
    world: int


MODELS: dict[str, tuple[GPTConfig, int]] = {
    "wide": (GPTConfig(layers=6, width=384, heads=6, sequence=256, vocabulary=2048), 4),
    "small": (GPTConfig(layers=6, width=256, heads=8, sequence=256, vocabulary=4096, tied=False), 8),
}
Side = Callable[[ExitStack, Work], tuple[Step, cl.Context]]


@dataclass(frozen=True)
class Block:
    """CPU seconds and bytes sent of this rank, and wall seconds of the slowest rank, per step."""

    cpu_s: float
    wall_s: float
    sent_bytes: float


# ---- the sides: each builds a model and returns its step, and the context that says which samples it takes ----


def ours(stack: ExitStack, work: Work, **settings: Any) -> tuple[Step, cl.Context]:
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG | settings))
    engine = cl.initialize(GPT(work.model), context=context)
    return lambda inputs, labels: engine.train_step((inputs, labels)).loss.item(), context


def plain(
    stack: ExitStack, work: Work, optimizer: Callable[..., Any] | None = None
) -> tuple[Step, cl.Context]:
    """The loop anyone would write; under several ranks with DistributedDataParallel."""
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG))
    model: nn.Module = GPT(work.model)
    if context.world_size > 1:
        model = DistributedDataParallel(model)
    chosen = optimizer or torch.optim.AdamW
    return _loop(model, chosen(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)), context


def alone(stack: ExitStack, work: Work, *, micro_batches: int = 1) -> tuple[Step, cl.Context]:
    """The plain loop over the whole batch on rank 0, all at once or in so many parts."""
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG | tensor(work)))  # whole batches on all ranks
    model = GPT(work.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    step = _loop(model, optimizer, micro_batches=micro_batches)
    return (step if context.is_main else lambda inputs, labels: 0.0), context


def fsdp2(stack: ExitStack, work: Work, *, reshard: bool) -> tuple[Step, cl.Context]:
    """fully_shard of each block and of the rest."""
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG))
    model = GPT(work.model)
    mesh = init_device_mesh("cpu", (context.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)), context


def deepspeed_zero(stack: ExitStack, work: Work, *, stage: int) -> tuple[Step, cl.Context]:
    """DeepSpeed's engine on its CPU accelerator over gloo, with torch's fused AdamW and float32 throughout."""
    deepspeed = import_module("deepspeed")
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG))
    model = GPT(work.model)
    config = {
        "train_micro_batch_size_per_gpu": work.global_batch // work.world,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": sys.maxsize,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(inputs: Tensor, labels: Tensor) -> float:
        loss = _mean_loss(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, context


def dtensor(stack: ExitStack, work: Work, *, sequence: bool, data: int = 1) -> tuple[Step, cl.Context]:
    """torch.distributed.tensor.parallel over all ranks, or over groups of them with FSDP2 over `data` groups;
    `sequence`: residual stream cut along the sequence."""
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG | tensor(work, size=work.world // data)))
    model = Separate(work.model)
    both = init_device_mesh("cpu", (data, work.world // data), mesh_dim_names=("data", "tensor"))
    mesh = both["tensor"]
    stream = Shard(1) if sequence else Replicate()
    entry = dict(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True)
    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    for i in range(work.model.layers):
        at = f"blocks.{i}"
        plan |= {f"{at}.attention": PrepareModuleInput(**entry), f"{at}.mlp": PrepareModuleInput(**entry)}
        plan |= {f"{at}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.attention.out": RowwiseParallel(output_layouts=stream)}
        plan |= {f"{at}.mlp.up": ColwiseParallel(), f"{at}.mlp.down": RowwiseParallel(output_layouts=stream)}
        plan |= {f"{at}.norm{n}": SequenceParallel() for n in (1, 2)} if sequence else {}
    plan |= {"norm": SequenceParallel()} if sequence else {}
    model.cut = (mesh.size(), mesh.get_local_rank()) if sequence else (1, 0)
    parallelize_module(model, mesh, plan)
    if work.model.tied:
        model.head.weight = model.token.weight
    for block in model.blocks:
        block.attention.heads //= mesh.size()
        if data > 1:
            fully_shard(block, mesh=both["data"])
    if data > 1:
        fully_shard(model, mesh=both["data"])
    cut = [
        p
        for p in model.parameters()
        if isinstance(p, DTensor) and "tensor" in (p.device_mesh.mesh_dim_names or ())
    ]
    whole = [p for p in model.parameters() if all(p is not other for other in cut)]
    optimizers = [torch.optim.AdamW(some, lr=1e-3, weight_decay=0.1, fused=True) for some in (cut, whole)]
    return _loop(model, *optimizers, clip=False), context


def torch_pipeline(
    stack: ExitStack, work: Work, *, schedule: Any, chunks: int = 1
) -> tuple[Step, cl.Context]:
    """torch.distributed.pipelining, a micro-batch a sample, cut as `CUTS` says. It ties no weights between stages and
    clips no gradients."""
    torch.manual_seed(0)
    context = stack.enter_context(cl.launch(CONFIG | tensor(work)))  # whole batches on all ranks
    stages, rank = chunks * work.world, context.rank
    v_shaped = schedule is ScheduleZBVZeroBubble
    here = (rank, stages - 1 - rank) if v_shaped else range(rank, stages, work.world)
    parts = [Layers(work.model, index, stages) for index in here]
    built = [
        PipelineStage(part, index, stages, torch.device("cpu"))
        for part, index in zip(parts, here, strict=True)
    ]
    runs = schedule(built if chunks > 1 else built[0], work.global_batch, loss_fn=_mean_loss)
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)

    def step(inputs: Tensor, labels: Tensor) -> float:
        losses: list[Tensor] = []
        given = (inputs,) if 0 in here else ()
        runs.step(*given, **(dict(target=labels, losses=losses) if stages - 1 in here else {}))
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / work.global_batch

    return step, context


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


CUTS = {2: (0, 3, 6), 4: (0, 1, 3, 5, 6)}
"""Which of 6 layers each of so many stages begins with; the first has the embedding beside, the last the head."""


class Layers(nn.Module):
    """One stage of the same GPT."""

    def __init__(self, config: GPTConfig, stage: int, stages: int) -> None:
        super().__init__()
        whole = Separate(config)
        self.token, self.position = (whole.token, whole.position) if stage == 0 else (None, None)
        self.blocks = whole.blocks[CUTS[stages][stage] : CUTS[stages][stage + 1]]
        if stage == stages - 1:
            self.norm, self.head = whole.norm, nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def _loop(model: nn.Module, *optimizers: Any, clip: bool = True, micro_batches: int = 1) -> Step:
    def step(inputs: Tensor, labels: Tensor) -> float:
        total = 0.0
        for x, y in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            loss = _mean_loss(model(x), y) / micro_batches
            loss.backward()
            total += loss.item()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total

    return step


class Separate(nn.Module):
    """The same GPT with separate q, k and v, as DTensor's plans need it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.cut = (1, 0)  # parts of the sequence that the residual stream holds, and which one
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(SeparateBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).tensor_split(self.cut[0])[self.cut[1]]
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SeparateBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = SeparateAttention(config)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(config.width, 4 * config.width))
        self.mlp.add_module("act", nn.GELU(approximate="tanh"))
        self.mlp.add_module("down", nn.Linear(4 * config.width, config.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SeparateAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def tensor(work: Work, **settings: Any) -> dict[str, Any]:
    return dict(parallel=dict(tensor=dict(size=work.world) | settings))


def ours_tensor(
    stack: ExitStack, work: Work, backend: str = "auto", zero: dict[str, Any] | None = None, **settings: Any
) -> tuple[Step, cl.Context]:
    return ours(stack, work, backend=backend, zero=zero or {}, **tensor(work, **settings))


def ours_pipeline(stack: ExitStack, work: Work, **settings: Any) -> tuple[Step, cl.Context]:
    pipeline = dict(size=work.world, micro_batches=work.global_batch, **settings)
    return ours(stack, work, parallel=dict(pipeline=pipeline))


def sequence(mode: str) -> dict[str, Any]:
    return dict(parallel=dict(sequence=dict(size=2, mode=mode)))


ONE_RANK = "one rank: plain PyTorch loop"
SAME_PARTS = "one rank: plain PyTorch loop, a micro-batch a sample"
# The first side of a table is the one that the others' ratios are to.
TABLES: dict[int, dict[str, Side]] = {
    1: {"plain PyTorch loop": plain, "colossal_lite": ours},
    2: {
        "DistributedDataParallel": plain,
        ONE_RANK: alone,
        SAME_PARTS: lambda stack, work: alone(stack, work, micro_batches=work.global_batch),
        "colossal_lite, data": ours,
        "colossal_lite, data, gloo": partial(ours, backend="gloo"),
        "DDP + ZeroRedundancyOptimizer": partial(
            plain, optimizer=partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
        ),
        "colossal_lite, ZeRO-1": partial(ours, zero=dict(stage=1)),
        "colossal_lite, ZeRO-2": partial(ours, zero=dict(stage=2)),
        "FSDP2, gathered twice": partial(fsdp2, reshard=True),
        "colossal_lite, ZeRO-3": partial(ours, zero=dict(stage=3)),
        "FSDP2, gathered once": partial(fsdp2, reshard=False),
        "colossal_lite, ZeRO-3, gathered once": partial(
            ours, zero=dict(stage=3, reshard_after_forward=False)
        ),
        "DTensor tensor parallel": partial(dtensor, sequence=False),
        "colossal_lite, tensor 1d": partial(ours_tensor, sequence_parallel=False),
        "DTensor tensor + sequence parallel": partial(dtensor, sequence=True),
        "colossal_lite, tensor 1d, sequence cut": ours_tensor,
        "colossal_lite, tensor 1d, sequence cut, gloo": partial(ours_tensor, backend="gloo"),
        "colossal_lite, tensor 1d, sequence cut, inputs kept": partial(ours_tensor, regather_inputs=False),
        "colossal_lite, sequence ring": partial(ours, **sequence("ring")),
        "colossal_lite, sequence ulysses": partial(ours, **sequence("ulysses")),
        "torch pipelining, GPipe": partial(torch_pipeline, schedule=ScheduleGPipe),
        "colossal_lite, pipeline gpipe": partial(ours_pipeline, schedule="gpipe"),
        "torch pipelining, 1F1B": partial(torch_pipeline, schedule=Schedule1F1B),
        "colossal_lite, pipeline 1f1b": partial(ours_pipeline, schedule="1f1b"),
        "torch pipelining, interleaved": partial(torch_pipeline, schedule=ScheduleInterleaved1F1B, chunks=2),
        "colossal_lite, pipeline interleaved": partial(ours_pipeline, schedule="interleaved", chunks=2),
        "torch pipelining, ZBV": partial(torch_pipeline, schedule=ScheduleZBVZeroBubble, chunks=2),
        "colossal_lite, pipeline zb-v": partial(ours_pipeline, schedule="zb-v", chunks=2),
    },
}
if find_spec("deepspeed") is not None:
    TABLES[2] |= {f"DeepSpeed ZeRO-{stage}": partial(deepspeed_zero, stage=stage) for stage in (1, 2, 3)}
TABLES[4] = {name: side for name, side in TABLES[2].items() if name == ONE_RANK or "tensor" in name}
TABLES[8] = TABLES[4] | {  # with --model small, whose 8 heads these ranks divide
    "colossal_lite, tensor 2.5d": partial(ours_tensor, mode="2.5d", depth=2),
    "colossal_lite, tensor 3d": partial(ours_tensor, mode="3d"),
}
TABLES[4] = TABLES[4] | {
    "colossal_lite, tensor 2d": partial(ours_tensor, mode="2d"),
    "FSDP2 x DTensor tensor parallel, 2 x 2": partial(dtensor, sequence=False, data=2),
    "colossal_lite, data x tensor 1d, 2 x 2": partial(ours_tensor, size=2, sequence_parallel=False),
    "colossal_lite, ZeRO-3 x tensor 1d, 2 x 2": partial(
        ours_tensor, size=2, sequence_parallel=False, zero=dict(stage=3)
    ),
}


# ---- measuring ----


def measure(context: cl.Context, step: Step, steps: int, seed: int, work: Work) -> Block:
    generator = torch.Generator().manual_seed(seed)
    shape = (work.global_batch, work.model.sequence + 1)
    cut = context.local_batch(work.global_batch)
    tokens = torch.randint(work.model.vocabulary, shape, generator=generator)[cut]
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    context.mesh.world.barrier()
    cpu, wall, sent = time.process_time(), time.perf_counter(), sent_bytes(context)
    for _ in range(steps):
        step(inputs, labels)
    context.mesh.world.barrier()
    return Block(
        (time.process_time() - cpu) / steps,
        (time.perf_counter() - wall) / steps,
        (sent_bytes(context) - sent) / steps,
    )


def sent_bytes(context: cl.Context) -> float:
    """A rank's share of what this machine has sent to itself so far, if its kernel says so, and what it posted."""
    path = Path("/proc/net/dev")
    lines = path.read_text().splitlines() if path.exists() else []
    loopback = sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))
    return loopback / context.world_size + context.mesh.posted_bytes


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_rank(args: argparse.Namespace) -> None:
    """On one rank: blocks of all sides in turn; rank 0 writes what it and the others measured."""
    imported_bytes = peak_bytes()
    torch.set_num_threads(1)
    (world,) = args.world
    names = chosen(world, args.only)
    with ExitStack() as stack:
        work = Work(*MODELS[args.model], world)
        sides = {name: TABLES[world][name](stack, work) for name in names}
        for step, context in sides.values():
            measure(context, step, 2, 0, work)
        blocks: dict[str, list[Block]] = {name: [] for name in names}
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                step, context = sides[name]
                blocks[name].append(measure(context, step, args.steps, number, work))
        context = next(iter(sides.values()))[1]
        rows = context.mesh.world.gather_json(
            {
                k: [[b.cpu_s, b.wall_s, b.sent_bytes, peak_bytes() - imported_bytes] for b in v]
                for k, v in blocks.items()
            }
        )
        if context.is_main:
            merged = {
                name: [
                    [
                        sum(row[name][i][0] for row in rows),
                        *(max(row[name][i][n] for row in rows) for n in (1, 2, 3)),
                    ]
                    for i in range(args.rounds)
                ]
                for name in names
            }
            Path(args.out).write_text(json.dumps(merged))


def chosen(world: int, words: list[str]) -> list[str]:
    """The sides of a table that are named by one of the words, or else whose names have one of them."""
    if exact := [name for name in TABLES[world] if name in words]:
        return exact
    return [name for name in TABLES[world] if not words or any(word in name for word in words)]


def table(
    world: int, blocks: dict[str, list[list[float]]], steps: int, peaks: dict[str, float] | None = None
) -> Table:
    peer, *_ = blocks
    rounds = len(blocks[peer])
    drawn = Table(
        title=f"{world} rank(s), one thread each; {rounds} rounds of {steps} steps; ratios to {peer}"
    )
    columns = ["", "CPU ms, sum over ranks", "wall ms", "CPU ratio", "wall ratio", "MB sent"]
    columns += ["speed-up"] * (ONE_RANK in blocks) + ["CPU, same parts"] * (SAME_PARTS in blocks)
    columns += ["peak MB"] * bool(peaks)
    for column in columns:
        drawn.add_column(column)

    def ratio(one: str, other: str, column: int) -> float:
        return statistics.median(
            a[column] / b[column] for a, b in zip(blocks[one], blocks[other], strict=True)
        )

    for name, found in blocks.items():
        cpu, wall = ([row[i] for row in found] for i in (0, 1))
        cells = [
            f"{1e3 * statistics.median(cpu):.0f} ({1e3 * min(cpu):.0f}-{1e3 * max(cpu):.0f})",
            f"{1e3 * statistics.median(wall):.0f} ({1e3 * min(wall):.0f}-{1e3 * max(wall):.0f})",
            f"{ratio(name, peer, 0):.3f}",
            f"{ratio(name, peer, 1):.3f}",
            f"{statistics.median(row[2] for row in found) / 1e6:.1f}",
        ]
        cells += [f"{ratio(ONE_RANK, name, 1):.2f}"] if ONE_RANK in blocks else []
        cells += [f"{ratio(name, SAME_PARTS, 0):.2f}"] if SAME_PARTS in blocks else []
        cells += [f"{peaks[name] / 1e6:.0f}"] if peaks else []
        drawn.add_row(name, *cells)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2], help="world sizes to measure")
    parser.add_argument("--model", choices=list(MODELS), default="wide", help="what is trained")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of the sides to measure")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of blocks")
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--memory", action="store_true", help="also each side alone, for its peak memory")
    parser.add_argument(
        "--out", default="", help="where a rank writes its blocks (set by this script for its ranks)"
    )
    args = parser.parse_args()
    if args.out:
        return run_rank(args)
    for world in args.world:
        blocks = launch(world, args.model, args.only, args.rounds, args.steps)
        peaks: dict[str, float] = {}
        for name in [None, *(chosen(world, args.only) if args.memory else [])]:
            if name is not None:
                peaks[name] = launch(world, args.model, [name], 1, 3)[name][0][3]
                print(f"{name}: {peaks[name] / 1e6:.0f} MB", flush=True)
            Path(f"cpu_peers_{world}.json").write_text(json.dumps(dict(blocks=blocks, peaks=peaks)))
        Console(width=140).print(table(world, blocks, args.steps, peaks))
    return None


def launch(world: int, model: str, only: list[str], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Rounds of blocks of each side: CPU s, wall s, bytes sent, peak bytes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "blocks.json"
        options = ["--rounds", str(rounds), "--steps", str(steps), "--out", str(out), "--world", str(world)]
        options += ["--model", model]
        options += ["--only", *only] if only else []
        subprocess.run([*command, __file__, *options], check=True)
        found: dict[str, list[list[float]]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main()
