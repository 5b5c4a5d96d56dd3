"""Stores optimizer state in flat buffers; reads, writes, parks and restores it between steps.

Note: access.
State on disk has its tensors on the meta device, so no code reads them by mistake.  `at_hand` and `opened` bring it to
memory, and `settle` writes changes back.  Split masters (kernels/split.py) are joined for a reader.  They are split
again before anything else is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.task_records import OPTIMIZER, WEIGHTS, TaskRecords
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.optimizers import Rule
from colossal_lite.offload.optimizer_states import OffloadedOptimizerStates
from colossal_lite.offload.state_storage import MASTER, Record, record_of


class OptimizerState:
    """State tensors and step counts of every chunk."""

    def __init__(
        self, chunks: Sequence[Chunk], rules: Sequence[Rule], shapes: Mapping[str, torch.Size],
        records: TaskRecords,
    ) -> None:  # fmt: skip
        """`rules` of the update of each chunk; `shapes` of parameters by name; state on the host is in `records`.
        The subclass allocates the state."""
        self._chunks, self._rules, self._shapes, self._records = tuple(chunks), tuple(rules), shapes, records
        self.tiers: OffloadedOptimizerStates | None = None
        """Copies to and from where state rests; None if that is the device."""
        self._forms = [
            dict.fromkeys(rule.states, rule.narrow or chunk.types.state)
            for chunk, rule in zip(self._chunks, self._rules, strict=True)
        ]
        """For each chunk the dtype of each state."""
        self._state: list[dict[str, Tensor]] = []
        self._on_device: frozenset[int] = frozenset()  # chunks whose state rests on the device
        self._steps = [[0] * len(c.spec.entries) for c in self._chunks]
        self._index = {chunk.spec.id: index for index, chunk in enumerate(self._chunks)}
        self._changing: set[tuple[int, str]] = set()  # records that are written between steps
        self._joined: tuple[Chunk, slice, Tensor] | None = None  # split masters that may have been written

    # ---- where it rests ----

    def tier_of(self, chunk: Chunk) -> str | None:
        """Where the record of a chunk rests; None: on the device."""
        index = self._index[chunk.spec.id]
        return None if self.tiers is None or index in self._on_device else self.tiers.tier_of(index)

    def bytes_of(self, chunk: Chunk) -> tuple[int, int]:
        """State of a chunk, its master left out: held now, and by its rule's formula."""
        index = self._index[chunk.spec.id]
        return sum(t.nbytes for t in self._state[index].values()), self._state_bytes(index)

    def _state_bytes(self, index: int) -> int:
        return self._chunks[index].owned_numel * sum(dtype.itemsize for dtype in self._forms[index].values())

    def record_bytes(self, index: int) -> int:
        """Of the state of chunk `index`, its master included where that is apart from the weights."""
        return self._state_bytes(index) + self._chunks[index].master_bytes

    # ---- reads and writes between steps ----

    @contextmanager
    def at_hand(self, chunk: Chunk, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """The state of a chunk by name, and its master in it, in memory; to be changed if `write`. Raises DiskError."""
        self._split_joined()
        index = self._index[chunk.spec.id]
        if write:
            self._change(chunk)
        if self.tiers is None or index in self._on_device:
            yield self._state[index]
            return
        self.tiers.check()
        parts = dict(self.tiers.opened(index, write=write))
        before = chunk.master, chunk.residual
        if (words := parts.pop(MASTER, None)) is not None:
            chunk.rest_master(words)
        try:
            yield parts
        finally:
            chunk.master, chunk.residual = before

    def opened(self, chunk: Chunk, name: str, local: slice, *, write: bool) -> Tensor:
        """Elements of a buffer [owned] of a chunk that `flat_state` or its master has on the meta device: in memory,
        until some others are asked for. `name`: of the state, or "model". Raises DiskError."""
        if name != "model" or chunk.residual is None:
            assert self.tiers is not None
            name = MASTER if name == "model" else name
            if write:
                self._change(chunk)
            return self.tiers.opened(self._index[chunk.spec.id], write=write)[name][local]
        if self._joined is not None and self._joined[:2] == (chunk, local):
            return self._joined[2]
        with self.at_hand(chunk):
            masters = chunk.masters(local)
        self._joined = (chunk, local, masters) if write else None
        return masters

    def _split_joined(self) -> None:
        """Split masters again that were joined to be changed."""
        joined, self._joined = self._joined, None
        if joined is not None:
            chunk, local, masters = joined
            with self.at_hand(chunk, write=True):
                chunk.set_split_masters(local, masters)

    def check(self) -> None:
        """Raise the DiskError that has ended the use of the state, if there is one."""
        if self.tiers:
            self.tiers.check()

    def settle(self) -> None:
        """Write changes between steps back to where the state rests. Raises DiskError."""
        self._split_joined()
        if self.tiers:
            self.tiers.settle()
        while self._changing:
            self._records.commit(*self._changing.pop())

    def changing(self, frozen: Sequence[WeightChunk] = ()) -> None:
        """State on the host may be written from now on, `frozen` weights too; it is valid after `settle`."""
        for chunk in (*self._chunks, *frozen):
            self._change(chunk)

    def unchanged(self) -> None:
        """Nothing was written: the state on the host is still valid."""
        while self._changing:
            self._records.cancel(*self._changing.pop())

    def _change(self, chunk: WeightChunk) -> None:
        for kind in (OPTIMIZER, WEIGHTS):
            self._changing.add((chunk.spec.id, kind))
            self._records.begin(chunk.spec.id, kind)

    # ---- what outlives the engine ----

    def form(self) -> dict[str, list[Any]]:
        """The layout of each chunk's records, by its number: another engine needs the same to restore them."""
        return {
            f"chunk {chunk.spec.id}": [
                [[entry.name, entry.start, entry.stop] for entry in chunk.spec.entries],
                [*chunk.owned],
                str(chunk.local_shard.dtype),
                [[name, numel, str(dtype)] for name, numel, dtype in self._layout(index).forms],
            ]
            for index, chunk in enumerate(self._chunks)
        }

    def park(self, version: int) -> None:
        """Copy state and weights to the records on the host, if they rest elsewhere."""
        for chunk in self._chunks:
            with self.at_hand(chunk) as state:
                for kind, pairs in self._parked(chunk, state).items():
                    for here, there in pairs:
                        there.copy_(here)
                    self._records.commit(chunk.spec.id, kind, version=version)

    def take_up(self) -> None:
        """Copy what an earlier engine has parked to where it rests here, and free its room on the host."""
        for chunk in self._chunks:
            with self.at_hand(chunk, write=self.tier_of(chunk) != "host") as state:
                for kind, pairs in self._parked(chunk, state).items():
                    for here, there in pairs:
                        here.copy_(there)
                    self._records.free(chunk.spec.id, kind)
            chunk.count_change()
        self.settle()

    def _parked(
        self, chunk: Chunk, state: Mapping[str, Tensor]
    ) -> dict[str, Sequence[tuple[Tensor, Tensor]]]:
        """What of a chunk rests elsewhere than on the host, by kind: each tensor, and its place in the records."""
        number, layout = chunk.spec.id, self._layout(self._index[chunk.spec.id])
        found: dict[str, Sequence[tuple[Tensor, Tensor]]] = {}
        if self.tier_of(chunk) != "host":
            flat = self._records.room(number, OPTIMIZER, layout.size, chunk.types.state)
            own = {**state, MASTER: chunk.master_words}
            found[OPTIMIZER] = [(own[name], part) for name, part in layout.parts(flat).items()]
        if chunk.weights_at_rest is None:
            value = chunk.local_shard
            found[WEIGHTS] = [(value, self._records.room(number, WEIGHTS, value.numel(), value.dtype))]
        return found

    def _layout(self, index: int) -> Record:
        return record_of(self._chunks[index], self._forms[index])

    def states_of(self, chunk: Chunk) -> Iterator[Mapping[str, Tensor]]:
        """The whole state tensors of each entry of a chunk, in its shape, with its step count as `step` (0-d int64).
        Collective where state is sharded."""
        index = self._index[chunk.spec.id]
        with self.at_hand(chunk) as state:
            whole = {name: chunk.whole(flat) for name, flat in state.items()}
            for entry, steps in zip(chunk.spec.entries, self._steps[index], strict=True):
                shape = self._shapes[entry.name]
                views = {name: chunk.of(flat, entry, shape) for name, flat in whole.items()}
                yield views | {"step": torch.tensor(steps)}

    def flat_state(self, chunk: Chunk) -> Mapping[str, Tensor]:
        """The state buffers [owned] of a chunk by name; on the meta device where they rest on disk."""
        return self._state[self._index[chunk.spec.id]]

    def updates(self) -> dict[str, int]:
        """Optimizer steps that each parameter has taken."""
        return {
            entry.name: count
            for chunk, counts in zip(self._chunks, self._steps, strict=True)
            for entry, count in zip(chunk.spec.entries, counts, strict=True)
        }

    def set_updates(self, updates: Mapping[str, int]) -> None:
        """Set these counts; a parameter that is not named has taken none."""
        self._steps = [[updates.get(entry.name, 0) for entry in c.spec.entries] for c in self._chunks]
