"""The support matrix: every pair of features is exact, with its measured error, or refused by name. No third state.

`refusal` is what the rules say, found without a process or a tensor; `measure` is the parity of a pair on real ranks.
`docs/support.md` holds both, and test_support.py keeps it true.  A feature is one line of FEATURES.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from colossal_lite.config.config import Config
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.parallel.parallelize import facts_of, parallelize
from tests.shared import matrix
from tests.shared.parity import Case, assert_parity

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@dataclass(frozen=True)
class Feature:
    """What a case changes for it. Two features of one group cannot both be on."""

    group: str
    changes: Mapping[str, Any]
    config: Mapping[str, Any]
    data: int = 1


def _feature(
    group: str, *, data: int = 1, config: Mapping[str, Any] | None = None, **changes: Any
) -> Feature:
    return Feature(group, changes, config or {}, data)


FEATURES: dict[str, Feature] = {
    "1d": _feature("tensor", tensor=2),
    "1d, whole sequences": _feature("tensor", tensor=2, sequence_parallel=False),
    "2d": _feature("tensor", tensor=4, mode="2d"),
    "2.5d": _feature("tensor", tensor=8, mode="2.5d", depth=2),
    "3d": _feature("tensor", tensor=8, mode="3d"),
    "ring": _feature("sequence", sequence=2),
    "ulysses": _feature("sequence", sequence=2, sequence_mode="ulysses"),
    "usp": _feature("sequence", sequence=4, sequence_mode="usp", ulysses=2),
    "allgather_kv": _feature("sequence", sequence=2, sequence_mode="allgather_kv"),
    "ring_full": _feature("sequence", sequence=2, sequence_mode="ring_full", causal=False),
    "1f1b": _feature("pipeline", layers=2, pipeline=dict(size=2, micro_batches=2)),
    "zb-h1": _feature("pipeline", layers=2, pipeline=dict(size=2, schedule="zb-h1", micro_batches=2)),
    "zb-v": _feature("pipeline", layers=4, pipeline=dict(size=2, schedule="zb-v", micro_batches=4)),
    "data 2": _feature("data", data=2),
    "ZeRO-1": _feature("zero", data=2, config=dict(zero=dict(stage=1))),
    "ZeRO-2": _feature("zero", data=2, config=dict(zero=dict(stage=2))),
    "ZeRO-3": _feature("zero", data=2, config=dict(zero=dict(stage=3))),
    "recompute full": _feature("recompute", config=dict(activation_checkpoint="full")),
    "recompute selective": _feature("recompute", config=dict(activation_checkpoint="selective")),
    "accumulation": _feature("accumulation", config=dict(gradient_accumulation=2)),
    "dropout": _feature("dropout", dropout=0.2),
    "auxiliary, by token": _feature("auxiliary", auxiliary=("token",)),
    "auxiliary, by element": _feature("auxiliary", auxiliary=("element",)),
    "untied": _feature("family", tied=False),
    "llama": _feature("family", family="llama"),
    "HF GPT-2": _feature("family", family="hf-gpt2", build="module"),
    "HF Llama": _feature("family", family="hf-llama", build="module", tied=False),
}
MOST_RANKS = 16
"""Larger pairs are measured without their data axis."""


def pairs() -> Iterator[tuple[str, str]]:
    """Every pair of features that a configuration can name together; Hugging Face's Llama has no dropout."""
    for a, b in combinations(FEATURES, 2):
        if FEATURES[a].group != FEATURES[b].group and {a, b} != {"dropout", "HF Llama"}:
            yield a, b


def case_of(*names: str) -> Case:
    """One step of a tiny model with all these features, labels unevenly ignored, gradients clipped."""
    case = Case(ragged=True, steps=1, layers=1, tokens=8, global_batch=16)
    config: dict[str, Any] = dict(clip_grad_norm=0.05)
    for name in names:
        case = replace(case, **FEATURES[name].changes)
        config |= FEATURES[name].config
    data = max(FEATURES[name].data for name in names)
    is_theirs = case.family.startswith("hf-")
    if case.sequence == 4 and (is_theirs or case.tensor * case.sequence > MOST_RANKS):
        case = replace(case, sequence=2)  # usp without a ring
    case = replace(case, tokens=12) if is_theirs else case  # their positions
    inner = case.tensor * case.sequence * (1 if case.pipeline == 1 else case.pipeline["size"])
    return replace(case, world_size=inner * min(data, max(1, MOST_RANKS // inner)), config=config)


def refusal(*names: str) -> str | None:
    """Why the rules refuse these features together; None where they are legal. Nothing is allocated."""
    case = case_of(*names)
    try:
        config = Config.load(case.full_config)
        config.check_built()
        config = config.check_world(case.world_size)
        with torch.device("meta"):
            model = case.model()
        if (facts := facts_of(model)) is not None:
            config.check_model(facts)
        parallelize(
            model,
            Mesh.recording(config.layout()),
            sequence_parallel=config.parallel.tensor.sequence_parallel,
            sequence_mode=config.parallel.sequence.mode,
        )
    except ValueError as error:
        return re.sub(r"\s+", " ", str(error)).removeprefix("the configuration has 1 problem: ").strip()
    return None


def measure(a: str, b: str) -> float:
    """The largest relative error of a gradient, against the serial run in float64."""
    return assert_parity(case_of(a, b))


# ---- the page ----

HEAD = """# What goes with what

| in a cell | |
|---|---|
| a number | the largest relative error; the bound is 1e-10 |
| **R** with a number | refused by name, before anything is allocated; the words are below |
| a dot | the two exclude each other |

Features that are not built alone (`NOT_BUILT` of `colossal_lite/config/rules.py`) are not in the table. Models have one
block, two under `1f1b` and `zb-h1`, and four under `zb-v`. Hugging Face's always have two, too few for the four stages
of `zb-v`. `usp` is 2 x 2, but 2 without a ring beside 2.5d, 3d and Hugging Face's models. A pipeline has two ranks. So
has data, if the world then has no more than 16.

Which classes a swap of layers carries, and how a plan is proven: [plans](plans.md).

## Every pair

Each pair of features was trained for one step on real ranks in float64, with SGD, clipping and unevenly ignored labels.
Every gradient was compared with the serial run. `pytest tests/house/test_support.py -m campaign`, 22 November 2026. In
the suite `tests/house/test_support.py` compares the page with the rules.

"""


def write(found: matrix.Matrix) -> str:
    """The page for states `exact 1.2e-15` and `refused WORDS` by pair."""
    names = list(FEATURES)
    return HEAD + matrix.write(found, names[:-1], names[1:])


def read(text: str) -> dict[tuple[str, str], str]:
    """The inverse of `write`."""
    return matrix.read(text.removeprefix(HEAD))
