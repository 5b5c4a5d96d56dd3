"""Bad configurations, made from tables: each is refused, with its path, its value and something legal.

`SETTINGS` lists for every setting values that it must refuse; a new setting that is missing here turns
`test_every_setting_has_bad_values` red.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.errors import item_section, walk
from colossal_lite.config.legacy_keys import REFUSED
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.rules import NOT_BUILT

NAN, INF = float("nan"), float("inf")
COUNT = ("8", 0, -1, 1.5, True, None, (1,), {})
COUNT_OR_NONE = tuple(value for value in COUNT if value is not None)
STEPS = ("8", -1, 0.5, False, None)
POSITIVE = ("1e-3", 0, -1.0, NAN, INF, True, None, [1.0])
POSITIVE_OR_NONE = tuple(value for value in POSITIVE if value is not None)
NOT_NEGATIVE = ("0.1", -0.1, NAN, -INF, False, None)
NOT_NEGATIVE_OR_NONE = tuple(value for value in NOT_NEGATIVE if value is not None)
RATIO = ("0.1", -0.1, 1.1, NAN, True, None)
BETA = ("0.9", -0.1, 1.0, NAN, True, None)
BETA_OR_NONE = tuple(value for value in BETA if value is not None)
BETAS = (0.9, "0.9", (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.95, 0.99), (0.9, "0.95"), (NAN, 0.9), None)
BETAS_OR_NONE = tuple(value for value in BETAS if value is not None)
FLAG = (1, 0, "true", "False", None)
FLAG_OR_NONE = tuple(value for value in FLAG if value is not None)
BUDGET = ("40Gb", "many", "-1GiB", "90%", 0, -1, 1.5, True)


def choice(*near: str) -> tuple[Any, ...]:
    return (*near, "nonsense", 7, None, True)


SETTINGS: dict[str, tuple[Any, ...]] = {
    "parallel.data": ("8", "automatic", 0, -1, 2.0, True, None),
    "parallel.pipeline.size": COUNT,
    "parallel.pipeline.schedule": choice("1f2b", "zb-h2", "gpipes"),
    "parallel.pipeline.micro_batches": COUNT_OR_NONE,
    "parallel.pipeline.stages_per_rank": COUNT,
    "parallel.pipeline.activation_cap": COUNT_OR_NONE,
    "parallel.pipeline.partition": ("even", (1, "2"), (0,), (1, 2, 3), 2, None),
    "parallel.tensor.size": COUNT,
    "parallel.tensor.mode": ("4d", "2D", "2.5", "column", 7, True),  # None was Colossal-AI's for no mode
    "parallel.tensor.sequence_parallel": FLAG,
    "parallel.tensor.regather_inputs": FLAG,
    "parallel.tensor.depth": COUNT,
    "parallel.sequence.size": COUNT,
    "parallel.sequence.mode": choice("rings", "megatron", "Ulysses"),
    "parallel.sequence.ulysses": COUNT,
    "zero.stage": ("1", -1, 4, 1.0, True, None),
    "zero.sum_order": choice("fastest", "order"),
    "zero.reduce_every": choice("steps", "micro_batches"),
    "zero.reshard_after_forward": (*FLAG, -2, 2.0, (2,)),
    "zero.shard_size": COUNT_OR_NONE,
    "zero.prefetch": ("1", -1, 1.0, True, None),
    "memory.placement": choice("cpu", "cuda", "nvme"),
    "memory.chunk_bytes": BUDGET,
    "memory.device_budget": BUDGET,
    "memory.host_budget": BUDGET,
    "memory.update_on": (
        *choice("cpu", "disk", "gpu"),
        {},
        {"every": 1},
        {"every": 2.5},
        {"host": 1.5},
        {"host": (1, 1)},
        {"host": (-1,)},
        {"every": (1,)},
        {"every": 2, "host": 0.5},
    ),
    "memory.rates.host_update": POSITIVE_OR_NONE,
    "memory.rates.device_update": POSITIVE_OR_NONE,
    "memory.rates.up": BUDGET,
    "memory.rates.down": BUDGET,
    "memory.rates.host_memory": BUDGET,
    "memory.rates.call_s": NOT_NEGATIVE,
    "memory.rates.latency_s": NOT_NEGATIVE,
    "memory.rates.disk": BUDGET,
    "memory.rates.flops": POSITIVE_OR_NONE,
    "memory.rates.file": (1, True, ("x",), {}),
    "memory.disk_dir": (1, True, ("/tmp",), {}),
    "memory.shared_base": (1, True, ("base",), {}),
    "memory.host_fraction.weights": RATIO,
    "memory.host_fraction.gradients": RATIO,
    "memory.host_fraction.optimizer": RATIO,
    "precision.dtype": choice("float32", "fp8", "bfloat16"),
    "precision.master": choice("fp16", "double", "splits"),
    "precision.gradient": choice("fp32", "bfloat16"),
    "precision.loss_scale": ("65536", "static", 0, -1.0, NAN, True, None),
    "optimizer.type": choice("adamW", "adagrad", "Lion"),
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.betas": BETAS,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.momentum": BETA,
    "optimizer.nesterov": FLAG,
    "optimizer.moments": choice("fp32", "bfloat16"),
    "optimizer.update_when": choice("backwards", "host"),
    "optimizer.max_skipped_steps": COUNT_OR_NONE,
    "optimizer.groups": ({"match": "*.bias"}, "*.bias", None, 3),
    "lr_scheduler.type": choice("cosin", "step", "onecycle"),
    "lr_scheduler.warmup_steps": STEPS,
    "lr_scheduler.total_steps": COUNT_OR_NONE,
    "lr_scheduler.final_ratio": RATIO,
    "lr_scheduler.power": POSITIVE,
    "lr_scheduler.decay_steps": COUNT_OR_NONE,
    "lr_scheduler.start_ratio": RATIO,
    "clip_grad_norm": POSITIVE_OR_NONE,
    "gradient_accumulation": COUNT,
    "activation_checkpoint": choice("ful", "selected"),
    "kernels": choice("tritons", "cuda"),
    "compile": choice("blocks", "inductor"),
    "checkpoint.keep": COUNT,
    "checkpoint.max_failures": COUNT,
    "checkpoint.asynchronous": FLAG,
    "deterministic": FLAG,
    "backend": choice("mpi", "ncll"),
    "timeout_s": (*POSITIVE, 1e9),
    "seed": ("1", -1, 0.5, 2**63, True, None),
}
GROUP_SETTINGS: dict[str, tuple[Any, ...]] = {
    "match": ("", 1, None),
    "type": tuple(value for value in choice("adamW", "adagrad") if value is not None),
    "lr": NOT_NEGATIVE_OR_NONE,
    "betas": BETAS_OR_NONE,
    "eps": POSITIVE_OR_NONE,
    "weight_decay": NOT_NEGATIVE_OR_NONE,
    "momentum": BETA_OR_NONE,
    "nesterov": FLAG_OR_NONE,
    "moments": tuple(value for value in choice("fp32", "bfloat16") if value is not None),
}
SECTIONS = (
    "parallel",
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.sequence",
    "zero",
    "memory",
    "memory.host_fraction",
    "precision",
)
SECTIONS += ("optimizer", "lr_scheduler", "checkpoint")
SHORT = ("parallel.pipeline", "parallel.tensor", "parallel.sequence")  # an int is their size


def nested(path: str, value: object) -> dict[str, Any]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def misspelt(name: str) -> str:
    """One letter too few, and no legal name."""
    return name[: len(name) // 2] + name[len(name) // 2 + 1 :]


@dataclass(frozen=True)
class Bad:
    """A configuration that must be refused, with the path, the value and a legal word of its message."""

    name: str
    path: str
    value: object
    run: Callable[[], object] = field(compare=False)
    legal: str = ""
    near: str | None = None

    def __str__(self) -> str:
        return self.name


def loaded(name: str, path: str, value: object, **more: Any) -> Bad:
    config = nested(path, value)
    return Bad(f"{name}: {config}", path, value, lambda: Config.load(config), **more)


def wrong_values() -> Iterator[Bad]:
    for path, values in SETTINGS.items():
        for value in values:
            yield loaded("value", path, value)
    for name, values in GROUP_SETTINGS.items():
        for value in values:
            group = {"match": "*.bias"} | {name: value}
            config = {"optimizer": {"groups": [group]}}
            yield Bad(f"group: {group}", f"optimizer.groups.0.{name}", value, lambda c=config: Config.load(c))
    for section in SECTIONS:
        for value in (3.5, None, ["size"]):
            path = {"precision": "precision.dtype"}.get(
                section, f"{section}.size" if section in SHORT else section
            )
            shown = tuple(value) if isinstance(value, list) else value
            config = nested(section, value)
            yield Bad(f"section: {config}", path, shown, lambda c=config: Config.load(c))
    lacking = {"optimizer": {"groups": [{"lr": 1.0}]}}
    yield Bad(f"{lacking}", "optimizer.groups.0.match", "not given", lambda: Config.load(lacking), "'*.bias'")


def wrong_names() -> Iterator[Bad]:
    for path in (*SETTINGS, *SECTIONS, "optimizer.groups.0.match"):
        section, _, name = path.rpartition(".")
        if ".0." in path:
            continue
        wrong = ".".join(filter(None, (section, misspelt(name))))
        yield loaded("name", wrong, 1, legal=name, near=path if len(name) > 3 else None)
    groups = {"optimizer": {"groups": [{"match": "*", "weight_decy": 0.1}]}}
    wrong = "optimizer.groups.0.weight_decy"
    yield Bad(
        f"{groups}",
        wrong,
        0.1,
        lambda: Config.load(groups),
        "weight_decay",
        "optimizer.groups.0.weight_decay",
    )
    for wrong, meant in (
        ("micro_batches", "parallel.pipeline.micro_batches"),
        ("MICRO_BATCHES", "parallel.pipeline.micro_batches"),
        ("parallel.micro_batches", "parallel.pipeline.micro_batches"),
        ("device_budgets", "memory.device_budget"),
        ("parallel.clip_grad_norm", "clip_grad_norm"),
        ("clip_grad_norms", "clip_grad_norm"),
    ):
        yield loaded("place", wrong, 1, near=meant)
    yield Bad("number as a name", "config[3]", 1, lambda: Config.load({3: 1}))


def contradictions() -> Iterator[Bad]:
    sgd = {"optimizer": {"type": "sgd", "nesterov": True}}
    yield Bad(f"{sgd}", "optimizer.nesterov", True, lambda: Config.load(sgd), "momentum")
    for kind in ("cosine", "linear", "wsd", "one_cycle", "polynomial"):
        config = {"lr_scheduler": {"type": kind}}
        yield Bad(f"{config}", "lr_scheduler.total_steps", None, lambda c=config: Config.load(c), "int >= 1")
    for more, least in (
        (dict(type="cosine", warmup_steps=13), 13),
        (dict(type="wsd", warmup_steps=5, decay_steps=4), 9),
    ):
        Config.load(dict(lr_scheduler=dict(more, total_steps=least)))
        config = dict(lr_scheduler=more)
        legal = f"int >= {least}:"
        yield Bad(f"{config}", "lr_scheduler.total_steps", None, lambda c=config: Config.load(c), legal)
    group = {"match": "*.weight", "nesterov": True}
    grouped = {"optimizer": {"type": "sgd", "groups": [group]}}
    yield Bad(f"{grouped}", "optimizer.groups.0.nesterov", True, lambda: Config.load(grouped), "momentum")
    for section, path, legal in (
        (
            {"lr_scheduler": {"type": "cosine", "warmup_steps": 11, "total_steps": 10}},
            "lr_scheduler.warmup_steps",
            "0 to 10",
        ),
        (
            {"lr_scheduler": {"type": "wsd", "warmup_steps": 5, "total_steps": 10}},
            "lr_scheduler.decay_steps",
            "1 to 5",
        ),
        (
            {"lr_scheduler": {"type": "wsd", "total_steps": 10, "decay_steps": 11}},
            "lr_scheduler.decay_steps",
            "1 to 10",
        ),
        ({"precision": {"dtype": "fp16", "master": "split"}}, "precision.master", "auto"),
        ({"precision": {"dtype": "fp64", "master": "fp32"}}, "precision.master", "auto"),
        ({"precision": {"dtype": "fp16", "gradient": "bf16"}}, "precision.gradient", "auto"),
        ({"precision": {"dtype": "fp32", "gradient": "bf16"}}, "precision.gradient", "auto"),
        *(
            (
                {**more, "optimizer": {"update_when": "backward", **more.get("optimizer", {})}},
                "optimizer.update_when",
                legal,
            )
            for more, legal in (
                ({"clip_grad_norm": 1.0}, "clip_grad_norm=None"),
                ({"precision": "fp16"}, "precision.dtype='bf16'"),
                ({"optimizer": {"type": "lamb"}}, "optimizer.type='adamw'"),
                (
                    {"optimizer": {"groups": [{"match": "*", "type": "muon"}]}},
                    "optimizer.groups.0.type='adamw'",
                ),
                ({"memory": {"placement": "auto", "device_budget": 10**9}}, "memory.device_budget=None"),
            )
        ),
        (
            {"precision": {"gradient": "bf16"}, "gradient_accumulation": 2},
            "precision.gradient",
            "gradient_accumulation=1",
        ),
        (
            {"precision": {"gradient": "bf16"}, "parallel": {"pipeline": 2}},
            "precision.gradient",
            "parallel.pipeline.micro_batches=1",
        ),
        ({"memory": {"placement": "disk"}}, "memory.disk_dir", "directory"),
        ({"memory": {"placement": "disk", "disk_dir": ""}}, "memory.disk_dir", "the name of a directory"),
        ({"memory": {"shared_base": ""}}, "memory.shared_base", "a name, or None"),
        ({"memory": {"placement": "static"}}, "memory.placement", "host_fraction"),
        (
            {"parallel": {"pipeline": {"size": 2, "schedule": "1f1b", "stages_per_rank": 2}}},
            "parallel.pipeline.stages_per_rank",
            "1, or a schedule that takes 2: interleaved, bfs, zb-v, auto",
        ),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "a list of 2"),
        (
            {"parallel": {"pipeline": {"schedule": "interleaved", "stages_per_rank": 1}}},
            "parallel.pipeline.stages_per_rank",
            "at least 2",
        ),
        (
            {"parallel": {"pipeline": {"schedule": "zb-v", "stages_per_rank": 3}}},
            "parallel.pipeline.stages_per_rank",
            "2",
        ),
        (
            {"parallel": {"pipeline": {"size": 2, "partition": [3]}}},
            "parallel.pipeline.partition",
            "2 stages",
        ),
    ):
        value: Any = section
        for step in path.split("."):
            value = value.get(step) if isinstance(value, dict) else value
        value = tuple(value) if isinstance(value, list) else value
        yield Bad(f"{section}", path, value, lambda c=section: Config.load(c), legal)


def impossible_worlds() -> Iterator[Bad]:
    for parallel, world, path, value, legal in (
        ({"data": 3}, 4, "parallel.data", 3, "data 4"),
        ({"data": 8, "tensor": 2}, 8, "parallel.data", 8, "data 4 x pipeline 1 x sequence 1 x tensor 2"),
        ({"tensor": 3}, 8, "parallel.data", "auto", "data 4 x pipeline 1 x sequence 1 x tensor 2"),
        (
            {"pipeline": 3, "tensor": 2},
            8,
            "parallel.data",
            "auto",
            "data 2 x pipeline 2 x sequence 1 x tensor 2",
        ),
        ({"sequence": 5}, 8, "parallel.data", "auto", "sequence 4"),
        ({"tensor": 16}, 8, "parallel.data", "auto", "tensor 8"),
        ({"tensor": {"size": 3, "mode": "2d"}}, 3, "parallel.tensor.size", 3, "q*q; legal: 1"),
        ({"tensor": {"size": 8, "mode": "2d"}}, 8, "parallel.tensor.size", 8, "q*q; legal: 4"),
        ({"tensor": {"size": 4, "mode": "3d"}}, 4, "parallel.tensor.size", 4, "l*l*l; legal: 1"),
        (
            {"tensor": {"size": 8, "mode": "2.5d", "depth": 3}},
            8,
            "parallel.tensor.size",
            8,
            "legal: data 8 x ",
        ),
        ({"tensor": {"size": 2, "mode": "2.5d"}}, 2, "parallel.tensor.size", 2, "legal: 1"),
        (
            {"sequence": {"size": 4, "mode": "usp", "ulysses": 3}},
            4,
            "parallel.sequence.ulysses",
            3,
            "1, 2, 4",
        ),
        ({"sequence": {"size": 2, "mode": "usp", "ulysses": 4}}, 2, "parallel.sequence.ulysses", 4, "1, 2"),
        ({"data": 6}, 6, "zero.shard_size", 4, "1, 2, 3, 6"),
        ({"tensor": 2}, 6, "zero.shard_size", 4, "1, 3"),
        ({}, 12, "zero.reshard_after_forward", 5, "True, False, 2, 3, 4, 6"),
        ({}, 4, "zero.reshard_after_forward", 4, "True, False, 2"),
        ({"tensor": 2}, 4, "zero.reshard_after_forward", 2, "True, False"),
        ({}, 0, "world_size", 0, ">= 1"),
        ({}, -4, "world_size", -4, ">= 1"),
    ):
        config: dict[str, Any] = {"parallel": parallel}
        if path.startswith("zero."):
            config["zero"] = {"stage": 3, path.removeprefix("zero."): value}
        run = lambda c=config, w=world: Config.load(c).check_world(w)  # noqa: E731
        yield Bad(f"{config} in a world of {world}", path, value, run, legal)


FACTS = {
    "layers": 6,
    "heads": 12,
    "kv_heads": 4,
    "width": 768,
    "ffn": 3072,
    "vocabulary": 50257,
    "sequence": 1024,
}


def impossible_models() -> Iterator[Bad]:
    for parallel, change, path, value, legal in (
        ({"pipeline": 8}, {}, "parallel.pipeline.size", 8, "1 to 6"),
        ({"pipeline": {"size": 4, "schedule": "interleaved"}}, {}, "parallel.pipeline.size", 4, "1 to 3"),
        ({"tensor": 5}, {}, "parallel.tensor.size", 5, "1, 2, 4"),
        ({"tensor": 8}, {}, "parallel.tensor.size", 8, "1, 2, 4"),
        ({"tensor": 6}, {"sequence": 1022}, "parallel.tensor.size", 6, "1, 2"),
        ({"tensor": 12}, {"kv_heads": 12, "ffn": 3070}, "parallel.tensor.size", 12, "1, 2"),
        ({"tensor": {"size": 25, "mode": "2d"}}, {}, "parallel.tensor.size", 25, "1, 4, 16"),
        ({"tensor": {"size": 8, "mode": "3d"}}, {"width": 780, "ffn": 3070}, "parallel.tensor.size", 8, "1"),
        ({"tensor": {"size": 2}}, {"vocabulary": 1}, "parallel.tensor.size", 2, "legal: 1"),
        ({"sequence": {"size": 8, "mode": "ulysses"}}, {}, "parallel.sequence.size", 8, "1, 2, 4"),
        (
            {"sequence": {"size": 4, "mode": "usp", "ulysses": 2}},
            {"heads": 3, "kv_heads": 3},
            "parallel.sequence.ulysses",
            2,
            "1",
        ),
        (
            {"tensor": 4, "sequence": {"size": 4, "mode": "ulysses"}},
            {},
            "parallel.tensor.size",
            4,
            "legal: 1, 3",
        ),
        ({}, {"heads": 7}, "model.heads", 7, "6"),
        ({}, {"kv_heads": 5}, "model.kv_heads", 5, "1, 2, 3, 4, 6, 12"),
        ({}, {"layers": 0}, "model.layers", 0, ">= 1"),
    ):
        facts = ModelFacts(**{**FACTS, **change}, tied=True)
        config = {"parallel": parallel}
        run = lambda c=config, f=facts: Config.load(c).check_model(f)  # noqa: E731
        yield Bad(f"{config} of {change}", path, value, run, legal)


NOT_YET: dict[str, tuple[Any, ...]] = {
    "zero.stage": (3,),
    "zero.reshard_after_forward": (2,),
    "memory.placement": ("host", "auto"),
    "memory.device_budget": (10**9,),
    "memory.host_budget": (10**9,),
    "memory.update_on": ("host",),
    "kernels": ("triton",),
    "compile": ("block",),
    "checkpoint.keep": (1,),
    "checkpoint.asynchronous": (True,),
}
"""Legal values that may be unbuilt; when a part is built, its row is gone from NOT_BUILT."""


def unbuilt_values() -> Iterator[Bad]:
    for row in NOT_BUILT:
        for value in NOT_YET[row.path]:
            if value in row.built:
                continue
            config = nested(row.path, value)
            if row.path == "parallel.tensor.mode":
                config["parallel"]["tensor"]["size"] = 8
            if row.path == "zero.stage":
                if any(other.path == "parallel.pipeline.size" for other in NOT_BUILT):
                    continue  # the pipeline that it does not work with would be a second fault
                config["parallel"] = {"pipeline": {"size": 2}}
            if row.path == "zero.reshard_after_forward":
                config["zero"]["stage"] = 3
                config["memory"] = {"placement": "auto", "device_budget": 10**9}
            if row.path == "memory.update_on":
                config["memory"] |= {"placement": "auto", "device_budget": 10**9}
            if row.path == "parallel.sequence.mode":
                config["parallel"]["sequence"]["size"] = 2
            if row.path == "kernels":
                config["precision"] = "fp64"
            if row.path == "activation_checkpoint":
                config["parallel"] = {"sequence": 2}
            if row.path == "compile":
                config["parallel"] = {"tensor": 2}
            run = lambda c=config: Config.load(c).check_built()  # noqa: E731
            yield Bad(f"not built: {config}", row.path, value, run, repr(row.built[0]))


def legacy_keys() -> Iterator[Bad]:
    for path, new in REFUSED.items():
        yield loaded("Colossal-AI", path, 3, legal=new)
    for config, path, value, legal in (
        ({"fp16": {"mode": "AMP"}}, "fp16", {"mode": "AMP"}, "bf16"),
        ({"fp16": {"mode": "TORCH", "foo": 1}}, "fp16.foo", 1, "loss_scale"),
        ({"fp16": {"mode": "NAIVE"}, "precision": "bf16"}, "fp16", {"mode": "NAIVE"}, "precision.dtype"),
        ({"NUM_MICRO_BATCHES": "4"}, "parallel.pipeline.micro_batches", "4", "int >= 1"),
        ({"gradient_clipping": -1}, "clip_grad_norm", -1, "> 0"),
        ({"gradient_clipping": 1.0, "clip_grad_norm": 2.0}, "gradient_clipping", 1.0, "clip_grad_norm"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm", 0.0, "None"),
        (
            {"zero": {"model_config": {"tensor_placement_policy": "const"}}},
            "zero.model_config.tensor_placement_policy",
            "const",
            "host",
        ),
        ({"zero": {"model_config": {"chunks": 3}}}, "zero.model_config", {"chunks": 3}, "stage"),
        ({"parallel": {"tensor": {"size": 4, "mode": None}}}, "parallel.tensor.mode", None, "'1d'"),
        (
            {"parallel": {"sequence": 4, "tensor": {"size": 2, "mode": "sequence"}}},
            "parallel.tensor",
            {"size": 2, "mode": "sequence"},
            "parallel.sequence",
        ),
        ({"model": {"type": "gpt", "num_chunks": 2}}, "model", {"type": "gpt"}, "initialize"),
    ):
        yield Bad(f"Colossal-AI: {config}", path, value, lambda c=config: Config.load(c), legal)


def command_lines() -> Iterator[Bad]:
    for options, path, value, legal in (
        (["--parallel.tensor.siz", "2"], "parallel.tensor.siz", "2", "size"),
        (["--parallel.tensor.size", "two"], "parallel.tensor.size", "two", "int >= 1"),
        (["--parallel.tensor.size", "2.0"], "parallel.tensor.size", 2.0, "int >= 1"),
        (["--parallel.tensor.size=0"], "parallel.tensor.size", 0, "int >= 1"),
        (["--parallel.tensor", "x"], "parallel.tensor.size", "x", "int >= 1"),
        (["--parallel.tensor.size"], "parallel.tensor.size", "not given", "value"),
        (["--optimizer.betas", "0.9"], "optimizer.betas", 0.9, "list of 2"),
        (["--optimizer.betas", "0.9", "x"], "optimizer.betas", (0.9, "x"), "list of 2"),
        (["--optimizer.lr", "nan"], "optimizer.lr", "nan", ">= 0"),
        (["--optimizer.lr.peak", "1"], "optimizer.lr.peak", "1", "lr"),
        (
            ["--optimizer.groups.0.lr", "1"],
            "optimizer.groups.0.lr",
            1,
            "--optimizer.groups \"[{'match': '*', 'lr': 1}]\"",
        ),
        (["--optimizer.nesterov", "perhaps"], "optimizer.nesterov", "perhaps", "True or False"),
        (["--zero", "1"], "zero", 1, "stage"),
        (["parallel.tensor.size=2"], "overrides", "parallel.tensor.size=2", "--section.setting"),
        (["--kernels", "Triton"], "kernels", "Triton", "'triton'"),
        (["--worldsize", "2"], "worldsize", "2", "parallel"),
    ):
        yield Bad(f"options {options}", path, value, lambda o=options: Config.load({}, o), legal)


GENERATORS = (
    *(wrong_values, wrong_names, contradictions, impossible_worlds, impossible_models),
    *(unbuilt_values, legacy_keys, command_lines),
)
CASES = [case for generate in GENERATORS for case in generate()]
JARGON = (
    "pydantic",
    "Traceback",
    "validation error",
    "ValidationError",
    "input_value",
    "input_type",
    "Input should",
)
JARGON += ("constrained", "literal[", "[type=", "loc=", "errors.", "object at 0x")


def shown(value: object) -> str:
    value = tuple(value) if isinstance(value, list) else value
    return value if value == "not given" else repr(value)[:100]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_configuration_is_refused_with_path_value_and_what_is_legal(case: Bad) -> None:
    with pytest.raises(ConfigError) as caught:
        case.run()
    text = str(caught.value)
    at_path = [problem for problem in caught.value.problems if problem.path == case.path]
    assert at_path, f"no problem at {case.path} in {text}"
    line = str(at_path[0])
    assert line in text and line.startswith(f"{case.path} = {shown(case.value)}"), line
    assert all(problem.rule and problem.legal for problem in caught.value.problems), text
    assert case.legal in f"{at_path[0].rule} {at_path[0].legal}" or case.legal in " ".join(
        map(str, at_path)
    ), line
    assert case.near is None or at_path[0].nearest == case.near, line
    assert not [word for word in JARGON if word in text], text


def test_one_fault_makes_one_problem() -> None:
    for case in [*wrong_values(), *wrong_names(), *contradictions(), *impossible_worlds(), *unbuilt_values()]:
        with pytest.raises(ConfigError) as caught:
            case.run()
        assert len(caught.value.problems) == 1, f"{case}: {caught.value}"


def test_there_are_at_least_195_different_bad_configurations() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 195


def test_every_setting_has_bad_values() -> None:
    groups = item_section(dict(walk(Config))["optimizer.groups"].annotation)
    assert groups is not None
    assert set(SETTINGS) == {path for path, _ in walk(Config)}
    assert set(GROUP_SETTINGS) == set(groups.model_fields)
    assert {row.path for row in NOT_BUILT} <= set(NOT_YET)


def test_all_faults_of_many_sections_are_told_at_once() -> None:
    """One bad value in every setting: as many problems as settings, each at its own path."""
    config: dict[str, Any] = {}
    for path, values in SETTINGS.items():
        holder = config
        *sections, name = path.split(".")
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[name] = values[0]
    with pytest.raises(ConfigError) as caught:
        Config.load(config)
    assert {problem.path for problem in caught.value.problems} == set(SETTINGS)


def test_faults_of_types_rules_options_and_old_keys_are_told_together() -> None:
    config = {
        "zero": {"stage": 9},
        "lr_scheduler": {"type": "cosine"},
        "parallel": {"pipeline": {"stages_per_rank": 3}},
        "BATCH_SIZE": 8,
    }
    with pytest.raises(ConfigError) as caught:
        Config.load(config, ["--seed", "x", "--seeds", "1"])
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {
        *("zero.stage", "lr_scheduler.total_steps", "parallel.pipeline.stages_per_rank"),
        *("BATCH_SIZE", "seed", "seeds"),
    }


def test_a_faulty_setting_does_not_make_its_neighbours_faulty() -> None:
    """stages_per_rank=2 is right for the schedule that was meant, nesterov for the momentum that was meant."""
    with pytest.raises(ConfigError) as caught:
        Config.load(
            {
                "parallel": {"pipeline": {"size": 2, "schedule": "interleavd", "stages_per_rank": 2}},
                "optimizer": {"type": "sgd", "momentum": "0.9", "nesterov": True},
            }
        )
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["parallel.pipeline.schedule", "optimizer.momentum"]


@pytest.mark.parametrize(
    "memory, paths",
    [
        ({"placement": "static", "host_fraction": {"optimizer": 1.5}}, {"memory.host_fraction.optimizer"}),
        ({"placement": "static", "host_fraction": {"optimizer": 0.0}}, {"memory.placement"}),
        (
            {"placement": "disk", "host_fraction": {"optimizer": 1.5}},
            {"memory.host_fraction.optimizer", "memory.disk_dir"},
        ),
    ],
)
def test_a_section_is_not_judged_by_faulty_settings_below_it(memory: dict[str, Any], paths: set[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"memory": memory})
    assert {problem.path for problem in caught.value.problems} == paths


def test_a_setting_that_is_not_given_is_called_so() -> None:
    with pytest.raises(ConfigError, match=r"groups\.0\.match = not given: must be given; legal: a pattern"):
        Config.load({"optimizer": {"groups": [{"lr": 1.0}]}})


def test_problems_are_data() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"parallel": {"tensor": {"mode": "2dd"}}})
    (problem,) = caught.value.problems
    assert (problem.path, problem.value, problem.nearest) == ("parallel.tensor.mode", "2dd", "'2d'")
    assert json.dumps(problem.legal) and isinstance(caught.value, ValueError)
