"""A disk that does not answer keeps nobody waiting for ever: who waits for a save or a load is told for what."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from colossal_lite.checkpoint import checkpointer, files
from colossal_lite.checkpoint.checkpointer import Checkpointer
from colossal_lite.checkpoint.files import LateError, listed, verify
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of

TIMEOUT_S = 0.2
SHAPE = (50, 7)


def disk(world_size: int = 1) -> Checkpointer:
    layout = MeshLayout.build(data=world_size)
    return Checkpointer(layout, 0, HashStore(), keep=3, timeout_s=TIMEOUT_S, heard=str)


def held_of(value: float) -> list[HeldTensor]:
    return [
        HeldTensor("model/a.weight", ShardSpec("model/a.weight", dims_of(SHAPE)), torch.full(SHAPE, value))
    ]


def facts(step: int) -> RunFacts:
    return RunFacts(step, step, 7, {"seed": 7}, None, {"a.weight": step}, {})


@pytest.fixture(autouse=True)
def slices_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "SLICE_BYTES", 600)
    monkeypatch.setattr(checkpointer, "GRACE_S", 0.1)
    monkeypatch.setattr(files, "GRACE_S", 0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return disk().save(tmp_path, held_of(1.0), facts(1), asynchronous=False).wait()


Stuck = Callable[[str], threading.Event]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    """Calls of one function of the system do not return before the event is set."""
    gate = threading.Event()

    def hold(name: str) -> threading.Event:
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (gate.wait(60), original(*args))[1])
        return gate

    yield hold
    gate.set()


def ends(gate: threading.Event, *names: str) -> None:
    """Let go of what is stuck, and wait for its threads."""
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            thread.join(20)
            assert not thread.is_alive()


def test_a_save_in_a_thread_whose_disk_does_not_answer_is_told_of_and_the_next_one_goes_on(
    tmp_path: Path, saved: Path, stuck: Stuck
) -> None:
    ours = disk()
    gate = stuck("fsync")
    saving = ours.save(tmp_path, held_of(2.0), facts(2), asynchronous=True)
    with pytest.raises(
        LateError, match=r"rank 0: its thread has been at .*\.tmp-step-00000002.*more than 0.2 s"
    ):
        saving.wait()
    assert not saving.is_done and listed(tmp_path) == [saved] and list(verify(saved)) == []
    ends(gate, "checkpoint")
    assert saving.wait().name == "step-00000002", "what comes to its end after all is there"
    assert ours.save(tmp_path, held_of(3.0), facts(3), asynchronous=True).wait().name == "step-00000003"


def test_a_late_save_that_nobody_has_waited_for_is_a_warning_of_the_next(
    tmp_path: Path, saved: Path, stuck: Stuck
) -> None:
    ours = disk()
    gate = stuck("fsync")
    ours.save(tmp_path, held_of(2.0), facts(2), asynchronous=True)
    with pytest.warns(UserWarning, match="checkpoint not saved: save: rank 0: its thread has been at"):
        ours.settle()
    ends(gate, "checkpoint")


def test_a_save_that_waits_for_another_rank_names_it_and_not_the_disk(tmp_path: Path) -> None:
    saving = disk(world_size=2).save(tmp_path, held_of(2.0), facts(2), asynchronous=True)
    with pytest.raises(CheckpointError, match="waited for 'rows 0' of ranks 1; timeout 0.2 s") as told:
        saving.wait()
    assert not isinstance(told.value, LateError)


def test_what_cannot_be_read_back_in_time_is_not_saved(tmp_path: Path, saved: Path, stuck: Stuck) -> None:
    gate = stuck("preadv")
    with pytest.raises(
        CheckpointError, match=r"written of tensor model/a.weight\[.*\] was not read in 0.2 s"
    ):
        disk().save(tmp_path, held_of(2.0), facts(2), asynchronous=False)
    assert listed(tmp_path) == [saved] and not list(tmp_path.glob(".tmp-*"))
    ends(gate, "checkpoint")


def test_a_load_whose_disk_does_not_answer_ends_and_no_other_load_follows_it(
    tmp_path: Path, saved: Path, stuck: Stuck
) -> None:
    newer = disk().save(tmp_path, held_of(2.0), facts(2), asynchronous=False).wait()
    ours, held = disk(), held_of(0.0)
    gate = stuck("preadv")
    with pytest.raises(
        LateError, match=rf"load: rank 0: {newer}.*tensor model/a.weight\[.*was not read in 0.2 s"
    ):
        ours.load(tmp_path, held, {"seed": 7})
    assert ours.is_mixed, "no step may begin"
    ends(gate, "checkpoint")
    assert held[0].tensor.any(), "a read that ends later does write into what was to be filled"
    with pytest.raises(LateError, match="start the run again"):
        ours.load(tmp_path, held, {"seed": 7})


def test_reads_that_are_on_their_way_when_a_load_passes_on_to_another_checkpoint_have_ended(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is damaged in its first slice, and its other slices come after that is known."""
    newer = disk().save(tmp_path, held_of(2.0), facts(2), asynchronous=False).wait()
    (file,) = newer.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1400] ^= 1  # of the first slice
    file.write_bytes(data)
    original, seen = os.preadv, list[int]()

    def slow(fd: int, buffers: Any, at: int) -> int:
        seen.append(fd)
        threading.Event().wait(0.05 if len(seen) in (2, 3) else 0.0)
        return original(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", slow)
    held = held_of(0.0)
    loaded = disk().load(tmp_path, held, {"seed": 7})
    assert loaded is not None and loaded.path == saved and len(loaded.skipped) == 1
    assert torch.equal(held[0].tensor, held_of(1.0)[0].tensor)


def test_verify_names_the_slice_that_is_not_read_and_ends(
    saved: Path, stuck: Stuck, monkeypatch: Any
) -> None:
    monkeypatch.setattr(files.stream, "__kwdefaults__", {"places": (), "timeout_s": TIMEOUT_S})
    gate = stuck("preadv")
    (said,) = verify(saved)
    assert "tensor model/a.weight" in said and "was not read in 0.2 s (timeout_s): the disk does not" in said
    ends(gate, "checkpoint")
