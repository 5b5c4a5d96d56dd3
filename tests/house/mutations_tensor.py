"""Plants faults in tensor parallelism: 1D, adapters, 2D, 2.5D and 3D."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.house.mutations_step import Faults
from tests.shared.parity import Case, ModularAdapter

# ---- 1D tensor parallelism ----


def _input_gradient_not_summed(original: Any, terms: torch.Tensor, mode: Any) -> Any:
    pending = original(terms.clone(), mode)
    if torch._C._current_graph_task_id() == -1:  # in forward
        return pending
    pending.wait()
    part = terms.tensor_split(mode.size, 1)[mode.coord] if mode.sequence_parallel else terms
    return _Ready(part)


def _output_not_summed(original: Any, terms: torch.Tensor, mode: Any) -> Any:
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


def _norm_gradient_not_summed(original: Any, self: Any, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor")


def _norm_gradient_summed_when_whole(original: Any, self: Any, layout: Any) -> tuple[str, ...]:
    return original(self, layout) if self.sharding_axes else (*original(self, layout), "tensor")


def _every_copy_counts(original: Any, self: Any, layout: Any, coords: Any) -> Any:
    return original(self, layout, dict.fromkeys(coords, 0))


def _one_shard_counts(original: Any, self: Any, layout: Any, coords: Any) -> Any:
    return original(self, layout, coords) if not coords["tensor"] else ()


def _key_heads_not_summed(original: Any, x: torch.Tensor, comm: Any) -> torch.Tensor:
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

    def in_the_head(*args: Any, start: int, **kwargs: Any) -> Any:
        return ops.linear_cross_entropy(*args, start=start + 1, **kwargs)

    return replace(ops, cross_entropy_partial=partial, linear_cross_entropy=in_the_head)


def _same_mask_on_every_part(original: Any, self: Any, name: str, parts: int = 1, part: int = 0) -> Any:
    return original(self, name, parts, 0)


def _loss_of_every_rank(original: Any, self: Any) -> Any:
    self._tells_loss = True
    return original(self)


SIZES_1D: dict[str, Any] = dict(world_size=4, tensor=2, ragged=True, config=dict(clip_grad_norm=0.05))
CUT = Case(dropout=0.2, **SIZES_1D)
WHOLE = Case(sequence_parallel=False, **SIZES_1D)
SHARED = Case(family="llama", world_size=4, tensor=4, config=dict(clip_grad_norm=0.05))
FAULTS_1D: Faults = {
    "input gradient not summed": (CUT, "_sum_async", _input_gradient_not_summed),
    "input gradient not summed, whole": (WHOLE, "_sum_async", _input_gradient_not_summed),
    "output of a pair not summed": (CUT, "_sum_async", _output_not_summed),
    "norm gradient not summed": (CUT, "ShardSpec.sync_axes", _norm_gradient_not_summed),
    "norm gradient summed where it is whole": (
        WHOLE,
        "ShardSpec.sync_axes",
        _norm_gradient_summed_when_whole,
    ),
    "every copy counts in the norm": (WHOLE, "ShardSpec.owned", _every_copy_counts),
    "one shard counts in the norm": (CUT, "ShardSpec.owned", _one_shard_counts),
    "shared key heads not summed": (SHARED, "copy", _key_heads_not_summed),
    "shared key heads counted by all": (SHARED, "ShardSpec.owned", _every_copy_counts),
    "bias before the sum": (CUT, "_RowwiseLinear.apply", _bias_on_every_rank),
    "vocabulary off by one": (CUT, "select", _vocabulary_off_by_one),
    "same mask on every part": (CUT, "DropoutStreams.rows", _same_mask_on_every_part),
    "loss told by every rank": (CUT, "Engine._agree", _loss_of_every_rank),
}


# ---- adapters, and products that are kept ----


def _offset_forgotten(original: Any, module: Any, rows: Any, width: int, coord: int) -> Any:
    return rows


def _of_other_samples(original: Any, self: Any, compute: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda kept: kept.roll(1, 0), original(self, compute))


ADAPTED = Case(tensor=2, adapters=2, adapter_kind=ModularAdapter, config=dict(clip_grad_norm=0.05), steps=2)
KEPT_1D = replace(CUT, config=CUT.config | dict(activation_checkpoint="selective"), steps=1)
FAULTS_1D |= {
    "whole factors' gradients not summed": (ADAPTED, "ShardSpec.sync_axes", _norm_gradient_not_summed),
    "an adapter drops other features": (ADAPTED, "rows_on_features", _offset_forgotten),
    "kept products of other samples": (KEPT_1D, "SavedResults._take", _of_other_samples),
}


# ---- 2D and 2.5D ----


def _terms_not_summed(original: Any, x: torch.Tensor, along: Any) -> Any:
    summed = original(x.clone(), along)()
    if along is None:
        return lambda: summed
    return lambda: x.tensor_split(along.comm.size, along.dim)[along.comm.coord].contiguous()


def depth_not_summed(original: Any, self: Any, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor.depth")


def _samples_of_another_row(original: Any, self: Any, given: Any) -> Any:
    parts = given.cut(self.row.size)
    return replace(original(self, given), samples=parts[1 - self.row.coord].samples)


def _norm_over_own_features(original: Any, self: Any, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    result: torch.Tensor = original(self, tensor.clone(), op)
    return tensor * self.size if self.axis == "tensor.column" else result


def features_from_zero(original: Any, rows: Any, comm: Any, width: int) -> Any:
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
FAULTS_2D: Faults = {
    "terms of a product not summed": (GRID, "_scatter_async", _terms_not_summed),
    "depth not summed": (DEEP, "ShardSpec.sync_axes", depth_not_summed),
    "counters of another row's samples": (GRID, "Tensor2D.local_part", _samples_of_another_row),
    "norm over own features": (GRID, "Communicator.all_reduce", _norm_over_own_features),
    "mask of other features": (GRID, "features_of", features_from_zero),
}


# ---- 3D ----


def _samples_of_the_hidden_part(original: Any, self: Any, given: Any) -> Any:
    part = given.cut(self.edge**2)[self.i.coord * self.edge + self.k.coord]
    return replace(original(self, given), samples=part.samples)


def _labels_of_the_stream(original: Any, self: Any, given: Any) -> Any:
    part = given.cut(self.edge**2)[self.i.coord * self.edge + self.j.coord]
    return replace(original(self, given), labels=part.labels)


def _without_i(original: Any, self: Any, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "tensor.i")


def _features_in_another_order(original: Any, x: torch.Tensor, comm: Any) -> torch.Tensor:
    found: torch.Tensor = original(x, comm)
    return found.flip(2)


CUBE = Case(
    world_size=8, tensor=8, mode="3d", dropout=0.2, global_batch=8, ragged=True, steps=1, layers=1,
    config=dict(clip_grad_norm=0.05),
)  # fmt: skip
FAULTS_3D: Faults = {
    "3d, terms of a product not summed": (CUBE, "_scatter_async", _terms_not_summed),
    "3d, counters of the hidden samples": (CUBE, "Tensor3D.local_part", _samples_of_the_hidden_part),
    "3d, labels of the residual stream": (CUBE, "Tensor3D.local_part", _labels_of_the_stream),
    "3d, biases and norms not summed over i": (CUBE, "ShardSpec.sync_axes", _without_i),
    "3d, embedded features out of order": (
        CUBE,
        "heads_to_tokens",
        _features_in_another_order,
    ),
    "3d, mask of other features": (CUBE, "features_of", features_from_zero),
    "3d, loss told by every rank": (CUBE, "Engine._agree", _loss_of_every_rank),
}

FAULTS: Faults = FAULTS_1D | FAULTS_2D | FAULTS_3D
