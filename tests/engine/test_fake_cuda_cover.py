"""On a CUDA device that is not there a cover of modes, and every recipe, trains, evaluates, saves and loads."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_fake_cuda import assert_waits_once
from tests.engine.test_fake_cuda import guard as guard
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.fake_rank import LLAMA, Case, case, rows_of, stuck

MODES: dict[str, tuple[int, Case]] = {
    "alone": (1, {}),
    "data": (2, {}),
    "1d": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(size=4, mode="2d"))),
    "2.5d": (8, dict(tensor=dict(size=8, mode="2.5d", depth=2))),
    "3d": (8, dict(tensor=dict(size=8, mode="3d"))),
    **{
        mode: (2, dict(sequence=dict(size=2, mode=mode)))
        for mode in ("ring", "ring_full", "ulysses", "allgather_kv")
    },
    "usp": (4, dict(sequence=dict(size=4, mode="usp", ulysses=2))),
    **{
        schedule: (2, dict(pipeline=dict(size=2, micro_batches=4, schedule=schedule)))
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    },
    "1f1b x data": (4, dict(pipeline=dict(size=2, micro_batches=4), data=2)),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "1f1b x data")
MODELS: dict[str, Case] = {
    "GPT": dict(dropout=0.1),
    "Llama": LLAMA,
    "HF GPT-2": dict(kind="hf-gpt2"),
    "HF Llama": dict(kind="hf-llama", ffn=512, kv_heads=8),
}
MEMORY: dict[str, Case] = {
    "device": {},
    "host": dict(placement="host"),
    "updated on both": dict(placement="host", update_on=dict(every=2)),
    "disk": dict(placement="disk", disk_dir="/tmp"),
    "static": dict(placement="static", host_fraction=dict(optimizer=0.5)),
    "budget": dict(placement="auto", device_budget="1GiB"),
}
OPTIMIZERS: dict[str, Case] = {
    "adamw": dict(type="adamw"),
    "moments in bf16": dict(type="adamw", moments="bf16"),
    "sgd": dict(type="sgd", lr=0.1, momentum=0.9),
    "lion": dict(type="lion"),
    "lamb": dict(type="lamb"),
}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "split": dict(dtype="bf16", master="split"),
}  # fmt: skip
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS), "mode": tuple(MODES), "stage": (0, 1, 2, 3), "memory": tuple(MEMORY),
    "optimizer": tuple(OPTIMIZERS), "precision": tuple(PRECISIONS),
    "recompute": ("none", "full", "selective"), "save": ("here", "beside"),
}  # fmt: skip


WHOLE = ("alone", "data", "ring", "ring_full", "ulysses", "allgather_kv", "usp")


def legal(choice: Choice) -> bool:
    """LAMB takes the norm of a whole tensor."""
    return choice["optimizer"] != "lamb" or (choice["stage"] == 0 and choice["mode"] in WHOLE)


def cases_of(choice: Choice) -> dict[str, Case]:
    """A case for each rank of a pipeline or a ring, whose messages are matched, and for the last rank of others."""
    ranks, parallel = MODES[choice["mode"]]
    more: Case = dict(layers=4) if choice["mode"] in SCHEDULES else {}
    if choice["mode"] == "ring_full":
        more = dict(causal=False)
    settings: Case = dict(
        parallel=parallel, zero=dict(stage=choice["stage"]), memory=MEMORY[choice["memory"]] | dict(chunk_bytes="1MiB"),
        optimizer=OPTIMIZERS[choice["optimizer"]], precision=PRECISIONS[choice["precision"]],
        activation_checkpoint=choice["recompute"], checkpoint=dict(asynchronous=choice["save"] == "beside"),
    )  # fmt: skip
    every = ranks if choice["mode"] in (*SCHEDULES, "ring", "ring_full") else 1
    return {
        f"{name_of(choice)}/{rank}": case(ranks, rank, MODELS[choice["model"]] | more, samples=16, **settings)
        for rank in range(ranks - every, ranks)
    }


def recipes() -> dict[str, Case]:
    """Each recipe on as many ranks as its axes have, or on two where it shards: all of a pair, and the last of more."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
    from configs import CONFIGS

    found = {}
    for name, recipe in ((name, make(50)) for name, make in CONFIGS.items()):
        axes = recipe["config"].get("parallel", {}).values()
        ranks = math.prod(axis["size"] if isinstance(axis, dict) else axis for axis in axes)
        ranks = max(ranks, 2) if "zero" in recipe["config"] else ranks
        for rank in range(ranks) if "pipeline" in name or ranks == 2 else [ranks - 1]:
            found[f"{name}/{rank}"] = case(
                ranks, rank, recipe["model"], samples=recipe["global_batch"], **recipe["config"]
            )
    return found


def assert_ends(rows: dict[str, Any]) -> None:
    """Each case waits once in a step, and the messages of its ranks meet in the queues of each group."""
    logs: dict[tuple[str, tuple[int, ...]], dict[int, list[Any]]] = {}
    for name, row in rows.items():
        assert_waits_once(name, row)
        assert row["saved"]["saved"] == row["saved"]["loaded"] > 0, (name, row["saved"])
        title, _, rank = name.rpartition("/")
        for group, at_once in row["messages"]:
            of_group = logs.setdefault((title, tuple(group)), {})
            of_group.setdefault(int(rank), []).append((group, at_once))
    for (title, group), log in logs.items():
        if len(log) == len(group):  # all of its ranks have run
            assert stuck(log) == {}, (title, group)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quarter", range(4))
def test_in_each_pair_of_choices_a_step_waits_once_and_no_rank_stops(guard: Path, quarter: int) -> None:
    chosen = covering_array(FACTORS, legal)[quarter::4]
    assert_ends(rows_of(guard, {name: one for row in chosen for name, one in cases_of(row).items()}))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_every_recipe_of_the_example_runs(guard: Path) -> None:
    assert_ends(rows_of(guard, recipes()))
