"""`cl.Run` and `cl.fit`: a loop in a folder that resumes, saves, evaluates, logs and stops, with the numbers of a loop
by hand."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.checkpoint.files import inspect, listed
from colossal_lite.observe.report import report
from colossal_lite.observe.schedule_report import ScheduleReport
from tests.shared.pool import RankEnv, WorldError, run_world

CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="adamw", lr=1e-2), seed=5, timeout_s=30)
SHAPE = cl.models.GPTConfig(vocabulary=32, layers=1, heads=2, width=8, sequence=8)
TOKENS = torch.randint(32, (41, 9), generator=torch.Generator().manual_seed(0))
TRAIN = [(row[:-1], row[1:]) for row in TOKENS[:22]]
VALID = [(row[:-1], torch.where(torch.arange(8) > i % 8, -100, row[1:])) for i, row in enumerate(TOKENS[22:])]
"""19 samples with 1 to 8 labels that count"""


def engine_in(context: cl.Context) -> cl.Engine:
    return cl.initialize(lambda: cl.models.GPT(SHAPE), context=context)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def looped(env: RankEnv, folder: str, how: dict[str, Any]) -> dict[str, Any]:
    """A run's loop to `steps`; `at`: a signal to `rank` before that step, `leave`: the loop breaks after that step."""
    losses, valid, ended = {}, {}, None
    steps, at, leave = how.get("steps", 9), how.get("at"), how.get("leave")
    try:
        with env.launch(CONFIG | how.get("config", {})) as context:
            engine = engine_in(context)
            run = cl.Run(folder, engine, save_every=how.get("save_every", 4), facts=how.get("facts"))
            for batch in run.batches(TRAIN[: how.get("samples")], global_batch=4, steps=steps):
                if engine.steps + 1 == at and env.rank == how.get("rank", 0):
                    os.kill(os.getpid(), signal.SIGTERM)
                result = run.step(batch)
                losses[result.step] = float(result.loss)
                if result.step % 3 == 0:
                    valid[result.step] = run.evaluate(VALID)
                if result.step == leave:
                    break
    except cl.Stopped as stopped:
        ended = stopped.code
    return dict(losses=losses, valid=valid, ended=ended)


def by_hand(env: RankEnv) -> dict[str, Any]:
    losses = {}
    with env.launch(CONFIG) as context:
        engine = engine_in(context)
        for batch in context.dataloader(TRAIN, global_batch=4).take(9):
            result = engine.train_step(batch)
            losses[result.step] = float(result.loss)
        weights = engine.full_state_dict()
    model = cl.models.GPT(SHAPE).double()
    model.load_state_dict(weights)
    inputs, labels = (torch.stack(part) for part in zip(*VALID, strict=True))
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    return dict(losses=losses, valid=float(loss))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of nine steps on two ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    run_world(looped, 2, str(folder), {})
    return folder


def test_a_run_leaves_its_report_with_the_memory_of_a_step_by_kind_and_its_schedule_beside_the_plan(
    whole: Path,
) -> None:
    page = (whole / "report.html").read_text()
    assert page == report(whole) and "not measured" not in page and "all_reduce" in page
    measured = json.loads((whole / "measured.json").read_text())
    assert measured["where"] == "pipeline 1 x data 2 x sequence 1 x tensor 1 on cpu", "no rank's address"
    changed = json.loads((whole / "run.json").read_text())["changed"]
    assert {"seed", "optimizer.lr", "parallel.data"} <= set(changed) and "kernels" not in changed
    levels = {level["kind"]: level for level in measured["timeline"]["levels"]}
    assert {"weights", "gradients", "optimizer", "activations", "temporaries"} <= set(levels)
    assert "forward blocks.0" in measured["timeline"]["moments"]
    forecast = levels["activations"]["forecast_bytes"]
    assert max(levels["activations"]["measured_bytes"]) == pytest.approx(forecast, rel=0.03)
    schedule = ScheduleReport.parse((whole / "schedule.json").read_text())
    assert {"0F0", "0B0"} <= {str(span.action) for span in schedule.measured.spans}


