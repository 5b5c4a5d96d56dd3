"""Computes the bytes of model state on one rank, by kind, from the shards of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colossal_lite.config.zero_stage import Sharding


@dataclass(frozen=True)
class Extent:
    """A chunk's elements, and over how many ranks it is sharded."""

    numel: int
    parts: int

    @property
    def shard(self) -> int:
        return self.numel // self.parts


@dataclass(frozen=True)
class Widths:
    """Bytes per element of weight and gradient, bits of what the master has beside the weight."""

    weight: int
    master_bits: int
    gradient: int


def forecast(sharding: Sharding, chunks: Sequence[Extent], widths: Widths) -> dict[str, int]:
    """Bytes of model state on one rank, by kind, at their most, alignment included. Optimizer states follow from the
    rule, and slots from the order of the parameters: neither is counted here."""
    whole = sum(chunk.numel for chunk in chunks)
    shards = sum(chunk.shard for chunk in chunks)
    owned = shards if sharding.state else whole
    return {
        "weights": widths.weight * (shards if sharding.weight else whole),
        "masters": widths.master_bits * owned // 8,
        "gradients": widths.gradient
        * (0 if sharding.frees_gradient_on_update else owned if sharding.by_micro_batch else whole),
    }
