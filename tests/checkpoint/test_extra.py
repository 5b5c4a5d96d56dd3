"""What a user gives as `extra` comes back as it was at the save, or is refused by name on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.manifest import CheckpointError, ExtraError
from tests.shared.pool import RankEnv, run_world

BAD: Mapping[str, tuple[Any, str]] = {
    "tensor": ({"best": torch.ones(1)}, "extra: 'best': Object of type Tensor is not JSON serializable"),
    "key": ({"seen": {3: 5}}, "extra: 'seen': the key 3 would come back as a text"),
    "first key": ({3: 5}, "extra: 3: the key 3 would come back as a text"),
    "half a character": ({"name": "\ud800"}, "extra: 'name': 'utf-8' codec can't encode"),
    "list": ([1], "extra: list; legal: a dict of texts"),
    "half a key": ({"\ud800": 1}, "extra: '\\ud800': 'utf-8' codec can't encode"),
    "many names": ({f"k{i:09}": 1 for i in range(40000)}, "extra: "),
    "long": ({"all": "x" * (1 << 23)}, "extra: 4194304 characters at most"),
}


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    """A best loss that begins as infinity once came back as None."""
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        engine.save(tmp_path, extra=dict(best=math.inf, worst=[-math.inf], none=math.nan))
        loaded = engine.resume(tmp_path)
    assert loaded is not None
    extra = loaded.manifest.extra
    assert extra["best"] == math.inf and extra["worst"] == [-math.inf] and math.isnan(extra["none"])


def test_a_save_beside_training_has_the_extra_of_its_call(tmp_path: Path) -> None:
    """It once had what the dict was changed to before the thread wrote it."""
    config = dict(precision="fp32", checkpoint=dict(asynchronous=True))
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = cl.initialize(torch.nn.Linear(2000, 2000), context=context)
        kept = {"seen": [1]}
        saving = engine.save(tmp_path, extra=kept)
        kept["seen"].append(2)
        saving.wait()
        loaded = engine.resume(tmp_path)
    assert loaded is not None and loaded.manifest.extra == {"seen": [1]}


def refused(env: RankEnv, folder: str, kind: str, on: int | None) -> list[str]:
    """The words of a save whose `extra` is bad on some ranks, and of the save that follows."""
    with env.launch(dict(precision="fp32", timeout_s=20)) as context:
        torch.manual_seed(0)
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        said = []
        for extra in (BAD[kind][0] if on in (None, env.rank) else {}, {"good": [1]}):
            try:
                said.append(engine.save(folder, extra=extra).wait().name)
            except CheckpointError as error:
                assert isinstance(error, ExtraError) and isinstance(error, ValueError)
                said.append(str(error).splitlines()[-1].strip())
        if on is None:
            with pytest.raises(ExtraError):
                engine.save_on_stop(folder, extra=BAD[kind][0])
    return said


@pytest.mark.parametrize(("kind", "on"), [*((kind, None) for kind in BAD), ("tensor", 0)])
def test_what_no_manifest_holds_is_refused_on_every_rank_and_the_next_save_goes_on(
    kind: str, on: int | None, tmp_path: Path
) -> None:
    """The other ranks once waited for rank 0 until their timeout. Keys that are numbers came back as texts."""
    for bad, good in run_world(refused, 2, str(tmp_path), kind, on):
        assert bad.startswith(BAD[kind][1]) and "legal: a dict of texts" in bad
        assert good == "step-00000000"


@pytest.mark.parametrize("samples", [-1, 1.5, "3"])
def test_samples_that_no_run_has_used_are_refused(samples: Any, tmp_path: Path) -> None:
    """They once ended in a validation error of a library."""
    with cl.launch(dict(precision="fp32"), rank=0, world_size=1) as context:
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        with pytest.raises(ValueError, match="samples: .*; legal: 0 or more samples"):
            engine.save(tmp_path, samples=samples)


def stop_points_of(env: RankEnv, folder: str, on: int) -> tuple[list[str], dict[str, Any]]:
    """The folders of the stop point after saves, whose `extra` one rank has bad; and the `extra` after the second."""
    with env.launch(dict(precision="fp32", timeout_s=20)) as context:
        torch.manual_seed(0)
        engine = cl.initialize(torch.nn.Linear(4, 6), context=context)
        bad = {3: 5} if env.rank == on else {}
        folders, good = [f"{folder}/{name}" for name in "abc"], {"good": 1}
        points, extras = [], []
        for where, extra in zip(folders, (bad, good, bad), strict=True):
            try:
                engine.save(where, extra=extra).wait()
            except ExtraError:
                assert extra is bad and on == 0
            points.append(str(engine._state.stop_point.directory))
            extras.append(dict(engine._state.stop_point.extra))
        engine.save(folder).wait()
        assert points == folders
        return points, extras[-1]


@pytest.mark.parametrize("on", [0, 1])
def test_a_refused_extra_is_not_what_a_stop_saves_and_all_ranks_have_one_folder(
    on: int, tmp_path: Path
) -> None:
    """The save on a stop signal once was refused too. Ranks that had another folder would wait for each other."""
    (_, first), (_, other) = run_world(stop_points_of, 2, str(tmp_path), on)
    assert first == ({"good": 1} if on == 0 else {}) and other == {}
