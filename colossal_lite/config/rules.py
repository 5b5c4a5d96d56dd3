"""Checks the configuration against a world, against a model, and against the settings that are implemented.

Note: a rule is a pure function that yields every `Problem` it finds.  So `Config` reports all of them at once.
`NOT_BUILT` lists settings that the schema has and no code implements yet.  An implementation deletes its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from colossal_lite.config.errors import Problem, get_path, listed
from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.config.parallel_schema import ModelFacts, SequenceConfig, TensorConfig
from colossal_lite.config.schema import WHOLE_TENSORS, ZeroConfig
from colossal_lite.config.settings import ParallelConfig, Settings
from colossal_lite.config.zero_stage import Sharding


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# ------------------------------------------------------------------------------------------------------ world


MOST_TRIALS = 64
"""Meshes that are tried beside the other settings for one message; each takes a millisecond."""


class MeshSizes(NamedTuple):
    """Ranks along each axis."""

    data: int
    pipeline: int
    sequence: int
    tensor: int

    @property
    def settings(self) -> dict[str, object]:
        """The settings that make this mesh, by path."""
        names = ("data", "pipeline.size", "sequence.size", "tensor.size")
        return {f"parallel.{name}": size for name, size in zip(names, self, strict=True)}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self._asdict().items())


def world_problems(
    parallel: ParallelConfig, world_size: int, origins: Mapping[str, str], offers: Iterable[MeshSizes] = ()
) -> Iterator[Problem]:
    """Whether the axes fill a world of `world_size` ranks, and whether each can be sharded as its mode needs. `offers`:
    the meshes that it calls legal, read where it needs them."""
    if world_size < 1:
        yield Problem("world_size", world_size, "is out of range", "an int >= 1")
        return
    yield from _product_problems(parallel, world_size, origins, offers)
    tensor, sequence = parallel.tensor, parallel.sequence
    if not tensor.fits(tensor.size):
        near = [tensor.size_of(edge) for edge in range(max(1, tensor.edge - 1), tensor.edge + 3)]
        below, above = [n for n in near if n < tensor.size][-1:], [n for n in near if n > tensor.size][:2]
        yield Problem.listing("parallel.tensor.size", tensor.size, tensor.shape_rule, below + above)
    if not sequence.fits(sequence.size):
        rule = f"must divide parallel.sequence.size={sequence.size}"
        legal = divisors(sequence.size)
        yield Problem.listing("parallel.sequence.ulysses", sequence.ulysses, rule, legal)


def _product_problems(
    parallel: ParallelConfig, world_size: int, origins: Mapping[str, str], offers: Iterable[MeshSizes]
) -> Iterator[Problem]:
    inner = parallel.inner
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if parallel.data == "auto":
        if world_size % inner == 0:
            return
        rule = f"{_terms(parallel, origins)}; the world has {ranks}, no multiple of {inner}"
    else:
        if parallel.data * inner == world_size:
            return
        rule = f"{_terms(parallel, origins)} = {parallel.data * inner}, but the world has {ranks}"
    legal = "; ".join(map(str, offers))
    yield Problem("parallel.data", parallel.data, rule, legal)


def shard_problems(
    parallel: ParallelConfig, zero: ZeroConfig, world_size: int, origins: Mapping[str, str]
) -> Iterator[Problem]:
    """Whether the data axis can be cut into the copies of hybrid sharding."""
    data, rest = parallel.data, parallel.inner
    whence = origins.get("parallel.data", "default")
    if data == "auto":
        if world_size < 1 or world_size % rest:  # reported already
            return
        data, whence = world_size // rest, "derived"
    if zero.stage and zero.shard_size is not None and data % zero.shard_size:
        rule = f"must divide parallel.data={data} ({whence})"
        yield Problem.listing("zero.shard_size", zero.shard_size, rule, divisors(data))
        return
    copy = zero.shard_size or data
    if zero.near is not None and (copy % zero.near or zero.near == copy):
        rule = f"must divide the {copy} ranks over which a copy is sharded, and be fewer"
        legal = True, False, *divisors(copy)[1:-1]
        yield Problem.listing("zero.reshard_after_forward", zero.near, rule, legal)


def device_problems(memory: MemoryConfig, zero: ZeroConfig, data: int, device_type: str) -> Iterator[Problem]:
    """Settings of `memory` that a device of this type does not support, with `data` ranks on the data axis."""
    if device_type == "cpu":
        return
    if memory.moves and zero.is_hybrid(data):
        copies = f"copies of {zero.shard_size} ranks"
        rule = f"keeps gradients on the host, over which {copies} are not summed on {device_type}"
        legal = "zero.shard_size=None, or memory.placement='host', 'disk' or 'device'"
        yield Problem("memory.placement", memory.placement, rule, legal)


def _terms(parallel: ParallelConfig, origins: Mapping[str, str]) -> str:
    values = {
        "data": parallel.data,
        "pipeline.size": parallel.pipeline.size,
        "sequence.size": parallel.sequence.size,
        "tensor.size": parallel.tensor.size,
    }
    terms = [f"{value} ({origins.get(f'parallel.{path}', 'default')})" for path, value in values.items()]
    return f"data x pipeline x sequence x tensor = {' x '.join(terms)}"


def nearest_factorisations(
    parallel: ParallelConfig,
    world_size: int,
    facts: ModelFacts | None = None,
    takes: Callable[[MeshSizes], bool] = lambda sizes: True,
    count: int = 3,
) -> list[MeshSizes]:
    """Ways to fill `world_size` that change least: fewest of the inner axes, then by the smallest factors.

    Leaves out sizes that a mode, or a model of these `facts`, cannot have.  Those that the other settings do not take
    (`takes`) are left out too, unless these take none.  `data` follows from the others and counts if it was given.
    """
    wanted = (parallel.data, parallel.pipeline.size, parallel.sequence.size, parallel.tensor.size)

    def distance(sizes: MeshSizes) -> tuple[int, float, MeshSizes]:
        factors = [
            math.log(size / want) for size, want in zip(sizes, wanted, strict=True) if isinstance(want, int)
        ]
        return sum(factor != 0 for factor in factors[-3:]), sum(map(abs, factors)), sizes

    found = [
        MeshSizes(world_size // (pipeline * sequence * tensor), pipeline, sequence, tensor)
        for pipeline in divisors(world_size)
        for sequence in divisors(world_size // pipeline)
        if parallel.sequence.fits(sequence)
        for tensor in divisors(world_size // (pipeline * sequence))
        if parallel.tensor.fits(tensor)
    ]
    near = (sizes for sizes in sorted(found, key=distance) if facts is None or _bears(parallel, sizes, facts))
    nearest = list(islice(near, MOST_TRIALS))
    return list(islice(filter(takes, nearest), count)) or nearest[:count]


def _bears(parallel: ParallelConfig, sizes: MeshSizes, facts: ModelFacts) -> bool:
    """Whether a model can be cut into a mesh of these sizes."""
    axes = sizes._asdict()
    del axes["data"]
    resized = {name: getattr(parallel, name).model_copy(update={"size": size}) for name, size in axes.items()}
    return not any(model_problems(parallel.model_copy(update=resized), facts))


# ------------------------------------------------------------------------------------------------------ model


def model_problems(parallel: ParallelConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Whether a model can be cut as the configuration says. The vocabulary is padded and may be any size."""
    broken = list(_facts_problems(facts))
    yield from broken
    if broken:
        return
    stages, chunks = parallel.pipeline.stages, parallel.pipeline.stages_per_rank
    if facts.layers < stages:
        product = f"size {parallel.pipeline.size} x stages_per_rank {chunks}"
        rule = f"{facts.layers} layers are fewer than {stages} stages ({product})"
        most = facts.layers // chunks
        legal = f"1 to {most}" if most else f"any beside stages_per_rank of at most {facts.layers}"
        figures = tuple(range(1, most + 1))
        yield Problem("parallel.pipeline.size", parallel.pipeline.size, rule, legal, figures=figures)
    tensor, sequence = parallel.tensor, parallel.sequence
    if rules := list(tensor_rules(tensor, sequence, facts)):
        sizes = legal_tensor_sizes(tensor, sequence, facts)
        yield from (Problem.listing("parallel.tensor.size", tensor.size, rule, sizes) for rule in rules)
    yield from _sequence_problems(sequence, facts)


