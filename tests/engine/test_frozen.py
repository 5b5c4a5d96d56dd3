"""Frozen parameters at stage 3: shards between uses like those that train, and nothing beside their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_lite.memory.chunk import Chunk
from colossal_lite.planner import planner
from colossal_lite.zero.sharded_weights import ParameterGather
from tests.shared.parity import Case, assert_parity, start, steps_of
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import SMALL, VOCABULARY


def zero3(**more: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=3, **more))


FULL = dict(clip_grad_norm=0.05, gradient_accumulation=2)
ADAPTED = Case(layers=4, vocabulary=VOCABULARY, chunk_bytes=SMALL, steps=2, adapters=2)
BLOCK = ("norm1", "norm2", "attention.qkv", "attention.out", "mlp.up", "mlp.down")


def frozen_blocks(*numbers: int) -> tuple[str, ...]:
    return tuple(
        f"blocks.{n}.{name}.{kind}" for n in numbers for name in BLOCK for kind in ("weight", "bias")
    )


FIRST = replace(
    ADAPTED, adapters=0, tied=False, frozen=("token.weight", "position.weight", *frozen_blocks(0, 1))
)
"""Backward ends at the third of four blocks."""

# ---- the same numbers ----

CASES: dict[str, Case] = {
    "adapters, recomputed, gathered once, two ahead": replace(
        ADAPTED, dropout=0.1, config=FULL | zero3(reshard_after_forward=False, prefetch=2)
        | dict(activation_checkpoint="full"),
    ),
    "adapters, copies of two shards, kept near, an empty cut": replace(
        ADAPTED, world_size=4, global_batch=3, ragged=True, config=FULL | zero3(reshard_after_forward=2)
    ),
    "adapters beside tensor parallelism, ordered, hybrid": replace(
        ADAPTED, family="llama", world_size=4, tensor=2, config=zero3(sum_order="ordered")
    ),
    "the first blocks": replace(FIRST, config=FULL | zero3()),
    "a block between, and a tied table": replace(
        ADAPTED, adapters=0, build="module", frozen=("token.weight", *frozen_blocks(2)),
        config=FULL | zero3(prefetch=0) | dict(activation_checkpoint="selective"),
    ),
    "all but one norm, hybrid": replace(
        ADAPTED, adapters=0, tied=False, world_size=4,
        frozen=("token.weight", "position.weight", "head.weight", *frozen_blocks(0, 1, 2, 3)),
        config=zero3(shard_size=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_beside_frozen_shards_is_the_serial_one(name: str) -> None:
    assert_parity(CASES[name])


# ---- bytes and memory ----


@dataclass(frozen=True)
class Seen:
    """Of one rank after three steps."""

    rows: Mapping[tuple[str, str], tuple[int, int]]
    gathers: Mapping[int, int]
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    memory: Mapping[str, tuple[int, int | None]]
    predicted: Mapping[str, int]
    traffic: Mapping[tuple[str, str], tuple[int, int]]


def three_steps(env: RankEnv, case: Case) -> Seen:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        kept = [(chunk.version, chunk.local_shard.clone()) for chunk in engine._parts.built.frozen]
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        for _ in range(
            3
        ):  # nobody reads the weights between, which would drop what the next step begins with
            engine.train_step((inputs, labels))
        rows = {(r.operation, r.axis): (r.calls, r.payload_bytes) for r in engine.ledger.rows()}
        assert all(
            chunk.version == version and torch.equal(chunk.local_shard, value)
            for chunk, (version, value) in zip(engine._parts.built.frozen, kept, strict=True)
        )
        weights = engine._weights
        assert isinstance(weights, ParameterGather) and weights.plan is not None
        assert not any(isinstance(chunk, Chunk) for chunk in engine._parts.built.frozen)
        made = planner.plan(
            context.config, case.model, batch=case.global_batch, sequence=case.tokens,
            world_size=case.world_size, rank=env.rank,
            one_host=context.mesh.shares_memory,
        )  # fmt: skip
        return Seen(
            rows, weights.plan.gathers(),
            tuple(c.spec.numel for c in engine._chunks), tuple(c.spec.numel for c in engine._parts.built.frozen),
            tuple(tuple(e.name for e in c.spec.entries) for c in (*engine._chunks, *engine._parts.built.frozen)),
            {row.kind: (row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()},
            {row.kind: row.bytes for row in made.memory},
            {(r.operation, r.axis): (r.calls, r.payload_bytes) for r in made.traffic},
        )  # fmt: skip


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("case", [ADAPTED, FIRST], ids=["adapters", "the first blocks"])
def test_frozen_shards_move_twice_a_micro_batch_and_hold_nothing_beside(case: Case, reshard: bool) -> None:
    """2 k w F, or k w F where they are kept from forward to backward or backward does not come; no gradient, no master
    and no state of them: w F / W."""
    k, w, r = 2, 2, 4
    adamw = dict(type="adamw", lr=1e-2)
    config = dict(precision="bf16", gradient_accumulation=k, optimizer=adamw) | zero3(
        reshard_after_forward=reshard
    )
    for seen in run_world(three_steps, 2, replace(case, config=config)):
        first = len(seen.trained)
        for index, names in enumerate(seen.names):
            block = next((name.split(".")[1] for name in names if name.startswith("blocks.")), None)
            is_last, never = (
                block == "3",
                case is FIRST and (block in ("0", "1") or "position.weight" in names),
            )
            if block is not None:  # the last stays over the turn where nothing but the head follows it
                expected = {1} if not reshard or never else {1, 2} if is_last else {2}
                assert seen.gathers[index] in expected, names
        numels = (*seen.trained, *seen.frozen)
        times = sum(seen.gathers.values())
        gathered = sum(n * numels[index] for index, n in seen.gathers.items())
        # modules that are not ours may draw a dropout, for which batch sizes are exchanged
        sizes = int(case is ADAPTED)
        assert seen.rows["all_gather", "data"] == (k * times + sizes, k * w * gathered + 8 * 2 * sizes)
        assert seen.rows["reduce_scatter", "data"] == (k * first, k * r * sum(seen.trained))
        assert seen.frozen and all(peak == forecast for peak, forecast in seen.memory.values())
        assert seen.memory["frozen"][0] == w * sum(seen.frozen) // 2
        assert seen.memory["weights"][0] == w * sum(seen.trained) // 2
        assert seen.memory["gradients"][0] == r * sum(seen.trained) // 2
        assert seen.memory["optimizer"][0] == 2 * r * sum(seen.trained) // 2
        held = ("frozen", "weights", "gathered", "masters", "gradients", "optimizer", "staging")
        assert {kind: seen.predicted[kind] for kind in held} == {kind: seen.memory[kind][0] for kind in held}
        assert {key: seen.traffic[key] for key in seen.rows if key[1] == "data"} == {
            key: row for key, row in seen.rows.items() if key[1] == "data"
        }


def on_the_host(env: RankEnv, case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        steps = list(steps_of(engine, context, case))
        frozen = engine._parts.built.frozen
        weights, link = engine._weights, {row.link: row.moved_bytes for row in engine.link_report()}
        assert isinstance(weights, ParameterGather) and weights.plan is not None
        stays = weights.plan.stays()
        facts = dict(
            rows=[(r.tier, r.now_bytes, r.forecast_bytes) for r in engine.memory_report() if r.kind == "frozen"],
            all=sum(c.resting_bytes for c in frozen),
            ups=sum(stays[c.spec.id] * c.resting_bytes for c in frozen if c.weights_at_rest is not None),
            up=link.get("h2d"),
            on_host=sum(c.weights_at_rest is not None for c in frozen),
        )  # fmt: skip
        return [step.loss for step in steps], dict(steps[-1].parameters), facts


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_weights_rest_on_the_host_come_for_their_use_and_never_go_back(ranks: int) -> None:
    case = replace(ADAPTED, world_size=ranks, config=zero3(sum_order="ordered"))
    fractions = dict(weights=1.0, gradients=0.0, optimizer=0.0)
    memory = dict(memory=dict(placement="static", host_fraction=fractions))
    device = run_world(parameters_of, ranks, case)
    for (losses, parameters, seen), (true_losses, truth) in zip(
        run_world(on_the_host, ranks, replace(case, config={**case.config, **memory})), device, strict=True
    ):
        assert losses == true_losses
        assert all(torch.equal(parameters[name], value) for name, value in truth.items())
        assert seen["on_host"] and seen["rows"] == [("host", seen["all"], seen["all"])]
        assert seen["ups"] <= seen["up"]


def parameters_of(env: RankEnv, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(case.full_config) as context:
        steps = list(steps_of(start(case, context), context, case))
        return [step.loss for step in steps], dict(steps[-1].parameters)


# ---- checkpoints and whole tensors ----


def saved(env: RankEnv, case: Case, folder: str) -> dict[str, Tensor]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        for _ in steps_of(engine, context, case, (0,)):
            pass
        engine.save(folder)
        return engine.full_state_dict()


def loaded(env: RankEnv, case: Case, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a run of other values has after a load, and after a load of the whole tensors of that."""
    with env.launch(case.full_config | dict(seed=8)) as context:
        engine = start(case, context)
        before = engine.full_state_dict()
        engine.load(folder)
        found = engine.full_state_dict()
        engine.load_full_state_dict(before)
        engine.load_full_state_dict(found)
        for _ in steps_of(engine, context, case, (1,)):
            pass
        frozen = {name for name, p in engine._parts.parameters.items() if not p.requires_grad}
        return found, {name: engine.full_state_dict()[name] for name in frozen}


MESHES = {
    "stage 3": replace(ADAPTED, config=dict(precision="bf16", **zero3())),
    "stage 0 on one rank": replace(ADAPTED, world_size=1, config=dict(precision="bf16")),
    "tensor 2, stage 3": replace(
        ADAPTED, world_size=4, tensor=2, config=dict(precision="bf16", **zero3(prefetch=0))
    ),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("stage 3", "stage 0 on one rank"),
        ("stage 0 on one rank", "tensor 2, stage 3"),
        ("tensor 2, stage 3", "stage 3"),
    ],
)
def test_frozen_weights_are_saved_on_any_mesh_and_loaded_on_any_other_bit_by_bit(
    source: str, target: str, tmp_path: Path
) -> None:
    truth = run_world(saved, MESHES[source].world_size, MESHES[source], str(tmp_path))[0]
    for found, kept in run_world(loaded, MESHES[target].world_size, MESHES[target], str(tmp_path)):
        assert found.keys() == truth.keys() and kept
        assert all(torch.equal(found[name], value) for name, value in truth.items())
        assert all(torch.equal(kept[name], truth[name]) for name in kept), "a step changes no frozen weight"
