"""Plants faults in sharded state: optimizer shards, sharded weights, hybrid sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.house.mutations_step import CASE, Faults, late_gradient, one_step_count
from tests.shared.places import find

# ---- sharded state ----


def _not_gathered(original: Any, self: Any) -> None:
    if self.spec.id:
        original(self)


def _gathered_before_the_update(original: Any, self: Any, chunk: Any, used: Any, **kwargs: Any) -> None:
    stale = chunk.full_weight.clone()
    original(self, chunk, used, **kwargs)
    chunk.full_weight.copy_(stale)


def _gate_left_open(original: Any, self: Any) -> None:
    """A chunk counts as whole while the others' shards are still on their way."""
    if self._gathering is not None:
        shards, self._value = self.full_weight, torch.full_like(self.full_weight, 0.1)
        own = slice(*self.owned)
        self.full_weight[own] = shards[own]
    original(self)


def _neighbours_shard(original: Any, self: Any, parts: int, part: int) -> tuple[int, int]:
    return original(self, parts, (part + 1) % parts)


def _half_of_the_norm(original: Any, self: Any) -> list[torch.Tensor]:
    return original(self) * (self.groups.all.coord == 0)


def _sum_of_the_first(original: Any, self: Any, full: torch.Tensor, out: torch.Tensor, **more: Any) -> Any:
    return original(self, full.clone(), out.clone() if self.coord else out, **more)


def _wrong_offset(original: Any, self: Any, entry: Any) -> Any:
    part = original(self, entry)
    return part and (part[0], 0)


SHARDED = replace(CASE, config=CASE.config | dict(zero=dict(stage=1)), chunk_bytes=8 * 3000, vocabulary=200)
FAULTS_ZERO: Faults = {
    "weights of the first chunk not gathered": (SHARDED, "Chunk.start_gather", _not_gathered),
    "weights published before the update": (SHARDED, "ChunkOptimizer.update", _gathered_before_the_update),
    "weights used before they are whole": (SHARDED, "Chunk.finish_gather", _gate_left_open),
    "the neighbour's shard": (SHARDED, "ChunkSpec.shard", _neighbours_shard),
    "shards summed on one rank only": (SHARDED, "Communicator.reduce_scatter_async", _sum_of_the_first),
    "a master from the parameter's beginning": (SHARDED, "Chunk.part_of", _wrong_offset),
    "sharded, norm over one share only": (SHARDED, "Chunk.counted", _half_of_the_norm),
    "sharded, a parameter left out": (SHARDED, "ChunkOptimizer.update", one_step_count),
    "sharded, reduced too early": (SHARDED, "GradientHooks.begin", late_gradient),
}


# ---- sharded weights ----


def _shards_rolled(original: Any, self: Any, slot: torch.Tensor, *part: Any) -> None:
    original(self, slot, *part)
    assert self._gathering is not None
    self._gathering.wait()
    slot.copy_(slot.roll(self.local_shard.numel()))


def _view_kept(original: Any, self: Any, tensor: torch.Tensor) -> Any:
    original(self, tensor)
    return tensor, tensor._version


def _view_from_the_start(original: Any, self: Any, tensor: torch.Tensor) -> Any:
    view = original(self, tensor)
    return view and replace(view, offset=0)


def _one_slot_for_all(original: Any, intervals: Any) -> Any:
    _, numel = original(intervals)
    return (0,) * len(intervals), numel


def _all_at_once(original: Any, self: Any, count: int) -> None:
    original(self, len(self._chunks))


def _dropped_while_used(original: Any, needs: Any, prefetch: int, reshard: bool) -> Any:
    later = [*needs[1:], needs[-1]]
    return original(later, prefetch, reshard)


def _used_before_it_came(original: Any, self: Any, needs: Any) -> None:
    for index in needs:
        chunk = self._chunks[index]
        chunk._value = torch.full_like(chunk.full_weight, 0.1)
    original(self, needs)


WEIGHTS = replace(
    SHARDED, layers=3, config=CASE.config | dict(zero=dict(stage=3), activation_checkpoint="none")
)
FAULTS_WEIGHTS: Faults = {
    "a gather brings the neighbour's shard": (WEIGHTS, "Chunk.unshard", _shards_rolled),
    "a saved view is not rebuilt": (WEIGHTS, "ParameterGather._pack", _view_kept),
    "a saved view is rebuilt elsewhere": (WEIGHTS, "Chunk.saved", _view_from_the_start),
    "slots overlap": (WEIGHTS, "pack_intervals", _one_slot_for_all),
    "reduced before the last use": (WEIGHTS, "GradientHooks.launch", _all_at_once),
    "dropped while it is used": (WEIGHTS, "residents", _dropped_while_used),
    "weights used before they came": (WEIGHTS, "ParameterGather._wait", _used_before_it_came),
    "sharded weights, a parameter left out": (WEIGHTS, "ChunkOptimizer.update", one_step_count),
}


