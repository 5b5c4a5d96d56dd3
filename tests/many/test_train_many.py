"""`train_many`: each task has the bits that it has alone, whatever the policy, devices, neighbours or a kill."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import psutil
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, default_collate

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.launcher import env as launcher_env
from colossal_lite.launcher.start import launch_gang, serve_gangs
from colossal_lite.many import coordinator, worker
from colossal_lite.many.fingerprint import fingerprint
from colossal_lite.many.jobs import Job
from colossal_lite.many.policies import POLICIES, Candidate, Choose
from colossal_lite.many.results import ManyResult, TaskResult, losses_of, read_result
from colossal_lite.many.task import check
from colossal_lite.many.task_plan import data_of
from colossal_lite.many.trainer import OnReportError, train
from colossal_lite.many.worker import Order, Worker, saved_step
from colossal_lite.planner.host_room import state_bytes
from tests.many import tasks as own
from tests.many.tasks import CONFIG, TRAIN, Dying, Raising, task
from tests.shared.pool import RankEnv, WorldError, run_world

Found = dict[str, dict[str, Any]]
pytestmark = pytest.mark.timeout(300)


def elsewhere(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """A task that this device does not hold; of these, the one that has come farthest."""

    def worth(candidate: Candidate) -> tuple[bool, int, int]:
        return not candidate.is_here, -candidate.left, -candidate.order

    return lambda moment: max(moment.candidates, key=worth)


def kill(what: str, draw: random.Random) -> None:
    """Kill any worker or supervisor of this world, or ask for an end: "worker", "job", "stop"."""
    if what == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    while True:
        ranks = psutil.Process(os.getppid()).children()
        workers = {
            rank.pid: [w.pid for server in rank.children() for w in server.children()] for rank in ranks
        }
        ours = [rank for rank, found in workers.items() if found]
        victims = ours if what == "job" else [pid for rank in ours for pid in workers[rank]]
        with suppress(
            ProcessLookupError, psutil.NoSuchProcess, IndexError
        ):  # it has ended, or is not there yet
            os.kill(draw.choice(victims), signal.SIGKILL)
            return
        time.sleep(0.05)


def together(env: RankEnv, tasks: Sequence[cl.Task], folder: Path, how: Mapping[str, Any]) -> Found | None:
    """Train them in this world; None if a signal has stopped the run. `kills`: what is killed at which report."""
    how, reports = dict(how), 0
    kills: Mapping[int, str] = how.pop("kills", {})
    quantum_s = how.pop("quantum_s", coordinator.QUANTUM_S)

    def counted(*given: Any, ran: Any = coordinator.Coordinator._ran) -> None:
        """In the place of `on_report`, beside which a worker does not go on after its answer."""
        nonlocal reports
        ran(*given)
        reports += 1
        if reports in kills:
            with (folder / "moments").open("a") as file:
                file.write(f"{kills[reports]} at report {reports}\n")
            kill(kills[reports], random.Random(reports))

    patch = pytest.MonkeyPatch()
    patch.setitem(POLICIES, "elsewhere", elsewhere)  # type: ignore[misc]
    patch.setattr(coordinator, "QUANTUM_S", quantum_s)
    patch.setattr(coordinator.Coordinator, "_ran", counted)
    try:
        with env.launch(dict(backend="gloo", timeout_s=60)) as context:
            prepare = partial(launcher_env.show_one_device, env.rank)
            how = dict(directory=folder, config=CONFIG) | how
            result = train(tasks, context, launch=launch_gang, serve=serve_gangs, prepare=prepare, **how)
    except cl.Stopped:
        return None
    finally:
        patch.undo()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it lives as long as its process, here a rank
    return {
        name: dict(status=t.status, cause=t.cause, losses=t.losses, held_out=t.held_out, best=result.best)
        for name, t in result.tasks.items()
    }


def alone(env: RankEnv, tasks: Sequence[cl.Task], folder: Path) -> Found:
    found = {}
    for each in tasks:
        losses, weights, held_out = own.alone(env, each, folder / each.name)
        found[each.name] = dict(losses=losses, weights=weights, held_out=held_out)
    return found


def assert_as_alone(
    found: Found | None, expected: Found, folder: Path, tasks: Sequence[cl.Task] = ()
) -> None:
    """`tasks`: those of `expected` whose model is not that of `PLAIN`."""
    assert found is not None
    by_name = {name: task(name) for name in expected} | {each.name: each for each in tasks}
    weights = run_world(weights_of, 1, [by_name[name] for name in expected], folder)[0]
    for name, its in expected.items():
        assert found[name]["status"] == "done", found[name]
        assert found[name]["losses"] == its["losses"], name
        assert found[name]["held_out"] == its["held_out"], name
        assert its["weights"].keys() == weights[name].keys()
        assert all(torch.equal(its["weights"][key], weights[name][key]) for key in weights[name]), name


def by_themselves(tasks: Sequence[cl.Task], folder: Path) -> Found:
    """Each task alone in a world of its size."""
    found: Found = {}
    for size in sorted({each.devices for each in tasks}):
        found |= run_world(alone, size, [each for each in tasks if each.devices == size], folder)[0]
    return found


def weights_of(env: RankEnv, tasks: Sequence[cl.Task], folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {each.name: own.weights_in(each, folder / "tasks" / each.name) for each in tasks}


PLAIN = [task("a"), task("b", 3e-3, 9), task("c", 1e-3, 14)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = run_world(alone, 1, PLAIN, tmp_path_factory.mktemp("alone"))[0]
    return found


def test_on_two_devices_each_task_is_as_alone_beside_tasks_that_fail_and_a_worker_that_dies(
    expected: Found, tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    others = [
        task("raises", build=own.raises),
        task("diverges", 1e38),
        task("kills", data=Dying(tmp_path / "kills", deaths=99)),
        task("killed", data=Dying(tmp_path / "killed")),
    ]
    found, same = run_world(
        together, 2, [*PLAIN, *others], folder, dict(policy="elsewhere", save_every=5), timeout_s=100
    )
    assert found == same, "every rank has the result"
    assert_as_alone(found, {**expected, "killed": expected["a"]}, folder)
    assert found["raises"]["cause"] == "ValueError: no such weights"
    assert "the norm of the gradients of step 2 is inf" in found["diverges"]["cause"]
    assert "its process died 3 times after step" in found["kills"]["cause"]
    assert {found[name]["status"] for name in ("raises", "diverges", "kills")} == {"failed"}
    assert found["a"]["best"] == min("abc", key=lambda name: expected[name]["held_out"])
    rows = [json.loads(row) for row in (folder / "journal.jsonl").read_text().splitlines()]
    assert {row["decision"] for row in rows} >= {"run", "move", "died", "done", "failed"}
    assert "killed" in (folder / "report.html").read_text() and (folder / "timeline.svg").exists()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def other_rules(env: RankEnv, tasks: Sequence[cl.Task], folder: Path) -> list[str]:
    told = []
    for stop in (None, cl.Halving(rungs=(4,), keep=0.75)):
        with pytest.raises(ValueError) as found:
            together(env, tasks, folder, dict(stop=stop, policy="lrtf", resume=True))
        told.append(str(found.value))
    return told


def test_a_stopped_run_goes_on_on_another_number_of_devices_and_halves_as_one_that_was_not_stopped(
    expected: Found, tmp_path: Path
) -> None:
    folder, stop = tmp_path / "many", cl.Halving(rungs=(4,), keep=0.5)
    tasks = [*PLAIN, task("d", 1e-5)]
    how = dict(stop=stop, policy="lrtf")
    assert run_world(together, 1, tasks, folder, how | dict(kills={5: "stop"}), timeout_s=240) == [None]
    assert json.loads((folder / "result.json").read_text())["tasks"][0]["status"] == "open"
    found = run_world(together, 2, tasks, folder, how | dict(resume=True), timeout_s=240)[0]
    told = run_world(other_rules, 2, tasks, folder, timeout_s=60)
    assert told[0] == told[1] and len(told[0]) == 2
    assert all(
        "legal: a cl.Halving with metric='loss', keep=0.5, rungs that begin with [4]" in t for t in told[0]
    )
    kept = stop.kept({n: each["losses"][3] for n, each in expected.items()} | {"d": found["d"]["losses"][3]})
    assert {n for n in found if found[n]["status"] == "done"} == {*kept} and len(kept) == 2
    assert_as_alone(found, {n: expected[n] for n in kept if n in expected}, folder)
    for name in {"a", "b", "c"} - {*kept}:
        assert found[name]["losses"] == expected[name]["losses"][:4], "stopped at the rung"
        assert found[name]["cause"] == "not among the best 2 of 4 at step 4"


def test_tasks_larger_than_their_device_train_stage_by_stage_with_the_bits_of_no_budget(
    tmp_path: Path,
) -> None:
    """One asks for stages, and is killed; the other has a budget alone. Both move between the devices."""
    free = {name: value for name, value in own.BUDGET.items() if name != "memory"}
    tasks = [
        task("stages", build=own.deep, config=own.SPILLED, data=Dying(tmp_path / "killed")),
        task("budget", 3e-3, 5, build=own.deep, config=own.BUDGET),
    ]
    unhurt = [replace(tasks[0], data=TRAIN), task("budget", 3e-3, 5, build=own.deep, config=free)]
    expected = by_themselves(unhurt, tmp_path)
    folder, how = tmp_path / "many", dict(policy="elsewhere", save_every=3)
    found = run_world(together, 2, tasks, folder, how, timeout_s=240)[0]
    assert_as_alone(found, expected, folder, tasks)
    told = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert "budget: ways to train within memory.device_budget" in told, told


STAGED = [
    task("three", build=own.deep, config=own.SPILLED),
    task("two", 3e-3, 9, config=dict(
        optimizer=dict(type="lion"), clip_grad_norm=0.5, zero=dict(stage=3, prefetch=0), memory=own.AWAY,
        parallel=dict(pipeline=own.STAGES | dict(stages_per_rank=2, micro_batches=4)),
    ), build=own.deep),
]  # fmt: skip
"""Unlike in their stages, micro-batches, optimizers and steps."""


@pytest.fixture(scope="module")
def expected_of_staged(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return by_themselves(STAGED, tmp_path_factory.mktemp("staged"))


def abreast_in(folder: Path) -> set[tuple[str, str]]:
    """Pairs of tasks that the journal shows to be asked for at once, of one device."""
    rows = [json.loads(row) for row in (folder / "journal.jsonl").read_text().splitlines()]
    runs = [row for row in rows if row["decision"] == "run"]
    pairs = zip(runs, runs[1:], strict=False)
    return {
        (a["task"], b["task"])
        for a, b in pairs
        if a["devices"] == b["devices"] and b["at_s"] - a["at_s"] < 0.01
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_two_tasks_take_turns_stage_by_stage_with_their_own_bits(
    devices: int, expected: Found, expected_of_staged: Found, tmp_path: Path
) -> None:
    folder, how = tmp_path / "many", dict(quantum="stage", quantum_s=0.02)
    tasks = [*STAGED, *PLAIN[:2]]
    found = run_world(together, devices, tasks, folder, how, timeout_s=240)[0]
    names = ("three", "two", "a", "b")
    assert_as_alone(found, {n: (expected_of_staged | expected)[n] for n in names}, folder, tasks)
    if devices == 1:  # of two devices each may take one of them
        assert frozenset(("three", "two")) in {frozenset(pair) for pair in abreast_in(folder)}


GANGS = [
    task("pair", devices=2),
    task("tensor", 3e-3, 8, devices=2, config=dict(parallel=dict(tensor=dict(mode="1d", size=2)))),
]


def test_gangs_meet_again_when_a_worker_dies_and_have_the_bits_of_a_world_of_their_size(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "many"
    raises = task("raises", devices=2, data=Raising())
    hurt = [
        replace(GANGS[0], data=Dying(tmp_path / "killed", deaths=2)),
        GANGS[1],
        task("a"),
        task("b", 3e-3, 9),
    ]
    expected = by_themselves([*GANGS, *hurt[2:]], tmp_path)
    how = dict(policy="elsewhere", save_every=3)
    found, same = run_world(together, 2, [*hurt, raises], folder, how, timeout_s=240)
    assert found == same
    assert_as_alone(found, expected, folder)
    assert found["raises"]["cause"] == "ValueError: sample 12 is torn"
    rows = [json.loads(row) for row in (folder / "journal.jsonl").read_text().splitlines()]
    assert [row["devices"] for row in rows if row["decision"] == "died"] == [[0, 1]] * 2
    runs = [row["devices"] for row in rows if row["decision"] == "run" and row["task"] == "pair"]
    assert runs and all(devices == [0, 1] for devices in runs)


def of_one_process(env: RankEnv, folder: Path, global_batch: int) -> list[float]:
    with env.launch(CONFIG) as context:
        example = default_collate(own.of_pictures()[:4])
        engine = cl.initialize(own.pictures, context=context, criterion="model", example=example)
        run = cl.Run(folder, engine)
        return [
            float(run.step(b).loss)
            for b in run.batches(own.of_pictures(), steps=5, global_batch=global_batch)
        ]


def test_a_task_of_pictures_trains_on_its_own_loss_by_its_first_batch(tmp_path: Path) -> None:
    """No random ids run through it, so its loss and its roles are proven on its data."""
    plain = cl.Task("one", own.pictures, data=own.of_pictures, steps=5, global_batch=4, criterion="model")
    tensor = replace(plain, name="tensor", devices=2, config=dict(parallel=dict(tensor=2)))
    loaded = replace(plain, name="loaded", data=DataLoader(own.of_pictures(), batch_size=4, shuffle=True))
    single = replace(plain, name="single", global_batch=1)  # which has one label in its first batch
    found = run_world(together, 2, [plain, tensor, loaded, single], tmp_path / "many", {}, timeout_s=240)[0]
    (expected,) = run_world(of_one_process, 1, tmp_path / "alone", 4)
    assert found["single"]["losses"] == run_world(of_one_process, 1, tmp_path / "single", 1)[0]
    for name in ("one", "loaded"):
        assert found[name]["losses"] == expected, found[name]["cause"]
    assert found["tensor"]["losses"] == pytest.approx(expected, rel=1e-10), found["tensor"]["cause"]


def test_gangs_of_two_sizes_share_four_devices(tmp_path: Path) -> None:
    """A gang of 4 and one of 2 are never open in one worker; a task of one device moves between them."""
    folder = tmp_path / "many"
    tasks = [task("four", 1e-2, 6, devices=4), GANGS[0], GANGS[1], task("a", 1e-2, 6)]
    found = run_world(together, 4, tasks, folder, dict(policy="elsewhere"), timeout_s=240)[0]
    assert_as_alone(found, by_themselves(tasks, tmp_path), folder)


def trained_alone(env: RankEnv, tasks: Sequence[cl.Task], folder: Path) -> dict[str, list[float]]:
    """The losses of each task by itself."""
    found = {}
    for each in tasks:
        assert callable(each.build)
        with cl.launch(each.settings(CONFIG), rank=0, world_size=1) as context:
            engine = cl.initialize(each.build, context=context)
            run = cl.Run(folder / each.name, engine)
            batches = run.batches(each.data, steps=each.steps, global_batch=each.global_batch)
            found[each.name] = [float(run.step(batch).loss) for batch in batches]
    return found


def test_tasks_over_one_base_run_abreast_with_their_own_bits_though_a_worker_dies(tmp_path: Path) -> None:
    stated = dict(config=own.SPILLED | dict(memory=own.SPILLED["memory"] | dict(shared_base="deep")))
    tasks = [own.adapted(name, lr, 3, evaluate=None, **stated) for name, lr in dict(a=1e-2, b=3e-3).items()]
    tasks.append(own.adapted("killed", 1e-2, 3, evaluate=None, data=Dying(tmp_path / "mark"), **stated))
    tasks.append(task("other", 1e-2, 3, evaluate=None, build=own.over_another_base, **stated))
    by_themselves = run_world(trained_alone, 1, [replace(t, data=TRAIN) for t in tasks[:3]], tmp_path)[0]
    folder = tmp_path / "many"
    found = run_world(together, 1, tasks, folder, dict(policy="fifo", save_every=2), timeout_s=240)[0]
    assert found is not None
    assert "memory.shared_base='deep': the frozen weights" in found["other"]["cause"]
    for name, losses in by_themselves.items():
        assert found[name]["status"] == "done" and found[name]["losses"] == losses, name
    rows = [json.loads(row) for row in (folder / "journal.jsonl").read_text().splitlines()]
    runs = [(row["at_s"], row["task"]) for row in rows if row["decision"] == "run"]
    assert [name for _, name in runs[:4]] == ["a", "b", "killed", "other"], "asked for at once"
    assert {row["decision"] for row in rows} >= {"died", "failed", "done"}


@pytest.fixture(scope="module")
def expected_of_gangs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return by_themselves(GANGS, tmp_path_factory.mktemp("gangs"))


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(19))
def test_kills_at_drawn_moments_change_no_bit(
    seed: int, expected: Found, expected_of_gangs: Found, expected_of_staged: Found, tmp_path: Path
) -> None:
    """Five moments each: two workers, then the whole job or a signal, then two workers of the run that goes on. From 12
    on with tasks that take turns stage by stage."""
    draw, folder = random.Random(seed), tmp_path / "many"
    stop = cl.Halving(rungs=(4,), keep=0.5) if draw.random() < 0.3 else None
    policy = list(POLICIES)[seed % len(POLICIES)]
    devices = [1, 2, 2, 4][seed % 4], draw.choice([1, 2] if seed % 4 == 0 else [2, 4])
    tasks = [*PLAIN, *(GANGS if min(devices) > 1 else []), *(STAGED if seed >= 12 else [])]
    want = (
        expected
        | (expected_of_gangs if min(devices) > 1 else {})
        | (expected_of_staged if seed >= 12 else {})
    )
    how = dict(policy=policy, save_every=draw.choice([None, 1, 3, 5]), stop=stop, quantum_s=0.02)
    how |= dict(quantum="stage" if seed >= 12 else "step")
    first, second = draw.sample(range(1, 7), 2)
    kills = {first: "worker", second: "worker", draw.randint(7, 9): draw.choice(["job", "job", "stop"])}
    with suppress(WorldError):
        assert (
            run_world(together, devices[0], tasks, folder, how | dict(kills=kills), timeout_s=300)[0] is None
        )
    how |= dict(resume=True, kills={1: "worker", draw.randint(2, 4): "worker"})
    found = run_world(together, devices[1], tasks, folder, how, timeout_s=300)[0]
    moments = (folder / "moments").read_text().splitlines()
    print(seed, policy, devices, how["save_every"], "Halving" if stop else "", *moments, sep="; ")
    assert len(moments) >= 4, moments
    kept = stop.kept({name: its["losses"][3] for name, its in want.items()}) if stop else list(want)
    assert_as_alone(found, {name: want[name] for name in kept}, folder, tasks)
    for name in {*want} - {*kept}:
        assert found[name]["losses"] == want[name]["losses"][:4], "stopped at the rung"


def by_turns(env: RankEnv, folder: Path) -> list[float]:
    """Seconds from a request to its first step, of two open tasks that train a step each, by turns."""
    prepare = partial(launcher_env.show_one_device, env.rank)
    order = Order((task("a"), task("b")), CONFIG, folder, None, launch_gang, folder / "log", prepare)
    worker = Worker(order)
    place = dict(rank=0, world_size=1)
    asked = [
        dict(do="run", task=name, to=step, evaluates=False, place=place)
        for step in range(1, 4)
        for name in "ab"
    ]
    answers = [worker.answer(request) for request in asked]
    assert [answer["step"] for answer in answers] == [request["to"] for request in asked]
    assert not any(saved_step(folder, name) for name in "ab")
    worker.park_all()
    return [answer["open_s"] for answer in answers[2:]]


def going_on(env: RankEnv, folder: Path) -> list[dict[str, Any]]:
    """Answers of a worker that goes on after each, of which it is asked again in the midst of the fourth."""
    order = Order(
        (task("a"), task("torn", data=own.Raising())), CONFIG, folder, None, launch_gang, folder / "log",
        partial(launcher_env.show_one_device, env.rank),
    )  # fmt: skip
    is_asked = [False]
    worker, told = Worker(order, lambda: is_asked[0]), list[dict[str, Any]]()
    for name, to, on, asked in (
        ("a", 1, 1, False), ("a", 3, 5, False), ("a", 4, 4, False), ("a", 9, 9, True), ("torn", 1, 11, False),
        ("torn", 1, 1, False), ("a", 12, 12, False),
    ):  # fmt: skip
        is_asked[0] = asked
        place = dict(rank=0, world_size=1)
        request = dict(do="run", task=name, to=to, evaluates=False, place=place, on=on)
        told += worker.answers([request])
        worker.go_on()
    worker.park_all()
    return told


def test_a_worker_goes_on_after_its_answer_until_it_is_asked_again(tmp_path: Path, expected: Any) -> None:
    """Its steps are those of the task alone. An error meanwhile is told with the next answer."""
    first, second, third, fourth, torn, failed, last = run_world(going_on, 1, tmp_path)[0]
    assert (first["step"], "over" in first) == (1, False) and (second["step"], "over" in second) == (3, False)
    assert (third["before"], third["step"], third["loss"]) == (5, 5, None), "it was past step 4"
    assert third["over"]["step"] == 5 and third["over"]["run_s"] > 0 <= third["over"]["ago_s"]
    assert (fourth["before"], fourth["step"]) == (5, 6), "asked again, it ends after a step"
    assert torn["step"] == 1 and "over" not in torn
    assert failed["said"] == "failed" and "is torn" in failed["cause"], failed
    assert last["done"] and losses_of(tmp_path, "a") == list(expected["a"]["losses"])


def test_a_device_goes_from_one_open_task_to_another_within_5_ms(tmp_path: Path) -> None:
    assert median(run_world(by_turns, 1, tmp_path)[0]) <= 5e-3


def test_everything_that_is_wrong_is_refused_at_once() -> None:
    stream = iter(TRAIN)
    tasks = [
        task("a"), task("a"), task("../b"), task("c", data=stream), task("d", steps=0), task("e", devices=2),
        cl.Task("f", own.gpt, data=TRAIN, steps=3, global_batch=4, config=dict(optimizer=dict(rate=1))),
        cl.Task("g", own.gpt, data=TRAIN, steps=3, global_batch=4, config=dict(parallel=dict(data=2))),
        task("h", evaluate=None),
    ]  # fmt: skip
    with pytest.raises(ValueError) as told:
        check(tasks, CONFIG, "best", cl.Halving(metric="held_out", rungs=(9, 4), keep=2), 0, 3, "part")
    for words in (
        "'a' names 2 tasks", "policy='best': no such policy; legal: fifo", "save_every=0", "stop.keep=2",
        "quantum='part': legal: 'step', 'stage'",
        "stop.rungs=(9, 4)", "f, g, h have no evaluate", "task '../b': the name is also a folder",
        "task 'c': data: a list_iterator has no length", "task 'd': steps=0", "devices=2 in a world of 3; legal: 1, 3",
        "task 'f': ", "optimizer.rate", "task 'g': ", "parallel.data",
    ):  # fmt: skip
        assert words in str(told.value), words
    with pytest.raises(ValueError, match="there is none"):
        check([], CONFIG, "link", None, None, 1)


@pytest.mark.parametrize(
    "given, legal",
    [
        (dict(tasks=3), "a list of cl.Task"),
        (dict(tasks=["x"]), "a list of cl.Task"),
        (dict(config="x"), "a dict of settings"),
        (dict(directory=3), "the path of a folder"),
        (dict(directory=""), "the path of a folder"),
        (dict(stop="x"), "cl.Halving, or None"),
        (dict(on_report=3), "a function, or None"),
        (dict(resume="x"), "True or False"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(
    given: dict[str, Any], legal: str, tmp_path: Path
) -> None:
    arguments: Any = dict(tasks=[task("a")], config=CONFIG, directory=tmp_path) | given
    ((name, value),) = given.items()
    with pytest.raises(ValueError) as told:
        cl.train_many(**arguments)
    assert str(told.value) == f"train_many: {name}={value!r}; legal: {legal}"


def test_a_task_reads_its_data_as_its_loader_says(tmp_path: Path) -> None:
    loader = dict(collate=own.texts, labels="unshifted", shuffle=False)
    rows = [*own.TOKENS[:22]]
    given = dict(build=own.of_texts, data=rows, evaluate=rows, loader=loader)
    tasks = [task("texts", **given), task("shuffled", **given | dict(loader=loader | dict(shuffle=True)))]
    expected = by_themselves(tasks, tmp_path / "alone")
    found: Found = run_world(together, 1, tasks, tmp_path / "many", {})[0]
    assert_as_alone(found, expected, tmp_path / "many", tasks)
    assert expected["texts"]["losses"] != expected["shuffled"]["losses"]


COLLATORS = ("own.texts", "partial(own.texts, x=own.Joining())", "own.Joining()", "own.Joining().join")


def test_what_a_directory_is_compared_by_has_no_address() -> None:
    """Else no task with a collator could be resumed, or be on two ranks."""
    code = (
        "from functools import partial; from tests.many import tasks as own; "
        "from colossal_lite.many.fingerprint import fingerprint; kept = [object() for _ in range({})]; "
        f"[print(fingerprint([own.task('a', loader=dict(collate=each))], own.CONFIG)['a']) for each in "
        f"({', '.join(COLLATORS)})]"
    )
    found = [subprocess.check_output([sys.executable, "-c", code.format(n)], text=True) for n in (0, 99)]
    assert found[0] == found[1] and len({*found[0].split()}) == len(COLLATORS)
    assert fingerprint([task("a", loader=dict(collate=default_collate))], CONFIG)["a"] not in found[0].split()


@pytest.mark.parametrize(
    "given",
    [
        dict(build=own.deep), dict(build=own.deep()), dict(criterion=own.noisy), dict(criterion=own.Counting()),
        dict(data=own.train), dict(data=TRAIN[1:]), dict(evaluate=None), dict(build=partial(cl.models.GPT, own.SHAPE)),
    ],
)  # fmt: skip
def test_a_directory_of_another_model_criterion_or_data_is_another_s(given: dict[str, Any]) -> None:
    """Else the losses of the old one would be given for the new one."""
    found = [fingerprint([each], CONFIG)["a"] for each in (task("a"), task("a", **given), task("a", **given))]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("own_lr", [{"optimizer.lr": 0.5}, dict(optimizer={"lr": 0.5})])
def test_settings_of_a_task_lie_over_shared_ones_in_every_form(own_lr: dict[str, Any]) -> None:
    for shared in (dict(optimizer=dict(type="sgd", lr=0.1)), {"optimizer.lr": 0.1, "optimizer.type": "sgd"}):
        each = cl.Task("a", own.gpt, data=TRAIN, steps=1, global_batch=1, config=own_lr)
        check([each], shared, "link", None, None, 1)
        optimizer = Config.load(each.settings(shared)).optimizer
        assert (optimizer.lr, optimizer.type) == (0.5, "sgd")


def test_models_of_other_shapes_are_other_models() -> None:
    shapes = [replace(own.SHAPE, width=width) for width in (8, 16)]
    of_others = [transformers.GPT2Config(n_layer=layers) for layers in (1, 2)]
    for builds in (
        [cl.models.GPT(s) for s in shapes],
        [partial(cl.models.GPT, s) for s in shapes],
        [partial(transformers.GPT2LMHeadModel, c) for c in of_others],
        [partial(own.gpt, dtype=dtype) for dtype in (torch.float32, torch.float64)],  # type: ignore[call-arg]
    ):
        found = {fingerprint([task("a", build=build)], CONFIG)["a"] for build in builds}
        assert len(found) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.zeros(2)), (numpy.array(["a"]), numpy.array(["b"])), ({1}, {2}), (b"a", b"b"),
        (signal.SIGINT, signal.SIGTERM), (date(2020, 1, 1), date(2020, 1, 2)), (range(2), range(3)),
        ({1: 1, "a": 2}, {1: 1, "a": 3}), (Namespace(width=1), Namespace(width=2)),
        (own.Counting(), own.Late()), (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
    ],
)  # fmt: skip
def test_other_arguments_of_a_function_make_another_task(one: Any, other: Any) -> None:
    """Else the results of the old one would be given for the new one."""
    found = [fingerprint([task("a", build=partial(own.gpt, x))], CONFIG)["a"] for x in (one, other, one)]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", ["build", "criterion"])
def test_other_settings_of_a_module_make_another_task(name: str) -> None:
    smoothed = [torch.nn.CrossEntropyLoss(label_smoothing=x) for x in (0.1, 0.2, 0.1)]
    found = [fingerprint([task("a", **{name: torch.nn.Sequential(x)})], CONFIG)["a"] for x in smoothed]
    assert found[0] == found[2] != found[1]


def test_tasks_share_neither_the_draws_of_their_data_nor_the_state_of_their_criterion(tmp_path: Path) -> None:
    """And a criterion that draws is refused, as its numbers would depend on the other tasks."""
    counting = own.Counting()
    tasks = [
        task("one", criterion=counting), task("other", criterion=counting),
        task("drawn", data=own.drawn), task("again", data=own.drawn, evaluate=own.drawn),
        task("noisy", criterion=own.noisy), task("late", criterion=own.Late()),
    ]  # fmt: skip
    found: Found = run_world(together, 1, tasks, tmp_path, {})[0]
    assert found["one"]["losses"] == found["other"]["losses"]
    assert found["drawn"]["losses"] == found["again"]["losses"]
    for name in ("noisy", "late"):
        assert found[name]["status"] == "failed"
        assert "build, criterion: a step draws from torch's own generator" in found[name]["cause"]


@pytest.mark.parametrize("criterion", [own.torn, own.torn_draw])
def test_a_step_that_fails_its_task_is_in_no_checkpoint_and_a_resume_makes_it_again(
    criterion: Any, tmp_path: Path
) -> None:
    tasks = [task("torn", criterion=criterion)]
    first, again = (
        run_world(together, 1, tasks, tmp_path, dict(save_every=1, resume=resume))[0]["torn"]
        for resume in (False, True)
    )
    assert first["status"] == "failed" and first["losses"]
    assert (again["status"], again["cause"], again["losses"]) == ("failed", first["cause"], first["losses"])


def test_a_batch_without_a_label_changes_nothing_and_fails_no_task(tmp_path: Path) -> None:
    tasks = [cl.Task("sparse", own.gpt, data=own.partly_labelled, steps=8, global_batch=1)]
    found = run_world(together, 1, tasks, tmp_path / "many", {})[0]["sparse"]
    losses = run_world(of_sparse, 1, tmp_path / "alone")[0]
    assert found["status"] == "done", found["cause"]
    assert any(map(math.isnan, losses))
    assert [math.isnan(x) or x for x in found["losses"]] == [math.isnan(x) or x for x in losses]


def of_sparse(env: RankEnv, folder: Path) -> list[float]:
    with env.launch(CONFIG) as context:
        run = cl.Run(folder, cl.initialize(own.gpt, context=context))
        batches = run.batches(own.partly_labelled(), steps=8, global_batch=1)
        return [float(run.step(batch).loss) for batch in batches]


def beside_one_that_draws(env: RankEnv, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers for two tasks that take turns, and those of the second by itself afterwards."""
    staged = partial(task, build=own.deep, config=own.SPILLED)
    order = Order(
        (staged("late", criterion=own.LateDraws()), staged("clean")), CONFIG, folder, None,
        launch_gang, folder / "log", partial(launcher_env.show_one_device, env.rank),
    )  # fmt: skip
    worker, place = Worker(order), dict(rank=0, world_size=1)
    names = ("late", "clean")
    asked = [dict(do="run", task=name, to=9, evaluates=False, place=place) for name in names]
    told = worker.answers(asked), worker.answers([asked[1] | dict(to=11)])
    worker.park_all()
    return told


