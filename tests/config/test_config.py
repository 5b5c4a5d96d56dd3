"""The configuration: what it accepts, where each value comes from, and what it says about itself."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import UserDict, UserList, UserString
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.config.config import Config, ConfigError, render
from colossal_lite.config.errors import get_path, paths_of, unknown_key, walk
from colossal_lite.config.foreign_keys import answer
from colossal_lite.config.rules import NOT_BUILT
from colossal_lite.config.schema import OPTIMIZER_READS, SCHEDULE_READS, OptimizerConfig

DESIGN = dict(
    parallel=dict(
        data="auto",
        pipeline=dict(size=2, schedule="1f1b", micro_batches=8, stages_per_rank=1, partition="balanced"),
        tensor=dict(size=4, mode="2d"),
        sequence=dict(size=1, mode="ring"),
    ),
    zero=dict(stage=1, sum_order="fast", reduce_every="step", reshard_after_forward=True),
    memory=dict(placement="device", device_budget=None, host_budget=None, disk_dir=None),
    precision="bf16",
    optimizer=dict(
        type="adamw",
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        groups=[dict(match="*.bias", weight_decay=0.0)],
    ),
    lr_scheduler=dict(type="cosine", warmup_steps=100, total_steps=1000),
    clip_grad_norm=1.0,
    gradient_accumulation=1,
    activation_checkpoint="none",
    kernels="auto",
    compile="none",
    checkpoint=dict(keep=3, asynchronous=False),
    backend="auto",
    timeout_s=600,
    seed=1024,
)
"""The example of the public interface: accepted as it stands, and nothing in it is without effect."""


def origins(config: Config) -> dict[str, str]:
    return {row.path: row.origin for row in config.resolved() if row.origin != "default"}


def values(config: Config) -> dict[str, Any]:
    return {row.path: row.value for row in config.resolved()}


# ------------------------------------------------------------------------------------------------- valid ones


def section(**settings: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=settings)


positive = st.floats(1e-12, 1e6)
ratio = st.floats(0, 1)
beta = st.floats(0, 1, exclude_max=True)
budget = st.none() | st.integers(1, 2**50) | st.sampled_from(["40GiB", "1.5 TB", "512MiB"])
pipeline = st.integers(1, 8) | st.builds(
    lambda size, schedule, more: {"size": size, "schedule": schedule} | more,
    st.integers(1, 8),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto"]),
    section(
        micro_batches=st.none() | st.integers(1, 64),
        partition=st.sampled_from(["balanced", "profiled", "uniform"]),
    ),
)
tensor = st.integers(1, 64) | section(
    size=st.integers(1, 64),
    mode=st.sampled_from(["1d", "2d", "2.5d", "3d"]),
    sequence_parallel=st.booleans(),
    regather_inputs=st.booleans(),
    depth=st.integers(1, 4),
)
sequence = st.integers(1, 64) | section(
    size=st.integers(1, 64),
    mode=st.sampled_from(["ring", "ulysses", "usp", "allgather_kv", "ring_full"]),
    ulysses=st.integers(1, 8),
)
group = st.builds(
    lambda match, more: {"match": match} | more, st.text("abc.*", min_size=1), section(lr=positive)
)
schedules = st.just({"type": "constant"}) | st.builds(
    lambda kind, warmup, decay, rest, more: (
        {"type": kind, "warmup_steps": warmup, "decay_steps": decay, "total_steps": warmup + decay + rest}
        | more
    ),
    st.sampled_from([kind for kind in SCHEDULE_READS if kind != "constant"]),
    st.integers(0, 100),
    st.integers(1, 100),
    st.integers(0, 100),
    section(final_ratio=ratio, power=positive, start_ratio=ratio),
)
valid = section(
    parallel=section(
        data=st.just("auto") | st.integers(1, 64), pipeline=pipeline, tensor=tensor, sequence=sequence
    ),
    zero=section(stage=st.integers(0, 3), sum_order=st.sampled_from(["fast", "ordered"])),
    memory=section(
        placement=st.sampled_from(["device", "host", "auto"]),
        device_budget=budget,
        disk_dir=st.text(min_size=1),
    ),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16"])
    | section(dtype=st.sampled_from(["bf16", "fp16"]), loss_scale=st.just("dynamic") | positive),
    optimizer=section(
        type=st.sampled_from(sorted(OPTIMIZER_READS)),
        lr=st.floats(0, 10) | st.integers(0, 3),
        betas=st.tuples(beta, beta) | st.lists(beta, min_size=2, max_size=2),
        eps=positive,
        momentum=beta,
        groups=st.lists(group, max_size=3),
    ),
    lr_scheduler=schedules,
    clip_grad_norm=st.none() | positive,
    gradient_accumulation=st.integers(1, 64),
    activation_checkpoint=st.sampled_from(["none", "selective", "full"]),
    checkpoint=section(keep=st.integers(1, 9), asynchronous=st.booleans()),
    timeout_s=st.floats(1e-3, 1e6) | st.integers(1, 1000),
    seed=st.integers(0, 2**63 - 1),
)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(valid)
def test_a_valid_configuration_is_accepted_and_keeps_every_value(raw: dict[str, Any]) -> None:
    config = Config.load(raw)
    resolved = values(config)
    assert [path for path, _ in walk(Config) if path != "optimizer.groups"] == [
        path for path in resolved if not path.startswith("optimizer.groups")
    ]
    for path in resolved:
        given_value = get_path(json.loads(json.dumps(raw), object_hook=dict), path)
        if isinstance(given_value, (str, int, float)) and "budget" not in path:
            assert resolved[path] == given_value, path


@given(valid)
def test_loading_is_idempotent_and_the_form_of_the_source_makes_no_difference(raw: dict[str, Any]) -> None:
    config = Config.load(raw)
    again = Config.load(config)
    assert again == config and again.resolved() == config.resolved() and again.warnings() == config.warnings()
    assert Config.load(as_json(raw)) == config
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and hash(copy) == hash(config) and copy.resolved() == config.resolved()


@given(valid)
def test_a_source_is_never_changed_by_loading_it(raw: dict[str, Any]) -> None:
    before = json.dumps(raw)
    Config.load(raw, ["--seed", "3", "--parallel.tensor", "2"])
    assert json.dumps(raw) == before


NAMES = sorted({name for path, _ in walk(Config) for name in path.split(".")})
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["auto", "1d"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(NAMES), anything, max_size=4),
    st.lists(st.text("-.=parlesiz01 ", max_size=9)),
)
def test_no_input_raises_anything_but_a_config_error(raw: dict[str, Any], options: list[str]) -> None:
    try:
        config = Config.load(raw, options)
    except ConfigError as error:
        assert error.problems and all(problem.path and problem.legal for problem in error.problems)
    else:
        assert Config.load(config) == config


def test_the_example_of_the_public_interface_is_accepted_and_all_of_it_has_effect() -> None:
    config = Config.load(DESIGN)
    assert config.warnings() == () and config.notices == ()
    assert config.check_world(16).parallel.data == 2
    assert config.check_world(16).layout().describe() == (
        "pipeline 2 x data 2 x sequence 1 x tensor 4 (row 2 x column 2)"
    )
    assert config.optimizer.betas == (0.9, 0.95) and config.optimizer.groups[0].weight_decay == 0.0


def test_an_empty_configuration_runs_today() -> None:
    config = Config.load({})
    config.check_built()
    assert config == Config() and config.check_world(1).layout().world_size == 1
    assert config.check_world(8).parallel.data == 8


def test_short_forms_stand_for_their_sections() -> None:
    short = Config.load({"parallel": {"pipeline": 2, "tensor": 4, "sequence": 3}, "precision": "fp32"})
    long = {
        "parallel": {"pipeline": {"size": 2}, "tensor": {"size": 4}, "sequence": {"size": 3}},
        "precision": {"dtype": "fp32"},
    }
    assert short == Config.load(long)


@pytest.mark.parametrize(
    ("raw", "same"),
    [
        (dict(seed=np.int64(3)), dict(seed=3)),
        (dict(gradient_accumulation=torch.tensor(2)), dict(gradient_accumulation=2)),
        (dict(clip_grad_norm=np.float64(0.1)), dict(clip_grad_norm=0.1)),
        (dict(deterministic=np.True_), dict(deterministic=True)),
        (dict(parallel=dict(tensor=np.int32(2))), dict(parallel=dict(tensor=2))),
        (dict(optimizer=dict(betas=np.array([0.5, 0.25]))), dict(optimizer=dict(betas=(0.5, 0.25)))),
        (dict(optimizer=dict(betas=UserList([0.5, 0.25]))), dict(optimizer=dict(betas=(0.5, 0.25)))),
        (UserDict(optimizer=UserDict(lr=Decimal("0.1"))), dict(optimizer=dict(lr=0.1))),
        (dict(checkpoint=dict(keep=np.uint8(3))), dict(checkpoint=dict(keep=3))),
        (
            dict(memory=dict(placement="host", update_on=dict(host=[np.int64(0), np.int64(2)]))),
            dict(memory=dict(placement="host", update_on=dict(host=(0, 2)))),
        ),
        (
            dict(memory=dict(placement="disk", disk_dir=Path("some") / "where", rates=Path("rates.json"))),
            dict(memory=dict(placement="disk", disk_dir=f"some{os.sep}where", rates="rates.json")),
        ),
    ],
)
def test_numbers_of_numpy_and_torch_paths_and_sequences_mean_what_pythons_own_do(
    raw: Mapping[str, Any], same: dict[str, Any]
) -> None:
    read = Config.load(raw)
    assert read == Config.load(same)
    assert read.model_dump_json() == Config.load(same).model_dump_json()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.float64(2.0), "gradient_accumulation = 2.0: has the wrong type, float; legal: an int >= 1"),
        (np.True_, "gradient_accumulation = True: has the wrong type, bool; legal: an int >= 1"),
        (np.array([2]), "gradient_accumulation = (2,): has the wrong type, tuple; legal: an int >= 1"),
        (torch.ones(1, device="meta"), "has the wrong type, Tensor; legal: an int >= 1"),
    ],
)
def test_numbers_of_numpy_and_torch_are_refused_where_pythons_own_are(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Config.load(dict(gradient_accumulation=value))


class Unread(UserDict[str, Any]):
    """A mapping with a value to fill in, as OmegaConf has."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(f"{key} has no value yet")


