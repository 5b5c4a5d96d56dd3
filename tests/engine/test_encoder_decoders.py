"""Encoder-decoders of Hugging Face train on their own loss as one process does; without labels they are told of it."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.parallel.model_loss import model_loss
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.pool import RankEnv, run_world

SAMPLES, TOKENS, WORDS, STEPS = 4, 8, 101, 2
SIZES: dict[str, Any] = dict(
    vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, pad_token_id=1,
    bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None, attention_dropout=0.1,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BART": ("Bart", "ForConditionalGeneration", SIZES),
    "mBART": ("MBart", "ForConditionalGeneration", SIZES),
    "Pegasus": ("Pegasus", "ForConditionalGeneration", SIZES),
    "Marian": ("Marian", "MTModel", SIZES),
    "T5": ("T5", "ForConditionalGeneration", T5),
}


PLAIN = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, dropout_rate=0.0)


def model(name: str, *, drops: bool = True) -> nn.Module:
    """As it comes, with its dropout (unless not `drops`) and its cache of keys."""
    prefix, suffix, sizes = MODELS[name]
    sizes = (
        sizes
        if drops
        else sizes | {n: p for n, p in PLAIN.items() if (n == "dropout_rate") == (name == "T5")}
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    made: nn.Module = getattr(transformers, prefix + suffix)(config).double()
    with torch.no_grad():
        for parameter in made.parameters():  # those that begin as zeros too
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=generator) for _ in range(2))
    labels[0, 5:] = -100
    return ids, labels


Step = tuple[float, dict[str, Tensor]]


def trains(env: RankEnv, name: str, config: dict[str, Any], drops: bool = True) -> list[Step]:
    """Losses and gradients of the steps."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=60)
    with env.launch(base | config) as context:
        engine = cl.initialize(model(name, drops=drops), context=context, criterion="model")
        part = context.local_batch(SAMPLES)
        found: list[Step] = []
        for step in range(STEPS):
            loss = float(engine.forward_backward(tuple(t[part] for t in batch(step))))
            found.append((loss, engine.full_gradients()))
            engine.step()
        engine.close()
        return found


@pytest.mark.parametrize("name", MODELS)
def test_without_dropout_the_loss_and_every_gradient_are_those_of_plain_torch(name: str) -> None:
    error = 1e-6 if name == "T5" else 1e-10  # T5's own code computes softmax in float32
    plain = model(name, drops=False)
    ids, labels = batch(0)
    loss: Any = plain(input_ids=ids, labels=labels).loss
    loss.backward()
    for steps in run_world(trains, 2, name, dict(parallel=dict(tensor=2)), False):
        found, gradients = steps[0]
        assert found == pytest.approx(loss.item(), rel=1e-12)
        assert gradients.keys() == {
            key for key, parameter in plain.named_parameters() if parameter.requires_grad
        }
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for key, gradient in gradients.items():
            right = plain.get_parameter(key).grad
            assert right is not None
            least = 1e-14 * largest  # a bias of keys has no gradient but by rounding
            assert float((gradient - right).abs().max()) <= error * float(right.abs().max()) + least, key


@cache
def of_one_process(name: str) -> list[Step]:
    (found,) = run_world(trains, 1, name, {})
    return found


CASES = [(name, 2, dict(parallel=dict(tensor=2))) for name in MODELS] + [
    ("BART", 2, dict(zero=dict(stage=3))),
    ("BART", 4, dict(parallel=dict(tensor=2), zero=dict(stage=3), gradient_accumulation=2)),
    ("T5", 1, dict(activation_checkpoint="full")),
]


@pytest.mark.filterwarnings("ignore:parallel.tensor.sequence_parallel. off", "ignore:plan='auto'. left whole")
@pytest.mark.parametrize(("name", "ranks", "config"), CASES)
def test_an_encoder_decoder_trains_on_its_own_loss_as_one_process_does(
    name: str, ranks: int, config: dict[str, Any]
) -> None:
    (found, *_) = run_world(trains, ranks, name, config, timeout_s=180)
    for (loss, right), (theirs, own) in zip(of_one_process(name), found, strict=True):
        assert theirs == pytest.approx(loss, rel=1e-12, abs=0) and right.keys() == own.keys()
        largest = max(float(g.norm()) for g in right.values())
        for parameter, gradient in right.items():
            assert torch.allclose(own[parameter], gradient, rtol=1e-10, atol=1e-12 * largest), parameter


def test_what_a_decoder_reads_of_its_encoder_and_the_table_that_it_shares_are_cut() -> None:
    """Of more words than a small copy keeps, which the config states and a bias over the words has."""
    layout, bart = MeshLayout.build(tensor=TensorConfig(size=2).axis()), model("BART")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = Mesh.emulated(layout, EmulatedWorld(1.0))[0]
        plan = parallelize(bart, mesh, sequence_parallel=False, criterion=model_loss(bart)).plan
    assert plan["model.decoder.embed_tokens"] == plan["model.encoder.embed_tokens"] == "embedding:whole"
    assert plan["model.decoder.layers.*.encoder_attn"] == "attention" and "replicate" not in {
        role for name, role in plan.items() if "layers" in name
    }


def refusal(env: RankEnv, name: str) -> str:
    with env.launch(dict(precision="fp64", parallel=dict(tensor=2), timeout_s=60)) as context:
        with pytest.raises(ValueError, match="criterion") as caught:
            cl.initialize(model(name), context=context)
        return str(caught.value)


@pytest.mark.parametrize("name", ["BART", "T5"])
def test_an_encoder_decoder_without_labels_is_answered_with_its_own_loss(name: str) -> None:
    for told in run_world(refusal, 2, name, timeout_s=180):
        assert "is an encoder-decoder, and its forward gets no labels. Legal: criterion='model'" in told
