"""Holds frozen weights that rest on the host in a record that equal ones share.

Note: a chunk of frozen weights that stays on the device is a plain `WeightChunk`.  One that can rest on the host has no
memory of its own.  When it adopts its parameters it takes the record of equal names and values, or makes one
(memory/frozen_records.py).  Nothing writes in a record that others use: values that differ are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.frozen_records import FrozenRecord, record_name
from colossal_lite.memory.link import Link
from colossal_lite.memory.packing import Entry
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.transfers import copy_into
from colossal_lite.memory.weight_chunk import Values, WeightChunk, WeightState

BLOCK_NUMEL = 1 << 20


class FrozenChunk(WeightChunk):
    """The frozen weights of one `ChunkSpec` on this rank."""

    record: FrozenRecord | None = None
    """Where its shard rests; None: on the device, or its values are its own."""
    base: str | None = None
    """The stated name of the weights that this chunk is a part of."""
    _start_bytes: int | None = None  # of its slot in the shared arena, while it has one
    world: Communicator | None = None
    """All ranks of the engine: each has its own part of such weights."""

    def _room(self, kind: str, numel: int, dtype: torch.dtype, *, rests: bool) -> Tensor:
        """As for all chunks; on the host its values say where it rests."""
        if rests:
            return torch.empty(numel, dtype=dtype, device="meta")
        return super()._room(kind, numel, dtype, rests=rests)

    def adopt(self, parameters: Mapping[str, nn.Parameter], initial: Values | None) -> None:
        """As for all chunks. Raises FrozenError for values that differ from those of the stated base."""
        if self.weights_at_rest is None or self.device.type == "meta" or initial is None:
            return super().adopt(parameters, initial)
        assert self._records is not None
        shapes = [(e.name, e.start, e.stop, [*parameters[e.name].shape]) for e in self.spec.entries]
        place = (self.world.size, self.world.rank) if self.world is not None else (1, 0)
        numel, dtype = self.owned_numel, self.types.compute
        self.record = self._records.take_frozen(
            record_name(self.base, str(dtype), self.owned, place, shapes), numel, dtype,
            same=lambda flat: self._difference(flat, initial), fill=lambda flat: self._fill_all(flat, initial),
            base=self.base,
        )  # fmt: skip
        self.local_shard = self.weights_at_rest = self.record.flat
        super().adopt(parameters, None)

    def _blocks(self, initial: Values) -> Iterator[tuple[Entry, slice, Tensor]]:
        """This rank's part of each parameter by blocks: the elements of the shard, and values on the host."""
        for entry in self.spec.entries:
            local, first = self.part_of(entry) or (slice(0, 0), 0)
            for start in range(local.start, local.stop, BLOCK_NUMEL):
                stop = min(start + BLOCK_NUMEL, local.stop)
                values = initial(entry.name, first + start - local.start, first + stop - local.start)
                yield entry, slice(start, stop), self._kept(values)

    def _kept(self, values: Tensor) -> Tensor:
        kept = torch.empty(values.numel(), dtype=self.types.compute)
        copy_into(kept, values.reshape(-1))
        return kept

    def _fill_all(self, flat: Tensor, initial: Values) -> None:
        for _, place, values in self._blocks(initial):
            flat[place] = values

    def _difference(self, flat: Tensor, initial: Values) -> str | None:
        """How `flat` has other bits."""
        blocks = self._blocks(initial)
        name = next((entry.name for entry, at, values in blocks if not same_bits(flat[at], values)), None)
        return None if name is None else f"the frozen weights {name} differ from those of"

    def load_own(self, local: slice, own: Tensor) -> None:
        """Set elements `local` of the shard. Raises FrozenError where others have the old ones."""
        if self.record is not None:
            values = self._kept(own)
            if same_bits(self.local_shard[local], values):
                return
            assert self._records is not None
            names = [e.name for e in self.spec.entries if e.start <= local.start + self.owned[0] < e.stop]
            self._records.frozen.take_alone(self.record, ", ".join(names))
            if self._records.slots is not None:
                self._records.slots.forget(self.record)
            own = values
        super().load_own(local, own)

    @property
    def shares_slots(self) -> bool:
        """Whether its slot on the device is one that all engines of the store share."""
        has_slots = self._records is not None and self._records.slots is not None
        return has_slots and self.record is not None and self.shards.size == 1

    def fetch_shared(self, offset: int, up: Link) -> None:
        """As `fetch`, to the slot at this element of the shared arena, lent until `reshard`."""
        assert self.record is not None and self._records is not None
        self.move_weights(WeightState.FETCHING)
        self._start_bytes = offset * self.record.flat.itemsize
        source = self.record.flat
        self._value, self._incoming = self._records.take_slot(
            self.record, self._start_bytes, lambda slot: up.copy(slot, source, prefetch=True)
        )

    def reshard(self) -> None:
        """As for all chunks. A copy to a shared slot goes on: other engines may wait for it."""
        if self._start_bytes is not None and self.weights is WeightState.FETCHING:
            self._incoming = None
        super().reshard()
        if self._start_bytes is not None:
            assert self.record is not None and self._records is not None
            self._records.give_slot(self.record, self._start_bytes)
            self._start_bytes = None

    def _gone(self, kind: str) -> None:
        if self.record is not None and self._records is not None:
            self._records.give_frozen(self.record)
            self.record = None


def state_base(
    records: TaskRecords,
    base: str,
    form: Mapping[str, tuple[Sequence[int], torch.dtype]],
    world: Communicator,
) -> None:
    """State the shapes and dtypes of this rank's frozen weights, by name, under the name of a base. Raises FrozenError
    if another engine has stated others."""
    rows = {name: [[*shape], str(dtype)] for name, (shape, dtype) in sorted(form.items())}
    stated = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)

    def difference(flat: Tensor) -> str | None:
        others = json.loads(bytes(flat.tolist()))
        for name in {**others, **rows}:
            here, there = (" ".join(map(str, of.get(name, ["not frozen"]))) for of in (rows, others))
            if here != there:
                return f"{name} is {here} here, and {there} in"
        return None

    records.take_frozen(
        record_name("form", base, world.size, world.rank), stated.numel(), torch.uint8, same=difference,
        fill=lambda flat: flat.copy_(stated), base=base,
    )  # fmt: skip


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [numel] of one dtype have the same bits."""
    ends = [n for t in (one, other) for n in (t.nbytes, t.storage_offset() * t.itemsize)]
    word = torch.uint8 if any(n % 8 for n in ends) else torch.int64  # whose comparison is six times as quick
    return torch.equal(one.view(word), other.view(word))
