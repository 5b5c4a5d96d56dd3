"""Allocates, versions and reads the records of one task in shared host memory.

Note: records.
A record is the flat memory of one chunk of one task, on the rank of this process.  It has one kind: `OPTIMIZER`,
`WEIGHTS` or `GRADIENTS`.  Its name is (task, chunk, kind).  All records of a task lie in one shared mapping, a memfd
like that of distributed/send_buffer.py.  Its addresses are reserved at once, and a page is taken when it is first
written.  Each record starts on a page, and its size is rounded up to pages.  A directory of 64 bytes a record comes
first.  `taken_bytes` is 64 (records + 1) and the bytes of each record, each rounded up to pages.

Versions.  The step that defers an update of a record makes it *pending* (`defer`). It stays so until its last byte is
in the record (`commit`).  `commit` adds one to the version.  Version and pending flag are one word of the directory,
written before the first byte and after the last one.  A reader that finds the same word, not pending, before and after
its copy has a record of one version.  Any other reader tries again or raises.  `HostStore.flush` makes the owner's
engine run its deferred updates.  `Records.flush` waits for that.  Gradients are pending while an engine sums in them.
Cost: two writes of a word for each update.
Source: sequence locks, Lameter, Gelato 2005.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossal_lite.distributed import host_handshake, send_buffer
from colossal_lite.memory.disk_layout import whole_pages
from colossal_lite.memory.frozen_records import FrozenRecord, FrozenRecords, Same
from colossal_lite.memory.frozen_slots import FrozenSlots
from colossal_lite.memory.link import Transfer
from colossal_lite.memory.pinned import host_room, lock, locked, make_pages

OPTIMIZER, WEIGHTS, GRADIENTS = "optimizer", "weights", "gradients"
KINDS = (OPTIMIZER, WEIGHTS, GRADIENTS)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.uint8)
ENTRY_WORDS, WORD_BYTES = 8, 8
ENTRY_BYTES = ENTRY_WORDS * WORD_BYTES
MOST_RECORDS = 2**16 - 1
DIRECTORY_BYTES = (MOST_RECORDS + 1) * ENTRY_BYTES
MAGIC = int.from_bytes(b"clstore1", "little")
POLL_S = 5e-4

# Words of an entry. STATE is 0 for none, else version << VERSION | PENDING or not | LIVE; USES counts its records.
STATE, OFFSET, SIZE, CHUNK, KIND, DTYPE, USES = range(7)
LIVE, PENDING, VERSION = 1, 2, 2
# Words of the first entry: STATE is the magic number, then the entries ever used, and the token.
COUNT, TOKEN = 1, 2
TOKEN_BYTES = 16


class StoreError(RuntimeError):
    """A record is missing, incomplete, or not of the requested kind."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of one record, of one version: `flat` [numel], on the host."""

    task: str
    chunk: int
    kind: str
    version: int
    flat: Tensor


