"""Adds the gradients of a chunk's vectors to it together: biases and norms would cost a GPU a launch each.

Note: on a GPU a vector waits until all vectors of the chunk have come.  If one has no gradient, the others wait until
the chunk is reduced, or until their gradients of the next micro-batch come.
Cost: the memory of these gradients meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_gradient(target: Tensor, gradient: Tensor, factor: float, *, adds: bool) -> None:
    """target = factor * gradient, or, with `adds`, target + factor * gradient, in the dtype of `target`."""
    if adds:
        target.add_(gradient, alpha=factor)
        return
    target.copy_(gradient)
    if factor != 1.0:
        target.mul_(factor)  # in the wide dtype: its own would lose what the scale has saved


class VectorGradients:
    """The vectors of one chunk whose gradients wait, by entry."""

    def __init__(self, most: int = 1) -> None:
        self.most = most
        """Vectors of the chunk: when so many wait, all are added."""
        self._waiting: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._factor = 1.0

    def add(self, index: int, target: Tensor, gradient: Tensor, factor: float, *, adds: bool) -> None:
        """As `add_gradient`, now or later: when `take` is called at the latest."""
        if index in self._waiting or factor != self._factor:
            self.take()
        self._waiting[index], self._factor = (target, gradient, adds), factor
        if len(self._waiting) >= self.most:
            self.take()

    def take(self) -> None:
        """Add what waits: in one launch on a GPU, where the gradients have the dtype of the sum or come first."""
        for adds in (False, True):
            come = [(target, gradient) for target, gradient, also in self._waiting.values() if also == adds]
            if not come:
                continue
            targets, gradients = map(list, zip(*come, strict=True))
            if adds:
                torch._foreach_add_(targets, gradients, alpha=self._factor)
                continue
            torch._foreach_copy_(targets, gradients)
            if self._factor != 1.0:
                torch._foreach_mul_(targets, self._factor)
        self.drop()

    def drop(self) -> None:
        """Forget what waits: the step was discarded."""
        self._waiting.clear()