def test_a_run_gives_the_losses_of_a_loop_by_hand_and_the_loss_of_the_whole_held_out_set(
    whole: Path, tmp_path: Path
) -> None:
    (truth,) = run_world(by_hand, 1)
    (alone,) = run_world(looped, 1, str(tmp_path), {})
    assert alone["losses"] == truth["losses"]
    assert alone["valid"][9] == pytest.approx(truth["valid"], rel=1e-12)
    found = rows(whole / "metrics.jsonl")
    assert {row["step"]: row["loss"] for row in found} == pytest.approx(truth["losses"], rel=1e-12)
    assert rows(whole / "evaluation.jsonl")[-1]["loss"] == pytest.approx(truth["valid"], rel=1e-12)
    assert [path.name for path in listed(whole / "checkpoints")] == [f"step-0000000{n}" for n in (9, 8, 4)]
    assert sorted(path.name for path in (whole / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]


class Regression(nn.Module):
    """Of vectors, with a loss that is not of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


@pytest.mark.parametrize("by_module", [True, False], ids=["a module", "a function"])
def test_a_run_of_vectors_with_a_criterion_of_ones_own_logs_every_step(
    by_module: bool, tmp_path: Path
) -> None:
    data = list(
        torch.randn(12, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    )
    pairs = [(row[0], row[1]) for row in data]
    with cl.launch(CONFIG, rank=0, world_size=1) as context:
        model = Regression().double() if by_module else Regression
        engine = cl.initialize(model, context=context, criterion=squares)
        run = cl.Run(tmp_path, engine)
        losses = [float(run.step(batch).loss) for batch in run.batches(pairs, steps=4, global_batch=4)]
        report = engine.memory_report()
    assert len(losses) == 4
    assert [row["loss"] for row in rows(tmp_path / "metrics.jsonl")] == pytest.approx(losses, rel=1e-12)
    assert {row.kind for row in report} >= {"weights", "gradients", "optimizer", "activations"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_run_goes_on_to_the_same_rows_evaluations_of_its_last_step_included(
    rank: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_world(looped, 2, str(tmp_path), dict(at=6, rank=rank, facts={"width": 8}))
    assert [row["ended"] for row in ended] == [0, 0] and [*ended[0]["valid"]] == [3, 6]
    manifest = inspect(listed(tmp_path / "checkpoints")[0])
    assert (manifest.step, manifest.samples) == (6, 24)
    order = {"global_batch": 4, "shuffle": True, "drop_last": True, "labels": "shifted"}
    assert manifest.extra == {"facts": {"width": 8}, "data": {"samples": 22, **order}}
    capsys.readouterr()
    again = run_world(looped, 2, str(tmp_path), dict(facts={"width": 9}))
    assert [*again[0]["losses"]] == [7, 8, 9]
    said = capsys.readouterr().out
    assert (
        f"resumed from {tmp_path}/checkpoints/step-00000006: step 6, 24 samples" in said and "width" in said
    )
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_a_resumed_run_tells_of_data_in_another_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(torch.full((6,), float(i)).double(), torch.ones(6).double()) for i in range(10)]
    for steps, options in ((2, {}), (3, {}), (4, dict(shuffle=False, global_batch=2))):
        with cl.launch(CONFIG, rank=0, world_size=1) as context:
            engine = cl.initialize(Regression().double(), context=context, criterion=squares)
            run = cl.Run(tmp_path, engine)
            for batch in run.batches(pairs, steps=steps, **{"global_batch": 4, **options}):
                run.step(batch)
        told = [line for line in capsys.readouterr().out.splitlines() if "data." in line]
        assert len(told) == len(options)
    assert "data.shuffle was True, is False: later steps differ" in told[1]


def test_a_run_goes_on_on_another_mesh(whole: Path, tmp_path: Path) -> None:
    run_world(looped, 2, str(tmp_path), dict(at=5, config=dict(zero=dict(stage=3))))
    run_world(looped, 2, str(tmp_path), dict(config=dict(parallel=dict(tensor=2))))
    found, truth = rows(tmp_path / "metrics.jsonl"), rows(whole / "metrics.jsonl")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in truth], rel=1e-12)
    run_world(looped, 1, str(tmp_path), {})
    assert rows(tmp_path / "metrics.jsonl") == found, "the run is complete: nothing is trained again"


@pytest.mark.parametrize(
    "steps, told",
    [(9, "complete: 9 of 9 steps, nothing to do"), (3, "already at step 9 of 3, nothing to do")],
)
def test_a_run_that_has_made_its_steps_says_so_and_changes_nothing(
    steps: int, told: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (found,) = run_world(looped, 1, str(folder), dict(steps=steps))
    assert (found["losses"], found["ended"]) == ({}, None)
    assert f"[rank 0] {told}" in capsys.readouterr().out.splitlines()
    for name in ("metrics.jsonl", "run.json", "trace.json", "report.html"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_a_loop_that_breaks_has_its_last_step_saved(tmp_path: Path) -> None:
    run_world(looped, 2, str(tmp_path), dict(leave=6))
    assert [inspect(path).step for path in listed(tmp_path / "checkpoints")] == [6, 4]


def fitted(env: RankEnv, folder: str) -> None:
    with env.launch(CONFIG) as context:
        cl.fit(
            engine_in(context), TRAIN, directory=folder, global_batch=4, steps=9, valid=VALID, save_every=4,
            evaluate_every=3,
        )  # fmt: skip


def test_fit_leaves_what_the_loop_leaves(whole: Path, tmp_path: Path) -> None:
    run_world(fitted, 2, str(tmp_path))
    for name in ("metrics.jsonl", "evaluation.jsonl", "run.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert len(listed(tmp_path / "checkpoints")) == 3


def evaluations_of_fit(env: RankEnv, folder: str) -> list[list[int]]:
    found = []
    with env.launch(CONFIG) as context:
        for n, every in enumerate((dict(save_every=2), {}, dict(save_every=2, evaluate_every=3))):
            directory = f"{folder}/{n}"
            cl.fit(
                engine_in(context), TRAIN, directory=directory, global_batch=4, steps=5, valid=VALID, **every
            )
            found.append([row["step"] for row in rows(Path(directory) / "evaluation.jsonl")])
    return found


def test_fit_evaluates_with_each_save_unless_it_is_told_and_after_the_last_step(tmp_path: Path) -> None:
    assert run_world(evaluations_of_fit, 1, str(tmp_path)) == [[[2, 4, 5], [5], [3, 5]]]


def logged_use(env: RankEnv, folder: str) -> list[tuple[float, float]]:
    """For each step its mfu, and that of one rank's peak by the tokens a second of its row."""
    with patch("colossal_lite.engine.run.device_peak_flops", lambda *_: 1e9), env.launch(CONFIG) as context:
        run = cl.Run(folder, engine_in(context), flops_per_token=1e3)
        for batch in run.batches(TRAIN, global_batch=4, steps=2):
            run.step(batch)
    return [(row["mfu"], 1e3 * row["tokens_per_s"] / 1e9) for row in rows(Path(folder) / "timing.jsonl")]


def test_the_use_of_peak_flops_is_that_of_all_ranks_together(tmp_path: Path) -> None:
    for whole_use, of_one in run_world(logged_use, 2, str(tmp_path))[0]:
        assert whole_use == pytest.approx(of_one / 2, rel=1e-9)


def fails_to_save(env: RankEnv, folder: str) -> tuple[int, Any]:
    with pytest.raises(cl.Stopped) as stopped, env.launch(CONFIG) as context:
        run = cl.Run(folder, engine_in(context))
        run.checkpoints = Path("/sys/kernel/checkpoints")
        for batch in run.batches(TRAIN, global_batch=4, steps=2):
            run.step(batch)
    return stopped.value.step, stopped.value.code


def test_a_last_save_that_fails_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_world(fails_to_save, 2, str(tmp_path)) == [(2, 4)] * 2
    assert capsys.readouterr().out.count("NOT SAVED: ") == 1, "tried once"


def own_steps(env: RankEnv, folder: str) -> list[int]:
    """A loop in the Colossal-AI manner."""
    with env.launch(CONFIG) as context:
        engine = engine_in(context)
        run = cl.Run(folder, engine, save_every=2)
        for inputs, labels in run.batches(TRAIN, global_batch=4, steps=3):
            loss = torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten())
            engine.backward(loss, count=labels.numel())
            engine.step()
    return [row["step"] for row in rows(Path(folder) / "metrics.jsonl")]