def test_a_task_that_takes_turns_with_one_that_draws_is_not_blamed(tmp_path: Path) -> None:
    (late, clean), (after,) = run_world(beside_one_that_draws, 1, tmp_path)[0]
    assert late["said"] == "failed" and "a step draws from torch's own generator" in late["cause"]
    assert (clean["said"], after["said"], after["step"]) == ("ran", "ran", 11), clean


def reports(env: RankEnv, folder: Path) -> list[str]:
    told = []
    for how in (
        dict(on_report=own.reports_badly), dict(on_report=own.reports_a_word, resume=True),
    ):  # fmt: skip
        try:
            together(env, PLAIN[:2], folder, how)
        except OnReportError as error:
            told.append(str(error))
    return told


def test_a_function_of_reports_that_raises_ends_the_run_by_name_and_all_is_saved(
    expected: Found, tmp_path: Path
) -> None:
    told = run_world(reports, 2, tmp_path)
    assert told[0] == told[1]
    for text, words in zip(
        told[0],
        ("raised KeyError: 'my table'. ", "returned 'halt'; legal: 'go', 'stop' or None. "),
        strict=True,
    ):
        assert text.startswith("on_report of task '") and words in text
        assert f"Every open task is saved in {tmp_path}; resume=True goes on" in text
    assert any(saved_step(tmp_path, name) for name in "ab")
    found = run_world(together, 1, PLAIN[:2], tmp_path, dict(resume=True))[0]
    assert_as_alone(found, {name: expected[name] for name in "ab"}, tmp_path)


