"""Gathers updated weights chunk by chunk, and waits for each before a module reads it.

Note: gates.
From stage 1 on a rank updates its shard of a chunk and gathers the others' shards.  It does so chunk by chunk in
forward order, while the next forward already runs.  A hook before the forward of every module with parameters waits for
their chunks.  At stage 3 the same gates gather (zero/sharded_weights.py), or the list of a pipeline does
(zero/stage_weights.py).  The gates also run deferred updates of the last step (zero/deferred_updates.py), all of them
before a forward ends.  Where shards are gathered, they run one chunk ahead.

Note: reads without a gate.
Code may read a weight without calling its owner, as in `x @ self.codebook.weight.T`.  During its gather a weight is NaN
(memory/chunk.py).  Saved tensors show some of these reads, but none under `no_grad` and none of a sum.  So the first
forward in each mode (with gradients, and without) is seen operation by operation.  Weights that it reads early are
complete before each forward from then on.  Code that first runs in a later forward is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.torch_modes import WatchingMode, read_by, storage_of, without_modes, written_by
from colossal_lite.schedule.plan import Action
from colossal_lite.transforms.compiled_units import Place, compiled_units
from colossal_lite.zero.deferred_updates import DeferredUpdates
from colossal_lite.zero.parameter_order import own_parameters


class ForwardGates:
    """Gates before the modules of one model, whose weights are full between steps."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk],
        frozen: Sequence[WeightChunk] = (),
    ) -> None:  # fmt: skip
        """`parameters`: those of `module` by the names that the chunks have for them. `frozen`: the chunks that never
        change, where they need gates."""
        self._module, self._chunks = module, tuple(chunks)
        self._all: dict[int, WeightChunk] = {chunk.spec.id: chunk for chunk in (*chunks, *frozen)}
        self._names_only = False
        self._place = {chunk.spec.id: place for place, chunk in enumerate(self._chunks)}
        self._deferred: DeferredUpdates | None = None
        self._read_early: dict[int, int] = {}
        """Stage -> the last place of a chunk that is read before its gate."""
        self._was_seen: set[tuple[int, bool]] = set()  # stages that were watched, with gradients or without
        self._asked: set[int] = set()  # chunks that gates have asked for in this forward
        self._is_watched = False  # whether such a forward runs
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the model's own `state_dict()` may be called, whatever part this rank has."""
        self.refuses_writes = False
        """Whether several ranks, or several forwards of a step, would each change a frozen parameter."""
        self._frozen_in = {storage_of(p): n for n, p in parameters.items() if not p.requires_grad}
        names = {id(parameter): name for name, parameter in parameters.items()}
        chunk_of: dict[str, WeightChunk] = {e.name: c for c in (*chunks, *frozen) for e in c.spec.entries}
        hidden = {name for name, chunk in chunk_of.items() if chunk.is_sharded}
        self._frozen = {n: p for n, p in parameters.items() if not p.requires_grad and n not in hidden}
        self._handles: list[Any] = []
        units = compiled_units(module)
        for owner in module.modules():
            is_unit = units.get(owner, False)
            own = [names[id(p)] for p in (owner.parameters() if is_unit else own_parameters(owner))]
            needed = tuple(dict.fromkeys(chunk_of[name] for name in own if name in chunk_of))
            if needed:
                place = Place(owner, is_unit, is_within=owner in units and not is_unit)
                self._handles += self._gates(place, needed)
            has_state = any(True for _ in chain(owner.parameters(), owner.buffers()))
            if own or owner is module or has_state:  # one activation may be in other models too
                self._handles.append(owner.register_state_dict_pre_hook(self._before_state_dict))
                self._handles.append(owner.register_load_state_dict_pre_hook(lambda *_: self._before_load()))

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ValueError(
            "copy.deepcopy of a model that an engine trains: its weights and hooks are the engine's. Legal: a copy "
            "made before cl.initialize, which loads engine.full_state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ValueError(
            "torch.save, or pickle, of a model that an engine trains: its weights and hooks are the engine's. Legal: "
            "state = engine.full_state_dict() on every rank, and torch.save(state, path) on one; engine.save; the "
            "model after engine.close()"
        )

    @contextmanager
    def forward(self, stage: int = 0) -> Iterator[None]:
        """Around the forward of one micro-batch by a stage, also where this rank has none."""
        with self._watched(stage):
            yield
        self.run_deferred()

    @contextmanager
    def _watched(self, stage: int) -> Iterator[None]:
        """The first forward in each mode is watched; what a later one reads early is complete before it begins."""
        key = stage, torch.is_grad_enabled()
        if key in self._was_seen:
            if (last := self._read_early.get(stage, -1)) >= 0:
                self._run_deferred_until(last)
                for chunk in self._chunks[: last + 1]:
                    chunk.finish_gather()
            yield
            return
        self.run_deferred()
        for chunk in self._chunks:
            if not chunk.is_sharded:  # a gather for a later stage stays hidden until then
                chunk.finish_gather()
        self._asked.clear()
        places = {name: storage_of(p) for name, p in self._frozen.items()}
        self._is_watched = True
        try:
            with OutsideReads(self._all.values(), partial(self._note_read, stage), self._note_write) as watch:
                yield
        finally:
            self._is_watched = False
        self._refuse_replaced(places)
        if watch.has_seen:  # else this rank has no samples
            self._was_seen.add(key)

    def watch_again(self) -> None:
        """After a step whose loss was no number: weights may be read that the first forwards did not read."""
        self._was_seen.clear()

    def _note_read(self, stage: int, chunk: WeightChunk) -> None:
        """An operation reads weights of this chunk."""
        if chunk.spec.id in self._place and chunk.spec.id not in self._asked:
            self._read_early[stage] = max(self._read_early.get(stage, -1), self._place[chunk.spec.id])

    def _note_write(self, changed: Tensor) -> None:
        """An operation has changed this tensor. Raises ValueError for a frozen parameter."""
        if (name := self._frozen_in.get(storage_of(changed))) is not None:
            self._refuse_write(name)

    def _refuse_replaced(self, places: Mapping[str, int]) -> None:
        """A watched forward is over. Raises ValueError for parameters that have other data (`p.data = ...`), which no
        operation shows. `places`: storages of frozen ones before."""
        for name, place in places.items():
            if storage_of(self._frozen[name]) != place:
                self._refuse_write(name)

    def _refuse_write(self, name: str) -> None:
        if self.refuses_writes:
            raise ValueError(
                f"model: its forward changes {name}, a parameter that does not train. Each rank and each micro-batch "
                f"would change its own; legal: a buffer (register_buffer), which is compared between ranks"
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of one micro-batch, also where this rank has none."""
        self.run_deferred()
        yield

    def after_fetches(self, call: Callable[[], None]) -> None:
        """Call this in the next backward, when its last weights are on their way from the host. Here none are."""
        call()

    def follow(self, actions: Sequence[Action]) -> None:
        """This rank's list of a step or evaluation begins."""

    def gather(self, action: Action) -> None:
        """Do a FETCH, an UNSHARD or a RESHARD of the list. Collective where other ranks have shards."""
        raise AssertionError(f"{action}: no weights are sharded here")

    def is_in_slot(self, tensor: Tensor) -> bool:
        """Whether this tensor is in memory that other weights take when its stage has run."""
        return False

    def arrive(self, stage: int) -> None:
        """Wait for the weights of a stage that computes next."""

    def flush(self) -> None:
        """Finish deferred updates and gathers."""
        self.run_deferred()
        for chunk in self._chunks:
            chunk.finish_gather()

    def defer(self, deferred: DeferredUpdates) -> None:
        """The updates of a step, which run from now on. What the next forward begins with is updated at once."""
        self._deferred = deferred
        for chunk in self._chunks:
            chunk.defer()
        self._run_deferred_until(self._first)

    def update(self, deferred: DeferredUpdates) -> None:
        """Run the updates of a step now. If one raises, all later requests raise the same: the weights are a mix."""
        self._deferred = deferred
        self.run_deferred()

    def give_up(self) -> bool:
        """After a forward or backward that failed: make the collectives of it that other ranks may still make. False:
        there are none. Collective where there are."""
        return False

    def for_readers(self) -> None:
        """Make parameters readable, with the values of the last step; not those that are sharded."""
        self.flush()

    @property
    def has_deferred(self) -> bool:
        """Whether updates of the last step are still to run."""
        return self._deferred is not None

    def run_deferred(self) -> None:
        """Run every deferred update. Raises what one of them has raised."""
        if self._deferred is not None:
            with without_modes():
                self._deferred.finish()
            self._deferred = None

    @property
    def has_failed(self) -> bool:
        """Whether an update of the last step has raised."""
        return self._deferred is not None and self._deferred.has_failed

    def discard(self) -> bool:
        """Forget failed updates, because all weights are about to be loaded. False: none has failed."""
        has_failed, self._deferred = self.has_failed, None if self.has_failed else self._deferred
        return has_failed

    def mark_failed(self) -> None:
        """The run is over: deferred updates never run, and a read of the weights raises an error."""
        if self._deferred is not None:
            self._deferred.mark_failed(
                ValueError(
                    "model: the run has ended by an error before the updates of its last step were made; its "
                    "weights are incomplete; continue from the last checkpoint"
                )
            )

    def _run_deferred_until(self, place: int) -> None:
        """Run the updates of the chunks up to this place in their order."""
        if self._deferred is not None and 0 <= place:
            with without_modes():
                self._deferred.until(min(place, len(self._chunks) - 1))

    @property
    def _first(self) -> int:
        """The last place among the chunks that a forward begins with."""
        return 0

    def again(self, owner: nn.Module) -> AbstractContextManager[None]:
        """Context of a second forward of `owner` in backward, where none of its hooks run."""
        return nullcontext()

    def updated(self, chunk: Chunk, *, changed: bool) -> None:
        """After the update of a chunk, in forward order, on every rank: start its gather."""
        if changed:
            chunk.start_gather()

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """The model's own `state_dict()`, for names, shapes and buffers: its weights may be placeholders."""
        self._names_only = True
        with self.reading():
            found = dict(self._module.state_dict(keep_vars=keep_vars))
        self._names_only = False
        return found

    def remove(self) -> None:
        """Remove the gates; first every weight is made full."""
        self.flush()
        for handle in self._handles:
            handle.remove()

    def _gates(self, place: Place, needed: Sequence[WeightChunk]) -> Iterator[Any]:
        yield from place.before(partial(self._enter, needed))

    def _before_state_dict(self, *_: object) -> None:
        if not self._names_only:
            self.flush()

    def _before_load(self) -> None:
        """Before `load_state_dict` of the model, which writes to parameters."""
        self.flush()

    def _enter(self, needed: Sequence[WeightChunk], module: nn.Module, args: Any) -> None:
        if self._deferred is not None:
            is_gathered = any(chunk.sharding_axes for chunk in needed)
            self._run_deferred_until(max(self._place[chunk.spec.id] for chunk in needed) + is_gathered)
        for chunk in needed:
            self._asked.add(chunk.spec.id)
            if chunk.is_gathering:
                with without_modes():
                    chunk.finish_gather()


class OutsideReads(WatchingMode):
    """One forward, seen operation by operation."""

    def __init__(
        self, chunks: Iterable[WeightChunk], read: Callable[[WeightChunk], object],
        written: Callable[[Tensor], object],
    ) -> None:  # fmt: skip
        """`read` is called with a chunk whose weights, or their placeholder, an operation reads. `written` is called
        with a tensor that an operation has changed."""
        super().__init__()
        self._read, self._written = read, written
        self.has_seen = False
        """Whether there was an operation."""
        self._chunks: dict[int, list[WeightChunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.seen_in, []).append(chunk)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_seen = True
        for tensor in read_by(func, args, kwargs):
            chunks = self._chunks.get(storage_of(tensor), ())
            for chunk in chunks:
                if len(chunks) == 1 or chunk.saved(tensor) is not None:
                    self._read(chunk)
        out = func(*args, **(kwargs or {}))
        for tensor in written_by(func, args, kwargs):
            self._written(tensor)
        return out
