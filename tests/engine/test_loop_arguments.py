"""What a loop of one's own may give a forward on data ranks, and what a forward may give: the result is torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

D, STEPS = 6, 3
CONFIG = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), timeout_s=60)


@dataclass(frozen=True)
class Beside:
    one: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2), nn.Linear(D, 2)

    def forward(
        self, x: Tensor, times: Any = 1, head: str = "a", beside: Any = None, rows: Any = None
    ) -> Tensor:
        x = torch.tanh(self.wide(x)) * times
        if beside is not None:
            x = x + (beside.one if isinstance(beside, Beside) else beside["one"] * beside["two"][0])
        if rows is not None:
            x = x + torch.stack([row.mean(0) for row in rows])
        out: Tensor = getattr(self, head)(x)
        return out


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, D, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)


def of_lengths(x: Tensor) -> list[Tensor]:
    """For each sample a tensor of its own length."""
    return [row.expand(1 + n % 2, -1) for n, row in enumerate(x)]


GIVEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number": lambda model, x: model(x, 2),
    "a tensor of one number": lambda model, x: model(x, times=torch.tensor(0.5, dtype=torch.float64)),
    "None and a word": lambda model, x: model(head="b", beside=None, x=x),
    "a mapping with a tuple": lambda model, x: model(x, beside=dict(one=x.sin(), two=(x.cos(),))),
    "a dataclass": lambda model, x: model(x, beside=Beside(x.sin())),
    "a list of samples": lambda model, x: model(x, rows=of_lengths(x)),
}


def loss_of(model: Any, x: Tensor, given: str) -> Tensor:
    # a rank without samples gives a sum of nothing
    return (GIVEN[given](model, x) - 1).square().mean(1).sum() / max(1, len(x))


def trained(env: RankEnv, samples: int, given: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    with env.launch(CONFIG | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(Model().double(), context=context)
        x, losses = context.local_batch([vectors(samples)])[0], []
        for _ in range(STEPS):
            engine.backward(loss_of(engine, x, given), count=len(x))
            losses.append(float(engine.step().loss))
        return losses, engine.full_state_dict()


def plainly(samples: int, given: str) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model, losses = Model().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, vectors(samples), given)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("samples", "given", "stage"),
    [
        *((samples, given, stage) for samples, stage in ((2, 0), (3, 3), (8, 0)) for given in GIVEN),
        (1, "a mapping with a tuple", 0),
    ],
)
def test_a_forward_of_a_loop_takes_more_than_tensors_of_samples(samples: int, given: str, stage: int) -> None:
    expected, plain = plainly(samples, given)
    for losses, weights in run_world(trained, 2, samples, given, stage):
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-10, atol=1e-12)


def sequences(layers: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4 * layers, 3, D, dtype=torch.float64)
    return nn.LSTM(D, 4, layers, batch_first=True).double(), x


def recurrent_loss(model: Any, x: Tensor) -> Tensor:
    y, (state, _) = model(x)
    loss: Tensor = (y - 1).square().mean() + state.square().mean()
    return loss


def recurrent(env: RankEnv, layers: int) -> dict[str, Tensor]:
    with env.launch(CONFIG) as context:
        model, x = sequences(layers)
        engine = cl.initialize(model, context=context)
        engine.backward(recurrent_loss(engine, context.local_batch([x])[0]))
        return engine.full_gradients()


@pytest.mark.parametrize("layers", [1, 2])
def test_states_whose_samples_are_second_do_not_count_as_samples_that_see_each_other(layers: int) -> None:
    """A half of a rank's samples, as the look takes it, has as many as there are layers."""
    model, x = sequences(layers)
    recurrent_loss(model, x).backward()
    for gradients in run_world(recurrent, 2, layers):
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12)


