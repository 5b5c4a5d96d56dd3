"""Where collectives return at once, as NCCL's do, the watch names a rank that does not come, and ends the wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

import colossal_lite as cl
from colossal_lite.distributed import communicator, mesh
from colossal_lite.distributed.communicator import CommError, PendingCollective, group_timeout, leave_group
from colossal_lite.distributed.watchdog import GRACE_S
from tests.shared.parity import Case
from tests.shared.pool import RankEnv, WorldError, run_world

TIMEOUT_S = 1.5
CASE = Case(dropout=0.1, config=dict(timeout_s=TIMEOUT_S, backend="gloo"))


@contextmanager
def waits_at_once() -> Iterator[None]:
    """The waits of collectives return at once, and what reads their numbers waits for all."""
    under_way: list[Any] = []
    tolist, wait = Tensor.tolist, PendingCollective.wait

    def late(pending: PendingCollective) -> Tensor:
        under_way.extend(pending._works)
        pending._works = ()
        return wait(pending)

    def read(tensor: Tensor) -> Any:
        while under_way:
            under_way.pop(0).wait()
        return tolist(tensor)

    with patch.object(PendingCollective, "wait", late), patch.object(Tensor, "tolist", read):
        yield


def patient_groups() -> Any:
    """Groups of torch's have the limit of NCCL's."""
    return patch.object(mesh, "group_timeout", lambda limit_s, _: group_timeout(limit_s, "nccl"))


def train(env: RankEnv, fault: str) -> tuple[str, float]:
    """What rank 0 is told when rank 1 does not come to its second step, and after how many seconds."""
    said, start = "", 0.0
    with ExitStack() as stack:
        stack.enter_context(patient_groups())
        context = stack.enter_context(env.launch(CASE.full_config))
        engine = cl.initialize(CASE.model, context=context)
        cut = context.local_batch(CASE.global_batch)

        def stays_away(*_: Any) -> None:
            if fault == "stops":
                time.sleep(0.4)  # a first beat
                os.kill(os.getpid(), signal.SIGSTOP)
            end = time.monotonic() + 20
            while not env.store.check(["told"]) and time.monotonic() < end:
                time.sleep(0.05)
            raise InterruptedError

        try:
            for number in range(2):
                if number and env.rank:
                    engine.model.get_submodule("blocks.1").register_forward_pre_hook(stays_away)
                elif number:
                    stack.enter_context(waits_at_once())
                start = time.monotonic()
                inputs, labels = CASE.batch(number)
                engine.train_step((inputs[cut], labels[cut]))
        except CommError as error:
            said = str(error)
            env.store.set("told", "")
        except InterruptedError:
            pass
    if fault == "stops":
        raise RuntimeError(f"{said} ({time.monotonic() - start:.1f} s)")
    return said, time.monotonic() - start


def test_a_rank_that_does_not_come_is_named_with_its_phase_and_the_collective() -> None:
    (said, taken_s), _ = run_world(train, 2, "hangs")
    assert said.startswith(f"rank 0: collectives have no end within {TIMEOUT_S:g} s, in phase "), said
    assert "of step 1: " in said and "on axis 'data' (call " in said, said
    assert "rank 1 has not come to it: rank 1 is in phase 'forward' of step 1, at" in said
    assert "in stays_away" in said and taken_s < TIMEOUT_S + 6


def test_a_rank_that_is_stopped_is_named_too() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(train, 2, "stops", timeout_s=40)
    said = caught.value.failures[0].summary
    assert "rank 1 does not answer: it has died or is stopped; it was last heard in phase 'forward'" in said


@pytest.mark.parametrize(
    ("backend", "grace_s"), [("cpu:gloo,cuda:nccl", GRACE_S), ("gloo", 0.0), (None, 0.0)]
)
def test_only_the_limit_of_nccl_comes_after_ours(backend: str | None, grace_s: float) -> None:
    assert group_timeout(7.0, backend) == timedelta(seconds=7.0 + grace_s)


def test_a_group_left_by_an_error_is_aborted_and_one_that_does_not_end_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, never = list[str](), threading.Event()

    class Group:
        def __init__(self, ends: bool) -> None:
            self._ends = ends

        def abort(self) -> None:
            done.append("aborted")
            self._ends or never.wait(20)

    monkeypatch.setattr(communicator, "END_S", 0.2)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: done.append("destroyed"))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    leave_group(Group(True), aborts=False)  # type: ignore[arg-type]
    leave_group(Group(True), aborts=True)  # type: ignore[arg-type]
    assert done == ["destroyed", "aborted", "destroyed"]
    leave_group(Group(False), aborts=True)  # type: ignore[arg-type]
    never.set()
    assert (
        done[3:] == ["aborted"]
        and "ranks [0, 1]: their group has not been aborted" in capsys.readouterr().err
    )
