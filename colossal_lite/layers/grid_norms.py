"""Decides how a norm runs where features are cut: as a LayerNorm or RMSNorm of ours, or by its own forward.

Note: a norm is replaced where that is proven. On random rows in float64 the replacement returns the norm's output and
all its gradients.  Any other norm keeps its forward, and sees all features: they are gathered before it and cut behind
it.  That moves M elements of the stream each way.  A replaced norm moves one or two numbers a token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.grid_layers import GridNorm
from colossal_lite.layers.swap_checks import has_forward_of, has_hooks
from colossal_lite.numerics.proof_modes import TOLERANCE, Wide

EPS = ("eps", "variance_epsilon")
ROWS = 8


@dataclass(frozen=True)
class NormKind:
    """A LayerNorm (`centred`) or RMSNorm."""

    centred: bool
    eps: float


def norm_kind(module: Any) -> NormKind | None:
    """The kind of a norm, if it is proven; None for any other norm, and for one with hooks."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, a) for a in EPS if hasattr(module, a)), None)
    has_others = bool(set(dict(module.named_parameters())) - {"weight", "bias"})
    if weight is None or weight.dim() != 1 or has_others or has_hooks(module):
        return None
    if eps is None:
        is_rms = has_forward_of(module, nn.RMSNorm)
        return NormKind(centred=False, eps=torch.finfo(weight.dtype).eps) if is_rms else None
    kinds = (NormKind(centred, float(eps)) for centred in (False, True))
    return next((kind for kind in kinds if _is_proven(module, kind)), None)


def key_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for norms that are proven together: class, sizes and settings."""
    plain = (bool, int, float, str, tuple, type(None))
    return (
        type(module),
        tuple((n, p.shape) for n, p in module.named_parameters()),
        tuple(bool(getattr(module, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")),
        tuple((n, v if isinstance(v, plain) else id(v)) for n, v in vars(module).items() if n[0] != "_"),
    )  # fmt: skip


def _is_proven(module: nn.Module, kind: NormKind) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(p.shape, generator=generator).double() for n, p in module.named_parameters()}
    memo: dict[int, Any] = {id(p): nn.Parameter(values[n]) for n, p in module.named_parameters()}
    own: Any = copy.deepcopy(module, memo)
    weight, bias = (None if v is None else nn.Parameter(v) for v in (values["weight"], values.get("bias")))
    assert weight is not None
    ours = GridNorm(Mesh.serial().axis(), weight, bias, eps=kind.eps, centred=kind.centred)
    # rows of other sizes, and off centre, so that eps and the mean can be distinguished
    x = torch.randn(ROWS, weight.numel(), generator=generator).double().mul_(0.02).add_(0.01)
    dy = torch.randn(x.shape, generator=generator).double()
    try:
        truth = _outcome(own.eval(), x, dy)
    except (RuntimeError, TypeError, ValueError):  # what it asks for is not one tensor
        return False
    return _are_close(_outcome(ours, x, dy), truth)


def _outcome(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, and the gradients of input and parameters by name."""
    x = x.clone().requires_grad_()
    with torch.enable_grad(), Wide():
        y = module(x)
    (y * dy).sum().backward()  # not y.backward(dy): that loads sympy
    named = dict(module.named_parameters())
    leaves = (x, *(named[name] for name in sorted(named)))
    return [y.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in leaves)]


def _are_close(ours: Iterable[Tensor], truth: Iterable[Tensor]) -> bool:
    return all(float((a - b).norm()) <= TOLERANCE * float(b.norm()) for a, b in zip(ours, truth, strict=True))


def on_whole_features(module: nn.Module, stream: Communicator) -> None:
    """Make a norm see all features of the stream [..., D / n] along `stream`, and give this rank's part: in place."""
    own = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = own(autograd_collectives.gather(x, stream, x.dim() - 1), *args, **kwargs)
        part: Tensor = whole.chunk(stream.size, -1)[stream.coord].contiguous()
        return part

    module.forward = forward
