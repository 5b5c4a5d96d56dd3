"""Plants faults in pipelines: alone, with sharded gradients, with cut layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.house.mutations_sequence import positions_from_zero, sum_over_data_only
from tests.house.mutations_step import Faults
from tests.house.mutations_tensor import depth_not_summed, features_from_zero
from tests.pipeline.test_runtime import by_place
from tests.shared.parity import Case
from tests.shared.places import find

# ---- pipeline ----


def _tied_not_summed(original: Any, self: Any, tensor: torch.Tensor, *more: Any) -> torch.Tensor:
    original(self, tensor.clone(), *more)
    return tensor


def _every_stage_counts(original: Any, self: Any, stages: Any) -> bool:
    return True


def _micro_batch_without_weights(original: Any, self: Any, subject: Any) -> None:
    if subject[1] == 1:
        self.later[subject] = []
    original(self, subject)


def _weights_again(original: Any, self: Any, subject: Any) -> None:
    if subject[1] == 1:
        self.later[subject] *= 2
    original(self, subject)


def _slot_back_too_early(original: Any, self: Any, action: Any) -> None:
    original(self, action)
    subject = find("subject_of")(action)
    for slots, tensor in self.lent.pop(subject):
        slots.give(tensor)


def _gradient_of_input_lost(original: Any, self: Any, send: Any, *more: Any) -> None:
    *rest, tensors = more
    if send is find("ActionKind").SEND_B:
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
    original(self, send, *rest, tensors)


def _masks_of_the_first(original: Any, self: Any, stage: int, part: Any, carried: Any, sums: Any) -> Any:
    if stage:
        part = replace(part, samples=part.samples - part.samples.min())
    return original(self, stage, part, carried, sums)


def _half_the_blocks(original: Any, self: Any, start: int, stop: int, *more: Any) -> Any:
    return original(self, start, stop - 1 if start == 0 else stop, *more)


def _norms_in_no_step(original: Any, weights: Any, gradients: Any) -> None:
    if weights[0].dim() == 1:  # of a norm; a linear and a table have weights of two dims
        gradients = [gradient * 0 for gradient in gradients]
    original(weights, gradients)


def _same_part_on_every_rank(original: Any, x: torch.Tensor, comm: Any, dim: int) -> torch.Tensor:
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
FAULTS_PIPELINE: Faults = {
    "tied gradients not summed over stages": (PIPED, "Communicator.exchange_sum", _tied_not_summed),
    "tied weights counted on both stages": (PIPED, "Stages.is_first_holder", _every_stage_counts),
    "weight gradients of a micro-batch lost": (
        PIPED,
        "_Step._weights",
        _micro_batch_without_weights,
    ),
    "weight gradients of a micro-batch twice": (PIPED, "_Step._weights", _weights_again),
    "a message's slot given back too early": (PIPED, "_Step._receive", _slot_back_too_early),
    "gradients of inputs lost": (PIPED, "_Step._pass_on", _gradient_of_input_lost),
    "masks of the first micro-batch": (PIPED, "Engine._forward", _masks_of_the_first),
    "half a block left out": (PIPED, "GPTSections.run", _half_the_blocks),
    "own optimizer given one stage's parameters": (PIPED_OWN, "in_order_of", _only_of_this_stage),
    "gradients of norms put off for ever": (PIPED, "deliver", _norms_in_no_step),
}


def _sums_before_forgotten(original: Any, self: Any) -> None:
    self._sums = 0
    original(self)


def _tied_by_micro_batch(original: Any, self: Any, stage: int, **more: Any) -> None:
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
FAULTS_PIPED_SHARDS: Faults = {
    "sums of the micro-batches before lost": (PIPED_SHARDS, "Chunk.finish_reduce", _sums_before_forgotten),
    "tied gradients over ranks before stages": (PIPED_SHARDS, "StageHooks.begin", _tied_by_micro_batch),
    "a stage's parameters left out of the norm": (PIPED_ORDER, "in_order", _norm_of_own_stages),
    "in order, tied weights counted twice": (PIPED_ORDER, "Stages.is_first_holder", _every_stage_counts),
}


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
FAULTS_PIPED_CUTS: Faults = {
    "piped grid, weight gradients put off are twice": (
        PIPED_GRID,
        "deliver",
        _terms_put_off_not_summed,
    ),
    "piped grid, mask of other features": (PIPED_GRID, "features_of", features_from_zero),
    "piped sheets, biases in no step": (PIPED_DEEP, "add_bias", _biases_in_no_step),
    "piped sheets, depth not summed": (PIPED_DEEP, "ShardSpec.sync_axes", depth_not_summed),
    "piped ring, positions from zero": (PIPED_RING, "SequenceParallel.local_part", positions_from_zero),
    "piped ring, gradients not summed": (PIPED_RING, "ShardSpec.sync_axes", sum_over_data_only),
    "piped library, the same part on every rank": (
        PIPED_LIBRARY,
        "split",
        _same_part_on_every_rank,
    ),
    "piped ring, tied not summed over stages": (PIPED_RING, "Communicator.exchange_sum", _tied_not_summed),
}

FAULTS: Faults = FAULTS_PIPELINE | FAULTS_PIPED_SHARDS | FAULTS_PIPED_CUTS
