"""What comes too late, is given up halfway or is asked for at the end: the right numbers, or an error that says why."""

from __future__ import annotations

import errno
import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossal_lite as cl
from colossal_lite.distributed.communicator import CommError
from colossal_lite.engine.engine import Engine
from colossal_lite.memory import disk_file
from colossal_lite.memory.task_records import StoreError
from colossal_lite.zero.optimizer import ChunkOptimizer
from tests.offload.test_optimizer_states import ADAMW, HOST, on_disk
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_sharded_weights import Turning
from tests.zero.test_zero import SMALL, start_module

DEVICE: dict[str, Any] = {}
STATIC = dict(memory=dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.5)))
DISK = dict(memory=dict(placement="disk"))


def placed(case: Case, placement: dict[str, Any], directory: Path) -> Case:
    memory = on_disk(directory) if placement is DISK else placement
    return replace(case, config={**case.config, **memory})


def stage(number: int, **more: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=number), optimizer=ADAMW, **more)


# ---- a backward after the update ----

CASE = Case(world_size=1, chunk_bytes=SMALL // 2, global_batch=4)


def too_late(env: RankEnv, case: Case) -> str:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, _ = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine.train_step((inputs, (inputs + 1) % case.vocabulary))
        old = engine(inputs).square().mean()
        engine.backward(engine(inputs).square().mean())
        engine.step()
        try:
            engine.backward(old)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "nothing"


SAVED, ITS_OWN = (
    "the forward has saved was modified by an inplace",
    "needed for gradient computation has been modified",
)
FROZEN = dict(tied=False, frozen=("norm.weight", "norm.bias", "head.weight"))
"""So that nothing behind the blocks changes."""
LATE = {
    "0": (replace(CASE, config=stage(0)), DEVICE),
    "0, host": (replace(CASE, config=stage(0)), HOST),
    "0, disk, bf16": (replace(CASE, config=stage(0, precision="bf16")), DISK),
    "0, recomputed": (replace(CASE, config=stage(0, activation_checkpoint="full"), **FROZEN), DEVICE),
    "0, recomputed in part, host": (
        replace(CASE, config=stage(0, activation_checkpoint="selective"), **FROZEN), HOST,
    ),
    "1, two ranks": (replace(CASE, world_size=2, config=stage(1)), DEVICE),
    "2, two ranks, host": (replace(CASE, world_size=2, config=stage(2)), HOST),
    "3": (replace(CASE, config=stage(3)), DEVICE),
    "3, static": (replace(CASE, config=stage(3)), STATIC),
    "3, two ranks, recomputed": (
        replace(CASE, world_size=2, config=stage(3, activation_checkpoint="full")),
        DEVICE,
    ),
    "3, some weights on one rank": (replace(CASE, world_size=2, tensor=2, config=stage(3)), DEVICE),
}  # fmt: skip
WORDS = {
    "3, static": "the weights token.weight, position.weight have been updated",
    "3, two ranks, recomputed": "the weights token.weight, position.weight have been updated",
    "3, some weights on one rank": SAVED,
}


@pytest.mark.parametrize("name", LATE)
def test_a_backward_after_the_update_of_what_its_forward_read_is_told(name: str, tmp_path: Path) -> None:
    case, placement = LATE[name]
    for text in run_world(too_late, case.world_size, placed(case, placement, tmp_path)):
        words = "the weights of blocks.1 have been updated" if "recomputed" in name else ITS_OWN
        assert WORDS.get(name, words) in text, text


# ---- a step that is given up ----


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise RuntimeError("a fault of the model's own")
        return gradients[0], None


class Breaking(nn.Module):
    """A chain of layers, of which one raises, in forward or in backward of the micro-batch with a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
        self.bad, self.calls = ("", "", 0), [0]  # in a list: a number would be a count of the model's own

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        self.calls[0] += 1
        for name, layer in self.layers.items():
            if self.bad == (name, "forward", self.calls[0]):
                raise RuntimeError("a fault of the model's own")
            h = Fault.apply(torch.tanh(layer(h)), self.bad == (name, "backward", self.calls[0]))
        return self.head(Fault.apply(h, self.bad == ("head", "backward", self.calls[0])))


def batch_of(number: int, env: RankEnv) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(10 * number + env.rank))
    return inputs, (inputs + 3) % 8


BASE = dict(precision="fp64", optimizer=ADAMW, gradient_accumulation=2, clip_grad_norm=0.05, timeout_s=30)
Weights = dict[str, Tensor]


def attempt(engine: Engine, bad: tuple[str, str, int], batch: Any) -> str:
    """A step in which this rank's model raises."""
    engine.model.bad, engine.model.calls = bad, [0]
    try:
        engine.train_step(batch)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.model.bad = ("", "", 0)
    return "nothing"


def given_up(env: RankEnv, config: dict[str, Any], bad: tuple[str, str, int] | None, at: int) -> Weights:
    """Three steps; the one numbered `at` is given up at first. Every other rank raises a layer further on."""
    with env.launch(BASE | config) as context:
        engine = start_module(Breaking(), context, Case(chunk_bytes=8 * 16))
        for number in range(3):
            if bad is not None and number == at:
                layer, where, micro_batch = bad
                layers = [*"abcd", "head"]
                here = layers[layers.index(layer) + (env.rank % 2 if where == "backward" else 0)]
                said = attempt(engine, (here, where, micro_batch), batch_of(7, env))
                assert said == "a fault of the model's own"
                engine.zero_grad()
            engine.train_step(batch_of(number, env))
        return engine.full_state_dict()


GIVEN_UP: dict[str, tuple[int, dict[str, Any], int]] = {
    "0": (1, stage(0), 1),
    "0, two ranks": (2, stage(0), 1),
    "0, ordered, host": (2, dict(zero=dict(sum_order="ordered")) | HOST, 1),
    "1, host": (2, stage(1) | HOST, 1),
    "2 by micro-batch": (2, dict(zero=dict(stage=2, reduce_every="micro_batch")), 1),
    "3": (1, stage(3), 1),
    "3, two ranks": (2, stage(3), 1),
    "3, two ranks, in the first step": (2, stage(3), 0),
    "3, copies": (4, dict(zero=dict(stage=3, shard_size=2)), 1),
    "3, static": (2, stage(3) | STATIC, 1),
}
PLACES = [("b", "backward", 2), ("d", "backward", 1), ("c", "forward", 2)]


@pytest.mark.parametrize("name", GIVEN_UP)
def test_after_a_step_that_every_rank_gave_up_the_next_has_the_bits_of_a_run_without_it(name: str) -> None:
    ranks, config, at = GIVEN_UP[name]
    expected = run_world(given_up, ranks, config, None, at)
    for bad in PLACES:
        for ours, theirs in zip(run_world(given_up, ranks, config, bad, at), expected, strict=True):
            assert [key for key, value in theirs.items() if not torch.equal(value, ours[key])] == [], bad


def loaded_after(env: RankEnv, config: dict[str, Any], breaks: bool, directory: Path) -> Weights:
    """A step from a checkpoint, which is loaded as soon as another step has been given up in backward."""
    with env.launch(BASE | config | dict(gradient_accumulation=1)) as context:
        engine = start_module(Breaking(), context, Case(chunk_bytes=8 * 16))
        engine.train_step(batch_of(0, env))
        engine.save(directory)
        if breaks:
            assert attempt(engine, ("b", "backward", 1), batch_of(7, env)) == "a fault of the model's own"
        engine.load(directory)
        engine.train_step(batch_of(1, env))
        return engine.full_state_dict()


@pytest.mark.parametrize("name", ["0", "0, two ranks", "1, host", "3, static"])
def test_a_checkpoint_is_loaded_after_a_step_that_was_given_up(name: str, tmp_path: Path) -> None:
    ranks, config, _ = GIVEN_UP[name]
    expected = run_world(loaded_after, ranks, config, False, tmp_path / "whole")
    found = run_world(loaded_after, ranks, config, True, tmp_path / "given up")
    for ours, theirs in zip(found, expected, strict=True):
        assert [key for key, value in theirs.items() if not torch.equal(value, ours[key])] == []


def loss_breaks(env: RankEnv, breaks: bool) -> Weights:
    """A step whose loss raises in backward, before any gradient has come, and the next without `zero_grad`."""
    broken = [breaks]

    def criterion(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        outputs = Fault.apply(outputs, broken[0])
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5))
    with env.launch(config) as context:
        engine = cl.initialize(Breaking(), context=context, criterion=criterion)
        if breaks:
            with pytest.raises(RuntimeError, match="a fault of the model's own"):
                engine.train_step(batch_of(7, env))
        broken[0] = False
        engine.train_step(batch_of(0, env))
        return engine.full_state_dict()


