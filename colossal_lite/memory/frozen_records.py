"""Stores frozen weights once for all engines that have equal ones: in shared host memory, read-only and counted.

Note: one record for equals.
A record is the flat memory of one chunk of frozen weights.  Its name is a digest of the parameters' names, shapes and
offsets, of dtype, and of the part that a rank holds.  Who needs a record compares the values bit for bit with those of
that name.  So equal name and content are one record, and a digest of values is not needed.  Nothing writes in a record
that others use.

Holders.  Up to 64 processes of a host hold records, each with a bit of its own.  A process counts its own users, and
clears its bit with the last of them.  A record without a bit is freed.  A process that dies leaves its bits set.  The
one that is started in its place has the same bit, and finds its records there.

The directory has 64 bytes a record, and addresses for all of the host's memory are reserved.  A page is taken when it
is first written.  `taken_bytes` is 64 (records + 1) and the bytes of each record, each rounded up to pages.  A file
lock orders changes of the directory; it ends with the process that has it.  A record whose writer died is not used.
Cost: to open an engine again its values are compared, at the speed of memory.
Source: memory of equal content, once: Waldspurger, OSDI 2002, section 4.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.distributed import host_handshake, send_buffer
from colossal_lite.memory.disk_layout import whole_pages
from colossal_lite.memory.pinned import host_room, locked

ENTRY_WORDS, WORD_BYTES = 8, 8
ENTRY_BYTES = ENTRY_WORDS * WORD_BYTES
MOST_RECORDS = 2**16 - 1
DIRECTORY_BYTES = (MOST_RECORDS + 1) * ENTRY_BYTES
MAGIC = int.from_bytes(b"clfrozen", "little")
MOST_HOLDERS = 64
DIGEST_BYTES = 32

# Words of an entry behind its name, which has the first four. STATE is 0 for none, and then one of these.
OFFSET, SIZE, HOLDERS, STATE = range(4, 8)
WRITTEN, LIVE, ALONE = 1, 2, 3  # ALONE: changed by its only user, so no other finds it
# Words of the first entry: the magic number, the entries ever used, the changes so far, and the end of all records.
COUNT, CHANGES, END = 1, 2, 3

Same = Callable[[Tensor], str | None]
"""Takes a record [numel] of the name asked for; how its values differ from the caller's, or None."""


class FrozenError(ValueError):
    """Frozen weights that are shared differ, or would be changed."""


@dataclass(frozen=True)
class FrozenHandle:
    """The address by which another process of this user on this host finds the records."""

    pid: int
    descriptor: int


@dataclass(eq=False)
class FrozenRecord:
    """One record: `flat` [numel], to be read only."""

    index: int
    flat: Tensor
    users: int = 0
    """Of this process."""


def record_name(*facts: object) -> bytes:
    """The name of a record: a digest of what tells it from others beside its values."""
    return hashlib.sha256(json.dumps(facts).encode()).digest()


