"""Computes the bytes of model state on one rank, by kind, from the shards of its chunks."""

from __future__ import annotations

from colossal_lite.config.zero_stage import Sharding


def forecast(
    sharding: Sharding, whole: int, shards: int, *, weight: int, master_bits: int, gradient: int
) -> dict[str, int]:
    """Bytes of model state on one rank, by kind, at their most, alignment included. Optimizer states follow from the
    rule, and slots from the order of the parameters: neither is counted here.

    `whole`: elements of all chunks; `shards`: of this rank's shards of them. Bytes of an element: of its `weight`,
    what its master has beside that (`master_bits`), and its `gradient`."""
    owned = shards if sharding.state else whole
    return {
        "weights": weight * (shards if sharding.weight else whole),
        "masters": master_bits * owned // 8,
        "gradients": gradient
        * (0 if sharding.frees_gradient_on_update else owned if sharding.by_micro_batch else whole),
    }
