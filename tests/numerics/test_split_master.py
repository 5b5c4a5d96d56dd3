"""Split masters train to the bits of float32 masters, wherever they rest, and take 17 bits beside each weight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.memory.chunk import Chunk
from colossal_lite.models import GPTConfig
from colossal_lite.planner.planner import plan
from tests.shared.covering import covering_array, name_of
from tests.shared.kernel_cases import masters_with_ties
from tests.shared.parity import Case, start, steps_of
from tests.shared.places import patched, replaced
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import _extent, auto, placement_of
from tests.zero.test_zero import SMALL, VOCABULARY, assert_same_bits, assert_same_state, loads, saves

SPLIT = dict(dtype="bf16", master="split")
STILL = dict(match="*norm*", lr=0.0, weight_decay=0.0)
"""Weights that an update must leave as they are, ties included."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": dict(type="adamw", lr=1e-2, weight_decay=0.1, groups=[STILL]),
    "adam, decay in the gradient": dict(type="adam", lr=1e-2, weight_decay=0.1, groups=[STILL]),
    "momentum and lion": dict(
        type="sgd", lr=1e-2, momentum=0.9, groups=[STILL, dict(match="*.weight", type="lion")]
    ),
    "lamb and muon": dict(type="lamb", lr=1e-2, groups=[dict(match="*attention*weight", type="muon"), STILL]),
}
WHOLE_TENSORS = "lamb and muon"
CASE = Case(layers=2, vocabulary=VOCABULARY, chunk_bytes=SMALL // 2, steps=2, ragged=True, dropout=0.1)


def with_ties(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other weights, many of them between two bf16 numbers."""
    return {name: masters_with_ties(v.numel()).view(v.shape) for name, v in state.items()}


def tied_bits(env: RankEnv, case: Case) -> Any:
    """Every step from weights with ties on, and the optimizer's state; and whether this rank had ties in the end. Where
    a budget may be, it is near the least there is."""
    if case.config.get("memory", {}).get("placement") == "auto":
        least, most = _extent(env, case)
        case = replace(case, config={**case.config, **auto(round(0.7 * least + 0.3 * most))})
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.load_full_state_dict(with_ties(engine.full_state_dict()))
        found = list(steps_of(engine, context, case)), engine.full_optimizer_state()
        assert engine._memory_budget is None or placement_of(engine).on_host
        return found, any(map(_has_ties, engine._chunks))


def assert_split_has_the_same_bits(whole: Case, halved: Case) -> None:
    ours, theirs = (run_world(tied_bits, case.world_size, case) for case in (halved, whole))
    assert_same_bits([found for found, _ in ours], [found for found, _ in theirs])
    assert any(has_ties for _, has_ties in ours) and not any(has_ties for _, has_ties in theirs)


def _has_ties(chunk: Chunk) -> bool:
    """On disk nobody looks."""
    if chunk.residual is None or chunk.residual.is_meta:
        return chunk.residual is not None
    return bool(chunk.halves(slice(0, chunk.local_shard.numel()))[2].any())


ROWS = covering_array(
    dict(
        ranks=[1, 2],
        stage=[0, 1, 2, 3],
        optimizer=list(OPTIMIZERS),
        placement=["device", "host", "disk", "auto"],
        update=["device", "host"],
        accumulation=[1, 2],
    ),
    lambda row: (
        (row["optimizer"] != WHOLE_TENSORS or row["stage"] == 0)
        and (row["placement"] in ("host", "disk") or row["update"] == "device")
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_p10_split_masters_train_to_the_bits_of_float32_masters(row: dict[str, Any], tmp_path: Path) -> None:
    memory = dict(placement=row["placement"], update_on=row["update"])
    memory |= dict(disk_dir=str(tmp_path)) if row["placement"] == "disk" else {}
    config = dict(
        zero=dict(stage=row["stage"]), optimizer=OPTIMIZERS[row["optimizer"]],
        gradient_accumulation=row["accumulation"], clip_grad_norm=0.05 * row["accumulation"],
    )  # fmt: skip
    whole = replace(CASE, world_size=row["ranks"], config=config | dict(precision="bf16"))
    halved = replace(whole, config=config | dict(precision=SPLIT, memory=memory))
    assert_split_has_the_same_bits(whole, halved)


@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (4, dict(pipeline=dict(size=2, schedule="1f1b", micro_batches=3), global_batch=12)),
        (4, dict(tensor=2, config=dict(zero=dict(stage=2)))),
        (1, dict(config=dict(activation_checkpoint="full", compile="none"), family="llama")),
    ],
    ids=["a pipeline", "cut layers", "recomputation"],
)
def test_split_masters_of_other_modes_have_the_same_bits(ranks: int, change: dict[str, Any]) -> None:
    config = dict(optimizer=OPTIMIZERS["adamw"]) | change.pop("config", {})
    whole = replace(CASE, world_size=ranks, config=config | dict(precision="bf16"), **change)
    halved = replace(whole, config=whole.config | dict(precision=SPLIT))
    assert_split_has_the_same_bits(whole, halved)


@pytest.mark.parametrize("away", ["device", "host", "disk"])
def test_a_checkpoint_of_split_masters_is_one_of_float32_masters_and_back(away: str, tmp_path: Path) -> None:
    whole = replace(CASE, steps=2, config=dict(precision="bf16", optimizer=OPTIMIZERS["adamw"]))
    memory = dict(placement=away) | (dict(disk_dir=str(tmp_path)) if away == "disk" else {})
    halved = replace(whole, config=whole.config | dict(precision=SPLIT, memory=memory, zero=dict(stage=3)))
    for number, (here, there) in enumerate(((whole, halved), (halved, whole), (halved, halved))):
        saved = run_world(saves, 2, here, str(tmp_path / f"saved {number}"))[0]
        for loaded in run_world(loads, 2, there, str(tmp_path / f"saved {number}")):
            assert_same_state(loaded, saved)


def _without_ties(original: Any, master: Tensor, high: Tensor, residual: Tensor, ties: Tensor) -> None:
    original(master, high, residual, ties)
    ties.zero_()


def _first_residual(original: Any, chunk: Any, local: slice) -> tuple[Tensor, Tensor, Tensor]:
    high, residual, ties = original(chunk, local)
    assert chunk.residual is not None
    return high, chunk.residual[: len(residual)], ties


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "ties are forgotten": lambda: patched("split_", _without_ties),
    "a residual from the chunk's beginning": lambda: patched("Chunk.halves", _first_residual),
    "upper halves that rest on the host do not come": lambda: replaced(
        "Chunk.updates_weights", property(lambda chunk: False)
    ),
}


def faulty(env: RankEnv, case: Case, name: str) -> Any:
    with FAULTS[name]():
        return tied_bits(env, case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_split_changes_bits(name: str) -> None:
    """Of weights, or of what they lead to."""
    memory = dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))
    config = dict(zero=dict(stage=3), optimizer=OPTIMIZERS["adamw"], memory=memory)
    case = replace(CASE, world_size=1, config=config | dict(precision=SPLIT))
    right, wrong = run_world(tied_bits, 1, case), run_world(faulty, 1, case, name)
    with pytest.raises(AssertionError):
        assert_same_bits([found for found, _ in wrong], [found for found, _ in right])


def resumed(env: RankEnv, first: Case, second: Case, directory: str) -> Any:
    """Two steps and a save, then two more of another run that loads it; weights with ties at first."""
    with env.launch(first.full_config) as context:
        engine = start(first, context)
        engine.load_full_state_dict(with_ties(engine.full_state_dict()))
        list(steps_of(engine, context, first))
        engine.save(directory)
    with env.launch(second.full_config) as context:
        engine = start(second, context)
        engine.load(directory)
        return list(steps_of(engine, context, second)), engine.full_optimizer_state()


@pytest.mark.parametrize(("first", "second"), [("bf16", SPLIT), (SPLIT, "bf16"), (SPLIT, SPLIT)], ids=str)
def test_a_run_goes_on_from_the_other_form_of_its_masters_with_the_same_bits(
    first: Any, second: Any, tmp_path: Path
) -> None:
    case = replace(
        CASE, steps=2, config=dict(precision="bf16", optimizer=OPTIMIZERS["adamw"], zero=dict(stage=1))
    )
    one, other = (replace(case, config=case.config | dict(precision=form)) for form in (first, second))
    expected = run_world(resumed, 2, case, case, str(tmp_path / "whole"))
    assert_same_bits(run_world(resumed, 2, one, other, str(tmp_path / "split")), expected)


def rows_of(env: RankEnv, case: Case) -> dict[str, tuple[str, int, int | None]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine.train_step((inputs, labels))
        return {row.kind: (row.tier, row.now_bytes, row.forecast_bytes) for row in engine.memory_report()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_masters_take_17_bits_beside_each_weight_and_everything_else_what_it_did(
    stage: int, placement: str
) -> None:
    config = dict(zero=dict(stage=stage), memory=dict(placement=placement), optimizer=dict(type="adamw"))
    whole, halved = (
        run_world(rows_of, 2, replace(CASE, config=config | dict(precision=form)))[0]
        for form in ("bf16", SPLIT)
    )
    owned = whole["masters"][1] // 4
    assert halved["masters"] == (placement.replace("device", "cpu"), owned * 17 // 8, owned * 17 // 8)
    moves = {"masters", "visiting"}
    assert {k: v for k, v in halved.items() if k not in moves} == {
        k: v for k, v in whole.items() if k not in moves
    }
    if placement == "host":
        assert halved["visiting"][1] == halved["visiting"][2]
        assert halved["visiting"][1] * (8 + 4) == whole["visiting"][1] * Fraction(8 * 8 + 17, 8)


def test_plan_foretells_split_masters() -> None:
    model = GPTConfig(vocabulary=1000, layers=2, heads=2, width=64, sequence=32)
    config = dict(precision=SPLIT, optimizer=dict(type="adamw"), zero=dict(stage=1))
    made = plan(config, model, batch=4, sequence=32, world_size=2)
    plain = plan(config | dict(precision="bf16"), model, batch=4, sequence=32, world_size=2)
    assert made.bytes_of("masters") * 32 == plain.bytes_of("masters") * 17
    assert "what float32 has beyond bfloat16" in str(made)
    for kind in ("weights", "gradients", "optimizer", "staging", "activations"):
        assert made.bytes_of(kind) == plain.bytes_of(kind)


def refused_with_own(env: RankEnv) -> str:
    with env.launch(dict(precision=SPLIT)) as context:
        with pytest.raises(ValueError) as caught:
            cl.initialize(CASE.model, context=context, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        return str(caught.value)


def test_an_optimizer_of_ones_own_is_refused_split_masters_by_name() -> None:
    (text,) = run_world(refused_with_own, 1)
    assert "precision.master='split'" in text and "legal: 'auto'" in text


def test_split_masters_need_bf16() -> None:
    assert Config.load(dict(precision=SPLIT)).precision.master_dtype == "split"
    with pytest.raises(cl.ConfigError, match="precision.master"):
        Config.load(dict(precision=dict(dtype="fp16", master="split")))
