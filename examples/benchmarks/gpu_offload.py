"""Times training with state outside the GPU: each of our placements, FSDP2's and DeepSpeed's offload.

    PYTHONPATH=. python examples/benchmarks/gpu_offload.py --out offload.json      (1.3 B and 6.7 B; within 9 minutes)
    PYTHONPATH=. python examples/benchmarks/gpu_offload.py --tiny                  (any machine: a tiny model)
    PYTHONPATH=. python examples/benchmarks/gpu_offload.py --models 13B --sides "ours host" --steps 1
    PYTHONPATH=. python examples/benchmarks/gpu_offload.py --models 6.7B       (updates on both sides, beside all peers)
    PYTHONPATH=. python examples/benchmarks/gpu_offload.py --models "6B in 11GiB" --sides "ours stages" --steps 2

Every side trains the same GPT from the same values on the same tokens: bf16 beside float32 masters, AdamW, clipping at
1.0, every block recomputed, one process.  FSDP2 gets torch's fused AdamW on the CPU, its best.  Each row has a process
of its own, so that peaks are its own; it ends when the time given to all of them does.  Printed are the median and the
least of the timed steps, tokens a second, the peak of torch's allocator on the device over the timed steps, the most
resident memory of the process, what crossed the links in a step and how long the computing stood still for it.  Then
how long each lane worked, and the last loss, in which sides may differ by rounding only.  Last is the largest model
that this device and this host's memory would hold by this row's own bytes a parameter (less what a process holds
anyway; so of a small model it is too small).
The JSON is rewritten after every row.  FSDP2 needs torch and triton alone, ours also what colossal_lite imports
(pydantic, einops, rich, psutil); a side that is not installed, does not fit or has no time left is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.clock import Mark, host_seconds, mark
from colossal_lite.schedule.plan import COMPUTE_KINDS

ADAMW = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CLIP = 1.0
STATE_BYTES = 18
"""A parameter's on the device if all stays there: bf16 weight, float32 gradient, master and two moments."""
ON_HOST_BYTES = {
    "device": 0,
    "ours host": 12,
    "ours split": 11,
    "ours auto": 18,
    "ours stages": 18,
    "FSDP2 offload": 16,
}
"""A parameter's on the host at the most; of other sides as much as of `ours host`, or, of DeepSpeed, of `ours auto`."""
MARK = "ROW "
ALONE = ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29511")
"""What DeepSpeed reads of the environment."""


@dataclass(frozen=True)
class Work:
    """A model, its batch, and the budget of `ours auto`. `stages`, a visit of each for all samples: of `ours stages`.
    `cap_gib`: what torch may allocate on the device."""

    model: GPTConfig
    batch: int
    budget: str
    stages: int = 8
    cap_gib: float | None = None


@dataclass(frozen=True)
class Row:
    """One side of one model. A note says why there are no numbers."""

    model: str
    side: str
    params: int = 0
    ready_s: float = 0.0
    """From the configuration to the first step."""
    step_ms: float = 0.0
    least_ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    update_ms: float = 0.0
    """What of clipping and updates is behind backward. Ours go on in the next forward."""
    tokens_per_s: float = 0.0
    device_gib: float = 0.0
    host_gib: float = 0.0
    up_gib: float = 0.0
    down_gib: float = 0.0
    waited_ms: float = 0.0
    over_busiest: float = 0.0
    """The last step over its busiest lane, the compute of stages among them; 0: not known."""
    lanes: str = ""
    """Of the last step: seconds that each lane worked over those of the step, GB/s, and predicted seconds."""
    loss: float = float("nan")
    largest_b: float = 0.0
    note: str = ""


def gpt(layers: int, heads: int, width: int, *, tied: bool = True) -> GPTConfig:
    return GPTConfig(vocabulary=50304, layers=layers, heads=heads, width=width, sequence=4096, tied=tied)


WORKS: dict[str, Work] = {
    "1.3B": Work(gpt(24, 16, 2048), 1, "14GiB"),
    "2.7B": Work(gpt(32, 20, 2560), 1, "24GiB"),
    "6.7B": Work(gpt(32, 32, 4096), 1, "40GiB"),
    "6B in 11GiB": Work(gpt(28, 32, 4096, tied=False), 4, "11GiB", 28, 11.0),
    "13B": Work(gpt(40, 40, 5120), 1, "70GiB"),
    "18B": Work(gpt(56, 40, 5120), 1, "70GiB"),
    "tiny": Work(
        GPTConfig(vocabulary=64, layers=2, heads=2, width=32, sequence=16, tied=False), 2, "1GiB", 2
    ),
}


