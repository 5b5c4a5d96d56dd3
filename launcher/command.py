"""Runs the command `colossal-lite`: each command is a frozen dataclass, with options as fields and `run` as its action.

Note: exit codes.  0: done.  1: the answer is negative.  2: the request is not possible; standard error says why,
without a traceback.  Torchrun starts the workers, not this command.  Commands that need torch import it themselves, so
`config` and `schedule` start without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TextIO

import tyro
from tyro.conf import OmitSubcommandPrefixes, Positional, Suppress, subcommand

from colossal_lite import __version__
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.config.config import Config, render
from colossal_lite.config.pipeline_schema import ScheduleName
from colossal_lite.launcher.calibrate_command import CalibrateCommand
from colossal_lite.launcher.many_command import ManyCommand
from colossal_lite.launcher.new_command import NewCommand
from colossal_lite.launcher.plan_command import PlanCommand
from colossal_lite.launcher.prove_command import ProveCommand
from colossal_lite.launcher.roles_command import RolesCommand
from colossal_lite.schedule.schedule_drawing import draw

PIPE_CLOSED = 141
"""The exit code of a command whose reader has closed the pipe, as shells give it."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""
PROGRAM = "colossal-lite"
# Commands that are not built yet; each is refused by name.
NOT_BUILT: Mapping[str, str] = {
    "bench": "benchmarks in one command; scripts are in examples/benchmarks",
}
ABOUT = f"""Large-scale training; torchrun starts the workers. Not built yet: {", ".join(NOT_BUILT)}.

--version prints the version. For completion, write FILE and source it, in bash, zsh or fish:
{PROGRAM} --tyro-write-completion bash FILE"""


@dataclass(frozen=True)
class Doctor:
    """Check this machine for training: findings, fallbacks and reasons. Exit code 1 if something cannot work."""

    json: bool = False
    """One JSON object a finding, for programs."""

    def run(self) -> int:
        from rich.console import Console

        from colossal_lite import launcher
        from colossal_lite.launcher import doctor, env

        rows = (*doctor.report(env.environment()), *doctor.attempt("launch", launcher.findings))
        if self.json:
            print("\n".join(json.dumps(asdict(row)) for row in rows))
        else:
            console = Console()
            with console.capture() as drawn:  # rich would end the process where the reader has enough
                console.print(doctor.table(rows))
            print(drawn.get(), end="")
        return 1 if any(row.status == "fault" for row in rows) else 0


@dataclass(frozen=True)
class Show:
    """Show every setting with its value and origin. Options after the file (`--parallel.tensor.size 2`) win."""

    path: Positional[str]
    """A .py file (`file.py:name` for another dict than `config`), .json or .toml."""
    world: int | None = None
    """Check the configuration against a world of so many ranks, and derive parallel.data."""
    overrides: Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        config = Config.load(self.path, self.overrides)
        config.check_built()
        if self.world is not None:
            config = config.check_world(self.world)
        for line in (*config.notices, *config.warnings()):
            print(line, file=sys.stderr)
        print(render(config.resolved()))
        return 0


@dataclass(frozen=True)
class Schema:
    """Print the JSON schema of a configuration file."""

    def run(self) -> int:
        print(json.dumps(Config.schema(), indent=2))
        return 0


@dataclass(frozen=True)
class Options:
    """List every option that may override a configuration file, with its meaning and default."""

    def run(self) -> int:
        print(Config.help(PROGRAM))
        return 0


@dataclass(frozen=True)
class ConfigCommand:
    """Show a configuration as a run reads it, or list the legal settings."""

    action: OmitSubcommandPrefixes[
        Annotated[Show, subcommand("show")]
        | Annotated[Schema, subcommand("schema")]
        | Annotated[Options, subcommand("options")]
    ]

    def run(self) -> int:
        return self.action.run()


@dataclass(frozen=True)
class ScheduleCommand:
    """Draw a pipeline schedule, with its bubble, its activations, and its messages."""

    stages: int
    """Ranks of the pipeline."""
    micro_batches: int
    """Parts of a batch."""
    name: ScheduleName
    """Which schedule."""
    stages_per_rank: int | None = None
    """Stages on each rank; default: the least that the schedule allows."""
    cost: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Seconds of forward, input gradient and weight gradient of one rank's layers."""
    latency_s: float = 0.0
    """Seconds from one rank to the next."""

    def run(self) -> int:
        drawn = draw(
            self.stages,
            self.micro_batches,
            self.name,
            self.stages_per_rank,
            cost=self.cost,
            latency_s=self.latency_s,
        )
        print(drawn)
        return 0


