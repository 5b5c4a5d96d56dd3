"""Hugging Face's GPT-2 and Llama, as they are, on data, tensor and sequence axes: the serial run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import colossal_lite as cl
from colossal_lite.layers import hugging_face
from colossal_lite.parallel.parallelize import stated_sizes
from tests.shared.hugging_face import MODELS
from tests.shared.parity import Case, assert_parity, initial_values, relative_error, serial_run
from tests.shared.pool import RankEnv, WorldError, run_world

MISTRAL: dict[str, Any] = dict(
    vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
CASES = {
    "data 2": Case(world_size=2, ragged=True),
    "tensor 2": Case(world_size=2, tensor=2),
    "tensor 2, whole": Case(world_size=2, tensor=2, sequence_parallel=False),
    "tensor 4": Case(world_size=4, tensor=4, config=dict(clip_grad_norm=0.05)),
    "data 2 x tensor 2": Case(
        world_size=4, tensor=2, ragged=True, config=dict(gradient_accumulation=2, clip_grad_norm=0.05)
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("family", "tied"), [("hf-gpt2", True), ("hf-llama", False), ("hf-llama", True)])
def test_every_gradient_is_the_serial_one(family: str, tied: bool, name: str) -> None:
    assert_parity(CASES[name], family=family, tied=tied, build="module")


def test_dropout_of_gpt2_is_exact_where_activations_are_cut_and_where_they_are_whole() -> None:
    assert_parity(CASES["tensor 2"], family="hf-gpt2", build="module", dropout=0.2)


@pytest.mark.parametrize("family", ["hf-gpt2", "hf-llama"])
def test_a_callable_is_built_on_meta_and_its_initialisers_replayed(family: str) -> None:
    assert_parity(CASES["tensor 2"], family=family, tied=family == "hf-gpt2", steps=1)


# ---- gradient checkpointing of its own ----


def checkpointed(env: RankEnv, family: str, how: str, config: dict[str, Any]) -> tuple[str, list[float], Any]:
    """The error, or the losses of two steps and the gradients of the last. `how`: the model's own checkpointing."""
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(vocab_size=37, bos_token_id=None, eos_token_id=None)
    if family == "hf-gpt2":
        sizes = dict(
            n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **shape)).double()
    else:  # with its own norm, which computes in float32
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **shape)).double()
    if how:
        model.gradient_checkpointing_enable()
    if how == "without the hook":
        model.disable_input_require_grads()
    settings = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60) | config
    losses, gradients = [], {}
    with env.launch(settings) as context, warnings.catch_warnings():
        warnings.filterwarnings("error", message="plan: .* is not proven")
        try:
            engine = cl.initialize(model, context=context)
            for step in range(2):
                ids = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(step))
                losses.append(
                    float(engine.forward_backward((ids[:, :-1].contiguous(), ids[:, 1:].contiguous())))
                )
                gradients = engine.full_gradients()
                engine.step()
        except ValueError as error:
            return str(error), [], {}
    return "", losses, gradients


@pytest.mark.parametrize("family", ["hf-gpt2", "hf-llama"])
def test_checkpointing_of_its_own_on_a_tensor_axis_changes_no_number(family: str) -> None:
    tensor = dict(parallel=dict(tensor=2))
    told, losses, truth = run_world(checkpointed, 2, family, "", tensor)[0]
    assert not told
    for ways in (("without the hook", tensor), ("", tensor | dict(activation_checkpoint="full"))):
        for said, theirs, gradients in run_world(checkpointed, 2, family, *ways):
            assert not said and theirs == pytest.approx(losses, rel=1e-12), said
            assert all(relative_error(gradients[name], truth[name], 1.0) < 1e-10 for name in truth)


def test_the_hook_of_its_checkpointing_is_refused_on_a_tensor_axis_with_two_ways_that_work() -> None:
    for told, *_ in run_world(checkpointed, 2, "hf-gpt2", "with the hook", dict(parallel=dict(tensor=2))):
        assert "transformer.wte (Embedding): a forward hook" in told
        assert (
            "or model.disable_input_require_grads() behind gradient_checkpointing_enable(), or activation_"
            in told
        )


# ---- a sequence axis ----

HALVES = Case(world_size=2, sequence=2, tokens=16, build="module", ragged=True)
SEQUENCES = {
    "ring": HALVES,
    "allgather_kv": replace(HALVES, sequence_mode="allgather_kv"),
    "ulysses": replace(HALVES, sequence_mode="ulysses"),
    "usp": replace(HALVES, world_size=4, sequence=4, sequence_mode="usp", ulysses=2),
    "ring_full": replace(HALVES, sequence_mode="ring_full", causal=False),
    "ring, full": replace(HALVES, causal=False),
    "ring x tensor 2": replace(HALVES, world_size=4, tensor=2, config=dict(clip_grad_norm=0.05)),
    "ulysses x tensor 2, whole": replace(
        HALVES, world_size=4, sequence_mode="ulysses", tensor=2, sequence_parallel=False
    ),
    "ring x 2d": replace(HALVES, world_size=8, tensor=4, mode="2d"),
    "ring x data 2, ZeRO-1, recomputed": replace(
        HALVES,
        world_size=4,
        config=dict(zero=dict(stage=1), activation_checkpoint="full", gradient_accumulation=2),
    ),
}