def _sequence_problems(sequence: SequenceConfig, facts: ModelFacts) -> Iterator[Problem]:
    if sequence.size > 1 and sequence.mode == "ring_full" and facts.causal:
        rule = "is ring self-attention over whole rows of scores (2105.13120), and this model's attention is causal"
        others = "ring", "ulysses", "usp", "allgather_kv"
        yield Problem("parallel.sequence.mode", sequence.mode, rule, ", ".join(others), figures=others)
    shape, heads = list(_shape_rules(sequence)), list(_head_rules(sequence, facts))
    if sequence.mode == "usp" and heads:  # its inner axis alone cuts the heads
        inner = [
            n for n in divisors(sequence.size) if not any(_head_rules(_with(sequence, "ulysses", n), facts))
        ]
        for rule in heads:
            yield Problem.listing("parallel.sequence.ulysses", sequence.ulysses, rule, inner)
        heads = []
    sizes = [
        n for n in divisors(facts.sequence) if not any(sequence_rules(_with(sequence, "size", n), facts))
    ]
    for rule in (*shape, *heads):
        yield Problem.listing("parallel.sequence.size", sequence.size, rule, sizes or [1])


def _with(sequence: SequenceConfig, name: str, value: int) -> SequenceConfig:
    return sequence.model_copy(update={name: value})


