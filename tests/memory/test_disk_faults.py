"""Tests disk faults: a run makes a correct step or raises an error with a remedy, and its last checkpoint is intact."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.config.errors import ConfigError
from colossal_lite.engine.engine import Engine
from colossal_lite.memory import disk_file
from colossal_lite.memory.disk_file import DiskError, DiskFile
from tests.offload.test_optimizer_states import ADAMW, on_disk
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import BITS, SMALL, assert_same_bits, bits

# Several records of several pages; and, in float32, masters that are the weights themselves.
CASE = Case(config=dict(precision="bf16", optimizer=ADAMW), chunk_bytes=SMALL // 2, global_batch=4)


def file_of(engine: Engine) -> DiskFile:
    tiers = engine._optimizer.tiers
    assert tiers is not None and tiers.disk is not None and tiers.disk.file is not None
    return tiers.disk.file


def step(engine: Engine, case: Case, number: int) -> float:
    inputs, labels = case.batch(number)
    cut = engine.context.local_batch(case.global_batch)
    return float(engine.train_step((inputs[cut], labels[cut])).loss)


# ---- a correct step ----


@contextmanager
def halting() -> Iterator[None]:
    """System calls that do some of what they are asked for, in pages or not."""
    counts = cycle((4096, 100, 10**9, 1, 8191))

    def read_some(fd: int, view: memoryview, offset: int) -> int:
        found = os.pread(fd, -(-len(view) // 4096) * 4096, offset)[: min(len(view), next(counts))]
        view[: len(found)] = found
        return len(found)

    with (
        patch.object(disk_file, "_read_some", read_some),
        patch.object(DiskFile, "_fd", lambda self, done: self._fds[0]),
    ):
        yield


def halting_bits(env: RankEnv, case: Case) -> Any:
    with halting():
        return bits(env, case)


def bits_without_a_directory(env: RankEnv, case: Case) -> Any:
    """The directory goes while the run is on."""
    forward_backward = Engine.forward_backward

    def after_it_is_gone(self: Engine, batch: Any) -> Any:
        shutil.rmtree(case.config["memory"]["disk_dir"], ignore_errors=True)
        return forward_backward(self, batch)

    with patch.object(Engine, "forward_backward", after_it_is_gone):
        return bits(env, case)


@pytest.mark.parametrize("run", [halting_bits, bits_without_a_directory])
def test_p9_short_reads_and_a_directory_that_goes_do_not_change_a_bit(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    case = replace(BITS, world_size=1, config=BITS.config | dict(precision="bf16"))
    expected = run_world(bits, 1, case)
    (tmp_path / "states").mkdir()
    assert_same_bits(
        run_world(run, 1, replace(case, config=case.config | on_disk(tmp_path / "states"))), expected
    )


# ---- an error, and what follows ----


def _flipped(file: DiskFile) -> Any:
    (byte,) = os.pread(file._fds[0], 1, 5000)
    os.pwrite(file._fds[0], bytes([byte ^ 1]), 5000)


def _unreadable(file: DiskFile) -> Any:
    return patch.object(disk_file, "_read_some", side_effect=OSError(errno.EIO, "Input/output error"))


def _full(file: DiskFile) -> Any:
    return patch.object(
        disk_file, "_write_some", side_effect=OSError(errno.ENOSPC, "No space left on device")
    )


def _cut(file: DiskFile) -> Any:
    os.ftruncate(file._fds[0], file.layout.starts[-1] // 2)


FAULTS: dict[str, tuple[Callable[[DiskFile], Any], str]] = {
    "a flipped bit": (_flipped, "their checksum is"),
    "a read that fails": (_unreadable, "were not read: Input/output error"),
    "a disk that is full": (_full, "were not written: No space left on device"),
    "a file that is cut": (_cut, "the file ends after"),
}


def told(use: Callable[[], object]) -> str:
    try:
        use()
    except (DiskError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def struck(env: RankEnv, case: Case, directory: str, fault: str) -> list[str]:
    """What a run says of a fault in its second step, at the latest in the next, which pays what that owes; and of
    everything that is asked of it then."""
    found = list[str]()
    with suppress(cl.Stopped), env.launch(case.full_config) as context:  # ended by the last save, which fails
        engine = start(case, context)
        step(engine, case, 0)
        engine.save(directory)
        with FAULTS[fault][0](file_of(engine)) or nullcontext():
            first = told(lambda: [step(engine, case, number) for number in (1, 2)])
        engine.zero_grad()
        inputs, labels = case.batch(0)
        found += [
            first,
            told(lambda: step(engine, case, 1)),
            told(lambda: engine.eval_step((inputs, labels))),
            told(engine.full_state_dict),
            told(engine.full_optimizer_state),
            told(lambda: engine.save(directory)),
        ]
    return found


def continues(env: RankEnv, case: Case, directory: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps 1 and 2, after step 0 or a checkpoint of it."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        if directory is None:
            step(engine, case, 0)
        else:
            assert engine.load(directory).step == 1
        return [step(engine, case, number) for number in (1, 2)], engine.full_state_dict()


@pytest.mark.parametrize(
    ("fault", "precision"),
    [(fault, "bf16") for fault in FAULTS] + [("a flipped bit", "fp32"), ("a disk that is full", "fp32")],
)
def test_p9_a_fault_ends_the_run_in_words_and_the_last_checkpoint_goes_on(
    fault: str, precision: str, tmp_path: Path
) -> None:
    whole = replace(CASE, world_size=1, config=CASE.config | dict(precision=precision))
    case = replace(whole, config=whole.config | on_disk(tmp_path))
    directory = str(tmp_path / "checkpoints")
    (said,) = run_world(struck, 1, case, directory, fault)
    for text in said:
        assert FAULTS[fault][1] in text and "continue from the last checkpoint" in text, text
    assert (
        said[:-1] == [said[0]] * 5
        and said[0].startswith("DiskError")
        and said[-1].startswith("CheckpointError")
    )
    assert [path.name for path in Path(directory).iterdir()] == ["step-00000001"]
    (losses, weights), (true_losses, true_weights) = (
        run_world(continues, 1, case, directory)[0],
        run_world(continues, 1, whole, None)[0],
    )
    assert losses == true_losses
    assert all(torch.equal(value, weights[name]) for name, value in true_weights.items())


# ---- before step 1 ----


def without_room(env: RankEnv, case: Case) -> str:
    """Rank 1 has no room."""
    fails = patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with env.launch(case.full_config) as context, fails if env.rank == 1 else nullcontext():
        try:
            start(case, context)
        except ConfigError as error:
            return str(error)
    return "nothing"


def test_a_disk_without_room_is_told_on_every_rank_before_the_first_step(tmp_path: Path) -> None:
    case = replace(CASE, config=CASE.config | on_disk(tmp_path))
    said = run_world(without_room, 2, case)
    assert said[0] == said[1]
    assert f"memory.disk_dir = '{tmp_path}': rank 1: {tmp_path}: a file of " in said[0]
    assert "cannot be made: No space left on device; legal: an existing directory with room" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_told_on_every_rank(tmp_path: Path) -> None:
    case = replace(CASE, config=CASE.config | on_disk(tmp_path / "nowhere"))
    for text in run_world(without_room, 2, case):
        assert text.count("cannot be made: there is no such directory, so create it first; legal: ") == 2


# ---- whole reads and writes ----


def reloaded(env: RankEnv, case: Case) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Step 0, then other weights from outside, then step 1."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        step(engine, case, 0)
        before = engine.full_optimizer_state()
        engine.load_full_state_dict({name: value * 0.5 for name, value in engine.full_state_dict().items()})
        after = engine.full_optimizer_state()
        assert all(
            torch.equal(v, after[name][kind]) for name, state in before.items() for kind, v in state.items()
        )
        loss = step(engine, case, 1)
        return loss, engine.full_state_dict(), engine.full_optimizer_state()


def test_weights_from_outside_reach_the_masters_on_disk(tmp_path: Path) -> None:
    case = replace(CASE, config=CASE.config | dict(zero=dict(stage=1)))
    expected = run_world(reloaded, 2, case)
    for ours, theirs in zip(
        run_world(reloaded, 2, replace(case, config=case.config | on_disk(tmp_path))), expected, strict=True
    ):
        assert ours[0] == theirs[0]
        assert all(torch.equal(value, ours[1][name]) for name, value in theirs[1].items())
        assert all(
            torch.equal(v, ours[2][name][kind]) for name, s in theirs[2].items() for kind, v in s.items()
        )
