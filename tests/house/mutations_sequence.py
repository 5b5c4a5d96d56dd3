"""Plants faults in sequence parallelism: rings, gathered keys, exchanged heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.house.mutations_step import Faults
from tests.shared.parity import Case

# ---- sequence parallelism ----


def _halves_swapped(original: Any, coord: int, source: int, tokens: int, causal: bool) -> Any:
    return original(source, coord, tokens, causal)


def _own_tokens_seen_whole(original: Any, coord: int, source: int, tokens: int, causal: bool) -> Any:
    return original(coord, source, tokens, causal)._replace(causal=False)


def _own_keys_in_every_step(original: Any, self: Any, block: torch.Tensor) -> Any:
    return ((source, block) for source, _ in list(original(self, block)))


def _gradients_stay(original: Any, self: Any) -> torch.Tensor:
    total, own = original(self), torch.stack([gradient.clone() for gradient in self._own])
    return own if self._comm.coord else total


def _own_gradient_forgotten(original: Any, self: Any) -> torch.Tensor:
    self._own = tuple(torch.zeros_like(gradient) for gradient in self._own)
    return original(self)


def _blocks_not_merged_by_weight(original: Any, *args: Any, ops: Any, **more: Any) -> Any:
    def halves(out: torch.Tensor, lse: torch.Tensor, *part: Any) -> None:
        out.lerp_(part[0].to(out.dtype), 0.5)

    return original(*args, ops=replace(ops, attend_merge_=halves), **more)


def _heads_of_the_next_rank(original: Any, tensors: Any, comm: Any) -> Any:
    return original([tensor.roll(tensor.shape[2] // comm.size, 2) for tensor in tensors], comm)


def _tokens_of_another_order(original: Any, tensors: Any, comm: Any) -> Any:
    return original([tensor.roll(tensor.shape[1] // comm.size, 1) for tensor in tensors], comm)


def positions_from_zero(original: Any, self: Any, given: Any) -> Any:
    part = original(self, given)
    return replace(part, kwargs={**part.kwargs, "position_ids": torch.arange(part.inputs.shape[1])})


def _masks_from_zero(original: Any, self: Any, given: Any) -> Any:
    part = original(self, given)
    return replace(part, positions=torch.arange(part.inputs.shape[1]))


def _blocks_of_the_next_rank(original: Any, self: Any, block: torch.Tensor) -> Any:
    sources, blocks = zip(*original(self, block), strict=True)
    return zip(sources, (*blocks[1:], blocks[0]), strict=True)


def sum_over_data_only(original: Any, self: Any, layout: Any) -> tuple[str, ...]:
    return tuple(axis for axis in original(self, layout) if axis != "sequence")


RING = Case(world_size=2, sequence=2, dropout=0.2, ragged=True, config=dict(clip_grad_norm=0.05))
GATHERED = replace(RING, sequence_mode="allgather_kv")
FULL = replace(RING, sequence_mode="ring_full", causal=False)
USP = replace(RING, world_size=4, sequence=4, sequence_mode="usp", ulysses=2, tokens=16, steps=2)
FAULTS_SEQUENCE: Faults = {
    "ring halves swapped": (RING, "seen", _halves_swapped),
    "own tokens seen without a mask": (USP, "seen", _own_tokens_seen_whole),
    "own keys in every step of a ring": (RING, "Ring.blocks", _own_keys_in_every_step),
    "own keys for those of all ranks": (GATHERED, "Gather.blocks", _own_keys_in_every_step),
    "gradients of keys do not travel": (RING, "_RingGradients.home", _gradients_stay),
    "own gradient of keys forgotten": (USP, "_RingGradients.home", _own_gradient_forgotten),
    "blocks merged without weights": (RING, "attend_blocks", _blocks_not_merged_by_weight),
    "own keys in every step of a full ring": (FULL, "Ring.blocks", _own_keys_in_every_step),
    "gradients of keys of a full ring do not travel": (
        FULL,
        "_RingGradients.home",
        _gradients_stay,
    ),
    "heads of the next rank": (USP, "_to_heads", _heads_of_the_next_rank),
    "gradients of tokens of another rank": (
        USP,
        "_to_tokens",
        _tokens_of_another_order,
    ),
    "positions from zero": (RING, "SequenceParallel.local_part", positions_from_zero),
    "masks from position zero": (RING, "SequenceParallel.local_part", _masks_from_zero),
    "gathered blocks taken for others": (GATHERED, "Gather.blocks", _blocks_of_the_next_rank),
    "gradients not summed over the sequence": (RING, "ShardSpec.sync_axes", sum_over_data_only),
}

FAULTS: Faults = FAULTS_SEQUENCE
