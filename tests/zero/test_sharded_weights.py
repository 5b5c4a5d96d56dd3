"""Checks that sharded weights give the serial numbers, from planned slots and in one order on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightState
from colossal_lite.schedule.gather_plan import GatherPlan, GatherStep
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.zero import gather_units
from colossal_lite.zero import sharded_weights as product
from colossal_lite.zero.sharded_weights import ParameterGather, Phase
from tests.engine.test_engine import SGD, Branches, batch_of
from tests.shared.parity import Case, assert_no_further, assert_parity, parallel_run, serial_run, start
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_zero import SMALL, VOCABULARY, Odd, start_module


def zero3(**more: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=3, **more))


FULL = dict(clip_grad_norm=0.05, gradient_accumulation=2)
DEEP = Case(layers=4, vocabulary=VOCABULARY, chunk_bytes=SMALL, steps=2)
"""Four blocks of several chunks each, and an embedding that is cut."""

# ---- the same numbers ----

COMBINATIONS: dict[str, Case] = {
    "two ranks": replace(DEEP, config=zero3()),
    "four ranks, everything": replace(
        DEEP,
        world_size=4,
        family="llama",
        dropout=0.1,
        ragged=True,
        global_batch=7,
        config=FULL | zero3(prefetch=2),
    ),
    "untied, recomputed, gathered once": replace(
        DEEP,
        tied=False,
        dropout=0.1,
        config=FULL | zero3(reshard_after_forward=False) | dict(activation_checkpoint="full"),
    ),
    "recomputed in part, without prefetch": replace(
        DEEP, dropout=0.1, config=FULL | zero3(prefetch=0) | dict(activation_checkpoint="selective")
    ),
    "one block a chunk, all ahead": replace(DEEP, chunk_bytes=None, config=zero3(prefetch=50)),
    "an empty cut, a module, frozen": replace(
        DEEP,
        global_batch=1,
        build="module",
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias"),
        config=zero3(),
    ),
    "adapters on frozen weights": replace(DEEP, adapters=2, config=zero3()),
    "norms in two groups": replace(
        DEEP,
        config=zero3()
        | dict(optimizer=dict(type="sgd", lr=0.5, groups=[dict(match="*.bias", weight_decay=0.1)])),
    ),
    "1d": replace(DEEP, world_size=4, tensor=2, config=FULL | zero3() | dict(activation_checkpoint="full")),
    "1d, key heads shared": replace(DEEP, family="llama", world_size=4, tensor=4, tied=False, config=zero3()),
    "2d": replace(DEEP, family="llama", world_size=4, tensor=4, mode="2d", global_batch=8, config=zero3()),
    "3d": replace(DEEP, family="llama", world_size=8, tensor=8, mode="3d", global_batch=8, config=zero3()),
    "ring": replace(DEEP, world_size=4, sequence=2, dropout=0.1, ragged=True, config=FULL | zero3()),
    "ulysses": replace(DEEP, sequence=2, sequence_mode="ulysses", config=zero3(sum_order="ordered")),
    "Llama of Hugging Face": Case(family="hf-llama", steps=2, config=zero3()),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one(name: str) -> None:
    assert_parity(COMBINATIONS[name])


ALONE = Case(layers=2, steps=3, tied=False, tensor=2, config=zero3() | dict(memory=dict(placement="host")))
"""Weights that a rank keeps alone (cut by tensor ranks, no data ranks), beside norms that the ranks share."""
OFF_DEVICE: dict[str, Case] = {
    "our GPT": ALONE,
    "updated on the host": replace(
        ALONE, config=zero3() | dict(memory=dict(placement="host", update_on="host"))
    ),
    "inputs kept": replace(ALONE, regather_inputs=False),
    "no prefetch, clipped": replace(
        ALONE, config=zero3(prefetch=0) | FULL | dict(memory=dict(placement="host"))
    ),
    "static": replace(
        ALONE, config=zero3() | dict(memory=dict(placement="static", host_fraction=dict(optimizer=0.7)))
    ),
    "on disk": replace(ALONE, config=zero3() | dict(memory=dict(placement="disk"))),
    "2d": replace(ALONE, world_size=4, tensor=4, mode="2d"),
    "hf-gpt2": replace(ALONE, family="hf-gpt2", tied=True),
    "hf-llama": replace(ALONE, family="hf-llama"),
}


def losses_of(env: RankEnv, case: Case) -> list[tuple[float, bool]]:
    """Of each step, and whether it was skipped. Nothing is read between steps: that would run deferred updates."""
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        cut, found = context.local_batch(case.global_batch), []
        for number in range(case.steps):
            inputs, labels = case.batch(number)
            result = engine.train_step((inputs[cut], labels[cut]))
            found.append((float(result.loss), result.skipped))
        engine.close()
        return found


@pytest.mark.parametrize("name", OFF_DEVICE)
def test_a_weight_that_no_rank_shares_is_updated_before_it_is_read(name: str, tmp_path: Path) -> None:
    """Its module has no gather to wait for, and its update may be deferred to the next forward."""
    case = OFF_DEVICE[name]
    memory = dict(case.config["memory"])
    memory |= dict(disk_dir=str(tmp_path)) if memory["placement"] == "disk" else {}
    away = run_world(losses_of, case.world_size, replace(case, config=case.config | dict(memory=memory)))
    there = run_world(losses_of, case.world_size, replace(case, config=case.config | dict(memory={})))
    assert away == there and not any(skipped for _, skipped in away[0])


MORE = COMBINATIONS | {"GPT-2 of Hugging Face": Case(family="hf-gpt2", steps=2, config=zero3())}


@pytest.mark.campaign
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", MORE)
def test_every_gradient_is_the_serial_one_whatever_the_prefetch(
    name: str, reshard: bool, prefetch: int
) -> None:
    case = MORE[name]
    zero = dict(stage=3, prefetch=prefetch, reshard_after_forward=reshard, sum_order="ordered")
    assert_parity(case, config={**case.config, "zero": zero})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_are_no_further_from_the_truth_than_a_plain_loop(dtype: str) -> None:
    case = replace(DEEP, dropout=0.2, ragged=True, global_batch=5)
    assert_no_further(case, config=FULL | zero3() | {"precision": dtype})


# ---- saved views ----


def elsewhere(original: Callable[..., GatherPlan], *args: Any, **more: Any) -> GatherPlan:
    """The plan with every slot of backward in other bytes than any slot of forward."""
    plan, by = original(*args, **more), 0
    by = plan.arena_numel

    def moved(step: GatherStep) -> GatherStep:
        return replace(step, resident={c: offset + by for c, offset in step.resident.items()})

    return replace(plan, backward=tuple(map(moved, plan.backward)), arena_numel=2 * by)


def begin_elsewhere(original: Callable[..., None], self: ParameterGather, phase: Phase) -> None:
    original(self, phase)
    if phase is Phase.BACKWARD and self.plan is not None:
        self._make_resident({c: offset + self.plan.arena_numel // 2 for c, offset in self._resident.items()})


def drop_and_spoil(original: Callable[..., None], self: Chunk) -> None:
    self.finish_gather()
    self.full_weight.fill_(torch.nan)
    original(self)


def moving(env: RankEnv, case: Case) -> Any:
    begin, drop, plan_of = ParameterGather._begin, Chunk.reshard, gather_units.plan_of
    with (
        patch.object(ParameterGather, "_begin", lambda self, phase: begin_elsewhere(begin, self, phase)),
        patch.object(Chunk, "reshard", lambda self: drop_and_spoil(drop, self)),
        patch.object(product, "plan_of", lambda *args, **more: elsewhere(plan_of, *args, **more)),
    ):
        return parallel_run(env, case)


@pytest.mark.parametrize("name", ["two ranks", "untied, recomputed, gathered once", "1d"])
def test_a_saved_view_is_right_though_every_slot_has_moved_between_forward_and_backward(name: str) -> None:
    from tests.shared.parity import compare

    case = COMBINATIONS[name]
    truth = serial_run(case)
    for rank, steps in enumerate(run_world(moving, case.world_size, case)):
        compare(case, truth, steps, rank)


# ---- bytes and memory ----


def two_steps(env: RankEnv, case: Case) -> dict[str, Any]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        inputs, labels = case.batch(0)
        identities = [id(p) for p in engine.model.parameters()]
        shapes = [(p.shape, p.dtype) for p in engine.model.parameters()]
        storages, most = [], 0
        for _ in range(3):
            engine.train_step((inputs[cut], labels[cut]))
            weights = engine._weights
            assert isinstance(weights, ParameterGather) and weights._arena is not None
            storages.append(weights._arena.data_ptr())
            assert [id(p) for p in engine.model.parameters()] == identities
            assert [(p.shape, p.dtype) for p in engine.model.parameters()] == shapes
            assert weights.plan is not None
            next_up = weights.plan.forward[0].resident  # gathered while the others are updated
            assert all(
                (c.weights is WeightState.GATHERING) == (c.spec.id in next_up)
                for c in engine._chunks
                if c.is_sharded
            )
        plan, chunks = weights.plan, engine._chunks
        assert plan is not None and len(set(storages)) == 1
        most = max(
            offset + chunks[c].spec.numel
            for step in (*plan.forward, *plan.backward)
            for c, offset in step.resident.items()
        )
        return dict(
            rows=[(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()],
            names=[[entry.name for entry in chunk.spec.entries] for chunk in chunks],
            numels=[chunk.spec.numel for chunk in chunks],
            memory={row.kind: (row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()},
            arena=(plan.arena_numel, most, plan.live_numel),
            reduces=sum(a.kind is ActionKind.REDUCE for a in plan.actions),
            largest=max(
                sum(c.spec.numel for c in chunks if c.spec.key.unit == unit)
                for unit in {c.spec.key.unit for c in chunks}
            ),
        )


def gathers_of(names: list[str], *, reshard: bool) -> int:
    """Times that a chunk of the tied model, prefetch 1, is gathered in a micro-batch: the embedding for the first layer
    and for the head, whose backward follows at once; the last norm likewise; a block in forward and in backward."""
    if names[0].startswith("blocks."):
        return 2 if reshard else 1
    if names == ["norm.weight", "norm.bias"]:
        return 1
    return 2 if reshard and "token.weight" in names else 1


def windows(numels: list[int], width: int) -> int:
    """The most that so many neighbours take."""
    return max(sum(numels[i : i + width]) for i in range(len(numels)))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("world_size", "precision", "w", "r", "backend"), [(2, "fp64", 8, 8, "gloo"), (4, "bf16", 2, 4, "auto")]
)
def test_p6_bytes_and_memory_of_a_step_are_the_formula(
    world_size: int, precision: str, w: int, r: int, backend: str, reshard: bool
) -> None:
    """k (2 w + r) P, less what the turn from forward to backward keeps; w + r + 2 r + (m) over W and the slots."""
    k = 2
    zero = zero3(reshard_after_forward=reshard)
    adamw = dict(type="adamw", lr=1e-2)
    case = replace(
        DEEP,
        world_size=world_size,
        config=dict(precision=precision, gradient_accumulation=k, optimizer=adamw, backend=backend) | zero,
    )
    for seen in run_world(two_steps, world_size, case):
        numels, total = seen["numels"], sum(seen["numels"])
        times = [gathers_of(names, reshard=reshard) for names in seen["names"]]
        gathered = sum(n * numel for n, numel in zip(times, numels, strict=True))
        assert gathered <= (2 if reshard else 1) * total
        rows = {row[:2]: row[2:] for row in seen["rows"]}
        assert rows["all_gather", "data"] == (k * sum(times), k * w * gathered)
        assert rows["reduce_scatter", "data"] == (k * len(numels), k * r * total)
        assert rows.keys() == {("all_gather", "data"), ("reduce_scatter", "data"), ("all_reduce", "world")}
        arena, most, live = seen["arena"]
        assert arena == most and live <= arena
        assert live <= 2 * seen["largest"] or not reshard
        master = 4 if precision == "bf16" else 0
        assert all(peak == forecast for peak, forecast in seen["memory"].values())
        staging, _ = seen["memory"].pop("staging")
        others = [n - n // world_size if backend == "gloo" else 0 for n in numels]
        assert (
            r * (windows(numels, 3) + windows(others, 2))
            <= staging
            <= r * (3 * max(numels) + 2 * max(others))
        )
        assert {kind: peak for kind, (peak, _) in seen["memory"].items()} == {
            "weights": w * total // world_size,
            "masters": master * total // world_size,
            "gradients": r * total // world_size,
            "optimizer": 2 * r * total // world_size,
            "gathered": w * arena,
        }
        first = sum(names[0].startswith(("token.", "position.", "blocks.0.")) for names in seen["names"])
        assert seen["reduces"] == len(numels) - first, (
            "all but those of the first layers begin before the last unit"
        )


# ---- models that are not what they seem ----


class Backwards(nn.Module):
    """Defines its layers in another order than it uses them, uses one twice, and owns a parameter beside children."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.second, self.first = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.embedding(x)))
        h = torch.tanh(self.second(h + self.shift))
        return self.head(torch.tanh(self.first(h)) * (1 + self.shift) + self.nothing.sum())


