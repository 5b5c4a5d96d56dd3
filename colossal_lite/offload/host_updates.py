"""Runs updates on the host, beside the states of their chunks, and copies gradients and weights for them.

Note: one thread, and slots.
An update's gradient and weights are copied to slots on the host.  A gradient takes one of `ahead_down + 1` slots, and
is freed there.  With `early` it takes a slot of its own in the last backward, right after its sum.  There it waits for
the norm.  Weights that are their own masters, or the upper half of them, take one of `ahead_down + 2` slots.  The new
weights are copied back from there.  Where a float32 master exists, the update only writes weights, in one of two slots.
State on the host is updated in place.  Updates run one after the other on one thread, so the computing thread does not
wait.  An update follows its copies to the host, and its copy back follows it.  A reader of the weights waits for this
last copy alone (`arrived`), with the timeout of all links.  It gets the error of any of these.  The op is the one that
the device would run, on the same numbers in the same order.  So an emulated device gives the same bits.  So does a
GPU with AdamW, SGD and Lion by Triton (kernels/optimizer_triton.py).  Bytes over the link, for one element:
    bf16 weights, float32 masters    4 to the host and 2 back; a copied AdamW record takes 12 each way
    float32 weights                  8 to the host and 4 back; a copied AdamW record takes 8 each way
Source: arXiv 2101.06840 (AdamW on the host), 2410.21316 (on either side, chunk by chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import ThreadExecutor
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.local_shard import LocalShard
from colossal_lite.memory.pinned import host_room
from colossal_lite.memory.transfers import Buffers
from colossal_lite.offload.pieces import GRADIENT_DOWN, WEIGHTS_BOTH, WEIGHTS_UP, StagingBuffer
from colossal_lite.schedule.optimizer_updates import ChunkPart, Crossing
from colossal_lite.schedule.update_mix import UpdateMix

Job = Callable[[LocalShard], None]


def crossing_of(chunk: Chunk) -> Crossing:
    """The parts of a chunk that cross the link for its update on the host."""
    up = chunk.weights_at_rest is None
    down = [ChunkPart.GRADIENT] if chunk.gradient_at_rest is None else []
    down += [ChunkPart.WEIGHTS] if up and chunk.updates_weights else []
    return Crossing(tuple(down), up)


def _kinds_of(
    chunks: Sequence[Chunk], on_host: Collection[int], mix: UpdateMix
) -> tuple[tuple[StagingBuffer, torch.dtype, list[int]], ...]:
    """Slots for gradients, for weights that are copied both ways, and for weights that are only written. With each its
    dtype, and the chunks that take such."""
    crossings, types = {i: crossing_of(chunks[i]) for i in sorted(on_host)}, chunks[0].types
    coming = [i for i, c in crossings.items() if ChunkPart.GRADIENT in c.down]
    both = [i for i, c in crossings.items() if ChunkPart.WEIGHTS in c.down]
    written = [i for i, c in crossings.items() if c.up and ChunkPart.WEIGHTS not in c.down]
    return (
        (GRADIENT_DOWN.wide(mix.gradient_width), types.gradient, coming),
        (WEIGHTS_BOTH.wide(mix.weight_width), types.compute, both),
        (WEIGHTS_UP.wide(mix.new_weight_width), types.compute, written),
    )


def updating_bytes(chunks: Sequence[Chunk], on_host: Collection[int], mix: UpdateMix) -> int:
    """Bytes of the slots for the chunks of `on_host`. A slot fits the largest that it takes."""
    return sum(
        slot.bytes({i: chunks[i].owned_numel * dtype.itemsize for i in some})
        for slot, dtype, some in _kinds_of(chunks, on_host, mix)
    )


class HostUpdates:
    """Runs updates on a thread of the host, with slots for what they need from the device."""

    def __init__(self, chunks: Sequence[Chunk], up: Link, down: Link) -> None:
        self._chunks, self._up, self._down = tuple(chunks), up, down
        self.updates_link = Link("cpu", ThreadExecutor(), timeout_s=down.timeout_s)
        self.host_bytes = 0
        """Bytes of the slots."""
        self.crossings: Mapping[int, Crossing] = {}
        """The parts that cross the link, for each chunk that is updated here."""
        self._came: dict[tuple[int, ChunkPart], tuple[Tensor, Transfer]] = {}
        """Copies to the host, with their slots."""
        self._made: dict[int, tuple[Tensor, Transfer]] = {}
        """New weights in a slot, and the update that writes them."""
        self._coming: dict[int, Transfer] = {}  # what a reader of the new weights waits for
        self._leaving: dict[int, Transfer] = {}  # copies that read a gradient

    def settle(self, on_host: Collection[int], mix: UpdateMix) -> None:
        """Update these chunks on the host from now on, as early as `mix` says, and allocate their slots. No copy may be
        in flight."""
        self._mix = mix
        self.crossings = {index: crossing_of(self._chunks[index]) for index in sorted(on_host)}
        self._gradients = self._both = self._written = Buffers(())  # the old ones go first
        self._came.clear()
        self._leaving.clear()
        self.host_bytes = 0
        kinds = _kinds_of(self._chunks, on_host, mix)
        self._gradients, self._both, self._written = (self._slots(*kind) for kind in kinds)

    @property
    def most_bytes(self) -> int:
        """The most bytes of slots in use at once so far."""
        return sum(slots.most_bytes for slots in (self._gradients, self._both, self._written))

    @property
    def forecast_bytes(self) -> int:
        """Bytes of the slots, by the formula."""
        return updating_bytes(self._chunks, self.crossings, self._mix)

    def send(self, index: int) -> None:
        """Begin to copy the final gradient of a chunk, with `early`. Called in backward or after it."""
        crossing = self.crossings.get(index)
        if self._mix.early and crossing is not None and ChunkPart.GRADIENT in crossing.down:
            self.bring(index, ChunkPart.GRADIENT)

    def bring(self, index: int, part: ChunkPart) -> None:
        """Begin to copy a chunk's gradient or weights to the host."""
        chunk, is_gradient = self._chunks[index], part is ChunkPart.GRADIENT
        slots = self._gradients if is_gradient else self._both
        source = chunk.gradient if is_gradient else chunk.local_shard
        if (index, part) in self._came:  # of a step that was discarded
            slot, before = self._came[index, part]
            free: Sequence[Transfer] = (before,)
        else:
            slot, free = slots.take()
        here = slot[: source.numel()]
        came = self._down.copy(here, source, after=free)
        self._came[index, part] = slot, came
        if is_gradient:
            self._leaving[index] = came

    def leaving(self, index: int) -> tuple[Transfer, ...]:
        """The copy that still reads the gradient of a chunk whose update has started. A second call returns none."""
        came = self._leaving.pop(index, None)
        return () if came is None else (came,)

    def update(
        self, index: int, words: Tensor | None, job: Job, *, after: Sequence[Transfer], is_whole: bool,
        then: Callable[[], object],
    ) -> Transfer:  # fmt: skip
        """Begin the update `job` of a chunk, after its copies and all of `after`.

        `words`: its float32 masters, or the residuals of split ones; None where the weights are the masters.
        `is_whole`: `job` writes all of the weights. `then` is called when the update has ended."""
        chunk, crossing = self._chunks[index], self.crossings[index]
        numel, before = chunk.local_shard.numel(), [*after]
        gradient, weights = chunk.gradient, chunk.local_shard
        if ChunkPart.GRADIENT in crossing.down:
            taken, came = self._came.pop((index, ChunkPart.GRADIENT))
            gradient = taken[:numel]
            before.append(came)
        if crossing.up:
            if ChunkPart.WEIGHTS in crossing.down:
                slot, came = self._came.pop((index, ChunkPart.WEIGHTS))
                before.append(came)
            else:
                slot, free = self._written.take()
                before += free
            weights = slot[:numel]
        part = _part_of(chunk, weights, words, gradient)
        work = partial(_run, part, job, is_whole=is_whole)
        done = self.updates_link.run(work, 0, after=before, then=then)
        if ChunkPart.GRADIENT in crossing.down:
            self._gradients.give(taken, done)
        if crossing.up:
            self._made[index] = slot, done
        self._coming[index] = done
        if chunk.weights_at_rest is not None:
            chunk.going_home = done
        return done

    def take_up(self, index: int) -> None:
        """Begin to copy a chunk's new weights to the device."""
        slot, done = self._made.pop(index)
        target = self._chunks[index].local_shard
        self._coming[index] = gone = self._up.copy(target, slot[: target.numel()], after=(done,))
        is_both = ChunkPart.WEIGHTS in self.crossings[index].down
        (self._both if is_both else self._written).give(slot, gone)

    def arrived(self, index: int) -> None:
        """Wait until the new weights of a chunk are where the model reads them; nothing if it is not updated here."""
        if (coming := self._coming.pop(index, None)) is not None:
            coming.wait()

    def finish(self) -> None:
        """Wait for updates that no `arrived` has waited for: those of weights that rest on the host."""
        while self._coming:
            self._coming.popitem()[1].wait()

    def close(self) -> None:
        self.updates_link.close()

    def _slots(self, slot: StagingBuffer, dtype: torch.dtype, indices: Sequence[int]) -> Buffers:
        """Slots for what this rank owns of these chunks. A gradient that its update frees has no size now."""
        largest = max((self._chunks[index].owned_numel for index in indices), default=0)
        slots = [host_room(largest, dtype, self._chunks[0].device) for _ in range(slot.buffers(indices))]
        self.host_bytes += sum(room.nbytes for room in slots)
        return Buffers(slots)


def _part_of(chunk: Chunk, weights: Tensor, words: Tensor | None, gradient: Tensor) -> LocalShard:
    """The tensors of a chunk that its update reads and writes on the host."""
    if chunk.residual is not None:
        assert words is not None
        return LocalShard(weights, chunk.master, words.view(torch.int16), gradient)
    return LocalShard(weights, weights if words is None else words, None, gradient)


def _run(part: LocalShard, job: Job, *, is_whole: bool) -> None:
    if not is_whole and not part.updates_weights:
        part.local_shard.copy_(part.master)  # of elements that are not updated
    job(part)
