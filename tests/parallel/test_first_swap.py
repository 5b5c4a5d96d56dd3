"""A swap that random words cannot prove is proven by the first batch, or refused there, before anything is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.parallel.first_swap import FirstSwap
from colossal_lite.parallel.parallelize import parallelize
from tests.parallel.test_swap_proofs import MODES, mesh_of
from tests.shared.pool import RankEnv, WorldError, run_world

INPUTS, WIDTH, WORDS, TOKENS, SAMPLES = 8, 16, 40, 6, 8
CUT: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-1) / 8,
}
"""What sees the features of a rank alone, between two linears."""
WAYS = CUT | {"gelu": F.gelu}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.b(WAYS[self.way](self.a(x)))
        return y


class Vectors(nn.Module):
    """Of one or two arguments that are no words. `outputs`: of the head."""

    def __init__(self, way: str, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(INPUTS, WIDTH), nn.ModuleList(Block(way) for _ in range(3))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.first(x))

    def of(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class TwoVectors(Vectors):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        return self.of(self.first(x) * z)


class Scaled(Vectors):
    """Of words and a number for each sample, so that it has what a grid cuts and runs on no words alone."""

    def __init__(self, way: str, outputs: int = WORDS) -> None:
        super().__init__(way, outputs)
        self.first = nn.Embedding(WORDS, WIDTH)  # type: ignore[assignment]

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        return self.of(self.first(x) * z[:, None, None])


class OfSix(Vectors):
    """Of sequences of one length, as a position of each is counted."""

    def __init__(self, way: str, outputs: int = WORDS) -> None:
        super().__init__(way, outputs)
        self.first = nn.Embedding(WORDS, WIDTH)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != TOKENS:
            raise ValueError(f"{x.shape[1]} tokens")
        return self.of(self.first(x))


KINDS: dict[str, type[Vectors]] = {"one": Vectors, "two": TwoVectors, "words": Scaled, "six": OfSix}


def plan_of(kind: str) -> dict[str, str]:
    first = "embedding" if kind in ("words", "six") else "replicate"
    return {
        "first": first,
        "blocks.*": "block",
        "blocks.*.a": "colwise",
        "blocks.*.b": "rowwise",
        "head": "lm_head",
    }


def arguments(kind: str, samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(seed)
    if kind in ("words", "six"):
        ids = torch.randint(WORDS, (samples, TOKENS), generator=drawn)
        return (ids, torch.rand(samples, generator=drawn, dtype=torch.float64))[: 1 + (kind == "words")]
    x = torch.randn(samples, INPUTS, generator=drawn, dtype=torch.float64)
    return (x, torch.rand(samples, WIDTH, generator=drawn, dtype=torch.float64))[: 1 + (kind == "two")]


def model_of(kind: str, way: str, **options: int) -> Vectors:
    torch.manual_seed(0)
    return KINDS[kind](way, **options).double()


def swapped(kind: str, way: str, mode: str, **options: int) -> FirstSwap:
    """What looks at the first batch after a swap that is warned of by nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = MODES[mode].get("sequence_parallel", "auto")
        made = parallelize(
            model_of(kind, way, **options), mesh_of(MODES[mode]), plan_of(kind), sequence_parallel=whole
        )
    assert made.first_swap is not None
    return made.first_swap


# ---- in one process ----


@pytest.mark.parametrize("way", CUT)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("one", "1d"), ("one", "1d on 4"), ("two", "1d"), ("words", "1d"), ("words", "2d"), ("six", "3d")],
)
def test_what_sees_a_ranks_features_is_refused_by_the_first_batch(kind: str, mode: str, way: str) -> None:
    with pytest.raises(
        ValueError, match=f"first batch, on . emulated ranks of tensor mode {mode[:2]} is not that of"
    ):
        swapped(kind, way, mode).check(arguments(kind), {}, SAMPLES)


EXACT = [
    ("one", "1d"), ("one", "1d, whole"), ("two", "1d on 4"), ("words", "1d"), ("words", "2d"), ("words", "2.5d"),
    ("six", "1d"), ("six", "2d"), ("six", "3d"),
]  # fmt: skip


@pytest.mark.parametrize("samples", [1, 5, SAMPLES])
@pytest.mark.parametrize(("kind", "mode"), EXACT)
def test_what_acts_on_each_feature_is_proven_with_few_samples_and_many(
    kind: str, mode: str, samples: int
) -> None:
    look = swapped(kind, "gelu", mode)
    assert look.waits_for(samples) == (samples > 1 or mode.startswith("1d")), "a grid cannot cut one sample"
    if look.waits_for(samples):
        look.check(arguments(kind, samples), {}, samples)


