"""Buffers that a step needs for a while: taken from what was set aside at the start.

Note: slots.
A slot holds one chunk's gathered weights, its gradient while that fills, or what other ranks sent of it.  How many are
needed at once is planned, and these are one allocation.  A model that does not keep to the plan (parameters that no
backward reaches hold their chunk open) gets further slots, which are kept and counted: a wrong forecast shows in
`memory_report`, a wrong number never.  What a first micro-batch takes beyond the plan is given back (`shrink`).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Slots:
    """Flat buffers of `numel` elements: `planned` of them from the start."""

    def __init__(self, numel: int, planned: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._dtype, self._device = dtype, device
        slots = torch.zeros(planned if numel else 0, max(numel, 1), dtype=dtype, device=device)
        self._free: list[Tensor] = list(slots)
        self._storage = slots.untyped_storage()._cdata
        self._count, self._taken, self._most = len(self._free), 0, 0

    def take(self, numel: int) -> Tensor:
        """The first `numel` elements of a free slot; they hold whatever they held."""
        assert numel <= self.numel, f"a slot of {self.numel} elements cannot hold {numel}"
        if not self._free:
            self._count += 1
            self._free.append(torch.zeros(self.numel, dtype=self._dtype, device=self._device))
        self._taken += 1
        self._most = max(self._most, self._taken)
        return self._free.pop()[:numel]

    def give(self, buffer: Tensor) -> None:
        """Hand back a buffer that `take` gave. Nothing may read it any more."""
        slot: Tensor = buffer.as_strided((self.numel,), (1,), buffer.storage_offset())
        self._free.append(slot)
        self._taken -= 1
        assert self._taken >= 0, "a slot was given back twice"

    def shrink(self) -> None:
        """Let go of the slots beyond the planned ones; none may be taken."""
        assert self._taken == 0, f"{self._taken} slots are in use"
        self._free = [slot for slot in self._free if slot.untyped_storage()._cdata == self._storage]
        self._count = len(self._free)

    @property
    def most_taken(self) -> int:
        """Slots in use at once, at the most so far."""
        return self._most

    @property
    def bytes(self) -> int:
        return self._count * self.numel * self._dtype.itemsize