def test_the_losses_of_a_step_that_was_given_up_do_not_weigh_in_the_next() -> None:
    ((expected,), (found,)) = run_world(loss_breaks, 1, False), run_world(loss_breaks, 1, True)
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def alone(env: RankEnv, number: int, leaves: bool) -> list[str]:
    """Rank 1 alone gives a step up: it leaves, or goes on with the next. What each rank is told."""
    config = BASE | dict(zero=dict(stage=number), timeout_s=2)
    said = []
    with env.launch(config) as context:
        engine = start_module(Breaking(), context, Case(chunk_bytes=8 * 16))
        engine.train_step(batch_of(0, env))
        if env.rank == 1:
            engine.model.bad, engine.model.calls = ("b", "backward", 2), [0]
        try:
            engine.train_step(batch_of(1, env))
        except RuntimeError as error:
            if leaves:
                raise
            said.append(str(error))
        engine.model.bad = ("", "", 0)
        try:
            engine.zero_grad()
            engine.train_step(batch_of(2, env))
        except CommError as error:
            said.append(str(error))
        assert engine.steps == 1, "nothing was updated with half a gradient"
    return said


@pytest.mark.parametrize("number", [0, 2, 3])
def test_of_a_step_that_one_rank_gives_up_the_others_are_told(number: int) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(alone, 2, number, True)
    words = "rank 0 raised: CommError: rank 1 stopped: RuntimeError: a fault of the model's own"
    assert words in str(caught.value)


