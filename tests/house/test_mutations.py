"""Planted faults: parity must go red for each of them, or it proves nothing."""

from __future__ import annotations

import functools

import pytest

from tests.house import (
    mutations_auxiliary,
    mutations_offload,
    mutations_pipeline,
    mutations_sequence,
    mutations_step,
    mutations_tensor,
    mutations_zero,
)
from tests.house.mutations_auxiliary import EMITS_AGAIN, EMITS_HALF, EMITS_PIPED, EMITS_RING, EMITS_WHOLE
from tests.house.mutations_offload import DISK, HOST, ON_HOST, THREE
from tests.house.mutations_pipeline import (
    PIPED,
    PIPED_DEEP,
    PIPED_GRID,
    PIPED_LIBRARY,
    PIPED_ORDER,
    PIPED_OWN,
    PIPED_RING,
    PIPED_SHARDS,
)
from tests.house.mutations_sequence import FULL, GATHERED, RING, USP
from tests.house.mutations_step import CASE, FAULTS_STEP, Faults
from tests.house.mutations_tensor import ADAPTED, CUBE, CUT, DEEP, GRID, KEPT_1D, SHARED, WHOLE
from tests.house.mutations_zero import HYBRID_ORDER, HYBRID_WEIGHTS, NEAR, SHARDED, WEIGHTS
from tests.shared.parity import Case, Step, check_no_further, compare, parallel_run, serial_run
from tests.shared.places import patched, place
from tests.shared.pool import RankEnv, run_world

TABLES = (
    mutations_step, mutations_tensor, mutations_zero, mutations_offload, mutations_sequence, mutations_pipeline,
    mutations_auxiliary,
)  # fmt: skip
ALL: Faults = {name: fault for table in TABLES for name, fault in table.FAULTS.items()}


def faulty_run(env: RankEnv, fault: str) -> list[Step] | str:
    case, where, change = ALL[fault]
    try:
        with patched(where, change):
            return parallel_run(env, case)
    except (AssertionError, OSError, ValueError) as error:  # the product's own rules may be first
        return f"stopped: {error}"


@functools.cache
def reference(case_of: str) -> list[Step]:
    return serial_run(ALL[case_of][0])


def _is_green(case: Case, truth: list[Step], ranks: list[list[Step] | str]) -> bool:
    whole = [steps for steps in ranks if not isinstance(steps, str)]
    if len(whole) < len(ranks):
        return False
    try:
        if case.precision == "fp16":
            check_no_further([case], whole)
        else:
            for rank, steps in enumerate(whole):
                compare(case, truth, steps, rank)
    except AssertionError:
        return False
    return True


CASES = {
    "data": CASE,
    "sharded": SHARDED,
    "sharded weights": WEIGHTS,
    "copies of sharded weights": HYBRID_WEIGHTS,
    "copies, in order": HYBRID_ORDER,
    "kept by neighbours": NEAR,
    "state on the host": HOST,
    "state on the host, updated there": ON_HOST,
    "state on disk": DISK,
    "state on three tiers": THREE,
    "cut": CUT,
    "whole": WHOLE,
    "shared": SHARED,
    "adapted": ADAPTED,
    "kept": KEPT_1D,
    "grid": GRID,
    "deep": DEEP,
    "cube": CUBE,
    "ring": RING,
    "gathered": GATHERED,
    "piped": PIPED,
    "piped, sharded gradients": PIPED_SHARDS,
    "piped, in order": PIPED_ORDER,
    "piped grid": PIPED_GRID,
    "piped sheets": PIPED_DEEP,
    "piped ring": PIPED_RING,
    "piped library": PIPED_LIBRARY,
    "piped, own optimizer": PIPED_OWN,
    "usp": USP,
    "full": FULL,
    "emits, piped": EMITS_PIPED,
    "emits, recomputed": EMITS_AGAIN,
    "emits, whole": EMITS_WHOLE,
    "emits, ring": EMITS_RING,
    "emits, half": EMITS_HALF,
}
CASES |= {name: fault[0] for name, fault in FAULTS_STEP.items()}


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_this_case_is_green(case: str) -> None:
    ranks = run_world(parallel_run, CASES[case].world_size, CASES[case])
    assert _is_green(CASES[case], serial_run(CASES[case]), ranks)


def test_no_fault_hides_another_of_its_name() -> None:
    assert len(ALL) == sum(len(table.FAULTS) for table in TABLES)


@pytest.mark.parametrize("fault", ALL)
def test_each_fault_names_a_place(fault: str) -> None:
    assert callable(place(ALL[fault][1]).original)


@pytest.mark.parametrize("fault", ALL)
def test_parity_goes_red_for(fault: str) -> None:
    case = ALL[fault][0]
    assert not _is_green(case, reference(fault), run_world(faulty_run, case.world_size, fault))
