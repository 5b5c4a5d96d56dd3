"""Builds the models and batches of drawn cases from plain dicts, the same on every rank and in the plain loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.models import GPT, GPTConfig
from tests.shared.emitting import emit
from tests.shared.parity import DTYPE, ModularAdapter, adapt
from tests.shared.written_models import STYLES

PATTERNS = {
    "gpt": ["*norm1*", "*.0.*", "*attention*", "*mlp*"],
    "hf-gpt2": ["*bias", "*ln_1*", "*.0.*", "*attn*"],
    "hf-llama": ["*norm*", "*.0.*", "*mlp*"],
    "own": ["*bias", "*norm1*", "block0*"],
    "written": ["*bias", "*ln_1*", "*.0.*", "*mlp*"],
    "perceptron": ["*bias", "*norm*", "*linear0*"],
}
"""Of parameters' names, for optimizer groups."""
NO_MATRICES = {
    "gpt": ["*norm*"],  # without biases
    "hf-gpt2": ["*ln_*", "*bias"],
    "hf-llama": ["*norm*"],
    "own": ["*norm*", "*bias"],
    "perceptron": ["*norm*", "*bias"],
}
"""Those that Muon does not train; of a written model there is no one list."""
ADAPTERS = {"plain": None, "modular": ModularAdapter}


class Attention(nn.Module):
    """Causal attention as a user would write it: `num_heads` is set to a rank's share."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.narrow(torch.relu(self.wide(self.norm2(x))))
        return y


OWN_PLAN = {
    "embed": "embedding",
    "block*": "block",
    "block*.norm*": "norm",
    "block*.attention": "attention",
    "block*.attention.[qkv]": "colwise",
    "block*.attention.out": "rowwise",
    "block*.wide": "colwise",
    "block*.narrow": "rowwise",
    "norm": "norm",
    "head": "lm_head",
}


def own(vocabulary: int, layers: int, heads: int, width: int, ffn: int) -> nn.Module:
    """A model of a user's own, an `nn.Sequential` that a plan gives its roles."""
    blocks = {f"block{i}": Block(width, heads, ffn) for i in range(layers)}
    ends = {"norm": nn.LayerNorm(width), "head": nn.Linear(width, vocabulary)}
    return nn.Sequential(OrderedDict({"embed": nn.Embedding(vocabulary, width), **blocks, **ends}))


class Unused(nn.Module):
    """A model with a parameter and a layer that no forward uses."""

    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.idle, self.spare = nn.Parameter(torch.ones(3)), nn.Linear(features, features)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def perceptron(
    features: int, width: int, layers: int, classes: int, dropout: float, unused: bool = False
) -> nn.Module:
    """Layers on vectors [B, features]; no tokens."""
    rows: dict[str, nn.Module] = {"first": nn.Linear(features, width)}
    for i in range(layers):
        rows |= {f"norm{i}": nn.LayerNorm(width), f"linear{i}": nn.Linear(width, width)}
        rows |= {f"act{i}": nn.GELU(), f"drop{i}": nn.Dropout(dropout)}
    model = nn.Sequential(OrderedDict(rows | {"last": nn.Linear(width, classes)}))
    return Unused(model, features) if unused else model


def unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of a Hugging Face model whose labels are those of its tokens: Hugging Face's own shifts them."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def build_model(model: Mapping[str, Any]) -> nn.Module:
    """A model from its dict: `kind`, its sizes under `sizes`, and what is done to it."""
    kind, sizes = model["kind"], dict(model["sizes"])
    if kind == "gpt":
        made: nn.Module = GPT(GPTConfig(**sizes))
    elif kind == "own":
        made = own(**sizes)
    elif kind == "perceptron":
        made = perceptron(**sizes)
    elif kind == "written":
        made = STYLES[sizes["style"]](sizes["layers"]).float()
    else:
        from tests.shared.hugging_face import sized

        made = sized(kind, **sizes)
        made.loss_function = unshifted
    emit(made, model.get("auxiliary", ()), inside=not model.get("grid", False))
    if rank := model.get("adapters", 0):
        adapt(made, rank, ADAPTERS[model["adapter_kind"]])
    for name, parameter in made.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in model.get("frozen", ())):
            parameter.requires_grad_(False)
    return made


def make_batch(case: Any, number: int, samples: int) -> dict[str, Tensor]:
    """The global batch of a step, or of an evaluation where `number` is negative: `inputs` and `labels`, perhaps
    `attention_mask` and `position_ids`."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 500 + number)
    sizes, rule = case.model["sizes"], case.batch
    if case.model["kind"] == "perceptron":
        inputs = torch.randn(samples, sizes["features"], generator=generator, dtype=torch.float64)
        labels = torch.randint(sizes["classes"], (samples,), generator=generator)
        found = {"inputs": inputs.to(DTYPE[case.dtype]), "labels": labels}
    else:
        shape = (samples, rule["tokens"])
        text = torch.randint(sizes["vocabulary"], (samples, rule["tokens"] + 1), generator=generator)
        found = {"inputs": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
        found |= _extras(rule, shape)
    ignored = _ignored(rule["labels"], found["labels"].shape, number, generator)
    if "attention_mask" in found and rule["mask"] != "documents":
        ignored = ignored | (found["attention_mask"] == 0)
    found["labels"] = found["labels"].masked_fill(ignored, -100)
    return found


def _extras(rule: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Mask and positions of a batch of ids."""
    samples, tokens = shape
    place, row = torch.arange(tokens)[None], torch.arange(samples)[:, None]
    lengths = tokens - row % max(tokens, 1)
    found: dict[str, Tensor] = {}
    if rule["mask"] == "right":
        found["attention_mask"] = (place < lengths).long()
    elif rule["mask"] == "left":
        found["attention_mask"] = (place >= tokens - lengths).long()
    elif rule["mask"] == "documents":
        found["attention_mask"] = (place >= (3 + 2 * row) % tokens).long()
    if rule["positions"]:
        found["position_ids"] = place.expand(shape).contiguous()
    return found


def _ignored(kind: str, shape: Any, number: int, generator: torch.Generator) -> Tensor:
    """Which labels are ignored."""
    none = torch.zeros(shape, dtype=torch.bool)
    row = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    if kind == "sparse":
        return torch.rand(shape, generator=generator) < 0.5
    if kind == "ragged" and len(shape) == 2:
        return torch.arange(shape[1])[None] >= row * 2 + 1 + abs(number)
    if kind == "one sample":
        return none | (row != (abs(number) % max(shape[0], 1)))
    if kind == "a step without":
        return none | (number == 1)
    return none


def given(batch: Mapping[str, Tensor], form: str, cut: slice = slice(None)) -> Any:
    """A part of a batch as a user hands it over: a tuple, or a dict of input_ids and so on."""
    mine = {name: value[cut] for name, value in batch.items()}
    if form == "tuple":
        return mine["inputs"], mine["labels"]
    return {"input_ids" if name == "inputs" else name: value for name, value in mine.items()}
