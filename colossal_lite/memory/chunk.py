"""Holds the tensors of one chunk that trains, and takes its gradient from accumulation to the reduced sum.

Note: chunk tensors.  No other file defines them.
numel: elements of the chunk, gaps between entries included.  owned: elements that this rank updates: its shard, or all
at stage 0.
`full_weight`   [numel], compute dtype: all weights.  Parameters are views of it while the weights are WHOLE.  Where
                weights are sharded it is the gathered copy, in a slot lent from one gather to the drop.
`local_shard`   [owned], compute dtype: this rank's part of the weights.  A view of `full_weight`, or memory of its own
                where weights are sharded.
`master`        [owned], master dtype: what the optimizer updates.  The same memory as `local_shard` where the dtypes
                agree.  On the meta device where float32 masters are split.
`residual`      [owned * 17 / 16], int16: the lower half of split masters, whose upper half is `local_shard`, then a
                map of ties (kernels/split.py).  None where masters are not split.
`accumulating`  [numel], gradient dtype (numerics/precision.py): this rank's sum over micro-batches, or the gradient of
                one micro-batch.  None while it has no slot.
`gradient`      [owned], gradient dtype: the sum over the sync axes.  Part of `accumulating` where that lasts for the
                step, or where updates free it (`frees_gradient_on_update`): then empty after `free_gradient`.
`weights_at_rest`, `gradient_at_rest`  [owned]: the host memory of `local_shard` and `gradient`, where they are
                offloaded.  None otherwise.
With time-shared memory (schedule/step_moments.py) `local_shard` and `gradient` are on the meta device while another
buffer has their bytes.  Where a chunk has several sharded copies (`Groups`), micro-batches are summed over this copy
alone until `start_copies`.  When gradients are summed, gaps are zero in all tensors.  They add nothing to a norm, and
no optimizer changes them.

Gradients go EMPTY -> ACCUMULATING -> REDUCING -> (PARTIAL -> ACCUMULATING ... ->) REDUCED -> EMPTY.  Any other move is
a programming error and raises.  Read a buffer only in the states that its method lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from colossal_lite.config.zero_stage import Sharding
from colossal_lite.distributed.communicator import PendingCollective
from colossal_lite.kernels import TORCH, split
from colossal_lite.kernels.ops import Op
from colossal_lite.kernels.optimizer import cast_numel
from colossal_lite.memory.arena import ArenaAllocator
from colossal_lite.memory.gradient_squares import block_squares_of
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.local_shard import LocalShard
from colossal_lite.memory.packing import ChunkSpec, Entry
from colossal_lite.memory.pinned import make_pages, zeros_on
from colossal_lite.memory.task_records import GRADIENTS, WEIGHTS, TaskRecords
from colossal_lite.memory.transfers import GradientOffloadBuffer, copied_to, copy_into, to_device
from colossal_lite.memory.vector_gradients import VectorGradients, add_gradient
from colossal_lite.memory.weight_chunk import UNSHARDED, Groups, Values, WeightChunk
from colossal_lite.numerics.precision import ChunkTypes


class GradientState(StrEnum):
    EMPTY = "empty"  # no gradient in this step yet
    ACCUMULATING = "accumulating"  # some micro-batch has added to it
    REDUCING = "reducing"  # the sum over ranks is in flight
    PARTIAL = "partial"  # the full gradient of the micro-batches so far
    REDUCED = "reduced"  # the full gradient of the step


LEGAL = {
    (GradientState.EMPTY, GradientState.ACCUMULATING),
    (GradientState.ACCUMULATING, GradientState.ACCUMULATING),
    (GradientState.ACCUMULATING, GradientState.REDUCING),
    (GradientState.EMPTY, GradientState.REDUCING),  # no parameter of it was used on this rank
    (GradientState.REDUCING, GradientState.PARTIAL),
    (GradientState.PARTIAL, GradientState.ACCUMULATING),
    (GradientState.PARTIAL, GradientState.REDUCING),
    (GradientState.PARTIAL, GradientState.REDUCED),
    (GradientState.REDUCED, GradientState.EMPTY),
    (GradientState.ACCUMULATING, GradientState.EMPTY),  # the step was discarded
    (GradientState.PARTIAL, GradientState.EMPTY),
    (GradientState.EMPTY, GradientState.EMPTY),
}


class Chunk(WeightChunk, LocalShard):
    """The tensors of one `ChunkSpec` that trains, on this rank."""

    # Time-shared memory, given by `share_time`.
    _weight_turns: ArenaAllocator | None = None
    _gradient_turns: ArenaAllocator | None = None
    _last_sums: tuple[ArenaAllocator, Link] | None = None
    # Copies in flight: earlier sums back to the device, and a sum to the host.
    _coming: Transfer | None = None
    _sent: tuple[Transfer, ...] = ()

    def __init__(
        self, spec: ChunkSpec, groups: Groups, *, types: ChunkTypes, device: torch.device,
        counted: Sequence[tuple[int, int]] | None = None, sharding: Sharding = UNSHARDED,
        staging: ArenaAllocator | None = None, received: ArenaAllocator | None = None, slot: int = 0,
        square_sum: Op = TORCH.square_sum, on_host: TaskRecords | None = None, master_on_host: bool = False,
    ) -> None:  # fmt: skip
        """As `WeightChunk`, and `groups` sum its gradient. `counted`: the elements whose squares this rank adds to the
        norm; None is all. `staging` gives slots for gradients that are reduced by micro-batch, `received` slots for
        the parts of other ranks. `master_on_host`: what masters have beside the weights is first filled there, for
        the optimizer that offloads it."""
        super().__init__(spec, groups, types=types, device=device, sharding=sharding, on_host=on_host)
        shards, copies = groups.shards, groups.copies
        self.share = spec.shard(shards.size * copies.size, shards.coord * copies.size + copies.coord)
        """The elements that this rank counts in the norm, among all ranks that sum."""
        self._scatterers = groups.scatterers(ordered=sharding.ordered)
        self.scatters = sharding.scatters and self._scatterers.size > 1
        self._scattered = (0, spec.numel)
        if self.scatters:
            self._scattered = spec.shard(self._scatterers.size, self._scatterers.coord)
        self._sums_copies = self.scatters and not sharding.ordered and copies.size > 1
        self._counted = tuple(counted) if counted is not None else ((0, spec.numel),)
        self.staging, self.received = staging if sharding.by_micro_batch else None, received
        self._slot, self.square_sum = slot, square_sum
        # Masters that the optimizer offloads are never on the device all at once.
        self._make_masters(torch.device("cpu") if master_on_host and device.type != "meta" else device)
        self._make_gradient(device, can_rest=on_host is not None)

    def _make_masters(self, begins: torch.device) -> None:
        """Allocate masters, zeros, on the device `begins`."""
        types, length = self.types, self.owned_numel
        where = torch.device("meta") if types.split else begins
        is_apart = types.master != types.compute
        self.master = zeros_on(where, length, types.master) if is_apart else self.local_shard
        self.residual: Tensor | None = None
        if types.split:
            self.residual = zeros_on(begins, length * 17 // 16, torch.int16)
        if is_apart and begins.type != self.device.type:
            make_pages(self.master_words)

    def _make_gradient(self, device: torch.device, *, can_rest: bool) -> None:
        """Allocate the sum and begin a step. `can_rest`: a sum of what this rank owns may be on the host."""
        types, length = self.types, self.owned_numel
        self.accumulating: Tensor | None = None
        self.gradient_at_rest: Tensor | None = None
        """The host memory of `gradient`, if it is offloaded."""
        self.offload_buffer: GradientOffloadBuffer | None = None
        """Sends sums to the host."""
        if self.sharding.frees_gradient_on_update:
            self.gradient = zeros_on(device, 0, types.gradient)
        elif self.sharding.by_micro_batch:
            assert self.staging is not None
            rests = can_rest and self.owned == self._scattered
            self.gradient = self._room(GRADIENTS, length, types.gradient, rests=rests)
            self.gradient_at_rest = self.gradient if rests else None
        else:
            self.accumulating = zeros_on(device, self.spec.numel, types.gradient)
            self.gradient = self.accumulating[slice(*self.owned)]
        self.state = GradientState.EMPTY
        self.used = [False] * len(self.spec.entries)  # entries with a gradient in this step
        self._filled = [False] * len(self.spec.entries)  # entries with a gradient in `accumulating`
        self._targets: dict[int, Tensor] = {}
        """The part of each entry in `accumulating`, while that has memory."""
        self._vectors = VectorGradients()
        self._sums = 0  # micro-batches that `gradient` holds
        self._in_flight: PendingCollective | None = None
        self._among_copies: PendingCollective | None = None
        self._scratch: Tensor | None = None
        self._squares: tuple[Tensor, ...] = ()
        """Squares of a first sum that has left a GPU for the host, and so need not come back."""

    def adopt(self, parameters: Mapping[str, nn.Parameter], initial: Values | None) -> None:
        super().adopt(parameters, initial)
        if self.device.type == "cuda":  # where a launch costs more than the memory of what waits
            self._vectors.most = sum(parameter.dim() == 1 for parameter in self._parameters)

    # ---- masters ----

    @property
    def takes_changes(self) -> bool:
        return super().takes_changes and self.master is self.local_shard

    def load_own(self, local: slice, own: Tensor) -> None:
        if self.residual is not None:
            self.set_split_masters(local, own)
            return
        copy_into(self.master[local], own)
        if self.master is not self.local_shard:
            super().load_own(local, own)

    def publish(self, start: int, stop: int) -> None:
        """Make the model see master elements [start, stop): of this rank's shard, until the next gather."""
        if (seen := self.weights_to_write(start, stop)) is not None:
            seen.copy_(self.master[start:stop])
        self.count_change()

    @property
    def master_words(self) -> Tensor:
        """The memory of what the masters have beside the weights, as numbers of the state's dtype."""
        return self.master if self.residual is None else self.residual.view(self.types.state)

    @property
    def master_bytes(self) -> int:
        """Bytes of what the masters have beside the weights."""
        if self.master is self.local_shard:
            return 0
        return (self.master if self.residual is None else self.residual).nbytes

    def rest_master(self, words: Tensor) -> None:
        """Use `words` as the memory of what the masters have beside the weights."""
        if self.residual is None:
            self.master = words
        else:
            self.residual = words.view(torch.int16)

    @property
    def update_bytes(self) -> int:
        """Bytes that an update needs beside the state: a copy, joined masters, widened gradients."""
        length, state = self.owned_numel, self.types.state
        widened = cast_numel(length) * state.itemsize if self.types.gradient != state else 0
        if self.residual is None:
            return length * state.itemsize + widened
        return self.local_shard.nbytes + self.master_bytes + split.joined_bytes(length) + widened

    # ---- tiers ----

    def keep_weights_on_device(self) -> None:
        is_master = self.master is self.local_shard
        super().keep_weights_on_device()
        self.master = self.local_shard if is_master else self.master

    def keep_gradient_on_device(self) -> None:
        """Move this rank's sum of the gradient to the device for good. No copy of it may be in flight."""
        assert self.gradient_at_rest is not None and self.gradient is self.gradient_at_rest
        self.gradient, self.gradient_at_rest = copied_to(self.gradient, self.device), None
        self.offload_buffer = None
        self._gone(GRADIENTS)

    # ---- turns ----

    def share_time(
        self, weights: ArenaAllocator | None, gradients: ArenaAllocator | None,
        last_sums: tuple[ArenaAllocator, Link] | None,
    ) -> None:  # fmt: skip
        """Give weights and gradients that are offloaded time-shared memory of the device instead. It is called between
        the last backward of a step and the update, with no copy in flight. The next use of weights writes them. In the
        memory of `last_sums` a gradient that is on the host waits for its update. The link brings it."""
        if weights is not None:
            assert self.weights_at_rest is not None and not self.updates_weights
            self._weight_turns, self.weights_at_rest = weights, None
            self.local_shard = _nowhere(self.local_shard)
            self._gone(WEIGHTS)
        if gradients is not None:
            assert self.gradient_at_rest is not None and self.state is GradientState.REDUCED
            self._gradient_turns, self.gradient_at_rest, self.offload_buffer = gradients, None, None
            summed, self.gradient = self.gradient, gradients.take_now(self._slot)
            self.gradient.copy_(to_device(summed, self.device))
            self._gone(GRADIENTS)
        self._last_sums = last_sums or self._last_sums

    def time_shared(self, kind: str) -> bool:
        """Whether its "weights" or its "gradients" have time-shared memory."""
        return (self._weight_turns if kind == "weights" else self._gradient_turns) is not None

    @property
    def lacks_weights(self) -> bool:
        """Whether its weights have no memory until their update, or until they are rebuilt from the masters."""
        return self._weight_turns is not None and self.local_shard.is_meta

    def give_weights(self) -> None:
        """Free the time-shared memory of the weights, if they have some: nothing reads them before their update."""
        if self._weight_turns is not None and not self.lacks_weights:
            self._weight_turns.give(self._slot)
            self.local_shard = _nowhere(self.local_shard)

    def take_weights(self, *, is_whole: bool) -> None:
        """Allocate the time-shared memory of the weights again, if any. `is_whole`: all of them are written next."""
        if self._weight_turns is not None and self.lacks_weights:
            self.local_shard = self._weight_turns.take_now(self._slot)[: self.local_shard.numel()]
            if not is_whole:
                self.local_shard.copy_(self.master)

    @property
    def waits_on_device(self) -> bool:
        """Whether its gradient is on the host except at the end of a step."""
        return self._last_sums is not None

    def bring_sums(self) -> None:
        """Start to copy the earlier sums of a step, if any, to the device memory of the last one."""
        if self._last_sums is None or self.gradient is not self.gradient_at_rest:
            return
        places, up = self._last_sums
        if not self._sums:
            self.gradient = places.take_now(self._slot)
            return
        self.gradient, before = places.take(self._slot)
        after = (*before, *self._sent)
        self._coming = up.copy(self.gradient, self.gradient_at_rest, after=after, prefetch=True)

    def have_sums(self) -> None:
        """Wait for the copy of `bring_sums`."""
        if self._coming is not None:
            self._coming.wait()
            self._coming, self._sent = None, ()

    # ---- gradients ----

    @property
    def is_final_when_summed(self) -> bool:
        """Whether the last sum of a step is its gradient, with no sum over copies or gather behind it."""
        return not self._sums_copies and not (self.sharding.by_micro_batch and self.owned != self._scattered)

    @property
    def takes_room(self) -> bool:
        """Whether a sum in flight has slots, for its own gradient or for the parts of other ranks."""
        return self.scatters or self.sharding.by_micro_batch

    def move(self, state: GradientState) -> None:
        assert (self.state, state) in LEGAL, (
            f"chunk {self.spec.id}: gradient may not go {self.state} -> {state}"
        )
        self.state = state

    def clear(self) -> None:
        """Discard this step's gradient. The buffer still has the old numbers; the first gradient overwrites them."""
        self.move(GradientState.EMPTY)
        self.used = [False] * len(self.spec.entries)
        self._filled = [False] * len(self.spec.entries)
        self._sums, self._squares = 0, ()
        self._vectors.drop()
        self.free_gradient()
        self._drop()

    def accept(self, index: int, gradient: Tensor, *, seed: float = 1.0) -> None:
        """Add the gradient of entry `index` from one micro-batch, whose backward was seeded with `seed`."""
        if self.state is not GradientState.ACCUMULATING:
            self.move(GradientState.ACCUMULATING)
        adds = self._filled[index]
        target = self._targets.get(index)
        if target is None:
            target = self.of(self._to_accumulate(), self.spec.entries[index], gradient.shape)
            self._targets[index] = target
        if gradient.dim() == 1 and self._vectors.most > 1:
            self._vectors.add(index, target, gradient, 1.0 / seed, adds=adds)
        else:
            add_gradient(target, gradient, 1.0 / seed, adds=adds)
        self._filled[index] = self.used[index] = True

    def completed(self) -> Tensor:
        """`accumulating` with zeros for absent gradients: for sums that come before those over the sync axes."""
        self.move(GradientState.ACCUMULATING)
        accumulating = self._zeros_where_absent()
        self._filled = [True] * len(self.spec.entries)
        return accumulating

    def _zeros_where_absent(self) -> Tensor:
        accumulating = self._to_accumulate()
        self._vectors.take()
        for entry, filled in zip(self.spec.entries, self._filled, strict=True):
            if not filled:
                accumulating[entry.start : entry.stop].zero_()
        return accumulating

    def start_reduce(self) -> None:
        """Start the sum over the sync axes; entries without a gradient count as zero. Collective."""
        assert self._among_copies is None, f"chunk {self.spec.id}: its copies are summed already"
        self.move(GradientState.REDUCING)
        accumulating = self._zeros_where_absent()
        if self.sharding.by_micro_batch:
            for start, stop in self._gaps():
                accumulating[start:stop].zero_()
        if not self.scatters:
            self._in_flight = self.groups.all.all_reduce_async(accumulating)
            return
        if self.received is not None:
            self._scratch = self.received.take_now(self._slot)
        self._in_flight = self._scatterers.reduce_scatter_async(
            accumulating,
            accumulating[slice(*self._scattered)],
            ordered=self.sharding.ordered,
            scratch=self._scratch,
        )

    def finish_reduce(self) -> None:
        """Wait for the sum that was started; by micro-batch, add it to the sums of earlier micro-batches."""
        assert self._in_flight is not None, f"chunk {self.spec.id}: no reduction was begun"
        self._in_flight.wait()
        self._in_flight = None
        if self._scratch is not None:
            assert self.received is not None
            self.received.give(self._slot)
            self._scratch = None
        if self.sharding.frees_gradient_on_update:
            # The order of all ranks may differ from that of the copies: then the full sum is gathered before a part is
            # owned.
            self.gradient = self._to_accumulate()
            if self.owned == self._scattered:
                self.gradient = self.gradient[slice(*self.owned)]
        elif self.sharding.by_micro_batch:
            assert self.accumulating is not None
            if self._gradient_turns is not None and self._sums == 0:
                self.gradient = self._gradient_turns.take_now(self._slot)
            sums, summed = self._sharded_sums(), self.accumulating[slice(*self._scattered)]
            self.have_sums()
            self._squares = ()  # those of the first sum alone are no longer right
            if self.offload_buffer is not None and self.gradient is self.gradient_at_rest:
                first = self.offload_buffer.on_stream and self._sums == 0 and not self._sums_copies
                if first:
                    self._squares = tuple(self._squares_of(summed))
                self._sent = (self.offload_buffer.send(self._slot, sums, summed, add=self._sums > 0),)
            elif self._sums:
                sums.add_(summed)
            else:
                sums.copy_(summed)
            self._drop()
            self._filled = [False] * len(self.spec.entries)
        self._sums += 1
        self.move(GradientState.PARTIAL)

    def start_copies(self) -> None:
        """Start the sum over the copies after the last micro-batch of a step, if that has not started. Collective."""
        if not self._sums_copies or self._among_copies is not None:
            return
        assert self.state is GradientState.PARTIAL
        if self.offload_buffer is not None:
            self.offload_buffer.flush()
        self._among_copies = self.groups.copies.all_reduce_async(self.gradient)

    def settle(self) -> None:
        """Wait for copies to the host and for the sum over the copies, also of a step that is discarded."""
        if self.offload_buffer is not None:
            self.offload_buffer.flush()
        if self._among_copies is not None:
            self._among_copies.wait()
            self._among_copies = None

    def conclude(self) -> None:
        """Finish the sums of all micro-batches of the step. Collective where ranks need the sums of others."""
        self.start_copies()
        self.settle()
        if self.sharding.by_micro_batch and self.owned != self._scattered:
            self._gather_sums()
        self.move(GradientState.REDUCED)

    def keep_squares(self) -> None:
        """Store the results of `squares` and `block_squares`, so that they outlive the gradient."""
        assert self.state is GradientState.REDUCED
        self._squares = tuple(self._squares_of(self.gradient))

    def free_gradient(self, *last: Transfer) -> None:
        """Free the slot or the time-shared memory of the gradient, if any. Only `last` may still read a slot."""
        if self.sharding.frees_gradient_on_update:
            self.gradient = self.gradient[:0]
            self._drop(*last)
        elif self._gradient_turns is not None and not self.gradient.is_meta:
            self._gradient_turns.give(self._slot)
            self.gradient = _nowhere(self.gradient)
        elif self._last_sums is not None and self.gradient is not self.gradient_at_rest:
            assert self.gradient_at_rest is not None
            self.have_sums()
            self._last_sums[0].give(self._slot)
            self.gradient = self.gradient_at_rest

    def _gather_sums(self) -> None:
        """Gather one sum in rank order from the parts of all ranks, and take what this rank owns."""
        if self.gradient.numel() == self.spec.numel:
            self.groups.all.all_gather(self._sharded_sums(), self.gradient)
            self.gradient = self.gradient[slice(*self.owned)]
            return
        # In the order of all ranks a shard is not contiguous. So each rank gathers the full chunk, in its slot.
        whole = self.groups.all.all_gather(self._sharded_sums(), self._to_accumulate())
        self.gradient.copy_(whole[slice(*self.owned)])
        self._drop()

    def squares(self) -> Tensor:
        """Sum of squares of this rank's share of the counted gradient elements, 0-d float64."""
        assert self.state is GradientState.REDUCED and not self.sharding.ordered
        (squares,) = self._squares or self._squares_of(self.gradient)
        return squares

    def counted(self) -> list[Tensor] | None:
        """The elements whose squares are still to be summed, where they are on the device; else None."""
        assert self.state is GradientState.REDUCED and not self.sharding.ordered
        if self._squares or self.gradient.device != self.device:
            return None
        return [self.gradient[span] for span in self._counted_spans()]

    def block_squares(self, entry: Entry) -> Tensor:
        """Squares [blocks] of the norms of an entry's blocks, float64. Blocks in other ranks' shares and elements
        that this rank does not count are zero. The bits do not depend on where the chunk is cut."""
        assert self.state is GradientState.REDUCED and self.sharding.ordered
        number = self.spec.entries.index(entry)
        return self._squares[number] if self._squares else self._block_squares(self.gradient, entry)

    def _squares_of(self, gradient: Tensor) -> Iterator[Tensor]:
        """The result of `squares` for this gradient [owned], or of `block_squares` for each entry where sums are
        `ordered`. It is computed on the device wherever the gradient is, so the bits are the same."""
        if self.sharding.ordered:
            yield from (self._block_squares(gradient, entry) for entry in self.spec.entries)
            return
        parts = [to_device(gradient[span], self.device) for span in self._counted_spans()]
        yield self.square_sum(parts) if parts else torch.zeros((), dtype=torch.float64, device=self.device)

    def _block_squares(self, gradient: Tensor, entry: Entry) -> Tensor:
        spans = self._counted_spans(entry.start, entry.stop)
        return block_squares_of(gradient, entry, spans, self.owned[0], self.device)

    def _counted_spans(self, start: int = 0, stop: int | None = None) -> list[slice]:
        """Of elements [start, stop), those whose squares this rank counts, as slices of `gradient`."""
        low, high = max(start, self.share[0]), min(self.spec.numel if stop is None else stop, self.share[1])
        spans = ((max(first, low), min(last, high)) for first, last in self._counted)
        return [slice(first - self.owned[0], last - self.owned[0]) for first, last in spans if first < last]

    def _sharded_sums(self) -> Tensor:
        """The part of `gradient` that has the sums scattered to this rank."""
        start, stop = self._scattered
        at = start if self.gradient.numel() == self.spec.numel else 0
        return self.gradient[at : at + stop - start]

    def _to_accumulate(self) -> Tensor:
        if self.accumulating is None:
            assert self.staging is not None
            self.accumulating = self.staging.take_now(self._slot)
        return self.accumulating

    def _drop(self, *last: Transfer) -> None:
        if self.staging is not None and self.accumulating is not None:
            self.staging.give(self._slot, *last)
            self.accumulating = None
            self._targets.clear()

    def _gaps(self) -> Iterator[tuple[int, int]]:
        end = 0
        for entry in self.spec.entries:
            yield end, entry.start
            end = entry.stop
        yield end, self.spec.numel


def _nowhere(tensor: Tensor) -> Tensor:
    """A tensor of that shape and dtype without memory: reading it raises."""
    return torch.empty_like(tensor, device="meta")
