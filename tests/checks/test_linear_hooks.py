"""Hooks on gradients train as in one process, or are refused: backward starts from another number than the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, WorldError, run_world

WORDS, WIDTH, SAMPLES, TOKENS = 31, 16, 8, 6
LIMIT = 1e-3


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.clamp(-LIMIT, LIMIT)


class Model(nn.Module):
    def __init__(self, within: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.within = within
        self.words, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.words(ids)))
        if self.within == "function":
            x = Clamped.apply(x)
        elif self.within == "tensor" and x.requires_grad:
            x.register_hook(lambda dy: dy.clamp(-LIMIT, LIMIT))
        y: Tensor = self.head(x)
        return y


def mask(model: Model) -> None:
    rows = torch.arange(WIDTH).remainder(2).view(-1, 1)
    model.inner.weight.register_hook(lambda dw: dw * rows)


def mask_in_place(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw[::2].zero_().sum().item() or None)


def centralise(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw - dw.mean(1, keepdim=True))


def halve_inputs(model: Model) -> None:
    model.inner.register_full_backward_hook(lambda module, dx, dy: (dx[0] / 2,))


def look_on(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: None)
    model.inner.register_full_backward_hook(lambda module, dx, dy: None)


def clamp(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw.clamp(-LIMIT, LIMIT))


def clamp_in_place(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: 0.0 * dw.clamp_(-LIMIT, LIMIT).sum().item() or None)


def absolute(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw.abs())


def normalise(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw / dw.norm())


def keep_largest(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw * (dw.abs() >= dw.abs().median()))


def drop_relatively_small(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw * (dw.abs() >= 1e-2 * dw.abs().max()))


def shrink(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: F.softshrink(dw, 1e-5))


def shift(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw + 1e-6)


def round_to_16_bits(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw.bfloat16().to(dw.dtype))


def round_to_half(model: Model) -> None:
    model.inner.weight.register_hook(lambda dw: dw.half().to(dw.dtype))


def clamp_inputs(model: Model) -> None:
    model.inner.register_full_backward_hook(lambda module, dx, dy: (dx[0].clamp(-LIMIT, LIMIT),))


def clamp_outputs(model: Model) -> None:
    model.inner.register_full_backward_pre_hook(lambda module, dy: (dy[0].clamp(-LIMIT, LIMIT),))


def behind(change: Callable[[Tensor], object]) -> Callable[[Model], None]:
    """A change in place behind the accumulation of a gradient."""

    def register(model: Model) -> None:
        model.inner.weight.register_post_accumulate_grad_hook(lambda weight: change(weight.grad) and None)

    return register


def look_behind(model: Model) -> None:
    behind(lambda gradient: gradient is not None)(model)


def mask_behind(model: Model) -> None:
    behind(lambda gradient: gradient[::2].zero_() is not None)(model)


def clamp_behind(model: Model) -> None:
    behind(lambda gradient: gradient.clamp_(-LIMIT, LIMIT) is not None)(model)


def take(model: Model) -> None:
    model.inner.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))


def take_if_large(model: Model) -> None:
    def change(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad = None if float(weight.grad.abs().max()) > 1e3 else 2.0 * weight.grad

    model.inner.weight.register_post_accumulate_grad_hook(change)


LINEAR = (mask, centralise, halve_inputs, look_on, look_behind, mask_behind)
ON_PARAMETERS = (
    clamp, absolute, normalise, keep_largest, drop_relatively_small, shrink, shift, round_to_16_bits,
    round_to_half,
)  # fmt: skip
ON_MODULES = (clamp_inputs, clamp_outputs)
MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "accumulation": dict(gradient_accumulation=2),
    "ZeRO-3": dict(zero=dict(stage=3)),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator) for _ in range(2))
    return ids, labels


def serial(change: Callable[[Model], None], within: str = "") -> dict[str, Tensor]:
    model = Model(within).double()
    change(model)
    ids, labels = batch()
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(
    env: RankEnv, changes: dict[str, Any], change: Callable[[Model], None], within: str, own_loop: bool,
    late: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.0), timeout_s=30) | changes
    with env.launch(config) as context:
        model = Model(within)
        if not late:
            change(model)
        engine = cl.initialize(model, context=context)
        if late:
            change(model)
        ids, labels = (x[context.local_batch(SAMPLES)] for x in batch())
        if own_loop:
            engine.backward(F.cross_entropy(engine(ids).flatten(0, 1), labels.flatten()))
        else:
            engine.forward_backward((ids, labels))
        found = engine.full_gradients()
        engine.close()
        return found


def nothing(model: Model) -> None:
    """No hook."""


def assert_serial(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, right in expected.items():
        assert float((found[name] - right).norm()) <= 1e-12 * float(right.norm()), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", LINEAR)
def test_a_linear_hook_trains_as_in_one_process(
    change: Callable[[Model], None], mode: str, ranks: int
) -> None:
    for found in run_world(gradients, ranks, MODES[mode], change, "", False):
        assert_serial(found, serial(change))


def test_one_that_writes_to_the_gradient_does_too() -> None:
    (found,) = run_world(gradients, 1, {}, mask_in_place, "", False)
    assert_serial(found, serial(mask_in_place))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ON_PARAMETERS)
def test_a_hook_on_a_parameter_that_is_not_linear_is_refused_by_name(
    change: Callable[[Model], None], mode: str, late: bool
) -> None:
    with pytest.raises(WorldError, match=r"inner\.weight: a hook on its gradient .* is not linear"):
        run_world(gradients, 1, MODES[mode], change, "", False, late)


def test_one_that_clamps_in_place_is_refused() -> None:
    with pytest.raises(WorldError, match=r"inner\.weight: a hook on its gradient .* is not linear"):
        run_world(gradients, 1, {}, clamp_in_place, "", False)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", ON_MODULES)
def test_a_hook_on_a_module_that_is_not_linear_is_refused(
    change: Callable[[Model], None], late: bool
) -> None:
    told = r"inner: a hook on its gradient .* is not linear" if late else "backward of Model is not linear"
    with pytest.raises(WorldError, match=told):
        run_world(gradients, 1, {}, change, "", False, late)


@pytest.mark.parametrize("change", [halve_inputs, mask])
@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-7])
def test_small_gradients_of_fp16_are_no_fault_of_a_hook(change: Callable[[Model], None], size: float) -> None:
    """The numbers of fp16 below 6e-5 have few digits, and there are none below 6e-8."""
    with cl.launch(dict(precision="fp16"), rank=0, world_size=1) as context:
        model = Model("")
        change(model)
        engine = cl.initialize(model, context=context)
        ids, labels = batch()
        for _ in range(2):
            logits = engine(ids).float()
            engine.backward(size * F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            engine.step()


@pytest.mark.parametrize("changes", [{}, dict(parallel=dict(tensor=2))], ids=["data", "tensor"])
@pytest.mark.parametrize("within", ["function", "tensor"])
def test_code_of_a_forward_whose_backward_is_not_linear_is_refused(
    within: str, changes: dict[str, Any]
) -> None:
    for ranks in (2,) if changes else (1, 2):
        with pytest.raises(WorldError, match=r"the backward of Model is not linear, as the gradient of"):
            run_world(gradients, ranks, changes, nothing, within, False)


@pytest.mark.parametrize(
    ("change", "within"),
    [(clamp, ""), (normalise, ""), (clamp_inputs, ""), (nothing, "function"), (nothing, "tensor")],
)
def test_a_loop_of_ones_own_on_one_rank_runs_any_hook_on_the_loss_itself(
    change: Callable[[Model], None], within: str
) -> None:
    (found,) = run_world(gradients, 1, {}, change, within, True)
    assert_serial(found, serial(change, within))


def test_on_two_ranks_it_is_refused_there_too() -> None:
    with pytest.raises(WorldError, match="is not linear"):
        run_world(gradients, 2, {}, clamp, "", True)


@pytest.mark.parametrize(
    ("change", "late", "says"),
    [
        (clamp_behind, False, "is not linear"),
        (take_if_large, False, "is not linear"),
        (take, False, "takes the gradient"),
        (look_behind, True, "finds none"),
        (mask_behind, True, "finds none"),
    ],
)
def test_a_hook_behind_the_accumulation_that_would_train_otherwise_is_refused(
    change: Callable[[Model], None], late: bool, says: str
) -> None:
    with pytest.raises(WorldError, match=rf"inner\.weight: a hook .*{says}"):
        run_world(gradients, 1, {}, change, "", False, late)


def returns_hooks(env: RankEnv) -> bool:
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1))) as context:
        model = Model()
        mask(model)
        halve_inputs(model)
        places = (model.inner.weight._backward_hooks, model.inner._backward_hooks)
        before = [dict(each) for each in places]
        engine = cl.initialize(model, context=context)
        engine.train_step(batch())
        assert [dict(each) for each in places] != before
        engine.close()
        return [dict(each) for each in places] == before


def test_a_closed_engine_gives_the_hooks_back() -> None:
    assert run_world(returns_hooks, 1) == [True]
