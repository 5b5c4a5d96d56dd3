"""Initialisers recorded on meta are replayed element by element; keys and dropout streams are what names say."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.init import orthogonal_

from colossal_lite.numerics.random import (
    DropoutStreams,
    InitialiserError,
    Recipe,
    build_on_meta,
    key,
    replay,
)

ROOT = Path(__file__).parents[2]


class Everything(nn.Module):
    """Parameters made in every way that can be replayed, a tied one, and a real buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(5))
        self.scaled = nn.Parameter(torch.randn(3, 4) * 0.02)
        self.full = nn.Parameter(torch.full((2,), 3.5))
        self.truncated = nn.Parameter(torch.empty(40, 30))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.6)
        self.data_style = nn.Parameter(torch.empty(8, 8))
        self.data_style.data.normal_(mean=1.0, std=0.1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))


def test_parameters_are_on_meta_buffers_are_real_and_ties_are_kept() -> None:
    module, recipes = build_on_meta(Everything)
    assert all(p.is_meta for p in module.parameters())
    assert module.head.weight is module.embedding.weight and "head.weight" not in recipes
    assert torch.equal(module.table, torch.arange(4.0))
    assert not module.frozen.requires_grad and module.gain.requires_grad
    assert set(recipes) == {name for name, _ in module.named_parameters()}


def test_replayed_values_have_the_distribution_of_the_initialiser() -> None:
    _, recipes = build_on_meta(Everything)

    def values(name: str) -> torch.Tensor:
        return replay(recipes[name], 1, name, 0, recipes[name].numel)

    bound = 1 / math.sqrt(6)
    assert values("linear.weight").abs().max() <= bound and values("linear.weight").std() > bound / 4
    table = values("embedding.weight").view(7, 6)
    assert (table[2] == 0).all() and (table[3] != 0).all()
    assert (values("norm.weight") == 1).all() and (values("norm.bias") == 0).all()
    assert (values("gain") == 1).all() and (values("full") == 3.5).all()
    assert 0 < values("scaled").abs().max() < 0.1
    truncated = values("truncated")
    assert torch.nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init", (
        "torch's own is back in its place"
    )
    # std of N(0, 1) cut at +-1.2 is 0.6055; 1,200 samples
    assert truncated.abs().max() <= 0.6 and abs(truncated.std() - 0.5 * 0.6055) < 0.03
    style = values("data_style")
    assert abs(style.mean() - 1.0) < 0.06 and abs(style.std() - 0.1) < 0.03


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.booleans())
def test_bits_of_an_element_do_not_depend_on_the_range_that_was_asked_for(
    a: int, b: int, truncated: bool
) -> None:
    start, stop = sorted((a, b))
    recipe = Recipe(20_000).then("uniform", (-1.0, 1.0), 100, 15_000)
    if truncated:
        recipe = recipe.then("erfinv", ()).then("mul", (0.3,)).then("clamp", (-0.5, 0.5))
    recipe = recipe.then("add", (0.25,)).then("normal", (0.0, 1.0), 3_000, 9_000)
    whole = replay(recipe, 3, "w", 0, 20_000)
    assert torch.equal(replay(recipe, 3, "w", start, stop), whole[start:stop])


def test_seed_name_and_order_of_draws_all_change_the_values() -> None:
    recipe = Recipe(64).then("normal", (0.0, 1.0))
    base = replay(recipe, 1, "a", 0, 64)
    assert not torch.equal(base, replay(recipe, 2, "a", 0, 64))
    assert not torch.equal(base, replay(recipe, 1, "b", 0, 64))
    assert not torch.equal(base, replay(recipe.then("normal", (0.0, 1.0)), 1, "a", 0, 64))
    assert len({key(1, "a"), key(1, "b"), key(2, "a"), key(1, "a", 0), key(1, "a0")}) == 5


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        with torch.no_grad():
            self.weight.copy_(torch.eye(4))


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 4))


def test_initialisers_that_cannot_be_replayed_are_refused_by_name() -> None:
    with pytest.raises(InitialiserError, match=r"Copies\.weight.*copy_"):
        build_on_meta(Copies)
    with pytest.raises(InitialiserError, match=r"Orthogonal\.weight.*normal.*cl.initialize\(build\(\)\)"):
        build_on_meta(Orthogonal)
    outside = nn.Linear(2, 2)
    with pytest.raises(InitialiserError, match="0.weight"):
        build_on_meta(lambda: nn.Sequential(outside))
    with pytest.raises(ValueError, match="must return an nn.Module"):
        build_on_meta(lambda: 3)  # type: ignore[arg-type, return-value]


