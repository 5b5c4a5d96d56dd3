"""Allocates, versions and reads the records of one task in shared host memory.

Note: records.
A record is the flat memory of one chunk of one task, on the rank of this process.  It has one kind: `OPTIMIZER`,
`WEIGHTS` or `GRADIENTS`.  Its name is (task, chunk, kind).  All records of a task lie in one shared mapping
(memory/shared_records.py).

Versions.  The step that defers an update of a record makes it *pending* (`defer`). It stays so until its last byte is
in the record (`commit`).  `commit` adds one to the version.  Version and pending flag are one word of the directory,
written before the first byte and after the last one.  A reader that finds the same word, not pending, before and after
its copy has a record of one version.  Any other reader tries again or raises.  `HostStore.flush` makes the owner's
engine run its deferred updates.  `Records.flush` waits for that.  Gradients are pending while an engine sums in them.
Source: sequence locks, Lameter, Gelato 2005.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossal_lite.distributed import host_handshake
from colossal_lite.memory.frozen_records import FrozenRecord, FrozenRecords, Same
from colossal_lite.memory.frozen_slots import FrozenSlots
from colossal_lite.memory.link import Transfer
from colossal_lite.memory.pinned import host_room, lock, locked, make_pages
from colossal_lite.memory.shared_records import STATE, RecordSpace, StoreError

OPTIMIZER, WEIGHTS, GRADIENTS = "optimizer", "weights", "gradients"
KINDS = (OPTIMIZER, WEIGHTS, GRADIENTS)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.uint8)
POLL_S = 5e-4

# Words of an entry behind those of any record; USES counts its records. STATE is version << VERSION | PENDING or not |
# LIVE.
CHUNK, KIND, DTYPE, USES = range(3, 7)
LIVE, PENDING, VERSION = 1, 2, 2


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

    def __init__(self, task: str, pid: int, space: RecordSpace) -> None:
        self.task, self.pid, self.space = task, pid, space
        self._fence = threading.Lock()
        self._found: dict[tuple[int, str], int] = {}

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """(chunk, kind) of each present record."""
        return tuple(sorted(map(self._name, self.space.live())))

    def version(self, chunk: int, kind: str = OPTIMIZER) -> int:
        """Number of finished updates of a record. Raises StoreError if there is none."""
        return self._state(self._index(chunk, kind)) >> VERSION

    def is_pending(self, chunk: int, kind: str = OPTIMIZER) -> bool:
        """Whether an update of a record is deferred or in flight. Raises StoreError if there is none."""
        return bool(self._state(self._index(chunk, kind)) & PENDING)

    def read(self, chunk: int, kind: str = OPTIMIZER, *, timeout_s: float = 0.0) -> Snapshot:
        """A copy of one version of a record. Raises StoreError: there is none, or it is pending after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            index = self._index(chunk, kind)
            with self._fence:
                before = self._state(index), self.space.word(index, USES)
            if not before[0] & PENDING:
                flat = self._flat(index).clone()
                with self._fence:  # a lock is a fence: loads stay on their side of it
                    after = self._state(index), self.space.word(index, USES)
                if after == before and before[0] & LIVE:
                    return Snapshot(self.task, chunk, kind, before[0] >> VERSION, flat)
            self._pause([(chunk, kind)], end_s, timeout_s)

    def flush(self, *, timeout_s: float = 0.0) -> None:
        """Wait until no update is pending, gradients left out. Raises StoreError after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while late := self._pending():
            self._pause(late, end_s, timeout_s)

    def view(self, chunk: int, kind: str = OPTIMIZER, *, runtime: Any = None) -> Tensor:
        """The memory of a record itself [numel].

        With CUDA's `runtime` (`torch.cuda.cudart()`) it is locked while the tensor lives. Its bytes are of one version
        only if `version` is the same before and after, and nothing is pending. Raises StoreError."""
        flat = self._flat(self._index(chunk, kind))
        if runtime is not None and (error := lock(flat, runtime)):
            raise StoreError(f"task {self.task!r}: ({chunk}, {kind!r}) cannot be locked (CUDA error {error})")
        return flat

    # ---- how ----

    def _pending(self) -> list[tuple[int, str]]:
        """The records with a pending update, gradients left out."""
        names = [self._name(index) for index in self.space.live() if self._state(index) & PENDING]
        return sorted(name for name in names if name[1] != GRADIENTS)

    def _name(self, index: int) -> tuple[int, str]:
        name = self.space.word(index, CHUNK), KINDS[self.space.word(index, KIND)]
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
        return self.space.word(index, STATE)

    def _flat(self, index: int) -> Tensor:
        return self.space.flat(index, DTYPES[self.space.word(index, DTYPE)])

    def _pause(self, names: Sequence[tuple[int, str]], end_s: float, timeout_s: float) -> None:
        """Wait a moment for these records. Raises StoreError after `end_s`."""
        if (left_s := end_s - time.monotonic()) > 0:
            return time.sleep(min(POLL_S, left_s))
        first = ", ".join(f"({chunk}, {kind!r})" for chunk, kind in names[:4])
        has_ended = "" if os.path.exists(f"/proc/{self.pid}") else ", which has ended and will not make it"
        raise StoreError(
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
        self, task: str, beside: torch.device, frozen: FrozenRecords | None = None, slots: FrozenSlots | None = None
    ) -> None:  # fmt: skip
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
        self._rooms: dict[tuple[int, str], Tensor] = {}
        self._entries: dict[tuple[int, str], int] = {}
        self._due: dict[int, int] = {}  # entry -> pending updates
        self._new: set[tuple[int, str]] = set()
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
            space = self._space()
            with self._lock:
                self._due.pop(index, None)
                space.put(index, USES, space.word(index, USES) + 1)
                space.free(index)

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory when every record has been written: by the formula of memory/shared_records.py."""
        return 0 if self.shared is None else self.shared.space.taken_bytes

    def _made(self, name: tuple[int, str], numel: int, dtype: torch.dtype) -> Tensor:
        if host_handshake.why_not() is not None:
            return host_room(numel, dtype, self.beside)
        space = self._space()
        index = space.make(numel * dtype.itemsize)
        room = space.flat(index, dtype)
        if self.beside.type == "cuda":
            make_pages(room)  # no other process has found it yet
            held = locked(room.view(torch.uint8), torch.cuda.cudart(), self.beside).view(dtype)
            if held.data_ptr() != room.data_ptr():  # another process would not find it there
                space.free(index)
                return held
        space.put(index, CHUNK, name[0])
        space.put(index, KIND, KINDS.index(name[1]))
        space.put(index, DTYPE, DTYPES.index(dtype))
        with self._lock:  # a fence: readers of the state see the words above
            space.put(index, STATE, LIVE)
        self._entries[name] = index
        return room

    def _space(self) -> RecordSpace:
        """The memory of all records; made with the first one."""
        if self.shared is None:
            space = RecordSpace.made(f"task {self.task}", secrets.randbits(64))
            self.shared = Records(self.task, os.getpid(), space)
        return self.shared.space

    # ---- versions ----

    def begin(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Mark a record, if there is one, as pending before it is written, unless it is pending already."""
        self._set(chunk, kind, lambda due: max(due, 1))

    def defer(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Count one more pending update of a record. The update of the step before may still be in flight."""
        self._set(chunk, kind, lambda due: due + 1)

    def commit(self, chunk: int, kind: str = OPTIMIZER, *, version: int | None = None) -> None:
        """Count one finished update: the next version, or a given one. Any thread may call it."""
        self._set(chunk, kind, lambda due: due - 1, lambda old: old + 1 if version is None else version)

    def cancel(self, chunk: int, kind: str = OPTIMIZER) -> None:
        """Count one pending update less, which has written nothing and will not run."""
        self._set(chunk, kind, lambda due: due - 1)

    def _set(
        self, chunk: int, kind: str, due: Callable[[int], int], version: Callable[[int], int] = int
    ) -> None:
        """Change the number of pending updates of a record, and its version."""
        if (index := self._entries.get((chunk, kind))) is not None:
            space = self._space()
            with self._lock:  # a fence: the bytes are written before the word
                left = self._due[index] = max(due(self._due.get(index, 0)), 0)
                now = version(space.word(index, STATE) >> VERSION)
                space.put(index, STATE, now << VERSION | (PENDING if left else 0) | LIVE)

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
        """Drop the records: no process can attach any more, and readers raise."""
        self._give_all_frozen()
        if self.shared is not None:
            for index in self._entries.values():
                self.shared.space.put(index, STATE, 0)
            self.shared.space.close()
        self._entries.clear()
        self._rooms.clear()
        self.shared, self.is_open = None, False


def nothing() -> None:
    """Do nothing: there is no engine."""


def _form(numel: int, dtype: torch.dtype) -> str:
    return f"{numel:,} {str(dtype).removeprefix('torch.')}"
