"""What a loop keeps from before the engine, and would do nothing: attributes, optimizers, schedulers, pickles."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import colossal_lite as cl
from colossal_lite.engine.other_names import INSTEAD
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

SGD: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[1, 2, 3, 4]])
    return inputs, inputs + 1


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch()[1].flatten())


@pytest.mark.parametrize("name", ["lr", "clip_grad_norm", "steps", "config", "model", "training"])
def test_what_is_set_on_an_engine_is_refused_as_nothing_reads_it(name: str) -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine = cl.initialize(model(), context=context)
        told = told_of(lambda: setattr(engine, name, 1e-4))
        assert f"engine.{name} = 0.0001: nothing reads attributes set on an engine" in told
        assert "optimizer.lr, lr_scheduler" in told


@pytest.mark.parametrize("name", INSTEAD)
def test_what_an_engine_has_not_names_what_it_has_in_its_place(name: str) -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine: Any = cl.initialize(model(), context=context)
        with pytest.raises(AttributeError, match=f"^engine.{name}: an engine has none. Legal: ") as found:
            getattr(engine, name)
        owners = dict(engine=engine, StepResult=cl.StepResult(1, 0.0, 0.0, 0, False, 0.0), context=context)
        legal = str(found.value).partition("Legal: ")[2]
        for owner, named in re.findall(r"\b(engine|StepResult|context)\.(\w+)", legal):
            assert hasattr(owners[owner], named)
        assert not hasattr(engine, name)


def test_a_name_of_the_model_s_own_is_found_there() -> None:
    given = model()
    given.temperature = 2.0
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine: Any = cl.initialize(given, context=context)
        with pytest.raises(AttributeError, match="Legal: engine.model.temperature, the model's own"):
            engine.temperature  # noqa: B018
        assert engine.model.temperature == 2.0


def test_a_name_that_nothing_is_known_of_is_no_attribute_of_an_engine() -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine: Any = cl.initialize(model(), context=context)
        with pytest.raises(AttributeError, match="'Engine' object has no attribute 'no_such_name'"):
            engine.no_such_name  # noqa: B018


@pytest.mark.parametrize("given", [lambda: torch.zeros(()), torch.zeros(())], ids=["closure", "loss"])
def test_a_closure_of_torch_s_optimizers_is_refused_and_what_is_legal_steps(given: Any) -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine: Any = cl.initialize(model(), context=context)
        engine.backward(loss_of(engine(batch()[0])))
        with pytest.raises(
            ValueError, match="^engine.step: closure = .*Legal: engine.backward.loss. and then"
        ):
            engine.step(given)
        assert engine.step().step == 1 and engine.steps == 1


# ---- optimizers ----


def both_step(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    engine.backward(loss_of(engine(batch()[0])))
    engine.step()
    optimizer.step()


def kept_optimizer(env: RankEnv, stage: int) -> list[str]:
    """What a kept optimizer's step says beside an engine: over its parameters, over others, over both, frozen ones, and
    after the engine's end."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        given, other = model(), nn.Linear(2, 2)
        kept = torch.optim.AdamW([*given.parameters(), *other.parameters()], lr=0.5)
        engine = cl.initialize(given, context=context)
        told = [told_of(lambda: both_step(engine, kept))]
        told.append(told_of(lambda: both_step(engine, torch.optim.SGD(other.parameters(), lr=0.1))))
        given.requires_grad_(False)
        told.append(told_of(kept.step))
        given.requires_grad_(True)
        engine.close()
        return [*told, told_of(kept.step)]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_kept_over_an_engine_s_parameters_is_refused_where_it_would_do_nothing(
    stage: int,
) -> None:
    for told, *rest in run_world(kept_optimizer, 2, stage):
        assert "AdamW.step: it holds 0.weight, which an engine trains by its own optimizer" in told
        assert "optimizer=lambda parameters: torch.optim.AdamW(parameters, ...)" in told
        assert rest == ["", "", ""]