def _init_by_out(weight: Tensor) -> None:
    with torch.no_grad():
        torch.full((4, 4), 5.0, out=weight)


def _init_by_data(weight: Tensor) -> None:
    weight.data = torch.ones(4, 4)


def _init_by_value(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(1 / weight.norm().item())


SKIPS_META = "is_meta" in inspect.getsource(orthogonal_)
"""Whether these of torch do nothing without values. In 2.11 they compute, and the operation is named."""


@pytest.mark.parametrize(
    ("initialiser", "told"),
    [
        (orthogonal_, "Linear.weight: " + ("nn.init.orthogonal_" if SKIPS_META else "aten.copy_")),
        (
            lambda weight: nn.init.sparse_(weight, 0.5),
            "Linear.weight: " + ("nn.init.sparse_" if SKIPS_META else "aten.index_put_"),
        ),
        (
            lambda weight: nn.init.dirac_(weight[..., None]),
            "Linear.weight: " + ("nn.init.dirac_" if SKIPS_META else "aten.copy_"),
        ),
        (nn.init.eye_, r"Linear.weight: aten.eye"),
        (_init_by_out, r"Linear.weight: aten.full.out"),
        (lambda weight: torch._foreach_zero_([weight.data]), r"Linear.weight: aten._foreach_zero_"),
        (_init_by_data, r"model: the callable raises RuntimeError: .*set_data"),
        (_init_by_value, r"model: the callable raises RuntimeError: .*meta"),
        (lambda weight: weight.data.copy_(torch.ones(4, 4)), r"Linear.weight: aten.copy_"),
    ],
)
def test_an_initialiser_that_does_nothing_or_fails_without_values_is_refused(
    initialiser: Callable[[Tensor], object], told: str
) -> None:
    """A linear has values from its own initialiser, so one that is skipped would leave these, in silence."""

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        initialiser(model.weight)
        return model

    with pytest.raises(InitialiserError, match=f"(?s){told}.*" + r"cl.initialize\(build\(\)\)"):
        build_on_meta(build)


def test_a_state_dict_that_is_assigned_while_the_model_is_built_is_refused_by_name() -> None:
    read = nn.Linear(4, 4).state_dict()

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.load_state_dict(read, assign=True)
        return model

    with pytest.raises(InitialiserError, match=r"cl.initialize\(build\(\)\)"):
        build_on_meta(build)


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


def test_a_parameter_that_nothing_initialises_is_refused() -> None:
    with pytest.raises(InitialiserError, match="weight: nothing gives it a value"):
        build_on_meta(Forgotten)


def test_a_module_called_twice_in_one_pass_gets_two_keys_and_the_next_pass_the_same_two() -> None:
    streams = DropoutStreams(7)
    sample, position = torch.arange(2), torch.arange(3)
    streams.begin(4, sample, position)
    first, second, other = streams.rows("a"), streams.rows("a"), streams.rows("b")
    assert len({first.key, second.key, other.key}) == 3 and first.step == 4
    streams.begin(4, sample, position)
    assert streams.rows("a").key == first.key and streams.rows("a").key == second.key


def test_a_place_that_was_gone_back_to_is_still_that_place() -> None:
    """A graph that is kept runs a block again in each of its backwards, each time with the same masks."""
    streams = DropoutStreams(7)
    streams.begin(4, torch.arange(2), torch.arange(3), is_part=True, tokens=2)
    streams.rows("a")
    streams.behind = "a linear"
    place, drawn = streams.place(), []
    for step in range(3):
        streams.begin(5 + step, torch.arange(4), torch.arange(6))
        streams.go_to(place)
        rows, behind = streams.rows("a"), streams.behind
        drawn.append(
            (
                rows.key,
                rows.step,
                rows.tokens,
                behind,
                rows.sample.numel(),
                rows.position.numel(),
                rows.whole is None,
            )
        )
    assert drawn == [(key(7, "a", 1), 4, 2, "a linear", 2, 3, False)] * 3


def test_building_on_meta_does_not_import_the_compiler() -> None:
    """torch's meta form of normal_ and its wrapper of dispatch modes do: 155 MB in each rank, and 2 s of its start."""
    code = (
        "import sys, torch; from colossal_lite.models import GPT, GPTConfig; "
        "from colossal_lite.numerics.random import build_on_meta; "
        "build_on_meta(lambda: GPT(GPTConfig(vocabulary=8, layers=1, heads=1, width=4, sequence=4))); "
        "print([m for m in ('torch._dynamo', 'sympy') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]", ended