@pytest.mark.parametrize("number", [0, 3])
def test_a_rank_that_gives_a_step_up_alone_does_not_go_on(number: int) -> None:
    first, second = run_world(alone, 2, number, False)
    assert second[0] == "a fault of the model's own" and len(second) == 2 and "rank 1: " in second[1]
    assert len(first) == 2 and all("rank 0: " in text for text in first), first


# ---- a step that was updated in part ----

HALFWAY: dict[str, dict[str, Any]] = {
    "0": stage(0),
    "1": stage(1),
    "0, host": stage(0) | HOST,
    "0, host, updated there": stage(0, memory=dict(placement="host", update_on="host")),
    "3, static": stage(3) | STATIC,
}
UPDATED = Case(world_size=1, chunk_bytes=SMALL // 2, global_batch=4)


def ended_halfway(
    env: RankEnv, config: dict[str, Any], error: type[BaseException] | None, directory: Path
) -> tuple[list[str], Weights]:
    """What is said after an error, or an interrupt, in the second update of a step: before a checkpoint is loaded, and
    by that; and the weights of a step from there on."""
    case, said, store = replace(UPDATED, config=config), [], cl.HostStore()
    updates = 0

    def breaking(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 2 and error is not None:
            raise error("a fault of its own")
        return begins(self, *args, **more)

    begins = ChunkOptimizer.update
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store)
        engine.train_step(case.batch(0))
        engine.save(directory)
        with patch.object(ChunkOptimizer, "update", breaking), suppress(RuntimeError, KeyboardInterrupt):
            engine.train_step(case.batch(1))
            engine.full_state_dict()  # pays what a step owes
        calls = [lambda: engine.train_step(case.batch(2)), lambda: engine.save(directory / "mix")]
        calls += [engine.full_state_dict, lambda: engine.load(directory)]
        for call in calls if error is not None else calls[-1:]:
            try:
                engine.zero_grad()
                call()
            except (RuntimeError, ValueError) as caught:
                said.append(str(caught))
        if len(said) == len(calls):
            return said, {}
        engine.train_step(case.batch(3))
        said.append("loaded")
        return said, engine.full_state_dict()


@pytest.mark.parametrize(
    ("name", "error"),
    [*((name, KeyboardInterrupt) for name in HALFWAY), ("0", RuntimeError), ("3, static", RuntimeError)],
)
def test_after_a_step_that_was_updated_in_part_nothing_goes_on_with_the_mix(
    name: str, error: type[BaseException], tmp_path: Path
) -> None:
    ((said, weights),) = run_world(ended_halfway, 1, HALFWAY[name], error, tmp_path / "broken")
    words = (
        "a fault of its own" if error is RuntimeError else "KeyboardInterrupt has ended its updates halfway"
    )
    assert all(words in text for text in said[:3]), said
    if name in ("0", "1"):  # else its copies are under way, and a new engine is asked for
        ((_, expected),) = run_world(ended_halfway, 1, HALFWAY[name], None, tmp_path / "whole")
        assert said[3:] == ["loaded"], said
        assert [n for n, value in expected.items() if not torch.equal(value, weights[n])] == []
    else:
        assert len(said) == 4 and words in said[3], said


def left_halfway(env: RankEnv, config: dict[str, Any]) -> str:
    """What a store says of a task whose engine was interrupted in its updates and left in peace."""
    case, store = replace(UPDATED, config=config), cl.HostStore()
    with env.launch(case.full_config) as context:
        engine = start(case, context, store=store, task="gpt")
        engine.train_step(case.batch(0))
        with (
            patch.object(ChunkOptimizer, "update", side_effect=KeyboardInterrupt),
            suppress(KeyboardInterrupt),
        ):
            engine.train_step(case.batch(1))
            engine.full_state_dict()
    with env.launch(case.full_config) as context, pytest.raises(StoreError) as caught:
        start(case, context, store=store, task="gpt")
    return str(caught.value)


@pytest.mark.parametrize("name", ["0", "0, host"])
def test_a_store_takes_nothing_up_of_a_step_that_was_updated_in_part(name: str) -> None:
    (text,) = run_world(left_halfway, 1, HALFWAY[name])
    assert "the engine of task 'gpt' has ended by an error" in text


# ---- one rank's fault is the others' cause ----


def on_one_rank(env: RankEnv, case: Case, fault: str) -> str:
    """Rank 1 alone meets a fault and leaves in peace, as its caller catches it. What each rank is told."""
    broken = patch.object(disk_file, "_read_some", side_effect=OSError(errno.EIO, "Input/output error"))
    with env.launch(case.full_config) as context:
        if fault == "disk":
            engine = start(case, context)
        else:
            torch.manual_seed(0)
            engine = start_module(Turning(), context, case)
        cut = context.local_batch(4)
        inputs = torch.randint(8, (4, case.tokens), generator=torch.Generator().manual_seed(0))[cut]
        engine.train_step((inputs, (inputs + 1) % 8))
        if fault == "order" and env.rank == 1:
            engine.model.order = "dcba"
        try:
            with broken if fault == "disk" and env.rank == 1 else nullcontext():
                for _ in range(2):
                    engine.train_step((inputs, (inputs + 1) % 8))
        except (OSError, ValueError, CommError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("fault", "zero", "words"),
    [
        ("disk", 1, "DiskError: .* of record . were not read: Input/output error"),
        ("order", 3, "ValueError: forward: the weights layers.* in the order of its first step"),
    ],
)
def test_what_one_rank_alone_has_met_is_told_by_the_others_too(
    fault: str, zero: int, words: str, tmp_path: Path
) -> None:
    memory = on_disk(tmp_path) if fault == "disk" else {}
    config = dict(precision="bf16", optimizer=ADAMW, timeout_s=15) | dict(zero=dict(stage=zero)) | memory
    case = Case(config=config, chunk_bytes=SMALL // 2 if fault == "disk" else 8 * 16, global_batch=4)
    others, own = run_world(on_one_rank, 2, case, fault)
    assert re.search(words, own) and own.startswith(words.partition(":")[0]), own
    assert re.match(f"CommError: rank 1 stopped: {words}", others), others


# ---- what callbacks see, and what is left at the end ----

READ = Case(world_size=1, layers=2, chunk_bytes=SMALL // 2, global_batch=4, steps=2)


def seen(env: RankEnv, case: Case, where: str) -> list[Weights]:
    """The parameters after each step as a callback reads them, or the engine tells them; or those that are left when
    the context has closed, after the last."""
    states: list[Weights] = []
    with env.launch(case.full_config) as context:
        engine = start(case, context)

        def read(result: Any) -> None:
            states.append({name: p.detach().clone() for name, p in engine.model.named_parameters()})

        if where == "callback":
            engine.on_step(read)
        cut = context.local_batch(case.global_batch)
        for number in range(case.steps):
            inputs, labels = (t[cut] for t in case.batch(number))
            engine.train_step((inputs, labels))
            if where == "engine":
                states.append(engine.full_state_dict())
    return [dict(engine.model.state_dict())] if where == "end" else states


READERS: dict[str, tuple[Case, dict[str, Any]]] = {
    "0, host": (replace(READ, config=stage(0)), HOST),
    "0, disk": (replace(READ, config=stage(0)), DISK),
    "1, two ranks": (replace(READ, world_size=2, config=stage(1)), DEVICE),
    "2, two ranks, host": (replace(READ, world_size=2, config=stage(2)), HOST),
}


@pytest.mark.parametrize("name", READERS)
def test_a_callback_and_who_reads_after_the_end_find_every_update(name: str, tmp_path: Path) -> None:
    case, placement = READERS[name]
    expected = run_world(seen, case.world_size, case, "engine")[0]
    for where in ("callback", "end"):
        for states in run_world(seen, case.world_size, placed(case, placement, tmp_path), where):
            assert len(states) == (case.steps if where == "callback" else 1)
            for ours, truth in zip(reversed(states), reversed(expected), strict=False):
                assert [n for n, value in ours.items() if not torch.equal(value, truth[n])] == [], where


def logged(env: RankEnv, reads_weights: bool | None) -> bool:
    case = replace(READ, config=stage(0) | HOST)
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.on_step(lambda result: None, reads_weights=reads_weights)
        engine.train_step(case.batch(0))
        return engine._weights.has_deferred


def test_a_callback_that_reads_no_weights_waits_for_no_update() -> None:
    assert run_world(logged, 1, False) == [True] and run_world(logged, 1, None) == [False]


def refused(env: RankEnv) -> None:
    with env.launch(dict(zero=dict(stage=3))) as context:
        engine = start_module(Breaking(), context, Case(chunk_bytes=8 * 16))
        engine.on_step(lambda result: None)
        engine.on_step(lambda result: None, reads_weights=True)


def test_weights_that_are_sharded_cannot_be_promised_to_a_callback() -> None:
    with pytest.raises(
        WorldError, match=r"on_step: reads_weights=True .* legal: .* engine.full_state_dict\(\)"
    ):
        run_world(refused, 2)


def leaves_by_an_error(env: RankEnv, case: Case) -> str | Weights:
    with pytest.raises(KeyError), env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.train_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0)))
        raise KeyError("the caller's own")
    try:
        return dict(engine.model.state_dict())
    except ValueError as error:
        return str(error)


