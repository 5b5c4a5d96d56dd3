"""Runs copies on a thread of the host or on a stream of a GPU, and waits for their end.

Note: the only difference.
memory/link.py and its users decide the copies, their order and their buffers.  That is the same everywhere.  A
`CopyExecutor` does what differs.

On a *thread* a copy has ended when its work returns.  Whoever needs it waits there.  Files are read and written so,
sums are added on the host so, and a device behind a bus is emulated so on one machine.

On a *stream* work returns at once, and its end is an event.  The device's own stream waits for the event, and the host
goes on.  A host that reads the bytes itself waits for the event (`ended`).  A copy begins after all computing issued
before it was requested (`now`).  So it reads what was written by then, and overwrites nothing that is still read.
Other needs of one stream on another are events among `before`.
Cost: an event a copy, two with a time for each wait.
Source: the three races of stream-ordered offloading, DeepSpeed pull request 8186; tests/offload/test_streams.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

POLL_S = 2e-5


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event has it."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


@dataclass(frozen=True)
class LinkSpeed:
    """What a link between two tiers does: a copy takes `latency_s` and its bytes over `bandwidth_bytes_s` (None: as
    fast as the machine copies). On one machine the emulation of a device behind a bus."""

    bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + (size_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)


AS_IT_COPIES = LinkSpeed()


class Bus:
    """What several links have one speed together on, if they share it: one copy takes its time after another's."""

    def __init__(self) -> None:
        self.free_s = 0.0
        """When all copies so far have had their time, by whatever clock runs them."""
        self._lock = threading.Lock()

    def take(self, start_s: float, seconds: float) -> float:
        """Time of the bus from `start_s` on, or when it is free: when that ends."""
        with self._lock:
            self.free_s = max(start_s, self.free_s) + seconds
            return self.free_s


class CopyExecutor(ABC):
    """Where the work of one link runs."""

    on_stream = False

    @abstractmethod
    def now(self) -> Event | None:
        """What the computing has been given so far; None where it does all at once."""

    @abstractmethod
    def run(
        self, work: Callable[[], object], size_bytes: int, before: Sequence[Event], timeout_s: float
    ) -> Event | None:
        """Do work that moves so many bytes after the events `before`: its end, or None where it has ended."""

    @abstractmethod
    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        """Keep the computing from going on before the end of work that `handed` tells."""

    @property
    @abstractmethod
    def held_s(self) -> float:
        """Seconds that the computing has stood still so."""

    @abstractmethod
    def skip_emulated_delay(self) -> None:
        """Emulated time is not waited for any more."""


class ThreadExecutor(CopyExecutor):
    """Work on the thread that runs it, no faster than `speed`, on a `bus` that it may share."""

    def __init__(self, speed: LinkSpeed = AS_IT_COPIES, bus: Bus | None = None) -> None:
        self.speed, self.bus = speed, bus or Bus()
        self._held_s = 0.0
        self._hurries = threading.Event()

    def now(self) -> None:
        return None

    def run(
        self, work: Callable[[], object], size_bytes: int, before: Sequence[Event], timeout_s: float
    ) -> None:
        for event in before:
            ended(event, timeout_s)
        start = time.perf_counter()
        work()
        left_s = self.bus.take(start, self.speed.seconds(size_bytes)) - time.perf_counter()
        if left_s > 0:
            self._hurries.wait(left_s)

    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        start = time.perf_counter()
        handed()
        self._held_s += time.perf_counter() - start

    @property
    def held_s(self) -> float:
        return self._held_s

    def skip_emulated_delay(self) -> None:
        self._hurries.set()


class StreamExecutor(CopyExecutor):
    """Work on a stream of its own of a device; the computing is on whatever stream is current where it is asked for."""

    on_stream = True

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        """`streams`: what has torch.cuda's `Stream`, `Event`, `current_stream` and `stream`."""
        self._device, self._streams = device, streams
        self._stream = streams.Stream(device)
        self._held: deque[tuple[Event, Event]] = deque()  # where the computing stopped, and where it went on
        self._held_s = 0.0

    def now(self) -> Event:
        event: Event = self._computing.record_event()
        return event

    def run(
        self, work: Callable[[], object], size_bytes: int, before: Sequence[Event], timeout_s: float
    ) -> Event:
        with self._streams.stream(self._stream):
            for event in before:
                self._stream.wait_event(event)
            work()
            end: Event = self._stream.record_event()
        return end

    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        stopped = self._timed()
        event = handed()  # a host that has to wait for this leaves the device without work meanwhile
        if event is not None:
            self._computing.wait_event(event)
        self._held.append((stopped, self._timed()))
        self._fold()

    @property
    def held_s(self) -> float:
        """Of the waits that the device has come to the end of; the others count when it has."""
        self._fold()
        return self._held_s

    def skip_emulated_delay(self) -> None:
        """Nothing is emulated."""

    def _fold(self) -> None:
        while self._held and self._held[0][1].query():
            stopped, went_on = self._held.popleft()
            self._held_s += stopped.elapsed_time(went_on) / 1e3

    def _timed(self) -> Event:
        event: Event = self._computing.record_event(self._streams.Event(enable_timing=True))
        return event

    @property
    def _computing(self) -> Any:
        return self._streams.current_stream(self._device)


def executor_for(device: torch.device, speed: LinkSpeed) -> CopyExecutor:
    """The lane of a link between the host and a device: of `speed` where that is emulated."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(speed)


def ended(event: Event, timeout_s: float) -> None:
    """Wait for an event, on the host. Raises TimeoutError, where the event's own wait would stay for ever."""
    latest_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > latest_s:
            raise TimeoutError(f"the device has not come to the end of a copy in {timeout_s:g} s (timeout_s)")
        time.sleep(POLL_S)
