"""A run in a relative folder stays there when the script changes its working directory."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.files import folder_given
from colossal_lite.launcher.start import launch_gang, serve_gangs
from colossal_lite.many.trainer import train
from tests.many import tasks as own
from tests.shared.pool import RankEnv, run_world


def run_moves(env: RankEnv, first: str, then: str) -> None:
    """Four steps of a run, with a change of directory after the first."""
    os.chdir(first)
    with env.launch(dict(precision="fp32", checkpoint=dict(keep=9))) as context:
        torch.manual_seed(0)
        run = cl.Run("run", cl.initialize(torch.nn.Linear(4, 6), context=context), save_every=1)
        for batch in run.batches([(torch.ones(4), torch.tensor(1))] * 4, global_batch=4, steps=4):
            run.step(batch)
            os.chdir(then)


def loop_moves(env: RankEnv, first: str, then: str) -> str:
    """A loop by hand that resumes, changes directory, and is stopped by a signal in its first step."""
    os.chdir(first)
    with env.launch(dict(precision="fp32")) as context:
        torch.manual_seed(0)
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        engine.resume("run")
        os.chdir(then)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(cl.Stopped) as caught:
            engine.train_step((torch.ones(2, 4), torch.ones(2, dtype=torch.int64)))
    return str(caught.value.checkpoint)


def test_every_checkpoint_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    """Later ones once went to the new directory. The next resume took the old one, and said nothing."""
    first, then = tmp_path / "first", tmp_path / "then"
    first.mkdir(), then.mkdir()
    run_world(run_moves, 1, str(first), str(then))
    steps = sorted(path.name for path in (first / "run" / "checkpoints").glob("step-*"))
    assert steps == [f"step-{step:08}" for step in range(1, 5)] and not list(then.iterdir())


def test_a_signal_saves_where_the_loop_has_resumed_from(tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    first.mkdir(), then.mkdir()
    (saved,) = run_world(loop_moves, 1, str(first), str(then))
    assert saved == str(first / "run" / "step-00000001") and Path(saved).is_dir() and not list(then.iterdir())


@pytest.mark.parametrize("given", [None, 3, b"x", "", "a\0b"])
def test_what_can_be_no_folder_is_refused_by_name(given: Any) -> None:
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        calls = (engine.save, engine.load, engine.resume, engine.save_on_stop, lambda x: cl.Run(x, engine))
        for call in calls:
            with pytest.raises(ValueError, match=r"directory=.*; legal: the path of a folder"):
                call(given)


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named ~ was once made where the process works. There `rm -r ~` is near."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        engine.save("~/run")
        assert (tmp_path / "run" / "step-00000000").is_dir() and not (tmp_path / "~").exists()
        with pytest.raises(ValueError, match="directory='~nobody-of-this-name/run'.*Legal: an absolute path"):
            engine.resume("~nobody-of-this-name/run")
    on_disk = dict(precision="fp32", memory=dict(placement="disk", disk_dir="~/states"))
    (tmp_path / "states").mkdir()
    with cl.launch(on_disk, rank=0, world_size=1) as context:
        engine = cl.initialize(
            torch.nn.Linear(4, 6), context=context, criterion=torch.nn.functional.cross_entropy
        )
        assert engine.train_step((torch.ones(2, 4), torch.arange(2))).step == 1


def in_no_folder(env: RankEnv, folder: str) -> str:
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)
    try:
        folder_given("save", "relative")
    except ValueError as error:
        return f"{error}; {folder_given('save', folder)}"
    return ""


def test_a_relative_folder_is_refused_where_the_process_works_in_none(tmp_path: Path) -> None:
    ((told),) = run_world(in_no_folder, 1, str(tmp_path / "gone"))
    assert told.endswith(f"is gone. Legal: an absolute path; {tmp_path / 'gone'}")


def wanders() -> cl.models.GPT:
    os.chdir("/")
    return own.gpt()


def swept(env: RankEnv, folder: str) -> str:
    os.chdir(folder)
    try:
        with env.launch(dict(backend="gloo", timeout_s=60)) as context:
            result = train(
                [own.task("a", build=wanders, steps=3)], context, launch=launch_gang, serve=serve_gangs, prepare=dict,
                config=own.CONFIG, directory="relative",
            )  # fmt: skip
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it lives as long as its process, here a rank
    return f"{result['a'].status} {len(result['a'].losses)} {result.directory}"


def test_a_task_of_many_may_change_its_working_directory(tmp_path: Path) -> None:
    assert run_world(swept, 1, str(tmp_path)) == [f"done 3 {tmp_path / 'relative'}"]