class Towers(nn.Module):
    """Two inputs; the second is called as labels often are."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both: Tensor = self.left(x) * self.right(y)
        return both


BY_NAME: dict[str, Callable[[], nn.Module]] = {
    "y": Towers,
    "tgt": lambda: nn.Transformer(D, 2, 1, 1, 8, dropout=0.0, batch_first=True),
}


def two_inputs(env: RankEnv, name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with env.launch(CONFIG) as context:
        engine = cl.initialize(BY_NAME[name]().double(), context=context)
        x, y = context.local_batch(pair())
        engine.backward((engine(x, y) - 1).square().mean())
        return engine.full_gradients()


def pair() -> list[Tensor]:
    x = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [x, x.sin()]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_required_argument_that_need_not_be_labels_is_an_input(name: str) -> None:
    torch.manual_seed(0)
    plain = BY_NAME[name]().double()
    (plain(*pair()) - 1).square().mean().backward()
    for gradients in run_world(two_inputs, 2, name):
        for key, p in plain.named_parameters():
            torch.testing.assert_close(gradients[key], p.grad, rtol=1e-10, atol=1e-12)


class Named(NamedTuple):
    logits: Tensor
    rest: Any


class Unnamed(NamedTuple):
    y: Tensor
    rest: Any


@dataclass(frozen=True)
class Frozen:
    logits: Tensor


GIVES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a named tuple with logits": (lambda y: Named(y, [None, "word"]), lambda out: out.logits),
    "a named tuple without": (lambda y: Unnamed(y, 3), lambda out: out.y),
    "a frozen dataclass": (Frozen, lambda out: out.logits),
}


class Giving(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Any:
        return GIVES[self.what][0](self.inner(x))


def giving(env: RankEnv, what: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with env.launch(CONFIG) as context:
        engine = cl.initialize(Giving(what).double(), context=context)
        engine.backward(GIVES[what][1](engine(context.local_batch([vectors(4)])[0])).square().mean())
        return engine.full_gradients()


@pytest.mark.parametrize("what", GIVES)
def test_what_a_forward_gives_keeps_its_form(what: str) -> None:
    torch.manual_seed(0)
    plain = Giving(what).double()
    GIVES[what][1](plain(vectors(4))).square().mean().backward()
    for gradients in run_world(giving, 2, what):
        torch.testing.assert_close(gradients["inner.weight"], plain.inner.weight.grad, rtol=1e-10, atol=1e-12)


class Sample(NamedTuple):
    x: Tensor
    label: int


def loaded(env: RankEnv) -> tuple[Any, Any]:
    with env.launch(CONFIG) as context:
        named = context.dataloader([Sample(torch.ones(2), n) for n in range(4)], global_batch=4)
        words = context.dataloader(
            [dict(x=torch.ones(2), word=str(n)) for n in range(4)], global_batch=4, collate=of_words
        )
        return next(iter(named)).label.tolist(), next(iter(words))["word"]


def of_words(rows: list[Any]) -> dict[str, Any]:
    return dict(x=torch.stack([row["x"] for row in rows]), word=[row["word"] for row in rows])


def test_batches_keep_their_named_tuples_and_lists() -> None:
    ranks = run_world(loaded, 2)
    assert sorted(n for labels, _ in ranks for n in labels) == [0, 1, 2, 3]
    assert sorted(w for _, words in ranks for w in words) == ["0", "1", "2", "3"]
    assert all(type(words) is list for _, words in ranks)


def answering() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose loss reads other names than labels, and a batch of it."""
    sizes = dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForQuestionAnswering(config).double()
    starts, ends = torch.tensor([1, 4, 0, 2]), torch.tensor([3, 5, 0, 7])
    return model, dict(input_ids=torch.randint(50, (4, 8)), start_positions=starts, end_positions=ends)


def answers(env: RankEnv, stage: int) -> dict[str, Tensor]:
    model, batch = answering()
    with env.launch(CONFIG | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model, context=context)
        mine = dict(zip(batch, context.local_batch([*batch.values()]), strict=True))
        for _ in range(STEPS):
            engine.backward(engine(**mine).loss)
            engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_whose_loss_reads_other_names_than_labels_trains_in_a_loop(stage: int) -> None:
    model, batch = answering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    for state in run_world(answers, 2, stage):
        for name, value in model.named_parameters():
            assert torch.allclose(state[name], value, rtol=1e-11, atol=1e-13), name