def test_whole_numbers_of_numpy_are_numbers_and_texts_are_none(tmp_path: Path) -> None:
    one = numpy.int64(1)
    tasks = [task("a", steps=3 * one, devices=one), task("b", 1e-3, steps=3)]
    stop = cl.Halving(rungs=[2 * one], keep=0.5)
    found = run_world(together, 1, tasks, tmp_path, dict(stop=stop))[0]
    assert sorted(its["status"] for its in found.values()) == ["done", "stopped"]
    policy: Any = ["link"]
    with pytest.raises(ValueError) as told:
        check([task("a", devices="1")], CONFIG, policy, None, None, 2)
    assert "devices='1' in a world of 2; legal: 1, 2" in str(told.value)
    assert "policy=['link']: no such policy" in str(told.value)


def test_a_class_of_data_is_a_function_that_returns_it() -> None:
    check([task("a", data=Raising)], CONFIG, "link", None, None, 1)
    assert len(data_of(Raising, 0, "data")) == len(TRAIN)


def test_a_function_that_draws_gives_other_samples_to_evaluate_on_than_to_train_on() -> None:
    trained, again, held_out = (data_of(own.drawn, 3, use)[0][0] for use in ("data", "data", "evaluate"))
    assert torch.equal(trained, again) and not torch.equal(trained, held_out)


