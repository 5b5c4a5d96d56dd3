"""Builds the parts that an engine's step, state and reports share: hooks, gates, optimizer, budget, updates.

Note: order.
`assemble` builds the parts in one fixed order, because some builders communicate.  A part is built once and never
replaced.  Hooks and gates are on the model from here on; `Engine.close` removes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from colossal_lite.checks.first_step import FirstStep
from colossal_lite.checks.linear_hooks import LinearHooks
from colossal_lite.checks.model_structure import OwnState
from colossal_lite.checks.rank_comparison import recomputes, splits
from colossal_lite.config.config import Config
from colossal_lite.engine.context import Context
from colossal_lite.engine.memory_report import Metering
from colossal_lite.engine.update_timing import Updates
from colossal_lite.layers import hugging_face
from colossal_lite.layers.dropout_rows import unbind_dropout
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.frozen_chunk import FrozenChunk
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.compile_wrappers import CompileWrappers
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.parallel.fused_head import free_head
from colossal_lite.parallel.loss import Criterion, Loss, ModelLoss, checked
from colossal_lite.parallel.padding import SeenPadding
from colossal_lite.parallel.parallelize import Parallelized
from colossal_lite.parallel.samples_apart import FirstBatch
from colossal_lite.pipeline.stages import Stages
from colossal_lite.pipeline.step_plan import splits_backward
from colossal_lite.pipeline.traced_sections import TracedSections
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.activation_checkpoint import (
    remove_activation_checkpoint,
    surround_recomputation,
)
from colossal_lite.transforms.auxiliary_loss import unbind
from colossal_lite.transforms.batch_statistics import free_statistics
from colossal_lite.transforms.compiled_units import trace_again
from colossal_lite.transforms.key_cache import give_key_cache_back
from colossal_lite.transforms.split_backward import WeightGradStore, defer_weights, restore_weights
from colossal_lite.zero.build_chunks import chunk_optimizer
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.gradient_hooks import StageHooks
from colossal_lite.zero.memory_budget import MemoryBudget
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import weights_of
from colossal_lite.zero.update_choice import UpdateChoice
from colossal_lite.zero.user_optimizer import Factory, OwnOptimizer
from colossal_lite.zero.weight_slots import ShardedWeights


@dataclass(frozen=True)
class GlobalNames:
    """Names and shapes of a model's tensors before it is split."""

    first: Mapping[str, str]
    """First name of each parameter, by all its names (ties)."""
    state: Mapping[str, tuple[int, ...]]
    """Keys of its `state_dict()`, with full shapes."""

    @classmethod
    def of(cls, model: nn.Module, specs: Mapping[str, ShardSpec]) -> GlobalNames:
        """`specs`, by first names, give the full shapes of parameters that are split already."""
        first = {id(p): name for name, p in model.named_parameters()}
        firsts = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        shapes = {
            name: specs[firsts[name]].shape if name in firsts else tuple(value.shape)
            for name, value in model.state_dict().items()
        }
        return cls(firsts, shapes)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that `model` has now, by their first names."""
        return {self.first[name]: p for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Built:
    """A model as `initialize` has built it: this rank's modules, and the layout of the whole."""

    model: nn.Module
    names: GlobalNames
    stages: Stages
    parallelized: Parallelized
    streams: DropoutStreams
    all_packed: tuple[ChunkSpec, ...]
    """Chunks of the whole pipeline."""
    chunks: tuple[Chunk, ...]
    """Trainable chunks of this rank."""
    frozen: tuple[FrozenChunk, ...]
    """Frozen chunks of this rank; empty where every rank holds frozen parameters in full."""
    trainable: Mapping[str, torch.Size]
    """Trainable parameters of the whole pipeline, in the model's order, with their shapes on a rank of it."""
    records: TaskRecords
    """Records of state in host memory."""
    blocks: tuple[str, ...]
    """Names of the blocks of the whole pipeline."""
    outlives: bool
    """Whether another engine may resume from the records."""
    first_batch: FirstBatch | None
    """What looks at the first batch; None: the model was proven without."""
    seen_padding: SeenPadding
    """With which ids of unequal lengths on data ranks give other numbers than one process."""
    wrappers: CompileWrappers | None
    """What torch.compile had put around modules; None: the engine has built the model."""

    @property
    def packed(self) -> tuple[ChunkSpec, ...]:
        """Trainable chunks of the whole pipeline."""
        return tuple(spec for spec in self.all_packed if spec.key.trains)

    def apart(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Parameters of this rank that are in no chunk: frozen, and in full on every rank."""
        chunks: tuple[WeightChunk, ...] = (*self.chunks, *self.frozen)
        in_chunks = {entry.name for chunk in chunks for entry in chunk.spec.entries}
        return [parameter for name, parameter in parameters.items() if name not in in_chunks]


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine. Step, state and reports hold the same objects."""

    built: Built
    context: Context
    parameters: Mapping[str, nn.Parameter]
    """This rank's parameters by the model's first names."""
    apart: Sequence[nn.Parameter]
    """Parameters in no chunk."""
    hooks: StageHooks
    weights: ForwardGates
    weight_grads: WeightGradStore
    """Deferred weight gradients, used only if the schedule computes them separately."""
    optimizer: ChunkOptimizer | OwnOptimizer
    memory_budget: MemoryBudget | None
    """None if all state stays on the device."""
    metering: Metering
    updates: Updates
    choice: UpdateChoice | None
    """What has chosen the mix of updates; None for the user's own optimizer."""
    linear_hooks: LinearHooks
    first_step: FirstStep

    @property
    def config(self) -> Config:
        """That of the context, with the mix of updates that was found."""
        config, found = self.context.config, None if self.choice is None else self.choice.found
        return config if found is None else config.derived("memory", update_on=found)

    @property
    def cuts(self) -> str:
        """The settings by which a rank has a part of the model, or of its activations."""
        pipeline = self.context.config.parallel.pipeline
        axes = [(axis, self.context.mesh.size(axis)) for axis in ("tensor", "sequence", "pipeline")]
        found = [f"parallel.{axis}={size}" for axis, size in axes if size > 1]
        if pipeline.is_staged and pipeline.size == 1:
            found.append(f"parallel.pipeline.stages_per_rank={pipeline.stages_per_rank}")
        return " and ".join(found)

    @property
    def hidden(self) -> frozenset[str]:
        """Names of the parameters that have no values here outside of forward."""
        chunks = (*self.built.chunks, *self.built.frozen)
        return frozenset(e.name for chunk in chunks if chunk.is_sharded for e in chunk.spec.entries)

    def loss(self, criterion: Criterion | ModelLoss | None) -> Loss:
        """The loss of a micro-batch. A criterion of the user's own is checked."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return Loss(self.built.parallelized, checked(criterion, names, self.hidden, self.cuts))

    def before_backward(self, *, own_loss: bool = False) -> None:
        """Run deferred updates, then prefetch the optimizer state that the next updates need first. `own_loss`: the
        backward is of the user's loss as it is."""
        self.linear_hooks.begin(own_loss=own_loss)
        # The forward has run them, unless this backward belongs to an earlier one. The slots are used in order.
        self.weights.run_deferred()
        if self.updates.under_way:
            return  # an earlier stage's backward has prepared, and perhaps updated
        if self.memory_budget is None or self.memory_budget.placement is not None:
            self.weights.after_fetches(self.optimizer.prepare)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Context of a backward: weights are gathered. A dropout outside a block's recomputation raises an error."""
        with self.weights.backward(), self.built.streams.functional(None), self.first_step.backward():
            yield

    def detach(self) -> None:
        """Remove the hooks that only the steps of this engine need; its gates stay on the model."""
        model = self.built.model
        self.hooks.remove()
        self.linear_hooks.remove()
        remove_activation_checkpoint(model)
        give_key_cache_back(model)
        trace_again(model)
        hugging_face.unbind(model)
        restore_weights(model)
        free_head(model)
        unbind(model)
        unbind_dropout(model)
        free_statistics(model)

    def remove_gates(self) -> None:
        """Remove the gates of the weights from the model, and put back what torch.compile had put around modules."""
        self.weights.remove()
        if self.built.wrappers is not None:
            self.built.wrappers.put_back()

    def measured(self) -> AbstractContextManager[None]:
        """Context: measures the device memory in use, if a budget still has to choose a placement."""
        return nullcontext() if self.memory_budget is None else self.memory_budget.measured()


def assemble(built: Built, context: Context, factory: Factory | None) -> EngineParts:
    """Build the parts of an engine; `factory` makes the user's own optimizer. Collective.

    Raises ConfigError and ValueError as `chunk_optimizer` and `MemoryBudget` do."""
    config, mesh, model, chunks = context.config, context.mesh, built.model, built.chunks
    parameters = built.names.parameters(model)
    apart = built.apart(parameters)
    hooks = StageHooks(chunks, parameters)
    weights = weights_of(
        model, parameters, chunks, hooks, mesh.world, config.zero, built.frozen,
        is_staged=config.parallel.pipeline.is_staged, is_traced=isinstance(built.stages.sections, TracedSections),
    )  # fmt: skip
    surround_recomputation(model, weights.again)
    if axes := [f"parallel.{axis}" for axis in ("tensor", "pipeline") if mesh.size(axis) > 1]:
        weights.reading = OwnState(model, " and ".join(axes)).reading
    weights.refuses_writes = mesh.world_size > 1 or bool(splits(config) or recomputes(config))
    weight_grads = _weight_grads_of(model, config)
    optimizer, choice = _optimizer_of(built, context, factory, parameters)
    if isinstance(optimizer, OwnOptimizer):
        hooks.held.add(optimizer.parameters)
    if isinstance(weights, ShardedWeights) and optimizer.tiers:
        weights.up = optimizer.tiers.up
    memory_budget = _memory_budget_of(built, context, weights, optimizer, hooks, apart)
    metering = Metering()
    updates = Updates(chunks, optimizer, weights, hooks, metering, mesh, config)
    is_whole = config.gradient_accumulation == 1 and mesh.size("data", "sequence") == 1
    linear_hooks = LinearHooks(model, parameters, is_whole and config.parallel.tensor.sample_parts == 1)
    return EngineParts(
        built, context, parameters, apart, hooks, weights, weight_grads, optimizer, memory_budget, metering, updates,
        choice, linear_hooks, FirstStep(model, config, context.device),
    )  # fmt: skip


def _weight_grads_of(model: nn.Module, config: Config) -> WeightGradStore:
    """The store to which layers defer their weight gradients, if the schedule splits backward."""
    store = WeightGradStore()
    if splits_backward(config.parallel.pipeline):
        defer_weights(model, store)
    return store


def _optimizer_of(
    built: Built, context: Context, factory: Factory | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[ChunkOptimizer | OwnOptimizer, UpdateChoice | None]:
    """The optimizer of the config, with what has chosen its mix of updates. Or the user's own, made by `factory`.
    Collective; raises as `chunk_optimizer`."""
    config = context.config
    if factory is not None:
        scheduled = config.lr_scheduler.type != "constant"
        own = OwnOptimizer(built.chunks, built.trainable, factory, scheduled=scheduled, seed=config.seed)
        return own, None
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    ops = built.parallelized.ops
    return chunk_optimizer(built.chunks, config, ops, shapes, context.mesh, built.records, built.frozen)


def _memory_budget_of(
    built: Built, context: Context, weights: ForwardGates, optimizer: ChunkOptimizer | OwnOptimizer,
    hooks: StageHooks, apart: Sequence[nn.Parameter],
) -> MemoryBudget | None:  # fmt: skip
    """The placement of all state within a budget; None without one. Raises ConfigError as `MemoryBudget`."""
    memory = context.config.memory
    if not (memory.moves or memory.device_budget is not None or memory.host_budget is not None):
        return None
    try:
        return MemoryBudget(
            context.config, built.chunks, weights, optimizer, context.mesh.world,
            coord=context.mesh.coord("pipeline"), device=context.device,
            frozen=built.frozen, apart_bytes=sum(p.nbytes for p in apart), outlives=built.outlives,
            began=lambda: hooks.began,
        )  # fmt: skip
    except BaseException:
        optimizer.close()  # it may have a file
        raise
