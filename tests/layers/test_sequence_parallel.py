"""Sequence parallelism is the serial run in every mode; bytes are the formula; causal work is balanced."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import TORCH, Mask
from colossal_lite.layers.ring_attention import seen
from colossal_lite.layers.sequence_parallel import Pieces, SequenceParallel
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.parallelize import facts_of, parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.layers.test_token_parts import Averages
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.parity import (
    SIZES,
    Case,
    assert_no_further,
    assert_other_ways,
    assert_parity,
    initial_values,
    ledger,
    relative_error,
)
from tests.shared.pool import RankEnv, WorldError, run_world

CAUSAL = ("ring", "allgather_kv", "ulysses", "usp")
MODES = pytest.mark.parametrize("mode", CAUSAL)
ALL_MODES = pytest.mark.parametrize("mode", (*CAUSAL, "ring_full"))
CASE = Case(world_size=2, sequence=2)
USP = Case(world_size=4, sequence=4, sequence_mode="usp", ulysses=2, tokens=16)


def case_of(mode: str) -> Case:
    """The smallest case in which a mode has all its parts."""
    return USP if mode == "usp" else replace(CASE, sequence_mode=mode, causal=mode != "ring_full")


@MODES
@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_every_gradient_is_the_serial_one(family: str, tied: bool, mode: str) -> None:
    assert_parity(case_of(mode), family=family, tied=tied)


@ALL_MODES
def test_every_gradient_is_the_serial_one_of_full_attention(mode: str) -> None:
    assert_parity(case_of(mode), causal=False, family="llama", tied=False, ragged=True)


SIZES_OF_RANKS = {
    "ring 4": Case(world_size=4, sequence=4, family="llama", tokens=16, ragged=True),
    "gather of 4": Case(world_size=4, sequence=4, family="llama", sequence_mode="allgather_kv", tokens=16),
    "ulysses 4, two key heads": Case(world_size=4, sequence=4, family="llama", sequence_mode="ulysses"),
    "ring 1 x ulysses 2": replace(CASE, sequence_mode="usp", ulysses=2),
    "ring 2 x ulysses 1": replace(CASE, sequence_mode="usp", ulysses=1),
    "ring 2 x ulysses 4, two key heads": replace(USP, world_size=8, sequence=8, ulysses=4, family="llama"),
    "full ring 4": Case(world_size=4, sequence=4, family="llama", sequence_mode="ring_full", causal=False),
    "ring 4 of full attention": Case(world_size=4, sequence=4, tokens=16, causal=False, dropout=0.2),
    "ring 3": Case(world_size=3, sequence=3, tokens=12, dropout=0.2, ragged=True),
}


@pytest.mark.parametrize("name", SIZES_OF_RANKS)
def test_every_gradient_is_the_serial_one_on(name: str) -> None:
    assert_parity(SIZES_OF_RANKS[name], steps=1)


@pytest.mark.parametrize("mode", ["usp", "allgather_kv", "ring_full"])
def test_16_bits_are_no_further_from_the_truth_than_a_plain_run(mode: str) -> None:
    assert_no_further(case_of(mode), config=dict(precision="bf16"), steps=2)


# ---- beside everything else ----


TENSOR: dict[str, dict[str, Any]] = {
    "none": {},
    "1d": dict(tensor=2),
    "1d, whole": dict(tensor=2, sequence_parallel=False),
    "2d": dict(tensor=4, mode="2d"),
}


def together(row: Choice) -> Case:
    inner = case_of(row["mode"])
    tensor = TENSOR[row["tensor"]]
    zero = dict(stage=row["zero"]) | (dict(reduce_every="micro_batch") if row["zero"] == 2 else {})
    config = dict(
        clip_grad_norm=0.05, gradient_accumulation=2, zero=zero, activation_checkpoint=row["recompute"]
    )
    world_size = inner.sequence * tensor.get("tensor", 1) * row["data"]
    same = {name: row[name] for name in ("family", "tied", "causal", "dropout")}
    return replace(
        inner, **tensor, **same, world_size=world_size, tokens=16, ragged=True, global_batch=8, steps=1,
        config=config,
    )  # fmt: skip


TOGETHER = covering_array(
    dict(
        mode=(*CAUSAL, "ring_full"),
        causal=(True, False),
        tensor=tuple(TENSOR),
        data=(1, 2),
        zero=(0, 1, 2),
        recompute=("none", "full"),
        dropout=(0.0, 0.2),
        family=("gpt2", "llama"),
        tied=(True, False),
    ),
    lambda row: together(row).world_size <= 8 and not (row["mode"] == "ring_full" and row["causal"]),
)


@pytest.mark.parametrize("row", TOGETHER, ids=name_of)
def test_every_gradient_is_the_serial_one_together_with(row: Choice) -> None:
    assert_parity(together(row))


# ---- documents ----


def with_documents(env: RankEnv, case: Case) -> dict[str, Tensor]:
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        engine.forward_backward(packed(case))
        return engine.full_gradients()


def packed(case: Case) -> dict[str, Tensor]:
    inputs, labels = case.batch(0)
    documents = (torch.arange(inputs.shape[1])[None] >= torch.tensor([[3], [5], [7], [8], [9], [12]])).long()
    return dict(input_ids=inputs, labels=labels, attention_mask=documents)


@ALL_MODES
def test_packed_documents_do_not_see_each_other(mode: str) -> None:
    case = replace(case_of(mode), tokens=12 if mode != "usp" else 16)
    batch = packed(case)
    model = case.model().double()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(case).items():
            named[name].copy_(value)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    for gradients in run_world(with_documents, case.world_size, case):
        for name, parameter in named.items():
            assert parameter.grad is not None
            assert relative_error(gradients[name], parameter.grad, 1.0) < 1e-10, name


# ---- bytes and balance ----


def micro_batch_payload(
    sequence: SequenceParallel, *, layers: int, heads: int, kv_heads: int, head_width: int, batch: int, tokens: int,
    itemsize: int,
) -> tuple[LedgerRow, ...]:  # fmt: skip
    """Calls and payload bytes on the sequence axis of forward and backward of one micro-batch without documents
    (parallel.md 1.7).

    `heads` and `kv_heads`: those of this rank (a share where the tensor axis cuts them); `tokens`: of a whole sequence.
    """
    inner, n = sequence.heads.size, sequence.ring.size
    rows: list[tuple[str, str, int, int]] = []
    head_bytes = (
        batch * tokens // sequence.comm.size * head_width * itemsize
    )  # of one head of this rank's tokens
    sent = kv_heads if kv_heads % inner == 0 else inner
    if inner > 1:
        rows.append(("all_to_all", sequence.heads.axis, 4, 2 * (2 * heads + 2 * sent) * head_bytes))
    both_bytes = (
        2 * sent * head_bytes
    )  # keys and values between the exchanges: 1/U of the heads of U times the tokens
    gradient_bytes = both_bytes // itemsize * max(itemsize, 4)
    if n > 1 and sequence.mode == "allgather_kv":
        rows.append(("all_gather", sequence.ring.axis, 2, 2 * n * both_bytes))
        rows.append(("reduce_scatter", sequence.ring.axis, 1, n * gradient_bytes))
    elif n > 1:  # in forward ring_full sends keys, then values
        hops = (n - 1) * (4 if sequence.mode == "ring_full" else 3)
        sizes = (n - 1) * (2 * both_bytes + gradient_bytes)
        rows.append(("send", sequence.ring.axis, hops, sizes))
    return tuple(LedgerRow(name, axis, layers * calls, layers * size) for name, axis, calls, size in rows)


def formula(case: Case, rank: int) -> set[tuple[str, str, int, int]]:
    ulysses = case.ulysses if case.sequence_mode == "usp" else None
    layout = MeshLayout.build(sequence=case.sequence, tensor=case.tensor, ulysses=ulysses)
    rows = micro_batch_payload(
        SequenceParallel.on(Mesh.recording(layout, rank), case.sequence_mode),
        layers=SIZES["layers"],
        heads=SIZES["heads"] // case.tensor,
        kv_heads=2 // case.tensor,
        head_width=SIZES["width"] // SIZES["heads"],
        batch=case.global_batch,
        tokens=case.tokens,
        itemsize=8,
    )
    return {(r.operation, r.axis, r.calls, r.payload_bytes) for r in rows}


@ALL_MODES
@pytest.mark.parametrize(("size", "tensor"), [(2, 1), (4, 1), (2, 2)])
def test_bytes_of_a_step_are_the_formula(mode: str, size: int, tensor: int) -> None:
    case = Case(
        family="llama", world_size=size * tensor, sequence=size, tensor=tensor, sequence_mode=mode, ulysses=2,
        steps=1, tokens=16, causal=mode != "ring_full",
    )  # fmt: skip
    for rank, rows in enumerate(run_world(ledger, case.world_size, case)):
        in_layers = {row for row in rows if row[1].startswith("sequence") and row[0] != "all_reduce"}
        assert in_layers == formula(case, rank)


@ALL_MODES
@pytest.mark.parametrize("size", [8, 64])
def test_a_world_that_is_not_here_moves_what_the_formula_says(mode: str, size: int) -> None:
    heads, ulysses = 64, 4 if mode == "usp" else None
    config = GPTConfig(
        vocabulary=100,
        layers=2,
        heads=heads,
        width=128,
        sequence=256,
        kv_heads=16,
        causal=mode != "ring_full",
    )
    mesh = Mesh.recording(MeshLayout.build(sequence=size, ulysses=ulysses), rank=size - 1)
    with torch.device("meta"):
        model = GPT(config)
    made = parallelize(model, mesh, sequence_mode=mode)
    ids = torch.zeros(2, 256, dtype=torch.int64, device="meta")
    part = made.strategy.local_part(Batch((ids,), {}, labels=ids, samples=torch.arange(2, device="meta")))
    made.strategy.cross_entropy(made.ops, model(*part.args, **part.kwargs), part.labels)[0].backward()
    expected = micro_batch_payload(
        SequenceParallel.on(mesh, mode), layers=2, heads=heads, kv_heads=16, head_width=2, batch=2, tokens=256,
        itemsize=4,
    )  # fmt: skip
    assert set(mesh.ledger.rows()) == set(expected) != set()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_of_a_zigzag_is_the_same_on_every_rank_in_every_step(size: int) -> None:
    tokens = 8
    for step in range(1, size):
        parts = [seen(rank, (rank - step) % size, tokens, True) for rank in range(size)]
        areas = {len(range(tokens)[part.queries]) * len(range(tokens)[part.keys]) for part in parts}
        assert areas == {tokens**2 // 2} and not any(part.causal for part in parts)
    assert seen(0, 0, tokens, True) == (slice(0, tokens), slice(0, tokens), True)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_scores_of_a_zigzag_are_as_many_on_every_rank(size: int) -> None:
    """Counted, not by areas: t (t + 1) / 2 of one's own t tokens, and half of those with each other rank."""
    tokens = 2 * 4
    scores = []
    for rank in range(size):
        count = 0
        for source in range(size):
            part = seen(rank, source, tokens, True)
            queries, keys = range(tokens)[part.queries], range(tokens)[part.keys]
            count += sum(not part.causal or key <= query for query, key in product(queries, keys))
        scores.append(count)
    assert set(scores) == {tokens * (tokens + 1) // 2 + (size - 1) * tokens**2 // 2}
    assert sum(scores) == size * tokens * (size * tokens + 1) // 2, "all that causal attention sees, once"


@pytest.mark.parametrize(("ring", "heads"), [(2, 1), (3, 1), (8, 1), (1, 2), (2, 2), (2, 3), (4, 4)])
def test_what_a_ring_step_computes_is_what_causal_attention_sees(ring: int, heads: int) -> None:
    pieces = Pieces.of(ring, heads, "usp")
    assert sorted(piece for held in pieces.by_rank for piece in held) == list(range(2 * ring * heads))
    groups = [sum(pieces.by_rank[r * heads : (r + 1) * heads], ()) for r in range(ring)]
    assert all(list(group) == sorted(group) for group in groups), "local order is global order"
    computed = set()
    for coord, source in product(range(ring), repeat=2):
        part = seen(coord, source, 2 * heads, True)
        for query, key in product(groups[coord][part.queries], groups[source][part.keys]):
            if not part.causal or key <= query:
                assert (query, key) not in computed
                computed.add((query, key))
    assert computed == {(q, k) for q in range(2 * ring * heads) for k in range(q + 1)}


def test_tokens_come_back_in_order() -> None:
    layout = MeshLayout.build(sequence=6, ulysses=2)
    ranks = [SequenceParallel.on(Mesh.recording(layout, rank), "usp") for rank in range(6)]
    whole = torch.arange(24)
    assert torch.equal(ranks[0].in_order(torch.cat([rank.take(whole, 0) for rank in ranks]), 0), whole)


# ---- other ways to use it, and bad input ----


@pytest.mark.parametrize("argument", ["softcap", "bias", "window", "kv_prefix"])
def test_what_attention_cannot_do_across_ranks_is_refused_by_name(argument: str) -> None:
    sequence = SequenceParallel.on(Mesh.recording(MeshLayout.build(sequence=2)), "ring")
    attend, (q, k, v) = sequence.ops(TORCH).attend, torch.rand(3, 1, 4, 2, 8)
    assert attend(q, k, v, mask=Mask(True), **{argument: None}).shape == q.shape
    with pytest.raises(
        ValueError, match=f"attend: {argument} across sequence ranks .mode 'ring'. is not built; legal"
    ):
        attend(q, k, v, mask=Mask(True), **{argument: 2})


@ALL_MODES
def test_a_criterion_an_evaluation_and_an_own_loop_give_the_serial_numbers(mode: str) -> None:
    assert_other_ways(case_of(mode))


def refused(env: RankEnv, what: str) -> None:
    case = USP if env.world_size == 4 else CASE
    with env.launch(case.full_config) as context:
        if what == "model":
            cl.initialize(nn.Sequential(nn.Embedding(8, 8), Averages(), nn.Linear(8, 8)), context=context)
        if what == "causal":
            ring_full = dict(parallel=dict(sequence=dict(size=2, mode="ring_full")))
            env.launch(ring_full, model_facts=facts_of(CASE.model()))
        if what == "heads":
            cl.initialize(GPT(GPTConfig(**SIZES | dict(heads=3, width=12))), context=context)
        engine = cl.initialize(case.model, context=context)
        inputs, labels = case.batch(0)
        engine.train_step((inputs[:, :10], labels[:, :10]))


REFUSALS = {
    "causal": (2, "parallel.sequence.mode = 'ring_full'.*attention is causal; legal: ring, ulysses, usp"),
    "model": (2, "sequence: .*test_token_parts.py:.*mean of .*cannot be computed on a part.*or sequence=1"),
    "heads": (4, "parallel.sequence.ulysses = 2: 3 heads do not divide into 2 parts; legal: 1"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_in_words_on_every_rank(what: str) -> None:
    world_size, words = REFUSALS[what]
    with pytest.raises(WorldError, match=words) as error:
        run_world(refused, world_size, what)
    assert error.value.ranks("raised") == list(range(world_size))
