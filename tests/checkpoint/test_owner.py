"""A folder of checkpoints has one owner: a living one is refused by name, a dead one is taken over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint import owner
from colossal_lite.checkpoint.files import listed
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.checkpoint.owner import OWNER, FolderClaims
from tests.shared.pool import RankEnv, run_world

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = dict(precision="fp32", optimizer=dict(type="sgd", lr=0.1), timeout_s=30)
HOLDER = """
import sys, time, warnings
from pathlib import Path
from colossal_lite.checkpoint.owner import FolderClaims

warnings.simplefilter("ignore")
held = []
for number, folder in enumerate(sys.argv[2:]):
    while time.time() < float(sys.argv[1]) + 0.05 * number:  # all processes begin in the same moment
        continue
    held.append(FolderClaims())
    print(held[-1].run, held[-1].claim(Path(folder)), sep="|", flush=True)
sys.stdin.read()
"""


@contextmanager
def holders(count: int, folders: Sequence[Path]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that claim each folder at the same moment, and hold what they have got."""
    began = time.time() + 1.0 + 0.3 * count
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(began), *map(str, folders)],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=pipe, stdout=pipe, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str], lines: int) -> list[tuple[str, str]]:
    """(run, refusal) for each folder."""
    assert process.stdout is not None
    rows = [process.stdout.readline().rstrip("\n").partition("|") for _ in range(lines)]
    return [(run, refusal) for run, _, refusal in rows]


def dead(folder: Path, *, machine: str = "") -> str:
    """An owner that has ended; its run."""
    row = json.loads(owner.this_process("deadbeef").encode())
    row |= {"started": "1", "machine": machine or row["machine"]}
    folder.mkdir()
    (folder / OWNER).write_text(json.dumps(row))
    return "deadbeef"


