"""Streams of a device that is not there: a log of what they are told to do, and the races that it has.

Note: `Recorder` stands in for torch.cuda under a `StreamExecutor`.  Nothing runs late here: every operation computes at
once, so numbers are right whatever is forgotten.  What a GPU could have done instead is read off the log: which thread
or stream touches which bytes, which events are recorded and waited for, and what threads hand to each other.  `races`
gives each of them a vector clock, and finds every pair of accesses to the same bytes, one of them a write, of which
neither is known to come first; and memory that is freed while a stream still uses it.

The computing is whatever a thread does outside of the other streams: it is given to the device, which does it later, in
order.  What touches host memory alone (`host_room`, a record) the thread does itself; a copy between the two, or a
number that is read, waits for the device, as torch's do.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colossal_lite.memory import link, task_records
from colossal_lite.memory import pinned as host
from colossal_lite.memory.copy_streams import StreamExecutor
from colossal_lite.memory.disk_file import DiskFile
from colossal_lite.offload import host_updates, optimizer_states, shard_streaming, state_storage
from colossal_lite.zero import forward_hooks, sharded_weights
from tests.shared.modes import unwatched

COMPUTE = "compute"
READS_A_NUMBER = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
ROOM, PAGES, RECORD = host.host_room, host.host_pages, task_records.TaskRecords.room
Region = tuple[int, int, int]
"""A storage, and bytes [start, stop) of it."""


@dataclass(frozen=True)
class Entry:
    """Something that `actor`, a thread or a stream, does; a stream was told so by `thread`."""

    kind: str  # "touch", "record", "wait" (of a stream), "know" (of a thread), "free"
    actor: str
    thread: str
    what: str
    event: int = -1
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class FakeEvent:
    def __init__(self, recorder: Recorder, *, is_timed: bool = False) -> None:
        self.recorder, self.number = recorder, next(recorder.numbers)
        self._asked, self._is_timed = False, is_timed

    def query(self) -> bool:
        """It has never ended when it is first asked: whoever needs it must wait. The device is never as far as the
        times that it is to take."""
        asked, self._asked = self._asked and not self._is_timed, True
        if asked:
            self.recorder.note("know", self.recorder.thread, "an event", self.number)
        return asked

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


@dataclass
class FakeStream:
    recorder: Recorder
    name: str

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.recorder)
        self.recorder.note("record", self.name, "", event.number)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.recorder.note("wait", self.name, "", event.number)


@dataclass
class Recorder:
    """What torch.cuda is asked for, and everything that torch computes while it is `active`."""

    log: list[Entry] = field(default_factory=list)
    host: set[int] = field(default_factory=set)
    """Storages of `host_room`, and of records."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    devices: dict[str, torch.device] = field(default_factory=dict)
    """Of each thread that has set its own."""
    _storages: dict[int, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _here: threading.local = field(default_factory=threading.local)

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, f"stream {next(self.numbers)}")

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, is_timed=enable_timing)

    def set_device(self, device: torch.device) -> None:
        self.devices[self.thread] = device

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, getattr(self._here, "stream", COMPUTE))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = getattr(self._here, "stream", COMPUTE), stream.name
        with nullcontext() if getattr(self._here, "watched", False) else _Watch(self):
            yield
        self._here.stream = before

    @property
    def thread(self) -> str:
        return threading.current_thread().name

    def note(self, kind: str, actor: str, what: str, event: int = -1, **regions: tuple[Region, ...]) -> None:
        with self._lock:
            self.log.append(Entry(kind, actor, self.thread, what, event, **regions))

    def touched(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        of = {"reads": tuple(self._regions(reads)), "writes": tuple(self._regions(writes))}
        stream = getattr(self._here, "stream", COMPUTE)
        places = {storage in self.host for regions in of.values() for storage, _, _ in regions}
        if stream != COMPUTE or True not in places or places == {True}:
            by_thread = stream == COMPUTE and places == {True}
            self.note("touch", self.thread if by_thread else stream, what, **of)
        else:
            self.note("touch", COMPUTE, what, **of)
            self.known()

    def known(self) -> None:
        """The thread waits for all of the computing."""
        event = self.current_stream(torch.device("cpu")).record_event()
        self.note("know", self.thread, "the computing", event.number)

    def room(self, numel: int, dtype: torch.dtype, beside: torch.device) -> Tensor:
        """As the product's, which a forecast asks for on meta."""
        return self._on_host(ROOM(numel, dtype, beside))

    def pages(self, size_bytes: int, beside: torch.device) -> Tensor:
        return self._on_host(PAGES(size_bytes, beside))

    def _on_host(self, room: Tensor) -> Tensor:
        if not room.is_meta:
            self.host.add(self._storage(room))
        return room

    def _regions(self, tensors: Iterable[Tensor]) -> Iterator[Region]:
        for x in tensors:
            if x.numel() and not x.is_meta:
                first = x.storage_offset() * x.itemsize
                last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
                yield self._storage(x), first, first + (last + 1) * x.itemsize

    def _storage(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        with self._lock:
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = number = next(self.numbers)
                weakref.finalize(storage, self._freed, storage._cdata, number).atexit = False
            return self._storages[storage._cdata]

    def _freed(self, key: int, number: int) -> None:
        with self._lock:
            self._storages.pop(key, None)
        self.note("free", self.thread, "memory is freed", writes=((number, 0, 2**62),))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, what is computed is recorded, and lanes beside a device are streams."""
        recorder = self

        class Pool(ThreadPoolExecutor):
            """Hands over what the thread that submits knows, and back what the other has come to know."""

            def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
                begins, ends = FakeEvent(recorder), FakeEvent(recorder)
                recorder.note("record", recorder.thread, "handed over", begins.number)

                def watched() -> Any:
                    recorder.note("know", recorder.thread, "what is handed over", begins.number)
                    with _Watch(recorder):
                        try:
                            return work(*args, **more)
                        finally:
                            recorder.note("record", recorder.thread, "done", ends.number)

                future = super().submit(watched)
                result = future.result

                def known(timeout: float | None = None) -> Any:
                    found = result(timeout)
                    recorder.note("know", recorder.thread, "what is done", ends.number)
                    return found

                future.result = known  # type: ignore[method-assign]
                return future

        class Transfer(link.Transfer):
            """Hands over what the thread that asks knows, and to who wants its end what the one that served it does."""

            def __init__(self, on: link.Link, begin: Callable[[], Any], *form: Any) -> None:
                begins, ends = FakeEvent(recorder), FakeEvent(recorder)
                recorder.note("record", recorder.thread, "asked", begins.number)

                def watched() -> Any:
                    recorder.note("know", recorder.thread, "what is asked", begins.number)
                    try:
                        return begin()
                    finally:
                        recorder.note("record", recorder.thread, "served", ends.number)

                super().__init__(on, watched, *form)
                self._ends = ends

            def handed(self) -> Any:
                found = super().handed()
                recorder.note("know", recorder.thread, "what is served", self._ends.number)
                return found

        read, write = DiskFile.read, DiskFile.write

        def file_read(file: DiskFile, record: int, target: Tensor) -> None:
            recorder.touched("read from the file", (), (target,))
            read(file, record, target)

        def file_write(file: DiskFile, record: int, source: Tensor) -> None:
            recorder.touched("written to the file", (source,), ())
            write(file, record, source)

        def of_records(records: task_records.TaskRecords, *form: Any) -> Tensor:
            return recorder._on_host(RECORD(records, *form))

        with ExitStack() as stack:
            for target, name, value in (
                (link, "ThreadPoolExecutor", Pool),
                (link, "Transfer", Transfer),
                (optimizer_states, "executor_for", lambda device, speed: StreamExecutor(device, recorder)),
                (state_storage, "host_pages", self.pages),
                (shard_streaming, "host_room", self.room),
                (host_updates, "host_room", self.room),
                (task_records.TaskRecords, "room", of_records),
                (forward_hooks, "without_modes", unwatched),
                (sharded_weights, "without_modes", unwatched),
                (DiskFile, "read", file_read),
                (DiskFile, "write", file_write),
            ):
                stack.enter_context(patch.object(target, name, value))
            stack.enter_context(_Watch(self))
            yield


class _Watch(TorchDispatchMode):
    """Tells a recorder what each operation of this thread reads and writes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __enter__(self) -> Any:
        self.recorder._here.watched = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.recorder._here.watched = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        given = [
            (value, info.alias_info is not None and info.alias_info.is_write)
            for value, info in zip(args, func._schema.arguments, strict=False)
        ]
        by_name = {info.name: info for info in func._schema.arguments}
        given += [
            (value, by_name[key].alias_info is not None and by_name[key].alias_info.is_write)
            for key, value in kwargs.items()
            if key in by_name
        ]
        written = [
            x for value, is_write in given if is_write for x in tree_iter(value) if isinstance(x, Tensor)
        ]
        read = [
            x for value, is_write in given if not is_write for x in tree_iter(value) if isinstance(x, Tensor)
        ]
        is_view = any(
            info.alias_info is not None and not info.alias_info.is_write for info in func._schema.returns
        )
        if not is_view:
            old = {x.untyped_storage()._cdata for x in (*read, *written)}
            made = [
                x for x in tree_iter(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in old
            ]
            in_place = name.removesuffix("_") != name and not name.startswith("aten::_fused")
            only_written = name in ("aten::copy_", "aten::zero_", "aten::fill_")
            reads = read if only_written or not in_place else [*read, *written]
            if made:  # what is new has no past: it is where the computing is
                self.recorder._regions(made)
            self.recorder.touched(name, reads, written)
        if name in READS_A_NUMBER:
            self.recorder.known()
        return out


Clock = dict[str, int]


def races(log: Sequence[Entry], is_host: Callable[[int], bool] = lambda storage: False) -> list[str]:
    """Every pair of accesses of which neither comes first by what the log says, once for each pair of operations."""
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    past: dict[int, dict[tuple[int, int, str, bool], tuple[int, str]]] = {}
    found: dict[str, None] = {}

    def join(actor: str, other: Clock) -> None:
        mine = clocks.setdefault(actor, {})
        for name, count in other.items():
            mine[name] = max(mine.get(name, 0), count)

    def check(entry: Entry, region: Region, is_write: bool, clock: Clock) -> None:
        storage, start, stop = region
        for (a, b, actor, wrote), (count, what) in past.get(storage, {}).items():
            overlaps = a < stop and start < b and (wrote or is_write)
            if overlaps and actor != entry.actor and clock.get(actor, 0) < count:
                found[f"{entry.what} on {entry.actor} may come before {what} on {actor}"] = None

    for entry in log:
        mine = clocks.setdefault(entry.actor, {})
        if entry.actor != entry.thread:  # it was told to by a thread, after all that this knows
            join(entry.actor, clocks.get(entry.thread, {}))
        if entry.kind == "record":
            mine[entry.actor] = mine.get(entry.actor, 0) + 1
            events[entry.event] = dict(mine)
        elif entry.kind in ("wait", "know"):
            join(entry.actor, events.get(entry.event, {}))
        elif entry.kind == "free":
            (region,) = entry.writes
            clock = dict(mine)
            if not is_host(region[0]):  # the computing is the next to be given it
                for name, count in clocks.get(COMPUTE, {}).items():
                    clock[name] = max(clock.get(name, 0), count)
                clock[COMPUTE] = 2**62
            check(entry, region, True, clock)
            past.pop(region[0], None)
        else:
            mine[entry.actor] = count = mine.get(entry.actor, 0) + 1
            for regions, is_write in ((entry.reads, False), (entry.writes, True)):
                for region in regions:
                    check(entry, region, is_write, mine)
            for regions, is_write in ((entry.reads, False), (entry.writes, True)):
                for storage, start, stop in regions:
                    past.setdefault(storage, {})[start, stop, entry.actor, is_write] = count, entry.what
    return list(found)
