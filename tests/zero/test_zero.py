"""Checks that sharded training equals the serial run, and every stage has the same bits and the planned bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.memory.weight_chunk import LEGAL_WEIGHT, WeightState
from colossal_lite.zero import build_chunks as build
from tests.engine.test_engine import SGD, Branches, batch_of
from tests.memory.test_packing import _chunk
from tests.shared.parity import (
    Case,
    Step,
    assert_parity,
    chunk_numel,
    initial_values,
    parallel_steps,
    start,
    steps_of,
)
from tests.shared.pool import RankEnv, WorldError, run_world

ADAMW = dict(type="adamw", lr=1e-2, weight_decay=0.1)
KINDS: dict[str, dict[str, Any]] = {
    "0": dict(stage=0),
    "1": dict(stage=1),
    "2": dict(stage=2),
    "2 by micro-batch": dict(stage=2, reduce_every="micro_batch"),
    "0 ordered": dict(sum_order="ordered"),
    "2 ordered": dict(stage=2, sum_order="ordered"),
    "3": dict(stage=3),
    "3 kept": dict(stage=3, reshard_after_forward=False, prefetch=2),
    "3 ordered": dict(stage=3, sum_order="ordered", prefetch=0),
}
STAGES = pytest.mark.parametrize("kind", KINDS)
VOCABULARY = 200
"""Large enough that shards cut the embedding, whose blocks of 1,024 they keep."""
SMALL = 8 * 3000
"""Bytes of a chunk's gradient that cut the test model into several chunks."""


def sharded(case: Case, kind: str, **more: Any) -> Case:
    return replace(case, config={**case.config, "zero": KINDS[kind]}, vocabulary=VOCABULARY, **more)


# ---- the same numbers ----

COMBINATIONS = {
    "plain": Case(),
    "everything": Case(
        family="llama",
        dropout=0.1,
        ragged=True,
        global_batch=7,
        config=dict(clip_grad_norm=0.05, gradient_accumulation=3),
    ),
    "an empty cut, of a module, frozen, AdamW": Case(
        global_batch=1,
        build="module",
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias"),
        config=dict(optimizer=ADAMW),
    ),
}


PAIRWISE = [
    *((name, world_size, "1") for name in COMBINATIONS for world_size in (1, 2, 4)),
    *(("everything", world_size, "2 by micro-batch") for world_size in (1, 2, 4)),
    ("everything", 2, "2"),
    ("everything", 4, "0 ordered"),
    ("everything", 2, "2 ordered"),
    ("an empty cut, of a module, frozen, AdamW", 4, "2"),
    ("an empty cut, of a module, frozen, AdamW", 2, "0 ordered"),
]


@pytest.mark.parametrize(("name", "world_size", "kind"), PAIRWISE)
def test_every_gradient_is_the_serial_one(name: str, world_size: int, kind: str) -> None:
    assert_parity(sharded(COMBINATIONS[name], kind), world_size=world_size, chunk_bytes=SMALL)


TENSOR = Case(
    family="llama",
    world_size=4,
    tensor=2,
    ragged=True,
    global_batch=5,
    dropout=0.1,
    config=dict(clip_grad_norm=0.05, gradient_accumulation=2, optimizer=ADAMW),
    chunk_bytes=SMALL,
)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"),
    [("1", True), ("1", False), ("2 by micro-batch", True), ("2 ordered", True), ("0 ordered", False)],
)
def test_every_gradient_is_the_serial_one_with_tensor_parallelism(kind: str, sequence_parallel: bool) -> None:
    assert_parity(sharded(TENSOR, kind), sequence_parallel=sequence_parallel)


