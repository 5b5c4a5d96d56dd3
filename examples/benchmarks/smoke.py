"""Trains a small GPT in every mode on one device, and compares its losses with plain PyTorch in double precision.

    PYTHONPATH=. python examples/benchmarks/smoke.py --list
    PYTHONPATH=. python examples/benchmarks/smoke.py "zero 3" ring        (all modes if none is named)

Each mode takes the initial values of the engine, trains four steps, evaluates, saves, loads and trains once more.  A
mode of several ranks runs them as threads of this process on the one device (distributed/emulated_ranks.py): every
kernel and stream is real, and only NCCL is not.  A plain AdamW of torch in float64 on the CPU, from the same values on
the same batch, gives the truth.  Told are the largest relative distance of a loss, on CUDA the waits of the host for
the device in one step with their places, the seconds, and the peak of the allocator.  One JSON line a mode.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.distributed.emulated_ranks import EmulatedWorld, run_emulated
from colossal_lite.distributed.key_value_store import LimitedStore
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.engine.context import Context, FailureBoard
from colossal_lite.engine.stopping import StopSignals

ADAMW: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS, CLIP, RANK_S = 4, 1.0, 90.0
NARROW = {"bf16": 2e-2, "fp16": 2e-2}
LLAMA = dict(position="rotary", norm="rms", activation="swiglu", kv_heads=4, tied=False, bias=False)


@dataclass(frozen=True)
class Mode:
    """Ranks, settings and model of a row. `quick`: it is in a dry run. `followed`: torch's AdamW is its truth, and not
    for the first loss alone."""

    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    followed: bool = True


def on(ranks: int, *, quick: bool = False, model: dict[str, Any] | None = None, **parallel: Any) -> Mode:
    return Mode(dict(parallel=parallel), ranks, model or {}, quick)


def zero(stage: int, quick: bool = False, **more: Any) -> Mode:
    return Mode(dict(zero=dict(stage=stage)) | more, 2, quick=quick)


def optimizer(**settings: Any) -> dict[str, Any]:
    return dict(optimizer=dict(lr=1e-3) | settings)


MODES: dict[str, Mode] = {
    "fp32": Mode(),
    "fp32 triton": Mode(dict(kernels="triton"), quick=True),
    "fp32 torch": Mode(dict(kernels="torch")),
    "bf16": Mode(dict(precision="bf16")),
    "bf16 triton": Mode(dict(precision="bf16", kernels="triton")),
    "bf16 split masters": Mode(dict(precision=dict(dtype="bf16", master="split"))),
    "bf16 gradients": Mode(dict(precision=dict(dtype="bf16", gradient="bf16"))),
    "bf16 moments": Mode(dict(precision="bf16", optimizer=dict(type="adamw", moments="bf16", **ADAMW))),
    "fp16": Mode(dict(precision="fp16")),
    "fp64": Mode(dict(precision="fp64")),
    "llama": Mode(model=LLAMA),
    "llama bf16 triton": Mode(dict(precision="bf16", kernels="triton"), model=LLAMA),
    "dropout": Mode(model=dict(dropout=0.1), followed=False),
    "dropout bf16 triton": Mode(dict(precision="bf16", kernels="triton"), model=dict(dropout=0.1), followed=False),
    **{kind: Mode(optimizer(type=kind), followed=False) for kind in ("adam", "sgd", "lamb", "lion")},
    "muon": Mode(
        optimizer(type="muon", groups=[dict(match=what, type="adamw") for what in ("*.bias", "*norm*.weight")]),
        followed=False,
    ),
    "updates in backward": Mode(
        dict(optimizer=dict(type="adamw", update_when="backward", **ADAMW), clip_grad_norm=None)
    ),
    "accumulated": Mode(dict(gradient_accumulation=2)),
    "recompute full": Mode(dict(activation_checkpoint="full")),
    "recompute selective": Mode(dict(activation_checkpoint="selective")),
    "compiled blocks": Mode(dict(compile="block", precision="bf16")),
    "host": Mode(dict(memory=dict(placement="host"))),
    "host, updated there": Mode(dict(memory=dict(placement="host", update_on="host"), precision="bf16")),
    "host, updated on both": Mode(dict(memory=dict(placement="host", update_on=dict(every=2)), precision="bf16")),
    "disk": Mode(dict(memory=dict(placement="disk", disk_dir=tempfile.gettempdir()))),
    "half of each": Mode(
        dict(memory=dict(placement="static", host_fraction=dict(weights=0.5, gradients=0.5, optimizer=0.5)),
             zero=dict(stage=3), precision="bf16")
    ),
    "a budget": Mode(dict(memory=dict(placement="auto", device_budget="64GiB"), zero=dict(stage=3))),
    "data": on(2),
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3, quick=True),
    "zero 3 bf16 triton": zero(3, precision="bf16", kernels="triton"),
    "zero 3, host": zero(3, memory=dict(placement="host")),
    "zero 3, recompute full": zero(3, activation_checkpoint="full"),
    "1d": on(2, tensor=2),
    "1d llama": on(2, tensor=2, model=LLAMA),
    "1d x data": on(4, tensor=2, data=2),
    "2d": on(4, tensor=dict(size=4, mode="2d")),
    "2.5d": on(8, tensor=dict(size=8, mode="2.5d", depth=2)),
    "3d": on(8, tensor=dict(size=8, mode="3d")),
    **{kind: on(2, sequence=dict(size=2, mode=kind)) for kind in ("ulysses", "allgather_kv")},
    "ring_full": on(2, sequence=dict(size=2, mode="ring_full"), model=dict(causal=False)),
    "ring": on(2, sequence=dict(size=2, mode="ring"), quick=True),
    "ring bf16 triton": Mode(
        dict(parallel=dict(sequence=dict(size=2, mode="ring")), precision="bf16", kernels="triton"), 2, LLAMA
    ),
    "usp": on(4, sequence=dict(size=4, mode="usp", ulysses=2)),
    **{
        kind: on(2, pipeline=dict(size=2, schedule=kind, micro_batches=4), quick=kind == "zb-v")
        for kind in ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v")
    },
    "1f1b x 1d": on(4, pipeline=dict(size=2, micro_batches=4), tensor=2),
    "1f1b x data, zero 2": Mode(
        dict(parallel=dict(pipeline=dict(size=2, micro_batches=4), data=2), zero=dict(stage=2)), 4
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ one mode


@dataclass(frozen=True)
class Told:
    """What a rank has seen."""

    weights: dict[str, Tensor]
    losses: list[float]
    evaluated: float
    again: tuple[float, float]
    """The loss of the step after the save, and that of the same step after the load."""


def trains(
    context: Context, model: cl.models.GPTConfig, batch: tuple[Tensor, Tensor], folder: Path, waits: Waits
) -> Told:
    engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
    weights = engine.full_state_dict()
    mine = context.local_batch(batch)
    losses = [float(engine.train_step(mine).loss) for _ in range(STEPS - 1)]
    with waits.counted(context):
        losses.append(float(engine.train_step(mine).loss))
    evaluated = float(engine.eval_step(mine))
    engine.save(folder).wait()
    first = float(engine.train_step(mine).loss)
    engine.load(folder)
    again = float(engine.train_step(mine).loss)
    engine.close()
    return Told(weights, losses, evaluated, (first, again))


class Waits:
    """Waits of the host for the device, as torch tells them, while all ranks make one step."""

    def __init__(self) -> None:
        self.seen: list[warnings.WarningMessage] = []

    def counted(self, context: Context) -> Any:
        return self if context.is_main and context.device.type == "cuda" else nullcontext()

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def places(self, ranks: int) -> dict[str, float]:
        """Waits of a rank by file and line. Ranks are threads, so those of others count while rank 0 counts."""
        rows = Counter(
            f"{Path(w.filename).name}:{w.lineno}" for w in self.seen if "synchronizing CUDA" in str(w.message)
        )
        return {place: count / ranks for place, count in rows.most_common()}


def alone(config: dict[str, Any], train: Callable[[Context], Told]) -> Told:
    with cl.launch(config) as context:
        return train(context)


def together(
    config: dict[str, Any], ranks: int, device: torch.device, train: Callable[[Context], Told]
) -> Told:
    """The ranks as threads. Backward stays in the thread that asks for it, as one thread of torch's serves a device."""
    checked = Config.load(config).check_world(ranks)
    world, store = EmulatedWorld(RANK_S), dist.HashStore()
    meshes = Mesh.emulated(checked.layout(), world)

    def run(mesh: Mesh) -> Told:
        own = LimitedStore(store, RANK_S)
        board, signals = FailureBoard(own, mesh.rank), StopSignals()
        with (
            Context(
                checked, mesh, device, 0, own, "emulated", board, signals, ExitStack(), lambda *_: None
            ) as context,
            torch.autograd.set_multithreading_enabled(False),
        ):
            return train(context)

    return run_emulated(world, [partial(run, mesh) for mesh in meshes])[0]


