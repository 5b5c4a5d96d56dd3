"""Updates chunks: state in flat buffers, one call per range of parameters with gradients.

Note: ranges.
A parameter that no rank used in a step is left alone: no decay, no momentum, and its step count does not change, as in
torch with `grad=None`.  So a chunk is updated in maximal ranges of used entries with equal step counts, usually one.  A
rule that needs whole tensors gets them one by one.  State is float32 or wider, however wide gradients are.  Weights in
16 bits alone (`master="none"`) are widened for the update of one range and rounded back.  Narrow weights beside wide
masters are written by the update itself.  Split masters (kernels/split.py) are updated in their halves.

With narrow states (`moments="bf16"`) each entry is updated by itself.  Its rounding depends on its name and element
numbers alone: the same bits at any stage, chunk size and placement.  A rank holds and updates state for the shard of a
chunk that it owns.  State off the device is copied there when the plan says (offload/optimizer_states.py), or updated
on the host (offload/host_updates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from colossal_lite.config.config import Config
from colossal_lite.kernels import TORCH, Draws, Ops
from colossal_lite.memory.arena import Arena
from colossal_lite.memory.chunk import Chunk, GradientState
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.local_shard import LocalShard
from colossal_lite.memory.pinned import zeros_on
from colossal_lite.memory.task_records import OPTIMIZER, WEIGHTS, TaskRecords
from colossal_lite.memory.transfers import copied_to, sent_back
from colossal_lite.numerics.optimizers import groups_of, rule_of
from colossal_lite.numerics.random import key
from colossal_lite.observe.clock import TimedSpans
from colossal_lite.offload.arena_waits import early_records
from colossal_lite.offload.host_updates import HostUpdates, updating_bytes
from colossal_lite.offload.optimizer_states import OffloadedOptimizerStates
from colossal_lite.offload.pieces import VISITING, StateKind, passing_bytes, unused_bytes
from colossal_lite.offload.placement import spilled
from colossal_lite.offload.shard_streaming import HostShardStream
from colossal_lite.offload.state_storage import MASTER, READ_AHEAD, OpenFile
from colossal_lite.schedule.optimizer_updates import (
    ON_DEVICE,
    RECORDS_ALONE,
    ChunkPart,
    Streaming,
    part_of,
    update_plan,
)
from colossal_lite.schedule.plan import Action, ActionKind, Plan
from colossal_lite.schedule.update_mix import LOOKAHEAD, UpdateMix
from colossal_lite.schedule.update_rates import UpdateBytes
from colossal_lite.zero.optimizer_state import OptimizerState
from colossal_lite.zero.update_choice import UpdateChoice, emulated_speeds


class Range(NamedTuple):
    """Elements [start, stop) of what a rank owns of a chunk, all after `steps` updates; `first`: their first entry."""

    start: int
    stop: int
    steps: int
    first: int


def ranges_to_update(
    chunk: Chunk, used: Sequence[bool], steps: Sequence[int], *, whole: bool = False
) -> Iterator[Range]:
    """Maximal runs of used entries with equal step counts, cut to the owned part and counted from its start; a run to
    the last entry takes the chunk's end along. `whole`: each used entry alone, and no more than it."""
    entries, (owned_start, owned_stop) = chunk.spec.entries, chunk.owned
    for _, run in groupby(range(len(entries)), key=lambda i: (i if whole else -1, used[i], steps[i])):
        first, *rest = run
        last = rest[-1] if rest else first
        if used[first]:
            is_end = last == len(entries) - 1 and not whole
            stop = chunk.spec.numel if is_end else entries[last].stop
            start, stop = max(entries[first].start, owned_start), min(stop, owned_stop)
            if start < stop:
                yield Range(start - owned_start, stop - owned_start, steps[first], first)


ORIGINS = {
    "visiting": "places on the device for state that is copied there",
    "arena": "gradients in a backward, state that is copied there for its update, and time-shared state",
    "updating": "slots of gradients and weights for updates on the host",
    "landing": "buffers for sums of gradients that are added on the host",
    "passing": "slots for records on their way from and to disk",
    "unused": "ends of pages",
}
"""The buffers beside state that rests off the device."""


