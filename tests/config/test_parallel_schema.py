"""The table of tensor modes: it drives the schema, the mesh and the texts."""

from __future__ import annotations

import pytest

from colossal_lite.config.config import Config
from colossal_lite.config.parallel_schema import FLAT, TENSOR_MODES, TensorConfig


def test_every_setting_that_a_mode_reads_exists_and_has_an_effect() -> None:
    for name, mode in TENSOR_MODES.items():
        assert mode.reads <= TensorConfig.model_fields.keys() - {"mode", "size"}
        unused = {setting.name for setting in TensorConfig(size=64, mode=name).unused_settings()}
        assert unused == {"depth", "sequence_parallel", "regather_inputs"} - mode.reads


def test_the_schema_lists_the_modes_of_the_table() -> None:
    schema = Config.schema()["$defs"]["TensorConfig"]["properties"]["mode"]
    assert schema["enum"] == list(TENSOR_MODES) and schema["default"] == FLAT == "1d"
    assert all(mode.summary in schema["description"] for mode in TENSOR_MODES.values())


@pytest.mark.parametrize("mode", TENSOR_MODES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_axis_is_made_for_the_sizes_that_fit_and_for_no_other(mode: str, depth: int) -> None:
    for size in range(1, 70):
        tensor = TensorConfig(size=size, mode=mode, depth=depth)
        if not tensor.fits(size):
            with pytest.raises(ValueError, match=rf"axis tensor: mode='{mode}' needs .*, got size {size}$"):
                tensor.axis()
            continue
        axis = tensor.axis()
        assert axis.size == size and axis.mode == ("" if mode == FLAT or size == 1 else mode)
        if size > 1:
            names = tuple(f"tensor.{name}" for name in tensor.rule.sub_axes) or ("tensor",)
            assert tuple(leaf.name for leaf in axis.leaves) == names
            assert {leaf.size for leaf in axis.leaves if leaf.name != "tensor.depth"} == {tensor.edge}


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (TensorConfig(size=6, mode="2d"), "mode='2d' needs a square, q*q, got size 6"),
        (TensorConfig(size=9, mode="3d"), "mode='3d' needs a cube, l*l*l, got size 9"),
        (TensorConfig(size=9, mode="2.5d", depth=2), "needs q*q*depth with depth=2, got size 9"),
    ],
)
def test_an_impossible_size_is_refused_with_what_the_mode_needs(tensor: TensorConfig, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        tensor.axis()
    assert text in str(caught.value)
