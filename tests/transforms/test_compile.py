"""compile="block": the plain run up to rounding, or a refusal by name."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.config.config import Config, ConfigError
from tests.shared.parity import Case, assert_parity
from tests.shared.pool import RankEnv, WorldError, run_world

CONFIG = dict(compile="block", clip_grad_norm=0.05, gradient_accumulation=2)


@pytest.mark.campaign  # half a minute of compiling for each family
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_gradient_is_the_serial_one(family: str) -> None:
    """Quoted: 2 passed on 2 cores, 2026-11-21."""
    assert_parity(
        Case(family, dropout=0.2, ragged=True, world_size=2, steps=2, config=CONFIG | dict(timeout_s=500))
    )


def refused(env: RankEnv, what: str) -> None:
    def compile_nothing(line: Any, **options: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no working C++ compiler found\nand more")

        return run

    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)) if what == "no blocks" else Case().model()
    with (
        env.launch(Case(config=CONFIG).full_config) as context,
        patch.object(torch, "compile", compile_nothing),
    ):
        cl.initialize(model, context=context)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no blocks", "the model has no nn.ModuleList"),
        ("no compiler", r"here \(no working C\+\+ compiler found\)"),
    ],
)
def test_it_is_refused_where_it_cannot_work(what: str, words: str) -> None:
    with pytest.raises(WorldError, match=words):
        run_world(refused, 1, what)


def adamw_of(env: RankEnv, compile: str) -> str:
    """Why the engine's AdamW is what it is; its step, run without a compiler, moves the weights."""

    def as_it_is(function: Any, **options: Any) -> Any:
        return function

    config = dict(compile=compile, precision="bf16", optimizer=dict(type="adamw", lr=1e-2))
    with env.launch(Case(config=config).full_config) as context, patch.object(torch, "compile", as_it_is):
        engine = cl.initialize(Case().model, context=context)
        before = engine.full_state_dict()
        engine.train_step(Case().batch(0))
        after = engine.full_state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return {c.op: c.reason for c in engine._parallelized.ops.describe()}["adamw_"]


def test_adamw_is_compiled_where_blocks_are() -> None:
    assert run_world(adamw_of, 1, "block") == ["one pass, by torch.compile"]
    assert run_world(adamw_of, 1, "none") == ["the default"]


@pytest.mark.parametrize(
    "other", [{"activation_checkpoint": "full"}, {"parallel": {"tensor": 2}}, {"zero": {"stage": 3}}]
)
def test_it_is_refused_beside_what_changes_the_blocks(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compile"):
        Config.load({"compile": "block"} | other).check_built()
    Config.load({"compile": "block"}).check_built()
