"""Ends a run early: records signals, saves at the end of the step, says where, and raises `Stopped`.

Note: a signal.
SIGTERM, SIGINT, SIGHUP and SIGUSR1 do not end a rank; one that the process ignores (as under nohup) stays ignored.
Each rank records what it receives, and the all-reduce of the step's totals carries it.  So all ranks stop after the
same step, at no cost in messages.  A second SIGINT meets the handler of before the launch: it ends the rank at once.
Launchers send a signal to the process group of a rank.  Any forked worker of a torch DataLoader gets a group of its
own, and survives (data/worker_signals.py).  A worker dies if it is spawned, or signalled by its own number.  Then the
loader raises where the loop waits for it, and the run ends as stopped and not saved.  From the first signal on SIGCHLD
has no handler: that of torch's DataLoader would raise in the middle of the last step.

Note: exit codes of a script in which these errors are not caught.
0: finished, or stopped and saved.  1: any other error.  2: refused.  3: stopped and not saved.
4: saves failed: the last one of a run that has finished, or `checkpoint.max_failures` in a row.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import process, util
from pathlib import Path
from types import FrameType
from typing import Any

from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.data.worker_signals import begin_worker
from colossal_lite.observe.printed_lines import tell

STOPPED, NOT_SAVED, SAVES_FAILED = 0, 3, 4
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
LOADER_WORKERS = "torch.utils.data._utils.worker"
"""the module that a worker of torch's DataLoader runs"""
Handler = Callable[[int, FrameType | None], Any] | int | None


class Stopped(SystemExit):
    """The run ends, on every rank alike. `code` is its exit code: 0, 3 or 4 (see the note of this file). `step`: steps
    made. `checkpoint`: the directory that holds them, None if they are not saved."""

    def __init__(self, text: str, *, code: int, step: int, checkpoint: Path | None = None) -> None:
        super().__init__(code)
        self.text, self.step, self.checkpoint = text, step, checkpoint

    def __str__(self) -> str:
        return self.text


@dataclass(repr=False)  # `signal` writes one as text, with all that it replaced, twice each
class StopSignals:
    """Records stop signals while installed. Only the main thread of a process can install handlers."""

    answers: bool = False
    """Whether this process confirms a SIGINT on the terminal."""
    received: int | None = None
    _replaced: dict[int, Handler] = field(default_factory=dict)
    _of_children: Handler = None
    _open: bool = True
    _pid: int = field(default_factory=os.getpid)

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            # None: a handler that was not set from Python, so it could not be restored
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._replaced[number] = signal.signal(number, self._record)
        util.register_after_fork(self, StopSignals._in_a_child)

    def restore(self) -> None:
        """Restore the old handlers, except where another handler was installed since."""
        self._open = False
        if self._of_children is not None and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, self._of_children)
        for number, handler in self._replaced.items():
            while (owner := _owner(handler)) and not owner._open:  # contexts may close in any order
                handler = owner._replaced[number]
            if signal.getsignal(number) == self._record:
                signal.signal(number, handler)

    @property
    def name(self) -> str:
        """Name of the last signal received; "" if this rank has received none."""
        return signal.Signals(self.received).name if self.received is not None else ""

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return self._as_a_child(number)
        if self.received is None and signal.getsignal(signal.SIGCHLD) is not None:
            self._of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, self._replaced[number])
            if self.answers and sys.__stderr__ is not None and sys.__stderr__.isatty():
                os.write(2, b"SIGINT: stops after this step; a second one ends at once\n")
        if outer := _owner(self._replaced[number]):  # a context around this one is asked to stop as well
            outer._record(number, frame)

    def _in_a_child(self) -> None:
        """Called in a process that multiprocessing has forked: shield it if it is a loader's worker."""
        target = getattr(process.current_process(), "_target", None)
        if self._open and getattr(target, "__module__", "") == LOADER_WORKERS:
            begin_worker(None, 0)

    def _as_a_child(self, number: int) -> None:
        """The handler of a forked loader's worker: it ignores a terminal's SIGINT; other signals end it."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def worker_died(
    error: BaseException | None, signals: StopSignals, step: int, *, speaks: bool
) -> Stopped | None:
    """The error that ends a run whose loader lost a worker to the signal that this rank also received; else None."""
    text = str(error)
    if not signals.name or not isinstance(error, RuntimeError) or "DataLoader worker (pid" not in text:
        return None
    text = (
        f"stopped by {signals.name} after step {step}: NOT SAVED: the signal has ended a worker of a DataLoader, "
        f"and the loop waits for its batch ({text.splitlines()[0]}). Legal: context.dataloader(...), which takes that "
        f"loader too and shields its workers, or forked workers"
    )
    if speaks:
        tell(text)
    return Stopped(text, code=NOT_SAVED, step=step)


def _owner(handler: Handler) -> StopSignals | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None


@dataclass(frozen=True)
class StopPoint:
    """The directory where an engine saves when a signal stops it, and the facts that it saves beside its state."""

    speaks: bool
    """Whether this rank prints for all."""
    directory: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    samples: Callable[[], int] | None = None
    is_given: bool = False
    """Set by `save_on_stop`; other saves do not change it."""

    def after(self, directory: Path, extra: Mapping[str, Any]) -> StopPoint:
        """The point of an engine that has saved to this directory, or resumed from it."""
        return self if self.is_given else replace(self, directory=directory, extra=extra)

    def stop(
        self, step: int, who: str, saved: tuple[int, Path] | None, save: Callable[[StopPoint], Path]
    ) -> Stopped:
        """Save after `step`, unless it was `saved` already, and print one line. Returns the error to raise."""
        head = f"stopped by {who or 'a signal to another rank'} after step {step}"
        path, why = (
            None,
            "this engine has no directory; legal: engine.save_on_stop(directory), or a save before",
        )
        if saved is not None and (saved[0], saved[1].parent) == (step, self.directory):
            path = saved[1]
        elif self.directory is not None:
            try:
                path = save(self)
            except (CheckpointError, ValueError) as error:  # ValueError: the weights are a mix
                why = str(error)
        text = f"{head}: NOT SAVED: {why}" if path is None else f"{head}: saved {path}"
        if self.speaks:
            tell(text)
        return Stopped(text, code=NOT_SAVED if path is None else STOPPED, step=step, checkpoint=path)
