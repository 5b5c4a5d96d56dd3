"""Trains many tasks on the devices of one launch, each with the numbers that it has alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from colossal_lite.checkpoint.files import folder_given
from colossal_lite.checkpoint.owner import FolderClaims
from colossal_lite.config.whole_file import write_whole
from colossal_lite.engine.context import Context
from colossal_lite.engine.stopping import STOPPED, Stopped
from colossal_lite.many.build_timetable import Quantum
from colossal_lite.many.coordinator import Coordinator, OnReport
from colossal_lite.many.devices import (
    END_S,
    Device,
    OtherDevice,
    OwnDevice,
    Watch,
    WorkersLostError,
    poll,
    relay,
)
from colossal_lite.many.fingerprint import fingerprint
from colossal_lite.many.journal import JOURNAL, stop_fault
from colossal_lite.many.live_table import LiveTable
from colossal_lite.many.policies import PolicyName
from colossal_lite.many.results import TASKS, ManyResult, read_result, write_result
from colossal_lite.many.task import Halving, Task, check
from colossal_lite.many.worker import Launch, Order
from colossal_lite.memory.frozen_records import FrozenHandle, FrozenRecords
from colossal_lite.observe.printed_lines import tell

SWEEP = "sweep.json"


class OnReportError(RuntimeError):
    """The user's `on_report` has raised, or has returned something else than 'go', 'stop' or None."""


def train(
    tasks: Sequence[Task], context: Context, *, launch: Launch, serve: Callable[[], tuple[object, int]],
    prepare: Callable[[], object], config: Mapping[str, Any], directory: str | Path, policy: PolicyName = "link",
    stop: Halving | None = None, on_report: OnReport | None = None, save_every: int | None = None,
    resume: bool = False, quantum: Quantum = "step",
) -> ManyResult:  # fmt: skip
    """As `launcher.train_many`, in the context of its supervisors: a rank for each device. Collective.

    `launch`: opens the context of a task, in a worker.  `serve`: serves the store where gangs meet; its port.
    `prepare`: called first in each worker.
    """
    directory = folder_given("train_many", directory)  # `build` may change that of the process
    check(tasks, config, policy, stop, save_every, context.world_size, quantum)
    claims = FolderClaims()
    context.on_close(claims.close)
    goes_on = partial(stop_fault, directory, tasks, stop)
    _claim(claims, fingerprint(tasks, config), directory, context, resume, goes_on)
    log = directory / "logs" / f"device-{context.rank}.log"
    frozen = FrozenRecords()  # which outlives the workers
    order = Order(
        tuple(tasks), config, directory, save_every, launch, log, prepare, _shared(frozen, context), context.rank
    )  # fmt: skip
    own = OwnDevice(order)
    fault_from = None
    try:
        if context.is_main:
            others: list[Device] = [OtherDevice(context, rank) for rank in range(1, context.world_size)]
            server, port = serve()  # held while the tasks train
            leader = Leader(context, own, others, directory, port, config)
            leader.run(tasks, policy, stop, on_report, quantum)
            del server
            fault_from = leader.fault_from
        else:
            relay(own, context)
    finally:
        own.close()
    return _ended(context, directory, fault_from)


def _shared(frozen: FrozenRecords, context: Context) -> FrozenHandle | None:
    """Where the workers of all ranks find the frozen weights: in the memory of rank 0."""
    handle = frozen.handle() if context.is_main else None
    told = context.mesh.world.gather_json(None if handle is None else [handle.pid, handle.descriptor])
    return None if told[0] is None else FrozenHandle(*told[0])


def _claim(
    claims: FolderClaims, ours: Mapping[str, str], directory: Path, context: Context, resume: bool,
    goes_on: Callable[[], str],
) -> None:  # fmt: skip
    """Take the directory for these tasks. Raises ValueError on every rank if it is not theirs. `goes_on`: why they
    cannot go on from its files, or ""."""
    fault = ""
    if context.is_main:
        fault = _refused(claims, ours, directory, resume)
        if not fault and resume and (why := goes_on()):
            fault = f"directory={str(directory)!r}: {why}, or another directory"
    told = context.mesh.world.gather_json([fault, dict(ours)])
    if told[0][0]:
        raise ValueError(told[0][0])
    for rank, (_, theirs) in enumerate(told):
        if theirs != told[0][1]:
            names = ", ".join(
                name for name in {**theirs, **told[0][1]} if theirs.get(name) != told[0][1].get(name)
            )
            raise ValueError(
                f"tasks: {names}: rank {rank} has others than rank 0; legal: the same on every rank"
            )


