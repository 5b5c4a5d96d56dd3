"""bf16 gradients: on one rank the bits of float32 ones, on several a sum that is rounded once, and half the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_lite.models import GPTConfig
from colossal_lite.planner.planner import plan
from tests.numerics.test_split_master import CASE, OPTIMIZERS, WHOLE_TENSORS, tied_bits
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, assert_no_further, ledger, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import assert_same_bits, bits

NARROW = dict(dtype="bf16", gradient="bf16")


def narrow(case: Case, **config: Any) -> Case:
    """With gradients of two bytes, and whatever masters it has."""
    given = {**case.config, **config}
    precision = given.get("precision", "bf16")
    form = precision if isinstance(precision, dict) else dict(dtype=precision)
    return replace(case, config=given | dict(precision=form | dict(gradient="bf16")))


# ---- the same bits ----

ROWS = covering_array(
    dict(
        stage=[0, 1, 2, 3],
        sum_order=["fast", "ordered"],
        optimizer=list(OPTIMIZERS),
        master=["auto", "split", "none"],
        moments=["auto", "bf16"],
        placement=["device", "host", "disk", "auto"],
        update=["device", "host"],
    ),
    lambda row: (
        (row["optimizer"] != WHOLE_TENSORS or row["stage"] == 0)
        and (row["moments"] == "auto" or (row["optimizer"].startswith("adam") and row["master"] != "none"))
        and (row["placement"] in ("host", "disk") or row["update"] == "device")
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_p10_on_one_rank_narrow_gradients_train_to_the_bits_of_float32_ones(
    row: dict[str, Any], tmp_path: Path
) -> None:
    memory = dict(placement=row["placement"], update_on=row["update"])
    memory |= dict(disk_dir=str(tmp_path)) if row["placement"] == "disk" else {}
    optimizer = OPTIMIZERS[row["optimizer"]]
    optimizer |= dict(moments=row["moments"]) if row["moments"] != "auto" else {}
    config = dict(
        zero=dict(stage=row["stage"], sum_order=row["sum_order"]), optimizer=optimizer,
        clip_grad_norm=0.05, precision=dict(dtype="bf16", master=row["master"]),
    )  # fmt: skip
    wide = replace(CASE, world_size=1, config=config | dict(memory=memory))
    (theirs, _), (ours, _) = (run_world(tied_bits, 1, case)[0] for case in (wide, narrow(wide)))
    assert_same_bits([ours], [theirs])


ORDERED = replace(
    CASE, world_size=4,
    config=dict(
        precision=NARROW | dict(master="split"), optimizer=OPTIMIZERS["adamw"], clip_grad_norm=0.05,
        zero=dict(stage=0, sum_order="ordered"),
    ),
)  # fmt: skip
HALF_AWAY = dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.5))
ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1, whole chunks": (dict(stage=1), dict(chunk_bytes=None)),
    "stage 2, on the host": (dict(stage=2), dict(memory=dict(placement="host"))),
    "stage 3, half of it on the host": (dict(stage=3), dict(memory=HALF_AWAY)),
    "stage 3, updated on the host": (dict(stage=3), dict(memory=HALF_AWAY | dict(update_on="host"))),
    "two copies": (dict(stage=2, shard_size=2), {}),
    "gloo": (dict(stage=2), dict(backend="gloo")),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_in_rank_order_they_have_the_same_bits_at_any_stage_chunk_size_and_placement(name: str) -> None:
    zero, changes = ELSEWHERE[name]
    fields = {k: v for k, v in changes.items() if k == "chunk_bytes"}
    config = {k: v for k, v in changes.items() if k not in fields}
    other = replace(
        ORDERED, config=ORDERED.config | dict(zero=dict(sum_order="ordered") | zero) | config, **fields
    )
    assert_same_bits(run_world(bits, 4, other), run_world(bits, 4, ORDERED))


def kept_sums(env: RankEnv, case: Case) -> dict[str, Tensor]:
    """What the chunks of the first step have summed, undivided."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.forward_backward(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0)))
        return engine._state.full.gradients(1.0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("zero", [dict(stage=0), dict(stage=2), dict(stage=3, sum_order="ordered")], ids=str)
def test_a_sum_over_ranks_is_that_of_float32_rounded_once(world_size: int, zero: dict[str, Any]) -> None:
    ordered = dict(stage=zero["stage"], sum_order="ordered")
    wide = replace(CASE, world_size=world_size, config=dict(precision="bf16", zero=ordered))
    ours = run_world(kept_sums, world_size, narrow(wide, zero=zero))[0]
    theirs = run_world(kept_sums, world_size, wide)[0]
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.bfloat16().float()), name


def rounding_each_time(original: Any, terms: list[Tensor], target: Tensor) -> None:
    total = terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    target.copy_(total)


def norms_in_their_own_dtype(original: Any, rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1).float()


def never_joins(original: Any, self: Any, group: Any) -> bool:
    return False


FAULTS: dict[str, tuple[str, Any]] = {
    "sums over ranks are rounded each time": ("add_wide", rounding_each_time),
    "norms are rounded": ("_norms", norms_in_their_own_dtype),
    "decay joins a gradient that is not widened": ("AdamW.joins", never_joins),
}


