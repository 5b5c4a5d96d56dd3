"""The support matrix: every pair of features is exact, with its measured error, or refused by name. No third state.

`refusal` is what the rules say, found without a process or a tensor; `measure` is the parity of a pair on real ranks.
`docs/support.md` holds both, and test_support.py keeps it true.  A feature is one line of FEATURES.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.parallel.parallelize import facts_of, parallelize
from tests.shared import matrix
from tests.shared.parity import (
    LOSS_TOLERANCE,
    TOLERANCE,
    Case,
    assert_parity,
    relative_error,
    serial_run,
    start,
)
from tests.shared.pool import RankEnv, run_world

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
DISK = tempfile.gettempdir()
SHARES = dict(weights=0.5, gradients=0.5, optimizer=0.5)
SEVERAL_CHUNKS = 4096
"""Bytes of a chunk where memory is a feature, so that some of a model's chunks are elsewhere."""


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


def _memory(**memory: Any) -> Feature:
    """State that is elsewhere: there is some (momentum), in several chunks, and the second step reads it."""
    config = dict(memory=memory, optimizer=dict(momentum=0.5))
    return _feature("memory", config=config, steps=2, chunk_bytes=SEVERAL_CHUNKS)


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
    "interleaved": _feature(
        "pipeline",
        layers=4,
        pipeline=dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=2),
    ),
    "bfs": _feature(
        "pipeline", layers=4, pipeline=dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=2)
    ),
    "stages on one device": _feature(
        "pipeline",
        layers=2,
        pipeline=dict(size=1, schedule="bfs", stages_per_rank=2, micro_batches=2),
    ),
    "data 2": _feature("data", data=2),
    "ZeRO-1": _feature("zero", data=2, config=dict(zero=dict(stage=1))),
    "ZeRO-2": _feature("zero", data=2, config=dict(zero=dict(stage=2))),
    "ZeRO-3": _feature("zero", data=2, config=dict(zero=dict(stage=3))),
    "hybrid": _feature("zero", data=4, config=dict(zero=dict(stage=3, shard_size=2))),
    "state on host": _memory(placement="host"),
    "updates on host": _memory(placement="host", update_on="host"),
    "updates on both": _memory(placement="host", update_on=dict(every=2)),
    "state on disk": _memory(placement="disk", disk_dir=DISK),
    "shares": _memory(placement="static", host_fraction=SHARES),
    "budget": _memory(placement="auto", device_budget=1),
    "updates in backward": _feature(
        "update time", config=dict(optimizer=dict(update_when="backward"), clip_grad_norm=None)
    ),
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
    config: dict[str, Any] = dict(clip_grad_norm=0.05, optimizer=dict(type="sgd", lr=0.5))
    for name in names:
        case = replace(case, **FEATURES[name].changes)
        for section, value in FEATURES[name].config.items():
            both = isinstance(value, Mapping) and section in config
            config[section] = config[section] | value if both else value
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
    """The largest relative error of a gradient, against the serial run in float64; of a weight where the update has
    taken the gradient away."""
    case = case_of(a, b)
    if "budget" in (a, b):
        case = within_least_budget(case)
    if "updates in backward" not in (a, b):
        return assert_parity(case)
    plain = {key: value for key, value in case.config["optimizer"].items() if key != "update_when"}
    reference, worst = serial_run(replace(case, config={**case.config, "optimizer": plain})), 0.0
    for steps in run_world(_train_steps, case.world_size, case, timeout_s=120):
        for (loss, weights), truth in zip(steps, reference, strict=True):
            assert abs(loss - truth.loss) <= LOSS_TOLERANCE["fp64"] * abs(truth.loss)
            worst = max(worst, *(relative_error(weights[n], p, 1.0) for n, p in truth.parameters.items()))
    assert worst <= TOLERANCE["fp64"]
    return worst


def _train_steps(env: RankEnv, case: Case) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and weights of each step, all in one call."""
    with env.launch(case.full_config) as context:
        engine, cut = start(case, context), context.local_batch(case.global_batch)
        batches = ((inputs[cut], labels[cut]) for inputs, labels in map(case.batch, range(case.steps)))
        return [(float(engine.train_step(batch).loss), engine.full_state_dict()) for batch in batches]


def within_least_budget(case: Case) -> Case:
    """The case under the least budget that a refusal names: first of the model alone, then of a batch. Each
    figure that is told as legal for a batch is accepted, so there are two."""
    for _ in range(3):
        told = run_world(_needed_bytes, case.world_size, case)
        if not any(told):
            return case
        memory = case.config["memory"] | dict(device_budget=max(told))
        case = replace(case, config={**case.config, "memory": memory})
    raise AssertionError(f"each budget that was told as enough was refused: {told}")


def _needed_bytes(env: RankEnv, case: Case) -> int:
    """Bytes that a refusal of the budget names; 0 where a step fits."""
    try:
        _train_steps(env, replace(case, steps=1))
    except ConfigError as error:
        return max(
            int(told.replace(",", "")) for told in re.findall(r"the device needs ([\d,]+) b", str(error))
        )
    return 0


# ---- the page ----

HEAD = """# What goes with what

| in a cell | |
|---|---|
| a number | the largest relative error; the bound is 1e-10 |
| **R** with a number | refused by name, before anything is allocated; the words are below |
| a dot | the two exclude each other |

Features that are not built alone (`NOT_BUILT` of `colossal_lite/config/rules.py`) are not in the table. Models have one
block, Hugging Face's two. Both have two under `1f1b`, `zb-h1` and `stages on one device`, and four under the other
schedules. `usp` is 2 x 2, but 2 without a ring beside 2.5d, 3d and Hugging Face's models. A pipeline has two ranks. So
has data, four under `hybrid`, if the world then has no more than 16.

Which classes a swap of layers carries, and how a plan is proven: [plans](plans.md).

## What is refused, and why

- **Auxiliary losses by token in grids.** A token's features lie on several ranks there.
- **Shares and budgets beside updates in backward.** They give the gradients of a backward and the state of updates one
  memory, at different times. Within backward both are there at once, and no gradient is left to place.
- **Clipping, fp16 and optimizers of whole tensors beside updates in backward.** Each needs all gradients first.
- **Optimizers of whole tensors beside cuts of a tensor.** A rank has no whole tensor.

## Every pair

Each pair of features was trained for one step on real ranks in float64, with SGD, clipping and unevenly ignored labels.
Every gradient was compared with the serial run. Where memory is a feature there are two steps with momentum, in chunks
of 4,096 bytes. `shares` keeps half of weights, gradients and state on the host. `budget` is the least that the refusals
of smaller ones named. `updates on both` updates every second chunk on the device. After `updates in backward`, which
excludes clipping, the updated weights are compared.

`pytest tests/house/test_support.py -m campaign`, 24 November 2026. In the suite `tests/house/test_support.py` compares
the page with the rules. 25 November 2026: Hugging Face's models under `zb-v`, `interleaved` and `bfs`, and selective
recomputation beside sequence axes and grids.

"""


def write(found: matrix.Matrix) -> str:
    """The page for states `exact 1.2e-15` and `refused WORDS` by pair."""
    names = list(FEATURES)
    return HEAD + matrix.write(found, names[:-1], names[1:])


def read(text: str) -> dict[tuple[str, str], str]:
    """The inverse of `write`."""
    return matrix.read(text.removeprefix(HEAD))
