"""Vectors that wait are added as if each had been added at once, bit for bit."""

from __future__ import annotations

import pytest
import torch

from colossal_lite.memory.vector_gradients import VectorGradients, add_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "factors", [(1.0, 1.0, 1.0), (1 / 64, 1 / 64, 1 / 64), (1 / 64, 1 / 32, 1.0)], ids=str
)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_sums_of_micro_batches_have_the_bits_of_sums_at_once(
    dtype: torch.dtype, factors: tuple[float, ...], most: int
) -> None:
    torch.manual_seed(0)
    at_once, waited = torch.full((2, 3, 5), 7.0), torch.full((2, 3, 5), 7.0)
    vectors = VectorGradients(most)
    for batch, factor in enumerate(factors):
        for index in (2, 0, 1) if batch else (0, 1):  # the last has no gradient in the first micro-batch
            gradient = torch.randn(5).to(dtype)
            adds = batch > int(index == 2)
            add_gradient(at_once[0, index], gradient, factor, adds=adds)
            vectors.add(index, waited[0, index], gradient, factor, adds=adds)
    vectors.take()
    assert torch.equal(at_once, waited) and not torch.equal(at_once[0], at_once[1])
    vectors.take()
    assert torch.equal(at_once, waited), "they wait no more"


def test_vectors_wait_until_all_have_come() -> None:
    targets, vectors = torch.zeros(2, 5), VectorGradients(2)
    vectors.add(0, targets[0], torch.ones(5), 1.0, adds=False)
    assert not targets.any()
    vectors.add(1, targets[1], torch.ones(5), 1.0, adds=False)
    assert targets.all()


def test_dropped_vectors_are_never_added() -> None:
    target, vectors = torch.zeros(5), VectorGradients(2)
    vectors.add(0, target, torch.ones(5), 1.0, adds=False)
    vectors.drop()
    vectors.take()
    assert not target.any()