BESIDE_LLAMA = ("allgather_kv", "ring, full", "ring x tensor 2", "ring x data 2, ZeRO-1, recomputed")


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_gradient_of_gpt2_is_the_serial_one_on_a_sequence_axis(name: str) -> None:
    assert_parity(SEQUENCES[name], family="hf-gpt2", steps=1)


@pytest.mark.parametrize("name", [name for name in SEQUENCES if name not in BESIDE_LLAMA])
def test_every_gradient_of_llama_is_the_serial_one_on_a_sequence_axis(name: str) -> None:
    assert_parity(SEQUENCES[name], family="hf-llama", tied=False, steps=1)


def test_dropout_of_gpt2_is_exact_on_a_sequence_axis() -> None:
    assert_parity(SEQUENCES["usp"], family="hf-gpt2", dropout=0.2, build="callable")


def padded(case: Case) -> dict[str, Tensor]:
    """Sequences of different lengths, padding behind them; its labels are ignored, its keys hidden."""
    inputs, labels = case.batch(0)
    inside = torch.arange(inputs.shape[1])[None] < torch.tensor([[16], [5], [1], [9], [12], [8]])
    return dict(input_ids=inputs, labels=labels.masked_fill(~inside, -100), attention_mask=inside.long())


def on_ranks(env: RankEnv, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a padded batch; parameters after a step of one's own loop."""
    with env.launch(case.full_config) as context:
        torch.manual_seed(3)
        engine = cl.initialize(case.model(), context=context)
        engine.forward_backward(padded(case))
        gradients = engine.full_gradients()
        torch.manual_seed(3)
        own = cl.initialize(case.model(), context=context)
        inputs, labels = case.batch(0)
        loss = nn.functional.cross_entropy(own(inputs).logits.flatten(0, 1), labels.flatten())
        own.backward(loss, int((labels != -100).sum()))
        own.step()
        return gradients, own.full_state_dict()


MASKED = {
    "ring": HALVES,
    "usp": SEQUENCES["usp"],
    "ring of 13": replace(HALVES, tokens=13),
    "1d of 13": replace(HALVES, tokens=13, sequence=1, tensor=2),
}


@pytest.mark.parametrize("family", ["hf-gpt2", "hf-llama"])
@pytest.mark.parametrize("mode", MASKED)
def test_padding_is_hidden_and_an_own_loop_sees_whole_logits(mode: str, family: str) -> None:
    case = replace(MASKED[mode], family=family, tied=family == "hf-gpt2", steps=1)
    model = case.model().double()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(case).items():
            named[name].copy_(value)
    batch = padded(case)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    (truth,) = serial_run(case)
    for gradients, state in run_world(on_ranks, case.world_size, case):
        for name, parameter in named.items():
            assert parameter.grad is not None
            assert relative_error(gradients[name], parameter.grad, 1.0) < 1e-10, name
        for name, expected in truth.parameters.items():
            assert relative_error(state[name], expected, 1.0) < 1e-10, name


def refused(env: RankEnv, what: str) -> None:
    case = replace(HALVES, family="hf-gpt2")
    model: Any = case.model()
    config = case.full_config
    if what == "causal":
        config["parallel"] = dict(sequence=dict(size=2, mode="ring_full"))
    with env.launch(config) as context:
        engine = cl.initialize(model, context=context)
        batch = padded(case)
        if what == "positions":
            batch["position_ids"] = torch.arange(16).expand(6, 16)
        engine.train_step(batch)


REFUSALS = {
    "positions": "position_ids of a Hugging Face model under sequence > 1.*legal: input_ids, attention_mask, labels",
    "causal": "parallel.sequence.mode = 'ring_full'.*attention is causal",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_their_attention_cannot_do_is_refused_by_name(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, 2, what)
    assert error.value.ranks("raised") == [0, 1]


def test_a_model_of_masked_words_says_by_its_name_that_it_is_not_causal() -> None:
    config = BertConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    assert not stated_sizes(BertForMaskedLM(config), {}).causal
    assert not stated_sizes(nn.Sequential(BertForMaskedLM(config)), {}).causal, "as within an adapter"
    assert not stated_sizes(MODELS["hf-gpt2"](causal=False), {}).causal
    assert stated_sizes(MODELS["hf-gpt2"](), {}).causal and stated_sizes(nn.Linear(2, 2), {}).causal


def test_a_model_of_words_says_that_it_takes_ids() -> None:
    shape = cl.models.GPTConfig(vocabulary=8, layers=1, heads=2, width=8, sequence=4)
    assert (
        stated_sizes(cl.models.GPT(shape), {}).takes_ids and stated_sizes(MODELS["hf-gpt2"](), {}).takes_ids
    )
    assert not stated_sizes(nn.Linear(2, 2), {}).takes_ids


def test_angles_that_follow_from_the_longest_position_are_refused_on_a_sequence_axis() -> None:
    model: Any = MODELS["hf-llama"]()
    assert not list(hugging_face.faults(model))
    model.config.rope_parameters = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    (words,) = hugging_face.faults(model)
    assert "rope_type='dynamic', whose angles follow from the longest position" in words


def with_cache(env: RankEnv, use_cache: bool) -> tuple[float, list[bool]]:
    """The loss of a second step, and `use_cache` in the run and behind it."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**MISTRAL, use_cache=use_cache)).double()
    ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), parallel=dict(sequence=2))
    with env.launch(config) as context:
        engine = cl.initialize(model, context=context)
        losses = [float(engine.train_step((ids, ids.roll(-1, 1))).loss) for _ in range(2)]
        seen = model.config.use_cache
        positions = torch.arange(8).remainder(4).expand(2, -1)
        packed = dict(input_ids=ids, labels=ids.roll(-1, 1), position_ids=positions)
        if use_cache:
            with pytest.raises(ValueError, match="position_ids alone under sequence > 1"):
                engine.train_step(packed)
        engine.close()
    return losses[1], [seen, model.config.use_cache]


def test_a_model_that_keeps_keys_is_trained_on_a_sequence_axis_without_them() -> None:
    for (kept, switched), (right, off) in zip(
        run_world(with_cache, 2, True), run_world(with_cache, 2, False), strict=True
    ):
        assert kept == right and switched == [False, True] and off == [False, False]


def shared_config(env: RankEnv) -> tuple[str, float, float]:
    """What another model of one config says beside an engine on a sequence axis; its loss behind that and before."""
    torch.manual_seed(0)
    model: Any = MODELS["hf-llama"]()
    other: Any = type(model)(model.config).double()
    ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))

    def loss() -> float:
        return float(other(ids, labels=ids).loss)

    before, text = loss(), ""
    with env.launch(dict(precision="fp64", parallel=dict(sequence=2))) as context:
        engine = cl.initialize(model.double(), context=context)
        engine.train_step((ids, ids.roll(-1, 1)))
        try:
            loss()
        except ValueError as error:
            text = str(error)
        engine.close()
        return text, before, loss()


def test_another_model_of_the_same_config_is_refused_by_name_and_runs_when_the_engine_is_closed() -> None:
    for text, before, behind in run_world(shared_config, 2):
        assert "LlamaAttention has its config from another model" in text and before == behind


def refused_with_cache(env: RankEnv, why: str) -> tuple[str, bool, bool]:
    """What refuses a model, and whether it has its cache and its attention behind that."""
    model: Any = MistralForCausalLM(MistralConfig(**MISTRAL, use_cache=True)).double()
    if why == "bound":
        model = MODELS["hf-llama"]().double()
        model.config.use_cache = True
    attention = model.config._attn_implementation
    if why == "tokens":
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(1, keepdim=True),))
    with env.launch(dict(precision="fp64", parallel=dict(sequence=2))) as context:
        try:
            cl.initialize(model, context=context, optimizer=None if why == "tokens" else lambda given: None)
        except ValueError as error:
            return str(error), model.config.use_cache, model.config._attn_implementation == attention
    return "", False, False


@pytest.mark.parametrize("why", ["tokens", "optimizer", "bound"])
def test_a_refused_model_keeps_its_key_cache_and_its_attention(why: str) -> None:
    for text, *kept in run_world(refused_with_cache, 2, why):
        assert ("sequence: a small copy" if why == "tokens" else "optimizer") in text and kept == [True, True]


CLASSES = 5


def classified(env: RankEnv, config: dict[str, Any]) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of two steps of a classifier of whole sequences."""
    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    with env.launch(
        dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60) | config
    ) as context:
        engine = cl.initialize(BertForSequenceClassification(settings).double(), context=context)
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(2):
            ids = torch.randint(37, (4, 8), generator=generator)
            loss = engine.forward_backward((ids, torch.randint(CLASSES, (4,), generator=generator)))
            found.append((float(loss), engine.full_gradients()))
            engine.step()
        engine.close()
    return found


def test_the_head_of_a_classifier_is_the_linear_that_is_as_wide_as_its_logits() -> None:
    """Its pooler is as wide as a table has rows."""
    (serial,) = run_world(classified, 1, {})
    tensor = dict(size=2, sequence_parallel=False)
    (found, *_) = run_world(classified, 2, dict(parallel=dict(tensor=tensor)), timeout_s=120)
    for (loss, right), (theirs, own) in zip(serial, found, strict=True):
        assert theirs == pytest.approx(loss, rel=1e-12, abs=0) and right.keys() == own.keys()
        for name, gradient in right.items():
            assert torch.allclose(own[name], gradient, rtol=1e-10, atol=1e-13), name
