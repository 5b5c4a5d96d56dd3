"""Optimizer state that rests on the host and visits the device for its update.

Note: records and slots.
A chunk has a record: its state tensors and, where masters are apart from the weights, its master, side by side in one
buffer of the host arena, so that a visit is one copy each way.  On the device there are `AHEAD + 2` slots as large as
the largest record: one is updated, `AHEAD` are filled, one is emptied.  A slot is refilled only when the copy out of it
is done, a record is read only when the copy into it is done (`Transfer`s say so), and all copies are done when the step
ends.  What is computed, and in which order, is the same as without tiers: so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.mover import Link, LinkSpeed, Transfer

AHEAD = 1
SLOTS = AHEAD + 2
# As fast as the machine copies; tests emulate slower ones.
LINK = LinkSpeed()


@dataclass(frozen=True)
class Record:
    """One chunk's state: names of its parts, each of `numel` elements, and all of them on the host."""

    names: tuple[str, ...]
    numel: int
    host: Tensor

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a buffer that holds such a record."""
        return {name: flat[i * self.numel : (i + 1) * self.numel] for i, name in enumerate(self.names)}


MASTER = "master"


class HostStates:
    """The records of all chunks, and the slots and links by which they come and go."""

    def __init__(self, chunks: Sequence[Chunk], states: Sequence[Sequence[str]], timeout_s: float) -> None:
        self._chunks = tuple(chunks)
        self._records: list[Record] = []
        shapes = [
            (
                (*names, MASTER) if chunk.master is not chunk.own_value else tuple(names),
                chunk.owned[1] - chunk.owned[0],
            )
            for chunk, names in zip(chunks, states, strict=True)
        ]
        dtype, device = chunks[0].gradient.dtype, chunks[0].gradient.device
        host = torch.device("cpu") if device.type != "meta" else device
        self._arena = torch.zeros(
            sum(len(names) * numel for names, numel in shapes), dtype=dtype, device=host
        )
        start = 0
        for chunk, (names, numel) in zip(self._chunks, shapes, strict=True):
            record = Record(names, numel, self._arena[start : start + len(names) * numel])
            start += len(names) * numel
            self._records.append(record)
            if MASTER in names:
                assert chunk.master.dtype == dtype, "masters and states are of one width"
                rest = record.parts(record.host)[MASTER]
                rest.copy_(chunk.master)
                chunk.master = rest
        largest = max(len(names) * numel for names, numel in shapes)
        self._free = list(torch.zeros(SLOTS, largest, dtype=dtype, device=device)) if largest else []
        self._slots_bytes = SLOTS * largest * dtype.itemsize
        self._here: dict[int, Tensor] = {}
        self._incoming: dict[int, Transfer] = {}
        self._outgoing: list[Transfer] = []
        self._emptied: dict[int, Transfer] = {}  # slot (by address) -> the copy out of it
        self.up, self.down = Link("h2d", LINK, timeout_s=timeout_s), Link("d2h", LINK, timeout_s=timeout_s)

    @property
    def host_bytes(self) -> int:
        return self._arena.numel() * self._arena.element_size()

    @property
    def device_bytes(self) -> int:
        return self._slots_bytes

    def at_rest(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk on the host, between steps."""
        return {n: t for n, t in self._records[index].parts(self._records[index].host).items() if n != MASTER}

    def fetch(self, index: int) -> None:
        """Begin to bring a record to the device."""
        record = self._records[index]
        if not record.names:
            return
        slot = self._free.pop(0)
        self._here[index] = slot
        before = self._emptied.pop(slot.data_ptr(), None)
        self._incoming[index] = self.up.copy(slot[: record.host.numel()], record.host, after=before)

    def here(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk on the device, whose master is there too from now on."""
        record = self._records[index]
        if not record.names:
            return {}
        self._incoming.pop(index).wait()
        parts = record.parts(self._here[index])
        if (master := parts.pop(MASTER, None)) is not None:
            self._chunks[index].master = master
        return parts

    def evict(self, index: int) -> None:
        """Begin to take a record back to the host."""
        record = self._records[index]
        if not record.names:
            return
        slot = self._here.pop(index)
        transfer = self.down.copy(record.host, slot[: record.host.numel()])
        self._emptied[slot.data_ptr()] = transfer
        self._outgoing.append(transfer)
        self._free.append(slot)
        if MASTER in record.names:
            self._chunks[index].master = record.parts(record.host)[MASTER]

    def flush(self) -> None:
        """Every record is whole on the host."""
        for transfer in self._outgoing:
            transfer.wait()
        self._outgoing.clear()
        self._emptied.clear()

    def close(self) -> None:
        self.up.close()
        self.down.close()
