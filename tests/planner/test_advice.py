"""What `plan` advises where a configuration does not fit: configurations that do, and that are really taken."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, LlamaConfig

import colossal_lite as cl
from colossal_lite.config.config import Config, ConfigError
from colossal_lite.launcher import command
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.planner.advice import MOST_PLANS, Advice, Request, advise
from colossal_lite.planner.model_source import find_model
from colossal_lite.planner.planner import plan
from tests.shared.pool import RankEnv, run_world

MODEL = GPTConfig(vocabulary=512, layers=4, heads=4, width=128, sequence=64)
BATCH = 8
KiB, MiB = 2**10, 2**20


def asked(device_bytes: int, world_size: int = 2, model: GPTConfig = MODEL) -> Request:
    return Request(model, BATCH, model.sequence, world_size, device_bytes)


def advice(config: dict[str, Any], device_bytes: int, world_size: int = 2) -> Advice:
    return advise(Config.load(config), asked(device_bytes, world_size))


def settings_of(made: Advice) -> list[dict[str, Any]]:
    return [dict(fit.settings) for fit in made.fits]


@pytest.mark.parametrize(
    ("config", "world_size"),
    [({}, 4), (dict(precision="fp32", zero=dict(stage=1)), 2), (dict(parallel=dict(data=2)), 2)],
)
def test_every_figure_is_that_of_a_plan_and_fits_on_every_rank(
    config: dict[str, Any], world_size: int
) -> None:
    base = plan(config, MODEL, batch=BATCH, sequence=64, world_size=world_size).peak_bytes
    made = advice(config, base * 7 // 10, world_size)
    assert made.fits and made.planned <= MOST_PLANS + world_size
    for fit in made.fits:
        changed = Config.load(config, fit.options.split())
        peaks = [
            plan(changed, MODEL, batch=BATCH, sequence=64, world_size=world_size, rank=rank).peak_bytes
            for rank in range(world_size)
        ]
        assert max(peaks) == fit.plan.peak_bytes <= base * 7 // 10


def test_the_same_question_has_the_same_answer_and_none_goes_further_than_another() -> None:
    made = advice({}, 8 * MiB, 4)
    assert made == advice({}, 8 * MiB, 4) and 1 <= len(made.fits) <= 3
    found = settings_of(made)
    assert not any(
        a.keys() <= b.keys() and all(a[k] == b[k] for k in a) for a in found for b in found if a is not b
    )


def taken(env: RankEnv, config: dict[str, Any], options: list[str]) -> int:
    """Steps that a rank makes under an advised configuration."""
    with env.launch(Config.load(config, options)) as context:
        engine = cl.initialize(lambda: GPT(MODEL), context=context)
        ids = torch.randint(512, (BATCH, 65), generator=torch.Generator().manual_seed(0))[
            context.local_batch(BATCH)
        ]
        engine.train_step((ids[:, :-1], ids[:, 1:]))
        return engine.steps


def test_what_is_advised_is_taken_by_a_real_run() -> None:
    config = dict(precision="fp32")
    base = plan(config, MODEL, batch=BATCH, sequence=64, world_size=2).peak_bytes
    made = advice(config, base // 2)
    assert made.fits
    for fit in made.fits[-2:]:
        assert run_world(taken, 2, config, fit.options.split()) == [1, 1], fit.options


def test_where_nothing_fits_it_says_so_and_how_many_were_planned() -> None:
    made = advice({}, 10 * KiB)
    assert made.fits == () and "more ranks" in str(made) and str(made.planned) in str(made)


def test_sizes_that_divide_no_heads_are_never_offered() -> None:
    """63 ranks, 64 heads: nine tensor ranks would fill the world, and no head could be cut so."""
    model = GPTConfig(vocabulary=256, layers=2, heads=64, width=128, sequence=32)
    with pytest.raises(ConfigError) as caught:
        plan(dict(parallel=dict(tensor=8)), model, batch=63, sequence=64, world_size=63)
    assert "legal: data 63" in str(caught.value) and "tensor 9" not in str(caught.value)
    bare = Config.load(dict(parallel=dict(tensor=8)))
    with pytest.raises(ConfigError, match="tensor 9"):
        bare.check_world(63)  # without a model every factor of the world is as good
    request = replace(asked(300 * KiB, 63, model), batch=63)
    assert not any("--parallel.tensor" in fit.options for fit in advise(Config.load({}), request).fits)


def test_an_answer_for_7_billion_takes_few_seconds() -> None:
    model = find_model("llama-7B")
    request = Request(model, 64, 4096, 64, 80 * 2**30)
    begun_s = time.process_time()
    made = advise(Config.load({}), request)
    assert len(made.fits) == 3 and time.process_time() - begun_s < 6


# ---- the command ----


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_answer_begins_with_what_is_asked_and_has_at_most_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "c.json").write_text("{}")
    sizes = "layers=4,heads=4,width=128,vocabulary=512,sequence=64"
    options = ["--model", sizes, "--batch", "8", "--sequence", "64", "--world", "4"]
    for memory, code, words in (("8MiB", 1, "does not fit in 8.00 MiB"), ("1GiB", 0, "fits in 1.00 GiB")):
        given = [str(tmp_path / "c.json"), *options, "--device-memory", memory]
        found, out, _ = told(capsys, *given)
        lines = out.splitlines()
        assert found == code and lines[0].startswith(f"{words}: peak ") and "rank 0 of 4" in lines[0]
        assert "filled by " in lines[1] and "moves " in lines[2] and "bubble 0.0%" in lines[2]
        assert ("nearest that fit" in out) == bool(code)
        assert max(map(len, lines)) <= 100
    advised = next(
        line for line in told(capsys, *given[:-1], "8MiB")[1].splitlines() if line.startswith("  --")
    )
    assert told(capsys, *given[:-1], "8MiB", *advised.split())[0] == 0, "what is told can be typed"


def test_a_folder_of_hugging_face_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    LlamaConfig(**sizes, num_hidden_layers=5, max_position_embeddings=64).save_pretrained(tmp_path / "llama")
    GPTNeoXConfig(**sizes, num_hidden_layers=2).save_pretrained(tmp_path / "neox")
    model = find_model(str(tmp_path / "llama"))
    assert isinstance(model, GPTConfig) and (model.layers, model.width, model.position) == (5, 32, "rotary")
    assert find_model(str(tmp_path / "llama/config.json")) == model
    other = find_model(str(tmp_path / "neox"))
    assert not isinstance(other, GPTConfig)
    assert plan({}, other, batch=4, sequence=16, world_size=2).parameters > 2 * 32 * 96
    (tmp_path / "c.json").write_text("{}")
    given = [str(tmp_path / "c.json"), "--batch", "4", "--sequence", "16", "--world", "2"]
    assert told(capsys, *given, "--model", str(tmp_path / "llama"))[0] == 0
    code, _, err = told(capsys, *given, "--model", str(tmp_path / "neox"), "--compare", "tensor")
    assert code == 2 and "without --compare" in err


def test_a_function_that_builds_a_model_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sizes_here.py").write_text("WIDTH = 8\n")
    text = "from sizes_here import WIDTH\nfrom torch import nn\n"
    text += (
        "def build(): return nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10))\ndef none(): pass\n"
        "def loads(): raise RuntimeError('not on meta')\n"
    )
    (tmp_path / "model_here.py").write_text(text)
    for name in (f"{tmp_path}/model_here.py:build", "model_here:build"):
        monkeypatch.chdir(tmp_path)
        model = find_model(name)
        assert not isinstance(model, GPTConfig) and isinstance(model(), nn.Sequential)
        assert plan({}, model, batch=2, sequence=4, world_size=1).parameters == 10 * 8 + 8 * 10 + 10
    with pytest.raises(ValueError, match="returns a NoneType; legal: an nn.Module"):
        plan({}, find_model("model_here.py:none"), batch=2, sequence=4, world_size=1)
    with pytest.raises(
        ValueError, match="loads: RuntimeError: not on meta; legal: .*a Hugging Face folder is"
    ):
        plan({}, find_model("model_here.py:loads"), batch=2, sequence=4, world_size=1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:build", "nowhere.py: .*legal"),
        ("no_such_module_here:build", "no_such_module_here.*legal"),
        ("json:no_function", "json has no function 'no_function'"),
        ("{empty}", "no config.json of Hugging Face.*legal"),
    ],
)
def test_a_model_that_is_not_there_is_refused_by_name(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        find_model(name.format(empty=tmp_path))


def test_a_text_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ValueError, match="no_such_model"):
        find_model(str(tmp_path))
