"""Steps AdamW, SGD and Lion over flat buffers, element by element, in place, in one pass.

    adamw (arXiv 1711.05101): m += (1 - b1)(g - m); v = b2 v + (1 - b2) g g
          p = p (1 - lr wd) - lr / (1 - b1**t) * m / (sqrt(v / (1 - b2**t)) + eps)
    sgd:  g += wd p; b = momentum b + g (b = g at first); p -= lr (g + momentum b | b | g)
    lion (arXiv 2302.06675): p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g

Scale: g = grad / grad_scale.  One number holds token count, clip factor and loss scale, so they cost no extra pass.

Dtypes: the gradient may be narrower than the float32 master.  `low` receives the new weights in its own dtype.
AdamW moves 28 bytes a parameter when both are bf16.

Split masters: with `residual` and `ties`, `param` is the high half of the master (split.py).  Both halves are read
and written, and together have the bits of a float32 master.

Narrow moments: with `draws`, AdamW's moments are bf16.  They are widened for the step, which uses the float32 results,
and rounded back by counted random numbers (philox.py).  The lower half of an element's word rounds m, the upper half v.
Rounding to nearest would fail: at b2 = 0.999, a v 1.5 times too large changes by less than half of its last place.  It
would never shrink.

Cuts: cutting a buffer anywhere (a split one at a multiple of 8) changes no bit.  On the CPU, AdamW and SGD are
torch's fused kernels.  Where a cast comes before or after, they run on pieces that stay in cache.
The kernel for GPUs is in optimizer_triton.py; it has the bits of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_float
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import colossal_lite.kernels.optimizer_triton as _kernels

from .launch import FLAT, SCALAR, Takes, TritonOp
from .philox import Draws, round_by
from .split import PIECE, check_halves, join, split_


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | Tensor = 1.0,
    low: Tensor | None = None,
    residual: Tensor | None = None,
    ties: Tensor | None = None,
    draws: Draws | None = None,
) -> None:
    """One AdamW step on contiguous tensors of one shape; step counts from 1.

    The moments have param's dtype (float32 beside a residual; bf16 with `draws`, and param is then float32 or split),
    grad and low may have any floating one.  Equal to torch.optim.AdamW(fused=True) bit for bit when grad_scale is 1.
    Exception: on the CPU torch rounds the last numel % 64 elements differently.  grad is consumed: it may hold the
    scaled gradient afterwards.
    """
    _check("adamw_", param, grad, low, residual, ties, draws, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if draws is not None:
        numbers = dict(
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale
        )
        buffers = (param, grad, exp_avg, exp_avg_sq)
        return _by_widened(adamw_, buffers, low, residual, ties, draws, step, numbers)
    steps = torch.full((), float(step), dtype=torch.float32, device=param.device)
    divisor, scaled = _scaled(grad_scale, param)
    for p, g, m, v in _pieces(param, grad, low, residual, ties, exp_avg, exp_avg_sq):
        if divisor is not None:
            g.div_(divisor)
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [steps], lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, amsgrad=False, maximize=False, **scaled,
        )  # fmt: skip


def _by_widened(
    update: Callable[..., None], buffers: Sequence[Tensor], low: Tensor | None, residual: Tensor | None,
    ties: Tensor | None, draws: Draws, step: int, numbers: Mapping[str, Any],
) -> None:  # fmt: skip
    """`update` piece by piece on float32 copies of the moments, which are rounded back."""
    flat = [t.view(-1) for t in buffers]
    for start in range(0, flat[0].numel(), _NARROW):
        part = slice(start, min(start + _NARROW, flat[0].numel()))
        param, grad, m, v = (t[part] for t in flat)
        wide_m, wide_v = m.float(), v.float()
        update(
            param, grad, wide_m, wide_v, step=step, low=None if low is None else low.view(-1)[part],
            residual=None if residual is None else residual.view(-1)[part],
            ties=None if ties is None else ties[start // 8 : -(-part.stop // 8)], **numbers,
        )  # fmt: skip
        words = draws.from_element(start).words(m.numel(), step, m.device)
        round_by(wide_m, words & 0xFFFF, m)
        round_by(wide_v, words.bitwise_right_shift_(16).bitwise_and_(0xFFFF), v)


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_scale: float | Tensor = 1.0,
    first: bool = False,
    low: Tensor | None = None,
    residual: Tensor | None = None,
    ties: Tensor | None = None,
) -> None:
    """One SGD step; `first` makes the buffer equal the gradient, as torch does.  grad is consumed.

    momentum_buffer is None if and only if momentum is 0.
    """
    _check_momentum(momentum_buffer, momentum)
    state = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    _check("sgd_", param, grad, low, residual, ties, None, **state)
    divisor, scaled = _scaled(grad_scale, param)
    for p, g, *buffer in _pieces(param, grad, low, residual, ties, *state.values()):
        if divisor is not None:
            g.div_(divisor)
        torch._fused_sgd_(
            [p], [g], buffer, lr=lr, momentum=momentum, weight_decay=weight_decay, dampening=0.0,
            nesterov=nesterov, maximize=False, is_first_step=first, **scaled,
        )  # fmt: skip


def lion_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float | Tensor = 1.0,
    low: Tensor | None = None,
    residual: Tensor | None = None,
    ties: Tensor | None = None,
) -> None:
    """One Lion step.  grad is consumed."""
    _check("lion_", param, grad, low, residual, ties, exp_avg=exp_avg)
    for p, g, m in _pieces(param, grad, low, residual, ties, exp_avg):
        g.div_(grad_scale)
        p.mul_(1.0 - lr * weight_decay).sub_(m.mul(beta1).add_(g * (1.0 - beta1)).sign_().mul_(lr))
        m.mul_(beta2).add_(g.mul_(1.0 - beta2))


def compiled_adamw_() -> Callable[..., None]:
    """adamw_ as one pass over 28 bytes a parameter.  torch.compile makes it from the formula, with a C++ compiler;
    about 1.8 times the speed of cast, fused step and cast.  Its bits are its own, and as independent of cuts.
    """

    def formula(
        numbers: Tensor, p: Tensor, g: Tensor, m: Tensor, v: Tensor, low: Tensor | None = None
    ) -> None:
        scale, lr, decay, one_beta1, beta2, one_beta2, eps, correction1, correction2 = numbers.unbind()
        g = g.to(p.dtype) / scale
        new_m = m + one_beta1 * (g - m)
        new_v = beta2 * v + one_beta2 * g * g
        new_p = p * (1.0 - decay) - lr * correction1 * new_m / (new_v.sqrt() * correction2 + eps)
        m.copy_(new_m)
        v.copy_(new_v)
        p.copy_(new_p)
        if low is not None:
            low.copy_(new_p)

    run: Callable[..., None] = torch.compile(formula, dynamic=True, fullgraph=True)

    def step_(
        param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, lr: float, beta1: float,
        beta2: float, eps: float, weight_decay: float, grad_scale: float | Tensor = 1.0, low: Tensor | None = None,
        residual: Tensor | None = None, ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        _check("adamw_", param, grad, low, residual, ties, draws, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        if draws is not None:
            rates_of = dict(
                lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale
            )
            return _by_widened(
                step_, (param, grad, exp_avg, exp_avg_sq), low, residual, ties, draws, step, rates_of
            )
        corrections = 1.0 / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)
        rates = (lr, lr * weight_decay, 1.0 - beta1, beta2, 1.0 - beta2, eps)
        numbers = torch.tensor((float(grad_scale), *rates, *corrections), dtype=exp_avg.dtype)
        buffers = (param, grad, exp_avg, exp_avg_sq, *(() if low is None else (low,)))
        split = residual is not None
        for pieces in (
            _pieces(param, grad, None, residual, ties, exp_avg, exp_avg_sq)
            if split
            else _whole_vectors(*(t.view(-1) for t in buffers))
        ):
            run(numbers, *pieces)

    return step_


_NARROW = 1 << 17
"""Elements whose moments are float32 at once: with their words they stay in the second-level cache."""
_VECTOR = 64
"""A multiple of the widest vector of every machine, in elements."""
_TILE = 1 << 18
"""Elements a thread has of a piece whose gradient and weights stay in cache between a cast and the step: 5 MiB with
the moments.  Of 2**15 to 2**20 the fastest on one core and on two; smaller pieces pay for their calls."""


def cast_numel(numel: int) -> int:
    """Elements of a gradient that a step on the CPU widens at once, at the most."""
    return min(_TILE * torch.get_num_threads(), numel)


def _pieces(
    param: Tensor, grad: Tensor, low: Tensor | None, residual: Tensor | None, ties: Tensor | None, *state: Tensor
) -> Iterator[tuple[Tensor, ...]]:  # fmt: skip
    """(masters, gradient in their dtype, states) piece by piece; after each piece its weights go to `low`, or to the
    two halves that they came from."""
    p, g, *rest = (t.view(-1) for t in (param, grad, *state))
    dtype = p.dtype if residual is None else torch.float32
    cast, joins = g.dtype != dtype, residual is not None
    tile = _TILE * torch.get_num_threads() if cast or low is not None else max(1, p.numel())
    step = PIECE if joins else tile
    most = min(step, p.numel())
    scratch = torch.empty(most if cast else 0, dtype=dtype, device=p.device)
    joined = torch.empty(most if joins else 0, dtype=dtype, device=p.device)
    for start in range(0, p.numel(), step):
        part = slice(start, min(start + step, p.numel()))
        piece = scratch[: part.stop - start].copy_(g[part]) if cast else g[part]
        if residual is None or ties is None:
            yield from _whole_vectors(p[part], piece, *(r[part] for r in rest))
        else:
            halves = p[part], residual.view(-1)[part], ties[start // 8 : -(-part.stop // 8)]
            master = join(*halves, out=joined[: part.stop - start])
            yield from _whole_vectors(master, piece, *(r[part] for r in rest))
            split_(master, *halves)
        if low is not None:
            low.view(-1)[part].copy_(p[part])


def _whole_vectors(*buffers: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The buffers in at most two groups, each of whole vectors: the body in place, the rest in a padded copy
    that is written back.

    torch's loops round the elements behind the last whole vector differently (fused multiply-adds). So an element would
    depend on where a buffer is cut.
    """
    body = buffers[0].numel() // _VECTOR * _VECTOR
    tail = buffers[0].numel() - body
    if body:
        yield tuple(b[:body] for b in buffers) if tail else buffers
    if tail:
        padded = tuple(F.pad(b[body:], (0, _VECTOR - tail)) for b in buffers)
        yield padded
        for b, copy in zip(buffers, padded, strict=True):
            b[body:] = copy[:tail]


