"""A loss of one's own on data ranks, whose weights, masks or indices are detached numbers of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.flop_counter import FlopCounterMode

import colossal_lite as cl
from colossal_lite.checks.loss_record import MOST_FORWARDS, LossRecord
from colossal_lite.checks.loss_replay import couples
from colossal_lite.numerics.retained_gradients import retained_gradients_kept
from tests.checks.test_losses_between_samples import SGD, batch, each, is_equal, itself, model, plain, three
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

Loss = Callable[[Tensor, Tensor], Tensor]


def hardest(of_loss: Tensor) -> Tensor:
    return of_loss.detach().topk(2).indices


def above(of_loss: Tensor, limit: Callable[[Tensor], Tensor]) -> Tensor:
    numbers = of_loss.detach()
    return numbers > limit(numbers)


def normalized(of_loss: Tensor) -> Tensor:
    with torch.no_grad():
        return (of_loss - of_loss.mean()) / (of_loss.std() + 1e-6)


def marked(of_loss: Tensor) -> Tensor:
    """A mask that is written in place, by indices."""
    mask = torch.zeros_like(of_loss)
    mask[hardest(of_loss)] = 1.0
    return mask


def written(of_loss: Tensor) -> Tensor:
    weights = torch.zeros(len(of_loss), dtype=of_loss.dtype)
    for n, x in enumerate(of_loss):
        weights[n] = x.detach()
    return weights.softmax(0)


def banked(of_loss: Tensor) -> Tensor:
    bank = torch.zeros(2 * len(of_loss), dtype=of_loss.dtype)
    first = bank[: len(of_loss)]
    bank[: len(of_loss)] = of_loss.detach()
    return first.softmax(0)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "the hardest by indices": lambda e: e[hardest(e)].mean(),
    "the hardest gathered": lambda e: e.gather(0, e.data.argsort()[-2:]).mean(),
    "the hardest selected": lambda e: e.index_select(0, hardest(e)).mean(),
    "the hardest by a written mask": lambda e: (e * marked(e)).sum() / 2,
    "those above the mean": lambda e: e[above(e, torch.mean)].mean(),
    "those above the median, by a mask": lambda e: (e * above(e, torch.median)).mean(),
    "others of those above the median": lambda e: torch.where(above(e, torch.median), e, 0.1 * e).mean(),
    "clipped at the median": lambda e: e.clamp(max=e.detach().median()).mean(),
    "weights of a softmax": lambda e: (e * e.detach().softmax(0)).sum(),
    "weights over the mean": lambda e: (e * (e / e.mean()).detach()).mean(),
    "normalized advantages": lambda e: (e * normalized(e)).mean(),
    "weights in parts": lambda e: sum(a * b for a, b in zip(e.unbind(), e.detach().softmax(0), strict=True)),
    "weights written one by one": lambda e: (e * written(e)).sum(),
    "weights of a part of a bank": lambda e: (e * banked(e)).sum(),
    "over its own size": lambda e: (e / e.detach().norm()).mean(),
}
"""Losses of the losses of samples."""


def sure(z: Tensor) -> Tensor:
    return z.detach().softmax(1).amax(1) > 0.3


def is_largest(z: Tensor) -> Tensor:
    return z.detach() == z.detach().amax(1, keepdim=True)


WITHIN: dict[str, Loss] = {
    "a focal weight": lambda z, y: (each(z, y) * (1 - (-each(z, y).detach()).exp()) ** 2).mean(),
    "labels of its own": lambda z, _: F.cross_entropy(z, z.detach().argmax(-1)),
    "a fixed threshold": lambda z, y: (each(z, y) * (z.detach().softmax(-1).amax(-1) > 0.3)).mean(),
    "a straight-through choice": lambda z, y: each(z + (z.sign() - z).detach(), y).mean(),
    "the largest by an index": lambda z, _: z.gather(1, z.detach().argmax(-1, keepdim=True)).mean(),
    "its own scale": lambda z, y: F.cross_entropy(z / z.detach().norm(dim=-1, keepdim=True), y),
    "its mean is taken off": lambda z, y: F.cross_entropy(z - z.detach().mean(), y),
    "written in place": lambda z, y: F.cross_entropy(z.clone().masked_fill_(z.detach() < -1, -9.0), y),
    "a sampled action": lambda z, _: -torch.distributions.Categorical(logits=z).log_prob(z.data.argmax(-1)).mean(),
    "a weight of no effect": lambda z, y: F.cross_entropy(z, y) + 0.0 * (z * z.detach().mean()).sum(),
    "rows in another order": lambda z, y: each(z[order := z.detach()[:, 0].argsort()], y[order]).mean(),
    "a loop over some samples": lambda z, y: (
        sum(F.cross_entropy(row[None], label[None]) for row, label in zip(z[sure(z)], y[sure(z)], strict=True)) / len(z)
    ),
    "a guard that never fires": lambda z, y: each(z, y)[z.detach().abs().amax(1) < 10].mean(),
    "the larger half of each sample": lambda z, _: z[z.detach() >= z.detach().median(1, True).values].mean(),
    "the largest of each sample": lambda z, _: (z * is_largest(z)).sum() / is_largest(z).sum(),
    "probabilities over their sum": lambda z, _: (z.softmax(1).square() / z.detach().softmax(1).sum()).sum(),
    "a sparse number beside it": lambda z, y: F.cross_entropy(z, y) + 0 * z.data.to_sparse().div_(2).to_dense().sum(),
    "a loop over samples": lambda z, y: torch.stack(
        [(row * row.detach().softmax(0)).sum() - row[label] for row, label in zip(z, y, strict=True)]
    ).mean(),
}  # fmt: skip


def trained_on(
    env: RankEnv, name: str, gathers: bool, count: int | None, config: dict[str, Any]
) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(model(), context=context)
        x, _, y = (each.chunk(env.world_size)[env.rank] for each in batch())
        every = engine.all_samples if gathers else itself

        def step() -> None:
            z = engine(x)
            loss = BETWEEN[name](every(each(z, y))) if name in BETWEEN else WITHIN[name](z, y)
            engine.backward(loss, count=count)
            assert not _len_torch_dispatch_stack(), "nothing is recorded beside backward"
            engine.step()

        return three(step, engine)


@pytest.mark.parametrize("name", BETWEEN)
def test_a_loss_by_detached_numbers_of_other_samples_is_exact_over_all_and_refused_over_a_rank_s(
    name: str,
) -> None:
    truth = plain(lambda given: BETWEEN[name](each(given(batch()[0]), batch()[2])))
    for told, state in run_world(trained_on, 2, name, True, None, {}):
        assert told == "" and is_equal(state, truth)
    for told, state in run_world(trained_on, 2, name, False, None, {}):
        assert "the loss is one between samples" in told and is_equal(state, model().state_dict())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", WITHIN)
def test_a_loss_by_detached_numbers_of_the_same_sample_is_exact(name: str, stage: int) -> None:
    truth = plain(lambda given: WITHIN[name](given(batch()[0]), batch()[2]))
    for told, state in run_world(trained_on, 2, name, False, None, dict(zero=dict(stage=stage))):
        assert told == "" and is_equal(state, truth)


def confident(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of the samples that the model is sure of, and their number."""
    chosen = z.detach().softmax(-1).amax(-1) > 0.3
    return (each(z, y) * chosen).sum() / chosen.sum(), chosen.sum()


