"""Reads and writes the masters and weights that this rank owns of a chunk, on device or host.

The tensors are defined in memory/chunk.py.  Masters may be split into `local_shard` and `residual` (kernels/split.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.kernels import split
from colossal_lite.memory.transfers import to_device


@dataclass(eq=False, repr=False)
class LocalShard:
    """The tensors that a rank owns of a chunk, as an update reads and writes them: on the device or on the host."""

    local_shard: Tensor
    master: Tensor
    residual: Tensor | None
    gradient: Tensor

    @property
    def updates_weights(self) -> bool:
        """Whether an update reads and writes the weights: they are the masters, or half of their bits."""
        return self.master is self.local_shard or self.residual is not None

    def weights_to_write(self, start: int, stop: int) -> Tensor | None:
        """The weights that an update of master elements [start, stop) writes beside the masters, if any."""
        return None if self.updates_weights else self.local_shard[start:stop]

    def halves(self, local: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Upper half, residual and ties of split master elements [start, stop).

        `start` is a multiple of 8. `stop` is one too, unless it is the end of a parameter."""
        assert self.residual is not None and local.start % 8 == 0
        length = self.local_shard.numel()
        ties = self.residual[length:].view(torch.uint8)
        return self.local_shard[local], self.residual[local], ties[local.start // 8 : -(-local.stop // 8)]

    def masters(self, local: slice | None = None) -> Tensor:
        """The masters, or elements [start, stop) of them. A joined copy where they are split."""
        local = local or slice(0, self.local_shard.numel())
        if self.residual is None:
            return self.master[local]
        here = self.local_shard.device
        return split.join(*(to_device(half, here) for half in self.halves(local)))

    def set_split_masters(self, local: slice, masters: Tensor) -> None:
        """Write split master elements [start, stop) from values of any dtype."""
        halves, device = self.halves(local), self.local_shard.device
        here = [to_device(half, device) for half in halves]
        split.split_(to_device(masters, device).to(self.master.dtype), *here)
        for half, changed in zip(halves, here, strict=True):
            if changed is not half:  # the residual is on another tier
                half.copy_(changed)