def test_time_of_an_evaluation_by_hand_is_in_no_step_and_a_loop_without_counts_has_no_rate(
    tmp_path: Path,
) -> None:
    """Both were in timing.jsonl: seconds of other work, and 0 tokens a second."""
    spans_ns: list[int] = []
    with cl.launch(CONFIG | dict(backend="gloo")) as context:
        engine = engine_in(context)
        run = cl.Run(tmp_path, engine)
        engine.on_evaluation(spans_ns.append)
        for inputs, labels in run.batches(TRAIN, global_batch=4, steps=3):
            if engine.steps == 1:
                began_ns = time.perf_counter_ns()
                for _ in range(30):
                    engine.eval_step((inputs, labels))
            if engine.steps == 2:
                engine.backward(
                    torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten())
                )
                engine.step()
            else:
                run.step((inputs, labels))
            if engine.steps == 2:
                whole_s = (time.perf_counter_ns() - began_ns) / 1e9
    _, second, last = rows(tmp_path / "timing.jsonl")
    assert len(spans_ns) == 30 and second["step_s"] < whole_s - sum(spans_ns) / 2e9
    assert second["tokens_per_s"] > 0 and last["tokens_per_s"] is None


def test_steps_of_a_loop_of_ones_own_are_logged_and_saved_too(tmp_path: Path) -> None:
    assert run_world(own_steps, 2, str(tmp_path)) == [[1, 2, 3]] * 2
    assert [inspect(path).step for path in listed(tmp_path / "checkpoints")] == [3, 2]


