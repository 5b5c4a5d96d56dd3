"""Computes the result shapes of a transformer's operations from the shapes, strides and dtypes of their arguments.

Note: torch's answers without torch's imports.
Torch has most of these rules in Python, over its compiler's symbolic shapes.  The first of them loads 145 MB of code,
into a training process whose memory is planned to the byte.  A rule here covers the plain case of one operation.  For
any other case it returns None, and torch computes the shape or raises.  Tests compare each rule with torch, over drawn
arguments and in dry runs of our models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten

TensorMeta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""
ResultMeta = tuple[TensorMeta | None, ...]
"""Result shapes of an operation; None in it: no tensor there."""
Rule = Callable[..., ResultMeta | None]
"""Computes result shapes from the arguments of an operation; returns None where torch must compute them."""

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The dtype in which 16-bit values are computed."""


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))[::-1][: len(shape)]


def _dense(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return tuple(shape), strides_of(shape), dtype


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill one interval of memory, each once, in any order of dims."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in range(x.dim()) if x.shape[dim] > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _wants_swap(tensors: Sequence[Tensor], inner: int, outer: int) -> int:
    """Compares two dims by the first tensor that orders them. 1: `inner` should be further out than `outer`; -1: it
    should not; 0: no tensor orders them."""
    for x in tensors:
        a, b = x.stride(inner), x.stride(outer)
        if a == 0 or b == 0:
            continue
        if a == b:
            if x.shape[inner] > x.shape[outer]:
                return 1
            continue
        return 1 if a > b else -1
    return 0


def _strides_like(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Strides of a new dense tensor with the order of dims of these, all of one shape (TensorIterator's order)."""
    shape, dims = tensors[0].shape, tensors[0].dim()
    if dims < 2 or 0 in shape or all(x.is_contiguous() for x in tensors):
        return strides_of(shape)
    order = list(reversed(range(dims)))  # innermost first
    for i in range(1, dims):
        moving = i
        for other in reversed(range(i)):
            wants = _wants_swap(tensors, order[other], order[moving])
            if wants < 0:
                break
            if wants > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
    strides, step = [0] * dims, 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> TensorMeta:
    return tuple(x.shape), x.stride() if _is_dense(x) else _strides_like([x]), dtype or x.dtype


def _made_like(x: Tensor, **options: Any) -> ResultMeta | None:
    if options.get("memory_format") not in (None, torch.preserve_format):
        return None
    return (_like(x, options.get("dtype")),)


# ---- element by element ----


def _common_type(*given: Any) -> torch.dtype | None:
    if len(given) == 1:
        return given[0].dtype if isinstance(given[0], Tensor) else None
    return torch.result_type(*given) if len(given) == 2 else None


def _promoted(*given: Any) -> torch.dtype | None:
    dtype = _common_type(*given)
    return None if dtype is torch.bool else dtype


def _without_bool(*given: Any) -> torch.dtype | None:
    return None if any(_common_type(x, x) is torch.bool for x in given) else _promoted(*given)


def _bits(*given: Any) -> torch.dtype | None:
    dtype = _common_type(*given)
    return None if dtype is not None and dtype.is_floating_point else dtype


def _floating(*given: Any) -> torch.dtype | None:
    """Integers become the default dtype."""
    dtype = _common_type(*given)
    return torch.get_default_dtype() if dtype is not None and not dtype.is_floating_point else dtype


def _only_floating(*given: Any) -> torch.dtype | None:
    dtype = _common_type(*given)
    return dtype if dtype is not None and dtype.is_floating_point else None


def _bool(*given: Any) -> torch.dtype | None:
    return torch.bool


def _chosen(condition: Tensor, *given: Any) -> torch.dtype | None:
    return _common_type(*given) if condition.dtype is torch.bool else None


def _pointwise(dtype_of: Callable[..., torch.dtype | None], *, conditions: int = 0) -> Rule:
    """Tensors, except the first `conditions`, are converted to the dtype of the computation before broadcasting."""

    def rule(*given: Any, **options: Any) -> ResultMeta | None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        dtype = dtype_of(*given)
        shape = _broadcast(tensors)
        if shape is None or dtype is None or dtype.is_complex or options.keys() - {"approximate"}:
            return None
        if len(tensors) == 1:
            return (_like(tensors[0], dtype),)
        computed_in = dtype if conditions else WIDE.get(dtype, dtype)
        computed = tensors[:conditions] + [_converted(x, computed_in) for x in tensors[conditions:]]
        return ((shape, _strides_like([x.expand(shape) for x in computed]), dtype),)

    return rule


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is dtype:
        return x
    shape, strides, _ = _like(x)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _alike(one: Tensor, other: Tensor, **options: Any) -> ResultMeta | None:
    """Result of two tensors with one order of dims, for operations that torch splits into several."""
    is_plain = one.shape == other.shape and one.dtype is other.dtype and one.dtype.is_floating_point
    strides = _strides_like([one]), _strides_like([other])
    return ((tuple(one.shape), strides[0], one.dtype),) if is_plain and strides[0] == strides[1] else None


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    try:
        return tuple(np.broadcast_shapes(*(tuple(x.shape) for x in tensors)))
    except ValueError:
        return None


# ---- over dims ----


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool) -> tuple[int, ...] | None:
    """The remaining shape; no dims means all."""
    over = {dim % max(x.dim(), 1) for dim in dims or range(x.dim()) if -x.dim() <= dim < x.dim()}
    if len(over) != (len(dims) if dims else x.dim()):
        return None
    return tuple(1 if d in over else size for d, size in enumerate(x.shape) if keepdim or d not in over)


def _sum(
    x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None
) -> ResultMeta | None:
    shape = _reduced(x, dims, keepdim)
    whole = x.dtype if x.dtype.is_floating_point else torch.int64
    return None if shape is None or x.dtype.is_complex else (_dense(shape, dtype or whole),)


def _of_floats(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> ResultMeta | None:
    shape = _reduced(x, dims, keepdim)
    is_plain = dims and x.dtype.is_floating_point and x.numel()
    return (_dense(shape, x.dtype),) if shape is not None and is_plain else None


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> ResultMeta | None:
    is_plain = x.dtype.is_floating_point and not half_to_float and -x.dim() <= dim < x.dim()
    return (_dense(x.shape, x.dtype),) if is_plain and x.is_contiguous() else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> ResultMeta | None:
    first = tensors[0]
    at = dim % max(first.dim(), 1)
    rest = {(*x.shape[:at], *x.shape[at + 1 :]) for x in tensors}
    if not -first.dim() <= dim < first.dim() or len(rest) > 1 or any(x.dim() != first.dim() for x in tensors):
        return None
    if first.dim() > 3 and all(x.stride(1) <= x.stride(-1) for x in tensors):
        return None  # channels may be last in memory
    shape = (*first.shape[:at], sum(x.shape[at] for x in tensors), *first.shape[at + 1 :])
    return (_dense(shape, _common(tensors)),)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> ResultMeta | None:
    first = tensors[0]
    if any(x.shape != first.shape for x in tensors) or not -first.dim() - 1 <= dim <= first.dim():
        return None
    at = dim % (first.dim() + 1)
    return (_dense((*first.shape[:at], len(tensors), *first.shape[at:]), _common(tensors)),)


def _common(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


# ---- products ----


def _mm(a: Tensor, b: Tensor) -> ResultMeta | None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype is b.dtype
    return (_dense((a.shape[0], b.shape[1]), a.dtype),) if fits else None


def _bmm(a: Tensor, b: Tensor) -> ResultMeta | None:
    fits = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    return (_dense((*a.shape[:2], b.shape[2]), a.dtype),) if fits and a.dtype is b.dtype else None


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> ResultMeta | None:
    product = _mm(a, b)
    if product is None or bias.dtype is not a.dtype or not a.dtype.is_floating_point:
        return None
    return product if bias.dim() == 1 and bias.shape[0] in (1, b.shape[1]) else None


def _attention(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> ResultMeta | None:
    if query.dim() != 4:
        return None
    samples, heads, tokens = query.shape[:3]
    log_sums = (samples, heads, tokens), (tokens * heads, 1, heads), WIDE.get(query.dtype, query.dtype)
    return (_like(query), log_sums) if query.numel() else None


# ---- norms, tables, new tensors ----


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> ResultMeta | None:
    outer = x.dim() - len(shape)
    if (
        not x.is_contiguous()
        or not x.numel()
        or outer < 0
        or tuple(x.shape[outer:]) != tuple(shape)
        or not shape
    ):
        return None
    affine = [p for p in (weight, bias) if p is not None]
    if not x.dtype.is_floating_point or any(
        p.shape != x.shape[outer:] or p.dtype is not x.dtype for p in affine
    ):
        return None
    of_rows = _dense((*x.shape[:outer], *(1 for _ in shape)), WIDE.get(x.dtype, x.dtype))
    return _dense(x.shape, x.dtype), of_rows, of_rows


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, wanted: Sequence[bool],
) -> ResultMeta | None:  # fmt: skip
    outer = x.dim() - len(shape)
    if not x.is_contiguous() or not gradient.is_contiguous() or not x.numel() or outer < 1:
        return None
    affine = [
        _dense(shape, p.dtype) if p is not None and is_wanted else None
        for p, is_wanted in zip((weight, bias), wanted[1:], strict=True)
    ]
    return (_dense(x.shape, x.dtype) if wanted[0] else None, *affine)


def _embedding(table: Tensor, ids: Tensor, *options: Any) -> ResultMeta | None:
    fits = table.dim() == 2 and ids.dtype in (torch.int64, torch.int32)
    return (_dense((*ids.shape, table.shape[1]), table.dtype),) if fits else None


def _gather(x: Tensor, dim: int, index: Tensor) -> ResultMeta | None:
    fits = index.dim() == x.dim() and index.dtype is torch.int64 and -x.dim() <= dim < x.dim()
    return (_dense(index.shape, x.dtype),) if fits else None


def _slice_backward(gradient: Tensor, sizes: Sequence[int], *where: int) -> ResultMeta:
    return (_dense(sizes, gradient.dtype),)


def _arange(end: Any, *, dtype: torch.dtype | None = None, **options: Any) -> ResultMeta | None:
    return (_dense((end,), dtype or torch.int64),) if type(end) is int and end >= 0 else None


RULES: Mapping[Any, Rule] = {
    aten.clone.default: _made_like,
    aten.empty_like.default: _made_like,
    aten.ones_like.default: _made_like,
    aten.zeros_like.default: _made_like,
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.pow.Tensor_Scalar,
            aten.pow.Scalar,
        ),
        _pointwise(_promoted),
    ),
    aten.sub.Tensor: _pointwise(_without_bool),
    aten.bitwise_and.Tensor: _pointwise(_bits),
    aten.bitwise_or.Tensor: _pointwise(_bits),
    **dict.fromkeys(
        (
            aten.div.Tensor, aten.div.Scalar, aten.cos.default, aten.sin.default, aten.exp.default, aten.log.default,
            aten.rsqrt.default, aten.sigmoid.default,
        ),
        _pointwise(_floating),
    ),
    aten.gelu.default: _pointwise(_only_floating),
    aten.silu.default: _pointwise(_only_floating),
    aten.gelu_backward.default: _alike,
    aten.logaddexp.default: _alike,
    **dict.fromkeys(
        (aten.eq.Scalar, aten.ne.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.le.Scalar),
        _pointwise(_bool),
    ),
    aten.where.self: _pointwise(_chosen, conditions=1),
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _of_floats,
    aten.amax.default: _of_floats,
    aten.logsumexp.default: _of_floats,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.slice_backward.default: _slice_backward,
    aten.arange.default: _arange,
}  # fmt: skip

GIVEN_OUT: Mapping[Any, Rule] = {aten.mul.out: _pointwise(_promoted), aten.cat.out: _cat, aten.mm.out: _mm}
"""Operations that return their `out=` tensor, if it has the shape of the rule."""

IN_PLACE = frozenset(
    (
        aten.add_.Tensor, aten.add_.Scalar, aten.mul_.Tensor, aten.mul_.Scalar, aten.exp_.default, aten.log_.default,
        aten.lerp_.Tensor, aten.scatter_add_.default, aten.zero_.default, aten.fill_.Scalar,
        aten.addmm_.default,
    )
)  # fmt: skip
"""Operations that return their first argument with its shape unchanged."""
