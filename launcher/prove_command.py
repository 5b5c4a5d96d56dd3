"""Runs `colossal-lite prove`: compares a model on emulated ranks of this machine with the same model in one process.

Note: ranks are processes of this machine's CPUs, started once and used for every world.  If ranks differ, each axis is
tried alone, so that the axis at fault is named.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional, Suppress

from colossal_lite.config.config import Config
from colossal_lite.config.source import read_source
from colossal_lite.launcher.env import LaunchError

if TYPE_CHECKING:
    from colossal_lite.engine.proof import Build, Fault, Proof, ProofCase

MOST_SECONDS = 2.592e6
"""As `timeout_s` of a configuration."""
PRELOADED = ["torch", "torch.distributed", "colossal_lite.launcher.start", "colossal_lite.engine.proof"]


@dataclass(frozen=True)
class Verdict:
    """What `prove` found."""

    equal: bool
    world: int
    layout: str
    model: str
    steps: int
    compared: int
    """Tensors that each rank compared."""
    largest_error: float
    """Largest relative error of tensors that agree."""
    fault: Fault | None = None
    """The first difference."""
    refused: str = ""
    """Why the configuration is refused for this model."""
    seconds: float = 0.0

    def __str__(self) -> str:
        where = f"{self.model} on {self.world} ranks ({self.layout})"
        if self.refused:
            return f"refused: {where}: {self.refused}"
        if self.fault is not None:
            return f"differs: {where}: {self.fault}"
        return (
            f"equal: {where}: {self.compared} losses, outputs, gradients and weights of {self.steps} steps in "
            f"float64, the largest error {self.largest_error:.1e} ({self.seconds:.0f} s)"
        )


@dataclass(frozen=True)
class ProveCommand:
    """Train a small version of your model on ranks of this machine and in one process, and compare every gradient.

    Exit code 0: equal. 1: not; the first module, tensor and axis are named. 2: refused. Both sides run in float64 with
    SGD. Options after the file (`--parallel.tensor.size 2`) override it, as in `config show`.
    """

    path: Positional[str]
    """Configuration: a .py file (`file.py:name` for another dict than `config`), .json or .toml."""
    model: str
    """FILE.py:FUNCTION or MODULE:FUNCTION that takes nothing and returns the model; or a model as in `plan`."""
    world: int
    """Ranks: processes of this machine."""
    steps: int = 3
    """Steps to train."""
    whole: bool = False
    """Take the model as it is; default: a large one is made smaller by the sizes in its config."""
    criterion: Literal["model"] | None = None
    """model: train on the loss that the model's own forward returns."""
    plan: str | None = None
    """FILE.py:NAME, a dict of roles, as `initialize(plan=...)` takes it."""
    timeout_s: float = 300.0
    """Seconds that ranks may take."""
    json: bool = False
    """One JSON object, for programs."""
    overrides: Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        verdict = prove(self)
        print(json.dumps(asdict(verdict)) if self.json else verdict)
        return 2 if verdict.refused else int(not verdict.equal)


def prove(asked: ProveCommand) -> Verdict:
    """Run a proof. Raises ValueError for a request that is not possible, LaunchError for ranks that do not answer."""
    from colossal_lite.engine import proof

    if asked.steps < 1:  # which would compare no gradient
        raise ValueError(f"--steps {asked.steps}: is out of range; legal: an int >= 1")
    if not 0 < asked.timeout_s <= MOST_SECONDS:
        raise ValueError(
            f"--timeout-s {asked.timeout_s:g}: is out of range; legal: a float > 0 and <= {MOST_SECONDS:g}"
        )
    begun_s = time.monotonic()
    config = Config.load(asked.path, asked.overrides).check_world(asked.world)
    config.check_built()
    build, about = _builder(asked.model, asked.whole)
    plan: Any = read_source(asked.plan)[0] if asked.plan else "auto"
    model = build()
    case = proof.case_of(config, model, steps=asked.steps, criterion=asked.criterion, plan=plan)
    layout = config.layout().describe()
    with _ranks(asked.world, asked.timeout_s, {type(each).__module__ for each in model.modules()}) as ranks:
        found = ranks.run(asked, case)
        verdict = _verdict(found, Verdict(True, asked.world, layout, about, asked.steps, 0, 0.0))
        if verdict.fault is not None:
            verdict = replace(verdict, fault=replace(verdict.fault, axis=_axis(asked, config, case, ranks)))
    return replace(verdict, seconds=time.monotonic() - begun_s)


