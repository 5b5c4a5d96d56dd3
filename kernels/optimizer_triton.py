"""Steps AdamW, SGD and Lion on a GPU by one Triton kernel, in one pass over flat buffers.

The formulas and the checks of arguments are in optimizer.py, which calls `step_` here.

Bits: those of optimizer.py's step on an x86 CPU with AVX2 or AVX-512.  So a chunk may be updated on either side of the
link.  Every operation is rounded by itself, divisions and roots to nearest.  `tl.fma` stands where that CPU's code has
one, and the compiler may make no other (fuse=False).  Rates are rounded to float32 once, from Python's numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import architecture, jit, launch, signed32, tile, tl
from .philox import Draws, word_tile
from .split import load_halves, store_halves


@jit
def _widened(pointer, i, inside):
    """bf16 elements i, given as int16, as float32."""
    return (tl.load(pointer + i, mask=inside).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _rounded(wide, noise):
    """`philox.round_by`, as int16."""
    return ((wide.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16)


@jit
def _adamw_rule(
    p, g, first_state, second_state, i, inside, begin, k0, k1, count, first, rate, keep, back, rest1, beta2, rest2, eps,
    root, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new weights; the moments are stepped where they are."""
    if NARROW:
        m = _widened(first_state, i, inside)
        v = _widened(second_state, i, inside)
    else:
        m = tl.load(first_state + i, mask=inside).to(tl.float32)
        v = tl.load(second_state + i, mask=inside).to(tl.float32)
    is_near = rest1 < 0.5  # from the nearer end, as torch.lerp
    m = tl.fma(tl.where(is_near, rest1, back), g - m, tl.where(is_near, m, g))
    v = tl.fma(rest2 * g, g, v * beta2)
    if NARROW:
        words = word_tile(k0, k1, count, first + begin, BLOCK)
        tl.store(second_state + i, _rounded(v, (words >> 16) & 0xFFFF), mask=inside)
    else:
        tl.store(second_state + i, v, mask=inside)
    p = p * keep - tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if NARROW:  # behind the division: before it ptxas spills
        tl.store(first_state + i, _rounded(m, words & 0xFFFF), mask=inside)
    else:
        tl.store(first_state + i, m, mask=inside)
    return p


@jit
def _lion_rule(p, g, first_state, i, inside, rate, keep, beta1, rest1, beta2, rest2):
    """The new weights; the moment is stepped where it is."""
    m = tl.load(first_state + i, mask=inside).to(tl.float32)
    mixed = m * beta1 + g * rest1
    sign = tl.where(mixed > 0.0, 1.0, tl.where(mixed < 0.0, -1.0, 0.0))
    p = p * keep - sign * rate
    tl.store(first_state + i, m * beta2 + g * rest2, mask=inside)
    return p


@jit
def _sgd_rule(p, g, first_state, i, inside, rate, decay, momentum, RULE: tl.constexpr):
    """The new weights; the buffer, if the rule has one, is stepped where it is."""
    g = tl.fma(p, decay, g)
    step = g
    if RULE == "momentum first" or RULE == "nesterov first":
        b = g
    if RULE == "momentum" or RULE == "nesterov":
        b = momentum * tl.load(first_state + i, mask=inside).to(tl.float32) + g
    if RULE != "plain":
        tl.store(first_state + i, b, mask=inside)
        step = b
    if RULE == "nesterov" or RULE == "nesterov first":
        step = tl.fma(b, momentum, g)
    return tl.fma(step, -rate, p)


@jit
def _step_kernel(
    param, grad, first_state, second_state, low, residual, ties, scale_pointer, numel, start, k0: tl.int32,
    k1: tl.int32, count: tl.int32, first, scale: tl.float32, rate: tl.float32, keep: tl.float32, beta1: tl.float32,
    rest1: tl.float32, beta2: tl.float32, rest2: tl.float32, eps: tl.float32, root: tl.float32,
    RULE: tl.constexpr, POINTER: tl.constexpr, LOW: tl.constexpr, SPLIT: tl.constexpr, NARROW: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block.  RULE: adamw; lion; sgd without a buffer; momentum; nesterov; and both at the first step.

    rate: lr, for adamw over 1 - beta1**t.  keep: 1 - lr * weight_decay, or weight_decay for sgd.  beta1: sgd's
    momentum, and for adamw rest1 - 1.  rest: 1 - beta.  root: of 1 - beta2**t.  SPLIT: param is an int16 high half.
    NARROW: the moments are bf16, given as int16, and step `count` rounds element i by draw `first` + i.
    """
    begin = start + tl.program_id(0).to(tl.int64) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    if MASKED:
        inside = i < numel
    else:
        inside = None
    if POINTER:
        scale = tl.load(scale_pointer).to(tl.float32)
    g = tl.div_rn(tl.load(grad + i, mask=inside).to(tl.float32), scale)
    if SPLIT:
        p = load_halves(param, residual, ties, i, inside)
        kind = tl.float32
    else:
        p = tl.load(param + i, mask=inside)
        kind = p.dtype
        p = p.to(tl.float32)
    if RULE == "adamw":
        p = _adamw_rule(
            p, g, first_state, second_state, i, inside, begin, k0, k1, count, first, rate, keep, beta1, rest1, beta2,
            rest2, eps, root, NARROW, BLOCK,
        )  # fmt: skip
    elif RULE == "lion":
        p = _lion_rule(p, g, first_state, i, inside, rate, keep, beta1, rest1, beta2, rest2)
    else:
        p = _sgd_rule(p, g, first_state, i, inside, rate, keep, beta1, RULE)
    p = p.to(kind)
    if SPLIT:
        store_halves(p, param, residual, ties, i, begin, numel, MASKED, BLOCK)
    else:
        tl.store(param + i, p, mask=inside)
    if LOW:
        tl.store(low + i, p.to(tl.float32), mask=inside)


def step_(
    rule: str, param: Tensor, grad: Tensor, states: tuple[Tensor | None, Tensor | None], low: Tensor | None,
    residual: Tensor | None, ties: Tensor | None, grad_scale: float | Tensor, *numbers: float,
    draws: Draws | None = None, step: int = 0,
) -> None:  # fmt: skip
    """Whole blocks without a mask (a mask costs the 128-bit loads), then the rest with one.

    A tensor `grad_scale` is on the device of `param`; `numbers`: rate, keep, beta1, rest1, beta2, rest2, eps, root.
    """
    if isinstance(grad_scale, Tensor):
        pointer, scale = grad_scale, 1.0
    else:
        pointer, scale = None, float(grad_scale)
    options = tile("step", 1, architecture(param.device))
    numel, block = param.numel(), options["BLOCK"]
    body = numel // block
    param = param if residual is None else param.view(torch.int16)
    first, second = states
    drawn = (0, 0, 0, 0)
    if draws is not None and first is not None and second is not None:
        first, second = first.view(torch.int16), second.view(torch.int16)
        drawn = (signed32(draws.key[0]), signed32(draws.key[1]), signed32(step), draws.first)
    for start, count, masked in ((0, body, False), (body * block, -(-numel // block) - body, True)):
        launch(
            _step_kernel, (count,), param, grad, first, second, low, residual, ties, pointer, numel, start, *drawn,
            scale, *numbers, RULE=rule, POINTER=pointer is not None, LOW=low is not None, SPLIT=residual is not None,
            NARROW=draws is not None, MASKED=masked, fuse=False, **options,
        )  # fmt: skip
