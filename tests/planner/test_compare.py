"""`plan --compare tensor`: figures are those of the formulas and of the plans, and say when a grid pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.launcher import command
from colossal_lite.models import GPTConfig
from colossal_lite.planner.compare import (
    Comparison,
    candidates,
    compare_tensor,
    layer_traffic,
    pays_above_tokens,
)
from colossal_lite.planner.planner import facts_of_config, plan
from colossal_lite.sharding.mesh_layout import MeshLayout

MODEL = GPTConfig(vocabulary=512, layers=3, heads=8, width=64, sequence=32, kv_heads=4)
WIDE = GPTConfig(vocabulary=64, layers=4000, heads=64, width=4096, sequence=32, bias=False)


def comparison(world_size: int, batch: int = 64) -> Comparison:
    return compare_tensor(dict(precision="bf16"), MODEL, batch=batch, sequence=32, world_size=world_size)


def test_every_mode_that_a_world_can_have_is_there_and_the_least_comes_first() -> None:
    made = comparison(16)
    titles = [row.title for row in made.rows] + [row.title for row in made.refused]
    assert sorted(titles) == sorted(
        (
            *("data 16", "1d 2 x data 8", "1d 4 x data 4", "1d 8 x data 2", "1d 16"),
            *("2d 4 x data 4", "2d 16", "2.5d 8 (depth 2) x data 2", "3d 8 x data 2"),
        )
    )
    assert [row.wire_bytes for row in made.rows] == sorted(row.wire_bytes for row in made.rows)
    assert [(row.title, "8 heads do not divide" in row.reason) for row in made.refused] == [("1d 16", True)]


@pytest.mark.parametrize("tensor", list(candidates(8)), ids=str)
def test_a_row_is_the_formula_and_the_plan_of_that_mesh(tensor: TensorConfig) -> None:
    (row,) = (row for row in comparison(8).rows if row.tensor == tensor)
    config = dict(precision="bf16", parallel=dict(tensor=tensor.model_dump()))
    made = plan(config, MODEL, batch=64, sequence=32, world_size=8)
    layout = MeshLayout.build(data=row.data, tensor=tensor.axis())
    rows = layer_traffic(layout, tensor, MODEL, facts_of_config(MODEL), 64 // row.data, 32, 2)
    for each in rows:
        (found,) = (r for r in made.traffic if (r.operation, r.axis) == (each.operation, each.axis))
        # the sum of a replicated parameter's gradient may go over the same axis
        assert found == each or (each.operation == "all_reduce" and found.payload_bytes > each.payload_bytes)
    assert row.layers_payload_bytes == sum(r.payload_bytes for r in rows)
    assert row.calls == sum(r.calls for r in rows)
    assert (row.weights_bytes, row.peak_bytes) == (made.bytes_of("weights"), made.peak_bytes)


def test_weights_and_activations_of_a_grid_shrink_with_its_ranks() -> None:
    """A grid holds 1/n of both; 1D holds what it replicates as well."""
    model = replace(MODEL, layers=12, width=256, ffn=1024, kv_heads=8, vocabulary=512)
    serial = plan({}, model, batch=64, sequence=32, world_size=1)
    for tensor in (TensorConfig(size=4, mode="2d"), TensorConfig(size=8, mode="3d")):
        config = dict(parallel=dict(tensor=tensor.model_dump()))
        made = plan(config, model, batch=64, sequence=32, world_size=tensor.size)
        assert made.local_parameters / serial.local_parameters == pytest.approx(1 / tensor.size, rel=0.02)
        kept = made.bytes_of("activations") / serial.bytes_of("activations")
        assert kept == pytest.approx(1 / tensor.size, rel=0.05)


@pytest.mark.parametrize(
    ("mode", "size", "depth", "ratio"),
    [("2d", 4, 1, 12.0), ("2d", 16, 1, 1.9), ("2d", 64, 1, 0.70), ("3d", 8, 1, 2.1), ("3d", 64, 1, 0.28)],
)
def test_the_tokens_from_which_a_grid_pays_are_those_of_the_reference(
    mode: str, size: int, depth: int, ratio: float
) -> None:
    """parallel.md 1.3, against 1D without sequence sharding; 3D from 39 T h + 36 h^2 against 8 (n-1)/n T h."""
    tensor = TensorConfig(size=size, mode=mode, depth=depth, sequence_parallel=False)  # type: ignore[arg-type]
    found = pays_above_tokens(tensor, WIDE, itemsize=4)
    assert found is not None and found / WIDE.width == pytest.approx(ratio, rel=0.03)


def test_a_grid_that_sends_more_at_any_length_never_pays() -> None:
    """Wide MLPs: SUMMA moves their hidden activations, 1D does not."""
    tensor = TensorConfig(size=4, mode="2d", sequence_parallel=False)
    assert pays_above_tokens(tensor, WIDE, itemsize=4) is not None
    assert pays_above_tokens(tensor, replace(WIDE, ffn=8 * WIDE.width), itemsize=4) is None


def test_the_command_says_what_moves_least_and_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.py"
    path.write_text("config = dict(precision='bf16')\n")
    asked = ["plan", str(path), "--model", "layers=2,heads=4,width=64,vocabulary=256", "--batch", "16"]
    assert command.main([*asked, "--sequence", "32", "--world", "8", "--compare", "tensor"]) == 0
    out = capsys.readouterr().out
    for words in ("data 8 ", "1d 2 x data 4", "2.5d 8 (depth 2)", "3d 8", "moves least", "times the width"):
        assert words in out, words
    assert "1d 8 refused: parallel.tensor.size = 8: 4 heads do not divide into 8 parts" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_batch_that_only_some_modes_can_cut_leaves_the_others() -> None:
    made = comparison(8, batch=6)
    assert {row.title for row in made.rows} >= {"1d 2 x data 4", "1d 8", "data 8"}
    assert any("does not divide over 4 parts" in row.reason for row in made.refused if row.title == "3d 8")