@dataclass(frozen=True)
class Side:
    """Something that trains: a step from inputs and labels [B, T] to the mean loss, which calls its third argument
    when forward has ended, and when backward has. And what its links moved in the last one: bytes up, bytes down,
    seconds that were waited."""

    step: Callable[[Tensor, Tensor, Callable[[], None]], Tensor]
    links: Callable[[], tuple[float, float, float]] = lambda: (0.0, 0.0, 0.0)
    lanes: Callable[[float], str] = lambda step_s: ""
    """In words, of a step of so many seconds."""
    busiest_s: Callable[[], float] = lambda: 0.0
    """Of the last step, the seconds of the lane that worked most; 0: not known."""
    device_bytes: Callable[[], int] = lambda: 0
    """Where there is no allocator to ask: of the emulated device."""


# -------------------------------------------------------------------------------------------------------- sides


def built(config: GPTConfig, device: str) -> GPT:
    """The same values for every side, made where that is quick."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return GPT(config)
    finally:
        torch.set_default_dtype(torch.float32)


def ours(work: Work, device: str, stack: ExitStack, *, memory: Mapping[str, Any], **more: Any) -> Side:
    import colossal_lite as cl

    config = dict(
        precision="bf16", optimizer=dict(type="adamw", **ADAMW), clip_grad_norm=CLIP, kernels="auto",
        activation_checkpoint="full", memory=dict(memory),
    )  # fmt: skip
    context = stack.enter_context(cl.launch(config | more))
    # the model itself is larger than some caps
    model = partial(GPT, work.model) if work.cap_gib else built(work.model, device)
    engine = cl.initialize(model, context=context)
    stack.callback(engine.close)

    def links() -> tuple[float, float, float]:
        rows = engine.link_report()
        moved = {row.link: row.moved_bytes for row in rows}
        return moved.get("h2d", 0), moved.get("d2h", 0), sum(row.waited_s for row in rows)

    def held() -> int:
        return sum(row.peak_bytes for row in engine.memory_report() if row.tier == device)

    def lanes(step_s: float) -> str:
        rows = [row for row in engine.link_report() if row.busy_s]
        parts = [
            f"{row.link} {row.busy_s / step_s:.0%}"
            + (f" {row.moved_bytes / row.busy_s / 1e9:.1f} GB/s" if row.moved_bytes else "")
            + (f" (predicted {row.predicted_s / step_s:.0%})" if row.predicted_s is not None else "")
            for row in rows
        ]
        return ", ".join(parts)

    def busiest_s() -> float:
        if "parallel" not in more:
            return 0.0
        spans = engine.schedule_report().measured.spans
        computes_s = sum(span.end_s - span.start_s for span in spans if span.action.kind in COMPUTE_KINDS)
        return max(computes_s, *(row.busy_s for row in engine.link_report()))

    ended = list[Callable[[], None]]()
    engine.model.head.register_forward_hook(lambda *_: ended.pop()() if ended else None)

    def step(inputs: Tensor, labels: Tensor, mark: Callable[[], None]) -> Tensor:
        ended[:] = [mark]
        loss = engine.forward_backward((inputs, labels))
        mark()
        engine.step()
        return loss

    return Side(step, links, lanes, busiest_s, held)


def fsdp2(work: Work, device: str, stack: ExitStack) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    stack.enter_context(alone())
    mesh = init_device_mesh(device, (1,))
    model = recomputed(built(work.model, device).float())
    how: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"),
    )
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(inputs: Tensor, labels: Tensor, mark: Callable[[], None]) -> Tensor:
        loss = loss_of(model, inputs, labels)
        mark()
        loss.backward()
        mark()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Side(step)


def deepspeed(work: Work, device: str, stack: ExitStack, *, stage: int, **optimizer: Any) -> Side:
    """`optimizer`: further settings of `offload_optimizer`, such as Twin-Flow's `ratio`."""
    import deepspeed as ds

    stack.enter_context(alone())
    model = recomputed(built(work.model, device))
    on_host = dict(device="cpu", pin_memory=True)
    zero = dict(
        stage=stage, offload_optimizer=on_host | optimizer, overlap_comm=True, contiguous_gradients=True
    )
    config = dict(
        train_micro_batch_size_per_gpu=work.batch,
        bf16=dict(enabled=True),
        gradient_clipping=CLIP,
        optimizer=dict(type="AdamW", params=ADAMW | dict(torch_adam=False)),
        zero_optimization=zero | (dict(offload_param=on_host) if stage == 3 else {}),
    )
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(inputs: Tensor, labels: Tensor, mark: Callable[[], None]) -> Tensor:
        loss = loss_of(engine, inputs, labels)
        mark()
        engine.backward(loss)
        mark()
        engine.step()
        return loss.detach()

    return Side(step)


