"""Draws counter-based random numbers: Philox with ten rounds (Salmon et al., SC 2011, "Parallel random numbers: as easy
as 1, 2, 3").

Note: a draw is a pure function of a key and a counter, so no stream has a state. A rank computes the bits of any
slice of a weight or of a dropout mask alone.  Two counter maps are used.
Initial values are of Philox-4x64.  Elements 8 c to 8 c + 7 of a tensor take the eight halves of the words of counter c,
the lower half of each word first.  NumPy has this generator in C, for counters that follow each other.
Dropout is of Philox-4x32.  Feature f of one token takes word f % 4 of counter (step, sample, position, f // 4).  Sample
and position are the token's place in the *global* batch.  So the mask is the same on every mesh and for every number of
micro-batches.  Where a sample has three dims, as heads, queries and keys, the first two make the position.  No size is
in it, so padding behind queries and keys changes no mask of others.  32-bit words are held in int64 tensors (torch
multiplies no uint32), products wrap modulo 2**64.  Rounds one and two see only rows or only columns of a mask and cost
next to nothing.  All runs in blocks that stay in the second-level cache.
`normal` uses +, -, * and / alone.  A library's log, cos or even sqrt differs in the last bit: between the vector body
and the tail of a loop, and between machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from .launch import TritonOp, architecture, jit, launch, signed32, tile, tl

Key = tuple[int, int]
"""Two 32-bit words."""
SampleDim = Literal["first", "second", "none"]
"""Where a tensor has the samples of a batch."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
ROUNDS = 10
_BLOCK_COUNTERS = 1 << 15  # 256 KiB a buffer: measured best between call overhead and cache misses
_BLOCK_ELEMENTS = 1 << 16
_FEW, _MANY = 1 << 11, 1 << 20  # sizes of two dims that make a position: one of them is of few
_SIGN_BITS = 0x8000000080000000 - (1 << 64)  # flips the sign bit of both int32 halves of an int64


