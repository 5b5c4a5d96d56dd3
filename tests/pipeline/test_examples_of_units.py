"""A trace runs on the user's example where few ids do not do, and on all rows where few of them do not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.data.batch import Batch, read_batch
from colossal_lite.pipeline.traced_sections import traced
from colossal_lite.pipeline.unit_trace import UnitsError, trace_units
from tests.pipeline.test_modes_of_units import SGD, STEPS, Block, D
from tests.shared.pool import RankEnv, run_world

CLASSES = 5


class Written(nn.Module):
    """Patches that are written into a tensor of zeros, which only a copy without values lets pass."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Linear(12, D), nn.Linear(D, CLASSES)
        self.own = nn.Parameter(torch.randn(D))
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), x.shape[1] + 1, D, dtype=x.dtype, device=x.device)
        h[:, 0], h[:, 1:] = self.own, self.patch(x)
        for block in self.blocks:
            h = block(h)
        given: Tensor = self.head(h[:, 0])
        return given


def test_a_large_model_is_traced_on_an_example_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossal_lite.pipeline.unit_trace.LIMIT_BYTES", 100)
    shown = Batch((torch.randn(4, 3, 12),), {}, torch.tensor([1, 2, 3, 4]), torch.arange(4))
    _, copy = trace_units(Written(), shown)
    assert not copy.has_values


class Pictures(nn.Module):
    """A vision transformer's frame: patches, a token of its own, positions, one output a sample."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 3, stride=3)
        self.own = nn.Parameter(torch.randn(1, 1, D))
        self.places = nn.Parameter(torch.randn(1, 5, D))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.own.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        given: Tensor = self.head(self.norm(x)[:, 0])
        return given if given.shape[-1] > 1 else given[:, 0]


def model(outputs: int) -> Pictures:
    torch.manual_seed(0)
    return Pictures(outputs).double()


def batches(outputs: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, 4, 3, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (STEPS, 4), generator=generator)
    return list(zip(inputs, labels if outputs > 1 else labels.double(), strict=True))


def loss(given: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(given, labels) if given.dim() > 1 else F.mse_loss(given, labels)


def staged(
    env: RankEnv, outputs: int, parallel: dict[str, Any], by_name: bool
) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(SGD | dict(parallel=parallel)) as context:
        first, *_ = given = [dict(x=x, labels=y) if by_name else (x, y) for x, y in batches(outputs)]
        engine = cl.initialize(model(outputs), context=context, criterion=loss, example=first)
        return [float(engine.train_step(batch).loss) for batch in given], engine.full_state_dict()


@pytest.mark.parametrize(("outputs", "by_name"), [(CLASSES, False), (1, False), (CLASSES, True)])
def test_a_model_of_pictures_has_stages_by_an_example(outputs: int, by_name: bool) -> None:
    """Of any form that a step takes: a tuple, or a dict of the arguments that its own forward names."""
    serial, losses = model(outputs), []
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.5)
    for inputs, labels in batches(outputs):
        optimizer.zero_grad()
        own = loss(serial(inputs), labels)
        own.backward()
        optimizer.step()
        losses.append(float(own.detach()))
    for found, state in run_world(staged, 2, outputs, dict(pipeline=dict(size=2, micro_batches=2)), by_name):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, right in serial.state_dict().items():
            torch.testing.assert_close(state[name], right, rtol=1e-11, atol=1e-13)


def example(*shape: int) -> Batch:
    return read_batch((torch.randn(shape), torch.zeros(shape[0])), device=torch.device("cpu"))


def test_an_example_is_named_where_ids_do_not_do_and_is_taken() -> None:
    with pytest.raises(
        UnitsError, match=r"on ids \[2, 8\] alone.*Legal: cl.initialize\(..., example=\(inputs, l"
    ):
        traced(Pictures())
    assert len(traced(Pictures(), example(4, 3, 6, 6)).parts) == 5
    with pytest.raises(
        UnitsError, match=r"does not run on the example inputs \[4, 2, 6, 6\]: .*Legal: a default"
    ):
        traced(Pictures(), example(4, 2, 6, 6))


class Viewing(Pictures):
    """Fails on no samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1, 6, 6))


def test_a_rank_without_samples_traces_one() -> None:
    assert len(traced(Viewing(), example(0, 3, 6, 6)).parts) == 5


def test_a_copy_without_values_runs_on_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossal_lite.pipeline.unit_trace.LIMIT_BYTES", 100)
    assert len(traced(Pictures(), example(4, 3, 6, 6)).parts) == 5


V = 64


class TwoInputs(nn.Module):
    """Takes a second argument, without which it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, V)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + position_ids[..., None]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_an_example_of_ids_and_more_is_taken_where_ids_alone_do_not_do() -> None:
    ids = torch.full((4, 6), V - 1)
    batch = read_batch(dict(input_ids=ids, position_ids=ids, labels=ids), device=torch.device("cpu"))
    with pytest.raises(UnitsError, match="example="):
        traced(TwoInputs())
    assert len(traced(TwoInputs(), batch).parts) == 5
    _, copy = trace_units(TwoInputs(), batch)
    assert copy.model.get_submodule("words").num_embeddings < V, "its words are among the few of the copy"


class Words(nn.Module):
    """What is of the size of the vocabulary stands beside the head: an adapter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, V)
        self.a, self.b = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.randn(2, V))
        self.register_buffer("bias", torch.randn(1, V))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x) + x @ self.a @ self.b + self.bias
        return logits


def test_a_model_whose_head_has_parts_beside_it_is_traced_with_all_words() -> None:
    *_, head = traced(Words()).parts
    assert head.modules == ("head",) and head.parameters == ("a", "b")
