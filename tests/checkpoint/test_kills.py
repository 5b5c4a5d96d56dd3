"""SIGKILL at random moments of saving: what was acknowledged is there and whole, nothing torn is seen."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from colossal_lite.checkpoint import checkpointer
from colossal_lite.checkpoint.checkpointer import Checkpointer
from colossal_lite.checkpoint.files import inspect, listed, tensors, verify
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import Factor, Shard, ShardSpec
from tests.shared.pool import RankEnv, WorldError, run_world

ROWS, COLUMNS = 64, 4096
LATEST_S = 0.25


def save_until_killed(env: RankEnv, folder: str, start: int, delay_s: float, asynchronous: bool) -> None:
    """Save steps start + 1, start + 2, ... of a tensor cut over the ranks; tell each that is done; die."""
    layout = MeshLayout.build(tensor=env.world_size)
    rows = Factor("rows", ROWS)
    spec = ShardSpec("w", (((rows,),), ((Factor("columns", COLUMNS),),)), (("tensor", Shard("rows")),))
    disk = Checkpointer(layout, env.rank, env.store, keep=2, timeout_s=20, heard=str)
    local = torch.empty(spec.local_shape(layout))
    checkpointer.SLICE_BYTES, checkpointer.FILE_BYTES = 2**17, 2**18
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(start + 1, start + 1000):
        held = [HeldTensor("model/w", spec, local.fill_(step))]
        saving = disk.save(
            Path(folder), held, RunFacts(step, step, 0, {}, None, {}, {}), asynchronous=asynchronous
        )
        local.fill_(-1)  # what training does to the weights while a thread writes
        name = saving.wait().name
        if env.rank == 0:
            with open(f"{folder}/acknowledged", "a") as log:
                log.write(f"{name}\n")


def kill_and_check(folder: Path, chance: random.Random, world_size: int) -> str:
    """One killed run; what the kill met: "between" two saves, or a save in "files" or near its "end"."""
    steps = [inspect(path).step for path in listed(folder)]
    with pytest.raises(WorldError) as caught:
        delay_s = chance.uniform(0, LATEST_S)
        run_world(
            save_until_killed, world_size, str(folder), max(steps, default=0), delay_s, chance.random() < 0.5
        )
    # A rank that has not come so far yet when the other dies is killed by the pool, which is as good.
    assert caught.value.ranks("died") and not caught.value.ranks("raised"), caught.value
    found = listed(folder)
    for path in found:
        assert list(verify(path)) == [], "a torn checkpoint is visible"
        manifest = inspect(path)
        w = tensors(path, manifest, ["model/w"])["model/w"]
        assert (w == manifest.step).all(), "a checkpoint holds the state of another step"
    log = folder / "acknowledged"
    acknowledged = log.read_text().splitlines() if log.exists() else []
    names = [path.name for path in found]
    assert not acknowledged or names[0] >= acknowledged[-1], "an acknowledged checkpoint is lost"
    assert len(names) >= min(2, len(acknowledged)), "more were deleted than keep=2 allows"
    hidden = [path for path in folder.glob(".tmp-step-*")]
    assert len(hidden) <= 1, "what a killed run left is not taken away by the next"
    return "between" if not hidden else "end" if (hidden[0] / "manifest.json").exists() else "files"


def campaign(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """How many of so many killed runs met what, each checked."""
    chance, met = random.Random(seed), {"between": 0, "files": 0, "end": 0}
    for number in range(kills):
        met[kill_and_check(folder, chance, 1 if number % 4 else 2)] += 1
    return met


def test_20_kills_lose_nothing(tmp_path: Path) -> None:
    met = campaign(tmp_path, 20, seed=1)
    assert met["files"] + met["end"] >= 5, f"the kills missed the saves: {met}"


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_300_kills_lose_nothing(tmp_path: Path) -> None:
    met = campaign(tmp_path, 300, seed=2)
    assert met["files"] + met["end"] >= 75, f"the kills missed the saves: {met}"
