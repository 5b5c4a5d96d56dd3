"""Gathers chunks of sharded weights into the slots of one arena, for gates and for plans of pipelines.

Note: saved views.
Autograd saves views of weights, which would read other bytes when a chunk gets another slot.  So saved tensors that lie
in a slot are stored as (chunk, offset, strides) and rebuilt on use.  A recomputed block saves real views, which live
until its own backward ends; its weights are not dropped before.  For a tensor that a hook packs, torch does not check
whether it was modified.  This hook does.  A weight that is not gathered is an error, never an old value: a parameter is
then NaN, and saving one is an error too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.link import Link
from colossal_lite.memory.pinned import zeros_on
from colossal_lite.memory.weight_chunk import SavedView, WeightChunk, WeightState
from colossal_lite.numerics.torch_modes import storage_of
from colossal_lite.transforms.compiled_units import Place
from colossal_lite.zero.forward_hooks import ForwardGates


class ShardedWeights(ForwardGates):
    """Gates of weights that are sharded between their uses."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk],
        frozen: Sequence[WeightChunk] = (),
    ) -> None:  # fmt: skip
        """As `ForwardGates`; `frozen`: the chunks that do not train."""
        self.up: Link | None = None
        """The link for shards that rest on the host."""
        self._arena: Tensor | None = None
        self._in_shared: set[int] = set()  # chunks whose slots lie in an arena of all engines of a store
        self._shared_arena: Tensor | None = None
        self._slots_in: set[int] = set()
        """Identities of the storages of both arenas; empty while there is none."""
        self._most_shared_numel = 0
        self._planned_numel = 0  # elements of the arena by the plan; 0 while there is none
        self._kept: Mapping[int, int] = {}  # offsets of the parts that neighbours store, by chunk
        self._most_numel = 0  # elements of the arena up to the furthest that was used
        self._stage = 0  # whose forward runs
        self._resident: dict[int, int] = {}  # chunk -> offset
        self._has_part: set[int] = set()  # chunks whose parts the neighbours hold
        self._wanted: dict[int, int] = {}  # chunk -> offset, of one that is fetched when its update has run
        self._all_sharded = all(chunk.is_sharded for chunk in chunks)
        super().__init__(module, parameters, chunks, frozen)
        self._placeholders = {chunk.placeholder: chunk for chunk in self._all.values() if chunk.is_sharded}

    @property
    def arena_bytes(self) -> int:
        return sum(arena.nbytes for arena in (self._arena, self._shared_arena) if arena is not None)

    @property
    def most_bytes(self) -> int:
        return (self._most_numel + self._most_shared_numel) * self._dtype.itemsize

    @property
    def forecast_bytes(self) -> int:
        return self._planned_numel * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._all.values())).types.compute

    def _allocate(self, numel: int) -> None:
        device = next(iter(self._all.values())).device
        self._arena = None  # before there is another
        self._arena = zeros_on(device, numel, self._dtype)
        self._note_arenas()

    def _note_arenas(self) -> None:
        arenas = (arena for arena in (self._arena, self._shared_arena) if arena is not None)
        self._slots_in = {storage_of(arena) for arena in arenas}

    # Deferred updates run. The gathers for the next forward go on.
    flush = for_readers = ForwardGates.run_deferred

    def remove(self) -> None:
        """Remove the gates, and leave full weights on every rank. Collective."""
        self.flush()
        for index, chunk in self._all.items():
            if chunk.is_sharded:
                self._fetch(index, None)
                self._gather(index)
                chunk.finish_gather()
                chunk.keep()
        self._resident.clear()  # for good
        super().remove()

    def _gates(self, place: Place, needed: Sequence[WeightChunk]) -> Iterator[Any]:
        # A chunk that one rank alone keeps is never gathered. That is a weight cut by tensor parallelism with data=1,
        # beside norms that the tensor ranks share. Its update may be deferred all the same.
        if whole := [chunk for chunk in needed if not chunk.is_sharded and chunk.spec.id in self._place]:
            yield from place.before(partial(self._enter, whole))

    @contextmanager
    def _watched(self, stage: int) -> Iterator[None]:
        self._stage = stage
        hooks = saved_tensors_hooks(self._pack, self._unpack) if torch.is_grad_enabled() else nullcontext()
        with hooks, super()._watched(stage):
            yield

    # ---- saved views ----

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | SavedView:
        storage = storage_of(tensor)
        if not self._slots_in or storage in self._slots_in:
            for index in self._resident:
                if (view := self._all[index].saved(tensor)) is not None:
                    return view
        if (chunk := self._placeholders.get(storage)) is not None:
            self._refuse_read(chunk)
        return tensor, tensor._version

    def is_in_slot(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage in self._slots_in or storage in self._placeholders

    def _note_read(self, stage: int, chunk: WeightChunk) -> None:
        if chunk.is_sharded:
            self._refuse_read(chunk)
        super()._note_read(stage, chunk)

    def _note_write(self, changed: Tensor) -> None:
        for index in self._resident:
            chunk = self._all[index]
            # One that is being gathered changes in any collective, which moves all of them on.
            if chunk.weights is WeightState.WHOLE and chunk.saved(changed) is not None:
                _refuse_change(f"one of {chunk.spec.few_names}, ...")
        super()._note_write(changed)

    def _refuse_replaced(self, places: Mapping[str, int]) -> None:
        for index in self._resident:
            if name := self._all[index].replaced():
                _refuse_change(name)
        super()._refuse_replaced(places)

    def _refuse_read(self, chunk: WeightChunk) -> None:
        """An operation reads weights of a chunk that is not gathered. Raises ValueError."""
        raise ValueError(
            f"model: one of {chunk.spec.few_names}, ... is read while it is not gathered; at zero.stage=3 a weight is "
            f"read by calling the module that owns it; or use zero.stage=2"
        )

    def _unpack(self, saved: tuple[Tensor, int] | SavedView) -> Tensor:
        """Raises ValueError for a saved tensor that is no weight, if it was modified since."""
        if isinstance(saved, SavedView):
            return saved.rebuilt()
        tensor, version = saved
        if tensor._version != version:
            raise ValueError(
                f"backward: a tensor {list(tensor.shape)} that the forward has saved was modified by an inplace "
                f"operation since; if it is a weight that step has updated, call backward before step"
            )
        return tensor

    # ---- gathers and drops ----

    def _fetch(self, index: int, offset: int | None, *, near: bool = False) -> None:
        """Give a chunk its slot. Then start the copy of its own shard if that is on the host. Otherwise start the
        gather of all shards, or of the neighbours' parts."""
        chunk = self._all[index]
        numel = chunk.spec.numel
        if self._arena is None or offset is None:
            slot = torch.empty(numel, dtype=chunk.types.compute, device=chunk.device)
        else:
            slot = self._arena[offset : offset + numel]
        if chunk.weights_at_rest is not None and self.up is not None and not near:
            chunk.fetch(slot, self.up)
        else:
            chunk.unshard(slot, self._part(index) if near else None)
        self._resident[index] = -1 if offset is None else offset
        if self._arena is not None and offset is not None:
            self._count(offset + numel)

    def _fetch_updated(self, index: int, offset: int) -> None:
        """As `_fetch`, after the deferred update of the chunk: from where this has been on the device, if it has."""
        if self._all_sharded:
            self._wanted[index] = offset
        self._run_deferred_until(self._last_trained([index]))
        self._wanted.clear()
        if index not in self._resident:
            self._fetch(index, offset)

    def updated(self, chunk: Chunk, *, changed: bool) -> None:
        """Fetch the chunk if that is what its update was run for."""
        if (index := chunk.spec.id) in self._wanted:
            self._fetch(index, self._wanted[index])

    def _count(self, stop: int) -> None:
        """The arena is used up to element `stop`."""
        self._most_numel = max(self._most_numel, stop)

    def _gather(self, index: int) -> None:
        """Start to gather the other shards, if that has not begun."""
        if self._all[index].weights is WeightState.FETCHING:
            self._all[index].gather_fetched()

    def _part(self, index: int) -> Tensor:
        assert self._arena is not None
        start = self._kept[index]
        return self._arena[start : start + self._all[index].part_numel]

    def _keep_part(self, index: int) -> None:
        """Before the first drop of a chunk: store this rank's part for the neighbours."""
        if index in self._kept and index not in self._has_part:
            part = self._part(index)
            self._all[index].keep_part(part)
            self._count(self._kept[index] + part.numel())
            self._has_part.add(index)

    def _drop(self, index: int) -> None:
        if self._is_watched and (name := self._all[index].replaced()):
            _refuse_change(name)
        self._all[index].reshard()
        del self._resident[index]

    def _last_trained(self, indices: Iterable[int]) -> int:
        """The last place of these chunks among those that have updates; -1: none."""
        return max((self._place[index] for index in indices if index in self._place), default=-1)

    def _before_load(self) -> None:
        raise ValueError(
            "model.load_state_dict(): at zero.stage=3 this rank has a shard of each weight; use "
            "engine.load_full_state_dict()"
        )

    def _before_state_dict(self, *_: object) -> None:
        if not self._names_only:
            raise ValueError(
                "model.state_dict(): at zero.stage=3 this rank has a shard of each weight; use engine.full_state_dict()"
            )


def _refuse_change(what: str) -> NoReturn:
    raise ValueError(
        f"model: its forward changes {what} in place. Here weights are copies, which are dropped "
        f"after use; legal: a buffer (register_buffer), or zero.stage=2 without offload"
    )
