"""Models as people write them train on a sequence axis as on one rank: their code sees whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers import whole_sizes
from colossal_lite.layers.token_parts import TokenCut
from colossal_lite.layers.whole_sizes import CutError, Part
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared import hugging_face
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.shared.written_models import MLP, STYLES, TOKENS, WIDTH, WORDS, EinopsAttention, Written


class DroppingAttention(nn.Module):
    """Attention of torch with dropout, one key head, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.kv(x)[:, None].expand(b, 4, t, 8).chunk(2, -1)
        drop = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        far = torch.ones(t, t, dtype=torch.bool, device=x.device).tril().triu(-2)
        y = y + F.scaled_dot_product_attention(q, k, v, attn_mask=far)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, -1))
        return out


class OwnLoss(Written):
    """Gives its loss, and without targets the logits of the last position."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits, _ = super().forward(idx)
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def gpt2() -> nn.Module:
    """Hugging Face's as it comes, with dropout everywhere."""
    made: Any = hugging_face.gpt2()
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(made.config, name, 0.1)
    torch.manual_seed(0)
    return type(made)(made.config).double()


def built(attn: Callable[[], nn.Module], kind: type[Written] = Written) -> nn.Module:
    torch.manual_seed(0)
    return kind(attn, MLP, "table").double()


def few_words() -> nn.Module:
    """Fewer words than a small copy has, and no block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)).double()


class HookedAttention(EinopsAttention):
    """A hook on the gradient of an activation that is linear, and acts on each token alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: 0.5 * dy)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a hook on activations": lambda: built(HookedAttention),
    **STYLES,
    "torch's attention with dropout and a mask": lambda: built(DroppingAttention),
    "a loss of its own": lambda: built(EinopsAttention, OwnLoss),
    "Hugging Face": gpt2,
    "tokens alone, few words": few_words,
}


def batch(step: int, words: int = WORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(words, (4, TOKENS), generator=generator) for _ in range(2))
    labels[0, 5:] = -100
    return ids, labels


def trained(env: RankEnv, name: str, config: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, timeout_s=60) | dict(config)
    whole_sizes._plans.clear()  # as in a process of its own, where the first step finds how calls are cut
    with env.launch(settings) as context:
        criterion: Any = "model" if name == "a loss of its own" else None
        engine = cl.initialize(MODELS[name](), context=context, criterion=criterion)
        losses, gradients = [], {}
        for step in range(3):
            losses.append(float(engine.forward_backward(batch(step, 8 if "few words" in name else WORDS))))
            gradients = gradients or engine.full_gradients()
            engine.step()
        return losses, gradients, engine.full_state_dict()


RECOMPUTED = dict(zero=dict(stage=3), activation_checkpoint="full", parallel=dict(sequence=2))
STAGED = dict(schedule="bfs", stages_per_rank=2, micro_batches=2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RECOMPUTED, "activation_checkpoint='full' with zero.stage=3 and parallel.sequence=2: the code of"),
        (
            dict(parallel=dict(pipeline=STAGED, sequence=2)),
            "stages_per_rank=2 with parallel.sequence=2: the code of",
        ),
    ],
)
def test_code_that_would_see_a_part_of_a_sequence_is_refused_by_name(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(WorldError, match=f"{words} .* Legal: one of"):
        run_world(trained, 2, next(iter(STYLES)), config)


ON: dict[str, tuple[str, int, dict[str, Any]]] = {
    "scores by hand": ("fused, tied", 2, dict(mode="ring")),
    "scores by hand, dropout, recomputed": ("fused, dropout", 4, dict(mode="usp", ulysses=2)),
    "rotary": ("grouped, rotary", 4, dict(mode="ring")),
    "grouped keys": ("einops", 2, dict(mode="ulysses")),
    "einsum and ALiBi": ("interleaved, ALiBi", 2, dict(mode="allgather_kv")),
    "torch's attention": ("torch's attention with dropout and a mask", 2, dict(mode="ring")),
    "Hugging Face's, with its dropout": ("Hugging Face", 2, dict(mode="ring")),
    "tokens alone, few words": ("tokens alone, few words", 2, dict(mode="ring")),
    "its own loss": ("a loss of its own", 2, dict(mode="ring")),
    "a hook on activations": ("a hook on activations", 2, dict(mode="ring")),
    "einsum and ALiBi, products kept": ("interleaved, ALiBi", 2, dict(mode="ulysses")),
    "rotary, products kept": ("grouped, rotary", 4, dict(mode="usp", ulysses=2)),
}


@pytest.mark.parametrize("name", ON)
def test_a_model_as_written_trains_on_a_sequence_axis_as_on_one_rank(name: str) -> None:
    model, ranks, sequence = ON[name]
    modes = {"recomputed": "full", "kept": "selective"}
    more = dict(activation_checkpoint=next((mode for word, mode in modes.items() if word in name), "none"))
    ((losses, *truth),) = run_world(trained, 1, model, {})
    parallel = dict(sequence=dict(size=ranks) | sequence)
    for theirs, *found in run_world(trained, ranks, model, dict(parallel=parallel, **more)):
        assert theirs == pytest.approx(losses, rel=1e-12)
        for expected, got in zip(truth, found, strict=True):
            whole = max(float(x.norm()) for x in expected.values())
            for key, value in expected.items():
                assert float((got[key] - value).norm()) < 1e-12 * (float(value.norm()) + 1e-3 * whole), key


def losses_of(env: RankEnv, name: str, parallel: dict[str, Any]) -> list[float]:
    """Of two steps of two tokens."""
    settings = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, parallel=parallel)
    with env.launch(settings) as context:
        engine = cl.initialize(MODELS[name](), context=context)
        batches = [tuple(part[:, :2] for part in batch(step)) for step in range(2)]
        return [float(engine.train_step(each).loss) for each in batches]


