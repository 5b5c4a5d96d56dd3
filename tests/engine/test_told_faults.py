"""An error that one rank meets alone is told to the others within two seconds, in every mode; nothing follows it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy

from colossal_lite.checks.rank_comparison import RanksDifferError
from colossal_lite.distributed.communicator import CommError
from colossal_lite.engine.engine import Engine
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world

TOLD_S = 2.0
CASE = Case(layers=4, global_batch=8, steps=1, config=dict(timeout_s=20))
MODES: dict[str, Case] = {
    "data": CASE,
    "ZeRO-3": replace(CASE, config=dict(timeout_s=20, zero=dict(stage=3))),
    "tensor": replace(CASE, tensor=2),
    "ring": replace(CASE, sequence=2),
    "pipeline": replace(CASE, pipeline=dict(size=2, micro_batches=4)),
    "pipeline of four": replace(CASE, world_size=4, pipeline=dict(size=4, micro_batches=4)),
    "zb-v": replace(CASE, pipeline=dict(size=2, schedule="zb-v", micro_batches=4)),
    "ZeRO-3 on gloo": replace(CASE, config=dict(timeout_s=20, backend="gloo", zero=dict(stage=3))),
    "data on gloo": replace(CASE, config=dict(timeout_s=20, backend="gloo")),
    "pipeline on gloo": replace(
        CASE, pipeline=dict(size=2, micro_batches=4), config=dict(timeout_s=20, backend="gloo")
    ),
}
CATCHES = ("waits", "goes on", "gives up")
"""What the caller of the rank that raised does next: nothing until all are told, the next step, or zero_grad."""


def meets_a_fault(env: RankEnv, case: Case, guilty: int, then: str) -> tuple[list[str], float]:
    """A step, and one in which a rank's forward raises. What each rank is told, and when after the fault."""
    told: list[str] = []
    original = Engine._forward

    def forward(self: Engine, stage: int, part: Any, carried: Any, sums: Any) -> Any:
        outputs = original(self, stage, part, carried, sums)
        if env.rank == guilty and self.steps == 1 and not env.store.check(["raised"]):
            env.store.set("raised", repr(time.time()))
            raise ValueError("a fault of one rank alone")
        return outputs

    with patch.object(Engine, "_forward", forward), env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        batches = [tuple(t[cut] for t in case.batch(number)) for number in range(3)]
        engine.train_step(batches[0])
        try:
            engine.train_step(batches[1])
        except (ValueError, CommError) as error:
            told.append(f"{type(error).__name__}: {error}")
        late_s = time.time() - float(env.store.get("raised"))
        env.store.set(f"told {env.rank}", "")
        if env.rank == guilty and then == "waits":
            env.store.wait([f"told {rank}" for rank in range(env.world_size)])
        for call in [engine.zero_grad] * (then == "gives up") + [lambda: engine.train_step(batches[2])]:
            try:
                call()
            except (ValueError, CommError) as error:
                told.append(f"{type(error).__name__}: {error}")
        assert engine.steps == 1, "nothing was updated with half a gradient"
    return told, late_s


@pytest.mark.parametrize("name", MODES)
def test_an_error_of_one_rank_is_told_to_all_within_two_seconds_and_the_next_call_is_refused(
    name: str,
) -> None:
    case = MODES[name]
    guilty = case.world_size - 1 if "pipeline" in name else 0
    ended = run_world(meets_a_fault, case.world_size, case, guilty, "waits")
    for rank, (told, late_s) in enumerate(ended):
        assert len(told) == 2, (rank, told)
        if rank == guilty:
            assert told[0] == "ValueError: a fault of one rank alone"
        else:
            cause = f"CommError: rank {guilty} stopped: ValueError: a fault of one rank alone\n"
            assert told[0].startswith(cause), told[0]
            assert late_s < TOLD_S, late_s
            assert told[1].startswith(f"CommError: rank {rank}: forward_backward: these ranks have stopped")
        assert "a fault of one rank alone" in told[1] and told[1].startswith("CommError: "), told[1]


