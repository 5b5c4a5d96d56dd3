"""`prove` passes a right model, and names the module of a planted fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.engine import proof
from colossal_lite.engine.initialize import initialize
from colossal_lite.launcher.command import main
from colossal_lite.layers.tensor_modes import Form
from colossal_lite.sharding.shard_spec import ShardSpec
from tests.shared.own_models import HEADS, PLAN, WIDTH, WORDS, Attention, Model
from tests.shared.pool import RankEnv, run_world


class Windowed(Attention):
    """Sees three tokens back."""

    window: int | None = 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        mask = ones.tril() if self.window is None else ones.tril().triu(-self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Proven(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.drop = nn.Dropout(0.1)
        for block in self.blocks:
            block.attention = Windowed()  # type: ignore[assignment]

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(x)
        return y


def build() -> nn.Module:
    return Proven()


def with_hook() -> nn.Module:
    model = Proven()
    model.get_submodule("blocks.1.up").register_forward_hook(lambda module, args, out: out * 1.1)
    return model


# ---- faults of a rank, planted behind initialize ----


def hook(name: str, change: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, args, out: change(out))


def read_as_one_plus(model: nn.Module) -> None:
    norm: Any = model.get_submodule("blocks.0.norm_1")
    hook("blocks.0.norm_1", lambda y: y + F.layer_norm(y, y.shape[-1:]) * 0.5, model)
    assert norm.weight is not None


def hook_dropped(model: nn.Module) -> None:
    model.get_submodule("blocks.1.up")._forward_hooks.clear()


def set_on(name: str, attribute: str, value: Any, model: nn.Module) -> None:
    setattr(model.get_submodule(name), attribute, value)


def of_other_tokens(model: nn.Module) -> None:
    model.get_submodule("places").register_forward_pre_hook(lambda module, args: (args[0].roll(1),))


def a_mask_per_rank(engine: cl.Engine) -> None:
    engine._streams._seed += engine.context.rank


_SYNC_AXES = ShardSpec.sync_axes


def not_summed(self: ShardSpec, layout: Any) -> tuple[str, ...]:
    return () if self.name == "blocks.1.norm_1.weight" else _SYNC_AXES(self, layout)


@dataclass(frozen=True)
class Planted:
    """A fault, where it is planted, and what is named. Of the model by default, which is built by `build`."""

    plants: Callable[[Any], None]
    axis: str
    module: str
    tensor: str = "output"
    build: Callable[[], nn.Module] = build
    in_engine: bool = False


ATTENTION = "blocks.0.attention"
FAULTS = {
    "a scaled embedding": Planted(partial(hook, "words", lambda y: y * 1.1), "tensor", "words"),
    "a norm of 1 + w": Planted(read_as_one_plus, "tensor", "blocks.0.norm_1"),
    "a hook dropped": Planted(hook_dropped, "data", "blocks.1.up", build=with_hook),
    "a padding row trained": Planted(
        partial(set_on, "words", "padding_idx", None), "data", "words", "gradient of weight"
    ),
    "a qkv layout mistaken": Planted(
        partial(hook, f"{ATTENTION}.qkv", lambda y: y.roll(WIDTH // 2, -1)), "tensor", ATTENTION
    ),
    "a window ignored": Planted(partial(set_on, ATTENTION, "window", None), "tensor", ATTENTION),
    "a mask per rank": Planted(a_mask_per_rank, "data", "drop", in_engine=True),
    "a gradient not summed": Planted(lambda model: None, "tensor", "blocks.1.norm_1", "gradient of weight"),
    "positions of the wrong rank": Planted(of_other_tokens, "tensor", "places"),
    "a head too many": Planted(partial(set_on, ATTENTION, "num_heads", HEADS), "tensor", ATTENTION),
}


def planted(env: RankEnv, name: str) -> proof.Proof:
    fault = FAULTS[name]
    config = Config.load(dict(parallel={fault.axis: 2})).check_world(2)

    def tampered(model: nn.Module, **options: Any) -> cl.Engine:
        engine = initialize(model, **options)
        fault.plants(engine if fault.in_engine else engine.model)
        return engine

    with patch.object(proof, "initialize", tampered):
        if name == "a gradient not summed":  # which initialize itself would refuse
            unseen = patch("colossal_lite.parallel.parallelize.check_plan", return_value=Form())
            with unseen, patch.object(ShardSpec, "sync_axes", not_summed):
                return proven(env, fault.build, config)
        return proven(env, fault.build, config)


def proven(env: RankEnv, make: Callable[[], nn.Module], config: Config) -> proof.Proof:
    case = proof.case_of(config, make(), steps=1, plan=PLAN)
    with env.launch(case.config) as context:
        return proof.prove_on_rank(context, make, case)


def right(env: RankEnv, axis: str) -> proof.Proof:
    return proven(
        env, with_hook if axis != "tensor" else build, Config.load(dict(parallel={axis: 2})).check_world(2)
    )


class Unstated(Attention):
    """Has its heads in its code alone, which is shown whole sizes."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Capped(Model):
    """Bounds its logits, those of padding words too."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * torch.tanh(super().forward(ids) / 3)


class CappedUnstated(Capped):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = Unstated()  # type: ignore[assignment]


def right_by_auto_plan(env: RankEnv, mode: str) -> proof.Proof:
    tensor = dict(size=env.world_size, mode=mode)
    config = Config.load(dict(parallel=dict(tensor=tensor))).check_world(env.world_size)
    build = CappedUnstated if mode == "1d" else Capped  # other modes ask for the heads
    case = proof.case_of(config, build(), steps=2)
    with env.launch(case.config) as context:
        return proof.prove_on_rank(context, build, case)


@pytest.mark.parametrize("mode, ranks", [("1d", 2), ("1d", 4), ("2d", 4)])
def test_a_model_whose_code_sees_whole_sizes_and_changes_padded_logits_is_equal(
    mode: str, ranks: int
) -> None:
    assert WORDS % 2, "so that the last rank has a word too many"
    for found in run_world(right_by_auto_plan, ranks, mode):
        assert not found.faults and found.compared > 100 and found.largest_error < 1e-12


def seen_by_one_rank(env: RankEnv) -> int:
    """Faults of this rank, where the first of several steps is wrong on the last rank alone."""
    case = proof.case_of(Config.load(dict(parallel=dict(data=2))).check_world(2), Proven(), steps=3)
    wrong = patch.object(proof, "_row_error", lambda *_: 1.0)
    with env.launch(case.config) as context, wrong if env.rank else nullcontext():
        return len(proof.prove_on_rank(context, Proven, case).faults)


def test_a_fault_that_one_rank_sees_ends_the_proof_on_all() -> None:
    first, last = run_world(seen_by_one_rank, 2)
    assert first == 0 and last > 0


def without_dropout(env: RankEnv) -> proof.Proof:
    shape = cl.models.GPTConfig(vocabulary=16, layers=1, heads=2, width=16, sequence=8)
    make = partial(cl.models.GPT, shape)
    case = proof.case_of(Config.load(dict(parallel=dict(data=2))).check_world(2), make(), steps=2)
    with env.launch(case.config) as context:
        return proof.prove_on_rank(context, make, case)


def test_a_right_model_without_dropout_is_equal_on_data_ranks() -> None:
    """Before, it was said to differ: without dropout an engine counts the samples of each rank from 0."""
    for found in run_world(without_dropout, 2):
        assert not found.faults and found.compared > 30 and found.largest_error < 1e-12


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_right_model_is_equal(axis: str) -> None:
    for found in run_world(right, 2, axis):
        assert not found.faults and found.compared > 60 and found.largest_error < 1e-12


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_names_its_module(name: str) -> None:
    ranks = run_world(planted, 2, name)
    first = min((fault for each in ranks for fault in each.faults), key=lambda f: f.order)
    assert first.module.startswith(FAULTS[name].module) and first.tensor == FAULTS[name].tensor, first
    assert "." not in first.module.removeprefix(FAULTS[name].module).removeprefix(".out"), first


def test_the_case_has_every_word_and_labels_that_are_ignored() -> None:
    case = proof.case_of(Config.load(dict(parallel=dict(data=2))).check_world(2), Proven(), steps=1)
    ids, labels = case.batch(0)
    assert case.words == WORDS == len(ids.unique()) or ids.numel() < WORDS
    assert bool((labels == -100).any()) and bool((labels != -100).any())
    assert case.config["optimizer"] == dict(type="sgd", lr=proof.LEARNING_RATE)


MODEL = """
import torch
from tests.engine.test_proof import Proven
def build():
    return Proven()