def test_a_function_of_data_draws_by_the_seed_of_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[Any]()
    monkeypatch.setattr(
        worker, "OpenTask", lambda order, task, config, data, place, store: opened.append(data)
    )
    tasks = [task("shared", data=own.drawn), task("own", data=own.drawn, config=dict(seed=11))]
    order = Order(tasks, CONFIG | dict(seed=3), tmp_path, None, launch_gang, tmp_path / "log", int)
    of_device = Worker(order)
    for each in tasks:
        of_device._opened(each, {})
    for data, seed in zip(opened, (3, 11), strict=True):
        assert torch.equal(data[0][0], data_of(own.drawn, seed, "data")[0][0])


@pytest.mark.parametrize("loader", [3, dict(label="unshifted"), dict(start=4)])
def test_a_loader_of_other_arguments_is_refused_by_name(loader: Any) -> None:
    with pytest.raises(ValueError, match="task 'a': loader=.*; legal: a dict of shuffle, drop_last, workers"):
        check([task("a", loader=loader)], CONFIG, "link", None, None, 1)


def test_a_criterion_that_is_none_is_refused_before_a_task_opens() -> None:
    for criterion in ("mdoel", 3):
        with pytest.raises(ValueError, match=f"criterion={criterion!r}; legal: a callable, 'model' or None"):
            check([task("a", criterion=criterion)], CONFIG, "link", None, None, 1)