def philox(key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words per counter; the counters are int64 tensors with values below 2**32 that broadcast together.

    Returns four int64 tensors of the broadcast shape that hold uint32 values (bitwise `tl.philox`).
    """
    c0, low1, c2, low3 = _rounds(key, c0, c1, c2, c3)
    return c0, low1 & MASK32, c2, low3 & MASK32


def _rounds(
    key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ten rounds; words 1 and 3 come back with garbage above bit 31, since every user masks or shifts it
    off."""
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(MASK32)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(MASK32)
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _packed_words(key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """Words of counters [N, M] as int32 [N, 4 M], in order.  Each sign bit is flipped, so signed order is the order of
    the uint32 words.  Little-endian, as every platform torch supports."""
    c0, c1, c2, c3 = _rounds(key, c0, c1, c2, c3)
    packed = torch.empty((*c0.shape, 2), dtype=torch.int64, device=c0.device)
    torch.bitwise_or(c0, c1 << 32, out=packed[..., 0])
    torch.bitwise_or(c2, c3 << 32, out=packed[..., 1])
    return packed.bitwise_xor_(_SIGN_BITS).view(torch.int32).view(c0.shape[0], 4 * c0.shape[1])


# ---------------------------------------------------------------------------------------------- dropout masks


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the tokens of a local activation [B, T, D] stand in the global one; all that a dropout mask
    depends on.

    key: from (seed, module name, call index).  step: optimizer step.  sample [B] int64: index in the step's
    global batch.  position [T] int64: index in the whole sequence.  feature: global index of the first local
    feature.
    For tensors of other shapes (`fitted`), what is cut here.  whole [T'] int64: positions of all tokens; `position`
    is a part of them.  part [T''] int64: those of this rank.  A tensor with as many tokens is cut.  width: features of
    the local part.  heads: first and number of the local heads.
    tokens: of the whole sequence; those behind are padding.  None: there is none.
    samples: where the tensor has them, if it is known; "first" leaves it to the shape.
    """

    key: Key
    step: int
    sample: Tensor
    position: Tensor
    feature: int = 0
    whole: Tensor | None = None
    width: int = 0
    heads: tuple[int, int] | None = None
    tokens: int | None = None
    part: Tensor | None = None
    samples: SampleDim = "first"

    def fitted(self, op: str, shape: torch.Size) -> tuple[Rows, tuple[int, int, int], bool]:
        """The rows of an x of any shape, its shape as [samples, units, features], and whether units come first.

        Legal: [B, ...]; [T, B, ...], with tokens first; [B k, ...], with the units of a sample side by side.  Units
        are tokens where there are as many, else heads, channels or whatever follows the samples.  They and the dims
        between them and the last make the positions.
        Raises ValueError where something is cut and the shape does not tell which dim that is.
        """
        if self.samples == "none":
            if self.heads or self.width or self.part is not None or self.whole is not None:
                raise self._strange(op, shape, "it has no samples, and a rank may have a part of it")
            one = replace(self, samples="first", sample=self.sample.new_zeros(1))
            return one.fitted(op, torch.Size((1, *shape)))
        samples, tokens = (
            self.sample.numel(),
            {x.numel() for x in (self.position, self.part) if x is not None},
        )
        is_second = self.samples == "second" and len(shape) > 1 and shape[1] == samples
        turned = is_second or (len(shape) > 1 and shape[0] != samples == shape[1] and shape[0] in tokens)
        if turned:
            inner = (shape[0], *shape[2:])
        elif shape and shape[0] == samples:
            inner = tuple(shape[1:])
        elif shape and samples and shape[0] % samples == 0:
            inner = (shape[0] // samples, *shape[1:])
        else:
            raise self._strange(op, shape, f"its first dim is not of {samples} samples")
        units, between = inner[0] if len(inner) > 1 else 1, math.prod(inner[1:-1])
        features = inner[-1] if inner else 1
        everywhere = self.position.numel() if self.whole is None else self.whole.numel()
        if self.tokens is not None and everywhere in inner[2:-1]:
            raise self._strange(
                op, shape, f"its counters depend on the padding of {self.tokens} tokens to {everywhere}"
            )
        if self.width and (len(inner) < 2 or between * features != self.width or self.feature % features):
            raise self._strange(op, shape, f"of the features {self.width} are here, and it has others")
        if self.heads is not None:
            first, count = self.heads
            is_other = len(inner) != 3 or units != count or (inner[1] == count and inner[2] != count)
            if turned or is_other:
                raise self._strange(op, shape, f"its dims are not [samples, {count} heads, queries, keys]")
            position, most = torch.arange(first, first + count, device=self.position.device), first + count
        else:
            position = self._positions(op, shape, inner)
            is_token = position is self.position or position is self.part
            most = everywhere if is_token else units
        rows = replace(self, position=position, whole=None, heads=None, width=0, part=None)
        if len(inner) > 2:
            # A rank's part of the features begins at `before` of the dims between.
            before = self.feature // features if self.width else 0
            sizes = sorted((most, before + between))
            if sizes[0] > _FEW or sizes[1] > _MANY:
                raise self._strange(op, shape, f"counters hold {_FEW} by {_MANY} positions at most")
            at = torch.arange(before, before + between, device=position.device)
            feature = 0 if self.width else self.feature
            rows = replace(rows, position=_joined(position[:, None], at).flatten(), feature=feature)
        return rows, (samples, units * between, features), turned

    def _positions(self, op: str, shape: torch.Size, inner: Sequence[int]) -> Tensor:
        units = inner[0] if len(inner) > 1 else 1
        if self.part is not None and len(inner) > 1 and units == self.part.numel():
            return self.part
        if units == self.position.numel():
            return self.position
        if self.whole is None:
            return torch.arange(units, device=self.position.device)
        if units == self.whole.numel():
            return self.whole
        raise self._strange(op, shape, f"{self.position.numel()} of {self.whole.numel()} tokens are here")

    def _strange(self, op: str, shape: torch.Size, why: str) -> ValueError:
        return ValueError(
            f"{op}: x has the shape {tuple(shape)}, and which of its elements these are cannot be told: {why}; "
            f"legal: samples first, then tokens, or p=0 here"
        )

    def words(self) -> tuple[int, int, int]:
        """The key and the step as int32, for a kernel."""
        return signed32(self.key[0]), signed32(self.key[1]), signed32(self.step)

    def check(self, op: str, x: Tensor) -> None:
        """Raises ValueError unless these rows describe x."""
        if x.dim() < 3 or x.shape[:2] != (self.sample.numel(), self.position.numel()):
            raise ValueError(
                f"{op}: x has shape {tuple(x.shape)}, but rows describe {self.sample.numel()} samples of "
                f"{self.position.numel()} positions; legal is [samples, positions, features]"
            )
        for name, index in (("sample", self.sample), ("position", self.position)):
            if index.dtype != torch.int64 or index.dim() != 1:
                raise ValueError(
                    f"{op}: rows.{name} is {index.dtype} with {index.dim()} dimensions; "
                    "legal is a one-dimensional torch.int64"
                )
            if x.device.type != "meta" and index.device != x.device:
                raise ValueError(
                    f"{op}: rows.{name} is on {index.device}, x on {x.device}; legal is one device"
                )


def _joined(outer: Tensor, inner: Tensor) -> Tensor:
    """A number below 2**32 for each pair, which no other pair has. One number of a pair is below _FEW, the other below
    _MANY."""
    return torch.where(outer < _FEW, outer * _MANY + inner, (inner + _FEW) * _MANY + outer)


def threshold(p: float) -> int:
    """A word below this drops its element.  Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p={p}; legal is 0 <= p < 1")
    return min(round(p * 2.0**32), MASK32)


def keep_mask(rows: Rows, features: int, p: float) -> Tensor:
    """Bool [B, T, features]: which elements dropout keeps."""
    samples, positions = rows.sample.numel(), rows.position.numel()
    keep = torch.empty(samples * positions, features, dtype=torch.bool, device=rows.sample.device)
    if keep.numel() == 0:
        return keep.view(samples, positions, features)
    device = keep.device
    sample = rows.sample.repeat_interleave(positions)[:, None]
    position = rows.position.repeat(samples)[:, None]
    first, skip = divmod(rows.feature, 4)
    groups = torch.arange(first, -(-(rows.feature + features) // 4), device=device)[None]
    step = torch.tensor(rows.step & MASK32, device=device)
    limit = threshold(p) - (1 << 31)
    rows_per_block = max(1, _BLOCK_COUNTERS // groups.numel())
    for start in range(0, keep.shape[0], rows_per_block):
        block = slice(start, start + rows_per_block)
        words = _packed_words(rows.key, step, sample[block], position[block], groups)
        torch.ge(words[:, skip : skip + features], limit, out=keep[block])
    return keep.view(samples, positions, features)


# --------------------------------------------------------------------------------------------- initial values


def uniform(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Float64 draws in [0, 1) (multiples of 2**-32) for the global elements start <= e < stop of one
    tensor: 1/2 + word / 2**32, of words with a sign. They are drawn on the host, and copied."""
    return _by_blocks(key, start, stop, device, _uniform_of)


def normal(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Float32 standard normal draws for the global elements start <= e < stop of one tensor.

    The inverse normal distribution of 2**-33 above `uniform`, to 6 digits (Wichura, AS 241, routine PPND7); the
    largest magnitude is 6.34.  The same bits on every machine and for every cut of the range.  They are drawn on the
    host, and copied.
    """
    return _by_blocks(key, start, stop, device, _normal_of)


def _uniform_of(words: Array) -> Array:
    u = words.astype(numpy.float64)
    u *= 2.0**-32
    u += 0.5
    return u


def _normal_of(words: Array) -> Array:
    """Of int32 words. How far they are from the nearer end is a whole number: near 1, float32 has too few p."""

    def small_at(at: Array) -> Array:
        n = words[at]
        n ^= n >> 31
        n ^= 0x7FFFFFFF
        return _middle_of(n)

    return _inverse_normal(_middle_of(words), small_at)


def _middle_of(words: Array) -> Array:
    p = words.astype(numpy.float32)
    p += 0.5
    p *= 2.0**-32
    return p


def inverse_erf(x: Tensor) -> Tensor:
    """Float64: the inverse error function of float64 x, to 6 digits, as if x ended at +-(1 - 2**-32). The same bits on
    every device."""
    q, small = (x * 0.5).float(), (1.0 - x.abs()).mul_(0.5).clamp_(2.0**-33).float()
    if x.is_cpu:
        value = torch.from_numpy(_inverse_normal(q.numpy(), lambda at: small.numpy()[at]))
    else:
        value = _inverse_normal(q, lambda at: small[at])
    return value.double().mul_(_HALF_ROOT2)


def _check_range(start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise ValueError(f"philox: elements {start} to {stop}; legal is 0 <= start <= stop")


def _by_blocks(
    key: Key, start: int, stop: int, device: torch.device | str, transform: Callable[[Array], Array]
) -> Tensor:
    _check_range(start, stop)
    cuts = [*range(start, stop, _BLOCK_ELEMENTS), stop] if stop > start else [start, stop]
    blocks = [torch.from_numpy(transform(_contiguous_words(key, low, high))) for low, high in pairwise(cuts)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return (
        whole if torch.device(device).type == "cpu" else torch.empty_like(whole, device=device).copy_(whole)
    )


def _contiguous_words(key: Key, start: int, stop: int) -> Array:
    """Int32 [stop - start] of NumPy. Little-endian, as every platform torch supports."""
    first, behind = start // 8, -(-stop // 8)
    # NumPy counts before it draws
    generator = numpy.random.Philox(
        key=numpy.array(key, dtype=numpy.uint64), counter=(first - 1) % (1 << 256)
    )
    raw = generator.random_raw(4 * (behind - first)).view(numpy.int32)
    return raw[start - 8 * first : stop - 8 * first]


@dataclass(frozen=True)
class Draws:
    """Words that round what an update writes: of key's generator, for the elements from `first` on, a multiple of 4.

    Element e has word e % 4 of counter (e // 4, step): the same bits wherever a buffer is cut."""

    key: Key
    first: int = 0

    def from_element(self, start: int) -> Draws:
        """Those of a piece that begins `start` elements later."""
        return Draws(self.key, self.first + start)

    def words(self, numel: int, step: int, device: torch.device | str = "cpu") -> Tensor:
        """Int32 [numel], uniform over all 32 bits."""
        counter = torch.arange(self.first // 4, -(-(self.first + numel) // 4), device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        words = _packed_words(
            self.key, (counter & MASK32)[:, None], (counter >> 32)[:, None], zero + (step & MASK32), zero
        )
        return words.view(-1)[:numel]


def round_by(wide: Tensor, noise: Tensor, out: Tensor) -> None:
    """Rounds `wide` float32 [n] to one of the two neighbours in `out` bf16 [n], by `noise` [n] int32 in [0, 2**16). The
    probability of away from zero is the distance to the other. The mean over all noise is `wide`."""
    bits = wide.view(torch.int32).add(noise).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)


_CENTRE = (
    (59.109374720, 159.29113202, 50.434271938, 3.3871327179),
    (67.187563600, 78.757757664, 17.895169469, 1.0),
)
_TAIL = ((0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0))
_LN2 = 0.6931471805599453
_HALF_ROOT2 = 0.7071067811865476
_HALF_ROOT2_BITS = 0x3F3504F3
_ROOT_START = (0.15625, 1.375)
_ATANH = tuple(2.0 / (2 * k + 1) for k in reversed(range(5)))  # |s| <= 0.1716: the next term is below 4e-9

Array = Any
"""NumPy's on the host, whose calls cost a fifth of torch's; a tensor elsewhere. Operators are the same."""


def _horner(x: Array, coefficients: Sequence[float]) -> Array:
    total = x * coefficients[0]
    for c in coefficients[1:-1]:
        total += c
        total *= x
    total += coefficients[-1]
    return total


def _inverse_normal(q: Array, small_at: Callable[[Array], Array]) -> Array:
    """AS 241 for float32 q = p - 1/2 with 2**-33 <= p <= 1 - 2**-33; its third branch begins below exp(-25) and is
    never needed. `small_at` gives min(p, 1 - p) of the elements at an index."""
    r = 0.180625 - q * q
    value = _horner(r, _CENTRE[0])
    value *= q
    value /= _horner(r, _CENTRE[1])
    mask = abs(q) > 0.425
    at = mask.nonzero().view(-1) if isinstance(mask, Tensor) else numpy.flatnonzero(mask)
    r = _square_root(-_natural_log(small_at(at))) - 1.6
    far = _horner(r, _TAIL[0]) / _horner(r, _TAIL[1])
    sign = q[at]
    sign /= abs(sign)
    value[at] = far * sign
    return value


def _square_root(x: Array) -> Array:
    """Heron's method for 2.5 <= x <= 23, to the last bit or two; torch.sqrt rounds as the library behind it does."""
    y = x * _ROOT_START[0] + _ROOT_START[1]
    for _ in range(3):  # 9 % off at first, then 4e-3, 8e-6, 3e-11
        y += x / y
        y *= 0.5
    return y


def _natural_log(x: Array) -> Array:
    """ln of positive normal float32 numbers by atanh, from exactly rounded operations only."""
    kinds = torch if isinstance(x, Tensor) else numpy
    bits = x.view(kinds.int32) - _HALF_ROOT2_BITS
    exponent = kinds.asarray(bits >> 23, dtype=kinds.float32)
    mantissa = ((bits & 0x7FFFFF) + _HALF_ROOT2_BITS).view(kinds.float32)  # [0.707, 1.414)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    value = _horner(s * s, _ATANH)
    value *= s
    value += exponent * _LN2
    return value


# ----------------------------------------------------------------------------------------------------- triton


@jit
def keep_tile(k0, k1, step, threshold, sample, position, feature, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bool [ROWS, COLUMNS]: what dropout keeps of the features from `feature` on, a multiple of 4; sample,
    position [ROWS, 1]."""
    group = feature // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    zero = tl.zeros((ROWS, COLUMNS // 4), tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + step.to(tl.uint32, bitcast=True),
        zero + sample.to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + group.to(tl.uint32),
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, COLUMNS)
    return words >= threshold.to(tl.uint32, bitcast=True)


@jit
def word_tile(k0, k1, step, first, BLOCK: tl.constexpr):
    """Int32 [BLOCK]: `Draws.words` of the elements from `first` on, a multiple of 4."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros((BLOCK // 4,), tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        (counter & 0xFFFFFFFF).to(tl.uint32),
        (counter >> 32).to(tl.uint32),
        zero + step.to(tl.uint32, bitcast=True),
        zero,
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    return (words ^ 0x80000000).to(tl.int32, bitcast=True)


@jit
def _draw_kernel(out, start, stop, k0: tl.int32, k1: tl.int32, NORMAL: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of BLOCK / 8 counters; the same operations as on the CPU, none fused."""
    counter = start // 8 + tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    zero = tl.zeros((BLOCK // 8,), tl.uint64)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + counter.to(tl.uint64),
        zero,
        zero,
        zero,
        zero + k0.to(tl.uint32, bitcast=True).to(tl.uint64),
        zero + k1.to(tl.uint32, bitcast=True).to(tl.uint64),
    )
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK // 2)
    words = tl.join((pairs & 0xFFFFFFFF).to(tl.uint32), (pairs >> 32).to(tl.uint32)).reshape(BLOCK)
    words = words.to(tl.int32, bitcast=True)
    e = start // 8 * 8 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (e >= start) & (e < stop)
    if NORMAL:
        n = words ^ (words >> 31) ^ 0x7FFFFFFF
        value = _inverse_normal_tile(_middle_tile(words), _middle_tile(n))
    else:
        scale = tl.full((BLOCK,), 2.0, tl.float64)
        for _ in tl.static_range(5):  # 2**-32; a literal would be float32 in some versions
            scale = scale * scale
        value = words.to(tl.float64) / scale + 0.5
    tl.store(out + (e - start), value, mask=inside)


@jit
def _middle_tile(words):
    return (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@jit
def _inverse_normal_tile(q, small):
    """`_inverse_normal` in float32."""
    r = 0.180625 - q * q
    over = ((r * 59.109374720 + 159.29113202) * r + 50.434271938) * r + 3.3871327179
    under = ((r * 67.187563600 + 78.757757664) * r + 17.895169469) * r + 1.0
    centre = tl.div_rn(over * q, under)
    bits = small.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (bits >> 23).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    s = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    t = s * s
    t = (((t * 0.2222222222222222 + 0.2857142857142857) * t + 0.4) * t + 0.6666666666666666) * t + 2.0
    log = t * s + exponent * 0.6931471805599453
    root = -log * 0.15625 + 1.375
    for _ in tl.static_range(3):
        root = (root + tl.div_rn(-log, root)) * 0.5
    r = root - 1.6
    over = ((r * 0.17023821103 + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
    far = tl.div_rn(over, (r * 0.12021132975 + 0.73700164250) * r + 1.0)
    far = tl.where(q < 0.0, -far, far)
    return tl.where(tl.abs(q) > 0.425, far, centre)


def _draw_on(device: torch.device, key: Key, start: int, stop: int, as_normal: bool) -> Tensor:
    _check_range(start, stop)
    out = torch.empty(stop - start, dtype=torch.float32 if as_normal else torch.float64, device=device)
    options = tile("normal", 1, architecture(device))
    blocks = -(-(-(-stop // 8) - start // 8) // (options["BLOCK"] // 8))
    launch(
        _draw_kernel, (blocks if stop > start else 0,), out, start, stop, signed32(key[0]), signed32(key[1]),
        NORMAL=as_normal, fuse=False, **options,
    )  # fmt: skip
    return out


def _triton_normal(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    return _draw_on(torch.device(device), key, start, stop, as_normal=True)


def _triton_uniform(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    return _draw_on(torch.device(device), key, start, stop, as_normal=False)


TRITON = {"normal": TritonOp(_triton_normal, {}), "uniform": TritonOp(_triton_uniform, {})}
