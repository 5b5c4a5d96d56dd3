"""Models with code that our own do not have are exact in every mode that takes them, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import colossal_lite as cl
from colossal_lite.data.batch import first_input
from colossal_lite.parallel.small_copy import own_lengths
from tests.shared.plain_loop import OfBlocks, batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS, TOKENS = 16, 8, 3, 6
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)


class Attending(nn.Module):
    """A block that is its own attention. `way`: what its output goes through."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.num_heads = way, 2
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        if way == "orthogonal":
            nn.utils.parametrizations.orthogonal(self.out, orthogonal_map="householder")
        if way == "gate":  # that prunes what is below a threshold
            self.gate = nn.Parameter(torch.full((D,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        qkv = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        if self.way == "gate":
            y = y * self.gate * (self.gate > 1)
        x = x + y
        return x + self.down(F.gelu(self.up(x)))


class Attentive(OfBlocks):
    def __init__(self, way: str = "") -> None:
        super().__init__(V, D, (Attending(way) for _ in range(2)))


@dataclass
class Outputs:
    logits: Tensor


class AnObject(Attentive):
    """Gives an object that torch's trees do not know."""

    def forward(self, ids: Tensor) -> Any:
        return Outputs(super().forward(ids))


class FixedLength(Attentive):
    """Takes sequences of one length alone, which no setting states."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TOKENS, D))

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Empty(Attentive):
    """Has parameters of no element, as adapters of rank 0 are."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.narrow = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids) + self.none.sum() + self.narrow.sum()


class NamedResult(Attentive):
    """Reads a result of torch by its name."""

    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        return logits - logits.max(-1, keepdim=True).values


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(D, D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class FrozenDropout(OfBlocks):
    """Its own `train()` leaves modules within the blocks in evaluation."""

    def __init__(self) -> None:
        super().__init__(V, D, (nn.Sequential(Tanh(), Tanh()) for _ in range(2)))

    def train(self, mode: bool = True) -> FrozenDropout:
        super().train(mode)
        for block in self.blocks:
            block[0].drop.eval()  # type: ignore[index]
            for inner in block:  # type: ignore[attr-defined]
                inner.drop.eval()
        return self


class AlphaDropout(OfBlocks):
    """Drops features between two linears of a block."""

    def __init__(self) -> None:
        super().__init__(V, D, (AlphaDropped() for _ in range(2)))


class AlphaDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.alpha_dropout(self.up(x).tanh(), 0.3, self.training))
        return y


class FrozenStatistics(nn.Module):
    """Its own `train()` leaves a norm over the batch in evaluation, or not."""

    def __init__(self, stays: int = 9) -> None:
        """`stays`: for so many calls of `train()`."""
        super().__init__()
        self.stays = stays
        self.words, self.norm, self.head = nn.Embedding(V, D), nn.BatchNorm1d(D), nn.Linear(D, V)
        self.norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.stays -= mode
        if self.stays >= 0:
            self.norm.eval()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2))
        return logits


class Force(nn.Module):
    """Takes a step against the gradient of an energy, by transforms of torch.func or by autograd."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.energy = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.how == "func":
            force = torch.func.vmap(torch.func.grad(lambda z: self.energy(z).squeeze(-1)))(x.flatten(0, 1))
        else:
            at = x.flatten(0, 1)
            at = at if at.requires_grad else at.requires_grad_()
            with torch.enable_grad():
                (force,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)
        logits: Tensor = self.head(x - force.view_as(x))
        return logits


class Recomputing(OfBlocks):
    """Recomputes its blocks by torch's own function."""

    def __init__(self) -> None:
        super().__init__(V, D, (nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "": Attentive,
    "orthogonal": lambda: Attentive("orthogonal"),
    "gate": lambda: Attentive("gate"),
    "object": AnObject,
    "frozen dropout": FrozenDropout,
    "frozen statistics": FrozenStatistics,
    "moving statistics": lambda: FrozenStatistics(stays=0),
    "later moving statistics": lambda: FrozenStatistics(stays=2),
    "named result": NamedResult,
    "fixed length": FixedLength,
    "empty": Empty,
    "func": lambda: Force("func"),
    "autograd": lambda: Force("autograd"),
    "scripted": lambda: nn.Sequential(nn.Embedding(V, D), torch.jit.script(nn.Linear(D, V))),
    "all scripted": lambda: torch.jit.script(nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))),
    "alpha dropout": AlphaDropout,
    "recomputing": Recomputing,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


class Plain(nn.Module):
    """Gives the logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        found = self.inner(ids)
        return found.logits if isinstance(found, Outputs) else found


def trained(env: RankEnv, name: str, more: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(SGD | more) as context:
        engine = cl.initialize(made(name), context=context)
        given = [
            tuple(part[context.local_batch(4)].contiguous() for part in batch)
            for batch in batches(V, STEPS, TOKENS)
        ]
        losses = [float(engine.train_step(batch).loss) for batch in given]
        return [*losses, float(engine.eval_step(given[0]))], engine.full_state_dict()


def told(env: RankEnv, name: str, more: dict[str, Any]) -> str:
    try:
        trained(env, name, more)
    except ValueError as error:
        return str(error)
    return ""


CUT = dict(tensor=dict(size=2))
WHOLE = dict(tensor=dict(size=2, sequence_parallel=False))
STAGES = dict(pipeline=dict(size=2, micro_batches=2))


@pytest.mark.parametrize(
    "name, more",
    [
        # In random copies these close the way that attention takes, so a proof would see nothing of it.
        ("orthogonal", dict(parallel=CUT)),
        ("gate", dict(parallel=CUT)),
        ("", dict(parallel=CUT)),
        ("", dict(parallel=WHOLE)),
        ("object", dict(parallel=dict(sequence=2))),
        ("object", dict(parallel=CUT)),
        ("object", dict(parallel=STAGES)),
        ("named result", dict(parallel=dict(sequence=2))),
        ("fixed length", dict(parallel=CUT)),
        ("fixed length", dict(parallel=STAGES)),
        ("fixed length", dict(zero=dict(stage=2))),
        ("frozen dropout", dict(parallel=STAGES)),
        ("frozen dropout", dict(zero=dict(stage=3))),
        ("frozen statistics", dict(zero=dict(stage=2))),
        ("frozen statistics", dict(gradient_accumulation=2)),
        ("empty", dict(parallel=CUT)),
        ("empty", dict(zero=dict(stage=3), memory=dict(placement="host", chunk_bytes=64))),
        (
            "empty",
            dict(zero=dict(stage=3), memory=dict(placement="auto", device_budget=10**6, chunk_bytes=64)),
        ),
        ("func", dict(zero=dict(stage=1), memory=dict(chunk_bytes=256))),
        ("func", dict(zero=dict(stage=2), memory=dict(chunk_bytes=256))),
        ("func", dict(memory=dict(chunk_bytes=256, placement="host"))),
        ("autograd", dict(zero=dict(stage=3), memory=dict(chunk_bytes=256))),
    ],
    ids=str,
)
def test_a_model_with_code_of_its_own_is_that_of_one_process(name: str, more: dict[str, Any]) -> None:
    inner = made(name)
    truth = plain_run(Plain(inner).train(), batches(V, STEPS, TOKENS), 0.5)
    for losses, weights in run_world(trained, 2, name, more):
        assert losses == pytest.approx([*truth.losses, truth.evaluated], rel=1e-11)
        for key, right in truth.weights.items():
            torch.testing.assert_close(weights[key.removeprefix("inner.")], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parallel", [CUT, WHOLE, dict(sequence=2), STAGES], ids=str)
def test_alpha_dropout_draws_as_on_one_rank_wherever_features_or_tokens_are_cut(
    parallel: dict[str, Any],
) -> None:
    ((losses, weights),) = run_world(trained, 1, "alpha dropout", {})
    for found, state in run_world(trained, 2, "alpha dropout", dict(parallel=parallel)):
        assert found == pytest.approx(losses, rel=1e-11)
        for key, right in weights.items():
            torch.testing.assert_close(state[key], right, rtol=1e-10, atol=1e-12)


def test_an_initialize_that_fails_leaves_a_norm_free_to_train() -> None:
    with cl.launch(SGD | dict(gradient_accumulation=2), rank=0, world_size=1) as context:
        model = made("frozen statistics")
        with pytest.raises(ValueError, match="optimizer"):
            cl.initialize(model, context=context, optimizer=lambda parameters: None)
        engine = cl.initialize(model, context=context)
        engine.close()
    model.norm.train()  # type: ignore[union-attr, operator]
    model(batches(V, 1, TOKENS)[0][0])


ACCUMULATED = dict(gradient_accumulation=2)


@pytest.mark.parametrize(
    "name, more, says",
    [
        ("later moving statistics", ACCUMULATED, ("norm is a BatchNorm1d", "gradient_accumulation=2")),
        ("moving statistics", ACCUMULATED, ("norm is a BatchNorm1d", "own train() leaves in eval()")),
        ("all scripted", {}, ("it is a torch.jit module",)),
        ("scripted", {}, ("1 is a torch.jit module", "the module before torch.jit.script")),
        ("func", dict(zero=dict(stage=3)), ("torch.func", "zero.stage=2", "torch.autograd.grad")),
        ("recomputing", dict(parallel=STAGES), ("does not run in parts", "activation_checkpoint")),
    ],
    ids=str,
)
def test_what_a_mode_cannot_run_is_refused_by_name(
    name: str, more: dict[str, Any], says: tuple[str, ...]
) -> None:
    for text in run_world(told, 2, name, more):
        assert all(word in text for word in says), text


class SeesOthers(nn.Module):
    """Takes vectors, so that no copy can be tried on words. Its samples see each other, in the way `how`, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        if self.how == "mean":
            h = h - h.mean(0, keepdim=True)
        elif self.how == "size":
            h = h / len(h)
        elif self.how == "in-batch negatives":
            return F.normalize(h, dim=-1) @ F.normalize(x, dim=-1).T
        elif self.how == "two groups":
            groups = h.view(2, -1, D) if len(h) % 2 == 0 else h[None]
            h = (h.view_as(groups) - groups.mean(1, keepdim=True)).view(-1, D)
        elif self.how == "mean, of another name":
            return dict(count=torch.ones(()), scores=self.head(h - h.mean(0, keepdim=True)))
        logits: Tensor = self.head(h)
        return logits


def first_step(env: RankEnv, how: str, more: dict[str, Any], loop: str) -> str | float:
    """The loss of the first step, or what it is refused by."""
    torch.manual_seed(0)
    vectors, labels = torch.randn(4, D).double(), torch.arange(4)
    with env.launch(SGD | more) as context:
        engine = cl.initialize(SeesOthers(how).double(), context=context)
        mine = context.local_batch(4)
        try:
            if loop in ("own", "own, by name"):
                given = engine(vectors[mine]) if loop == "own" else engine(x=vectors[mine])
                given = given["scores"] if isinstance(given, dict) else given
                engine.backward(F.cross_entropy(given, labels[mine]))
                return float(engine.step().loss)
            return float(engine.train_step((vectors[mine], labels[mine])).loss)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    "how, loop",
    [
        *((how, loop) for how in ("mean", "size", "in-batch negatives") for loop in ("own", "engine's")),
        ("mean, of another name", "own"),
    ],
)
def test_the_first_batch_shows_that_samples_see_each_other_where_words_cannot(how: str, loop: str) -> None:
    for told_of in run_world(first_step, 2, how, {}, loop):
        assert "samples of SeesOthers see each other" in str(told_of) and "data=2" in str(told_of)
    (one,) = run_world(first_step, 1, how, {}, loop)
    assert isinstance(one, float), "a rank that has the whole batch takes the model"


