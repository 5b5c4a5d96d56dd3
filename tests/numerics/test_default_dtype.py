"""torch.set_default_dtype of a user changes no number of a run: the framework names the dtypes of its own tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.distributed.shared_memory_collectives import add_wide

DEFAULTS = [torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def numbers_of_run(made: nn.Module, dtype: str, optimizer: str) -> list[float]:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    config: cl.ConfigDict = dict(
        precision=dtype, clip_grad_norm=0.01, optimizer=dict(type=optimizer, lr=1e-2), timeout_s=30
    )
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = cl.initialize(made, context=context)
        results = [engine.train_step((ids, 7 - ids)) for _ in range(3)]
        state: dict[str, Tensor] = engine.full_state_dict()
        return [*(r.loss.item() for r in results), *(r.grad_norm for r in results)] + [
            value for each in state.values() for value in each.flatten().tolist()
        ]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "lion"])
def test_a_run_has_the_same_bits_under_any_default_dtype(
    optimizer: str, dtype: str, default: torch.dtype
) -> None:
    expected = numbers_of_run(model(), dtype, optimizer)
    made = model()
    with default_dtype(default):
        assert numbers_of_run(made, dtype, optimizer) == expected


def rounded_once(terms: list[Tensor]) -> Tensor:
    return torch.stack([term.float() for term in terms]).sum(0).to(torch.bfloat16)


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_sum_of_ranks_in_16_bits_is_rounded_once_under_any_default_dtype(default: torch.dtype) -> None:
    terms = [torch.tensor([256.0, 1.0], dtype=torch.bfloat16)] + [torch.ones(2, dtype=torch.bfloat16)] * 3
    with default_dtype(default):
        total = torch.empty(2, dtype=torch.bfloat16)
        add_wide(terms, total)
    assert torch.equal(total, rounded_once(terms))
