"""World and model rules: what they let through can be built, and what they suggest is legal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.parallel_schema import ModelFacts, SequenceConfig, TensorConfig, token_parts
from colossal_lite.config.rules import (
    device_problems,
    legal_tensor_sizes,
    model_problems,
    nearest_factorisations,
    world_problems,
)
from colossal_lite.sharding.mesh_layout import MeshLayout

MODES = st.sampled_from(["1d", "2d", "2.5d", "3d"])
tensors = st.builds(TensorConfig, size=st.integers(1, 30), mode=MODES, depth=st.integers(1, 3))
sequences = st.builds(
    SequenceConfig,
    size=st.integers(1, 12),
    mode=st.sampled_from(["ring", "ulysses", "usp", "allgather_kv", "ring_full"]),
    ulysses=st.integers(1, 4),
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    parallel = {
        "data": draw(st.just("auto") | st.integers(1, 8)),
        "pipeline": draw(st.integers(1, 6)),
        "tensor": draw(tensors).model_dump(),
        "sequence": draw(sequences).model_dump(),
    }
    return Config.load({"parallel": parallel})


def layout_exists(config: Config, world_size: int) -> bool:
    """Whether the mesh itself can be built with so many ranks: the other statement of the same rules."""
    parallel = config.parallel
    inner = parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size
    data = world_size // inner if parallel.data == "auto" else parallel.data
    usp = parallel.sequence.mode == "usp" and parallel.sequence.size > 1
    try:
        layout = MeshLayout.build(
            pipeline=parallel.pipeline.size,
            data=max(data, 1),
            sequence=parallel.sequence.size,
            tensor=parallel.tensor.axis(),
            ulysses=parallel.sequence.ulysses if usp else None,
        )
    except ValueError:
        return False
    return data >= 1 and layout.world_size == world_size


@given(configs(), st.integers(1, 4), st.integers(0, 1))
def test_a_world_passes_exactly_when_its_mesh_can_be_built(config: Config, factor: int, off: int) -> None:
    parallel = config.parallel
    inner = parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size
    world_size = inner * factor + off
    if layout_exists(config, world_size):
        checked = config.check_world(world_size)
        assert checked.layout().world_size == world_size
        assert checked.parallel.data == world_size // inner
    else:
        with pytest.raises(ConfigError):
            config.check_world(world_size)


@given(configs(), st.integers(1, 200))
def test_every_suggested_factorisation_is_legal_and_fills_the_world(config: Config, world_size: int) -> None:
    found = nearest_factorisations(config.parallel, world_size)
    assert 1 <= len(found) <= 3 and len(set(found)) == len(found)
    for sizes in found:
        parallel = config.parallel.model_copy(
            update={
                "data": sizes.data,
                "pipeline": config.parallel.pipeline.model_copy(update={"size": sizes.pipeline}),
                "sequence": config.parallel.sequence.model_copy(update={"size": sizes.sequence}),
                "tensor": config.parallel.tensor.model_copy(update={"size": sizes.tensor}),
            }
        )
        assert not list(world_problems(parallel, world_size, {})), sizes


@given(configs())
def test_a_legal_configuration_is_its_own_nearest_factorisation(config: Config) -> None:
    parallel = config.parallel
    world_size = parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size
    if config.parallel.data == "auto" and layout_exists(config, world_size):
        best = nearest_factorisations(parallel, world_size)[0]
        assert best == (1, parallel.pipeline.size, parallel.sequence.size, parallel.tensor.size)


def test_suggestions_change_as_few_axes_as_they_can() -> None:
    parallel = Config.load({"parallel": {"pipeline": 2, "tensor": 3}}).parallel
    best = nearest_factorisations(parallel, 16)[0]
    assert (best.pipeline, best.sequence) == (2, 1) and best.tensor in (2, 4)


def test_suggestions_for_a_large_world_take_no_time() -> None:
    parallel = Config.load({"parallel": {"tensor": 7}}).parallel
    assert len(nearest_factorisations(parallel, 4096)) == 3


def test_all_faults_of_a_world_are_told_at_once() -> None:
    parallel = {"tensor": {"size": 3, "mode": "2d"}, "sequence": {"size": 4, "mode": "usp", "ulysses": 3}}
    with pytest.raises(ConfigError) as caught:
        Config.load({"parallel": parallel}).check_world(16)
    assert {problem.path for problem in caught.value.problems} == {
        "parallel.data",
        "parallel.tensor.size",
        "parallel.sequence.ulysses",
    }


def test_a_copy_is_cut_into_neighbours_that_keep_weights() -> None:
    zero = dict(stage=3, shard_size=4, reshard_after_forward=2)
    layout = Config.load({"zero": zero}).check_world(8).layout()
    assert layout.describe() == ("pipeline 1 x data 8 (replicate 2 x far 2 x near 2) x sequence 1 x tensor 1")
    assert layout.group(5, "data.near") == (4, 5) and layout.group(5, "data.far", "data.near") == (4, 5, 6, 7)


@pytest.mark.parametrize(
    "zero", [dict(stage=1, shard_size=2), dict(stage=1, shard_size=4), dict(shard_size=2), {}]
)
def test_the_data_axis_is_cut_where_there_are_several_copies(zero: dict[str, int]) -> None:
    layout = Config.load({"zero": zero}).check_world(4).layout()
    copies = " (replicate 2 x shard 2)" if zero == dict(stage=1, shard_size=2) else ""
    assert layout.describe() == f"pipeline 1 x data 4{copies} x sequence 1 x tensor 1"
    assert not copies or layout.group(0, "data.shard") == (0, 1), "a copy lies on neighbours"


@pytest.mark.parametrize(
    "tensor, sequence, described",
    [
        ({"size": 6}, {"size": 1}, "sequence 1 x tensor 6"),
        ({"size": 4, "mode": "2d", "depth": 3}, 2, "sequence 2 x tensor 4 (row 2 x column 2)"),
        ({"size": 8, "mode": "2.5d", "depth": 2}, 1, "sequence 1 x tensor 8 (depth 2 x row 2 x column 2)"),
        ({"size": 27, "mode": "3d"}, {"ulysses": 2}, "sequence 1 x tensor 27 (i 3 x j 3 x k 3)"),
        (1, {"size": 6, "mode": "usp", "ulysses": 2}, "sequence 6 (ring 3 x ulysses 2) x tensor 1"),
        (1, {"size": 6, "mode": "ring", "ulysses": 4}, "sequence 6 x tensor 1"),
    ],
)
def test_the_mesh_is_cut_as_the_modes_say(tensor: object, sequence: object, described: str) -> None:
    config = Config.load({"parallel": {"data": 1, "tensor": tensor, "sequence": sequence}})
    assert config.layout().describe() == f"pipeline 1 x data 1 x {described}"


def test_a_mesh_needs_a_number_of_data_ranks() -> None:
    with pytest.raises(ValueError, match="check_world"):
        Config.load({}).layout()


# ----------------------------------------------------------------------------------------------------- models

GPT2 = ModelFacts(
    layers=12, heads=12, kv_heads=12, width=768, ffn=3072, vocabulary=50257, sequence=1024, tied=True
)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 12, "pipeline": 12} | {"tensor": {"size": 4}},
        {"tensor": {"size": 4, "mode": "2d"}},
        {"tensor": {"size": 9, "mode": "2d"}},
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        {"tensor": {"size": 8, "mode": "3d"}},
        {"tensor": 2, "sequence": {"size": 2, "mode": "ulysses"}},
        {"sequence": {"size": 8, "mode": "ring"}},
        {"sequence": {"size": 8, "mode": "usp", "ulysses": 4}},
        {"pipeline": {"size": 4, "schedule": "interleaved", "stages_per_rank": 3}},
        {"pipeline": {"size": 6, "schedule": "zb-v"}},
        {"tensor": {"size": 3, "sequence_parallel": False}},
    ],
)
def test_a_model_that_divides_is_never_refused(parallel: dict[str, object]) -> None:
    Config.load({"parallel": parallel}).check_model(GPT2)


def test_a_vocabulary_need_not_divide_and_fewer_kv_heads_than_ranks_are_shared() -> None:
    few = replace(GPT2, kv_heads=2, vocabulary=50257)
    Config.load({"parallel": {"tensor": 4}}).check_model(few)


def test_all_rules_that_a_model_breaks_are_told_at_once() -> None:
    odd = ModelFacts(
        layers=3, heads=6, kv_heads=3, width=774, ffn=3001, vocabulary=3, sequence=1022, tied=True
    )
    with pytest.raises(ConfigError) as caught:
        Config.load({"parallel": {"pipeline": 4, "tensor": 4, "sequence": 2}}).check_model(odd)
    text = str(caught.value)
    for told in (
        "3 layers",
        "6 heads",
        "3 kv_heads",
        "ffn 3001",
        "vocabulary of 3",
    ):
        assert told in text, told
    assert "width" not in text, "1d cuts heads, not the width"


def test_two_and_three_dimensional_modes_cut_the_width() -> None:
    facts = replace(GPT2, heads=4, kv_heads=4, width=36, ffn=64)
    for mode, size, broken in (("2d", 16, False), ("2d", 64, True), ("3d", 8, False), ("3d", 64, True)):
        config = Config.load({"parallel": {"tensor": {"size": size, "mode": mode}}})
        assert any("width" in problem.rule for problem in model_problems(config.parallel, facts)) == broken


@given(
    tensors,
    sequences,
    st.builds(
        ModelFacts,
        layers=st.integers(1, 8),
        heads=st.sampled_from([1, 2, 4, 6, 8, 12]),
        kv_heads=st.sampled_from([1, 2]),
        width=st.sampled_from([24, 48, 96, 768]),
        ffn=st.sampled_from([96, 192, 97]),
        vocabulary=st.integers(1, 99),
        sequence=st.integers(1, 256),
        tied=st.booleans(),
    ),
)
def test_the_sizes_that_a_message_calls_legal_are_legal(
    tensor: TensorConfig, sequence: SequenceConfig, facts: ModelFacts
) -> None:
    facts = replace(facts, kv_heads=math.gcd(facts.kv_heads, facts.heads))
    parallel = Config.load(
        {"parallel": {"tensor": tensor.model_dump(), "sequence": sequence.model_dump()}}
    ).parallel
    for problem in model_problems(parallel, facts):
        assert problem.legal
        if not problem.path.startswith("parallel") or problem.path.endswith("mode"):
            continue
        _, section, name = problem.path.split(".")
        for size in map(int, problem.legal.split(", ")):
            part = getattr(parallel, section).model_copy(update={name: size})
            changed = parallel.model_copy(update={section: part})
            assert part.fits(size)
            assert problem.path not in {left.path for left in model_problems(changed, facts)}, problem
    legal = legal_tensor_sizes(tensor, sequence, facts)
    assert 1 in legal
    if tensor.size in legal:
        assert "parallel.tensor.size" not in {problem.path for problem in model_problems(parallel, facts)}


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from(["ring", "usp", "allgather_kv", "ulysses"]),
    st.sampled_from([1, 2, 3, 4]), st.integers(1, 200),
)  # fmt: skip
def test_a_padded_sequence_is_cut_alike_on_both_axes_and_no_length_is_a_problem(
    size: int, mode: str, tensor: int, tokens: int
) -> None:
    config = Config.load({"parallel": {"sequence": {"size": size, "mode": mode}, "tensor": tensor}})
    parts = token_parts(config.parallel.tensor, config.parallel.sequence)
    zigzag = mode != "ulysses" and size > 1
    assert parts % (2 * size if zigzag else size) == 0 and parts // size % tensor == 0
    assert parts <= 2 * size * tensor
    facts = replace(GPT2, sequence=tokens, heads=288, kv_heads=288, width=288)
    assert not list(model_problems(config.parallel, facts))


def test_what_a_gpu_does_not_support_is_refused_there_by_name() -> None:
    def refused(zero: dict[str, object] | None = None, **memory: object) -> list[str]:
        config = Config.load({"zero": zero or {}, "memory": memory})
        assert not list(device_problems(config.memory, config.zero, 4, "cpu"))
        return [problem.path for problem in device_problems(config.memory, config.zero, 4, "cuda")]

    for placement in ("device", "host", "auto"):
        assert refused(placement=placement) == []
    hybrid = {"stage": 3, "shard_size": 2}
    assert refused(hybrid, placement="host") == [] and refused(hybrid, placement="disk", disk_dir="x") == []
    assert refused(hybrid, placement="auto", device_budget=9) == ["memory.placement"]
    assert refused({"stage": 3}, placement="auto", device_budget=9) == []
