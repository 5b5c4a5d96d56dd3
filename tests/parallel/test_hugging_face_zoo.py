"""Text families of Hugging Face, as they come: exact in each mode, or refused by name, as docs/models.md says.

A covering part of the table is in the suite; the whole is `-m campaign`, and `python -m tests.shared.zoo` writes it.
"""

from __future__ import annotations

import warnings

import pytest

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared import matrix
from tests.shared.zoo import FAMILIES, HEAD, MODES, MORE_MODES, PAGE, model, one_line, outcome, read

BOUND = 1e-12
ALL_MODES = MODES | MORE_MODES
IN_THE_SUITE = [
    ("Gemma", "1d cut"),
    ("Gemma, unpadded", "zb-h1"),
    ("Gemma", "2d"),
    ("Gemma-2", "1d whole"),
    ("Gemma-2", "pipeline x 1d"),
    ("Cohere", "2d"),
    ("Cohere", "ring"),
    ("Nemotron", "2d"),
    ("OLMo", "2d"),
    ("OLMo", "1d x ZeRO-3"),
    ("Llama, padded", "1d on 4"),
    ("Llama, padded", "2d"),
    ("Llama, padded", "ZeRO-3"),
    ("Llama, padded", "ring"),
]


@pytest.mark.parametrize(("name", "mode"), IN_THE_SUITE)
def test_a_class_with_layers_of_its_own_trains_as_one_process(name: str, mode: str) -> None:
    found = outcome(name, ALL_MODES[mode])
    assert not isinstance(found, str) and found[0] < BOUND, found


@pytest.mark.parametrize("name", ["Qwen3", "Bloom", "GPT-NeoX", "BERT"])
def test_roles_of_a_family_are_read_from_a_run_and_proven(name: str) -> None:
    layout = MeshLayout.build(tensor=TensorConfig(size=2).axis())  # Qwen3 has two heads of keys
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parallelize(model(name), Mesh.emulated(layout, EmulatedWorld(1.0))[0])
    assert made.form.sequence_parallel and list(made.plan.values()).count("rowwise") == 2


def test_the_page_of_models_has_every_cell_and_names_its_command() -> None:
    text, found = PAGE.read_text(), read()
    assert list(found) == [(name, mode) for name in FAMILIES for mode in MODES]
    assert text.endswith(matrix.write(found, list(FAMILIES), list(MODES)))
    assert text.startswith(HEAD) and "`python -m tests.shared.zoo`" in text
    assert all(f"| {name} | `{dict(mode.config)}` |" in text for name, mode in MODES.items())


def test_four_of_five_cells_of_the_page_are_exact() -> None:
    exact = [state.split()[1] for state in read().values() if state.startswith("exact")]
    assert len(exact) >= 0.8 * len(read()) and max(map(float, exact)) <= 1e-9


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_every_mode_is_as_the_page_has_it(name: str, mode: str) -> None:
    """Modes that the page has not are exact; with more ranks than heads attention is left whole there."""
    found = outcome(name, ALL_MODES[mode])
    on_page = read().get((name, mode))
    if isinstance(found, str):
        assert on_page == f"refused {one_line(found)}"
        return
    assert found[0] < BOUND, found
    assert on_page is None or (on_page.startswith("exact") and on_page.endswith("w") == found[1]), found
