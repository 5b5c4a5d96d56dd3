"""What a user does beside the engine, and would change nothing or be lost, is refused; skipped steps are told."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.layers.tensor_1d_layers import TablePart
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[1, 2, 3, 4]])
    return inputs, inputs + 1


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch()[1].flatten())


def foreign_backward(env: RankEnv, through: str) -> tuple[str, float, float]:
    """The message of a backward that the engine does not run; the loss of a step afterwards, and of one without it."""
    with env.launch(SGD) as context:
        untouched = cl.initialize(model(), context=context)
        truth = [float(untouched.train_step(batch()).loss) for _ in range(2)][1]
        untouched.close()
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        forward = engine.model if through == "model" else engine
        told = told_of(lambda: loss_of(forward(batch()[0])).backward())
        engine.zero_grad()
        return told, float(engine.train_step(batch()).loss), truth


@pytest.mark.parametrize("through", ["model", "engine"])
def test_a_backward_beside_the_engine_is_refused_and_leaves_nothing_behind(through: str) -> None:
    ((told, loss, truth),) = run_world(foreign_backward, 1, through)
    assert "from a backward that the engine did not run" in told and "engine.backward(loss)" in told
    assert loss == truth


class Shifting(nn.Module):
    """Moves its inputs by one, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.inner = in_place, model()

    def forward(self, ids: Tensor) -> Tensor:
        moved = ids.add_(1) if self.in_place else ids + 1
        logits: Tensor = self.inner(moved)
        return logits


def moved_inputs(env: RankEnv, in_place: bool) -> list[str]:
    """The messages of a step, an evaluation and a forward of a loop of one's own; whether the batch is what it was."""
    with env.launch(SGD) as context:
        engine = cl.initialize(Shifting(in_place), context=context)
        calls = (engine.train_step, engine.eval_step, lambda batch: engine(batch[0]))
        return [told_of(lambda call=call: call(batch())) for call in calls]  # type: ignore[misc]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_forward_that_changes_its_batch_in_place_is_refused_and_updates_nothing(in_place: bool) -> None:
    (told,) = run_world(moved_inputs, 1, in_place)
    for message in told:
        assert ("its forward changes inputs of the batch in place" in message) == in_place == bool(message)


CHANGED: list[dict[str, Any]] = [
    dict(precision="bf16"),
    dict(precision="bf16", zero=dict(stage=2)),
]
CALLS: dict[str, Callable[[Any], Any]] = {
    "train_step": lambda engine: engine.train_step(batch()),
    "eval_step": lambda engine: engine.eval_step(batch()),
    "engine(x)": lambda engine: engine(batch()[0]),
    "full_state_dict": lambda engine: engine.full_state_dict(),
    "save": lambda engine: engine.save(Path(tempfile.mkdtemp())),
}


