"""Measures how near many models on few devices come to their bound: the paper's twelve tasks, and drawn loads.

    python examples/benchmarks/many_models.py              simulated from costs, about a minute
    python examples/benchmarks/many_models.py emulated     eight processes that sleep for each step, half a minute
    python examples/benchmarks/many_models.py stages       two GPTs on one device behind an emulated link, two minutes
    python examples/benchmarks/many_models.py real         small GPTs in two processes, five minutes a round
    python examples/benchmarks/many_models.py adapters     eight adapters over 6.7 B on one GPU; --tiny: any machine

Hydra's last public version does not start, so its rules are simulated. They are Sharded-LRTF by visits, one
micro-batch a visit, and no load beside the compute. `emulated` and `real` run the coordinator and the workers of
`train_many`. In `real` the rounds of the policies alternate. `adapters` trains all of them through one loaded base, and
one of them by itself. On a GPU torch may allocate 11 GiB.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.engine.turn_taking import take_turns
from colossal_lite.launcher.start import launch_gang
from colossal_lite.many import coordinator, worker
from colossal_lite.many.build_timetable import QUANTA, Quantum, timetable
from colossal_lite.many.devices import OwnDevice
from colossal_lite.many.jobs import Job
from colossal_lite.many.policies import POLICIES, PolicyName
from colossal_lite.many.timetable import simulate
from colossal_lite.many.trainer import Leader
from colossal_lite.many.turnstile import Turnstile
from colossal_lite.many.worker import Order, folder_of
from colossal_lite.observe.tables import table

STAGES, FORWARD_S, LOAD_S, STEPS, TASKS, DEVICES = 8, 1.0, 0.8, 100, 12, 8
EMULATED_STEP_S = 0.1
CONFIG: dict[str, Any] = dict(precision="fp32", backend="gloo", seed=0)
SHAPE = cl.models.GPTConfig(vocabulary=256, layers=4, heads=4, width=128, sequence=64)
REAL_STEPS = 400
LINK_BYTES_S, STAGED_STEPS = 100_000_000, 20
BASE = cl.models.GPTConfig(
    vocabulary=32000, layers=32, heads=32, width=4096, sequence=1024, position="rotary", norm="rms", tied=False,
    bias=False,
)  # fmt: skip
TINY_BASE = replace(BASE, vocabulary=64, layers=4, heads=2, width=32, sequence=16)
ADAPTERS, RANK, ADAPTER_STEPS, CAP_BYTES = 8, 8, 5, 11 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "how", nargs="?", choices=["simulated", "emulated", "stages", "real", "adapters"], default="simulated"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each policy, for real")
    parser.add_argument("--tasks", type=int, nargs="*", default=[3, 5], help="how many, for real")
    parser.add_argument("--tiny", action="store_true", help="adapters over a tiny base")
    parser.add_argument("--layers", type=int, default=32, help="of the base of the adapters; 32: 6.7 B")
    parser.add_argument("--out", type=Path, help="where the adapters' JSON goes")
    given = parser.parse_args()
    how = given.how
    if how == "simulated":
        twelve()
        two()
        drawn(80)
    elif how == "emulated":
        emulated()
    elif how == "stages":
        stages(given.rounds)
    elif how == "adapters":
        adapters(TINY_BASE if given.tiny else replace(BASE, layers=given.layers), given.out)
    else:
        real(given.rounds, given.tasks)


# ------------------------------------------------------------------------------------------------- simulated


def twelve() -> None:
    """Twelve equal models of eight stages on eight devices: backward takes three forwards, a load 0.8 of one."""
    parts, step_s = 2 * STAGES - 1, 4 * STAGES * FORWARD_S
    jobs = [Job(f"t{n}", STEPS, step_s, parts * LOAD_S, parts=parts) for n in range(TASKS)]
    compute_s = TASKS * STEPS * step_s
    begun_s = time.process_time()
    plan = timetable(jobs, DEVICES)
    found = simulate(plan)
    took_s, actions = time.process_time() - begun_s, sum(map(len, plan.devices))
    print(f"{TASKS} equal tasks of {STEPS} steps on {DEVICES} devices: {found.over_bound:.4f} of the bound")
    print(f"{actions:,} actions made, checked and simulated in {took_s:.1f} s of CPU")
    others = {
        "model parallelism": compute_s,
        **{f"GPipe, {m} micro-batches": compute_s / DEVICES * (m + DEVICES - 1) / m for m in (4, 8, 16, 32)},
        "one spilled model a device": simulate(timetable(jobs, DEVICES, "fifo")).makespan_s,
        "Hydra's rules": hydra_s(jobs, 1),
        "Hydra's rules, 4 micro-batches a step": hydra_s(jobs, 4),
    }
    print(table(["beside", "times ours"], [[k, f"{s / found.makespan_s:.2f}"] for k, s in others.items()]))


def hydra_s(jobs: Sequence[Job], micro_batches: int) -> float:
    """Sharded-LRTF by visits: a visit loads its stage, waits for it, and computes one micro-batch."""
    found = [
        replace(
            job, step_s=job.step_s + micro_batches * job.load_s, load_s=0.0, parts=micro_batches * job.parts
        )
        for job in jobs
    ]
    few = [replace(job, left=max(1, job.left // micro_batches)) for job in found]  # as long a list for each
    times = sum(job.left for job in found) / sum(job.left for job in few)
    return times * simulate(timetable(few, DEVICES, "lrtf", quantum="stage")).makespan_s


def two() -> None:
    """A task of heavy loads and one of heavy compute on one device hide each other's loads."""
    jobs = [Job("loads", 40, 4, 12, parts=6), Job("computes", 40, 12, 1.2, parts=6)]
    names: tuple[PolicyName, ...] = ("link", "lrtf")
    over = {policy: simulate(timetable(jobs, 1, policy)).over_bound for policy in names}
    print(
        f"\nheavy loads beside heavy compute: link {over['link']:.3f}, lrtf {over['lrtf']:.3f} of the bound"
    )


