"""Buffers of a user's own model come back from a checkpoint. State that no checkpoint holds is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.checkpoint.files import listed, verify
from tests.shared.pool import RankEnv, run_world


class Turned(nn.Linear):
    """Turns pairs of features by a complex buffer, as rotary embeddings do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4, 6)
        self.turns: Tensor
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return super().forward(torch.view_as_real(pairs * self.turns).flatten(-2))


class Counting(nn.Linear):
    """Keeps a count beside its tensors, as torch lets a module do."""

    def __init__(self, *, as_tensor: bool) -> None:
        super().__init__(4, 6)
        self.count, self.as_tensor = 0, as_tensor

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state if self.as_tensor else state["count"])


def save_and_load(env: RankEnv, folder: str, stage: int) -> tuple[bool, list[str]]:
    """Whether a complex buffer is loaded as it was saved, and the faults of the files."""
    with env.launch(dict(precision="fp64", zero=dict(stage=stage))) as context:
        torch.manual_seed(0)
        model = Turned(torch.complex128)
        engine = cl.initialize(model, context=context)
        truth = model.turns.clone()
        engine.save(folder)
        model.turns.zero_()
        engine.load(folder)
        same = torch.equal(model.turns, truth)
    return same, list(verify(listed(Path(folder))[0]))


@pytest.mark.parametrize("world", [1, 2])
def test_a_complex_buffer_comes_back(world: int, tmp_path: Path) -> None:
    """A save once raised KeyError: torch.complex128."""
    assert run_world(save_and_load, world, str(tmp_path), 0) == [(True, [])] * world


def refused_save(env: RankEnv, folder: str) -> str:
    """The words of a save of a buffer whose dtype no checkpoint holds."""
    with env.launch(dict(precision="fp32")) as context:
        model = nn.Linear(4, 6)
        model.register_buffer("small", torch.zeros(2, dtype=torch.float8_e5m2fnuz))
        engine = cl.initialize(model, context=context)
        with pytest.raises(ValueError) as caught:
            engine.save(folder)
    return str(caught.value)


def test_a_dtype_that_no_checkpoint_holds_is_refused_by_name(tmp_path: Path) -> None:
    (text,) = run_world(refused_save, 1, str(tmp_path))
    assert text.startswith("checkpoint: model/small is torch.float8_e5m2fnuz") and "persistent=False" in text


def refused_model(env: RankEnv, as_tensor: bool) -> str:
    with env.launch(dict(precision="fp32")) as context, pytest.raises(ValueError) as caught:
        cl.initialize(nn.Sequential(Counting(as_tensor=as_tensor)), context=context)
    return str(caught.value)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_state_beside_parameters_and_buffers_is_refused_by_name(as_tensor: bool) -> None:
    """A tensor of get_extra_state once was saved and not loaded: a resumed run counted from 0."""
    (text,) = run_world(refused_model, 1, as_tensor)
    assert text.startswith("model: 0 (Counting) has get_extra_state") and "register_buffer" in text


def test_a_conjugate_view_is_refused_by_name_and_its_values_come_back(tmp_path: Path) -> None:
    """A step, or a save, once ended in an error of torch."""
    turns = torch.tensor([1 + 2j, 3j])
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        for view in (turns.conj(), turns.conj().imag):
            model = nn.Linear(4, 6)
            model.register_buffer("turns", view)
            with pytest.raises(ValueError, match="the buffer turns is a conjugate or negative view"):
                cl.initialize(model, context=context)
        model.turns = turns.conj().resolve_conj()
        engine = cl.initialize(model, context=context)
        engine.train_step((torch.randn(2, 4), torch.tensor([1, 2])))
        engine.save(tmp_path)
        model.turns.zero_()
        engine.load(tmp_path)
        assert torch.equal(model.turns, torch.tensor([1 - 2j, -3j]))


def test_a_buffer_of_nine_dimensions_is_refused_by_name(tmp_path: Path) -> None:
    """Rank 0 once raised an error of a library, and other ranks waited for it."""
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        model = nn.Linear(4, 6)
        model.register_buffer("deep", torch.ones([1] * 9))
        engine = cl.initialize(model, context=context)
        with pytest.raises(ValueError, match="model/deep has 9 dimensions, and a checkpoint holds at most 8"):
            engine.save(tmp_path)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sparse_buffer_is_refused_by_name_and_an_attribute_is_not(persistent: bool) -> None:
    """It once ended in an error of torch, from inside."""
    table = torch.eye(4).to_sparse()

    class Graph(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((self.table @ x.t()).t())

    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        model = Graph(4, 6)
        model.register_buffer("table", table, persistent=persistent)
        with pytest.raises(ValueError, match="the buffer table is torch.sparse_coo.*Legal: .*attribute"):
            cl.initialize(model, context=context, criterion=nn.functional.cross_entropy)
        model = Graph(4, 6)
        model.table = table
        engine = cl.initialize(model, context=context, criterion=nn.functional.cross_entropy)
        assert engine.train_step((torch.ones(2, 4), torch.arange(2))).step == 1