def bits(env: RankEnv, case: Case) -> tuple[list[Step], dict[str, dict[str, Tensor]]]:
    """Every step, and the optimizer's state at the end."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return list(steps_of(engine, context, case)), engine.full_optimizer_state()


def assert_same_bits(left: Any, right: Any) -> None:
    for (ours, our_state), (theirs, their_state) in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
            for one, other in ((a.gradients, b.gradients), (a.parameters, b.parameters)):
                assert one.keys() == other.keys()
                assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert_same_moments(our_state, their_state)


BITS = Case(
    dropout=0.1,
    ragged=True,
    config=dict(precision="fp32", optimizer=ADAMW, clip_grad_norm=0.05, gradient_accumulation=2),
    vocabulary=VOCABULARY,
    chunk_bytes=SMALL // 2,
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_p2_stage_1_has_the_bits_of_stage_0_on_two_ranks(precision: str) -> None:
    case = replace(BITS, config=BITS.config | {"precision": precision})
    assert_same_bits(run_world(bits, 2, case), run_world(bits, 2, sharded(case, "1")))


ORDERED = {
    "other chunks": (dict(stage=0), dict(chunk_bytes=SMALL * 4)),
    "stage 1": (dict(stage=1), dict(chunk_bytes=SMALL)),
    "stage 2": (dict(stage=2), dict(chunk_bytes=SMALL // 2)),
    "stage 2, one chunk": (dict(stage=2, reduce_every="micro_batch"), dict(chunk_bytes=None)),
    "stage 3": (dict(stage=3), dict(chunk_bytes=SMALL // 2)),
    "stage 3, kept": (dict(stage=3, reshard_after_forward=False, prefetch=0), dict(chunk_bytes=None)),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_ordered_has_the_same_bits_at_every_stage_and_chunk_size(world_size: int, tensor: int) -> None:
    if tensor > world_size:
        return
    case = replace(BITS, world_size=world_size, tensor=tensor)
    plain = replace(case, config=case.config | dict(zero=dict(sum_order="ordered")))
    expected = run_world(bits, world_size, plain)
    for zero, change in ORDERED.values():
        other = replace(case, config=case.config | dict(zero=zero | dict(sum_order="ordered")), **change)
        assert_same_bits(run_world(bits, world_size, other), expected)


def test_on_one_micro_batch_and_two_ranks_fast_has_the_gradients_of_ordered() -> None:
    case = replace(BITS, config=BITS.config | dict(gradient_accumulation=1), steps=1)
    ordered = replace(case, config=case.config | dict(zero=dict(sum_order="ordered")))
    for (fast,), (other,) in zip(
        (steps for steps, _ in run_world(bits, 2, case)),
        (steps for steps, _ in run_world(bits, 2, ordered)),
        strict=True,
    ):
        assert all(torch.equal(fast.gradients[name], other.gradients[name]) for name in fast.gradients)


def conditional(env: RankEnv, kind: str, firsts: list[int]) -> dict[str, Any]:
    """Two AdamW steps, in the first of which rank r takes the branch of firsts[r]; in the second all the other one."""
    config = SGD | dict(optimizer=dict(type="adamw", lr=0.1, weight_decay=0.5), zero=KINDS[kind])
    with env.launch(config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context)
        before = engine.full_state_dict()
        engine.train_step(batch_of(firsts[env.rank]))
        middle = engine.full_state_dict()
        engine.train_step(batch_of(1))
        steps = {name: int(values["step"]) for name, values in engine.full_optimizer_state().items()}
        return dict(before=before, middle=middle, after=engine.full_state_dict(), steps=steps)


@STAGES
def test_a_parameter_that_no_rank_used_is_left_alone(kind: str) -> None:
    for out in run_world(conditional, 2, kind, [0, 2]):
        assert torch.equal(out["middle"]["right.weight"], out["before"]["right.weight"])
        assert not torch.equal(out["middle"]["left.weight"], out["before"]["left.weight"])
        assert torch.equal(out["after"]["left.weight"], out["middle"]["left.weight"])
        assert out["steps"]["left.weight"] == out["steps"]["right.weight"] == 1
        assert out["steps"]["embedding.weight"] == 2 and out["steps"]["unused"] == 0
    mixed = run_world(conditional, 2, kind, [0, 1])
    assert all(torch.equal(mixed[0]["after"][name], mixed[1]["after"][name]) for name in mixed[0]["after"])
    assert mixed[0]["steps"]["right.weight"] == 2


LATE = ((0, 0), (0, 0), (0, 1), (1, 1), (0, 1))
"""First words of two samples, by which each takes a branch."""
BY_ADAMW = dict(type="adamw", lr=0.1, weight_decay=0.5)


def used_late(env: RankEnv, kind: str) -> dict[str, Tensor]:
    """Weights after five steps on two ranks, with a branch that the first two steps do not take."""
    with env.launch(SGD | dict(optimizer=BY_ADAMW, zero=KINDS[kind])) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context)
        for firsts in LATE:
            engine.train_step(batch_of(firsts[env.rank]))
        return engine.full_state_dict()


@STAGES
def test_a_parameter_that_is_used_late_steps_by_its_own_count_as_torch_has_it(kind: str) -> None:
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5
    )
    for firsts in LATE:
        inputs, labels = batch_of(*firsts)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    for found in run_world(used_late, 2, kind):
        for name, value in model.state_dict().items():
            assert float((found[name] - value).abs().max()) <= 1e-12, name


# ---- gates ----


class Odd(nn.Module):
    """Reads its child's weight without calling the child; where it counts `calls`, not in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: int | None = None
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls is not None:
            self.calls += 1
        if self.calls == 1:
            return self.head(self.embedding(x))  # type: ignore[no-any-return]
        return nn.functional.linear(self.embedding(x), self.head.weight)