class FrozenRecords:
    """The frozen weights of one host, as one process of it sees them."""

    def __init__(self, handle: FrozenHandle | None = None, holder: int = 0) -> None:
        """`handle`: of the process that has the memory; None: this one, which reserves it with the first record.
        `holder`: the bit of this process. Raises FrozenError for a handle of a process that has ended, or a bit that
        there is not."""
        if not 0 <= holder < MOST_HOLDERS:
            raise FrozenError(f"frozen: holder={holder}; legal: 0 to {MOST_HOLDERS - 1}")
        self._bit, self._descriptor, self._is_shared = 1 << holder, -1, host_handshake.why_not() is None
        self._memory: mmap.mmap | None = None
        self._used: dict[int, FrozenRecord] = {}
        """By index; without shared memory by a number of this process."""
        self._named: dict[bytes, list[int]] = {}
        self._live: set[int] = set()
        self._seen = -1  # changes when these two were read
        self._lock = threading.Lock()
        if handle is not None:
            self._open(handle)

    def handle(self) -> FrozenHandle | None:
        """For other processes; None where memory cannot be shared."""
        if not self._is_shared:
            return None
        with self._alone():
            return FrozenHandle(os.getpid(), self._descriptor)

    def take(
        self, name: bytes, numel: int, dtype: torch.dtype, beside: torch.device, *, same: Same,
        fill: Callable[[Tensor], object], base: str | None = None,
    ) -> FrozenRecord:  # fmt: skip
        """The record of this name whose values are those of the caller, one use more; `fill` writes a new one [numel].

        `base`: the stated name of weights that must be equal: FrozenError if one of this name differs."""
        with self._alone():
            for index in self._named.get(name, ()):
                found = self._used.get(index) or FrozenRecord(index, self._flat(index, dtype))
                if (differs := same(found.flat)) is None:
                    return self._count(found, beside)
                if base is not None:
                    raise FrozenError(
                        f"memory.shared_base={base!r}: {differs} another task with this base; legal: the same frozen "
                        f"weights, or another name"
                    )
            record = self._made(name, numel, dtype)
            fill(record.flat)
            self._set(record.index, STATE, LIVE)
            self._named.setdefault(name, []).append(record.index)
            self._changed()
            return self._count(record, beside)

    def give(self, record: FrozenRecord) -> None:
        """End one use; with the last one in any process its memory is freed. Nothing may read it any more."""
        with self._alone():
            record.users -= 1
            if not record.users:
                del self._used[record.index]
                self._leave(record.index)

    def take_alone(self, record: FrozenRecord, who: str) -> None:
        """Make a record that has one user its own, which may then change it. Raises FrozenError with `who`."""
        with self._alone():
            if record.users > 1 or self._word(record.index, HOLDERS, self._bit) != self._bit:
                raise FrozenError(
                    f"{who}: these frozen weights are shared with other engines, and a write would change theirs; "
                    f"legal: the values that they have, or an engine that shares with none"
                )
            self._set(record.index, STATE, ALONE)
            for indices in self._named.values():
                if record.index in indices:
                    indices.remove(record.index)

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory, by the formula in the Note."""
        if self._memory is None:
            return sum(record.flat.nbytes for record in self._used.values())
        with self._alone():
            sizes = [whole_pages(self._word(index, SIZE)) for index in self._live]
            return sum(sizes) + whole_pages(ENTRY_BYTES * (self._words[COUNT] + 1))

    # ---- how ----

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process changes the directory; `_named` is that of now."""
        with self._lock:
            if not self._is_shared:
                yield
                return
            if self._memory is None:
                capacity = DIRECTORY_BYTES + 4 * send_buffer.physical_bytes()
                self._map(*send_buffer.shared_memory("frozen weights", capacity))
                self._words[0], self._words[END] = MAGIC, DIRECTORY_BYTES
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                self._read_names()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _open(self, handle: FrozenHandle) -> None:
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        gone = f"frozen: process {handle.pid} has no frozen weights any more"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size_bytes = os.fstat(descriptor).st_size
            self._map(descriptor, send_buffer.mapped(descriptor, max(size_bytes, DIRECTORY_BYTES)))
        except (OSError, ValueError) as error:
            raise FrozenError(f"{gone} ({error})") from error
        if self._words[0] != MAGIC:
            raise FrozenError(gone)

    def _map(self, descriptor: int, memory: mmap.mmap) -> None:
        self._descriptor, self._memory = descriptor, memory
        self._words = memoryview(memory)[:DIRECTORY_BYTES].cast("Q")
        weakref.finalize(self, os.close, descriptor)

    def _read_names(self) -> None:
        """What others have changed; a record whose writer has died is dropped."""
        if self._seen == self._words[CHANGES]:
            return
        self._named.clear()
        states = {index: self._word(index, STATE) for index in range(1, self._words[COUNT] + 1)}
        self._live = {index for index, state in states.items() if state}
        for index in sorted(self._live):
            if states[index] == WRITTEN:
                self._free(index)
            elif states[index] == LIVE:
                start = index * ENTRY_BYTES
                assert self._memory is not None
                self._named.setdefault(self._memory[start : start + DIGEST_BYTES], []).append(index)
        self._seen = self._words[CHANGES]

    def _word(self, index: int, word: int, without: int = 0) -> int:
        """A word of an entry; `without` shared memory another value."""
        return without if self._memory is None else self._words[index * ENTRY_WORDS + word]

    def _set(self, index: int, word: int, value: int) -> None:
        if self._memory is not None:
            self._words[index * ENTRY_WORDS + word] = value

    def _changed(self) -> None:
        """The names are others now, and this process knows them."""
        if self._memory is not None:
            self._words[CHANGES] += 1
            self._seen = self._words[CHANGES]

    def _flat(self, index: int, dtype: torch.dtype) -> Tensor:
        assert self._memory is not None
        count = self._word(index, SIZE) // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._word(index, OFFSET))

    def _count(self, record: FrozenRecord, beside: torch.device) -> FrozenRecord:
        """One use more. The first one of a process locks the pages beside a GPU."""
        if not record.users and beside.type == "cuda" and self._memory is not None:
            room, dtype = record.flat.view(torch.uint8), record.flat.dtype
            record.flat = locked(room, torch.cuda.cudart(), beside).view(dtype)
        record.users += 1
        self._used[record.index] = record
        self._set(record.index, HOLDERS, self._word(record.index, HOLDERS) | self._bit)
        return record

    def _made(self, name: bytes, numel: int, dtype: torch.dtype) -> FrozenRecord:
        """A record of zeros that no other process finds yet."""
        if self._memory is None:
            index = max(self._used, default=0) + 1
            return FrozenRecord(index, host_room(numel, dtype, torch.device("cpu")))
        words, is_dense = self._words, len(self._live) == self._words[COUNT]
        index = words[COUNT] + 1 if is_dense else min({*range(1, words[COUNT] + 1)} - self._live)
        if index > MOST_RECORDS:
            raise FrozenError(f"frozen: {MOST_RECORDS:,} records, and room for no more; legal: larger chunks")
        size_bytes, start = numel * dtype.itemsize, index * ENTRY_BYTES
        place = words[END] if is_dense else self._place(whole_pages(size_bytes))
        if place + size_bytes > len(self._memory):
            raise FrozenError(f"frozen: the records take more than {len(self._memory):,} bytes of addresses")
        words[COUNT], words[END] = max(words[COUNT], index), max(words[END], place + whole_pages(size_bytes))
        self._memory[start : start + DIGEST_BYTES] = name
        for word, value in {OFFSET: place, SIZE: size_bytes, HOLDERS: 0, STATE: WRITTEN}.items():
            self._set(index, word, value)
        self._live.add(index)
        return FrozenRecord(index, self._flat(index, dtype))

    def _place(self, size_bytes: int) -> int:
        """The start of free pages: between records, or behind all."""
        start = DIRECTORY_BYTES
        for first, stop in sorted((self._word(i, OFFSET), self._end(i)) for i in self._live):
            if first - start >= size_bytes:
                return start
            start = stop
        return start

    def _end(self, index: int) -> int:
        return self._word(index, OFFSET) + whole_pages(self._word(index, SIZE))

    def _leave(self, index: int) -> None:
        """This process uses a record no more."""
        holders = self._word(index, HOLDERS) & ~self._bit
        self._set(index, HOLDERS, holders)
        if not holders:
            self._free(index)

    def _free(self, index: int) -> None:
        for indices in self._named.values():
            if index in indices:
                indices.remove(index)
        self._live.discard(index)
        if self._memory is not None:
            self._set(index, STATE, 0)
            start = self._word(index, OFFSET)
            self._memory.madvise(mmap.MADV_REMOVE, start, self._end(index) - start)
            self._changed()
