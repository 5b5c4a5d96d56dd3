"""The command line, as a person types it: what is printed where, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import colossal_lite
from colossal_lite.config.config import Config
from colossal_lite.launcher import command as cli
from colossal_lite.launcher import doctor

ROOT = Path(__file__).parents[2]
PLAN_OF_MODEL = ["plan", "{config}", "--batch", "2", "--sequence", "8", "--world", "2", "--model"]
PLAN = [*PLAN_OF_MODEL, "layers=2,heads=2,width=8", "--parallel.pipeline.size", "2"]
SCHEDULE = ["schedule", "--stages", "2", "--micro-batches", "3", "--name", "1f1b"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text('seed = 7\nprecision = "fp32"\n[optimizer]\nlr = 0.1\n')
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def test_config_show_prints_every_setting_with_its_origin(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    code, out, err = run(
        capsys,
        "config",
        "show",
        config,
        "--world",
        "4",
        "--zero.reshard_after_forward",
        "False",
        "--optimizer.lr=0.2",
    )
    rows = rows_of(out)
    assert code == 0 and len(rows) == len(Config().resolved())
    assert rows["seed"] == ["7", "file"]
    assert rows["optimizer.lr"] == ["0.2", "command", "line"]
    assert rows["parallel.data"] == ["4", "derived"]
    assert rows["zero.reshard_after_forward"] == ["False", "command", "line"]
    assert err.splitlines() == [
        "zero.reshard_after_forward=False has no effect: weights are sharded at stage 3 only, and stage is 0"
    ]


def test_config_schema_is_json_that_knows_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "schema")
    assert code == 0 and set(Config.model_fields) <= set(json.loads(out)["properties"])


def test_config_options_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "options")
    assert code == 0 and all(f"--{name}" in out for name in ("parallel.tensor.size", "zero.stage", "seed"))


def test_schedule_draws_what_the_papers_draw(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schedule", "--stages", "2", "--micro-batches", "3", "--name", "gpipe")
    assert code == 0
    assert "rank 0 | F0 F1 F2 .  .  .  B0 -  B1 -  B2 -" in out
    assert "rank 1 | .  F0 F1 F2 B0 -  B1 -  B2 -  .  ." in out


def test_schedule_takes_costs_and_latency(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "schedule",
        "--stages",
        "2",
        "--micro-batches",
        "2",
        "--name",
        "gpipe",
        "--cost",
        "2",
        "1",
        "1",
    )
    _, out, _ = run(capsys, *arguments, "--latency-s", "0.5")
    assert "F, I, W take 2, 1, 1 s a rank, a message 0.5 s" in out
    assert (
        "step 13 s" in out
    )  # 2 forwards of 2 s, 2 backwards of 2 s, one more of each, two messages of 0.5 s


def test_doctor_prints_findings_as_json_and_fails_on_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and {"versions", "kernels", "launch"} <= {row["group"] for row in rows}
    monkeypatch.setattr(doctor, "report", lambda environment: (doctor.DoctorRow("g", "n", "v", "fault"),))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "fault" in out and "gloo" in out


@pytest.mark.parametrize("name", cli.NOT_BUILT)
def test_what_is_not_built_is_refused_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, name, "config.py", "--model", "gpt")
    assert (code, out) == (2, "") and err.startswith(f"colossal-lite {name} is not built yet")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", "show", "{config}", "--sed", "4"], "sed = '4': is an unknown key"),
        (["config", "show", "{config}", "--world", "0"], "world_size = 0"),
        (["config", "show", "{config}", "--parallel.data", "3", "--world", "4"], "parallel.data = 3"),
        (
            [
                "config",
                "show",
                "{config}",
                "--activation_checkpoint",
                "selective",
                "--compile",
                "block",
            ],
            "compile = 'block': is not built yet",
        ),
        (["config", "show", "nowhere.toml"], "nowhere.toml"),
        (["config", "schema", "--seed", "4"], "unknown: --seed 4"),
        (["doctor", "--jsn"], "unknown: --jsn"),
        (["schedule", "--stages", "0", "--micro-batches", "3", "--name", "gpipe"], "0"),
        (
            "schedule --stages 2 --micro-batches 3 --name gpipe --cost 1e308 1e308 1e308".split(),
            "cost 1e+308, latency 0: all parts take no finite time",
        ),
        (
            ["schedule", "--stages", "2", "--micro-batches", "3", "--name", "1f1b", "--stages-per-rank", "2"],
            "stages_per_rank=2",
        ),
        (
            [*SCHEDULE, "--cost", "-1", "1", "1"],
            "cost -1, 1, 1 of F, I and W: give three finite seconds >= 0",
        ),
        ([*SCHEDULE, "--cost", "nan", "1", "1"], "cost nan, 1, 1"),
        ([*SCHEDULE, "--latency-s", "-5"], "latency -5: give finite seconds >= 0"),
        (
            ["config", "show", "{config}", "--optimizer.groups.0.lr", "0.5"],
            "which has none; legal: --optimizer.groups \"[{'match': '*', 'lr': 0.5}]\"",
        ),
        (
            [*PLAN, "--svg", "nowhere/schedule.svg"],
            "--svg nowhere/schedule.svg: there is no folder nowhere; legal: a file in one that exists",
        ),
        ([*PLAN, "--svg", "."], ".: Is a directory; legal: a path that can be read or written"),
    ],
)
def test_requests_that_cannot_be_exit_2_with_the_reason_on_standard_error(
    capsys: pytest.CaptureFixture[str], config: str, arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *(argument.format(config=config) for argument in arguments))
    assert (code, out) == (2, "") and says in err


@pytest.mark.parametrize("command", [["roles"], PLAN_OF_MODEL], ids=["roles", "plan"])
@pytest.mark.parametrize("text", ["import sys\nsys.exit(7)", "1 / 0"])
def test_a_file_of_a_model_that_does_not_run_is_named(
    capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path, command: list[str], text: str
) -> None:
    """Before, a file that exits ended the command without a word."""
    (tmp_path / "model.py").write_text(text)
    named = f"{tmp_path}/model.py:build"
    code, out, err = run(capsys, *(argument.format(config=config) for argument in command), named)
    fault = "SystemExit: 7" if "sys" in text else "ZeroDivisionError"
    assert (code, out) == (2, "") and fault in err and "legal" in err


@pytest.mark.parametrize("size", [10**18, 4097, 1])
def test_roles_of_more_ranks_than_can_be_emulated_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """The command looked at 10**18 ranks one by one."""
    code, out, err = run(capsys, "roles", "model.py:build", "--size", str(size))
    assert (code, out) == (2, "") and f"--size {size}: " in err and "legal: 2 to 4,096" in err


def test_a_setting_of_a_group_that_is_refused_is_legal_as_it_is_told(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    code, out, _ = run(capsys, "config", "show", config, "--optimizer.groups", "[{'match': '*', 'lr': 0.5}]")
    assert code == 0 and "optimizer.groups.0.lr" in out


@pytest.mark.parametrize("arguments", [["nope"], [], ["schedule", "--name", "1f2b"], ["config"]])
def test_tyro_refuses_unknown_words_with_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(word in out for word in ("doctor", "config", "schedule", *cli.NOT_BUILT))


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"colossal-lite {colossal_lite.__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_help_tells_how_a_shell_completes_and_what_it_tells_works(
    capsys: pytest.CaptureFixture[str], shell: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert "--tyro-write-completion bash FILE" in told and shell in told
    with pytest.raises(SystemExit) as caught:
        cli.main(["--tyro-write-completion", shell, str(tmp_path / "completion")])
    assert caught.value.code in (0, None) and "colossal-lite" in (tmp_path / "completion").read_text()


# ------------------------------------------------------------------------------------------ real commands

BAD = {
    "misspelt.json": (
        '{"optimizer": {"lrr": 0.1}}',
        "optimizer.lrr = 0.1: is an unknown key",
        "optimizer.lr",
    ),
    "type.toml": ('parallel = {pipeline = "two"}\n', "parallel.pipeline", "an int >= 1"),
    "size.py": (
        "config = dict(parallel=dict(pipeline=0))",
        "parallel.pipeline.size = 0",
        "an int >= 1",
    ),
    "world.json": ('{"parallel": {"data": 3}}', "parallel.data = 3", "the world has 1 rank"),
    "exits.py": ("import sys\nsys.exit(7)", "SystemExit in line 2: 7", "a file that runs alone"),
    "combination.toml": ("[lr_scheduler]\ntype = 'cosine'\n", "lr_scheduler.total_steps", "cosine needs it"),
}
SCRIPT = """
import sys
import colossal_lite as cl