def past_the_gate(env: RankEnv) -> list[bool]:
    with env.launch(SGD | dict(zero=dict(stage=1))) as context:
        torch.manual_seed(0)
        case_bytes = Case(chunk_bytes=8 * 32)
        with_small = start_module(Odd(), context, case_bytes)
        results = [with_small.train_step(batch_of(env.rank)) for _ in range(2)]
        flushed = [torch.isfinite(p).all().item() for p in with_small.model.state_dict().values()]
        return [results[0].skipped, results[1].skipped, *flushed]


def start_module(module: nn.Module, context: cl.Context, case: Case) -> cl.Engine:
    with patch.object(build, "CHUNK_BYTES", case.chunk_bytes):
        return cl.initialize(module, context=context)


def test_a_weight_read_past_its_gate_is_that_of_the_last_step() -> None:
    """No gate stands before a functional read of a weight; the first forward has shown it."""
    for first, second, *flushed in run_world(past_the_gate, 2):
        assert not first and not second and all(flushed)


def late_reads(env: RankEnv) -> list[bool]:
    """Whether steps are skipped, of which all but the first read a weight past its gate."""
    with env.launch(SGD | dict(zero=dict(stage=1))) as context:
        torch.manual_seed(0)
        model = Odd()
        model.calls = 0
        engine = start_module(model, context, Case(chunk_bytes=8 * 32))
        return [engine.train_step(batch_of(env.rank)).skipped for _ in range(5)]


def test_a_later_step_that_first_reads_a_weight_past_its_gate_has_no_number_and_is_skipped() -> None:
    """The one after it is watched, and from then on the read is that of the last step."""
    assert run_world(late_reads, 2) == [[False, True, False, False, False]] * 2


@pytest.mark.parametrize("before", WeightState)
@pytest.mark.parametrize("after", WeightState)
def test_weights_make_only_legal_moves(before: WeightState, after: WeightState) -> None:
    chunk = _chunk()
    chunk.weights = before
    if (before, after) in LEGAL_WEIGHT:
        chunk.move_weights(after)
        assert chunk.weights is after
    else:
        with pytest.raises(AssertionError, match=f"{before} -> {after}"):
            chunk.move_weights(after)


# ---- bytes and memory ----


def ledger(env: RankEnv, case: Case) -> list[tuple[str, str, int, int]]:
    return parallel_steps(env, case)[1]


