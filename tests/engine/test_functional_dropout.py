"""Functional dropout draws the same masks on every mesh: stock models of Hugging Face, and what else torch offers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

import colossal_lite as cl
from colossal_lite.kernels.philox import keep_mask
from colossal_lite.numerics.functional_dropout import FunctionalDropout
from colossal_lite.numerics.random import DropoutStreams, key
from colossal_lite.parallel.small_copy import stated_length
from tests.shared.pool import RankEnv, WorldError, run_world

BATCH, TOKENS, VOCABULARY, SEED = 8, 16, 37, 7


def gpt2(attention: str = "sdpa") -> nn.Module:
    """As it comes: attn_pdrop, embd_pdrop and resid_pdrop are 0.1, use_cache is True."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=4, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert(attention: str = "sdpa", config: Any = BertConfig, kind: Any = BertForMaskedLM) -> nn.Module:
    """As it comes: attention_probs_dropout_prob and hidden_dropout_prob are 0.1."""
    made: nn.Module = kind(config(
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS + 2, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=32, attn_implementation=attention, tie_word_embeddings=True,
    ))  # fmt: skip
    return made


def xlnet(attention: str = "eager") -> nn.Module:
    """As it comes: dropout is 0.1. Its config states -1 for the longest sequence, as there is no limit."""
    return XLNetLMHeadModel(XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=4, d_inner=32))


class Draws(nn.Module):
    """A residual layer that draws in one of the ways that torch has; `x` [B, T, 16]."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout2d(0.3))
        if "table" in way:
            self.table = nn.Parameter(torch.ones(2 * TOKENS, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y = y + self.attention(y, y, y, need_weights=self.way == "attention with weights")[0]
        match self.way:
            case "in place":
                y = F.dropout(y * 1.0, 0.3, inplace=True)
            case "twice":
                y = F.dropout(F.dropout(y, 0.3), 0.3)
            case "torch.dropout":
                y = torch.dropout(y, 0.3, True)
            case "tokens first":
                y = F.dropout(y.transpose(0, 1), 0.3).transpose(0, 1)
            case "flat":
                y = F.dropout(y.flatten(0, 1), 0.3).view_as(x)
            case "channels":
                y = F.dropout1d(y, 0.3) + F.dropout2d(y[..., None], 0.3)[..., 0]
            case "alpha":
                y = F.alpha_dropout(y, 0.3, True) + F.feature_alpha_dropout(y, 0.3, True)
            case "pooled":
                y = y + F.dropout(y[:, 0], 0.3)[:, None]
            case "table":
                y = y + F.dropout(self.table, 0.3)[: y.shape[1]]
            case "table of as many rows as samples":
                y = y + F.dropout(self.table[:BATCH], 0.3).sum(0)
            case "table, samples second":
                y = (
                    y
                    + F.dropout(self.table[:, None].expand(-1, len(y), -1), 0.3).transpose(0, 1)[
                        :, : y.shape[1]
                    ]
                )
            case "checkpoint of its own":
                y = checkpoint(lambda z: F.dropout(self.linear(z), 0.3), y, use_reentrant=False)
            case "reentrant checkpoint":
                y = checkpoint(self.inner[1], y[..., None], use_reentrant=True)[..., 0]
        return x + y


def drawing(way: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), Draws(way), Draws(way), nn.Linear(16, VOCABULARY))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "roberta": partial(bert, config=RobertaConfig, kind=RobertaForMaskedLM),
    "electra": partial(bert, config=partial(ElectraConfig, embedding_size=16), kind=ElectraForMaskedLM),
    "xlnet": xlnet,
    "draws": drawing,
}
BERT_PLAN = {
    "bert.embeddings.word_embeddings": "embedding",
    "bert.embeddings.position_embeddings": "position",
    "bert.embeddings.token_type_embeddings": "replicate",
    "**.LayerNorm": "norm",
    "**.attention.self": "attention",
    "**.attention.self.query": "colwise",
    "**.attention.self.[kv]*": "colwise:kv",
    "**.attention.output.dense": "rowwise",
    "**.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
    "cls.predictions": "replicate",
    "cls.predictions.transform.dense": "replicate",
    "cls.predictions.decoder": "lm_head",
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, labels = (torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator) for _ in range(2))
    return inputs, labels


def losses(env: RankEnv, model: str, how: str, config: dict[str, Any], plan: Any = "auto") -> list[float]:
    """Of three steps, in which the weights change a good deal."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=SEED, timeout_s=60)
    with env.launch(base | config) as context:
        torch.manual_seed(3)
        engine = cl.initialize(MODELS[model](how), context=context, plan=plan)
        part = context.local_batch(BATCH)
        found = [float(engine.train_step(tuple(t[part] for t in batch(step))).loss) for step in range(3)]
        engine.close()
    return found