@pytest.mark.parametrize("name", STYLES)
def test_one_token_on_each_rank_is_not_taken_for_all_of_them(name: str) -> None:
    """A size of 1 is broadcast, also in a product over all keys."""
    (truth,) = run_world(losses_of, 1, name, {})
    for found in run_world(losses_of, 2, name, dict(sequence=dict(size=2, mode="ulysses"))):
        assert found == pytest.approx(truth, rel=1e-12)


# ---- what code sees, and what is refused ----


def on_ring(model: nn.Module, **more: Any) -> None:
    layout = MeshLayout.build(sequence=2, **more)
    parallelize(model, Mesh.emulated(layout, EmulatedWorld(1.0))[0])


class Shifts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x[:, :-1], (0, 0, 1, 0))


class Averages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class HookAcrossTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = 1.0 * x
        if y.requires_grad:
            y.register_hook(lambda dy: dy.cumsum(1))
        return y


class Retains(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = 1.0 * x
        if y.requires_grad:
            y.retain_grad()
        return y


def test_a_hook_on_activations_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="its loss is right, but the gradient of .* is not"):
        on_ring(built(HookAcrossTokens))


@pytest.mark.parametrize(
    ("attn", "words"),
    [
        (
            Retains,
            "retain_grad keeps a rank's part of a gradient, of its tokens. Legal: no retain_grad, or register_hook",
        ),
        (Shifts, "0 to 7 of 8 tokens, of which a rank has a part"),
        (Averages, "mean of .*cannot be computed on a part"),
    ],
)
def test_other_calls_that_mix_tokens_are_refused_with_their_line(attn: type[nn.Module], words: str) -> None:
    with pytest.raises(
        ValueError, match=f"test_token_parts.py:.*{words}.*legal: F.scaled_dot_product_attention"
    ):
        on_ring(built(attn))


def test_a_tensor_axis_beside_it_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="parallel.tensor=2 with parallel.sequence=2: the code of Written is shown"
    ):
        on_ring(STYLES["einops"](), tensor=2)


def test_whole_tensors_are_narrowed_to_pieces_of_a_zigzag() -> None:
    whole = torch.arange(8.0).view(1, 8, 1).expand(2, 8, 3)
    cut = TokenCut(1, 8, (8,), 0, 2, (0, 3), 4)
    x = Part.of(cut.taken(whole, 1), None, cut)
    assert x.shape == (2, 8, 3) and x.view(16, 3).shape == (16, 3)
    assert torch.equal(
        (x + torch.arange(8.0)[:, None]).as_subclass(Tensor)[0, :, 0], torch.tensor([0.0, 2, 12, 14])
    )
    with pytest.raises(CutError, match="softmax over tokens"):
        (x.requires_grad_() * 1.0).softmax(1)