def scheduled(env: RankEnv, change: str, config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """What the steps of an optimizer of one's own say whose groups are changed between steps, and the weights then."""
    kept: list[torch.optim.Optimizer] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(torch.optim.SGD(parameters, lr=0.1))
        return kept[0]

    with env.launch(SGD | config) as context:
        engine = cl.initialize(model(), context=context, optimizer=make)
        between = CHANGES[change](kept[0])

        def steps() -> None:
            for _ in range(3):
                engine.train_step(batch())
                between()

        return told_of(steps), engine.full_state_dict()


def setting(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update(lr=group["lr"] / 2, weight_decay=group["weight_decay"] + 0.1, momentum=0.5)


CHANGES: dict[str, Callable[[torch.optim.Optimizer], Callable[[], Any]]] = {
    "a scheduler": lambda optimizer: StepLR(optimizer, 1, gamma=0.5).step,
    "a hand": lambda optimizer: lambda: setting(optimizer),
    "a group": lambda optimizer: (
        lambda: optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(2))]))
    ),
}


@pytest.mark.parametrize("change", ["a scheduler", "a hand"])
def test_groups_of_an_optimizer_of_one_s_own_follow_schedulers_and_hands(change: str) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    between = CHANGES[change](optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain(batch()[0])).backward()
        optimizer.step()
        between()
    for told, state in run_world(scheduled, 2, change, {}):
        assert told == ""
        for name, right in plain.state_dict().items():
            torch.testing.assert_close(state[name], right, rtol=1e-12, atol=1e-14)


def test_a_scheduler_of_torch_beside_one_of_the_config_and_parameters_given_later_are_refused() -> None:
    both = dict(lr_scheduler=dict(type="linear", total_steps=10))
    for told, _ in run_world(scheduled, 1, "a scheduler", both):
        assert "other code has set the lr of SGD to [0.05], and lr_scheduler of the config would" in told
    for told, _ in run_world(scheduled, 1, "a group", {}):
        assert "SGD has other parameters than when it was made (add_param_group)" in told


# ---- pickles ----


def saved(env: RankEnv, stage: int) -> tuple[str, str, float]:
    """What torch.save of a model says while an engine trains it, and after; how far what is loaded then is from it."""
    file = io.BytesIO()
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        told = told_of(lambda: torch.save(engine.model, io.BytesIO()))
        loss = float(engine.eval_step(batch()))
        engine.close()
        after = told_of(lambda: torch.save(engine.model, file))
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return told, after, abs(float(loss_of(again(batch()[0])).detach()) - loss)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_is_pickled_after_its_engine_and_refused_while_it_trains(stage: int) -> None:
    for told, after, difference in run_world(saved, 2, stage):
        assert "torch.save(state, path) on one" in told and after == "" and difference < 1e-14


# ---- what other frameworks leave in a loop ----


def test_zero_grad_takes_what_torch_s_takes_and_refuses_zeros() -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine = cl.initialize(model(), context=context)
        engine.backward(loss_of(engine(batch()[0])))
        engine.zero_grad(set_to_none=True)
        assert float(engine.train_step(batch()).loss) == float(loss_of(model()(batch()[0])).detach())
        assert "set_to_none=False would keep gradients of 0" in told_of(
            lambda: engine.zero_grad(set_to_none=False)
        )


