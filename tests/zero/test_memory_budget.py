"""Checks training within a budget: the bits of a run without one, the planned bytes, an error if nothing fits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import colossal_lite as cl
from colossal_lite.config.config import Config, ConfigError
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.arena import ArenaAllocator
from colossal_lite.memory.copy_streams import LinkSpeed
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.offload.pieces import Name, StateKind
from colossal_lite.offload.placement import StatePlacement, place, spill_to_disk
from colossal_lite.planner import planner
from colossal_lite.zero import build_chunks as build_module
from colossal_lite.zero import state_pieces
from colossal_lite.zero.budget_messages import _changes as smaller_changes
from colossal_lite.zero.gather_units import units_of
from colossal_lite.zero.memory_budget import MemoryBudget
from colossal_lite.zero.sharded_weights import ParameterGather
from tests.offload.test_optimizer_states import slow
from tests.shared.covering import covering_array, name_of
from tests.shared.link_bound import Phase, Use, link_bound
from tests.shared.parity import Case, Step, assert_parity, start, steps_of
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import (
    ADAMW,
    SMALL,
    VOCABULARY,
    assert_same_bits,
    assert_same_state,
    bits,
    loads,
    saves,
)

DEEP = Case(layers=3, vocabulary=VOCABULARY, chunk_bytes=SMALL // 2, steps=2, ragged=True, dropout=0.1)


def config_of(
    stage: int, *, precision: Any = "fp32", prefetch: int = 1, accumulation: int = 1, clip: bool = False,
    sum_order: str = "ordered", reshard: bool = True, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    zero = dict(stage=stage, sum_order=sum_order)
    if stage == 3:
        zero |= dict(prefetch=prefetch, reshard_after_forward=reshard)
    clipping = dict(clip_grad_norm=0.05) if clip else {}
    return dict(
        zero=zero,
        precision=precision,
        gradient_accumulation=accumulation,
        optimizer=ADAMW,
        **clipping,
        **more,
    )


def placement_of(engine: Engine) -> StatePlacement:
    assert engine._memory_budget is not None and engine._memory_budget.placement is not None
    return engine._memory_budget.placement


def within(env: RankEnv, case: Case, share: float, update: str) -> Any:
    """A run with a budget between the least that it needs (0) and what it takes without one (1): its steps and state,
    and how many of its pieces rest on the host. No step may hold more than the budget."""
    least, whole = _extent(env, case, update=update)
    budget = round(least + share * (whole - least))
    with env.launch(
        replace(case, config={**case.config, **auto(budget, update=update)}).full_config
    ) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        steps = []
        for number in range(case.steps):
            inputs, labels = case.batch(number)
            engine._forecast([inputs[cut]])  # without tensors, but the meter would count them
            before, first = on_tier(engine, "cpu"), list[int]()
            with (
                LiveBytes() as meter,
                patch.object(MemoryBudget, "settle", partial(noted, engine, meter, first)),
            ):
                loss = engine.forward_backward((inputs[cut], labels[cut]))
            # of the first step before it is decided what rests where: then the meter sees what is taken to the device
            assert first == [] if number else first[0] <= max(budget, _all_away(placement_of(engine)))
            assert not number or before + meter.peak_bytes <= budget
            gradients = engine.full_gradients()
            with LiveBytes() as meter:
                norm = engine.step().grad_norm
            assert on_tier(engine, "cpu") + meter.peak_bytes <= budget
            steps.append(Step(float(loss), norm, gradients, engine.full_state_dict()))
        placed, rows = placement_of(engine), engine.memory_report()
        assert all(row.now_bytes == row.peak_bytes == row.forecast_bytes for row in rows), rows
        assert on_tier(engine, "cpu") == placed.device_bytes - dict(placed.fixed)["activations"]
        assert on_tier(engine, "host") == placed.host_bytes and placed.device_bytes <= budget
        return (steps, engine.full_optimizer_state()), (len(placed.on_host), len(placed.pieces))


def _all_away(placed: StatePlacement) -> int:
    """What the device holds with every piece on the host: of a few chunks the slots may take more than the pieces."""
    return replace(placed, on_host=frozenset(piece.name for piece in placed.pieces)).device_bytes


SETTLE = MemoryBudget.settle


def noted(engine: Engine, meter: LiveBytes, first: list[int], *step: Any) -> bool:
    """Note what the first step has held at the most, with its gathered weights, which no meter sees; then settle."""
    memory_budget = engine._memory_budget
    assert memory_budget is not None
    if memory_budget.placement is None:
        rows = [row for row in engine.memory_report() if row.tier == "cpu"]
        first.append(sum(row.forecast_bytes or 0 for row in rows) + meter.peak_bytes)
    return SETTLE(memory_budget, *step)


def auto(budget: int, **more: Any) -> dict[str, Any]:
    return dict(memory=dict(placement="auto", device_budget=budget, **more))


def on_tier(engine: Engine, tier: str) -> int:
    return sum(row.now_bytes for row in engine.memory_report() if row.tier == tier)


def _extent(env: RankEnv, case: Case, **more: Any) -> tuple[int, int]:
    """Bytes of the least and of the most that a run can use."""
    placed = _free(env, case, **more)
    least, whole = (
        place(placed.pieces, dict(placed.fixed), at, placed.beside).device_bytes for at in (1, 2**40)
    )
    return least, whole


def _free(env: RankEnv, case: Case, *, criterion: Any = None, **more: Any) -> StatePlacement:
    """What there is to place in a run."""
    with env.launch(replace(case, config={**case.config, **auto(2**40, **more)}).full_config) as context:
        engine = start(case, context, criterion=criterion)
        cut = context.local_batch(case.global_batch)
        inputs, labels = case.batch(0)
        engine.train_step((inputs[cut], labels[cut]))
        return placement_of(engine)


def three_tiers(env: RankEnv, case: Case, directory: str, **more: Any) -> dict[str, Any]:
    """Budgets of the device and of the host beside which about half of what can be on disk has to be, or more for the
    first step, which has everything off the device."""
    free = _free(env, case, **more)
    least, whole = (place(free.pieces, dict(free.fixed), at, free.beside).device_bytes for at in (1, 2**40))
    device = round(least + 0.1 * (whole - least))
    placed = place(free.pieces, dict(free.fixed), device, free.beside)
    first = replace(placed, on_host=frozenset(piece.name for piece in placed.pieces if piece.moves))
    half = (spill_to_disk(placed, 0).host_bytes + placed.host_bytes) // 2
    host = max(spill_to_disk(first, 0).host_bytes, half)
    return auto(device, host_budget=host, disk_dir=directory, **more)["memory"]


ROWS = covering_array(
    dict(
        ranks=[1, 2],
        stage=[1, 2, 3],
        share=[0.0, 0.4, 1.0],
        precision=["fp32", "bf16"],
        prefetch=[0, 1, 2],
        accumulation=[1, 2],
        clip=[False, True],
        update=["device", "host"],
    ),
    lambda row: row["stage"] == 3 or row["prefetch"] == 1,
)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_i7_a_budget_is_never_exceeded_and_changes_no_bit(row: dict[str, Any]) -> None:
    row = dict(row)
    ranks, share, update = row.pop("ranks"), row.pop("share"), row.pop("update")
    case = replace(DEEP, world_size=ranks, config=config_of(**row))
    expected = run_world(bits, ranks, case)
    found = run_world(within, ranks, case, share, update)
    assert_same_bits([steps for steps, _ in found], expected)
    for _, (on_host, pieces) in found:
        assert on_host == 0 if share == 1.0 else 0 < on_host <= pieces


class Idle(nn.Module):
    """Has a layer between the others that no forward calls, unless it `calls` that, and may leave out another."""

    skips = calls = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.idle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 31)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 5):
                h = torch.tanh(layer(h))
        h = self.idle(h) if self.calls else h
        logits: Tensor = self.head(h)
        return logits


def idle(env: RankEnv, stage: int, budget: int | None) -> tuple[int, int, list[dict[str, Tensor]]]:
    """The least and the most that a run can use on the device, and what it comes to within a budget, if it keeps to
    that."""
    config = dict(config_of(stage, precision="bf16"), seed=7, timeout_s=30.0)
    with env.launch(config | (auto(budget) if budget else auto(2**40))) as context:
        torch.manual_seed(0)
        with patch.object(build_module, "CHUNK_BYTES", 16_000):
            engine = cl.initialize(Idle(), context=context)
        found = []
        for number in range(3):
            inputs = torch.randint(31, (4, 5), generator=torch.Generator().manual_seed(number))
            cut = context.local_batch(4)
            before = on_tier(engine, "cpu")
            with LiveBytes() as meter:
                engine.forward_backward((inputs[cut], (inputs[cut] + 1) % 31))
            assert not number or budget is None or before + meter.peak_bytes <= budget
            with LiveBytes() as meter:
                engine.step()
            assert budget is None or on_tier(engine, "cpu") + meter.peak_bytes <= budget
            found.append(engine.full_state_dict())
        free, rows = placement_of(engine), engine.memory_report()
        assert all(row.now_bytes == row.peak_bytes == row.forecast_bytes for row in rows), rows
        least, whole = (
            place(free.pieces, dict(free.fixed), at, free.beside).device_bytes for at in (1, 2**40)
        )
        return least, whole, found


@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (1, 3), (2, 3)])
def test_i7_holds_for_a_model_with_parameters_that_no_backward_reaches(ranks: int, stage: int) -> None:
    """Behind them gradients stay open until backward is over, in every step as in the first."""
    free = run_world(idle, ranks, stage, None)
    least, whole = (max(row[i] for row in free) for i in (0, 1))
    for (_, _, found), (_, _, expected) in zip(
        run_world(idle, ranks, stage, round(least + 0.1 * (whole - least))), free, strict=True
    ):
        assert_same_states(found, expected)


def left_out_later(env: RankEnv, budget: int | None) -> tuple[int, list[str]]:
    """What a run that leaves a layer out from its second step on can use, and what it is told of its budget."""
    with env.launch(dict(config_of(2, precision="bf16"), seed=7) | auto(budget or 2**40)) as context:
        torch.manual_seed(0)
        with patch.object(build_module, "CHUNK_BYTES", 16_000):
            engine = cl.initialize(model := Idle(), context=context)
        inputs = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number in range(3):
                model.calls, model.skips = True, number > 0
                engine.train_step((inputs, (inputs + 1) % 31))
        free = placement_of(engine)
        whole = place(free.pieces, dict(free.fixed), 2**40, free.beside).device_bytes
        return whole, [str(each.message) for each in told if "device_budget" in str(each.message)]


def test_what_gradients_take_beyond_a_budget_where_parameters_are_left_out_later_is_told_once() -> None:
    (whole, none), _ = run_world(left_out_later, 2, None)
    (_, told), _ = run_world(left_out_later, 2, round(0.8 * whole))
    assert none == [] and len(told) == 1
    assert re.search(r"had no gradient; .* took [\d,]+ bytes beyond the [\d,]+ of the plan", told[0])


def assert_same_states(
    found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


# ---- the bits of stage 0, however it is run ----

SHARES = {"auto, least": 0.0, "auto, some": 0.4}
WAYS = covering_array(
    dict(
        ranks=[1, 2, 4],
        stage=[0, 1, 2, 3],
        placement=[
            "device",
            "host",
            "host, updated there",
            "disk",
            "disk, updated there",
            "static",
            "static, updated there",
            *SHARES,
            "auto, some, updated there",
            "auto, three tiers",
            "auto, three tiers, updated there",
        ],  # fmt: skip
        chunk_bytes=[SMALL // 2, None],
        prefetch=[0, 1, 2],
        accumulation=[1, 2],
        clip=[False, True],
        resume=[False, True],
    ),
    lambda row: row["stage"] == 3 or row["prefetch"] == 1,
)


def memory_of(env: RankEnv, case: Case, placement: str, directory: str) -> dict[str, Any]:
    there = dict(update_on="host") if placement.endswith(", updated there") else {}
    placement = placement.removesuffix(", updated there")
    if placement == "static":
        fractions = dict(weights=0.5, gradients=1.0, optimizer=0.8)
        return dict(placement="static", host_fraction=fractions) | there
    if placement == "auto, three tiers":
        return three_tiers(env, case, directory, **there)
    if placement == "all away":
        return dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0)) | there
    if placement in SHARES:
        case = replace(case, config=dict(case.config))
        least, whole = _extent(env, case, **there)
        return auto(round(least + SHARES[placement] * (whole - least)), **there)["memory"]
    memory = dict(placement=placement) | there
    return memory | (dict(disk_dir=directory) if placement == "disk" else {})


def in_one_way(env: RankEnv, case: Case, placement: str, resume: bool, directory: str) -> Any:
    """As `bits`; between its steps a run may be saved and gone on with by another."""
    memory = memory_of(env, case, placement, directory)
    full = replace(case, config=dict(case.config) | dict(memory=memory)).full_config
    steps, state = list[Step](), dict[str, dict[str, torch.Tensor]]()
    for numbers in ([0], [1]) if resume else ([0, 1],):
        with env.launch(full) as context:
            engine = start(case, context)
            if numbers[0]:
                engine.load(f"{directory}/saved")
            steps += steps_of(engine, context, case, numbers)
            state = engine.full_optimizer_state()
            if resume and not numbers[0]:
                engine.save(f"{directory}/saved")
    return steps, state


@cache
def of_stage_0(ranks: int, accumulation: int, clip: bool) -> Any:
    """Whole runs of plain data parallelism with everything on the device and chunks of the product's size."""
    config = config_of(0, accumulation=accumulation, clip=clip, precision="bf16")
    return run_world(bits, ranks, replace(DEEP, world_size=ranks, chunk_bytes=None, config=config))


