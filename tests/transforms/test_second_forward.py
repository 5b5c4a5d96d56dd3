"""A recomputed block sees in backward what it saw in forward, and changes no buffer twice, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks, batches
from tests.shared.pool import RankEnv, run_world

V, D, TOKENS = 16, 8, 6
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm = way, nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.register_buffer("calls", torch.zeros(()))
        if way in ("statistics within", "over the batch within"):
            self.over_samples = nn.BatchNorm1d(TOKENS, track_running_stats=way == "statistics within")

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if self.way == "within":
            self.calls += 1
        if self.way == "replaced within":
            self.calls = self.calls + 1
        if self.way in ("statistics within", "over the batch within"):
            x = self.over_samples(x)
        if self.way == "an input":
            x = torch.tanh(x + 1)  # which saves no input, so torch alone would not mind
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x if shift is None else x + shift))))
        if self.way == "last in the block":
            self.calls += 1
        return y


class Model(OfBlocks):
    """A forward that changes a buffer, or a tensor that a block has read, in one `way`."""

    def __init__(self, way: str) -> None:
        super().__init__(V, D, (Block(way) for _ in range(2)))
        self.way, self.norm = way, nn.BatchNorm1d(D) if way == "statistics" else nn.Identity()
        self.register_buffer("shift", torch.zeros(()))
        if way == "counted words":
            self.words.scale_grad_by_freq = True

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            if self.way == "by name":
                x = block(x, shift=self.shift)
            elif self.way in ("behind a reader", "replaced"):
                x = block(x, self.shift)
            elif self.way == "an input":
                y = block(before := x * 2)
                before += 1
                x = y + before
            else:
                x = block(x)
            if self.way == "replaced":
                self.shift = self.shift + 0.1
            elif self.way in ("beside the blocks", "behind a reader", "by name"):
                self.shift += 0.1
        if self.way == "statistics":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


EXACT = (
    "beside the blocks", "replaced", "statistics", "last in the block", "over the batch within", "counted words",
)  # fmt: skip
REFUSED = {
    "within": ("runs again in backward", "the buffer blocks.1.calls has changed since its forward"),
    "replaced within": ("runs again in backward", "the buffer blocks.1.calls has changed since its forward"),
    "behind a reader": ("blocks.1 runs again in backward", "its argument shift has changed"),
    "by name": ("blocks.1 runs again in backward", "its argument shift has changed"),
    "an input": ("blocks.1 runs again in backward", "its argument x has changed"),
    "statistics within": ("blocks.0.over_samples is a BatchNorm1d", "activation_checkpoint='full'"),
}


def built(way: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(way).double()


def trained(env: RankEnv, way: str, config: dict[str, Any]) -> tuple[str, list[float], dict[str, Tensor]]:
    """The error, or losses and gradients of each step, with the state at the end."""
    losses, found = list[float](), dict[str, Tensor]()
    with env.launch(SGD | config) as context:
        try:
            engine = cl.initialize(built(way), context=context)
            cut = context.local_batch(4)
            for step, (ids, labels) in enumerate(batches(V, 3, TOKENS)):
                losses.append(float(engine.forward_backward((ids[cut], labels[cut]))))
                found |= {f"{step} {name}": g for name, g in engine.full_gradients().items()}
                engine.step()
        except ValueError as error:
            return str(error), losses, found
        return "", losses, found | engine.full_state_dict()


def truth(way: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses, found = built(way), list[float](), dict[str, Tensor]()
    for step, (ids, labels) in enumerate(batches(V, 3, TOKENS)):
        model.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        for name, p in model.named_parameters():
            found[f"{step} {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            p.data.sub_(0.5 * found[f"{step} {name}"])
    return losses, found | model.state_dict()


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("way", EXACT)
def test_what_changes_outside_of_recomputed_blocks_is_exact(way: str, mode: str) -> None:
    ((told, losses, found),) = run_world(trained, 1, way, dict(activation_checkpoint=mode))
    right, expected = truth(way)
    assert not told and losses == pytest.approx(right, rel=1e-12)
    for name, value in expected.items():
        assert torch.allclose(found[name].to(value.dtype), value, rtol=1e-10, atol=1e-14), name


@pytest.mark.parametrize("way", REFUSED)
def test_a_second_forward_that_sees_another_tensor_or_changes_one_is_refused(way: str) -> None:
    ((told, *_),) = run_world(trained, 1, way, dict(activation_checkpoint="full"))
    assert all(part in told for part in REFUSED[way]), told
    ((told, *_),) = run_world(trained, 1, way, dict(activation_checkpoint="none"))
    assert not told, "what the message names as legal is legal"


@pytest.mark.parametrize("config", [dict(zero=dict(stage=3)), dict(parallel=dict(sequence=2))], ids=str)
def test_ranks_are_exact_and_each_of_them_refuses(config: dict[str, Any]) -> None:
    config = config | dict(activation_checkpoint="full")
    right, expected = truth("beside the blocks")
    for told, losses, found in run_world(trained, 2, "beside the blocks", config):
        assert not told and losses == pytest.approx(right, rel=1e-12)
        for name, value in expected.items():
            assert torch.allclose(found[name].to(value.dtype), value, rtol=1e-10, atol=1e-14), name
    for told, *_ in run_world(trained, 2, "within", config):
        assert all(part in told for part in REFUSED["within"]), told


def test_where_backward_updates_weights_a_changed_buffer_is_refused_before() -> None:
    config = dict(activation_checkpoint="full", optimizer=dict(type="sgd", lr=0.5, update_when="backward"))
    ((told, *_),) = run_world(trained, 1, "beside the blocks", config)
    assert "changes the buffer shift, and activation_checkpoint='full' would" in told
