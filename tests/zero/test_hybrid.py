"""Checks hybrid sharding, copies of the model over neighbouring ranks: serial numbers, planned bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_planner import assert_predicted
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, assert_parity, initial_values
from tests.shared.pool import run_world
from tests.zero.test_memory_budget import DEEP as LOW
from tests.zero.test_memory_budget import within
from tests.zero.test_sharded_weights import DEEP, gathers_of, two_steps
from tests.zero.test_zero import (
    ADAMW,
    BITS,
    SMALL,
    VOCABULARY,
    assert_same_bits,
    assert_same_state,
    bits,
    ledger,
    loads,
    memory,
    numel_of,
    saves,
    sharded,
)


def hybrid(stage: int, shard: int = 2, **more: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=stage, shard_size=shard, **more))


ORDERED = dict(sum_order="ordered")
SPLIT = dict(dtype="bf16", master="split")
FULL = dict(clip_grad_norm=0.05, gradient_accumulation=2)
FOUR = Case(world_size=4, vocabulary=VOCABULARY, chunk_bytes=SMALL, steps=2)
"""Two copies over two ranks each."""

# ---- the same numbers ----

COMBINATIONS: dict[str, Case] = {
    "1, everything": replace(
        FOUR, family="llama", dropout=0.1, ragged=True, global_batch=7, config=FULL | hybrid(1)
    ),
    "2, an empty cut, of a module, frozen, AdamW": replace(
        FOUR,
        global_batch=3,
        build="module",
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias"),
        config=hybrid(2) | dict(optimizer=ADAMW),
    ),
    "2 by micro-batch": replace(FOUR, dropout=0.1, config=FULL | hybrid(2, reduce_every="micro_batch")),
    "3, tied, recomputed": replace(
        FOUR, ragged=True, config=FULL | hybrid(3, prefetch=2) | dict(activation_checkpoint="full")
    ),
    "3 kept, untied, ordered": replace(
        FOUR, tied=False, config=FULL | hybrid(3, reshard_after_forward=False, **ORDERED)
    ),
    "3, ring, copies of one data rank": replace(FOUR, sequence=2, config=FULL | hybrid(3, 1)),
    "1, copies that nobody shards": replace(FOUR, world_size=2, config=FULL | hybrid(1, 1)),
    "1, 1d, copies that only norms are sharded over": replace(
        FOUR, tensor=2, layers=3, chunk_bytes=SMALL // 4, steps=1, config=FULL | hybrid(1, 1)
    ),
    "3, 1d": replace(FOUR, world_size=8, tensor=2, global_batch=8, steps=1, config=FULL | hybrid(3)),
    "2, pipeline": replace(
        FOUR,
        world_size=8,
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=2),
        global_batch=16,
        steps=1,
        config=FULL | hybrid(2, reduce_every="micro_batch"),
    ),
    "1, state on the host": replace(
        FOUR, config=FULL | hybrid(1) | dict(memory=dict(placement="host"), optimizer=ADAMW)
    ),
}


NEAR = dict(stage=3, reshard_after_forward=2)
COMBINATIONS |= {
    "3, kept by neighbours": replace(FOUR, layers=3, ragged=True, config=FULL | dict(zero=NEAR)),
    "3, kept by neighbours, recomputed, ordered, an empty cut": replace(
        FOUR,
        layers=3,
        global_batch=3,
        dropout=0.1,
        config=FULL | dict(zero=NEAR | ORDERED | dict(prefetch=0), activation_checkpoint="full"),
    ),
    "3, kept by neighbours of a copy": replace(
        FOUR, world_size=8, global_batch=8, steps=2, config=dict(zero=NEAR | dict(shard_size=4))
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one(name: str) -> None:
    assert_parity(COMBINATIONS[name])


def test_ordered_has_the_bits_of_stage_0_however_many_copies_there_are() -> None:
    case = replace(BITS, world_size=4, steps=2)
    expected = run_world(bits, 4, replace(case, config=case.config | dict(zero=ORDERED)))
    for zero in (hybrid(1, **ORDERED), hybrid(2, 1, **ORDERED), hybrid(3, **ORDERED)):
        assert_same_bits(run_world(bits, 4, replace(case, config=case.config | zero)), expected)


@pytest.mark.parametrize("sum_order", ["fast", "ordered"])
def test_a_budget_changes_no_bit(sum_order: str) -> None:
    """What rests on the host is summed over the copies there."""
    zero = hybrid(3, sum_order=sum_order) | dict(gradient_accumulation=2)
    case = replace(LOW, world_size=4, config=zero | dict(precision="fp32", optimizer=ADAMW))
    found = run_world(within, 4, case, 0.0, "device")
    assert_same_bits([steps for steps, _ in found], run_world(bits, 4, case))
    assert all(0 < on_host <= pieces for _, (on_host, pieces) in found)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": dict(placement="device"),
    "host": dict(placement="host"),
    "disk": dict(placement="disk"),
    "static": dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.8)),
}
PLACED = covering_array(
    dict(
        where=[
            *((1, "disk"), (1, "static"), (2, "host"), (2, "static"), (3, "disk"), (3, "static")),
            *((3, "near"), (3, "near, host"), (3, "near, disk")),
        ],
        split=[False, True],
        sum_order=["fast", "ordered"],
        shard_size=[1, 2],
    ),
    lambda row: not row["where"][1].startswith("near") or row["shard_size"] == 2,
)
FEW = [
    dict(where=(1, "disk"), split=True, sum_order="fast", shard_size=2),
    dict(where=(2, "static"), split=False, sum_order="ordered", shard_size=2),
    dict(where=(3, "static"), split=True, sum_order="ordered", shard_size=1),
    dict(where=(3, "near"), split=True, sum_order="fast", shard_size=2),
    dict(where=(3, "near, disk"), split=True, sum_order="ordered", shard_size=2),
]


def assert_copies_have_the_same_bits(row: dict[str, Any], directory: Path) -> None:
    """As with float32 masters and everything on the device. `near`: kept by neighbours of a copy of four, with state on
    the device or where it says."""
    (stage, placement), is_near = row["where"], row["where"][1].startswith("near")
    placement = placement.removeprefix("near").removeprefix(", ") or "device"
    zero = dict(stage=stage, shard_size=4 if is_near else row["shard_size"], sum_order=row["sum_order"])
    config = dict(zero=zero, precision="bf16", optimizer=ADAMW, clip_grad_norm=0.05, gradient_accumulation=2)
    whole = replace(LOW, world_size=4, config=config)
    memory = PLACEMENTS[placement]
    memory = memory | (dict(disk_dir=str(directory)) if placement == "disk" else {})
    more: dict[str, Any] = dict(memory=memory) | (dict(precision=SPLIT) if row["split"] else {})
    more |= dict(zero=zero | dict(reshard_after_forward=2)) if is_near else {}
    other = replace(whole, config=config | more)
    assert_same_bits(run_world(bits, 4, other), run_world(bits, 4, whole))


@pytest.mark.parametrize("row", FEW, ids=name_of)
def test_copies_have_the_same_bits_wherever_things_rest_and_whatever_their_masters(
    row: dict[str, Any], tmp_path: Path
) -> None:
    assert_copies_have_the_same_bits(row, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("row", PLACED, ids=name_of)
def test_copies_have_the_same_bits_in_every_place_and_with_every_master(
    row: dict[str, Any], tmp_path: Path
) -> None:
    assert_copies_have_the_same_bits(row, tmp_path)


GRIDS: dict[str, dict[str, Any]] = {
    "2d, copies of one data rank": dict(world_size=8, tensor=4, mode="2d", shard_size=1),
    "2d, copies of two": dict(world_size=16, tensor=4, mode="2d", shard_size=2),
    "2.5d": dict(world_size=16, tensor=8, mode="2.5d", depth=2, shard_size=1),
    "3d": dict(world_size=16, tensor=8, mode="3d", shard_size=1),
}


def assert_grid(name: str, stage: int, **more: Any) -> None:
    cut = dict(GRIDS[name])
    zero = dict(stage=stage, shard_size=cut.pop("shard_size"), **more)
    config = dict(clip_grad_norm=0.05, gradient_accumulation=2, zero=zero)
    assert_parity(replace(FOUR, global_batch=16, ragged=True, steps=1, config=config, **cut))


def test_every_gradient_is_the_serial_one_on_copies_of_a_grid() -> None:
    assert_grid("2d, copies of one data rank", 3)


@pytest.mark.campaign
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sum_order", ["fast", "ordered"])
def test_every_gradient_is_the_serial_one_on_copies_of_any_grid(
    name: str, stage: int, sum_order: str
) -> None:
    assert_grid(name, stage, sum_order=sum_order)


CAMPAIGN = covering_array(
    dict(
        stage=[1, 2, 3],
        shard_size=[1, 2, 4],
        near=[None, 2],
        sum_order=["fast", "ordered"],
        inner=["", "tensor", "sequence", "pipeline"],
        accumulation=[1, 2],
        prefetch=[0, 1, 2],
        family=["gpt2", "llama"],
    ),
    lambda row: (
        (row["near"] is None or (row["stage"] == 3 and row["shard_size"] == 4))
        and (row["stage"] == 3 or row["prefetch"] == 1)
        and (row["stage"] < 3 or row["inner"] != "pipeline")
    ),
)


@pytest.mark.campaign
@pytest.mark.parametrize("row", CAMPAIGN, ids=name_of)
def test_every_gradient_is_the_serial_one_with_every_other_cut(row: dict[str, Any]) -> None:
    inner, zero = row["inner"], {name: row[name] for name in ("stage", "shard_size", "sum_order")}
    zero |= dict(prefetch=row["prefetch"]) if row["stage"] == 3 else {}
    zero |= dict(reshard_after_forward=row["near"]) if row["near"] else {}
    cut: dict[str, Any] = {inner: 2} if inner else {}
    cut |= dict(pipeline=dict(size=2, micro_batches=2)) if inner == "pipeline" else {}
    config = dict(clip_grad_norm=0.05, gradient_accumulation=row["accumulation"], zero=zero)
    case = replace(FOUR, family=row["family"], global_batch=16, ragged=True, dropout=0.1, config=config)
    assert_parity(case, world_size=8 if inner else 4, **cut)


# ---- bytes and memory ----

ALL = "data"


@pytest.mark.parametrize("kind", ["1", "2 by micro-batch", "2 ordered"])
def test_bytes_of_a_step_are_the_formula(kind: str) -> None:
    """Over the S ranks of a copy a reduce-scatter of r P, once or k times, and an all-gather of w P; over the copies
    one all-reduce of r P / S.  Ordered: one sum of all ranks, k r P, and what each owns of it from all, r P."""
    k, shards, r, w = 3, 2, 4, 2
    zero = dict(stage=int(kind[0]), shard_size=shards)
    zero |= ORDERED if "ordered" in kind else dict(reduce_every="micro_batch") if "by" in kind else {}
    config = dict(gradient_accumulation=k, precision="bf16", zero=zero)
    case = Case(world_size=4, vocabulary=VOCABULARY, steps=1, config=config)
    numel, values = numel_of(case, 4), initial_values(case)
    expected = {
        ("reduce_scatter", "data.shard", 1 if kind == "1" else k, (1 if kind == "1" else k) * r * numel),
        ("all_reduce", "data.replicate", 1, r * numel // shards),
    }
    blocks = 1
    if "ordered" in kind:
        expected = {("reduce_scatter", ALL, k, k * r * numel), ("all_gather", ALL, 1, r * numel)}
        blocks = sum(-(-v.numel() // 1024) for v in values.values())
    expected |= {
        ("all_gather", "data.shard", 1, w * numel),
        ("all_reduce", "world", 1, (6 + len(values) + blocks) * 8),
    }
    for rows in run_world(ledger, 4, case):
        assert set(rows) == expected


def test_bytes_and_memory_of_sharded_weights_are_the_formula() -> None:
    """k (2 w + r) P over a copy, less what the turn keeps, and r P / S over the copies; (w + m + r + 2 r) P / S."""
    k, shards, w, r, m = 2, 2, 2, 4, 4
    config = dict(precision="bf16", gradient_accumulation=k, optimizer=ADAMW) | hybrid(3, shards)
    for seen in run_world(two_steps, 4, replace(DEEP, world_size=4, config=config)):
        numels, total = seen["numels"], sum(seen["numels"])
        times = [gathers_of(names, reshard=True) for names in seen["names"]]
        gathered = sum(n * numel for n, numel in zip(times, numels, strict=True))
        rows = {row[:2]: row[2:] for row in seen["rows"]}
        assert rows.pop(("all_reduce", "world"))
        assert rows == {
            ("all_gather", "data.shard"): (k * sum(times), k * w * gathered),
            ("reduce_scatter", "data.shard"): (k * len(numels), k * r * total),
            ("all_reduce", "data.replicate"): (len(numels), r * total // shards),
        }
        held = {kind: peak for kind, (peak, _) in seen["memory"].items()}
        assert all(peak == forecast for peak, forecast in seen["memory"].values())
        assert (held["weights"], held["masters"]) == (w * total // shards, m * total // shards)
        assert (held["gradients"], held["optimizer"]) == (r * total // shards, 2 * r * total // shards)


def test_bytes_and_memory_of_weights_that_neighbours_keep_are_the_formula() -> None:
    """The first gather of a micro-batch is over all W ranks, a later one over g neighbours: w P each, less what the
    turn keeps; and P / g elements of what is gathered again lie behind the slots."""
    k, near, w = 2, 2, 4
    config = dict(precision="fp32", gradient_accumulation=k, optimizer=ADAMW)
    case = replace(DEEP, world_size=4, config=config | dict(zero=NEAR))
    plain = replace(case, config=config | dict(zero=dict(stage=3)))
    for seen, other in zip(run_world(two_steps, 4, case), run_world(two_steps, 4, plain), strict=True):
        numels = seen["numels"]
        again = [gathers_of(names, reshard=True) > 1 for names in seen["names"]]
        kept = sum(numel for numel, twice in zip(numels, again, strict=True) if twice)
        rows = {row[:2]: row[2:] for row in seen["rows"]}
        assert rows.pop(("all_reduce", "world")) and rows.pop(("reduce_scatter", "data"))
        assert rows == {
            ("all_gather", "data"): (k * len(numels), k * w * sum(numels)),
            ("all_gather", "data.near"): (k * sum(again), k * w * kept),
        }
        (peak, forecast), (slots, _) = seen["memory"]["gathered"], other["memory"]["gathered"]
        assert peak == forecast == slots + w * kept // near


@pytest.mark.parametrize(("sum_order", "backend"), [("fast", "auto"), ("fast", "gloo"), ("ordered", "gloo")])
def test_memory_of_sharded_gradients_is_the_formula(sum_order: str, backend: str) -> None:
    """w P + (m + g + 2 g) P / S of AdamW, a slot for the gradient that fills, and for what the others send of it."""
    shards = 2
    config = dict(precision="bf16", optimizer=ADAMW, gradient_accumulation=2, backend=backend)
    zero = dict(stage=2, shard_size=shards, sum_order=sum_order, reduce_every="micro_batch")
    case = Case(world_size=4, vocabulary=VOCABULARY, config=config | dict(zero=zero))
    numel = numel_of(case, 4)
    others = numel - numel // (4 if sum_order == "ordered" else shards) if backend == "gloo" else 0
    for rows in run_world(memory, 4, case):
        assert {kind: peak for kind, peak, _ in rows} == {
            "weights": 2 * numel,
            "masters": 4 * numel // shards,
            "gradients": 4 * numel // shards,
            "optimizer": 8 * numel // shards,
            "staging": 4 * (numel + others),
        }
        assert all(peak == forecast for _, peak, forecast in rows)


PLANNED = {"1": hybrid(1), "3 ordered": hybrid(3, **ORDERED), "3, kept by neighbours": dict(zero=NEAR)}


@pytest.mark.parametrize("zero", PLANNED.values(), ids=PLANNED)
def test_a_plan_foretells_bytes_and_memory(zero: dict[str, Any]) -> None:
    config = zero | dict(gradient_accumulation=2, precision="bf16", optimizer=ADAMW)
    assert_predicted(Case(world_size=4, config=config))


# ---- checkpoints ----

SAVED = Case(config=dict(precision="bf16", optimizer=ADAMW), chunk_bytes=SMALL // 2, vocabulary=VOCABULARY)
MESHES = {
    "0 on 1": (1, SAVED),
    "3 on 2": (2, sharded(SAVED, "3")),
    "1 on 2 x 2": (4, replace(SAVED, config=SAVED.config | hybrid(1))),
    "3 on 2 x 2, ordered": (4, replace(SAVED, config=SAVED.config | hybrid(3, **ORDERED), chunk_bytes=None)),
}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("0 on 1", "3 on 2 x 2, ordered"),
        ("3 on 2 x 2, ordered", "3 on 2"),
        ("3 on 2", "1 on 2 x 2"),
        ("1 on 2 x 2", "0 on 1"),
    ],
)
def test_a_checkpoint_is_the_same_with_and_without_copies(here: str, there: str, tmp_path: Path) -> None:
    ranks, case = MESHES[here]
    saved = run_world(saves, ranks, replace(case, world_size=ranks), str(tmp_path))[0]
    ranks, case = MESHES[there]
    for loaded in run_world(loads, ranks, replace(case, world_size=ranks), str(tmp_path)):
        assert_same_state(loaded, saved)
