"""What every kernel is tried on, in the interpreter and on a GPU: an op, its float64 reference, shapes that
fit no tile.

Note on tolerances, as norm(a - b) / norm(b), with every single element within 10 times that of the largest.
float32: 1e-5; sums of up to some thousand terms in another order err by about 1e-6 at worst, a GPU's exp2 and
reciprocal by a few units in the last place.  bf16 and fp16: inputs are rounded before both sides see them, so
what is left is the rounding of outputs and of values kept between kernels, 2**-9 and 2**-12 each; 1e-2 and
2e-3 leave room for two or three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossal_lite.kernels import FULL, TORCH, Draws, Mask, Ops, Rows, attention, split
from colossal_lite.kernels.philox import round_by

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """call(ops, *inputs) and reference(*inputs) return a tensor or a tuple; inputs are random, of these
    shapes."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    backward: bool = True


def against_torch(name: str, call: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    """The reference is the torch path in float64, which test_kernels.py compares with that of the op's file."""
    return Case(name, call, lambda *inputs: call(TORCH, *inputs), shapes)


def assert_agree(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Raises AssertionError beyond the tolerance."""
    got = got.detach().double().cpu()
    want = want.detach().double().cpu()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert torch.equal(got.isfinite(), want.isfinite()), f"{what}: finite at other places"
    finite = want.isfinite()
    got, want = got[finite], want[finite]
    if want.numel() == 0:
        return
    error = (got - want).abs()
    floor = 1e-30 + tolerance * 1e-3  # a true value of zero may come out as rounding
    relative, worst = float(error.norm() / want.norm()), float(error.max())
    assert error.norm() <= tolerance * want.norm() + floor, f"{what}: off by {relative}"
    assert worst <= 10 * tolerance * float(want.abs().max()) + floor, f"{what}: one element off by {worst}"


def outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]


def check(case: Case, ops: Ops, dtype: torch.dtype, device: str = "cpu") -> None:
    """Forward and every gradient of one case."""
    generator = torch.Generator().manual_seed(len(case.name))
    base = [torch.randn(*shape, generator=generator).to(dtype) for shape in case.shapes]
    inputs = [x.clone().to(device).requires_grad_() for x in base]
    exact = [x.double().requires_grad_() for x in base]
    got, want = outputs(case.call(ops, *inputs)), outputs(case.reference(*exact))
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_agree(f"{case.name}, output {index}", a, b, TOLERANCE[dtype])
    if not case.backward:
        return
    directions = [torch.randn(g.shape, generator=generator).to(g.dtype) for g in got]
    d_got = torch.autograd.grad(got, inputs, [d.to(device) for d in directions], allow_unused=True)
    d_want = torch.autograd.grad(want, exact, [d.double() for d in directions], allow_unused=True)
    for index, (a, b, x) in enumerate(zip(d_got, d_want, base, strict=True)):
        assert a is not None and b is not None and a.dtype == x.dtype
        assert_agree(f"{case.name}, gradient {index}", a, b, TOLERANCE[dtype])


def rows(samples: int = 2, positions: int = 3, feature: int = 0) -> Rows:
    """Permuted, far apart, with a key whose words have their top bit set."""
    return Rows(
        (2**31 + 5, 2**32 - 7), 9,
        torch.arange(samples).flip(0) * 1000, (torch.arange(positions) * 7) % positions, feature,
    )  # fmt: skip


def norm_cases() -> list[Case]:
    found: list[Case] = []
    for samples, width in ((2, 1), (2, 37), (0, 37), (2, 128), (2, 1030)):
        x, w, r = (samples, 3, width), (width,), rows(samples)
        ops: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
            "dropout": (lambda o, x, r=r: o.dropout(x, 0.3, at(r, x)), (x,)),
            "dropout_add": (lambda o, x, y, r=r: o.dropout_add(x, y, 0.3, at(r, x)), (x, x)),
            "rms_norm": (lambda o, x, w: o.rms_norm(x, w, 1e-2), (x, w)),
            "add_rms_norm": (lambda o, x, y, w: o.add_rms_norm(x, y, w, 1e-2), (x, x, w)),
            "drop_add_rms_norm": (lambda o, x, y, w, r=r: o.add_rms_norm(x, y, w, 1e-2, 0.3, at(r, x)), (x, x, w)),
            "stream_rms_norm": (lambda o, x, w: o.add_rms_norm(x, None, w, 1e-2), (x, w)),
            "layer_norm": (lambda o, x, w, b: o.layer_norm(x, w, b, 1e-5), (x, w, w)),
            "stream_layer_norm": (lambda o, x, w, b: o.add_layer_norm(x, None, w, b, 1e-5), (x, w, w)),
            "layer_norm no bias": (lambda o, x, w: o.layer_norm(x, w, None, 1e-5), (x, w)),
            "drop_add_layer_norm": (
                lambda o, x, y, w, b, r=r: o.add_layer_norm(x, y, w, b, 1e-5, 0.3, at(r, x)), (x, x, w, w)
            ),
        }  # fmt: skip
        for name, (call, shapes) in ops.items():
            if width > 1 or "layer" not in name:  # LayerNorm of one feature is zero
                label = f"{name} {width}" if samples else f"{name} of nothing"
                found.append(against_torch(label, call, *shapes))
    return found


def activation_cases() -> list[Case]:
    found: list[Case] = []
    for samples, width in ((3, 1), (3, 37), (0, 8), (3, 130)):
        x = (samples, 5, width)
        found += [
            against_torch(f"gelu {width}", lambda o, x: o.gelu(x), x),
            against_torch(f"gelu bias {width}", lambda o, x, b: o.gelu(x, b), x, x[2:]),
            against_torch(
                f"gelu exact bias {width}", lambda o, x, b: o.gelu(x, b, approximate="none"), x, x[2:]
            ),
            against_torch(f"swiglu {width}", lambda o, g, u: o.swiglu(g, u), x, x),
            against_torch(f"swiglu packed {width}", lambda o, g: o.swiglu(g), (samples, 5, 2 * width)),
            against_torch(
                f"swiglu strided {width}", lambda o, g: o.swiglu(*g.chunk(2, -1)), (samples, 5, 2 * width)
            ),
        ]
    return found


def rotary_cases() -> list[Case]:
    once, by_sample = torch.tensor([3, 0, 700]), torch.tensor([[3, 0, 700], [1, 2, 90]])
    found: list[Case] = []
    for heads, width in ((1, 2), (5, 6), (40, 32)):
        for name, p in (("", once), (" by sample", by_sample)):
            found.append(
                against_torch(
                    f"rotary {heads} x {width}{name}",
                    lambda o, x, p=p: o.rotary(x, p.to(x.device), 5e3),
                    (2, 3, heads, width),
                )  # fmt: skip
            )
    strided = lambda o, x: o.rotary(x[:, :, 1:4], once.to(x.device), 5e3)  # noqa: E731
    return [*found, against_torch("rotary strided", strided, (2, 3, 6, 8))]


def loss_cases() -> list[Case]:
    found: list[Case] = []
    for rows_, columns in ((5, 11), (3, 1030), (1, 1)):
        labels = (torch.arange(rows_) * 7) % columns
        labels[-2:-1] = -100
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-2)):

            def call(
                o: Ops, z: Tensor, y: Tensor = labels, s: float = smoothing, c: float = z_loss
            ) -> Tensor:
                total: Tensor = o.cross_entropy(3 * z, y.to(z.device), smoothing=s, z_loss=c)[0]
                return total

            def cut(
                o: Ops, z: Tensor, y: Tensor = labels, s: float = smoothing, c: float = z_loss
            ) -> list[Tensor]:
                return by_pieces(o, 3 * z, y.to(z.device), s, c)

            def linear(
                o: Ops, x: Tensor, w: Tensor, y: Tensor = labels, s: float = smoothing, c: float = z_loss
            ) -> Tensor:
                total: Tensor = o.linear_cross_entropy(x, w, y.to(x.device), -100, s, c, rows=2)[0]
                return total

            name = f"{rows_} x {columns}, smoothing {smoothing}, z-loss {z_loss}"
            found += [
                against_torch(f"cross_entropy {name}", call, (rows_, columns)),
                replace(against_torch(f"cut cross_entropy {name}", cut, (rows_, columns)), backward=False),
                against_torch(f"linear_cross_entropy {name}", linear, (rows_, 16), (columns, 16)),
            ]
    return found


def by_pieces(ops: Ops, z: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> list[Tensor]:
    """Loss, lse and gradient of a vocabulary in three pieces; the last holds no true column."""
    vocabulary = z.shape[1]
    z = z.detach()
    edges = [0, -(-vocabulary // 2), vocabulary + 1, vocabulary + 3]
    padded = torch.nn.functional.pad(z, (0, 3), value=1e4)
    pairs = list(zip(edges, edges[1:], strict=False))
    stats = [ops.cross_entropy_partial(padded[:, a:b], labels, a, vocabulary) for a, b in pairs]
    total, _, lse = ops.cross_entropy_combine(torch.stack(stats), labels, vocabulary, -100, smoothing, z_loss)
    one = torch.ones((), device=z.device, dtype=lse.dtype)
    pieces = [
        ops.cross_entropy_gradient(one, padded[:, a:b], labels, lse, a, vocabulary, -100, smoothing, z_loss)
        for a, b in pairs
    ]
    return [total, lse, torch.cat(pieces, dim=1)]


def optimizer_steps(decay: float = 0.1) -> dict[str, Callable[..., Any]]:
    """Every rule of a step, called with ops, weights, gradient, two states, and how gradient and weights are given."""
    adamw = dict(step=3, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=decay)
    lion = dict(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay)
    sgd = dict(lr=0.1, weight_decay=decay)
    return {
        "adamw": lambda o, p, g, m, v, **k: o.adamw_(p, g, m, v.abs_(), **adamw, **k),
        "lion": lambda o, p, g, m, v, **k: o.lion_(p, g, m, **lion, **k),
        "sgd": lambda o, p, g, m, v, **k: o.sgd_(p, g, None, **sgd, **k),
        "momentum": lambda o, p, g, m, v, **k: o.sgd_(p, g, m, momentum=0.9, **sgd, **k),
        "momentum first": lambda o, p, g, m, v, **k: o.sgd_(p, g, m, momentum=0.9, first=True, **sgd, **k),
        "nesterov": lambda o, p, g, m, v, **k: o.sgd_(p, g, m, momentum=0.9, nesterov=True, **sgd, **k),
        "nesterov first": lambda o, p, g, m, v, **k: o.sgd_(
            p, g, m, momentum=0.9, nesterov=True, first=True, **sgd, **k
        ),
    }  # fmt: skip


def masters_with_ties(numel: int) -> Tensor:
    """Float32 weights of which every third lies between two bf16 numbers or next to there, in all four ways."""
    generator = torch.Generator().manual_seed(numel)
    bits = torch.randn(numel, generator=generator).view(torch.int32)
    ends = torch.tensor([0x8000, 0x7FFF, 0x8001, 0x18000, 0x17FFF, 0x18001], dtype=torch.int32)
    bits[::3] = (bits[::3] & ~0x1FFFF) | ends[torch.arange(len(bits[::3])) % len(ends)]
    return bits.view(torch.float32)


def check_split(ops: Ops, name: str, numel: int, *, still: bool = False, device: str = "cpu") -> None:
    """A step on split masters leaves the bits of one on float32 masters with a bf16 copy. `still`: nothing moves the
    weights, so that their ties come out as they went in."""
    step = optimizer_steps(0.0 if still else 0.1)[name]
    p = masters_with_ties(numel).to(device)
    generator = torch.Generator().manual_seed(1)
    g, m, v = (torch.randn(numel, generator=generator).to(device) * (not still) for _ in range(3))
    high, ties = p.bfloat16(), torch.zeros(split.tie_bytes(numel), dtype=torch.uint8, device=device)
    residual, low = torch.zeros(numel, dtype=torch.int16, device=device), torch.zeros_like(high)
    split.split_(p, high, residual, ties)
    split_states = [t.clone() for t in (m, v)]
    step(ops, high, g.bfloat16(), *split_states, grad_scale=0.37, residual=residual, ties=ties)
    step(ops, p, g.bfloat16(), m, v, grad_scale=0.37, low=low)
    assert torch.equal(high, low), f"{name} {numel}: the model sees other weights"
    assert torch.equal(split.join(high, residual, ties), p), f"{name} {numel}: other masters"
    assert torch.equal(split_states[0], m) and torch.equal(split_states[1], v), (
        f"{name} {numel}: other states"
    )


def check_narrow(ops: Ops, numel: int, *, first: int = 0, split_: bool = False, device: str = "cpu") -> None:
    """A step on bf16 moments is one on float32 copies of them, each rounded to one of its two neighbours, by the words
    that the torch path draws: other only where a sum's last bit is."""
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(numel, generator=generator).to(device) for _ in range(4))
    m, v, draws = m.bfloat16(), v.abs().bfloat16(), Draws((7, 1 << 31), first)
    wide, step = [m.float(), v.float()], optimizer_steps()["adamw"]
    weights, more = p.clone(), dict[str, Any]()
    if split_:
        weights, ties = p.bfloat16(), torch.zeros(split.tie_bytes(numel), dtype=torch.uint8, device=device)
        more = dict(residual=torch.zeros(numel, dtype=torch.int16, device=device), ties=ties)
        split.split_(p, weights, **more)
    step(ops, weights, g.clone(), m, v, grad_scale=0.37, draws=draws, **more)
    step(ops, p, g.clone(), *wide, grad_scale=0.37)
    assert torch.equal(split.join(weights, **more) if split_ else weights, p), "other weights"
    words = draws.words(numel, 3, device)
    for narrow, truth, noise in ((m, wide[0], words & 0xFFFF), (v, wide[1], (words >> 16) & 0xFFFF)):
        expected = torch.empty_like(narrow)
        round_by(truth, noise, expected)
        assert torch.equal(narrow, expected), f"{numel} from {first}: other moments"


def step_cases() -> list[Case]:
    """Optimizer steps, with a gradient and a copy of the weights in their own dtype."""
    found: list[Case] = []
    for name, step in optimizer_steps().items():
        for numel in (1, 1024, 2500):
            for as_tensor in (False, True):

                def call(
                    o: Ops, p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Callable[..., Any] = step,
                    as_tensor: bool = as_tensor,
                ) -> list[Tensor]:  # fmt: skip
                    exact = p.dtype == torch.float64
                    master = [
                        t.detach().clone().to(torch.float64 if exact else torch.float32) for t in (p, m, v)
                    ]
                    low = torch.zeros_like(p, requires_grad=False)
                    scale = torch.tensor(0.37, device=p.device) if as_tensor else 0.37
                    step(o, master[0], g.detach().clone(), *master[1:], grad_scale=scale, low=low)
                    return [*master, low]

                kind = "tensor" if as_tensor else "number"
                found.append(
                    Case(
                        f"{name} {numel} by a {kind}",
                        call,
                        partial(call, TORCH),
                        ((numel,),) * 4,
                        backward=False,
                    )
                )
    return found


ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # T, S, H, G, K
    "one": ((1, 1, 1, 1, 8), {}),
    "causal": ((37, 37, 2, 1, 16), {}),
    "causal over tiles": ((130, 130, 1, 1, 64), {}),
    "grouped": ((33, 33, 6, 2, 8), dict(scale=0.5)),
    "full": ((50, 70, 2, 2, 24), dict(mask=FULL)),
    "ring step, all seen": ((20, 90, 2, 1, 32), dict(offsets=(200, 0))),
    "ring step, nothing seen": ((30, 60, 2, 2, 16), dict(offsets=(0, 90))),
    "ring step, partly": ((40, 60, 2, 2, 16), dict(offsets=(0, 30))),
    "edge of a whole tile": ((4, 64, 1, 1, 16), dict(offsets=(30, 0))),
    "edge of the last tile": ((64, 70, 1, 1, 16), dict(offsets=(1, 0))),
    "generation": ((3, 200, 2, 1, 24), dict(offsets=(197, 0))),
    "window": ((140, 140, 1, 1, 16), dict(window=33)),
    "window of one": ((40, 40, 1, 1, 16), dict(window=1)),
    "window, full": ((100, 140, 1, 1, 16), dict(mask=FULL, window=33)),
    "documents": ((150, 150, 1, 1, 16), dict(documents=True)),
    "documents, full, window": ((60, 90, 2, 1, 16), dict(documents=True, mask=FULL, window=40)),
    "wide heads": ((18, 18, 1, 1, 100), {}),
    "empty": ((0, 0, 2, 1, 16), {}),
}


