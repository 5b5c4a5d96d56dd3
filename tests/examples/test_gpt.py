"""examples/gpt: one command trains, the same command gives the same numbers, bad input one message."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser

from colossal_lite.config.config import Config
from colossal_lite.models import GPT, GPTConfig
from tests.shared.gpt_example import FOLDER, ROOT, gpt_example

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(3000))


@pytest.fixture
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Imports the example's modules as its own folder sees them, and forgets them afterwards."""
    with gpt_example() as example:
        yield example


Train = Callable[..., int]


@pytest.fixture
def train(example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs train.py with options in this process; its exit code."""
    module = example("train")

    def call(*options: object) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, options)])
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        try:
            module.main()
        except SystemExit as stopped:
            return int(stopped.code or 0)
        except Exception as error:
            with pytest.raises(SystemExit) as ended:
                sys.excepthook(type(error), error, error.__traceback__)
            return int(ended.value.code or 0)
        return 0

    return call


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "functions.py"
    path.write_text(TEXT)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def few_steps(text: Path, out: Path) -> list[object]:
    return ["--steps", 4, "--global-batch", 3, "--data", text, "--out", out, "--sample", 20]


def test_the_same_command_twice_gives_the_same_metrics(train: Train, text: Path, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("a", "b", "c")]
    assert [
        train(*few_steps(text, out), "--seed", seed) for out, seed in zip(outs, (3, 3, 2), strict=True)
    ] == [0] * 3
    for name in ("metrics.jsonl", "evaluation.jsonl", "model.safetensors", "run.json"):
        first, again, other = ((out / name).read_bytes() for out in outs)
        assert first == again != other, name
    metrics = rows(outs[0] / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert (
        metrics[0]["loss"] == pytest.approx(math.log(256), rel=0.1)
        and metrics[-1]["loss"] < metrics[0]["loss"]
    )
    assert {row["tokens"] for row in metrics} == {3 * 128}
    assert rows(outs[0] / "evaluation.jsonl")[0]["step"] == 4


def test_evaluation_is_the_mean_over_all_held_out_windows(
    example: Callable[[str], ModuleType], train: Train, text: Path, tmp_path: Path
) -> None:
    """35 windows in batches of 3: the ragged last batch weighs what it holds."""
    assert train(*few_steps(text, tmp_path)) == 0
    model_config = GPTConfig(**json.loads((tmp_path / "run.json").read_text())["facts"]["model"])
    model = GPT(model_config)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    _, held_out = example("corpus").read_corpus(text).windows(model_config.sequence, 3)
    assert len(held_out) % 3 and len(held_out) < 48
    inputs, labels = (
        torch.stack(part) for part in zip(*(held_out[i] for i in range(len(held_out))), strict=True)
    )
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    assert rows(tmp_path / "evaluation.jsonl")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("mesh", ["data 2 x sequence 1 x tensor 1", "data 1 x sequence 1 x tensor 2"])
def test_torchrun_on_two_ranks_gives_the_numbers_of_one(
    train: Train, text: Path, tmp_path: Path, mesh: str
) -> None:
    """In double precision, and with three sequences, so that two data ranks have different numbers of them."""
    double = ["--config", "small_fp64"]
    assert train(*few_steps(text, tmp_path / "one"), *double) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FOLDER / "train.py"), *map(str, few_steps(text, tmp_path / "two")), *double]
    command += ["--parallel.tensor.size", mesh[-1]]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert mesh in done.stdout and "--- sample\ndef " in done.stdout
    one, two = (rows(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=1e-9), key
    assert {row["sent_bytes"] for row in one} == {0} and all(row["sent_bytes"] > 0 for row in two)
    facts = [json.loads((tmp_path / name / "run.json").read_text())["facts"] for name in ("one", "two")]
    assert facts[0]["corpus"] == facts[1]["corpus"] and len(facts[0]["corpus"]["sha256"]) == 64
    assert facts[0]["matrix_weights"] == facts[1]["matrix_weights"] > 0


def test_text_becomes_tokens_that_train_and_read_as_text(
    example: Callable[[str], ModuleType], train: Train, text: Path, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("tokenizers")
    prepare, tokens = example("prepare"), tmp_path / "tokens"
    assert prepare.main(prepare.Options(tokens, text, vocabulary=300)) == 0
    few = [*few_steps(tokens, tmp_path / "run"), "--prompt", "return"]
    assert train(*few) == 2
    said = capsys.readouterr().err
    assert "its ids go up to 299, and the model has 256; legal: --vocabulary 300 or more" in said
    assert train(*few, "--vocabulary", 300) == 0
    corpus = example("tokens").read_token_corpus(tokens)
    assert corpus.vocabulary == 300 and corpus.bytes_per_token > 1.5
    step = rows(tmp_path / "run" / "metrics.jsonl")[0]
    assert step["bits_per_byte"] == pytest.approx(step["loss"] / math.log(2) / corpus.bytes_per_token)
    assert "--- sample\nreturn" in capsys.readouterr().out
    assert example("generate").codec_of(tmp_path / "run").size == 300
    data = np.frombuffer(text.read_bytes(), np.uint8)
    joined = "".join(prepare.pieces(data)).encode()
    assert joined == text.read_bytes()
    whole = np.concatenate([corpus.train, corpus.held_out]).tolist()
    assert example("generate").Bpe(tokens / "tokenizer.json").decode(whole).encode() == joined


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "/not/there"], "data = '/not/there': is not there; legal: a text file"),
        (["--optimizer.lr", "-1"], "optimizer.lr = -1"),
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate"),
        (["--parallel.tensor.size", "2"], "the world has 1 rank, no multiple of 2"),
        (["--parallel.data", "3"], "parallel.data"),
        (["--steps", "0"], "lr_scheduler.total_steps = 0"),
        (["--global-batch", "0"], "global_batch = 0: no sequence; legal: 1 or more"),
        (["--step", "5"], "step"),
        (["--steps", "many"], "--steps"),
        (["--config", "smal"], "small"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert train("--out", out, *options) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert not out.exists(), "nothing is written for a run that cannot be"


@pytest.mark.parametrize("content", ["", "too short"])
def test_an_empty_or_tiny_text_says_what_was_found_and_what_is_needed(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "text").write_text(content)
    assert train("--data", tmp_path / "text", "--out", tmp_path / "out") == 2
    assert f"{len(content)} bytes found in 1 text files, 20 or more needed" in capsys.readouterr().err
    (tmp_path / "text").write_text("longer, but not long enough for a batch")
    assert train("--data", tmp_path / "text", "--out", tmp_path / "out") == 2
    assert "38 bytes found to train on and 1 held out, 2,049 and 129 needed" in capsys.readouterr().err


def test_generate_continues_a_text_with_the_model_of_a_run(
    train: Train,
    example: Callable[[str], ModuleType],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = example("generate")
    assert train(*few_steps(text, tmp_path)) == 0
    capsys.readouterr()
    options = generate.Options(tmp_path, prompt="class ", length=20)
    assert [generate.main(options), generate.main(options)] == [0, 0]
    printed = capsys.readouterr().out
    assert printed.startswith("class ") and printed == printed[: len(printed) // 2] * 2
    assert generate.main(generate.Options(tmp_path / "none")) == 2
    assert "run.json" in capsys.readouterr().err


def test_a_sample_is_drawn_from_the_model_given_the_last_window(example: Callable[[str], ModuleType]) -> None:
    class Successor(torch.nn.Module):
        """Surely the byte after the last, however long the window; remembers what it was shown."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.lengths: list[int] = []

        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            assert not self.training
            self.lengths.append(ids_BT.shape[1])
            return 1e3 * torch.nn.functional.one_hot(ids_BT + 1, 300).float()

    model = Successor()
    module = example("generate")
    generate, codec = module.generate, module.Bytes()
    assert generate(model, codec, "abc", 4, window=5) == "abcdefg" and model.lengths == [3, 4, 5, 5]
    assert generate(model, codec, "", 2, window=5, temperature=0) == "\n\x0b\x0c" and model.training


def test_every_config_can_run_and_decays_matrices_only(example: Callable[[str], ModuleType]) -> None:
    for name, function in example("configs").CONFIGS.items():
        for recipe in (function(), function(3)):
            config = Config.load(recipe["config"]).check_world(8)
            config.check_built()
            assert not config.warnings() and not config.notices, name
            assert config.lr_scheduler.total_steps == recipe["steps"]
            model_config = GPTConfig(**recipe["model"])
            with torch.device("meta"):
                model = GPT(model_config)
            for parameter_name, parameter in model.named_parameters():
                patterns = [group.match for group in config.optimizer.groups]
                decays = not any(fnmatch(parameter_name, pattern) for pattern in patterns)
                assert decays == (parameter.dim() > 1), parameter_name
    assert function(3)["steps"] == 3


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_readmes_command_is_below_the_unigram_entropy_within_two_minutes_and_still_falls(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FOLDER / "train.py"), "--out", str(tmp_path)]
    start = time.monotonic()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = next(line for line in process.stdout if line.startswith("step"))
        first_loss_s = time.monotonic() - start
        process.stdout.read()
    losses = [row["loss"] for row in rows(tmp_path / "metrics.jsonl")]
    spent_s = 0.0
    unigram = json.loads((tmp_path / "run.json").read_text())["facts"]["bits_per_byte_of_held_out_text"][
        "unigram"
    ]
    for timing in rows(tmp_path / "timing.jsonl"):
        spent_s += timing["step_s"]
        if spent_s > 120 - first_loss_s:
            break
    reached = losses[timing["step"] - 50 : timing["step"]]
    before = losses[timing["step"] - 100 : timing["step"] - 50]
    print(f"{first.strip()} after {first_loss_s:.1f} s; {sum(reached) / 50:.3f} at step {timing['step']}")
    assert process.returncode == 0 and first_loss_s < 10
    assert sum(reached) < sum(before) and sum(reached) / 50 / math.log(2) < unigram