def odd():
    model = Proven()
    for block in model.blocks:
        block.attention.num_heads = 3
    return model
plan = {plan!r}
"""


def test_the_command_says_equal_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.py").write_text(
        "config = dict(parallel=dict(data=2), zero=dict(stage=3), clip_grad_norm=0.1)"
    )
    (tmp_path / "model.py").write_text(MODEL.format(plan=PLAN))
    given = [
        "prove",
        f"{tmp_path}/config.py",
        "--model",
        f"{tmp_path}/model.py:build",
        "--world",
        "2",
        "--json",
    ]
    assert main(given) == 0, capsys.readouterr()
    said = json.loads(capsys.readouterr().out)
    assert (
        said["equal"] and said["fault"] is None and said["largest_error"] < 1e-12 and said["compared"] > 100
    )
    assert math.isfinite(said["seconds"])
    assert main([*given[:3], f"{tmp_path}/model.py:nothing", *given[4:]]) == 2
    assert "has no function 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--steps 0", "--steps -1", "--timeout-s 0", "--timeout-s nan", "--timeout-s inf"]
)
def test_a_proof_of_no_step_or_no_time_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, no step was said to be equal, and a time that is no number to be no integer."""
    assert main(["prove", "config.json", "--model", "gpt2-124M", "--world", "1", *option.split()]) == 2
    said = capsys.readouterr().err
    assert option in said and "is out of range; legal: a" in said


def test_a_model_of_pictures_is_refused_with_what_proves_it() -> None:
    """Before, the refusal named no choice."""
    config = Config.load({}).check_world(1)
    with pytest.raises(
        ValueError, match=r"Conv2d does not run on ids .*Legal: .*cl.initialize\(..., example=batch\)"
    ):
        proof.case_of(config, nn.Conv2d(3, 4, 2), steps=1)