def wide() -> cl.models.GPT:
    return cl.models.GPT(replace(own.SHAPE, layers=2, width=256))


def huge() -> cl.models.GPT:
    """About 1.5 T parameters, on meta."""
    return cl.models.GPT(cl.models.GPTConfig(vocabulary=64, layers=2, heads=1, width=250_000, sequence=8))


def test_a_task_larger_than_host_and_disk_is_refused_with_its_bytes(tmp_path: Path) -> None:
    away = dict(zero=dict(stage=3), memory=dict(placement="disk", disk_dir=str(tmp_path)))
    for config, words in ((dict(), "the host has"), (away, f"are free in {tmp_path}")):
        with pytest.raises(
            ValueError, match=r"task 'huge': weights and optimizer state take [\d.,]+ GiB"
        ) as told:
            check([task("a"), task("huge", build=huge, config=config)], CONFIG, "link", None, None, 1)
        assert words in str(told.value) and "task 'a'" not in str(told.value)
    raises = task("raises", build=own.raises)
    check([raises], CONFIG, "link", None, None, 1)
    odd = task("odd", config=dict(optimizer=dict(groups=[dict(match="no.such", lr=1.0)])))
    with pytest.raises(ValueError, match=r"task 'odd': optimizer.groups.0.match = 'no.such'"):
        check([odd], CONFIG, "link", None, None, 1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(), dict(optimizer=dict(type="sgd", momentum=0.9)), dict(precision="bf16"),
        dict(precision="bf16", optimizer=dict(type="adamw", moments="bf16")),
        dict(precision=dict(dtype="bf16", master="split")),
    ],
)  # fmt: skip
def test_the_least_bytes_of_a_task_are_those_that_its_engine_holds(settings: dict[str, Any]) -> None:
    with cl.launch(CONFIG | settings, rank=0, world_size=1) as context:
        engine = cl.initialize(wide, context=context)
        engine.train_step(tuple(torch.stack(part) for part in zip(*TRAIN[:4], strict=True)))
        held = {row.kind: row.now_bytes for row in engine.memory_report()}
    weights, records = state_bytes(wide(), Config.load(CONFIG | settings))
    assert weights <= held["weights"] <= 1.01 * weights
    assert records <= held.get("masters", 0) + held["optimizer"] <= 1.01 * records


