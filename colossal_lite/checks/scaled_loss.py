"""Refuses a loss that a GradScaler has multiplied, because nothing would divide the gradients again.

Note: how it is found.
`GradScaler.scale` multiplies the loss by a tensor that the scaler keeps.  Autograd saves that same tensor.  So a factor
in the graph of a loss is a scaler's if one refers to it.  Cost: a look at the first nodes of the graph.  For a factor
that may be a scaler's, all objects of the process are searched.  That is done a few times only.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

NODES = 16
"""How many nodes of the graph are looked at, from the loss on."""
LOOKS = 8
"""In how many backwards such factors are looked for."""


class ScaledLoss:
    """Looks at the losses of one engine."""

    def __init__(self) -> None:
        self._left = LOOKS

    def refuse(self, loss: Tensor) -> None:
        """Raises ValueError if a GradScaler has multiplied `loss`."""
        if not self._left or not (factors := _factors(loss)):
            return
        self._left -= 1
        holders = gc.get_referrers(*factors)
        if any(isinstance(x, GradScaler) or _is_state_of_scaler(x) for x in holders):
            self._left = LOOKS
            raise ValueError(
                "backward: a GradScaler has multiplied the loss, and nothing would divide the gradients again; legal: "
                "engine.backward(loss), without a scaler. With precision='fp16' the engine scales the loss itself"
            )


def _factors(loss: Tensor) -> list[Tensor]:
    """Tensors that may be factors of a scaler, from the first nodes of the graph of `loss`."""
    nodes: list[Any] = [loss.grad_fn]
    found: list[Tensor] = []
    for _ in range(NODES):
        if not nodes:
            break
        node = nodes.pop(0)
        if node is None:
            continue
        nodes += [before for before, _ in node.next_functions]
        if node.name() == "MulBackward0":
            # As it was saved: to unpack it may gather weights.
            x = getattr(node._raw_saved_other, "data", None)
            if isinstance(x, Tensor) and x.dim() == 0 and x.dtype == torch.float32 and not x.requires_grad:
                found.append(x)
    return found


def _is_state_of_scaler(x: object) -> bool:
    return isinstance(x, dict) and "_scale" in x and "_growth_tracker" in x
