"""Stores frozen weights once for all engines that have equal ones: in shared host memory, read-only and counted.

Note: one record for equals.
A record is the flat memory of one chunk of frozen weights.  Its name is a digest of the parameters' names, shapes and
offsets, of dtype, and of the part that a rank holds.  Who needs a record compares the values bit for bit with those of
that name.  So equal name and content are one record, and a digest of values is not needed.  Nothing writes in a record
that others use.

Holders.  Up to 64 processes of a host hold records, each with a bit of its own.  A process counts its own users, and
clears its bit with the last of them.  A record without a bit is freed.  A process that dies leaves its bits set.  The
one that is started in its place has the same bit, and finds its records there.

A file lock orders changes of the directory (memory/shared_records.py); it ends with the process that has it.  A record
whose writer died is not used.
Cost: to open an engine again its values are compared, at the speed of memory.
Source: memory of equal content, once: Waldspurger, OSDI 2002, section 4.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.memory.pinned import locked
from colossal_lite.memory.shared_records import ENTRY_WORDS, STATE, RecordSpace, StoreError

MARK = int.from_bytes(b"clfrozen", "little")
MOST_HOLDERS = 64

# Words of an entry behind those of any record; NAME has four. Values of STATE.
HOLDERS, NAME = 3, 4
WRITTEN, LIVE, ALONE = 1, 2, 3  # ALONE: changed by its only user, so no other finds it
# A word of the first entry: the changes so far.
CHANGES = 2

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
        """`handle`: of the process that has the memory; None: this one. `holder`: the bit of this process. Raises
        FrozenError for a handle of a process that has ended, or for another bit."""
        if not 0 <= holder < MOST_HOLDERS:
            raise FrozenError(f"frozen: holder={holder}; legal: 0 to {MOST_HOLDERS - 1}")
        self._bit, self._space = 1 << holder, None if handle is None else _opened(handle)
        self._used: dict[int, FrozenRecord] = {}
        self._named: dict[bytes, list[int]] = {}
        self._seen = -1  # changes when these were read
        self._lock = threading.Lock()

    def handle(self) -> FrozenHandle | None:
        """For other processes; None where memory cannot be shared."""
        with self._alone() as space:
            return None if space.descriptor < 0 else FrozenHandle(os.getpid(), space.descriptor)

    def take(
        self, name: bytes, numel: int, dtype: torch.dtype, beside: torch.device, *, same: Same,
        fill: Callable[[Tensor], object], base: str | None = None,
    ) -> FrozenRecord:  # fmt: skip
        """The record of this name whose values are those of the caller, one use more; `fill` writes a new one [numel].

        `base`: the stated name of weights that must be equal: FrozenError if one of this name differs."""
        with self._alone() as space:
            for index in self._named.get(name, ()):
                found = self._used.get(index) or FrozenRecord(index, space.flat(index, dtype))
                if (differs := same(found.flat)) is None:
                    return self._count(space, found, beside)
                if base is not None:
                    raise FrozenError(
                        f"memory.shared_base={base!r}: {differs} another task with this base; legal: the same frozen "
                        f"weights, or another name"
                    )
            record = self._made(space, name, numel, dtype)
            fill(record.flat)
            space.put(record.index, STATE, LIVE)
            self._named.setdefault(name, []).append(record.index)
            self._changed(space)
            return self._count(space, record, beside)

    def give(self, record: FrozenRecord) -> None:
        """End one use; with the last one in any process its memory is freed. Nothing may read it any more."""
        with self._alone() as space:
            record.users -= 1
            if record.users:
                return
            del self._used[record.index]
            holders = space.word(record.index, HOLDERS) & ~self._bit
            space.put(record.index, HOLDERS, holders)
            if not holders:
                self._hide(record.index)
                space.free(record.index)
                self._changed(space)

    def take_alone(self, record: FrozenRecord, who: str) -> None:
        """Make a record that has one user its own, which may then change it. Raises FrozenError with `who`."""
        with self._alone() as space:
            if record.users > 1 or space.word(record.index, HOLDERS) != self._bit:
                raise FrozenError(
                    f"{who}: these frozen weights are shared with other engines, and a write would change theirs; "
                    f"legal: the values that they have, or an engine that shares with none"
                )
            space.put(record.index, STATE, ALONE)
            self._hide(record.index)

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory, by the formula of memory/shared_records.py."""
        if self._space is None:
            return 0
        with self._alone() as space:
            return space.taken_bytes

    # ---- how ----

    @contextmanager
    def _alone(self) -> Iterator[RecordSpace]:
        """The memory, which no other thread or process changes; `_named` is that of now."""
        with self._lock:
            space = self._space = self._space or RecordSpace.made("frozen weights", MARK)
            if space.descriptor < 0:
                yield space
                return
            fcntl.flock(space.descriptor, fcntl.LOCK_EX)
            try:
                self._read_names(space)
                yield space
            finally:
                fcntl.flock(space.descriptor, fcntl.LOCK_UN)

    def _read_names(self, space: RecordSpace) -> None:
        """What others have changed; a record whose writer has died is dropped."""
        if self._seen == space.words[CHANGES]:
            return
        self._named.clear()
        space.look()
        for index in space.live():
            if (state := space.word(index, STATE)) == WRITTEN:
                space.free(index)
            elif state == LIVE:
                self._named.setdefault(space.words[_name_of(index)].tobytes(), []).append(index)
        self._seen = space.words[CHANGES]

    def _changed(self, space: RecordSpace) -> None:
        """The names are others now, and this process knows them."""
        space.words[CHANGES] += 1
        self._seen = space.words[CHANGES]

    def _hide(self, index: int) -> None:
        for indices in self._named.values():
            if index in indices:
                indices.remove(index)

    def _count(self, space: RecordSpace, record: FrozenRecord, beside: torch.device) -> FrozenRecord:
        """One use more. The first one of a process locks the pages beside a GPU."""
        if not record.users and beside.type == "cuda":
            room, dtype = record.flat.view(torch.uint8), record.flat.dtype
            record.flat = locked(room, torch.cuda.cudart(), beside).view(dtype)
        record.users += 1
        self._used[record.index] = record
        space.put(record.index, HOLDERS, space.word(record.index, HOLDERS) | self._bit)
        return record

    def _made(self, space: RecordSpace, name: bytes, numel: int, dtype: torch.dtype) -> FrozenRecord:
        """A record of zeros that no other process finds yet."""
        try:
            index = space.make(numel * dtype.itemsize)
        except StoreError as error:
            raise FrozenError(str(error)) from error
        space.words[_name_of(index)] = memoryview(name).cast("Q")
        space.put(index, HOLDERS, 0)
        space.put(index, STATE, WRITTEN)
        return FrozenRecord(index, space.flat(index, dtype))


def _name_of(index: int) -> slice:
    """The words of an entry that are its name."""
    return slice(index * ENTRY_WORDS + NAME, (index + 1) * ENTRY_WORDS)


def _opened(handle: FrozenHandle) -> RecordSpace:
    try:
        return RecordSpace.opened("frozen weights", MARK, handle.pid, handle.descriptor)
    except OSError as error:
        raise FrozenError(f"frozen: process {handle.pid} has no frozen weights any more ({error})") from error