@pytest.mark.parametrize("how, world", [("two groups", 2), ("two groups", 4), ("mean", 4)])
def test_so_it_does_where_the_samples_of_a_rank_are_too_few_to_show_it(how: str, world: int) -> None:
    for told_of in run_world(first_step, world, how, {}, "engine's"):
        assert "samples of SeesOthers see each other" in str(told_of) and f"data={world}" in str(told_of)


def test_a_model_of_vectors_whose_samples_are_apart_trains_on_parts_of_a_batch() -> None:
    (whole,) = run_world(first_step, 1, "apart", {}, "engine's")
    (turns,) = run_world(first_step, 1, "apart", dict(gradient_accumulation=2), "engine's")
    named = run_world(first_step, 2, "apart", {}, "own, by name")
    ranks = [loss for world in (2, 4) for loss in run_world(first_step, world, "apart", {}, "engine's")]
    assert [turns, *ranks, *named] == pytest.approx(9 * [whole], rel=1e-12)


def test_a_call_without_a_tensor_is_refused_by_its_names() -> None:
    with pytest.raises(ValueError, match=r"1 positional arguments and the names \['scale'\]"):
        first_input(([1, 2],), dict(scale=2.0))


class Maps(nn.Module):
    """Attention that gives its weights as well."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        maps = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return x + self.out((maps @ v).transpose(1, 2).flatten(2)), maps


class Heads(nn.Module):
    """Gives logits and what `what` says beside them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.words = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Maps() if what == "maps" else Tanh() for _ in range(2))
        self.head, self.value = nn.Linear(D, V), nn.Linear(D, 1)
        for block in self.blocks if what != "maps" else ():
            block.drop.p = 0.0  # type: ignore[union-attr, assignment]

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
            if self.what == "maps":
                x, maps = x
        logits = self.head(x)
        match self.what:
            case "second":
                return x, logits
            case "other name":
                return dict(scores=logits)
            case "of logits":
                return dict(logits=logits, beside=logits.tanh())
            case "maps":
                return dict(logits=logits, beside=maps)
            case "mean of logits":
                return dict(logits=logits, beside=logits.mean(-1))
            case "sum":
                return dict(logits=logits, beside=x.square().mean())
            case "value":
                return dict(logits=logits, beside=self.value(x))
        return dict(logits=logits, beside=x)


