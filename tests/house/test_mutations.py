"""Planted faults: parity must go red for each of them, or it proves nothing."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_map_only

from colossal_lite import kernels
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.engine import engine, micro_batches
from colossal_lite.engine.engine import Engine
from colossal_lite.engine.micro_batches import MicroBatches
from colossal_lite.engine.step_totals import LocalSums
from colossal_lite.engine.update_timing import Updates
from colossal_lite.memory.chunk import Chunk, GradientState
from colossal_lite.memory.disk_file import DiskFile
from colossal_lite.memory.link import Link
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.transfers import GradientOffloadBuffer
from colossal_lite.memory.weight_chunk import SavedView, WeightChunk
from colossal_lite.numerics.optimizers import LAMB, Muon
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.offload.host_updates import HostUpdates
from colossal_lite.offload.optimizer_states import OffloadedOptimizerStates
from colossal_lite.offload.shard_streaming import HostShardStream
from colossal_lite.offload.state_storage import DiskStorage, HostStorage
from colossal_lite.parallel import (
    grid_layers,
    ring_attention,
    sequence_parallel,
    tensor_1d,
    tensor_1d_layers,
    tensor_grid,
)
from colossal_lite.parallel.grid_layers import OperandAxis
from colossal_lite.parallel.ring_attention import Gather, Ring
from colossal_lite.parallel.sequence_parallel import SequenceParallel
from colossal_lite.parallel.tensor_1d import TensorParallel1D
from colossal_lite.parallel.tensor_1d_layers import Tensor1D
from colossal_lite.parallel.tensor_2d import Tensor2D
from colossal_lite.parallel.tensor_3d import Tensor3D
from colossal_lite.pipeline import runtime
from colossal_lite.pipeline.model_units import GPTSections
from colossal_lite.pipeline.stages import Stages
from colossal_lite.schedule import gather_plan
from colossal_lite.schedule.optimizer_updates import ChunkPart
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms import split_backward
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLosses, Share
from colossal_lite.transforms.saved_results import SavedResults
from colossal_lite.zero import build_chunks, optimizer, sharded_weights
from colossal_lite.zero import user_optimizer as own
from colossal_lite.zero.deferred_updates import DeferredUpdates
from colossal_lite.zero.gradient_hooks import GradientHooks, StageHooks
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from colossal_lite.zero.user_optimizer import OwnOptimizer
from tests.pipeline.test_runtime import by_place
from tests.shared.parity import (
    Case,
    ModularAdapter,
    Step,
    check_no_further,
    compare,
    parallel_run,
    serial_run,
)
from tests.shared.pool import RankEnv, run_world

CASE = Case(
    dropout=0.2, ragged=True, global_batch=5, config=dict(clip_grad_norm=0.05, gradient_accumulation=2)
)


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Patch `owner.name` by `change(original, *arguments)`."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return patch.object(owner, name, changed)


def _scaled(original: Any, self: Chunk, index: int, gradient: torch.Tensor, **more: Any) -> None:
    original(self, index, gradient * 2, **more)


def _reduce_dropped(original: Any, self: Communicator, tensor: torch.Tensor, op: str = "sum") -> Any:
    return original(self, tensor.clone() if self.axis == "data" else tensor, op)


def _reduce_averaged(original: Any, self: Chunk) -> None:
    original(self)
    self.gradient.div_(2)


def _mask_shifted(original: Any, self: DropoutStreams, step: int, sample: Any, position: Any) -> None:
    original(self, step, sample, position + 1)


def _micro_batch_in_the_counter(
    original: Any, self: DropoutStreams, step: int, sample: Any, position: Any
) -> None:
    original(self, step, sample - sample.min() if len(sample) else sample, position)


def _rank_in_the_stream(original: Any, self: MicroBatches, sizes: Any) -> int:
    original(self, sizes)
    return 0


def _same_step(original: Any, self: DropoutStreams, step: int, sample: Any, position: Any) -> None:
    original(self, 0, sample, position)


def _tied_twice(original: Any, self: Chunk, index: int, gradient: torch.Tensor, **more: Any) -> None:
    is_tied = self.spec.entries[index].name == "token.weight"
    original(self, index, gradient * 2 if is_tied else gradient, **more)


def _micro_batch_lost(original: Any, self: Chunk, index: int, gradient: torch.Tensor, **more: Any) -> None:
    self._filled[index] = False
    original(self, index, gradient, **more)


def _norm_of_one_share(original: Any, self: ChunkSpec, parts: int, part: int) -> tuple[int, int]:
    return original(self, parts, 0)


def _norm_counts_replicas(original: Any, self: ChunkSpec, parts: int, part: int) -> tuple[int, int]:
    return 0, self.numel


def _labels_shifted(original: Any, given: Any, **kwargs: Any) -> Any:
    inputs, labels = given
    return original((inputs, labels.roll(1, dims=1)), **kwargs)


def _mean_of_means(original: Any, self: LocalSums, loss: torch.Tensor, weight: Any) -> None:
    original(self, loss / max(float(weight), 1.0), 1.0)


def _one_step_count(original: Any, self: ChunkOptimizer, chunk: Chunk, used: Any, **kwargs: Any) -> None:
    original(self, chunk, [False, *used[1:]], **kwargs)


def _late_gradient(original: Any, self: GradientHooks, *, is_last: bool, **more: Any) -> None:
    original(self, is_last=True, **more)  # lets chunks go before the last micro-batch has added to them


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gradient scaled": (Chunk, "accept", _scaled),
    "reduce dropped": (Communicator, "all_reduce_async", _reduce_dropped),
    "reduce averaged": (Chunk, "finish_reduce", _reduce_averaged),
    "mask shifted": (DropoutStreams, "begin", _mask_shifted),
    "micro-batch in the counter": (DropoutStreams, "begin", _micro_batch_in_the_counter),
    "samples numbered by rank": (MicroBatches, "first_sample", _rank_in_the_stream),
    "wrong random stream": (DropoutStreams, "begin", _same_step),
    "tied gradient counted twice": (Chunk, "accept", _tied_twice),
    "micro-batch overwrites the one before": (Chunk, "accept", _micro_batch_lost),
    "norm over one share only": (ChunkSpec, "shard", _norm_of_one_share),
    "norm counts replicas": (ChunkSpec, "shard", _norm_counts_replicas),
    "labels shifted": (micro_batches, "read_batch", _labels_shifted),
    "mean of the ranks' means": (LocalSums, "add", _mean_of_means),
    "a parameter left out of the update": (ChunkOptimizer, "update", _one_step_count),
    "reduced before the last micro-batch": (GradientHooks, "begin", _late_gradient),
}


# ---- 1D tensor parallelism ----


def _input_gradient_not_summed(original: Any, terms: torch.Tensor, mode: Tensor1D) -> Any:
    pending = original(terms.clone(), mode)
    if torch._C._current_graph_task_id() == -1:  # in forward
        return pending
    pending.wait()
    part = terms.tensor_split(mode.size, 1)[mode.coord] if mode.sequence_parallel else terms
    return _Ready(part)


def _output_not_summed(original: Any, terms: torch.Tensor, mode: Tensor1D) -> Any:
    pending = original(terms.clone(), mode)
    pending.wait()
    if torch._C._current_graph_task_id() != -1:
        return pending
    return _Ready(terms.tensor_split(mode.size, 1)[mode.coord].clone() if mode.sequence_parallel else terms)


class _Ready:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


def _norm_gradient_not_summed(original: Any, self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor")


def _norm_gradient_summed_when_whole(original: Any, self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return original(self, layout) if self.sharding_axes else (*original(self, layout), "tensor")


def _every_copy_counts(original: Any, self: ShardSpec, layout: Any, coords: Any) -> Any:
    return original(self, layout, dict.fromkeys(coords, 0))


def _one_shard_counts(original: Any, self: ShardSpec, layout: Any, coords: Any) -> Any:
    return original(self, layout, coords) if not coords["tensor"] else ()


def _key_heads_not_summed(original: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    original(x.detach(), comm)
    return x


def _bias_on_every_rank(original: Any, x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    return original(
        torch.cat((x, torch.ones_like(x[..., :1])), -1), torch.cat((weight, bias[:, None]), 1), None, *rest
    )


def _vocabulary_off_by_one(original: Any, *args: Any, **kwargs: Any) -> Any:
    ops = original(*args, **kwargs)

    def partial(logits: torch.Tensor, labels: torch.Tensor, start: int) -> torch.Tensor:
        result: torch.Tensor = ops.cross_entropy_partial(logits, labels, start + 1)
        return result

    return replace(ops, cross_entropy_partial=partial)


def _same_mask_on_every_part(
    original: Any, self: DropoutStreams, name: str, parts: int = 1, part: int = 0
) -> Any:
    return original(self, name, parts, 0)


def _loss_of_every_rank(original: Any, self: Engine) -> Any:
    self._tells_loss = True
    return original(self)


SIZES_1D: dict[str, Any] = dict(world_size=4, tensor=2, ragged=True, config=dict(clip_grad_norm=0.05))
CUT = Case(dropout=0.2, **SIZES_1D)
WHOLE = Case(sequence_parallel=False, **SIZES_1D)
SHARED = Case(family="llama", world_size=4, tensor=4, config=dict(clip_grad_norm=0.05))
FAULTS_1D: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "input gradient not summed": (CUT, tensor_1d_layers, "_sum_async", _input_gradient_not_summed),
    "input gradient not summed, whole": (WHOLE, tensor_1d_layers, "_sum_async", _input_gradient_not_summed),
    "output of a pair not summed": (CUT, tensor_1d_layers, "_sum_async", _output_not_summed),
    "norm gradient not summed": (CUT, ShardSpec, "sync_axes", _norm_gradient_not_summed),
    "norm gradient summed where it is whole": (
        WHOLE,
        ShardSpec,
        "sync_axes",
        _norm_gradient_summed_when_whole,
    ),
    "every copy counts in the norm": (WHOLE, ShardSpec, "owned", _every_copy_counts),
    "one shard counts in the norm": (CUT, ShardSpec, "owned", _one_shard_counts),
    "shared key heads not summed": (SHARED, autograd_collectives, "copy", _key_heads_not_summed),
    "shared key heads counted by all": (SHARED, ShardSpec, "owned", _every_copy_counts),
    "bias before the sum": (CUT, tensor_1d_layers._RowwiseLinear, "apply", _bias_on_every_rank),
    "vocabulary off by one": (CUT, kernels, "select", _vocabulary_off_by_one),
    "same mask on every part": (CUT, DropoutStreams, "rows", _same_mask_on_every_part),
    "loss told by every rank": (CUT, Engine, "_agree", _loss_of_every_rank),
}


# ---- adapters, and products that are kept ----


def _offset_forgotten(original: Any, module: Any, rows: Any, width: int, coord: int) -> Any:
    return rows


def _of_other_samples(original: Any, self: SavedResults, compute: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda kept: kept.roll(1, 0), original(self, compute))


ADAPTED = Case(tensor=2, adapters=2, adapter_kind=ModularAdapter, config=dict(clip_grad_norm=0.05), steps=2)
KEPT_1D = replace(CUT, config=CUT.config | dict(activation_checkpoint="selective"), steps=1)
FAULTS_1D |= {
    "whole factors' gradients not summed": (ADAPTED, ShardSpec, "sync_axes", _norm_gradient_not_summed),
    "an adapter drops other features": (ADAPTED, tensor_1d, "rows_on_features", _offset_forgotten),
    "kept products of other samples": (KEPT_1D, SavedResults, "_take", _of_other_samples),
}


# ---- optimizers, precision, recomputation ----


def _stay(original: Any, self: DropoutStreams, place: Any) -> None:
    return


def _in_two_parts(original: Any, self: Any, ops: Any, group: Any, *tensors: Any, **more: Any) -> None:
    weight, gradient, state = tensors
    rows = [slice(0, weight.shape[0] // 2), slice(weight.shape[0] // 2, None)]
    for part in rows:
        pieces = {name: tensor[part] for name, tensor in state.items()}
        original(self, ops, group, weight[part], gradient[part], pieces, **more)


def _adam_decays_as_adamw(original: Any, group: Any, compute: Any) -> Any:
    return original(replace(group, type="adamw"), compute)


def _schedule_a_step_late(original: Any, config: Any, step: int) -> float:
    return original(config, max(step - 1, 0))


def _no_groups(original: Any, names: Any, groups: Any) -> dict[str, int]:
    return dict.fromkeys(original(names, groups), len(groups) - 1)


def _not_clipped(original: Any, self: OwnOptimizer, chunk: Chunk, used: Any, **more: Any) -> None:
    original(self, chunk, used, **more | {"grad_scale": 6.0 * 12})  # the tokens alone


def _scale_kept(original: Any, self: Chunk, index: int, gradient: torch.Tensor, *, seed: float) -> None:
    original(self, index, gradient)


def _one_seed_for_all_parts(original: Any, self: GradientHooks, *, seed: float, **more: Any) -> None:
    original(self, seed=2.0**16 / 32, **more)


def _not_published(original: Any, self: Chunk, start: int, stop: int) -> torch.Tensor | None:
    seen: torch.Tensor | None = original(self, start, stop)
    return None if self.state is GradientState.REDUCED else seen


def _own(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2)


def _stepping(**optimizer: Any) -> Case:
    config = dict(clip_grad_norm=0.05, optimizer=dict(lr=1e-2, weight_decay=0.3) | optimizer)
    return Case(family="llama", world_size=2, config=config)


RECOMPUTED = replace(CASE, config=CASE.config | {"activation_checkpoint": "full"})
KEPT = replace(CASE, config=CASE.config | {"activation_checkpoint": "selective"})
HALF = replace(CASE, config=CASE.config | {"precision": "fp16"}, steps=2)
MATRICES = dict(type="muon", groups=[dict(match="*norm*", type="adamw")])
GROUPED = _stepping(type="adamw", groups=[dict(match="blocks.0.*", lr=0.1)])
SCHEDULED = Case(
    config=dict(lr_scheduler=dict(type="linear", total_steps=4)),
    schedule=functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=4
    ),
)
OWN = replace(_stepping(type="adamw"), config=dict(clip_grad_norm=0.05), own=_own)
FAULTS_STEP: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "recomputed with new masks": (RECOMPUTED, DropoutStreams, "go_to", _stay),
    "partly recomputed with new masks": (KEPT, DropoutStreams, "go_to", _stay),
    "length of a part of a tensor": (_stepping(type="lamb"), LAMB, "update", _in_two_parts),
    "a part of a matrix made orthogonal": (_stepping(**MATRICES), Muon, "update", _in_two_parts),
    "adam decays as adamw": (_stepping(type="adam"), optimizer, "rule_of", _adam_decays_as_adamw),
    "schedule a step late": (SCHEDULED, engine, "learning_rate_factor", _schedule_a_step_late),
    "groups forgotten": (GROUPED, build_chunks, "assign_groups", _no_groups),
    "own optimizer not clipped": (OWN, OwnOptimizer, "update", _not_clipped),
    "loss scale not removed": (HALF, Chunk, "accept", _scale_kept),
    "one seed for parts of all sizes": (HALF, GradientHooks, "begin", _one_seed_for_all_parts),
    "weights in 16 bits not renewed": (HALF, Chunk, "seen", _not_published),
}


# ---- 2D and 2.5D ----


def _terms_not_summed(original: Any, x: torch.Tensor, along: OperandAxis | None) -> Any:
    summed = original(x.clone(), along)()
    if along is None:
        return lambda: summed
    return lambda: x.tensor_split(along.comm.size, along.dim)[along.comm.coord].contiguous()


def _depth_not_summed(original: Any, self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor.depth")


def _samples_of_another_row(original: Any, self: Tensor2D, given: Any) -> Any:
    parts = given.cut(self.row.size)
    return replace(original(self, given), samples=parts[1 - self.row.coord].samples)


def _norm_over_own_features(
    original: Any, self: Communicator, tensor: torch.Tensor, op: str = "sum"
) -> torch.Tensor:
    result: torch.Tensor = original(self, tensor.clone(), op)
    return tensor * self.size if self.axis == "tensor.column" else result


def _features_from_zero(original: Any, rows: Any, comm: Communicator, width: int) -> Any:
    return rows


GRID = Case(
    world_size=4,
    tensor=4,
    mode="2d",
    dropout=0.2,
    global_batch=4,
    ragged=True,
    config=dict(clip_grad_norm=0.05),
)
DEEP = Case(world_size=8, tensor=8, mode="2.5d", depth=2, global_batch=4, steps=2)
FAULTS_2D: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "terms of a product not summed": (GRID, grid_layers, "_scatter_async", _terms_not_summed),
    "depth not summed": (DEEP, ShardSpec, "sync_axes", _depth_not_summed),
    "counters of another row's samples": (GRID, Tensor2D, "local_part", _samples_of_another_row),
    "norm over own features": (GRID, Communicator, "all_reduce", _norm_over_own_features),
    "mask of other features": (GRID, tensor_grid, "features_of", _features_from_zero),
}


# ---- 3D ----


def _samples_of_the_hidden_part(original: Any, self: Tensor3D, given: Any) -> Any:
    part = given.cut(self.edge**2)[self.i.coord * self.edge + self.k.coord]
    return replace(original(self, given), samples=part.samples)


def _labels_of_the_stream(original: Any, self: Tensor3D, given: Any) -> Any:
    part = given.cut(self.edge**2)[self.i.coord * self.edge + self.j.coord]
    return replace(original(self, given), labels=part.labels)


def _without_i(original: Any, self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor.i")


def _features_in_another_order(original: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    found: torch.Tensor = original(x, comm)
    return found.flip(2)


CUBE = Case(
    world_size=8, tensor=8, mode="3d", dropout=0.2, global_batch=8, ragged=True, steps=1, layers=1,
    config=dict(clip_grad_norm=0.05),
)  # fmt: skip
FAULTS_3D: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "3d, terms of a product not summed": (CUBE, grid_layers, "_scatter_async", _terms_not_summed),
    "3d, counters of the hidden samples": (CUBE, Tensor3D, "local_part", _samples_of_the_hidden_part),
    "3d, labels of the residual stream": (CUBE, Tensor3D, "local_part", _labels_of_the_stream),
    "3d, biases and norms not summed over i": (CUBE, ShardSpec, "sync_axes", _without_i),
    "3d, embedded features out of order": (
        CUBE,
        autograd_collectives,
        "heads_to_tokens",
        _features_in_another_order,
    ),
    "3d, mask of other features": (CUBE, tensor_grid, "features_of", _features_from_zero),
    "3d, loss told by every rank": (CUBE, Engine, "_agree", _loss_of_every_rank),
}


# ---- sharded state ----


def _not_gathered(original: Any, self: Chunk) -> None:
    if self.spec.id:
        original(self)


def _gathered_before_the_update(
    original: Any, self: ChunkOptimizer, chunk: Chunk, used: Any, **kwargs: Any
) -> None:
    stale = chunk.full_weight.clone()
    original(self, chunk, used, **kwargs)
    chunk.full_weight.copy_(stale)


def _gate_left_open(original: Any, self: Chunk) -> None:
    """A chunk counts as whole while the others' shards are still on their way."""
    if self._gathering is not None:
        shards, self._value = self.full_weight, torch.full_like(self.full_weight, 0.1)
        own = slice(*self.owned)
        self.full_weight[own] = shards[own]
    original(self)


