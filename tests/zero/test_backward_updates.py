"""Checks that updates in backward give the bits of later updates, need a few slots, and else raise clear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.models import GPTConfig
from colossal_lite.parallel.own_criterion import OwnCriterion
from colossal_lite.planner.planner import plan
from tests.engine.test_engine import Branches, batch_of
from tests.numerics.test_split_master import CASE, OPTIMIZERS
from tests.planner.test_planner import assert_predicted, held, planned
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, run_world

SCHEDULE = dict(type="cosine", warmup_steps=1, total_steps=9)
WORDS = "optimizer.update_when='backward'"


def within(case: Case) -> Case:
    """Updates are made in backward."""
    return replace(
        case,
        config=case.config | dict(optimizer=dict(case.config["optimizer"]) | dict(update_when="backward")),
    )


def trained(env: RankEnv, case: Case) -> Any:
    """What every step leaves, and the optimizer's state in the end."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut, steps = context.local_batch(case.global_batch), []
        for number in range(case.steps):
            inputs, labels = case.batch(number)
            result = engine.train_step((inputs[cut], labels[cut]))
            steps.append(
                (float(result.loss), result.grad_norm, result.lr, result.skipped, engine.full_state_dict())
            )
        return steps, engine.full_optimizer_state()


def same_bits(left: Any, right: Any) -> bool:
    return all(
        ours[:4] == theirs[:4] and all(torch.equal(v, theirs[4][n]) for n, v in ours[4].items())
        for (steps, _), (others, _) in zip(left, right, strict=True)
        for ours, theirs in zip(steps, others, strict=True)
    ) and all(
        torch.equal(value, others[name][kind])
        for (_, states), (_, others) in zip(left, right, strict=True)
        for name, state in states.items()
        for kind, value in state.items()
    )


def assert_same_bits(case: Case) -> None:
    n = case.world_size
    assert same_bits(run_world(trained, n, within(case)), run_world(trained, n, case))


# ---- the same bits ----

ROWS = covering_array(
    dict(
        ranks=[1, 2, 4],
        stage=[0, 1, 2, 3],
        sum_order=["fast", "ordered"],
        optimizer=[name for name in OPTIMIZERS if "lamb" not in name],
        master=["auto", "split", "none"],
        gradient=["auto", "bf16"],
        placement=["device", "host", "disk"],
        checkpoint=["none", "full"],
        chunks=["many", "one"],
    )
)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_updates_in_backward_have_the_bits_of_updates_after_it(row: dict[str, Any], tmp_path: Path) -> None:
    memory = dict(placement=row["placement"])
    memory |= dict(disk_dir=str(tmp_path)) if row["placement"] == "disk" else {}
    config = dict(
        zero=dict(stage=row["stage"], sum_order=row["sum_order"]), optimizer=OPTIMIZERS[row["optimizer"]],
        precision=dict(dtype="bf16", master=row["master"], gradient=row["gradient"]), memory=memory,
        activation_checkpoint=row["checkpoint"], lr_scheduler=SCHEDULE,
    )  # fmt: skip
    chunk_bytes = None if row["chunks"] == "one" else CASE.chunk_bytes
    assert_same_bits(replace(CASE, world_size=row["ranks"], config=config, chunk_bytes=chunk_bytes))


HOSTS = covering_array(
    dict(
        stage=[2, 0, 3],
        update_on=["host", {"every": 2}, {"host": 0.4}],
        master=["auto", "split", "none"],
        placement=["host", "disk"],
        gradient=["auto", "bf16"],
        optimizer=[name for name in OPTIMIZERS if "lamb" not in name],
        ranks=[2, 1],
    )
)


def on_host_case(row: dict[str, Any], directory: Path) -> Case:
    """On a slow link: a gradient's slot is used again while its copy is on its way."""
    memory = dict(placement=row["placement"], update_on=row["update_on"], rates=dict(down=10**6))
    memory |= dict(disk_dir=str(directory)) if row["placement"] == "disk" else {}
    config = dict(
        zero=dict(stage=row["stage"]), optimizer=OPTIMIZERS[row["optimizer"]], memory=memory,
        precision=dict(dtype="bf16", master=row["master"], gradient=row["gradient"]), lr_scheduler=SCHEDULE,
    )  # fmt: skip
    return replace(CASE, world_size=row["ranks"], config=config)