ODD = dict(precision="fp64", optimizer=dict(type="adamw", lr=0.1), seed=7, timeout_s=30)


def odd_run(env: RankEnv, stage: int, prefetch: int) -> list[dict[str, Tensor]]:
    zero = dict(stage=stage, prefetch=prefetch) if stage == 3 else dict(stage=stage)
    with env.launch(ODD | dict(zero=zero)) as context:
        torch.manual_seed(0)
        engine = start_module(Backwards(), context, Case(chunk_bytes=8 * 32))
        out = []
        for step in range(3):
            inputs = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(step))
            cut = context.local_batch(4)
            engine.train_step((inputs[cut], (inputs[cut] + 1) % 16))
            out.append(engine.full_state_dict())
            engine.eval_step((inputs[cut], (inputs[cut] + 1) % 16))
        return out


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_order_of_use_is_what_the_first_step_shows_not_what_the_model_defines(prefetch: int) -> None:
    expected = run_world(odd_run, 2, 0, 0)[0]
    for states in run_world(odd_run, 2, 3, prefetch):
        for ours, theirs in zip(states, expected, strict=True):
            for name, value in theirs.items():
                assert torch.allclose(ours[name], value, rtol=1e-11, atol=1e-14), name


def branching(env: RankEnv, stage: int) -> tuple[dict[str, Tensor], list[tuple[Any, ...]]]:
    """Ranks take other branches than each other, and than in the first step. Also every collective, in order."""
    calls: list[tuple[Any, ...]] = []
    run = Communicator._run

    def told(self: Communicator, counted: str | None, payload: Tensor, *args: Any, **more: Any) -> Any:
        calls.append((self.axis, counted or more.get("what"), tuple(payload.shape), payload.dtype))
        return run(self, counted, payload, *args, **more)

    with (
        patch.object(Communicator, "_run", told),
        env.launch(SGD | dict(zero=dict(stage=stage))) as context,
    ):
        torch.manual_seed(0)
        engine = start_module(Branches(), context, Case(chunk_bytes=8 * 16))
        calls.clear()
        for firsts in ([0, 2], [1, 3], [0, 1], [3, 2], [1, 1], [0, 0]):
            assert not engine.train_step(batch_of(firsts[env.rank])).skipped
        made = list(calls)
        return engine.full_state_dict(), made