def _neighbours_shard(original: Any, self: ChunkSpec, parts: int, part: int) -> tuple[int, int]:
    return original(self, parts, (part + 1) % parts)


def _half_of_the_norm(original: Any, self: Chunk) -> torch.Tensor:
    return original(self) * (self.groups.all.coord == 0)


def _sum_of_the_first(
    original: Any, self: Communicator, full: torch.Tensor, out: torch.Tensor, **more: Any
) -> Any:
    return original(self, full.clone(), out.clone() if self.coord else out, **more)


def _wrong_offset(original: Any, self: Chunk, entry: Any) -> Any:
    part = original(self, entry)
    return part and (part[0], 0)


SHARDED = replace(CASE, config=CASE.config | dict(zero=dict(stage=1)), chunk_bytes=8 * 3000, vocabulary=200)
FAULTS_ZERO: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "weights of the first chunk not gathered": (SHARDED, Chunk, "start_gather", _not_gathered),
    "weights published before the update": (SHARDED, ChunkOptimizer, "update", _gathered_before_the_update),
    "weights used before they are whole": (SHARDED, Chunk, "finish_gather", _gate_left_open),
    "the neighbour's shard": (SHARDED, ChunkSpec, "shard", _neighbours_shard),
    "shards summed on one rank only": (SHARDED, Communicator, "reduce_scatter_async", _sum_of_the_first),
    "a master from the parameter's beginning": (SHARDED, Chunk, "part_of", _wrong_offset),
    "sharded, norm over one share only": (SHARDED, Chunk, "squares", _half_of_the_norm),
    "sharded, a parameter left out": (SHARDED, ChunkOptimizer, "update", _one_step_count),
    "sharded, reduced too early": (SHARDED, GradientHooks, "begin", _late_gradient),
}

