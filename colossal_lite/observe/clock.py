"""Reads the time of a host or of a CUDA device, which computes later than the host issues.

Note: a mark of a device is an event on its current stream.  It has a time when the device has come to it, so a mark
waits for nothing.  `host_seconds` waits, once, and gives marks in seconds of the host's clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

Mark: TypeAlias = Any
"""Seconds of the host's clock, or an event with a time."""


def mark(device: torch.device) -> Mark:
    """Now; of a CUDA device behind all that was issued on its current stream."""
    return event_on(device, torch.cuda) if device.type == "cuda" else time.perf_counter()


def event_on(device: torch.device, streams: Any) -> Mark:
    """An event with a time on the current stream of a device, by what has torch.cuda's streams and events."""
    return streams.current_stream(device).record_event(streams.Event(enable_timing=True))


def host_seconds(marks: Sequence[Mark], device: torch.device) -> list[float]:
    """Marks of one device in seconds of the host's clock. Waits for the device."""
    if device.type != "cuda":
        return list(marks)
    last = mark(device)
    last.synchronize()
    now_s = time.perf_counter()
    return [now_s - each.elapsed_time(last) / 1e3 for each in marks]


class TimedSpans:
    """Adds up the seconds between pairs of marks, of a host or of a device. Any thread may add and read."""

    def __init__(self) -> None:
        self._seconds, self._lock = 0.0, threading.Lock()
        self._open: deque[tuple[Mark, Mark]] = deque()

    def add(self, start: Mark, stop: Mark) -> None:
        if isinstance(start, float):
            with self._lock:
                self._seconds += stop - start
            return
        self._open.append((start, stop))
        self._fold()

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        """Add the span of a part of a device's computing."""
        start = mark(device)
        yield
        self.add(start, mark(device))

    @property
    def seconds(self) -> float:
        """Of the spans that have ended on the device."""
        self._fold()
        return self._seconds

    def _fold(self) -> None:
        with self._lock:
            while self._open and self._open[0][1].query():
                start, stop = self._open.popleft()
                self._seconds += start.elapsed_time(stop) / 1e3
