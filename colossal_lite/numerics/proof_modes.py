"""Modes that proofs run a model's forward in: in float64, and without dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from colossal_lite.numerics.torch_modes import tensors_in

TOLERANCE = 1e-6
"""Of a proof's gradient, relative to its norm: far above rounding in float64."""


class Wide(TorchFunctionMode):
    """Leaves out conversions to a precision below float64."""

    NARROW = (torch.float32, torch.bfloat16, torch.float16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        if func in (Tensor.backward, torch.autograd.grad) and not any(x.is_meta for x in tensors_in(args)):
            return self._differentiated(func, *args, **kwargs)
        wide = [torch.float64 if self._is_narrow(a) else a for a in args]
        return func(
            *wide, **{k: torch.float64 if self._is_narrow(v) else v for k, v in (kwargs or {}).items()}
        )

    def _differentiated(
        self, func: Any, outputs: Any, *inputs: Any, gradient: Any = None, **more: Any
    ) -> Any:
        """A backward within this mode, as it may run a forward again (activation checkpointing). Torch leaves a mode
        for calls with tensors, and not for calls with edges of the graph. These fail for tensors on meta."""
        with self:
            if func is torch.autograd.grad:
                return func(*tree_map_only(Tensor, _edge, (outputs, *inputs)), **more)
            gradient = torch.ones_like(outputs) if gradient is None else gradient
            return torch.autograd.backward(_edge(outputs), gradient, **more)

    def _is_narrow(self, value: Any) -> bool:
        return isinstance(value, torch.dtype) and value in self.NARROW


def _edge(x: Tensor) -> Any:
    return get_gradient_edge(x) if x.requires_grad else x


class Plainly(Wide):
    """Leaves out dropout as well, so that a model in training mode draws nothing by it."""

    DROPOUTS = (
        F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:  # whose dropout no mode sees
            at, kwargs = 10, dict(kwargs or {})
            args = (*args[:at], *((0.0,) if len(args) > at else ()), *args[at + 1 :])
            kwargs |= {"dropout_p": 0.0} if len(args) <= at else {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), dict(kwargs or {})
            kwargs.pop("dropout_p", None)
        return super().__torch_function__(func, types, args, kwargs)