def recomputed(model: GPT) -> GPT:
    """Each block keeps its input only."""
    for block in model.blocks:
        setattr(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))  # noqa: B010
    return model


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten())


@contextmanager
def alone() -> Iterator[None]:
    """A world of one, for peers that need one."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def static(share: float) -> Callable[..., Side]:
    return partial(ours, memory=dict(placement="static", host_fraction=dict(optimizer=share)))


def stages(work: Work, device: str, stack: ExitStack) -> Side:
    """Each stage is loaded once a pass, for all samples, and nothing rests on the device."""
    pipeline = dict(size=1, schedule="bfs", stages_per_rank=work.stages, micro_batches=work.batch)
    rest = dict.fromkeys(("weights", "gradients", "optimizer"), 1.0)
    return ours(
        work, device, stack, memory=dict(placement="static", host_fraction=rest, update_on="host"),
        parallel=dict(pipeline=pipeline), zero=dict(stage=3),
    )  # fmt: skip


SIDES: dict[str, Callable[..., Side]] = {
    "device": partial(ours, memory=dict(placement="device")),
    "ours host": partial(ours, memory=dict(placement="host")),
    "FSDP2 offload": fsdp2,
    "ours auto": lambda work, *where: ours(
        work, *where, memory=dict(placement="auto", device_budget=work.budget), zero=dict(stage=3)
    ),
    "ours stages": stages,
    "ours static 0.25": static(0.25),
    "ours static 0.5": static(0.5),
    "ours static 0.75": static(0.75),
    "ours split": partial(
        ours, memory=dict(placement="host"), precision=dict(dtype="bf16", master="split")
    ),
    **{
        f"ours updates {name}": partial(ours, memory=dict(placement="host", update_on=how))
        for name, how in (("on host", "host"), ("auto", "auto"), *((f"every {k}", dict(every=k)) for k in (2, 3, 4, 5)))
    },
    "DeepSpeed ZeRO-2": partial(deepspeed, stage=2),
    "DeepSpeed ZeRO-3": partial(deepspeed, stage=3),
    **{f"DeepSpeed Twin-Flow {ratio}": partial(deepspeed, stage=3, ratio=ratio) for ratio in (0.25, 0.5, 0.75)},
    "DeepSpeed SuperOffload": partial(deepspeed, stage=3, super_offload=True),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- measuring


def measured(name: str, side: str, work: Work, device: str, warm: int, steps: int) -> Row:
    """One row, in this process. A side that cannot run is a row that says why."""
    params, before = count(work.model), resident_bytes()
    held = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    if held is not None and work.cap_gib is not None:
        torch.cuda.set_per_process_memory_fraction(work.cap_gib * 2**30 / held)
    if side == "device" and held is not None and STATE_BYTES * params > held:
        return Row(name, side, params, note=f"{STATE_BYTES} bytes a parameter are more than the device has")
    streams = 16 if side.startswith("ours updates") else 12  # gradients too
    on_host = ON_HOST_BYTES.get(side, 18 if side.startswith("DeepSpeed") else streams)
    if on_host * params > 0.95 * host_bytes():  # a host without memory ends more than this process
        return Row(name, side, params, note=f"{on_host} bytes a parameter are more than the host has")
    with ExitStack() as stack:
        try:
            begun_s = time.monotonic()
            trains = SIDES[side](work, device, stack)
            ready_s = time.monotonic() - begun_s
            times, loss = timed(trains, work, device, warm, steps)
        except ImportError as error:
            return Row(name, side, params, note=f"absent: {error}"[:400])
        except Exception as error:  # a peer may fail in any way of its own, and the next row is to come
            return Row(name, side, params, note=f"{type(error).__name__}: {error}"[:400])
        on_device = torch.cuda.max_memory_allocated() if device == "cuda" else trains.device_bytes()
        up, down, waited_s = trains.links()
        busiest_s = trains.busiest_s()
        grown = max(0, resident_bytes() - before)
        largest = 0.0
        if held is not None:  # processes that are not apart have peaks of each other
            largest = params / 1e9 * min(held / max(on_device, 1), host_bytes() / max(grown, 1))
        whole, gib = [sum(parts) for parts in times], 2**30
        step_s = statistics.median(whole)
        return Row(
            name, side, params, ready_s, step_s * 1e3, min(whole) * 1e3,
            *(statistics.median(each) * 1e3 for each in zip(*times, strict=True)),
            work.batch * work.model.sequence / step_s,
            on_device / gib, resident_bytes() / gib, up / gib, down / gib, waited_s * 1e3,
            whole[-1] / busiest_s if busiest_s else 0.0, trains.lanes(whole[-1]), loss,
            largest,
        )  # fmt: skip


def timed(
    side: Side, work: Work, device: str, warm: int, steps: int
) -> tuple[list[tuple[float, ...]], float]:
    """Seconds of forward, backward and the rest of each step, and the last loss; every step learns the same tokens."""
    generator, where = torch.Generator().manual_seed(1), torch.device(device)
    shape = (work.batch, work.model.sequence + 1)
    ids = torch.randint(work.model.vocabulary, shape, generator=generator).to(device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    times, loss = list[tuple[float, ...]](), torch.tensor(float("nan"))
    for number in range(warm + steps):
        if number == warm and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = [mark(where)]

        def end_phase(marks: list[Mark] = marks) -> None:
            marks.append(mark(where))

        loss = side.step(inputs, labels, end_phase)
        end_phase()
        times.append(tuple(stop - start for start, stop in pairwise(host_seconds(marks, where))))
    return times[warm:], float(loss)


def count(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


def resident_bytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_bytes() -> int:
    """What this host has, or gives this container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min(whole, int(text)) if text.isdigit() else whole