def attention_cases() -> list[Case]:
    found: list[Case] = []
    for name, ((t, s, h, g, k), options) in ATTENTION.items():
        options = dict(options)
        mask = options.pop("mask", Mask())
        if options.pop("documents", False):
            generator = torch.Generator().manual_seed(t)
            pair = tuple(torch.randint(0, 4, (2, n), generator=generator).sort(dim=1).values for n in (t, s))
            mask = Mask(mask.causal, (pair[0], pair[1]))

        def call(
            o: Ops | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: Mask = mask,
            options: dict[str, Any] = options,
        ) -> tuple[Tensor, Tensor]:
            pair = mask.document_pair()
            if pair is not None:
                mask = Mask(mask.causal, (pair[0].to(q.device), pair[1].to(q.device)))
            function = attention.reference if o is None else o.attend_lse
            result: tuple[Tensor, Tensor] = function(q, k, v, mask=mask, **options)
            return result

        def finite(
            o: Ops | None, q: Tensor, k: Tensor, v: Tensor, call: Callable[..., Any] = call
        ) -> tuple[Tensor, Tensor]:
            """Without the -inf of queries that see nothing, whose gradient is none."""
            out, lse = call(o, q, k, v)
            return out, torch.where(lse.isinf(), 0.0, lse)

        shapes = ((2, t, h, k), (2, s, g, k), (2, s, g, k))
        found.append(Case(f"attend {name}", finite, partial(finite, None), shapes))
        found.append(Case(f"attend {name}, lse", call, partial(call, None), shapes, backward=False))
    prefix = lambda o, q, k, v, a, b: o.attend(q, k, v, kv_prefix=(a, b))  # noqa: E731
    shapes = ((2, 20, 2, 16), (2, 20, 1, 16), (2, 20, 1, 16), (2, 3, 1, 16), (2, 3, 1, 16))
    return [*found, against_torch("attend after a prefix", prefix, *shapes)]