def _facts_problems(facts: ModelFacts) -> Iterator[Problem]:
    sizes = ("layers", "heads", "kv_heads", "width", "ffn", "vocabulary", "sequence")
    small = [name for name in sizes if getattr(facts, name) < 1]
    yield from (
        Problem(f"model.{name}", getattr(facts, name), "is out of range", "an int >= 1") for name in small
    )
    if small:
        return
    if facts.width % facts.heads:
        near = sorted(divisors(facts.width), key=lambda d: abs(d - facts.heads))[:3]
        yield Problem("model.heads", facts.heads, f"must divide width={facts.width}", listed(sorted(near)))
    if facts.heads % facts.kv_heads:
        rule = f"must divide heads={facts.heads}"
        yield Problem("model.kv_heads", facts.kv_heads, rule, listed(divisors(facts.heads)))


def tensor_rules(tensor: TensorConfig, sequence: SequenceConfig, facts: ModelFacts) -> Iterator[str]:
    """Rules that the tensor axis breaks. Divisors as in 1909.08053 (1d), 2104.05343 (2d), 2105.14450 (3d)."""
    if tensor.size == 1:
        return
    if not tensor.fits(tensor.size):
        yield tensor.shape_rule
        return
    edge = tensor.edge
    parts = edge * sequence.head_parts
    inner = f" ({edge} of tensor x {sequence.head_parts} of ulysses)" if sequence.head_parts > 1 else ""
    if facts.heads % parts:
        yield f"{facts.heads} heads do not divide into {parts} parts{inner}"
    if facts.kv_heads % parts and parts % facts.kv_heads:
        yield f"{facts.kv_heads} kv_heads neither divide into {parts} parts{inner} nor divide that number"
    hidden = edge**tensor.rule.hidden_cuts
    if tensor.cuts_features and facts.width % hidden:
        yield f"width {facts.width} does not divide into {hidden} parts"
    if facts.ffn % hidden:
        yield f"ffn {facts.ffn} does not divide into {hidden} parts"
    if facts.vocabulary < edge:
        yield f"a vocabulary of {facts.vocabulary} leaves some of {edge} parts empty"


def legal_tensor_sizes(tensor: TensorConfig, sequence: SequenceConfig, facts: ModelFacts) -> list[int]:
    """Sizes of the tensor axis that break no rule, in the mode and with the sequence axis as they are."""
    sizes = {1, *(tensor.size_of(edge) for edge in divisors(facts.heads))}
    return sorted(
        size
        for size in sizes
        if not any(tensor_rules(tensor.model_copy(update={"size": size}), sequence, facts))
    )


def sequence_rules(sequence: SequenceConfig, facts: ModelFacts) -> Iterator[str]:
    """Rules that the sequence axis breaks. Sequences of other lengths are padded (parallel/padding.py)."""
    yield from _shape_rules(sequence)
    yield from _head_rules(sequence, facts)


def _shape_rules(sequence: SequenceConfig) -> Iterator[str]:
    if not sequence.fits(sequence.size):
        yield f"ulysses={sequence.ulysses} does not divide it"


def _head_rules(sequence: SequenceConfig, facts: ModelFacts) -> Iterator[str]:
    parts = sequence.head_parts
    if facts.heads % parts:
        yield f"{facts.heads} heads do not divide into {parts} parts"
    if facts.kv_heads % parts and parts % facts.kv_heads:
        yield f"{facts.kv_heads} kv_heads neither divide into {parts} parts nor divide that number"


def joint_problems(config: Settings) -> Iterator[Problem]:
    """Settings that contradict settings of other sections."""
    if config.precision.gradient == "bf16" and (parts := _parts_of_a_step(config)):
        what = "and ".join(f"{name}={value} " for name, value in parts.items())
        rule = f"keeps the sum of one micro-batch, and {what}would round it again with each further one"
        legal = "'auto', or " + " and ".join(f"{name}=1" for name in parts)
        yield Problem("precision.gradient", "bf16", rule, legal)
    if config.optimizer.update_when == "backward" and (forbids := dict(_needs_all_gradients(config))):
        what = ", ".join(f"{name}={get_path(config.model_dump(), name)!r}" for name in forbids)
        rule = f"updates a chunk before other gradients are known, and has no place for {what}"
        legal = "'step', or " + " and ".join(f"{name}={value}" for name, value in forbids.items())
        yield Problem("optimizer.update_when", "backward", rule, legal)