def test_p8_a_rank_that_skips_a_module_takes_part_in_its_gathers() -> None:
    (expected, _), _ = run_world(branching, 2, 0)
    (_, first), (_, second) = ranks = run_world(branching, 2, 3)
    assert first == second, "all ranks make the same collectives in the same order"
    assert ("data", "all_gather") in {call[:2] for call in first}
    for state, _ in ranks:
        assert all(torch.allclose(state[n], v, rtol=1e-12, atol=1e-15) for n, v in expected.items())


class Experts(nn.Module):
    """Samples of word w run through the experts whose bits w has, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for number, expert in enumerate(self.experts):
            chosen = (ids >> number) % 2 == 1
            if chosen.any():
                x = torch.where(chosen[..., None], torch.tanh(expert(x)), x)
        logits: Tensor = self.head(x)
        return logits


def routed(env: RankEnv, stage: int, first: tuple[int, int]) -> dict[str, Tensor]:
    """In the first step each rank uses the experts of a word of its own, and later ones that are new to it."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        torch.manual_seed(0)
        engine = start_module(Experts(), context, Case(chunk_bytes=8 * 16))
        for words in (first, (7, 7), (5, 2), (3, 6), first[::-1]):
            ids = torch.full((1, 4), words[env.rank])
            engine.train_step((ids, (ids + 1) % 8))
        return engine.full_state_dict()


