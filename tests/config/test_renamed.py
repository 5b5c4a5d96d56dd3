"""Settings by the names that they had before version 0.2: files, options, manifests, and the roles of a plan."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import colossal_lite as cl
from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.renamed import RENAMED, renamed
from tests.shared.before_the_move import BASE, FOLDER, MESHES, MODEL
from tests.shared.pool import RankEnv, run_world

# Old path -> a value that is not the default, another one, and what must stand beside them.
VALUES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "zero.reduce": ("micro_batch", "step", {"zero": {"stage": 2}}),
    "zero.reduction": ("ordered", "fast", {}),
    "zero.shard": (2, 4, {"zero": {"stage": 1}}),
    "optimizer.update": ("backward", "step", {"optimizer": {"type": "adamw"}}),
    "memory.update": ("host", "device", {"memory": {"placement": "host"}}),
    "memory.link_bandwidth": (10**9, 10**8, {"memory": {"placement": "host"}}),
    "memory.link_latency_s": (0.5, 0.25, {"memory": {"placement": "host"}}),
    "memory.disk_bandwidth": (10**9, 10**8, {"memory": {"placement": "disk", "disk_dir": "x"}}),
    "parallel.pipeline.chunks": (2, 4, {"parallel": {"pipeline": {"size": 2, "schedule": "interleaved"}}}),
    "parallel.tensor.regather": (False, True, {"parallel": {"tensor": {"size": 2}}}),
}
ROWS = pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=list(RENAMED))


def test_every_old_name_has_values_here() -> None:
    assert VALUES.keys() == RENAMED.keys()


def given(old: str, *paths: str) -> dict[str, Any]:
    """A configuration with the value of `old` at each of these paths, and what must stand beside it."""
    value, _, beside = VALUES[old]
    raw: dict[str, Any] = json.loads(json.dumps(beside))
    for path in paths:
        *sections, name = path.split(".")
        holder = raw
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[name] = value
    return raw


def option(path: str, value: object) -> list[str]:
    return [f"--{path}", str(value)]


def text_of(suffix: str, raw: dict[str, Any]) -> str:
    """The configuration as a file of this kind has it."""
    if suffix == ".json":
        return json.dumps(raw)
    if suffix == ".py":
        return f"config = {raw!r}\n"

    def lines(section: dict[str, Any], path: str) -> list[str]:
        plain = {name: value for name, value in section.items() if not isinstance(value, dict)}
        head = [f"[{path}]"] if path else []
        mine = head + [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
        inner = [
            (f"{path}.{name}".lstrip("."), value) for name, value in section.items() if name not in plain
        ]
        return mine + [line for where, value in inner for line in lines(value, where)]

    return "\n".join(lines(raw, ""))


def assert_translated(found: Config, old: str, new: str, notice: str) -> None:
    expected = Config.load(given(old, new))
    assert found == expected and found.values() == expected.values()
    assert found.values()[new] == VALUES[old][0] != Config().values()[new]
    assert not RENAMED.keys() & found.values().keys()
    assert found.notices == (notice,) and expected.notices == ()
    assert found.warnings() == expected.warnings()


def notice_of(old: str, new: str) -> str:
    value = VALUES[old][0]
    return f"{old}={value!r} is now {new}={value!r}"


@ROWS
def test_an_old_name_means_what_the_new_one_does_and_leaves_one_line(old: str, new: str) -> None:
    found = Config.load(given(old, old))
    assert_translated(found, old, new, notice_of(old, new))
    assert next(row.origin for row in found.resolved() if row.path == new) == "translated"


@ROWS
@pytest.mark.parametrize("suffix", [".toml", ".json", ".py"])
def test_an_old_name_in_a_file_is_translated(old: str, new: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"config{suffix}"
    path.write_text(text_of(suffix, given(old, old)))
    assert_translated(Config.load(path), old, new, notice_of(old, new))


@ROWS
@pytest.mark.parametrize("dashes", [False, True], ids=["as it is", "with dashes"])
def test_an_old_name_as_an_option_is_translated(old: str, new: str, dashes: bool) -> None:
    path = old.replace("_", "-") if dashes else old
    found = Config.load(given(old), option(path, VALUES[old][0]))
    assert_translated(found, old, new, f"--{old} is now --{new}")
    assert next(row.origin for row in found.resolved() if row.path == new) == "command line"


@ROWS
def test_an_old_name_beside_its_new_one_is_refused(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(given(old, old, new))  # even if both say the same
    (problem,) = caught.value.problems
    assert (problem.path, problem.legal) == (old, f"{new} alone")
    assert new in problem.rule and "old name" in problem.rule


@ROWS
@pytest.mark.parametrize("old_first", [True, False])
def test_an_old_option_beside_its_new_one_is_refused(old: str, new: str, old_first: bool) -> None:
    options = [option(old, VALUES[old][0]), option(new, VALUES[old][0])]
    first, second = options if old_first else reversed(options)
    with pytest.raises(ConfigError) as caught:
        Config.load(given(old), [*first, *second])
    (problem,) = caught.value.problems
    assert (problem.path, problem.legal) == (old, f"--{new} alone")
    assert new in problem.rule and "old name" in problem.rule


@ROWS
def test_an_option_lies_over_a_file_by_either_name(old: str, new: str) -> None:
    for in_file in (old, new):
        for as_option in (old, new):
            found = Config.load(given(old, in_file), option(as_option, VALUES[old][1]))
            assert found.values()[new] == VALUES[old][1]
            assert len(found.notices) == (in_file == old) + (as_option == old)


@ROWS
def test_an_option_that_is_given_twice_by_its_old_name_is_no_clash(old: str, new: str) -> None:
    found = Config.load(given(old), [*option(old, VALUES[old][1]), *option(old, VALUES[old][0])])
    assert found.values()[new] == VALUES[old][0]


@ROWS
def test_warnings_and_errors_name_the_new_path(old: str, new: str) -> None:
    """Alone, most of them have no effect; a value of a wrong type is refused."""
    value = VALUES[old][0]
    raw: dict[str, Any] = {}
    holder = raw
    *sections, name = old.split(".")
    for section in sections:
        holder = holder.setdefault(section, {})
    if old != "parallel.pipeline.chunks":  # by itself it is an error of the schedule
        holder[name] = value
        assert all(line.startswith(f"{new}=") for line in Config.load(raw).warnings())
    holder[name] = "no such value"
    with pytest.raises(ConfigError) as caught:
        Config.load(raw)
    assert [problem.path for problem in caught.value.problems] == [new]


def test_settings_without_effect_are_warned_of_by_their_new_names() -> None:
    raw = {"zero": {"reduce": "micro_batch", "shard": 2}, "memory": {"update": "host"}}
    raw |= {"parallel": {"tensor": {"regather": False}}}
    said = Config.load(raw).warnings()
    expected = ("zero.reduce_every", "zero.shard_size", "memory.update_on", "parallel.tensor.regather_inputs")
    assert sorted(line.split("=")[0] for line in said) == sorted(expected)


# ---- manifests of before ----


def load_of_before(
    env: RankEnv, config: dict[str, Any], folder: str
) -> tuple[list[str], list[str], list[str]]:
    """Warnings of the load, differences that it found, and the old names in the manifest."""
    with env.launch(config) as context:
        engine = cl.initialize(lambda: cl.models.GPT(cl.models.GPTConfig(**MODEL)), context=context)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = engine.load(folder)
        engine.close()
        said = [str(each.message) for each in caught]
        return said, [str(change) for change in loaded.changes], list(renamed(loaded.manifest.config)[1])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_manifest_of_before_loads_with_one_warning_and_no_false_change(mesh: str) -> None:
    ranks, config = MESHES[mesh]
    found = run_world(load_of_before, ranks, BASE | config, str(FOLDER / mesh))
    for rank, (said, changes, old) in enumerate(found):
        assert set(old) == set(RENAMED)
        assert changes == [
            "parallel.tensor.sequence_parallel was True, is 'auto': the same numbers, up to the order of sums"
        ]  # another default
        lines = [line for line in said if "older names" in line]
        assert len(lines) == (rank == 0)
        assert all(name in line for line in lines for name in RENAMED)


def test_a_manifest_of_before_states_true_changes_by_new_names() -> None:
    _, config = MESHES["zero2"]
    ((_, changes, _),) = run_world(load_of_before, 1, BASE, str(FOLDER / "zero2"))
    paths = {change.split()[0].rstrip(":") for change in changes}
    assert "zero.sum_order" in " ".join(changes) and "zero.reduce_every" in " ".join(changes)
    assert not any(f"{old} " in f"{line} " for line in paths for old in RENAMED)