def loss_beside(outputs: Any, labels: Tensor) -> Tensor:
    beside = outputs["beside"]
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()) + beside.square().mean()


def own_loop(env: RankEnv, what: str, parallel: dict[str, Any]) -> tuple[list[float], Any] | str:
    torch.manual_seed(0)
    with env.launch(SGD | dict(parallel=parallel)) as context:
        losses = []
        try:
            engine = cl.initialize(Heads(what).double(), context=context)
            for ids, labels in batches(V, STEPS, TOKENS + 1):
                outputs = engine(ids)
                loss = loss_beside(outputs, labels) if isinstance(outputs, dict) else outputs[1].sum()
                engine.backward(loss)
                losses.append(float(loss.detach()))
                engine.step()
        except ValueError as error:
            return str(error)
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("parallel", [dict(sequence=2), dict(tensor=WHOLE["tensor"])], ids=str)
@pytest.mark.parametrize("what", ["hidden", "value"])
def test_a_loss_may_read_all_tokens_of_other_outputs(what: str, parallel: dict[str, Any]) -> None:
    (truth,) = run_world(own_loop, 1, what, {})
    for losses, weights in run_world(own_loop, 2, what, parallel):
        assert losses == pytest.approx(truth[0], rel=1e-12)
        for name, right in truth[1].items():
            torch.testing.assert_close(weights[name], right, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "what, parallel, says",
    [
        ("second", dict(tensor=2), "first in a tuple"),
        ("other name", dict(tensor=2), "'scores'"),
        ("other name", dict(sequence=2), "'scores'"),
        ("maps", dict(tensor=WHOLE["tensor"]), "not by whole outputs"),
        ("of logits", dict(tensor=2), "not by whole outputs"),
        ("hidden", dict(tensor=2), "not by whole outputs"),  # tokens are cut up to the head
        ("sum", dict(sequence=2), "cannot be computed on a part"),
        ("mean of logits", dict(tensor=2), "not by whole outputs"),
        ("hidden", dict(tensor=dict(size=4, mode="2d")), "not by whole outputs"),
    ],
    ids=str,
)
def test_a_loss_of_a_rank_s_part_of_outputs_is_refused(
    what: str, parallel: dict[str, Any], says: str
) -> None:
    for text in run_world(own_loop, 4 if "2d" in str(parallel) else 2, what, parallel):
        assert says in text