@pytest.mark.parametrize("then", CATCHES[1:])
@pytest.mark.parametrize("name", ["pipeline", "pipeline on gloo", "ZeRO-3", "ZeRO-3 on gloo"])
def test_whoever_catches_it_and_goes_on_is_refused_and_reads_no_message_of_another_step(
    name: str, then: str
) -> None:
    begun_s = time.monotonic()
    (own, *refused), others = (told for told, _ in run_world(meets_a_fault, 2, MODES[name], 0, then))
    assert own == "ValueError: a fault of one rank alone"
    assert refused and all(text.startswith("CommError: ") for text in (*refused, *others)), (refused, others)
    assert "pipeline" not in name or "a fault of one rank alone" in others[0]
    assert time.monotonic() - begun_s < 20


def launches_again(env: RankEnv, case: Case) -> list[float]:
    """The losses of a run whose first context has met a fault, in a second context of the same processes."""
    failing = patch.object(Engine, "_forward", side_effect=ValueError("a fault of one rank alone"))
    with pytest.raises((ValueError, CommError)), env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.train_step(case.batch(0))
        if env.rank == 0:
            failing.start()
        try:
            engine.train_step(case.batch(1))
        finally:
            failing.stop()
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return [float(engine.train_step(case.batch(number)).loss) for number in range(2)]


@pytest.mark.parametrize("name", ["pipeline", "pipeline on gloo"])
def test_after_such_an_error_the_same_processes_launch_again_and_train(name: str) -> None:
    losses = run_world(launches_again, 2, MODES[name])
    assert losses[0] == losses[1] and len(losses[0]) == 2


def retries(env: RankEnv, case: Case) -> tuple[float, float]:
    """A rank whose forward has raised before any collective, and which calls the same step again after a while."""
    original, broken = Engine._forward, [env.rank == 0]

    def forward(self: Engine, stage: int, part: Any, carried: Any, sums: Any) -> Any:
        if self.steps == 1 and broken[0]:
            broken[0] = False
            raise ValueError("out of memory")
        if self.steps == 1 and env.rank == 0:
            time.sleep(2.5)  # longer than others have patience with a rank that does nothing
        return original(self, stage, part, carried, sums)

    with patch.object(Engine, "_forward", forward), env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        losses = []
        for number in range(2):
            batch = tuple(t[cut] for t in case.batch(number))
            try:
                losses.append(float(engine.train_step(batch).loss))
            except ValueError:
                losses.append(float(engine.train_step(batch).loss))
        return losses[0], losses[1]


def test_a_rank_that_raised_before_any_collective_may_call_the_step_again() -> None:
    first, second = run_world(retries, 2, CASE)
    assert first == second and all(torch.isfinite(torch.tensor(first)))


class UserError(Exception):
    """Of a loop of the user's own."""


def leaves_a_batch(
    env: RankEnv, case: Case, directory: str, loop: str, guilty: tuple[int, ...]
) -> tuple[list[str], list[float]]:
    """Around the second batch a `guilty` rank meets an error that its loop catches; it goes on with the next one. What
    was caught, step by step, and the losses after a load."""
    faulty = [False]

    def criterion(logits: Any, labels: Any) -> Any:
        if faulty[0] and loop != "dropped":
            raise UserError
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def step(engine: Engine, batch: tuple[Any, ...]) -> float:
        if loop == "train_step":
            return float(engine.train_step(batch).loss)
        engine.backward(criterion(engine(batch[0]), batch[1]))
        if faulty[0]:
            engine.zero_grad()
            raise UserError
        return float(engine.step().loss)

    with env.launch(case.full_config) as context:
        engine = start(case, context, criterion=criterion if loop == "train_step" else None)
        cut = context.local_batch(case.global_batch)
        first, second, *later = (tuple(t[cut] for t in case.batch(number)) for number in range(4))
        step(engine, first)
        engine.save(directory)
        told, faulty[0] = list[str](), env.rank in guilty
        alone = env.rank in guilty and len(guilty) < env.world_size
        for batch in (second, *later, *later[:alone]):  # others come one step later
            try:
                step(engine, batch)
                told.append("")
            except (UserError, RanksDifferError) as error:
                told.append(str(error) or "UserError")
            faulty[0] = False
        engine.load(directory)
        return told, [step(engine, batch) for batch in (second, *later)]