ALL = (
    {name: (CASE, *fault) for name, fault in FAULTS.items()} | FAULTS_1D | FAULTS_2D | FAULTS_3D | FAULTS_STEP
)
ALL |= FAULTS_ZERO


# ---- sharded weights ----


def _shards_rolled(original: Any, self: WeightChunk, slot: torch.Tensor) -> None:
    original(self, slot)
    assert self._gathering is not None
    self._gathering.wait()
    slot.copy_(slot.roll(self.local_shard.numel()))


def _view_kept(original: Any, self: ParameterGather, tensor: torch.Tensor) -> Any:
    original(self, tensor)
    return tensor, tensor._version


def _view_from_the_start(original: Any, self: Chunk, tensor: torch.Tensor) -> Any:
    view = original(self, tensor)
    return view and replace(view, offset=0)


def _one_slot_for_all(original: Any, intervals: Any) -> Any:
    _, numel = original(intervals)
    return (0,) * len(intervals), numel


def _all_at_once(original: Any, self: GradientHooks, count: int) -> None:
    original(self, len(self._chunks))


def _dropped_while_used(original: Any, needs: Any, prefetch: int, reshard: bool) -> Any:
    later = [*needs[1:], needs[-1]]
    return original(later, prefetch, reshard)


def _used_before_it_came(original: Any, self: ParameterGather, needs: Any) -> None:
    for index in needs:
        chunk = self._chunks[index]
        chunk._value = torch.full_like(chunk.value, 0.1)
    original(self, needs)


