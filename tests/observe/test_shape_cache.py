"""Shapes of operations without tensors: remembered where nothing else can come, and no plan differs by it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.shape_cache import ShapeCache
from colossal_lite.observe.shape_rules import IN_PLACE, RULES
from colossal_lite.planner.planner import plan
from tests.observe.test_shape_rules import form, meant
from tests.shared.covering import covering_array, name_of

ROOT = Path(__file__).parents[2]
META = torch.device("meta")
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


class Asked:
    """An operation that notes how often it is asked."""

    def __init__(self, func: Any) -> None:
        self.func, self._schema, self.times = func, func._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.func(*args, **kwargs)


X = meta(4, 6)
PURE = {
    "norm": (aten.native_layer_norm.default, (X, [6], meta(6), meta(6), 1e-5)),
    "norm's backward": (
        aten.native_layer_norm_backward.default,
        (X, X, [6], meta(4, 1), meta(4, 1), meta(6), None, [True, True, False]),
    ),
    "of a transposed tensor": (aten.gelu.default, (X.t(),)),
    "to another dtype": (aten._to_copy.default, (X, dict(dtype=torch.float64))),
}


@pytest.mark.parametrize("name", PURE)
def test_an_operation_is_asked_once_and_what_is_remembered_is_new_and_of_the_same_forms(name: str) -> None:
    func, args = PURE[name]
    kwargs = args[-1] if isinstance(args[-1], dict) else {}
    args = args[: len(args) - bool(kwargs)]
    forms, asked = ShapeCache(), Asked(func)
    outs = [forms.run(asked, args, kwargs) for _ in range(3)]
    assert asked.times == 1
    first, *others = [out if isinstance(out, tuple) else (out,) for out in outs]
    storages = {x.untyped_storage()._cdata for out in (first, *others) for x in out if x is not None}
    assert len(storages) == 3 * sum(x is not None for x in first)
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
                assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


NOT_REMEMBERED = {
    "a view": (aten.view.default, (X, [24])),
    "a view that says it is none": (aten._unsafe_view.default, (X, [24])),
    "in place": (aten.add_.Tensor, (X, X)),
    "what is there": (aten.gelu.default, (torch.zeros(3),)),
    "no tensor": (aten.sym_size.int, (X, 0)),
}


@pytest.mark.parametrize("name", NOT_REMEMBERED)
def test_what_gives_no_new_tensors_without_values_is_asked_each_time(name: str) -> None:
    func, args = NOT_REMEMBERED[name]
    forms, asked = ShapeCache(), Asked(func)
    for _ in range(3):
        forms.run(asked, args, {})
    assert asked.times == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, 2), (X, 2.5)),
        ((meta(4, dtype=torch.int64), 2), (meta(4, dtype=torch.int64), 2.0)),
        ((meta(4, dtype=torch.bool), 1), (meta(4, dtype=torch.bool), True)),
        ((X, X), (X.t().contiguous().t(), X.t().contiguous().t())),
        ((X, X), (X.double(), X)),
        ((X, X), (X, meta(6))),
    ],
)
def test_arguments_of_another_form_or_type_are_asked_anew(one: Any, other: Any) -> None:
    forms, asked = ShapeCache(), Asked(aten.mul.Tensor)
    for args in (one, other, one, other):
        found, truth = forms.run(asked, args, {}), aten.mul.Tensor(*args)
        assert (found.shape, found.stride(), found.dtype) == (truth.shape, truth.stride(), truth.dtype)
    assert asked.times == 2


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(data=2)),
    "1d": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(size=4, mode="2d"))),
    "sequence": (2, dict(sequence=2)),
    "pipeline": (2, dict(pipeline=2)),
}
ROWS = covering_array(
    dict(
        family=["gpt2", "llama"],
        grid=list(GRIDS),
        stage=[0, 1, 3],
        precision=["fp32", "bf16"],
        checkpoint=["none", "full", "selective"],
        accumulation=[1, 2],
        is_config=[False, True],
        trains=[False, True],
    ),
    lambda row: row["grid"] != "pipeline" or row["trains"] and row["stage"] < 2,
)
FAMILIES: dict[str, Any] = dict(
    gpt2=dict(), llama=dict(position="rotary", norm="rms", activation="swiglu", kv_heads=2, bias=False)
)


def asked_too(forms: ShapeCache, func: Any, args: Any, kwargs: Any) -> Any:
    """What torch says, which our rule must say too."""
    told = RULES[func](*args, **kwargs) if func in RULES else None
    out = func(*args, **kwargs)
    assert told is None or meant(told) == meant(
        tuple(map(form, out if isinstance(out, tuple) else (out,)))
    ), func
    assert func not in IN_PLACE or out is args[0]
    return out


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_plan_is_the_same_where_every_operation_is_asked(row: dict[str, Any]) -> None:
    model = GPTConfig(
        layers=4, width=32, heads=4, vocabulary=64, sequence=16, dropout=0.1, **FAMILIES[row["family"]]
    )
    world_size, parallel = GRIDS[row["grid"]]
    config = dict(
        parallel=parallel,
        zero=dict(stage=row["stage"]),
        precision=row["precision"],
        activation_checkpoint=row["checkpoint"],
        gradient_accumulation=row["accumulation"],
    )
    made = partial(
        plan, config, model if row["is_config"] else partial(GPT, model), batch=8, sequence=16,
        world_size=world_size, trains=row["trains"],
    )  # fmt: skip
    found = made()
    with patch.object(ShapeCache, "run", asked_too):
        assert made() == found


LIGHT = """
import sys
from functools import partial
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.planner.planner import plan
from tests.observe.test_shape_cache import FAMILIES, GRIDS

for family in FAMILIES.values():
    model = GPTConfig(layers=2, width=32, heads=4, vocabulary=64, sequence=16, dropout=0.1, **family)
    for size, parallel in [*GRIDS.values(), (2, dict(sequence=dict(size=2, mode="ulysses")))]:
        for precision in ("bf16", "fp32"):
            stage = 0 if "pipeline" in parallel else 3
            config = dict(parallel=parallel, precision=precision, zero=dict(stage=stage))
            plan(config, partial(GPT, model), batch=8, sequence=16, world_size=size)
print([name for name in ("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
"""


def test_a_run_without_tensors_loads_nothing_of_torch_s_compiler() -> None:
    """145 MB of each rank that trains under a budget, and 1.4 s of every plan."""
    ended = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.strip() == "[]", ended
