"""A wrong call of a public function says which call it is, the fault, and its legal form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.config.call_forms import with_form

ROWS = torch.arange(17).expand(8, 17)
BATCH = ROWS[:, :-1], ROWS[:, 1:]
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "two arguments for one batch": (
        lambda e, r, c: e.train_step(*BATCH),
        "engine.train_step: too many positional arguments; legal: engine.train_step(batch), where a batch is one value",
    ),
    "evaluation of two arguments": (lambda e, r, c: e.eval_step(*BATCH), "engine.eval_step(batch)"),
    "sums of two arguments": (lambda e, r, c: e.eval_sums(*BATCH), "engine.eval_sums(batch)"),
    "backward of a batch in two": (
        lambda e, r, c: e.forward_backward(*BATCH),
        "engine.forward_backward(batch)",
    ),
    "no batch": (lambda e, r, c: e.train_step(), "missing a required argument: 'batch'"),
    "no loss": (lambda e, r, c: e.backward(), "engine.backward: missing a required argument: 'loss'"),
    "a step of a run": (
        lambda e, r, c: r.step(*BATCH),
        "run.step: too many positional arguments; legal: run.step",
    ),
    "steps by place": (lambda e, r, c: r.batches([1], 3), "legal: run.batches(dataset, steps=..."),
    "no dataset": (lambda e, r, c: c.dataloader(), "legal: context.dataloader(dataset, global_batch=...)"),
    "no engine": (lambda e, r, c: cl.Run("runs"), "cl.Run: missing a required argument: 'engine'"),
    "no folder": (lambda e, r, c: cl.fit(e, [1]), "legal: cl.fit(engine, dataset, directory=..., steps=..."),
    "no config": (
        lambda e, r, c: cl.launch(),
        "cl.launch: missing a required argument: 'config'; legal: cl.launch(c",
    ),
    "an old launch": (
        lambda e, r, c: cl.launch({}, host="a"),
        "cl.launch: got an unexpected keyword argument 'host'",
    ),
    "an optimizer by place": (
        lambda e, r, c: cl.initialize(nn.Linear(2, 2), torch.optim.SGD),
        "cl.initialize: too many positional arguments; legal: cl.initialize(model, context=context)",
    ),
    "a config for a model": (
        lambda e, r, c: cl.initialize(
            cl.models.GPTConfig(8, layers=1, heads=1, width=4, sequence=4), context=c
        ),  # type: ignore[arg-type]
        "model: GPTConfig; legal: an nn.Module, or a function that makes one",
    ),
    "a task of another name": (
        lambda e, r, c: cl.Task("a", nn.Linear, data=[1], steps=1, global_batch=1, batch=2),  # type: ignore[call-arg]
        "Task: got an unexpected keyword argument 'batch'",
    ),
    "no context": (
        lambda e, r, c: cl.initialize(nn.Linear(2, 2), context={}),  # type: ignore[arg-type]
        "context: dict; legal: the context that cl.launch(config) gives",
    ),
    "a list of roles": (
        lambda e, r, c: cl.initialize(nn.Linear(2, 2), context=c, plan=["a"]),  # type: ignore[arg-type]
        "plan: ['a']; legal: 'auto', or a dict from name patterns to roles",
    ),
    "a number for a loss": (
        lambda e, r, c: cl.initialize(nn.Linear(2, 2), context=c, criterion=3),  # type: ignore[arg-type]
        "criterion=3; legal: a callable, 'model' or None",
    ),
    "a folder last": (
        lambda e, r, c: cl.Run(e, "runs"),
        "cl.Run: engine is str; legal: cl.Run(directory, engine)",
    ),
    "a number": (lambda e, r, c: e.backward(3.0), "backward: loss is float; legal: a 0-d tensor"),
    "a misspelt name": (
        lambda e, r, c: cl.initialize(nn.Linear(2, 2), context=c, optimiser=1),
        "unexpected keyword argument 'optimiser'; did you mean 'optimizer'?; legal",
    ),
}


def test_a_wrong_call_says_its_legal_form(tmp_path: Path) -> None:
    with cl.launch(dict(precision="fp32", backend="gloo")) as context:
        torch.manual_seed(0)
        engine = cl.initialize(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), context=context)
        run = cl.Run(tmp_path, engine)
        for name, (call, told) in WRONG.items():
            with pytest.raises(ValueError) as caught:
                call(engine, run, context)
            assert told in str(caught.value), (name, str(caught.value))
        engine.train_step(BATCH)  # nothing has changed


def test_a_type_error_from_within_a_call_stays_one() -> None:
    @with_form("call", "call()")
    def call() -> None:
        len(1)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        call()
