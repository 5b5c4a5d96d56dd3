"""Checkpoints and metrics of the old layout repeat bit for bit (see `tests.shared.before_the_move`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shared.before_the_move import BASE, EXAMPLES, FOLDER, MESHES, go_on, machine, run_example
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


@pytest.mark.parametrize("mode", EXAMPLES)
def test_the_example_repeats_the_metrics_of_before(mode: str, tmp_path: Path) -> None:
    found, expected = run_example(mode, tmp_path), EXPECTED["examples"][mode]
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, known in zip(found, expected, strict=True):
        assert row == (known if SAME_MACHINE else pytest.approx(known, rel=RELATIVE))