def refused(env: RankEnv, folder: Path) -> list[str]:
    told = []
    for tasks, how in (
        ([task("x", build=lambda: own.gpt())], {}),
        ([task("a")], {}),
        ([task("a", 3e-3)], dict(resume=True)),
        ([task("a"), task("b")], dict(resume=True)),
    ):
        try:
            together(env, tasks, folder / tasks[0].name, how)
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_lambda_a_directory_in_use_and_one_of_other_tasks_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sweep.json").write_text(json.dumps(fingerprint([task("a")], CONFIG)))
    unsent, begun, other, more = run_world(refused, 1, tmp_path)[0]
    assert "cannot be sent to the process that trains them" in unsent and "no lambda" in unsent
    assert "were begun there; legal: resume=True" in begun
    assert "belongs to other tasks: a with other functions, data, steps, batch or settings; legal" in other
    assert "belongs to other tasks: b only here; legal" in more


def test_a_done_task_whose_rows_were_cut_short_says_so_and_is_not_compared_by_an_earlier_loss(
    tmp_path: Path,
) -> None:
    """Its last loss was that of the last row left, and a task could be the best by it."""
    ended = [dict(name=n, status="done", cause="", step=3, held_out=None) for n in ("whole", "cut", "holed")]
    (tmp_path / "result.json").write_text(json.dumps(dict(tasks=ended, devices=1, jobs=[], spans=[])))
    kept = {"whole": (1, 2, 3), "cut": (1,), "holed": (1, 3)}
    for name, steps in kept.items():
        (tmp_path / "tasks" / name).mkdir(parents=True)
        lines = [json.dumps(dict(step=step, loss=float(step))) + "\n" for step in steps]
        (tmp_path / "tasks" / name / "metrics.jsonl").write_text("".join(lines) + '{"st')
    found = read_result(tmp_path)
    assert found["cut"].cause == "metrics.jsonl has 1 of 3 steps, so later losses are NaN"
    assert found["whole"].cause == found["holed"].cause == "" and found["whole"].training_loss == 3.0
    assert [len(task.losses) for task in found.tasks.values()] == [3, 3, 3]
    assert math.isnan(found["holed"].losses[1]) and found["holed"].training_loss == 3.0
    assert math.isnan(found["cut"].training_loss) and found.best == "whole"


