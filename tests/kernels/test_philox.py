"""Random bits are functions of a key and of global indices, whatever is cut, permuted or recomputed."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colossal_lite.kernels import philox
from colossal_lite.kernels.dropout import dropout, dropped
from colossal_lite.kernels.dropout import reference as dropout_reference
from colossal_lite.kernels.philox import Rows

KEY = (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the known-answer vectors that come with Random123
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            KEY,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    key: tuple[int, int], counter: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox.philox(key, *(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in words) == expected


def philox_4x64(key: tuple[int, int], counter: int) -> list[int]:
    """The four words of Philox-4x64-10 as the paper writes it, in Python's integers."""
    mask, words, (k0, k1) = 2**64 - 1, [counter >> 64 * i & (2**64 - 1) for i in range(4)], key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(b >> 64) ^ words[1] ^ k0, b & mask, (a >> 64) ^ words[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return words


def test_the_generator_of_initial_values_gives_the_published_answer() -> None:
    assert philox_4x64((0, 0), 0) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B
    ]  # fmt: skip


@pytest.mark.parametrize("start", [0, 3, 8 * (2**32 - 2) + 1])
def test_initial_values_follow_the_documented_counters(start: int) -> None:
    for e, value in enumerate(philox.uniform(KEY, start, start + 30).tolist(), start):
        word = philox_4x64(KEY, e // 8)[e % 8 // 2] >> 32 * (e % 2) & philox.MASK32
        assert value == (word / 2**32 + 0.5) % 1.0


@given(st.lists(st.integers(0, 3 * philox._BLOCK_ELEMENTS), min_size=2, max_size=5), st.booleans())
def test_bits_do_not_depend_on_how_a_range_is_cut(cuts: list[int], as_normal: bool) -> None:
    draw = philox.normal if as_normal else philox.uniform
    cuts = [0, *sorted(c % 70_000 for c in cuts), 70_000]
    whole = draw(KEY, 0, 70_000)
    pieces = [draw(KEY, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(whole, torch.cat(pieces))


def test_blocks_join_without_a_seam() -> None:
    edge = philox._BLOCK_ELEMENTS
    assert torch.equal(philox.normal(KEY, 0, edge + 5)[-10:], philox.normal(KEY, edge - 5, edge + 5))


def test_normal_is_the_inverse_normal_distribution_of_uniform() -> None:
    u, z = philox.uniform(KEY, 0, 20_000) + 2.0**-33, philox.normal(KEY, 0, 20_000)
    exact = torch.tensor([statistics.NormalDist().inv_cdf(float(x)) for x in u], dtype=torch.float64)
    assert z.dtype == torch.float32
    assert ((z - exact) / exact).abs().max() < 5e-7


def test_normal_reaches_its_tails_exactly() -> None:
    """By the words nearest to either end, which as float32 probabilities would all be 0 or 1."""
    ends = (0, 1, 2, 100, 2**20 + 1, 0.0749 * 2**32, 0.0751 * 2**32)
    high = numpy.array([2**31 - 1 - int(n) for n in ends]).astype(numpy.int32)
    for word, x in zip(high, philox._normal_of(high), strict=True):
        exact = statistics.NormalDist().inv_cdf((2**31 - 1 - int(word) + 0.5) * 2.0**-32)
        assert math.isclose(-x, exact, rel_tol=5e-7)
    assert (philox._normal_of(~high) == -philox._normal_of(high)).all()


def test_the_inverse_error_function_is_the_same_in_numpy_and_in_torch() -> None:
    x = torch.cat(
        (torch.linspace(-1, 1, 4001, dtype=torch.float64), torch.tensor([1 - 1e-9, 1e-9 - 1]).double())
    )
    y, inner = philox.inverse_erf(x), x[1:4000]
    assert (y[1:4000] - torch.erfinv(inner)).abs().max() < 1e-6 and float(y[4000]) == -float(y[0])
    with mock.patch.object(Tensor, "is_cpu", False):  # as on a device
        assert torch.equal(philox.inverse_erf(x), y)


def test_normal_has_the_bits_of_plain_arithmetic() -> None:
    """NumPy's float32 scalars round each +, -, *, / as IEEE 754 says; so every library and device must agree."""
    f = numpy.float32

    def polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
        total = f(coefficients[0])
        for c in coefficients[1:]:
            total = total * x + f(c)
        return total

    def plain(word: int) -> Any:
        q = (f(word) + f(0.5)) * f(2.0**-32)
        if abs(q) <= f(0.425):
            r = f(0.180625) - q * q
            return polynomial(r, philox._CENTRE[0]) * q / polynomial(r, philox._CENTRE[1])
        small = (f(2**31 - 1 - max(word, ~word)) + f(0.5)) * f(2.0**-32)
        mantissa, exponent = math.frexp(small)
        if mantissa < math.sqrt(0.5):
            mantissa, exponent = 2 * mantissa, exponent - 1
        s = (f(mantissa) - f(1.0)) / (f(mantissa) + f(1.0))
        x = -(polynomial(s * s, philox._ATANH) * s + f(exponent) * f(philox._LN2))
        y = x * f(philox._ROOT_START[0]) + f(philox._ROOT_START[1])
        for _ in range(3):
            y = (y + x / y) * f(0.5)
        r = y - f(1.6)
        far = polynomial(r, philox._TAIL[0]) / polynomial(r, philox._TAIL[1])
        return -far if q < 0 else far

    words, draws = philox._contiguous_words(KEY, 0, 4000), philox.normal(KEY, 0, 4000)
    assert [plain(int(w)) for w in words] == draws.tolist()


def test_normal_has_the_moments_of_a_normal() -> None:
    z = philox.normal((7, 9), 0, 400_000)
    moments = [float((z**k).mean()) for k in (1, 2, 3, 4)]
    for moment, exact, deviation in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(moment - exact) < 5 * math.sqrt(deviation / 400_000)


def rows(samples: Tensor, positions: Tensor, feature: int = 0) -> Rows:
    return Rows(KEY, 3, samples, positions, feature)


def test_a_mask_is_what_the_counters_say_element_by_element() -> None:
    samples, positions, p = torch.tensor([4, 0]), torch.tensor([7, 2, 11]), 0.3
    keep = philox.keep_mask(rows(samples, positions, feature=2), 7, p)
    for b, t, f in ((0, 0, 0), (0, 2, 1), (1, 1, 2), (1, 0, 5), (0, 1, 6)):
        g = f + 2
        counter = (torch.tensor(c) for c in (3, int(samples[b]), int(positions[t]), g // 4))
        word = int(philox.philox(KEY, *counter)[g % 4])
        assert bool(keep[b, t, f]) == (word >= round(p * 2**32))


def test_a_word_at_the_threshold_is_kept() -> None:
    word = int(philox.philox(KEY, *(torch.tensor(c) for c in (3, 0, 0, 0)))[0])
    first = rows(torch.tensor([0]), torch.tensor([0]))
    assert bool(philox.keep_mask(first, 1, word / 2**32))
    assert not bool(philox.keep_mask(first, 1, (word + 1) / 2**32))


@given(st.data())
def test_a_mask_is_the_same_for_any_split_of_batch_positions_and_features(data: st.DataObject) -> None:
    b, t, d = (data.draw(st.integers(1, n)) for n in (4, 6, 70))
    whole = philox.keep_mask(rows(torch.arange(b), torch.arange(t)), d, 0.4)
    samples = torch.tensor(data.draw(st.permutations(range(b)))[: data.draw(st.integers(1, b))])
    positions = torch.tensor(data.draw(st.permutations(range(t)))[: data.draw(st.integers(1, t))])
    start = data.draw(st.integers(0, d - 1))
    stop = data.draw(st.integers(start + 1, d))
    part = philox.keep_mask(rows(samples, positions, start), stop - start, 0.4)
    assert torch.equal(part, whole[samples][:, positions, start:stop])


def ones_dropped(rows: Rows, *shape: int) -> Tensor:
    return dropped(dropout, torch.ones(*shape), 0.4, rows)


@given(st.data())
def test_a_mask_of_heads_queries_and_keys_depends_on_no_size(data: st.DataObject) -> None:
    few = [data.draw(st.integers(1, 5)) for _ in range(4)]
    b, h, q, k = few
    more = [b, *(n + data.draw(st.integers(0, 3)) for n in few[1:])]
    whole = ones_dropped(rows(torch.arange(b), torch.arange(7)), *more)
    part = ones_dropped(rows(torch.arange(b), torch.arange(7)), *few)
    assert torch.equal(part, whole[:, :h, :q, :k])
    first = data.draw(st.integers(0, h - 1))
    heads = replace(rows(torch.arange(b), torch.arange(7)), heads=(first, h - first))
    if h - first != q or q == k:  # else it does not tell heads from queries
        assert torch.equal(ones_dropped(heads, b, h - first, q, k), whole[:, first:h, :q, :k])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_mask_of_tokens_heads_and_features_is_cut_at_heads(
    b: int, t: int, h: int, d: int, data: st.DataObject
) -> None:
    whole = ones_dropped(rows(torch.arange(b), torch.arange(t)), b, t, h, d)
    first = data.draw(st.integers(0, h - 1))
    cut = replace(rows(torch.arange(b), torch.arange(t), first * d), width=(h - first) * d)
    assert torch.equal(ones_dropped(cut, b, t, h - first, d), whole[:, :, first:])
    if first * d % ((h - first) * d):  # in the middle of a head of another size
        with pytest.raises(ValueError, match="of the features"):
            ones_dropped(cut, b, t, 1, (h - first) * d)


SIDES = st.sampled_from([0, 1, 2**11 - 1, 2**11, 2**11 + 1, 2**20 - 1])


@given(st.lists(st.tuples(SIDES | st.integers(0, 2**20 - 1), SIDES), min_size=2, unique=True))
def test_pairs_of_a_few_and_many_make_numbers_of_32_bits_each_of_its_own(
    pairs: list[tuple[int, int]],
) -> None:
    fit = [pair for pair in pairs if min(pair) < 2**11]
    made = [int(philox._joined(torch.tensor(a), torch.tensor(b))) for a, b in fit]
    assert len(set(made)) == len(fit) and all(0 <= number < 2**32 for number in made)


@pytest.mark.parametrize("shape", [(1, 2049, 2049, 1), (1, 2, 2**20 + 1, 1)])
def test_dims_that_make_no_position_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="counters hold 2048 by 1048576 positions at most"):
        rows(torch.arange(1), torch.arange(4)).fitted("dropout", torch.Size(shape))


def test_a_mask_joins_over_blocks_of_rows() -> None:
    d = 4 * philox._BLOCK_COUNTERS // 3  # three rows a block
    whole = philox.keep_mask(rows(torch.arange(2), torch.arange(4)), d, 0.5)
    assert torch.equal(whole[1, 3:], philox.keep_mask(rows(torch.tensor([1]), torch.tensor([3])), d, 0.5)[0])


def test_step_key_sample_position_and_feature_all_change_the_mask() -> None:
    base = rows(torch.tensor([1]), torch.tensor([1]))
    variants = [
        base,
        Rows((KEY[0] + 1, KEY[1]), 3, base.sample, base.position),
        Rows((KEY[0], KEY[1] + 1), 3, base.sample, base.position),
        Rows(KEY, 4, base.sample, base.position),
        Rows(KEY, 3, base.sample + 1, base.position),
        Rows(KEY, 3, base.sample, base.position + 1),
        Rows(KEY, 3, base.sample, base.position, 4),
    ]
    masks = [philox.keep_mask(v, 256, 0.5) for v in variants]
    for i, a in enumerate(masks):
        for b in masks[i + 1 :]:
            assert 64 < int((a != b).sum()) < 192  # independent masks differ in half of 256 places


def test_dropout_keeps_the_share_it_promises_and_its_gradient_uses_the_same_mask() -> None:
    x = torch.randn(8, 32, 100, requires_grad=True)
    r = rows(torch.arange(8), torch.arange(32))
    y = dropout(x, 0.25, r)
    share = float((y != 0).double().mean())
    assert abs(share - 0.75) < 5 * math.sqrt(0.25 * 0.75 / x.numel())
    assert torch.allclose(y.double(), dropout_reference(x, 0.25, r), rtol=1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.where(y != 0, torch.tensor(1 / 0.75), 0.0))


def test_dropout_drops_what_is_not_finite() -> None:
    r = rows(torch.arange(1), torch.arange(4))
    y = dropout(torch.full((1, 4, 64), math.inf), 0.5, r)
    assert set(y.unique().tolist()) == {0.0, math.inf}


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_dropout_refuses_a_share_outside_0_to_1(p: float) -> None:
    with pytest.raises(ValueError, match=r"legal is 0 <= p < 1"):
        dropout(torch.ones(1, 1, 4), p, rows(torch.arange(1), torch.arange(1)))


def test_dropout_refuses_rows_of_another_shape_or_type() -> None:
    with pytest.raises(ValueError, match=r"rows describe 2 samples of 3 positions"):
        dropout(torch.ones(3, 2, 4), 0.5, rows(torch.arange(2), torch.arange(3)))
    with pytest.raises(ValueError, match=r"rows.position is torch.int32"):
        dropout(torch.ones(2, 3, 4), 0.5, rows(torch.arange(2), torch.arange(3, dtype=torch.int32)))