WEIGHTS = replace(
    SHARDED, layers=3, config=CASE.config | dict(zero=dict(stage=3), activation_checkpoint="none")
)
FAULTS_WEIGHTS: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a gather brings the neighbour's shard": (WEIGHTS, Chunk, "unshard", _shards_rolled),
    "a saved view is not rebuilt": (WEIGHTS, ParameterGather, "_pack", _view_kept),
    "a saved view is rebuilt elsewhere": (WEIGHTS, Chunk, "saved", _view_from_the_start),
    "slots overlap": (WEIGHTS, gather_plan, "pack_intervals", _one_slot_for_all),
    "reduced before the last use": (WEIGHTS, GradientHooks, "launch", _all_at_once),
    "dropped while it is used": (WEIGHTS, gather_plan, "_residents", _dropped_while_used),
    "weights used before they came": (WEIGHTS, ParameterGather, "_wait", _used_before_it_came),
    "sharded weights, a parameter left out": (WEIGHTS, ChunkOptimizer, "update", _one_step_count),
}
ALL |= FAULTS_WEIGHTS


# ---- sharded weights that do not train ----


def _shards_of_frozen_rolled(original: Any, self: WeightChunk, slot: torch.Tensor) -> None:
    if isinstance(self, Chunk):
        original(self, slot)
    else:
        _shards_rolled(original, self, slot)


def _frozen_dropped_at_once(original: Any, self: ParameterGather, needs: Any) -> None:
    original(self, needs)
    for index in needs:
        if index >= len(self._chunks):
            self._all[index]._hide()


def _frozen_not_asked_for_in_backward(original: Any, self: SavedView) -> Any:
    view = original(self)
    return view if isinstance(self.chunk, Chunk) else torch.full_like(view, 0.1)


FROZEN = replace(WEIGHTS, adapters=2)
FAULTS_FROZEN: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "frozen weights of the neighbour's shard": (FROZEN, WeightChunk, "unshard", _shards_of_frozen_rolled),
    "frozen weights dropped too early": (FROZEN, ParameterGather, "_wait", _frozen_dropped_at_once),
    "frozen weights of others in backward": (FROZEN, SavedView, "rebuilt", _frozen_not_asked_for_in_backward),
    "a frozen shard from the parameter's beginning": (FROZEN, WeightChunk, "part_of", _wrong_offset),
}
ALL |= FAULTS_FROZEN


# ---- hybrid sharding ----


def _copies_not_summed(original: Any, self: Chunk) -> None:
    return None


def _copies_summed_too_early(original: Any, self: GradientHooks, **more: Any) -> None:
    original(self, **more | dict(ends=True))


def _every_copy_counts_its_shard(original: Any, self: Chunk, first: int, last: int) -> slice:
    self.share = self.shard
    return original(self, first, last)


def _shard_of_the_next_rank(original: Any, self: Chunk) -> None:
    original(self)
    summed = self.groups.copies.all_gather(self.gradient)
    self.gradient.copy_(self.shards.shift(summed[: self.gradient.numel()].contiguous()))


def _sums_of_copies_alone(original: Any, self: Chunk) -> None:
    self.groups.copies.all_gather(self._sharded_sums().clone(), self.gradient)


