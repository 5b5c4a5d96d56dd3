"""Hugging Face's GPT-2 and Llama, as they are, under data and tensor parallelism: the serial run."""

from __future__ import annotations

import pytest

from tests.parity import Case, assert_parity

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