def drawn(loads: int) -> None:
    """Mixed models on 2 to 8 devices, whose loads take 0.1 to 3 forwards."""
    over: dict[PolicyName, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(loads):
        draw = random.Random(seed)
        devices = draw.choice([2, 4, 8])
        jobs = []
        for n in range(draw.randint(devices, 3 * devices)):
            stages, forward_s = draw.randint(3, 12), draw.uniform(0.5, 2)
            heavy, steps, parts = draw.choice([0.1, 0.5, 1, 2, 3]), draw.randint(5, 25), 2 * stages - 1
            jobs.append(Job(f"t{n}", steps, stages * 4 * forward_s, parts * heavy * forward_s, parts=parts))
        for policy in POLICIES:
            over[policy].append(simulate(timetable(jobs, devices, policy)).over_bound)
    worst = max(ours / theirs for ours, theirs in zip(over["link"], over["lrtf"], strict=True))
    print(f"\n{loads} drawn loads, times the bound; link is at most {worst:.3f} of lrtf")
    rows = [[policy, f"{statistics.mean(found):.3f}", f"{max(found):.3f}"] for policy, found in over.items()]
    print(table(["policy", "mean", "worst"], rows))


# -------------------------------------------------------------------------------------- by processes of train_many


def trained_s(
    tasks: Sequence[cl.Task], devices: int, policy: PolicyName, prepare: Callable[[], object],
    quantum: Quantum = "step",
) -> tuple[float, int]:  # fmt: skip
    """Seconds from the first step to the last of all tasks, by so many workers, and the moves between them."""
    with tempfile.TemporaryDirectory() as name, cl.launch(CONFIG, rank=0, world_size=1) as context:
        folder = Path(name)
        orders = [
            Order(tuple(tasks), CONFIG, folder, None, launch_gang, folder / f"log{n}", prepare)
            for n in range(devices)
        ]
        workers = [OwnDevice(order) for order in orders]
        try:
            while not all(each.is_ready for each in workers):
                for each in workers:
                    assert not list(each.answers()), "nothing is asked yet"
                time.sleep(0.1)
            Leader(context, workers[0], workers[1:], folder, 0, CONFIG).run(
                tasks, policy, None, None, quantum
            )
        finally:
            for each in workers:
                each.close()
        spans = cl.many.results.read_result(folder).timeline
        return spans.makespan_s - min(span.start_s for span in spans.spans), spans.moves


class Sleeping:
    """A task whose steps sleep. Where it stands is kept in its folder, as a checkpoint would."""

    def __init__(self, order: Order, task: cl.Task, *others: Any) -> None:
        self._folder, self.step = order.directory, slept(order.directory, task.name)
        self._name = task.name

    def advance(self, to: int, *, ends: bool = True, until: Callable[[], bool] = lambda: False) -> float:
        before = self.step
        while self.step < to and (self.step == before or not until()):
            time.sleep(EMULATED_STEP_S)
            self.step += 1
        return 0.0

    def close(self, error: BaseException | None = None) -> None:
        folder_of(self._folder, self._name).mkdir(parents=True, exist_ok=True)
        (folder_of(self._folder, self._name) / "step").write_text(str(self.step))


def slept(folder: Path, task: str) -> int:
    path = folder_of(folder, task) / "step"
    return int(path.read_text()) if path.exists() else 0


def sleep_instead() -> None:
    """In a worker: let tasks sleep."""
    worker.OpenTask, worker.saved_step = Sleeping, slept  # type: ignore[misc,assignment]


def emulated() -> None:
    """The twelve tasks by eight processes that sleep."""
    coordinator.saved_step = slept
    tasks = [task(f"t{n}", STEPS) for n in range(TASKS)]
    jobs = [Job(each.name, STEPS, EMULATED_STEP_S) for each in tasks]
    plan = simulate(timetable(jobs, DEVICES))
    took_s, moves = trained_s(tasks, DEVICES, "link", sleep_instead)
    alone_s = TASKS * STEPS * EMULATED_STEP_S
    print(
        f"{TASKS} tasks of {STEPS} steps by {DEVICES} emulated devices: {took_s:.2f} s, {moves} moves. Simulated "
        f"{plan.makespan_s:.2f} s, so {took_s / plan.makespan_s:.3f} of it. Model parallelism takes "
        f"{alone_s / took_s:.2f} times as long."
    )


def build() -> cl.models.GPT:
    return cl.models.GPT(SHAPE)


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(
        SHAPE.vocabulary, (64, SHAPE.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    return [(row[:-1], row[1:]) for row in tokens]


def task(name: str, steps: int) -> cl.Task:
    return cl.Task(name, build, data=samples, steps=steps, global_batch=8)


def stages(rounds: int) -> None:
    """A task with few samples and one with many, each with all its state on the host, behind a slow link."""
    config = dict(
        parallel=dict(pipeline=dict(size=1, schedule="bfs", stages_per_rank=4, micro_batches=2)), zero=dict(stage=3),
        memory=dict(
            placement="static", host_fraction=dict.fromkeys(("weights", "gradients", "optimizer"), 1.0),
            update_on="host", rates=dict(up=LINK_BYTES_S, down=LINK_BYTES_S),
        ),
    )  # fmt: skip
    loads, computes = (
        cl.Task(name, wide, data=samples, steps=STAGED_STEPS, global_batch=batch, config=config)
        for name, batch in (("loads", 2), ("computes", 32))
    )
    took: dict[str, list[float]] = {"step": [], "stage": [], "loads": [], "computes": []}
    for _ in range(rounds):
        for name, tasks, quantum in (
            ("step", (loads, computes), QUANTA[0]), ("stage", (loads, computes), QUANTA[1]),
            ("loads", (loads,), QUANTA[0]), ("computes", (computes,), QUANTA[0]),
        ):  # fmt: skip
            took[name].append(trained_s(tasks, 1, "link", partial(torch.set_num_threads, 1), quantum)[0])
    found = {name: statistics.median(each) for name, each in took.items()}
    print(
        f"heavy loads ({found['loads']:.1f} s by itself) and heavy compute ({found['computes']:.1f} s) on one device: "
        f"step by step {found['step']:.1f} s, stage by stage {found['stage']:.1f} s"
    )


def wide() -> cl.models.GPT:
    return cl.models.GPT(replace(SHAPE, width=256))


def real(rounds: int, counts: Sequence[int]) -> None:
    """Equal small GPTs by two processes of one thread: the default against one task a device to its end."""
    for count in counts:
        ideal = -(-count // 2) / (count / 2)
        tasks = [task(f"t{n}", REAL_STEPS) for n in range(count)]
        took: dict[PolicyName, list[float]] = {"fifo": [], "link": []}
        for _ in range(rounds):
            for policy, found in took.items():
                found.append(trained_s(tasks, 2, policy, partial(torch.set_num_threads, 1))[0])
        gains = [theirs / ours for theirs, ours in zip(took["fifo"], took["link"], strict=True)]
        fifo_s, link_s = (statistics.median(took[policy]) for policy in ("fifo", "link"))
        print(
            f"{count} tasks on 2 devices: one task a device {fifo_s:.1f} s, link {link_s:.1f} s; "
            f"{statistics.median(gains):.2f}x, ideal {ideal:.2f}x ({', '.join(f'{gain:.2f}' for gain in gains)})"
        )


# --------------------------------------------------------------------------------------------------- adapters


class LowRank(nn.Module):
    """base(x) + up(down(x)) of a frozen linear (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(shape: cl.models.GPTConfig) -> nn.Module:
    """A frozen GPT with an adapter on what leaves the attention of each block."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(
            CAP_BYTES / torch.cuda.get_device_properties(0).total_memory
        )
    model = cl.models.GPT(shape).requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.get_submodule("attention")
        attention.out = LowRank(attention.out)
    return model


def adapters(shape: cl.models.GPTConfig, out: Path | None) -> None:
    """A step of each adapter, all through one loaded base as a worker runs them, and a step of one by itself."""
    one_s, all_s = abreast_s(shape, 1), abreast_s(shape, ADAPTERS)
    with torch.device("meta"):
        billions = sum(p.numel() for p in cl.models.GPT(shape).parameters()) / 1e9
    gain = ADAPTERS * one_s / all_s
    print(
        f"{ADAPTERS} adapters over {billions:.2g} B, {shape.sequence} tokens a step: {all_s:.2f} s for a step of each, "
        f"one by itself {one_s:.2f} s; {gain:.2f}x one after another"
    )
    if out is not None:
        row = dict(name="adapters", billions=billions, all_s=all_s, one_s=one_s, gain=gain)
        out.write_text(json.dumps({"rows": [row]}))


def abreast_s(shape: cl.models.GPTConfig, count: int) -> float:
    """Seconds for a step of each of so many adapters, after a first one."""
    rest = dict.fromkeys(("weights", "gradients", "optimizer"), 1.0)
    config: dict[str, Any] = dict(
        precision="bf16" if torch.cuda.is_available() else "fp32", seed=1, zero=dict(stage=3),
        activation_checkpoint="full",
        parallel=dict(pipeline=dict(size=1, schedule="bfs", stages_per_rank=shape.layers // 2, micro_batches=1)),
        memory=dict(placement="static", host_fraction=rest, update_on="host", shared_base="base"),
    )  # fmt: skip
    store, turnstile = cl.HostStore(parks=False), Turnstile[float]()
    tokens = torch.randint(
        shape.vocabulary, (1, shape.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with ExitStack() as stack:
        engines = []
        for n in range(count):
            rate = dict(optimizer=dict(type="adamw", lr=1e-4 * (n + 1)))
            context = stack.enter_context(cl.launch(config | rate, rank=0, world_size=1))
            engine = cl.initialize(partial(adapted, shape), context=context, store=store, task=f"a{n}")
            take_turns(engine, partial(turnstile.turn, n) if count > 1 else None)
            engines.append(engine)

        def trained(engine: cl.Engine, steps: int) -> float:
            return [float(engine.train_step(batch).loss) for _ in range(steps)][-1]

        def together(steps: int) -> None:
            for told in turnstile.run([partial(trained, engine, steps) for engine in engines]):
                if isinstance(told, BaseException):
                    raise told

        together(1)
        begun_s = time.perf_counter()
        together(ADAPTER_STEPS)
        return (time.perf_counter() - begun_s) / ADAPTER_STEPS


if __name__ == "__main__":
    main()