def faulty(env: RankEnv, case: Case, name: str) -> Any:
    with patched(*FAULTS[name]):
        return bits(env, case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_arithmetic_changes_bits(name: str) -> None:
    adam = dict(precision=NARROW, optimizer=OPTIMIZERS["adam, decay in the gradient"])
    case = replace(ORDERED, config=ORDERED.config | adam, steps=1)
    right, wrong = run_world(bits, 4, case), run_world(faulty, 4, case, name)
    with pytest.raises(AssertionError):
        assert_same_bits(wrong, right)


# ---- the truth ----


@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (2, dict(family="llama")),
        (4, dict(family="llama", config=dict(zero=dict(stage=3), backend="gloo"))),
        (4, dict(config=dict(zero=dict(stage=2, shard_size=2)))),
        (4, dict(tensor=2, config=dict(zero=dict(stage=1)))),
        (2, dict(sequence=2)),
        (2, dict(pipeline=dict(size=2, micro_batches=1))),
    ],
    ids=["data", "gloo", "copies", "cut layers", "sequences", "a pipeline of one micro-batch, tied"],
)
def test_narrow_gradients_are_no_further_from_the_truth_than_a_plain_loops(
    ranks: int, change: dict[str, Any]
) -> None:
    config = dict(clip_grad_norm=0.05, precision=NARROW) | change.pop("config", {})
    assert_no_further(Case(ragged=True, steps=2, dropout=0.2), world_size=ranks, config=config, **change)


# ---- bytes ----


def rows_of(env: RankEnv, case: Case) -> tuple[int, dict[str, int], dict[str, int | None]]:
    """Elements of this rank's chunks, and bytes of each kind: held, and foretold."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.train_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0)))
        rows = engine.memory_report()
        numel = sum(chunk.spec.numel for chunk in engine._chunks)
        return numel, {r.kind: r.now_bytes for r in rows}, {r.kind: r.forecast_bytes for r in rows}


@pytest.mark.parametrize(("master", "eighths"), [("split", 14 * 8 + 1), ("auto", 16 * 8)])
def test_a_parameter_takes_14_bytes_and_a_bit_with_split_masters_and_16_with_whole_ones(
    master: str, eighths: int
) -> None:
    """Weights, masters, moments and gradients: all that a rank alone keeps, with clipping."""
    config = dict(precision=NARROW | dict(master=master), optimizer=dict(type="adamw"), clip_grad_norm=1.0)
    numel, held, predicted = run_world(rows_of, 1, replace(CASE, world_size=1, config=config))[0]
    assert sum(held.values()) * 8 == eighths * numel
    assert held == predicted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_and_their_slots_take_half_and_everything_else_what_it_did(stage: int) -> None:
    wide = replace(CASE, config=dict(precision="bf16", zero=dict(stage=stage), optimizer=dict(type="adamw")))
    (_, *theirs), (_, *ours) = (run_world(rows_of, 2, case)[0] for case in (wide, narrow(wide)))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["gradients"] and mine == {
            kind: size // 2 if kind in ("gradients", "staging") else size for kind, size in other.items()
        }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_on_the_wire_take_half(stage: int) -> None:
    wide = replace(CASE, config=dict(precision="bf16", zero=dict(stage=stage)))
    theirs, ours = (run_world(ledger, 2, case)[0] for case in (wide, narrow(wide)))
    reduces = {"all_reduce", "reduce_scatter"}
    for (operation, axis, calls, payload), (*same, mine) in zip(theirs, ours, strict=True):
        assert same == [operation, axis, calls]
        assert mine == (payload // 2 if operation in reduces and axis == "data" else payload)


def test_plan_foretells_them() -> None:
    model = GPTConfig(vocabulary=1000, layers=2, heads=2, width=64, sequence=32)
    config = dict(precision=NARROW, optimizer=dict(type="adamw"), zero=dict(stage=1))
    made, plain = (
        plan(config | dict(precision=form), model, batch=4, sequence=32, world_size=2)
        for form in (NARROW, "bf16")
    )
    assert made.bytes_of("gradients") * 2 == plain.bytes_of("gradients")
    assert "bfloat16" in next(row.origin for row in made.memory if row.kind == "gradients")
    assert "float32" in next(row.origin for row in made.memory if row.kind == "optimizer")
    for kind in ("weights", "masters", "optimizer", "activations"):
        assert made.bytes_of(kind) == plain.bytes_of(kind)


# ---- refusals ----


def twice(env: RankEnv) -> str:
    case = Case(config=dict(precision=NARROW))
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = case.batch(0)
        for _ in range(2):  # one call a step, again and again
            engine.backward(torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten()))
            assert not engine.step().skipped
        engine.backward(engine(inputs).float().sum())
        with pytest.raises(ValueError) as caught:
            engine.backward(engine(inputs).float().sum())
        return str(caught.value)


def test_a_second_backward_of_a_step_is_refused_by_name() -> None:
    (text,) = run_world(twice, 1)
    assert "precision.gradient='bf16'" in text and "legal: 'auto', or one call a step" in text
