"""Offloads optimizer state to host or disk, and copies it to the device for its update.

Note: records and slots.
A chunk has a record: its state tensors, and what its masters have beside the weights, in one buffer.  So there is one
copy each way.  On the device a record has a place that it shares with records of other times.  One is updated, `ahead`
(schedule/update_mix.py) are fetched, and one is written back.  So `ahead + 2` in a row have separate places.  Between
updates a record is in a storage (offload/state_storage.py).  On the host that is a place of its own
(memory/host_store.py). It is pending from the end of a step until its update is back.  On disk (memory/disk_file.py) it
passes through slots on the host.  A record is fetched again only after it has been written back.  A slot is refilled
only after the copy out of it; a record is read only after the copy into it.  `Transfer`s order these.  The computation
and its order are those without offload: so are the bits.  Records that are updated on the host
(offload/host_updates.py) are not copied to the device.  They are updated in place, or in the slot between their read
and their write.

The first records are fetched while backward still runs (`prepare`).  The last ones are written back when the next step
has begun.  A reader or writer outside of a step first calls `flush`.  That drops what was fetched ahead, without
waiting where the copy has not begun; it is fetched again later.  A record on disk is then in one of the slots on the
host.  A change is written before the next step, or when another record needs the slot.

Once, between steps, records may change their tiers (`release`, `settle_storages`).  Those to the device are copied
first, then those to disk, then those from it.  Each passes one slot on the host, the largest first.  Meanwhile the host
may hold one record's slot more than before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import LinkSpeeds, executor_for
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.offload.pieces import VISITING, StateKind
from colossal_lite.offload.state_storage import (
    MASTER,
    DiskStorage,
    HostStorage,
    OpenFile,
    StateStorage,
    record_of,
)
from colossal_lite.schedule.plan import DISK, Action, ActionKind
from colossal_lite.schedule.update_mix import ALL_ON_DEVICE, UpdateMix


class OffloadedOptimizerStates:
    """The records of all chunks that rest off the device, with the slots and links for copies to it."""

    def __init__(
        self, chunks: Sequence[Chunk], states: Sequence[Mapping[str, torch.dtype]], timeout_s: float,
        speeds: LinkSpeeds, places: TaskRecords, *, mix: UpdateMix = ALL_ON_DEVICE,
        on_disk: Collection[int] | None = None, open_file: OpenFile | None = None,
        shares: bool = False,
    ) -> None:  # fmt: skip
        """`states`: for each chunk its state tensors, which begin as zeros, by name and dtype; no copy is faster than
        `speeds`; records rest in `places`, but those of the chunks `on_disk` (None: none ever does) in what `open_file`
        makes (None: nowhere; nothing is ever read or written); `mix`: those updated on the host are not copied to the
        device; `shares`: there are no places on the device before `settle_places`. Raises DiskError."""
        self._chunks, self._mix = tuple(chunks), mix
        self._records = tuple(record_of(chunk, some) for chunk, some in zip(chunks, states, strict=True))
        self._dtype, device = chunks[0].types.state, chunks[0].device
        self._device = device
        self._host = HostStorage(self._records, self._dtype, self._chunks, places)
        self.disk: DiskStorage | None = None
        """None where no record ever rests on disk."""
        if on_disk is not None:
            self.disk = DiskStorage(self._records, self._dtype, device, open_file, speeds.disk, timeout_s)
        is_all = self.disk is not None and len(on_disk or ()) == len(self._chunks)
        self._default_storage: StateStorage = self.disk if self.disk is not None and is_all else self._host
        on_disk_now = {index for index in on_disk or () if self._records[index].size}
        self.storage_of: dict[int, StateStorage] = {
            index: self.disk if self.disk is not None and index in on_disk_now else self._host
            for index, record in enumerate(self._records)
            if record.size
        }
        """Where the record of each chunk rests that does not stay on the device."""
        self.staging_places = ArenaAllocator((), self._dtype, device)
        """Places on the device for copies of records."""
        if not shares:
            self.settle_places(None)
        self._here: dict[int, Tensor] = {}
        self._incoming: dict[int, Transfer] = {}
        self.up = Link("h2d", executor_for(device, speeds.up), timeout_s=timeout_s)
        self.down = Link("d2h", executor_for(device, speeds.down), timeout_s=timeout_s)
        if self.disk is not None:
            self.disk.begin(on_disk_now)
        for index, storage in self.storage_of.items():
            # One after the other: the chunk frees its own masters as soon as they are copied.
            storage.take_in(index, partial(_fill_master, self._chunks[index]))
            self.at_rest(index)

    def move(self, action: Action) -> None:
        """Begin what an action of the plan beside UPDATE says."""
        ways = {ActionKind.FETCH: (self.fetch, self.read), ActionKind.EVICT: (self.evict, self.write)}
        ways[action.kind][action.resource == DISK](action.chunk or 0)

    # ---- what rests where ----

    def tier_of(self, index: int) -> str:
        """Where the record of a chunk rests that does not stay on the device; or would, if it has none."""
        return self.storage_of.get(index, self._default_storage).tier

    @property
    def on_disk(self) -> frozenset[int]:
        """Chunks whose records rest there."""
        return frozenset() if self.disk is None else self.disk.resting

    @property
    def on_host(self) -> frozenset[int]:
        """Chunks with a record that are updated on the host."""
        return self._mix.on_host & {*self.storage_of}

    def record_bytes(self, tier: str) -> int:
        """Of all records that rest on a tier."""
        there = (index for index, storage in self.storage_of.items() if storage.tier == tier)
        return sum(self._records[index].size for index in there) * self._dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Of the places, and of the slots."""
        return self.record_bytes("host") + (self.disk.host_bytes if self.disk else 0)

    def follow(self, mix: UpdateMix) -> None:
        """Copy to the device what this mix updates there, through places of its own. Nothing may be on its way."""
        self.flush()
        self._mix = mix
        self.settle_places(None)

    def settle_places(self, arena: Arena | None) -> None:
        """Allocate places on the device for copies of records, in `arena`; None: in one of their own."""
        self.staging_places = ArenaAllocator((), self._dtype, self._device)  # the old ones go first
        visiting, width = sorted({*self.storage_of} - self.on_host), self._dtype.itemsize
        sizes = {index: self._records[index].size * width for index in visiting}
        ranges = VISITING[StateKind.OPTIMIZER].wide(self._mix.record_width).live_ranges(sizes)
        self.staging_places = ArenaAllocator(ranges, self._dtype, self._device, arena)

    @property
    def links(self) -> tuple[Link, ...]:
        return self.up, self.down, *(self.disk.links if self.disk else ())

    @property
    def _storages(self) -> tuple[StateStorage, ...]:
        return (self._host, self.disk) if self.disk else (self._host,)

    # ---- in a step ----

    def read(self, index: int) -> None:
        """Begin to read a record from disk; nothing if that has begun."""
        if self.disk is not None and index in self.disk.resting and index not in self._here:
            self.disk.settle()
            self.disk.read(index)

    def fetch(self, index: int) -> None:
        """Begin to bring a record to the device; nothing if that has begun."""
        if index in self.storage_of and index not in self._here:
            self.storage_of[index].leave(index, partial(self._copy_in, index))

    def here(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk on the device, whose master is there too from now on."""
        if index not in self.storage_of:
            return {}
        self._incoming.pop(index).wait()
        return self._without_master(index, self._records[index].parts(self._here[index]))

    def evict(self, index: int) -> None:
        """Begin to take a record back to the host."""
        if index in self.storage_of:
            self.storage_of[index].come_back(index, partial(self._take_back, index))
            self.at_rest(index)

    def write(self, index: int) -> None:
        """Begin to write a record to disk."""
        if self.disk is not None and index in self.disk.resting:
            self.disk.write(index)

    def flush(self) -> None:
        """Wait until every record is valid where it rests; drop what was fetched and not updated."""
        read = [transfer for storage in self._storages for transfer in storage.drop()]
        dropped = list[Transfer]()
        for index in tuple(self._here):
            if (coming := self._incoming.pop(index, None)) is not None:
                dropped.append(coming)
                if coming.revoke():
                    for feeding in coming.after:
                        if feeding.is_prefetch:
                            feeding.revoke()
            del self._here[index]
            self.staging_places.give(index, *() if coming is None else (coming,))
        for storage in self._storages:
            storage.finish()
        for transfer in (*dropped, *read):
            _finish_before(transfer)
        if self.disk is not None:
            self.disk.rest()

    def close(self) -> None:
        self.up.close()
        self.down.close()
        if self.disk is not None:
            self.disk.close()

    def defer(self) -> None:
        """A step has ended whose updates of all records have yet to come. No other process reads the file."""
        self._host.defer()

    # ---- between steps ----

    def check(self) -> None:
        """Raise the DiskError that has ended the use of these records, if there is one."""
        if self.disk is not None:
            self.disk.check()

    def at_rest(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk between steps: where there is no memory of it, its shapes on the meta device."""
        storage = self.storage_of.get(index)
        return {} if storage is None else self._without_master(index, storage.at_rest(index))

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        """All parts of a record in host memory, until some others are asked for; to be changed if `write`. Raises
        DiskError."""
        self.check()
        self.flush()
        storage = self.storage_of.get(index)
        return {} if storage is None else storage.opened(index, write=write)

    def settle(self) -> None:
        """Write changes between steps back to where the records rest. Raises DiskError."""
        for storage in self._storages:
            storage.settle()

    # ---- once ----

    def release(self, index: int) -> None:
        """A record rests on the device from now on: what it took is given back. Nothing may be on its way;
        `settle_storages` follows."""
        self.settle()
        if (storage := self.storage_of.pop(index, None)) is not None:
            storage.release(index)

    def settle_storages(self, on_disk: Collection[int]) -> None:
        """Store the remaining records of the chunks `on_disk` there, and the others on the host. Slots there are as
        large as they need; `settle_places` follows. Raises DiskError."""
        self.flush()
        self.staging_places = ArenaAllocator((), self._dtype, self._device)
        if self.disk is not None:
            there = {*on_disk} & {*self.storage_of}
            moved = (there - self.disk.resting) | (self.disk.resting - there)
            self.disk.make_slots(moved, 1)
            largest_first = sorted(moved, key=lambda index: (index not in there, -self._records[index].size))
            for index in largest_first:
                self._move(index, self.disk if index in there else self._host)
            self.disk.make_slots(there)

    def _move(self, index: int, storage: StateStorage) -> None:
        before = self.storage_of[index]
        parts = before.opened(index, write=False)

        def fill(empty: dict[str, Tensor]) -> None:
            for name, part in parts.items():
                empty[name].copy_(part)

        storage.take_in(index, fill)
        before.settle()
        before.release(index)
        self.storage_of[index] = storage
        self.at_rest(index)

    # ---- how ----

    def _copy_in(self, index: int, source: Tensor, *after: Transfer) -> Transfer:
        slot, emptied = self.staging_places.take(index)
        self._here[index] = slot
        self._incoming[index] = transfer = self.up.copy(
            slot[: source.numel()], source, after=(*emptied, *after), prefetch=True
        )
        return transfer

    def _take_back(
        self, index: int, target: Tensor, *after: Transfer, then: Callable[[], object] | None = None
    ) -> Transfer:
        slot = self._here.pop(index)
        transfer = self.down.copy(target, slot[: target.numel()], after=after, then=then)
        self.staging_places.give(index, transfer)
        return transfer

    def _without_master(self, index: int, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The other parts; the chunk has its master in these."""
        if (words := parts.pop(MASTER, None)) is not None:
            self._chunks[index].rest_master(words)
        return parts


def _fill_master(chunk: Chunk, parts: Mapping[str, Tensor]) -> None:
    """States begin as zeros, masters as they are."""
    if MASTER in parts:
        parts[MASTER].copy_(chunk.master_words)


def _finish_before(dropped: Transfer) -> None:
    """What a copy that was dropped came after has ended: its record's way back is among it. A thread that has begun the
    copy has seen that end."""
    if dropped.is_revoked or dropped.link.executor.on_stream:
        dropped.finish()
