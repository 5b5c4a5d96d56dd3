"""Keys and values of other frameworks are answered with what to write."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.foreign_keys import FOREIGN, OF_CALLS, SCHEDULES, answer


def refused(config: dict[str, Any], options: tuple[str, ...] = ()) -> dict[str, str]:
    """What is told to be legal, by path; every problem is asserted to be of another framework's key or value."""
    with pytest.raises(ConfigError) as caught:
        Config.load(config, options)
    return {problem.path: problem.legal for problem in caught.value.problems}


ANSWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "learning_rate": (1e-3, {"optimizer": {"lr": 1e-3}}),
    "max_grad_norm": (1.0, {"clip_grad_norm": 1.0}),
    "gradient_accumulation_steps": (4, {"gradient_accumulation": 4}),
    "bf16": ({"enabled": True}, {"precision": "bf16"}),
    "fp16": ({"enabled": True, "initial_scale_power": 16}, {"precision": "fp16"}),
    "mixed_precision": ("no", {"precision": "fp32"}),
    "gradient_checkpointing": (True, {"activation_checkpoint": "full"}),
    "save_total_limit": (2, {"checkpoint": {"keep": 2}}),
    "optim": ("adamw_torch_fused", {"optimizer": {"type": "adamw"}}),
    "adam_beta2": (0.95, {"optimizer": {"betas": (0.9, 0.95)}}),
    "zero_optimization": (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        {"zero": {"stage": 3}, "memory": {"placement": "host"}},
    ),
    "offload_optimizer": (
        {"device": "nvme"},
        {"memory": {"placement": "disk", "disk_dir": "/local/disk"}},
    ),
    "fsdp": ("shard_grad_op offload", {"zero": {"stage": 2}, "memory": {"placement": "host"}}),
    "warmup_steps": (10, {"lr_scheduler": {"type": "cosine", "warmup_steps": 10, "total_steps": 1000}}),
    "params": ({"lr": 1e-3, "torch_adam": True, "eps": 1e-6}, {"optimizer": {"lr": 1e-3, "eps": 1e-6}}),
    "tensor_model_parallel_size": (2, {"parallel": {"tensor": 2}}),
    "torch_compile": (True, {"compile": "block"}),
    "strategy": ("deepspeed_stage_2_offload", {"zero": {"stage": 2}, "memory": {"placement": "host"}}),
    "accumulate_grad_batches": (4, {"gradient_accumulation": 4}),
    "gradient_clip_val": (0.5, {"clip_grad_norm": 0.5}),
    "grad_clip": (1.0, {"clip_grad_norm": 1.0}),
    "warmup_iters": (10, {"lr_scheduler": {"type": "cosine", "warmup_steps": 10, "total_steps": 1000}}),
    "tp": (2, {"parallel": {"tensor": 2}}),
    "ddp_timeout": (1800, {"timeout_s": 1800}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_key_is_answered_with_settings_that_are_legal_as_they_are_printed(name: str) -> None:
    value, meant = ANSWERS[name]
    path = "optimizer.params" if name == "params" else name
    told = refused({path: value})
    settings = eval(f"dict({told[path]})")
    assert settings == meant
    Config.load(settings)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_theirs_has_settings_that_are_legal(name: str) -> None:
    for key, value in (("lr_scheduler_type", name), ("scheduler", {"type": name, "params": {}})):
        Config.load(eval(f"dict({refused({key: value})[key]})"))


VALUES = (True, False, None, 1, 0.5, "auto", "cpu", {}, {"enabled": False}, {"device": "none"}, [1, 2])


def test_all_keys_are_answered_at_once_whatever_their_values() -> None:
    """Each in one line, and no key of theirs is a key of ours."""
    for value in VALUES:
        given = {name: value for name in FOREIGN if name not in ("fp16", "gradient_clipping")}
        told = refused(given)
        assert told.keys() == given.keys()
        assert all(told[name] == answer(name, value) and "\n" not in told[name] for name in given)


def test_what_they_switch_off_is_no_other_number_format() -> None:
    """Off means float32 there; here the default is bf16."""
    for name in ("fp16", "bf16"):
        for value in (False, {"enabled": False}):
            assert refused({name: value})[name].startswith("precision='fp32'")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("float32", "fp32"),
        ("bfloat16", "bf16"),
        ("torch.float16", "fp16"),
        (torch.float64, "fp64"),
        ("no", "fp32"),
    ],
)
def test_a_number_format_is_known_by_its_other_names(given: object, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        Config.load({"precision": given})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"zero": 3}, {"zero": {"stage": 3}}),
        ({"optimizer": "adamw"}, {"optimizer": {"type": "adamw"}}),
        ({"memory": "host"}, {"memory": {"placement": "host"}}),
    ],
)
def test_a_bare_value_of_a_section_is_answered_with_the_section_and_with_the_option(
    given: dict[str, Any], meant: dict[str, Any]
) -> None:
    (told,) = refused(given).values()
    written, _, option = told.partition(", or ")
    assert eval(f"dict({written})") == meant and Config.load(meant) == Config.load({}, option.split())
    (name,) = given
    assert "a dict with" in refused({name: 99})[name], "no setting of it takes that value"


def test_a_key_as_an_option_is_answered_with_its_number() -> None:
    assert refused({}, ("--learning_rate", "1e-3")) == {"learning_rate": "optimizer=dict(lr=0.001)"}


def test_an_argument_of_a_call_in_a_config_is_answered_with_the_call() -> None:
    assert (
        refused({"save_every": 5})["save_every"]
        == "cl.fit(..., save_every=...), or cl.Run(..., save_every=...)"
    )
    assert "cl.Run(..., directory=...)" in refused({"directory": "runs"})["directory"]
    assert "context.dataloader(..., global_batch=...)" in refused({"global_batch": 8})["global_batch"]


def test_calls_have_the_arguments_that_answers_name() -> None:
    given = dict(context=cl.Context, run=cl.Run)
    for form, names in OF_CALLS.items():
        for call in re.findall(r"([a-zA-Z.]+)\(", form):
            owner, name = call.split(".")
            found = [*inspect.signature(getattr(given.get(owner, cl), name)).parameters]
            legal = found + [*inspect.signature(cl.Context.dataloader).parameters] * ("loader" in found)
            assert {*names} <= {*legal}, call