def changed_in_place(env: RankEnv, config: dict[str, Any], call: str) -> tuple[str, str]:
    """The message of a call after a torch optimizer has stepped on the engine's parameters, and after a load."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        state = engine.full_state_dict()
        parameter = engine.model[1].weight
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.grad = None
        told = told_of(lambda: CALLS[call](engine))
        engine.load_full_state_dict(state)
        return told, told_of(lambda: engine.train_step(batch()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("config", CHANGED, ids=["bf16", "bf16, stage 2"])
def test_a_change_of_weights_that_would_be_lost_is_refused_until_all_are_loaded(
    config: dict[str, Any], call: str
) -> None:
    ranks = 2 if "zero" in config else 1
    for told, after in run_world(changed_in_place, ranks, config, call):
        assert "1.weight was changed in place by other code than the engine" in told and after == ""


def changed_for_good(env: RankEnv, config: dict[str, Any]) -> tuple[str, bool]:
    """A change in place where the parameter is the value that is updated; whether it is there a step later."""
    with env.launch(SGD | config) as context:
        engine, twin = cl.initialize(model(), context=context), model().double()
        for each in (engine.model, twin):
            with torch.no_grad():
                each[1].weight.mul_(0.5)
        told = told_of(lambda: engine.train_step(batch()))
        loss_of(twin(batch()[0])).backward()
        with torch.no_grad():
            twin[1].weight -= 0.1 * twin[1].weight.grad
        return told, torch.allclose(engine.full_state_dict()["1.weight"], twin[1].weight, atol=1e-14)


ON_HOST: dict[str, Any] = dict(placement="host")
KEPT = [
    (1, {}),
    (2, dict(zero=dict(stage=2))),
    (1, dict(memory=ON_HOST)),
    (2, dict(memory=ON_HOST, zero=dict(stage=1))),
]


@pytest.mark.parametrize(("ranks", "config"), KEPT)
def test_a_change_of_weights_that_are_the_values_updated_stays(ranks: int, config: dict[str, Any]) -> None:
    assert run_world(changed_for_good, ranks, config) == [("", True)] * ranks


# ---- what strangers do to weights and gradients ----


def halved(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


HANDS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "other data": (halved, {}),
    "other data of a shard": (halved, dict(zero=dict(stage=3))),
    "a fill of hidden weights": (lambda weight: weight.fill_(0.1), dict(zero=dict(stage=1))),
    "rows of hidden weights": (lambda weight: weight[0].zero_(), dict(zero=dict(stage=2))),
}


def handled(env: RankEnv, what: str) -> tuple[str, float, float]:
    """What a step tells after weights were changed so between two steps. Its loss after the weights before were
    loaded, and what it would have been."""
    change, more = HANDS[what]
    with env.launch(SGD | more) as context:
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        state, loss = engine.full_state_dict(), float(engine.eval_step(batch()))
        engine.train_step(batch())
        with torch.no_grad():
            change(engine.model[1].weight)
        told = told_of(lambda: engine.train_step(batch()))
        engine.load_full_state_dict(state)
        return told, float(engine.eval_step(batch())), loss


@pytest.mark.parametrize("what", HANDS)
def test_weights_that_a_hand_replaces_or_changes_while_they_are_hidden_are_refused(what: str) -> None:
    for told, loss, before in run_world(handled, 2, what):
        assert "1.weight was changed in place by other code than the engine" in told and loss == before


def with_gradient(env: RankEnv) -> tuple[str, bool]:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        engine.model[1].weight.grad = torch.ones_like(engine.model[1].weight)
        told = told_of(lambda: engine.train_step(batch()))
        engine.zero_grad()
        return told, bool(torch.isfinite(engine.train_step(batch()).loss))


def test_gradients_of_a_loop_before_the_engine_are_in_no_update() -> None:
    ((found, truth),) = run_world(after_a_loop, 1)
    assert found == truth


def after_a_loop(env: RankEnv) -> tuple[float, float]:
    losses = []
    for leaves in (True, False):
        made = model()
        if leaves:
            loss_of(made(batch()[0])).backward()
        with env.launch(SGD) as context:
            engine = cl.initialize(made, context=context)
            losses.append([float(engine.train_step(batch()).loss) for _ in range(2)][1])
    return losses[0], losses[1]


def test_a_gradient_that_a_hand_has_set_is_refused_before_it_is_added() -> None:
    for told, goes_on in run_world(with_gradient, 2):
        assert told.startswith("backward: 1.weight.grad was set by other code") and goes_on


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.turn = nn.Embedding(8, 8), nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.words(ids) * self.turn).real


def refused(env: RankEnv, what: str) -> str:
    made = {
        "complex": Phases,
        "sparse": lambda: nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)),
        "counts": lambda: nn.Sequential(nn.Embedding(8, 8, scale_grad_by_freq=True), nn.Linear(8, 8)),
    }[what]
    torch.manual_seed(0)
    with env.launch(SGD) as context:
        return told_of(lambda: cl.initialize(made(), context=context))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("complex", "the parameter turn is complex"), ("sparse", "sparse=True"), ("counts", "scale_grad_by_freq=True"),
    ],
)  # fmt: skip
def test_parameters_whose_training_would_be_another_are_refused_by_name(what: str, says: str) -> None:
    for told in run_world(refused, 2, what):
        assert says in told and "legal: " in told.lower()


def test_a_loss_of_many_numbers_is_refused() -> None:
    for told in run_world(many_numbers, 1):
        assert "a loss of the shape (3,)" in told


def scaled_loss(env: RankEnv, precision: str, stage: int) -> tuple[list[str], Tensor, Tensor]:
    """Messages of losses that a scaler has multiplied. And the weights of a step afterwards, and of one that no scaler
    came before."""
    with env.launch(SGD | dict(precision=precision, zero=dict(stage=stage))) as context:
        told, weights = [], []
        for scaler in (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
            engine = cl.initialize(model(), context=context)
            for scaled in (scaler.scale, lambda x: scaler.scale(x) / 2, lambda x: scaler.scale([x])[0]):  # noqa: B023
                loss = scaled(loss_of(engine(batch()[0])))
                if scaler.is_enabled():
                    told.append(told_of(lambda: engine.backward(loss)))  # noqa: B023
                engine.zero_grad()
            engine.backward(loss_of(engine(batch()[0])) * torch.tensor(0.5))
            engine.step()
            weights.append(engine.full_state_dict()["1.weight"])
            engine.close()
        return told, weights[0], weights[1]


@pytest.mark.parametrize("precision, stage", [("fp64", 0), ("fp32", 0), ("fp64", 3)])
def test_a_loss_that_a_scaler_has_multiplied_is_refused_and_other_factors_are_not(
    precision: str, stage: int
) -> None:
    ((told, weights, truth),) = run_world(scaled_loss, 1, precision, stage)
    assert len(told) == 3
    for message in told:
        assert "a GradScaler has multiplied the loss" in message and "precision='fp16'" in message
    assert torch.equal(weights, truth)


def many_numbers(env: RankEnv) -> str:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        loss = loss_of(engine(batch()[0]))
        return told_of(lambda: engine.backward(loss.expand(3)))


# ---- skipped steps ----


def not_finite(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.sum() * torch.nan, torch.tensor(labels.numel())


def skipping(env: RankEnv, limit: int | None, steps: int, why: str) -> tuple[list[str], str, int]:
    """The warnings of skipped steps, the error that ends them, and the steps that were made."""
    config = SGD | dict(optimizer=dict(type="sgd", lr=0.1, max_skipped_steps=limit))
    criterion = not_finite if why == "nan" else None
    inputs, labels = batch()
    labels = labels if why == "nan" else torch.full_like(labels, -100)
    with env.launch(config) as context, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = cl.initialize(model(), context=context, criterion=criterion)
        told = told_of(lambda: [engine.train_step((inputs, labels)) for _ in range(steps)])
        return (
            [str(each.message) for each in caught if "changed nothing" in str(each.message)],
            told,
            engine.steps,
        )


@pytest.mark.parametrize(
    "why, words", [("nan", "its loss is nan"), ("empty", "no label of the global batch counts")]
)
def test_each_skipped_step_is_told_and_too_many_in_a_row_end_the_run_on_every_rank(
    why: str, words: str
) -> None:
    for rank, (said, told, steps) in enumerate(run_world(skipping, 2, 3, 9, why)):
        assert len(said) == (2 if rank == 0 else 0) and all(words in line for line in said)
        assert words in told and "3 in a row, and optimizer.max_skipped_steps=3" in told and steps == 3


def every_other(env: RankEnv) -> tuple[str, int, int]:
    """The error of steps of which every other one is skipped, where two in a row may not be; steps and samples."""
    config = SGD | dict(optimizer=dict(type="sgd", lr=0.1, max_skipped_steps=2))
    inputs, labels = batch()
    with env.launch(config) as context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = cl.initialize(model(), context=context)
        given = [torch.full_like(labels, -100), labels]
        told = told_of(lambda: [engine.train_step((inputs, given[number % 2])) for number in range(6)])
        return told, engine.steps, engine.samples


def test_a_step_that_counts_ends_a_row_of_skipped_ones_whose_samples_are_used_up_all_the_same() -> None:
    assert run_world(every_other, 1) == [("", 6, 6)]


def overflowing(env: RankEnv, scale: Any) -> tuple[str, int]:
    """The error of twelve fp16 steps with this loss scale, and the steps that were made."""
    precision = dict(dtype="fp16", loss_scale=scale)
    config = SGD | dict(precision=precision, optimizer=dict(type="sgd", lr=0.1, max_skipped_steps=9))
    with env.launch(config) as context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = cl.initialize(model(), context=context)
        return told_of(lambda: [engine.train_step(batch()) for _ in range(12)]), engine.steps


def test_an_overflow_under_a_fixed_loss_scale_names_the_scale_and_what_ends_it() -> None:
    ((told, steps),) = run_world(overflowing, 1, 1e9)
    assert steps == 9 and "its gradient is not finite" in told
    assert "with the fixed precision.loss_scale=1e+09; that is 9 in a row" in told
    assert told.endswith(
        "legal: precision.loss_scale='dynamic', which follows overflows, or a smaller number"
    )
    for legal in ("dynamic", 1e3):
        assert run_world(overflowing, 1, legal) == [("", 12)]


def reads_between_steps(env: RankEnv) -> list[str]:
    """What is told where a loss reads a weight before the forward that updates it."""
    with (
        env.launch(SGD | dict(zero=dict(stage=1))) as context,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        penalty = engine.model[1].weight.square().sum()
        engine.backward(loss_of(engine(batch()[0])) + penalty)
        engine.step()
        return [str(each.message) for each in caught]


def test_a_step_that_is_skipped_for_a_weight_that_was_hidden_says_so() -> None:
    told = run_world(reads_between_steps, 2)
    assert any("its loss is nan (zero and offload keep NaN for a weight" in line for line in told[0])


def test_the_limit_is_20_unless_the_config_says_otherwise_and_none_is_none() -> None:
    assert cl.Config().optimizer.max_skipped_steps == 20
    ((said, told, steps),) = run_world(skipping, 1, None, 25, "nan")
    assert len(said) == 25 and told == "" and steps == 25


def now_and_then(env: RankEnv) -> int:
    """Steps made where every third is skipped, at a limit of 2."""
    with env.launch(SGD | dict(optimizer=dict(type="sgd", lr=0.1, max_skipped_steps=2))) as context:
        engine = cl.initialize(model(), context=context)
        inputs, labels = batch()
        for number in range(9):
            engine.train_step((inputs, labels if number % 3 else torch.full_like(labels, -100)))
        return engine.steps


def test_a_step_that_is_made_begins_the_count_anew() -> None:
    assert run_world(now_and_then, 1) == [9]


# ---- a model that changes under its engine ----


def assigned(module: nn.Module) -> None:
    values = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in module.named_parameters()}
    module.load_state_dict(values, strict=False, assign=True)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "unfrozen": lambda m: m[0].requires_grad_(True),
    "another parameter": lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(8, 4).double())),
    "assigned by load_state_dict": assigned,
    "another module": lambda m: m.__setitem__(1, nn.Linear(4, 8).double()),
    "one more module": lambda m: m.append(nn.Linear(8, 8).double()),
    "one more parameter": lambda m: m[1].register_parameter("gain", nn.Parameter(torch.ones(8).double())),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m[1]),
}


def changed_under_its_engine(env: RankEnv, how: str, stage: int) -> list[str]:
    """What a step, an evaluation, a forward of a loop of one's own and the weights say."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        given = model()
        given[0].requires_grad_(False)
        engine = cl.initialize(given, context=context)
        engine.train_step(batch())
        CHANGES[how](engine.model)
        calls: list[Callable[[], Any]] = [
            lambda: engine.train_step(batch()), lambda: engine.eval_step(batch()), lambda: engine(batch()[0]),
            engine.full_state_dict,
        ]  # fmt: skip
        return [told_of(call) for call in calls]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("how", CHANGES)