@pytest.mark.parametrize("row", HOSTS[:5], ids=name_of)
def test_updates_on_the_host_in_backward_have_the_bits_of_updates_after_it(
    row: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_bits(on_host_case(row, tmp_path))


@pytest.mark.campaign
@pytest.mark.parametrize("row", HOSTS[5:], ids=name_of)
def test_updates_on_the_host_in_backward_have_the_bits_for_each_two_choices(
    row: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_bits(on_host_case(row, tmp_path))


ADAMW = dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1))
OTHERS: dict[str, Case] = {
    "copies": replace(CASE, world_size=4, config=ADAMW | dict(zero=dict(stage=2, shard_size=2))),
    "copies, in order": replace(
        CASE, world_size=4, config=ADAMW | dict(zero=dict(stage=3, shard_size=2, sum_order="ordered"))
    ),
    "weights kept by neighbours": replace(
        CASE, world_size=4, config=ADAMW | dict(zero=dict(stage=3, reshard_after_forward=2))
    ),
    "weights kept": replace(CASE, config=ADAMW | dict(zero=dict(stage=3, reshard_after_forward=False))),
    "cut layers": replace(CASE, world_size=4, tensor=2, config=ADAMW | dict(zero=dict(stage=2))),
    "a grid": replace(CASE, world_size=4, tensor=4, mode="2d", config=ADAMW, global_batch=4),
    "sequences": replace(CASE, sequence=2, config=ADAMW | dict(zero=dict(stage=1))),
    "adapters": replace(CASE, adapters=2, config=ADAMW | dict(zero=dict(stage=3))),
    "auxiliary losses": replace(CASE, auxiliary=("token", "element"), config=ADAMW | dict(zero=dict(stage=2))),
    "a rank without samples": replace(CASE, world_size=4, global_batch=3, config=ADAMW | dict(zero=dict(stage=2))),
    "a rank without samples, sharded weights": replace(
        CASE, world_size=4, global_batch=3, config=ADAMW | dict(zero=dict(stage=3))
    ),
    "a rank without samples, copies in order": replace(
        CASE, global_batch=1, config=ADAMW | dict(zero=dict(stage=1, shard_size=1, sum_order="ordered"), timeout_s=10)
    ),
    "two micro-batches": replace(CASE, config=ADAMW | dict(gradient_accumulation=2)),
    "three micro-batches, in order, a rank without samples": replace(
        CASE, global_batch=5, config=ADAMW | dict(zero=dict(stage=1, sum_order="ordered"), gradient_accumulation=3)
    ),
    "two micro-batches, updated on the host": replace(
        CASE,
        config=ADAMW
        | dict(zero=dict(stage=3), gradient_accumulation=2, memory=dict(placement="host", update_on="host")),
    ),
    "two micro-batches, copies": replace(
        CASE, world_size=4,
        config=ADAMW | dict(zero=dict(stage=2, shard_size=2, reduce_every="micro_batch"), gradient_accumulation=2),
    ),
    "a recomputed block in two stages of one rank": replace(
        CASE, world_size=1, pipeline=dict(size=1, schedule="bfs", stages_per_rank=2, partition=(2, 4)),
        config=ADAMW | dict(activation_checkpoint="full"),
    ),
    "a pipeline": replace(CASE, pipeline=dict(size=2, micro_batches=3), config=ADAMW),
    "a pipeline of one micro-batch, breadth first": replace(
        CASE, layers=4, pipeline=dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=1), config=ADAMW
    ),
    "a pipeline, sharded, updated on the host": replace(
        CASE, world_size=4, layers=4, global_batch=7,
        pipeline=dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=2),
        config=ADAMW | dict(zero=dict(stage=3), memory=dict(placement="host", update_on="host")),
    ),
    "a pipeline, split backward, accumulation": replace(
        CASE, layers=4, global_batch=6, pipeline=dict(size=2, schedule="zb-v", micro_batches=2),
        config=ADAMW | dict(zero=dict(stage=2), gradient_accumulation=2),
    ),
    "a pipeline whose first stage is frozen": replace(
        CASE, tied=False, frozen=("token.weight", "position.weight"),
        pipeline=dict(size=2, micro_batches=2, partition=(1, 5)), config=ADAMW,
    ),
    "a pipeline, split backward on two stages a rank, state on the host": replace(
        CASE, layers=4, pipeline=dict(size=2, schedule="zb-v", stages_per_rank=2, micro_batches=1),
        config=ADAMW | dict(zero=dict(stage=3, prefetch=2), memory=dict(placement="host")),
    ),
    "untied, gloo, float32": replace(
        CASE, family="llama", tied=False,
        config=ADAMW | dict(zero=dict(stage=1), backend="gloo", precision="fp32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_updates_in_backward_of_other_modes_have_the_same_bits(name: str) -> None:
    case = OTHERS[name]
    precision = case.config.get("precision", "bf16")
    assert_same_bits(replace(case, config=case.config | dict(precision=precision)))


def branching(env: RankEnv, stage: int, update: str) -> Any:
    """Ranks take other branches than each other, one parameter is used by none; weights decay."""
    optimizer = dict(type="adamw", lr=0.1, weight_decay=0.5, update=update)
    config = dict(precision="fp32", optimizer=optimizer, zero=dict(stage=stage), timeout_s=30)
    with env.launch(config) as context, patch("colossal_lite.zero.build_chunks.CHUNK_BYTES", 8 * 16):
        torch.manual_seed(0)
        engine, steps = cl.initialize(Branches(), context=context), []
        for firsts in ([0, 2], [1, 3], [0, 1], [3, 2], [1, 1]):
            result = engine.train_step(batch_of(firsts[env.rank]))
            steps.append(
                (float(result.loss), result.grad_norm, result.lr, result.skipped, engine.full_state_dict())
            )
        return steps, engine.full_optimizer_state()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_lacks_a_gradient_waits_for_what_the_others_say_of_it(stage: int) -> None:
    assert same_bits(run_world(branching, 2, stage, "backward"), run_world(branching, 2, stage, "step"))


def own_loop(env: RankEnv, case: Case, counts: bool, skipped: int = -1) -> Any:
    """`skipped`: a step without a label that counts."""
    parts = case.config.get("gradient_accumulation", 1)
    with env.launch(case.full_config) as context:
        engine, steps = start(case, context), []
        cut = context.local_batch(case.global_batch)
        for number in range(case.steps):
            for part in range(parts):
                inputs, labels = (part[cut] for part in case.batch(parts * number + part))
                labels = torch.full_like(labels, -100) if number == skipped else labels
                logits, count = engine(inputs).float().flatten(0, 1), int((labels != -100).sum())
                total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
                engine.backward(total / max(count, 1), count if counts else None)
            result = engine.step()
            assert result.skipped == (number == skipped)
            steps.append(
                (str(result.loss), result.grad_norm, result.lr, result.skipped, engine.full_state_dict())
            )
        return steps, engine.full_optimizer_state()


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_of_ones_own_updates_in_backward_too(stage: int, counts: bool) -> None:
    case = replace(CASE, config=ADAMW | dict(zero=dict(stage=stage), precision="bf16"))
    assert same_bits(run_world(own_loop, 2, within(case), counts), run_world(own_loop, 2, case, counts))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_of_ones_own_updates_in_its_last_backward_too(stage: int) -> None:
    config = ADAMW | dict(zero=dict(stage=stage), precision="bf16", gradient_accumulation=2)
    case = replace(CASE, config=config)
    assert same_bits(run_world(own_loop, 2, within(case), True), run_world(own_loop, 2, case, True))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_of_ones_own_skips_a_step_without_labels_in_backward_too(stage: int) -> None:
    config = ADAMW | dict(zero=dict(stage=stage), precision="bf16", gradient_accumulation=2)
    case = replace(CASE, config=config)
    assert same_bits(run_world(own_loop, 2, within(case), True, 1), run_world(own_loop, 2, case, True, 1))


def miscounted(env: RankEnv, case: Case) -> list[str]:
    """What a loop is told that calls backward once, or three times, where a step has two micro-batches."""
    told = []
    with env.launch(case.full_config) as context:
        for calls in (1, 3):
            engine = start(case, context)
            inputs, _ = (part[context.local_batch(case.global_batch)] for part in case.batch(0))
            with pytest.raises(ValueError) as caught:
                for _ in range(calls):
                    engine.backward(engine(inputs).float().square().mean())
                engine.step()
            told.append(str(caught.value))
        return told


def test_a_loop_that_calls_backward_another_number_of_times_is_refused_by_name() -> None:
    config = ADAMW | dict(zero=dict(stage=1), precision="bf16", gradient_accumulation=2)
    for fewer, more in run_world(miscounted, 2, within(replace(CASE, config=config))):
        assert "step: after 1 calls of backward" in fewer and "gradient_accumulation=2" in fewer
        assert WORDS in fewer and WORDS in more


# ---- planted faults ----


def all_at_once(original: Any, self: Any, chunk: Any) -> None:
    """Nobody waits for what other ranks say."""
    chunk.keep_squares()
    assert self.deferred is not None
    self.deferred.until(self._place[chunk.spec.id])


def by_own_tokens(original: Any, self: Any, told: Tensor, comparison: Any) -> None:
    def alone(comm: Any, tensor: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: tensor)

    with patch.object(type(self._mesh.world), "all_reduce_async", alone):
        original(self, told, comparison)


def never_fetched(original: Any, self: Any, chunk: Any, *, changed: bool) -> None:
    return


def before_the_sum(original: Any, self: Any) -> None:
    """The gradient of this rank alone."""
    assert self.accumulating is not None
    kept = self.accumulating.clone()
    original(self)
    self.gradient.copy_(kept[slice(*self.owned)])


FAULTS: dict[str, tuple[str, Any]] = {
    "an update does not wait for what other ranks have used": ("UpdatesInBackward.summed", all_at_once),
    "an update divides by the tokens of its rank": ("Updates.announce", by_own_tokens),
    "new weights are not fetched": ("ForwardGates.updated", never_fetched),
    "an update takes a gradient that is not summed": ("Chunk.finish_reduce", before_the_sum),
}


def faulty(env: RankEnv, name: str, stage: int, case: Case) -> Any:
    with patched(*FAULTS[name]):
        return branching(env, stage, "backward") if "wait" in name else trained(env, case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_things_changes_bits(name: str) -> None:
    case = within(replace(CASE, config=ADAMW | dict(zero=dict(stage=2), precision="bf16")))
    right = run_world(branching, 2, 2, "backward") if "wait" in name else run_world(trained, 2, case)
    assert not same_bits(run_world(faulty, 2, name, 2, case), right)


# ---- bytes ----


def rows_of(env: RankEnv, case: Case) -> tuple[int, int, dict[str, int], dict[str, int | None]]:
    """Elements of this rank's chunks and of the largest, and bytes of each kind: held, and forecast."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        for number in range(2):
            engine.train_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(number)))
        rows = engine.memory_report()
        numels = [chunk.spec.numel for chunk in engine._chunks]
        return (
            sum(numels),
            max(numels),
            {r.kind: r.peak_bytes for r in rows},
            {r.kind: r.forecast_bytes for r in rows},
        )


@pytest.mark.parametrize("gradient", ["auto", "bf16"])
def test_a_parameter_takes_12_bytes_and_a_bit_beside_slots_that_do_not_grow_with_the_model(
    gradient: str,
) -> None:
    precision = dict(dtype="bf16", master="split", gradient=gradient)
    case = within(replace(CASE, world_size=1, config=ADAMW | dict(precision=precision), layers=3))
    for layers in (3, 12):
        numel, largest, used, predicted = run_world(rows_of, 1, replace(case, layers=layers))[0]
        assert used == predicted and used["gradients"] == 0
        slots = used.pop("staging")
        assert sum(used.values()) * 8 == (12 * 8 + 1) * numel
        assert slots <= 4 * largest * (2 if gradient == "bf16" else 4)


@pytest.mark.parametrize(
    "zero",
    [
        dict(stage=0),
        dict(stage=1),
        dict(stage=2, sum_order="ordered"),
        dict(stage=3),
        dict(stage=2, shard_size=2),
    ],
    ids=str,
)
def test_bytes_of_state_and_of_the_wire_are_as_planned(zero: dict[str, Any]) -> None:
    config = ADAMW | dict(precision="bf16", zero=zero)
    assert_predicted(within(Case(world_size=4 if "shard_size" in zero else 2, global_batch=8, config=config)))


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_of_state_and_of_the_wire_are_as_planned_with_two_micro_batches(stage: int) -> None:
    config = ADAMW | dict(precision="bf16", zero=dict(stage=stage), gradient_accumulation=2)
    assert_predicted(within(Case(world_size=2, global_batch=8, config=config)))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_of_state_and_of_the_wire_are_as_planned_in_a_pipeline(micro_batches: int) -> None:
    pipeline = dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=micro_batches)
    config = ADAMW | dict(precision="bf16", zero=dict(stage=2))
    assert_predicted(within(Case(world_size=4, layers=4, global_batch=8, pipeline=pipeline, config=config)))


def test_bytes_of_state_and_of_the_wire_are_as_planned_with_updates_on_the_host() -> None:
    memory = dict(placement="host", update_on="host")
    config = ADAMW | dict(precision="bf16", zero=dict(stage=2), memory=memory)
    assert_predicted(within(Case(world_size=2, global_batch=8, config=config)))


def test_the_peak_of_a_step_is_no_more_than_planned() -> None:
    case = within(Case(world_size=1, dropout=0.1, config=ADAMW | dict(precision="fp32")))
    ((_, peak),) = run_world(held, 1, case)
    predicted = planned(case, 0)
    assert (
        0.8 * (predicted.peak_bytes - predicted.state_bytes)
        <= peak
        <= predicted.peak_bytes - predicted.state_bytes + 1024
    )


def test_plan_foretells_no_place_for_gradients() -> None:
    model = GPTConfig(vocabulary=1000, layers=2, heads=2, width=64, sequence=32)
    config = ADAMW | dict(precision="bf16", zero=dict(stage=1))
    plain, made = (
        plan(
            config | dict(optimizer=config["optimizer"] | dict(update=update)),
            model,
            batch=4,
            sequence=32,
            world_size=2,
        )
        for update in ("step", "backward")
    )
    assert plain.bytes_of("gradients") and not made.bytes_of("gradients")
    for kind in ("weights", "masters", "optimizer", "activations"):
        assert made.bytes_of(kind) == plain.bytes_of(kind)
    assert made.payload_bytes == plain.payload_bytes + 40


# ---- refusals ----


def infinite_gradient(scale: float) -> Any:
    """A finite loss whose gradient is not."""

    def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        logits = logits.float()
        return (logits.flatten()[0] * 0.0).abs().sqrt() * scale + logits.square().sum(), labels.numel()

    return criterion


def spoilt(env: RankEnv, directory: str) -> list[str]:
    case, told = within(Case(config=ADAMW | dict(precision="fp32", zero=dict(stage=1)))), []
    with env.launch(case.full_config) as context:
        scale = [0.0]

        def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
            return infinite_gradient(scale[0])(logits, labels)

        engine = cl.initialize(case.model, context=context, criterion=criterion)
        batch = tuple(t[context.local_batch(6)] for t in case.batch(0))
        scale[0] = torch.inf
        before = engine.full_state_dict()
        assert engine.train_step(batch).skipped  # the loss is not a number: nothing is updated
        assert all(torch.equal(v, before[n]) for n, v in engine.full_state_dict().items())
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context, criterion=infinite_gradient(0.0))
        engine.save(directory)
        batch = tuple(t[context.local_batch(6)] for t in case.batch(0))
        engine._loss.criterion = OwnCriterion(infinite_gradient(1.0))
        for call in (
            lambda: engine.train_step(batch), lambda: engine.train_step(batch), lambda: engine.save(directory)
        ):  # fmt: skip
            with pytest.raises(ValueError) as caught:
                call()
            told.append(str(caught.value))
        engine.load(directory)
        assert engine.steps == 0 and engine.full_state_dict().keys() == before.keys()
        engine._loss.criterion = None
        assert not engine.train_step(batch).skipped
        return told


def test_a_gradient_that_is_not_finite_ends_the_run_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    for step, again, save in run_world(spoilt, 2, str(tmp_path)):
        assert "a gradient is not finite" in step and WORDS in step and "load a checkpoint" in step
        assert (
            again.startswith("forward_backward:")
            and save.startswith("save:")
            and "the weights are a mix" in save
        )


def halfway(env: RankEnv) -> list[str]:
    """What may not be done between a backward and its step."""
    case, told = within(Case(config=ADAMW | dict(precision="fp32", zero=dict(stage=1)))), []
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        batch = tuple(t[context.local_batch(6)] for t in case.batch(0))
        for _ in range(2):
            engine.forward_backward(batch)
            for call in (
                engine.full_gradients, lambda: engine.eval_step(batch), engine.full_state_dict,
                engine.full_optimizer_state, lambda: engine.save("nowhere"), lambda: engine(batch[0]),
                lambda: engine.backward(torch.zeros(())), lambda: engine.forward_backward(batch),
            ):  # fmt: skip
                with pytest.raises(ValueError) as caught:
                    call()
                told.append(str(caught.value))
            assert not engine.step().skipped
        engine.forward_backward(batch)
        with pytest.raises(ValueError) as caught:
            engine.zero_grad()
        return [*told[:7], str(caught.value)]


def test_between_backward_and_step_nothing_else_is_done() -> None:
    for told in run_world(halfway, 2):
        assert len(told) == 8 and all(WORDS in text for text in told)
        assert "load a checkpoint" in told[-1]


class Stumbles(torch.autograd.Function):
    """Raises in backward while `fails`."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Stumbles.fails:
            raise RuntimeError("stumbled")
        return gradient


def stumbling(env: RankEnv, case: Case, directory: str, stumbles: bool) -> Any:
    """A run whose second backward ends halfway on every rank, and goes on from a checkpoint; or that just goes on."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        block: Any = engine.model.get_submodule("blocks.1")
        block.register_forward_pre_hook(lambda _, args: (Stumbles.apply(args[0]), *args[1:]))
        batches = [tuple(t[context.local_batch(6)] for t in case.batch(number)) for number in range(3)]
        engine.train_step(batches[0])
        engine.save(directory)
        if stumbles:
            Stumbles.fails = True
            with pytest.raises(RuntimeError, match="stumbled"):
                engine.forward_backward(batches[1])
            Stumbles.fails = False
            with pytest.raises(ValueError, match="load a checkpoint"):
                engine.zero_grad()
            with pytest.raises(ValueError, match="forward_backward"):
                engine.train_step(batches[1])
            engine.load(directory)
        for batch in batches[1:]:
            assert not engine.train_step(batch).skipped
        return engine.full_state_dict(), engine.full_optimizer_state()


@pytest.mark.parametrize(
    ("stage", "placement"), [(0, "host"), (2, "device"), (3, "host"), (3, "disk"), (2, "updated on the host")]
)
def test_a_run_goes_on_from_a_checkpoint_after_a_backward_that_ended_halfway(
    stage: int, placement: str, tmp_path: Path
) -> None:
    memory = dict(placement=placement) | (dict(disk_dir=str(tmp_path)) if placement == "disk" else {})
    if placement == "updated on the host":
        memory = dict(placement="host", update_on="host")
    config = ADAMW | dict(precision="bf16", zero=dict(stage=stage), memory=memory)
    case = within(replace(CASE, layers=4, config=config))
    fell, went = (
        run_world(stumbling, 2, case, str(tmp_path / str(stumbles)), stumbles) for stumbles in (True, False)
    )
    for (weights, states), (expected, others) in zip(fell, went, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
        assert all(torch.equal(v, others[name][kind]) for name, s in states.items() for kind, v in s.items())


class Peeks(nn.Module):
    """Reads the weights of its last layer at first too, with no gradient for them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        self.last = nn.Linear(32, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embedding(x) @ self.last.weight.detach())
        return self.head(self.last(self.layers(h)))


def peeking(env: RankEnv, update: str) -> str:
    config = dict(precision="fp32", optimizer=dict(type="adamw", update=update))
    with env.launch(config) as context, patch("colossal_lite.zero.build_chunks.CHUNK_BYTES", 4 * 1024):
        torch.manual_seed(0)
        engine = cl.initialize(Peeks(), context=context)
        try:
            engine.train_step(batch_of(0))
        except RuntimeError as error:
            return str(error)
        return ""


def test_weights_that_are_read_after_their_update_are_told() -> None:
    assert run_world(peeking, 1, "step") == [""]
    (text,) = run_world(peeking, 1, "backward")
    assert "modified by an inplace operation" in text


def refused_with_own(env: RankEnv) -> str:
    with env.launch(dict(optimizer=dict(update_when="backward"))) as context:
        with pytest.raises(ValueError) as caught:
            cl.initialize(Case().model, context=context, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        return str(caught.value)


def test_an_optimizer_of_ones_own_is_refused_by_name() -> None:
    (text,) = run_world(refused_with_own, 1)
    assert WORDS in text and "legal: 'step'" in text
