"""Refuses a loss that a GradScaler has multiplied, because nothing would divide the gradients again.

Note: how it is found.
`GradScaler.scale` multiplies the loss by a tensor that the scaler keeps.  Autograd saves that factor.  So the first
products in the graph of a loss are compared with the factors of all scalers.  Saved tensors are read only where there
is such a scaler: at ZeRO-3, to unpack one may gather weights.  Cost: a look at the first nodes of the graph.  For a
product with a constant, all objects of the process are searched.  That is done a few times only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

NODES = 16
"""How many nodes of the graph are looked at, from the loss on."""
LOOKS = 8
"""In how many backwards scalers are looked for."""


class ScaledLoss:
    """Looks at the losses of one engine."""

    def __init__(self) -> None:
        self._left = LOOKS

    def refuse(self, loss: Tensor) -> None:
        """Raises ValueError if a GradScaler has multiplied `loss`."""
        if not self._left or not (products := list(_products(loss))):
            return
        self._left -= 1
        if not (scales := list(_scales())):
            return
        if any(_is_one_of(product._saved_other, scales) for product in products):
            self._left = LOOKS
            raise ValueError(
                "backward: a GradScaler has multiplied the loss, and nothing would divide the gradients again; legal: "
                "engine.backward(loss), without a scaler. With precision='fp16' the engine scales the loss itself"
            )


def _products(loss: Tensor) -> Iterator[Any]:
    """Products with a factor that needs no gradient, among the first nodes of the graph of `loss`."""
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(NODES):
        if not nodes:
            return
        if (node := nodes.pop(0)) is None:
            continue
        inputs = [before for before, _ in node.next_functions]
        if node.name() == "MulBackward0" and inputs[1] is None:
            yield node
        nodes += inputs


def _scales() -> Iterator[Tensor]:
    """The factors of all scalers that have multiplied anything."""
    for each in gc.get_objects():
        if issubclass(type(each), GradScaler) and getattr(each, "_scale", None) is not None:
            yield each._scale


def _is_one_of(factor: Tensor | None, scales: list[Tensor]) -> bool:
    if factor is None or factor.numel() != 1 or factor.dtype != torch.float32:
        return False
    return any(factor is scale or float(factor) == float(scale) for scale in scales)