with cl.launch(sys.argv[1]):
    print("training")
"""
OPTIONS = [
    (["--optimizer.lrr", "0.1"], "optimizer.lrr = '0.1': is an unknown key"),
    (["--parallel.pipeline.size", "two"], "parallel.pipeline.size = 'two'"),
    (["--parallel.data", "3"], "the world has 1 rank"),
    (["--backend", "nccl"], "backend = 'nccl'"),
    (["--data", "nowhere.txt"], "data = 'nowhere.txt'"),
]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process with these arguments, run to its end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def write(folder: Path, name: str) -> str:
    (folder / name).write_text(BAD[name][0])
    return str(folder / name)


def assert_refused(ended: subprocess.CompletedProcess[str], says: tuple[str, ...]) -> None:
    assert ended.returncode == 2 and ended.stdout == "", ended
    assert "Traceback" not in ended.stderr and all(part in ended.stderr for part in says), ended.stderr


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_ends_the_command_with_a_message_and_exit_code_2(name: str, tmp_path: Path) -> None:
    ended = command("-m", "colossal_lite", "config", "show", write(tmp_path, name), "--world", "1")
    assert_refused(ended, BAD[name][1:])


def test_a_bad_config_file_ends_a_script_that_launches_from_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert_refused(command(str(script), write(tmp_path, "world.json")), BAD["world.json"][1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is no bad backend here")
@pytest.mark.parametrize(("options", "says"), OPTIONS)
def test_bad_options_end_the_example_in_the_same_way(options: list[str], says: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "gpt" / "train.py")
    assert_refused(command(example, "--out", str(tmp_path / "out"), *options), (says,))


def test_a_script_ends_with_a_traceback_where_the_fault_is_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('print("training")', 'int("x")'))
    (tmp_path / "good.json").write_text("{}")
    ended = command(str(script), str(tmp_path / "good.json"))
    assert ended.returncode == 1 and "Traceback" in ended.stderr and "invalid literal" in ended.stderr


def test_config_commands_start_without_torch(config: str) -> None:
    code = (
        f"import sys; from colossal_lite.launcher.command import main; main(['config', 'show', {config!r}]); "
    )
    ended = command("-c", code + "print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])")
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "[]", ended.stderr


def test_a_reader_that_has_enough_ends_the_command_without_a_message() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [sys.executable, "-m", "colossal_lite", "config", "options"],
        stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (cli.PIPE_CLOSED, "")


ANSWERS = (["--help"], ["--version"], ["plan", "--help"], ["config", "options"], ["doctor"])


def ended_with(arguments: list[str], redirection: str) -> tuple[int, str]:
    """The exit code of a command in a shell, and its errors."""
    ended = subprocess.run(
        ["bash", "-c", f'exec "$0" -m colossal_lite "$@" {redirection}', sys.executable, *arguments],
        stderr=subprocess.PIPE, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
def test_an_output_that_is_closed_or_full_gives_no_traceback(arguments: list[str]) -> None:
    assert ended_with(arguments, ">&-") == (0, "")
    code, told = ended_with(arguments, "> /dev/full")
    assert code == 2 and told.startswith("No space left on device; legal: "), told


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
def test_help_for_a_reader_that_has_enough_gives_no_message(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [sys.executable, "-m", "colossal_lite", *arguments],
        stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (cli.PIPE_CLOSED, "")


def test_an_interrupt_ends_a_command_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Doctor, "run", interrupted)
    assert cli.main(["doctor"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "colossal-lite: interrupted\n"
