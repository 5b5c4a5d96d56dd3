"""Copies weights and gradients of chunks on the host: to the device for updates, gradient sums out after backward.

Note: three copies over the link.
1. For a forward or backward, `Chunk.fetch` copies a shard to its slot of the gathered weights.  It is dropped with
   them.
2. A sum of gradients is copied out through a place on the device.  The host adds it to the sums of earlier
   micro-batches, in their order.  So the bits are those of the device.  A GPU computes the squares before that copy, or
   from the copied result of several sums.  A CPU's squares would have other bits (`Chunk.squares`).
3. For its update a chunk's gradient is copied to a place on the device, with the record (offload/optimizer_states.py).
   Weights that are their own masters, or the upper half of them, are copied too, and copied back.  Where a float32
   master exists, the update only writes the weights, so they are not fetched.
As many chunks in a row have places at once as records: one is updated, some are fetched, one is written back.
Gradients are not written back, and such weights are not fetched: both have one place less.  A chunk that is updated on
the host is not copied here (offload/host_updates.py).  Between steps `local_shard`, `master` and `gradient` of a chunk
are the tensors on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import ThreadExecutor
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.pinned import host_room
from colossal_lite.memory.task_records import WEIGHTS, TaskRecords
from colossal_lite.memory.transfers import GradientOffloadBuffer
from colossal_lite.offload.pieces import LEAVING, OUTGOING, VISITING, WRITTEN, StagingBuffer, StateKind
from colossal_lite.schedule.optimizer_updates import ChunkPart, Streaming

Resting = Mapping[int, Tensor]
"""The number of a chunk -> what of it is on the host."""


def landing_bytes(gradients: Sequence[int], device: torch.device) -> int:
    """Bytes of the host buffers that a GPU copies gradient sums into, before the host adds them.

    `gradients`: bytes of each gradient on the host. An emulated device needs none: a thread adds as it copies."""
    return min(OUTGOING, len(gradients)) * max(gradients, default=0) if device.type == "cuda" else 0


def streaming(chunk: Chunk, *, weights: bool, gradient: bool) -> Streaming:
    """The copies for an update of a chunk on the device. `weights`, `gradient`: whether these are on the host."""
    reads = (ChunkPart.WEIGHTS,) if weights and chunk.updates_weights else ()
    return Streaming(
        (*reads, *((ChunkPart.GRADIENT,) if gradient else ())), (ChunkPart.WEIGHTS,) if weights else ()
    )


class HostShardStream:
    """Copies weights and gradients between the host and places on the device."""

    def __init__(self, chunks: Sequence[Chunk], up: Link, down: Link, records: TaskRecords) -> None:
        """`records`: the host memory of the offloaded kinds."""
        self._chunks, self._up, self._down, self._records = tuple(chunks), up, down, records
        self._incoming: dict[int, list[Transfer]] = {}
        self._weights_here: dict[int, Tensor] = {}
        self._gradients_here: dict[int, Tensor] = {}
        self._adds = Link("add", ThreadExecutor(), timeout_s=down.timeout_s)
        self.host_bytes = 0
        """Bytes of the host buffers that sums are copied into."""
        self._on_host: frozenset[int] = frozenset()
        self.has_places = False
        """Whether there are places for updates."""

    def settle(self, on_host: Collection[int], arena: Arena | None, *, is_first: bool = False) -> None:
        """Allocate the places on the device for the tensors that are on the host now, in `arena`. No copy may run.

        `on_host`: chunks that are updated on the host, and need no places for it. Without an arena each kind has its
        own. `is_first`: there has been no update yet, so only places for sums are allocated."""
        self._on_host, self.has_places = frozenset(on_host), not is_first
        self.release_slots()
        kinds = self._kinds
        self._weight_slots, self._gradient_slots, leaving = (
            self._places(slot, resting, arena) for slot, resting in kinds
        )
        landings = self._landings([*kinds[-1][1].values()])
        self._offload_buffer = GradientOffloadBuffer(self._down, self._adds, leaving, landings)
        for chunk in self._chunks:
            chunk.offload_buffer = self._offload_buffer if chunk.gradient_at_rest is not None else None

    def release_slots(self) -> None:
        """Free all places on the device, before others are allocated."""
        nothing = self._places(LEAVING, {}, None)
        self._weight_slots = self._gradient_slots = nothing
        self._offload_buffer = GradientOffloadBuffer(self._down, self._adds, nothing)

    @property
    def device_bytes(self) -> int:
        """Bytes of the places outside a shared arena, and of those added beyond the plan."""
        return sum(places.bytes for places in self.staging_places)

    @property
    def most_device_bytes(self) -> int:
        """The most of `device_bytes` that was in use at once so far."""
        return sum(places.most_bytes for places in self.staging_places)

    @property
    def most_host_bytes(self) -> int:
        """The most bytes of host buffers that held sums at once so far."""
        return self._offload_buffer.landings.most_bytes

    @property
    def staging_places(self) -> tuple[ArenaAllocator, ...]:
        """The places on the device: of weights, of gradients for updates, and of sums that are copied out."""
        return self._weight_slots, self._gradient_slots, self._offload_buffer.places

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that this object adds to those up and down."""
        return (self._adds,) if self._down.executor.on_stream else ()

    @property
    def forecast_bytes(self) -> int:
        """Bytes of the places by the formula, while they are outside a shared arena."""
        return sum(slot.bytes(_sizes(resting)) for slot, resting in self._kinds)

    @property
    def _kinds(self) -> tuple[tuple[StagingBuffer, Resting], ...]:
        """The kinds of places, each with the tensors on the host that need one: of weights and of gradients for updates
        on the device, and of sums that are copied out."""
        chunks = [*enumerate(self._chunks)]
        updated = [(i, c) for i, c in chunks if i not in self._on_host] if self.has_places else []
        sums = {i: c.gradient_at_rest for i, c in chunks if c.gradient_at_rest is not None}
        weights = {i: c.weights_at_rest for i, c in updated if c.weights_at_rest is not None}
        gradients = {i: sums[i] for i, c in updated if i in sums and not c.waits_on_device}
        reads = any(self._chunks[i].updates_weights for i in weights)
        return (
            (VISITING[StateKind.WEIGHTS] if reads else WRITTEN, weights),
            (VISITING[StateKind.GRADIENTS], gradients),
            (LEAVING, sums),
        )

    @property
    def streamed(self) -> dict[int, Streaming]:
        """The copies for updates on the device, by the chunks that need some."""
        (_, weights), (_, gradients), _ = self._kinds
        return {
            index: streaming(self._chunks[index], weights=index in weights, gradient=index in gradients)
            for index in sorted({*weights, *gradients})
        }

    def fetch(self, index: int, part: ChunkPart) -> None:
        """Begin to copy a part of a chunk to the device, which its update reads."""
        chunk = self._chunks[index]
        if part is ChunkPart.WEIGHTS:
            slot, before = self._weight_slots.take(index)
            self._weights_here[index], resting = slot, chunk.weights_at_rest
            before = before if chunk.going_home is None else (*before, chunk.going_home)
        else:
            slot, before = self._gradient_slots.take(index)
            self._gradients_here[index], resting = slot, chunk.gradient_at_rest
        assert resting is not None
        coming = self._up.copy(slot[: resting.numel()], resting, after=before, prefetch=True)
        self._incoming.setdefault(index, []).append(coming)

    def here(self, index: int, *, is_whole: bool) -> None:
        """Wait for a chunk's copies, and use the places on the device as its shards until `evict`.

        `is_whole`: the update will write all of the weights."""
        chunk = self._chunks[index]
        for transfer in self._incoming.pop(index, ()):
            transfer.wait()
        if (weights := chunk.weights_at_rest) is not None:
            if not chunk.updates_weights:
                self._weights_here[index] = self._weight_slots.take_now(index)
            slot = self._weights_here[index][: weights.numel()]
            if chunk.master is weights:
                chunk.master = slot
            elif not chunk.updates_weights and not is_whole:
                slot.copy_(chunk.master)
            chunk.local_shard = slot
        if (gradient := chunk.gradient_at_rest) is not None and not chunk.waits_on_device:
            chunk.gradient = self._gradients_here[index][: gradient.numel()]

    def used(self, index: int) -> None:
        """The update of a chunk is over: free the place of its gradient."""
        chunk = self._chunks[index]
        if self._gradients_here.pop(index, None) is not None:
            assert chunk.gradient_at_rest is not None
            self._gradient_slots.give(index)
            chunk.gradient = chunk.gradient_at_rest

    def evict(self, index: int) -> None:
        """Begin to copy the new weights of a chunk back to the host."""
        chunk = self._chunks[index]
        weights = chunk.weights_at_rest
        assert weights is not None
        slot = self._weights_here.pop(index)
        landed = partial(self._records.commit, chunk.spec.id, WEIGHTS)
        transfer = self._down.copy(weights, slot[: weights.numel()], then=landed)
        self._weight_slots.give(index, transfer)
        chunk.going_home = transfer
        chunk.master = weights if chunk.master is chunk.local_shard else chunk.master
        chunk.local_shard = weights

    def defer(self) -> None:
        """Mark the weights on the host as pending at the end of a step, until its updates have run. Those of the step
        before have come home first: their commits are not for this one."""
        self.flush()
        for chunk in self._chunks:
            if chunk.weights_at_rest is not None:
                self._records.defer(chunk.spec.id, WEIGHTS)

    def flush(self) -> None:
        """Wait until all weights are back on the host."""
        for chunk in self._chunks:
            if chunk.going_home is not None:
                chunk.going_home.finish()
                chunk.going_home = None

    def close(self) -> None:
        self._adds.close()

    def _landings(self, resting: Sequence[Tensor]) -> list[Tensor]:
        """Allocate buffers on the host for sums that are added there. A thread adds as it copies, and needs none."""
        count = min(OUTGOING, len(resting)) if self._down.executor.on_stream else 0
        landings = [
            host_room(max(tensor.numel() for tensor in resting), resting[0].dtype, self._chunks[0].device)
            for _ in range(count)
        ]
        self.host_bytes = sum(landing.nbytes for landing in landings)
        return landings

    def _places(self, slot: StagingBuffer, resting: Resting, arena: Arena | None) -> ArenaAllocator:
        """Places on the device for tensors of these sizes."""
        dtype = next((tensor.dtype for tensor in resting.values()), torch.float32)
        ranges = slot.live_ranges(_sizes(resting))
        return ArenaAllocator(ranges, dtype, self._chunks[0].device, arena, grows=slot is LEAVING)


def _sizes(resting: Resting) -> dict[int, int]:
    return {index: tensor.nbytes for index, tensor in resting.items()}
