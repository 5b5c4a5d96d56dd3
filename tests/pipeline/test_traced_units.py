"""Models as people write them have units by a trace: exact on stages, or refused with the line of their source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from colossal_lite.parallel.auto_plan import auto_plan
from colossal_lite.pipeline.traced_sections import traced
from colossal_lite.pipeline.unit_trace import UnitsError
from tests.shared.parity import Case, assert_parity

V, D, T = 37, 16, 8


class Block(nn.Module):
    """Takes a mask and a table of angles beside the stream, and gives a tuple."""

    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.window = 4

    def forward(self, x: Tensor, mask: Tensor, *, angles: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = angles.to(x.dtype)
        q, k = q * angles.cos(), k * angles.sin()
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), None


class Walk(nn.Module):
    """Positions and a matrix are parameters at the root, the head is the table, and code stands between the blocks."""

    def __init__(self, blocks: Callable[[list[nn.Module]], nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(V, D), nn.Dropout(0.1)
        self.places = nn.Parameter(torch.randn(1, T, D))
        self.kinds = nn.Parameter(torch.randn(3, D))
        self.widen = nn.Conv1d(D, D, 1)
        self.scales = nn.Parameter(torch.ones(3))
        self.blocks = blocks([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(D)
        self.register_buffer("angles", torch.outer(torch.arange(float(T)), torch.arange(float(D))))

    def list(self) -> list[Any]:
        return list(self.blocks.children())

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        tokens = ids.shape[1]
        x = self.drop(self.widen(self.words(ids).mT).mT + self.places[:, :tokens])
        x = x + F.one_hot(ids % 3, 3).to(x.dtype) @ self.kinds
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()
        for i, block in enumerate(self.list()):
            assert block.window == 4, "a setting of a block of another stage"
            x = x * self.scales[i]
            x, _ = block(x, mask, angles=self.angles[:tokens])
        x += 1.0
        return {"logits": self.norm(x) @ self.words.weight.T}


class Wrapped(Walk):
    """As parity reads logits."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids)["logits"]


def named(blocks: list[nn.Module]) -> nn.Module:
    return nn.ModuleDict({f"layer{i}": block for i, block in enumerate(blocks)})


@dataclass(frozen=True)
class WalkCase(Case):
    blocks: Any = nn.ModuleList

    def model(self) -> nn.Module:
        return Wrapped(self.blocks)


CASES = {
    "a stage for each unit but two": dict(
        world_size=3,
        pipeline=dict(size=3, micro_batches=2, partition=(2, 1, 2)),
        config=dict(clip_grad_norm=0.3),
    ),
    "the blocks in a ModuleDict, interleaved, recomputed": dict(
        blocks=named,
        pipeline=dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=2),
        config=dict(activation_checkpoint="full"),
    ),
    "cut behind the embedding": dict(pipeline=dict(size=2, micro_batches=2, partition=(1, 4))),
    "weights in another precision than they came": dict(
        pipeline=dict(size=2, micro_batches=2, partition=(2, 3)), config=dict(precision="fp32")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_ones_own_trains_on_stages_as_on_one_process(name: str) -> None:
    options: dict[str, Any] = CASES[name]
    assert_parity(
        WalkCase(build="module", tokens=T, dropout=0.1, ragged=True, global_batch=4, steps=2, **options)
    )


def test_units_say_which_parameters_are_theirs() -> None:
    first, *blocks, head = traced(Wrapped()).parts
    assert first.modules == ("words", "widen", "drop") and first.parameters == ("places", "kinds", "scales")
    assert [block.modules for block in blocks] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    assert [block.parameters for block in blocks] == [(), ("scales",), ("scales",)]
    assert head.modules == ("words", "norm"), "the head reads the table"


def test_a_model_of_fewer_positions_than_a_trace_takes_tokens_has_units() -> None:
    shape = GPT2Config(vocab_size=50, n_positions=6, n_embd=8, n_head=2, n_layer=3, use_cache=False)
    assert len(traced(GPT2LMHeadModel(shape)).parts) == 5


# ---- what is refused ----


class TwoTensors(Walk):
    def forward(self, ids: Tensor) -> Any:
        x = first = self.words(ids)
        for block in self.list():
            x, _ = block(x + 0.1 * first, torch.ones(T, T, dtype=torch.bool), angles=self.angles)
        return self.norm(x)


class HandsTwo(Walk):
    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.list():
            x, _ = block(x, torch.ones(T, T, dtype=torch.bool), angles=2 * self.places)
        return self.norm(x)


class OtherOrder(Walk):
    def list(self) -> list[Any]:
        return super().list()[::-1]


class LeavesOut(Walk):
    def list(self) -> list[Any]:
        return super().list()[:-1]


class CallsForward(Walk):
    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.list():
            x, _ = block.forward(x, torch.ones(T, T, dtype=torch.bool), angles=self.angles)
        return self.norm(x)


class ReadsWithin(Walk):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids)["logits"] * self.blocks[0].out.bias.sum()  # type: ignore[index, union-attr]