HYBRID = replace(CASE, world_size=4, steps=2, chunk_bytes=8 * 3000, vocabulary=200)
HYBRID_WEIGHTS = replace(HYBRID, config=CASE.config | dict(zero=dict(stage=3, shard_size=2)))
HYBRID_ORDER = replace(
    HYBRID, config=CASE.config | dict(zero=dict(stage=2, shard_size=2, sum_order="ordered"))
)
FAULTS_HYBRID: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "copies are not summed": (HYBRID_WEIGHTS, Chunk, "start_copies", _copies_not_summed),
    "copies are summed before the last": (HYBRID_WEIGHTS, GradientHooks, "begin", _copies_summed_too_early),
    "each copy counts in the norm": (HYBRID_WEIGHTS, Chunk, "_share_of", _every_copy_counts_its_shard),
    "a copy's shards have wrong owners": (HYBRID_WEIGHTS, Chunk, "conclude", _shard_of_the_next_rank),
    "in order, sums of copies alone": (HYBRID_ORDER, Chunk, "_gather_sums", _sums_of_copies_alone),
}
ALL |= FAULTS_HYBRID


def _part_of_the_neighbour(original: Any, self: Chunk, part: torch.Tensor) -> None:
    original(self, part)
    part.copy_(self.groups.near.shift(part.clone()))


def _part_of_the_first_step(original: Any, self: Chunk, part: torch.Tensor) -> None:
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
FAULTS_NEAR: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a part is the neighbour's": (NEAR, Chunk, "keep_part", _part_of_the_neighbour),
    "a part is of the step before": (NEAR, Chunk, "keep_part", _part_of_the_first_step),
    "kept parts overlap": (NEAR, sharded_weights, "plan_of", _parts_in_one_place),
}
ALL |= FAULTS_NEAR


# ---- state on the host ----


def _refilled_before_it_is_empty(original: Any, self: Link, target: Any, source: Any, **more: Any) -> Any:
    if self.name == "d2h":
        self._thread.submit(time.sleep, 0.005)  # what is copied out is what is there by then
    return original(self, target, source)


def _not_taken_back(original: Any, self: OffloadedOptimizerStates, index: int) -> None:
    before = self._host.rest[index].clone()
    original(self, index)
    if index == len(self._records) - 1:
        self.flush()
        self._host.rest[index].copy_(before)


def _read_before_it_came(original: Any, self: OffloadedOptimizerStates, index: int) -> Any:
    self._incoming[index].wait()
    self._here[index].fill_(0.1)
    return original(self, index)


HOST = replace(
    SHARDED,
    chunk_bytes=8 * 1500,
    config=CASE.config
    | dict(memory=dict(placement="host"), optimizer=dict(type="adamw", lr=0.01, weight_decay=0.1)),
)
FAULTS_HOST: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a slot is refilled before it is empty": (HOST, Link, "copy", _refilled_before_it_is_empty),
    "the last state is not taken back": (HOST, OffloadedOptimizerStates, "evict", _not_taken_back),
    "state is read before it has come": (HOST, OffloadedOptimizerStates, "here", _read_before_it_came),
}
ALL |= FAULTS_HOST


# ---- updates on the host ----


def _not_down_yet(original: Any, self: HostUpdates, index: int, part: ChunkPart) -> None:
    self._down._thread.submit(time.sleep, 0.01)
    original(self, index, part)
    self._came[index, part] = self._came[index, part][0], self.updates_link.run(int, 0)


def _read_before_they_are_up(original: Any, self: HostUpdates, index: int) -> None:
    self._up._thread.submit(time.sleep, 0.01)
    original(self, index)
    self._coming[index] = self.updates_link.run(int, 0)


def _without_the_norm(original: Any, self: Updates, totals: Any, factor: float) -> DeferredUpdates:
    return original(self, replace(totals, squares=0.0), factor)


def _one_count_late(
    original: Any, self: ChunkOptimizer, index: int, spans: Any, *more: Any, **named: Any
) -> Any:
    original(self, index, [replace(span, steps=span.steps + 1) for span in spans], *more, **named)


ON_HOST = replace(HOST, config=HOST.config | dict(memory=dict(placement="host", update_on="host")))
FAULTS_ON_HOST: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "an update does not wait for its gradient": (ON_HOST, HostUpdates, "bring", _not_down_yet),
    "weights are read before they are up": (ON_HOST, HostUpdates, "take_up", _read_before_they_are_up),
    "an update before the norm is known": (ON_HOST, Updates, "deferred", _without_the_norm),
    "a step count of the step after": (ON_HOST, ChunkOptimizer, "_apply", _one_count_late),
}
ALL |= FAULTS_ON_HOST


# ---- weights and gradients on the host ----


def _sum_overwritten(
    original: Any, self: GradientOffloadBuffer, number: int, target: Any, source: Any, *, add: bool
) -> None:  # fmt: skip
    original(self, number, target, source, add=False)


def _weights_not_taken_back(original: Any, self: HostShardStream, index: int) -> None:
    weights = self._chunks[index].weights_at_rest
    assert weights is not None
    before = weights.clone()
    original(self, index)
    self.flush()
    if index == len(self._chunks) - 1:
        weights.copy_(before)


def _gathered_before_it_came(original: Any, self: Chunk) -> None:
    self._finish_fetch()
    self.full_weight.fill_(0.1)
    original(self)


def _gradient_not_brought(original: Any, self: HostShardStream, index: int, **more: Any) -> None:
    original(self, index, **more)
    self._chunks[index].gradient.fill_(0.1)


EVERYTHING = dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))
BUDGET = replace(
    HOST,
    layers=3,
    config=HOST.config | dict(zero=dict(stage=3), memory=EVERYTHING, activation_checkpoint="none"),
)
FAULTS_BUDGET: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a sum on the host is overwritten": (BUDGET, GradientOffloadBuffer, "send", _sum_overwritten),
    "the last weights are not taken back": (BUDGET, HostShardStream, "evict", _weights_not_taken_back),
    "a shard is gathered before it has come": (BUDGET, Chunk, "gather_fetched", _gathered_before_it_came),
    "a gradient is not brought for its update": (BUDGET, HostShardStream, "here", _gradient_not_brought),
}
ALL |= FAULTS_BUDGET


# ---- state on disk ----


def _not_awaited(original: Any, self: DiskStorage, index: int, bring: Any) -> None:
    slot, came = self._came[index]
    came.wait()
    self._elements(slot, index).fill_(0.1)  # what was in the slot before
    original(self, index, bring)


