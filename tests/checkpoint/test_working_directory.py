"""A run in a relative folder stays there when the script changes its working directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import colossal_lite as cl
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
