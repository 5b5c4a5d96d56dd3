"""Checkpoints of the old layout load bit for bit, and their runs go on (see `tests.shared.before_the_move`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.shared.before_the_move import BASE, FOLDER, MESHES, go_on
from tests.shared.pool import run_world

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
RELATIVE = 1e-10
"""The last bits of a product depend on the processor, and those of a gradient on how the head is computed."""


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["saved"] == expected["saved"]
    losses = [[float.fromhex(loss) for loss in row["losses"]] for row in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
    assert found["state"].keys() == expected["state"].keys()
    for name, (norm, weighted) in expected["state"].items():
        assert found["state"][name] == pytest.approx((norm, weighted), rel=0, abs=RELATIVE * norm), name


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_of_before_loads_bit_for_bit_and_its_run_goes_on_with_the_same_numbers(
    mesh: str,
) -> None:
    ranks, config = MESHES[mesh]
    for found in run_world(go_on, ranks, BASE | config, str(FOLDER / mesh), False):
        check(found, EXPECTED["meshes"][mesh])


@pytest.mark.parametrize("mesh", MESHES)
def test_one_rank_loads_the_checkpoints_of_every_mesh(mesh: str) -> None:
    (found,) = run_world(go_on, 1, BASE, str(FOLDER / mesh), False)
    check(found, EXPECTED["meshes"][mesh])