def _of_the_record_before(original: Any, self: DiskFile, record: int, target: torch.Tensor) -> None:
    original(self, max(record - 1, 0), target)


def _written_before_it_came(original: Any, self: DiskStorage, index: int) -> None:
    slot, came = self._leaving[index]
    came.wait()
    before = slot.clone()
    slot.zero_()
    original(self, index)
    self._outgoing[index].wait()
    slot.copy_(before)


def _not_written(original: Any, self: DiskStorage, index: int) -> None:
    if index == 0:
        _nothing_written(original, self, index)
    else:
        original(self, index)


def _nothing_written(original: Any, self: DiskStorage, index: int) -> None:
    slot, came = self._leaving.pop(index)
    self._passing.give(slot, came)


DISK = replace(
    HOST,
    config=HOST.config | dict(memory=dict(placement="disk", disk_dir=tempfile.gettempdir())),
)
FAULTS_DISK: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a read from disk is not awaited": (DISK, DiskStorage, "leave", _not_awaited),
    "a record is read for another": (DISK, DiskFile, "read", _of_the_record_before),
    "a record is written before it has come": (DISK, DiskStorage, "write", _written_before_it_came),
    "a record is not written": (DISK, DiskStorage, "write", _not_written),
}
ALL |= FAULTS_DISK


# ---- state on three tiers ----


def _not_brought_along(original: Any, self: OffloadedOptimizerStates, index: int, home: Any) -> None:
    original(self, index, home)
    for part in home.opened(index, write=True).values():
        part.fill_(0.1)  # what was there before
    home.settle()


def _stays_as_it_was(original: Any, self: HostStorage, index: int, take: Any) -> None:
    before = self.rest[index].clone()
    original(self, index, take)
    self.finish()
    if index == max(self.rest):
        self.rest[index].copy_(before)


BUDGETS = dict(placement="auto", device_budget=430_000, host_budget=195_000, disk_dir=tempfile.gettempdir())
THREE = replace(BUDGET, config=BUDGET.config | dict(memory=BUDGETS))
"""Of twelve records ten begin on disk; when it is settled seven are there and five on the host."""
FAULTS_THREE: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "a record that changes its tier is not brought along": (
        THREE,
        OffloadedOptimizerStates,
        "_move",
        _not_brought_along,
    ),
    "the last state on the host is not taken back there": (THREE, HostStorage, "come_back", _stays_as_it_was),
    "a record among others on disk is not written": (THREE, DiskStorage, "write", _nothing_written),
}
ALL |= FAULTS_THREE


# ---- sequence parallelism ----


def _halves_swapped(original: Any, coord: int, source: int, tokens: int, causal: bool) -> Any:
    return original(source, coord, tokens, causal)


def _own_tokens_seen_whole(original: Any, coord: int, source: int, tokens: int, causal: bool) -> Any:
    return original(coord, source, tokens, causal)._replace(causal=False)


def _own_keys_in_every_step(original: Any, self: Ring | Gather, block: torch.Tensor) -> Any:
    return ((source, block) for source, _ in list(original(self, block)))


def _gradients_stay(original: Any, self: Any) -> torch.Tensor:
    total, own = original(self), torch.stack([gradient.clone() for gradient in self._own])
    return own if self._comm.coord else total


def _own_gradient_forgotten(original: Any, self: Any) -> torch.Tensor:
    self._own = tuple(torch.zeros_like(gradient) for gradient in self._own)
    return original(self)


def _blocks_not_merged_by_weight(original: Any, *args: Any, ops: kernels.Ops, **more: Any) -> Any:
    def halves(out: torch.Tensor, lse: torch.Tensor, *part: Any) -> None:
        out.lerp_(part[0].to(out.dtype), 0.5)

    return original(*args, ops=replace(ops, attend_merge_=halves), **more)


