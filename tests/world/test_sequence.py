"""Sequence parallelism is the serial run: ring, all-gather of keys and values, Ulysses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.layout import MeshLayout
from colossal_lite.mesh import Mesh
from colossal_lite.parallel.sequence import Pieces, SequenceParallel, micro_batch_payload
from tests.parity import (
    SIZES,
    Case,
    assert_other_ways,
    assert_parity,
    initial_values,
    ledger,
    relative_error,
)
from tests.pool import RankEnv, WorldError, run_world

MODES = pytest.mark.parametrize("mode", ["ring", "allgather_kv", "ulysses"])
CASE = Case(world_size=2, sequence=2)


@MODES
@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_every_gradient_is_the_serial_one(family: str, tied: bool, mode: str) -> None:
    assert_parity(CASE, family=family, tied=tied, sequence_mode=mode)


COMBINATIONS = {
    "everything": Case(
        world_size=4,
        sequence=2,
        dropout=0.2,
        ragged=True,
        global_batch=5,
        config=dict(clip_grad_norm=0.05, gradient_accumulation=2),
    ),
    "ZeRO-2": Case(
        world_size=4,
        sequence=2,
        ragged=True,
        config=dict(clip_grad_norm=0.05, zero=dict(stage=2, reduce="micro_batch"), gradient_accumulation=2),
    ),
    "tensor 2, cut": Case(world_size=4, sequence=2, tensor=2, dropout=0.1, config=dict(clip_grad_norm=0.05)),
    "tensor 2, whole": Case(world_size=4, sequence=2, tensor=2, sequence_parallel=False),
}


@MODES
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one_with(name: str, mode: str) -> None:
    assert_parity(replace(COMBINATIONS[name], sequence_mode=mode))


@pytest.mark.parametrize("mode", ["allgather_kv", "ulysses"])
def test_four_ranks_share_two_key_heads(mode: str) -> None:
    assert_parity(
        CASE, world_size=4, sequence=4, sequence_mode=mode, family="llama", tied=False, steps=1, tokens=16
    )


def test_a_ring_of_four_is_the_serial_run() -> None:
    assert_parity(CASE, world_size=4, sequence=4, family="llama", tied=True, tokens=16, ragged=True)


def test_sequence_and_2d_tensor_parallelism_together() -> None:
    assert_parity(Case(world_size=8, sequence=2, tensor=4, mode="2d", dropout=0.1, ragged=True))


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


@MODES
def test_packed_documents_do_not_see_each_other(mode: str) -> None:
    case = replace(CASE, sequence_mode=mode)
    batch = packed(case)
    model = case.model().double()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(case).items():
            named[name].copy_(value)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    for gradients in run_world(with_documents, 2, case):
        for name, parameter in named.items():
            assert parameter.grad is not None
            assert relative_error(gradients[name], parameter.grad, 1.0) < 1e-10, name


# ---- bytes and balance ----


@MODES
@pytest.mark.parametrize(("size", "tensor"), [(2, 1), (4, 1), (2, 2)])
def test_bytes_of_a_step_are_the_formula(mode: str, size: int, tensor: int) -> None:
    case = Case(
        family="llama",
        world_size=size * tensor,
        sequence=size,
        tensor=tensor,
        sequence_mode=mode,
        steps=1,
        tokens=16,
    )
    layout = MeshLayout.build(sequence=size, tensor=tensor)
    for rank, rows in enumerate(run_world(ledger, case.world_size, case)):
        sequence = SequenceParallel(Mesh.recording(layout, rank).axis("sequence"), mode)
        expected = micro_batch_payload(
            sequence,
            layers=SIZES["layers"],
            heads=SIZES["heads"] // tensor,
            kv_heads=2 // tensor,
            head_width=SIZES["width"] // SIZES["heads"],
            batch=case.global_batch,
            tokens=16,
            itemsize=8,
        )
        in_layers = {row for row in rows if row[1] == "sequence" and row[0] != "all_reduce"}
        assert in_layers == {(r.operation, r.axis, r.calls, r.payload_bytes) for r in expected}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_of_a_zigzag_is_the_same_on_every_rank(size: int) -> None:
    pieces = Pieces.of(size, "ring")
    work = [
        sum(2 * piece + 1 for piece in held) for held in pieces.by_rank
    ]  # pairs of half blocks a query piece sees
    assert len(set(work)) == 1
    assert sorted(piece for held in pieces.by_rank for piece in held) == list(range(2 * size))
    comm = Mesh.recording(MeshLayout.build(sequence=size)).axis("sequence")
    sequence = SequenceParallel(comm, "ring")
    whole = torch.arange(4 * size)
    parts = [
        SequenceParallel(Mesh.recording(MeshLayout.build(sequence=size), r).axis("sequence"), "ring")
        for r in range(size)
    ]
    assert torch.equal(sequence.in_order(torch.cat([part.take(whole, 0) for part in parts]), 0), whole)


# ---- other ways to use it, and bad input ----


@MODES
def test_a_criterion_an_evaluation_and_an_own_loop_give_the_serial_numbers(mode: str) -> None:
    assert_other_ways(CASE, sequence_mode=mode)


def refused(env: RankEnv, what: str) -> None:
    with env.launch(CASE.full_config) as context:
        if what == "model":
            cl.initialize(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)), context=context)
        engine = cl.initialize(CASE.model, context=context)
        inputs, labels = CASE.batch(0)
        engine.train_step((inputs[:, :10], labels[:, :10]))


REFUSALS = {
    "model": "sequence parallelism \\(mode 'ring'\\) of Sequential",
    "tokens": "10 tokens do not divide into 4 pieces.*multiple of 4",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_in_words_on_every_rank(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, 2, what)
    assert error.value.ranks("raised") == [0, 1]