def flat_cases() -> list[Case]:
    def sums(o: Ops, *xs: Tensor) -> Tensor:
        result: Tensor = o.square_sum([x.detach().view(-1) for x in xs])
        return result

    def not_finite(o: Ops, x: Tensor) -> Tensor:
        bad = x.detach().clone()
        bad[-1] = math.nan
        total: Tensor = o.square_sum([x.detach(), bad])
        return (~total.isfinite()).double()

    def embedding(o: Ops, grad: Tensor, dy: Tensor) -> Tensor:
        ids = torch.tensor([[3, 9, 3, 3], [0, 11, 9, 4]], device=dy.device)  # 11 - 1 is beyond the table
        total = grad.detach().clone()
        o.embedding_grad_(total, dy.detach(), ids, 1)
        return total

    shapes = ((3, 37), (9000,), (1,))
    return [
        Case("square_sum", sums, partial(sums, TORCH), shapes, backward=False),
        Case("square_sum of NaN", not_finite, partial(not_finite, TORCH), ((70,),), backward=False),
        Case(
            "embedding_grad_", embedding, partial(embedding, TORCH), ((10, 600), (2, 4, 600)), backward=False
        ),
    ]


def cases() -> list[Case]:
    """All of them; small enough for the interpreter."""
    groups = (
        norm_cases(),
        activation_cases(),
        rotary_cases(),
        attention_cases(),
        loss_cases(),
        step_cases(),
        flat_cases(),
    )
    return [case for group in groups for case in group]


def at(r: Rows, x: Tensor) -> Rows:
    """The rows on x's device (the float64 reference stays on the CPU)."""
    return Rows(r.key, r.step, r.sample.to(x.device), r.position.to(x.device), r.feature)