def _heads_of_the_next_rank(original: Any, tensors: Any, comm: Communicator) -> Any:
    return original([tensor.roll(tensor.shape[2] // comm.size, 2) for tensor in tensors], comm)


def _tokens_of_another_order(original: Any, tensors: Any, comm: Communicator) -> Any:
    return original([tensor.roll(tensor.shape[1] // comm.size, 1) for tensor in tensors], comm)


def _positions_from_zero(original: Any, self: SequenceParallel, given: Any) -> Any:
    part = original(self, given)
    return replace(part, kwargs={**part.kwargs, "position_ids": torch.arange(part.inputs.shape[1])})


def _masks_from_zero(original: Any, self: SequenceParallel, given: Any) -> Any:
    part = original(self, given)
    return replace(part, positions=torch.arange(part.inputs.shape[1]))


def _blocks_of_the_next_rank(original: Any, self: Gather, block: torch.Tensor) -> Any:
    sources, blocks = zip(*original(self, block), strict=True)
    return zip(sources, (*blocks[1:], blocks[0]), strict=True)


def _sum_over_data_only(original: Any, self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "sequence")


RING = Case(world_size=2, sequence=2, dropout=0.2, ragged=True, config=dict(clip_grad_norm=0.05))
GATHERED = replace(RING, sequence_mode="allgather_kv")
FULL = replace(RING, sequence_mode="ring_full", causal=False)
USP = replace(RING, world_size=4, sequence=4, sequence_mode="usp", ulysses=2, tokens=16, steps=2)
FAULTS_SEQUENCE: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "ring halves swapped": (RING, ring_attention, "seen", _halves_swapped),
    "own tokens seen without a mask": (USP, ring_attention, "seen", _own_tokens_seen_whole),
    "own keys in every step of a ring": (RING, Ring, "blocks", _own_keys_in_every_step),
    "own keys for those of all ranks": (GATHERED, Gather, "blocks", _own_keys_in_every_step),
    "gradients of keys do not travel": (RING, ring_attention._Returning, "home", _gradients_stay),
    "own gradient of keys forgotten": (USP, ring_attention._Returning, "home", _own_gradient_forgotten),
    "blocks merged without weights": (RING, sequence_parallel, "attend_blocks", _blocks_not_merged_by_weight),
    "own keys in every step of a full ring": (FULL, Ring, "blocks", _own_keys_in_every_step),
    "gradients of keys of a full ring do not travel": (
        FULL,
        ring_attention._Returning,
        "home",
        _gradients_stay,
    ),
    "heads of the next rank": (USP, autograd_collectives, "_to_heads", _heads_of_the_next_rank),
    "gradients of tokens of another rank": (
        USP,
        autograd_collectives,
        "_to_tokens",
        _tokens_of_another_order,
    ),
    "positions from zero": (RING, SequenceParallel, "local_part", _positions_from_zero),
    "masks from position zero": (RING, SequenceParallel, "local_part", _masks_from_zero),
    "gathered blocks taken for others": (GATHERED, Gather, "blocks", _blocks_of_the_next_rank),
    "gradients not summed over the sequence": (RING, ShardSpec, "sync_axes", _sum_over_data_only),
}
ALL |= FAULTS_SEQUENCE


# ---- pipeline ----


def _tied_not_summed(original: Any, self: Communicator, tensor: torch.Tensor, *more: Any) -> torch.Tensor:
    original(self, tensor.clone(), *more)
    return tensor


def _every_stage_counts(original: Any, self: Stages, stages: Any) -> bool:
    return True


def _micro_batch_without_weights(original: Any, self: runtime._Step, subject: Any) -> None:
    if subject[1] == 1:
        self.later[subject] = []
    original(self, subject)


def _weights_again(original: Any, self: runtime._Step, subject: Any) -> None:
    if subject[1] == 1:
        self.later[subject] *= 2
    original(self, subject)


def _slot_back_too_early(original: Any, self: runtime._Step, action: Any) -> None:
    original(self, action)
    subject = runtime._subject(action)
    for slots, tensor in self.lent.pop(subject):
        slots.give(tensor)


def _gradient_of_input_lost(original: Any, self: runtime._Step, send: Any, *more: Any) -> None:
    *rest, tensors = more
    if send is ActionKind.SEND_B:
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
    original(self, send, *rest, tensors)


def _masks_of_the_first(original: Any, self: Engine, stage: int, part: Any, carried: Any, sums: Any) -> Any:
    if stage:
        part = replace(part, samples=part.samples - part.samples.min())
    return original(self, stage, part, carried, sums)


def _half_the_blocks(original: Any, self: GPTSections, start: int, stop: int, *more: Any) -> Any:
    return original(self, start, stop - 1 if start == 0 else stop, *more)


def _norms_in_no_step(original: Any, weights: Any, gradients: Any) -> None:
    if weights[0].dim() > 2:  # a norm gives its output back, a linear its weight
        gradients = [gradient * 0 for gradient in gradients]
    original(weights, gradients)


def _same_part_on_every_rank(original: Any, x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    part = original(x, comm, dim)
    return part + (x.chunk(comm.size, dim)[0] - part).detach()


def _only_of_this_stage(original: Any, shapes: Any, here: Any, dtype: torch.dtype) -> Any:
    return original({name: shape for name, shape in shapes.items() if name in here}, here, dtype)


PIPED = Case(
    pipeline=dict(size=2, schedule="zb-h1", micro_batches=3),
    dropout=0.2,
    ragged=True,
    config=dict(clip_grad_norm=0.05),
)
PIPED_OWN = replace(PIPED, family="llama", own=by_place)
FAULTS_PIPELINE: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "tied gradients not summed over stages": (PIPED, Communicator, "exchange_sum", _tied_not_summed),
    "tied weights counted on both stages": (PIPED, Stages, "is_first_holder", _every_stage_counts),
    "weight gradients of a micro-batch lost": (
        PIPED,
        runtime._Step,
        "_weights",
        _micro_batch_without_weights,
    ),
    "weight gradients of a micro-batch twice": (PIPED, runtime._Step, "_weights", _weights_again),
    "a message's slot given back too early": (PIPED, runtime._Step, "_receive", _slot_back_too_early),
    "gradients of inputs lost": (PIPED, runtime._Step, "_pass_on", _gradient_of_input_lost),
    "masks of the first micro-batch": (PIPED, Engine, "_forward", _masks_of_the_first),
    "half a block left out": (PIPED, GPTSections, "run", _half_the_blocks),
    "own optimizer given one stage's parameters": (PIPED_OWN, own, "in_order_of", _only_of_this_stage),
    "gradients of norms put off for ever": (PIPED, split_backward, "deliver", _norms_in_no_step),
}
ALL |= FAULTS_PIPELINE


def _sums_before_forgotten(original: Any, self: Chunk) -> None:
    self._sums = 0
    original(self)


def _tied_by_micro_batch(original: Any, self: StageHooks, stage: int, **more: Any) -> None:
    original(self, stage, **more)
    for stages, hooks in self._hooks.items():
        if stage in stages and len(stages) > 1:
            hooks.begin(is_last=True)


def _norm_of_own_stages(original: Any, packed: Any, names: Any) -> Any:
    return original(packed, [name for name in names if not name.startswith("blocks.1")])


PIPED_SHARDS = replace(
    PIPED, world_size=4, chunk_bytes=4096, steps=2,
    config=PIPED.config | dict(zero=dict(stage=2, reduce_every="micro_batch")),
)  # fmt: skip
PIPED_ORDER = replace(
    PIPED_SHARDS, config=PIPED.config | dict(zero=dict(sum_order="ordered")), chunk_bytes=None
)
FAULTS_PIPED_SHARDS: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "sums of the micro-batches before lost": (PIPED_SHARDS, Chunk, "finish_reduce", _sums_before_forgotten),
    "tied gradients over ranks before stages": (PIPED_SHARDS, StageHooks, "begin", _tied_by_micro_batch),
    "a stage's parameters left out of the norm": (PIPED_ORDER, engine, "in_order", _norm_of_own_stages),
    "in order, tied weights counted twice": (PIPED_ORDER, Stages, "is_first_holder", _every_stage_counts),
}
ALL |= FAULTS_PIPED_SHARDS


def _terms_put_off_not_summed(original: Any, weights: Any, gradients: Any) -> None:
    if weights[0].shape[-1] == 64 // 2:  # the row-wise linear of an MLP, cut in two
        gradients = [gradient * 2 for gradient in gradients]
    original(weights, gradients)


def _biases_in_no_step(original: Any, y: torch.Tensor, bias: torch.Tensor, queue: Any) -> torch.Tensor:
    return original(y, bias.detach(), queue)


PIPED_GRID = replace(PIPED, world_size=8, tensor=4, mode="2d", steps=1)
PIPED_DEEP = replace(PIPED, world_size=4, tensor=2, mode="2.5d", depth=2, steps=1)
PIPED_LIBRARY = replace(
    PIPED, world_size=4, tensor=2, steps=1, family="hf-gpt2", pipeline=dict(size=2, micro_batches=3)
)
PIPED_RING = replace(PIPED, world_size=4, sequence=2, steps=1)
FAULTS_PIPED_CUTS: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "piped grid, weight gradients put off are twice": (
        PIPED_GRID,
        grid_layers,
        "deliver",
        _terms_put_off_not_summed,
    ),
    "piped grid, mask of other features": (PIPED_GRID, tensor_grid, "features_of", _features_from_zero),
    "piped sheets, biases in no step": (PIPED_DEEP, grid_layers, "add_bias", _biases_in_no_step),
    "piped sheets, depth not summed": (PIPED_DEEP, ShardSpec, "sync_axes", _depth_not_summed),
    "piped ring, positions from zero": (PIPED_RING, SequenceParallel, "local_part", _positions_from_zero),
    "piped ring, gradients not summed": (PIPED_RING, ShardSpec, "sync_axes", _sum_over_data_only),
    "piped library, the same part on every rank": (
        PIPED_LIBRARY,
        autograd_collectives,
        "split",
        _same_part_on_every_rank,
    ),
    "piped ring, tied not summed over stages": (PIPED_RING, Communicator, "exchange_sum", _tied_not_summed),
}
ALL |= FAULTS_PIPED_CUTS


# ---- auxiliary losses ----


def _told_by_all(original: Any, self: TensorParallel1D, name: str) -> Share:
    return replace(original(self, name), tells=True)


def _of_own_samples(original: Any, self: AuxiliaryLosses, *, samples: int, labels: int) -> None:
    original(self, samples=samples // 2, labels=labels)


def _of_own_tokens(original: Any, self: Share, per: Any, x: torch.Tensor) -> int:
    return original(replace(self, tokens=1), per, x)


def _heard_for_ever(original: Any, self: AuxiliaryLosses, into: torch.Tensor, samples: int) -> Any:
    original(self, into, samples).__enter__()
    return contextlib.nullcontext()


def _without_a_gradient(original: Any, self: AuxiliaryLosses, name: str, factor: float) -> float:
    return original(self, name, factor) * (not name.startswith("blocks.0"))


def _seed_of_one(original: Any, self: AuxiliaryLosses, name: str, factor: float) -> float:
    original(self, name, factor)
    return factor


def _as_many_as_samples(original: Any, self: AuxiliaryLosses, *, samples: int, labels: int) -> None:
    original(self, samples=samples, labels=12 * samples)


EMITS = Case(auxiliary=("token", "element"), ragged=True, steps=1, config=dict(clip_grad_norm=0.05))
EMITS_PIPED = replace(EMITS, pipeline=dict(size=2, schedule="zb-h1", micro_batches=3))
EMITS_AGAIN = replace(EMITS, config=dict(activation_checkpoint="full"))
EMITS_WHOLE = replace(EMITS, tensor=2, sequence_parallel=False)
EMITS_RING = replace(EMITS, sequence=2)
EMITS_HALF = replace(EMITS, config=dict(precision="fp16"))
FAULTS_AUXILIARY: dict[str, tuple[Case, Any, str, Callable[..., Any]]] = {
    "auxiliary losses told by every rank": (EMITS_WHOLE, TensorParallel1D, "share_at", _told_by_all),
    "auxiliary losses over a rank's own samples": (EMITS, AuxiliaryLosses, "begin", _of_own_samples),
    "auxiliary losses over a rank's own tokens": (EMITS_RING, Share, "units_of_a_sample", _of_own_tokens),
    "auxiliary losses weighed against all labels": (EMITS, AuxiliaryLosses, "begin", _as_many_as_samples),
    "recomputed auxiliary losses count again": (EMITS_AGAIN, AuxiliaryLosses, "heard", _heard_for_ever),
    "auxiliary gradients of a stage lost": (EMITS_PIPED, AuxiliaryLosses, "_gradient", _without_a_gradient),
    "auxiliary gradients without the loss scale": (EMITS_HALF, AuxiliaryLosses, "_gradient", _seed_of_one),
}
ALL |= FAULTS_AUXILIARY


def faulty_run(env: RankEnv, fault: str) -> list[Step] | str:
    case, owner, name, change = ALL[fault]
    try:
        with _around(owner, name, change):
            return parallel_run(env, case)
    except (AssertionError, OSError, ValueError) as error:  # the product's own rules may be first
        return f"stopped: {error}"


@functools.cache
def reference(case_of: str) -> list[Step]:
    return serial_run(ALL[case_of][0])


def _is_green(case: Case, truth: list[Step], ranks: list[list[Step] | str]) -> bool:
    whole = [steps for steps in ranks if not isinstance(steps, str)]
    if len(whole) < len(ranks):
        return False
    try:
        if case.precision == "fp16":
            check_no_further(case, whole)
        else:
            for rank, steps in enumerate(whole):
                compare(case, truth, steps, rank)
    except AssertionError:
        return False
    return True


CASES = {
    "data": CASE,
    "sharded": SHARDED,
    "sharded weights": WEIGHTS,
    "copies of sharded weights": HYBRID_WEIGHTS,
    "copies, in order": HYBRID_ORDER,
    "kept by neighbours": NEAR,
    "state on the host": HOST,
    "state on the host, updated there": ON_HOST,
    "state on disk": DISK,
    "state on three tiers": THREE,
    "cut": CUT,
    "whole": WHOLE,
    "shared": SHARED,
    "adapted": ADAPTED,
    "kept": KEPT_1D,
    "grid": GRID,
    "deep": DEEP,
    "cube": CUBE,
    "ring": RING,
    "gathered": GATHERED,
    "piped": PIPED,
    "piped, sharded gradients": PIPED_SHARDS,
    "piped, in order": PIPED_ORDER,
    "piped grid": PIPED_GRID,
    "piped sheets": PIPED_DEEP,
    "piped ring": PIPED_RING,
    "piped library": PIPED_LIBRARY,
    "piped, own optimizer": PIPED_OWN,
    "usp": USP,
    "full": FULL,
    "emits, piped": EMITS_PIPED,
    "emits, recomputed": EMITS_AGAIN,
    "emits, whole": EMITS_WHOLE,
    "emits, ring": EMITS_RING,
    "emits, half": EMITS_HALF,
}
CASES |= {name: fault[0] for name, fault in FAULTS_STEP.items()}


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_this_case_is_green(case: str) -> None:
    ranks = run_world(parallel_run, CASES[case].world_size, CASES[case])
    assert _is_green(CASES[case], serial_run(CASES[case]), ranks)


@pytest.mark.parametrize("fault", ALL)
def test_parity_goes_red_for(fault: str) -> None:
    case = ALL[fault][0]
    assert not _is_green(case, reference(fault), run_world(faulty_run, case.world_size, fault))
