"""Checkpoints of the old layout load and go on bit for bit (see `tests.shared.before_the_move`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.shared.before_the_move import BASE, FOLDER, MESHES, go_on, machine
from tests.shared.pool import run_world

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
SAME_MACHINE = EXPECTED["machine"] == machine()
"""On another processor or torch the last bits of a product differ; what was saved is the same everywhere."""
RELATIVE = 1e-10


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_of_before_loads_and_its_run_goes_on_with_the_same_bits(mesh: str) -> None:
    ranks, config = MESHES[mesh]
    expected = EXPECTED["meshes"][mesh]
    for found in run_world(go_on, ranks, BASE | config, str(FOLDER / mesh), False):
        assert found["saved"] == expected["saved"]
        losses = [[float.fromhex(loss) for loss in row["losses"]] for row in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
        if SAME_MACHINE:
            assert (found["losses"], found["state"]) == (expected["losses"], expected["state"])


@pytest.mark.parametrize("mesh", MESHES)
def test_one_rank_loads_the_checkpoints_of_every_mesh(mesh: str) -> None:
    (found,) = run_world(go_on, 1, BASE, str(FOLDER / mesh), False)
    expected = EXPECTED["meshes"][mesh]
    assert found["saved"] == expected["saved"]
    losses = [[float.fromhex(loss) for loss in row["losses"]] for row in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