@pytest.mark.parametrize("stale", [False, True])
def test_of_runs_that_begin_at_once_20_times_one_owns_the_folder(stale: bool, tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{number}" for number in range(20)]
    if stale:
        for folder in folders:
            dead(folder)
    with holders(3, folders) as processes:
        found = [said(process, len(folders)) for process in processes]
        for rows in zip(*found, strict=True):
            winners = [run for run, refusal in rows if not refusal]
            assert len(winners) == 1
            assert all(f"belongs to run {winners[0]}, " in refusal for _, refusal in rows if refusal)


def test_a_folder_that_another_run_creates_meanwhile_is_a_folder(tmp_path: Path) -> None:
    """Two looks at a path once took one that came between them for a file."""
    folder, ended = tmp_path / "run", threading.Event()

    def comes_and_goes() -> None:
        while not ended.is_set():
            folder.mkdir()
            folder.rmdir()

    thread = threading.Thread(target=comes_and_goes)
    thread.start()
    try:
        assert {owner._no_folder(folder) for _ in range(20_000)} == {""}
    finally:
        ended.set()
        thread.join()


def resumes(env: RankEnv, folder: str) -> str:
    with env.launch(CONFIG) as context:
        model = cl.models.GPTConfig(vocabulary=8, layers=1, heads=1, width=4, sequence=4)
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        with pytest.raises(ValueError) as caught:
            engine.resume(folder)
        assert engine.steps == 0
        return str(caught.value)


def saves(env: RankEnv, folder: str) -> str:
    with pytest.raises(cl.Stopped), env.launch(CONFIG) as context:
        model = cl.models.GPTConfig(vocabulary=8, layers=1, heads=1, width=4, sequence=4)
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        with pytest.raises(CheckpointError) as caught:
            engine.save(folder)
    return str(caught.value)


def test_a_living_owner_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    with holders(1, [tmp_path]) as (holder,):
        ((run, refusal),) = said(holder, 1)
        assert not refusal
        for text in run_world(resumes, 2, str(tmp_path)) + run_world(saves, 1, str(tmp_path)):
            assert f"{tmp_path} belongs to run {run}, process {holder.pid} on " in text
            assert "which is running" in text
    assert listed(tmp_path) == []


def test_a_copy_of_a_living_folder_is_refused_with_what_to_do_and_resumes_then(tmp_path: Path) -> None:
    with holders(1, [tmp_path / "own"]) as (holder,):
        said(holder, 1)
        copy = Path(shutil.copytree(tmp_path / "own", tmp_path / "copy"))
        for text in run_world(resumes, 2, str(copy)):
            assert "or a copy without its owner.json" in text
        (copy / OWNER).unlink()
        claims = FolderClaims()
        assert claims.claim(copy) == ""
        claims.close()


def goes_on(env: RankEnv, folder: str) -> list[str]:
    with env.launch(CONFIG) as context:
        model = cl.models.GPTConfig(vocabulary=8, layers=1, heads=1, width=4, sequence=4)
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        if env.rank == 0:
            with pytest.warns(UserWarning, match="belonged to run deadbeef, .* has ended: taken over"):
                engine.resume(folder)
        else:
            engine.resume(folder)
        engine.save(folder)
        context.mesh.world.barrier()
        found = sorted(path.name for path in Path(folder).iterdir())
        context.mesh.world.barrier()  # rank 0 gives the folder back when it leaves
        return found


def test_a_dead_owner_is_taken_over_and_only_what_it_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = dead(folder)
    (folder / f".tmp-step-00000003-{run}-0123").mkdir()
    (folder / ".tmp-step-00000003-another-0123").mkdir()
    (folder / ".tmp-mine").touch()
    kept = [".tmp-mine", ".tmp-step-00000003-another-0123"]
    assert run_world(goes_on, 2, str(folder)) == [[*kept, OWNER, "step-00000000"]] * 2
    assert not (folder / OWNER).exists(), "it is given back"


def test_an_owner_on_another_host_lives_as_long_as_it_touches_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "STALE_S", 1.0)
    monkeypatch.setattr(owner, "BEAT_S", 0.2)
    away = tmp_path / "away"
    dead(away, machine="another boot")
    with pytest.warns(UserWarning, match="taken over"):
        assert FolderClaims().claim(away) == ""
    ours = FolderClaims()
    assert ours.claim(tmp_path / "here") == ""
    monkeypatch.setattr(owner, "_machine", lambda: "a third boot")
    monkeypatch.setattr(owner, "_started", lambda pid: "2")
    refused = FolderClaims().claim(tmp_path / "here")
    assert f"belongs to run {ours.run}" in refused
    ours.close()
    assert FolderClaims().claim(tmp_path / "here") == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run":"x"}', "[" * 5000, '{"pid":{}}'])
def test_a_file_without_an_owner_in_it_is_taken_over(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "EMPTY_S", 0.3)
    (tmp_path / OWNER).write_text(text)
    with pytest.warns(UserWarning, match="taken over"):
        assert FolderClaims().claim(tmp_path) == ""


def test_a_run_that_was_taken_over_saves_no_more(tmp_path: Path) -> None:
    ours = FolderClaims()
    assert ours.claim(tmp_path) == ""
    (tmp_path / OWNER).unlink()
    with holders(1, [tmp_path]) as (holder,):
        ((run, _),) = said(holder, 1)
        assert f"belongs to run {run}" in ours.claim(tmp_path)
        ours.close()
        assert (tmp_path / OWNER).exists(), "what is another's is not removed"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with pytest.warns(UserWarning, match=f"belonged to run {run}"):
            assert ours.claim(tmp_path) == ""


PLACES = {
    "a link to nowhere": ("run", "/run is a link to nowhere, which is not there"),
    "a link to itself": ("ring", "ring is a link to ring, which is not there"),
    "in a file": ("file/run", "file is no folder"),
    "a folder for the owner": (
        "taken",
        "owner.json is a folder, in the place of the file that names the owner",
    ),
}


def placed(env: RankEnv, folder: str) -> list[str]:
    """What a save and a resume say of a folder that cannot be made."""
    told = []
    with pytest.raises(cl.Stopped), env.launch(CONFIG) as context:  # its last save has failed
        engine = cl.initialize(torch.nn.Linear(2, 2), context=context)
        for call in (engine.save, engine.resume):
            with pytest.raises((CheckpointError, ValueError)) as caught:
                call(folder)
            told.append(str(caught.value))
    return told


@pytest.mark.parametrize("kind", PLACES)
def test_a_folder_that_cannot_be_made_is_refused_with_what_is_there(kind: str, tmp_path: Path) -> None:
    """A link to nowhere once said `File exists`, and a resume from it began a run that could not be saved."""
    (tmp_path / "run").symlink_to("nowhere")
    (tmp_path / "ring").symlink_to("ring")
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "owner.json").mkdir(parents=True)
    name, words = PLACES[kind]
    ((save, resume),) = run_world(placed, 1, str(tmp_path / name))
    assert words in save and words in resume and "resume:" in resume


def saved_within(env: RankEnv, folder: str, renamed: bool) -> tuple[str, str]:
    """What a save into a checkpoint says, and what one to the folder that it names does."""
    with env.launch(CONFIG) as context:
        engine = cl.initialize(torch.nn.Linear(2, 2), context=context)
        place = engine.save(folder).wait()
        if renamed:
            place = place.rename(place.with_name("best"))
        with pytest.raises(CheckpointError) as caught:
            engine.save(place)
        assert f"legal: {folder}, or" in str(caught.value)
        return str(caught.value), engine.save(folder).wait().name


@pytest.mark.parametrize(("renamed", "name"), [(False, "step-00000000-2"), (True, "step-00000000")])
def test_a_save_into_a_checkpoint_itself_is_refused(renamed: bool, name: str, tmp_path: Path) -> None:
    """It was once written there, and a resume of either folder went on from the one before."""
    ((told, then),) = run_world(saved_within, 1, str(tmp_path), renamed)
    assert "is itself a checkpoint, or named as one" in told and then == name
