"""Stores the record of a chunk between updates: on the host, or in a file behind slots on the host.

Note: the file's slots.
A record on disk has a slot on the host from its read to the end of its copy up.  It has another from its copy back
until it is written.  Where it is updated on the host it has one, from its read to its write.  Reads follow the order of
the records on disk, however far apart their chunks are (schedule/optimizer_updates.py).  Of the host buffers,
READ_AHEAD hold records read ahead.  One is on its way to the device, one on its way back, one is being written to disk.
There are never more than there are such records.  A slot is refilled only after the copy out of it (`Transfer`s order
these).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import Bus, LinkSpeed, ThreadExecutor
from colossal_lite.memory.disk_file import DiskFile
from colossal_lite.memory.disk_layout import FileLayout
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.pinned import host_pages
from colossal_lite.memory.task_records import OPTIMIZER, TaskRecords
from colossal_lite.memory.transfers import Buffers

READ_AHEAD = 1
HOST_SLOTS = READ_AHEAD + 3
MASTER = "master"

OpenFile = Callable[[FileLayout, Collection[int]], DiskFile]
"""Makes the file of a layout, with room for these of its records."""


@dataclass(frozen=True)
class Record:
    """The form of one chunk's state: name of each part, elements of the buffer that it takes, and its own dtype."""

    forms: tuple[tuple[str, int, torch.dtype], ...] = ()

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return sum(numel for _, numel, _ in self.forms)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a buffer that holds such a record."""
        sizes = [numel for _, numel, _ in self.forms]
        pieces = flat[: self.size].split(sizes) if sizes else ()
        return {name: piece.view(dtype) for (name, _, dtype), piece in zip(self.forms, pieces, strict=True)}


def record_of(chunk: Chunk, states: Mapping[str, torch.dtype]) -> Record:
    """The states of a chunk, and what its masters have beside the weights."""
    length, word = chunk.owned_numel, chunk.types.state
    parts = [(name, length * dtype.itemsize // word.itemsize, dtype) for name, dtype in states.items()]
    if chunk.master is not chunk.local_shard:
        assert chunk.master.dtype == word, "of one width"
        parts.append((MASTER, chunk.master_words.numel(), word))
    return Record(tuple(parts))


class StateStorage(ABC):
    """Records at rest, by the numbers of their chunks."""

    tier = ""

    def __init__(self, records: Sequence[Record], dtype: torch.dtype) -> None:
        self._records, self._dtype = tuple(records), dtype
        self._outgoing: dict[int, Transfer] = {}  # on its way back

    @abstractmethod
    def take_in(self, index: int, fill: Callable[[dict[str, Tensor]], object]) -> None:
        """A record rests here from now on; `fill` writes the values that are not zero into its parts. Raises
        DiskError."""

    @abstractmethod
    def release(self, index: int) -> None:
        """A record rests elsewhere from now on. Nothing of it may be on its way."""

    # ---- in a step ----

    @abstractmethod
    def leave(self, index: int, bring: Callable[..., Transfer]) -> None:
        """Copy a record to the device by `bring(flat, *after)`: its elements, and the transfers before it."""

    @abstractmethod
    def come_back(self, index: int, take: Callable[..., Transfer]) -> None:
        """Copy a record back by `take(flat, *after, then=)`: the target, the transfers before, the callback after."""

    @abstractmethod
    def begin_update(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        """The parts of a record where it is updated on the host, and what must be done before."""

    @abstractmethod
    def end_update(self, index: int, updated: Transfer) -> None:
        """The update of that record has started."""

    def drop(self) -> Sequence[Transfer]:
        """Drop what was read ahead: those copies, revoked where they had not begun."""
        return ()

    def finish(self) -> None:
        """Wait until all records are back."""
        while self._outgoing:
            self._outgoing.popitem()[1].finish()

    def back(self, index: int) -> tuple[Transfer, ...]:
        """The transfer that must end before a record is read where it rests."""
        return () if index not in self._outgoing else (self._outgoing.pop(index),)

    # ---- between steps ----

    @abstractmethod
    def at_rest(self, index: int) -> dict[str, Tensor]:
        """The parts of a record: where there is no memory of it, its shapes on the meta device."""

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        """The parts of a record in host memory, until some others are asked for; to be changed if `write`."""
        return self.at_rest(index)

    @abstractmethod
    def settle(self) -> None:
        """Write changes between steps back."""


class HostStorage(StateStorage):
    """Records on the host, each in a place of its own, where an earlier engine may have parked it."""

    tier = "host"

    def __init__(
        self, records: Sequence[Record], dtype: torch.dtype, chunks: Sequence[Chunk], places: TaskRecords
    ) -> None:
        super().__init__(records, dtype)
        self._numbers, self._places = [chunk.spec.id for chunk in chunks], places
        self.rest: dict[int, Tensor] = {}
        """The elements of each."""

    def take_in(self, index: int, fill: Callable[[dict[str, Tensor]], object]) -> None:
        number, record = self._numbers[index], self._records[index]
        self.rest[index] = self._places.room(number, OPTIMIZER, record.size, self._dtype)
        if self._places.is_new(number, OPTIMIZER):
            self._places.begin(number, OPTIMIZER)
            fill(record.parts(self.rest[index]))
            self._places.cancel(number, OPTIMIZER)

    def release(self, index: int) -> None:
        del self.rest[index]
        self._places.free(self._numbers[index], OPTIMIZER)

    def leave(self, index: int, bring: Callable[..., Transfer]) -> None:
        bring(self.rest[index], *self.back(index))

    def come_back(self, index: int, take: Callable[..., Transfer]) -> None:
        landed = partial(self._places.commit, self._numbers[index], OPTIMIZER)
        self._outgoing[index] = take(self.rest[index], then=landed)

    def begin_update(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        return self._records[index].parts(self.rest[index]), self.back(index)

    def end_update(self, index: int, updated: Transfer) -> None:
        self._outgoing[index] = updated

    def defer(self) -> None:
        """A step has ended: the records are not valid until its updates are done."""
        for index in self.rest:
            self._places.defer(self._numbers[index], OPTIMIZER)

    def at_rest(self, index: int) -> dict[str, Tensor]:
        return self._records[index].parts(self.rest[index])

    def settle(self) -> None:
        """Records are changed where they rest."""


class DiskStorage(StateStorage):
    """Records in a file, which pass through slots on the host."""

    tier = "disk"

    def __init__(
        self, records: Sequence[Record], dtype: torch.dtype, device: torch.device, open_file: OpenFile | None,
        speed: LinkSpeed, timeout_s: float,
    ) -> None:  # fmt: skip
        """`open_file`: None: nothing is ever read or written. `speed`: no faster, both ways together."""
        super().__init__(records, dtype)
        self.layout = FileLayout(tuple(record.size * dtype.itemsize for record in records))
        self._device, self._open_file = device, open_file
        self.file: DiskFile | None = None
        """Made when the first record is to rest here."""
        self.resting: frozenset[int] = frozenset()
        self.host_bytes = 0
        """Of the slots."""
        self._shapes: dict[int, Tensor] = {}  # on the meta device
        self._passing = Buffers(())
        self._came: dict[int, tuple[Tensor, Transfer]] = {}  # read from disk, or on its way
        self._leaving: dict[int, tuple[Tensor, Transfer]] = {}  # from the device, or on its way
        self._opened: dict[int, Tensor] = {}  # between steps; the one that was asked for last is last
        self._changed: set[int] = set()
        disk = Bus()
        self.reads = Link("read", ThreadExecutor(speed, disk), timeout_s=timeout_s)
        self.writes = Link("write", ThreadExecutor(speed, disk), timeout_s=timeout_s)

    @property
    def bytes(self) -> int:
        """In the file, whole pages."""
        return sum(map(self.layout.padded_bytes, self.resting))

    @property
    def most_host_bytes(self) -> int:
        """Of the slots in use at once, at the most so far."""
        return self._passing.most_bytes

    @property
    def links(self) -> tuple[Link, ...]:
        return self.reads, self.writes

    # ---- which records rest here ----

    def begin(self, resting: Collection[int]) -> None:
        """These rest here from the start. Raises DiskError."""
        self.resting = frozenset(resting)
        if resting:
            self._make_file()
        self.make_slots(resting)

    def make_slots(self, passing: Collection[int], most: int | None = None) -> None:
        """As many and as large as these need where they pass, `most` at once (None: `HOST_SLOTS`). Nothing may be on
        its way."""
        self._passing = Buffers(())  # the old ones go first
        count = min(HOST_SLOTS if most is None else most, len(passing))
        largest = max(map(self.layout.padded_bytes, passing), default=0)
        self.host_bytes = count * largest
        room = host_pages(self.host_bytes, self._device)
        self._passing = Buffers(room[i * largest : (i + 1) * largest] for i in range(count))

    def take_in(self, index: int, fill: Callable[[dict[str, Tensor]], object]) -> None:
        self._shapes[index] = torch.empty(self._records[index].size, dtype=self._dtype, device="meta")
        if index not in self.resting:
            self.resting |= {index}
            if self.file is None:
                self._make_file()
            else:
                self.file.make_room(index)
        if self.file is not None:
            slot, _ = self._passing.take()
            fill(self._records[index].parts(self._elements(slot, index).zero_()))
            self._write(index, slot)
            self._passing.give(slot)

    def release(self, index: int) -> None:
        self.resting -= {index}
        if self.file is not None:
            self.file.give_back(index)

    # ---- in a step ----

    def read(self, index: int) -> None:
        """Begin to read a record into a slot of the host; nothing if that has begun."""
        if index not in self._came:
            back = self.back(index)
            slot, free = self._passing.take(*back)
            size_bytes = self.layout.sizes_bytes[index]
            transfer = self.reads.run(
                partial(self._read, index, slot), size_bytes, after=(*free, *back), prefetch=True
            )
            self._came[index] = slot, transfer

    def leave(self, index: int, bring: Callable[..., Transfer]) -> None:
        slot, came = self._came.pop(index)
        self._passing.give(slot, bring(self._elements(slot, index), came))

    def come_back(self, index: int, take: Callable[..., Transfer]) -> None:
        slot, free = self._passing.take()
        self._leaving[index] = slot, take(self._elements(slot, index), *free)

    def begin_update(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        slot, came = self._came[index]
        return self._records[index].parts(self._elements(slot, index)), (came,)

    def end_update(self, index: int, updated: Transfer) -> None:
        slot, _ = self._came.pop(index)
        self._leaving[index] = slot, updated

    def write(self, index: int) -> None:
        """Begin to write a record that has come from the device, or been updated where it is."""
        slot, came = self._leaving.pop(index)
        size_bytes = self.layout.sizes_bytes[index]
        transfer = self.writes.run(partial(self._write, index, slot), size_bytes, after=(came,))
        self._passing.give(slot, transfer)
        self._outgoing[index] = transfer

    def drop(self) -> Sequence[Transfer]:
        dropped = [self._came.pop(index) for index in tuple(self._came)]
        for slot, transfer in dropped:
            transfer.revoke()
            self._passing.give(slot, transfer)
        return [transfer for _, transfer in dropped]

    def rest(self) -> None:
        """Wait until no slot is in use."""
        self._passing.rest()

    def close(self) -> None:
        self.reads.close()
        self.writes.close()
        if self.file is not None:
            self.file.close()

    # ---- between steps ----

    def check(self) -> None:
        """Raise the DiskError that has ended the use of these records, if one has."""
        if self.file is not None:
            self.file.check()

    def at_rest(self, index: int) -> dict[str, Tensor]:
        return self._records[index].parts(self._shapes[index])

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        if index not in self._opened:
            if len(self._opened) == len(self._passing):
                self._put_back(next(iter(self._opened)))
            slot, free = self._passing.take()
            for transfer in free:
                transfer.finish()
            self._read(index, slot)
            self._opened[index] = slot
        self._opened[index] = slot = self._opened.pop(index)
        if write:
            self._changed.add(index)
        return self._records[index].parts(self._elements(slot, index))

    def settle(self) -> None:
        for index in tuple(self._opened):
            self._put_back(index)

    def _put_back(self, index: int) -> None:
        slot = self._opened.pop(index)
        if index in self._changed:
            self._changed.remove(index)
            self._write(index, slot)
        self._passing.give(slot)

    # ---- how ----

    def _make_file(self) -> None:
        self.file = self._open_file(self.layout, self.resting) if self._open_file else None

    def _elements(self, slot: Tensor, index: int) -> Tensor:
        return slot[: self.layout.sizes_bytes[index]].view(self._dtype)

    def _read(self, index: int, slot: Tensor) -> None:
        assert self.file is not None
        self.file.read(index, slot[: self.layout.padded_bytes(index)])

    def _write(self, index: int, slot: Tensor) -> None:
        assert self.file is not None
        self.file.write(index, slot[: self.layout.padded_bytes(index)])
