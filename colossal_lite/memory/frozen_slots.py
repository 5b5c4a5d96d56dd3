"""Lends slots on the device for frozen weights that several engines read, and loads each only where it is not there.

Note: one arena for all tasks of a device, as large as the largest plan of one task.  A slot has the offset of the plan.
It keeps what was copied there until another chunk takes some of its bytes.  An engine that asks for the same record at
the same offset finds it, and waits for the same copy.  Tasks that run by turns (schedule/abreast.py) so load a stage
once for all.  No engine may take bytes that another still reads; plans of tasks by turns never do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.memory.frozen_records import FrozenRecord
from colossal_lite.memory.link import Transfer
from colossal_lite.memory.pinned import zeros_on


@dataclass
class _Slot:
    record: FrozenRecord
    start_bytes: int
    stop_bytes: int
    copy: Transfer
    users: int = 0


class FrozenSlots:
    """The slots of one device."""

    def __init__(self) -> None:
        self.arena: Tensor | None = None
        self._slots: list[_Slot] = []

    @property
    def bytes(self) -> int:
        return 0 if self.arena is None else self.arena.nbytes

    def reserve(self, size_bytes: int, device: torch.device) -> None:
        """Make the arena at least so large. A larger one takes the place of one that no engine reads."""
        if size_bytes <= self.bytes:
            return
        assert not any(slot.users for slot in self._slots), "an arena in use cannot grow"
        for slot in self._slots:
            slot.copy.finish()  # which writes there
        self._slots.clear()
        self.arena = None  # before there is another
        self.arena = zeros_on(device, size_bytes, torch.uint8)

    def take(
        self, record: FrozenRecord, start_bytes: int, copy: Callable[[Tensor], Transfer]
    ) -> tuple[Tensor, Transfer]:
        """The slot of a record, and the copy that fills it, which `copy` begins if need be. Raises RuntimeError."""
        stop_bytes = start_bytes + record.flat.nbytes
        assert self.arena is not None and stop_bytes <= self.bytes
        view = self.arena[start_bytes:stop_bytes].view(record.flat.dtype)
        met = [s for s in self._slots if s.start_bytes < stop_bytes and start_bytes < s.stop_bytes]
        for slot in met:
            if slot.record is record and slot.start_bytes == start_bytes:
                slot.users += 1
                return view, slot.copy
        if any(slot.users for slot in met):
            raise RuntimeError(
                "frozen weights: another engine reads the place of a chunk on the device. Engines of one store take "
                "turns between steps, or by a plan of schedule/abreast.py"
            )
        self._slots = [slot for slot in self._slots if slot not in met]
        for slot in met:  # whose copy may be on its way
            slot.copy.finish()
        self._slots.append(_Slot(record, start_bytes, stop_bytes, copy(view), 1))
        return view, self._slots[-1].copy

    def give(self, record: FrozenRecord, start_bytes: int) -> None:
        """An engine reads a slot no more. Its bytes stay until they are needed."""
        next(s for s in self._slots if s.record is record and s.start_bytes == start_bytes).users -= 1

    def forget(self, record: FrozenRecord) -> None:
        """A record changes, or its memory is freed."""
        for slot in [slot for slot in self._slots if slot.record is record]:
            assert not slot.users, "a record that an engine reads stays as it is"
            slot.copy.finish()
            self._slots.remove(slot)
