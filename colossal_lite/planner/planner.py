"""Plans the memory and traffic of one rank, in a world of any size that need not exist.

Note: figures are measured, not stated a second time.
`plan` runs one micro-batch of the real model on meta tensors (dry_run.py).  There it makes and reduces the real chunks,
and builds the real optimizer (step_estimate.py; with a pipeline, pipeline_estimate.py).  So bytes on each axis and
bytes of state are those of the engine by construction.  This file states only how often each part runs in a step.
`activations` are alive when a forward pass ends.  `temporaries` are on top of them at the peak of forward, backward or
update.  Cost: some milliseconds a block of a model, at any size of the world.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError, Problem
from colossal_lite.config.memory_schema import UNITS, parse_bytes
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.numerics.random import on_meta
from colossal_lite.parallel.parallelize import facts_of
from colossal_lite.pipeline.stages import one_stage
from colossal_lite.pipeline.step_plan import step_plan
from colossal_lite.pipeline.step_plans import shape_of
from colossal_lite.planner.dry_run import (
    META,
    Builder,
    Cost,
    DryRun,
    ValuesError,
    Whole,
    gathers_of,
    measured,
)
from colossal_lite.planner.limits import check_sizes
from colossal_lite.planner.pipeline_estimate import staged_plan
from colossal_lite.planner.run_plan import SEQUENCES_CUT, SEQUENCES_WHOLE, RunPlan, libraries_bytes
from colossal_lite.planner.step_estimate import (
    batch_terms,
    exchange_rows,
    memory_rows,
    record_step,
    samples_of,
)
from colossal_lite.planner.step_list import step_list
from colossal_lite.schedule.gather_plan import GatherPlan
from colossal_lite.schedule.plan import Plan
from colossal_lite.schedule.update_rates import operations_of
from colossal_lite.zero.build_chunks import build_chunks, build_frozen


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python's cycle collector walks every object that torch has, again and again, while a plan makes its many small
    values. None of them is in a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collections()
def plan(
    config: Config | Mapping[str, Any],
    model: GPTConfig | Builder,
    *,
    batch: int,
    sequence: int,
    world_size: int,
    rank: int = 0,
    layers: Literal["auto"] | Mapping[str, str] = "auto",
    device_bytes: int | None = None,
    one_host: bool = False,
    trains: bool = True,
) -> RunPlan:
    """The step of `rank` in a world of `world_size`, for `batch` samples of `sequence` tokens a step over all ranks.

    `model` is a GPTConfig, or a function that builds a module that maps ids [B, T] to logits.  `layers` is its plan, as
    for `initialize`.  `device_bytes`: memory of a device, if known.  `one_host`: all ranks are processes of one host's
    CPUs.  Without `trains` the activations are those of an evaluation (not with a pipeline).  Nothing is allocated and
    no other rank is needed.  Raises ConfigError if the config does not fit this world or this model.
    """
    config, facts = _check_request(Config.load(config), model, batch, sequence, world_size, rank)
    mesh = partial(Mesh.recording, config.layout(), rank, one_host=one_host and config.backend == "auto")
    dry = DryRun(config, mesh(), sequence, layers, trains)
    made = partial(_planned, model=model, facts=facts, batch=batch, device_bytes=device_bytes)
    tensor = config.parallel.tensor
    if tensor.size == 1 or tensor.mode != "1d" or tensor.sequence_parallel != "auto":
        return made(dry)
    if isinstance(model, GPTConfig) or type(on_meta(model)) is GPT:  # that is proven by tests
        return made(dry)
    try:
        return replace(made(dry), assumed=SEQUENCES_CUT)
    except ValuesError:  # the proof of a run has the same end
        whole = tensor.model_copy(update={"sequence_parallel": False})
        dry = replace(dry, config=config.derived("parallel", tensor=whole), mesh=mesh())
        return replace(made(dry), assumed=SEQUENCES_WHOLE)


def _planned(
    dry: DryRun, model: GPTConfig | Builder, facts: ModelFacts | None, batch: int, device_bytes: int | None
) -> RunPlan:
    """The plan of this form of the model."""
    config, mesh, sequence = dry.config, dry.mesh, dry.sequence
    rank, world_size, trains = mesh.rank, mesh.world_size, dry.trains
    if config.parallel.pipeline.is_staged:
        return staged_plan(dry, model, facts, batch, device_bytes)
    pieces = samples_of(config, batch, mesh)
    whole, costs = _measured(dry, model, pieces)
    packed = whole.packed(config, mesh.layout)
    chunks = build_chunks(whole.trainable, packed, whole.specs, config, mesh, META)
    frozen = build_frozen(packed, config, mesh, META)
    gathers = gathers_of(dry, model, max(pieces) or 1, whole, (*chunks, *frozen))
    mesh.ledger.clear()
    tokens = sum(pieces) * sequence // mesh.size("sequence")
    operations = operations_of(
        sum(whole.trainable.values()), tokens, recomputes=config.activation_checkpoint == "full"
    )
    state = memory_rows(config, chunks, gathers, whole, costs[max(pieces)], frozen, operations)
    record_step(chunks, gathers, config, mesh, whole, frozen)
    traffic = _summed(mesh.ledger.rows(), [costs[samples] for samples in pieces if samples])
    return RunPlan(
        layout=mesh.layout.describe(),
        rank=rank,
        world_size=world_size,
        parameters=sum(whole.specs[name].numel for name in whole.names),
        local_parameters=sum(whole.trainable.values()) + sum(whole.frozen.values()),
        memory=state.rows + exchange_rows(mesh),
        traffic=traffic,
        batch=batch_terms(config, batch, sequence, mesh, pieces),
        micro_batches=pieces,
        device_bytes=device_bytes if device_bytes is not None else config.memory.device_budget,
        memory_budget=str(state.placed or ""),
        link_bytes=state.link_bytes,
        updates=state.told,
        step_list=_step_list(config, mesh, packed, chunks, state.updates, gathers) if trains else "",
        libraries_bytes=libraries_bytes(config),
    )


def _step_list(
    config: Config, mesh: Mesh, packed: Sequence[ChunkSpec], chunks: Sequence[Chunk], updates: Plan,
    gathers: GatherPlan,
) -> str:  # fmt: skip
    shape = shape_of(config, mesh.layout, one_stage(nn.Module()), packed, 1)
    (actions,) = step_plan(config.parallel.pipeline, shape)
    return step_list(config, mesh, shape, actions, [chunk.spec.id for chunk in chunks], updates, gathers)


def _measured(
    dry: DryRun, model: GPTConfig | Builder, pieces: Sequence[int]
) -> tuple[Whole, dict[int, Cost]]:
    """The model, and what a micro-batch of each number of samples costs; none costs nothing."""
    whole, cost = measured(dry, model, max(pieces) or 1)
    others = {n: measured(dry, model, n)[1] for n in set(pieces) - {0, max(pieces)}}
    return whole, others | {max(pieces): cost if any(pieces) else Cost({}, {}, 0, 0, 0, 0)}


def _summed(rows: Iterable[LedgerRow], micro_batches: Iterable[Cost]) -> tuple[LedgerRow, ...]:
    """The traffic of a step: `rows`, and the collectives of its micro-batches."""
    traffic = Counter({(row.operation, row.axis): row.payload_bytes for row in rows})
    calls = Counter({(row.operation, row.axis): row.calls for row in rows})
    for cost in micro_batches:
        traffic.update(cost.payload)
        calls.update(cost.calls)
    return tuple(LedgerRow(*key, calls[key], traffic[key]) for key in sorted(traffic))


def facts_of_model(model: GPTConfig | Builder) -> ModelFacts | None:
    """The sizes of a model; None for a model of neither known family."""
    if isinstance(model, GPTConfig):
        return facts_of_config(model)
    return facts_of(on_meta(model))


def facts_of_config(model: GPTConfig) -> ModelFacts:
    """The sizes of a model of ours, without building it."""
    return ModelFacts(
        layers=model.layers, heads=model.heads, kv_heads=model.key_heads, width=model.width,
        ffn=model.ffn_width, vocabulary=model.vocabulary, sequence=model.sequence, tied=model.tied,
        causal=model.causal,
    )  # fmt: skip


def _check_request(
    config: Config, model: GPTConfig | Builder, batch: int, sequence: int, world_size: int, rank: int
) -> tuple[Config, ModelFacts | None]:
    """The config for this world, and the sizes of the model. Raises ConfigError for a request that cannot be
    planned."""
    config.check_built()
    facts = facts_of_model(model)
    check_sizes(config, facts, batch=batch, sequence=sequence, world_size=world_size, rank=rank)
    given = None if facts is None else replace(facts, sequence=sequence)
    config = config.check_world(world_size, given)
    if facts is not None and given is not None:
        _check_sequence(facts, sequence)
        config.check_model(given)
    return config, facts


def _check_sequence(facts: ModelFacts, sequence: int) -> None:
    if sequence > facts.sequence:
        raise ConfigError(
            [Problem("sequence", sequence, "is more than the model takes", f"1 to {facts.sequence}")]
        )


def device_memory(text: str | None) -> int | None:
    """Bytes of a device: as given (`80GiB`), else of the CUDA device here, else None. ValueError for other text."""
    if text is not None:
        number = parse_bytes(text)
        if not isinstance(number, int):
            raise ValueError(
                f"device memory: {text!r}; legal: a number with one of {', '.join(UNITS)}, as in 80GiB"
            )
        return number
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
