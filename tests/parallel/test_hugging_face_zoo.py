"""Gemma, Gemma-2, Cohere, Nemotron, OLMo and a padded Llama, as they come: exact in each mode.

A covering part of the table is in the suite; the whole is `-m campaign`, and `python -m tests.shared.zoo` prints it.
"""

from __future__ import annotations

import warnings

import pytest

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed.emulated_ranks import EmulatedWorld
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.zoo import CLASSES, FAMILIES, MODES, model, outcome

BOUND = 1e-12
IN_THE_SUITE = [
    ("Gemma", "1d on 2"),
    ("Gemma, unpadded", "zb-h1 on 2"),
    ("Gemma", "2d on 4"),
    ("Gemma-2", "1d on 2, whole sequences"),
    ("Gemma-2", "pipeline 2 x 1d 2"),
    ("Cohere", "2d on 4"),
    ("Cohere", "ring on 2"),
    ("Nemotron", "2d on 4"),
    ("OLMo", "2d on 4"),
    ("OLMo", "1d x ZeRO-3"),
    ("Llama, padded", "1d on 4"),
    ("Llama, padded", "2d on 4"),
    ("Llama, padded", "ZeRO-3 on 2"),
    ("Llama, padded", "ring on 2"),
]


def check(name: str, mode: str) -> None:
    found = outcome(name, MODES[mode])
    assert isinstance(found, float) and found < BOUND, found


@pytest.mark.parametrize(("name", "mode"), IN_THE_SUITE)
def test_a_class_with_layers_of_its_own_trains_as_one_process(name: str, mode: str) -> None:
    check(name, mode)


OF_FAMILIES = ["1d on 2", "1d on 2, whole sequences", "1d on 4", "2d on 4", "ring on 2"]
NOT_IN_2D = {"Phi-3", "OLMo-2", "Bloom", "Falcon, one key head"}
"""Families whose attention reads sizes of the whole, or is left whole, for which 2d has no form."""


@pytest.mark.parametrize("name", ["Qwen3", "Bloom", "GPT-NeoX", "BERT"])
def test_roles_of_a_family_are_read_from_a_run_and_proven(name: str) -> None:
    layout = MeshLayout.build(tensor=TensorConfig(size=2).axis())  # Qwen3 has two heads of keys
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parallelize(model(name), Mesh.emulated(layout, EmulatedWorld(1.0))[0])
    assert made.form.sequence_parallel and list(made.plan.values()).count("rowwise") == 2


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", OF_FAMILIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_tensor_modes(name: str, mode: str) -> None:
    found = outcome(name, MODES[mode])
    if mode == "2d on 4" and name in NOT_IN_2D:
        assert isinstance(found, str) and found.startswith(("plan: ", "parallelize: ")), found
    else:
        assert isinstance(found, float) and found < BOUND, found


@pytest.mark.campaign
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_in_every_mode(name: str, mode: str) -> None:
    check(name, mode)
