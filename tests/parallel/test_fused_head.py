"""The head computes the loss, so that logits are never whole, and what reads or changes logits stays exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import colossal_lite as cl
from colossal_lite.kernels.linear_cross_entropy import ROWS
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.fused_head import head_of
from colossal_lite.planner.planner import plan
from tests.shared.hugging_face import sized
from tests.shared.pool import RankEnv, run_world

CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=30)
SIZES: dict[str, Any] = dict(vocabulary=1001, layers=2, heads=2, width=8, sequence=64)
SAMPLES = 8
NUM_TOKENS = SAMPLES * SIZES["sequence"]
assert NUM_TOKENS > ROWS

AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tensor 2": (2, dict(tensor=2)),
    "pipeline 2, zb-h1": (2, dict(pipeline=dict(size=2, micro_batches=2, schedule="zb-h1"))),
    "ring 2": (2, dict(sequence=2)),
}


class Largest(TorchDispatchMode):
    """The most elements of one tensor that anything inside has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def made(kind: str, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    if kind == "GPT":
        return GPT(GPTConfig(tied=tied, **SIZES))
    return sized(kind, tied=tied, ffn=32, kv_heads=2, **SIZES)


def samples_of(parallel: dict[str, Any]) -> int:
    """So many that each forward of a head has NUM_TOKENS."""
    return SAMPLES * (2 if parallel.keys() & {"pipeline", "sequence"} else 1)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1001, (samples, 65), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[0, :40] = -100
    return ids[:, :-1].contiguous(), labels


def measured(env: RankEnv, parallel: dict[str, Any], kind: str, tied: bool) -> tuple[float, float, int]:
    """Losses of a step and of an evaluation after it, and the most elements of a tensor in the two."""
    with env.launch(CONFIG | dict(parallel=parallel)) as context:
        engine = cl.initialize(made(kind, tied), context=context)
        given = context.local_batch(batch(samples_of(parallel)))
        with Largest() as largest:
            trained = engine.train_step(given).loss.item()
            return trained, engine.eval_step(given).item(), largest.numel


def truth(kind: str, tied: bool, samples: int) -> tuple[float, float]:
    model, (ids, labels) = made(kind, tied).double(), batch(samples)
    found = []
    for _ in range(2):
        logits = model(ids)
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        model.zero_grad()
        loss.backward()
        found.append(loss.item())
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    return found[0], found[1]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(("kind", "tied"), [("GPT", False), ("hf-gpt2", True)])
def test_no_tensor_of_a_step_or_an_evaluation_is_as_large_as_a_ranks_logits(
    kind: str, tied: bool, axes: str
) -> None:
    """And both losses are those of whole logits."""
    world, parallel = AXES[axes]
    want = truth(kind, tied, samples_of(parallel))
    for *losses, largest in run_world(measured, world, parallel, kind, tied):
        assert losses == pytest.approx(want, rel=1e-12)
        assert largest < NUM_TOKENS * (501 if "tensor" in parallel else 1001)


def test_by_plan_logits_are_never_whole() -> None:
    for precision, rows in (("fp32", 512), ("bf16", 4096)):
        model = GPTConfig(**SIZES | dict(vocabulary=50257))
        made = plan(dict(precision=precision), model, batch=rows // 64, sequence=64, world_size=1)
        whole = rows * 50257 * (2 if precision == "bf16" else 4)
        assert made.bytes_of("logits") == 0
        assert made.bytes_of("activations") + made.bytes_of("temporaries") < whole


class Own(nn.Module):
    """A model whose logits are what `change` makes of those of its head."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.change = nn.Embedding(1001, 8), nn.Linear(8, 1001, bias=False), change

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.change(self.head(self.table(ids)))
        return found


def written(logits: Tensor) -> Tensor:
    logits[..., 500:] = -50.0
    return logits


CHANGES: dict[str, Any] = {
    "as it is": lambda logits: logits, "softcap": lambda logits: 5 * torch.tanh(logits / 5), "written": written,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("hooked", [False, True])
def test_what_code_or_a_hook_does_with_logits_is_done(name: str, hooked: bool) -> None:
    """Whether it stands in the model, or in a hook that is registered on its head later."""
    model = Own(CHANGES["as it is" if hooked else name])
    serial = copy.deepcopy(model).double()
    assert (head_of(model) is None) is (name != "as it is" and not hooked)
    with cl.launch(CONFIG) as context:
        engine = cl.initialize(model, context=context)
        if hooked:
            for each in (model, serial):
                each.head.register_forward_hook(lambda module, args, out: CHANGES[name](out))
        ids, labels = batch(SAMPLES)
        loss = nn.functional.cross_entropy(serial(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        assert engine.train_step((ids, labels)).loss.item() == pytest.approx(loss.item(), rel=1e-12)
        for own, p in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(own, p - 0.1 * p.grad, rtol=1e-12, atol=1e-14)


def test_a_hook_that_reads_and_a_criterion_get_true_logits() -> None:
    model, seen = Own(CHANGES["as it is"]), list[Tensor]()
    serial, (ids, labels) = copy.deepcopy(model).double(), batch(SAMPLES)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.detach().clone())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    for given in (criterion, None):
        with cl.launch(CONFIG) as context:
            engine = cl.initialize(copy.deepcopy(model), context=context, criterion=given)
            if given is None:
                head: Any = engine.model.head
                head.register_forward_hook(lambda module, args, out: seen.append(out.detach() + 0.0))
            engine.eval_step((ids, labels))
            torch.testing.assert_close(seen.pop(), serial(ids).detach(), rtol=1e-12, atol=1e-14)
            with torch.no_grad():
                torch.testing.assert_close(engine(ids), serial(ids), rtol=1e-12, atol=1e-14)
            seen.clear()


def test_a_model_that_was_let_go_computes_its_loss_in_the_head_again() -> None:
    model = Own(CHANGES["as it is"])
    for _ in range(2):
        with cl.launch(CONFIG) as context:
            engine = cl.initialize(model, context=context)
            with Largest() as largest:
                engine.train_step(batch(SAMPLES))
            assert largest.numel < NUM_TOKENS * 1001
            engine.close()
