"""Runs copies on a thread of the host or on a stream of a GPU, and waits for their end.

Note: the only difference.  memory/link.py decides the copies and their order, which are the same everywhere.
On a *thread* a copy has ended when its work returns.  A thread that needs it waits there.  Reads and writes of files,
sums on the host, and the emulation of a device behind a bus run so.
On a *stream* work returns at once, and its end is an event.  The device's own stream waits for the event, and the host
goes on.  A host that reads the bytes itself waits for the event (`ended`).  A copy begins after all computing issued
before it was requested (`now`).  So it reads what was written by then, and overwrites nothing that is still read.
Other needs of one stream on another are events among `before`.
Cost: three events a copy, two of them with a time, and two with a time for each wait.
Source: the three races of stream-ordered offloading, DeepSpeed pull request 8186; tests/offload/test_streams.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from colossal_lite.observe.clock import TimedSpans, event_on

POLL_S = 2e-5


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event has it."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of a link: a copy takes `latency_s` and its bytes over `bandwidth_bytes_s` (None: as fast as the machine
    copies). It emulates a device behind a bus on one machine."""

    bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + (size_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)


AS_IT_COPIES = LinkSpeed()


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds of the links between device and host, and of the disk."""

    up: LinkSpeed = AS_IT_COPIES
    down: LinkSpeed = AS_IT_COPIES
    disk: LinkSpeed = AS_IT_COPIES


class Bus:
    """Shares one emulated speed among several links: one copy takes its time after another's."""

    def __init__(self) -> None:
        self.free_s = 0.0
        """When the time of all copies so far ends, by the clock that runs them."""
        self._lock = threading.Lock()

    def take(self, start_s: float, seconds: float) -> float:
        """Reserve time of the bus from `start_s` on, or from when it is free; return its end."""
        with self._lock:
            self.free_s = max(start_s, self.free_s) + seconds
            return self.free_s


class CopyExecutor(ABC):
    """Runs the work of one link."""

    on_stream = False

    def __init__(self) -> None:
        self.held, self.busy = TimedSpans(), TimedSpans()
        """For how long computing has waited, and all work that has ended has taken, emulated times among it."""

    @abstractmethod
    def now(self) -> Event | None:
        """An event after all computing issued so far; None where computing is synchronous."""

    @abstractmethod
    def run(
        self, work: Callable[[], object], size_bytes: int, before: Sequence[Event], timeout_s: float
    ) -> Event | None:
        """Run work that moves `size_bytes` after the events `before`: the event of its end; None: it has ended."""

    @abstractmethod
    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        """Make later computing wait for the end of the work, whose event `handed` returns."""

    def begin_thread(self) -> None:
        """Called by each thread of a link before its first work."""
        return

    def skip_emulated_delay(self) -> None:
        """Wait for no emulated time any more."""
        return


class ThreadExecutor(CopyExecutor):
    """Runs work on the calling thread, no faster than `speed`, on a `bus` that it may share."""

    def __init__(self, speed: LinkSpeed = AS_IT_COPIES, bus: Bus | None = None) -> None:
        super().__init__()
        self.speed, self.bus = speed, bus or Bus()
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
        self.busy.add(start, time.perf_counter())

    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        start = time.perf_counter()
        handed()
        self.held.add(start, time.perf_counter())

    def skip_emulated_delay(self) -> None:
        self._hurries.set()


class StreamExecutor(CopyExecutor):
    """Runs work on a stream of its own. Computing is on the stream that is current at the call."""

    on_stream = True

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        """`streams`: what has torch.cuda's `Stream`, `Event`, `current_stream`, `stream` and `set_device`."""
        super().__init__()
        self._device, self._streams = device, streams
        self._stream = streams.Stream(device)

    def begin_thread(self) -> None:
        """A new thread has device 0, and leaving a stream sets it again: on other ranks' device, with memory there."""
        self._streams.set_device(self._device)

    def now(self) -> Event:
        event: Event = self._computing.record_event()
        return event

    def run(
        self, work: Callable[[], object], size_bytes: int, before: Sequence[Event], timeout_s: float
    ) -> Event:
        with self._streams.stream(self._stream):
            for event in before:
                self._stream.wait_event(event)
            start = event_on(self._device, self._streams)
            work()
            self.busy.add(start, event_on(self._device, self._streams))
            end: Event = self._stream.record_event()
        return end

    def block_compute_until(self, handed: Callable[[], Event | None]) -> None:
        stopped = event_on(self._device, self._streams)
        event = handed()  # a host that has to wait for this leaves the device without work meanwhile
        if event is not None:
            self._computing.wait_event(event)
        self.held.add(stopped, event_on(self._device, self._streams))

    @property
    def _computing(self) -> Any:
        return self._streams.current_stream(self._device)


def executor_for(device: torch.device, speed: LinkSpeed) -> CopyExecutor:
    """The executor of a link between the host and a device; with `speed` where the device is emulated."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(speed)


def ended(event: Event, timeout_s: float) -> None:
    """Wait for an event, on the host. Raises TimeoutError, where the event's own wait would never return."""
    latest_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > latest_s:
            raise TimeoutError(f"a copy on the device did not finish within {timeout_s:g} s (timeout_s)")
        time.sleep(POLL_S)