@pytest.mark.parametrize("row", WAYS, ids=name_of)
def test_p1_every_way_to_run_has_the_bits_of_stage_0(row: dict[str, Any], tmp_path: Path) -> None:
    """Stage, chunk size, placement, budget, prefetch depth, accumulation, clipping and resume."""
    row = dict(row)
    ranks, placement, resume = row.pop("ranks"), row.pop("placement"), row.pop("resume")
    chunk_bytes = row.pop("chunk_bytes")
    config = config_of(precision="bf16", **row)
    case = replace(DEEP, world_size=ranks, chunk_bytes=chunk_bytes, config=config)
    found = run_world(in_one_way, ranks, case, placement, resume, str(tmp_path))
    assert_same_bits(found, of_stage_0(ranks, row["accumulation"], row["clip"]))


# ---- fractions ----

FRACTIONS = {
    "some of each": dict(weights=0.5, gradients=1.0, optimizer=0.8),
    "half of the optimizer's": dict(optimizer=0.5),
    "weights, half of the gradients": dict(weights=1.0, gradients=0.5),
}
STATIC_ROWS = covering_array(
    dict(
        ranks=[1, 2],
        stage=[0, 1, 2, 3],
        fractions=list(FRACTIONS),
        precision=["fp32", "bf16", "split"],
        accumulation=[1, 2],
    )
)