@pytest.mark.parametrize("status", ["failed", "stopped", "open"])
def test_a_task_that_is_not_done_has_a_loss_for_each_step_too(status: str, tmp_path: Path) -> None:
    ended = [dict(name="cut", status=status, cause="a fault", step=3, held_out=None)]
    (tmp_path / "result.json").write_text(json.dumps(dict(tasks=ended, devices=1, jobs=[], spans=[])))
    (tmp_path / "tasks" / "cut").mkdir(parents=True)
    (tmp_path / "tasks" / "cut" / "metrics.jsonl").write_text(json.dumps(dict(step=1, loss=1.0)) + "\n")
    found = read_result(tmp_path)["cut"]
    assert len(found.losses) == 3 and math.isnan(found.training_loss)
    assert found.cause == "a fault; metrics.jsonl has 1 of 3 steps, so later losses are NaN"


def test_processes_of_several_launchers_are_refused_before_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents of one process each began, and gave two ranks one device."""
    given = dict(
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0", MASTER_ADDR="10.0.0.1"
    )
    for name, value in {**given, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="train_many: 2 processes, 1 of them .*legal: one launcher on one host"
    ):
        cl.train_many([task("a")], config=CONFIG, directory=tmp_path)


def test_a_result_gives_the_names_of_its_tasks_one_after_another() -> None:
    """Without an order of its own, `for name in result` asked for task 0 and ended in a KeyError."""
    ended = {n: TaskResult(n, "done", "", 1, [1.0], None, Path(n)) for n in ("b", "a")}
    result = ManyResult(ended, timeline=None, directory=Path())  # type: ignore[arg-type]
    assert list(result) == ["b", "a"] and "a" in result and "c" not in result


def test_a_result_that_cannot_be_written_is_refused_on_all_ranks_and_is_there_after_a_resume(
    tmp_path: Path,
) -> None:
    tasks = [task("a", steps=4), task("b", steps=4)]
    for name in ("result.json", "report.html"):
        (tmp_path / name).mkdir()
    with pytest.raises(WorldError) as caught:
        run_world(together, 2, tasks, tmp_path, {}, timeout_s=240, grace_s=30.0)
    for failure in caught.value.failures:
        assert failure.kind == "raised"
        assert failure.summary == (
            f"ValueError: directory: {tmp_path}/result.json cannot be written: Is a directory. Every task is saved; "
            f"legal: a folder with room, and resume=True"
        )
    (tmp_path / "result.json").rmdir()
    found = run_world(together, 2, tasks, tmp_path, dict(resume=True), timeout_s=240)[0]
    assert {name: (row["status"], len(row["losses"])) for name, row in found.items()} == {
        "a": ("done", 4), "b": ("done", 4)
    }  # fmt: skip
    assert not list(tmp_path.glob(".*.part"))