def _refused(claims: FolderClaims, ours: Mapping[str, str], directory: Path, resume: bool) -> str:
    """Why these tasks cannot have the directory; "" if they have it now."""
    path, where = directory / SWEEP, f"directory={str(directory)!r}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if refused := claims.claim(directory):
            return f"directory: {refused}"
        if not path.exists():
            if left := [name for name in (JOURNAL, TASKS) if (directory / name).exists()]:
                return f"{where}: {' and '.join(left)} there, without {SWEEP}; legal: another directory"
            write_whole(path, json.dumps(ours, indent=1))
            return ""
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        return f"{where}: {error}; legal: a folder that can be written to"
    theirs = None
    with suppress(ValueError):
        theirs = json.loads(text)
    if not isinstance(theirs, dict):
        return f"{where}: {SWEEP} there is not one of train_many; legal: another directory"
    if told := "; ".join(_unlike(theirs, ours)):
        return f"{where}: it belongs to other tasks: {told}; legal: those tasks, or another directory"
    if not resume:
        return f"{where}: these tasks were begun there; legal: resume=True, or another directory"
    return ""


def _unlike(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[str]:
    """What differs between the tasks of a directory and these."""
    kinds = {
        "only there": theirs.keys() - ours.keys(),
        "only here": ours.keys() - theirs.keys(),
        "with other functions, data, steps, batch or settings": {
            n for n in theirs.keys() & ours.keys() if theirs[n] != ours[n]
        },
    }
    for what, names in kinds.items():
        if names:
            yield f"{', '.join(sorted(names)[:8])} {what}"


class Leader:
    """Rank 0: hears the workers, and lets the coordinator decide."""

    def __init__(
        self, context: Context, own: OwnDevice, others: Sequence[Device], directory: Path, port: int,
        config: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._context, self._own, self._directory, self._port = context, own, directory, port
        self._config = config
        self._devices: list[Device] = [own, *others]
        self._watch = Watch(context)
        self.fault_from: BaseException | None = None
        """What `on_report` has raised."""

    def run(
        self, tasks: Sequence[Task], policy: PolicyName, stop: Halving | None, on_report: OnReport | None,
        quantum: Quantum = "step",
    ) -> None:  # fmt: skip
        coordinator = Coordinator(
            tasks, self._directory, policy, stop, on_report, len(self._devices), self._context.config.seed,
            self._port, lambda device, request: self._devices[device].send(request), self._config, quantum,
        )  # fmt: skip
        table = LiveTable(coordinator)
        try:
            with table.shown():
                while not coordinator.is_over:
                    if not self._context.stop_requested and not coordinator.fault:
                        coordinator.assign()
                    elif not any(coordinator.pending):
                        break
                    self._hear(coordinator)
                    coordinator.end_hung()
                    table.show()
                table.show(last=True)
            self._end()
        finally:
            coordinator.close()
        rows, spans = coordinator.rows(), coordinator.spans
        jobs, count = coordinator.jobs(), len(self._devices)
        unwritten = write_result(self._directory, rows, spans, jobs, count)
        is_open = any(row["status"] == "open" for row in rows)
        over = [self._context.stop_signal if is_open else "", coordinator.fault, unwritten]
        self._context.store.set("over", json.dumps(over))
        self.fault_from = coordinator.fault_from

    def _hear(self, coordinator: Coordinator) -> None:
        """Take what workers have said, or wait a little."""
        for number, device in enumerate(self._devices):
            for answer in device.answers():
                coordinator.hear(number, answer)
        self._watch.look()
        poll(self._devices, self._own)

    def _end(self) -> None:
        """Let every worker save what is open and end. Raises WorkersLostError if one does not."""
        waits = set(range(len(self._devices)))
        for device in self._devices:
            device.send({"do": "end"})
        end_s = time.monotonic() + END_S
        while waits:
            for number in tuple(waits):
                if any(answer["said"] == "ended" for answer in self._devices[number].answers()):
                    waits.discard(number)
            if time.monotonic() > end_s:
                raise WorkersLostError(
                    f"the workers of ranks {sorted(waits)} have not ended within {END_S:g} s"
                )
            self._watch.look()
            if waits:
                poll(self._devices, self._own)


def _ended(context: Context, directory: Path, fault_from: BaseException | None) -> ManyResult:
    """The result, on every rank. Raises Stopped if a signal has ended the run early, and OnReportError if `on_report`
    has. `fault_from`: what it raised, on its rank. Raises ValueError if the result could not be written."""
    signal, fault, unwritten = json.loads(context.store.get("over"))
    if fault:
        text = f"{fault}. Every open task is saved in {directory}; resume=True goes on"
        raise OnReportError(text) from fault_from
    if signal:
        text = f"stopped by {signal}: every open task is saved in {directory}; resume=True goes on"
        if context.is_main:
            tell(text)
        raise Stopped(text, code=STOPPED, step=0)
    if unwritten:
        raise ValueError(
            f"directory: {unwritten}. Every task is saved; legal: a folder with room, and resume=True"
        )
    return read_result(directory)