@pytest.mark.parametrize("first", [(4, 3), (3, 4), (4, 1), (0, 7), (6, 1)])
def test_ranks_that_use_other_experts_in_the_first_step_trace_all_in_one_order(
    first: tuple[int, int],
) -> None:
    """Before, what one rank used last stood before what the other used first. A step that used both was refused."""
    expected, _ = run_world(routed, 2, 0, first)
    for state in run_world(routed, 2, 3, first):
        assert all(torch.allclose(state[n], v, rtol=1e-12, atol=1e-15) for n, v in expected.items())


class Turning(nn.Module):
    """Uses its two layers in the order that an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
        self.head = nn.Linear(4, 8)
        self.order = "abcd"

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for name in self.order:
            h = torch.tanh(self.layers[name](h))
        return self.head(h)


def turned(env: RankEnv, prefetch: int) -> str:
    with env.launch(SGD | dict(zero=dict(stage=3, prefetch=prefetch))) as context:
        torch.manual_seed(0)
        engine = start_module(Turning(), context, Case(chunk_bytes=8 * 16))
        engine.train_step(batch_of(0))
        engine.model.order = "dcba"
        with pytest.raises(ValueError) as caught:
            engine.train_step(batch_of(0))
        return str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_p8_a_model_that_changes_its_order_is_told_so(prefetch: int) -> None:
    for text in run_world(turned, 2, prefetch):
        assert "layers.c" in text and "order of its first step" in text and "zero.stage=2" in text


def past_the_gate(engine: cl.Engine) -> None:
    engine.train_step(batch_of(0))


def own_backward(engine: cl.Engine) -> None:
    nn.functional.cross_entropy(engine(batch_of(0)[0]).flatten(0, 1), torch.zeros(4).long()).backward()


def own_forward(engine: cl.Engine) -> None:
    engine.model(batch_of(0)[0])


def own_state(engine: cl.Engine) -> None:
    engine.model.state_dict()


def stale_backward(engine: cl.Engine) -> None:
    engine.train_step(batch_of(0))
    loss = engine(batch_of(0)[0]).sum()
    engine.backward(engine(batch_of(0)[0]).sum())
    engine.step()
    engine.backward(loss)


BAD: dict[str, tuple[Callable[[], nn.Module], Callable[[cl.Engine], None], str]] = {
    "a weight read past its module": (Odd, past_the_gate, "calling the module that owns it"),
    "a backward of one's own": (Branches, own_backward, "engine.backward"),
    "a forward of one's own": (Branches, own_forward, "engine\\(inputs\\)"),
    "the model's own state": (Branches, own_state, "full_state_dict"),
    "a backward after the update": (Branches, stale_backward, "updated since the forward"),
}


def misused(env: RankEnv, name: str) -> None:
    build, act, _ = BAD[name]
    with env.launch(SGD | dict(zero=dict(stage=3))) as context:
        torch.manual_seed(0)
        act(start_module(build(), context, Case(chunk_bytes=8 * 16)))


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_told_with_what_is_legal(name: str) -> None:
    with pytest.raises(WorldError, match=BAD[name][2]):
        run_world(misused, 2, name)


def closed(env: RankEnv, case: Case) -> bool:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        inputs, labels = case.batch(0)
        engine.eval_step((inputs[cut], labels[cut]))
        engine.train_step((inputs[cut], labels[cut]))
        expected, before = engine.full_state_dict(), engine.eval_step((inputs[cut], labels[cut]))
        engine.load_full_state_dict(expected)
        assert torch.equal(engine.eval_step((inputs[cut], labels[cut])), before)
        engine.close()
        return all(torch.equal(value, expected[n]) for n, value in engine.model.state_dict().items())


def test_evaluation_and_loading_stand_between_steps_and_a_closed_model_is_whole() -> None:
    assert all(run_world(closed, 2, replace(DEEP, global_batch=5, config=zero3())))


class Attends(nn.Module):
    """Torch's attention outside of any block: its forward reads the weights of `out_proj`, and never calls that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)
        return y


def attended(env: RankEnv) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 5, 8, generator=generator).double(), torch.arange(4)
    memory = dict(chunk_bytes=8 * 32)  # out_proj has a chunk of its own
    with env.launch(SGD | dict(zero=dict(stage=3), memory=memory)) as context:
        engine = cl.initialize(Attends().double(), context=context, criterion=nn.functional.cross_entropy)
        part = context.local_batch(4)
        for _ in range(3):
            engine.train_step((x[part], y[part]))
        return engine.full_state_dict()


def test_the_output_projection_of_torchs_attention_is_gathered_for_it() -> None:
    (serial,) = run_world(attended, 1)
    for state in run_world(attended, 2):
        for name, value in serial.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