def divided(env: RankEnv, case: Case) -> Any:
    """As `bits`; what rests where is as the fractions say, to the nearest piece, and the report tells it."""
    fractions = case.config["memory"]["host_fraction"]
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        steps = list(steps_of(engine, context, case))
        placed, rows = placement_of(engine), engine.memory_report()
        for kind in set(StateKind) - {StateKind.LAST_SUM}:  # which is of a gradient
            pieces = [piece for piece in placed.pieces if piece.name.kind is kind]
            away = sum(piece.bytes for piece in pieces if piece.name in placed.on_host)
            share = fractions.get(kind, 0.0) * sum(piece.bytes for piece in pieces)
            assert abs(away - share) <= max((piece.bytes for piece in pieces), default=0) / 2
        assert all(row.now_bytes == row.forecast_bytes for row in rows if row.kind != "staging"), rows
        assert on_tier(engine, "host") == placed.host_bytes
        assert on_tier(engine, "cpu") == placed.device_bytes - dict(placed.fixed)["activations"]
        return steps, engine.full_optimizer_state()


@pytest.mark.parametrize("row", STATIC_ROWS, ids=name_of)
def test_p1_fractions_on_the_host_change_no_bit(row: dict[str, Any]) -> None:
    row = dict(row)
    ranks, fractions = row.pop("ranks"), FRACTIONS[row.pop("fractions")]
    if row["precision"] == "split":
        row["precision"] = dict(dtype="bf16", master="split")
    case = replace(DEEP, world_size=ranks, config=config_of(**row))
    memory = dict(placement="static", host_fraction=fractions)
    found = run_world(divided, ranks, replace(case, config=dict(case.config) | dict(memory=memory)))
    assert_same_bits(found, run_world(bits, ranks, case))


def test_fractions_that_a_budget_does_not_hold_are_refused_with_what_would() -> None:
    memory = dict(placement="static", host_fraction=dict(optimizer=0.5), device_budget=10_000)
    for text in run_world(refused, 2, replace(DEEP, config=config_of(3)), memory, 0):
        assert needed(text) > 10_000 and "at the least" not in text and "memory.placement='auto'" in text
    memory |= dict(device_budget=2**40, host_budget=1000)
    for text in run_world(refused, 2, replace(DEEP, config=config_of(3)), memory, 1):
        assert "memory.host_budget = 1000" in text and "smaller fractions" in text


# ---- states of eight times the budget ----

SMALL_MODEL = dict(width=32, heads=4)
EIGHTFOLD = Case(
    layers=32, sizes=SMALL_MODEL, tokens=8, vocabulary=64, global_batch=2, steps=3, chunk_bytes=4 * 4096,
    config=config_of(3, prefetch=0, sum_order="fast") | dict(activation_checkpoint="full"),
)  # fmt: skip


@dataclass(frozen=True)
class Told:
    """Of the last step of a run: bytes over the link, and where everything rested."""

    losses: tuple[float, ...]
    up_bytes: int
    down_bytes: int
    placement: StatePlacement
    reads: tuple[int, ...]
    """How often a micro-batch brings the weights of each chunk."""
    unit_bytes: int
    disk_bytes: tuple[int, int]
    """Read and written."""


def told(env: RankEnv, case: Case, times: float, **more: Any) -> Told:
    """A run with a budget of the `times`-th part of the states."""
    state_bytes = sum(rows_of(env, case).values())
    with env.launch(
        replace(case, config={**case.config, **auto(int(state_bytes / times), **more)}).full_config
    ) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        losses, before, tiers = [], [0, 0, 0, 0], engine._optimizer.tiers
        assert tiers is not None
        for number in range(case.steps):
            before = [link.moved_bytes for link in tiers.links]
            inputs, labels = case.batch(number)
            losses.append(float(engine.train_step((inputs[cut], labels[cut])).loss))
        moved = [link.moved_bytes - mark for link, mark in zip(tiers.links, before, strict=True)]
        weights, chunks = engine._weights, engine._chunks
        assert isinstance(weights, ParameterGather) and weights.plan is not None
        stays = weights.plan.stays()
        units = {unit for unit in units_of(chunks).values()}
        return Told(
            tuple(losses), moved[0], moved[1], placement_of(engine),
            tuple(stays[chunk.spec.id] for chunk in chunks),
            max(sum(chunks[c].resting_bytes for c in unit) for unit in units),
            (sum(moved[2:3]), sum(moved[3:4])),
        )  # fmt: skip


def rows_of(env: RankEnv, case: Case) -> dict[str, int]:
    with env.launch(case.full_config) as context:
        rows = start(case, context).memory_report()
        return {
            r.kind: r.now_bytes for r in rows if r.kind in ("weights", "masters", "gradients", "optimizer")
        }


def losses_of(env: RankEnv, case: Case) -> tuple[float, ...]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        batches = [case.batch(number) for number in range(case.steps)]
        return tuple(float(engine.train_step((i[cut], t[cut])).loss) for i, t in batches)


def phases_of(told: Told, micro_batches: int = 1, *, own_master: bool = True) -> list[Phase]:
    """What a step uses: forward and backward of each micro-batch, update, which reads weights that are their own
    masters."""
    forward, backward, update = dict[Name, Use](), dict[Name, Use](), dict[Name, Use]()
    again = dict[Name, Use]()
    for piece in told.placement.pieces:
        name = piece.name
        if name.kind is StateKind.LAST_SUM:
            continue  # of a gradient
        if name.kind is StateKind.WEIGHTS:
            forward[name] = Use(piece.bytes, reads=True, writes=False)
            if told.reads[name.chunk] > 1:
                backward[name] = forward[name]
        elif name.kind is StateKind.GRADIENTS:
            backward[name] = Use(piece.bytes, reads=False, writes=True)
            again[name] = replace(backward[name], adds=True)
        reads = own_master or name.kind is not StateKind.WEIGHTS
        update[name] = Use(piece.bytes, reads=reads, writes=name.kind is not StateKind.GRADIENTS)
    return [forward, backward, *[forward, backward | again] * (micro_batches - 1), update]


