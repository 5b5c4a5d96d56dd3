"""Draws counter-based random numbers: Philox with ten rounds (Salmon et al., SC 2011, "Parallel random numbers: as easy
as 1, 2, 3").

Note: a draw is a pure function of a key and a counter, so no stream has a state. A rank computes the bits of any
slice of a weight or of a dropout mask alone.  Two counter maps are used.
Initial values are of Philox-4x64.  Elements 8 c to 8 c + 7 of a tensor take the eight halves of the words of counter c,
the lower half of each word first.  NumPy has this generator in C, for counters that follow each other.
Dropout is of Philox-4x32.  Feature f of one token takes word f % 4 of counter (step, sample, position, f // 4).  Sample
and position are the token's place in the *global* batch.  So the mask is the same on every mesh and for every number of
micro-batches.  32-bit words are held in int64 tensors (torch multiplies no uint32), products wrap modulo
2**64.  Rounds one and two see only rows or only columns of a mask and cost next to nothing.
All runs in blocks that stay in the second-level cache.
`normal` uses +, -, * and / alone.  A library's log, cos or even sqrt differs in the last bit: between the vector body
and the tail of a loop, and between machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from .launch import TritonOp, architecture, jit, launch, signed32, tile, tl

Key = tuple[int, int]
"""Two 32-bit words."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
ROUNDS = 10
_BLOCK_COUNTERS = 1 << 15  # 256 KiB a buffer: measured best between call overhead and cache misses
_BLOCK_ELEMENTS = 1 << 15
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
    is a part of them.  width: features of the local part.  heads: first and number of the local heads.
    tokens: of the whole sequence; those behind are padding.  None: there is none.
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

    def fitted(self, op: str, shape: torch.Size) -> tuple[Rows, tuple[int, int, int], bool]:
        """The rows of an x of any shape, its shape as [samples, units, features], and whether units come first.

        Legal: [B, ...]; [T, B, ...], with tokens first; [B k, ...], with the units of a sample side by side.  Units
        are tokens where there are as many, else heads, channels or whatever follows the samples.
        Raises ValueError where something is cut and the shape does not tell which dim that is.
        """
        samples, tokens = self.sample.numel(), self.position.numel()
        turned = len(shape) > 1 and shape[0] != samples and tuple(shape[:2]) == (tokens, samples)
        if turned:
            inner = (shape[0], *shape[2:])
        elif shape and shape[0] == samples:
            inner = tuple(shape[1:])
        elif shape and samples and shape[0] % samples == 0:
            inner = (shape[0] // samples, *shape[1:])
        else:
            raise self._strange(op, shape, f"its first dim is not of {samples} samples")
        units = inner[0] if len(inner) > 1 else 1
        features = math.prod(inner[1:]) if len(inner) > 1 else math.prod(inner)
        padded = self.position.numel() if self.whole is None else self.whole.numel()
        if self.tokens is not None and padded in inner[2:]:
            raise self._strange(
                op, shape, f"its counters depend on the padding of {self.tokens} tokens to {padded}"
            )
        if self.heads is not None:
            first, count = self.heads
            is_other = len(inner) != 3 or units != count or (inner[1] == count and inner[2] != count)
            if turned or is_other:
                raise self._strange(op, shape, f"its dims are not [samples, {count} heads, queries, keys]")
            at = torch.arange(first, first + count, device=self.position.device)
            return replace(self, position=at, whole=None, heads=None), (samples, units, features), False
        if self.width and (len(inner) < 2 or features != self.width):
            raise self._strange(op, shape, f"of the features {self.width} are here, and it has others")
        position = self._positions(op, shape, units)
        return replace(self, position=position, whole=None, width=0), (samples, units, features), turned

    def _positions(self, op: str, shape: torch.Size, units: int) -> Tensor:
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
    return _by_blocks(key, start, stop, device, lambda word: word.mul_(2.0**-32).add_(0.5))


def normal(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Float64 standard normal draws for the global elements start <= e < stop of one tensor.

    The inverse normal distribution of 2**-33 above `uniform`, to 16 digits (Wichura, AS 241, routine PPND16);
    the largest magnitude is 6.3.  The same bits on every machine and for every cut of the range.
    """
    return _by_blocks(
        key, start, stop, device, lambda word: _inverse_normal(word.add_(0.5).mul_(2.0**-32).add_(0.5))
    )


def inverse_erf(x: Tensor) -> Tensor:
    """The inverse error function of float64 x, as if x ended at +-(1 - 2**-32): the same bits on every device."""
    p = ((x + 1.0) * 0.5).clamp_(2.0**-33, 1.0 - 2.0**-33)
    return _inverse_normal(p).mul_(_HALF_ROOT2)


def _check_range(start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise ValueError(f"philox: elements {start} to {stop}; legal is 0 <= start <= stop")


def _by_blocks(
    key: Key, start: int, stop: int, device: torch.device | str, transform: Callable[[Tensor], Tensor]
) -> Tensor:
    _check_range(start, stop)
    out = torch.empty(stop - start, dtype=torch.float64, device=device)
    for low in range(start, stop, _BLOCK_ELEMENTS):
        high = min(low + _BLOCK_ELEMENTS, stop)
        out[low - start : high - start] = transform(_contiguous_words(key, low, high).double())
    return out


def _contiguous_words(key: Key, start: int, stop: int) -> Tensor:
    """Int32 [stop - start] on the host. Little-endian, as every platform torch supports."""
    first, behind = start // 8, -(-stop // 8)
    # NumPy counts before it draws
    generator = numpy.random.Philox(
        key=numpy.array(key, dtype=numpy.uint64), counter=(first - 1) % (1 << 256)
    )
    raw = generator.random_raw(4 * (behind - first)).view(numpy.int32)
    return torch.from_numpy(raw)[start - 8 * first : stop - 8 * first]


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
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
     4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
     2.05319162663775882187e0, 1.0),
)  # fmt: skip
_LN2 = 0.6931471805599453
_ROOT2 = 1.4142135623730951
_HALF_ROOT2 = 0.7071067811865476
_ROOT_START = (0.15625, 1.375)
_ATANH = tuple(1.0 / (2 * k + 1) for k in reversed(range(12)))  # |s| <= 0.1716: the next term is below 1e-19


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total.mul_(x).add_(c)
    return total


def _inverse_normal(p: Tensor) -> Tensor:
    """AS 241 for 2**-33 <= p <= 1 - 2**-33; its third branch begins below exp(-25) and is never needed."""
    q = p - 0.5
    r = (q * q).neg_().add_(0.180625)
    value = _horner(r, _CENTRE[0]).mul_(q).div_(_horner(r, _CENTRE[1]))
    tail = (q.abs() > 0.425).nonzero().view(-1)
    q, p = q[tail], p[tail]
    r = _square_root(_natural_log(torch.minimum(p, 1.0 - p)).neg_()).sub_(1.6)
    far = _horner(r, _TAIL[0]).div_(_horner(r, _TAIL[1]))
    value[tail] = torch.where(q < 0, -far, far)
    return value


def _square_root(x: Tensor) -> Tensor:
    """Heron's method for 2.5 <= x <= 23, to the last bit or two; torch.sqrt rounds as the library behind it does."""
    y = x * _ROOT_START[0] + _ROOT_START[1]
    for _ in range(4):  # 9 % off at first, then 4e-3, 8e-6, 3e-11, 5e-22
        y = (y + x / y).mul_(0.5)
    return y


def _natural_log(x: Tensor) -> Tensor:
    """ln of positive normal doubles by atanh, from exactly rounded operations only."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)  # [1, 2)
    high = mantissa > _ROOT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = (exponent + high).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return _horner(s * s, _ATANH).mul_(s).mul_(2.0).add_(exponent * _LN2)


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
def _draw_kernel(
    out, start, stop, k0: tl.int32, k1: tl.int32, table, NORMAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Elements of BLOCK / 8 counters; the same operations as on the CPU, in float64 and none fused."""
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
    words = words.to(tl.int32, bitcast=True).to(tl.float64)
    scale = tl.full((BLOCK,), 2.0, tl.float64)
    for _ in tl.static_range(5):  # 2**-32; a literal would be float32 in some versions
        scale = scale * scale
    e = start // 8 * 8 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (e >= start) & (e < stop)
    if NORMAL:
        value = _inverse_normal_tile((words + 0.5) / scale + 0.5, table, BLOCK)
    else:
        value = words / scale + 0.5
    tl.store(out + (e - start), value, mask=inside)


@jit
def _polynomial(x, table, FIRST: tl.constexpr, COUNT: tl.constexpr):
    total = tl.load(table + FIRST) + x * 0.0
    for i in tl.static_range(1, COUNT):
        total = total * x + tl.load(table + FIRST + i)
    return total


@jit
def _inverse_normal_tile(p, table, BLOCK: tl.constexpr):
    """`_inverse_normal`; the coefficients come from a float64 table, in its order."""
    q = p - 0.5
    r = tl.load(table + 45) - q * q
    centre = _polynomial(r, table, 0, 8) * q / _polynomial(r, table, 8, 8)
    small = tl.minimum(p, 1.0 - p)
    bits = small.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    high = mantissa > tl.load(table + 46)
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent = (exponent + high.to(tl.int64)).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    log = _polynomial(s * s, table, 32, 12) * s * 2.0 + exponent * tl.load(table + 44)
    root = -log * 0.15625 + 1.375
    for _ in tl.static_range(4):
        root = (root + -log / root) * 0.5
    r = root - tl.load(table + 47)
    far = _polynomial(r, table, 16, 8) / _polynomial(r, table, 24, 8)
    far = tl.where(q < 0.0, -far, far)
    return tl.where(tl.abs(q) > tl.load(table + 48), far, centre)


def _coefficients(device: torch.device) -> Tensor:
    """Every number that float32 does not hold, for the kernel."""
    numbers = (*_CENTRE[0], *_CENTRE[1], *_TAIL[0], *_TAIL[1], *_ATANH, _LN2, 0.180625, _ROOT2, 1.6, 0.425)
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _draw_on(device: torch.device, key: Key, start: int, stop: int, as_normal: bool) -> Tensor:
    _check_range(start, stop)
    out = torch.empty(stop - start, dtype=torch.float64, device=device)
    options = tile("normal", 1, architecture(device))
    blocks = -(-(-(-stop // 8) - start // 8) // (options["BLOCK"] // 8))
    launch(
        _draw_kernel, (blocks if stop > start else 0,), out, start, stop, signed32(key[0]), signed32(key[1]),
        _coefficients(device), NORMAL=as_normal, fuse=False, **options,
    )  # fmt: skip
    return out


def _triton_normal(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    return _draw_on(torch.device(device), key, start, stop, as_normal=True)


def _triton_uniform(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    return _draw_on(torch.device(device), key, start, stop, as_normal=False)


TRITON = {"normal": TritonOp(_triton_normal, {}), "uniform": TritonOp(_triton_uniform, {})}