def chosen_by_outputs(env: RankEnv, counts: bool) -> tuple[str, dict[str, Tensor]]:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, _, y = (each.chunk(env.world_size)[env.rank] for each in batch())

        def step() -> None:
            loss, count = confident(engine(x), y)
            engine.backward(loss, count=count) if counts else engine.backward(loss)
            engine.step()

        return three(step, engine)


def test_a_mean_over_samples_that_outputs_choose_is_exact_with_their_count_and_refused_without() -> None:
    truth = plain(lambda given: confident(given(batch()[0]), batch()[2])[0])
    for told, state in run_world(chosen_by_outputs, 2, True):
        assert told == "" and is_equal(state, truth)
    for told, state in run_world(chosen_by_outputs, 2, False):
        assert "engine.backward(loss, count)" in told and is_equal(state, model().state_dict())


def told_later(env: RankEnv) -> tuple[int, str]:
    """The step that is refused, of a term that begins in step 6, and what it says."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, _, y = (each.chunk(env.world_size)[env.rank] for each in batch())

        def step(n: int) -> None:
            of_loss = each(engine(x), y)
            engine.backward(BETWEEN["weights of a softmax"](of_loss) if n > 5 else of_loss.mean())
            engine.step()

        return next((n, told) for n in range(1, 10) if (told := told_of(lambda n=n: step(n))) or n == 9)  # type: ignore[misc]


def test_steps_1_2_4_8_and_so_on_look_again() -> None:
    for n, told in run_world(told_later, 2):
        assert n == 8 and "the loss is one between samples" in told


def twice(z: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Two forwards, each of which learns to be what the other is."""
    a, b = z(x), z(x + 1)
    return -(F.cosine_similarity(a, b.detach()) + F.cosine_similarity(b, a.detach())).mean()


def two_forwards(env: RankEnv, couples: bool) -> tuple[str, dict[str, Tensor]]:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x = batch()[0].chunk(env.world_size)[env.rank]

        def step() -> None:
            loss = twice(engine, x)
            if couples:
                a, b = engine(x), engine(x + 1)
                loss = ((a - b).square().sum(1) * b.detach().sum(1).softmax(0)).mean()
            engine.backward(loss)
            engine.step()

        return three(step, engine)


