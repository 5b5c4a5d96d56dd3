"""Records spans of time and memory marks of one rank, and exports them as a Chrome trace."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch


def memory_bytes(device: torch.device) -> int:
    """CUDA: the peak that torch has allocated so far. CPU: the resident memory of this process now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class LogSpan:
    """A named interval of time on one track."""

    name: str
    track: str
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class MemoryMark:
    """Memory in use at one time."""

    name: str
    at_ns: int
    memory_bytes: int


class LogTimeline:
    """Spans and memory marks of one rank, the newest `limit` of each, for chrome://tracing and Perfetto."""

    def __init__(self, limit: int = 100_000, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.spans: deque[LogSpan] = deque(maxlen=limit)
        self.marks: deque[MemoryMark] = deque(maxlen=limit)
        self._clock = clock

    @contextmanager
    def span(self, name: str, track: str = "main") -> Iterator[None]:
        """Records the time that the block takes, also if it raises."""
        start_ns = self._clock()
        try:
            yield
        finally:
            self.spans.append(LogSpan(name, track, start_ns, self._clock()))

    def mark(self, name: str, device: torch.device) -> MemoryMark:
        """Records how much memory is in use now."""
        mark = MemoryMark(name, self._clock(), memory_bytes(device))
        self.marks.append(mark)
        return mark

    def chrome_trace(self, rank: int = 0) -> dict[str, Any]:
        """As a Chrome trace: a process per rank, a thread per track, a counter of memory; times in us."""
        tracks = {track: i for i, track in enumerate(dict.fromkeys(span.track for span in self.spans))}
        named = [
            ("process_name", 0, f"rank {rank}"),
            *(("thread_name", i, track) for track, i in tracks.items()),
        ]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": what, "pid": rank, "tid": i, "args": {"name": name}}
            for what, i, name in named
        ]
        for span in self.spans:
            times = {"ts": span.start_ns / 1e3, "dur": (span.stop_ns - span.start_ns) / 1e3}
            events.append({"ph": "X", "name": span.name, "pid": rank, "tid": tracks[span.track], **times})
        for mark in self.marks:
            args = {"bytes": mark.memory_bytes}
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": mark.at_ns / 1e3, "args": args})
            events.append(
                {"ph": "i", "name": mark.name, "pid": rank, "tid": 0, "ts": mark.at_ns / 1e3, "s": "p"}
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def export(self, path: Path, rank: int = 0) -> None:
        """Writes the Chrome trace as JSON."""
        path.write_text(json.dumps(self.chrome_trace(rank)), encoding="utf-8")
