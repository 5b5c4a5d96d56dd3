"""Computes transformers of the GPT-2 and Llama families, causal or not, without any parallelism.

Note: B batch, T tokens, D width, H query heads, G key heads, K head width, F feed-forward width, V vocabulary.
Every layer keeps [B, T, D].  A block is two branches on one residual stream, each runnable alone:

    x = x + dropout(attention(norm1(x)))
    x = x + dropout(mlp(norm2(x)))

A whole block computes the sum before norm2 with the norm, in one kernel on a GPU.

Everything except nn.Linear and nn.Embedding is computed by `self.ops` (colossal_lite.kernels.Ops), by default torch's
own functions.  qkv is one linear with output blocks [q | k | v], gate and up one with [gate | up].  Attention reads its
numbers of heads from `self.heads` and `self.kv_heads`.  A rank with a part of the heads sets only these two.  Initial
values come from torch's in-place normal_, zeros_ and ones_ alone.  Residual projections start at 0.02 / sqrt(2 layers)
(GPT-2, "Language models are unsupervised multitask learners", 2.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite.kernels import TORCH, Dropout, Mask

INITIAL_STD = 0.02


def _is_number(value: object, kind: type[Integral | Real]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a model.  Raises ValueError with every fault."""

    vocabulary: int = 50257
    layers: int = 12
    heads: int = 12
    width: int = 768
    sequence: int = 1024
    """Longest sequence (with learned positions, the number of rows of their table)."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as `heads`."""
    ffn: int | None = None
    """Width of the feed-forward layer; None: 4 width, or 8/3 width rounded up to 64 with SwiGLU."""
    position: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "swiglu"] = "gelu"
    tied: bool = True
    """The head is the embedding, transposed."""
    bias: bool = True
    dropout: float = 0.0
    """On the embeddings and on both branches of each block."""
    causal: bool = True
    """Whether a token attends only to those before it; False: to all of its document (an encoder)."""
    rotary_base: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value!r}; legal is a whole number from 1"
            for name in ("vocabulary", "layers", "heads", "width", "sequence", "kv_heads", "ffn")
            if (value := getattr(self, name)) is not None or name not in ("kv_heads", "ffn")
            if not _is_number(value, Integral) or value < 1
        ]
        faults += [
            f"{name}={value!r}; legal are True and False"
            for name in ("tied", "bias", "causal")
            if not isinstance(value := getattr(self, name), bool)
        ]
        faults += [
            f"{name}={value!r}; legal is a number"
            for name in ("rotary_base", "eps")
            if not _is_number(value := getattr(self, name), Real)
        ]
        for name, legal in (
            ("position", ("learned", "rotary")),
            ("norm", ("layer", "rms")),
            ("activation", ("gelu", "swiglu")),
        ):
            if getattr(self, name) not in legal:
                faults.append(f"{name}={getattr(self, name)!r}; legal are {legal[0]!r} and {legal[1]!r}")
        if not _is_number(self.dropout, Real) or not 0.0 <= self.dropout < 1.0:
            faults.append(f"dropout={self.dropout!r}; legal is 0 <= dropout < 1")
        if not faults and self.width % self.heads:
            faults.append(f"width={self.width} is not divisible by heads={self.heads}")
        if not faults and self.heads % self.key_heads:
            faults.append(f"heads={self.heads} is not divisible by kv_heads={self.key_heads}")
        if not faults and self.position == "rotary" and self.head_width % 2:
            faults.append(f"rotary positions need an even head width; width / heads is {self.head_width}")
        if faults:
            raise ValueError("GPTConfig: " + "; ".join(faults))

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return 4 * self.width if self.activation == "gelu" else -(-8 * self.width // (3 * 64)) * 64

    @classmethod
    def gpt2(cls, size: str = "124M", **changes: Any) -> GPTConfig:
        """The four published sizes: learned positions, LayerNorm, GELU, tied head, biases."""
        return _sized(cls(), _GPT2, size, changes)

    @classmethod
    def llama(cls, size: str = "8B", **changes: Any) -> GPTConfig:
        """Llama 2 (7B, 13B) and Llama 3 (8B, 70B), and a small 1B: rotary, RMSNorm, SwiGLU, grouped
        queries."""
        family = cls(position="rotary", norm="rms", activation="swiglu", tied=False, bias=False)
        return _sized(family, _LLAMA, size, changes)


_GPT2: dict[str, dict[str, Any]] = {
    "124M": dict(layers=12, heads=12, width=768),
    "355M": dict(layers=24, heads=16, width=1024),
    "774M": dict(layers=36, heads=20, width=1280),
    "1.5B": dict(layers=48, heads=25, width=1600),
}
_LLAMA: dict[str, dict[str, Any]] = {
    "1B": dict(vocabulary=32000, layers=24, heads=16, width=2048, ffn=5504, sequence=4096),
    "7B": dict(vocabulary=32000, layers=32, heads=32, width=4096, ffn=11008, sequence=4096),
    "13B": dict(vocabulary=32000, layers=40, heads=40, width=5120, ffn=13824, sequence=4096),
    "8B": dict(
        vocabulary=128256,
        layers=32,
        heads=32,
        width=4096,
        ffn=14336,
        sequence=8192,
        kv_heads=8,
        rotary_base=5e5,
    ),
    "70B": dict(
        vocabulary=128256,
        layers=80,
        heads=64,
        width=8192,
        ffn=28672,
        sequence=8192,
        kv_heads=8,
        rotary_base=5e5,
    ),
}


def _sized(
    base: GPTConfig, sizes: dict[str, dict[str, Any]], size: str, changes: dict[str, Any]
) -> GPTConfig:
    if size not in sizes:
        raise ValueError(f"GPTConfig: size {size!r}; legal are {', '.join(map(repr, sizes))}")
    return replace(base, **{**sizes[size], **changes})


class Linear(nn.Linear):
    """nn.Linear that starts from N(0, std) and a zero bias."""

    def __init__(self, inputs: int, outputs: int, bias: bool, std: float = INITIAL_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding that starts from N(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, INITIAL_STD)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over D."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ops = TORCH
        self.kind = config.norm
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.width))
        with_bias = config.norm == "layer" and config.bias
        self.bias = nn.Parameter(torch.empty(config.width)) if with_bias else None
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x_BTD: Tensor,
        residual: Tensor | None = None,
        dropout: Dropout | None = None,
        *,
        streams: bool = False,
    ) -> Any:
        """norm(x).  With `streams` the pair (norm(s), s) of s = residual + dropout(x), or x without a residual."""
        affine = (self.weight,) if self.kind == "rms" else (self.weight, self.bias)
        if not streams:
            norm = self.ops.rms_norm if self.kind == "rms" else self.ops.layer_norm
            return norm(x_BTD, *affine, self.eps)
        x_BTD, p, rows = (x_BTD, 0.0, None) if dropout is None else dropout.for_a_kernel(x_BTD)
        add_norm = self.ops.add_rms_norm if self.kind == "rms" else self.ops.add_layer_norm
        return add_norm(x_BTD, residual, *affine, self.eps, p, rows)

    def extra_repr(self) -> str:
        return f"{self.kind}, {tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


