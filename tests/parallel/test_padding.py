"""Sequences that ranks cannot cut equally are padded inside, and every number stays the serial run's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPTJConfig, GPTJForCausalLM

import colossal_lite as cl
from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import IGNORED
from colossal_lite.kernels import Rows, dropped
from colossal_lite.kernels.dropout import dropout
from colossal_lite.parallel.padding import Padding
from tests.layers.test_tensor_1d import PLAN, Plain, SelfAttention
from tests.shared import parity
from tests.shared.parity import Case, assert_documents, assert_other_ways, assert_parity, relative_error
from tests.shared.pool import RankEnv, WorldError, run_world

CASES = {
    "1d": Case(tensor=2, tokens=11, dropout=0.2, ragged=True),
    "1d of full attention": Case(tensor=2, tokens=11, causal=False, family="llama"),
    "1d, gpt2": Case(family="hf-gpt2", tensor=2, tokens=15),
    "1d, llama": Case(family="hf-llama", tensor=2, tokens=7),
    "1d, llama of full attention": Case(family="hf-llama", tensor=2, tokens=7, causal=False),
    "ring": Case(sequence=2, tokens=9, dropout=0.2, ragged=True),
    "ring of full attention": Case(sequence=2, tokens=5, causal=False),
    "ring, gpt2": Case(family="hf-gpt2", sequence=2, tokens=15, dropout=0.2),
    "ring, llama of full attention": Case(family="hf-llama", sequence=2, tokens=6, causal=False),
    "full rows": Case(sequence=2, sequence_mode="ring_full", tokens=5, causal=False),
    "gathered": Case(sequence=2, sequence_mode="allgather_kv", tokens=5),
    "ulysses": Case(sequence=2, sequence_mode="ulysses", tokens=7, family="llama"),
    "ulysses, llama": Case(family="hf-llama", sequence=2, sequence_mode="ulysses", tokens=7),
    "ring x 1d": Case(world_size=4, sequence=2, tensor=2, tokens=11),
    "pipeline x 1d": Case(world_size=4, pipeline=2, tensor=2, tokens=11, dropout=0.2),
    "pipeline x ring": Case(world_size=4, pipeline=2, sequence=2, tokens=3, dropout=0.2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_of_lengths_that_do_not_divide_is_the_serial_one(name: str) -> None:
    assert_parity(CASES[name], steps=1)


MESHES: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "ring": dict(sequence=2),
    "ulysses": dict(sequence=2, sequence_mode="ulysses"),
}


def drawn() -> list[Case]:
    """30 lengths, for each of the families in turn."""
    generator, found = random.Random(23), []
    for number in range(30):
        family = ("gpt2", "llama", "hf-gpt2", "hf-llama")[number % 4]
        tokens, causal = generator.randint(1, 16 if family.startswith("hf") else 64), generator.random() < 0.7
        found.append(Case(family=family, tokens=tokens, causal=causal, ragged=tokens > 1, steps=1))
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", drawn(), ids=lambda case: f"{case.family} {case.tokens}")
def test_loss_and_every_gradient_of_30_drawn_lengths_are_the_serial_ones_to_1e_10(
    case: Case, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parity.LOSS_TOLERANCE, "fp64", 1e-10)
    assert assert_parity(case, **MESHES[mesh]) <= 1e-10


@pytest.mark.parametrize("case", [CASES["1d"], replace(CASES["ring"], tokens=3)], ids=["1d", "ring"])
def test_a_criterion_an_evaluation_and_an_own_loop_see_no_padding(case: Case) -> None:
    assert_other_ways(replace(case, dropout=0.0))


def of_all_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return logits.square().sum(), labels.numel()


def with_all_tokens(env: RankEnv, case: Case) -> list[float]:
    with env.launch(case.full_config) as context:
        engine = parity.start(case, context, criterion=of_all_tokens)
        return [float(engine.train_step(case.batch(n)).loss) for n in range(2)]


@pytest.mark.parametrize("axis", [dict(tensor=2), dict(sequence=2)], ids=["1d", "ring"])
def test_a_criterion_that_reads_tokens_without_a_label_reads_no_padding(axis: dict[str, Any]) -> None:
    case = Case(tokens=11, ragged=True, world_size=2, **axis)
    (alone,) = run_world(with_all_tokens, 1, replace(case, tensor=1, sequence=1, world_size=1))
    for losses in run_world(with_all_tokens, 2, case):
        assert losses == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("name", ["1d of full attention", "ring of full attention"])
@pytest.mark.parametrize("positions", [False, True])
def test_padding_is_in_no_packed_document(name: str, positions: bool) -> None:
    assert_documents(replace(CASES[name], family="gpt2"), positions)


class Looking(SelfAttention):
    """Attention that is causal or not."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).flatten(2))


class Counting(Plain):
    """Learned positions, which the model counts itself."""

    def __init__(self, positions: int, causal: bool = True) -> None:
        super().__init__()
        self.places = nn.Embedding(positions, 8)
        for layer in self.mixing:
            layer.heads_of = Looking(causal)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.mixing:
            x = layer(x)
        return self.out(self.last(x))


