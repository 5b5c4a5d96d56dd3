"""Models in the styles in which people write them in one file: what a plan="auto" must read without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

WORDS, WIDTH, HEADS, GROUPS, TOKENS = 37, 16, 4, 2, 8
HEAD = WIDTH // HEADS


class FusedAttention(nn.Module):
    """Fused [q | k | v], sizes from the input, a causal buffer."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(drop), nn.Dropout(drop)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.ones(TOKENS, TOKENS).tril().view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        out: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))
        return out


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions of x [B, T, H, K], by pairs."""
    assert angles.shape == (x.shape[1], x.shape[-1] // 2)
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = (t.view(1, x.shape[1], 1, -1) for t in (angles.cos(), angles.sin()))
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(3)


class GroupedAttention(nn.Module):
    """Separate q, k, v with fewer key heads, rotary positions, a norm of each head, keys repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = HEADS, GROUPS, HEAD
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, GROUPS * HEAD, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = turned(self.q_norm(xq.view(bsz, seqlen, self.n_local_heads, self.head_dim)), angles)
        xk = turned(xk.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim), angles)
        xv = xv.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        n_rep = self.n_local_heads // self.n_local_kv_heads
        xk = torch.repeat_interleave(xk, n_rep, dim=2)
        xv = xv[:, :, :, None].expand(bsz, seqlen, self.n_local_kv_heads, n_rep, self.head_dim)
        xv = xv.reshape(bsz, seqlen, self.n_local_heads, self.head_dim)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (xq, xk, xv)), is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, -1))
        return out


class InterleavedAttention(nn.Module):
    """Rows of q, k, v head by head, with a bias for each head by its distance (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1).view(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.query_key_value(x).view(b, t, HEADS, 3 * HEAD).chunk(3, dim=-1)
        scores = torch.einsum("bthk,bshk->bhts", q, k) / HEAD**0.5
        at = torch.arange(t, device=x.device)
        scores = scores + self.slopes * (at[None, :] - at[:, None])
        scores = scores.masked_fill(at[None, :] > at[:, None], -torch.inf)
        y: Tensor = self.dense(torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).reshape(b, t, c))
        return y


class EinopsAttention(nn.Module):
    """Blocks of unequal size, cut by slices, and patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        q = rearrange(qkv[..., :WIDTH], "b n (h d) -> b h n d", h=HEADS)
        k, v = (
            rearrange(part, "b n (g d) -> b g n d", g=GROUPS) for part in qkv[..., WIDTH:].chunk(2, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(rearrange(y, "b h n d -> b n (h d)"))
        return out


class Head(nn.Module):
    """One head, with a causal buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(TOKENS, TOKENS).tril())

    def forward(self, x: Tensor) -> Tensor:
        _, T, _ = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * HEAD**-0.5
        out: Tensor = F.softmax(wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")), dim=-1) @ self.value(
            x
        )
        return out


class HeadsApart(nn.Module):
    """Heads that are modules of their own, which no linear holds together."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.dropout(
            torch.stack([h(x) for h in self.heads], dim=1)
        )  # as many heads as a rank has tokens
        out: Tensor = self.dropout(self.proj(heads.transpose(1, 2).flatten(2)))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return y


class GatedMLP(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        y: Tensor = self.w3(F.silu(gate) * up)
        return y


class Block(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, calls_forward: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH), mlp
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.calls_forward = calls_forward

    def forward(self, x: Tensor, *side: Tensor) -> Tensor:
        run: Any = self.attn.forward if self.calls_forward else self.attn
        x = x + self.scale * run(self.ln_1(x), *side)
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Written(nn.Module):
    """`positions`: a table, a parameter of the model, or angles that are handed to each block."""

    def __init__(
        self, attn: Callable[[], nn.Module], mlp: Callable[[], nn.Module], positions: str, **more: Any
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=TOKENS)
        parts: dict[str, nn.Module] = dict(wte=nn.Embedding(WORDS, WIDTH))
        if positions == "table":
            parts["wpe"] = nn.Embedding(TOKENS, WIDTH)
        parts["h"] = nn.ModuleList(
            Block(attn(), mlp(), more.get("calls_forward", False)) for _ in range(more.get("layers", 3))
        )
        self.transformer = nn.ModuleDict(parts | dict(ln_f=nn.LayerNorm(WIDTH)))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if more.get("tied"):
            self.lm_head.weight = parts["wte"].weight  # type: ignore[assignment]
        self.positions = positions
        if positions == "parameter":
            self.pos_emb = nn.Parameter(0.1 * torch.randn(1, TOKENS, WIDTH))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        _, t = idx.size()
        assert t <= self.config.block_size
        x = self.transformer.wte(idx)  # type: ignore[operator]
        side: tuple[Tensor, ...] = ()
        if self.positions == "table":
            x = x + self.transformer.wpe(torch.arange(t, device=idx.device))  # type: ignore[operator]
        elif self.positions == "parameter":
            x = x + self.pos_emb[:, :t]
        elif self.positions == "angles":
            side = (
                torch.outer(torch.arange(t).double(), 100.0 ** -torch.linspace(0, 1, HEAD // 2).double()).to(
                    x
                ),
            )
        for block in self.transformer.h:  # type: ignore[union-attr]
            x = block(x, *side)
        logits = self.lm_head(self.transformer.ln_f(x))  # type: ignore[operator]
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def _style(
    attn: Callable[[], nn.Module], mlp: Callable[[], nn.Module], positions: str, **more: Any
) -> Callable[..., nn.Module]:
    def build(layers: int = 3) -> nn.Module:
        torch.manual_seed(0)
        made = Written(attn, mlp, positions, layers=layers, **more).double()
        for parameter in made.parameters():  # ones and zeros hide what a norm does with its weight
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        return made

    return build


STYLES: dict[str, Callable[..., nn.Module]] = {
    "fused, tied": _style(lambda: FusedAttention(0.0), MLP, "table", tied=True),
    "fused, dropout": _style(lambda: FusedAttention(0.1), MLP, "parameter"),
    "grouped, rotary": _style(GroupedAttention, GatedMLP, "angles", calls_forward=True),
    "interleaved, ALiBi": _style(InterleavedAttention, MLP, "none"),
    "einops": _style(EinopsAttention, GatedMLP, "parameter"),
}
LEFT_WHOLE: dict[str, Callable[[], nn.Module]] = {
    "heads apart, dropout": _style(HeadsApart, MLP, "table"),
}
"""Styles whose attention no rank has a part of."""
