"""A context that is closed leaves the model that it trained as it was given: for one's own loop, or another engine."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

KINDS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def changes(module: nn.Module) -> list[str]:
    """Hooks, and methods of its own, on a module, its parts and its parameters."""
    found = []
    for name, owner in [*module.named_modules(), *module.named_parameters()]:
        found += [f"{name}.{kind}" for kind in KINDS if getattr(owner, kind, None)]
        found += [f"{name}.forward"] if "forward" in vars(owner) else []
    return found


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(37, (4, 17), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def run(env: RankEnv, module: nn.Module, config: dict[str, Any], fails: bool = False) -> list[float]:
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60)
    with env.launch(base | config) as context:
        engine = cl.initialize(module, context=context)
        found = [float(engine.train_step(context.local_batch(batch())).loss) for _ in range(2)]
        if fails:
            raise KeyError
        return found


def left(env: RankEnv, config: dict[str, Any], fails: bool) -> tuple[list[str], float, list[float], bool]:
    """What is left on a model; the loss of one's own loop on it; what another engine gives with other masks."""
    module = model()
    try:
        run(env, module, config, fails)
    except KeyError:
        assert fails
    inputs, labels = batch()
    loss = nn.functional.cross_entropy(module.train()(inputs).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return changes(module), float(loss.detach()), run(env, module, config), module.config.use_cache


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(zero=dict(stage=2)),
        dict(activation_checkpoint="full"),
        dict(activation_checkpoint="selective"),
    ],
)
def test_a_model_can_be_trained_by_ones_own_loop_and_by_another_engine_afterwards(
    config: dict[str, Any], fails: bool
) -> None:
    ((found, own_loss, again, uses_cache),) = run_world(left, 1, config, fails)
    assert not found and uses_cache
    assert 0 < own_loss < 10 and len(again) == 2


def test_nothing_is_left_on_the_models_of_two_ranks() -> None:
    for found, _, again, uses_cache in run_world(left, 2, dict(activation_checkpoint="full"), False):
        assert not found and uses_cache and len(again) == 2


GELU = nn.GELU()
"""One module of many models, as tables of activations have it."""


def with_shared() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), GELU, nn.Linear(8, 3)).double()


def beside(env: RankEnv, stage: int) -> tuple[bool, bool, list[float]]:
    """Another model with a module of the trained one: its state and that of a copy, and the loss of an engine of it."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), zero=dict(stage=stage), timeout_s=60)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels, losses = torch.tensor([0, 1, 2, 0]), []
    with env.launch(config) as context:
        engine, other = cl.initialize(with_shared(), context=context), with_shared()
        engine.train_step(context.local_batch((x, labels)))
        state = other.state_dict()
        other.load_state_dict(state)
        made = copy.deepcopy(other).state_dict()
        with pytest.raises(ValueError, match="model.state_dict") if stage == 3 else nullcontext():
            engine.model.state_dict()
    with env.launch(config | dict(zero=dict(stage=0))) as context:
        engine = cl.initialize(other, context=context)
        losses = [float(engine.train_step(context.local_batch((x, labels))).loss) for _ in range(2)]
    given = with_shared().state_dict()
    same = [all(torch.equal(given[n], found[n]) for n in given) for found in (state, made)]
    return same[0], same[1], losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_shares_a_module_without_weights_keeps_its_own_state(stage: int) -> None:
    found = run_world(beside, 2, stage)
    assert found[0] == found[1]
    assert found[0][:2] == (True, True)