def assert_alike(model: str, how: str, ranks: int, config: dict[str, Any], plan: Any = "auto") -> None:
    (serial,) = run_world(losses, 1, model, how, {})
    for found in run_world(losses, ranks, model, how, config, plan):
        assert found == pytest.approx(serial, rel=1e-10, abs=0)


BOTH: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, dict(gradient_accumulation=4)),
    "recomputed": (1, dict(activation_checkpoint="full")),
    "recomputed in part": (1, dict(activation_checkpoint="selective")),
    "data 2": (2, {}),
    "data 4, accumulation": (4, dict(gradient_accumulation=2)),
    "zero 3": (2, dict(zero=dict(stage=3))),
    "zero 3 on 4": (4, dict(zero=dict(stage=3), activation_checkpoint="full")),
}
OF_GPT2: dict[str, tuple[int, dict[str, Any]]] = {
    "1d 2": (2, dict(parallel=dict(tensor=2))),
    "1d 2, whole": (2, dict(parallel=dict(tensor=dict(size=2, sequence_parallel=False)))),
    "1d 4, recomputed": (4, dict(parallel=dict(tensor=4), activation_checkpoint="full")),
    "2d 4": (4, dict(parallel=dict(tensor=dict(size=4, mode="2d")))),
    "pipeline 2": (2, dict(parallel=dict(pipeline=2))),
    "pipeline 2 x 2d 4, micro-batches by default": (
        8,
        dict(parallel=dict(pipeline=2, tensor=dict(size=4, mode="2d"))),
    ),
    "pipeline 2 x data 2, accumulation": (4, dict(parallel=dict(pipeline=2), gradient_accumulation=2)),
    "pipeline 2 x 1d 2, recomputed": (
        4,
        dict(parallel=dict(pipeline=2, tensor=2), activation_checkpoint="full"),
    ),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", BOTH | OF_GPT2)
def test_stock_gpt2_has_the_losses_of_one_rank(name: str, attention: str) -> None:
    assert_alike("gpt2", attention, *(BOTH | OF_GPT2)[name])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", BOTH)
def test_stock_bert_has_the_losses_of_one_rank(name: str, attention: str) -> None:
    assert_alike("bert", attention, *BOTH[name])


WAYS = (
    "attention", "attention with weights", "in place", "twice", "torch.dropout", "tokens first", "flat", "channels",
    "alpha", "pooled", "table", "table of as many rows as samples", "table, samples second",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_functional_dropout_has_the_masks_of_one_rank(way: str) -> None:
    assert_alike("draws", way, 2, dict(gradient_accumulation=2))


@pytest.mark.parametrize("config", [dict(zero=dict(stage=3)), dict(parallel=dict(tensor=2))])
def test_xlnet_has_the_masks_of_one_rank_and_no_longest_sequence(config: dict[str, Any]) -> None:
    """Its relative positions are [2 T, B, D]."""
    assert stated_length(xlnet()) is None
    assert_alike("xlnet", "eager", 2, config)


@pytest.mark.parametrize("way", ["attention", "flat"])
def test_functional_dropout_has_the_masks_of_one_rank_in_a_pipeline(way: str) -> None:
    assert_alike("draws", way, 2, dict(parallel=dict(pipeline=2)))


def test_a_mask_is_that_of_the_module_and_its_call_number() -> None:
    """From the generator alone: sample, (head, query) and key of attention; sample, position and feature else."""
    streams, model = (
        DropoutStreams(SEED),
        nn.ModuleDict({"a": Draws("twice"), "b": gpt2("eager").transformer.h[0].attn}),
    )
    names = dict(model.named_modules())
    streams.functional = lambda again: FunctionalDropout(
        {m: lambda name=name: streams.rows(name) for name, m in names.items()}, again
    )
    rows = DropoutStreams(SEED)
    for each in (streams, rows):
        each.begin(2, torch.arange(5, 7), torch.arange(3))
    x = torch.randn(2, 3, 16)
    with streams.forward(), torch.no_grad():
        model["a"].attention.dropout = 0.0
        twice = model["a"](x)
        weights = model["b"](x)[1]
    first, second = (keep_mask(rows.rows("a"), 16, 0.3) / 0.7 for _ in range(2))
    y = model["a"].linear(x)
    y = y + model["a"].attention(y, y, y)[0]
    torch.testing.assert_close(twice, x + y * first * second)
    heads = rows.rows("b")
    at = (torch.arange(4)[:, None] * 2**20 + torch.arange(3)).flatten()
    heads = heads.__class__(key(SEED, "b", 0), 2, torch.arange(5, 7), at)
    kept = keep_mask(heads, 3, 0.1).view(2, 4, 3, 3)
    assert torch.equal(weights != 0, kept)


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "3d": (
        "gpt2",
        8,
        dict(parallel=dict(tensor=dict(size=8, mode="3d"))),
        "c_attn, of other samples.*in mode 3d",
    ),
    "checkpoint of its own": (
        "draws",
        1,
        {},
        "Legal: a call in the forward of a module.*and activation_checkpoint",
    ),
    "reentrant checkpoint": ("draws", 1, {}, "dropout outside the forward.*legal: activation_checkpoint"),
    "its own generator": ("noise", 1, {}, "its forward draws from torch's own generator"),
    "its own generator in the second stage of a rank": (
        "late noise",
        1,
        dict(
            parallel=dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs")), gradient_accumulation=2
        ),
        "its forward draws from torch's own generator",
    ),
    "a gradient's hook": ("noise of a hook", 1, {}, "its backward draws from torch's own generator"),
    "a gradient's hook in a pipeline": (
        "noise of a hook",
        2,
        dict(parallel=dict(pipeline=2), gradient_accumulation=2),
        "its backward draws from torch's own generator",
    ),
    "a gradient's hook where weight gradients come later": (
        "noise of a hook",
        2,
        dict(parallel=dict(pipeline=dict(size=2, schedule="zb-h1")), gradient_accumulation=2),
        "its backward draws from torch's own generator",
    ),
    "a Function's backward": ("noise of a Function", 2, {}, "its backward draws from Python's random"),
    "compiled": ("gpt2", 1, dict(compile="block"), "compile='block' compiles"),
}


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class NoiseOfAHook(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        return y


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * random.choice([0.5, 1.5])


class NoiseOfAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Noisy.apply(x)  # type: ignore[no-untyped-call]
        return y


def around(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), *inner, nn.Linear(16, VOCABULARY))


MODELS |= {
    "noise": lambda how: around(Noise()),
    "late noise": lambda how: around(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), Noise()),
    "noise of a hook": lambda how: around(NoiseOfAHook()),
    "noise of a Function": lambda how: around(NoiseOfAFunction()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_draw_from_counters_is_refused_by_name(what: str) -> None:
    model, ranks, config, words = REFUSED[what]
    run = traced_only if what == "compiled" else losses
    with pytest.raises(WorldError, match=words):
        run_world(run, ranks, model, "eager" if model == "gpt2" else what, config, timeout_s=180)


@pytest.mark.parametrize("inner", [Noise, NoiseOfAHook, NoiseOfAFunction])
def test_a_model_that_draws_is_refused_as_often_as_it_is_tried_and_in_a_loop_of_the_users_own(
    inner: type[nn.Module],
) -> None:
    with cl.launch(dict(precision="fp32")) as context:
        engine = cl.initialize(around(inner()), context=context)
        ids, labels = batch(0)
        for _ in range(2):
            with pytest.raises(ValueError, match="draws from"):
                engine.train_step((ids, labels))
            engine.zero_grad()
        with pytest.raises(ValueError, match="draws from"):
            engine.backward(engine(ids).square().mean())


def test_draws_between_steps_and_draws_that_are_taken_back_are_let_be() -> None:
    class Forks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng([]):
                return x + 0.0 * torch.rand(1)

    with cl.launch(dict(precision="fp32")) as context:
        engine = cl.initialize(around(Forks()), context=context)
        for i in range(2):
            torch.rand(1), random.random()
            assert engine.train_step(batch(i)).loss.isfinite()


def traced_only(env: RankEnv, model: str, how: str, config: dict[str, Any]) -> list[float]:
    """`losses`, where what the compiler has traced is run as it is: code of its own would take half a minute."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        return losses(env, model, how, config)


def test_recomputation_keeps_no_cache_of_keys_and_closing_gives_the_setting_back() -> None:
    model: Any = gpt2()
    assert model.config.use_cache is True
    with cl.launch(dict(precision="fp32", activation_checkpoint="full")) as context:
        engine = cl.initialize(model, context=context)
        assert model.config.use_cache is False
        engine.train_step(batch(0))
        engine.close()
    assert model.config.use_cache is True


@pytest.mark.parametrize(
    ("config", "plan"),
    [(dict(parallel=dict(tensor=2)), BERT_PLAN), (dict(parallel=dict(pipeline=2)), "auto")],
)
def test_stock_bert_has_the_losses_of_one_rank_where_layers_are_cut(
    config: dict[str, Any], plan: Any
) -> None:
    assert_alike("bert", "sdpa", 2, config, plan)


def gradients(
    env: RankEnv, model: str, how: str, config: dict[str, Any]
) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of three steps under the roles that are found."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=SEED, timeout_s=60)
    with env.launch(base | config) as context:
        torch.manual_seed(3)
        engine = cl.initialize(MODELS[model](how), context=context)
        part = context.local_batch(BATCH)
        found: list[tuple[float, dict[str, Tensor]]] = []
        for step in range(3):
            loss = float(engine.forward_backward(tuple(t[part] for t in batch(step))))
            found.append((loss, engine.full_gradients()))
            engine.step()
        engine.close()
    return found


@cache
def of_one_process(model: str, how: str) -> list[tuple[float, dict[str, Tensor]]]:
    (found,) = run_world(gradients, 1, model, how, {})
    return found


CUT_HEADS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d, tokens cut": (2, dict(size=2, sequence_parallel=True)),
    "1d, tokens whole": (2, dict(size=2, sequence_parallel=False)),
    "2d": (4, dict(size=4, mode="2d")),
}


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CUT_HEADS)
@pytest.mark.parametrize("model", ["bert", "roberta", "electra"])
def test_dropout_of_attention_is_cut_with_heads_whose_row_wise_linear_stands_elsewhere(
    model: str, name: str, how: str
) -> None:
    """`attention.self` has the heads, and `attention.output` the linear behind them."""
    ranks, tensor = CUT_HEADS[name]
    (found, *_) = run_world(gradients, ranks, model, how, dict(parallel=dict(tensor=tensor)), timeout_s=180)
    for (loss, right), (theirs, own) in zip(of_one_process(model, how), found, strict=True):
        assert theirs == pytest.approx(loss, rel=1e-12, abs=0) and right.keys() == own.keys()
        largest = max(float(g.norm()) for g in right.values())
        for parameter, gradient in right.items():
            assert torch.allclose(own[parameter], gradient, rtol=1e-10, atol=1e-12 * largest), parameter