def test_a_value_that_a_mapping_does_not_give_is_refused_by_name() -> None:
    told = "config.optimizer.lr = not given: cannot be read: LookupError: lr has no value yet; legal: a value"
    with pytest.raises(ConfigError, match=re.escape(told)):
        Config.load(dict(optimizer=Unread(lr=None)))


class UnreadList(UserList[Any]):
    """As `Unread`, a sequence."""

    def __getitem__(self, place: Any) -> Any:
        raise LookupError("no value yet")


def holding_itself() -> list[Any]:
    betas: list[Any] = []
    betas += [betas, betas]
    return betas


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            UnreadList([0.5, 0.25]),
            "config.optimizer.betas = not given: cannot be read: LookupError: no value yet",
        ),
        (holding_itself(), "config.optimizer.betas.1 = 'a list': holds itself"),
        (np.timedelta64(5, "ns"), "optimizer.betas = np.timedelta64(5,'ns'): has the wrong type"),
        (
            torch.empty(2, device="meta"),
            "optimizer.betas = tensor(..., device='meta', size=(2,)): has the wrong",
        ),
    ],
)
def test_a_sequence_that_cannot_be_read_and_what_is_no_number_are_refused_by_name(
    value: object, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Config.load(dict(optimizer=dict(betas=value)))


def test_text_of_any_class_is_text() -> None:
    assert Config.load(dict(optimizer=dict(type=UserString("sgd")))).optimizer.type == "sgd"


def test_a_configuration_is_frozen() -> None:
    config = Config.load({})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.optimizer.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("text, count", [("40GiB", 40 * 2**30), ("1.5TB", 1_500_000_000_000), ("7 B", 7)])
def test_budgets_are_bytes(text: str, count: int) -> None:
    assert Config.load({"memory": {"device_budget": text}}).memory.device_budget == count


@pytest.mark.parametrize(
    "dtype, master", [("fp64", "fp64"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")]
)
def test_master_weights_are_never_narrower_than_fp32(dtype: str, master: str) -> None:
    assert Config.load({"precision": dtype}).precision.master_dtype == master


def test_an_optimizer_has_the_defaults_of_its_type() -> None:
    lion = Config.load({"optimizer": {"type": "lion"}}).optimizer
    muon = Config.load({"optimizer": {"type": "muon", "momentum": 0.5}}).optimizer
    assert (lion.betas, lion.weight_decay) == ((0.9, 0.99), 0.0)
    assert (muon.momentum, muon.nesterov, muon.weight_decay) == (0.5, True, 0.1)
    switched = Config.load(Config.load({"optimizer": {"lr": 0.5}}), ["--optimizer.type", "lion"]).optimizer
    assert switched == OptimizerConfig(type="lion", lr=0.5) and switched.betas == (0.9, 0.99)


# ------------------------------------------------------------------------------------------------ origins


def test_every_value_has_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 7\nNUM_MICRO_BATCHES = 4\n[parallel]\npipeline = 2\n")
    config = Config.load(file, ["--optimizer.lr", "0.5"]).check_world(4)
    assert origins(config) == {
        "seed": "file",
        "parallel.pipeline.size": "file",
        "parallel.pipeline.micro_batches": "translated",
        "parallel.data": "derived",
        "optimizer.lr": "command line",
    }
    assert origins(Config.load({"seed": 7})) == {"seed": "user"} == origins(Config.load(Config(seed=7)))
    assert origins(Config.load(config, ["--seed", "8"])) == {
        "seed": "command line",
        "parallel.pipeline.size": "file",
        "parallel.pipeline.micro_batches": "translated",
        "optimizer.lr": "command line",
    }, "data is auto again in the next world"


def test_resolved_rows_survive_json_and_print_as_a_table() -> None:
    rows = Config.load(DESIGN).check_world(8).resolved()
    assert [tuple(row) for row in json.loads(json.dumps(rows))] == [tuple(row) for row in rows]
    assert ("optimizer.groups.0.weight_decay", 0.0, "user") in rows
    lines = render(rows).splitlines()
    assert len(lines) == len(rows)
    assert any(re.fullmatch(r"parallel\.data +1 +derived", line) for line in lines)


def test_options_show_the_origin_of_each_term_of_the_product(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"parallel": {"pipeline": 2, "data": 3}}')
    with pytest.raises(
        ConfigError, match=r"3 \(file\) x 2 \(file\) x 1 \(default\) x 2 \(command line\) = 12, but"
    ):
        Config.load(file, ["--parallel.tensor", "2"]).check_world(16)


# --------------------------------------------------------------------------------------------------- files


MARK = chr(0xFEFF)
"""The byte order mark that some editors write first."""


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.json", '{"seed": 5, "optimizer": {"betas": [0.8, 0.9]}, "parallel": {"tensor": 2}}'),
        ("a.toml", "seed = 5\n[optimizer]\nbetas = [0.8, 0.9]\n[parallel]\ntensor = 2\n"),
        ("a.py", "config = dict(seed=5, optimizer=dict(betas=(0.8, 0.9)), parallel=dict(tensor=2))"),
        (
            "a.py",
            "import math\n_x = 5\nseed = _x\noptimizer = dict(betas=(0.8, 0.9))\nparallel = dict(tensor=2)",
        ),
        (
            "a.py:tiny",
            "def tiny():\n    return dict(seed=5, optimizer=dict(betas=(0.8, 0.9)), parallel=dict(tensor=2))",
        ),
        ("a.json", f'{MARK}{{"seed": 5, "optimizer": {{"betas": [0.8, 0.9]}}, "parallel": {{"tensor": 2}}}}'),
        ("a.toml", f"{MARK}seed = 5\n[optimizer]\nbetas = [0.8, 0.9]\n[parallel]\ntensor = 2\n"),
    ],
)
def test_files_of_every_kind_give_the_same_configuration(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name.partition(":")[0]).write_text(text)
    expected = {"seed": 5, "optimizer": {"betas": (0.8, 0.9)}, "parallel": {"tensor": 2}}
    assert Config.load(str(tmp_path / name)) == Config.load(expected)


@pytest.mark.parametrize(
    "name, text, told",
    [
        (
            "a.py",
            "config = dict(seed=1)\nconfig['x'] = 1 / 0\n",
            "ZeroDivisionError in line 2: division by zero",
        ),
        ("a.py", "def f(:\n", "SyntaxError in line 1"),
        ("a.py", "import colossalai\n", "ModuleNotFoundError in line 1: No module named 'colossalai'"),
        ("a.py", "config = 3", "is a int; legal: a dict"),
        ("a.py:tiny", "tinny = dict()", "is not defined there; legal: tinny; did you mean tinny?"),
        ("a.py:tinyy", "import math\ntiny = dict()\ndef tinx(): 1\n", "legal: tiny; did you mean tiny?"),
        ("a.py", "import math\n", "defines no config and no setting; legal: a dict named config"),
        ("a.py", "def tiny():\n    return {}\n", "legal: a dict named config, "),
        ("a.json", '{"seed": 1,}', "JSONDecodeError in line 1"),
        ("a.json", "", "legal: JSON in UTF-8"),
        ("a.json", '{"seed": 1, "seed": 2}', "key 'seed' is given twice"),
        ("a.json", "[1]", "holds a list; legal: a dict"),
        ("a.toml", "seed = \n", "TOMLDecodeError"),
        ("a.toml", "seed = \n", "legal: TOML in UTF-8"),
        ("a.yaml", "seed: 1", "ends in '.yaml'; legal: .py, .json, .toml"),
        ("a.jsn", "{}", "ends in '.jsn'; legal: .py, .json, .toml"),
        ("a", "{}", "has no ending; legal: .py, .json, .toml"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    (tmp_path / name.partition(":")[0]).write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(tmp_path / name)
    assert told in str(caught.value) and name in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("")
    with pytest.raises(ConfigError, match=r"trane\.toml' is no file|is no file.*did you mean .*train\.toml"):
        Config.load(tmp_path / "trane.toml")
    (tmp_path / "alone" / "folder.py").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"folder\.py': is no file") as caught:
        Config.load(tmp_path / "alone" / "folder.py")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="has the wrong type, int; legal: a dict"):
        Config.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("optimizer.betas", [0.9, "x"], "betas[1] = 'x' has the wrong type, str; legal: a list of 2: a number >= 0"),
        ("optimizer.betas", [1.5, None], "betas[0] = 1.5 is out of range and betas[1] = None has the wrong type"),
        ("optimizer.betas", [float("nan"), 0.9], "betas[0] = nan is not a finite number; legal: "),
        ("optimizer.groups", [dict(match="*", betas=["x", 0])], "groups.0.betas = ('x', 0): betas[0] = 'x' has the"),
        ("parallel.pipeline", dict(size=2, partition=[1, 1.5]), "partition[1] = 1.5 has the wrong type, float"),
        ("memory.update_on", dict(every="2"), "update_on['every'] = '2' has the wrong type, str; legal: 'device'"),
        ("memory.update_on", dict(host=[0, "a"]), "update_on['host'][1] = 'a' has the wrong type, str"),
        ("memory.update_on", dict(host=float("inf")), "update_on['host'] = inf is not a finite number"),
        ("memory.update_on", dict(hosts=0.5), "update_on['hosts'] = 0.5 is an unknown key; legal: 'device'"),
    ],
)  # fmt: skip
def test_a_wrong_entry_of_a_list_or_dict_is_named(path: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({path: value})
    assert told in str(caught.value), caught.value


# --------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "options, path, value",
    [
        (["--parallel.tensor.size", "2"], "parallel.tensor.size", 2),
        (["--parallel.tensor.size=2"], "parallel.tensor.size", 2),
        (["--parallel.tensor", "2"], "parallel.tensor.size", 2),
        (["--parallel.data", "auto"], "parallel.data", "auto"),
        (["--parallel.data", "4"], "parallel.data", 4),
        (["--parallel.tensor.mode", "2.5d"], "parallel.tensor.mode", "2.5d"),
        (["--parallel.tensor.sequence-parallel", "false"], "parallel.tensor.sequence_parallel", False),
        (["--parallel.pipeline.partition", "3"], "parallel.pipeline.partition", [3]),
        (["--precision", "fp32"], "precision.dtype", "fp32"),
        (["--optimizer.betas", "0.9", ".95"], "optimizer.betas", [0.9, 0.95]),
        (["--optimizer.betas", "[0.9, 0.95]"], "optimizer.betas", [0.9, 0.95]),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.groups", "[{'match': '*', 'lr': 1.0}]"], "optimizer.groups.0.lr", 1.0),
        (["--clip_grad_norm", "None"], "clip_grad_norm", None),
        (["--clip_grad_norm", "1e-1"], "clip_grad_norm", 0.1),
        (["--activation_checkpoint", "none"], "activation_checkpoint", "none"),
        (["--memory.device_budget", "40GiB"], "memory.device_budget", 40 * 2**30),
        (["--memory.disk_dir", "123"], "memory.disk_dir", "123"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_an_option_is_read_as_its_setting_takes_it(options: list[str], path: str, value: object) -> None:
    assert values(Config.load({}, options))[path] == value


def test_an_option_mends_a_file_and_reaches_into_lists() -> None:
    raw = {"seed": -1, "optimizer": {"groups": [{"match": "*.bias", "lr": 0.1}]}}
    config = Config.load(raw, ["--seed", "1", "--optimizer.groups.0.lr", "0.2"])
    assert config.seed == 1 and config.optimizer.groups[0].lr == 0.2


TYRO = dict(use_underscores=True, config=(tyro.conf.FlagConversionOff,))
FLAGS = {
    "--parallel.data": ["auto", "3"],
    "--parallel.tensor.size": ["2"],
    "--parallel.tensor.mode": ["2d"],
    "--parallel.tensor.sequence_parallel": ["True", "False"],
    "--parallel.tensor.regather_inputs": ["True", "False"],
    "--optimizer.betas": ["0.5 0.75"],
    "--optimizer.lr": ["1", "1e-3"],
    "--clip_grad_norm": ["None", "2.5"],
    "--parallel.pipeline.partition": ["uniform", "1"],
    "--memory.disk_dir": ["somewhere", "None"],
    "--timeout_s": ["3"],
    "--checkpoint.keep": ["5"],
}


@given(st.fixed_dictionaries({}, optional={flag: st.sampled_from(texts) for flag, texts in FLAGS.items()}))
@settings(max_examples=15)
def test_options_are_read_as_tyro_reads_them(chosen: dict[str, str]) -> None:
    options = [token for flag, text in chosen.items() for token in (flag, *text.split())]
    assert Config.load({}, options) == tyro.cli(Config, default=Config(), args=options, **TYRO)


def test_the_help_text_has_every_setting_with_its_meaning_and_the_parser_knows_them_all() -> None:
    text = Config.help()
    paths = {path for path, _ in walk(Config) if path != "optimizer.groups"}
    assert set(re.findall(r"--([\w.]+)", text)) - {"help"} == paths
    for path, setting in walk(Config):
        assert setting.description, f"{path} has no description"
    assert "Ranks over which each layer is cut" in text


def test_the_json_schema_takes_what_load_takes() -> None:
    schema = Config.schema()
    parallel = schema["$defs"]["ParallelConfig"]["properties"]
    assert {"type": "integer", "minimum": 1} in parallel["tensor"]["anyOf"]
    assert {"type": "string", "enum": ["fp64", "fp32", "bf16", "fp16"]} in schema["properties"]["precision"][
        "anyOf"
    ]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["TensorConfig"]["properties"]["size"]["description"]
    json.dumps(schema)


# ------------------------------------------------------------------------------------------------- no effect


@pytest.mark.parametrize(
    "raw, path, reason",
    [
        (
            {"parallel": {"pipeline": {"schedule": "gpipe"}}},
            "parallel.pipeline.schedule",
            "pipeline.size and pipeline.stages_per_rank are 1",
        ),
        ({"parallel": {"tensor": {"mode": "2d"}}}, "parallel.tensor.mode", "tensor.size is 1"),
        ({"parallel": {"tensor": {"size": 4, "depth": 2}}}, "parallel.tensor.depth", "2.5d"),
        (
            {"parallel": {"tensor": {"size": 4, "mode": "2d", "sequence_parallel": False}}},
            "parallel.tensor.sequence_parallel",
            "'2d'",
        ),
        ({"parallel": {"sequence": {"mode": "ulysses"}}}, "parallel.sequence.mode", "sequence.size is 1"),
        ({"parallel": {"sequence": {"size": 4, "ulysses": 2}}}, "parallel.sequence.ulysses", "usp"),
        ({"zero": {"reduce_every": "micro_batch"}}, "zero.reduce_every", "stage is 0"),
        (
            {"zero": {"stage": 3, "reduce_every": "micro_batch"}},
            "zero.reduce_every",
            "stage 3 reduces after each",
        ),
        ({"zero": {"stage": 2, "reduce_every": "micro_batch"}}, "zero.reduce_every", "one micro-batch"),
        (
            {"parallel": {"pipeline": {"micro_batches": 4}}},
            "parallel.pipeline.micro_batches",
            "gradient_accumulation cuts a step then",
        ),
        ({"zero": {"shard_size": 2}}, "zero.shard_size", "stage 0"),
        ({"zero": {"stage": 2, "reshard_after_forward": False}}, "zero.reshard_after_forward", "stage 3"),
        ({"memory": {"disk_dir": "x"}}, "memory.disk_dir", "'device'"),
        ({"memory": {"rates": {"disk": 9}}}, "memory.rates.disk", "'device'"),
        (
            {"memory": {"placement": "auto", "device_budget": 9, "disk_dir": "x"}},
            "memory.disk_dir",
            "without host_budget",
        ),
        ({"memory": {"placement": "host", "disk_dir": "x"}}, "memory.disk_dir", "without host_budget"),
        (
            {"memory": {"placement": "static", "host_fraction": {"optimizer": 0.5}, "disk_dir": "x"}},
            "memory.disk_dir",
            "'static' does not use the disk",
        ),
        ({"memory": {"rates": {"latency_s": 0.1}}}, "memory.rates.latency_s", "nothing moves"),
        ({"memory": {"host_budget": 1}}, "memory.host_budget", "'device'"),
        ({"memory": {"update_on": "host"}}, "memory.update_on", "updated there"),
        (
            {
                "memory": {"placement": "static", "host_fraction": {"weights": 0.5}, "update_on": "host"},
                "zero": {"stage": 3},
            },
            "memory.update_on",
            "host_fraction.optimizer=0",
        ),
        ({"memory": {"host_fraction": {"weights": 0.5}}}, "memory.host_fraction.weights", "'device'"),
        (
            {"memory": {"placement": "static", "host_fraction": {"weights": 0.5, "optimizer": 1.0}}},
            "memory.host_fraction.weights",
            "zero.stage=3 only, now 0",
        ),
        (
            {"memory": {"placement": "static", "host_fraction": {"gradients": 0.5}}, "zero": {"stage": 1}},
            "memory.host_fraction.gradients",
            "zero.stage=3, or 2 by micro-batch",
        ),
        ({"precision": {"loss_scale": 2.0}}, "precision.loss_scale", "fp16"),
        ({"precision": {"dtype": "fp32", "master": "fp32"}}, "precision.master", "their own master"),
        (
            {"optimizer": {"momentum": 0.9}},
            "optimizer.momentum",
            "adamw reads lr, betas, eps, moments, weight_decay",
        ),
        ({"optimizer": {"type": "sgd", "betas": (0.5, 0.5)}}, "optimizer.betas", "sgd reads"),
        (
            {"optimizer": {"groups": [{"match": "*", "nesterov": True}]}},
            "optimizer.groups.0.nesterov",
            "adamw",
        ),
        ({"optimizer": {"groups": [{"match": "*.bias"}]}}, "optimizer.groups.0.match", "changes no setting"),
        (
            {"lr_scheduler": {"warmup_steps": 9}},
            "lr_scheduler.warmup_steps",
            "constant schedule does not read it",
        ),
        (
            {"lr_scheduler": {"type": "cosine", "total_steps": 9, "power": 2.0}},
            "lr_scheduler.power",
            "polynomial would",
        ),
    ],
)
def test_a_setting_without_effect_is_named(raw: dict[str, Any], path: str, reason: str) -> None:
    (line,) = Config.load(raw).warnings()
    assert line.startswith(f"{path}=") and "has no effect" in line and reason in line


@pytest.mark.parametrize("name, value", [("host_budget", 1), ("disk_dir", "x")])
def test_what_auto_reads_beside_a_device_budget_only_is_named_without_one(name: str, value: Any) -> None:
    lines = Config.load({"memory": {"placement": "auto", name: value}}).warnings()
    assert [line.partition("=")[0] for line in lines] == ["memory.placement", f"memory.{name}"]
    assert all("has no effect: without device_budget all model state" in line for line in lines)


@pytest.mark.parametrize("parts", [{"gradient_accumulation": 2}, {"parallel": {"pipeline": 2}}])
def test_when_to_reduce_has_an_effect_where_a_step_has_several_micro_batches(parts: dict[str, Any]) -> None:
    assert Config.load({"zero": {"stage": 2, "reduce_every": "micro_batch"}, **parts}).warnings() == ()


@given(valid)
def test_only_settings_that_were_given_and_differ_from_the_default_are_warned_about(
    raw: dict[str, Any],
) -> None:
    config = Config.load(raw)
    default = values(Config())
    for line in config.warnings():
        path = line.partition("=")[0]
        assert origins(config)[path] == "user" and values(config)[path] != default.get(path, "none")


# ------------------------------------------------------------------------------------------------- not built


def test_every_row_of_what_is_not_built_names_a_setting_and_lets_its_default_pass() -> None:
    settings = values(Config())
    for row in NOT_BUILT:
        assert settings[row.path] in row.built, f"{row.path}: the default must be built"
        assert row.missing
    assert len({row.path for row in NOT_BUILT}) == len(NOT_BUILT)


def test_all_that_is_not_built_is_told_at_once() -> None:
    raw = {"zero": {"stage": 3}, "kernels": "triton", "precision": "fp64", "parallel": {"tensor": 2}}
    config = Config.load(raw)
    expected = {row.path for row in NOT_BUILT if row.when(config)}
    expected &= {"zero.stage", "kernels", "parallel.tensor.size"}
    if expected:
        with pytest.raises(ConfigError) as caught:
            config.check_built()
        assert {problem.path for problem in caught.value.problems} == expected


# -------------------------------------------------------------------------------------- Colossal-AI's dialect


@pytest.mark.parametrize(
    "old, new",
    [
        ({"fp16": {"mode": "NAIVE"}}, {"precision": "fp16"}),
        ({"fp16": {"mode": "TORCH", "init_scale": 2.0}}, {"precision": "fp16"}),
        ({"fp16": {"mode": None}}, {}),
        ({"fp16": None}, {}),
        (
            {"NUM_MICRO_BATCHES": 4, "parallel": {"pipeline": 2}},
            {"parallel": {"pipeline": {"size": 2, "micro_batches": 4}}},
        ),
        ({"gradient_clipping": 1.0}, {"clip_grad_norm": 1.0}),
        ({"gradient_clipping": 1.0, "clip_grad_norm": 1.0}, {"clip_grad_norm": 1.0}),
        ({"SEED": 3}, {"seed": 3}),
        ({"parallel": {"tensor": {"size": 1, "mode": None}}}, {}),
        (
            {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "sequence"}}},
            {"parallel": {"pipeline": 2, "sequence": 4}},
        ),
        (
            {"zero": {"model_config": {"tensor_placement_policy": "cpu"}}},
            {"zero": {"stage": 3}, "memory": {"placement": "host"}},
        ),
        ({"zero": {"model_config": {"tensor_placement_policy": "cuda"}}}, {"zero": {"stage": 3}}),
        (
            {"zero": {"optimizer_config": {"gpu_margin_mem_ratio": 0.8, "initial_scale": 32}}},
            {"zero": {"stage": 3}},
        ),
        ({"zero": {"model_config": {"bf16": True, "shard_strategy": object()}}}, {"zero": {"stage": 3}}),
        (
            {"model": {"num_chunks": 2}, "parallel": {"pipeline": 2}},
            {"parallel": {"pipeline": {"size": 2, "schedule": "interleaved", "stages_per_rank": 2}}},
        ),
        ({"TENSOR_SHAPE": (8, 16), "gradient_handler": [], "torch_ddp": {}, "cudnn_benchmark": True}, {}),
    ],
)
def test_old_keys_mean_what_they_meant_and_each_leaves_one_line(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    config = Config.load(old)
    assert config == Config.load(new)
    told = " ".join(config.notices)
    for key in old.keys() - {"parallel", "clip_grad_norm"}:
        assert key in told, f"no notice about {key}: {told}"
    assert all(
        "\n" not in line and (" is now " in line or " is ignored: " in line) for line in config.notices
    )
    assert Config.load(new).notices == ()


def test_an_old_file_with_settings_at_top_level_is_read(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        "from enum import Enum\n"
        "class AMP_TYPE(Enum):\n    NAIVE = 'naive'\n"
        "NUM_MICRO_BATCHES = 4\nfp16 = dict(mode=AMP_TYPE.NAIVE)\ncudnn_benchmark = True\n"
        "parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))\n"
    )
    config = Config.load(file)
    assert config.parallel.pipeline.micro_batches == 4 and config.precision.dtype == "fp16"
    assert config.parallel.tensor.mode == "2d" and len(config.notices) == 3


def test_a_key_with_dots_is_the_setting_that_it_names() -> None:
    flat = {"optimizer.lr": 1e-3, "parallel.tensor": 2, "parallel": {"data": 4}, "zero": {"stage": 1}}
    nested = {"optimizer": {"lr": 1e-3}, "parallel": {"data": 4, "tensor": 2}, "zero": {"stage": 1}}
    made = Config.load(flat)
    assert made == Config.load(nested)
    assert {
        row.origin for row in made.resolved() if row.path in ("optimizer.lr", "parallel.tensor.size")
    } == {"user"}


def cycle() -> dict[str, Any]:
    given: dict[str, Any] = {"optimizer": {}}
    given["optimizer"]["groups"] = [given]
    return given


def deep() -> dict[str, Any]:
    given: dict[str, Any] = {}
    for _ in range(10_000):
        given = {"optimizer": given}
    return given


BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "twice": (
        {"optimizer.lr": 1e-3, "optimizer": {"lr": 2e-3}},
        "config.optimizer.lr = 0.001: is given twice",
    ),
    "in a value": ({"seed.of.what": 1, "seed": 7}, "names a setting inside a value"),
    "empty name": ({"optimizer..lr": 1}, "has an empty name between dots"),
    "dots alone": ({".": 1}, "has an empty name between dots"),
    "misspelt": ({"optimizer.lrr": 1e-3}, "optimizer.lrr"),
    "of a list": ({"optimizer.groups.0.lr": 1e-3}, "optimizer.groups"),
    "cycle": (cycle(), "config.optimizer.groups.0 = .*: holds itself"),
    "deep": (deep(), "is nested more than 16 levels deep"),
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_a_key_with_dots_or_a_cycle_is_refused_by_name(what: str) -> None:
    given, words = BAD_KEYS[what]
    with pytest.raises(ConfigError, match=words):
        Config.load(given)


PATHS = sorted(paths_of(Config))


def misspelt(word: str) -> Iterator[str]:
    """A letter left out, doubled, changed, and two exchanged, in the middle."""
    at = len(word) // 2
    yield word[:at] + word[at + 1 :]
    yield word[:at] + word[at] + word[at:]
    yield word[:at] + "x" + word[at + 1 :]
    yield word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_with_one_segment_misspelt_is_answered_with_that_path(path: str) -> None:
    segments = path.split(".")
    for number, segment in enumerate(segments):
        for wrong in misspelt(segment) if len(segment) > 3 else ():
            given = ".".join([*segments[:number], wrong, *segments[number + 1 :]])
            if given not in PATHS and not answer(given.rpartition(".")[2], 1):
                assert unknown_key(Config, given, 1).nearest == path, given


@pytest.mark.parametrize(
    "option, near",
    [
        ("--paralel.tensor.size", "parallel.tensor.size"),
        ("--parallel.tensr.sise", "parallel.tensor.size"),
        ("--PARALEL.PIPELINE.SIZE", "parallel.pipeline.size"),
        ("--tensor.size", "parallel.tensor.size"),
        ("--zero.offlod", None),
    ],
)
def test_an_option_is_answered_with_the_nearest_path(option: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({}, [option, "2"])
    (problem,) = caught.value.problems
    assert problem.nearest == near
