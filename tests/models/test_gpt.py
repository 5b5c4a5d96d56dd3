"""The model is the published one: against a transformer written out by hand, in every combination of the
families."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossal_lite.kernels import TORCH
from colossal_lite.models import GPT, GPTConfig

SMALL = dict(vocabulary=37, layers=2, heads=4, width=24, sequence=16)
FAMILIES = [
    dict(zip(("position", "norm", "activation", "tied", "kv_heads", "bias"), choice, strict=True))
    for choice in itertools.product(
        ("learned", "rotary"), ("layer", "rms"), ("gelu", "swiglu"), (True, False), (None, 2), (True, False)
    )
]


def build(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SMALL, **changes})).double()
    with torch.no_grad():  # far from the initial ones and zeros, so that a lost bias or gain is seen
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tokens(b: int = 2, t: int = 9, v: int = 37) -> Tensor:
    return torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(1))


def by_hand(model: GPT, ids: Tensor) -> Tensor:
    """Logits from the named parameters alone, one head at a time, with complex numbers for the rotation."""
    c, w = model.config, dict(model.named_parameters())
    t, k = ids.shape[1], c.width // c.heads
    g = c.kv_heads or c.heads

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if c.bias else y

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "rms":
            return x / (x.pow(2).mean(-1, keepdim=True) + c.eps).sqrt() * w[f"{name}.weight"]
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + c.eps).sqrt()
        y = y * w[f"{name}.weight"]
        return y + w[f"{name}.bias"] if c.bias else y

    def turn(x: Tensor) -> Tensor:
        if c.position == "learned":
            return x
        angle = torch.arange(t)[:, None] * c.rotary_base ** (-torch.arange(k // 2).double() / (k // 2))
        z = torch.complex(x[..., : k // 2], x[..., k // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    x = w["token.weight"][ids]
    if c.position == "learned":
        x = x + w["position.weight"][:t]
    for i in range(c.layers):
        b = f"blocks.{i}"
        qkv = linear(norm(x, f"{b}.norm1"), f"{b}.attention.qkv")
        heads = []
        for h in range(c.heads):
            q = turn(qkv[..., h * k : (h + 1) * k])
            j = c.heads + h * g // c.heads
            key, value = turn(qkv[..., j * k : (j + 1) * k]), qkv[..., (j + g) * k : (j + g + 1) * k]
            s = (q @ key.transpose(1, 2) / math.sqrt(k)).masked_fill(
                torch.ones(t, t).triu(1).bool(), -math.inf
            )
            heads.append(s.softmax(-1) @ value)
        x = x + linear(torch.cat(heads, -1), f"{b}.attention.out")
        y = norm(x, f"{b}.norm2")
        if c.activation == "swiglu":
            gate, up = linear(y, f"{b}.mlp.gate_up").split(c.ffn_width, -1)
            y = gate * gate.sigmoid() * up
        else:
            y = linear(y, f"{b}.mlp.up")
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{b}.mlp.down")
    return norm(x, "norm") @ w["token.weight" if c.tied else "head.weight"].T


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: "-".join(map(str, f.values())))
def test_logits_and_gradients_are_those_written_by_hand(family: dict[str, Any]) -> None:
    model, ids = build(**family), tokens()
    labels = tokens(t=9).roll(-1, 1)
    labels[0, -1] = -100
    logits, expected = model(ids), by_hand(model, ids)
    assert logits.shape == (2, 9, 37)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    total, count = TORCH.cross_entropy(logits, labels)
    assert int(count) == 17
    by_hand_loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(total, params)
    for name, got, want in zip(names, grads, torch.autograd.grad(by_hand_loss, params), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not() -> None:
    tied, untied = build(tied=True), build(tied=False)
    assert tied.head.weight is tied.token.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert untied.head.weight is not untied.token.weight


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_packed_documents_are_separate_documents(position: str) -> None:
    model, ids = build(position=position, kv_heads=2), tokens(b=1, t=10)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    packed = model(ids, position_ids=positions, attention_mask=documents)
    apart = torch.cat((model(ids[:, :4]), model(ids[:, 4:])), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(packed, model(ids, position_ids=positions))


def test_positions_may_differ_by_sample() -> None:
    model, ids = build(position="rotary"), tokens()
    positions = torch.stack((torch.arange(9), torch.arange(9) + 5))
    together = model(ids, position_ids=positions)
    torch.testing.assert_close(
        together[1:], model(ids[1:], position_ids=positions[1]), rtol=1e-11, atol=1e-11
    )
    # rotary positions are relative: a shift of all of them changes nothing
    torch.testing.assert_close(together, model(ids), rtol=1e-9, atol=1e-9)


def test_a_token_sees_no_later_token() -> None:
    model, ids = build(), tokens()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 37
    a, b = model(ids), model(changed)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.equal(a[:, 5:], b[:, 5:])


def test_initial_values_have_the_published_deviation() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=500, layers=8, heads=4, width=128, sequence=64))
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:
            assert torch.equal(p, torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)), (
                name
            )
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / (4 if residual else 1)
            assert abs(float(p.detach().std()) / std - 1) < 0.05, name


def test_dropout_acts_in_training_only() -> None:
    model, ids = build(dropout=0.3), tokens()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model(ids), by_hand(model, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GPTConfig.gpt2("124M"), 124_439_808), (GPTConfig.gpt2("1.5B"), 1_557_611_200),
     (GPTConfig.llama("7B"), 6_738_415_616), (GPTConfig.llama("8B"), 8_030_261_248)],
)  # fmt: skip
def test_published_sizes_have_the_published_number_of_parameters(config: GPTConfig, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(width=25), "width=25 is not divisible by heads=4"),
        (dict(kv_heads=3), "heads=4 is not divisible by kv_heads=3"),
        (dict(layers=0, vocabulary=-1), "vocabulary=-1; legal.*layers=0; legal"),
        (dict(norm="batch"), "norm='batch'; legal are 'layer' and 'rms'"),
        (dict(dropout=1.0), "dropout=1.0; legal is 0 <= dropout < 1"),
        (dict(width=12, position="rotary"), "even head width; width / heads is 3"),
    ],
)
def test_a_shape_that_is_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SMALL, **changes})


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens; legal is at most 16"):
        build()(tokens(t=17))
    with pytest.raises(ValueError, match="size '3M'; legal are '124M'"):
        GPTConfig.gpt2("3M")