def own_model(env: RankEnv, positions: int, tokens: int, causal: bool) -> dict[str, Tensor]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), parallel=dict(tensor=2))
    with env.launch(config) as context:
        torch.manual_seed(0)
        model = Counting(positions, causal).double()
        engine = cl.initialize(model, context=context, plan=PLAN | {"places": "position"})
        engine.forward_backward(batch_of(tokens))
        return engine.full_gradients()


def batch_of(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(3 * tokens).view(3, tokens) * 7 % 20
    return ids, (ids + 5) % 20


def test_an_own_model_is_padded_where_a_small_copy_proves_it() -> None:
    torch.manual_seed(0)
    model = Counting(8).double()
    ids, labels = batch_of(7)
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    for gradients in run_world(own_model, 2, 8, 7, True):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative_error(gradients[name], parameter.grad, 1.0) < 1e-10, name


def test_an_own_model_whose_tokens_see_padding_is_refused_by_name() -> None:
    words = (
        "7 tokens do not divide into 2 parts.*padding changes what Counting gives.*parallel.tensor.sequence"
    )
    with pytest.raises(WorldError, match=words) as error:
        run_world(own_model, 2, 8, 7, False)
    assert error.value.ranks("raised") == [0, 1]


LEFT: dict[str, Any] = dict(
    vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=4, rotary_dim=4, attn_pdrop=0.0, embd_pdrop=0.0,
    resid_pdrop=0.0,
)  # fmt: skip


def left_padded(counts: bool) -> dict[str, Tensor]:
    """7 tokens with some masked at the left; whether labels count there."""
    ids, labels = batch_of(7)
    mask = (torch.arange(7) >= torch.tensor([[0], [1], [2]])).long()
    return dict(
        input_ids=ids,
        attention_mask=mask,
        labels=labels if counts else labels.masked_fill(mask == 0, IGNORED),
    )


def left_loss(env: RankEnv, parallel: dict[str, int], counts: bool) -> float | str:
    torch.manual_seed(0)
    with env.launch(dict(precision="fp64", parallel=parallel)) as context:
        engine = cl.initialize(GPTJForCausalLM(GPTJConfig(**LEFT)).double(), context=context)
        try:
            return float(engine.train_step(left_padded(counts)).loss)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_a_token_that_is_masked_with_all_before_it_sees_no_padding(axis: str) -> None:
    """All its scores are equal, so it attends to all tokens. Padding was once among them, in silence."""
    for said in run_world(left_loss, 2, {axis: 2}, True):
        assert "attention_mask begins with 0" in said and f"or without parallel.{axis}" in said
    (alone,) = run_world(left_loss, 1, {}, False)
    for loss in run_world(left_loss, 2, {axis: 2}, False):
        assert abs(loss - alone) < 1e-12


def test_weights_of_attention_are_dropped_by_the_counters_of_real_tokens() -> None:
    rows = Rows((1, 2), 3, torch.arange(2), torch.arange(5), heads=(2, 3))
    whole = dropped(dropout, torch.ones(2, 3, 5, 5), 0.5, rows)
    longer = replace(rows, position=torch.arange(8), tokens=5)
    padded = dropped(dropout, torch.ones(2, 3, 8, 8), 0.5, longer)
    assert torch.equal(padded[..., :5, :5], whole) and 0 < whole.count_nonzero() < whole.numel()
    tokens = dropped(dropout, torch.ones(2, 8, 3, 8), 0.5, replace(longer, heads=None))
    few = dropped(dropout, torch.ones(2, 5, 3, 5), 0.5, replace(rows, heads=None))
    assert torch.equal(tokens[:, :5, :, :5], few)
    with pytest.raises(ValueError, match="its counters depend on the padding of 5 tokens to 8"):
        dropped(dropout, torch.ones(2, 3, 4, 8, 8), 0.5, replace(longer, heads=None))


def test_what_is_padded_of_a_batch() -> None:
    ids = torch.tensor([[3, 4, 5]])
    given = dict(input_ids=ids, attention_mask=torch.tensor([[True, True, False]]))
    batch = Batch((), given, labels=ids + 1, samples=torch.arange(1))
    made = Padding(4, hidden=-1, positions=True).of(batch)
    assert made.tokens == 3 and made.labels.tolist() == [[4, 5, 6, IGNORED]]
    assert {name: x.tolist() for name, x in made.kwargs.items()} == dict(
        input_ids=[[3, 4, 5, 5]], attention_mask=[[1, 1, 0, -1]], position_ids=[[0, 1, 2, 2]]
    )
    assert Padding(3).of(batch) is batch
    other = replace(batch, kwargs={**given, "bias": torch.ones(1, 3)})
    with pytest.raises(
        ValueError, match="arguments beside input_ids, attention_mask, position_ids are not padded"
    ):
        Padding(2, "parallel.x").of(other)
    with pytest.raises(ValueError, match="3 tokens .* takes no more than 3, padding included; legal"):
        Padding(2, "parallel.x", longest=3).of(batch)
