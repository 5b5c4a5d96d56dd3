"""Packing places every parameter once, in order, by key, aligned, in chunks that cut into equal shards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colossal_lite.config.config import Config
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import LEGAL, Chunk, GradientState
from colossal_lite.memory.packing import (
    ENTRY_ALIGN_NUMEL,
    SHARD_ALIGN_NUMEL,
    SHARD_BLOCK_NUMEL,
    ChunkKey,
    ChunkSpec,
    Item,
    pack,
)
from colossal_lite.memory.weight_chunk import Groups
from colossal_lite.models.gpt import GPT, GPTConfig
from colossal_lite.numerics.precision import ChunkTypes
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.zero.build_chunks import pack_chunks

items = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 2)), min_size=1, max_size=30).map(
    lambda rows: [Item(f"p{i}", numel, key) for i, (numel, key) in enumerate(rows)]
)


@given(
    items,
    st.integers(1, 4000),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([SHARD_ALIGN_NUMEL, SHARD_BLOCK_NUMEL]),
)
def test_every_parameter_lies_once_in_forward_order_in_a_chunk_of_its_key(
    found: list[Item], target: int, most_parts: int, shard_numel: int
) -> None:
    def parts_of(key: Any) -> int:
        return most_parts + key

    chunks = pack(found, target_numel=target, parts=parts_of, shard_numel=shard_numel)
    by_name = {item.name: item for item in found}
    order = {item.name: i for i, item in enumerate(found)}
    placed = [entry.name for chunk in chunks for entry in chunk.entries]
    assert sorted(placed) == sorted(by_name)
    for i, chunk in enumerate(chunks):
        parts = parts_of(chunk.key)
        assert chunk.id == i and chunk.numel % (parts * shard_numel) == 0
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


# ---- waste ----

NO_DECAY = [dict(match=match, weight_decay=0.0) for match in ("*.bias", "*norm*")]


def config_of(size: str) -> GPTConfig:
    """1.3B: of the size on which offload is measured."""
    sizes = dict(layers=24, heads=16, width=2048)
    return GPTConfig.gpt2(**sizes) if size == "1.3B" else GPTConfig.gpt2(size)


@cache
def model_of(size: str) -> tuple[dict[str, int], dict[str, ShardSpec], tuple[str, ...]]:
    """Elements and specs of the parameters of a GPT-2, and the names of its blocks."""
    with torch.device("meta"):
        model = GPT(config_of(size))
    numels = {name: p.numel() for name, p in model.named_parameters()}
    return numels, dict(parallelize(model, Mesh.serial()).specs), tuple(blocks_of(model))


def packed_of(size: str, ranks: int, stage: int, reduction: str, **parallel: Any) -> tuple[ChunkSpec, ...]:
    numels, specs, blocks = model_of(size)
    config = Config.load(
        dict(
            zero=dict(stage=stage, sum_order=reduction),
            precision="bf16",
            parallel=parallel or dict(data=ranks),
            optimizer=dict(type="adamw", weight_decay=0.1, groups=NO_DECAY),
        )
    )
    return pack_chunks(numels, specs, config, config.check_world(ranks).layout(), blocks=blocks)


def test_chunks_have_the_size_that_is_set_or_else_that_of_the_device() -> None:
    numels, specs, blocks = model_of("355M")

    def largest(chunk_bytes: str | None, device_type: str) -> tuple[int, int]:
        """Chunks, and the most elements of one with several parameters."""
        config = Config.load(dict(memory=dict(chunk_bytes=chunk_bytes)))
        layout = config.check_world(1).layout()
        packed = pack_chunks(numels, specs, config, layout, None, blocks, (), device_type)
        return len(packed), max(chunk.numel for chunk in packed if len(chunk.entries) > 1)

    for device_type in ("cpu", "cuda"):
        count, numel = largest("32MiB", device_type)
        assert largest("33554432B", device_type) == (count, numel) and 2**22 < numel <= 2**23
    (on_cpu, narrow), (on_cuda, wide) = largest(None, "cpu"), largest(None, "cuda")
    assert narrow <= 2**21 < 2**23 < wide <= 2**24 and on_cuda < count < on_cpu


def waste_of(packed: tuple[ChunkSpec, ...]) -> float:
    """What is stored beyond the parameters, as a share of them."""
    return sum(chunk.numel for chunk in packed) / sum(chunk.used_numel for chunk in packed) - 1


RANKS = (2, 3, 8, 31, 64, 100, 128, 256, 384, 512)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["124M", "355M", "1.3B"])
def test_waste_is_under_one_percent_at_every_size_of_a_world(size: str, stage: int) -> None:
    """With biases and norms in a group without weight decay, and block by block where weights are sharded."""
    found = {ranks: waste_of(packed_of(size, ranks, stage, "fast")) for ranks in RANKS}
    assert all(waste <= 0.01 for waste in found.values()), found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", ["124M", "355M", "1.3B"])
def test_ordered_sums_waste_at_most_a_block_of_each_shard(size: str, stage: int) -> None:
    """No block of a sum whose bits are fixed may be cut: a chunk has at most a block more than it needs for each rank,
    and each entry less than one; so waste is under 1 % where chunks are large beside the world."""
    for ranks in RANKS:
        packed = packed_of(size, ranks, stage, "ordered")
        for chunk in packed:
            needed = (
                sum(-(-(e.stop - e.start) // SHARD_BLOCK_NUMEL) for e in chunk.entries) * SHARD_BLOCK_NUMEL
            )
            assert chunk.numel < needed + ranks * SHARD_BLOCK_NUMEL
        assert waste_of(packed) <= 0.01 or ranks > (32 if size == "124M" else 48 if size == "355M" else 128)


def test_ranks_that_do_not_sum_a_gradient_do_not_pad_it() -> None:
    """Of tensor parallelism each rank has pieces of its own; only those of one piece cut it."""
    numels, _, blocks = model_of("124M")
    sizes = dict(data=8, tensor=dict(size=4))
    config = Config.load(dict(zero=dict(stage=1), precision="bf16", parallel=sizes))
    layout = config.check_world(32).layout()
    with torch.device("meta"):
        specs = parallelize(GPT(config_of("124M")), Mesh.recording(layout, 0)).specs
    local = {name: prod(specs[name].local_shape(layout)) for name in numels}
    packed = pack_chunks(local, specs, config, layout, blocks=blocks)
    axes = {chunk.key.sync_axes for chunk in packed if isinstance(chunk.key, ChunkKey)}
    assert len(axes) > 1, "some gradients are summed over the tensor axis too"
    for chunk in packed:
        assert isinstance(chunk.key, ChunkKey)
        parts = prod(dict(data=8, tensor=4).get(axis, 1) for axis in chunk.key.sync_axes)
        assert chunk.numel - chunk.entries[-1].stop < parts * SHARD_ALIGN_NUMEL


def _chunk() -> Chunk:
    (spec,) = pack([Item("a", 6), Item("b", 5)], target_numel=100)
    return Chunk(
        spec,
        Groups(*[Mesh.serial().axis("data")] * 4),
        types=ChunkTypes(torch.bfloat16, torch.float32, torch.float32),
        device=torch.device("cpu"),
    )


def test_bytes_on_the_wire_count_its_dtype_and_weights_that_travel_or_rest_in_another_are_refused_by_name() -> (
    None
):
    types = ChunkTypes(torch.bfloat16, torch.float32, torch.float32)
    assert types.wire_bytes(1000) == types.resting_bytes(1000) == 2000
    for name, changes in (
        ("wire=torch.int8", dict(wire=torch.int8)),
        ("storage=torch.float32", dict(storage=torch.float32)),
        ("scale_block=256", dict(scale_block=256)),
    ):
        with pytest.raises(ValueError, match=f"chunk: {name} is not built; legal: "):
            replace(types, **changes)


def test_parameters_become_views_of_the_chunk_and_keep_their_identity() -> None:
    chunk = _chunk()
    parameters = {"a": nn.Parameter(torch.rand(2, 3)), "b": nn.Parameter(torch.rand(5))}
    before = {name: (id(p), p.detach().clone()) for name, p in parameters.items()}
    chunk.adopt(parameters, lambda name, start, stop: before[name][1].view(-1)[start:stop])
    for entry in chunk.spec.entries:
        identity, value = before[entry.name]
        parameter = parameters[entry.name]
        assert id(parameter) == identity and parameter.dtype == torch.bfloat16
        assert torch.equal(chunk.master[entry.start : entry.stop].view(value.shape), value), (
            "the master keeps every bit"
        )
        assert torch.equal(parameter.detach(), value.bfloat16())
        assert parameter.data_ptr() == chunk.full_weight[entry.start :].data_ptr()


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