class Records:
    """Reads the records of one task, in any process that has mapped them."""

    def __init__(self, task: str, pid: int, memory: mmap.mmap) -> None:
        self.task, self.pid, self.memory = task, pid, memory
        self.words = memoryview(memory)[:DIRECTORY_BYTES].cast("Q")
        self._fence = threading.Lock()
        self._found: dict[tuple[int, str], int] = {}

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """(chunk, kind) of each present record."""
        return tuple(sorted(self._name(i) for i in self._live()))

    def version(self, chunk: int, kind: str = OPTIMIZER) -> int:
        """Number of finished updates of a record. Raises StoreError if there is none."""
        return self._state(self._index(chunk, kind)) >> VERSION

    def is_pending(self, chunk: int, kind: str = OPTIMIZER) -> bool:
        """Whether an update of a record is deferred or in flight. Raises StoreError if there is none."""
        return bool(self._state(self._index(chunk, kind)) & PENDING)

    def read(self, chunk: int, kind: str = OPTIMIZER, *, timeout_s: float = 0.0) -> Snapshot:
        """A copy of one version of a record. Raises StoreError if there is none, or if its update is still pending
        after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            index = self._index(chunk, kind)
            with self._fence:
                state, uses = self._state(index), self.words[index * ENTRY_WORDS + USES]
            if not state & PENDING:
                flat = self._flat(index).clone()
                with self._fence:  # a lock is a fence: loads stay on their side of it
                    after = self._state(index), self.words[index * ENTRY_WORDS + USES]
                if after == (state, uses) and state & LIVE:
                    return Snapshot(self.task, chunk, kind, state >> VERSION, flat)
            if (left_s := end_s - time.monotonic()) <= 0:
                raise self._too_late([(chunk, kind)], timeout_s)
            time.sleep(min(POLL_S, left_s))

    def flush(self, *, timeout_s: float = 0.0) -> None:
        """Wait until no update is pending, gradients left out. Raises StoreError after `timeout_s` with the pending
        records."""
        end_s = time.monotonic() + timeout_s
        while late := [
            name for name in self.names if name[1] != GRADIENTS and self._is_pending(self._found.get(name))
        ]:
            if (left_s := end_s - time.monotonic()) <= 0:
                raise self._too_late(late, timeout_s)
            time.sleep(min(POLL_S, left_s))

    def view(self, chunk: int, kind: str = OPTIMIZER, *, runtime: Any = None) -> Tensor:
        """The memory of a record itself [numel].

        With CUDA's `runtime` (`torch.cuda.cudart()`) it is locked while the tensor lives, for asynchronous copies to
        a device. Its bytes are of one version only if `version` is the same before and after, and nothing is pending.
        Raises StoreError.
        """
        flat = self._flat(self._index(chunk, kind))
        if runtime is not None and (error := lock(flat, runtime)):
            raise StoreError(f"task {self.task!r}: ({chunk}, {kind!r}) cannot be locked (CUDA error {error})")
        return flat

    # ---- how ----

    def _live(self) -> Iterator[int]:
        for index in range(1, self.words[COUNT] + 1):
            if self.words[index * ENTRY_WORDS + STATE]:
                yield index

    def _name(self, index: int) -> tuple[int, str]:
        words = self.words
        name = words[index * ENTRY_WORDS + CHUNK], KINDS[words[index * ENTRY_WORDS + KIND]]
        self._found[name] = index
        return name

    def _index(self, chunk: int, kind: str) -> int:
        if kind not in KINDS:
            raise StoreError(f"kind={kind!r} names no records; legal: {', '.join(map(repr, KINDS))}")
        index = self._found.get((chunk, kind))
        if index is None or not self._state(index) or self._name(index) != (chunk, kind):
            self._found.clear()
            names = self.names  # which finds them
            index = self._found.get((chunk, kind))
            if index is None:
                has = ", ".join(f"({c}, {k!r})" for c, k in names[:4]) + (", ..." if len(names) > 4 else "")
                raise StoreError(
                    f"task {self.task!r} has no record ({chunk}, {kind!r}) in process {self.pid}; it has "
                    f"{has or 'none: it was dropped, or no engine has begun'}"
                )
        return index

    def _state(self, index: int) -> int:
        return self.words[index * ENTRY_WORDS + STATE]

    def _is_pending(self, index: int | None) -> bool:
        return index is not None and bool(self._state(index) & PENDING)

    def _flat(self, index: int) -> Tensor:
        words, at = self.words, index * ENTRY_WORDS
        dtype, size_bytes = DTYPES[words[at + DTYPE]], words[at + SIZE]
        return _tensor(self.memory, words[at + OFFSET], size_bytes // dtype.itemsize, dtype)

    def _too_late(self, names: Collection[tuple[int, str]], timeout_s: float) -> StoreError:
        first = ", ".join(f"({chunk}, {kind!r})" for chunk, kind in list(names)[:4])
        has_ended = "" if os.path.exists(f"/proc/{self.pid}") else ", which has ended and will not make it"
        return StoreError(
            f"task {self.task!r}: an update of {first}{', ...' if len(names) > 4 else ''} is owed or on its way by "
            f"process {self.pid}{has_ended}, after {timeout_s:g} s; legal: HostStore.flush there, or a longer timeout_s"
        )


@dataclass(frozen=True)
class ParkedState:
    """What an engine that has ended without error leaves beside its records."""

    form: Mapping[str, Any]
    """Layout of its chunks and states, for the engine that resumes."""
    facts: Mapping[str, Any]
    """Everything else: steps, step counts, loss scale, buffers."""


class TaskRecords:
    """Allocates and writes the records of one task, in the engine that has it open."""

    def __init__(
        self,
        task: str,
        beside: torch.device,
        frozen: FrozenRecords | None = None,
        slots: FrozenSlots | None = None,
    ) -> None:
        """`beside`: the device that copies from and to them; on meta no record has memory. `frozen`: where frozen
        weights are shared; None: with no other engine. `slots`: where they are shared on the device; None: nowhere."""
        self.task, self.beside = task, beside
        self.frozen = FrozenRecords() if frozen is None else frozen
        self.slots = slots
        self._frozen_used: list[FrozenRecord] = []
        self._slots_used: list[tuple[FrozenRecord, int]] = []
        self.is_open, self.is_blank = True, True
        """Whether an engine has them open; whether none ever had."""
        self.kept: ParkedState | None = None
        """What the last engine has left, until another resumes."""
        self.misfits: list[str] = []
        """Records whose size differs from what this engine needs, a line each."""
        self.on_flush: Callable[[], object] = nothing
        """Finishes all updates of the engine's records."""
        self.shared: Records | None = None
        """The readers' view; None while there are no records."""
        self.descriptor, self.token = -1, secrets.token_hex(TOKEN_BYTES)
        self._rooms: dict[tuple[int, str], Tensor] = {}
        self._entries: dict[tuple[int, str], int] = {}
        self._due: dict[int, int] = {}  # entry -> pending updates
        self._new: set[tuple[int, str]] = set()
        self._freed: list[tuple[int, int]] = []  # pages [start, stop)
        self._end = DIRECTORY_BYTES
        self._capacity = DIRECTORY_BYTES + 4 * send_buffer.physical_bytes()
        self._lock = threading.Lock()

    # ---- rooms ----

    def room(self, chunk: int, kind: str, numel: int, dtype: torch.dtype) -> Tensor:
        """The memory [numel] of a record: zeros, or what the last engine has left."""
        if self.beside.type == "meta" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device="meta" if self.beside.type == "meta" else "cpu")
        name = (chunk, kind)
        if (left := self._rooms.get(name)) is not None:
            if (left.numel(), left.dtype) == (numel, dtype):
                return left
            was, wanted = _form(left.numel(), left.dtype), _form(numel, dtype)
            self.misfits.append(f"chunk {chunk}: {kind} of {was}, where {wanted} are wanted")
            return torch.zeros(numel, dtype=dtype)
        self._rooms[name] = room = self._made(name, numel, dtype)
        self._new.add(name)
        if kind == GRADIENTS:
            self.begin(chunk, kind)
        return room

    def take_frozen(
        self, name: bytes, numel: int, dtype: torch.dtype, *, same: Same, fill: Callable[[Tensor], object],
        base: str | None,
    ) -> FrozenRecord:  # fmt: skip
        """As `FrozenRecords.take`, until the engine ends."""
        record = self.frozen.take(name, numel, dtype, self.beside, same=same, fill=fill, base=base)
        self._frozen_used.append(record)
        return record

    def give_frozen(self, record: FrozenRecord) -> None:
        """End the use of a frozen record."""
        self._frozen_used.remove(record)
        if self.slots is not None and record.users == 1:
            self.slots.forget(record)
        self.frozen.give(record)

    def take_slot(
        self, record: FrozenRecord, start_bytes: int, copy: Callable[[Tensor], Transfer]
    ) -> tuple[Tensor, Transfer]:
        """As `FrozenSlots.take`, until the engine ends."""
        assert self.slots is not None
        found = self.slots.take(record, start_bytes, copy)
        self._slots_used.append((record, start_bytes))
        return found

    def give_slot(self, record: FrozenRecord, start_bytes: int) -> None:
        """As `FrozenSlots.give`."""
        assert self.slots is not None
        self._slots_used.remove((record, start_bytes))
        self.slots.give(record, start_bytes)

    def _give_all_frozen(self) -> None:
        for used in tuple(self._slots_used):
            self.give_slot(*used)
        while self._frozen_used:
            self.give_frozen(self._frozen_used[-1])

    def is_new(self, chunk: int, kind: str) -> bool:
        """Whether no earlier engine has left this record."""
        return (chunk, kind) not in self._rooms or (chunk, kind) in self._new

    def free(self, chunk: int, kind: str) -> None:
        """Free the pages of a record. No tensor in them may be used any more."""
        name = (chunk, kind)
        if self._rooms.pop(name, None) is None:
            return
        self._new.discard(name)
        if (index := self._entries.pop(name, None)) is not None:
            (words, memory), at = self._segment(), index * ENTRY_WORDS
            with self._lock:
                self._due.pop(index, None)
                words[at + STATE] = 0
                words[at + USES] += 1
            start, size_bytes = words[at + OFFSET], whole_pages(words[at + SIZE])
            if self.descriptor >= 0:
                memory.madvise(mmap.MADV_REMOVE, start, size_bytes)
                insort(self._freed, (start, start + size_bytes))

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory when every record has been written: by the formula in the Note."""
        if self.shared is None:
            return 0
        words, _ = self._segment()
        records = sum(whole_pages(words[index * ENTRY_WORDS + SIZE]) for index in self._entries.values())
        return records + whole_pages(ENTRY_BYTES * (words[COUNT] + 1))

    def _made(self, name: tuple[int, str], numel: int, dtype: torch.dtype) -> Tensor:
        if host_handshake.why_not() is not None:
            return host_room(numel, dtype, self.beside)
        words, memory = self._segment()
        size_bytes = numel * dtype.itemsize
        start = self._place(whole_pages(size_bytes))
        room = _tensor(memory, start, numel, dtype)
        if self.beside.type == "cuda":
            make_pages(room)  # no other process has found it yet
            held = locked(room.view(torch.uint8), torch.cuda.cudart(), self.beside).view(dtype)
            if held.data_ptr() != room.data_ptr():  # another process would not find it there
                insort(self._freed, (start, start + whole_pages(size_bytes)))
                return held
        count = words[COUNT]
        freed = range(1, count + 1) if self._freed else ()  # else no entry is free
        index = next((i for i in freed if not words[i * ENTRY_WORDS + STATE]), count + 1)
        if index > MOST_RECORDS:
            raise StoreError(
                f"task {self.task!r} has {count:,} records and room for no more; legal: larger chunks"
            )
        at = index * ENTRY_WORDS
        words[at + OFFSET], words[at + SIZE], words[at + CHUNK] = start, size_bytes, name[0]
        words[at + KIND], words[at + DTYPE] = KINDS.index(name[1]), DTYPES.index(dtype)
        words[COUNT] = max(count, index)
        with self._lock:  # a fence: readers of the state see the words above
            words[at + STATE] = LIVE
        self._entries[name] = index
        return room

    def _place(self, size_bytes: int) -> int:
        """The start of free pages: freed ones, or behind all others."""
        for number, (start, stop) in enumerate(self._freed):
            if stop - start >= size_bytes:
                self._freed[number : number + 1] = [(start + size_bytes, stop)] * (stop - start > size_bytes)
                return start
        start, self._end = self._end, self._end + size_bytes
        if self._end > self._capacity:
            raise StoreError(
                f"task {self.task!r}: its records take more than {self._capacity:,} bytes of addresses"
            )
        return start

    def _segment(self) -> tuple[memoryview, mmap.mmap]:
        """The directory, and all memory; made with the first record."""
        if self.shared is None:
            self.descriptor, memory = send_buffer.shared_memory(f"task {self.task}", self._capacity)
            self._closing = weakref.finalize(self, os.close, self.descriptor)
            self.shared = Records(self.task, os.getpid(), memory)
            self.shared.words[0] = MAGIC
            memory[TOKEN * WORD_BYTES : TOKEN * WORD_BYTES + TOKEN_BYTES] = bytes.fromhex(self.token)
        return self.shared.words, self.shared.memory

    # ---- versions ----

    def begin(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Mark a record as pending before it is written, unless an update of it is pending already. No record:
        nothing."""
        self._set(chunk, kind, lambda due: max(due, 1))

    def defer(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Count one more pending update of a record. The update of the step before may still be in flight."""
        self._set(chunk, kind, lambda due: due + 1)

    def commit(self, chunk: int, kind: str = OPTIMIZER, *, version: int | None = None) -> None:
        """Count one finished update: the next version, or a given one. Any thread may call it."""
        self._set(chunk, kind, _one_less, lambda old: old + 1 if version is None else version)

    def cancel(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Count one pending update less, which has written nothing and will not run."""
        self._set(chunk, kind, _one_less)

    def _set(
        self, chunk: int, kind: str, due: Callable[[int], int], version: Callable[[int], int] = int
    ) -> None:
        """Change the number of pending updates of a record, and its version."""
        index = self._entries.get((chunk, kind))
        if index is not None and self.shared is not None:
            with self._lock:  # a fence: the bytes are written before the word
                left = self._due[index] = due(self._due.get(index, 0))
                at = index * ENTRY_WORDS + STATE
                now = version(self.shared.words[at] >> VERSION)
                self.shared.words[at] = now << VERSION | (PENDING if left else 0) | LIVE

    # ---- how an engine begins and ends ----

    def take_up(self) -> ParkedState | None:
        """Open the records of the last engine; returns what it has left, if anything."""
        self._new.clear()
        self.is_blank = False
        kept, self.kept = self.kept, None
        return kept

    def give_up(self) -> None:
        """Undo `open`: the engine was not made."""
        for name in tuple(self._new):
            self.free(*name)
        self._give_all_frozen()
        self.misfits.clear()
        self.is_open = False
        if self.is_blank:
            self.close()

    def leave(self, kept: ParkedState | None) -> None:
        """Close the records of an engine that has ended. `kept`: all its state is here, and another may resume."""
        for name in tuple(self._rooms):
            if name[1] == GRADIENTS:
                self.free(*name)
        self._give_all_frozen()
        self._new.clear()
        self.kept, self.is_open, self.is_blank, self.on_flush = kept, False, False, nothing

    def close(self) -> None:
        """Drop the records: no process can attach any more, and readers raise. The memory is freed with its last
        tensor."""
        self._give_all_frozen()
        for index in self._entries.values():
            words, _ = self._segment()
            words[index * ENTRY_WORDS + STATE] = 0
        self._entries.clear()
        self._rooms.clear()
        if self.descriptor >= 0:
            self._closing()
            self.descriptor = -1
        self.shared, self.is_open = None, False


def _one_less(due: int) -> int:
    return max(due - 1, 0)


def nothing() -> None:
    """Do nothing: there is no engine."""


def _form(numel: int, dtype: torch.dtype) -> str:
    return f"{numel:,} {str(dtype).removeprefix('torch.')}"


def _tensor(memory: mmap.mmap, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
