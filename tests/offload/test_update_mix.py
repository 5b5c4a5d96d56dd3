"""Checks updates on host and device at once: their bits, buffers by the formula, and each update once."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import colossal_lite as cl
from colossal_lite.checkpoint.files import inspect
from colossal_lite.models import GPTConfig
from colossal_lite.planner.planner import plan
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.optimizer_updates import ChunkPart, Crossing, memory_of, update_plan
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.schedule.update_mix import LOOKAHEAD, is_on_host, mix_of
from colossal_lite.schedule.update_rates import Rates, fastest_mix
from tests.engine.test_engine import SGD, Branches, batch_of
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, start, steps_of
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import DEEP, _extent, auto, config_of, three_tiers
from tests.zero.test_zero import SMALL, assert_same_bits

# ---- the plan ----


@given(
    st.integers(0, 40),
    st.fractions(0, 1, max_denominator=12),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_mix_updates_each_chunk_once_and_brings_it_home_once(
    num_chunks: int, share: Fraction, ahead: int, ahead_down: int, own_master: bool
) -> None:
    parts = (ChunkPart.GRADIENT, ChunkPart.WEIGHTS) if own_master else (ChunkPart.GRADIENT,)
    on_host = dict.fromkeys(sorted(mix_of(share, range(num_chunks)).on_host), Crossing(parts))
    how: dict[str, Any] = dict(ahead=ahead, ahead_down=ahead_down, on_host=on_host)
    plan = update_plan(num_chunks, **how)
    check(plan, memory=memory_of(num_chunks, **how))
    updated = [a.chunk or 0 for a in plan[0] if a.kind is ActionKind.UPDATE]
    assert sorted(updated) == [*range(num_chunks)]
    for side in (True, False):  # each in the order of the forward
        of_side = [chunk for chunk in updated if (chunk in on_host) is side]
        assert of_side == sorted(of_side)
    home = [a.chunk for a in plan[0] if a.kind is ActionKind.EVICT and (a.chunk or 0) < num_chunks]
    assert home == [chunk for chunk in range(num_chunks) if chunk not in on_host]


def assert_every_subset_comes_home_once(num_chunks: int) -> None:
    for ahead, chosen in product(range(4), range(2**num_chunks)):
        on_host = {chunk: Crossing() for chunk in range(num_chunks) if chosen >> chunk & 1}
        how: dict[str, Any] = dict(ahead=ahead, on_host=on_host)
        made = update_plan(num_chunks, **how)
        check(made, memory=memory_of(num_chunks, **how))
        updated = [a.chunk for a in made[0] if a.kind is ActionKind.UPDATE]
        home = [a.chunk for a in made[0] if a.kind is ActionKind.EVICT and (a.chunk or 0) < num_chunks]
        written = [a.chunk for a in made[0] if a.kind is ActionKind.FETCH and (a.chunk or 0) >= num_chunks]
        assert sorted(updated) == [*range(num_chunks)]
        assert home == [chunk for chunk in range(num_chunks) if chunk not in on_host]
        assert written == [ChunkPart.WEIGHTS.of(chunk, num_chunks) for chunk in on_host]


@pytest.mark.parametrize("num_chunks", range(6))
def test_every_subset_of_up_to_5_chunks_is_updated_once_and_home_once(num_chunks: int) -> None:
    assert_every_subset_comes_home_once(num_chunks)


@pytest.mark.campaign
@pytest.mark.parametrize("num_chunks", range(6, 11))
def test_every_subset_of_up_to_10_chunks_is_updated_once_and_home_once(num_chunks: int) -> None:
    assert_every_subset_comes_home_once(num_chunks)


@given(st.integers(1, 200), st.fractions(0, 1, max_denominator=50))
@settings(max_examples=200, deadline=None)
def test_a_share_is_spread_evenly_whichever_part_of_the_chunks_a_rank_has(
    first: int, share: Fraction
) -> None:
    for count in (1, 7, 50):
        chosen = sum(is_on_host(number, share) for number in range(first, first + count))
        assert abs(chosen - count * share) < 1
    ids = [first, first + 3, first + 4]
    assert mix_of(share, ids).on_host == {
        place for place, number in enumerate(ids) if is_on_host(number, share)
    }


# ---- the choice ----


RATES = dict(host_update=4e9, device_update=1.3e11, up="50GB", down="50GB")


def test_auto_takes_the_mix_that_is_fastest_by_the_rates_and_all_ranks_take_the_same() -> None:
    first, second = run_world(auto_of, 2, RATES)
    assert first == second and {True, False} == {*first}
    for slow, side in ((dict(host_update=1e6), False), (dict(up=1_000_000, down=1_000_000), True)):
        assert all({*sides} == {side} for sides in run_world(auto_of, 2, RATES | slow))


def auto_of(env: RankEnv, rates: dict[str, Any]) -> list[bool]:
    """Whether each chunk is updated on the host."""
    memory = dict(placement="host", update_on="auto", rates=rates)
    case = replace(DEEP, world_size=2, chunk_bytes=SMALL // 4, config=config_of(1) | dict(memory=memory))
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return [engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks]


@pytest.mark.parametrize(("placement", "lookahead"), [("host", LOOKAHEAD), ("static", 1)])
def test_auto_takes_the_mix_that_is_fastest_with_the_lookahead_that_a_placement_has(
    placement: str, lookahead: int
) -> None:
    """On shares and budgets copies are one chunk ahead. There another mix is the fastest."""
    ((sides, fastest, other),) = run_world(sides_of, 1, placement, lookahead)
    assert sides == fastest != other


def sides_of(env: RankEnv, placement: str, lookahead: int) -> tuple[list[bool], list[bool], list[bool]]:
    """Whether each chunk is updated on the host. The same by the rates with this lookahead, and with the other."""
    rates = dict(host_update=2e9, device_update=1.3e11, up="25GB", down="25GB")
    memory = dict(placement=placement, update_on="auto", rates=rates)
    memory |= dict(host_fraction=dict(optimizer=1.0)) if placement == "static" else {}
    case = replace(DEEP, world_size=1, chunk_bytes=SMALL, config=config_of(1) | dict(memory=memory))
    with env.launch(case.full_config) as context, redirect_stderr(io.StringIO()):
        optimizer = start(case, context)._optimizer
        numbers = range(len(optimizer._chunks))
        parts = [optimizer.work_of(n, record=True, gradient=False, weights=False) for n in numbers]
        parts = [replace(part, early=optimizer.mix.early) for part in parts]
        known = Rates(2e9, 1.3e11, 25 * 10**9, 25 * 10**9)
        found = [
            fastest_mix(parts, known, lookahead=n).chosen for n in (lookahead, LOOKAHEAD + 1 - lookahead)
        ]
        sides = [optimizer.is_updated_on_host(chunk) for chunk in optimizer._chunks]
        return sides, *([n in (some or ()) for n in numbers] for some in found)


def test_what_auto_has_found_is_told_once_and_stands_in_the_config_and_the_checkpoint(
    tmp_path: Path,
) -> None:
    """So a run with the value that stands there updates the same chunks on the host, and its report has a forecast."""
    (update_on, sides, saved, forecast, told), second = run_world(
        resolved_of, 2, RATES, "auto", str(tmp_path)
    )
    assert second == (update_on, sides, saved, forecast, [])
    assert saved == update_on and isinstance(update_on, dict) and {*sides} == {True, False}
    assert all(updating == foreseen for updating, foreseen in forecast)
    (line,) = told
    assert f"{sum(sides)} of {len(sides)} chunks are updated on the host" in line and "simulated" in line
    again = run_world(resolved_of, 2, {}, update_on, str(tmp_path))
    assert again[0][:2] == (update_on, sides)


def test_what_auto_has_found_for_shares_is_told_without_figures_of_all_state() -> None:
    ((told, lanes),) = run_world(told_of_shares, 1)
    assert told.startswith("memory.update_on='auto' is {") and told.endswith(
        "as if all that may rest off the device did"
    )
    assert lanes == ""


def told_of_shares(env: RankEnv) -> tuple[str, str]:
    memory = dict(placement="static", host_fraction=dict(optimizer=0.3), update_on="auto", rates=RATES)
    case = replace(DEEP, world_size=1, chunk_bytes=SMALL // 4, config=config_of(1) | dict(memory=memory))
    told = io.StringIO()
    with env.launch(case.full_config) as context:
        with redirect_stderr(told):
            engine = start(case, context)
        assert engine._parts.choice is not None
        (line,) = (line for line in told.getvalue().splitlines() if "update_on='auto'" in line)
        return line, engine._parts.choice.lanes


def resolved_of(env: RankEnv, rates: dict[str, Any], update_on: Any, directory: str) -> Any:
    """The resolved mix, which chunks it updates on the host, the mix that the checkpoint has, and the bytes on the host
    beside their forecast."""
    memory = dict(placement="host", update_on=update_on, rates=rates)
    case = replace(DEEP, world_size=2, chunk_bytes=SMALL // 4, config=config_of(1) | dict(memory=memory))
    told = io.StringIO()
    with env.launch(case.full_config) as context:
        with redirect_stderr(told):
            engine = start(case, context)
        list(steps_of(engine, context, case))
        with engine.metered():
            list(steps_of(engine, context, case, (0,)))
        saved = inspect(engine.save(directory).wait()).config["memory.update_on"]
        sides = [engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks]
        rows = [row for row in engine.memory_report() if row.kind == "updating"]
        return (
            engine.config.values()["memory.update_on"], sides, saved,
            [(row.now_bytes, row.forecast_bytes) for row in rows],
            [line for line in told.getvalue().splitlines() if line.startswith("memory.update_on='auto' is")],
        )  # fmt: skip


@pytest.mark.parametrize("update_on", ["auto", {"every": 2}, "host"])
def test_a_plan_prints_the_mix_with_its_lanes_and_seconds(update_on: Any) -> None:
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    memory = dict(placement="host", update_on=update_on, rates=RATES | dict(flops=1e9))
    told = str(plan(dict(memory=memory), model, batch=2, sequence=8, world_size=1))
    assert re.search(r"of \d+ chunks are updated on the host: host .* up .* s simulated; a step of", told)


@pytest.mark.parametrize("update_on", ["device", "host", {"every": 2}, "auto"])
@pytest.mark.parametrize("where", [dict(placement="auto", device_budget=100_000), dict(placement="static")])
def test_so_does_one_whose_weights_and_gradients_may_rest_on_the_host(
    update_on: Any, where: dict[str, Any]
) -> None:
    """At ZeRO-3. What rests there crosses the link too, and a step is no shorter than its lanes."""
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    shares = dict(host_fraction=dict(optimizer=1.0, weights=1.0, gradients=1.0))
    memory = where | dict(update_on=update_on, rates=RATES | dict(flops=1e9))
    memory |= shares if where["placement"] == "static" else {}
    config = dict(zero=dict(stage=3), precision="bf16", memory=memory)
    made = plan(config, model, batch=2, sequence=8, world_size=2)
    found = re.search(r"up ([\d.e-]+) s, down ([\d.e-]+) s.* a step of ([\d.e-]+) s", made.updates)
    assert found is not None
    up_s, down_s, step_s = map(float, found.groups())
    assert max(up_s, down_s) <= step_s * 1.01
    if where["placement"] == "static" and update_on == "device":
        held = {row.kind: row.bytes for row in made.memory if row.tier == "host"}
        # The first forward has the weights from their updates.
        assert up_s == pytest.approx((held["optimizer"] + held["gradients"]) / 50e9, rel=0.01)
        assert down_s == pytest.approx((held["optimizer"] + held["weights"]) / 50e9, rel=0.01)


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_a_plan_of_updates_within_backward_has_their_lanes_and_no_seconds_that_are_not_simulated(
    update_on: str,
) -> None:
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    memory = dict(placement="host", update_on=update_on, rates=RATES | dict(flops=1e9))
    config = dict(optimizer=dict(type="adamw", update_when="backward"), memory=memory)
    made = plan(config, model, batch=2, sequence=8, world_size=1)
    assert re.search(r"up [\d.e-]+ s, .*: at least [\d.e-]+ s$", made.updates)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_plan_counts_the_bytes_and_seconds_of_the_records_that_rest_on_the_host(share: float) -> None:
    model = GPTConfig(vocabulary=64, layers=8, heads=2, width=16, sequence=8)
    memory = dict(placement="static", host_fraction=dict(optimizer=share), rates=RATES | dict(flops=1e9))
    made = plan(dict(zero=dict(stage=3), memory=memory), model, batch=2, sequence=8, world_size=2)
    (held,) = (row.bytes for row in made.memory if (row.kind, row.tier) == ("optimizer", "host"))
    assert made.link_bytes == 2 * held
    found = re.search(r"up ([\d.e-]+) s, down ([\d.e-]+) s.* ([\d.e-]+) s simulated; a step", made.updates)
    assert found is not None
    up_s, down_s, updates_s = map(float, found.groups())
    assert (up_s, down_s) == pytest.approx((held / 50e9, held / 50e9), rel=0.005)
    assert up_s <= updates_s <= 1.01 * (up_s + down_s) + made.local_parameters / 130e9


def test_it_counts_weights_that_come_down_for_their_update_on_the_host_where_they_are_their_masters() -> None:
    """Gradients, as many bytes, have come in backward."""
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    memory = dict(
        placement="static", host_fraction=dict(optimizer=1.0), update_on="host", rates=RATES | dict(flops=1e9)
    )
    made = plan(dict(precision="fp32", memory=memory), model, batch=2, sequence=8, world_size=1)
    found = re.search(r"up ([\d.e-]+) s, down ([\d.e-]+) s", made.updates)
    (held,) = (row.bytes for row in made.memory if row.kind == "weights")
    assert found is not None and made.link_bytes == 3 * held
    assert [*map(float, found.groups())] == pytest.approx([held / 50e9, held / 50e9], rel=0.005)


@pytest.mark.parametrize("update_on", ["device", "host", {"every": 2}, "auto"])
def test_a_plan_whose_budget_holds_all_state_moves_nothing(update_on: Any) -> None:
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    memory = dict(placement="auto", device_budget="1GB", update_on=update_on, rates=RATES | dict(flops=1e9))
    config = dict(zero=dict(stage=3), precision="bf16", memory=memory)
    made = plan(config, model, batch=2, sequence=8, world_size=2)
    assert made.link_bytes == 0 and re.fullmatch(r"0 of \d+ chunks are updated on the host", made.updates)


@pytest.mark.parametrize("where", [dict(placement="host"), dict(placement="auto", device_budget="1GB")])
def test_a_plan_without_records_has_no_updates_on_the_host(where: dict[str, Any]) -> None:
    """Plain SGD in float32 has no state; it once ended in a PlanError."""
    model = GPTConfig(vocabulary=64, layers=2, heads=2, width=16, sequence=8)
    memory = where | dict(update_on="host", rates=RATES | dict(flops=1e9))
    config = dict(precision="fp32", optimizer=dict(type="sgd", lr=0.1), memory=memory)
    made = plan(config, model, batch=2, sequence=8, world_size=1)
    assert re.fullmatch(r"0 of \d+ chunks are updated on the host", made.updates)


def without_records(env: RankEnv, memory: dict[str, Any]) -> tuple[list[float], int]:
    """Losses, and how many chunks the host updates."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), memory=memory, timeout_s=30)
    case = replace(DEEP, world_size=env.world_size, config=config)
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        losses = [step.loss for step in steps_of(engine, context, case)]
        return losses, sum(engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_leaves_updates_without_state_on_the_device(ranks: int) -> None:
    """SGD without momentum in float64 keeps nothing. It once ended in a PlanError."""
    auto = dict(
        placement="host",
        update_on="auto",
        rates=dict(up=10**9, host_update=1e9, device_update=1e9, flops=1e9),
    )
    expected = run_world(without_records, ranks, dict())
    assert run_world(without_records, ranks, auto) == expected and expected[0][1] == 0


@pytest.mark.parametrize("update_on, gone", [({"host": (0, 99)}, "99"), ({"host": (8,)}, "8")])
def test_a_number_that_no_chunk_has_is_refused_by_name(update_on: Any, gone: str) -> None:
    memory = dict(placement="host", update_on=update_on)
    (told,) = run_world(refused, 1, memory)
    assert told.startswith("memory.update_on = ") and f"no chunk has the number {gone}; legal: 0 to 7" in told


def refused(env: RankEnv, memory: dict[str, Any]) -> str:
    case = replace(DEEP, world_size=1, config=config_of(1) | dict(memory=memory))
    with env.launch(case.full_config) as context, pytest.raises(ValueError) as error:
        start(case, context)
    return str(error.value)


# ---- the bits ----

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": dict(type="adamw", lr=0.01, weight_decay=0.1),
    "narrow moments": dict(type="adamw", lr=0.01, moments="bf16"),
    "sgd": dict(type="sgd", lr=0.1, momentum=0.9),
    "lion": dict(type="lion", lr=0.001),
    "muon": dict(
        type="muon", lr=0.01, groups=[dict(match="*norm*", type="adamw"), dict(match="*bias", type="adamw")]
    ),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": dict(placement="host"),
    "static": dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.8)),
    "records alone": dict(placement="static", host_fraction=dict(optimizer=1.0)),
    "budget": {},
    "three tiers": {},
    "disk": dict(placement="disk"),
}
MIXES: dict[str, Any] = {
    "every 2": dict(every=2), "every 3": dict(every=3), "every 4": dict(every=4), "0.3": dict(host=0.3), "auto": "auto",
}  # fmt: skip
ROWS = covering_array(
    dict(
        optimizer=list(OPTIMIZERS),
        precision=["fp32", "bf16", "split"],
        stage=[0, 1, 2, 3],
        placement=list(PLACEMENTS),
        mix=list(MIXES),
        step=["clip", "accumulation", "skipped"],
        ranks=[1, 2],
    ),
    legal=lambda row: (
        not (row["optimizer"] == "muon" and (row["precision"] == "split" or row["stage"]))
        and not (row["optimizer"] == "narrow moments" and row["precision"] == "fp32")
        and not (row["placement"] == "static" and row["stage"] < 3)
    ),
)