def cut_before(env: RankEnv, by: str, stage: int) -> str:
    """What initialize says of a model that FSDP has cut."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        torch.distributed.barrier()
        given = FullyShardedDataParallel(model(), device_id=torch.device("cpu")) if by == "FSDP" else model()
        if by == "fully_shard":
            fully_shard(given)
        return told_of(lambda: cl.initialize(given, context=context))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("by", ["FSDP", "fully_shard"])
def test_a_model_that_another_framework_has_cut_is_refused_by_name(by: str, stage: int) -> None:
    names = {
        "FSDP": "it is a FullyShardedDataParallel",
        "fully_shard": "0.weight is a DTensor and no plain tensor",
    }
    for told in run_world(cut_before, 2, by, stage):
        assert f"model: {names[by]}" in told and "the module before that call, and zero.stage=3" in told


def test_mixed_dtypes_that_autocast_makes_in_our_gpt_name_autocast() -> None:
    shape = cl.models.GPTConfig(vocabulary=8, layers=1, heads=2, width=8, sequence=4)
    with cl.launch(SGD | dict(precision="fp32"), rank=0, world_size=1) as context:
        engine = cl.initialize(lambda: cl.models.GPT(shape), context=context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            told = told_of(lambda: engine.train_step(batch()))
        assert "torch.autocast makes them so: leave it out, and set precision of the config" in told


# ---- after the end ----

AFTER: dict[str, Callable[[Any], Any]] = {
    "full_state_dict": lambda engine: engine.full_state_dict(),
    "full_optimizer_state": lambda engine: engine.full_optimizer_state(),
    "load_full_state_dict": lambda engine: engine.load_full_state_dict({}),
    "eval_step": lambda engine: engine.eval_step(batch()),
    "backward": lambda engine: engine.backward(torch.zeros((), requires_grad=True)),
    "engine(x)": lambda engine: engine(batch()[0]),
    "close": lambda engine: engine.close(),
}


def called_late(env: RankEnv, stage: int, closes: bool) -> dict[str, str]:
    """What each call says after the with block, or after engine.close() within it."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        if closes:
            engine.close()
            names = ("eval_step", "backward", "engine(x)")
            return {name: told_of(partial(AFTER[name], engine)) for name in names}
    return {name: told_of(partial(call, engine)) for name, call in AFTER.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_calls_after_the_context_are_refused_by_name(stage: int) -> None:
    for told in run_world(called_late, 2, stage, False):
        assert ("close: the context is closed" in told["close"]) == (stage == 3)
        for name in ("full_state_dict", "full_optimizer_state", "load_full_state_dict"):
            assert f"{name}: the context is closed" in told[name]
        for name in ("eval_step", "backward", "engine(x)"):
            assert f"{name}: this engine is closed" in told[name]


def pipeline_reports_late(env: RankEnv) -> tuple[str, str]:
    shape = cl.models.GPTConfig(vocabulary=8, layers=2, heads=2, width=8, sequence=4)
    with env.launch(SGD | dict(parallel=dict(pipeline=2))) as context:
        engine = cl.initialize(lambda: cl.models.GPT(shape), context=context)
        engine.train_step(batch())
        assert engine.timeline().ranks == engine.schedule_report().measured.ranks == 2
    return told_of(engine.timeline), told_of(engine.schedule_report)


def test_reports_of_a_pipeline_after_the_context_are_refused_as_a_rank_knows_its_own_actions_alone() -> None:
    for of_timeline, of_report in run_world(pipeline_reports_late, 2):
        assert "timeline: the context is closed, and ranks of a pipeline no longer reach each" in of_timeline
        assert "schedule_report: the context is closed, and ranks of a pipeline" in of_report


@pytest.mark.parametrize("stage", [0, 3])
def test_calls_after_engine_close_are_refused_by_name(stage: int) -> None:
    for told in run_world(called_late, 2, stage, True):
        for name, said in told.items():
            assert f"{name}: this engine is closed" in said


def evaluating(env: RankEnv) -> list[int]:
    """Samples after each of two steps of a loop of one's own, which evaluates before each."""
    counts = []
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        inputs, labels = batch()
        for _ in range(2):
            with torch.no_grad():
                engine(inputs.repeat(5, 1))
            engine.backward(loss_of(engine(inputs)))
            engine.step()
            counts.append(engine.samples)
    return counts


def test_samples_that_a_loop_of_ones_own_evaluates_on_are_not_used_up() -> None:
    assert run_world(evaluating, 2) == [[2, 4]] * 2