def test_two_forwards_are_looked_at_together() -> None:
    truth = plain(lambda given: twice(given, batch()[0]))
    for told, state in run_world(two_forwards, 2, False):
        assert told == "" and is_equal(state, truth)
    for told, _ in run_world(two_forwards, 2, True):
        assert "the loss is one between samples" in told


def over_ranks(e: Tensor) -> Tensor:
    """Advantages by the mean of all ranks, which a loop exchanges itself."""
    sums = torch.stack([e.detach().sum(), torch.tensor(float(len(e)), dtype=e.dtype)])
    torch.distributed.all_reduce(sums)
    return (e * (e.detach() - sums[0] / sums[1])).mean()


def softmax_over_ranks(e: Tensor) -> Tensor:
    own = e.detach().clone()
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    rank = torch.distributed.get_rank()
    return len(every) * (e * torch.cat(every).softmax(0).chunk(len(every))[rank]).sum()


def beside_its_own(e: Tensor) -> Tensor:
    """Weights of a rank's own, beside those that ranks exchange."""
    return BETWEEN["weights of a softmax"](e) + over_ranks(e)


EXCHANGED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a mean": (over_ranks, lambda e: (e * (e - e.mean()).detach()).mean()),
    "all": (softmax_over_ranks, BETWEEN["weights of a softmax"]),
    "some": (beside_its_own, beside_its_own),
}


def exchanged(env: RankEnv, name: str) -> tuple[str, dict[str, Tensor]]:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, _, y = (each.chunk(env.world_size)[env.rank] for each in batch())

        def step() -> None:
            engine.backward(EXCHANGED[name][0](each(engine(x), y)))
            engine.step()

        return three(step, engine)


def test_an_exchange_hides_nothing_else() -> None:
    for told, _ in run_world(exchanged, 2, "some"):
        assert "the loss is one between samples" in told


@pytest.mark.parametrize("name", ["a mean", "all"])
def test_what_a_loop_exchanges_itself_is_exact_and_is_not_exchanged_again(name: str) -> None:
    truth = plain(lambda given: EXCHANGED[name][1](each(given(batch()[0]), batch()[2])))
    for told, state in run_world(exchanged, 2, name):
        assert told == "" and is_equal(state, truth)


class Masked(nn.Module):
    """Reads some numbers of each sample, and says which."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones_like(x).scatter(1, (7 * x).sin().argsort(1)[:, :2], 0.0)
        return self.layer(x * (1 - mask)), mask


def masked(model: Any, x: Tensor) -> Tensor:
    found, mask = model(x)
    loss: Tensor = ((found - x).square() * mask).sum() / mask.sum()
    return loss


def masked_model() -> nn.Module:
    torch.manual_seed(0)
    return Masked()


def trained_masked(env: RankEnv) -> tuple[str, dict[str, Tensor]]:
    with env.launch(SGD) as context:
        engine = cl.initialize(masked_model(), context=context)
        x = batch()[0].chunk(env.world_size)[env.rank]

        def step() -> None:
            engine.backward(masked(engine, x))
            engine.step()

        return three(step, engine)


def test_outputs_that_do_not_train_stay_as_they_are() -> None:
    given, x = masked_model(), batch()[0]
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        masked(given, x).backward()
        optimizer.step()
    for told, state in run_world(trained_masked, 2):
        assert told == "" and is_equal(state, given.state_dict())


def looked_in_turn(env: RankEnv, how: str) -> str:
    """What is told where something else happens between the forward and the loss."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, other, y = (each.chunk(env.world_size)[env.rank] for each in batch())

        def step() -> None:
            z = engine(x)
            if how == "a forward without gradients":
                with torch.no_grad():
                    engine(other)
            if how == "another loss":
                engine.backward(F.cross_entropy(z, y), retain_graph=True)
            loss = BETWEEN["weights of a softmax"](each(z, y))
            if how == "zero_grad":
                engine.zero_grad()
            engine.backward(loss)

        return told_of(step)


@pytest.mark.parametrize("how", ["a forward without gradients", "another loss", "zero_grad"])
def test_a_loss_is_looked_at_beside_other_calls(how: str) -> None:
    for told in run_world(looked_in_turn, 2, how):
        assert "the loss is one between samples" in told


def left_on(env: RankEnv) -> list[int]:
    """How many modes are on after what ends a record."""
    found = []
    for end in ("close", "context", "other engine"):
        with env.launch(SGD) as context:
            engine, other = (cl.initialize(model(), context=context) for _ in range(2))
            z = engine(batch()[0].chunk(env.world_size)[env.rank])
            assert _len_torch_dispatch_stack() == 1
            match end:
                case "close":
                    engine.close()
                case "other engine":
                    other.backward(other(batch()[0].chunk(env.world_size)[env.rank]).mean())
            if end != "context":
                found.append(_len_torch_dispatch_stack())
            del z
        found.append(_len_torch_dispatch_stack())
    return found


