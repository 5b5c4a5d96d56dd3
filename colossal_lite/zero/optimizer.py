"""The optimizer over chunks: state in flat buffers, updates on the ranges that were used.

Note: ranges.
A parameter that no rank used in a step is left alone: no decay, no momentum, its step count stands still, as
torch does with `grad=None`.  So a chunk is updated in maximal ranges of entries that are used and share a
step count; when all are, which is the rule, that is one call for the whole chunk.  A rule that needs whole
tensors gets them one by one.  State is float32 or better, however wide gradients are.  Weights kept in 16 bits
alone (`master="none"`) are widened for the update of one range and rounded back.  Narrow weights beside wide
masters are written by the update itself, while the new masters are in cache.  Split masters (kernels/split.py) are
updated in their halves; whoever else reads or writes some of them gets a joined copy.  Where states are narrow
(`moments="bf16"`) each entry is updated by itself, and rounded by numbers that its name and its elements count: the
same bits at any stage, chunk size and placement.  A rank that owns a shard of a chunk keeps state for that shard and
updates that: elementwise rules give the same bits wherever they cut.
State may rest on the host or on disk and visit the device chunk by chunk (zero/tiers.py): the plan says when; or be
updated on the host (zero/on_host.py).  State
that rests on disk is in memory while `at_hand` says so, or after `opened`; at other times its tensors are on the meta
device, where nobody can read them by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from colossal_lite.kernels import TORCH, Draws, Ops
from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk, GradientState
from colossal_lite.memory.copy_streams import AS_IT_COPIES, LinkSpeed
from colossal_lite.memory.link import Link
from colossal_lite.memory.local_shard import LocalShard
from colossal_lite.memory.packing import ChunkKey
from colossal_lite.memory.task_records import OPTIMIZER, WEIGHTS, TaskRecords
from colossal_lite.memory.transfers import copied_to
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.optimizers import Group, Rule, rule_of
from colossal_lite.numerics.random import key
from colossal_lite.offload.host_updates import HostUpdates, updating_bytes
from colossal_lite.offload.optimizer_states import AHEAD, OffloadedOptimizerStates
from colossal_lite.offload.pieces import VISITING, StateKind, passing_bytes, unused_bytes
from colossal_lite.offload.placement import spilled
from colossal_lite.offload.shard_streaming import HostShardStream
from colossal_lite.offload.state_storage import BELOW, MASTER, OpenFile, Record, record_of
from colossal_lite.schedule.optimizer_updates import ON_DEVICE, ChunkPart, part_of, update_plan
from colossal_lite.schedule.plan import DISK, Action, ActionKind, Plan


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of what a rank owns of a chunk, which have all taken `steps` updates so far: of
    entries `first` to `last`."""

    start: int
    stop: int
    steps: int
    first: int
    last: int


def ranges_to_update(
    chunk: Chunk, used: Sequence[bool], steps: Sequence[int], *, whole: bool = False
) -> Iterator[Range]:
    """Maximal runs of used entries with equal step counts, cut to what this rank owns of the chunk and counted
    from there; a run to the last entry takes the chunk's end along. `whole`: each used entry alone, and no more
    than it."""
    entries, (owned_start, owned_stop) = chunk.spec.entries, chunk.owned
    for _, run in groupby(range(len(entries)), key=lambda i: (i if whole else -1, used[i], steps[i])):
        first, *rest = run
        last = rest[-1] if rest else first
        if used[first]:
            is_end = last == len(entries) - 1 and not whole
            stop = chunk.spec.numel if is_end else entries[last].stop
            start, stop = max(entries[first].start, owned_start), min(stop, owned_stop)
            if start < stop:
                yield Range(start - owned_start, stop - owned_start, steps[first], first, last)


ORIGINS = {
    "passing": "slots of state from and to the disk",
    "unused": "ends of pages",
    "arena": "gradients in a backward, what visits for an update, and what rests there by turns",
}
"""What is held beside the state that rests off the device."""


@dataclass(frozen=True)
class Visit:
    """Bytes that state off the device takes beside itself, on a tier (None: the device): as they are, as many as were
    used at once, and by the formula."""

    kind: str
    tier: str | None
    bytes: int
    most_bytes: int
    forecast_bytes: int
    origin: str


