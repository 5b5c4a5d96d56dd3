"""Gradients of weights that are put off: how a leaf comes by them."""

from __future__ import annotations

import torch
from torch import nn

from colossal_lite.transforms.split_backward import deliver


def test_a_leaf_takes_a_delivered_gradient_as_its_own_without_a_copy() -> None:
    weights = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))]
    for _ in range(2):
        gradients = [torch.ones(3, 2), torch.ones(2)]
        places = [gradient.data_ptr() for gradient in gradients]
        deliver(weights, gradients)
        found = [weight.grad for weight in weights]
        assert [None if grad is None else grad.data_ptr() for grad in found] == places
        assert gradients == []
        for weight in weights:
            weight.grad = None


def test_a_second_gradient_is_added_to_the_first() -> None:
    weight = nn.Parameter(torch.zeros(2))
    for _ in range(2):
        deliver([weight], [torch.tensor([1.0, 2.0])])
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 4.0]
