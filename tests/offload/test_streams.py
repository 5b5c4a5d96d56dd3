"""Checks that the copy streams of real steps have no race, and that a missing wait is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_lite.memory.link import Transfer
from tests.shared.parity import Case, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, run_world
from tests.shared.streams import Recorder, races

ADAMW = dict(type="adamw", lr=0.01, weight_decay=0.1)
CASE = Case(
    layers=3, vocabulary=256, chunk_bytes=8 * 1500, steps=3, global_batch=4, world_size=1,
    config=dict(optimizer=ADAMW, clip_grad_norm=0.05, precision="bf16"),
)  # fmt: skip
ALL_ON_HOST = dict(weights=1.0, gradients=1.0, optimizer=1.0)
WITHIN = dict(
    optimizer=dict(type="adamw", lr=1e-2, update_when="backward"), clip_grad_norm=None,
    precision=dict(dtype="bf16", master="split", gradient="bf16"),
)  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "host": dict(memory=dict(placement="host")),
    "host, split masters": dict(
        memory=dict(placement="host"), precision=dict(dtype="bf16", master="split"), zero=dict(stage=1)
    ),
    "disk": dict(memory=dict(placement="disk")),
    "host, updated there": dict(memory=dict(placement="host", update_on="host")),
    "disk, split masters, updated on the host": dict(
        memory=dict(placement="disk", update_on="host"), precision=dict(dtype="bf16", master="split"),
        gradient_accumulation=2,
    ),
    "half of each": dict(
        memory=dict(placement="static", host_fraction=dict(weights=0.5, gradients=0.5, optimizer=0.5)),
        zero=dict(stage=3), gradient_accumulation=2,
    ),
    "all of each": dict(memory=dict(placement="static", host_fraction=ALL_ON_HOST), zero=dict(stage=3)),
    "all of each, updated there": dict(
        memory=dict(placement="static", update_on="host", host_fraction=ALL_ON_HOST), zero=dict(stage=3),
    ),
    "half of each, updated there": dict(
        memory=dict(
            placement="static", update_on="host", host_fraction=dict(weights=0.5, gradients=0.5, optimizer=0.7)
        ),
        zero=dict(stage=3), gradient_accumulation=2, precision="fp32",
    ),
    "a budget": dict(
        memory=dict(placement="auto", device_budget=470_000), zero=dict(stage=3, sum_order="ordered"),
        gradient_accumulation=2, precision="fp32",
    ),
    "a budget of two sums": dict(
        memory=dict(placement="auto", device_budget=330_000), zero=dict(stage=3, sum_order="ordered"),
        gradient_accumulation=2,
    ),
    "all of each, narrow gradients": dict(
        memory=dict(placement="static", host_fraction=ALL_ON_HOST), zero=dict(stage=3),
        precision=dict(dtype="bf16", gradient="bf16"),
    ),
    "host, updated within backward": dict(memory=dict(placement="host"), **WITHIN),
    "disk, updated within backward": dict(memory=dict(placement="disk"), zero=dict(stage=3), **WITHIN),
    "budgets and a disk": dict(
        memory=dict(placement="auto", device_budget=392_000, host_budget=225_000), zero=dict(stage=3)
    ),
    "budgets and a disk, updated there": dict(
        memory=dict(placement="auto", device_budget=330_000, host_budget=232_000, update_on="host"),
        zero=dict(stage=3),
    ),
}  # fmt: skip


def placed(name: str, directory: Path) -> Case:
    config = PLACES[name]
    if "disk" in name:
        config = config | dict(memory=config["memory"] | dict(disk_dir=str(directory)))
    return replace(CASE, config={**CASE.config, **config})


def ran(env: RankEnv, case: Case, fault: str = "") -> tuple[list[float], list[str]]:
    """Losses of steps with reads between them, and the races of their streams; none without a device to stream to."""
    recorder = Recorder()
    streams = case.full_config.get("memory") is not None
    planted = patched(*FAULTS[fault][1:]) if fault else nullcontext()
    with env.launch(case.full_config) as context, recorder.active() if streams else nullcontext(), planted:
        engine = start(case, context)
        losses = [float(engine.train_step(case.batch(number)).loss) for number in range(case.steps)]
        losses.append(float(sum(value.double().sum() for value in engine.full_state_dict().values())))
        losses.append(float(engine.train_step(case.batch(9)).loss))
        engine.eval_step(case.batch(9))
        if streams:
            engine.close()
    found = races(recorder.log, recorder.host.__contains__)
    if streams and not fault:
        names = {entry.actor for entry in recorder.log if entry.kind == "touch" and entry.writes}
        assert len([name for name in names if name.startswith("stream ")]) == 2, (
            "both links copied on streams"
        )
    return losses, found[:10]


@pytest.mark.parametrize("name", PLACES)
def test_the_streams_of_steps_have_no_race_and_their_losses_are_those_of_the_device(
    name: str, tmp_path: Path
) -> None:
    case = placed(name, tmp_path)
    ((losses, found),) = run_world(ran, 1, case)
    assert found == []
    plain = {key: value for key, value in case.config.items() if key != "memory"}
    ((expected, _),) = run_world(ran, 1, replace(case, config=plain))
    assert losses == expected


# ---- what is forgotten shows ----


def _only_thread_waits(original: Any, self: Any) -> None:
    self.handed()


def _after_nothing(
    original: Any, self: Any, work: Any, size_bytes: int, *, after: Any = (), **more: Any
) -> Any:
    for transfer in after:
        transfer.handed()
    return original(self, work, size_bytes, **more)


def _copied_at_once(
    original: Any, self: Any, target: Any, source: Any, *, after: Any = (), **more: Any
) -> Any:
    for transfer in after:
        Transfer.handed(transfer)  # the thread that waits so knows nothing by it
    return original(self, target, source, **more)


def _at_once(original: Any, self: Any, work: Callable[[], object], *more: Any) -> None:
    work()


def _after_its_own_kind(original: Any, self: Any, key: Any) -> Any:
    others = {other: self._left.pop(other) for other in [*self._left] if other[0] != key[0]}
    found = original(self, key)
    self._left |= others
    return found


FAULTS: dict[str, tuple[str, str, Any]] = {
    "a copy does not come after what was computed": ("host", "StreamExecutor.now", lambda original, self: None),
    "the computing does not wait for a copy": ("host", "Transfer.wait", _only_thread_waits),
    "a copy does not come after another": ("host", "Link.run", _after_nothing),
    "the host does not wait for a copy": ("host", "Transfer.finish", _only_thread_waits),
    "a buffer is handed back as if nobody used it": (
        "half of each", "ArenaAllocator.give", lambda original, self, number, *last: original(self, number)
    ),
    "a place does not wait for whom of another kind had it": ("all of each", "Arena.take", _after_its_own_kind),
    "gradients do not wait for what had their place": (
        "half of each", "ArenaAllocator.take_now", lambda original, self, number: self.take(number)[0]
    ),
    "a thread does not wait for a stream": ("disk", "ThreadExecutor.run", _at_once),
    "a sum is added before it has landed": ("half of each", "ThreadExecutor.run", _at_once),
    "an update on the host does not wait for its gradient": ("host, updated there", "ThreadExecutor.run", _at_once),
    "weights go up before their update": ("host, updated there", "Link.copy", _copied_at_once),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_forgotten_is_a_race(fault: str, tmp_path: Path) -> None:
    ((_, found),) = run_world(ran, 1, replace(placed(FAULTS[fault][0], tmp_path), steps=2), fault)
    assert found, fault


def test_a_log_of_two_streams_that_wait_for_each_other_has_no_race_and_one_less_wait_has_one() -> None:
    recorder = Recorder()
    device = torch.device("cpu")
    one, two = recorder.Stream(device), recorder.Stream(device)
    x, y = torch.zeros(4), torch.zeros(4)
    with recorder.active():
        with recorder.stream(one):
            x.copy_(y)
        written = one.record_event()
        two.wait_event(written)
        with recorder.stream(two):
            y.add_(x)
        ended = two.record_event()
        recorder.current_stream(device).wait_event(ended)
        x.zero_()
    assert races(recorder.log) == []
    waits = [i for i, entry in enumerate(recorder.log) if entry.kind == "wait"]
    assert len(waits) == 2
    for number in waits:
        assert races([*recorder.log[:number], *recorder.log[number + 1 :]])
