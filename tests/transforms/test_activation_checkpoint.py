"""Activation checkpointing changes no number, and keeps as much memory as its formula says."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import colossal_lite as cl
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.transforms.activation_checkpoint import (
    CheckpointedBlock,
    apply_activation_checkpoint,
    blocks_of,
    remove_activation_checkpoint,
)
from tests.shared.parity import FAMILIES, SIZES, Case, assert_parity
from tests.shared.pool import RankEnv, WorldError, run_world

MODES: tuple[Literal["selective", "full"], ...] = ("selective", "full")
HARD = Case(
    dropout=0.2, ragged=True, global_batch=5, config=dict(clip_grad_norm=0.05, gradient_accumulation=2)
)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_every_gradient_is_the_serial_one(mode: str, family: str, world_size: int) -> None:
    config = HARD.config | dict(activation_checkpoint=mode)
    assert_parity(HARD, family=family, config=config, world_size=world_size)


@pytest.mark.parametrize("mode", MODES)
def test_it_is_exact_when_the_blocks_input_needs_no_gradient(mode: str) -> None:
    frozen = ("token.weight", "position.weight")
    assert_parity(HARD, frozen=frozen, tied=False, config=HARD.config | dict(activation_checkpoint=mode))


AXES: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "1d, whole": dict(tensor=2, sequence_parallel=False),
    "2d": dict(tensor=4, mode="2d", world_size=4, global_batch=8),
    "ring": dict(sequence=2),
    "ulysses": dict(sequence=2, sequence_mode="ulysses"),
}


@pytest.mark.parametrize("axes", AXES)
def test_a_whole_block_is_exact_on_other_axes(axes: str) -> None:
    assert_parity(HARD, config=HARD.config | dict(activation_checkpoint="full"), **AXES[axes])


@pytest.mark.parametrize("axes", ["1d", "1d, whole"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_kept_products_are_exact_under_1d(family: str, axes: str) -> None:
    """Llama's two key heads are fewer than four ranks."""
    sizes = AXES[axes] | (dict(tensor=4, world_size=4) if family == "llama" else {})
    assert_parity(HARD, family=family, config=HARD.config | dict(activation_checkpoint="selective"), **sizes)


HUGGING_FACE = {
    "gpt2, full": Case("hf-gpt2", dropout=0.1, config=dict(activation_checkpoint="full")),
    "gpt2, selective": Case("hf-gpt2", dropout=0.1, config=dict(activation_checkpoint="selective")),
    "llama, full": Case("hf-llama", tied=False, config=dict(activation_checkpoint="full")),
    "llama, selective": Case("hf-llama", tied=False, config=dict(activation_checkpoint="selective")),
    "llama, tensor, selective": Case(
        "hf-llama", tied=False, tensor=2, config=dict(activation_checkpoint="selective")
    ),
    "gpt2, tensor, selective": Case(
        "hf-gpt2", dropout=0.1, tensor=2, config=dict(activation_checkpoint="selective")
    ),
    "llama, tensor": Case("hf-llama", tied=False, tensor=2, config=dict(activation_checkpoint="full")),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_blocks_are_found_and_exact(name: str) -> None:
    assert_parity(HUGGING_FACE[name], build="module", ragged=True)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(x))
        return y


