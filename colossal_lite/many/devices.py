"""Keeps a worker on each device: starts it again when it dies, and carries requests and answers.

Note: two kinds of devices.
Each process of the launch supervises one worker, through a pipe.  Rank 0 reaches the workers of other ranks through the
key-value store of the launch. `do/RANK/N` is the N-th request to a rank, and `said/RANK/N` its N-th answer.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Protocol

from colossal_lite.engine.context import Context
from colossal_lite.engine.stopping import STOP_SIGNALS
from colossal_lite.many.worker import Message, Order, serve

PRELOADED = ["torch", "colossal_lite.launcher.start", "colossal_lite.many.worker"]
START_S = 300.0
"""How long a worker may take to import what it needs."""
MOST_STARTS = 3
"""Workers in a row that may be killed before they are ready."""
POLL_S = 0.01
WATCH_S = 1.0
"""How often a rank asks whether another has died."""
END_S = 60.0
"""How long to wait for the process of a worker that has ended or was killed."""


class WorkersLostError(RuntimeError):
    """The run cannot go on: a supervisor has ended, or a worker does not start."""


class Device(Protocol):
    """Where requests go and answers come from."""

    def send(self, request: Message) -> None: ...
    def answers(self) -> Iterator[Message]:
        """The answers since the last call. {"said": "died"}: the worker was lost and started again."""
        ...


class OwnDevice:
    """The worker of this process."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._starts = 1
        """In a row, without a worker that was ready."""
        self._start()

    def _start(self) -> None:
        """Start the worker. Raises ValueError for tasks that cannot be sent to it.

        A stop signal goes to the whole group of processes. The supervisor alone answers it. So the fork server, which
        is started here too, and the worker have these signals blocked from their first moment."""
        self.pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs, self._order), name="worker")
        resource_tracker.ensure_running()  # which unblocks signals when it starts, and protects itself
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
        except (AttributeError, TypeError, multiprocessing.ProcessError) as error:
            raise _not_sent(error) from error
        except Exception as error:
            if type(error).__name__ == "PicklingError":
                raise _not_sent(error) from error
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._started_s, self.is_ready = time.monotonic(), False

    def send(self, request: Message) -> None:
        """Hand a request to the worker, or end it: {"do": "kill"}."""
        if request["do"] == "kill":
            self._process.kill()
            return
        try:
            self.pipe.send(request)
        except OSError:  # it has died, as `answers` will find
            return

    def answers(self) -> Iterator[Message]:
        """See `Device`. Raises WorkersLostError if the worker ends before it is ready."""
        try:
            while self.pipe.poll():
                answer = self.pipe.recv()
                if answer["said"] == "ready":
                    self.is_ready = True
                else:
                    yield answer
        except (EOFError, OSError):
            self._process.join(END_S)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._starts = 1 if self.is_ready else self._starts + 1
            if self._starts > MOST_STARTS or (not self.is_ready and code is not None and code >= 0):
                raise WorkersLostError(
                    f"a worker ended with {how} before it was ready; it imports your script, so train_many "
                    f"stands under `if __name__ == '__main__':`"
                ) from None
            self._start()
            yield {"said": "died", "how": how}
        if not self.is_ready and time.monotonic() - self._started_s > START_S:
            raise WorkersLostError(f"a worker has not started within {START_S:g} s")

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer of the worker, at most so long."""
        wait([self.pipe], timeout_s)

    def close(self) -> None:
        """Kill the worker if it still runs."""
        self.pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join(END_S)


def _not_sent(error: Exception) -> ValueError:
    return ValueError(
        f"tasks: they cannot be sent to the process that trains them: {error}. Legal: functions of a module or of the "
        f"script (no lambda, no function within another), functools.partial of those, and data that can be pickled"
    )


class OtherDevice:
    """The worker of another rank, seen from rank 0."""

    def __init__(self, context: Context, rank: int) -> None:
        self._store, self._rank = context.store, rank
        self._sent = self._heard = self._deaths = 0

    def send(self, request: Message) -> None:
        self._store.set(f"do/{self._rank}/{self._sent}", json.dumps([self._deaths, request]))
        self._sent += 1

    def answers(self) -> Iterator[Message]:
        while self._store.check([key := f"said/{self._rank}/{self._heard}"]):
            self._heard += 1
            answer = json.loads(self._store.get(key))
            self._deaths += answer["said"] == "died"
            yield answer
            self._store.delete_key(key)


class Watch:
    """Asks now and then whether another supervisor has ended."""

    def __init__(self, context: Context) -> None:
        self._context, self._asked_s = context, time.monotonic()

    def look(self) -> None:
        """Raises WorkersLostError with the rank and its reason."""
        if self._context.world_size > 1 and time.monotonic() - self._asked_s > WATCH_S:
            self._asked_s = time.monotonic()
            if lost := self._context.first_loss():
                raise WorkersLostError(f"{lost}; the run ends, and resume=True goes on from its checkpoints")


def relay(device: OwnDevice, context: Context) -> None:
    """On every rank but 0: carry requests to the worker and its answers back, until rank 0 ends the run."""
    store, rank, watch = context.store, context.rank, Watch(context)
    asked = said = deaths = 0
    while True:
        for answer in device.answers():
            store.set(f"said/{rank}/{said}", json.dumps(answer))
            said += 1
            deaths += answer["said"] == "died"
            if answer["said"] == "ended":
                return
        if store.check([key := f"do/{rank}/{asked}"]):
            asked += 1
            known, request = json.loads(store.get(key))
            if known == deaths:  # else it was for a worker that has died
                device.send(request)
            store.delete_key(key)
        else:
            device.wait(POLL_S)
        watch.look()


def poll(devices: list[Device], own: OwnDevice) -> None:
    """Wait for an answer of this process's worker, at most a fraction of a second."""
    own.wait(POLL_S if len(devices) > 1 else 0.2)
