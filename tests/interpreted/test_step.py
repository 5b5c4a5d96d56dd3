"""A training step is the same with the interpreter in place of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from colossal_lite.kernels import TORCH, Dropout, Ops, Rows, select
from colossal_lite.kernels.ops import _triton_ops
from colossal_lite.models import GPT, GPTConfig
from tests.shared import interpreter  # noqa: F401  (repairs bf16)

OPS = select("triton", "cpu", strict=True)
GPT2 = GPTConfig(vocabulary=31, layers=1, heads=2, width=16, sequence=8, dropout=0.2)
LLAMA = replace(
    GPT2, kv_heads=1, position="rotary", norm="rms", activation="swiglu", tied=False, bias=False, ffn=24
)  # fmt: skip


def trained(
    ops: Ops, config: GPTConfig, steps: int = 2, prepared: Callable[[GPT], GPT] = lambda model: model
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of a few steps of AdamW."""
    torch.manual_seed(0)
    model = prepared(GPT(config))
    for index, module in enumerate(model.modules()):
        if hasattr(module, "ops"):
            module.ops = ops
        if isinstance(module, Dropout):
            module.rows = lambda key=index: Rows((key, 7), 1, torch.arange(2), torch.arange(8))
    ids = torch.randint(0, 31, (2, 8))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    documents = torch.tensor([[0] * 5 + [1] * 3, [2] * 8])
    states = [(torch.zeros(p.numel()), torch.zeros(p.numel())) for p in model.parameters()]
    losses = []
    for step in range(1, steps + 1):
        total, count = ops.cross_entropy(model(ids, attention_mask=documents), labels)
        total.backward()
        losses.append((total / count).detach())
        gradients = [p.grad for p in model.parameters()]
        norm = ops.square_sum([g.reshape(-1) for g in gradients if g is not None]).sqrt()
        for p, g, (m, v) in zip(model.parameters(), gradients, states, strict=True):
            assert g is not None
            ops.adamw_(
                p.detach().view(-1), g.reshape(-1), m, v, step=step, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-6,
                weight_decay=0.1, grad_scale=count * torch.clamp(norm / count, min=1.0),
            )  # fmt: skip
            p.grad = None
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_step_with_every_kernel_is_a_step_without(config: GPTConfig) -> None:
    torch.testing.assert_close(trained(OPS, config), trained(TORCH, config), rtol=1e-4, atol=1e-5)


USED = {
    "gpt2": (
        "layer_norm",
        "gelu",
        "attend",
        "cross_entropy",
        "dropout",
        "dropout_add",
        "adamw_",
        "square_sum",
    ),
    "llama": ("rms_norm", "swiglu", "rotary"),
}


@pytest.mark.parametrize(("family", "op"), [(family, op) for family, ops in USED.items() for op in ops])
def test_a_step_with_one_kernel_is_a_step_without(family: str, op: str) -> None:
    config = GPT2 if family == "gpt2" else LLAMA
    calls = []

    def counted(*args: object, **named: object) -> object:
        calls.append(op)
        return getattr(OPS, op)(*args, **named)

    got = trained(replace(TORCH, **{op: counted}), config, steps=1)
    assert calls
    torch.testing.assert_close(got, trained(TORCH, config, steps=1), rtol=1e-4, atol=1e-5)


def trained_by_the_rest(ops: Ops, optimizer: str, steps: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of one layer made of the ops that no model of ours calls, and what steps it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "token": (31, 16),
        "place": (8, 16),
        "qkv": (48, 16),
        "head": (31, 16),
        "norm1": (16,),
        "norm2": (16,),
    }
    weights = {n: 0.3 * torch.randn(*shape, generator=generator) for n, shape in shapes.items()}
    ids = torch.randint(0, 31, (2, 8), generator=generator)
    state = {n: torch.zeros_like(w) for n, w in weights.items()}
    losses = []
    for step in range(steps):
        w = {n: x.detach().requires_grad_() for n, x in weights.items()}
        x = w["token"][ids].detach().requires_grad_()
        y, stream = ops.add_rms_norm(x, w["place"].expand(2, 8, 16).contiguous(), w["norm1"], 1e-5)
        q, k, v = (y @ w["qkv"].T).chunk(3, -1)
        later = torch.ones(8, 8, dtype=torch.bool).triu(1)
        seen = (0.25 * q @ k.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ v
        rows = Rows((1, 2), step, torch.arange(2), torch.arange(8))
        y, _ = ops.add_layer_norm(seen, stream, w["norm2"], None, 1e-5, 0.2, rows)
        total, _ = ops.linear_cross_entropy(y, w["head"], ids.roll(-1, 1), rows=5)
        total.backward()
        losses.append(total.detach())
        assert x.grad is not None
        w["token"].grad = torch.zeros(31, 16)
        ops.embedding_grad_(w["token"].grad, x.grad, ids)
        gradients = [g for g in (p.grad for p in w.values()) if g is not None]
        for p, g, m in zip(weights.values(), gradients, state.values(), strict=True):
            if optimizer == "sgd_":
                ops.sgd_(p, g, m, lr=1e-2, momentum=0.9, first=step == 0)
            else:
                ops.lion_(p, g, m, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
    return losses, list(weights.values())


REST = (
    "add_rms_norm",
    "add_layer_norm",
    "linear_cross_entropy",
    "embedding_grad_",
)


@pytest.mark.parametrize(("op", "optimizer"), [*((op, "sgd_") for op in (*REST, "sgd_")), ("lion_", "lion_")])
def test_a_step_with_one_of_the_other_kernels_is_a_step_without(op: str, optimizer: str) -> None:
    calls = []

    def counted(*args: object, **named: object) -> object:
        calls.append(op)
        return getattr(OPS, op)(*args, **named)

    got = trained_by_the_rest(replace(TORCH, **{op: counted}), optimizer)
    assert calls
    torch.testing.assert_close(got, trained_by_the_rest(TORCH, optimizer), rtol=1e-4, atol=1e-5)


@pytest.mark.campaign  # half a minute of tracing
@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_a_compiled_step_calls_the_kernels_from_between_its_parts(choice: Literal["auto", "triton"]) -> None:
    """Dynamo alone, without inductor: what it traces, and where it lets go.  Quoted: 2 passed, 2026-11-21."""
    table = _triton_ops(choice, "cpu", strict=False, compiled=True)
    by_op = {c.op: (c.path, c.reason) for c in table.describe()}
    fused = ("torch", "left to torch.compile, which fuses it")
    assert (by_op["rms_norm"] == fused) is (choice == "auto") and by_op["cross_entropy"][0] == "triton"
    blocks = []

    def compiled(model: GPT) -> GPT:
        for block in model.blocks:
            block.compile(backend="eager")
            blocks.append(block)
        return model

    config = replace(LLAMA, dropout=0.0)
    got = trained(table, config, steps=1, prepared=compiled)
    assert blocks
    torch.testing.assert_close(got, trained(TORCH, config, steps=1), rtol=1e-4, atol=1e-5)
