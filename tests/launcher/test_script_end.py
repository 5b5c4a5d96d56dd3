"""How a script ends by an error: one message from the rank that failed first, an exit code, a word to torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.launcher.env import Launch
from colossal_lite.launcher.script_end import ScriptEnd, options

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rank_1() -> ScriptEnd:
    """The hook of rank 1 of 2, under a launcher that is not torchrun."""
    end = ScriptEnd(sys.__excepthook__)
    end.place = Launch("slurm", 1, 2, local_rank=1, local_world_size=2)
    return end


def ended(end: ScriptEnd, error: BaseException, first_failure: str | None = None) -> int:
    """The exit code of a rank that is ended by this error, which left a context if there is a `first_failure`."""
    if first_failure is not None:
        end.leaving(error, first_failure)
    try:
        end(type(error), error, error.__traceback__)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 1


def raised(fails: object) -> BaseException:
    with pytest.raises(BaseException) as caught:
        fails()  # type: ignore[operator]
    return caught.value


def of_the_user() -> None:
    json.loads("{")


def refused() -> None:
    Config.load({"optimzer": 1})


def test_the_first_rank_tells_of_its_own_files_and_where_it_was_raised(
    rank_1: ScriptEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised(of_the_user)
    error.add_note("all of the traceback: logs/rank-00001.log")
    assert ended(rank_1, error, "rank 1 stopped: JSONDecodeError: ...") == 1
    said = capsys.readouterr().err
    assert said.startswith("rank 1: Traceback (most recent call last):\n") and 'json.loads("{")' in said
    assert "decoder.py" in said and "json/__init__.py" not in said, (
        "where it was raised, and not the way there"
    )
    assert said.endswith(
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"
        "all of the traceback: logs/rank-00001.log\n"
    )


def test_a_refusal_from_within_an_installed_package_names_the_line_of_the_user_that_led_there(
    rank_1: ScriptEnd, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (package := tmp_path / "site-packages" / "theirs.py").parent.mkdir()
    package.write_text("def call(f): f({1: 1})  # of the package\n")
    own = tmp_path / "train.py"
    own.write_text("def main(call, f): call(f)  # of the user\n")
    places: dict[str, dict[str, Any]] = {name: {} for name in (str(package), str(own))}
    for name, place in places.items():
        exec(compile(Path(name).read_text(), name, "exec"), place)
    error = raised(lambda: places[str(own)]["main"](places[str(package)]["call"], Config.load))
    ended(rank_1, error)
    assert capsys.readouterr().err.endswith(f"\n  {own}, line 1: def main(call, f): call(f)  # of the user\n")


def test_a_rank_that_fails_because_another_did_prints_one_line_and_under_torchrun_none(
    rank_1: ScriptEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "rank 0 stopped: KeyError: 'lost'\nmore"
    assert ended(rank_1, raised(of_the_user), first) == 1
    assert capsys.readouterr().err == "rank 1 ends, as rank 0 stopped: KeyError: 'lost'\n"
    rank_1.place = Launch("torchrun", 1, 2, local_rank=1, local_world_size=2, has_agent=True)
    assert ended(rank_1, raised(of_the_user), first) == 1
    assert capsys.readouterr().err == ""
    assert ended(rank_1, raised(of_the_user)) == 1, "an error of the script after its context"
    assert "JSONDecodeError" in capsys.readouterr().err


def test_what_cannot_be_is_told_without_a_traceback_and_the_exit_code_is_2(
    rank_1: ScriptEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(rank_1, raised(refused), "") == 2
    said = capsys.readouterr().err
    assert "optimzer" in said and "did you mean" in said and "Traceback" not in said
    assert ended(rank_1, ValueError("not of this package"), "") == 1
    assert ended(rank_1, KeyError(), "") == 1


def test_torchrun_is_told_one_line_with_the_time(
    rank_1: ScriptEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = raised(of_the_user)
    error.__cause__ = KeyError("a cause")
    ended(rank_1, error, "")
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"].startswith("JSONDecodeError: Expecting property name")
    assert told["extraInfo"]["py_callstack"].strip() == told["message"]
    assert int(told["extraInfo"]["timestamp"]) > 0
    rank_1.leaving(cl.Stopped("nothing was saved", code=3, step=1), "")
    assert "Stopped: nothing was saved" in (tmp_path / "error.json").read_text()


@dataclass(frozen=True)
class Options:
    """Of a script."""

    steps: int = 3
    """how many"""


def test_options_are_a_dataclass_and_the_rest_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "5", "--parallel.tensor.size", "2"])
    assert options(Options) == (Options(5), ["--parallel.tensor.size", "2"])


SCRIPT = """
import sys, torch
from torch import nn
import colossal_lite as cl

class Net(nn.Sequential):
    def forward(self, x):
        if engine.steps == 2 and (sys.argv[1] == "both" or context.rank == 1):
            raise KeyError("a bug of the model")
        return super().forward(x)

data = [(torch.arange(8), torch.arange(1, 9))] * 16
with cl.launch(dict(precision="fp32", timeout_s=20)) as context:
    torch.manual_seed(0)
    engine = cl.initialize(Net(nn.Embedding(9, 8), nn.Linear(8, 9)), context=context)
    cl.fit(engine, data, global_batch=4, steps=9, directory="run")
"""


@pytest.mark.parametrize("who", ["both", "one"])
def test_under_torchrun_a_model_that_raises_is_one_message_and_its_box_says_it(
    who: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*torchrun, "script.py", who], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    ours, agent = [], False
    for line in done.stderr.splitlines():
        agent = agent or line.startswith("Traceback (most recent call last):")
        if not agent and "torch/distributed/" not in line:
            ours.append(line)
    assert done.returncode == 1 and done.stderr.count("Traceback (most recent call last):") == 2, done.stderr
    assert (
        len(ours) + len(done.stdout.splitlines()) <= 25
        and 'raise KeyError("a bug of the model")' in done.stderr
    )
    box = done.stderr.partition("Root Cause (first observed failure):")[2]
    line = next(line for line in box.splitlines() if line.startswith("  traceback : "))
    assert line.endswith("KeyError: 'a bug of the model'"), "whichever of two in one second torchrun takes"
    for rank in range(2):
        assert "Error: " in (tmp_path / "run" / "logs" / f"rank-{rank:05}.log").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "5", "MASTER_PORT": "29500"}, "rank 5 must be below"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
    ],
)
def test_an_environment_that_contradicts_itself_ends_a_script_as_other_refusals(
    given: dict[str, str], says: str
) -> None:
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in places}
    found = subprocess.run(
        [sys.executable, "-c", "import colossal_lite as cl\ncl.launch({})"],
        env=kept | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"} | given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 2 and says in found.stderr and "Traceback" not in found.stderr
