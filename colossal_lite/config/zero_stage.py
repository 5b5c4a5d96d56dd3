"""Describes the state that a ZeRO stage shards: optimizer states, gradients, weights."""

from __future__ import annotations

from dataclasses import dataclass

from colossal_lite.config.schema import ZeroConfig


@dataclass(frozen=True)
class Sharding:
    """The state that a stage shards, and how its gradients are reduced."""

    state: bool = False
    weight: bool = False
    by_micro_batch: bool = False
    ordered: bool = False
    frees_gradient_on_update: bool = False
    """A gradient is freed by its update as soon as it is summed. It has only a slot, no place of its own."""
    updates_in_backward: bool = False
    """A gradient is used as soon as it is summed for the last time."""
    by_visit: bool = False
    """What would be reduced by micro-batch is summed in its slot over all of a visit of a stage first."""

    @property
    def scatters(self) -> bool:
        """Whether a reduction leaves a shard on each rank (reduce-scatter)."""
        return self.state or self.ordered

    @classmethod
    def of(
        cls, zero: ZeroConfig, micro_batches: int, *, updates_in_backward: bool = False, visits: bool = False
    ) -> Sharding:
        """The sharding of a config whose steps have so many micro-batches. With one, both ways of reducing move the
        same bytes, and reducing by micro-batch needs less memory. With several, their sum has a place until its
        update. `visits`: those of a visit follow each other, and their order is not that of other ranks."""
        ordered, frees = zero.sum_order == "ordered", updates_in_backward and micro_batches == 1
        as_you_go = zero.stage == 3 or (
            zero.stage == 2 and (zero.reduce_every == "micro_batch" or micro_batches == 1)
        )
        return cls(
            state=zero.stage >= 1,
            weight=zero.stage == 3,
            by_micro_batch=as_you_go or ordered or frees,
            ordered=ordered,
            frees_gradient_on_update=frees,
            updates_in_backward=updates_in_backward,
            by_visit=visits and (as_you_go or ordered),
        )