def after_a_skipped_step(engine: Any, context: Any, case: Case) -> list[Any]:
    """The steps behind one without a label."""
    inputs, labels = (tensor[context.local_batch(case.global_batch)] for tensor in case.batch(0))
    assert engine.train_step((inputs, torch.full_like(labels, -100))).skipped
    return [*steps_of(engine, context, case, (0, 1))]


def on_the_device(env: RankEnv, case: Case, skips: bool) -> Any:
    """As `bits`, with a skipped step."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        steps = [*steps_of(engine, context, case)]
        if skips:
            steps += after_a_skipped_step(engine, context, case)
        return steps, engine.full_optimizer_state()


def mixed(env: RankEnv, case: Any, placement: str, mix: Any, directory: str, skips: bool) -> Any:
    """Steps and state of a case; how many chunks were updated on either side; buffers as allocated and by formula."""
    memory = memory_with(env, case, placement, mix, directory)
    case = replace(case, config=case.config | dict(memory=memory))
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        steps = [*steps_of(engine, context, case)]
        if skips:
            steps += after_a_skipped_step(engine, context, case)
        found = steps, engine.full_optimizer_state()
        updated = [engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks]
        visits = [(visit.kind, visit.bytes, visit.forecast_bytes) for visit in engine._optimizer.visits]
        return found, updated, visits


def memory_with(env: RankEnv, case: Case, placement: str, mix: Any, directory: str) -> dict[str, Any]:
    """Settings of a placement, whose budgets fit the case."""
    if placement == "budget":
        least, whole = _extent(env, case, update_on=mix)
        return dict(auto(round(least + 0.3 * (whole - least)), update_on=mix)["memory"])
    if placement == "three tiers":
        return three_tiers(env, case, directory, update_on=mix)
    there = dict(disk_dir=directory) if placement == "disk" else {}
    return PLACEMENTS[placement] | dict(update_on=mix) | there


@pytest.mark.parametrize("row", ROWS[::3], ids=name_of)
def test_a_mix_has_the_bits_of_state_that_stays_on_the_device(row: dict[str, Any], tmp_path: Path) -> None:
    assert_same_bits_as_on_the_device(row, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_so_has_every_pair_of_settings(row: dict[str, Any], tmp_path: Path) -> None:
    assert_same_bits_as_on_the_device(row, tmp_path)


def assert_same_bits_as_on_the_device(row: dict[str, Any], tmp_path: Path) -> None:
    precision = dict(dtype="bf16", master="split") if row["precision"] == "split" else row["precision"]
    more = dict(optimizer=OPTIMIZERS[row["optimizer"]])
    config = config_of(
        row["stage"], precision=precision, clip=row["step"] == "clip",
        accumulation=3 if row["step"] == "accumulation" else 1,
    ) | more  # fmt: skip
    case = replace(DEEP, world_size=row["ranks"], chunk_bytes=SMALL // 4, config=config)
    skips = row["step"] == "skipped"
    expected = run_world(on_the_device, row["ranks"], case, skips)
    found = run_world(mixed, row["ranks"], case, row["placement"], MIXES[row["mix"]], str(tmp_path), skips)
    assert_same_bits([steps for steps, _, _ in found], expected)
    if row["mix"] != "auto" and row["placement"] != "budget":
        assert any(set(updated) == {False, True} for _, updated, _ in found)
    assert all(held == foreseen for _, _, visits in found for _, held, foreseen in visits)


# ---- gradients that leave in backward ----


def moved_down(env: RankEnv, case: Case, placement: str, mix: Any, directory: str) -> Any:
    """Bytes that went down in a step's backward and in its updates, once state is where it stays; those of the
    gradients that leave, and of the records that are updated on the device and go back."""
    memory = memory_with(env, case, placement, mix, directory)
    with env.launch(case.full_config | dict(memory=memory)) as context:
        engine = start(case, context)
        inputs, labels = (tensor[context.local_batch(case.global_batch)] for tensor in case.batch(0))
        optimizer, found = engine._optimizer, []
        for _ in range(3):
            marks = [optimizer.tiers.down.moved_bytes]
            engine.forward_backward((inputs, labels))
            marks.append(optimizer.tiers.down.moved_bytes)
            engine.step()
            engine.full_state_dict()
            marks.append(optimizer.tiers.down.moved_bytes)
            found.append((marks[1] - marks[0], marks[2] - marks[1]))
        sides = [(chunk, optimizer.is_updated_on_host(chunk)) for chunk in engine._chunks]
        gradients = sum(
            c.gradient.nbytes for c, on_host in sides if on_host or c.gradient_at_rest is not None
        )
        streamed = {i for i, (_, on_host) in enumerate(sides) if not on_host} - optimizer._on_device
        leaves_device = any(on_host and chunk.gradient_at_rest is None for chunk, on_host in sides)
        return found[1:], gradients, sum(optimizer.record_bytes(i) for i in streamed), leaves_device


PLACEMENTS["half of the gradients"] = dict(
    placement="static", host_fraction=dict(gradients=0.5, optimizer=1.0)
)


@pytest.mark.parametrize(
    "placement, ranks, stage",
    [
        *(("host", ranks, stage) for ranks, stage in ((1, 0), (2, 1), (2, 3))),
        ("disk", 1, 1), ("records alone", 2, 3), ("half of the gradients", 1, 2), ("budget", 2, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("update_on", [{"every": 2}, "host"])
def test_no_gradient_goes_down_while_updates_run(
    placement: str, ranks: int, stage: int, update_on: Any, tmp_path: Path
) -> None:
    config = config_of(stage, precision="bf16", clip=True)
    case = replace(DEEP, world_size=ranks, chunk_bytes=SMALL // 4, config=config)
    for found, gradients, records, leaves_device in run_world(
        moved_down, ranks, case, placement, update_on, str(tmp_path)
    ):
        assert found == [(gradients, records)] * 2 and leaves_device is (placement != "budget")
        assert bool(records) is (update_on != "host")


def after_discards(env: RankEnv, case: Case, memory: dict[str, Any]) -> Any:
    """Steps behind a discarded one, and behind one that is skipped."""
    with env.launch(case.full_config | dict(memory=memory)) as context:
        engine = start(case, context)
        inputs, labels = (tensor[context.local_batch(case.global_batch)] for tensor in case.batch(5))
        engine.forward_backward((inputs, labels))
        engine.zero_grad()
        first = [*steps_of(engine, context, case)]
        assert engine.train_step((inputs, torch.full_like(labels, -100))).skipped
        return first, [*steps_of(engine, context, case, (0, 1))], engine.full_optimizer_state()


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_have_left_in_a_step_without_updates_are_never_used(ranks: int) -> None:
    case = replace(
        DEEP, world_size=ranks, chunk_bytes=SMALL // 4, config=config_of(1, precision="bf16", clip=True)
    )
    expected = run_world(after_discards, ranks, case, {})
    for update_on in ({"every": 2}, "host"):
        found = run_world(after_discards, ranks, case, dict(placement="host", update_on=update_on))
        for (first, then, states), (first_due, then_due, due) in zip(found, expected, strict=True):
            assert_same_bits([([*first, *then], states)], [([*first_due, *then_due], due)])


def branching(env: RankEnv, config: dict[str, Any]) -> list[float]:
    """Losses of steps that leave one of two branches out, each in turn, and of evaluations of both."""
    with env.launch(SGD | dict(optimizer=dict(type="adamw", lr=0.1)) | config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context)
        losses = []
        for first in (0, 0, 1, 0, 1):
            losses.append(float(engine.train_step(batch_of(first)).loss))
            losses += [float(engine.eval_step(batch_of(branch))) for branch in (0, 1)]
        return losses


ALL_ON_HOST = dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))


@pytest.mark.parametrize(
    "memory", [dict(placement="host", update_on="host"), ALL_ON_HOST], ids=["there", "here"]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32", dict(dtype="bf16", master="split")], ids=str)
def test_an_update_of_what_rests_on_the_host_leaves_weights_that_no_sample_used_as_they_were(
    precision: Any, memory: dict[str, Any]
) -> None:
    config = dict(precision=precision, zero=dict(stage=3 if memory is ALL_ON_HOST else 1))
    expected = run_world(branching, 1, config)
    assert run_world(branching, 1, config | dict(memory=memory)) == expected
