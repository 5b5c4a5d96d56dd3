"""Lets looks at a gradient leave alone what autograd.Functions of a user have saved.

Note: fused losses.
Such a Function computes its gradient in forward.  Backward multiplies that in place by what arrives.  So a further
backward finds other numbers, and so does the step's own.  In a look 1 arrives at each Function, or a multiple that a
last backward undoes.  Powers of two are exact.  What would have arrived is kept, so that it can be looked at too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

FUNCTION_SEED = -16.0
"""The multiple that Functions get. A saved gradient in fp16 has room for it."""


def _is_of_a_user(node: Any) -> bool:
    """Whether a node of a graph is an autograd.Function that is not the engine's."""
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = type(node)
    package: str = function._forward_cls.__module__.split(".")[0]
    return package != "colossal_lite"


class UnitArrivals:
    """Within, `factor` arrives at the Functions of users among the `nodes` of a graph."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.functions = [node for node in nodes if _is_of_a_user(node)]
        self.factor = 1.0
        self.arrived: dict[Any, tuple[Tensor | None, ...]] = {}
        """What would have arrived in the last backward."""
        self._handles: list[Any] = []

    def __enter__(self) -> UnitArrivals:
        self._handles = [
            node.register_prehook(partial(self._replace, node)) for node in dict.fromkeys(self.functions)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.arrived = [], {}

    def _replace(self, node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        self.arrived[node] = tuple(gradients)
        return tuple(None if g is None else torch.full_like(g, self.factor).detach() for g in gradients)

    def all_arrived(self) -> list[Tensor]:
        """What would have arrived at all of them, in their order."""
        return [g for node in self.functions for g in self.arrived.get(node, ()) if g is not None]
