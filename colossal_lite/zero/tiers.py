"""Optimizer state that rests on the host or on disk and visits the device for its update.

Note: records and slots.
A chunk has a record: its state tensors and what its masters have beside the weights, if anything, side by side in one
buffer, so that a visit is one copy each way.  On the device it has a place that it shares with those that are there at
other times: one is updated, `AHEAD` come, one goes, so `AHEAD + 2` in a row have places apart (memory/mover.py).
Records that rest on the host have a place there (memory/store.py), and are pending from the end of a step until what
its update wrote is back.  Those that rest on disk (memory/disk.py) pass through `BELOW + 3` slots on the host: `BELOW`
are read ahead, one goes up, one comes down, one is written.  There are
never more slots than records near each other: one that comes again waits for its own
going.  A slot is refilled only when the copy out of it is done, a record is read only when the copy into it is done and
comes only when the one that took it away is (`Transfer`s say so).  What is computed, and in which order, is the same as
without tiers: so are the bits.  Records that are updated on the host (zero/on_host.py) do not visit: they are updated
where they rest, or in the slot on the host between their read and their write.

The first records are fetched while backward still runs (`prepare`), and the last ones are on their way back when the
next step has begun.  Whoever reads or changes a record outside of a step first brings everything to rest (`flush`):
what was fetched ahead is dropped, without waiting for it where its copy has not begun, and is fetched again.  A record
that rests on disk is then in one of the slots on the host; what was changed is written before the next step, or when
the slot is needed for another record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.disk import DiskFile
from colossal_lite.memory.host import host_pages
from colossal_lite.memory.lane import AS_IT_COPIES, Bus, LinkSpeed, ThreadLane, lane_beside
from colossal_lite.memory.mover import Buffers, Link, Places, Priority, Transfer
from colossal_lite.memory.records import FileLayout
from colossal_lite.memory.store import OPTIMIZER, TaskRecords
from colossal_lite.plan import DISK, Action, Kind
from colossal_lite.zero.budget import most_at_once

AHEAD = 1
SLOTS = AHEAD + 2
BELOW = 1
HOST_SLOTS = BELOW + 3
MASTER = "master"


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


class States(ABC):
    """The records of all chunks, and the slots and links by which they visit the device. Where they rest is said by
    `HostStates` and `DiskStates`."""

    tier = ""
    """On which they rest."""
    below: int | None = None
    """Records that are read before the one that is copied to the device; None: they are on the host."""

    def __init__(
        self, chunks: Sequence[Chunk], states: Sequence[Mapping[str, torch.dtype]], timeout_s: float,
        speed: LinkSpeed, *, update: str = "device",
    ) -> None:  # fmt: skip
        """`states`: for each chunk its state tensors, which begin as zeros, by name and dtype; `speed` of the links
        between device and host; `update`: on the "host", where no record visits the device, or on the "device"."""
        self._chunks, self._update = tuple(chunks), update
        self._records = [record_of(chunk, some) for chunk, some in zip(chunks, states, strict=True)]
        self._dtype, device = chunks[0].types.state, chunks[0].device
        self._device = device
        self._make_slots()
        self.host_bytes = 0
        """Of the places or the slots."""
        self.disk_bytes = 0
        """Of the file."""
        self._here: dict[int, Tensor] = {}
        self._incoming: dict[int, Transfer] = {}
        self._outgoing: dict[int, Transfer] = {}  # on its way back to where it rests
        self.up = Link("h2d", lane_beside(device, speed), timeout_s=timeout_s)
        self.down = Link("d2h", lane_beside(device, speed), timeout_s=timeout_s)

    @property
    def moves(self) -> dict[Kind, Callable[[Action], None]]:
        """What the actions of the plan beside UPDATE do."""
        return {
            Kind.FETCH: lambda a: self.fetch(a.chunk or 0),
            Kind.EVICT: lambda a: self.evict(a.chunk or 0),
        }

    @property
    def record_bytes(self) -> int:
        """Of all records."""
        return sum(record.size for record in self._records) * self._dtype.itemsize

    @property
    def on_host(self) -> frozenset[int]:
        """Chunks with a record that are updated on the host."""
        here = self._update == "host"
        return frozenset(i for i, record in enumerate(self._records) if here and record.size)

    def _make_slots(self) -> None:
        self._slots = Places({}, SLOTS, self._dtype, self._device)  # the old ones go first
        on_host = self.on_host
        sizes = {i: record.size for i, record in enumerate(self._records) if i not in on_host}
        self._slots = Places(sizes, SLOTS, self._dtype, self._device)

    @property
    def device_bytes(self) -> int:
        """Of the places on the device."""
        return self._slots.bytes

    @property
    def most_device_bytes(self) -> int:
        """As much of them as was used, at the most so far."""
        return self._slots.most_bytes

    @property
    def visited(self) -> Places:
        """The places on the device."""
        return self._slots

    @property
    def most_host_bytes(self) -> int:
        """Of the places, or of the slots in use at once, at the most so far."""
        return self.host_bytes

    def _passing_slots(self) -> int:
        """Where up to `HOST_SLOTS` chunks in a row have to do with an update, and some have a record."""
        return most_at_once({i for i, record in enumerate(self._records) if record.size}, HOST_SLOTS)

    @property
    def links(self) -> tuple[Link, ...]:
        return self.up, self.down

    # ---- in a step ----

    @abstractmethod
    def fetch(self, index: int) -> None:
        """Begin to bring a record to the device; nothing if that has begun."""

    def here(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk on the device, whose master is there too from now on."""
        record = self._records[index]
        if not record.size:
            return {}
        self._incoming.pop(index).wait()
        return self._without_master(index, record.parts(self._here[index]))

    @abstractmethod
    def evict(self, index: int) -> None:
        """Begin to take a record back to the host."""

    @abstractmethod
    def begin_on_host(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        """The parts of a record where it is updated on the host, and what must be done before."""

    @abstractmethod
    def end_on_host(self, index: int, updated: Transfer) -> None:
        """The update of that record is on its way."""

    def flush(self) -> None:
        """Every record is whole where it rests; what was fetched and not updated is dropped."""
        dropped = list[Transfer]()
        for index in tuple(self._here):
            if (coming := self._incoming.pop(index, None)) is not None:
                dropped.append(coming)
                if coming.revoke():
                    for feeding in coming.after:
                        if feeding.priority is Priority.PREFETCH:
                            feeding.revoke()
            del self._here[index]
            self._slots.give(index, *() if coming is None else (coming,))
        while self._outgoing:
            self._outgoing.popitem()[1].finish()
        for coming in dropped:
            _finish_before(coming)

    def close(self) -> None:
        self.up.close()
        self.down.close()

    @abstractmethod
    def owe(self) -> None:
        """A step has ended whose updates of all records have yet to come."""

    # ---- between steps ----

    @abstractmethod
    def check(self) -> None:
        """Raise what has ended the use of these records, if anything has."""

    @abstractmethod
    def at_rest(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk between steps: where there is no memory of it, its shapes on the meta device."""

    @abstractmethod
    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        """All parts of a record in host memory, until some others are asked for; to be changed if `write`."""

    @abstractmethod
    def settle(self) -> None:
        """What was changed between steps is where it rests."""

    # ---- how ----

    def _bring(self, index: int, source: Tensor, *after: Transfer) -> Transfer:
        ready = (*after, *self._back(index))
        slot, emptied = self._slots.take(index)
        self._here[index] = slot
        self._incoming[index] = transfer = self.up.copy(
            slot[: source.numel()], source, after=(*emptied, *ready), priority=Priority.PREFETCH
        )
        return transfer

    def _take_back(
        self, index: int, target: Tensor, *after: Transfer, then: Callable[[], object] | None = None
    ) -> Transfer:
        slot = self._here.pop(index)
        transfer = self.down.copy(target, slot[: target.numel()], after=after, then=then)
        self._slots.give(index, transfer)
        return transfer

    def _back(self, index: int) -> tuple[Transfer, ...]:
        """What must be done before a record is read where it rests."""
        return () if index not in self._outgoing else (self._outgoing.pop(index),)

    def _without_master(self, index: int, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The other parts; the chunk has its master in these."""
        if (words := parts.pop(MASTER, None)) is not None:
            self._chunks[index].rest_master(words)
        return parts


def _finish_before(dropped: Transfer) -> None:
    """What a copy that was dropped came after has ended: its record's way back is among it. A thread that has begun the
    copy has seen that end."""
    if dropped.is_revoked or dropped.link.lane.on_stream:
        dropped.finish()


def record_of(chunk: Chunk, states: Mapping[str, torch.dtype]) -> Record:
    """The states of a chunk, and what its masters have beside the weights."""
    length, word = chunk.owned[1] - chunk.owned[0], chunk.types.state
    parts = [(name, length * dtype.itemsize // word.itemsize, dtype) for name, dtype in states.items()]
    if chunk.master is not chunk.own_value:
        assert chunk.master.dtype == word, "of one width"
        parts.append((MASTER, chunk.master_words.numel(), word))
    return Record(tuple(parts))


class HostStates(States):
    """Records that rest on the host, each in a place of its own, where an engine before may have left it."""

    tier = "host"

    def __init__(
        self, chunks: Sequence[Chunk], states: Sequence[Mapping[str, torch.dtype]], timeout_s: float,
        speed: LinkSpeed, places: TaskRecords, *, update: str = "device",
    ) -> None:  # fmt: skip
        super().__init__(chunks, states, timeout_s, speed, update=update)
        self.host_bytes = self.record_bytes
        self._places = places
        self._rest: list[Tensor] = []
        for index, (record, chunk) in enumerate(zip(self._records, self._chunks, strict=True)):
            # One after the other: the chunk's own memory of its masters goes as soon as they are here.
            self._rest.append(places.room(chunk.spec.id, OPTIMIZER, record.size, self._dtype))
            parts = record.parts(self._rest[index])
            if MASTER in parts and places.is_new(chunk.spec.id, OPTIMIZER):
                parts[MASTER].copy_(chunk.master_words)
            self._without_master(index, parts)

    def fetch(self, index: int) -> None:
        if self._records[index].size and index not in self._here:
            self._bring(index, self._rest[index])

    def evict(self, index: int) -> None:
        if self._records[index].size:
            landed = partial(self._places.commit, self._chunks[index].spec.id, OPTIMIZER)
            self._outgoing[index] = self._take_back(index, self._rest[index], then=landed)
            self.at_rest(index)

    def begin_on_host(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        return self._records[index].parts(self._rest[index]), self._back(index)

    def end_on_host(self, index: int, updated: Transfer) -> None:
        self._outgoing[index] = updated

    def owe(self) -> None:
        for chunk in self._chunks:
            self._places.begin(chunk.spec.id, OPTIMIZER)

    def at_rest(self, index: int) -> dict[str, Tensor]:
        return self._without_master(index, self._records[index].parts(self._rest[index]))

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        self.flush()
        return self._records[index].parts(self._rest[index])

    def check(self) -> None:
        """Nothing ends the use of memory."""

    def settle(self) -> None:
        """Records are changed where they rest."""

    def release(self, indices: Collection[int]) -> None:
        """These records rest elsewhere from now on: their places are given back, and the slots are as large as the
        others need. Nothing may be on its way."""
        for index in indices:
            self._records[index] = Record()
            self._rest[index] = self._rest[index][:0].clone()
            self._places.free(self._chunks[index].spec.id, OPTIMIZER)
        self._make_slots()
        self.host_bytes = self.record_bytes


class DiskStates(States):
    """Records that rest in a file, and pass through slots on the host."""

    tier = "disk"
    below = BELOW

    def __init__(
        self, chunks: Sequence[Chunk], states: Sequence[Mapping[str, torch.dtype]], timeout_s: float, speed: LinkSpeed,
        open_file: Callable[[FileLayout], DiskFile] | None, disk_speed: LinkSpeed = AS_IT_COPIES, *,
        update: str = "device",
    ) -> None:  # fmt: skip
        """`open_file` makes the file of a layout; None: nothing is ever read or written. `disk_speed`: no faster,
        both ways together."""
        super().__init__(chunks, states, timeout_s, speed, update=update)
        self.layout = FileLayout(tuple(record.size * self._dtype.itemsize for record in self._records))
        self._file = open_file(self.layout) if open_file else None
        self.disk_bytes, largest = self.layout.file_bytes, self.layout.largest_bytes
        self.host_bytes = self._passing_slots() * largest
        room = host_pages(self.host_bytes, self._device)
        self._passing = Buffers(room[i * largest : (i + 1) * largest] for i in range(self._passing_slots()))
        self._came: dict[int, tuple[Tensor, Transfer]] = {}  # read from disk, or on its way
        self._leaving: dict[int, tuple[Tensor, Transfer]] = {}  # from the device, or on its way
        self._opened: dict[int, Tensor] = {}  # between steps; the one that was asked for last is last
        self._changed: set[int] = set()
        disk = Bus()
        self.reads = Link("read", ThreadLane(disk_speed, disk), timeout_s=timeout_s)
        self.writes = Link("write", ThreadLane(disk_speed, disk), timeout_s=timeout_s)
        for index, chunk in enumerate(self._chunks):
            if self._file is not None and self._records[index].size:
                slot, _ = self._passing.take()
                parts = self._records[index].parts(self._elements(slot, index).zero_())
                if MASTER in parts:
                    parts[MASTER].copy_(chunk.master_words)
                self._write(index, slot)
                self._passing.give(slot)
            self.at_rest(index)

    @property
    def moves(self) -> dict[Kind, Callable[[Action], None]]:
        on_host = super().moves
        on_disk = {Kind.FETCH: self.read, Kind.EVICT: self.write}

        def move(action: Action) -> None:
            if action.resource == DISK:
                on_disk[action.kind](action.chunk or 0)
            else:
                on_host[action.kind](action)

        return dict.fromkeys(on_host, move)

    @property
    def links(self) -> tuple[Link, ...]:
        return *super().links, self.reads, self.writes

    # ---- in a step ----

    def read(self, index: int) -> None:
        """Begin to read a record into a slot of the host; nothing if that has begun."""
        self.settle()
        if self._records[index].size and index not in self._came and index not in self._here:
            back = self._back(index)
            slot, free = self._passing.take(*back)
            size_bytes = self.layout.sizes_bytes[index]
            transfer = self.reads.run(
                partial(self._read, index, slot), size_bytes, after=(*free, *back), priority=Priority.PREFETCH
            )
            self._came[index] = slot, transfer

    def fetch(self, index: int) -> None:
        if self._records[index].size and index not in self._here:
            slot, came = self._came.pop(index)
            self._passing.give(slot, self._bring(index, self._elements(slot, index), came))

    def evict(self, index: int) -> None:
        if self._records[index].size:
            slot, free = self._passing.take()
            self._leaving[index] = slot, self._take_back(index, self._elements(slot, index), *free)
            self.at_rest(index)

    def begin_on_host(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        slot, came = self._came[index]
        return self._records[index].parts(self._elements(slot, index)), (came,)

    def end_on_host(self, index: int, updated: Transfer) -> None:
        slot, _ = self._came.pop(index)
        self._leaving[index] = slot, updated

    def write(self, index: int) -> None:
        """Begin to write a record that has come from the device, or been updated where it is."""
        if self._records[index].size:
            slot, came = self._leaving.pop(index)
            size_bytes = self.layout.sizes_bytes[index]
            transfer = self.writes.run(partial(self._write, index, slot), size_bytes, after=(came,))
            self._passing.give(slot, transfer)
            self._outgoing[index] = transfer

    def owe(self) -> None:
        """Nobody else reads the file."""

    def flush(self) -> None:
        dropped = [self._came.pop(index) for index in tuple(self._came)]
        for slot, transfer in dropped:
            transfer.revoke()
            self._passing.give(slot, transfer)
        super().flush()
        for _, transfer in dropped:
            _finish_before(transfer)
        self._passing.rest()

    @property
    def most_host_bytes(self) -> int:
        return self._passing.most_taken * self.layout.largest_bytes

    def close(self) -> None:
        super().close()
        self.reads.close()
        self.writes.close()
        if self._file is not None:
            self._file.close()

    # ---- between steps ----

    def check(self) -> None:
        if self._file is not None:
            self._file.check()

    def at_rest(self, index: int) -> dict[str, Tensor]:
        record = self._records[index]
        shapes = torch.empty(record.size, dtype=self._dtype, device="meta")
        return self._without_master(index, record.parts(shapes))

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        self.check()
        self.flush()
        record = self._records[index]
        if not record.size:
            return {}
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
        return record.parts(self._elements(slot, index))

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

    def _elements(self, slot: Tensor, index: int) -> Tensor:
        return slot[: self.layout.sizes_bytes[index]].view(self._dtype)

    def _read(self, index: int, slot: Tensor) -> None:
        assert self._file is not None
        self._file.read(index, slot[: self.layout.padded_bytes(index)])

    def _write(self, index: int, slot: Tensor) -> None:
        assert self._file is not None
        self._file.write(index, slot[: self.layout.padded_bytes(index)])