class BothWays(nn.Module):
    """Each token sees those behind it, padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(2 * D, V)
        self.rows = nn.GRU(D, D, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(self.words(ids))[0])
        return logits


def padded_alone(env: RankEnv, causal: bool, lengths: list[int], loop: str) -> float | str:
    """The loss of a batch of two samples, which ranks pad each to its own length."""
    torch.manual_seed(0)
    made = Attentive() if causal else BothWays()
    ids, labels = torch.zeros(2, max(lengths), dtype=torch.int64), torch.full((2, max(lengths)), -100)
    for sample, length in enumerate([3, 5]):
        ids[sample, :length] = labels[sample, :length] = torch.arange(length) + 1
        labels[sample, :length] += 1
    with env.launch(SGD) as context:
        engine = cl.initialize(made.double(), context=context)
        mine, length = context.local_batch(2), lengths[env.rank]
        try:
            if loop == "engine's":
                return float(engine.train_step((ids[mine, :length], labels[mine, :length])).loss)
            if loop == "evaluation":
                return float(engine.eval_step((ids[mine, :length], labels[mine, :length])))
            logits = engine(ids[mine, :length]).flatten(0, 1)
            counted = labels[mine, :length].flatten()
            engine.backward(F.cross_entropy(logits, counted), int((counted != -100).sum()))
            return float(engine.step().loss)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("loop", ["engine's", "evaluation", "own"])
def test_lengths_that_ranks_pad_alone_are_refused_where_tokens_see_padding(loop: str) -> None:
    (whole,) = run_world(padded_alone, 1, False, [5], loop)
    assert run_world(padded_alone, 2, False, [5, 5], loop) == pytest.approx([whole, whole], rel=1e-12)
    for text in run_world(padded_alone, 2, False, [3, 5], loop):
        assert "[3, 5] tokens on the data ranks" in str(text) and "attention_mask" in str(text)
    (whole,) = run_world(padded_alone, 1, True, [5], loop)
    assert run_world(padded_alone, 2, True, [3, 5], loop) == pytest.approx([whole, whole], rel=1e-12)


def called_directly(env: RankEnv, parallel: dict[str, Any]) -> list[str]:
    """What a call of the model itself is refused by: beside its engine, after it, and as the model of another."""
    found = []

    def told_of(call: Callable[[], Any]) -> None:
        try:
            call()
        except ValueError as error:
            found.append(str(error))

    model, (ids, labels) = made(""), batches(V, 1, TOKENS)[0]
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(model, context=context)
        engine.train_step((ids, labels))
        told_of(lambda: engine.model(ids))
        engine.eval_step((ids, labels))
        engine(ids)
        engine.close()
        told_of(lambda: model(ids))
        told_of(lambda: cl.initialize(model, context=context))
    return found


@pytest.mark.parametrize("parallel", [CUT, dict(sequence=2)], ids=str)
def test_a_call_of_a_model_in_parts_is_refused_unless_its_engine_makes_it(parallel: dict[str, Any]) -> None:
    for beside, after, again in run_world(called_directly, 2, parallel):
        assert "so a call of it gives parts" in beside and "engine.full_state_dict()" in beside
        assert after == beside and "a model built anew" in again
    assert run_world(called_directly, 2, {}) == [[], []]


def test_lengths_of_a_model_s_own_are_rows_beside_its_layers() -> None:
    model = FixedLength()
    model.blocks[0].table = nn.Parameter(torch.zeros(5, D))  # type: ignore[union-attr]
    model.head.table = nn.Parameter(torch.zeros(7, D))
    assert own_lengths(model) == (TOKENS, 5), "none of a layer"
