"""Small models as users write them, with one thing each that a swap of layers must carry or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

WORDS, WIDTH, HEADS, TOKENS = 37, 16, 4, 8
PLAN = {
    "words": "embedding",
    "places": "position",
    "blocks.*": "block",
    "blocks.*.norm_?": "norm",
    "blocks.*.attention": "attention",
    "blocks.*.attention.qkv": "colwise:qkv",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "norm",
    "head": "lm_head",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y: Tensor = self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.middle(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y

    def middle(self, x: Tensor) -> Tensor:
        return x


# ---- what they may have ----


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.1


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 1.1


class CentredEmbedding(nn.Embedding):
    """Not a function of each word alone."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows - rows.mean(1, keepdim=True)


class ShiftedNorm(nn.Module):
    """As Gemma's: 1 + w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class BareNorm(nn.Module):
    """As OLMo's: no weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])


class LoudNorm(nn.LayerNorm):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3.0


class PerToken(Model):
    """A linear on each token, between the embeddings and the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.extra(x)
        return y


class AcrossTokens(PerToken):
    """A replicated module that mixes tokens."""

    def middle(self, x: Tensor) -> Tensor:
        return x + self.extra(x.mean(1, keepdim=True))


class CallsForward(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block.forward(x)
        y: Tensor = self.head(self.norm(x))
        return y


class CallsForwardWithin(Model):
    """Calls the forward of the module whose input several linears share."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = Separate()  # type: ignore[assignment]


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SeparateHeads()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class SeparateHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y: Tensor = self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


class PairsOfTokens(Model):
    """Reads two tokens as one."""

    def middle(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        return x + x.reshape(rows, 2 * tokens, -1).cumsum(1).reshape(rows, tokens, width)


def _with(change: Callable[[Any], None], kind: type[Model] = Model) -> Callable[[], Model]:
    def build() -> Model:
        torch.manual_seed(0)
        made = kind().double()
        change(made)
        for parameter in made.parameters():  # ones and zeros hide what a norm does with its weight
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        return made

    return build


def _set(path: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    parent, _, child = path.rpartition(".")

    def change(model: Model) -> None:
        setattr(model.get_submodule(parent), child, make().double())

    return change


def _hook(path: str, register: str, hook: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda model: getattr(model.get_submodule(path), register)(hook)


def _parameter_hook(model: Model) -> None:
    model.blocks[0].up.weight.register_hook(lambda g: g * 2)  # type: ignore[union-attr, operator]


UP = "blocks.1.up"
MODELS: dict[str, Callable[[], Model]] = {
    "plain": _with(lambda model: None),
    "subclass of Linear": _with(_set(UP, lambda: ScaledLinear(WIDTH, 4 * WIDTH))),
    "subclass of Embedding": _with(_set("words", lambda: ScaledEmbedding(WORDS, WIDTH))),
    "embedding across tokens": _with(_set("words", lambda: CentredEmbedding(WORDS, WIDTH))),
    "padding_idx": _with(_set("words", lambda: nn.Embedding(WORDS, WIDTH, padding_idx=3))),
    "subclass with padding_idx": _with(_set("words", lambda: ScaledEmbedding(WORDS, WIDTH, padding_idx=30))),
    "max_norm": _with(_set("words", lambda: nn.Embedding(WORDS, WIDTH, max_norm=0.5))),
    "scale_grad_by_freq": _with(_set("words", lambda: nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True))),
    "sparse": _with(_set("words", lambda: nn.Embedding(WORDS, WIDTH, sparse=True))),
    "forward hook": _with(_hook(UP, "register_forward_hook", lambda m, a, y: y * 1.1)),
    "forward pre-hook": _with(_hook(UP, "register_forward_pre_hook", lambda m, a: (a[0] * 1.1,))),
    "backward hook": _with(_hook(UP, "register_full_backward_hook", lambda m, a, b: (a[0] * 1.1,))),
    "hook on a weight": _with(_parameter_hook),
    "weight_norm": _with(lambda model: weight_norm(model.get_submodule(UP))),
    "forward replaced": _with(
        lambda model: setattr(model.get_submodule(UP), "forward", lambda x: x.repeat(1, 1, 4))
    ),
    "norm of 1 + w": _with(_set("blocks.0.norm_1", ShiftedNorm)),
    "norm without weight": _with(_set("blocks.0.norm_1", BareNorm)),
    "LayerNorm without weight": _with(_set("norm", lambda: nn.LayerNorm(WIDTH, elementwise_affine=False))),
    "subclass of LayerNorm": _with(_set("blocks.0.norm_2", lambda: LoudNorm(WIDTH))),
    "hook on a norm": _with(_hook("blocks.0.norm_1", "register_forward_hook", lambda m, a, y: y * 1.1)),
    "replicated, per token": _with(lambda model: None, PerToken),
    "replicated, across tokens": _with(lambda model: None, AcrossTokens),
    "block.forward()": _with(lambda model: None, CallsForward),
    "attention.forward()": _with(lambda model: None, CallsForwardWithin),
    "pairs of tokens": _with(lambda model: None, PairsOfTokens),
}


def plan_of(name: str) -> dict[str, str]:
    """The roles of a model above."""
    plan = dict(PLAN)
    if name.startswith("replicated"):
        plan["extra"] = "replicate"
    if name == "attention.forward()":
        for pattern in ("attention", "attention.qkv", "attention.out"):
            del plan[f"blocks.*.{pattern}"]
        plan |= {
            "blocks.*.attention.inner": "attention",
            "blocks.*.attention.inner.[qkv]": "colwise",
            "blocks.*.attention.inner.out": "rowwise",
        }
    return plan
