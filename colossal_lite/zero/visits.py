"""Weights and gradients that rest on the host: how they visit the device for an update, and how gradients leave it.

Note: three ways over the link.
In a forward or backward a shard comes into its slot of the gathered weights, and goes with it: nothing has changed
(`Chunk.fetch`).  A sum of gradients leaves through an outbox, two buffers on the device, and is added on the host to
those of the micro-batches before, in their order: the same bits as on the device.  On a GPU its
squares are taken before it leaves, or, of several sums, from what comes back for it: a CPU's would have other bits
(`Chunk.squares`).  For its update, with the optimizer's
record (zero/tiers.py), a chunk's gradient and, where they are their own masters or a half of them, its weights come
into slots, and the weights go back.  Weights beside whole masters are written whole and need not come.  There are as
many slots as records: one is updated, `AHEAD` are filled, one is emptied.  Whoever reads a chunk's `own_value`,
`master` or `gradient` between steps reads what is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.host import host_room
from colossal_lite.memory.lane import ThreadLane
from colossal_lite.memory.mover import Buffers, Link, Outbox, Priority, Transfer
from colossal_lite.memory.store import WEIGHTS, TaskRecords
from colossal_lite.zero.budget import OUTGOING, VISITORS


class HostShards:
    """The slots of chunks whose weights or gradients rest on the host, and the links by which they come and go."""

    def __init__(self, chunks: Sequence[Chunk], up: Link, down: Link, places: TaskRecords) -> None:
        """`places`: what rests on the host lies there."""
        self._chunks, self._up, self._down, self._places = tuple(chunks), up, down, places
        self._incoming: dict[int, list[Transfer]] = {}
        self._weights_here: dict[int, tuple[Tensor, tuple[Transfer, ...]]] = {}
        self._gradients_here: dict[int, Tensor] = {}
        self._outgoing: list[Transfer] = []
        self._adds = Link("add", ThreadLane(), timeout_s=down.timeout_s)
        self.device_bytes = self.host_bytes = 0
        """Of the slots, and of what sums land in."""
        self.settle()

    def settle(self) -> None:
        """As many and as large slots as what rests on the host now needs. Nothing may be on its way."""
        self.device_bytes = 0
        self._weight_slots = self._gradient_slots = Buffers(())  # the old ones go first
        weights = [c.weights_at_rest for c in self._chunks if c.weights_at_rest is not None]
        gradients = [c.gradient_at_rest for c in self._chunks if c.gradient_at_rest is not None]
        self._weight_slots = Buffers(self._slots(VISITORS, weights))
        self._gradient_slots = Buffers(self._slots(VISITORS, gradients))
        landings = self._landings(gradients)
        outbox = Outbox(self._down, self._adds, self._slots(OUTGOING, gradients), landings)
        for chunk in self._chunks:
            chunk.outbox = outbox if chunk.gradient_at_rest is not None else None

    @property
    def links(self) -> tuple[Link, ...]:
        """Beside those up and down."""
        return (self._adds,) if self._down.lane.on_stream else ()

    @property
    def moving(self) -> set[int]:
        """Chunks of which something rests on the host."""
        return {
            index
            for index, chunk in enumerate(self._chunks)
            if chunk.weights_at_rest is not None or chunk.gradient_at_rest is not None
        }

    @property
    def forecast_bytes(self) -> int:
        """By the formula: of the slots, each for the largest shard of its kind."""
        weights = [
            _owned(c) * c.own_value.element_size() for c in self._chunks if c.weights_at_rest is not None
        ]
        gradients = [
            _owned(c) * c.gradient.element_size() for c in self._chunks if c.gradient_at_rest is not None
        ]
        return VISITORS * max(weights, default=0) + (VISITORS + OUTGOING) * max(gradients, default=0)

    def fetch(self, index: int) -> None:
        """Begin to bring to the device what the update of a chunk reads."""
        chunk = self._chunks[index]
        self._incoming[index] = []
        if (weights := chunk.weights_at_rest) is not None:
            slot, before = self._weight_slots.take()
            self._weights_here[index] = slot, before
            if chunk.updates_weights:
                self._bring(index, slot, weights, before)
        if (gradient := chunk.gradient_at_rest) is not None:
            slot, before = self._gradient_slots.take()
            self._gradients_here[index] = slot
            self._bring(index, slot, gradient, before)

    def _bring(self, index: int, slot: Tensor, source: Tensor, before: Sequence[Transfer]) -> None:
        coming = self._up.copy(slot[: source.numel()], source, after=before, priority=Priority.PREFETCH)
        self._incoming[index].append(coming)

    def here(self, index: int, *, is_whole: bool) -> None:
        """A chunk's shards are on the device until `evict`. `is_whole`: the update will write all of the weights."""
        chunk = self._chunks[index]
        for transfer in self._incoming.pop(index, ()):
            transfer.wait()
        if (weights := chunk.weights_at_rest) is not None:
            slot, before = self._weights_here[index]
            slot = slot[: weights.numel()]
            if chunk.master is weights:
                chunk.master = slot
            elif not chunk.updates_weights:
                for transfer in before:
                    transfer.wait()
                if not is_whole:
                    slot.copy_(chunk.master)
            chunk.own_value = slot
        if (gradient := chunk.gradient_at_rest) is not None:
            chunk.gradient = self._gradients_here[index][: gradient.numel()]

    def evict(self, index: int) -> None:
        """Begin to take the weights back to the host; a gradient is used up."""
        chunk = self._chunks[index]
        if (weights := chunk.weights_at_rest) is not None:
            slot, _ = self._weights_here.pop(index)
            landed = partial(self._places.commit, chunk.spec.id, WEIGHTS)
            transfer = self._down.copy(weights, slot[: weights.numel()], then=landed)
            self._weight_slots.give(slot, transfer)
            self._outgoing.append(transfer)
            chunk.master = weights if chunk.master is chunk.own_value else chunk.master
            chunk.own_value = weights
        if chunk.gradient_at_rest is not None:
            self._gradient_slots.give(self._gradients_here.pop(index))
            chunk.gradient = chunk.gradient_at_rest

    def owe(self) -> None:
        """A step has ended whose updates of all weights have yet to come."""
        for chunk in self._chunks:
            if chunk.weights_at_rest is not None:
                self._places.begin(chunk.spec.id, WEIGHTS)

    def flush(self) -> None:
        """All weights are whole on the host."""
        while self._outgoing:
            self._outgoing.pop().finish()

    def close(self) -> None:
        self._adds.close()

    def _landings(self, rest: Sequence[Tensor]) -> list[Tensor]:
        """Where sums come down to be added; a thread adds as it copies, and needs none."""
        numel = max((tensor.numel() for tensor in rest), default=0) if self._down.lane.on_stream else 0
        landings = [
            host_room(numel, rest[0].dtype, self._chunks[0].device) for _ in range(OUTGOING if numel else 0)
        ]
        self.host_bytes = sum(landing.nbytes for landing in landings)
        return landings

    def _slots(self, count: int, rest: Sequence[Tensor]) -> list[Tensor]:
        if not rest:
            return []
        numel, dtype = max(tensor.numel() for tensor in rest), rest[0].dtype
        self.device_bytes += count * numel * dtype.itemsize
        return list(torch.zeros(count, numel, dtype=dtype, device=self._chunks[0].device))


def _owned(chunk: Chunk) -> int:
    return chunk.owned[1] - chunk.owned[0]
