"""One chunk: the flat buffers of a run of parameters, the life of their gradients and of their weights within a step.

Note: chunk tensors.
`value`     [numel], compute dtype: the weights; every `nn.Parameter` of the chunk is a view of it while it is WHOLE.
            Kept from step to step, or, where weights are sharded, a slot that is lent from one gather to the drop.
`own_value` [owned], compute dtype: this rank's part of the weights: of `value`, or, where that is lent, what is kept.
`master`    [owned], master dtype: what the optimizer of this rank updates: its shard, or at stage 0 all.  The
            same memory as `own_value` where the dtypes agree; nowhere (on the meta device) where masters are split:
`residual`  [owned * 17 / 16] int16: what float32 masters have beyond `own_value`, their upper half, and behind that a
            map of ties (kernels/split.py).  None where masters are whole.
`filling`   [numel], accumulation dtype (fp32 or better): the sum over micro-batches on this rank, or one micro-batch.
`gradient`  [owned], accumulation dtype: the sum over the sync axes, in `filling`'s place where that is kept whole.
Where several copies of a chunk are sharded over some ranks each (`Groups`), sums of the micro-batches are over this
copy alone until `start_copies`.
Gaps between entries are zero in all of them when they are summed: they add nothing to a norm and no optimizer moves
them.  Gradients walk EMPTY -> FILLING -> REDUCING -> (PARTIAL -> FILLING ... ->) REDUCED -> EMPTY, weights
WHOLE -> SHARDED -> (FETCHING ->) GATHERING -> WHOLE (sharded ones begin and rest as SHARDED) and, where a step owes
their update (zero/owed.py), WHOLE -> OWED -> WHOLE; any other move is a programming error and stops at once.  The
values of a buffer mean something only in the states named by its method.  A parameter of a chunk that is not WHOLE is a
view of one NaN: whoever reads it past the gates gets no stale number.  Parameters never change their shape, dtype or
identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from colossal_lite.comm import AxisComm, Pending
from colossal_lite.kernels import split
from colossal_lite.memory.arena import Slots
from colossal_lite.memory.host import host_room
from colossal_lite.memory.mover import Link, Outbox, Transfer, copied_to, to_device
from colossal_lite.memory.pack import SHARD_BLOCK_NUMEL, ChunkKey, ChunkSpec, Entry


class GradientState(StrEnum):
    EMPTY = "empty"  # nothing has arrived in this step
    FILLING = "filling"  # some micro-batch has added to it
    REDUCING = "reducing"  # the sum over ranks is in flight
    PARTIAL = "partial"  # the whole gradient of the micro-batches so far
    REDUCED = "reduced"  # the whole gradient of the step


LEGAL = {
    (GradientState.EMPTY, GradientState.FILLING),
    (GradientState.FILLING, GradientState.FILLING),
    (GradientState.FILLING, GradientState.REDUCING),
    (GradientState.EMPTY, GradientState.REDUCING),  # no parameter of it was used on this rank
    (GradientState.REDUCING, GradientState.PARTIAL),
    (GradientState.PARTIAL, GradientState.FILLING),
    (GradientState.PARTIAL, GradientState.REDUCING),
    (GradientState.PARTIAL, GradientState.REDUCED),
    (GradientState.REDUCED, GradientState.EMPTY),
    (GradientState.FILLING, GradientState.EMPTY),  # the step was given up
    (GradientState.PARTIAL, GradientState.EMPTY),
    (GradientState.EMPTY, GradientState.EMPTY),
}


class WeightState(StrEnum):
    WHOLE = "whole"  # parameters are views of all elements, as new as the masters
    SHARDED = "sharded"  # this rank has the newest of its own shard only
    FETCHING = "fetching"  # its own shard is on its way from the host
    GATHERING = "gathering"  # the shards of the others are on their way
    OWED = "owed"  # the update of the last step has yet to come


LEGAL_WEIGHT = {
    (WeightState.WHOLE, WeightState.SHARDED),
    (WeightState.SHARDED, WeightState.GATHERING),
    (WeightState.SHARDED, WeightState.FETCHING),
    (WeightState.FETCHING, WeightState.GATHERING),
    (WeightState.FETCHING, WeightState.SHARDED),  # dropped before it was gathered
    (WeightState.GATHERING, WeightState.WHOLE),
    (WeightState.WHOLE, WeightState.OWED),
    (WeightState.OWED, WeightState.WHOLE),
}


@dataclass(frozen=True)
class SavedView:
    """Where a tensor lies in the weights of a chunk, so that it can be had again wherever these are then.

    `offset` in elements of `dtype` from the start of the chunk; `version` of the weights it was a view of."""

    chunk: Chunk
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int

    def rebuilt(self) -> Tensor:
        """The view in the slot where the weights are now. Raises ValueError if they have changed since."""
        if self.version != self.chunk.version:
            names = ", ".join(entry.name for entry in self.chunk.spec.entries[:3])
            raise ValueError(
                f"backward: the weights {names} have been updated since the forward that it belongs to; call backward "
                f"before step"
            )
        value = self.chunk.value
        value = value if value.dtype == self.dtype else value.view(self.dtype)
        return value.as_strided(self.shape, self.stride, value.storage_offset() + self.offset)


@dataclass(frozen=True)
class Groups:
    """The ranks that sum the gradient of a chunk (`all`), those of them over which this rank's copy of it is sharded
    (`shards`), and those that hold the same shard (`copies`).  One copy is the rule, more are hybrid sharding
    (arXiv 2304.11277, section 3.2.2).  `near`: those of `shards` that may keep the weights between them for a while."""

    all: AxisComm
    shards: AxisComm
    copies: AxisComm
    near: AxisComm

    def scatterers(self, *, ordered: bool) -> AxisComm:
        """Those that scatter a sum among themselves: all, if it is one sum in rank order, or first those of a copy."""
        return self.all if ordered else self.shards


class Chunk:
    """The buffers of one `ChunkSpec` on this rank."""

    def __init__(
        self,
        spec: ChunkSpec,
        groups: Groups,
        *,
        value_dtype: torch.dtype,
        master_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        counted: Sequence[tuple[int, int]] | None = None,
        shard_state: bool = False,
        shard_value: bool = False,
        by_micro_batch: bool = False,
        ordered: bool = False,
        staging: Slots | None = None,
        received: Slots | None = None,
        slot: int = 0,
        on_host: bool = False,
        master_on_host: bool = False,
        split_master: bool = False,
    ) -> None:
        """`groups`: the ranks that sum its gradient.  `counted`: the elements whose squares this rank adds to the norm;
        None is all.  `staging` gives the slots that gradients fill when they are reduced by micro-batch, `received`
        those for what other ranks send.  `on_host`: what of its shards can rest on the host does (zero/visits.py).
        `master_on_host`: what masters have beside the weights is filled there, for whoever takes it over."""
        self.spec, self.groups, self.shards = spec, groups, groups.shards
        shards, copies = groups.shards, groups.copies
        self.shard = spec.shard(shards.size, shards.coord)
        self.owned = self.shard if shard_state else (0, spec.numel)
        self.share = spec.shard(shards.size * copies.size, shards.coord * copies.size + copies.coord)
        """What this rank counts in the norm, of what all that sum hold together."""
        self._scatterers = groups.scatterers(ordered=ordered)
        self._scattered = spec.shard(self._scatterers.size, self._scatterers.coord)
        self.scatters = (shard_state or by_micro_batch) and self._scatterers.size > 1
        self._sums_copies = self.scatters and not ordered and copies.size > 1
        self.by_micro_batch, self.ordered = by_micro_batch, ordered
        self._counted = tuple(counted) if counted is not None else ((0, spec.numel),)
        self.staging, self.received = staging if by_micro_batch else None, received
        self._slot = slot
        length = self.owned[1] - self.owned[0]

        self.is_sharded = shard_value and (shards.size > 1 or on_host)
        room = partial(host_room, beside=device) if on_host else partial(_on, device)
        kept = room(length, value_dtype) if self.is_sharded else _on(device, spec.numel, value_dtype)
        self.weights_at_rest = kept if self.is_sharded and on_host else None
        """This rank's part of the weights, where it rests on the host; `own_value` is elsewhere during an update."""
        self._value = None if self.is_sharded else kept
        self.own_value = kept if self.is_sharded else kept[slice(*self.owned)]
        same = master_dtype == value_dtype
        # What an optimizer takes away to another tier is never on the device as a whole.
        begins = torch.device("cpu") if master_on_host and device.type != "meta" else device
        where = torch.device("meta") if split_master else begins
        self.master = self.own_value if same else _on(where, length, master_dtype)
        self.residual: Tensor | None = None
        if split_master:
            self.residual = _on(begins, length * 17 // 16, torch.int16)
        self._parameters: list[nn.Parameter] = []
        self._nowhere = torch.full((), torch.nan, dtype=value_dtype, device=device)
        self._placeholders: list[Tensor] = []
        self.weights = WeightState.SHARDED if self.is_sharded else WeightState.WHOLE
        self.version = 0
        """How often the weights have changed."""
        self._gathering: Pending | None = None
        self._incoming: Transfer | None = None

        self.filling: Tensor | None = None
        self.gradient_at_rest: Tensor | None = None
        """This rank's sum of the gradient, where it rests on the host."""
        self.outbox: Outbox | None = None
        """By which sums go to the host."""
        if by_micro_batch:
            assert staging is not None
            rests = on_host and self.owned == self._scattered
            self.gradient = (room if rests else partial(_on, device))(length, gradient_dtype)
            self.gradient_at_rest = self.gradient if rests else None
        else:
            self.filling = torch.zeros(spec.numel, dtype=gradient_dtype, device=device)
            self.gradient = self.filling[slice(*self.owned)]
        self.state = GradientState.EMPTY
        self.used = [False] * len(spec.entries)  # whose gradient has arrived in this step
        self._filled = [False] * len(spec.entries)  # whose gradient is in `filling`
        self._sums = 0  # micro-batches that `gradient` holds
        self._in_flight: Pending | None = None
        self._among_copies: Pending | None = None
        self._scratch: Tensor | None = None
        self._squares: tuple[Tensor, ...] = ()
        """Of the sum that left a GPU for the host, while it is the only one: what is there need not come back."""

    @property
    def device(self) -> torch.device:
        """Where it is computed with."""
        return self._nowhere.device

    # ---- weights ----

    @property
    def value(self) -> Tensor:
        """The weights [numel]; only while they are here."""
        assert self._value is not None, f"chunk {self.spec.id}: its weights are not gathered"
        return self._value

    @property
    def resting_bytes(self) -> int:
        """Of weights between steps."""
        kept = self.own_value if self.is_sharded else self.value
        return kept.numel() * kept.element_size()

    def adopt(self, parameters: Mapping[str, nn.Parameter], initial: Mapping[str, Tensor]) -> None:
        """Take over the entries' parameters: copy in their initial values, make each a view of `value`.

        `initial` holds each entry's value in the master dtype or any other, of the parameter's shape.
        """
        self._parameters = [parameters[entry.name] for entry in self.spec.entries]
        self._placeholders = [self._nowhere.expand(p.shape) for p in self._parameters]
        for entry in self.spec.entries:
            self.load(entry, initial[entry.name])
        (self._hide if self.is_sharded else self._show)()

    def load(self, entry: Entry, value: Tensor) -> None:
        """Set one entry's weight, and its master, from all its elements."""
        assert self.weights is (WeightState.SHARDED if self.is_sharded else WeightState.WHOLE)
        flat = value.reshape(-1)
        if not self.is_sharded:
            self.value[entry.start : entry.stop].copy_(flat)
        if part := self.part_of(entry):
            local, start = part
            own = flat[start : start + local.stop - local.start]
            if self.residual is not None:
                self.set_masters(local, own)
            else:
                self.master[local].copy_(own)
                if self.is_sharded and self.master is not self.own_value:
                    self.own_value[local].copy_(own)
        self.count_change()

    def publish(self, start: int, stop: int, *, is_written: bool = False) -> None:
        """Make the model see master elements [start, stop): of this rank's shard, until the next gather.  `is_written`:
        the update has written what `seen` gave it, and whoever ran it counts the change."""
        if is_written:
            return
        if (seen := self.seen(start, stop)) is not None:
            seen.copy_(self.master[start:stop])
        self.count_change()

    def count_change(self) -> None:
        """Some of the weights are others now, of this rank's shard or not: who has saved some is told so when it wants
        them. Autograd itself would not know, of views that parameters were given as their `data`."""
        self.version += 1
        increment_version(self._parameters)

    def seen(self, start: int, stop: int) -> Tensor | None:
        """What the model sees of master elements [start, stop), for an update to write; None: the masters, or the
        upper half of them."""
        return None if self.updates_weights else self.own_value[start:stop]

    # ---- masters ----

    @property
    def updates_weights(self) -> bool:
        """Whether an update reads and writes the weights: they are the masters, or a half of them."""
        return self.master is self.own_value or self.residual is not None

    @property
    def master_words(self) -> Tensor:
        """The memory of what the masters have beside the weights, as numbers of the gradient's dtype."""
        return self.master if self.residual is None else self.residual.view(self.gradient.dtype)

    @property
    def master_bytes(self) -> int:
        """Of what the masters have beside the weights."""
        if self.master is self.own_value:
            return 0
        kept = self.master if self.residual is None else self.residual
        return kept.numel() * kept.element_size()

    def rest_master(self, words: Tensor) -> None:
        """`words` have what the masters have beside the weights from now on."""
        if self.residual is None:
            self.master = words
        else:
            self.residual = words.view(torch.int16)

    def halves(self, local: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Upper half, residual and ties of master elements [start, stop) where they are split; start is a multiple of
        8, and so is stop, or a gap follows."""
        assert self.residual is not None and local.start % 8 == 0
        length = self.own_value.numel()
        ties = self.residual[length:].view(torch.uint8)
        return self.own_value[local], self.residual[local], ties[local.start // 8 : -(-local.stop // 8)]

    def masters(self, local: slice | None = None) -> Tensor:
        """The masters, or elements [start, stop) of them; joined, a copy, where they are split."""
        local = local or slice(0, self.own_value.numel())
        if self.residual is None:
            return self.master[local]
        here = self.own_value.device
        return split.join(*(to_device(half, here) for half in self.halves(local)))

    def set_masters(self, local: slice, masters: Tensor) -> None:
        """Split such elements of any dtype into their halves."""
        halves, device = self.halves(local), self.own_value.device
        here = [to_device(half, device) for half in halves]
        split.split_(to_device(masters, device).to(self.master.dtype), *here)
        for half, changed in zip(halves, here, strict=True):
            if changed is not half:  # the residual rests on another tier
                half.copy_(changed)

    @property
    def update_bytes(self) -> int:
        """What an update holds beside the state: a copy that shows whether it changed, and halves joined."""
        length = self.owned[1] - self.owned[0]
        if self.residual is None:
            return length * self.gradient.element_size()
        return (
            self.own_value.numel() * self.own_value.element_size()
            + self.master_bytes
            + split.joined_bytes(length)
        )

    def owe(self) -> None:
        """Nobody may read the weights until their update, which has yet to come."""
        if not self.is_sharded:  # else nobody can
            self.finish_gather()
            self.move_weights(WeightState.OWED)
            self._hide()

    def pay(self) -> None:
        """The update that was owed has come."""
        if self.weights is WeightState.OWED:
            self._show()
            self.move_weights(WeightState.WHOLE)

    def start_gather(self) -> None:
        """Begin to fetch the other ranks' shards of the weights, which they have updated, if every rank keeps all.
        Collective."""
        if self.is_sharded or self.owned == (0, self.spec.numel):
            return
        self.move_weights(WeightState.SHARDED)
        self._hide()
        self.move_weights(WeightState.GATHERING)
        self._gathering = self.shards.all_gather_async(self.own_value, self.value)

    def unshard(self, slot: Tensor) -> None:
        """Begin to gather sharded weights into `slot` [numel], which is lent until `reshard`. Collective."""
        assert self.is_sharded and slot.numel() == self.spec.numel
        self.move_weights(WeightState.GATHERING)
        self._value = slot
        self._gathering = self.shards.all_gather_async(self.own_value, slot)

    @property
    def part_numel(self) -> int:
        """Elements of the weights that this rank keeps from forward to backward; 0: no more than its shard."""
        near = self.groups.near.size
        return self.spec.numel // near if self.is_sharded and near < self.shards.size else 0

    def keep_part(self, part: Tensor) -> None:
        """Copy this rank's part [part_numel] of the gathered weights for `unshard_near`."""
        self.finish_gather()
        part.copy_(self.value[slice(*self.spec.shard(self.groups.near.size, self.groups.near.coord))])

    def unshard_near(self, slot: Tensor, part: Tensor) -> None:
        """As `unshard`, from the parts that the neighbours have kept since. Collective among them."""
        assert self.is_sharded and slot.numel() == self.spec.numel
        self.move_weights(WeightState.GATHERING)
        self._value = slot
        self._gathering = self.groups.near.all_gather_async(part, slot)

    def fetch(self, slot: Tensor, up: Link) -> None:
        """Begin to bring this rank's shard, which rests on the host, to its place in `slot` [numel], which is lent
        until `reshard`; what is on the device for its update is taken from there."""
        assert self.is_sharded and self.weights_at_rest is not None and slot.numel() == self.spec.numel
        self.move_weights(WeightState.FETCHING)
        self._value = slot
        if self.own_value is self.weights_at_rest:
            self._incoming = up.copy(slot[slice(*self.shard)], self.own_value)
        else:
            slot[slice(*self.shard)].copy_(self.own_value)

    def gather_fetched(self) -> None:
        """Begin to gather the shards of the others beside the one that was fetched. Collective."""
        if self.shards.size > 1:
            self._finish_fetch()
        self.move_weights(WeightState.GATHERING)
        self._gathering = self.shards.all_gather_async(self.value[slice(*self.shard)], self.value)

    def _finish_fetch(self) -> None:
        if self._incoming is not None:
            self._incoming.wait()
            self._incoming = None

    def reshard(self) -> None:
        """Hand the slot back. Nothing may read the weights any more."""
        self._finish_fetch()
        self.finish_gather()
        self.move_weights(WeightState.SHARDED)
        self._hide()
        self._value = None

    def finish_gather(self) -> None:
        """Wait for the weights to be WHOLE; at once if none are on their way."""
        if self._gathering is None:
            return
        self._finish_fetch()
        self._gathering.wait()
        self._gathering = None
        self._show()
        self.move_weights(WeightState.WHOLE)

    def keep(self) -> None:
        """Weights that were gathered stay for good: the run is over."""
        self.is_sharded = False

    def saved(self, tensor: Tensor) -> SavedView | None:
        """A note of where `tensor` lies in the weights, if it does."""
        storage = tensor.untyped_storage()._cdata
        if self._value is None or storage != self._value.untyped_storage()._cdata:
            return None
        start_bytes = (
            tensor.storage_offset() * tensor.itemsize - self._value.storage_offset() * self._value.itemsize
        )
        if not 0 <= start_bytes < self._value.numel() * self._value.itemsize:
            return None
        offset = start_bytes // tensor.itemsize
        return SavedView(self, offset, tensor.shape, tensor.stride(), tensor.dtype, self.version)

    @property
    def placeholder(self) -> int:
        """Identity of the storage that parameters show while the weights are not here."""
        return int(self._nowhere.untyped_storage()._cdata)

    def _show(self) -> None:
        for entry, parameter in zip(self.spec.entries, self._parameters, strict=True):
            parameter.data = self.value[entry.start : entry.stop].view(parameter.shape)

    def _hide(self) -> None:
        for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
            parameter.data = placeholder

    def move_weights(self, state: WeightState) -> None:
        assert (self.weights, state) in LEGAL_WEIGHT, (
            f"chunk {self.spec.id}: weights may not go {self.weights} -> {state}"
        )
        self.weights = state

    # ---- tiers ----

    def keep_weights_on_device(self) -> None:
        """This rank's shard rests on the device from now on."""
        assert self.weights_at_rest is not None and self.own_value is self.weights_at_rest
        kept = copied_to(self.own_value, self.device)
        self.master = kept if self.master is self.own_value else self.master
        self.own_value, self.weights_at_rest = kept, None

    def keep_gradient_on_device(self) -> None:
        """This rank's sum of the gradient rests on the device from now on. Nothing of it may be on its way."""
        assert self.gradient_at_rest is not None and self.gradient is self.gradient_at_rest
        self.gradient, self.gradient_at_rest = copied_to(self.gradient, self.device), None
        self.outbox = None

    # ---- shards ----

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Leaf axes whose ranks own other elements of this chunk."""
        if self.owned == (0, self.spec.numel):
            return ()
        assert isinstance(self.spec.key, ChunkKey)
        return self.spec.key.shard_axes

    def part_of(self, entry: Entry) -> tuple[slice, int] | None:
        """This rank's part of an entry: where it lies in `master`, `gradient` and optimizer state, and which element of
        the parameter it begins with. None if it has none (an entry without elements belongs to no rank)."""
        first, last = max(entry.start, self.owned[0]), min(entry.stop, self.owned[1])
        if first >= last:
            return None
        return slice(first - self.owned[0], last - self.owned[0]), first - entry.start

    def of(self, buffer: Tensor, entry: Entry, shape: torch.Size) -> Tensor:
        """One entry's part of a whole flat buffer [numel], in the parameter's shape."""
        return buffer[entry.start : entry.stop].view(shape)

    def whole(self, owned: Tensor) -> Tensor:
        """All elements [numel] of a buffer of which each rank has its part [owned]. Collective where it is sharded."""
        return owned if owned.numel() == self.spec.numel else self.shards.all_gather(owned)

    # ---- gradients ----

    @property
    def takes_room(self) -> bool:
        """Whether a sum on its way has slots, of its own gradient or of what other ranks send."""
        return self.scatters or self.by_micro_batch

    def move(self, state: GradientState) -> None:
        assert (self.state, state) in LEGAL, (
            f"chunk {self.spec.id}: gradient may not go {self.state} -> {state}"
        )
        self.state = state

    def clear(self) -> None:
        """Forget this step's gradient. The old numbers stay in the buffer; the first arrival overwrites them."""
        self.move(GradientState.EMPTY)
        self.used = [False] * len(self.spec.entries)
        self._filled = [False] * len(self.spec.entries)
        self._sums, self._squares = 0, ()
        self._drop()

    def accept(self, index: int, gradient: Tensor, *, seed: float = 1.0) -> None:
        """Add the gradient of entry `index` from one micro-batch, whose backward was seeded with `seed`."""
        self.move(GradientState.FILLING)
        entry = self.spec.entries[index]
        target = self._to_fill()[entry.start : entry.stop].view(gradient.shape)
        if self._filled[index]:
            target.add_(gradient, alpha=1.0 / seed)
        else:
            target.copy_(gradient)
            if seed != 1.0:
                target.mul_(1.0 / seed)  # in the wide dtype: its own would lose what the scale has saved
            self._filled[index] = self.used[index] = True

    def completed(self) -> Tensor:
        """The buffer [numel] that fills, absent gradients as zero: for what is summed before the sync axes are."""
        self.move(GradientState.FILLING)
        filling = self._zeros_where_absent()
        self._filled = [True] * len(self.spec.entries)
        return filling

    def _zeros_where_absent(self) -> Tensor:
        filling = self._to_fill()
        for entry, filled in zip(self.spec.entries, self._filled, strict=True):
            if not filled:
                filling[entry.start : entry.stop].zero_()
        return filling

    def start_reduce(self) -> None:
        """Begin the sum over the sync axes; entries without a gradient count as zero. Collective."""
        assert self._among_copies is None, f"chunk {self.spec.id}: its copies are summed already"
        self.move(GradientState.REDUCING)
        filling = self._zeros_where_absent()
        if self.by_micro_batch:
            for start, stop in self._gaps():
                filling[start:stop].zero_()
        if not self.scatters:
            self._in_flight = self.groups.all.all_reduce_async(filling)
            return
        if self.received is not None:
            self._scratch = self.received.take(self._slot)
        self._in_flight = self._scatterers.reduce_scatter_async(
            filling, filling[slice(*self._scattered)], ordered=self.ordered, scratch=self._scratch
        )

    def finish_reduce(self) -> None:
        """Wait for the sum that was begun; by micro-batch, add it to those of the micro-batches before."""
        assert self._in_flight is not None, f"chunk {self.spec.id}: no reduction was begun"
        self._in_flight.wait()
        self._in_flight = None
        if self._scratch is not None:
            assert self.received is not None
            self.received.give(self._slot)
            self._scratch = None
        if self.by_micro_batch:
            assert self.filling is not None
            sums, summed = self._sharded_sums(), self.filling[slice(*self._scattered)]
            if self.outbox is not None:
                first = self.outbox.on_stream and self._sums == 0 and not self._sums_copies
                self._squares = tuple(self._squares_of(summed)) if first else ()
                self.outbox.send(sums, summed, add=self._sums > 0)
            elif self._sums:
                sums.add_(summed)
            else:
                sums.copy_(summed)
            self._drop()
            self._filled = [False] * len(self.spec.entries)
        self._sums += 1
        self.move(GradientState.PARTIAL)

    def start_copies(self) -> None:
        """After the last micro-batch of a step: begin to sum over the copies, if that has not begun. Collective."""
        if not self._sums_copies or self._among_copies is not None:
            return
        assert self.state is GradientState.PARTIAL
        if self.outbox is not None:
            self.outbox.flush()
        self._among_copies = self.groups.copies.all_reduce_async(self.gradient)

    def settle(self) -> None:
        """Of a step that is given up: what was begun beside the sums of its micro-batches is over."""
        if self.outbox is not None:
            self.outbox.flush()
        if self._among_copies is not None:
            self._among_copies.wait()
            self._among_copies = None

    def conclude(self) -> None:
        """All micro-batches of the step are summed. Collective where ranks need the sums of others."""
        self.start_copies()
        if self.outbox is not None:
            self.outbox.flush()
        if self._among_copies is not None:
            self._among_copies.wait()
            self._among_copies = None
        if self.by_micro_batch and self.owned != self._scattered:
            self._gather_sums()
        self.move(GradientState.REDUCED)

    def _gather_sums(self) -> None:
        """From what each of all ranks has of one sum in rank order to what each owns."""
        if self.owned == (0, self.spec.numel):
            self.groups.all.all_gather(self._sharded_sums(), self.gradient)
            return
        # In the order of all ranks a shard is in several places, so each rank sees the whole chunk, in its slot.
        whole = self.groups.all.all_gather(self._sharded_sums(), self._to_fill())
        self.gradient.copy_(whole[slice(*self.owned)])
        self._drop()

    def squares(self) -> Tensor:
        """Sum of squares of this rank's share of the counted gradient elements, 0-d float64."""
        assert self.state is GradientState.REDUCED and not self.ordered
        (squares,) = self._squares or self._squares_of(self.gradient)
        return squares

    def block_squares(self, entry: Entry) -> Tensor:
        """Squares [blocks] of the norms of an entry's blocks, float64; zero for blocks in other ranks' shares and for
        elements that this rank does not count. Their bits do not depend on where the chunk is cut."""
        assert self.state is GradientState.REDUCED and self.ordered
        number = self.spec.entries.index(entry)
        return self._squares[number] if self._squares else self._block_squares(self.gradient, entry)

    def _squares_of(self, gradient: Tensor) -> Iterator[Tensor]:
        """What `squares` tells of this gradient [owned], or, where sums are `ordered`, `block_squares` of each entry:
        taken on the device wherever the gradient is, so that the bits are the same."""
        if self.ordered:
            yield from (self._block_squares(gradient, entry) for entry in self.spec.entries)
            return
        spans = [self._share_of(first, last) for first, last in self._counted]
        found = [
            _block_norms(to_device(gradient[span], self.device)).double().square().sum()
            for span in spans
            if span.start < span.stop
        ]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        yield torch.stack(found).sum() if found else zero

    def _block_squares(self, gradient: Tensor, entry: Entry) -> Tensor:
        out = torch.zeros(blocks_of(entry), dtype=torch.float64, device=self.device)
        for first, last in self._counted:
            span = self._share_of(max(first, entry.start), min(last, entry.stop))
            if span.start >= span.stop:
                continue
            offset = span.start + self.owned[0] - entry.start
            for start, stop in _cut_to_blocks(offset, offset + span.stop - span.start):
                part = gradient[span.start + start - offset : span.start + stop - offset]
                norms = _block_norms(to_device(part, self.device))
                at = start // SHARD_BLOCK_NUMEL
                out[at : at + len(norms)] += norms.double().square()
        return out

    def _share_of(self, first: int, last: int) -> slice:
        """The part of elements [first, last) that lies in this rank's share, as a slice of `gradient`."""
        start = self.owned[0]
        return slice(max(first, self.share[0]) - start, min(last, self.share[1]) - start)

    def _sharded_sums(self) -> Tensor:
        """Where the sums of what is scattered to this rank are kept: in their own place, if they have one."""
        start, stop = self._scattered
        at = start if self.owned == (0, self.spec.numel) else 0
        return self.gradient[at : at + stop - start]

    def _to_fill(self) -> Tensor:
        if self.filling is None:
            assert self.staging is not None
            self.filling = self.staging.take(self._slot)
        return self.filling

    def _drop(self) -> None:
        if self.staging is not None and self.filling is not None:
            self.staging.give(self._slot)
            self.filling = None

    def _gaps(self) -> Iterator[tuple[int, int]]:
        end = 0
        for entry in self.spec.entries:
            yield end, entry.start
            end = entry.stop
        yield end, self.spec.numel


def _on(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def blocks_of(entry: Entry) -> int:
    """Blocks over which an entry's norm is summed."""
    return -(-(entry.stop - entry.start) // SHARD_BLOCK_NUMEL)


def _cut_to_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) as at most three ranges: to the first block boundary, whole blocks, the rest."""
    head = min(-(-start // SHARD_BLOCK_NUMEL) * SHARD_BLOCK_NUMEL, stop)
    body = max(stop // SHARD_BLOCK_NUMEL * SHARD_BLOCK_NUMEL, head)
    yield from ((a, b) for a, b in ((start, head), (head, body), (body, stop)) if a < b)


def _block_norms(flat: Tensor) -> Tensor:
    """Norms of the blocks of a buffer in its own dtype, the last block perhaps short (on CPU a float64 norm of a
    float32 buffer costs 40 times as much)."""
    whole = flat.numel() - flat.numel() % SHARD_BLOCK_NUMEL
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, SHARD_BLOCK_NUMEL), dim=1)] if whole else []
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return torch.cat(norms)
