"""Computes a batch norm over the samples of all data ranks.

Note: statistics of the whole batch.
In training each rank computes the mean of its own samples, and their squared distance from it.  One all-gather gives
those of all ranks, so each has the same statistics, bit for bit.  They are merged as in Chan, Golub, LeVeque (1979).
Ranks may have other numbers of samples, but not none.  The gradient of an input needs two sums over all ranks.  Those
of weight and bias are sums over a rank's own samples, as for other parameters.
Cost: 2 C + 1 numbers of each rank in a forward, and 2 C in a backward, for C channels.  Evaluation sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colossal_lite.config.config import Config
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.transforms.batch_statistics import is_synced


def shares_statistics(config: Config, mesh: Mesh) -> bool:
    """Whether batch norms may take the statistics of all data ranks: nothing else splits a batch, or their code."""
    is_alone = 1 < mesh.size("data") == mesh.world_size and not config.parallel.pipeline.is_staged
    return is_alone and config.compile == "none" and config.gradient_accumulation == 1


def sync_statistics(model: nn.Module, comm: Communicator) -> None:
    """Have the marked modules of `model` normalise over the ranks of `comm`, until `free_statistics`. Their forward is
    a collective then, and so is their backward."""
    for module in model.modules():
        if is_synced(module):
            module.__dict__["forward"] = _Forward(module, comm)


class _Forward:
    """The forward of a batch norm: x [samples, C, ...] to the same shape. Each rank has at least one sample."""

    def __init__(self, module: Any, comm: Communicator) -> None:
        self._module, self._comm = module, comm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._module
        if not norm.training:
            found: Tensor = type(norm).forward(norm, x)
            return found
        norm._check_input_dim(x)
        given = x, norm.weight, norm.bias, self._comm, norm.eps
        y, mean, variance, count = _OverRanks.apply(*given)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._add_to_running(mean, variance * (count / (count - 1)))
        normed: Tensor = y
        return normed

    def _add_to_running(self, mean: Tensor, variance: Tensor) -> None:
        """Count a batch of this mean and unbiased variance, both [C]."""
        norm = self._module
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        share = 1 / norm.num_batches_tracked.to(mean.dtype) if norm.momentum is None else norm.momentum
        for running, seen in ((norm.running_mean, mean), (norm.running_var, variance)):
            running.copy_((1 - share) * running.to(seen.dtype) + share * seen)


class _OverRanks(Function):
    """Normalises x [samples, C, ...] by the mean and variance of all ranks. Weight and bias are [C] or None. Gives y in
    the shape of x, mean and variance [C], and the number of values in a channel, 0-d."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, comm: Communicator, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as torch's sums are
        channels, own = x.shape[1], x.numel() // x.shape[1]
        mean = _sum(wide) / max(own, 1)
        squares = _sum((wide - _beside(mean, x)).square())
        told = torch.cat((mean, squares, mean.new_full((1,), own)))
        of_ranks = comm.all_gather(told[None])
        means, counts = of_ranks[:, :channels], of_ranks[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        apart = (counts * (means - mean).square()).sum(0)
        variance = (of_ranks[:, channels:-1].sum(0) + apart) / count
        scale = (variance + eps).rsqrt()
        y = (wide - _beside(mean, x)) * _beside(scale if weight is None else scale * weight, x)
        if bias is not None:
            y = y + _beside(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.comm = comm
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        wide = dy.to(mean.dtype)
        normed = (x.to(mean.dtype) - _beside(mean, x)) * _beside(scale, x)
        sums = torch.cat((_sum(wide), _sum(wide * normed)))
        of_bias, of_weight = sums.clone().chunk(2)
        over = [_beside(part / count, x) for part in ctx.comm.all_reduce(sums).chunk(2)]
        dx = (wide - over[0] - normed * over[1]) * _beside(scale if weight is None else scale * weight, x)
        if weight is None:
            return dx.to(x.dtype), None, None, None, None
        return dx.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _sum(x: Tensor) -> Tensor:
    """Over all but channels."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _beside(of_channels: Tensor, x: Tensor) -> Tensor:
    """A number of each channel, in the shape of x."""
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))