def _scaled(grad_scale: float | Tensor, param: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
    """(what to divide the gradient by first, what torch's fused kernels are told): these take the scale as
    float32, which would cost a float64 step nine digits."""
    if not isinstance(grad_scale, Tensor):
        if grad_scale == 1.0:
            return None, {}
        grad_scale = torch.full((), grad_scale, dtype=torch.float64, device=param.device)
    if param.dtype == torch.float64:
        return grad_scale, {}
    return None, {
        "grad_scale": grad_scale.to(device=param.device, dtype=torch.float32),
        "found_inf": torch.zeros((), dtype=torch.float32, device=param.device),
    }


def _check(
    op: str, param: Tensor, grad: Tensor, low: Tensor | None, residual: Tensor | None, ties: Tensor | None,
    draws: Draws | None = None, **state: Tensor,
) -> None:  # fmt: skip
    if not param.is_floating_point():
        raise ValueError(f"{op}: param is {param.dtype}; legal is a floating dtype")
    if (residual is None) != (ties is None) or (low is not None and residual is not None):
        given = [n for n, t in (("low", low), ("residual", residual), ("ties", ties)) if t is not None]
        raise ValueError(
            f"{op}: {' and '.join(given)} given; legal is low, or residual and ties, or none of them"
        )
    if residual is not None and ties is not None:
        check_halves(op, param, residual, ties)
    master = param.dtype if residual is None else torch.float32
    if draws is not None and (master != torch.float32 or draws.first % 4):
        raise ValueError(
            f"{op}: draws from element {draws.first} beside {master} weights; legal is a multiple of 4, and float32 or "
            f"split weights"
        )
    of_states = master if draws is None else torch.bfloat16
    loose = {"grad": grad} if low is None else {"grad": grad, "low": low}
    for name, tensor in {"param": param, **loose, **state}.items():
        wants = param.dtype if name == "param" else of_states
        dtype_fits = tensor.is_floating_point() if name in loose else tensor.dtype == wants
        if tensor.shape != param.shape or not dtype_fits or not tensor.is_contiguous():
            dtype = "floating" if name in loose else wants
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"legal is contiguous {dtype} {tuple(param.shape)}, as param"
            )
        if tensor.device != param.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; legal is {param.device}, as param")