class ChunkOptimizer:
    """State tensors and step counts of every chunk, and the update of one chunk at a time."""

    def __init__(
        self, chunks: Sequence[Chunk], groups: Sequence[Group], ops: Ops, shapes: Mapping[str, torch.Size], *,
        records: TaskRecords, placement: str = "device", timeout_s: float = 600.0, speed: LinkSpeed = AS_IT_COPIES,
        disk_speed: LinkSpeed = AS_IT_COPIES, open_file: OpenFile | None = None,
        seed: int = 0, update: str = "device", backward: bool = False, host_room: int | None = None,
    ) -> None:  # fmt: skip
        """`placement`: the tier on which state, and masters that are apart from the weights, rest: on the host, in
        `records`, where those may take `host_room` bytes with what their updates need there, and what is beyond rests
        on disk (None: no limit); `speed` of the link to it, `disk_speed` of the disk; `open_file` makes the disk's
        file; None where no step is taken; `seed` of what rounds narrow states; `update`: on the "host" what rests off
        the device is updated there; `backward`: updates come in the order of gradients.  Raises DiskError."""
        self._records, self._seed, self._backward = records, seed, backward
        self._chunks, self._groups, self._ops, self._shapes = tuple(chunks), tuple(groups), ops, shapes
        self._rules: list[Rule] = [rule_of(self.group_of(c), c.local_shard.dtype) for c in self._chunks]
        forms = [dict.fromkeys(rule.states, self._dtype_of(i)) for i, rule in enumerate(self._rules)]
        shares = any(c.weights_at_rest is not None or c.gradient_at_rest is not None for c in self._chunks)
        self.tiers: OffloadedOptimizerStates | None = None
        """Copies to and from where state rests; None if that is the device."""
        if self._chunks and placement != "device":  # of a pipeline stage where nothing trains there are none
            on_disk: Collection[int] | None = range(len(self._chunks)) if placement == "disk" else None
            if placement == "host" and host_room is not None:
                sizes = {i: size for i in range(len(self._chunks)) if (size := self.record_bytes(i))}
                updated = sizes if update == "host" else ()
                on_disk = spilled(sizes, host_room - updating_bytes(self._chunks, updated))
            self.tiers = OffloadedOptimizerStates(
                self._chunks, forms, timeout_s, speed, records,
                update=update, on_disk=on_disk, open_file=open_file, disk_speed=disk_speed, shares=shares,
            )  # fmt: skip
        self.below: HostUpdates | None = None
        """Updates on the host; None if there are none."""
        if self.tiers and self.tiers.on_host:
            self.below = HostUpdates(self._chunks, self.tiers.up, self.tiers.down)
            self.below.settle(self.tiers.on_host)
        self.plan = self._planned(None)
        self._state: list[dict[str, Tensor]] = [
            self.tiers.at_rest(index)
            if self.tiers
            else {
                name: torch.zeros(chunk.owned[1] - chunk.owned[0], dtype=dtype, device=chunk.device)
                for name, dtype in some.items()
            }
            for index, (chunk, some) in enumerate(zip(self._chunks, forms, strict=True))
        ]
        self._stays: frozenset[int] = frozenset(() if self.tiers else range(len(self._chunks)))
        self.shards: HostShardStream | None = None
        """Copies of weights and gradients that rest on the host; None if none does."""
        self.arena: Arena | None = None
        """That has all places on the device, where weights or gradients may rest on the host."""
        if shares:
            assert self.tiers is not None
            self.shards = HostShardStream(self._chunks, self.tiers.up, self.tiers.down, records)
            self.shards.settle(self.tiers.on_host, None, is_first=True)
        self._steps = [[0] * len(c.spec.entries) for c in self._chunks]
        self._index = {chunk.spec.id: index for index, chunk in enumerate(self._chunks)}
        self._changing: set[tuple[int, str]] = set()  # records that are written between steps
        self._joined: tuple[Chunk, slice, Tensor] | None = None  # split masters that may have been written
        self.changed = False
        """Whether an update has changed any master weight since this was last set to False."""

    @property
    def peak_lr(self) -> float:
        """Of the parameters in no group."""
        return self._groups[-1].lr

    def _dtype_of(self, index: int) -> torch.dtype:
        """Of the states of chunk `index`."""
        return self._rules[index].narrow or self._chunks[index].types.state

    def group_of(self, chunk: Chunk) -> Group:
        assert isinstance(chunk.spec.key, ChunkKey)
        return self._groups[chunk.spec.key.group]

    def update(self, chunk: Chunk, used: Sequence[bool], *, factor: float, grad_scale: float) -> None:
        """One optimizer step of one chunk; on the host it sets out, and has come after `arrived`. `used[i]`: some rank
        had a gradient for entry i; `factor` is the schedule's share of the peak learning rate; the gradient is divided
        by `grad_scale` and consumed."""
        assert chunk.state is GradientState.REDUCED
        index, rule = self._index[chunk.spec.id], self._rules[self._index[chunk.spec.id]]
        alone = not rule.is_elementwise or rule.narrow is not None
        spans = tuple(ranges_to_update(chunk, used, self._steps[index], whole=alone))
        self._steps[index] = [n + used[i] for i, n in enumerate(self._steps[index])]
        apply = partial(self._apply, index, spans, factor=factor, grad_scale=grad_scale)
        if self._is_on_host(index):
            self._set_out(index, apply, spans)
            return
        here = self._state[index] if self.tiers is None or index in self._stays else self.tiers.here(index)
        if self.shards:
            self.shards.here(index, is_whole=all(used))
        chunk.take_weights(is_whole=all(used))
        apply(chunk, here, self._ops)

    def remake(self, chunk: Chunk) -> None:
        """In the place of an update that a step has not made: weights that others have had the place of are made of
        their masters again."""
        index = self._index[chunk.spec.id]
        if self.tiers is not None and index not in self._stays:
            self.tiers.here(index)
        if self.shards:
            self.shards.here(index, is_whole=False)
        chunk.take_weights(is_whole=False)

    def _set_out(self, index: int, apply: Callable[..., None], spans: Sequence[Range]) -> None:
        assert self.tiers is not None and self.below is not None
        chunk = self._chunks[index]
        ops = self._ops if chunk.device.type == "cpu" else TORCH
        parts, before = self.tiers.begin_on_host(index)
        words = parts.pop(MASTER, None)
        is_whole = sum(span.stop - span.start for span in spans) == chunk.local_shard.numel()
        updated = self.below.update(
            index, words, lambda part: apply(part, parts, ops), after=before, is_whole=is_whole,
            then=partial(self._landed, index),
        )  # fmt: skip
        self.tiers.end_on_host(index, updated)

    def _landed(self, index: int) -> None:
        """An update on the host has written what rests there."""
        chunk = self._chunks[index]
        if self.tier_of(chunk) == "host":
            self._records.commit(chunk.spec.id, OPTIMIZER)
        if chunk.weights_at_rest is not None:
            self._records.commit(chunk.spec.id, WEIGHTS)

    def _apply(
        self, index: int, spans: Sequence[Range], part: LocalShard, state: Mapping[str, Tensor], ops: Ops,
        *, factor: float, grad_scale: float,
    ) -> None:  # fmt: skip
        """The update of these ranges of a chunk, wherever what this rank owns of it is."""
        chunk, rule = self._chunks[index], self._rules[index]
        group = self.group_of(chunk)
        before = None if self.changed else _copies(part)  # as a rule the first chunk says it for all
        for span in spans:
            entry, local = chunk.spec.entries[span.first], slice(span.start, span.stop)
            shape = torch.Size([span.stop - span.start]) if rule.is_elementwise else self._shapes[entry.name]
            gradient = part.gradient[local].view(shape)
            if rule.joins(group):  # it computes in the gradient's own memory
                gradient = gradient.to(chunk.types.state)
            states = {n: flat[local].view(shape) for n, flat in state.items()}
            draws = None
            if rule.narrow is not None:  # by the element of the parameter, wherever chunks and shards are cut
                draws = Draws(
                    key(self._seed, "moments", entry.name), chunk.owned[0] + span.start - entry.start
                )
            how = partial(
                rule.update, step=span.steps + 1, lr=group.lr * factor, grad_scale=grad_scale, draws=draws
            )
            if part.residual is None:
                stored, seen = part.master[local].view(shape), part.seen(span.start, span.stop)
                weight = stored.to(chunk.types.state)
                low = stored if weight is not stored else None if seen is None else seen.view(shape)
                how(ops, group, weight, gradient, states, low=low)
            elif rule.joins(group):
                masters = part.masters(local)
                how(ops, group, masters.view(shape), gradient, states)
                part.set_masters(local, masters)
            else:
                high, residual, ties = part.halves(local)
                how(ops, group, high, gradient, states, residual=residual, ties=ties)
        if before is not None and not all(map(torch.equal, before, _master_parts(part))):
            self.changed = True

    def arrived(self, chunk: Chunk) -> None:
        """The new weights of a chunk that is updated on the host are where the model reads them. Raises what its copies
        or its update have raised."""
        assert self.below is not None
        self.below.arrived(self._index[chunk.spec.id])

    @property
    def update_bytes(self) -> int:
        """What an update on the device holds beside the state, at the most."""
        there = [chunk for index, chunk in enumerate(self._chunks) if not self._is_on_host(index)]
        return max((chunk.update_bytes for chunk in there), default=0)

    def is_updated_on_host(self, chunk: Chunk) -> bool:
        """Whether a chunk's update is, for as long as its record rests where it does now."""
        return self._is_on_host(self._index[chunk.spec.id])

    def _is_on_host(self, index: int) -> bool:
        return self.below is not None and index in self.below.crossings

    def prepare(self) -> None:
        """Before the gradients are known: what of the state the first updates need sets out. Where weights come by the
        same link it would hold them up."""
        if self.tiers and self.shards is None:
            for action in takewhile(lambda a: a.kind is ActionKind.FETCH, self.plan[0]):
                self.tiers.moves[action.kind](action)

    def defer(self) -> None:
        """A step has ended, and what it updates is not whole where it rests before its updates have come."""
        if self.tiers:
            self.tiers.defer()
        if self.shards:
            self.shards.defer()

    def finish(self, factor: float) -> None:
        """After the update of the last chunk of a step: weights are back where they rest, state at least on its way."""
        if self.shards:
            self.shards.flush()

    def rest(self) -> None:
        """All state is where it rests. Raises DiskError."""
        if self.tiers:
            self.tiers.flush()

    @property
    def moves(self) -> dict[ActionKind, Callable[[Action], None]]:
        """What the actions of the plan beside UPDATE do."""
        return dict.fromkeys((ActionKind.FETCH, ActionKind.EVICT), self._move) if self.tiers else {}

    def _move(self, action: Action) -> None:
        part, index = part_of(action.chunk or 0, len(self._chunks))
        if part is not ChunkPart.RECORD:
            assert self.below is not None
            self.below.take_up(index) if action.kind is ActionKind.FETCH else self.below.bring(index, part)
            return
        assert self.tiers is not None
        self.tiers.moves[action.kind](action)
        if self.shards and action.resource != DISK:
            self.shards.fetch(index) if action.kind is ActionKind.FETCH else self.shards.evict(index)

    @property
    def links(self) -> tuple[Link, ...]:
        """By which state, weights and gradients travel between tiers."""
        updates_link = (self.below.updates_link,) if self.below else ()
        return (
            *(self.tiers.links if self.tiers else ()),
            *(self.shards.links if self.shards else ()),
            *updates_link,
        )

    def close(self) -> None:
        if self.below:
            self.below.close()
        if self.shards:
            self.shards.close()
        if self.tiers:
            self.tiers.close()

    # ---- what rests where ----

    def tier_of(self, chunk: Chunk) -> str | None:
        """Where the record of a chunk rests; None: on the device."""
        index = self._index[chunk.spec.id]
        return None if self.tiers is None or index in self._stays else self.tiers.tier_of(index)

    def bytes_of(self, chunk: Chunk) -> tuple[int, int]:
        """State of a chunk, its master left out: held now, and by its rule's formula."""
        index = self._index[chunk.spec.id]
        width = len(self._rules[index].states) * self._dtype_of(index).itemsize
        held = sum(t.numel() * t.element_size() for t in self._state[index].values())
        return held, (chunk.owned[1] - chunk.owned[0]) * width

    def record_bytes(self, index: int) -> int:
        """Of the state of chunk `index`, its master included where that is apart from the weights."""
        chunk = self._chunks[index]
        states = len(self._rules[index].states) * self._dtype_of(index).itemsize
        return (chunk.owned[1] - chunk.owned[0]) * states + chunk.master_bytes

    def settle_tiers(
        self, on_device: Collection[int], on_disk: Collection[int], arena: Callable[[], Arena] | None = None
    ) -> None:  # fmt: skip
        """The records of these chunks rest there from now on and the others on the host, and weights and gradients
        where their chunks say; what visits has its places in `arena`, which is made when all that has moved is where it
        rests; None: in one for each kind. Between steps. Raises DiskError."""
        assert self.tiers is not None
        for index in on_device:
            chunk = self._chunks[index]
            parts = {
                name: copied_to(flat, chunk.device)
                for name, flat in self.tiers.opened(index, write=False).items()
            }
            if (words := parts.pop(MASTER, None)) is not None:
                chunk.rest_master(words)
            self._state[index] = parts
            self.tiers.release(index)
        self.tiers.settle_homes(on_disk)
        self._stays = frozenset(on_device)
        moving = {index for index in range(len(self._chunks)) if index not in self._stays}
        for index in moving:
            self._state[index] = self.tiers.at_rest(index)
        self.arena = arena() if arena else None
        self.tiers.settle_places(self.arena)
        if self.shards:
            self.shards.settle(self.tiers.on_host, self.arena)
            moving |= self.shards.moving
        if self.below:
            self.below.settle(self.tiers.on_host)
        self.plan = self._planned(moving)

    def _planned(self, moving: Collection[int] | None) -> Plan:
        """The updates; `moving`: the chunks of which something rests off the device, None: all or none."""
        return update_plan(
            len(self._chunks), ahead=AHEAD if self.tiers else None, below=BELOW, moving=moving,
            on_disk=self.tiers.on_disk if self.tiers else (), on_host=self.below.crossings if self.below else ON_DEVICE,
            backward=self._backward,
        )  # fmt: skip

    def begin_in(self, arena: Arena) -> None:
        """Before the first update sums leave through places in `arena`, and nothing visits the device."""
        assert self.tiers is not None and self.shards is not None
        self.arena = arena
        self.shards.settle(self.tiers.on_host, arena, is_first=True)

    # ---- reads and writes between steps ----

    @contextmanager
    def at_hand(self, chunk: Chunk, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """The state of a chunk by name, and its master in the chunk, in memory; to be changed if `write`. Raises
        DiskError."""
        self._split_joined()
        index = self._index[chunk.spec.id]
        if write:
            self._change(chunk)
        if self.tiers is None or index in self._stays:
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
        """Masters that were joined, to be changed, are split again."""
        joined, self._joined = self._joined, None
        if joined is not None:
            chunk, local, masters = joined
            with self.at_hand(chunk, write=True):
                chunk.set_masters(local, masters)

    def check(self) -> None:
        """Raise what has ended the use of the state, if anything has: DiskError."""
        if self.tiers:
            self.tiers.check()

    def settle(self) -> None:
        """What was changed between steps is where it rests. Raises DiskError."""
        self._split_joined()
        if self.tiers:
            self.tiers.settle()
        while self._changing:
            self._records.commit(*self._changing.pop())

    def changing(self, frozen: Sequence[WeightChunk] = ()) -> None:
        """What is on the host may be written from now on, `frozen` weights too, and is whole after `settle`."""
        for chunk in (*self._chunks, *frozen):
            self._change(chunk)

    def unchanged(self) -> None:
        """Nothing was written after all."""
        while self._changing:
            self._records.cancel(*self._changing.pop())

    def _change(self, chunk: WeightChunk) -> None:
        for kind in (OPTIMIZER, WEIGHTS):
            self._changing.add((chunk.spec.id, kind))
            self._records.begin(chunk.spec.id, kind)

    # ---- what outlives the engine ----

    def form(self) -> dict[str, list[Any]]:
        """What the records of each chunk are, by its number: what another engine must have to take them up."""
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
        """Bring what does not rest in the records there too: state, and weights."""
        for index, chunk in enumerate(self._chunks):
            number, layout = chunk.spec.id, self._layout(index)
            with self.at_hand(chunk) as state:
                if self.tier_of(chunk) != "host":
                    flat = self._records.room(number, OPTIMIZER, layout.size, chunk.types.state)
                    for name, part in layout.parts(flat).items():
                        part.copy_(chunk.master_words if name == MASTER else state[name])
                    self._records.commit(number, OPTIMIZER, version=version)
            if chunk.weights_at_rest is None:
                value = chunk.local_shard
                self._records.room(number, WEIGHTS, value.numel(), value.dtype).copy_(value)
                self._records.commit(number, WEIGHTS, version=version)

    def take_up(self) -> None:
        """Bring what an engine before has parked to where it rests here; its room on the host is given back."""
        for index, chunk in enumerate(self._chunks):
            number, layout = chunk.spec.id, self._layout(index)
            comes = self.tier_of(chunk) != "host"
            with self.at_hand(chunk, write=comes) as state:
                if comes:
                    flat = self._records.room(number, OPTIMIZER, layout.size, chunk.types.state)
                    for name, part in layout.parts(flat).items():
                        (chunk.master_words if name == MASTER else state[name]).copy_(part)
                    self._records.free(number, OPTIMIZER)
            if chunk.weights_at_rest is None:
                value = chunk.local_shard
                value.copy_(self._records.room(number, WEIGHTS, value.numel(), value.dtype))
                self._records.free(number, WEIGHTS)
            chunk.count_change()
        self.settle()

    def _layout(self, index: int) -> Record:
        return record_of(self._chunks[index], dict.fromkeys(self._rules[index].states, self._dtype_of(index)))

    def states_of(self, chunk: Chunk) -> Iterator[Mapping[str, Tensor]]:
        """For each entry of a chunk its whole state tensors in its own shape, and its step count as `step` (0-d
        int64). Collective where state is sharded."""
        index = self._index[chunk.spec.id]
        with self.at_hand(chunk) as state:
            whole = {name: chunk.whole(flat) for name, flat in state.items()}
            for entry, steps in zip(chunk.spec.entries, self._steps[index], strict=True):
                views = {
                    name: chunk.of(flat, entry, self._shapes[entry.name]) for name, flat in whole.items()
                }
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
        """Take over such counts; what is not named has taken none."""
        self._steps = [[updates.get(entry.name, 0) for entry in c.spec.entries] for c in self._chunks]

    @property
    def state_bytes(self) -> int:
        """Held now."""
        return sum(t.numel() * t.element_size() for state in self._state for t in state.values())

    @property
    def visits(self) -> tuple[Visit, ...]:
        """What state that rests off the device takes beside itself."""
        tiers = self.tiers
        if tiers is None:
            return ()
        sizes = [0 if i in self._stays else self.record_bytes(i) for i in range(len(self._chunks))]
        moving, shards = {i for i, size in enumerate(sizes) if size}, self.shards
        visiting = {i: sizes[i] for i in moving if not self._is_on_host(i)}
        held, most = tiers.device_bytes, tiers.most_device_bytes
        foreseen = VISITING[StateKind.OPTIMIZER].bytes(visiting) if shards is None else 0
        if shards:
            held, most = held + shards.device_bytes, most + shards.most_device_bytes
            foreseen += shards.forecast_bytes if self.arena is None else 0
        device: tuple[Visit, ...] = (
            Visit("visiting", None, held, most, foreseen, "places of state that visits the device"),
        )
        if (arena := self.arena) is not None:
            device += (
                Visit("arena", None, arena.bytes, arena.most_bytes, arena.plan.bytes, ORIGINS["arena"]),
            )
        on_host = () if self.below is None else (
            Visit("updating", "host", self.below.host_bytes, self.below.most_bytes, self.below.forecast_bytes,
                  "slots of gradients and weights for updates on the host"),
        )  # fmt: skip
        landings = shards.host_bytes if shards else 0
        if shards and landings:
            origin = "what sums of gradients land in to be added"
            on_host = (*on_host, Visit("landing", "host", landings, shards.most_host_bytes, landings, origin))
        if not tiers.on_disk:
            return (*device, *on_host)
        assert tiers.disk is not None
        there = {index: sizes[index] for index in tiers.on_disk}
        passing, unused = tiers.disk.host_bytes, tiers.disk.bytes - tiers.record_bytes("disk")
        return (
            *device,
            *on_host,
            Visit("passing", "host", passing, tiers.disk.most_host_bytes, passing_bytes(there),
                  ORIGINS["passing"]),
            Visit("unused", "disk", unused, unused, unused_bytes(there), ORIGINS["unused"]),
        )  # fmt: skip

    @property
    def visited(self) -> tuple[ArenaAllocator, ...]:
        """The places on the device of what rests off it."""
        here = (self.tiers.visited,) if self.tiers else ()
        return (*here, *(self.shards.visited if self.shards else ()))

    @property
    def forecast_bytes(self) -> int:
        """By the formula: each rule's states, an element as wide as updates compute, or narrow."""
        return sum(self.bytes_of(chunk)[1] for chunk in self._chunks)


def _master_parts(part: LocalShard) -> tuple[Tensor, ...]:
    """All memory of a chunk's masters."""
    return (part.master,) if part.residual is None else (part.local_shard, part.residual)


def _copies(part: LocalShard) -> tuple[Tensor, ...]:
    return tuple(each.clone() for each in _master_parts(part))