class Caching(nn.Module):
    """A model whose blocks are handed a cache, as those of Hugging Face are while `use_cache` is set."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
            y: Tensor = self.linear(x)
            return y

    def __init__(self, by_position: bool) -> None:
        super().__init__()
        self.by_position = by_position
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h, []) if self.by_position else layer(h, past_key_values=[])
        y: Tensor = self.head(h)
        return y


def refused(env: RankEnv, what: str) -> None:
    with env.launch(dict(precision="fp32", activation_checkpoint="full")) as context:
        torch.manual_seed(0)
        model = Bare() if what == "no blocks" else Caching(by_position="position" in what)
        engine = cl.initialize(model, context=context)
        inputs = torch.tensor([[1, 2, 3]])
        engine.train_step((inputs, (inputs + 3) % 8))


CACHE = "layers.0 is handed a cache of keys"
REFUSED = {"no blocks": "Bare has no nn.ModuleList", "a cache": CACHE, "a cache by position": CACHE}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_run_twice_is_refused(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSED[what]):
        run_world(refused, 1, what)


def test_blocks_are_found_outermost_and_put_back() -> None:
    model = GPT(GPTConfig(**SIZES))
    names = [name for name, _ in model.named_modules()]
    assert (
        list(blocks_of(model))
        == ["blocks.0", "blocks.1"]
        == list(apply_activation_checkpoint(model, "full", DropoutStreams(0)))
    )
    assert all(isinstance(block.forward, CheckpointedBlock) for block in model.blocks)
    assert [name for name, _ in model.named_modules()] == names
    remove_activation_checkpoint(model)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    pairs = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    nested = nn.ModuleDict({"pairs": pairs, "leaves": nn.ModuleList([nn.Linear(2, 2)]), "gpt": model})
    assert list(blocks_of(nested)) == ["gpt.blocks.0", "gpt.blocks.1"]


# ------------------------------------------------------------------------------------------------------ memory


class Storages(TorchDispatchMode):
    """Remembers, without keeping it alive, the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def live_bytes(self) -> int:
        return sum(size for ref, size in self.seen.values() if not ref.expired())


BATCH = 3


def bytes_after_forward(family: str, layers: int, mode: Any, dropout: float, dtype: torch.dtype) -> int:
    """What the graph of one forward keeps alive, the weights left out."""
    options = SIZES | FAMILIES[family] | dict(layers=layers, dropout=dropout)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**options)).to(dtype).train()
    streams = DropoutStreams(0)
    for name, module in model.named_modules():
        if hasattr(module, "rows"):
            module.rows = lambda name=name: streams.rows(name)
    apply_activation_checkpoint(model, mode, streams)
    inputs = torch.randint(SIZES["vocabulary"], (BATCH, SIZES["sequence"]))
    streams.begin(0, torch.arange(BATCH), torch.arange(SIZES["sequence"]))
    with Storages() as storages:
        loss = model(inputs).float().logsumexp(-1).sum()
    assert loss.requires_grad
    for parameter in model.parameters():  # views of weights have their storages
        storages.seen.pop(parameter.untyped_storage()._cdata, None)
    return storages.live_bytes


def facts(family: str) -> tuple[ModelFacts, bool]:
    config = GPTConfig(**(SIZES | FAMILIES[family]))
    sizes = dict(kv_heads=config.key_heads, ffn=config.ffn_width, tied=True)
    names = ("layers", "heads", "width", "vocabulary", "sequence")
    return ModelFacts(**sizes, **{n: getattr(config, n) for n in names}), config.activation == "swiglu"


def kept_numel(facts: ModelFacts, mode: str, *, gated: bool) -> dict[str, int]:
    """Elements that one block keeps for each token: `activation` in the compute dtype, `statistic` in the dtype of
    attention's log-sums, float32 or better. `gated`: the feed-forward layer has a gate beside its up projection."""
    if mode == "full":
        return {"activation": facts.width, "statistic": 0}
    qkv = facts.width + 2 * facts.kv_heads * (facts.width // facts.heads)
    up = facts.ffn * (2 if gated else 1)
    block_input, attended, projected, down = (facts.width,) * 4
    return {"activation": block_input + qkv + attended + projected + up + down, "statistic": facts.heads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_block_keeps_is_the_formula(mode: Any, family: str, dtype: torch.dtype) -> None:
    for dropout in (0.0, 0.1):
        two, four = (bytes_after_forward(family, n, mode, dropout, dtype) for n in (2, 4))
        sizes, gated = facts(family)
        numel = kept_numel(sizes, mode, gated=gated)
        per_token = numel["activation"] * dtype.itemsize + numel["statistic"] * 4
        assert (four - two) / 2 == BATCH * SIZES["sequence"] * per_token


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_mode_keeps_less_than_the_one_before(family: str) -> None:
    none, selective, full = (bytes_after_forward(family, 4, m, 0.1, torch.float32) for m in ("none", *MODES))
    assert none > 1.2 * selective > 1.2 * 2 * full