def told_with_disk(env: RankEnv, case: Case, times: float, directory: str) -> Told:
    """With a host that has room for weights, gradients and a third of the records."""
    state_bytes = sum(rows_of(env, case).values())
    host_budget = round(state_bytes * (8 + 8 / 3) / 16)
    return told(env, case, times, host_budget=host_budget, disk_dir=directory)


@cache
def free_losses(ranks: int) -> tuple[tuple[float, ...], ...]:
    """Of the model with large states without a budget, on each rank."""
    return tuple(run_world(losses_of, ranks, replace(EIGHTFOLD, world_size=ranks)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_records_on_disk_states_of_eight_times_the_budget_train_to_the_same_losses(
    ranks: int, tmp_path: Path
) -> None:
    case = replace(EIGHTFOLD, world_size=ranks)
    for found, losses in zip(
        run_world(told_with_disk, ranks, case, 8.0, str(tmp_path)), free_losses(ranks), strict=True
    ):
        placed = found.placement
        assert found.losses == losses
        assert (found.up_bytes, found.down_bytes) == (placed.up_bytes, placed.down_bytes)
        assert found.disk_bytes == (placed.read_bytes, placed.read_bytes)
        assert placed.host_budget is not None and placed.host_bytes <= placed.host_budget
        tiers = {placed.tier_of(p.name) for p in placed.pieces if p.name.kind is StateKind.OPTIMIZER}
        assert tiers >= {"host", "disk"} and 0.5 < len(placed.on_disk) / len(found.reads) < 0.9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_states_of_eight_times_the_budget_trains_to_the_same_losses(ranks: int) -> None:
    case = replace(EIGHTFOLD, world_size=ranks)
    for found, losses in zip(run_world(told, ranks, case, 8.0), free_losses(ranks), strict=True):
        assert found.losses == losses
        assert len(found.placement.on_host) > 0.8 * len(found.placement.pieces)


def over_the_bound(told: Told, micro_batches: int, *, own_master: bool = True) -> float:
    """Bytes over the link as a multiple of what any policy moves that has all of the budget for what may move, but for
    the slots in which it visits and is fetched ahead, and the unit that computes."""
    placed = told.placement
    assert placed.budget is not None
    moving = tuple(
        replace(piece, shared=None, last_sum=False)
        for piece in placed.pieces
        if piece.name.kind is not StateKind.LAST_SUM
    )
    fixed = sum(held for _, held in placed.fixed) + replace(placed, pieces=moving).visiting_bytes
    phases = phases_of(told, micro_batches, own_master=own_master)
    bound = link_bound(phases, placed.budget - fixed + told.unit_bytes)
    return (told.up_bytes + told.down_bytes) / bound


LINK_ROWS = [
    dict(ranks=1, times=8.0),
    dict(ranks=1, times=3.0),
    dict(ranks=2, times=3.0),
    dict(ranks=1, times=3.0, prefetch=2),
    dict(ranks=2, times=2.5, prefetch=1, accumulation=2),
    dict(ranks=1, times=3.0, precision="bf16"),
    dict(ranks=2, times=4.0, accumulation=2, precision="bf16"),
]


def linked(row: dict[str, Any]) -> tuple[Case, float, int]:
    row = dict(row)
    ranks, times = row.pop("ranks"), row.pop("times")
    config = config_of(3, sum_order="fast", **dict(prefetch=0) | row) | dict(activation_checkpoint="full")
    parts = row.get("accumulation", 1)
    return replace(EIGHTFOLD, world_size=ranks, global_batch=2 * ranks * parts, config=config), times, parts


@cache
def told_in(number: int) -> tuple[Told, ...]:
    """Of the run of a row of LINK_ROWS, on each rank."""
    case, times, _ = linked(LINK_ROWS[number])
    return tuple(run_world(told, case.world_size, case, times))


@pytest.mark.parametrize("row", LINK_ROWS, ids=name_of)
def test_bytes_over_the_link_are_the_plan_and_within_five_percent_of_the_bound(row: dict[str, Any]) -> None:
    """Of any policy within the budget, the slots that it needs to work ahead left out; where masters are apart (bf16)
    too, between whose backward and update nobody reads weights."""
    _, _, parts = linked(row)
    for found in told_in(LINK_ROWS.index(row)):
        placed = found.placement
        assert (found.up_bytes, found.down_bytes) == (placed.up_bytes, placed.down_bytes)
        over = over_the_bound(found, parts, own_master="precision" not in row)
        assert placed.on_host and over <= 1.05


def told_on_host(env: RankEnv, case: Case, times: float) -> Told:
    return told(env, case, times, update_on="host")


@pytest.mark.parametrize("row", [LINK_ROWS[1], LINK_ROWS[4]], ids=name_of)
def test_updates_on_the_host_move_the_bytes_of_the_plan_and_fewer_than_records_that_visit(
    row: dict[str, Any],
) -> None:
    case, times, _ = linked(row)
    visit = told_in(LINK_ROWS.index(row))
    for found, other in zip(run_world(told_on_host, case.world_size, case, times), visit, strict=True):
        placed = found.placement
        assert placed.on_host and found.losses == other.losses
        assert (found.up_bytes, found.down_bytes) == (placed.up_bytes, placed.down_bytes)
        assert found.up_bytes + found.down_bytes < other.up_bytes + other.down_bytes


def all_on_the_host(pieces: Any, fixed: Any, budget: int | None, beside: Any) -> StatePlacement:
    return StatePlacement(
        tuple(pieces), frozenset(p.name for p in pieces), tuple(fixed.items()), budget, beside
    )


def told_badly(env: RankEnv, case: Case, times: float) -> Told:
    with patch.object(state_pieces, "place", all_on_the_host):
        return told(env, case, times)


@pytest.mark.parametrize("row", [LINK_ROWS[1], LINK_ROWS[4]], ids=name_of)
def test_a_policy_that_keeps_nothing_on_the_device_is_beyond_five_percent_of_the_bound(
    row: dict[str, Any],
) -> None:
    case, times, parts = linked(row)
    for found in run_world(told_badly, case.world_size, case, times):
        assert over_the_bound(found, parts) > 1.05


# ---- errors of budgets that do not fit ----


def refused(env: RankEnv, case: Case, memory: dict[str, Any], steps: int) -> str:
    with env.launch(replace(case, config=dict(case.config) | dict(memory=memory)).full_config) as context:
        calls = list[str]()
        try:
            engine = start(case, context)
            assert steps, "it was to be refused before any step"
            for name, module in engine.model.named_modules():
                module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
            engine.forward_backward((inputs, labels))
        except ConfigError as error:
            assert not steps or bool(calls) == (case.build == "module"), calls
            return str(error)
    raise AssertionError("nothing was refused")


def needed(text: str) -> int:
    found = re.search(r"the device needs ([\d,]+) bytes", text)
    assert found, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("placement", ["device", "host", "auto"])
def test_a_budget_that_no_batch_fits_is_refused_when_the_engine_is_made(placement: str) -> None:
    case = replace(DEEP, config=config_of(3))
    for text in run_world(refused, 2, case, dict(placement=placement, device_budget=10_000), 0):
        slots = "arena" if placement == "auto" else "staging"
        assert "memory.device_budget = 10000" in text and needed(text) > 10_000 and slots in text
        assert ("memory.placement='auto'" in text) == (placement != "auto")
        assert "; legal: more than " in text and "which the first step tells" in text, (
            "a floor is not what is legal"
        )


def test_what_does_not_fit_is_refused_before_the_first_forward_and_a_smaller_change_is_told() -> None:
    """By a run without tensors: no module has been called."""
    case = replace(DEEP, config=config_of(3, prefetch=2, precision="fp32"))
    (text, other) = run_world(refused, 2, case, dict(placement="auto", device_budget=200_000), 1)
    assert text == other and needed(text) > 200_000 and "activations" in text
    (text, _) = run_world(refused, 2, case, dict(placement="auto", device_budget=needed(text) - 1), 1)
    assert "zero.prefetch=1" in text, text


def steps_within(env: RankEnv, case: Case, memory: dict[str, Any]) -> int:
    with env.launch(replace(case, config=dict(case.config) | dict(memory=memory)).full_config) as context:
        return len(list(steps_of(start(case, context), context, case)))


@pytest.mark.parametrize("build", ["callable", "module"])
def test_a_device_budget_that_an_error_names_as_legal_is_taken_when_it_is_tried(build: str) -> None:
    more: dict[str, Any] = dict(adapters=2) if build == "module" else {}  # then it is measured, not foretold
    case = replace(DEEP, build=build, config=config_of(3, precision="fp32"), **more)
    (text, _) = run_world(refused, 2, case, dict(placement="auto", device_budget=200_000), 1)
    found = re.search(r"legal: ([\d,]+) or more", text)
    assert found, text
    legal = dict(placement="auto", device_budget=int(found[1].replace(",", "")))
    assert run_world(steps_within, 2, case, legal) == [case.steps] * 2


def test_an_accumulation_that_a_measured_step_names_is_taken_when_it_is_tried() -> None:
    """What backward holds of a weight stays as it is with half of the batch."""
    case = replace(
        DEEP, build="module", adapters=2, ragged=False, global_batch=8, config=config_of(1, precision="fp32")
    )

    def told(budget: int, steps: int = 1) -> str:
        (text, _) = run_world(refused, 2, case, dict(placement="auto", device_budget=budget), steps)
        return str(text)

    floor = re.search(r"legal: more than ([\d,]+)", told(1000, 0))
    assert floor
    text = told(needed(told(int(floor[1].replace(",", "")) + 1)) - 1)
    found = re.search(r"gradient_accumulation=2 \(([\d,]+) bytes\)", text)
    assert found, text
    halves = replace(case, config=config_of(1, precision="fp32", accumulation=2))
    legal = dict(placement="auto", device_budget=int(found[1].replace(",", "")))
    assert run_world(steps_within, 2, halves, legal) == [case.steps] * 2


def test_no_accumulation_is_named_that_leaves_fewer_samples_than_the_micro_batches_of_a_pipeline() -> None:
    staged = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs", micro_batches=4))
    config = Config.load(dict(config_of(3), parallel=staged))

    def named(samples: int) -> set[str | int]:
        return {change.get("gradient_accumulation", 1) for change in smaller_changes(config, samples)}

    assert named(4) == {1} and named(8) == {1, 2}


# ---- batches that no step has shown yet ----

GROWING = Case(
    layers=4, world_size=2, tokens=16, vocabulary=64, global_batch=2, sizes=dict(width=32, heads=4), chunk_bytes=SMALL,
)  # fmt: skip


def grown(env: RankEnv, case: Case, budget: int, sizes: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Of a run of batches of so many samples on a rank, to train on or to evaluate: what was refused, and the most that
    the device held in each."""
    out = []
    with env.launch(replace(case, config={**case.config, **auto(budget)}).full_config) as context:
        engine = start(case, context)
        for what, samples in sizes:
            inputs = torch.randint(
                64, (samples, case.tokens), generator=torch.Generator().manual_seed(samples)
            )
            batch = inputs, inputs.roll(-1, 1)
            before, said = on_tier(engine, "cpu"), ""
            try:
                with torch.set_grad_enabled(what == "train"):
                    engine._forecast([inputs])  # else the meter counts what has no bytes
            except ConfigError as error:
                said = str(error)
            with LiveBytes() as meter:
                if not said:
                    engine.train_step(batch) if what == "train" else engine.eval_step(batch)
            out.append((said, before + meter.peak_bytes))
        return out


@pytest.mark.parametrize("build", ["callable", "module"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_batch_larger_than_the_first_is_let_in_where_it_fits_and_else_refused_before_it_runs(
    stage: int, build: str
) -> None:
    """On every rank, also for models without a forecast."""
    case = replace(GROWING, build=build, config=config_of(stage, sum_order="fast"))
    if build == "module":
        case = replace(case, adapters=2)
    budget = 1_200_000
    sizes = [("train", 1), ("train", 3), ("train", 64), ("evaluate", 3), ("evaluate", 256), ("train", 2)]
    for rank in run_world(grown, 2, case, budget, sizes):
        said, held = zip(*rank, strict=True)
        assert [bool(each) for each in said] == [False, False, True, False, True, False], said
        assert max(held[1:]) <= budget, held
        for text, (what, samples) in ((said[2], sizes[2]), (said[4], sizes[4])):
            words = "a step" if what == "train" else "an evaluation"
            assert f"{words} of {samples} samples of {case.tokens} tokens on a rank" in text, text
            assert needed(text) > budget


@pytest.mark.parametrize("later", [("train", 4), ("evaluate", 16)])
def test_what_the_refusal_of_a_later_batch_names_as_legal_is_taken_when_it_is_tried(
    later: tuple[str, int],
) -> None:
    """A larger budget takes more state beside the first batch, and that must leave room for the later one."""
    case = replace(GROWING, config=config_of(3, sum_order="fast"))

    def refusals(budget: int, sizes: list[tuple[str, int]], parts: int = 1) -> list[str]:
        cut = replace(case, config=dict(case.config) | dict(gradient_accumulation=parts))
        return [text for text, _ in run_world(grown, 2, cut, budget, sizes)[0] if text]

    sizes, budget = [("train", 1), later], 600_000
    (text,) = refusals(budget, sizes)
    found = re.search(
        r"legal: ([\d,]+) or more, which has room for all state; or begin with the largest", text
    )
    assert found, text
    legal = int(found[1].replace(",", ""))
    assert legal > needed(text) > budget
    assert [refusals(legal + more, sizes) for more in (0, 100_000)] == [[], []]
    parts = re.search(r"is then placed, with gradient_accumulation=(\d)", text)
    assert bool(parts) == (later[0] == "train"), text
    assert refusals(budget, [later], int(parts[1]) if parts else 1) == []


def evaluated_first(env: RankEnv, case: Case, budget: int, samples: int) -> tuple[str, int]:
    """What an evaluation before the first step was refused with, or nothing, and the most that the device held."""
    with env.launch(replace(case, config={**case.config, **auto(budget)}).full_config) as context:
        engine, said = start(case, context), ""
        inputs = torch.randint(64, (samples, case.tokens), generator=torch.Generator().manual_seed(env.rank))
        before = on_tier(engine, "cpu")
        with LiveBytes() as meter:
            try:
                engine.eval_step((inputs, inputs.roll(-1, 1)))
            except ConfigError as error:
                said = str(error)
        held = before + meter.peak_bytes
        small = inputs[:1], inputs[:1].roll(-1, 1)
        engine.eval_step(small)
        engine.train_step(small)
        try:
            engine.eval_step((inputs, inputs.roll(-1, 1)))
            assert not said, "it does not fit after the first step either"
        except ConfigError:
            assert said
        return said, held


@pytest.mark.parametrize(("samples", "fits"), [(4, True), (256, False)])
def test_an_evaluation_before_the_first_step_of_what_nobody_can_foretell_is_held_to_the_budget(
    samples: int, fits: bool
) -> None:
    """It is measured, and refused on every rank; what fits may be evaluated before and after the first step."""
    case = replace(GROWING, build="module", adapters=2, config=config_of(1, sum_order="fast"))
    budget = 1_200_000
    for said, held in run_world(evaluated_first, 2, case, budget, samples):
        assert (held <= budget) == fits == (not said), (said, held)
        assert fits or needed(said) > budget and "activations" in said


class Pictures(nn.Module):
    """Features of pictures, and of a second input if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, pictures: Tensor, beside: Tensor | None = None) -> Tensor:
        seen = [
            torch.relu(self.features(each)).mean((2, 3)) for each in (pictures, beside) if each is not None
        ]
        return cast(Tensor, self.head(torch.stack(seen).sum(0)))


def larger_inputs(env: RankEnv, budget: int, sizes: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    """Of a run of batches of 4 samples, of one or two pictures of such sizes: what was refused, and the most that the
    device held in each."""
    config = config_of(1) | dict(memory=dict(placement="auto", device_budget=budget))
    out = []
    with env.launch(config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Pictures(), context=context)
        for each in sizes:
            pictures = tuple(torch.randn(4, 3, size, size) for size in each)
            before, said = on_tier(engine, "cpu"), ""
            with LiveBytes() as meter:
                try:
                    engine.train_step((pictures, torch.arange(4)))
                except ConfigError as error:
                    said = str(error)
            out.append((said, before + meter.peak_bytes))
    return out


@pytest.mark.parametrize(
    ("larger", "words"),
    [
        ((64,), "12,288 values of inputs on a rank"),
        ((8, 64), "192 values of inputs[0] and 12,288 values of inputs[1]"),
    ],
)
def test_larger_pictures_or_a_longer_second_input_are_held_to_the_budget(
    larger: tuple[int, ...], words: str
) -> None:
    budget = 200_000
    sizes = [larger[:-1] + (8,), larger, larger[:-1] + (4,), larger[:-1] + (9,)]
    (rank,) = run_world(larger_inputs, 1, budget, sizes)
    said, held = zip(*rank, strict=True)
    assert [bool(each) for each in said] == [False, True, False, False], said
    assert max(bytes_ for text, bytes_ in rank if not text) <= budget, held
    assert f"a step of 4 samples of {words}" in said[1] and needed(said[1]) > budget


def test_ranks_with_smaller_batches_learn_that_another_has_too_large_a_one() -> None:
    case = replace(GROWING, config=config_of(3, sum_order="fast"))
    (mine, other) = run_world(one_grows, 2, case, timeout_s=60)
    assert mine == other and "a step of 100 samples" in mine


def one_grows(env: RankEnv, case: Case) -> str:
    with env.launch(replace(case, config={**case.config, **auto(1_000_000)}).full_config) as context:
        engine = start(case, context)
        for samples in (1, 1 + 99 * env.rank):
            inputs = torch.zeros(samples, case.tokens, dtype=torch.int64)
            try:
                engine.train_step((inputs, inputs + 1))
            except ConfigError as error:
                return str(error)
    raise AssertionError("nothing was refused")


# ---- frozen parameters ----


def frozen_rows(env: RankEnv, case: Case) -> tuple[int, int, int, int]:
    """Bytes of frozen parameters: as they are (at stage 3 this rank's half), by the report now and foretold, and by the
    plan."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        held = sum(p.nbytes for p in engine.model.parameters() if not p.requires_grad)
        if engine._parts.built.frozen:
            held = sum(
                chunk.spec.numel // 2 * chunk.local_shard.itemsize for chunk in engine._parts.built.frozen
            )
        (row,) = [row for row in engine.memory_report() if row.kind == "frozen"]
        assert row.tier == "cpu" and row.peak_bytes == row.now_bytes
        made = planner.plan(
            context.config, case.model, batch=6, sequence=case.tokens, world_size=case.world_size
        )
        return held, row.now_bytes, row.forecast_bytes or 0, made.bytes_of("frozen")


@pytest.mark.parametrize("config", [dict(), dict(zero=dict(stage=3)), dict(precision="bf16")])
def test_the_report_and_the_plan_have_a_row_for_frozen_parameters(config: dict[str, Any]) -> None:
    for held, *told in run_world(frozen_rows, 2, Case(config=config, adapters=2)):
        assert held > 0 and told == [held] * 3


# ---- advice ----

ADVISED = Case(
    layers=8, world_size=2, tokens=16, vocabulary=64, sizes=dict(width=32, heads=4), chunk_bytes=SMALL
)


def advice(env: RankEnv, case: Case, memory: dict[str, Any], samples: int, changes: dict[str, Any]) -> str:
    """What a step of so many samples on a rank is refused with, or nothing."""
    config = dict(case.config) | dict(memory=memory)
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        config = config | (
            {section: dict(config.get(section, {})) | {key: value}} if section else {key: value}
        )
    with env.launch(replace(case, config=config).full_config) as context:
        inputs = torch.zeros(samples, case.tokens, dtype=torch.int64)
        try:
            start(case, context).train_step((inputs, inputs + 1))
        except ConfigError as error:
            return str(error)
    return ""


def test_advice_cuts_no_micro_batch_that_a_grid_cannot_cut() -> None:
    """Under the least budget no number of micro-batches is enough; each that is tried has to divide over the rows."""
    case = replace(ADVISED, layers=2, config=dict(optimizer=ADAMW), world_size=4, tensor=4, mode="2d")
    memory: dict[str, Any] = dict(placement="auto", device_budget=1)
    least = needed(run_world(advice, 4, case, memory, 8, {})[0])
    (text, *others) = run_world(advice, 4, case, memory | dict(device_budget=least + 1), 8, {})
    assert needed(text) > least and others == [text] * 3
    legal = dict(placement="auto", device_budget=needed(text))
    assert run_world(advice, 4, case, legal, 8, {}) == [""] * 4


ADVICE_ROWS = [
    dict(stage=1, placement="device", samples=9, short=0.9),
    dict(stage=2, placement="auto", samples=9, short=0.4),
    dict(stage=3, placement="auto", samples=9, short=0.9),
    dict(stage=3, placement="host", samples=9, short=0.4),
    dict(stage=2, placement="device", samples=1, short=0.9),
]


@pytest.mark.parametrize("row", ADVICE_ROWS, ids=name_of)
def test_advice_that_is_followed_fits(row: dict[str, Any]) -> None:
    """With the bytes that are told, or there is none; never more parts than there are samples."""
    zero: dict[str, Any] = dict(stage=row["stage"]) | (dict(prefetch=2) if row["stage"] == 3 else {})
    case = replace(
        ADVISED,
        config=dict(zero=zero, precision="fp32", optimizer=ADAMW),
    )
    memory: dict[str, Any] = dict(placement=row["placement"], device_budget=1)
    (text, other) = run_world(advice, 2, case, memory, row["samples"], {})
    least = needed(text)  # before any batch is seen
    (text, other) = run_world(advice, 2, case, memory | dict(device_budget=least), row["samples"], {})
    whole = needed(text) if text else least
    budget = round(least + row["short"] * (whole - least))
    (text, other) = run_world(advice, 2, case, memory | dict(device_budget=budget), row["samples"], {})
    assert text == other
    if not text or (found := re.search(r"; or (.+) \(([\d,]+) bytes\)", text)) is None:
        return
    changes = {path: _value(value) for path, value in (each.split("=") for each in found[1].split(" with "))}
    parts = changes.get("gradient_accumulation")
    assert parts is None or 1 < parts <= row["samples"]
    assert int(found[2].replace(",", "")) <= budget
    moved = dict(placement=changes.pop("memory.placement", row["placement"]))
    (text, _) = run_world(
        advice, 2, case, memory | dict(device_budget=budget) | moved, row["samples"], changes
    )
    assert not text, (found[1], text)


def _value(text: str) -> Any:
    return int(text) if text.isdigit() else text.strip("'")


def test_at_stage_2_more_micro_batches_are_advised_with_sums_for_each_of_them() -> None:
    """Sums by step would keep gradients whole."""
    config = dict(zero=dict(stage=2), precision="fp32", optimizer=ADAMW, activation_checkpoint="full")
    case, memory = replace(ADVISED, config=config), dict(placement="auto", device_budget=915_000)
    (text, _) = run_world(advice, 2, case, memory, 8, {})
    found = re.search(
        r"; or gradient_accumulation=(\d+) with zero.reduce_every='micro_batch' \(([\d,]+) bytes\)", text
    )
    assert found, text
    parts = dict(gradient_accumulation=int(found[1]))
    (alone, _) = run_world(advice, 2, case, memory, 8, parts)
    (both, _) = run_world(advice, 2, case, memory, 8, parts | {"zero.reduce_every": "micro_batch"})
    assert needed(alone) > 915_000 and not both


def test_where_nobody_can_foretell_it_the_first_step_is_measured_and_refused_before_its_update() -> None:
    case = replace(DEEP, build="module", config=config_of(3, prefetch=2), adapters=2)
    (text, other) = run_world(refused, 2, case, dict(placement="auto", device_budget=200_000), 1)
    assert text == other and needed(text) > 200_000 and "activations" in text


def test_a_host_budget_is_held_too() -> None:
    memory = dict(placement="auto", device_budget=380_000, host_budget=1000)
    for text in run_world(refused, 2, replace(DEEP, config=config_of(3, precision="bf16")), memory, 1):
        assert "memory.host_budget = 1000" in text and "memory.device_budget = " not in text


def first_on_host(env: RankEnv, case: Case, memory: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Bytes on the host when the engine has been made, and after a step; what `plan` says under this host's budget, and
    one that is a byte smaller."""
    with env.launch(replace(case, config=dict(case.config) | dict(memory=memory)).full_config) as context:
        engine = start(case, context)
        first = on_tier(engine, "host")
        list(steps_of(engine, context, case, [0]))
        told = [
            planner.plan(
                Config.load(context.config, ["--memory.host_budget", str(budget)]), case.model,
                batch=case.global_batch, sequence=case.tokens, world_size=env.world_size,
            ).memory_budget
            for budget in (memory["host_budget"], memory["host_budget"] - 1)
        ]  # fmt: skip
        return first, on_tier(engine, "host"), told


@pytest.mark.parametrize("placement", ["auto", "static"])
def test_a_host_budget_holds_before_the_device_takes_any_too(placement: str) -> None:
    """Until the first update all that may move rests on the host, however large the device; `plan` tells it."""
    case = replace(DEEP, config=config_of(3, precision="bf16"))
    memory: dict[str, Any] = dict(placement=placement, device_budget=2**30)
    if placement == "static":
        memory["host_fraction"] = dict(optimizer=0.3)
    text = run_world(refused, 2, case, memory | dict(host_budget=1000), 0)[0]
    found = re.search(r"host_budget = 1000: ([\d,]+) bytes .*, before the device takes any", text)
    assert found, text
    need = int(found[1].replace(",", ""))
    assert "the device takes any" in run_world(refused, 2, case, memory | dict(host_budget=need - 1), 0)[0]
    for first, then, (fits, does_not) in run_world(first_on_host, 2, case, memory | dict(host_budget=need)):
        assert first == need > then
        assert re.search(rf"host at first +{need:,} of {need:,}$", fits, re.M), fits
        assert re.search(rf"host at first +{need:,} of {need - 1:,}: does not fit$", does_not, re.M), does_not


# ---- three tiers ----


def run_on(env: RankEnv, case: Case, memory: dict[str, Any]) -> Any:
    """As `bits`, and where records rested before the first update and after it; the host never holds more than its
    budget, what is planned is what is held and moved, and `plan` foretells it."""
    memory = three_tiers(env, case, memory["disk_dir"]) if "placement" not in memory else memory
    with env.launch(replace(case, config=dict(case.config) | dict(memory=memory)).full_config) as context:
        engine = start(case, context)
        tiers, seen, steps = engine._optimizer.tiers, list[int](), list[Step]()
        assert tiers is not None
        first = tiers.on_disk
        for number in range(case.steps):
            seen.append(on_tier(engine, "host"))
            steps += steps_of(engine, context, case, [number])
        rows, links = engine.memory_report(), {row.link: row.moved_bytes for row in engine.link_report()}
        seen.append(on_tier(engine, "host"))
        assert all(row.now_bytes == row.forecast_bytes for row in rows if row.kind != "staging"), rows
        assert max(seen) <= memory["host_budget"]
        on_disk = tiers.record_bytes("disk")
        assert links["read"] == links["write"] == on_disk
        if memory["placement"] == "host":
            batch, sequence = case.global_batch, case.tokens
            made = planner.plan(
                context.config, case.model, batch=batch, sequence=sequence, world_size=env.world_size
            )
            told = {(row.kind, row.tier): row.bytes for row in made.memory if row.kind != "exchange"}
        else:
            told = {(kind, tier): held for kind, tier, held in placement_of(engine).rows}
        held = {(row.kind, row.tier): row.now_bytes for row in rows if row.tier in ("host", "disk")}
        if memory["placement"] == "auto":  # where a record is one row with its masters
            for tier in ("host", "disk"):
                held["optimizer", tier] = held.pop(("masters", tier), 0) + held.get(("optimizer", tier), 0)
        assert {at: b for at, b in held.items() if b} == {
            at: b for at, b in told.items() if b and at[1] in ("host", "disk")
        }
        return (steps, engine.full_optimizer_state()), (first, tiers.on_disk)


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("stage", [0, 1])
def test_beyond_the_hosts_budget_records_of_the_host_rest_on_disk(
    stage: int, update: str, tmp_path: Path
) -> None:
    """`placement="host"`: what no device budget decides is known when the engine is made."""
    case = replace(DEEP, config=config_of(stage, precision="bf16"))
    budget = (200_000 if update == "device" else 260_000) // (1 + stage)
    memory = dict(placement="host", update=update, disk_dir=str(tmp_path), host_budget=budget)
    found = run_world(run_on, 2, case, memory)
    assert_same_bits([steps for steps, _ in found], run_world(bits, 2, case))
    for _, (first, then) in found:
        assert first == then and 5 <= len(first) < 12


def test_records_change_their_tiers_when_it_is_known_what_the_device_has_room_for(tmp_path: Path) -> None:
    case = replace(DEEP, config=config_of(3, precision="bf16"))
    found = run_world(run_on, 2, case, dict(disk_dir=str(tmp_path)))
    assert_same_bits([steps for steps, _ in found], run_world(bits, 2, case))
    for _, (first, then) in found:
        assert first != then and len(then) >= 5
    assert list(tmp_path.iterdir()) == []


def test_what_the_host_has_no_room_for_is_refused_with_the_bytes_and_a_disk_that_would_help(
    tmp_path: Path,
) -> None:
    """The advice that is told fits, and what is told to be the least is it."""
    case = replace(DEEP, config=config_of(1, precision="bf16"))
    least = 1
    for steps in (0, 1):
        least = needed(run_world(refused, 2, case, dict(placement="auto", device_budget=least), steps)[0])
    for steps, memory, budget in (
        (0, dict(placement="host"), 105_000),
        (1, dict(placement="auto", device_budget=least), 150_000),
    ):
        (text, other) = run_world(refused, 2, case, memory | dict(host_budget=budget), steps)
        assert text == other
        found = re.search(
            rf"host_budget = {budget}: ([\d,]+) bytes .*; or memory.disk_dir, for ([\d,]+) bytes", text
        )
        assert found and int(found[1].replace(",", "")) > budget, text
        there = memory | dict(host_budget=budget, disk_dir=str(tmp_path))
        ((_, (first, _)), _) = run_world(run_on, 2, case, there)
        assert first
        (text, _) = run_world(refused, 2, case, there | dict(host_budget=1000), 0)
        told = re.search(r"host_budget = 1000: ([\d,]+) bytes .* at the least", text)
        assert told and "disk_dir" not in text, text
        need = int(told[1].replace(",", ""))
        assert "at the least" in run_world(refused, 2, case, there | dict(host_budget=need - 1), 0)[0]
        run_world(run_on, 2, case, there | dict(host_budget=need))


def test_a_checkpoint_of_a_run_within_a_budget_is_the_same_without_one(tmp_path: Any) -> None:
    free = replace(DEEP, config=config_of(3, precision="bf16"))
    tight = replace(free, config=free.config | auto(380_000))
    for number, (here, there) in enumerate(((free, tight), (tight, free))):
        saved = run_world(saves, 2, here, str(tmp_path / str(number)))[0]
        for loaded in run_world(loads, 2, there, str(tmp_path / str(number))):
            assert_same_state(loaded, saved)


ALL_AWAY: dict[str, Any] = dict(
    memory=dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))
)


@pytest.mark.parametrize("memory", [auto(380_000), ALL_AWAY], ids=["a budget", "all away"])
@pytest.mark.parametrize("link", ["h2d", "d2h"])
def test_i5_bits_do_not_depend_on_the_speed_of_the_link(link: str, memory: dict[str, Any]) -> None:
    case = replace(DEEP, world_size=1, config=config_of(3, precision="bf16", accumulation=2))
    expected = run_world(bits, 1, case)
    speeds = {link: LinkSpeed(latency_s=0.003)}
    assert_same_bits(run_world(slow, 1, replace(case, config={**case.config, **memory}), speeds), expected)


def slow_and_hasty(env: RankEnv, case: Case, speeds: dict[str, LinkSpeed]) -> Any:
    """Gradients fill places from which records still leave."""
    with patch.object(ArenaAllocator, "take_now", lambda self, number: self.take(number)[0]):
        return slow(env, case, speeds)


def test_i5_goes_red_where_gradients_do_not_wait_for_the_records_in_their_place() -> None:
    case = replace(DEEP, world_size=1, config=config_of(3, precision="bf16", accumulation=2))
    away = replace(case, config={**case.config, **ALL_AWAY})
    found = run_world(slow_and_hasty, 1, away, {"d2h": LinkSpeed(latency_s=0.03)})
    with pytest.raises(AssertionError):
        assert_same_bits(found, run_world(bits, 1, case))


def test_models_of_hugging_face_without_a_cache_of_keys_keep_a_budget() -> None:
    """They look into their positions for packed documents. In a forecast on meta each row is one."""
    memory = dict(placement="auto", device_budget="4MiB")
    for family in ("hf-gpt2", "hf-llama"):
        assert_parity(Case(family=family, tied=False, world_size=2, steps=2, config=dict(memory=memory)))


class Reads(nn.Module):
    """Its course depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        out: torch.Tensor = self.head(x.tanh() if (x > 0).any() else x)
        return out


def reads(env: RankEnv, memory: dict[str, Any]) -> list[float]:
    with env.launch(dict(precision="fp64", memory=memory)) as context:
        engine = cl.initialize(Reads, context=context)
        ids = torch.arange(16).view(4, 4)
        return [float(engine.train_step((ids, ids.flip(0))).loss) for _ in range(3)]


def test_a_model_whose_forward_reads_values_is_measured_in_the_first_step() -> None:
    assert run_world(reads, 1, dict(placement="auto", device_budget="1MiB")) == run_world(reads, 1, {})


def test_a_plan_of_such_a_model_says_what_it_reads() -> None:
    with pytest.raises(ValueError, match=r"plan: the model's forward reads a value \(__bool__ of \(\)\)"):
        planner.plan(dict(precision="fp32"), Reads, batch=2, sequence=12, world_size=1)


def gpt2(dropped: float) -> nn.Module:
    """The dropout of attention is an argument of a function."""
    sizes = dict(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=dropped))


def test_a_plan_counts_the_scores_of_attention_that_drops() -> None:
    """It is computed unfused, and keeps [samples, heads, tokens, tokens] before and after the dropout."""
    kept = [
        planner.plan(
            dict(precision="fp32"), partial(gpt2, dropped), batch=4, sequence=128, world_size=1
        ).bytes_of("activations")
        for dropped in (0.1, 0.0)
    ]
    assert kept[0] - kept[1] >= 2 * 2 * 4 * (4 * 4 * 128 * 128)