def _check_momentum(momentum_buffer: Tensor | None, momentum: float) -> None:
    if (momentum_buffer is None) != (momentum == 0.0):
        raise ValueError(
            f"sgd_: momentum={momentum} with{'out' if momentum_buffer is None else ''} a momentum_buffer; "
            "legal is a buffer if and only if momentum is not 0"
        )


# ----------------------------------------------------------------------------------------------------- triton


def _beside(grad_scale: float | Tensor, param: Tensor) -> float | Tensor:
    """The scale on param's device."""
    return grad_scale.to(param.device) if isinstance(grad_scale, Tensor) else grad_scale


def _triton_adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float | Tensor = 1.0,
    low: Tensor | None = None, residual: Tensor | None = None, ties: Tensor | None = None,
    draws: Draws | None = None,
) -> None:  # fmt: skip
    _check("adamw_", param, grad, low, residual, ties, draws, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _kernels.step_(
        "adamw", param, grad, (exp_avg, exp_avg_sq), low, residual, ties, _beside(grad_scale, param),
        lr / (1.0 - beta1**step), 1.0 - lr * weight_decay, c_float(1.0 - beta1).value - 1.0, 1.0 - beta1, beta2,
        1.0 - beta2, eps, math.sqrt(1.0 - beta2**step), draws=draws, step=step,
    )  # fmt: skip


def _triton_sgd(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, *, lr: float, momentum: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, grad_scale: float | Tensor = 1.0, first: bool = False,
    low: Tensor | None = None, residual: Tensor | None = None, ties: Tensor | None = None,
) -> None:  # fmt: skip
    _check_momentum(momentum_buffer, momentum)
    rule = "plain"
    if momentum_buffer is not None:
        rule = ("nesterov" if nesterov else "momentum") + (" first" if first else "")
    state = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    _check("sgd_", param, grad, low, residual, ties, None, **state)
    _kernels.step_(
        rule, param, grad, (momentum_buffer, None), low, residual, ties, _beside(grad_scale, param),
        lr, weight_decay, momentum, 0.0, 0.0, 0.0, 0.0, 0.0,
    )  # fmt: skip


def _triton_lion(
    param: Tensor, grad: Tensor, exp_avg: Tensor, *, lr: float, beta1: float, beta2: float,
    weight_decay: float,
    grad_scale: float | Tensor = 1.0, low: Tensor | None = None, residual: Tensor | None = None,
    ties: Tensor | None = None,
) -> None:  # fmt: skip
    _check("lion_", param, grad, low, residual, ties, exp_avg=exp_avg)
    _kernels.step_(
        "lion", param, grad, (exp_avg, None), low, residual, ties, _beside(grad_scale, param),
        lr, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 0.0, 0.0,
    )  # fmt: skip


# The states' dtype, which is that of the masters, `_check` tells.
_STATES = dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer"), FLAT)
_HALVES = {"residual": Takes((torch.int16,)), "ties": Takes((torch.uint8,))}
_TAKES = {"param": FLAT, "grad": FLAT, "low": FLAT, "grad_scale": SCALAR} | _STATES | _HALVES

TRITON = {
    "adamw_": TritonOp(_triton_adamw, _TAKES),
    "sgd_": TritonOp(_triton_sgd, _TAKES),
    "lion_": TritonOp(_triton_lion, _TAKES),
}


# -------------------------------------------------------------------------------------------------- reference


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(param, exp_avg, exp_avg_sq) after the step, in float64."""
    p, g, m, v = (t.double() for t in (param, grad, exp_avg, exp_avg_sq))
    g = g / grad_scale
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    return p * (1 - lr * weight_decay) - lr * update, m, v


def sgd_reference(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, *, lr: float, momentum: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, grad_scale: float = 1.0, first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(param, momentum buffer) after the step, in float64."""
    p, g = param.double(), grad.double() / grad_scale
    g = g + weight_decay * p
    if momentum_buffer is None:
        return p - lr * g, None
    b = g if first else momentum * momentum_buffer.double() + g
    return p - lr * (g + momentum * b if nesterov else b), b


def lion_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, *, lr: float, beta1: float, beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(param, exp_avg) after the step, in float64."""
    p, g, m = param.double(), grad.double() / grad_scale, exp_avg.double()
    update = torch.sign(beta1 * m + (1 - beta1) * g)
    return p * (1 - lr * weight_decay) - lr * update, beta2 * m + (1 - beta2) * g