class HoldsModules(nn.Module):
    """A block whose function holds its modules, as minGPT's MLP does; `kept` says how the block keeps the function."""

    def __init__(self, kept: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.out = up, out = nn.Linear(D, D), nn.Linear(D, D)

        def inner(x: Tensor) -> Tensor:
            return F.gelu(up(x))

        self.kept = kept(lambda x, last=out: last(inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        run = kept[0] if isinstance(kept, tuple) else kept["run"] if isinstance(kept, dict) else kept
        return x + getattr(run, "run", run)(x)


class Held(nn.Module):
    def __init__(self, kept: Callable[[Any], Any]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.ModuleList(HoldsModules(kept) for _ in range(2))

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KEPT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda f: f,
    "in a tuple": lambda f: (f,),
    "in a dict": lambda f: {"run": f},
}


@pytest.mark.parametrize("name", KEPT)
def test_the_proof_of_units_leaves_no_gradient_in_modules_that_a_function_holds(name: str) -> None:
    model = Held(KEPT[name]).double()
    with torch.random.fork_rng():
        assert [block.modules for block in traced(model).parts[1:3]] == [("blocks.0",), ("blocks.1",)]
        auto_plan(model, 2)
    assert all(parameter.grad is None for parameter in model.parameters())


def hooked() -> nn.Module:
    model = nn.Module()
    model.inner = Walk()
    model.inner.register_forward_hook(lambda *_: None)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "two tensors between blocks": (
        TwoTensors, ("TwoTensors at ", "test_traced_units.py:", "made before the first block", "pipeline_sections()"),
    ),
    "a second tensor of parameters for each block": (
        HandsTwo, ("blocks.0 (Block) is handed 2 tensors of parameters", "one tensor"),
    ),
    "another order": (OtherOrder, ("blocks.2 is called where blocks.0 is due",)),
    "a block that is not called": (LeavesOut, ("calls 2 of its 3 blocks", "blocks.2 not")),
    "block.forward(x)": (CallsForward, ("CallsForward", "is read outside its block", "block(x)")),
    "a weight of a block, read outside": (ReadsWithin, ("blocks.0.out.bias is read outside its block",)),
    "an object that is not copied holds modules": (
        lambda: Held(lambda f: SimpleNamespace(run=f)), ("cannot be copied", "by an object that is not copied"),
    ),
    "a hook around the blocks": (hooked, ("hook on inner (Walk)", "hooks on the blocks")),
    "no blocks": (lambda: nn.Linear(2, 2), ("does not say what its units are", "nn.ModuleList")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_passes_more_than_one_tensor_is_refused_with_its_line(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UnitsError) as told:
        traced(make())
    assert all(word in str(told.value) for word in words), told.value


def hugging_face() -> nn.Module:
    """Without a cache it looks at the values of positions."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=T, n_embd=8, n_head=2, n_layer=3, use_cache=False)
    )


@pytest.mark.parametrize("make", [Wrapped, hugging_face])
def test_a_model_too_large_for_a_copy_is_traced_without_values(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = traced(make()).parts
    monkeypatch.setattr("colossal_lite.pipeline.unit_trace.LIMIT_BYTES", 1)
    assert traced(make()).parts == small


class ReadsValues(Walk):
    def forward(self, ids: Tensor) -> Any:
        if self.words(ids).abs().max() > 100:
            raise ValueError("exploded")
        return super().forward(ids)


class WritesBeside(Walk):
    def forward(self, ids: Tensor) -> Any:
        held = torch.zeros(len(ids), T, D, device=self.places.device)
        if (ids >= 0).all():
            held[:] = self.words(ids)
        return super().forward(ids)


@pytest.mark.parametrize(
    ("kind", "word"), [(ReadsValues, "Tensor.item()"), (WritesBeside, "writes what parameters made")]
)
def test_a_model_too_large_for_a_copy_is_told_what_needs_values(
    kind: type[Walk], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(kind())
    monkeypatch.setattr("colossal_lite.pipeline.unit_trace.LIMIT_BYTES", 1)
    with pytest.raises(UnitsError) as told:
        traced(kind())
    words = (
        "without values (a small copy of it needs",
        word,
        "no value of a tensor read",
        "pipeline_sections()",
    )
    assert all(each in str(told.value) for each in words), told.value