def test_nothing_is_recorded_after_a_step_or_an_engine_ends() -> None:
    for found in run_world(left_on, 2):
        assert not any(found)


# ---- a record alone ----


def recorded(loss_of: Callable[[Tensor], Tensor], *, counted: bool = False) -> bool:
    """Whether a record of a loss finds that samples meet."""
    z = (
        torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        * 1.0
    )
    record = LossRecord()
    edge = get_gradient_edge(z)
    record.begin([z], 4)
    try:
        loss = loss_of(z)
    finally:
        record.pause()
    assert not _len_torch_dispatch_stack()
    return couples(record, loss, [edge], counted=counted)


def weighed(z: Tensor) -> Tensor:
    return (z.square().sum(1) * z.detach().sum(1).softmax(0)).sum()


def of_views(z: Tensor) -> Tensor:
    rows = z.view(2, 2, 3).transpose(0, 1).reshape(4, 3)[:, :2].unsqueeze(1).squeeze(1)
    return weighed(rows)


def in_place(z: Tensor) -> Tensor:
    z *= 2
    z[:, 0].mul_(3)
    return weighed(z)


def under_a_mode(z: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return weighed(z)


def mode_left_on(z: Tensor) -> Tensor:
    mode = FlopCounterMode(display=False)
    mode.__enter__()
    loss = weighed(z)
    record_is_below = _len_torch_dispatch_stack() == 2
    mode.__exit__(None, None, None)
    assert record_is_below
    return loss


def drawn_actions(z: Tensor) -> Tensor:
    return weighed(z) - z.log_softmax(-1).gather(1, torch.multinomial(z.detach().softmax(-1), 1)).sum()


def in_halves(z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scores = z.float() @ torch.eye(3)
    return weighed(scores)


@pytest.mark.parametrize(
    "loss_of", [weighed, of_views, in_place, under_a_mode, mode_left_on, drawn_actions, in_halves]
)
def test_a_record_holds_what_a_loss_does(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert recorded(loss_of)


def changed_since(z: Tensor) -> Tensor:
    weights = torch.ones(4, dtype=z.dtype)
    loss = (z.square().sum(1) * (weights * z.detach().sum(1)).softmax(0)).sum()
    weights.zero_()
    return loss


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize(
    "loss_of",
    [
        changed_since,
        lambda z: weighed(Doubled.apply(z)),
        lambda z: (z.square().sum(1) * torch.tensor(z.detach().sum(1).softmax(0).tolist())).sum(),
        lambda z: F.dropout(z, 0.5).mul(F.dropout(z, 0.5).detach()).sum(),
        lambda z: z.square().sum(1)[int(z.detach().sum(1).argmax())],
    ],
    ids=["a constant that changed", "a Function", "by Python", "drawn", "an index of Python"],
)
def test_what_a_record_does_not_hold_is_not_refused(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert not recorded(loss_of)


def test_a_common_factor_is_allowed_where_a_count_says_so() -> None:
    def over_the_sum(z: Tensor) -> Tensor:
        return z.square().sum() / z.detach().square().sum()

    assert recorded(over_the_sum) and not recorded(over_the_sum, counted=True)
    assert recorded(lambda z: over_the_sum(z) + z.sum(), counted=True)


def test_a_record_leaves_numbers_and_gradients_as_they_are() -> None:
    def trained(record: LossRecord | None) -> list[Tensor]:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        z = x * 1.0
        z.retain_grad()
        edge = get_gradient_edge(z)
        if record is not None:
            record.begin([z], 4)
        total = torch.zeros(4)
        z.data[0, 0] = 5.0
        total += z.detach().sum(1)
        loss = weighed(z) + (z.sum(1) * total).mean()
        if record is not None:
            record.pause()
            with retained_gradients_kept():
                assert couples(record, loss, [edge], counted=False)
            record.end()
        loss.backward()
        assert x.grad is not None and z.grad is not None
        return [x.grad, z.grad, total, loss.detach(), z.detach()]

    for with_record, without in zip(trained(LossRecord()), trained(None), strict=True):
        assert torch.equal(with_record, without)


def test_forwards_without_a_backward_are_not_kept_for_ever() -> None:
    record, network = LossRecord(), nn.Linear(3, 3)
    for n in range(3 * MOST_FORWARDS):
        record.pause()
        record.begin([network(torch.randn(4, 3))], 4)
        assert len(record._starts) <= MOST_FORWARDS
        assert _len_torch_dispatch_stack() == (n < MOST_FORWARDS)
    record.end()
    assert not _len_torch_dispatch_stack() and not record._starts