def _verdict(found: Sequence[Proof | str], about: Verdict) -> Verdict:
    refused = [each for each in found if isinstance(each, str)]
    if refused:
        return replace(about, equal=False, refused=refused[0])
    proofs = [each for each in found if not isinstance(each, str)]
    faults = sorted(
        (fault for each in proofs for fault in each.faults), key=lambda f: (f.step, f.order, f.rank)
    )
    return replace(
        about, equal=not faults, fault=faults[0] if faults else None,
        compared=min(each.compared for each in proofs), largest_error=max(each.largest_error for each in proofs),
    )  # fmt: skip


def _axis(asked: ProveCommand, config: Config, case: ProofCase, ranks: _Ranks) -> str:
    """The first axis of the mesh that differs alone; all of them if none does."""
    from colossal_lite.engine.proof import on_one_axis

    axes = [axis.name for axis in config.layout().axes if axis.size > 1]
    for axis, alone in on_one_axis(config).items():
        world = alone.layout().world_size
        made = replace(
            case, config=dict(case.config) | {"parallel": alone.model_dump(exclude_unset=True)["parallel"]}
        )
        found = ranks.run(asked, made, world)
        if any(isinstance(each, str) or each.faults for each in found):
            return axis
    return " and ".join(axes)


# ---- the model ----


def _builder(text: str, whole: bool) -> tuple[Build, str]:
    from colossal_lite.engine.proof import shrunk
    from colossal_lite.models import GPT, GPTConfig
    from colossal_lite.planner.model_source import find_model

    found = find_model(text)
    build: Build = partial(GPT, found) if isinstance(found, GPTConfig) else found
    return (build, "the whole model") if whole else shrunk(build)


# ---- ranks ----


def _serve(tasks: Connection) -> None:
    """Main function of a rank: runs one world after another, until the other end closes."""
    import torch

    from colossal_lite.engine.proof import prove_on_rank
    from colossal_lite.launcher.start import file_store, launch

    torch.set_num_threads(1)
    while True:
        try:
            model, whole, case, rank, world, path = tasks.recv()
        except EOFError:
            return
        try:
            build, _ = _builder(model, whole)
            store = file_store(path, world)
            with launch(case.config, store=store, rank=rank, world_size=world) as context:
                answer: Any = prove_on_rank(context, build, case)
        except ValueError as error:
            answer = str(error)
        except Exception:  # the parent reports it
            answer = LaunchError(f"rank {rank}: {traceback.format_exc()}")
        tasks.send(answer)


@dataclass
class _Ranks:
    """Processes that wait for worlds."""

    processes: list[Any]
    tasks: list[Connection]
    directory: str
    timeout_s: float
    worlds: int = 0

    def run(self, asked: ProveCommand, case: ProofCase, world: int | None = None) -> list[Proof | str]:
        """The result of each rank of a world, or its refusal. Raises LaunchError for a rank that died or is late."""
        tasks = self.tasks[: world or len(self.tasks)]
        self.worlds += 1
        path = f"{self.directory}/store{self.worlds}"
        for rank, each in enumerate(tasks):
            each.send((asked.model, asked.whole, case, rank, len(tasks), path))
        answers: dict[int, Any] = {}
        end = time.monotonic() + self.timeout_s
        while len(answers) < len(tasks):
            ready = wait([t for r, t in enumerate(tasks) if r not in answers], end - time.monotonic())
            late = [rank for rank in range(len(tasks)) if rank not in answers]
            if not ready:
                raise LaunchError(
                    f"prove: ranks {late} did not answer within {self.timeout_s:g} s (--timeout-s)"
                )
            for rank in late:
                if tasks[rank] in ready:
                    answers[rank] = self._answer(rank)
        return [answer for _, answer in sorted(answers.items())]

    def _answer(self, rank: int) -> Any:
        try:
            answer = self.tasks[rank].recv()
        except (EOFError, ConnectionError) as error:
            raise LaunchError(
                f"prove: rank {rank} has ended (exit code {self.processes[rank].exitcode})"
            ) from error
        if isinstance(answer, LaunchError):
            raise answer
        return answer


@contextmanager
def _ranks(world: int, timeout_s: float, modules: Iterable[str]) -> Iterator[_Ranks]:
    """Processes of `world` ranks; `modules` are imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    installed = sorted(name for name in modules if not name.startswith(("colossal_lite_model", "__main__")))
    context.set_forkserver_preload([*PRELOADED, *installed])
    pipes = [context.Pipe() for _ in range(world)]
    processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
    with tempfile.TemporaryDirectory(prefix="prove-") as directory:
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            yield _Ranks(processes, [ours for ours, _ in pipes], directory, timeout_s)
        finally:
            for ours, _ in pipes:
                ours.close()
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