def test_a_model_that_changes_under_its_engine_is_refused(how: str, stage: int) -> None:
    says = "requires a gradient now that did not" if how == "unfrozen" else "has other modules or parameters"
    for told in run_world(changed_under_its_engine, 2, how, stage):
        assert len(told) == 4 and all(says in each and "since the engine was made" in each for each in told)


def frozen_later(env: RankEnv, stage: int) -> tuple[list[float], float]:
    """Losses where the first module stops training after the first step, and how far this is from a plain loop."""
    plain = model().double()
    optimizer, truth = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1), []
    for number in range(4):
        plain[0].requires_grad_(number == 0)
        loss = loss_of(plain(batch()[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.append(float(loss.detach()))
    adamw = dict(optimizer=dict(type="adamw", lr=0.1, weight_decay=0.1))
    with env.launch(SGD | adamw | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context)
        losses = []
        for number in range(4):
            engine.model[0].requires_grad_(number == 0)
            losses.append(float(engine.train_step(batch()).loss))
    return losses, max(abs(one - other) for one, other in zip(losses, truth, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_that_stop_training_later_keep_their_values(stage: int) -> None:
    for _, difference in run_world(frozen_later, 2, stage):
        assert difference < 1e-12


# ---- tensors in one memory ----


class OneMemory(nn.Module):
    """Two tensors share memory, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if how == "tied by data":
            self.head.weight.data = self.table.weight.data
        elif how == "a buffer":
            self.register_buffer("seen", self.table.weight.data)
        elif how == "an attribute":
            self.kept = self.table.weight.detach().t()
        elif how == "views of one buffer":
            flat = torch.randn(64)
            self.table.weight = nn.Parameter(flat[:32].view(8, 4))
            self.head.weight = nn.Parameter(flat[16:48].view(8, 4))
        elif how == "parts of one buffer":  # as recurrent layers have them
            flat = torch.randn(64)
            self.table.weight = nn.Parameter(flat[:32].view(8, 4))
            self.head.weight = nn.Parameter(flat[32:].view(8, 4))
        elif how == "one Parameter":
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids))
        return logits


@pytest.mark.parametrize("how", ["tied by data", "a buffer", "an attribute", "views of one buffer"])
def test_parameters_that_share_memory_with_others_are_refused(how: str) -> None:
    with (
        cl.launch(SGD, rank=0, world_size=1) as context,
        pytest.raises(ValueError, match="are two tensors in one memory.*Legal: one Parameter by two names"),
    ):
        cl.initialize(OneMemory(how), context=context)


@pytest.mark.parametrize("how", ["", "one Parameter", "parts of one buffer"])
def test_parameters_in_memory_of_their_own_or_tied_are_not_refused(how: str) -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine = cl.initialize(OneMemory(how), context=context)
        assert float(engine.train_step(batch()).loss) > float(engine.train_step(batch()).loss)


def refused_by_one(env: RankEnv) -> str:
    with env.launch(SGD) as context, pytest.raises(ValueError) as caught:
        cl.initialize(OneMemory("" if context.mesh.world.coord == 0 else "tied by data"), context=context)
    return str(caught.value)


def test_a_model_that_one_rank_refuses_is_refused_by_the_others_in_its_words() -> None:
    first, second = run_world(refused_by_one, 2)
    assert second.startswith("model: table.weight and head.weight are two tensors in one memory")
    assert first == f"{second} (on rank 1, and not on rank 0)"


def with_old_spectral_norm() -> nn.Module:
    torch.manual_seed(0)
    model = OneMemory("").double()
    nn.utils.spectral_norm(model.head)
    return model


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_an_old_spectral_norm_sets_in_each_forward_may_share_memory_until_then(
    stage: int,
) -> None:
    given = batches(8, 3)
    truth = plain_run(with_old_spectral_norm(), given, 0.1)
    with cl.launch(SGD | dict(zero=dict(stage=stage)), rank=0, world_size=1) as context:
        engine = cl.initialize(with_old_spectral_norm(), context=context)
        losses = [float(engine.train_step(each).loss) for each in given]
    assert losses == pytest.approx(truth.losses, rel=1e-12)


class Replaces(torch.optim.SGD):
    """Gives parameters other data, in the place of changing them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_that_gives_parameters_other_data_is_refused() -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        engine = cl.initialize(model(), context=context, optimizer=lambda given: Replaces(given, lr=0.1))
        assert "has given 0.weight other data" in told_of(lambda: engine.train_step(batch()))


def unknown_ids(env: RankEnv, parallel: dict[str, Any], word: int) -> str:
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(OneMemory("one Parameter"), context=context)
        inputs, labels = batch()
        try:
            engine.train_step((inputs.masked_fill(inputs == 2, word), labels))
        except (IndexError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize("word", [8, 500])
def test_ids_that_a_table_has_not_are_refused_as_by_one_rank(word: int) -> None:
    assert "out of range" in run_world(unknown_ids, 1, {}, word)[0]
    for told in run_world(unknown_ids, 2, dict(tensor=dict(size=2)), word):
        assert told == f"ValueError: embedding: ids from 1 to {word}; legal: 0 to 7"


def test_on_a_device_that_raises_nothing_such_ids_look_up_a_row_that_no_part_has() -> None:
    part = TablePart(nn.Parameter(torch.zeros(4, 3)), 1, nn.Embedding(7, 3))
    ids, local = torch.tensor([-1, 0, 4, 6, 7, 500]), torch.tensor([0, 0, 0, 2, 3, 0])
    assert part.failing(ids, local).tolist() == [4, 0, 0, 2, 4, 4]
    with patch.object(part, "failing", wraps=part.failing) as asked:
        part.to("meta").terms(ids.to("meta"))
    assert asked.call_count == 1


def told_calls(env: RankEnv, stage: int) -> list[str]:
    """What a backward without a graph says, and a load of the model's own after a step; the loss after that."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context)
        engine.train_step(batch())
        weights = engine.full_state_dict()
        with torch.no_grad():
            told = [told_of(lambda: engine.backward(loss_of(engine(batch()[0]))))]
        engine.zero_grad()
        engine.train_step(batch())
        return [*told, told_of(lambda: engine.model.load_state_dict(weights))]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_without_a_graph_and_a_load_beside_the_engine_are_told(stage: int) -> None:
    for graph, load in run_world(told_calls, 2, stage):
        assert "the loss has no graph" in graph and "outside of no_grad" in graph
        assert load == "" if stage < 3 else "use engine.load_full_state_dict()" in load


def kept_words(env: RankEnv, causal: bool) -> str:
    """What a step says of labels that equal the inputs where they count, on one of two data ranks."""
    torch.manual_seed(0)
    shape = cl.models.GPTConfig(vocabulary=8, layers=1, heads=2, width=8, sequence=4, causal=causal)
    inputs = batch()[0]
    labels = torch.full_like(inputs, -100)
    labels[0, 2] = inputs[0, 2] if env.rank == 0 else 7
    with env.launch(SGD) as context:
        engine = cl.initialize(cl.models.GPT(shape), context=context)
        return told_of(lambda: engine.train_step((inputs, labels)))


def test_masked_words_that_a_batch_keeps_by_chance_are_trained_on() -> None:
    assert run_world(kept_words, 2, False) == ["", ""]
    (told,) = run_world(kept_words, 1, True)
    assert "labels: equal to the inputs" in told


class Blocks(nn.Module):
    """Gives logits and the stream before them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return {"logits": self.head(x), "stream": x}


def penalized(env: RankEnv, parallel: dict[str, Any], of: str) -> tuple[str, float]:
    """The error of a loop whose loss has a penalty, and the loss of a step after one."""
    torch.manual_seed(0)
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(Blocks().double(), context=context)

        def step() -> None:
            found = engine(batch()[0])
            logits = found["logits"].div_(2.0) if of == "logits" else found["logits"]
            weight = engine.model.head.weight if of == "head" else engine.model.blocks[0][0].weight
            more = logits.square().mean() if of == "logits" else weight.square().sum()
            engine.backward(loss_of(logits) + 0.1 * more)
            engine.step()

        told = told_of(step)
        engine.zero_grad()
        return told, float(engine.train_step(batch()).loss)


@pytest.mark.parametrize("of", ["logits", "block", "head"])
@pytest.mark.parametrize("parallel", [dict(tensor=dict(size=2)), dict(sequence=dict(size=2))], ids=str)
def test_a_penalty_on_weights_is_refused_where_a_rank_has_a_part_of_them(
    parallel: dict[str, Any], of: str
) -> None:
    ((nothing, truth),) = run_world(penalized, 1, {}, of)
    assert nothing == ""
    for told, loss in run_world(penalized, 2, parallel, of):
        if of == "logits":
            assert told == "" and loss == pytest.approx(truth, rel=1e-12)
        else:
            assert "the loss reads" in told and ".weight, not by whole outputs of engine(x)" in told


def copied(env: RankEnv, stage: int) -> tuple[str, float]:
    """What a copy of an engine's model says, and how far its weights in a copy made before are from a step of it."""
    given = model()
    apart = copy.deepcopy(given).double()
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(given, context=context)
        engine.train_step(batch())
        told = told_of(lambda: copy.deepcopy(engine.model))
        apart.load_state_dict(engine.full_state_dict())
        loss = float(loss_of(apart(batch()[0])).detach())
        return told, abs(loss - float(engine.train_step(batch()).loss))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_copy_of_a_model_that_an_engine_trains_is_refused_with_what_to_do(stage: int) -> None:
    for told, difference in run_world(copied, 2, stage):
        assert "a copy made before cl.initialize" in told and difference < 1e-14


def initialize_on_meta(env: RankEnv, where: str) -> str:
    with torch.device("meta"):
        built = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if where != "all":
        built[1 if where == "0.weight" else 0] = nn.Linear(4, 4)
    if where == "1.running_mean":
        built[1].weight = built[1].bias = None
    with env.launch(dict(precision="fp64")) as context:
        try:
            cl.initialize(built, context=context)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("where", ["all", "0.weight", "1.running_mean"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_values_is_refused_by_name(where: str, ranks: int) -> None:
    for said in run_world(initialize_on_meta, ranks, where):
        assert f"model: {'0.weight' if where == 'all' else where} is on meta and has no values" in said, said


def test_warnings_point_at_the_line_of_the_user() -> None:
    """Whatever lies between: decorators, hooks of torch, contexts."""
    model = OneMemory("")
    with cl.launch(SGD, rank=0, world_size=1) as context, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine = cl.initialize(model, context=context, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
        model.head.eval()
        engine.train_step(batch())
    words = ["config.optimizer has no effect", "stay in eval()"]
    told = [next(each for each in found if word in str(each.message)) for word in words]
    assert {each.filename for each in told} == {__file__}
    assert told[0].lineno < told[1].lineno