LEFT = "batch: rank 1 has left 1 batches untrained, after errors, and rank 0 has left 0"


@pytest.mark.parametrize("loop", ["train_step", "own", "dropped"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_that_alone_goes_on_with_the_next_batch_is_told_and_a_load_mends_it(
    stage: int, loop: str, tmp_path: Path
) -> None:
    case = replace(CASE, config=dict(timeout_s=20, zero=dict(stage=stage)))
    others, guilty = run_world(leaves_a_batch, 2, case, str(tmp_path), loop, (1,))
    assert guilty[0][0] == "UserError" and LEFT in guilty[0][1] and LEFT in others[0][0], (others, guilty)
    assert all("has left" in text for text in (*guilty[0][1:], *others[0]))
    (_, alone), *_ = run_world(leaves_a_batch, 2, case, str(tmp_path), loop, ())
    assert others[1] == guilty[1] == alone


@pytest.mark.parametrize("loop", ["train_step", "own", "dropped"])
def test_ranks_that_leave_a_batch_alike_go_on(loop: str, tmp_path: Path) -> None:
    for told, _ in run_world(leaves_a_batch, 2, CASE, str(tmp_path), loop, (0, 1)):
        assert told == ["UserError", "", ""]


def skips_a_batch(env: RankEnv, case: Case) -> tuple[int, str]:
    """Rank 1 passes over the second batch of a loader before the engine sees it. Steps made, and what the next says."""
    rows = [(torch.arange(8) + i, torch.arange(8) + i + 1) for i in range(24)]
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        for number, batch in enumerate(context.dataloader(rows, global_batch=case.global_batch)):
            if number == 1 and env.rank == 1:
                continue
            try:
                engine.train_step(batch)
            except RanksDifferError as error:
                return engine.steps, str(error)
        return engine.steps, ""


def test_a_rank_that_passes_over_a_batch_of_a_loader_is_told() -> None:
    for steps, told in run_world(skips_a_batch, 2, CASE):
        assert (
            steps == 1
            and "dataset: it is read from sample 8 of the run on rank 0, and from 16 on rank 1" in told
        )


def refuse_alike(env: RankEnv, case: Case) -> int:
    """All ranks refuse one batch. One of them takes its time until it comes with the next."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        for _ in range(2):
            with pytest.raises(ValueError, match="the vocabulary"):
                engine.train_step((inputs + case.vocabulary, labels))
            if env.rank == 1:
                time.sleep(2.5)
            engine.train_step((inputs, labels))
        return engine.steps


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_batch_that_all_ranks_refuse_ends_no_wait(name: str) -> None:
    assert run_world(refuse_alike, 2, MODES[name]) == [2, 2]


LONG: dict[str, Case] = {
    "learned positions": MODES["pipeline"],
    "rotary positions": replace(MODES["pipeline"], family="llama"),
    "Hugging Face's": replace(MODES["pipeline"], family="hf-gpt2", build="module", layers=2),
    "four replicas": replace(CASE, config=dict(timeout_s=20, backend="gloo")),
}


def too_long(env: RankEnv, case: Case) -> tuple[str, int]:
    """A batch of more tokens than the model states, between two that fit."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        engine.train_step(tuple(t[cut] for t in case.batch(0)))
        longer = replace(case, tokens=case.tokens + 100)
        with pytest.raises(ValueError) as caught:
            engine.train_step(tuple(t[cut] for t in longer.batch(1)))
        engine.train_step(tuple(t[cut] for t in case.batch(1)))
        return str(caught.value), engine.steps


@pytest.mark.parametrize("name", LONG)
def test_a_sequence_longer_than_the_model_states_is_refused_on_every_rank_before_the_step(name: str) -> None:
    for said, steps in run_world(too_long, 2, LONG[name]):
        assert re.search(r"legal: at most \d+ tokens, which the model states", said) and steps == 2, said
