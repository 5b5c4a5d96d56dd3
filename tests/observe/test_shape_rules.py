"""Shapes by our own rules: what torch says, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from colossal_lite.observe.shape_cache import ShapeCache
from colossal_lite.observe.shape_rules import GIVEN_OUT, IN_PLACE, RULES, strides_of

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.bool]
SIZES = st.sampled_from([0, 1, 1, 2, 3, 4])
NUMBERS = st.sampled_from([2, 0.5, True, -1, 0])


def form(x: Tensor | None) -> Any:
    return None if x is None else (tuple(x.shape), x.stride(), x.dtype)


def meant(forms: Any) -> Any:
    """Without the strides that lead nowhere: of dims of one element, and of tensors of none."""
    if not isinstance(forms, tuple):
        return forms
    return [
        None
        if each is None
        else (
            each[0],
            [n for n, size in zip(each[1], each[0], strict=True) if size > 1 and 0 not in each[0]],
            each[2],
        )
        for each in forms
    ]


def asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch says; an exception as it is."""
    try:
        out = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return error
    return tuple(form(x) for x in (out if isinstance(out, (tuple, list)) else (out,)))


def assert_as_torch(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the rule says anything; what it says must be what torch does, which must not refuse."""
    told = RULES[func](*args, **kwargs)
    if told is None:
        return False
    truth = asked(func, *args, **kwargs)
    assert meant(told) == meant(truth), (
        func,
        [form(x) if isinstance(x, Tensor) else x for x in args],
        kwargs,
    )
    return True


@st.composite
def laid(draw: Any, shape: Any, dtypes: Any = None) -> Tensor:
    """A meta tensor of such a shape, whose dims lie in any order, with gaps or expanded."""
    shape, dtype = tuple(shape), draw(st.sampled_from(dtypes or DTYPES))
    order = draw(st.permutations(range(len(shape))))
    gap, step, strides = draw(st.sampled_from([1, 1, 1, 2])), 1, [0] * len(shape)
    for dim in order:
        strides[dim], step = step, step * max(shape[dim], 1) * gap
    if draw(st.booleans()) and draw(st.booleans()):
        strides = [0 if draw(st.booleans()) else stride for stride in strides]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


SHAPES = st.lists(SIZES, max_size=4)


@st.composite
def operands(draw: Any, count: int, dtypes: Any = None) -> list[Tensor]:
    """Tensors that mostly go together, some of fewer dims or of size one."""
    shape, found = draw(SHAPES), list[Tensor]()
    for _ in range(count):
        mine = [1 if draw(st.integers(0, 5)) == 0 else size for size in shape]
        found.append(draw(laid(mine[draw(st.sampled_from([0, 0, 0, 1])) :], dtypes)))
    return found


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


UNARY = [
    aten.neg.default, aten.cos.default, aten.sin.default, aten.exp.default, aten.log.default, aten.rsqrt.default,
    aten.sigmoid.default, aten.gelu.default, aten.silu.default,
]  # fmt: skip
BINARY = [
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor, aten.gelu_backward.default, aten.logaddexp.default,
]  # fmt: skip
WITH_NUMBER = [
    aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.eq.Scalar, aten.ne.Scalar,
    aten.ge.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.le.Scalar,
]  # fmt: skip


@given(st.sampled_from(UNARY), operands(1))
def test_of_one_tensor(func: Any, tensors: list[Tensor]) -> None:
    assert_as_torch(func, *tensors)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


EXPANDED = strided((1, 1, 2, 2), (1, 1, 0, 2), torch.bfloat16)


@given(st.sampled_from(BINARY), operands(2))
@example(aten.add.Tensor, [EXPANDED, strided((1, 2, 1), (1, 1, 2), torch.bfloat16)])  # computed in 32 bits
@example(aten.mul.Tensor, [EXPANDED, strided((2, 2), (1, 2), torch.float32)])
def test_of_two_tensors(func: Any, tensors: list[Tensor]) -> None:
    assert_as_torch(func, *tensors)


@given(st.sampled_from(WITH_NUMBER), operands(1), NUMBERS)
def test_of_a_tensor_and_a_number(func: Any, tensors: list[Tensor], number: Any) -> None:
    assert_as_torch(func, tensors[0], number)
    assert_as_torch(aten.pow.Scalar, number, tensors[0])


@given(operands(3))
@example([x(1), strided((2, 2), (0, 2), torch.bfloat16), strided((2, 2), (1, 2), torch.float32)])
def test_what_is_chosen(tensors: list[Tensor]) -> None:
    assert_as_torch(aten.where.self, *tensors)
    assert_as_torch(aten.where.self, tensors[0].to(torch.bool), *tensors[1:])


@given(
    st.sampled_from([aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default]),
    SHAPES.flatmap(laid),
    st.sampled_from([{}, dict(dtype=torch.float64), dict(memory_format=torch.contiguous_format)]),
)
def test_what_is_made_like_another(func: Any, x: Tensor, options: dict[str, Any]) -> None:
    assert_as_torch(func, x, **options)


@given(SHAPES.flatmap(laid))
def test_a_clone(x: Tensor) -> None:
    assert_as_torch(aten.clone.default, x)


@given(
    st.sampled_from([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default]),
    SHAPES.flatmap(laid),
    st.lists(st.integers(-4, 4), max_size=2),
    st.booleans(),
)
def test_what_is_reduced(func: Any, x: Tensor, dims: list[int], keepdim: bool) -> None:
    assert_as_torch(func, x, dims, keepdim)


@given(
    st.sampled_from([aten._softmax.default, aten._log_softmax.default]),
    SHAPES.flatmap(laid),
    st.integers(-4, 4),
)
def test_softmax(func: Any, x: Tensor, dim: int) -> None:
    assert_as_torch(func, x, dim, False)


@given(st.sampled_from([aten.cat.default, aten.stack.default]), st.data(), st.integers(-5, 5))
def test_what_is_joined(func: Any, data: st.DataObject, dim: int) -> None:
    shape = data.draw(SHAPES)
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        mine = list(shape)
        if mine and func is aten.cat.default and -len(mine) <= dim < len(mine):
            mine[dim] = data.draw(SIZES)
        if data.draw(st.integers(0, 9)) == 0:
            mine = data.draw(SHAPES)
        parts.append(data.draw(laid(mine)))
    assert_as_torch(func, parts, dim)


@given(st.data())
def test_products(data: st.DataObject) -> None:
    n, m, k, p = (data.draw(SIZES) for _ in range(4))
    other = data.draw(st.sampled_from([k, k, k, m]))
    dtypes = [data.draw(st.sampled_from(FLOATS))] if data.draw(st.booleans()) else None
    a, b = data.draw(laid([n, k], dtypes)), data.draw(laid([other, m], dtypes))
    assert_as_torch(aten.mm.default, a, b)
    bias = data.draw(laid(data.draw(st.sampled_from([[m], [1], [n, m], []])), dtypes))
    assert_as_torch(aten.addmm.default, bias, a, b)
    assert_as_torch(
        aten.bmm.default, data.draw(laid([p, n, k], dtypes)), data.draw(laid([p, other, m], dtypes))
    )


@given(st.data())
def test_attention(data: st.DataObject) -> None:
    """Of float64 torch 2.11 says what its kernel does not do."""
    shape, dtype = (
        data.draw(st.lists(SIZES, min_size=4, max_size=4)),
        [data.draw(st.sampled_from(FLOATS[:3]))],
    )
    query, key, value = (data.draw(laid(shape, dtype)) for _ in range(3))
    assert_as_torch(
        aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True, scale=None
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_s_log_sums_have_the_dtype_that_the_kernel_gives(dtype: torch.dtype) -> None:
    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    real = torch.ones(2, 4, 3, 8, dtype=dtype)
    told = RULES[func](*(real.to("meta"),) * 3, 0.0, True)
    assert told is not None and [each and each[2] for each in told] == [
        x.dtype for x in func(real, real, real)
    ]


@given(st.data())
def test_norms(data: st.DataObject) -> None:
    shape = data.draw(st.lists(SIZES, min_size=1, max_size=4))
    inner = shape[data.draw(st.integers(0, len(shape) - 1)) :]
    dtypes = [data.draw(st.sampled_from(DTYPES))] if data.draw(st.booleans()) else None
    x, gradient = data.draw(laid(shape, dtypes)), data.draw(laid(shape, dtypes))
    weight, bias = (data.draw(st.one_of(st.none(), laid(inner, dtypes))) for _ in range(2))
    assert_as_torch(aten.native_layer_norm.default, x, inner, weight, bias, 1e-5)
    rows = x.new_empty([*shape[: len(shape) - len(inner)], *(1 for _ in inner)], dtype=torch.float32)
    wanted = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    assert_as_torch(
        aten.native_layer_norm_backward.default, gradient, x, inner, rows, rows, weight, bias, wanted
    )


@given(st.data())
def test_what_is_looked_up(data: st.DataObject) -> None:
    table = data.draw(laid(data.draw(st.lists(SIZES, min_size=1, max_size=3)), FLOATS))
    ids = data.draw(laid(data.draw(SHAPES), [torch.int64, torch.int32, torch.float32]))
    assert_as_torch(aten.embedding.default, table, ids)
    index = data.draw(laid([max(size - 1, 0) for size in table.shape], [torch.int64]))
    assert_as_torch(aten.gather.default, table, data.draw(st.integers(0, 2)), index)


@given(SHAPES.flatmap(laid))
def test_the_gradient_of_a_slice(gradient: Tensor) -> None:
    if gradient.dim():
        sizes = [gradient.shape[0] + 2, *gradient.shape[1:]]
        assert assert_as_torch(aten.slice_backward.default, gradient, sizes, 0, 1, 1 + gradient.shape[0], 1)


@given(
    st.sampled_from([0, 3, 2.5, -1, True]),
    st.sampled_from([{}, dict(dtype=torch.int64), dict(dtype=torch.float32)]),
)
def test_ranges(end: Any, options: dict[str, Any]) -> None:
    assert_as_torch(aten.arange.default, end, device=torch.device("meta"), **options)


IDS, HEADS = x(2, 3, dtype=torch.int64), x(2, 3, 4, 8).transpose(1, 2)
PLAIN: dict[Any, tuple[Any, ...]] = {
    **{func: (x(2, 3, 8),) for func in UNARY},
    **{func: (x(2, 3, 8), x(2, 3, 8)) for func in BINARY},
    **{func: (x(2, 3, 8), 2) for func in WITH_NUMBER},
    aten.bitwise_and.Tensor: (IDS, IDS),
    aten.bitwise_or.Tensor: (IDS, IDS),
    aten.pow.Scalar: (2.0, x(3)),
    aten.where.self: (x(2, 8, dtype=torch.bool), x(2, 8), x()),
    aten.clone.default: (HEADS,),
    aten.empty_like.default: (HEADS,),
    aten.zeros_like.default: (HEADS,),
    aten.ones_like.default: (HEADS,),
    aten.sum.dim_IntList: (x(2, 3, 8), [0]),
    aten.mean.dim: (x(2, 3, 8), [-1], True),
    aten.amax.default: (x(2, 3, 8), [-1]),
    aten.logsumexp.default: (x(2, 3, 8), [-1]),
    aten._softmax.default: (x(2, 8), 1, False),
    aten._log_softmax.default: (x(2, 8), 1, False),
    aten.cat.default: ([HEADS, HEADS], 2),
    aten.stack.default: ([HEADS, HEADS], -1),
    aten.mm.default: (x(3, 4), x(4, 5)),
    aten.bmm.default: (x(2, 3, 4), x(2, 4, 5)),
    aten.addmm.default: (x(5), x(3, 4), x(4, 5)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (HEADS, HEADS, HEADS, 0.0, True),
    aten.native_layer_norm.default: (x(2, 3, 8), [8], x(8), x(8), 1e-5),
    aten.native_layer_norm_backward.default: (
        x(2, 3, 8), x(2, 3, 8), [8], x(2, 3, 1), x(2, 3, 1), x(8), None, [True, True, False],
    ),
    aten.embedding.default: (x(16, 8), IDS),
    aten.gather.default: (x(2, 8), 1, IDS),
    aten.slice_backward.default: (x(2, 8), [4, 8], 0, 1, 3, 1),
    aten.arange.default: (5,),
}  # fmt: skip


@pytest.mark.parametrize("func", RULES, ids=str)
def test_the_plain_case_of_each_is_said(func: Any) -> None:
    """Else the other tests of this file would hold of a rule that says nothing."""
    options = dict(device=torch.device("meta")) if func is aten.arange.default else {}
    assert assert_as_torch(func, *PLAIN[func], **options)


@pytest.mark.parametrize("func", sorted(IN_PLACE, key=str), ids=str)
def test_what_changes_a_tensor_in_place_gives_it(func: Any) -> None:
    """By its schema: it writes its first argument and returns that."""
    first, (returned,) = func._schema.arguments[0], func._schema.returns
    assert first.alias_info.is_write and returned.alias_info.is_write
    assert first.alias_info.before_set == returned.alias_info.before_set
    y = x(2, 3)
    assert ShapeCache().run(func, (y, 1.0), {}) is y


@pytest.mark.parametrize(
    ("func", "given", "out", "is_told"),
    [
        (aten.mul.out, (x(2, 3), x(2, 1)), x(2, 3), True),
        (aten.mul.out, (x(2, 3), x(2, 1)), x(2, 4), False),
        (aten.mul.out, (x(2, 3), x(2, 1)), x(2, 3, dtype=torch.float64), False),
        (aten.cat.out, ([x(2, 3), x(2, 1)], 1), x(2, 4), True),
        (aten.cat.out, ([x(2, 3), x(1, 3)], 1), x(2, 4), False),
        (aten.mm.out, (x(2, 3), x(3, 4)), x(2, 4), True),
        (aten.mm.out, (x(2, 3), x(3, 4)), x(4, 2), False),
    ],
)
def test_what_is_written_into_out_is_that_if_it_fits(
    func: Any, given: Any, out: Tensor, is_told: bool
) -> None:
    assert func in GIVEN_OUT
    before = form(out)
    told = GIVEN_OUT[func](*given)
    assert (told is not None and told[0] is not None and told[0][0::2] == before[0::2]) is is_told
    if is_told:
        assert ShapeCache().run(func, given, dict(out=out)) is out and form(out) == before


def test_what_has_values_is_left_to_torch() -> None:
    forms, real = ShapeCache(), torch.ones(3)
    assert forms.run(aten.add_.Tensor, (real, real), {}) is real and real.tolist() == [2.0, 2.0, 2.0]
    assert forms.run(aten.add.Tensor, (real, 1), {}).tolist() == [3.0, 3.0, 3.0]
    assert forms.run(aten.arange.default, (3,), {}).tolist() == [0, 1, 2]
    assert forms.run(aten.zeros_like.default, (x(3),), dict(device=torch.device("cpu"))).tolist() == [0.0] * 3


@given(SHAPES)
def test_strides_of_a_shape_are_those_of_a_new_tensor(shape: list[int]) -> None:
    assert strides_of(shape) == x(*shape).stride()
