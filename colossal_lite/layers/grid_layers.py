"""Computes linears and norms whose operands are cut along several tensor axes.

Note: `ProductSpec` says along which axis each operand of a product is gathered or reduce-scattered.  Costs are in
`tensor_grid`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from colossal_lite.distributed.communicator import Communicator
from colossal_lite.layers.tensor_1d_layers import SharedHead, with_padding
from colossal_lite.numerics.torch_modes import left_untraced, refuse_autocast
from colossal_lite.transforms.saved_results import save_for_recompute
from colossal_lite.transforms.split_backward import WeightGradStore, add_bias, deliver

# ---- the product ----


@dataclass(frozen=True)
class OperandAxis:
    """The axis along which a tensor is cut, and the dim that is cut there: 0 or -1."""

    comm: Communicator
    dim: int


@dataclass(frozen=True)
class ProductSpec:
    """Says along which axes x and w of a product y = x w^T are gathered, and y is reduce-scattered. None: not cut."""

    x: OperandAxis | None
    weight: OperandAxis
    y: OperandAxis | None = None


def _gather_async(x: Tensor, along: OperandAxis | None) -> Callable[[], Tensor]:
    if along is None:
        return lambda: x
    return along.comm.all_gather_async(x.contiguous(), dim=along.dim).wait


def _scatter_async(x: Tensor, along: OperandAxis | None) -> Callable[[], Tensor]:
    if along is None:
        return lambda: x
    return along.comm.reduce_scatter_async(x.contiguous(), dim=along.dim).wait


@left_untraced
def product(x: Tensor, weight: Tensor, cut: ProductSpec, queue: WeightGradStore | None = None) -> Tensor:
    """This rank's part of y = x w^T from its parts of x [..., D_in] and w [D_out, D_in]."""
    y: Tensor = _Product.apply(x, weight, cut, queue)  # type: ignore[no-untyped-call]
    return y


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cut: ProductSpec, queue: WeightGradStore | None
    ) -> Tensor:
        refuse_autocast(weight)
        ctx.cut, ctx.queue = cut, queue
        if (
            queue is not None
        ):  # the parameter itself takes the gradient; a saved tensor may be a recomputed copy
            ctx.given = weight
        ctx.save_for_backward(x, weight)

        def product() -> Tensor:
            x_parts, w_parts = _gather_async(x, cut.x), _gather_async(weight, cut.weight)
            return _scatter_async(F.linear(x_parts(), w_parts()), cut.y)()

        return save_for_recompute(product, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cut: ProductSpec = ctx.cut
        x, weight = ctx.saved_tensors
        if ctx.queue is not None and ctx.queue.is_open:
            return _Product.in_two_parts(ctx, dy, x, weight), None, None, None
        w_parts = _gather_async(weight, cut.weight)
        dy_parts, x_parts = _gather_async(dy, cut.y), _gather_async(x, cut.x)
        dy = dy_parts()

        def of_weight() -> Callable[[], Tensor]:
            return _scatter_async(dy.flatten(0, -2).t() @ x_parts().flatten(0, -2), cut.weight)

        if cut.x is None:  # the sum that runs beside the other product is that of w
            dw, dx = of_weight(), dy @ w_parts()
            return dx, dw(), None, None
        terms = _scatter_async(dy @ w_parts(), cut.x)
        del w_parts  # and with it the gathered weight
        dw = of_weight()
        return terms(), dw(), None, None

    @staticmethod
    def in_two_parts(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """The gradient of x; that of w is deferred, with its communication."""
        cut, given = ctx.cut, getattr(ctx, "given", weight)
        w_parts, dy_parts = _gather_async(weight, cut.weight), _gather_async(dy, cut.y)
        dy = dy_parts()

        def work() -> None:
            x_parts = _gather_async(x, cut.x)()
            terms = dy.flatten(0, -2).t() @ x_parts.flatten(0, -2)
            deliver([given], [_scatter_async(terms, cut.weight)()])

        if ctx.needs_input_grad[1]:
            ctx.queue.put(work, given)
        if not ctx.needs_input_grad[0]:
            w_parts()
            return None
        return _scatter_async(dy @ w_parts(), cut.x)()


# ---- the norm ----


class _Norm(Function):
    """LayerNorm (centred) or RMSNorm over features that are cut over `comm`; statistics in float32 or better.

    x_hat = (x - mean) r, r = (var + eps)^(-1/2); dx = r (g - mean(g) - x_hat mean(g x_hat)), g = dy w.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, comm: Communicator,
        queue: WeightGradStore | None,
    ) -> Tensor:  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        width = x.shape[-1] * comm.size
        if centred:
            wide = wide - comm.all_reduce(wide.sum(-1, keepdim=True)) / width
        square = comm.all_reduce(wide.square().sum(-1, keepdim=True))
        rstd = (square / width + eps).rsqrt()
        x_hat = wide * rstd
        ctx.save_for_backward(x_hat.to(x.dtype), rstd, weight)
        ctx.centred, ctx.comm, ctx.has_bias = centred, comm, bias is not None
        ctx.queue, ctx.given = queue, (weight, bias)
        y = x_hat * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, rstd, weight = ctx.saved_tensors
        comm: Communicator = ctx.comm
        wide, g = x_hat.to(rstd.dtype), (dy * weight).to(rstd.dtype)
        width = dy.shape[-1] * comm.size
        sums = [(g * wide).sum(-1, keepdim=True)] + ([g.sum(-1, keepdim=True)] if ctx.centred else [])
        means = comm.all_reduce(torch.cat(sums, -1)) / width
        dx = g - wide * means[..., :1]
        if ctx.centred:
            dx = dx - means[..., 1:]
        given, kind = ctx.given, weight.dtype

        def of_weights() -> list[Tensor]:
            rows = dy.flatten(0, -2)
            dw = (rows * x_hat.flatten(0, -2)).sum(0).to(kind)
            return [dw, rows.sum(0)] if given[1] is not None else [dw]

        def work() -> None:
            pairs = [(w, g) for w, g in zip(given, of_weights(), strict=False) if w.requires_grad]
            deliver([w for w, _ in pairs], [g for _, g in pairs])

        if ctx.queue is not None and ctx.queue.is_open:
            if any(ctx.needs_input_grad[1:3]):
                ctx.queue.put(work, *given)
            return (dx * rstd).to(dy.dtype), *[None] * 6
        dw, db = (*of_weights(), None)[:2]
        return (dx * rstd).to(dy.dtype), dw, db, *[None] * 4


# ---- layers ----


class GridNorm(nn.Module):
    """LayerNorm (`centred`) or RMSNorm: x [..., D], D this rank's part over `comm`; weight and bias [D]."""

    def __init__(
        self,
        comm: Communicator,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        eps: float,
        centred: bool,
    ) -> None:
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.comm, self.eps, self.centred = comm, eps, centred
        self.weight, self.bias = weight, bias

    @left_untraced
    def forward(self, x: Tensor) -> Tensor:
        settings = self.eps, self.centred, self.comm, self.weight_grad_store
        y: Tensor = _Norm.apply(x, self.weight, self.bias, *settings)  # type: ignore[no-untyped-call]
        return y


class GridLinear(nn.Module):
    """x [B, T, D_in] -> y [B, T, D_out], this rank's parts; weight [D_out, D_in], or its transpose if `transposed`.

    The last `padded` outputs are padding, and get the least number of the dtype.  `shared`: the rows that are used of
    those held.
    """

    def __init__(
        self, cut: ProductSpec, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool = False,
        padded: int = 0, shared: SharedHead | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.cut, self.transposed, self.padded, self.shared = cut, transposed, padded, shared
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight.t() if self.transposed else self.weight
        bias: Tensor | None = self.bias
        if self.shared is not None:
            weight, bias = self.shared.used_rows(weight, bias)
        y = product(x, weight, self.cut, self.weight_grad_store)
        y = y if bias is None else add_bias(y, bias, self.weight_grad_store)
        return with_padding(y, self.padded)