def test_an_argument_that_meets_samples_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="first batch, on 8 emulated ranks of tensor mode 3d is not that of"):
        swapped("words", "gelu", "3d").check(arguments("words"), {}, SAMPLES)


def test_arguments_by_name_are_looked_at_too() -> None:
    x, z = arguments("two")
    swapped("two", "gelu", "1d").check((), dict(x=x, z=z), SAMPLES)
    with pytest.raises(ValueError, match="first batch"):
        swapped("two", "softmax", "1d").check((), dict(x=x, z=z), SAMPLES)


def test_one_number_a_sample_shows_a_difference_as_many_do() -> None:
    swapped("one", "gelu", "1d", outputs=1).check(arguments("one"), {}, SAMPLES)
    with pytest.raises(ValueError, match="first batch"):
        swapped("one", "softmax", "1d", outputs=1).check(arguments("one"), {}, SAMPLES)


def test_words_beyond_the_tables_of_a_copy_are_looked_at_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sum(p.numel() for p in model_of("words", "gelu").parameters())
    monkeypatch.setattr("colossal_lite.parallel.first_swap.MOST_QUICK_BYTES", 8 * numbers - 1)
    look = swapped("words", "gelu", "1d")
    assert look.rows is not None and look.rows < WORDS
    ids, scales = arguments("words")
    ids[0] = WORDS - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look.check((ids, scales), {}, SAMPLES)


class NotFirst(Vectors):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.first(x), super().forward(x)


def test_outputs_that_the_head_does_not_give_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "one", NotFirst)
    with pytest.raises(
        ValueError, match=r"\(2, 16\) stands where logits stand.*Legal: logits alone, first in a tuple"
    ):
        swapped("one", "gelu", "1d").check(arguments("one"), {}, SAMPLES)


def test_a_loss_that_is_not_finite_shows_nothing() -> None:
    (x,) = arguments("one")
    with pytest.warns(UserWarning, match="Vectors is not proven on a small copy .its loss is nan"):
        swapped("one", "gelu", "1d").check((x * float("nan"),), {}, SAMPLES)


# ---- on real ranks ----


def trained(env: RankEnv, kind: str, way: str, tensor: Mapping[str, Any], begins: str) -> dict[str, Tensor]:
    """Weights after two steps. `begins`: the kind of call that comes first."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60)
    with env.launch(config | dict(parallel=dict(tensor=dict(tensor)))) as context, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = cl.initialize(model_of(kind, way), context=context, plan=plan_of(kind), criterion=squares)
        if begins != "training":
            evaluated(engine, kind)
        for step in range(0 if begins == "evaluation alone" else 2):
            given = arguments(kind, seed=step)
            if kind == "one":
                engine.train_step((given[0], NOTHING))
            else:
                engine.backward(engine(*given).square().mean())
                engine.step()
        return engine.full_state_dict()


NOTHING = torch.zeros(SAMPLES, 4, dtype=torch.float64)


def evaluated(engine: cl.Engine, kind: str) -> None:
    given = arguments(kind)
    if kind == "one":
        engine.eval_step((given[0], NOTHING))
        return
    with torch.inference_mode():
        engine(*given)


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def plainly(kind: str) -> dict[str, Tensor]:
    model = model_of(kind, "gelu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(*arguments(kind, seed=step)).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


REAL = [
    ("one", "1d", "training"),
    ("two", "1d", "evaluation"),
    ("words", "2d", "training"),
    ("one", "1d", "evaluation"),
]


@pytest.mark.parametrize(("kind", "mode", "begins"), REAL)
def test_what_the_first_batch_proves_trains_as_in_one_process(kind: str, mode: str, begins: str) -> None:
    expected = plainly(kind)
    for weights in run_world(trained, MODES[mode]["size"], kind, "gelu", MODES[mode], begins):
        for name, value in expected.items():
            assert float((weights[name] - value).norm()) < 1e-12 * float(value.norm()), name


@pytest.mark.parametrize(
    ("kind", "mode", "begins"), [*REAL, ("one", "1d", "evaluation alone"), ("two", "1d", "evaluation alone")]
)
def test_all_ranks_refuse_before_the_first_forward(kind: str, mode: str, begins: str) -> None:
    size = MODES[mode]["size"]
    with pytest.raises(WorldError, match="run on samples of the first batch") as error:
        run_world(trained, size, kind, "softmax", MODES[mode], begins)
    assert error.value.ranks("raised") == list(range(size))
