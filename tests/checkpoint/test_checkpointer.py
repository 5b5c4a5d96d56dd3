"""Saved on any mesh, loaded on any other, bit for bit; and what stands in the way is said by name."""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import colossal_lite as cl
from colossal_lite.checkpoint import checkpointer, rendezvous, writer
from colossal_lite.checkpoint.files import inspect, listed, tensors, verify
from colossal_lite.checkpoint.manifest import CheckpointError, MisfitError
from tests.shared.parity import Case
from tests.shared.pool import RankEnv, WorldError, run_world

ADAMW = dict(type="adamw", lr=1e-2, weight_decay=0.1)
CASE = Case(
    family="llama",
    tokens=16,
    dropout=0.2,
    global_batch=8,
    config=dict(optimizer=ADAMW, clip_grad_norm=0.05, timeout_s=20),
)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, dict(tensor=2)),
    "data 2 tensor 2": (4, dict(data=2, tensor=2)),
    "tensor 4": (4, dict(tensor=4)),
    "data 2, zero 1": (2, dict(zero=1)),
    "data 2 tensor 2, zero 2": (4, dict(data=2, tensor=2, zero=2)),
    "pipeline 2 data 2, zero 1": (4, dict(pipeline=2, data=2, zero=1)),
    "sequence 4, zero 1": (4, dict(sequence=dict(size=4, mode="usp", ulysses=2), zero=1)),
}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "2d": (4, dict(tensor=dict(size=4, mode="2d"))),
    "2.5d": (8, dict(tensor=dict(size=8, mode="2.5d", depth=2))),
    "3d, zero 1": (8, dict(tensor=dict(size=8, mode="3d"), zero=1)),
}


def on(mesh: str, **config: Any) -> Case:
    """`CASE` on one of `MESHES` or `GRIDS`."""
    world_size, sizes = (MESHES | GRIDS)[mesh]
    parallel = {axis: size for axis, size in sizes.items() if axis != "zero"}
    config = {"zero": dict(stage=sizes.get("zero", 0))} | config
    return replace(CASE, world_size=world_size, config=dict(CASE.config) | dict(parallel=parallel) | config)


State = dict[str, Tensor]


def state_of(engine: cl.Engine) -> State:
    """Weights and everything the optimizer knows, whole."""
    moments = engine.full_optimizer_state()
    state = {f"{kind}/{name}": value for name, kinds in moments.items() for kind, value in kinds.items()}
    return state | {f"model/{name}": value for name, value in engine.full_state_dict().items()}


def train(engine: cl.Engine, case: Case, steps: range) -> list[float]:
    cut = engine.context.local_batch(case.global_batch)
    losses = []
    for number in steps:
        inputs, labels = case.batch(number)
        losses.append(float(engine.train_step((inputs[cut], labels[cut])).loss))
    return losses


@contextmanager
def engine_of(env: RankEnv, case: Case) -> Iterator[cl.Engine]:
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        yield engine
        engine.close()


def save_and_go_on(env: RankEnv, case: Case, folder: str, small: bool) -> tuple[State, list[float]]:
    """Two steps, a save, two more: the state that was saved, and the losses after it."""
    with small_slices(small), engine_of(env, case) as engine:
        train(engine, case, range(2))
        engine.save(folder, samples=2 * case.global_batch, extra={"corpus": "none"}).wait()
        return state_of(engine), train(engine, case, range(2, 4))


Resumed = tuple[State, list[float], int, int]


def load_each_and_go_on(env: RankEnv, case: Case, folders: list[str]) -> list[Resumed]:
    with engine_of(env, case) as engine:
        found = []
        for folder in folders:
            train(engine, case, range(7, 8))  # what a load must undo entirely
            loaded = engine.load(folder)
            assert engine.steps == loaded.step and loaded.manifest.extra == {"corpus": "none"}
            state = state_of(engine)
            found.append((state, train(engine, case, range(2, 4)), loaded.step, loaded.samples))
        return found


def load_each(env: RankEnv, case: Case, folders: list[str]) -> list[State]:
    with engine_of(env, case) as engine:
        found = []
        for folder in folders:
            engine.load(folder)
            found.append(state_of(engine))
        return found


@contextmanager
def small_slices(small: bool) -> Iterator[None]:
    """Slices and files so small that every tensor is cut and every rank writes several files."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(checkpointer, "SLICE_BYTES", 400)
            patch.setattr(checkpointer, "FILE_BYTES", 20000)
        yield


def assert_same_bits(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


Saved = dict[str, tuple[str, State, list[float]]]


def saved_on(mesh: str, folder: str, small: bool) -> tuple[str, State, list[float]]:
    """A run saved on a mesh: folder, state and later losses, as all its ranks have them."""
    case = on(mesh)
    ranks = run_world(save_and_go_on, case.world_size, case, folder, small)
    for state, losses in ranks:
        assert_same_bits(state, ranks[0][0])
        assert losses == ranks[0][1]
    (path,) = listed(Path(folder))
    assert list(verify(path)) == [] and (not small or len(inspect(path).by_file()) > 3)
    return folder, *ranks[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The same run saved on every mesh."""
    make = tmp_path_factory.mktemp
    return {mesh: saved_on(mesh, str(make("saved")), i % 2 == 0) for i, mesh in enumerate(MESHES)}


@pytest.mark.parametrize("reader", MESHES)
def test_any_mesh_reads_what_any_mesh_wrote(reader: str, saved: Saved) -> None:
    assert_goes_on(reader, saved)


@pytest.fixture(scope="module")
def saved_on_grids(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    make = tmp_path_factory.mktemp
    return {mesh: saved_on(mesh, str(make("grid")), i % 2 == 0) for i, mesh in enumerate(GRIDS)}


@pytest.mark.campaign
@pytest.mark.parametrize("reader", MESHES | GRIDS)
def test_every_mesh_reads_what_every_mesh_wrote(reader: str, saved: Saved, saved_on_grids: Saved) -> None:
    assert_goes_on(reader, saved_on_grids | (saved if reader in GRIDS else {}))


@pytest.mark.parametrize("writer", ["2d", "3d, zero 1"])
def test_grids_hand_a_run_to_other_meshes_and_take_theirs(writer: str, tmp_path: Path, saved: Saved) -> None:
    folder, truth, _ = saved_on(writer, str(tmp_path), True)
    for reader in ("1", "data 2 tensor 2, zero 2"):
        for (state,) in run_world(load_each, on(reader).world_size, on(reader), [folder]):
            assert_same_bits(state, truth)
    others = [saved[mesh] for mesh in ("1", "data 2 tensor 2, zero 2")]
    for states in run_world(load_each, on(writer).world_size, on(writer), [other[0] for other in others]):
        for state, (_, expected, _) in zip(states, others, strict=True):
            assert_same_bits(state, expected)


def assert_goes_on(reader: str, saved: Saved) -> None:
    """A mesh finds every saved state bit for bit, and goes on with the losses of whoever saved it."""
    case = on(reader)
    folders = [folder for folder, _, _ in saved.values()]
    for rank in run_world(load_each_and_go_on, case.world_size, case, folders):
        for (mesh, (_, truth, losses)), (state, after, step, samples) in zip(
            saved.items(), rank, strict=True
        ):
            assert (step, samples) == (2, 2 * case.global_batch)
            assert_same_bits(state, truth)
            assert mesh != reader or after == losses, "on the same mesh the run goes on bit for bit"
            assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(after, losses, strict=True))


def test_files_open_with_the_library_of_their_format(tmp_path: Path) -> None:
    saved, _ = run_world(save_and_go_on, 1, on("1"), str(tmp_path), False)[0]
    (path,) = listed(tmp_path)
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {name for name in saved if not name.startswith("step/")} - {
            "model/head.weight"
        }
        assert all(torch.equal(opened.get_tensor(name), saved[name]) for name in opened.keys())
    whole = tensors(path, inspect(path), ["model/token.weight"])
    assert torch.equal(whole["model/token.weight"], saved["model/token.weight"])


def test_no_pickle_and_no_torch_file_is_written(tmp_path: Path) -> None:
    run_world(save_and_go_on, 2, on("data 2"), str(tmp_path), False)
    (path,) = listed(tmp_path)
    assert sorted({file.suffix for file in path.iterdir()}) == [".json", ".safetensors"]
    assert json.loads((path / "manifest.json").read_text())["content"]["step"] == 2


def saves(env: RankEnv, case: Case, folder: str, count: int) -> list[str]:
    with engine_of(env, case) as engine:
        for number in range(count):
            train(engine, case, range(number, number + 1))
            engine.save(folder)
        return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_are_kept(asynchronous: bool, tmp_path: Path) -> None:
    case = on("data 2", checkpoint=dict(keep=2, asynchronous=asynchronous))
    run_world(saves, 2, case, str(tmp_path), 4)
    assert [path.name for path in listed(tmp_path)] == ["step-00000004", "step-00000003"]
    assert all(list(verify(path)) == [] for path in listed(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in listed(tmp_path)}


def save_same_step(env: RankEnv, case: Case, folder: str) -> list[str]:
    with engine_of(env, case) as engine:
        train(engine, case, range(1))
        return [engine.save(folder).wait().name for _ in range(3)]


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    names = run_world(save_same_step, 1, on("1"), str(tmp_path))[0]
    assert names == ["step-00000001", "step-00000001-2", "step-00000001-3"]
    assert [path.name for path in listed(tmp_path)] == names[::-1]


def save_while_training(env: RankEnv, case: Case, folder: str) -> tuple[State, list[float]]:
    """The save is held back until two more steps are done: it must still hold the state of its own step."""
    go, original = threading.Event(), writer.write_file

    def late(*args: Any) -> Any:
        assert go.wait(20)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch, engine_of(env, case) as engine:
        patch.setattr(writer, "write_file", late)
        train(engine, case, range(2))
        truth = state_of(engine)
        saving = engine.save(folder)
        assert not saving.is_done
        losses = train(engine, case, range(2, 4))
        assert not saving.is_done and listed(Path(folder)) == []
        go.set()
        saving.wait()
        return truth, losses


@pytest.mark.parametrize("mesh", ["1", "data 2"])
def test_an_asynchronous_save_holds_the_state_of_its_own_step(mesh: str, tmp_path: Path) -> None:
    case = on(mesh, checkpoint=dict(asynchronous=True))
    truth, losses = run_world(save_while_training, case.world_size, case, str(tmp_path))[0]
    (path,) = listed(tmp_path)
    stored = tensors(path, inspect(path), list(inspect(path).tensors))
    assert all(torch.equal(stored[name], truth[name]) for name in stored)


# ------------------------------------------------------------------------------------------ what may go wrong


def save_on_some(env: RankEnv, case: Case, folder: str, ranks: list[int]) -> tuple[str, float]:
    ends = pytest.raises(cl.Stopped, match="its last save failed") if env.rank in ranks else nullcontext()
    with ends, engine_of(env, case) as engine:
        train(engine, case, range(1))
        said, start = "", time.monotonic()
        if env.rank in ranks:
            with pytest.raises(CheckpointError) as caught:
                engine.save(folder)
            said = str(caught.value)
        taken_s = time.monotonic() - start
        env.store.set(f"tried {env.rank}", "")
        env.store.wait([f"tried {rank}" for rank in range(env.world_size)], timedelta(seconds=20))
    return said, taken_s


@pytest.mark.parametrize(("ranks", "names"), [([0], "ranks 1, 2"), ([1], "ranks 0"), ([0, 2], "ranks 1")])
def test_a_save_on_some_ranks_ends_in_words(ranks: list[int], names: str, tmp_path: Path) -> None:
    case = on("1", timeout_s=1.5)
    ended = run_world(save_on_some, 3, case, str(tmp_path), ranks)
    said, taken_s = ended[ranks[0]]
    assert "waited for" in said and names in said and "timeout 1.5 s" in said
    assert 1.4 < taken_s < 5 and listed(tmp_path) == []


def fail_then_go_on(env: RankEnv, case: Case, folder: str, fault: str) -> tuple[str, list[str], list[float]]:
    """A good save, one that cannot succeed on rank 0, training, and a good one after the fault is gone."""
    with engine_of(env, case) as engine:
        train(engine, case, range(1))
        engine.save(folder)
        with pytest.raises(CheckpointError) as caught, planted(env, fault, folder) as where:
            engine.save(where)
        losses = train(engine, case, range(1, 3))
        assert engine.load(folder).step == 1
        assert train(engine, case, range(1, 3)) == losses
        engine.save(folder)
        return str(caught.value), [path.name for path in listed(Path(folder))], losses


@contextmanager
def planted(env: RankEnv, fault: str, folder: str) -> Iterator[str]:
    """A disk that is full on one rank, a directory that cannot be written, one that is not shared."""
    if fault == "full":
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if env.rank == 0:  # it writes 170 kB; the store of the tests is a file too, of 20 kB
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, old[1]))
        try:
            yield folder
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    elif fault == "no room":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
            yield folder
    elif fault == "read-only":
        yield "/sys/kernel/checkpoints"
    elif fault == "no directory":
        file = Path(folder) / "a file"
        file.touch()
        yield str(file)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous, "SHARED_S", 0.2)
            yield folder if env.rank == 0 else folder + "-elsewhere"


FAULTS = {
    "full": ".safetensors: File too large",
    "no room": " KiB needed, 1,000 B free; legal: a folder with room",
    "read-only": "/sys/kernel/checkpoints",
    "no directory": "a file",
    "not shared": "all ranks must share one directory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_save_is_told_on_every_rank_and_the_run_goes_on(fault: str, tmp_path: Path) -> None:
    ended = run_world(fail_then_go_on, 2, on("data 2"), str(tmp_path), fault, timeout_s=90)
    assert ended[0][1:] == ended[1][1:]
    assert all(FAULTS[fault] in said for said, *_ in ended)
    assert ended[0][1] == ["step-00000003", "step-00000001"]
    assert not list(tmp_path.glob(".tmp-*")), "a failed save leaves nothing"
    assert all(list(verify(path)) == [] for path in listed(tmp_path))


def fail_asynchronously(env: RankEnv, case: Case, folder: str) -> list[str]:
    with engine_of(env, case) as engine:
        train(engine, case, range(1))
        saving = engine.save(folder + "/file")
        train(engine, case, range(1, 2))
        with pytest.warns(UserWarning, match="checkpoint not saved"):
            engine.save(folder).wait()
        with pytest.raises(CheckpointError, match="nothing was written"):
            saving.wait()
        return [path.name for path in listed(Path(folder))]


def test_an_asynchronous_failure_is_reported_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    case = on("data 2", checkpoint=dict(asynchronous=True))
    assert run_world(fail_asynchronously, 2, case, str(tmp_path)) == [["step-00000002"]] * 2


def load_changed(env: RankEnv, case: Case, folder: str) -> str:
    with engine_of(env, case) as engine:
        before = state_of(engine)
        try:
            return str(engine.load(folder))
        except CheckpointError as error:
            assert_same_bits(state_of(engine), before)
            train(engine, case, range(1))
            return f"refused: {error}"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "harmless": (dict(gradient_accumulation=2), "gradient_accumulation was 1, is 2: the same numbers"),
    "numeric": (dict(clip_grad_norm=1.0), "clip_grad_norm was 0.05, is 1.0: later steps differ"),
    "impossible": (
        dict(optimizer=dict(type="adam", lr=0.1)),
        "setting: optimizer.type was 'adamw', is 'adam': the saved state does not fit\nlegal: the model and settings",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_config_is_told_with_what_it_does_to_the_numbers(kind: str, tmp_path: Path) -> None:
    run_world(saves, 1, on("1"), str(tmp_path), 1)
    config, says = CHANGES[kind]
    for said in run_world(load_changed, 2, on("data 2", **config), str(tmp_path)):
        assert says in said and said.startswith("refused") == (kind == "impossible")
        assert kind == "impossible" or "parallel.data was 1, is 2: the same numbers" in said


def load_other_model(env: RankEnv, case: Case, folder: str) -> str:
    with env.launch(case.full_config) as context:
        model = cl.models.GPTConfig(vocabulary=37, layers=1, heads=4, width=24, sequence=12)
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        with pytest.raises(MisfitError) as caught:
            engine.load(folder)
        assert isinstance(caught.value, ValueError), "a script ends with 2 and without a traceback"
        return str(caught.value)


def test_another_model_is_refused_with_a_row_for_each_kind_of_misfit_and_what_to_do(tmp_path: Path) -> None:
    run_world(saves, 1, replace(on("1"), family="gpt2"), str(tmp_path), 1)
    for said in run_world(load_other_model, 2, on("data 2"), str(tmp_path)):
        assert "shape: model/token.weight is (37, 16), the run has (37, 24)" in said
        assert "unexpected: model/blocks.1.norm1.weight (16,) is not in this run; and " in said
        assert len(said.splitlines()) == 4 and said.splitlines()[-1].startswith(
            "legal: the model and settings"
        )


def load_as(env: RankEnv, case: Case, model: dict[str, Any], folder: str) -> str:
    """What a load says, into the model of a case with other settings."""
    with env.launch(case.full_config) as context:
        engine = cl.initialize(lambda: cl.models.GPT(replace(case.model().config, **model)), context=context)
        try:
            return str(engine.load(folder))
        except MisfitError as error:
            return f"refused: {error}"


def test_equal_shapes_with_other_heads_are_refused_and_other_settings_of_the_model_are_told(
    tmp_path: Path,
) -> None:
    case = replace(on("1"), family="gpt2")
    heads = case.model().config.heads
    run_world(saves, 1, case, str(tmp_path), 1)
    case = replace(case, world_size=2, config=on("tensor 2").config)
    for said in run_world(load_as, 2, case, dict(heads=heads // 2), str(tmp_path)):
        assert said.startswith("refused") and "legal: the model and settings of then" in said
        assert f"setting: model.heads was {heads}, is {heads // 2}: the saved state does not fit" in said
    for said in run_world(load_as, 2, case, dict(eps=1e-6, kv_heads=heads), str(tmp_path)):
        assert "model.eps was 1e-05, is 1e-06: later steps differ" in said and "heads" not in said


def test_a_pipeline_refuses_a_checkpoint_with_one_more_block(tmp_path: Path) -> None:
    """No stage has all names, and the block that the run has not was once dropped in silence."""
    layers = 3
    case = replace(on("1"), family="gpt2", layers=layers)
    run_world(saves, 1, case, str(tmp_path), 1)
    pipe = replace(case, world_size=4, config=on("pipeline 2 data 2, zero 1").config)
    for said in run_world(load_as, 4, pipe, dict(layers=layers - 1), str(tmp_path)):
        assert said.startswith("refused")
        assert f"unexpected: model/blocks.{layers - 1}.norm1.weight (16,) is not in this run" in said
    for said in run_world(load_as, 4, pipe, dict(layers=layers), str(tmp_path)):
        assert said.startswith("resumed")


def fall_back(env: RankEnv, case: Case, folder: str) -> tuple[str, State]:
    with engine_of(env, case) as engine:
        return str(engine.load(folder)), state_of(engine)


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    """A flip in data that only rank 1 of a later world would meet, in the newest but one; the newest is torn."""
    run_world(saves, 2, on("data 2", checkpoint=dict(keep=5)), str(tmp_path), 3)
    newest, middle, oldest = listed(tmp_path)
    (newest / "manifest.json").unlink()
    part = inspect(middle).tensors["model/blocks.0.mlp.down.weight"].slices[0]
    with open(middle / part.file, "r+b") as file:
        data = file.read()
        at = 8 + int.from_bytes(data[:8], "little") + part.start + 5
        file.seek(at)
        file.write(bytes([data[at] ^ 4]))
    for said, _ in run_world(fall_back, 2, on("data 2"), str(tmp_path)):
        assert f"resumed from {oldest}: step 1" in said
        assert f"passed over {newest / 'manifest.json'}" in said
        assert f"passed over {middle / part.file}: tensor model/blocks.0.mlp.down.weight" in said
    saved = tensors(oldest, inspect(oldest), ["model/token.weight"])["model/token.weight"]
    for _, state in run_world(fall_back, 2, on("data 2"), str(tmp_path)):
        assert torch.equal(state["model/token.weight"], saved)


def newer_than_listed(env: RankEnv, case: Case, folder: str, goes: str) -> list[str]:
    """What two loads say while another run saves step 2 and deletes step 1: the first before it looks at `goes`."""
    first, second, aside = (Path(folder) / name for name in ("step-00000001", "step-00000002", "aside"))
    second.rename(aside)

    look = getattr(checkpointer, goes)

    def moved(*given: Any, **more: Any) -> Any:
        if aside.exists():
            aside.rename(second)
            shutil.rmtree(first)
        return look(*given, **more)

    def loaded(engine: cl.Engine) -> str:
        try:
            return str(engine.load(folder))
        except CheckpointError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch, engine_of(env, case) as engine:
        patch.setattr(checkpointer, goes, moved)
        return [loaded(engine), loaded(engine)]


@pytest.mark.parametrize(
    ("goes", "says"),
    [("inspect", "passed over"), ("stream", "passed over"), ("shared", "is gone: another process deletes")],
)
def test_a_checkpoint_that_another_run_saves_as_it_deletes_the_older_one_is_loaded(
    tmp_path: Path, goes: str, says: str
) -> None:
    run_world(saves, 1, on("1"), str(tmp_path), 2)
    ((said, again),) = run_world(newer_than_listed, 1, on("1"), str(tmp_path), goes)
    assert says in said and (goes == "shared" or "step-00000002: step 2" in said)
    assert "step-00000002: step 2" in again and "passed over" not in again


def none_is_whole(env: RankEnv, case: Case, folder: str) -> tuple[str, str]:
    with engine_of(env, case) as engine:
        with pytest.raises(CheckpointError) as caught:
            engine.resume(folder)
        said = ""
        if "checksum" in str(caught.value):
            with pytest.raises(ValueError) as refused:
                train(engine, case, range(1))
            said = str(refused.value)
        return str(caught.value), said


def test_when_none_is_whole_nothing_trains_on_a_mix(tmp_path: Path) -> None:
    run_world(saves, 1, on("1"), str(tmp_path), 1)
    (path,) = listed(tmp_path)
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for said, refused in run_world(none_is_whole, 2, on("data 2"), str(tmp_path)):
        assert "no whole checkpoint" in said and str(file) in said and "checksum" in said
        assert "a load failed halfway" in refused


def resume_from_nothing(env: RankEnv, case: Case, folder: str) -> bool:
    with engine_of(env, case) as engine:
        nothing = engine.resume(folder) is None and engine.resume(folder + "/none") is None
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            engine.load(folder)
        return nothing


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
    assert run_world(resume_from_nothing, 2, on("data 2"), str(tmp_path)) == [True, True]


def frozen_and_buffers(env: RankEnv, case: Case, folder: str) -> bool:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 2)
            self.fixed = torch.nn.Parameter(torch.arange(6.0).view(3, 2).t(), requires_grad=False)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x) + (x @ self.fixed.t().to(x.dtype))
            return y

    with env.launch(dict(case.full_config)) as context:
        torch.manual_seed(0)
        model = Model()
        engine = cl.initialize(model, context=context, criterion=torch.nn.functional.mse_loss)
        with torch.no_grad():
            model.seen.fill_(5)
            model.fixed.mul_(2)
        truth = {name: value.clone() for name, value in model.state_dict().items()}
        engine.save(folder)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        engine.load(folder)
        return all(torch.equal(value, truth[name]) for name, value in model.state_dict().items())


def test_frozen_parameters_and_buffers_come_back(tmp_path: Path) -> None:
    assert all(run_world(frozen_and_buffers, 2, on("data 2"), str(tmp_path)))


def test_a_load_needs_three_slices_of_memory_and_a_save_two(tmp_path: Path) -> None:
    """256 MiB through 16 MiB slices: what is taken beside the tensors themselves."""
    taken = run_world(memory_of_save_and_load, 1, str(tmp_path), timeout_s=120)[0]
    assert taken["save"] < 40 * 2**20 and taken["load"] < 64 * 2**20


def memory_of_save_and_load(env: RankEnv, folder: str) -> dict[str, int]:
    from colossal_lite.checkpoint.checkpointer import Checkpointer
    from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
    from colossal_lite.sharding.mesh_layout import MeshLayout
    from colossal_lite.sharding.shard_spec import ShardSpec, dims_of

    big = torch.rand(4, 2**24)
    held = [HeldTensor("model/big", ShardSpec("big", dims_of(big.shape)), big)]
    disk = Checkpointer(MeshLayout.build(), 0, env.store, keep=1, timeout_s=9, heard=str)
    facts = RunFacts(1, 0, 0, {}, None, {}, {})
    disk.save(Path(folder), held, facts, asynchronous=False)  # what a first call loads stays loaded
    disk.load(Path(folder), held, {})
    taken = {}
    for name in ("save", "load"):
        reset_peak()
        before = peak_bytes()
        if name == "save":
            disk.save(Path(folder), held, facts, asynchronous=False)
        else:
            disk.load(Path(folder), held, {})
        taken[name] = peak_bytes() - before
    return taken


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# ------------------------------------------------------------------------------------------ line of descent


def going_back(env: RankEnv, case: Case, folder: str) -> list[Any]:
    """Saves at steps 1 to 3, back to 1, on to 2, and the same command again."""
    with engine_of(env, case) as engine:
        paths = []
        for number in range(3):
            train(engine, case, range(number, number + 1))
            paths.append(engine.save(folder).wait())
        engine.load(paths[0])
        train(engine, case, range(1, 2))
        paths.append(engine.save(folder).wait())
        state = state_of(engine)
    with engine_of(env, case) as engine:
        loaded = engine.resume(folder)
        assert loaded is not None
        assert_same_bits(state_of(engine), state)
        return [path.name for path in paths], loaded.path.name, loaded.manifest.parent, loaded.manifest.serial


def test_the_same_command_goes_on_with_what_was_saved_last_not_with_the_highest_step(tmp_path: Path) -> None:
    case = on("data 2", checkpoint=dict(keep=9))
    for names, loaded, parent, serial in run_world(going_back, 2, case, str(tmp_path)):
        assert names[-1] == loaded == "step-00000002-2" and (parent, serial) == (names[0], 4)


def test_pruning_counts_only_what_this_run_has_checked(tmp_path: Path) -> None:
    """A damaged newer checkpoint with its headers right is kept in the place of none."""
    case = on("1", checkpoint=dict(keep=1))
    run_world(saves, 1, on("1"), str(tmp_path), 2)
    damaged = tmp_path / "step-00000002"
    (file,) = damaged.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    for count, left in ((1, ["step-00000001-2"]), (2, ["step-00000002"])):
        run_world(saves, 1, case, str(tmp_path), count)
        assert [path.name for path in listed(tmp_path)] == left
        assert list(verify(tmp_path / left[0])) == []


def test_a_run_saves_on_where_an_older_checkpoint_was_moved_and_linked(tmp_path: Path) -> None:
    """The link goes as an old checkpoint does, and what it shows stays."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    run_world(saves, 1, on("1"), str(folder), 2)
    old = folder / "step-00000001"
    old.rename(elsewhere)
    old.symlink_to(elsewhere)
    run_world(saves, 1, on("1", checkpoint=dict(keep=1)), str(folder), 4)
    assert {path.name for path in folder.iterdir()} == {"step-00000004"} and list(verify(elsewhere)) == []


def goes_on_from_the_first(env: RankEnv, case: Case, folder: str) -> None:
    with engine_of(env, case) as engine:
        engine.load(f"{folder}/step-00000001")
        train(engine, case, range(1, 2))
        engine.save(folder)


def test_a_damaged_checkpoint_takes_the_place_of_none_that_was_loaded(tmp_path: Path) -> None:
    run_world(saves, 1, on("1"), str(tmp_path), 2)
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    run_world(goes_on_from_the_first, 1, on("1", checkpoint=dict(keep=2)), str(tmp_path))
    assert [path.name for path in listed(tmp_path)] == ["step-00000002-2", "step-00000002", "step-00000001"]


def starts(env: RankEnv, case: Case, folder: str) -> Any:
    with engine_of(env, case) as engine:
        return engine.resume(folder)


def trains_and_starts(env: RankEnv, case: Case, folder: str) -> None:
    with engine_of(env, case) as engine:
        train(engine, case, range(2))
        engine.resume(folder)


def test_a_new_folder_of_an_engine_that_has_made_steps_is_told_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_world(trains_and_starts, 1, on("1"), str(tmp_path / "new"))
    assert f"no checkpoint in {tmp_path}/new yet: begins at step 2" in capsys.readouterr().out


def test_a_folder_without_a_checkpoint_is_told_with_its_like_and_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first-run").mkdir()
    assert run_world(starts, 2, on("data 2"), str(tmp_path / "frist-run")) == [None, None]
    told = f"no checkpoint in {tmp_path}/frist-run yet: begins at step 0; beside it is {tmp_path}/first-run"
    assert capsys.readouterr().out == f"[rank 0] {told}\n"
    (tmp_path / "model.pt").touch()
    with pytest.raises(WorldError) as caught:
        run_world(starts, 2, on("data 2"), str(tmp_path / "model.pt"))
    assert all(
        "model.pt is no folder; legal: a folder of checkpoints" in f.summary for f in caught.value.failures
    )


LEFT_OPEN = """
import sys, time
import torch
import colossal_lite as cl
from colossal_lite.checkpoint.writer import SaveJob

write = SaveJob._write
SaveJob._write = lambda *given: time.sleep(0.5) or write(*given)
config = dict(checkpoint=dict(asynchronous=True), optimizer=dict(type="sgd", lr=0.1), precision="fp32")
context = cl.launch(config)
engine = cl.initialize(torch.nn.Linear(4, 2), criterion=torch.nn.functional.cross_entropy, context=context)
engine.train_step((torch.ones(2, 4), torch.tensor([0, 1])))
engine.save(sys.argv[1])
"""


def test_a_save_beside_training_is_whole_where_the_script_ends_with_its_context_open(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEFT_OPEN)
    subprocess.run([sys.executable, str(script), str(tmp_path / "out")], check=True, timeout=120)
    assert [path.name for path in listed(tmp_path / "out")] == ["step-00000001"]


def test_an_interrupt_of_such_a_script_waits_for_no_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEFT_OPEN.replace("sleep(0.5)", "sleep(100)") + "raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")], capture_output=True, timeout=60
    )
    assert ended.returncode and not listed(tmp_path / "out")