# ---- sharded weights that do not train ----


def _shards_of_frozen_rolled(original: Any, self: Any, slot: torch.Tensor, *part: Any) -> None:
    if isinstance(self, find("Chunk")):
        original(self, slot, *part)
    else:
        _shards_rolled(original, self, slot, *part)


def _frozen_dropped_at_once(original: Any, self: Any, needs: Any) -> None:
    original(self, needs)
    for index in needs:
        if index >= len(self._chunks):
            self._all[index]._hide()


def _frozen_not_asked_for_in_backward(original: Any, self: Any) -> Any:
    view = original(self)
    return view if isinstance(self.chunk, find("Chunk")) else torch.full_like(view, 0.1)


FROZEN = replace(WEIGHTS, adapters=2)
FAULTS_FROZEN: Faults = {
    "frozen weights of the neighbour's shard": (FROZEN, "WeightChunk.unshard", _shards_of_frozen_rolled),
    "frozen weights dropped too early": (FROZEN, "ParameterGather._wait", _frozen_dropped_at_once),
    "frozen weights of others in backward": (FROZEN, "SavedView.rebuilt", _frozen_not_asked_for_in_backward),
    "a frozen shard from the parameter's beginning": (FROZEN, "WeightChunk.part_of", _wrong_offset),
}


# ---- hybrid sharding ----


def _copies_not_summed(original: Any, self: Any) -> None:
    return None


def _copies_summed_too_early(original: Any, self: Any, **more: Any) -> None:
    original(self, **more | dict(ends=True))


def _every_copy_counts_its_shard(original: Any, self: Any, *span: int) -> list[slice]:
    self.share = self.shard
    return original(self, *span)


def _shard_of_the_next_rank(original: Any, self: Any) -> None:
    original(self)
    summed = self.groups.copies.all_gather(self.gradient)
    self.gradient.copy_(self.shards.shift(summed[: self.gradient.numel()].contiguous()))


def _sums_of_copies_alone(original: Any, self: Any) -> None:
    self.groups.copies.all_gather(self._sharded_sums().clone(), self.gradient)


HYBRID = replace(CASE, world_size=4, steps=2, chunk_bytes=8 * 3000, vocabulary=200)
HYBRID_WEIGHTS = replace(HYBRID, config=CASE.config | dict(zero=dict(stage=3, shard_size=2)))
HYBRID_ORDER = replace(
    HYBRID, config=CASE.config | dict(zero=dict(stage=2, shard_size=2, sum_order="ordered"))
)
FAULTS_HYBRID: Faults = {
    "copies are not summed": (HYBRID_WEIGHTS, "Chunk.start_copies", _copies_not_summed),
    "copies are summed before the last": (HYBRID_WEIGHTS, "GradientHooks.begin", _copies_summed_too_early),
    "each copy counts in the norm": (HYBRID_WEIGHTS, "Chunk._counted_spans", _every_copy_counts_its_shard),
    "a copy's shards have wrong owners": (HYBRID_WEIGHTS, "Chunk.conclude", _shard_of_the_next_rank),
    "in order, sums of copies alone": (HYBRID_ORDER, "Chunk._gather_sums", _sums_of_copies_alone),
}


def _part_of_the_neighbour(original: Any, self: Any, part: torch.Tensor) -> None:
    original(self, part)
    part.copy_(self.groups.near.shift(part.clone()))


def _part_of_the_first_step(original: Any, self: Any, part: torch.Tensor) -> None:
    first = self.__dict__.setdefault("_first_part", part.clone())
    if first.count_nonzero():
        part.copy_(first)
    else:
        original(self, part)
        first.copy_(part)


def _parts_in_one_place(original: Any, *args: Any, **more: Any) -> Any:
    plan = original(*args, **more)
    return replace(plan, kept=dict.fromkeys(plan.kept, min(plan.kept.values(), default=0)))


NEAR = replace(
    HYBRID, layers=3, steps=3, config=CASE.config | dict(zero=dict(stage=3, reshard_after_forward=2))
)
FAULTS_NEAR: Faults = {
    "a part is the neighbour's": (NEAR, "Chunk.keep_part", _part_of_the_neighbour),
    "a part is of the step before": (NEAR, "Chunk.keep_part", _part_of_the_first_step),
    "kept parts overlap": (NEAR, "ParameterGather:plan_of", _parts_in_one_place),
}

FAULTS: Faults = FAULTS_ZERO | FAULTS_WEIGHTS | FAULTS_FROZEN | FAULTS_HYBRID | FAULTS_NEAR
