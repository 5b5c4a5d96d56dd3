"""Buffers that a step needs for a while: taken from what was set aside at the start.

Note: slots.
A slot holds one chunk's gradient while that fills, or what other ranks sent of it.  When each chunk needs its slot is
planned, so every slot has a place in one allocation that no other slot has at the same time (memory/pack.py), and the
allocation is as large as the worst moment.  A model that does not keep to the plan (parameters that no backward
reaches hold their chunk open) gets further buffers, which are kept and counted: a wrong forecast shows in
`memory_report`, a wrong number never.  What a first micro-batch takes beyond the plan is given back (`shrink`).

Note: what shares memory, and what does not.
Each kind has one allocation in which whatever is needed at different moments overlaps: gradients that fill, what comes
of other ranks' (`Slots`), gathered weights (zero/unshard.py), records, weights and gradients that visit for an update
(mover.py `Places`).  Kinds do not share with each other, though gradients that fill and visitors are never there at
once: where weights are gathered, the moments are known only when the first micro-batch has shown them, and by then the
others are in use.  One allocation for all of a 124M GPT in bf16 on 2 ranks would take, by the same packing, at stage 3
232 MB in place of 307 on the device, 457 of 543 with state on the host, and 412 of 720 with everything there; at
stages 1 and 2 with state on the host 2 to 4 % less.

Note: high water.
What a plan asks for and what a step really takes are counted apart: the furthest element that any taken slot has
reached, and the most elements that were taken at once.  A plan that is right has both equal: a slot that nobody takes,
or an interval that is longer than it is needed, is a wrong plan, though no number is wrong.  Cost: a sum over the slots
that are taken, whenever one is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossal_lite.memory.pack import Interval, most_held, pack_intervals


class Slots:
    """One slot for each interval, whose `numel` it has; those that are needed at different moments may overlap."""

    def __init__(self, intervals: Sequence[Interval], dtype: torch.dtype, device: torch.device) -> None:
        self._offsets, self.numel = pack_intervals(intervals)
        self.planned_held_numel = most_held(intervals)
        """Elements taken at once, at the most, by the plan."""
        self.most_held_numel = 0
        """As it really was."""
        self._most_numel = 0
        self._numels = [one.numel for one in intervals]
        self._dtype, self._device = dtype, device
        self._arena = torch.zeros(self.numel, dtype=dtype, device=device)
        self._taken: dict[int, Tensor | None] = {}  # slot -> the further buffer that it has, or None
        self._spare: list[Tensor] = []
        self._further_numel = 0

    def take(self, slot: int) -> Tensor:
        """The elements of a slot; they hold whatever they held."""
        assert slot not in self._taken, f"slot {slot} is taken"
        numel, start = self._numels[slot], self._offsets[slot]
        if self._is_free(start, start + numel):
            self._taken[slot] = None
            self._count()
            return self._arena[start : start + numel]
        at = next((i for i, spare in enumerate(self._spare) if spare.numel() >= numel), None)
        if at is None:
            self._further_numel += numel
            further = torch.zeros(numel, dtype=self._dtype, device=self._device)
        else:
            further = self._spare.pop(at)
        self._taken[slot] = further
        self._count()
        return further[:numel]

    def give(self, slot: int) -> None:
        """Hand a slot back. Nothing may read it any more."""
        assert slot in self._taken, f"slot {slot} was given back twice"
        if (further := self._taken.pop(slot)) is not None:
            self._spare.append(further)

    def shrink(self) -> None:
        """Let go of all that was not planned; no slot may be taken."""
        assert not self._taken, f"slots {sorted(self._taken)} are in use"
        self._spare.clear()
        self._further_numel = self._most_numel = self.most_held_numel = 0

    def _count(self) -> None:
        reached = (
            self._offsets[s] + self._numels[s] for s, further in self._taken.items() if further is None
        )
        beyond = sum(further.numel() for further in self._taken.values() if further is not None)
        self._most_numel = max(self._most_numel, max(reached, default=0) + beyond)
        self.most_held_numel = max(self.most_held_numel, sum(self._numels[slot] for slot in self._taken))

    @property
    def bytes(self) -> int:
        return (self.numel + self._further_numel) * self._dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """As far as any slot has reached since `shrink`, with what was taken beyond the plan."""
        return self._most_numel * self._dtype.itemsize

    @property
    def planned_bytes(self) -> int:
        return self.numel * self._dtype.itemsize

    def _is_free(self, start: int, stop: int) -> bool:
        return all(
            further is not None
            or stop <= self._offsets[slot]
            or self._offsets[slot] + self._numels[slot] <= start
            for slot, further in self._taken.items()
        )


class Pool:
    """Equal buffers of `numel` elements, of which any will do: `planned` of them from the start, more if they are
    asked for. What a pipeline's messages arrive in."""

    def __init__(self, numel: int, planned: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._dtype, self._device = dtype, device
        self._free = list(torch.zeros(planned if numel else 0, max(numel, 1), dtype=dtype, device=device))
        self._planned = self._count = len(self._free)
        self._taken = 0
        self.most_taken = 0
        """Buffers in use at once, at the most so far."""

    def take(self, numel: int) -> Tensor:
        """The first `numel` elements of a free buffer; they hold whatever they held."""
        assert numel <= self.numel, f"a buffer of {self.numel} elements cannot hold {numel}"
        if not self._free:
            self._count += 1
            self._free.append(torch.zeros(self.numel, dtype=self._dtype, device=self._device))
        self._taken += 1
        self.most_taken = max(self.most_taken, self._taken)
        buffer: Tensor = self._free.pop()
        return buffer[:numel]

    def give(self, buffer: Tensor) -> None:
        """Hand back what `take` gave. Nothing may read it any more."""
        self._free.append(buffer.as_strided((self.numel,), (1,), buffer.storage_offset()))
        self._taken -= 1
        assert self._taken >= 0, "a buffer was given back twice"

    @property
    def bytes(self) -> int:
        return self._count * self.numel * self._dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """Of the buffers in use at once, at the most so far."""
        return self.most_taken * self.numel * self._dtype.itemsize

    @property
    def planned_bytes(self) -> int:
        return self._planned * self.numel * self._dtype.itemsize