def _needs_all_gradients(config: Settings) -> Iterator[tuple[str, str]]:
    """(setting, legal values) of settings that need all gradients, which an update within backward does not have."""
    if config.clip_grad_norm is not None:
        yield "clip_grad_norm", "None"
    if config.precision.dtype == "fp16":
        yield "precision.dtype", "'bf16'"
    for prefix, held in config.optimizer.by_prefix().items():
        if held.type in WHOLE_TENSORS:
            yield f"optimizer.{prefix}type", "'adamw'"
    if config.memory.moves:
        yield "memory.placement", "'device'"
    for name in ("device_budget", "host_budget"):
        if getattr(config.memory, name) is not None:
            yield f"memory.{name}", "None"


def _parts_of_a_step(config: Settings) -> dict[str, int | None]:
    """The settings that cut a step into more than one micro-batch, and their values."""
    pipeline, accumulation_steps = config.parallel.pipeline, config.gradient_accumulation
    found: dict[str, int | None] = (
        {"gradient_accumulation": accumulation_steps} if accumulation_steps > 1 else {}
    )
    if pipeline.is_staged and pipeline.micro_batches != 1:
        found["parallel.pipeline.micro_batches"] = pipeline.micro_batches
    return found


def unused_across_sections(config: Settings) -> Iterator[tuple[str, str]]:
    """(path, why) of settings that have no effect because of another section's."""
    if config.zero.stage == 2 and not _parts_of_a_step(config):
        yield "zero.reduce_every", "a step has one micro-batch, after which stage 2 reduces in any case"
    if config.memory.placement != "static":
        return
    sharding = Sharding.of(config.zero, config.gradient_accumulation)
    if not sharding.weight:
        yield (
            "memory.host_fraction.weights",
            f"weights rest apart at zero.stage=3 only, now {config.zero.stage}",
        )
    if not (sharding.by_micro_batch and (sharding.state or config.parallel.data == 1)):
        why = "gradients are kept whole where they fill, unless they are sharded (zero.stage=3, or 2 by micro-batch)"
        yield "memory.host_fraction.gradients", why


# -------------------------------------------------------------------------------------------------- not built


@dataclass(frozen=True)
class NotBuilt:
    """A setting that is implemented for the values in `built` only, where `when` holds. `missing` says why."""

    path: str
    built: tuple[object, ...]
    missing: str
    when: Callable[[Settings], bool] = lambda config: True


def _is_cut(config: Settings) -> bool:
    """Whether blocks run twice, are sharded, or are measured."""
    inner = (config.parallel.tensor.size, config.parallel.sequence.size, config.parallel.pipeline.stages)
    measured = config.memory.device_budget is not None
    return (
        config.activation_checkpoint != "none" or math.prod(inner) > 1 or config.zero.stage == 3 or measured
    )


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt(
        "zero.reshard_after_forward",
        (True, False),
        "groups that keep weights which rest on the host",
        when=lambda config: config.zero.near is not None and config.memory.moves,
    ),
    NotBuilt(
        "kernels",
        ("auto", "torch"),
        "Triton kernels in float64, which take their torch path",
        when=lambda config: config.precision.dtype == "fp64",
    ),
    NotBuilt(
        "compile", ("none",), "compilation of recomputed, cut and measured blocks", when=lambda c: _is_cut(c)
    ),
)


def unbuilt_problems(config: Settings) -> Iterator[Problem]:
    """Settings without an implementation yet."""
    values = config.model_dump()
    told: set[str] = set()
    for row in NOT_BUILT:
        value = get_path(values, row.path)
        if row.path in told:
            continue
        if value not in row.built and row.when(config):
            told.add(row.path)
            legal = ", ".join(map(repr, row.built))
            yield Problem(row.path, value, f"is not built yet ({row.missing})", legal)
    given = {"": config.optimizer.moments} | {
        f"groups.{i}.": g.moments for i, g in enumerate(config.optimizer.groups)
    }
    if config.precision.dtype == "fp64":
        for prefix, moments in given.items():
            if moments == "bf16":
                yield Problem(
                    f"optimizer.{prefix}moments", moments, "is not built beside float64 weights", "'auto'"
                )