def numel_of(case: Case, world_size: int) -> int:
    ordered = dict(case.config.get("zero", {})).get("sum_order") == "ordered"
    return chunk_numel([v.numel() for v in initial_values(case).values()], world_size, ordered=ordered)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_a_step_are_the_formula(world_size: int, accumulation: int, precision: str) -> None:
    """Stage 1: reduce-scatter of each gradient chunk, all-gather of each weight chunk, once a step: (r + w) P."""
    config = dict(gradient_accumulation=accumulation, precision=precision)
    case = sharded(Case(steps=1, config=config), "1")
    numel, parameters = numel_of(case, world_size), len(initial_values(case))
    widths = dict(fp64=(8, 8), bf16=(4, 2))[precision]
    expected = {
        ("reduce_scatter", "data", 1, numel * widths[0]),
        ("all_gather", "data", 1, numel * widths[1]),
        ("all_reduce", "world", 1, (7 + parameters) * 8),
    }
    for rows in run_world(ledger, world_size, case):
        assert set(rows) == expected


@pytest.mark.parametrize("kind", ["2", "2 by micro-batch", "0 ordered", "2 ordered"])
def test_bytes_of_reductions_by_micro_batch_are_the_formula(kind: str) -> None:
    """(k r + w) P; ordered stage 0 gathers gradients in the place of weights, and its norms are a sum of blocks."""
    k = 3
    case = sharded(Case(steps=1, config=dict(gradient_accumulation=k, precision="bf16")), kind)
    numel, values = numel_of(case, 2), initial_values(case)
    reductions = 1 if kind == "2" else k
    blocks = sum(-(-v.numel() // 1024) for v in values.values()) if "ordered" in kind else 1
    expected = {
        ("reduce_scatter", "data", reductions, reductions * numel * 4),
        ("all_gather", "data", 1, numel * (4 if kind == "0 ordered" else 2)),
        ("all_reduce", "world", 1, (6 + len(values) + blocks) * 8),
    }
    for rows in run_world(ledger, 2, case):
        assert set(rows) == expected


def memory(env: RankEnv, case: Case) -> list[tuple[str, int, int]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = case.batch(0)
        cut = context.local_batch(case.global_batch)
        engine.train_step((inputs[cut], labels[cut]))
        return [(row.kind, row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize(("precision", "w", "m", "g"), [("fp32", 4, 0, 4), ("bf16", 2, 4, 4)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_p6_memory_of_stage_1_is_the_formula(
    world_size: int, precision: str, w: int, m: int, g: int, backend: str
) -> None:
    """(w + g) P + (m + 2 g) P / W of AdamW, and, where ranks share no memory, room for what the others send."""
    case = sharded(Case(config=dict(precision=precision, optimizer=ADAMW, backend=backend)), "1")
    numel = numel_of(case, world_size)
    for rows in run_world(memory, world_size, case):
        assert {kind: peak for kind, peak, _ in rows} == {
            "weights": w * numel,
            "masters": m * numel // world_size,
            "gradients": g * numel,
            "optimizer": 2 * g * numel // world_size,
            "staging": g * (numel - numel // world_size) if backend == "gloo" else 0,
        }
        assert all(peak == forecast for _, peak, forecast in rows)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_p6_memory_of_stage_2_is_the_formula(world_size: int, backend: str) -> None:
    """w P + (m + g + 2 g) P / W of AdamW, a slot for the gradient that fills, and for what the others send of it."""
    config = dict(precision="bf16", optimizer=ADAMW, gradient_accumulation=2, backend=backend)
    case = sharded(Case(config=config), "2 by micro-batch")
    numel = numel_of(case, world_size)
    for rows in run_world(memory, world_size, case):
        assert {kind: peak for kind, peak, _ in rows} == {
            "weights": 2 * numel,
            "masters": 4 * numel // world_size,
            "gradients": 4 * numel // world_size,
            "optimizer": 8 * numel // world_size,
            "staging": 4 * (numel + (numel - numel // world_size if backend == "gloo" else 0)),
        }
        assert all(peak == forecast for _, peak, forecast in rows)


def own_loop(env: RankEnv, kind: str) -> dict[str, Tensor]:
    """The Colossal-AI manner, two backwards a step, of which the second has no gradient for half the parameters."""
    with env.launch(SGD | dict(zero=KINDS[kind])) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context)
        for first in (env.rank, 0):
            inputs, labels = batch_of(first)
            loss = nn.functional.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten())
            engine.backward(loss, labels.numel())
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("kind", ["1", "2 by micro-batch", "0 ordered", "2 ordered", "3", "3 kept"])
def test_a_users_own_loop_is_the_same_at_every_stage(kind: str) -> None:
    (expected, _) = run_world(own_loop, 2, "0")
    for state in run_world(own_loop, 2, kind):
        assert all(torch.allclose(state[name], value, rtol=1e-12, atol=0) for name, value in expected.items())


# ---- checkpoints ----


Moments = dict[str, dict[str, Tensor]]


def assert_same_moments(found: Moments, expected: Moments) -> None:
    """State of an optimizer, of every parameter, to the bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys()
        assert all(torch.equal(value, found[name][kind]) for kind, value in values.items()), name


def assert_same_state(
    found: tuple[dict[str, Tensor], Moments], expected: tuple[dict[str, Tensor], Moments]
) -> None:
    """`full_state_dict` and `full_optimizer_state`, to the bit."""
    assert found[0].keys() == expected[0].keys()
    assert [name for name, value in expected[0].items() if not torch.equal(value, found[0][name])] == []
    assert_same_moments(found[1], expected[1])


def saves(env: RankEnv, case: Case, directory: str) -> Any:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = case.batch(0)
        cut = context.local_batch(case.global_batch)
        engine.train_step((inputs[cut], labels[cut]))
        engine.save(directory)
        return engine.full_state_dict(), engine.full_optimizer_state()


def loads(env: RankEnv, case: Case, directory: str) -> Any:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        engine.load(directory)
        loaded = engine.full_state_dict(), engine.full_optimizer_state()
        inputs, labels = case.batch(1)
        cut = context.local_batch(case.global_batch)
        assert not engine.train_step((inputs[cut], labels[cut])).skipped
        return loaded


SAVED = Case(config=dict(precision="bf16", optimizer=ADAMW), chunk_bytes=SMALL // 2, vocabulary=VOCABULARY)
MESHES = {
    "0 on 1": (1, SAVED),
    "0 on 4": (4, SAVED),
    "1 on 2": (2, sharded(SAVED, "1")),
    "1 on 4": (4, sharded(SAVED, "1", chunk_bytes=None)),
    "1 on 2 x 2": (4, sharded(SAVED, "1", tensor=2)),
    "2 ordered on 2": (2, sharded(SAVED, "2 ordered")),
    "3 on 2": (2, sharded(SAVED, "3")),
    "3 on 2 x 2": (4, sharded(SAVED, "3", tensor=2)),
}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("0 on 1", "1 on 2"),
        ("1 on 2", "1 on 4"),
        ("1 on 4", "1 on 2 x 2"),
        ("1 on 2 x 2", "2 ordered on 2"),
        ("2 ordered on 2", "3 on 2"),
        ("3 on 2", "3 on 2 x 2"),
        ("3 on 2 x 2", "0 on 1"),
    ],
)
def test_p4_a_checkpoint_of_any_stage_and_mesh_is_the_same_on_any_other(
    here: str, there: str, tmp_path: Path
) -> None:
    ranks, case = MESHES[here]
    saved = run_world(saves, ranks, case, str(tmp_path))[0]
    ranks, case = MESHES[there]
    for loaded in run_world(loads, ranks, case, str(tmp_path)):
        assert_same_state(loaded, saved)


# ---- what is refused ----


def refused(env: RankEnv, kind: str) -> None:
    with env.launch(SGD | dict(optimizer=dict(type=kind), zero=dict(stage=1))) as context:
        cl.initialize(nn.Embedding(8, 8), context=context)


def test_an_optimizer_that_needs_whole_tensors_is_refused_by_name() -> None:
    with pytest.raises(WorldError, match="lamb needs whole tensors, and each rank holds a part"):
        run_world(refused, 2, "lamb")