class Visit(NamedTuple):
    """Bytes of buffers for state off the device, on a tier (None: the device): allocated, the most that was used at
    once, and by the formula."""

    kind: str
    tier: str | None
    bytes: int
    most_bytes: int
    forecast_bytes: int


class ChunkOptimizer(OptimizerState):
    """Updates one chunk at a time, and copies its state between tiers for that."""

    def __init__(
        self, chunks: Sequence[Chunk], config: Config, ops: Ops, shapes: Mapping[str, torch.Size], *,
        records: TaskRecords, choice: UpdateChoice, open_file: OpenFile | None = None,
        host_room: int | None = None,
    ) -> None:  # fmt: skip
        """State, and masters that are apart from the weights, rest on the tier of the config. On the host they are in
        `records`, where those may take `host_room` bytes with what their updates need there, and the rest is on disk
        (None: no limit). `open_file` makes the disk's file; None where no step is taken. `choice` says which are
        updated on the host, where their records rest off the device. Raises DiskError."""
        self._groups, self._ops, self._seed = groups_of(config.optimizer), ops, config.seed
        placement = config.memory.records_tier
        self._backward = config.optimizer.update_when == "backward"
        """Whether updates come in the order of gradients."""
        self._may_rest = config.memory.may_rest
        rules = [rule_of(self._groups[c.spec.key.group], c.local_shard.dtype) for c in chunks]
        super().__init__(chunks, rules, shapes, records)
        shares = any(c.weights_at_rest is not None or c.gradient_at_rest is not None for c in self._chunks)
        # Budgets and slots of the disk are for one ahead.
        self._choice, self._lookahead = choice, LOOKAHEAD
        if shares or placement == "disk" or host_room is not None:
            self._lookahead = 1
        self.mix = self._chosen()
        """Which updates run on the host, and how far ahead of them copies are made."""
        self.can_choose_again = placement in ("host", "disk") and not shares and host_room is None
        """Whether no plan of a budget counts on the mix."""
        self.work_timer = TimedSpans()
        """Of updates on the device, where state rests off it."""
        self.updated = {True: 0, False: 0}
        """Elements updated so far, on the host and elsewhere."""
        self.calls_on_host = 0
        if self._chunks and placement != "device":  # of a pipeline stage where nothing trains there are none
            self.tiers = OffloadedOptimizerStates(
                self._chunks, self._forms, config.timeout_s, emulated_speeds(choice.given), records,
                mix=self.mix, on_disk=self._on_disk(placement, host_room), open_file=open_file, shares=shares,
            )  # fmt: skip
        self.host_updates: HostUpdates | None = None
        """Updates on the host; None if there are none."""
        self._settle_host_updates()
        self.plan = self.planned(None, self.tiers.on_disk if self.tiers else ())
        self._state = [
            self.tiers.at_rest(index)
            if self.tiers
            else {name: zeros_on(chunk.device, chunk.owned_numel, dtype) for name, dtype in some.items()}
            for index, (chunk, some) in enumerate(zip(self._chunks, self._forms, strict=True))
        ]
        self._on_device = frozenset(() if self.tiers else range(len(self._chunks)))
        self.shards: HostShardStream | None = None
        """Copies of weights and gradients that rest on the host; None if none does."""
        self.arena: Arena | None = None
        """That has all places on the device, where weights or gradients may rest on the host; None in a pipeline."""
        if shares:
            assert self.tiers is not None
            self.shards = HostShardStream(self._chunks, self.tiers.up, self.tiers.down, records)
            self.shards.settle(self.tiers.on_host, None, is_first=True)
        self.changed = False
        """Whether an update of this step has changed any master weight."""
        self._same: Tensor | None = None
        """Whether the first update of the last step changed nothing, where the host has not waited to know."""
        self._doubts = False

    def _chosen(self) -> UpdateMix:
        """The mix by the choice of this moment. Collective as the choice is."""
        parts = [
            self.work_of(
                index,
                record=True,
                gradient=self._may_rest("gradients") and chunk.gradient_at_rest is not None,
                weights=self._may_rest("weights") and chunk.weights_at_rest is not None,
            )
            for index, chunk in enumerate(self._chunks)
        ]
        mix = self._choice(parts, [chunk.spec.id for chunk in self._chunks], self._lookahead)
        if self._backward:  # a gradient comes down when it is summed, and not before
            mix = replace(mix, ahead_down=0, early=False)
        self._choice.describe(parts, mix)
        return mix

    def choose_again(self) -> None:
        """Ask the choice for the mix again, and follow it, where `can_choose_again`. All state is at rest. Collective
        as the choice is."""
        assert self.can_choose_again
        self.mix = self._chosen()
        if self.tiers is None:  # of a pipeline stage where nothing trains
            return
        self.tiers.follow(self.mix)
        self._settle_host_updates()
        self.plan = self.planned(None, self.tiers.on_disk)

    def _settle_host_updates(self) -> None:
        """Update on the host what the mix says, of the chunks whose records rest off the device."""
        if self.tiers and self.tiers.on_host and self.host_updates is None:
            self.host_updates = HostUpdates(self._chunks, self.tiers.up, self.tiers.down)
        if self.tiers and self.host_updates is not None:
            self.host_updates.settle(self.tiers.on_host, self.mix)

    def _on_disk(self, placement: str, host_room: int | None) -> Collection[int] | None:
        """The chunks with state on disk: all, those for which the host has no room, or None without a disk."""
        if placement == "disk":
            return range(len(self._chunks))
        if placement != "host" or host_room is None:
            return None
        sizes = {i: size for i in range(len(self._chunks)) if (size := self.record_bytes(i))}
        updated = self.mix.on_host & {*sizes}
        return spilled(sizes, host_room - updating_bytes(self._chunks, updated, self.mix))

    def work_of(
        self, index: int, *, record: bool, gradient: bool, weights: bool, returns: bool = False
    ) -> UpdateBytes:
        """What the update of a chunk reads and writes, if its record, gradient or weights rest off the device. Without
        a record nothing moves for it. `returns`: its earlier sums rest there, and come back for the last."""
        chunk = self._chunks[index]
        states = self.record_bytes(index) / max(chunk.owned_numel, 1)
        summed, seen = (tensor.element_size() for tensor in (chunk.gradient, chunk.local_shard))
        return UpdateBytes(
            chunk.owned_numel, 1, states if record else 0.0, 0.0 if gradient else summed, 0.0 if weights else seen,
            2 * states + summed, resting_gradient=summed if gradient else 0.0,
            resting_weight=seen if weights else 0.0, reads_weights=chunk.updates_weights,
            returning_gradient=summed if returns else 0.0,
        )  # fmt: skip

    @property
    def peak_lr(self) -> float:
        """Of the parameters in no group."""
        return self._groups[-1].lr

    def update(self, chunk: Chunk, used: Sequence[bool], *, factor: float, grad_scale: float) -> None:
        """One optimizer step of one chunk; on the host it only starts, and ends before `arrived` does. `used[i]`: some
        rank had a gradient for entry i; `factor` is the schedule's share of the peak learning rate; the gradient is
        divided by `grad_scale` and consumed."""
        assert chunk.state is GradientState.REDUCED
        index, rule = self._index[chunk.spec.id], self._rules[self._index[chunk.spec.id]]
        alone = not rule.is_elementwise or rule.narrow is not None
        spans = tuple(ranges_to_update(chunk, used, self._steps[index], whole=alone))
        self._steps[index] = [n + used[i] for i, n in enumerate(self._steps[index])]
        apply = partial(self._apply, index, spans, factor=factor, grad_scale=grad_scale)
        on_host = self._is_on_host(index)
        self.updated[on_host] += sum(span.stop - span.start for span in spans)
        if on_host:
            self.calls_on_host += 1
            self._update_on_host(index, apply, spans)
            return
        state = self._brought(index, is_whole=all(used))
        with self.work_timer.during(chunk.device) if self.tiers else nullcontext():
            apply(chunk, state, self._ops)
        if self.shards:
            self.shards.used(index)

    def remake(self, chunk: Chunk) -> None:
        """In place of an update that a step skips: copy time-shared weights from their masters, because gradients have
        overwritten them. What the host updates shares no memory: it rests as it was."""
        index = self._index[chunk.spec.id]
        if self._is_on_host(index):
            self._tell_records(chunk, self._records.cancel)
            return
        self._brought(index, is_whole=False)
        if self.shards:
            self.shards.used(index)

    def _brought(self, index: int, *, is_whole: bool) -> Mapping[str, Tensor]:
        """The state of a chunk on the device, with its weights and gradient. `is_whole`: all weights are written."""
        state: Mapping[str, Tensor] = self._state[index]
        if self.tiers is not None and index not in self._on_device:
            state = self.tiers.here(index)
        if self.shards:
            self.shards.here(index, is_whole=is_whole)
        self._chunks[index].take_weights(is_whole=is_whole)
        return state

    def _update_on_host(self, index: int, apply: Callable[..., None], spans: Sequence[Range]) -> None:
        assert self.tiers is not None and self.host_updates is not None
        chunk = self._chunks[index]
        ops = self._ops if chunk.device.type == "cpu" else TORCH
        storage = self.tiers.storage_of[index]
        parts, before = storage.begin_update(index)
        words = parts.pop(MASTER, None)
        is_whole = sum(span.stop - span.start for span in spans) == chunk.local_shard.numel()
        updated = self.host_updates.update(
            index, words, lambda part: apply(part, parts, ops), after=before, is_whole=is_whole,
            then=partial(self._tell_records, chunk, self._records.commit),
        )  # fmt: skip
        storage.end_update(index, updated)

    def _tell_records(self, chunk: Chunk, how: Callable[[int, str], None]) -> None:
        """Commit or cancel the update of a chunk on the host that `defer` has counted."""
        if self.tier_of(chunk) == "host":
            how(chunk.spec.id, OPTIMIZER)
        if chunk.weights_at_rest is not None:
            how(chunk.spec.id, WEIGHTS)

    def _apply(
        self, index: int, spans: Sequence[Range], part: LocalShard, state: Mapping[str, Tensor], ops: Ops,
        *, factor: float, grad_scale: float,
    ) -> None:  # fmt: skip
        """The update of these ranges of a chunk, wherever what this rank owns of it is."""
        chunk, rule = self._chunks[index], self._rules[index]
        group = self._groups[chunk.spec.key.group]
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
                stored, seen = part.master[local].view(shape), part.weights_to_write(span.start, span.stop)
                weight = stored.to(chunk.types.state)
                low = stored if weight is not stored else None if seen is None else seen.view(shape)
                how(ops, group, weight, gradient, states, low=low)
            elif rule.joins(group):
                masters = part.masters(local)
                how(ops, group, masters.view(shape), gradient, states)
                part.set_split_masters(local, masters)
            else:
                high, residual, ties = part.halves(local)
                how(ops, group, high, gradient, states, residual=residual, ties=ties)
        if before is not None:
            self.changed = self._differs(before, _master_parts(part))

    def begin(self) -> None:
        """Before the updates of a step, for which the host has waited for the device."""
        self._doubts = self._same is not None and bool(self._same)
        self._same, self.changed = None, False

    def _differs(self, before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
        """Whether masters have changed. On CUDA it is believed, so that the host need not wait. If the next step finds
        that it was wrong, it looks for itself."""
        if self._doubts or not all(part.is_cuda for part in now):
            return not all(map(torch.equal, before, now))
        same = torch.stack([(a == b).all() for a, b in zip(before, now, strict=True)]).all()
        self._same = sent_back(same)
        return True

    def arrived(self, chunk: Chunk) -> None:
        """Wait until the model can read the new weights of a chunk, if it is updated on the host. For those that rest
        there the link waits, and the caller does not. Raises what its copies or its update have raised."""
        if self.host_updates is not None and (chunk.weights_at_rest is None or self._backward):
            self.host_updates.arrived(self._index[chunk.spec.id])

    def leaving(self, chunk: Chunk) -> tuple[Transfer, ...]:
        """The copies that still read the gradient of a chunk whose update on the host has started."""
        return self.host_updates.leaving(self._index[chunk.spec.id]) if self.host_updates else ()

    def is_updated_on_host(self, chunk: Chunk) -> bool:
        """Whether a chunk's update is, for as long as its record rests where it does now."""
        return self._is_on_host(self._index[chunk.spec.id])

    def _is_on_host(self, index: int) -> bool:
        return self.host_updates is not None and index in self.host_updates.crossings

    def send_gradient(self, chunk: Chunk) -> None:
        """The gradient of a chunk is final: it leaves for its update on the host, where it leaves early."""
        if self.host_updates is not None:
            self.host_updates.send(self._index[chunk.spec.id])

    def prepare(self) -> None:
        """Before the gradients are known: start to fetch the state for the first updates. In a shared arena, that for
        which its plan has room in backward (`StatePlacement.arena_with_room`)."""
        early = early_records(self.arena.plan) if self.arena else ()
        for action in takewhile(lambda a: a.kind is ActionKind.FETCH, self.plan[0] if self.tiers else ()):
            assert self.tiers is not None
            if self.shards is None or action.chunk in early:
                self.tiers.move(action)

    def defer(self) -> None:
        """A step has ended: until its updates are done, the state at rest is not valid."""
        if self.tiers:
            self.tiers.defer()
        if self.shards:
            self.shards.defer()

    def finish(self, factor: float) -> None:
        """After the update of the last chunk of a step: weights and state may still be copied back."""

    def finish_on_host(self) -> None:
        """Wait for the updates on the host that no `arrived` has waited for. Raises what they have raised."""
        if self.host_updates is not None:
            self.host_updates.finish()

    def rest(self) -> None:
        """Wait until all state is back at rest. Raises DiskError."""
        if self.shards:
            self.shards.flush()
        if self.tiers:
            self.tiers.flush()

    @property
    def moves(self) -> dict[ActionKind, Callable[[Action], None]]:
        """What the actions of the plan beside UPDATE do."""
        return dict.fromkeys((ActionKind.FETCH, ActionKind.EVICT), self._move) if self.tiers else {}

    @property
    def moves_to_remake(self) -> dict[ActionKind, Callable[[Action], None]]:
        """The same around `remake`: what the host would update stays where it is."""

        def move(action: Action) -> None:
            if not self._is_on_host(part_of(action.chunk or 0, len(self._chunks))[1]):
                self._move(action)

        return dict.fromkeys(self.moves, move)

    def _move(self, action: Action) -> None:
        part, index = part_of(action.chunk or 0, len(self._chunks))
        is_up = action.kind is ActionKind.FETCH
        if part is ChunkPart.RECORD:
            assert self.tiers is not None
            self.tiers.move(action)
        elif self._is_on_host(index):
            updates = self.host_updates
            assert updates is not None
            updates.take_up(index) if is_up else updates.bring(index, part)
        else:
            assert self.shards is not None
            self.shards.fetch(index, part) if is_up else self.shards.evict(index)

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that copy state, weights and gradients between tiers."""
        updates = (self.host_updates.updates_link,) if self.host_updates else ()
        parts = [part for part in (self.tiers, self.shards) if part is not None]
        return (*(link for part in parts for link in part.links), *updates)

    def close(self) -> None:
        for part in (self.host_updates, self.shards, self.tiers):
            if part:
                part.close()

    # ---- what rests where ----

    def settle_tiers(
        self, on_device: Collection[int], on_disk: Collection[int], arena: Callable[[], Arena] | None = None
    ) -> None:  # fmt: skip
        """Put the records of these chunks on device and disk, and others on the host. Weights and gradients go where
        their chunks say. Copies on the device have places in `arena`, which is made after the moves; None: in one for
        each kind. Between steps. Raises DiskError."""
        if self.tiers is None:  # of a pipeline stage where nothing trains
            return
        for index in on_device:
            chunk = self._chunks[index]
            opened = self.tiers.opened(index, write=False)
            parts = {name: copied_to(flat, chunk.device) for name, flat in opened.items()}
            if (words := parts.pop(MASTER, None)) is not None:
                chunk.rest_master(words)
            self._state[index] = parts
            self.tiers.release(index)
        self.tiers.settle_storages(on_disk)
        self._on_device = frozenset(on_device)
        moving = {index for index in range(len(self._chunks)) if index not in self._on_device}
        for index in moving:
            self._state[index] = self.tiers.at_rest(index)
        self.arena = arena() if arena else None
        self.tiers.settle_places(self.arena)
        if self.shards:
            self.shards.settle(self.tiers.on_host, self.arena)
        self._settle_host_updates()
        for chunk in self._chunks:  # of this step's gradients none has left since
            if chunk.state is GradientState.REDUCED:
                self.send_gradient(chunk)
        streamed = self.shards.streamed if self.shards else RECORDS_ALONE
        self.plan = self.planned(moving, self.tiers.on_disk, streamed)

    def planned(
        self, moving: Collection[int] | None, on_disk: Collection[int],
        streamed: Mapping[int, Streaming] = RECORDS_ALONE,
    ) -> Plan:  # fmt: skip
        """The updates. `moving`: the chunks with records off the device, None: all or none; those `on_disk` are there.
        `streamed`: the copies beside records, for updates on the device."""
        crossings = self.host_updates.crossings if self.host_updates else ON_DEVICE
        return update_plan(
            len(self._chunks), ahead=self.mix.ahead if self.tiers else None, ahead_down=self.mix.ahead_down,
            below=READ_AHEAD, moving=moving, on_disk=on_disk, early=self.mix.early, backward=self._backward,
            on_host={i: crossing for i, crossing in crossings.items() if moving is None or i in moving},
            streamed=streamed,
        )  # fmt: skip

    def share_first_arena(self, arena: Arena) -> None:
        """Before the first update sums are copied out through places in `arena`, and no state is on the device."""
        assert self.tiers is not None and self.shards is not None
        self.arena = arena
        self.shards.settle(self.tiers.on_host, arena, is_first=True)

    @property
    def visits(self) -> Iterator[Visit]:
        """The buffers that state off the device needs beside itself."""
        tiers, shards, arena, updates = self.tiers, self.shards, self.arena, self.host_updates
        if tiers is None:
            return
        sizes = [0 if i in self._on_device else self.record_bytes(i) for i in range(len(self._chunks))]
        visiting = {i: size for i, size in enumerate(sizes) if size and not self._is_on_host(i)}
        held, most, foreseen = tiers.staging_places.bytes, tiers.staging_places.most_bytes, 0
        if arena is None and (shards is None or shards.has_places):
            foreseen = VISITING[StateKind.OPTIMIZER].wide(self.mix.record_width).bytes(visiting)
        if shards:
            held, most = held + shards.device_bytes, most + shards.most_device_bytes
            foreseen += shards.forecast_bytes if arena is None else 0
        yield Visit("visiting", None, held, most, foreseen)
        if arena is not None:
            yield Visit("arena", None, arena.bytes, arena.most_bytes, arena.plan.bytes)
        if updates is not None:
            yield Visit("updating", "host", updates.host_bytes, updates.most_bytes, updates.forecast_bytes)
        if shards and (landings := shards.host_bytes):
            yield Visit("landing", "host", landings, shards.most_host_bytes, landings)
        if tiers.on_disk:
            assert tiers.disk is not None
            there, disk = {index: sizes[index] for index in tiers.on_disk}, tiers.disk
            yield Visit("passing", "host", disk.host_bytes, disk.most_host_bytes, passing_bytes(there))
            unused = disk.bytes - tiers.record_bytes("disk")
            yield Visit("unused", "disk", unused, unused, unused_bytes(there))


def _master_parts(part: LocalShard) -> tuple[Tensor, ...]:
    """All memory of a chunk's masters."""
    return (part.master,) if part.residual is None else (part.local_shard, part.residual)


def _copies(part: LocalShard) -> tuple[Tensor, ...]:
    return tuple(each.clone() for each in _master_parts(part))