def test_after_an_end_by_an_error_weights_are_right_or_said_to_be_lost() -> None:
    alone = replace(READ, config=stage(0) | HOST, steps=1)
    (expected,) = run_world(seen, 1, alone, "engine")[0]
    (found,) = run_world(leaves_by_an_error, 1, alone)
    assert isinstance(found, dict) and all(torch.equal(v, found[n]) for n, v in expected.items())
    for text in run_world(leaves_by_an_error, 2, replace(alone, world_size=2, config=stage(2) | HOST)):
        assert isinstance(text, str) and "before the updates of its last step were made" in text, text


# ---- gradients that come twice ----


class Twice(nn.Module):
    """A layer that is used twice, each time under torch's own recomputation."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(2):
            h = checkpoint(self.layer, torch.tanh(h), use_reentrant=self.reentrant)
        return self.head(h)


def twice(env: RankEnv, number: int, reentrant: bool, chunk_bytes: int) -> str | Weights:
    with env.launch(BASE | dict(zero=dict(stage=number))) as context:
        engine = start_module(Twice(reentrant), context, Case(chunk_bytes=chunk_bytes))
        try:
            engine.train_step(batch_of(0, env))
        except ValueError as error:
            return str(error)
        return engine.full_state_dict()


@pytest.mark.parametrize("chunk_bytes", [8 * 16, 2**20])
def test_gradients_that_come_twice_in_a_backward_are_refused_with_what_is_legal(chunk_bytes: int) -> None:
    for number in (0, 2):
        (text,) = run_world(twice, 1, number, True, chunk_bytes)
        assert isinstance(text, str), text
        assert "gradient of layer." in text and "a second time" in text and "use_reentrant=False" in text
        assert "zero.stage" not in text
        (weights,) = run_world(twice, 1, number, False, chunk_bytes)
        assert isinstance(weights, dict)