def test_the_offload_example_trains_to_the_same_bits_wherever_state_rests(tmp_path: Path) -> None:
    script = ROOT / "examples" / "offload" / "train.py"
    options = ["--layers", "4", "--width", "64", "--budget", "5MiB", "--out", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, str(script), *options], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "losses of all steps: the same bits in each" in ended.stdout
    assert {each.name for each in tmp_path.iterdir()} == {
        f"{n}.svg" for n in ("device", "host", "disk", "budget")
    }


def test_model_flops_are_those_of_the_matrix_products(example: Callable[[str], ModuleType]) -> None:
    """N weights take 2 N forward and 4 N backward; attention has two products of T x D for a token."""
    width, tokens, vocabulary = 8, 4, 16
    config = GPTConfig(vocabulary=vocabulary, layers=1, heads=2, width=width, sequence=tokens)
    forward = 2 * (12 * width * width + vocabulary * width) + 2 * 2 * tokens * width
    assert example("describe").flops_per_token(config) == 3 * forward
    for shape in (config, GPTConfig.llama("1B", layers=2, vocabulary=64), GPTConfig(layers=1, vocabulary=64)):
        with torch.device("meta"):
            linears = [m for m in GPT(shape).modules() if isinstance(m, torch.nn.Linear)]
        assert example("describe").matrix_weights(shape) == sum(m.weight.numel() for m in linears)


def test_every_option_is_passed_on_by_torchrun(example: Callable[[str], ModuleType]) -> None:
    """One that begins like several of torchrun's own ends there as ambiguous."""
    for field in fields(example("train").Options):
        given = [f"--{field.name.replace('_', '-')}", "value"]
        parsed = get_args_parser().parse_args(["--standalone", "--nproc-per-node", "2", "train.py", *given])
        assert parsed.training_script_args == given
