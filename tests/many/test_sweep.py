"""Sweep files: which tasks a grid spans, the plan before a run, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colossal_lite.launcher.command import main
from colossal_lite.many.sweep import read_sweep
from colossal_lite.many.task import check
from colossal_lite.many.task_plan import plan_of
from colossal_lite.observe.tables import size

ROOT = Path(__file__).parents[2]
HEAD = """
build = "tests.many.tasks:gpt"
data = "tests.many.tasks:train"
steps = 10
global_batch = 4
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def test_the_example_spans_its_grid() -> None:
    sweep = read_sweep(ROOT / "examples" / "many_models" / "sweep.toml")
    check(sweep.tasks, sweep.config, sweep.policy, sweep.stop, sweep.save_every, 1)
    assert [task.name for task in sweep.tasks][:2] == ["width=32,lr=0.0003", "width=32,lr=0.001"]
    assert len(sweep.tasks) == 6 and sweep.directory == Path("runs/many_models") and sweep.quantum == "step"
    last: Any = sweep.tasks[-1]
    assert last.build.keywords == {"width": 64}
    assert last.settings(sweep.config)["optimizer"] == {"type": "adamw", "lr": 3e-3}


def test_a_file_may_ask_for_stages(tmp_path: Path) -> None:
    path = written(tmp_path, 'quantum = "stage"' + HEAD)
    assert read_sweep(path).quantum == "stage"


def test_a_grid_lies_over_a_short_form_and_names_values_that_json_has_not(tmp_path: Path) -> None:
    grid = '"parallel.pipeline.micro_batches" = [2]\n"optimizer.lr" = [2026-01-02]'
    (task,) = read_sweep(written(tmp_path, HEAD + f"[config.parallel]\npipeline = 2\n[grid]\n{grid}")).tasks
    assert task.name == "micro_batches=2,lr=2026-01-02"
    assert task.settings({"parallel": {"pipeline": 2}})["parallel"] == {
        "pipeline": {"size": 2, "micro_batches": 2}
    }
    of_task = f"[[task]]\n[task.config.parallel]\npipeline = 2\n[grid]\n{grid}"
    (other,) = read_sweep(written(tmp_path, HEAD + of_task)).tasks
    assert other.settings({})["parallel"] == {"pipeline": {"size": 2, "micro_batches": 2}}
    path = tmp_path / "sweep.py"
    path.write_text("grid = {3: [1]}")
    with pytest.raises(ValueError, match="grid: legal: setting ="):
        read_sweep(path)


def test_a_point_of_the_grid_counts_where_its_task_has_the_setting_too(tmp_path: Path) -> None:
    row = (
        '[[task]]\n[task.config.optimizer]\nlr = 1.0\nweight_decay = 0.5\n[grid]\n"optimizer.lr" = [0.1, 0.2]'
    )
    tasks = read_sweep(written(tmp_path, HEAD + row)).tasks
    found = [task.settings({"optimizer": {"lr": 2.0}})["optimizer"] for task in tasks]
    assert found == [{"lr": lr, "weight_decay": 0.5} for lr in (0.1, 0.2)]


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
step = 3
[[task]]
name = "a"
stepss = 3
[[task]]
name = "b"
build = "tests.many.tasks:no_such"
data = "no_such_module:f"
[stop]
rung = [3]
"""
    )
    with pytest.raises(ValueError) as told:
        read_sweep(written(tmp_path, text))
    for words in (
        "step: no such key", "did you mean steps?", "task[0].stepss: no such key", "stop.rung: no such key",
        "b: build = 'tests.many.tasks:no_such': no such function", "No module named 'no_such_module'",
    ):  # fmt: skip
        assert words in str(told.value), words


@pytest.mark.parametrize(
    "text, words",
    [
        ("step_s = 'x'", "step_s='x'; legal: seconds"),
        ("config = 'x'", "config='x'; legal: a table of settings"),
        ("directory = 3", "directory=3; legal: a text"),
        ("stop = 3", "stop=3; legal: a table of metric, rungs and keep"),
        ("save_every = 'x'", "save_every='x'; legal: 1 or more steps"),
        ("[stop]\nrungs = 3", "stop.rungs=3; legal: rising steps"),
        ("[stop]\nkeep = 'x'\nrungs = [1]", "stop.keep='x'; legal: a share"),
        ("[[task]]\nname = 3", "task[0].name=3; legal: a text"),
        ("[[task]]\nloader = 'x'", "task[0].loader='x'; legal: a table of arguments"),
        ("[loader]\nlabel = 'x'", "loader={'label': 'x'}; legal: a dict of shuffle"),
        (
            "[loader]\ncollate = 'tests.many.tasks:nosuch'",
            "loader.collate = 'tests.many.tasks:nosuch': no such",
        ),
        ("[[task]]\nconfig = 'x'", "task[0].config='x'; legal: a table"),
        ("[grid]\nsteps = [1, 2]", "grid: steps; legal: settings of the config"),
        (
            '[grid]\n"build.nosuch" = [1]',
            "build.nosuch in grid; legal: an argument that tests.many.tasks:gpt takes",
        ),
    ],
)
def test_values_of_another_kind_are_refused_by_name(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["many", str(written(tmp_path, HEAD + text))]) == 2
    assert words in capsys.readouterr().err


def test_plan_prints_every_policy_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        HEAD
        + f"""
directory = "{tmp_path / "run"}"
[[task]]
name = "a"
step_s = 2.0
[[task]]
name = "b"
step_s = 1.0
[[task]]
name = "c"
step_s = 1.0
[task.config.memory]
placement = "host"
"""
    )
    path = written(tmp_path, text)
    assert main(["many", str(path), "--plan", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "3 tasks on 2 devices" in shown and "bound 20 s" in shown
    sweep = read_sweep(path)
    plans = [plan_of(task, sweep.config) for task in sweep.tasks]
    assert plans[0] and plans[2] and plans[0].host_bytes == 0 < plans[2].host_bytes
    host, device = size(plans[2].host_bytes), size(plans[0].peak_bytes)
    assert shown.splitlines()[-1] == f"host {host} with all tasks open; device {device} at the most, a"
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[2:-1]}
    assert float(rows["link*"][2]) <= 1.05 and rows["sjf"] == ["30", "s", "1.500", "0"]
    assert not (tmp_path / "run").exists()


def test_plan_without_times_and_devices_without_plan_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, HEAD + f'directory = "{tmp_path}"')
    assert main(["many", str(path), "--plan"]) == 2
    assert "legal: step_s = SECONDS in the file" in capsys.readouterr().err
    assert main(["many", str(path), "--devices", "2"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