@dataclass(frozen=True)
class Ls:
    """List the checkpoints of a folder, the newest first. Exit code 1 if one is damaged."""

    folder: Positional[Path]
    """The folder of `engine.save`, or one checkpoint in it."""

    def run(self) -> int:
        from colossal_lite.checkpoint import tools as tools

        rows = list(tools.ls(self.folder))
        print("\n".join(map(str, rows)))
        return 1 if any(row.fault for row in rows) else 0


@dataclass(frozen=True)
class Verify:
    """Read every byte of a checkpoint, or of all in a folder. Exit code 1 if one is damaged."""

    folder: Positional[Path]
    """The folder of `engine.save`, or one checkpoint in it."""

    def run(self) -> int:
        from colossal_lite.checkpoint import tools as tools

        found = False
        for path, faults in tools.check(self.folder):
            print("\n  ".join([f"{path}: {'damaged' if faults else 'whole'}", *faults]))
            found = found or bool(faults)
        return int(found)


@dataclass(frozen=True)
class ToHF:
    """Write a checkpoint as a Hugging Face folder that `from_pretrained` opens."""

    folder: Positional[Path]
    """The folder of `engine.save`, or one checkpoint in it; the newest whole checkpoint is exported."""
    target: Positional[Path]
    """The folder to make."""
    dtype: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    """Format of the weights."""

    def run(self) -> int:
        from colossal_lite.checkpoint import tools as tools

        print(f"{self.target}: written from {tools.export(self.folder, self.target, self.dtype)}")
        return 0


@dataclass(frozen=True)
class FromHF:
    """Make a checkpoint of step 0 from a Hugging Face folder of GPT-2 or Llama (safetensors)."""

    folder: Positional[Path]
    """Folder with config.json and safetensors."""
    target: Positional[Path]
    """The folder to pass to `engine.load`."""

    def run(self) -> int:
        from colossal_lite.checkpoint import tools as tools

        print(f"{tools.import_(self.folder, self.target)}: written from {self.folder}")
        return 0


@dataclass(frozen=True)
class CkptCommand:
    """List, verify and convert checkpoints. No process group, no torchrun."""

    action: OmitSubcommandPrefixes[
        Annotated[Ls, subcommand("ls")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[ToHF, subcommand("to-hf")]
        | Annotated[FromHF, subcommand("from-hf")]
    ]

    def run(self) -> int:
        return self.action.run()


@dataclass(frozen=True)
class ReportCommand:
    """Make report.html of a run again, from the files in its folder."""

    folder: Positional[Path]
    """The folder of the `cl.Run`."""

    def run(self) -> int:
        from colossal_lite.observe.report import write_report

        print(f"{write_report(self.folder)}: written")
        return 0


Command = (
    Annotated[NewCommand, subcommand("new")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[ConfigCommand, subcommand("config")]
    | Annotated[PlanCommand, subcommand("plan")]
    | Annotated[RolesCommand, subcommand("roles")]
    | Annotated[ProveCommand, subcommand("prove")]
    | Annotated[ScheduleCommand, subcommand("schedule")]
    | Annotated[CalibrateCommand, subcommand("calibrate")]
    | Annotated[ManyCommand, subcommand("many")]
    | Annotated[CkptCommand, subcommand("ckpt")]
    | Annotated[ReportCommand, subcommand("report")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. tyro itself exits with 0 after --help, with 2 at a wrong option."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()  # None: closed by `>&-`
    try:
        try:
            return _answer(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `| head -1`
        _drop_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:  # a file of the command cannot be written or read
        place = f"{error.filename}: " if error.filename else ""
        legal = "legal: a path that can be read or written, in a folder that exists"
        print(f"{place}{error.strerror or error}; {legal}", file=sys.stderr)
        _drop_output()
        return 2
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def _answer(given: list[str]) -> int:
    """Run one command. Raises ValueError, OSError and CheckpointError as it does."""
    if given and given[0] in NOT_BUILT:
        print(f"{PROGRAM} {given[0]} is not built yet ({NOT_BUILT[given[0]]})", file=sys.stderr)
        return 2
    if given == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    command, rest = tyro.cli(Command, args=given, prog=PROGRAM, description=ABOUT, return_unknown_args=True)
    if rest and isinstance(command, ConfigCommand) and isinstance(command.action, Show):
        command = ConfigCommand(replace(command.action, overrides=tuple(rest)))
    elif rest and isinstance(command, PlanCommand | ProveCommand):
        command = replace(command, overrides=tuple(rest))
    elif rest:
        print(
            f"{PROGRAM} {given[0]}: unknown: {' '.join(rest)}; see {PROGRAM} {given[0]} --help",
            file=sys.stderr,
        )
        return 2
    return command.run()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _drop_output() -> None:
    """Let what stdout still holds go nowhere, as Python flushes it once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