def truth(
    model: cl.models.GPTConfig, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor], clip: bool
) -> list[float]:
    """Losses of the steps, and of the model after them."""
    plain = cl.models.GPT(model)
    plain.load_state_dict(weights)
    plain.double().train()
    updates, losses = torch.optim.AdamW(plain.parameters(), **ADAMW), []
    for _ in range(STEPS + 1):
        loss = F.cross_entropy(plain(batch[0]).flatten(0, 1), batch[1].flatten())
        losses.append(float(loss.detach()))
        updates.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        updates.step()
    return losses


def judged(mode: Mode, told: Told, right: Sequence[float], precision: str) -> tuple[str, dict[str, Any]]:
    """What is wrong, and the numbers."""
    numbers = [*told.losses, *told.again, told.evaluated]
    if not all(map(math.isfinite, numbers)):
        return f"a loss is not finite: {numbers}", {}
    tolerance = NARROW.get(precision, 1e-4)
    seen = (
        [*told.losses, told.evaluated]
        if mode.followed
        else told.losses[: 1 - bool(mode.model.get("dropout"))]
    )
    off = max((abs(a - b) / b for a, b in zip(seen, right, strict=False)), default=0.0)
    drift = abs(told.again[0] - told.again[1]) / told.again[0]
    found = dict(off=off, after_load=drift, first_loss=told.losses[0], last_loss=told.losses[-1])
    if off > tolerance:
        return f"a loss is {off:.1e} off, beyond {tolerance:g}", found
    if drift > tolerance:
        return f"the step after a load differs by {drift:.1e}", found
    return ("" if told.losses[-1] < told.losses[0] else "the loss does not fall"), found