def sum_and_norm(
    norm: nn.Module, x_BTD: Tensor, residual: Tensor | None = None, dropout: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(s), s) of s = residual + dropout(x), or x without a residual; by one op unless a module was changed."""
    if _is_plain(norm, Norm) and (dropout is None or _is_plain(dropout, Dropout)):
        y, s = norm(x_BTD, residual, dropout, streams=True)
        return y, s
    s = x_BTD if dropout is None else dropout(x_BTD, residual)
    return norm(s), s


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of this class, with its forward, and nothing reads its output."""
    return type(module) is kind and "forward" not in module.__dict__ and not module._forward_hooks


class Attention(nn.Module):
    """Self-attention, causal or full; keys of other documents are hidden if documents are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ops = TORCH
        self.heads, self.kv_heads = config.heads, config.key_heads
        self.head_width = config.head_width
        self.rotary_base = config.rotary_base if config.position == "rotary" else None
        qkv = (config.heads + 2 * config.key_heads) * config.head_width
        self.qkv = Linear(config.width, qkv, config.bias)
        self.out = Linear(config.width, config.width, config.bias, INITIAL_STD / math.sqrt(2 * config.layers))

    def forward(self, x_BTD: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(2, (-1, self.head_width))  # [B, T, H + 2 G, K]
        if self.rotary_base is None:
            q_BTHK, k_BTGK, v_BTGK = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        else:
            qk, v_BTGK = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
            q_BTHK, k_BTGK = self.ops.rotary(qk, positions, self.rotary_base).split(
                (self.heads, self.kv_heads), dim=2
            )
        y_BTHK = self.ops.attend(q_BTHK, k_BTGK, v_BTGK, mask=mask)
        y: Tensor = self.out(y_BTHK.flatten(2))
        return y


class MLP(nn.Module):
    """up, GELU, down (GPT-2), or gate and up, SwiGLU, down (Llama)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ops = TORCH
        self.activation = config.activation
        if config.activation == "swiglu":
            self.gate_up = Linear(config.width, 2 * config.ffn_width, config.bias)
        else:
            self.up = Linear(config.width, config.ffn_width, config.bias)
        std = INITIAL_STD / math.sqrt(2 * config.layers)
        self.down = Linear(config.ffn_width, config.width, config.bias, std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.activation == "swiglu":
            h_BTF = self.ops.swiglu(self.gate_up(x_BTD))
        else:
            h_BTF = self.ops.gelu(self.up(x_BTD))
        y: Tensor = self.down(h_BTF)
        return y


class Block(nn.Module):
    """Two branches on the residual stream; a pipeline may cut between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = Norm(config)
        self.attention = Attention(config)
        self.dropout1 = Dropout(config.dropout)
        self.norm2 = Norm(config)
        self.mlp = MLP(config)
        self.dropout2 = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """`feed` of `mix`; each norm also gives the stream, whose gradients it adds."""
        y_BTD, x_BTD = sum_and_norm(self.norm1, x_BTD)
        y_BTD = self.attention(y_BTD, positions, mask)
        y_BTD, x_BTD = sum_and_norm(self.norm2, y_BTD, x_BTD, self.dropout1)
        y: Tensor = self.dropout2(self.mlp(y_BTD), x_BTD)
        return y

    def mix(self, x_BTD: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Add the attention branch to the stream."""
        y: Tensor = self.dropout1(self.attention(self.norm1(x_BTD), positions, mask), x_BTD)
        return y

    def feed(self, x_BTD: Tensor) -> Tensor:
        """Add the feed-forward branch to the stream."""
        y: Tensor = self.dropout2(self.mlp(self.norm2(x_BTD)), x_BTD)
        return y


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = Embedding(config.vocabulary, config.width)
        self.position = Embedding(config.sequence, config.width) if config.position == "learned" else None
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config)
        if config.tied:  # the head has no storage of its own: it shares the embedding's
            self.head = nn.Linear(config.width, config.vocabulary, bias=False, device="meta")
            self.head.weight = self.token.weight
        else:
            self.head = Linear(config.width, config.vocabulary, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V] of input_ids [B, T].

        position_ids [T] or [B, T] default to 0 .. T - 1.  attention_mask [B, T] holds integers.  A token attends to the
        tokens (with `causal`, those before it) that have its own number.  So zeros hide padding, and 1, 2, ... keep
        packed documents apart. Without position_ids raises ValueError for more than `config.sequence` tokens.
        """
        positions = self.positions(input_ids, position_ids)
        mask = Mask(self.config.causal, attention_mask)
        x_BTD = self.embed(input_ids, positions)
        for block in self.blocks:
            x_BTD = block(x_BTD, positions, mask)
        return self.finish(x_BTD)

    def positions(self, input_ids_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The integer positions of the tokens, [T] unless given otherwise."""
        if position_ids is not None:
            return position_ids
        if input_ids_BT.shape[1] > self.config.sequence:
            raise ValueError(f"GPT: {input_ids_BT.shape[1]} tokens; legal is at most {self.config.sequence}")
        return torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)

    def embed(self, input_ids_BT: Tensor, positions: Tensor) -> Tensor:
        """Tokens to the residual stream [B, T, D]."""
        x_BTD = self.token(input_ids_BT)
        if self.position is not None:
            x_BTD = x_BTD + self.position(positions)
        y: Tensor = self.dropout(x_BTD)
        return y

    def finish(self, x_BTD: Tensor) -> Tensor:
        """The residual stream to logits [B, T, V]."""
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits
