"""Tests a store that outlives the engines of its tasks: the next resumes bit for bit, readers see finished updates."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.task_records import OPTIMIZER, WEIGHTS, StoreError
from colossal_lite.zero.optimizer import ChunkOptimizer
from tests.offload.test_optimizer_states import ADAMW, on_disk
from tests.shared.parity import Case, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_deferred_updates import assert_same
from tests.zero.test_zero import SMALL, VOCABULARY

HOST = dict(memory=dict(placement="host"))
EVERYTHING = dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))
HALF = dict(placement="static", host_fraction=dict(weights=0.5, gradients=0.5, optimizer=0.5))
CASE = Case(
    layers=2, vocabulary=VOCABULARY, chunk_bytes=SMALL // 2, steps=4, global_batch=4, dropout=0.1, world_size=1,
    config=dict(
        optimizer=ADAMW, clip_grad_norm=0.05, lr_scheduler=dict(type="cosine", warmup_steps=2, total_steps=6),
    ),
)  # fmt: skip


def _told_at_once(
    original: Any, self: Any, target: Tensor, source: Tensor, *, then: Any = None, **more: Any
) -> Any:  # fmt: skip
    if then is not None:
        self.run(partial(time.sleep, 0.15), 0)
        then()
    return original(self, target, source, **more)


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "host": (1, HOST),
    "host, ZeRO-1, bf16": (2, HOST | dict(zero=dict(stage=1), precision="bf16")),
    "host, split masters": (1, HOST | dict(precision=dict(dtype="bf16", master="split"), zero=dict(stage=1))),
    "everything on the host, ZeRO-3": (2, dict(memory=EVERYTHING, zero=dict(stage=3), precision="bf16")),
    "half of everything, fp16": (1, dict(memory=HALF, zero=dict(stage=3), precision="fp16")),
    "device, ZeRO-2": (2, dict(zero=dict(stage=2), precision="bf16")),
    "disk": (1, dict(memory=dict(placement="disk"), precision="bf16")),
}

State = tuple[list[float], dict[str, Tensor], dict[str, dict[str, Tensor]]]


def trained(env: RankEnv, case: Case, stops: tuple[int, ...], fault: str = "") -> State:
    """Losses of a run whose engine is closed before the steps of `stops`, its context before the last of them, and its
    state at the end."""
    with patched(*FAULTS[fault]) if fault else nullcontext():
        return _trained(env, case, stops)


def _trained(env: RankEnv, case: Case, stops: tuple[int, ...]) -> State:
    store, losses = cl.HostStore(), []
    step = 0
    for last in (*stops[-1:], case.steps):
        with env.launch(case.full_config) as context:
            cut = context.local_batch(case.global_batch)
            engine = None
            while step < last:
                if engine is None or step in stops:
                    if engine is not None:
                        engine.close()
                    engine = start(case, context, store=store, task="gpt")
                    if case.config.get("memory") == HOST["memory"]:
                        shown = store.records("gpt")
                        assert {shown.version(chunk) for chunk, _ in shown.names} == {step}
                assert engine.steps == step
                inputs, labels = case.batch(step)
                losses.append(float(engine.train_step((inputs[cut], labels[cut])).loss))
                step += 1
            assert engine is not None
            if step == case.steps:
                found = losses, engine.full_state_dict(), engine.full_optimizer_state()
    store.drop("gpt")
    return found


def placed(name: str, directory: Path) -> Case:
    ranks, config = PLACES[name]
    if name == "disk":
        config = config | on_disk(directory)
    return replace(CASE, world_size=ranks, config={**CASE.config, **config})


@pytest.mark.parametrize("name", PLACES)
def test_an_engine_that_takes_up_a_task_goes_on_with_the_bits_of_one_engine(
    name: str, tmp_path: Path
) -> None:
    case = placed(name, tmp_path)
    expected = run_world(trained, case.world_size, case, ())
    assert_same(run_world(trained, case.world_size, case, (1, 3)), expected)


FAULTS: dict[str, tuple[str, Any]] = {
    "a record that was left is filled anew": ("TaskRecords.is_new", lambda original, self, chunk, kind: True),
    "step counts are not taken up": ("ChunkOptimizer.set_updates", lambda original, self, updates: None),
    "weights are not left": ("ChunkOptimizer.park", lambda original, self, version: None),
    "an update that is owed is not told": ("HostStorage.defer", lambda original, self: None),
    "a record is whole when its bytes set out": ("Link.copy", _told_at_once),
}


@pytest.mark.parametrize("fault", [*FAULTS][:3])
def test_a_task_that_is_taken_up_with_a_fault_has_other_bits(fault: str, tmp_path: Path) -> None:
    case = placed("host, ZeRO-1, bf16", tmp_path)
    expected = run_world(trained, 2, case, ())
    assert run_world(trained, 2, case, (1,), fault)[0][0] != expected[0][0]


@pytest.mark.parametrize("fault", [*FAULTS][3:])
def test_a_sibling_that_is_told_too_soon_shows(fault: str, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="DID NOT RAISE|assert"):
        run_world(watched, 2, placed("host, ZeRO-1, bf16", tmp_path), fault)


def records_of(engine: Engine) -> dict[int, Tensor]:
    """What rests on the host of each chunk's state, after a flush."""
    assert isinstance(engine._optimizer, ChunkOptimizer) and engine._optimizer.tiers is not None
    return {
        chunk.spec.id: engine._optimizer.tiers._host.rest[i].clone() for i, chunk in enumerate(engine._chunks)
    }


def watched(env: RankEnv, case: Case, fault: str = "") -> None:
    """Each rank reads the records of the other, in the other's memory."""
    with patched(*FAULTS[fault]) if fault else nullcontext():
        _watched(env, case)


def _watched(env: RankEnv, case: Case) -> None:
    store = cl.HostStore()
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        world, cut = context.mesh.world, context.local_batch(case.global_batch)
        handle = store.handle("gpt")
        rows = world.gather_json([handle.task, handle.pid, handle.descriptor, handle.token])
        other = cl.HostStore.attach(type(handle)(*rows[1 - env.rank]))
        defers = engine._updates.defers
        for number in (1, 2):
            engine.train_step([t[cut] for t in case.batch(number)])
            mine = store.records("gpt")
            if defers:  # a step owes its updates until the next forward
                with pytest.raises(StoreError, match="is owed or on its way by process"):
                    mine.flush()
            world.barrier()
            if defers:
                with pytest.raises(StoreError, match=r"after 0 s; legal: HostStore\.flush there"):
                    other.flush()
            world.barrier()
            engine._weights.flush()  # updates are made, and their bytes on their way
            told = [c for c, kind in mine.names if kind == OPTIMIZER and not mine.is_pending(c)]
            early = [mine.read(chunk) for chunk in told]
            store.flush()
            rest = records_of(engine)
            assert all(got.version == number and torch.equal(got.flat, rest[got.chunk]) for got in early)
            other.flush(timeout_s=20.0)
            shown = world.gather_json({str(chunk): flat.tolist() for chunk, flat in rest.items()})
            for chunk, values in shown[1 - env.rank].items():
                got = other.read(int(chunk))
                assert got.version == number and got.flat.tolist() == values
            world.barrier()
        engine.load_full_state_dict(engine.full_state_dict())
        assert {mine.version(chunk) for chunk, kind in mine.names if kind == OPTIMIZER} == {3}
        mine.flush()
        engine.eval_step([t[cut] for t in case.batch(0)])
        world.barrier()
        other.flush(timeout_s=20.0)
        world.barrier()


@pytest.mark.parametrize("place", ["host, ZeRO-1, bf16", "everything on the host, ZeRO-3"])
def test_a_sibling_reads_the_moments_of_each_step_when_they_have_come_to_rest(
    place: str, tmp_path: Path
) -> None:
    case = placed(place, tmp_path)
    run_world(watched, 2, case)


def refused(env: RankEnv, case: Case, others: list[Case], directory: str) -> list[str]:
    store, told = cl.HostStore(), []
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        cut = context.local_batch(case.global_batch)
        batch = tuple(t[cut] for t in case.batch(0))
        engine.train_step(batch)
        with pytest.raises(StoreError, match="task 'gpt' has an engine"):
            start(case, context, store=store, task="gpt")
        engine.save(directory)
        engine.close()
        expected = engine.full_state_dict()
    for other in others:
        with env.launch(other.full_config) as context, pytest.raises(ValueError) as caught:
            start(other, context, store=store, task="gpt")
        told.append(str(caught.value))
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        assert all(torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items())
        engine.train_step(batch)
        with pytest.raises(ValueError, match="not used"):
            engine.forward_backward(batch)
            engine.forward_backward(batch)
    with pytest.raises(StoreError, match="ended by an error, and its records are of different steps"):
        store.open("gpt", beside=torch.device("cpu"))
    store.drop("gpt")
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        engine.load(directory)
        assert all(torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items())
        engine.train_step(batch)
    return told


def test_what_cannot_be_taken_up_is_refused_on_every_rank_and_is_still_there(tmp_path: Path) -> None:
    case = replace(placed("host, ZeRO-1, bf16", tmp_path), steps=1)
    others = [
        replace(case, layers=3),
        replace(case, config={**case.config, "zero": dict(stage=0)}),
        replace(case, config={**case.config, "optimizer": dict(type="lion", lr=0.1)}),
        replace(case, config={**case.config, "precision": "fp32"}),
    ]
    for told in run_world(refused, 2, case, others, str(tmp_path / "saved")):
        for text in told:
            assert (
                "what was left of task 'gpt' cannot be taken up:\n  rank 0: chunk " in text
                and "rank 1: " in text
            )
            assert text.endswith(
                "legal: the model and the config that it was trained with, a checkpoint, or store.drop"
            )
        assert "chunk 0: entries were" in told[0] or "it is new" in told[0]
        assert "owned elements were" in told[1] and "records were" in told[2] and "dtype were" in told[3]


def other_optimizer(env: RankEnv) -> None:
    with env.launch(dict(memory=dict(placement="device"))) as context:
        cl.initialize(
            torch.nn.Linear(2, 2), context=context, store=cl.HostStore(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip


def test_an_optimizer_of_ones_own_leaves_nothing_in_a_store() -> None:
    with pytest.raises(
        WorldError, match="store: what an optimizer of your own keeps, only it knows; legal: a type of"
    ):
        run_world(other_optimizer, 1)


def many(env: RankEnv, case: Case) -> list[tuple[list[float], int]]:
    """Two tasks in turns, each step by an engine of its own."""
    store, losses = cl.HostStore(), {"a": list[float](), "b": list[float]()}
    with env.launch(case.full_config) as context:
        for number in range(3):
            for task in losses:
                engine = start(case, context, store=store, task=task)
                losses[task].append(
                    float(engine.train_step(case.batch(number if task == "a" else 2 - number)).loss)
                )
                engine.close()
                del engine
        assert {kind for _, kind in store.records("a").names} == {OPTIMIZER, WEIGHTS}
        return [(losses[task], store.taken_bytes(task)) for task in losses]


def test_tasks_take_turns_on_one_device_with_the_bits_of_each_alone(tmp_path: Path) -> None:
    case = replace(placed("host", tmp_path), steps=3)
    ((a, b),) = run_world(many, 1, case)
    (((alone, _, _)),) = run_world(trained, 1, case, ())
    assert a[0] == alone and b[0] != alone and a[1] == b[1]


def _huge_at_first(steps: list[int]) -> Any:
    """A sum of losses whose first gradient overflows in fp16."""

    def criterion(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        loss = torch.nn.functional.cross_entropy(outputs.float(), labels, reduction="sum")
        return loss * (1e30 if not steps[0] else 1.0), len(labels)

    return criterion


def beside_records(env: RankEnv, stops: tuple[int, ...]) -> list[Any]:
    """Steps, samples, loss scale and buffers of a task after three steps, with engines closed before `stops`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).half()
    store, number = cl.HostStore(), [0]
    with env.launch(dict(optimizer=dict(type="sgd", lr=0.1), precision="fp16", timeout_s=30)) as context:
        engine = None
        for number[0] in range(3):
            if engine is None or number[0] in stops:
                if engine is not None:
                    engine.close()
                engine = cl.initialize(
                    copy.deepcopy(model),
                    context=context,
                    criterion=_huge_at_first(number),
                    store=store,
                    task="a",
                )
            torch.manual_seed(number[0])
            engine.train_step((torch.randn(5 + number[0], 4).half(), torch.arange(5 + number[0]) % 3))
        assert engine is not None
        state = engine.full_state_dict()
        return [
            engine.steps,
            engine.samples,
            engine.loss_scale,
            {name: x.tolist() for name, x in state.items()},
        ]


def test_samples_the_loss_scale_and_buffers_go_on_with_a_task_as_its_records_do() -> None:
    (whole,) = run_world(beside_records, 1, ())
    assert whole[:3] == [3, 18, 2.0**15] and whole[3]["1.num_batches_tracked"] == 3
    assert run_world(beside_records, 1, (1, 2)) == [whole]


# ---- a step ends while updates of the one before are on their way ----


def owed_twice(env: RankEnv, case: Case) -> list[tuple[int, bool]]:
    """Version of each record, and whether it is pending, when a step has ended and those of the one before rest."""
    store = cl.HostStore()
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        for number in range(2):
            engine.train_step(case.batch(number))
        assert isinstance(engine._optimizer, ChunkOptimizer) and engine._optimizer.tiers is not None
        engine._optimizer.tiers.down.drain()
        shown = store.records("gpt")
        return [(shown.version(chunk, kind), shown.is_pending(chunk, kind)) for chunk, kind in shown.names]


def test_a_record_is_pending_while_a_second_update_is_owed_and_the_first_comes_to_rest() -> None:
    memory = dict(placement="host", rates=dict(latency_s=0.2))
    case = replace(CASE, layers=1, chunk_bytes=SMALL, config={**CASE.config, "memory": memory})
    (marks,) = run_world(owed_twice, 1, case)
    # What the next forward begins with is updated at once.
    assert marks[0] == (2, False) and {*marks[1:]} == {(1, True)}, marks


# ---- an engine that was not made ----


def made_at_last(env: RankEnv, case: Case, directory: Path) -> tuple[int, int, list[float]]:
    """Descriptors and threads that are more after an engine was refused, and losses of the one that was then made."""
    here = Path("/proc/self/fd")
    memory = dict(placement="host", host_budget=100, disk_dir=str(directory))
    small = replace(case, config={**case.config, "memory": memory})
    store = cl.HostStore()
    with env.launch(small.full_config) as context:
        before = len(list(here.iterdir())), threading.active_count()
        with pytest.raises(ValueError, match=r"memory\.host_budget = 100"):
            start(small, context, store=store, task="gpt")
        after = len(list(here.iterdir())), threading.active_count()
        assert store.tasks == ()
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        losses = [float(engine.train_step(case.batch(number)).loss) for number in range(case.steps)]
    return after[0] - before[0], after[1] - before[1], losses


def test_after_an_engine_that_was_refused_the_task_can_be_begun_and_nothing_is_left(tmp_path: Path) -> None:
    case = replace(placed("host", tmp_path), steps=2)
    ((descriptors, threads, losses),) = run_world(made_at_last, 1, case, tmp_path)
    assert (descriptors, threads) == (0, 0)
    (((alone, _, _)),) = run_world(trained, 1, case, ())
    assert losses == alone


# ---- what is left there counts ----


def left_bytes(env: RankEnv, case: Case) -> int:
    """What an engine leaves."""
    store = cl.HostStore()
    with env.launch(case.full_config) as context:
        start(case, context, store=store, task="gpt").close()
    left = store.records("gpt")
    return sum(left.view(chunk, kind).nbytes for chunk, kind in left.names)


def told_of(env: RankEnv, case: Case, budget: int) -> str:
    """What the budget is told of an engine with a store, where one without has room; empty: nothing."""
    case = replace(case, config=case.config | {"memory": case.config["memory"] | dict(host_budget=budget)})
    store = cl.HostStore()
    with env.launch(case.full_config) as context:
        start(case, context).close()
        try:
            start(case, context, store=store, task="gpt").close()
        except ValueError as error:
            assert store.tasks == ()
            return str(error)
    return ""


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_host_budget_without_room_for_what_is_left_in_a_store_is_refused_when_the_engine_is_made(
    placement: str,
) -> None:
    case = replace(CASE, config=CASE.config | {"memory": dict(placement=placement)})
    (left,) = run_world(left_bytes, 1, case)
    assert run_world(told_of, 1, case, left) == [""]
    (told,) = run_world(told_of, 1, case, left - 1)
    assert (
        f"memory.host_budget = {left - 1}: {left:,} bytes are on the host when the engine is closed" in told
    )
    assert f"legal: {left:,} or more, zero.stage=1 on two or more ranks; or no store: a checkpoint" in told
    sharded = replace(case, config=case.config | {"zero": dict(stage=1)})
    (least,) = {*run_world(left_bytes, 2, sharded)}
    assert least < left and run_world(told_of, 2, sharded, least) == ["", ""], "the choice that it names"
    assert "or more, more ranks; or no store" in run_world(told_of, 2, sharded, least - 1)[0]


def test_records_that_are_on_disk_for_want_of_room_are_not_brought_to_a_store_beyond_it(
    tmp_path: Path,
) -> None:
    case = replace(CASE, config=CASE.config | {"memory": dict(placement="host", disk_dir=str(tmp_path))})
    (left,) = run_world(left_bytes, 1, case)
    (told,) = run_world(told_of, 1, case, left * 3 // 4)
    assert "bytes are on the host when the engine is closed: the store takes all state" in told


def test_gradients_that_are_on_the_host_when_the_engine_is_closed_count_beside_the_store() -> None:
    """Of weights that cannot rest there while the engine is open, which the store takes at its end."""
    memory = dict(placement="static", host_fraction=dict(gradients=1.0))
    case = replace(CASE, config=CASE.config | {"memory": memory, "zero": dict(stage=2)})
    (left,) = run_world(left_bytes, 1, case)
    told = [run_world(told_of, 1, case, left + more)[0] for more in (0, left)]
    assert "bytes are on the host when the engine is closed" in told[0] and told[1] == ""


# ---- an engine that was closed ----


def left_behind(env: RankEnv, case: Case, stored: bool) -> tuple[int, bool]:
    """Descriptors that are more, and whether an engine is still there, when it has been closed and its context not."""
    here, store = Path("/proc/self/fd"), cl.HostStore() if stored else None
    with env.launch(case.full_config) as context:
        start(case, context, store=store).close()
        gc.collect()
        before = len(list(here.iterdir()))
        engine = start(case, context, store=store)
        engine.train_step(case.batch(0))
        engine.close()
        seen = weakref.ref(engine)
        del engine
        gc.collect()
        return len(list(here.iterdir())) - before, seen() is not None


@pytest.mark.parametrize(("name", "stored"), [("host", True), ("host", False), ("disk", False)])
def test_of_an_engine_that_was_closed_nothing_is_left_while_its_context_goes_on(
    name: str, stored: bool, tmp_path: Path
) -> None:
    assert run_world(left_behind, 1, placed(name, tmp_path), stored) == [(0, False)]