def row(name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    mode, start = MODES[name], time.perf_counter()
    size, samples = dict(vocabulary=512, layers=4, heads=8, width=256, sequence=128), 8
    if tiny:
        size |= dict(vocabulary=64, width=64, sequence=16)
    if tiny and mode.ranks == 1:  # what the interpreter does in seconds
        size, samples = size | dict(layers=1, heads=2, width=16), 1
    model = cl.models.GPTConfig(**(size | mode.model))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.vocabulary, (samples, model.sequence + 1), generator=generator)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    base = dict(
        precision="fp32", optimizer=dict(type="adamw", **ADAMW), clip_grad_norm=CLIP, timeout_s=RANK_S
    )
    config = base | mode.config
    folder, waits = Path(tempfile.mkdtemp(prefix="gpu_day-")), Waits()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with warnings.catch_warnings(record=True) as waits.seen:
            warnings.simplefilter("always")
            train = partial(trains, model=model, batch=batch, folder=folder, waits=waits)
            told = alone(config, train) if mode.ranks == 1 else together(config, mode.ranks, device, train)
    finally:
        shutil.rmtree(folder)
    given: Any = config["precision"]
    precision = given["dtype"] if isinstance(given, dict) else given
    wrong, numbers = judged(
        mode, told, truth(model, told.weights, batch, config["clip_grad_norm"] is not None), precision
    )
    numbers["seconds"] = time.perf_counter() - start
    places: dict[str, float] = {}
    if device.type == "cuda":
        places = waits.places(mode.ranks)
        numbers |= dict(waits=sum(places.values()), peak_mib=torch.cuda.max_memory_allocated() / 2**20)
    waited = ", ".join(f"{count:g} at {place}" for place, count in places.items())
    return dict(name=name, verdict="wrong" if wrong else "ok", note=wrong or waited, numbers=numbers)


def modes(*, tiny: bool) -> list[str]:
    return [name for name, mode in MODES.items() if mode.quick or not tiny]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="*", metavar="MODE", help="as --list names them; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the modes")
    parser.add_argument("--tiny", action="store_true", help="few modes of a tiny model, on the CPU")
    arguments = parser.parse_args()
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; legal: {', '.join(MODES)}")
    device = torch.device("cpu" if arguments.tiny or not torch.cuda.is_available() else "cuda:0")
    if arguments.list:
        print("\n".join(modes(tiny=arguments.tiny)))
        return 0
    for name in arguments.modes or modes(tiny=arguments.tiny):
        try:
            print("ROW " + json.dumps(row(name, device, arguments.tiny)), flush=True)
        except (
            Exception
        ) as error:  # it is this row's, and after an error of CUDA a new process takes the next
            note = f"{type(error).__name__}: {error}"[:600]
            print("ROW " + json.dumps(dict(name=name, verdict="failed", note=note, numbers={})), flush=True)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
