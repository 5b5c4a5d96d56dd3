"""What comes too late, is given up halfway or is asked for at the end: the right numbers, or an error that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import Case, start
from tests.pool import RankEnv, run_world
from tests.world.test_tiers import ADAMW, HOST, on_disk
from tests.world.test_zero import SMALL

DEVICE: dict[str, Any] = {}
STATIC = dict(memory=dict(placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.5)))
DISK = dict(memory=dict(placement="disk"))


def placed(case: Case, placement: dict[str, Any], directory: Path) -> Case:
    memory = on_disk(directory) if placement is DISK else placement
    return replace(case, config={**case.config, **memory})


def stage(number: int, **more: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=number), optimizer=ADAMW, **more)


# ---- a backward after the update ----

CASE = Case(world_size=1, chunk_bytes=SMALL // 2, global_batch=4)


def too_late(env: RankEnv, case: Case) -> str:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, _ = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine.train_step((inputs, (inputs + 1) % case.vocabulary))
        old = engine(inputs).square().mean()
        engine.backward(engine(inputs).square().mean())
        engine.step()
        try:
            engine.backward(old)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "nothing"


SAVED, ITS_OWN = (
    "the forward has saved was modified by an inplace",
    "needed for gradient computation has been modified",
)
FROZEN = dict(tied=False, frozen=("norm.weight", "norm.bias", "head.weight"))
"""So that nothing behind the blocks changes."""
LATE = {
    "0": (replace(CASE, config=stage(0)), DEVICE),
    "0, host": (replace(CASE, config=stage(0)), HOST),
    "0, disk, bf16": (replace(CASE, config=stage(0, precision="bf16")), DISK),
    "0, recomputed": (replace(CASE, config=stage(0, activation_checkpoint="full"), **FROZEN), DEVICE),
    "0, recomputed in part, host": (
        replace(CASE, config=stage(0, activation_checkpoint="selective"), **FROZEN), HOST,
    ),
    "1, two ranks": (replace(CASE, world_size=2, config=stage(1)), DEVICE),
    "2, two ranks, host": (replace(CASE, world_size=2, config=stage(2)), HOST),
    "3": (replace(CASE, config=stage(3)), DEVICE),
    "3, static": (replace(CASE, config=stage(3)), STATIC),
    "3, two ranks, recomputed": (
        replace(CASE, world_size=2, config=stage(3, activation_checkpoint="full")),
        DEVICE,
    ),
    "3, some weights on one rank": (replace(CASE, world_size=2, tensor=2, config=stage(3)), DEVICE),
}  # fmt: skip
WORDS = {
    "3, static": "the weights token.weight, position.weight have been updated",
    "3, two ranks, recomputed": "the weights token.weight, position.weight have been updated",
    "3, some weights on one rank": SAVED,
}


@pytest.mark.parametrize("name", LATE)
def test_a_backward_after_the_update_of_what_its_forward_read_is_told(name: str, tmp_path: Path) -> None:
    case, placement = LATE[name]
    for text in run_world(too_late, case.world_size, placed(case, placement, tmp_path)):
        words = "the weights of blocks.1 have been updated" if "recomputed" in name else ITS_OWN
        assert WORDS.get(name, words) in text, text
