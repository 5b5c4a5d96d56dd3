"""Gemma, Gemma-2, Cohere, Nemotron, OLMo and a padded Llama, as they come: exact in each mode, or refused by name.

A covering part of the table is in the suite; the whole is `-m campaign`, and `python -m tests.shared.zoo` prints it.
"""

from __future__ import annotations

import re

import pytest

from tests.shared.zoo import CLASSES, MODES, outcome

BOUND = 1e-12
REFUSED = {
    f"ring on {ranks}": "sequence parallelism .* is not built with model_type='.*'; legal: 'gpt2', 'llama'"
    for ranks in (2, 4)
}
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
    if mode in REFUSED and not name.startswith("Llama"):
        assert isinstance(found, str) and re.search(REFUSED[mode], found), found
    else:
        assert isinstance(found, float) and found < BOUND, found


@pytest.mark.parametrize(("name", "mode"), IN_THE_SUITE)
def test_a_class_with_layers_of_its_own_trains_as_one_process_or_is_refused(name: str, mode: str) -> None:
    check(name, mode)


@pytest.mark.campaign
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_in_every_mode(name: str, mode: str) -> None:
    check(name, mode)
