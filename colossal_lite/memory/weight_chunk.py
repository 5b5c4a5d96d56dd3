"""Gathers, drops, fetches and loads the weights of one chunk, and points its parameters at them.

Note: states of weights.  The tensors are defined in memory/chunk.py.
Weights go WHOLE -> SHARDED -> (FETCHING ->) GATHERING -> WHOLE.  Sharded weights begin and end a step as SHARDED. Where
a step defers their update (zero/deferred_updates.py) they go WHOLE -> OWED -> WHOLE.  Any other move is a programming
error and raises.  A parameter of a chunk that is not WHOLE is a view of one NaN. So a read past the gates gives no
stale number.  Parameters never change their shape, dtype or identity.

A chunk of frozen weights has nothing else.  It is gathered, dropped and offloaded like any other, and never written.
memory/chunk.py adds what training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from colossal_lite.config.zero_stage import Sharding
from colossal_lite.distributed.communicator import Communicator, PendingCollective
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.packing import ChunkSpec, Entry
from colossal_lite.memory.pinned import zeros_on
from colossal_lite.memory.task_records import WEIGHTS, TaskRecords
from colossal_lite.memory.transfers import copied_to, copy_into, to_host
from colossal_lite.numerics.precision import ChunkTypes
from colossal_lite.numerics.torch_modes import storage_of

UNSHARDED = Sharding()
Values = Callable[[str, int, int], Tensor]
"""Elements [start, stop) of the flattened local parameter of that name, in any dtype."""


class OwnChanges:
    """Versions of parameters, as the engine's own changes have made them. Parameters that are views of one tensor, such
    as the parts of `w.chunk(3)`, have one version in torch, also in different chunks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        every = list(self._names)
        before = [p._version for p in every]
        increment_version(every)
        apart = [p._version - version == 1 for p, version in zip(every, before, strict=True)]
        self._of = {p: [p._version] for p, alone in zip(every, apart, strict=True) if alone}
        shared = [p for p, alone in zip(every, apart, strict=True) if not alone]
        while shared:
            before = [p._version for p in shared]
            increment_version(shared[:1])
            moved = [p for p, version in zip(shared, before, strict=True) if p._version != version]
            self._of |= dict.fromkeys(moved, [shared[0]._version])  # one list for all of them
            shared = [p for p in shared if p not in self._of]

    def has(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are among its parameters."""
        return all(parameter in self._of for parameter in parameters)

    def count(self, parameters: Sequence[nn.Parameter]) -> None:
        """The engine changes these."""
        increment_version(parameters)
        for parameter in parameters:
            self._of[parameter][0] += 1

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """What changed these before does not matter."""
        for parameter in parameters:
            self._of[parameter][0] = parameter._version

    def others(self, parameter: nn.Parameter) -> str | None:
        """The name of this one, if others may have changed it, or those of all parts of its tensor."""
        version = self._of[parameter]
        if parameter._version == version[0]:
            return None
        parts = [self._names[part] for part, of in self._of.items() if of is version]
        return parts[0] if len(parts) == 1 else f"one of {', '.join(parts)}, which are parts of one tensor,"


class WeightState(StrEnum):
    WHOLE = "whole"  # parameters are views of all elements, as new as the masters
    SHARDED = "sharded"  # only this rank's own shard is newest
    FETCHING = "fetching"  # its own shard is copied from the host
    GATHERING = "gathering"  # the shards of the others are being gathered
    OWED = "owed"  # the update of the last step is deferred


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
    """Offset of a tensor in a chunk's weights, in elements of `dtype`, to rebuild the view wherever they are."""

    chunk: WeightChunk
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int

    def rebuilt(self) -> Tensor:
        """The view in the slot where the weights are now. Raises ValueError if they have changed since."""
        if self.version != self.chunk.version:
            raise ValueError(
                f"backward: the weights {self.chunk.spec.few_names} have been updated since the forward that it "
                f"belongs to; call backward before step"
            )
        value = self.chunk.full_weight
        value = value if value.dtype == self.dtype else value.view(self.dtype)
        return value.as_strided(self.shape, self.stride, value.storage_offset() + self.offset)


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of a chunk. `all` sums its gradient, `shards` shares this rank's copy of it, and `copies` has
    the same shard. One copy is the rule. Several are hybrid sharding (arXiv 2304.11277, section 3.2.2). `near`: those
    of `shards` that may store the gathered weights between them from forward to backward."""

    all: Communicator
    shards: Communicator
    copies: Communicator
    near: Communicator

    def scatterers(self, *, ordered: bool) -> Communicator:
        """The ranks that scatter a sum among themselves: all for one sum in rank order, else those of a copy."""
        return self.all if ordered else self.shards


class WeightChunk:
    """The weights of one `ChunkSpec` on this rank."""

    def __init__(
        self, spec: ChunkSpec, groups: Groups, *, types: ChunkTypes, device: torch.device,
        sharding: Sharding = UNSHARDED, on_host: TaskRecords | None = None,
    ) -> None:  # fmt: skip
        """`groups`: the ranks that have the same values. `on_host`: shards that can be offloaded are, to these
        records (offload/shard_streaming.py)."""
        self.spec, self.groups, self.shards, self.sharding = spec, groups, groups.shards, sharding
        self.shard = spec.shard(self.shards.size, self.shards.coord)
        self.owned = self.shard if sharding.state else (0, spec.numel)
        self.owned_numel = self.owned[1] - self.owned[0]
        self._records = on_host
        self.types, dtype = types, types.compute
        self._nowhere = torch.full((), torch.nan, dtype=dtype, device=device)
        self.placeholder = storage_of(self._nowhere)
        """Identity of the storage that parameters have while the weights are not gathered."""
        self.device = self._nowhere.device
        """That computes with the weights."""
        self.is_sharded = sharding.weight and (self.shards.size > 1 or on_host is not None)
        rests = self.is_sharded and on_host is not None
        kept = self._room(WEIGHTS, self.owned_numel if self.is_sharded else spec.numel, dtype, rests=rests)
        self.weights_at_rest = kept if rests else None
        """The host memory of `local_shard`, if it is offloaded; during an update `local_shard` is elsewhere."""
        self._value = None if self.is_sharded else kept
        self.local_shard = kept if self.is_sharded else kept[slice(*self.owned)]
        self._parameters: list[nn.Parameter] = []
        self._placeholders: list[Tensor] = []
        self._views: list[tuple[torch.Size, tuple[int, ...], int]] = []
        """Shape, strides and first element of each parameter."""
        self.weights = WeightState.SHARDED if self.is_sharded else WeightState.WHOLE
        self.version = 0
        """How often the weights have changed."""
        self.changes = OwnChanges({})
        """Of all parameters of a model, if given before `adopt`. Else no other chunk has views of the same tensors."""
        self._storage = self.placeholder  # identity of that in which the parameters are
        self._gathering: PendingCollective | None = None
        self._incoming: Transfer | None = None
        self.going_home: Transfer | None = None
        """The last copy of updated weights to `weights_at_rest`: what reads these comes after it."""

    def _room(self, kind: str, numel: int, dtype: torch.dtype, *, rests: bool) -> Tensor:
        """Allocate a shard: in the records on the host if it `rests` there, else on the device."""
        if rests and self._records is not None:
            return self._records.room(self.spec.id, kind, numel, dtype)
        return zeros_on(self.device, numel, dtype)

    def _gone(self, kind: str) -> None:
        """Free the record of a shard that is no longer on the host."""
        if self._records is not None:
            self._records.free(self.spec.id, kind)

    # ---- weights ----

    @property
    def full_weight(self) -> Tensor:
        """All weights [numel]; only while they are gathered."""
        assert self._value is not None, f"chunk {self.spec.id}: its weights are not gathered"
        return self._value

    @property
    def resting_bytes(self) -> int:
        """Bytes of the weights between steps."""
        kept = self.local_shard if self.is_sharded else self.full_weight
        return self.types.resting_bytes(kept.numel())

    def adopt(self, parameters: Mapping[str, nn.Parameter], initial: Values | None) -> None:
        """Make each entry's parameter a view of `full_weight`, with its initial value; None: it is loaded later."""
        self._parameters = [parameters[entry.name] for entry in self.spec.entries]
        if not self.changes.has(self._parameters):
            self.changes = OwnChanges({entry.name: parameters[entry.name] for entry in self.spec.entries})
        self._placeholders = [self._nowhere.expand(p.shape) for p in self._parameters]
        starts = (entry.start for entry in self.spec.entries)
        self._views = [(p.shape, _strides(p.shape), s) for p, s in zip(self._parameters, starts, strict=True)]
        if initial is not None:
            least = 1 << (16 if self.device.type == "cpu" else 22)  # what the cache holds; megabytes a launch
            for entry, parameter in zip(self.spec.entries, self._parameters, strict=True):
                row_numel = parameter.numel() // max(parameter.shape[:1].numel(), 1)
                self._fill(entry, partial(initial, entry.name), max(least, -(-row_numel // 8) * 8))
        (self._hide if self.is_sharded else self._show)()
        self.note_versions()

    def load(self, entry: Entry, value: Tensor) -> None:
        """Set one entry's weight, and its master, from all its elements."""
        flat = value.reshape(-1)
        self._fill(entry, lambda start, stop: flat[start:stop], max(flat.numel(), 1))

    def _fill(self, entry: Entry, values: Callable[[int, int], Tensor], block_numel: int) -> None:
        """As `load`, from elements [start, stop) of it. Only what is stored here is asked for, a block at a time."""
        assert self.weights is (WeightState.SHARDED if self.is_sharded else WeightState.WHOLE)
        local, first = self.part_of(entry) or (slice(0, 0), 0)
        last = first + local.stop - local.start
        low, high = (first, last) if self.is_sharded else (0, entry.stop - entry.start)
        for start in range(low, high, block_numel):
            stop = min(start + block_numel, high)
            block = values(start, stop)
            if not self.is_sharded:
                self.full_weight[entry.start + start : entry.start + stop].copy_(block)
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                own = slice(local.start + begin - first, local.start + end - first)
                self.load_own(own, block[begin - start : end - start])
        self.count_change()

    def load_own(self, local: slice, own: Tensor) -> None:
        """Set this rank's part of an entry: elements `local` of `local_shard`."""
        if self.is_sharded:
            copy_into(self.local_shard[local], own)

    def count_change(self) -> None:
        """Count a change of weights, of this rank's shard or not, so that views saved before it raise. Autograd does
        not see changes of views that parameters were given as their `data`."""
        self.version += 1
        self.changes.count(self._parameters)

    def note_versions(self) -> None:
        """All weights were set: what changed them before does not matter."""
        self.changes.note(self._parameters)

    def regain_parameters(self) -> None:
        """All weights were set: parameters are views of them again, whatever others have done with them."""
        if self.weights is WeightState.WHOLE:
            self._show()
        elif self.weights in (WeightState.SHARDED, WeightState.OWED):
            self._hide()
        self.note_versions()

    @property
    def takes_changes(self) -> bool:
        """Whether a parameter that is changed in place stays changed: it is then the value that is updated."""
        return not self.is_sharded

    def replaced(self) -> str | None:
        """The name of a parameter that others have given other data (`p.data = ...`)."""
        each = zip(self.spec.entries, self._parameters, strict=True)
        return next((entry.name for entry, parameter in each if storage_of(parameter) != self._storage), None)

    def lost_change(self) -> str | None:
        """As `replaced`, or one that others have changed in place where the next gather or update undoes it."""
        if name := self.replaced():
            return name
        if self.takes_changes and self.weights is WeightState.WHOLE:
            return None
        return next(filter(None, map(self.changes.others, self._parameters)), None)

    def defer(self) -> None:
        """Hide the weights until their deferred update."""
        if not self.is_sharded:  # sharded weights are hidden already
            self.finish_gather()
            self.move_weights(WeightState.OWED)
            self._hide_own()

    def run_deferred(self) -> None:
        """Show the weights again: their deferred update has run."""
        if self.weights is WeightState.OWED:
            self._show()
            self.move_weights(WeightState.WHOLE)

    def start_gather(self) -> None:
        """Start to gather the other ranks' updated shards, where every rank stores all weights. Collective."""
        if self.is_sharded or self.owned == (0, self.spec.numel):
            return
        self.move_weights(WeightState.SHARDED)
        self._hide_own()
        self.move_weights(WeightState.GATHERING)
        self._gathering = self.shards.all_gather_async(self.local_shard, self.full_weight)

    def unshard(self, slot: Tensor, part: Tensor | None = None) -> None:
        """Start to gather sharded weights into `slot` [numel], lent until `reshard`. With `part`, from the parts that
        the neighbours have stored since, and collective among them; else from all shards. Raises ValueError where the
        weights have no memory at this time of the step."""
        assert self.is_sharded and slot.numel() == self.spec.numel
        if part is None and self.local_shard.is_meta and not self.device.type == "meta":
            raise ValueError(
                f"model: the weights {self.spec.few_names} are read between the last backward of a step and their "
                f"update. The device has gradients in their place then (memory.placement). Legal: reads after step or "
                f"zero_grad; as many backwards a step as gradient_accumulation says; modules in the order of the first "
                f"step"
            )
        self.move_weights(WeightState.GATHERING)
        self._value = slot
        ranks, own = (self.shards, self.local_shard) if part is None else (self.groups.near, part)
        self._gathering = ranks.all_gather_async(own, slot)

    @property
    def part_numel(self) -> int:
        """Elements of the weights that this rank stores from forward to backward; 0: no more than its shard."""
        near = self.groups.near.size
        return self.spec.numel // near if self.is_sharded and near < self.shards.size else 0

    def keep_part(self, part: Tensor) -> None:
        """Copy this rank's part [part_numel] of the gathered weights for `unshard`."""
        self.finish_gather()
        part.copy_(self.full_weight[slice(*self.spec.shard(self.groups.near.size, self.groups.near.coord))])

    def fetch(self, slot: Tensor, up: Link) -> None:
        """Start to copy this rank's shard from the host to its part of `slot` [numel], lent until `reshard`. A shard
        that is on the device for its update is copied from there."""
        assert self.is_sharded and self.weights_at_rest is not None and slot.numel() == self.spec.numel
        self.move_weights(WeightState.FETCHING)
        self._value = slot
        if self.local_shard is self.weights_at_rest:
            after = () if self.going_home is None else (self.going_home,)
            target = slot[slice(*self.shard)]
            self._incoming = up.copy(target, self.local_shard, after=after, prefetch=True)
        else:
            slot[slice(*self.shard)].copy_(self.local_shard)

    def gather_fetched(self) -> None:
        """Start to gather the shards of the others beside the fetched one. Collective."""
        if self.shards.size > 1:
            self._finish_fetch()
        self.move_weights(WeightState.GATHERING)
        self._gathering = self.shards.all_gather_async(self.full_weight[slice(*self.shard)], self.full_weight)

    def _finish_fetch(self) -> None:
        if self._incoming is not None:
            self._incoming.wait()
            self._incoming = None

    def reshard(self) -> None:
        """Give the slot back. Nothing may read the weights any more; a fetch that has not started is revoked."""
        if self.weights is WeightState.FETCHING and self._incoming is not None and self._incoming.revoke():
            self._incoming = None
        self._finish_fetch()
        self.finish_gather()
        self.move_weights(WeightState.SHARDED)
        self._hide()
        self._value = None

    @property
    def is_gathering(self) -> bool:
        """Whether the weights are in flight."""
        return self._gathering is not None

    def finish_gather(self) -> None:
        """Wait for the weights to be WHOLE; return at once if none are in flight."""
        if self._gathering is None:
            return
        self._finish_fetch()
        self._gathering.wait()
        self._gathering = None
        self._show()
        self.move_weights(WeightState.WHOLE)

    def keep(self) -> None:
        """Make gathered weights permanent: the run is over. Those that rest on the host stay there, for their size."""
        self.is_sharded = False
        assert self._value is not None
        if self.weights_at_rest is not None and self.weights_at_rest.device != self._value.device:
            self._value = to_host(self._value)
            self._show()

    def saved(self, tensor: Tensor) -> SavedView | None:
        """The offset of `tensor` in the weights, or None if it is not a view of them."""
        value = self._value
        if value is None or storage_of(tensor) != storage_of(value):
            return None
        start_bytes = tensor.storage_offset() * tensor.itemsize - value.storage_offset() * value.itemsize
        if not 0 <= start_bytes < value.nbytes:
            return None
        offset = start_bytes // tensor.itemsize
        return SavedView(self, offset, tensor.shape, tensor.stride(), tensor.dtype, self.version)

    @property
    def seen_in(self) -> int:
        """Identity of the storage by which a read is known. Sharded weights are known by their placeholder."""
        return self.placeholder if self.is_sharded else self._storage

    def _show(self) -> None:
        value = self.full_weight
        self._storage, start = storage_of(value), value.storage_offset()
        for (shape, strides, first), parameter in zip(self._views, self._parameters, strict=True):
            parameter.data = value.as_strided(shape, strides, start + first)

    def _hide_own(self) -> None:
        """Hide weights that are all here. What was changed in them before stays changed."""
        self._hide()
        if self.takes_changes:
            self.note_versions()

    def _hide(self) -> None:
        self._storage = self.placeholder
        for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
            parameter.data = placeholder

    def move_weights(self, state: WeightState) -> None:
        assert (self.weights, state) in LEGAL_WEIGHT, (
            f"chunk {self.spec.id}: weights may not go {self.weights} -> {state}"
        )
        self.weights = state

    def keep_weights_on_device(self) -> None:
        """Move this rank's shard to the device for good."""
        assert self.weights_at_rest is not None and self.local_shard is self.weights_at_rest
        self.local_shard, self.weights_at_rest = copied_to(self.local_shard, self.device), None
        self._gone(WEIGHTS)

    # ---- shards ----

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Leaf axes whose ranks own other elements of this chunk."""
        if self.owned == (0, self.spec.numel):
            return ()
        return self.spec.key.shard_axes

    def part_of(self, entry: Entry) -> tuple[slice, int] | None:
        """This rank's part of an entry: its slice of `master`, `gradient` and optimizer state, and the element of the
        parameter that it begins with. None if it has none (an entry without elements belongs to no rank)."""
        first, last = max(entry.start, self.owned[0]), min(entry.stop, self.owned[1])
        if first >= last:
            return None
        return slice(first - self.owned[0], last - self.owned[0]), first - entry.start

    def of(self, buffer: Tensor, entry: Entry, shape: torch.Size) -> Tensor:
        """One entry's part of a flat buffer [numel], in the parameter's shape: by one call, as it is made often."""
        assert shape.numel() == entry.stop - entry.start and entry.stop <= buffer.numel()
        assert buffer.stride() == (1,)
        return buffer.as_strided(shape, _strides(shape), buffer.storage_offset() + entry.start)

    def whole(self, owned: Tensor) -> Tensor:
        """All elements [numel] of a buffer whose parts [owned] the ranks hold. Collective where it is sharded."""
        return owned if owned.numel() == self.spec.numel else self.shards.all_gather(owned)


@lru_cache(maxsize=4096)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor of this shape."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
