"""Packing places every parameter once, in order, by key, aligned, in chunks that cut into equal shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colossal_lite.memory.chunk import LEGAL, Chunk, GradientState, Groups
from colossal_lite.memory.pack import ENTRY_ALIGN_NUMEL, SHARD_BLOCK_NUMEL, Item, pack
from colossal_lite.mesh import Mesh

items = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 2)), min_size=1, max_size=30).map(
    lambda rows: [Item(f"p{i}", numel, key) for i, (numel, key) in enumerate(rows)]
)


@given(items, st.integers(1, 4000), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_parameter_lies_once_in_forward_order_in_a_chunk_of_its_key(
    found: list[Item], target: int, parts: int
) -> None:
    chunks = pack(found, target_numel=target, parts=parts)
    by_name = {item.name: item for item in found}
    order = {item.name: i for i, item in enumerate(found)}
    placed = [entry.name for chunk in chunks for entry in chunk.entries]
    assert sorted(placed) == sorted(by_name)
    for i, chunk in enumerate(chunks):
        assert chunk.id == i and chunk.numel % (parts * SHARD_BLOCK_NUMEL) == 0
        positions = [order[entry.name] for entry in chunk.entries]
        assert positions == sorted(positions)
        end = 0
        for entry in chunk.entries:
            assert by_name[entry.name].key == chunk.key
            assert entry.stop - entry.start == by_name[entry.name].numel
            assert entry.start >= end and entry.start % ENTRY_ALIGN_NUMEL == 0
            end = entry.stop
            first, last = (
                entry.start // SHARD_BLOCK_NUMEL,
                max(entry.stop - 1, entry.start) // SHARD_BLOCK_NUMEL,
            )
            assert entry.start % SHARD_BLOCK_NUMEL == 0 or first == last, "a shard would cut a block"
        assert end <= chunk.numel
        assert len(chunk.entries) == 1 or end <= target
        assert [chunk.shard(parts, p) for p in range(parts)][-1][1] == chunk.numel
    firsts = [order[chunk.entries[0].name] for chunk in chunks]
    assert firsts == sorted(firsts)


def test_waste_is_under_one_percent_for_a_gpt_of_11_million_parameters() -> None:
    width, layers, vocabulary = 384, 6, 2048
    shapes = [vocabulary * width, 256 * width]
    for _ in range(layers):
        shapes += [width, width, 3 * width * width, 3 * width, width * width, width]
        shapes += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    chunks = pack([Item(str(i), n) for i, n in enumerate(shapes)], target_numel=2 << 20, parts=8)
    stored = sum(chunk.numel for chunk in chunks)
    assert sum(chunk.used_numel for chunk in chunks) == sum(shapes) and stored <= 1.01 * sum(shapes)


def _chunk() -> Chunk:
    (spec,) = pack([Item("a", 6), Item("b", 5)], target_numel=100)
    return Chunk(
        spec,
        Groups(*[Mesh.serial().axis("data")] * 4),
        value_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        gradient_dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_parameters_become_views_of_the_chunk_and_keep_their_identity() -> None:
    chunk = _chunk()
    parameters = {"a": nn.Parameter(torch.rand(2, 3)), "b": nn.Parameter(torch.rand(5))}
    before = {name: (id(p), p.detach().clone()) for name, p in parameters.items()}
    chunk.adopt(parameters, {name: p.detach() for name, p in parameters.items()})
    for entry in chunk.spec.entries:
        identity, value = before[entry.name]
        parameter = parameters[entry.name]
        assert id(parameter) == identity and parameter.dtype == torch.bfloat16
        assert torch.equal(chunk.master[entry.start : entry.stop].view(value.shape), value), (
            "the master keeps every bit"
        )
        assert torch.equal(parameter.detach(), value.bfloat16())
        assert parameter.data_ptr() == chunk.value[entry.start :].data_ptr()


@given(st.lists(st.sampled_from(list(GradientState)), max_size=12))
def test_a_gradient_buffer_makes_only_legal_moves(moves: list[GradientState]) -> None:
    chunk = _chunk()
    for state in moves:
        before = chunk.state
        if (before, state) in LEGAL:
            chunk.move(state)
            assert chunk.state is state
        else:
            with pytest.raises(AssertionError, match=f"{before} -> {state}"):
                chunk.move(state)
            assert chunk.state is before


def test_gradients_of_micro_batches_add_up_and_last_steps_numbers_do_not_leak() -> None:
    chunk = _chunk()
    for scale in (1.0, 10.0):
        chunk.accept(0, torch.full((2, 3), scale))
        chunk.accept(0, torch.full((2, 3), scale))
        if scale == 1.0:
            chunk.accept(1, torch.ones(5))
        chunk.start_reduce()
        chunk.finish_reduce()
        chunk.conclude()
        first, second = chunk.spec.entries
        assert (chunk.gradient[first.start : first.stop] == 2 * scale).all()
        assert (chunk.gradient[second.start : second.stop] == (1.0 if scale == 1.0 else 0.0)).all()
        squares = float(chunk.squares())
        assert squares == pytest.approx(6 * 4 * scale**2 + (5 if scale == 1.0 else 0), rel=1e-6)
        chunk.clear()