def apart(name: str, side: str, arguments: argparse.Namespace, left_s: float) -> Row:
    """A row in a process of its own, which is ended when the time is."""
    numbers = ["--warm", str(arguments.warm), "--steps", str(arguments.steps), *["--tiny"] * arguments.tiny]
    place = ["env", *ALONE] if side.startswith("DeepSpeed") else []
    command = [*place, sys.executable, __file__, "--row", name, side, *numbers]
    with tempfile.TemporaryFile("w+") as told:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=told, text=True, timeout=left_s)
        except subprocess.TimeoutExpired:
            return Row(name, side, note=f"ended after {left_s:.0f} s, when the time was over")
        for words in reversed(done.stdout.splitlines()):
            if words.startswith(MARK):
                return Row(**json.loads(words.removeprefix(MARK)))
        told.seek(0)
        last = (told.read().strip().splitlines() or ["it said nothing"])[-1]
        return Row(name, side, note=f"ended with {done.returncode}: {last}"[:400])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, in this process; any machine")
    parser.add_argument("--models", nargs="*", default=["1.3B", "6.7B"], choices=list(WORKS))
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--warm", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=525, help="for all rows together")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu"
    if device == "cpu" and not arguments.tiny:
        print("gpu_offload: no CUDA device is visible; legal here: --tiny", file=sys.stderr)
        return 2
    if arguments.row:
        name, side = arguments.row
        row = measured(name, side, WORKS[name], device, arguments.warm, arguments.steps)
        print(MARK + json.dumps(asdict(row)), flush=True)
        return 0
    start, rows = time.monotonic(), list[Row]()
    for name in ["tiny"] if arguments.tiny else arguments.models:
        longest_s = 20.0
        for side in arguments.sides:
            began = time.monotonic()
            left_s = arguments.seconds - (began - start)
            if arguments.tiny:
                rows.append(measured(name, side, WORKS[name], device, arguments.warm, arguments.steps))
            elif left_s < longest_s:
                rows.append(Row(name, side, note=f"left out: {max(left_s, 0):.0f} s remain"))
            else:
                rows.append(apart(name, side, arguments, left_s))
                longest_s = max(longest_s, time.monotonic() - began)
            print(line(rows[-1]), flush=True)
            if arguments.out:
                found = {
                    "torch": torch.__version__,
                    "device": name_of(device),
                    "rows": [asdict(r) for r in rows],
                }
                arguments.out.write_text(json.dumps(found, indent=1))
    return 0


def name_of(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "an emulated device"


def line(row: Row) -> str:
    if row.note:
        return f"{row.model:5} {row.side:17} {row.note}"
    return (
        f"{row.model:5} {row.side:17} ready in {row.ready_s:.1f} s  {row.step_ms:9.1f} ms (least {row.least_ms:.1f}): "
        f"forward {row.forward_ms:.1f}, "
        f"backward {row.backward_ms:.1f}, update {row.update_ms:.1f}  "
        f"{row.tokens_per_s:8.0f} tokens/s  device {row.device_gib:6.2f} GiB  host {row.host_gib:6.2f} GiB  "
        f"up {row.up_gib:.2f} down {row.down_gib:.2f} GiB  waited {row.waited_ms:.1f} ms  loss {row.loss:.4f}  "
        f"busy: {row.lanes or 'not known'}  "
        f"{f'step over the busiest {row.over_busiest:.2f}  ' if row.over_busiest else ''}"
        f"largest {row.largest_b:.1f} B"
    )


if __name__ == "__main__":
    sys.exit(main())