# ------------------------------------------------------------------------------------------- what is refused


def refused(env: RankEnv, folder: str, how: str) -> str:
    with env.launch(CONFIG) as context, pytest.raises(ValueError) as error:
        engine = engine_in(context)
        if how == "every":
            cl.Run(folder, engine, save_every=0)
        if how == "facts differ":
            cl.Run(folder, engine, facts={"rank": env.rank})
        if how == "every differs":
            cl.Run(folder, engine, save_every=2 + env.rank)
        if how == "fresh differs":
            cl.Run(folder, engine, fresh=env.rank == 1)
        if how == "facts":
            cl.Run(folder, engine, facts={"model": SHAPE})
        if how == "one rank":
            cl.Run(folder + "/there" if env.rank else "/sys/kernel/run", engine)
        if how == "log":
            cl.Run(folder, engine, log=["mlflow"])
        if how == "no package":
            with patch.dict(sys.modules, {} if env.rank else {"wandb": None}):
                cl.Run(folder, engine, log=["wandb"])
        run = cl.Run(folder, engine)
        if how == "report":
            run.report()
        if how == "steps":
            run.batches(TRAIN, global_batch=4, steps=0)
        if how == "half":
            run.batches(TRAIN, global_batch=4, steps=6.0)  # type: ignore[arg-type]
        if how == "fit steps":
            cl.fit(engine, TRAIN, directory=folder + "/other", steps="6", global_batch=4)  # type: ignore[arg-type]
        if how == "fit every":
            cl.fit(engine, TRAIN, directory=folder + "/other", steps=6, evaluate_every=-1, global_batch=4)
        if how == "fit name":
            cl.fit(engine, TRAIN, directory=folder + "/other", steps=6, batchsize=3)
        if how == "fit start":
            cl.fit(engine, TRAIN, directory=folder + "/other", steps=6, global_batch=4, start=4)
        if how == "name":
            run.batches(TRAIN, global_batch=4, steps=6, suffle=False)
        if how == "evaluate name":
            run.evaluate(VALID, global_batch=4, num_workers=1)
        if how == "unused":
            for _ in run.batches(TRAIN, global_batch=4, steps=3):
                continue
        if how == "labels":
            run.evaluate([(row[:-1], torch.full((8,), -100)) for row in TOKENS], global_batch=4)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("every", "save_every: 0; legal: 1 or more steps"),
        (
            "facts differ",
            "facts: rank is 1 on rank 1, 0 on rank 0; legal: the same on every rank",
        ),
        ("every differs", "save_every: 3 on rank 1, 2 on rank 0; legal: the same on every rank"),
        ("fresh differs", "fresh: True on rank 1, False on rank 0; legal: the same on every rank"),
        ("facts", "facts: 'model': Object of type GPTConfig is not JSON serializable; legal: a dict of"),
        ("one rank", "directory: rank 0 cannot write to /sys/kernel/run: "),
        ("log", "log: mlflow; legal: tensorboard, wandb"),
        (
            "no package",
            'log: import of wandb halted; None in sys.modules; legal after: pip install -e ".[log]"',
        ),
        ("report", "/run has no step yet; legal: a call after the first step"),
        ("steps", "steps: 0; legal: 1 or more"),
        ("half", "steps: 6.0; legal: 1 or more whole steps"),
        ("fit steps", "steps: '6'; legal: 1 or more whole steps"),
        ("fit every", "evaluate_every: -1; legal: 1 or more steps, or None"),
        ("fit name", "fit: unknown argument 'batchsize'; legal: directory, steps, valid, "),
        ("fit name", "did you mean 'global_batch'?"),
        ("fit start", "fit: unknown argument 'start'; legal: "),
        ("name", "run.batches: unknown argument 'suffle'; legal: steps, global_batch, shuffle, "),
        ("name", "did you mean 'shuffle'?"),
        ("evaluate name", "run.evaluate: unknown argument 'num_workers'; legal: "),
        ("evaluate name", "did you mean 'workers'?"),
        ("unused", "a batch was given, and no step was made with it; legal: one run.step(batch)"),
        ("labels", "evaluate: no label of the dataset counts"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(how: str, says: str, tmp_path: Path) -> None:
    assert all(says in text for text in run_world(refused, 2, str(tmp_path / "run"), how))


def test_the_next_run_of_an_engine_ends_the_one_before_and_saves_its_last_step(tmp_path: Path) -> None:
    """Before, both logged and saved each further step."""
    assert run_world(ran_twice, 2, str(tmp_path)) == [([1, 2, 3], [4, 5], [3], [5])] * 2


def ran_twice(env: RankEnv, folder: str) -> tuple[list[int], list[int], list[int], list[int]]:
    """The steps that each run has logged and saved."""
    first, second = Path(folder) / "first", Path(folder) / "second"
    with env.launch(CONFIG | dict(backend="gloo")) as context:
        engine = engine_in(context)
        run = cl.Run(first, engine)
        batches = run.batches(TRAIN, global_batch=4, steps=6)
        for _, batch in zip(range(2), batches, strict=False):
            run.step(batch)
        with pytest.raises(ValueError, match="log: mlflow"):
            cl.Run(second, engine, log=["mlflow"])
        run.step(next(batches))
        with pytest.raises(ValueError, match="labels"):
            cl.fit(engine, TRAIN, directory=second, steps=5, global_batch=4, labels="none")
        cl.fit(engine, TRAIN, directory=second, steps=5, global_batch=4)
        late: list[Callable[[], object]] = [
            lambda: next(batches), lambda: run.step(batch), lambda: run.evaluate(TRAIN), run.save,
            lambda: run.batches(TRAIN, global_batch=4, steps=9),
        ]  # fmt: skip
        for call in late:
            with pytest.raises(ValueError, match="first ended when another of its engine began"):
                call()
    logged = ([row["step"] for row in rows(each / "metrics.jsonl")] for each in (first, second))
    saved = ([inspect(path).step for path in listed(each / "checkpoints")] for each in (first, second))
    return *logged, *saved  # type: ignore[return-value]


UNEVEN: dict[str, tuple[int, dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "valid": (
        4, dict(tensor=dict(size=4, mode="2d")), dict(valid=5),
        "valid: 5 samples in batches of 4: a batch of 1 has a micro-batch of 1, cut into 2 equal parts; legal: 4 or 6 "
        "samples",
        dict(valid=6),
    ),
    "drop_last": (
        2, dict(pipeline=dict(size=2, micro_batches=4)), dict(drop_last=False),
        "dataset: 22 samples in batches of 4: a batch of 2 gives a data rank fewer samples than micro_batches=4 x 1 "
        "accumulated parts; legal: 20 or 24 samples, drop_last=True, micro_batches=None in parallel.pipeline",
        dict(pipeline=dict(size=2), drop_last=False),
    ),
    "no later batch": (2, dict(pipeline=dict(size=2, micro_batches=4)), dict(drop_last=False, steps=5), "", {}),
}  # fmt: skip
"""ranks, parallel, further arguments, the refusal, and what it names as legal"""


def fits_or_not(env: RankEnv, parallel: dict[str, Any], folder: str, how: dict[str, Any]) -> tuple[int, str]:
    """Steps that `fit` has made, and its refusal."""
    valid = VALID[: how.pop("valid")] if "valid" in how else None
    parallel = {axis: how.pop(axis, size) for axis, size in parallel.items()}
    with env.launch(CONFIG | dict(parallel=parallel)) as context:
        engine = cl.initialize(lambda: cl.models.GPT(replace(SHAPE, layers=2)), context=context)
        try:
            cl.fit(engine, TRAIN, directory=folder, valid=valid, **(dict(steps=6, global_batch=4) | how))
        except ValueError as error:
            return engine.steps, str(error)
        return engine.steps, ""


@pytest.mark.parametrize("case", UNEVEN)
def test_a_last_batch_that_cannot_be_cut_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    ranks, parallel, how, says, legal = UNEVEN[case]
    for made, told in run_world(fits_or_not, ranks, parallel, str(tmp_path / "one"), how):
        assert told == says and made == (0 if says else how["steps"])
    for made, told in run_world(fits_or_not, ranks, parallel, str(tmp_path / "two"), how | legal):
        assert told == "" and made == how.get("steps", 6)


def test_a_dataset_of_another_length_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    run_world(looped, 1, str(tmp_path), dict(leave=3))
    with pytest.raises(
        WorldError, match=r"dataset: 20 samples, and 22 when .* legal: the dataset of then, or a new"
    ):
        run_world(looped, 1, str(tmp_path), dict(samples=20))
    run_world(looped, 1, str(tmp_path), dict(steps=4))
    assert inspect(listed(tmp_path / "checkpoints")[0]).step == 4, "nothing is lost"


def begins_anew(env: RankEnv, folder: str) -> int:
    with env.launch(CONFIG) as context:
        engine = engine_in(context)
        run = cl.Run(folder, engine, fresh=True)
        for batch in run.batches(TRAIN, global_batch=4, steps=2):
            run.step(batch)
        return engine.steps


def test_fresh_sets_earlier_checkpoints_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_world(looped, 2, str(tmp_path), dict(steps=3))
    assert run_world(begins_anew, 2, str(tmp_path)) == [2, 2]
    assert f"fresh: earlier checkpoints are in {tmp_path}/checkpoints.1" in capsys.readouterr().out
    assert inspect(listed(tmp_path / "checkpoints.1")[0]).step == 3
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_facts_that_are_no_number_are_the_same_on_every_rank(tmp_path: Path) -> None:
    """They once were refused on one rank: "x is nan on rank 0, nan on rank 0"."""
    with cl.launch(CONFIG, rank=0, world_size=1) as context:
        cl.Run(tmp_path, engine_in(context), facts={"x": float("nan")}).save()
    assert math.isnan(inspect(listed(tmp_path / "checkpoints")[0]).extra["facts"]["x"])
