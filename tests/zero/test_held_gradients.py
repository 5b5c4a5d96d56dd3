"""Between backward and step `p.grad` is the engine's: whoever uses or sets it is refused, and the step stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colossal_lite as cl
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, run_world

VOCABULARY, WIDTH, TOKENS, BATCH = 19, 8, 6, 4
GIVEN = batches(VOCABULARY, 3, TOKENS)


def build() -> nn.Module:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), inner, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


def serial() -> list[float]:
    return plain_run(build().double(), GIVEN, 0.3).losses


USES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "clip_grad_norm_, one by one": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.1),
    "a norm for a log": lambda ps: [p.grad.norm() for p in ps if p.grad is not None],
    "a norm of the data": lambda ps: [p.grad.data.norm() for p in ps if p.grad is not None],
    "a factor": lambda ps: ps[0].grad.mul_(2.0),  # type: ignore[union-attr]
    "an optimizer": lambda ps: torch.optim.Adam(ps).step(),
    "a fused optimizer": lambda ps: torch.optim.Adam(ps, fused=True).step(),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9).step(),
    "zeros": lambda ps: torch.optim.SGD(ps, lr=0.1).zero_grad(set_to_none=False),
    "one vector": lambda ps: nn.utils.parameters_to_vector(p.grad for p in ps if p.grad is not None),
    "a backward of one's own": lambda ps: sum(p.sum() for p in ps).backward(),  # type: ignore[union-attr]
}
"""What code does with gradients between backward and step. Decay of weights, which needs no gradient, is off."""
SETS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "dropped": lambda ps: torch.optim.SGD(ps, lr=0.1).zero_grad(),
    "one dropped": lambda ps: setattr(ps[-1], "grad", None),
    "replaced": lambda ps: setattr(ps[1], "grad", torch.zeros_like(ps[1])),
}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "accumulation": (1, dict(gradient_accumulation=2)),
    "state on the host": (1, dict(memory=dict(placement="host"))),
    "zero 2": (2, dict(zero=dict(stage=2))),
    "zero 3": (2, dict(zero=dict(stage=3))),
}


def tried(env: RankEnv, mode: str, own_loop: bool) -> tuple[dict[str, str], list[float]]:
    """What each use says, and the losses of steps in which all were tried."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)
    said, losses = dict[str, str](), list[float]()
    with env.launch(base | MODES[mode][1]) as context:
        engine = cl.initialize(build(), context=context)
        part = context.local_batch(BATCH)
        for step in range(3):
            ids, labels = (x[part] for x in GIVEN[step])
            if own_loop:
                for x, y in zip(
                    *(t.chunk(context.config.gradient_accumulation) for t in (ids, labels)), strict=True
                ):
                    logits = engine(x)
                    engine.backward(F.cross_entropy(logits.flatten(0, 1), y.flatten()), count=y.numel())
            else:
                engine.forward_backward((ids, labels))
            parameters = [p for p in engine.model.parameters() if p.grad is not None]
            assert len(parameters) == len([*engine.model.parameters()])
            assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
            for name, use in USES.items():
                try:
                    use(parameters)
                except ValueError as error:
                    said[name] = str(error)
            if step == 1:
                engine.full_gradients()
                assert all(p.grad is not None for p in parameters)
            losses.append(float(engine.step().loss))
            assert all(p.grad is None for p in engine.model.parameters())
        engine.close()
    return said, losses


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_use_of_a_gradient_before_the_step_is_refused_by_name_and_changes_nothing(
    mode: str, own_loop: bool
) -> None:
    truth = serial()
    for said, losses in run_world(tried, MODES[mode][0], mode, own_loop):
        assert [*said] == [*USES]
        for name, text in said.items():
            assert ".grad: aten::" in text and "would have no effect" in text, name
            assert "Legal: clip_grad_norm of the config" in text and "engine.backward(loss)" in text
        assert losses == pytest.approx(truth, rel=1e-12, abs=0)


@pytest.mark.parametrize("way", SETS)
def test_a_gradient_that_other_code_sets_or_drops_is_refused_before_the_update(way: str) -> None:
    with cl.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3))) as context:
        engine = cl.initialize(build(), context=context)
        before = engine.full_state_dict()
        engine.forward_backward(GIVEN[0])
        SETS[way]([*engine.model.parameters()])
        with pytest.raises(
            ValueError, match=r"grad was set by other code.*Legal: clip_grad_norm of the config"
        ):
            engine.step()
        after = engine.full_state_dict()
        assert engine.steps == 0 and all(torch.equal(x, after[name]) for name, x in before.items())
        engine.zero_grad()
        assert float(engine.train_step(GIVEN[0]).loss) == pytest.approx(serial()[0], rel=1e-12)


def test_what_is_legal_in_its_place_works() -> None:
    model = build().double()
    ids, labels = GIVEN[0]
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), clip_grad_norm=0.1)
    with cl.launch(config) as context:
        engine = cl.initialize(build(), context=context)
        engine.forward_backward(GIVEN[0])
        found = engine.full_gradients()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-15)
        engine.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.SGD(model.parameters(), lr=0.3).step()
        after = engine.full_state_dict()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("end", ["zero_grad", "close", "error"])
def test_nothing_stands_as_a_gradient_once_it_was_dropped(end: str) -> None:
    with cl.launch(dict(precision="fp64")) as context:
        engine = cl.initialize(build(), context=context)
        engine.forward_backward(GIVEN[0])
        grad = engine.model[0].weight.grad  # type: ignore[index,union-attr]
        assert repr(grad) == "HeldGradient(0.weight)" and grad.untyped_storage().nbytes() == 0
        if end == "error":
            engine.step()
            with pytest.raises(ValueError, match="label"):
                engine.forward_backward((GIVEN[0][0], torch.full((BATCH, TOKENS), VOCABULARY)))
        engine.close() if end == "close" else engine.zero_grad()
        assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("what", ["used", "dropped"])
def test_so_it_is_of_the_copies_that_an_optimizer_of_ones_own_updates(what: str) -> None:
    made: list[torch.optim.Optimizer] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.3))
        return made[-1]

    with cl.launch(dict(precision="fp64")) as context:
        engine = cl.initialize(build(), context=context, optimizer=factory)
        optimizer, losses = made[-1], list[float]()
        for step in range(3):
            optimizer.zero_grad()  # as loops do before a backward
            engine.forward_backward(GIVEN[step])
            if step == 1 and what == "used":
                with pytest.raises(ValueError, match="would have no effect"):
                    nn.utils.clip_grad_norm_(
                        [p for group in optimizer.param_groups for p in group["params"]], 0.1
                    )
            if step == 1 and what == "dropped":
                optimizer.zero_grad()
                with pytest.raises(ValueError, match="was set by other code"):
                    engine.step()
            losses.append(float(engine.step().loss))
        assert losses == pytest.approx(serial(), rel=1e-12, abs=0)
