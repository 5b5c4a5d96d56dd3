"""Builds an engine from a model and a context: checks, splits, allocates and fills before the first step.

Note: order.
Model and config are checked before anything is built.  A model's values are compared between ranks before it is split.
Layers are swapped while parameters have no storage.  Chunks are allocated last, at their final size, and filled shard
by shard.  So a rank never holds more than its part and one tensor in transit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite.checkpoint.tools import last_unit_seconds
from colossal_lite.checks.model_structure import (
    check_lazy,
    check_other_engines,
    check_own_state,
    check_storages,
    check_values,
    is_in_parts,
)
from colossal_lite.checks.rank_comparison import recomputes, splits
from colossal_lite.checks.same_model import check_same_model, told_to_all
from colossal_lite.config.call_forms import with_form
from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError, refuse, shown
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.rules import device_problems
from colossal_lite.config.schema import OptimizerConfig
from colossal_lite.data.batch import Batch, read_batch
from colossal_lite.data.batch_checks import LossOf, StatedSizes, check_batch
from colossal_lite.data.batch_forms import ForwardArguments, named
from colossal_lite.engine.context import Context
from colossal_lite.engine.engine import Engine
from colossal_lite.engine.engine_parts import Built, GlobalNames
from colossal_lite.engine.step_totals import StepResult
from colossal_lite.layers import hugging_face
from colossal_lite.layers.batch_norm import shares_statistics, sync_statistics
from colossal_lite.layers.layer_swap import cut_range
from colossal_lite.layers.sequence_parallel import sees_whole_sequences
from colossal_lite.layers.tensor_modes import Form
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.frozen_chunk import FrozenChunk, state_base
from colossal_lite.memory.host_store import HostStore
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.transfers import buffers_to_device, to_device
from colossal_lite.memory.weight_chunk import OwnChanges
from colossal_lite.models import GPT
from colossal_lite.numerics.compile_wrappers import CompileWrappers
from colossal_lite.numerics.lr_schedules import told_of_end
from colossal_lite.numerics.optimizers import assign_groups, check_whole_tensors, groups_of
from colossal_lite.numerics.precision import Precision
from colossal_lite.numerics.random import DropoutStreams, Recipe, build_on_meta, on_meta, replay
from colossal_lite.numerics.torch_modes import outside_inference
from colossal_lite.observe.printed_lines import tell, warn
from colossal_lite.parallel.copy_batches import few_of_rank_0, is_more_than_words
from colossal_lite.parallel.forward_history import RepeatedForwards
from colossal_lite.parallel.loss import Criterion, Loss, checked, reader_of
from colossal_lite.parallel.model_loss import ModelLoss, check_labels_optional, model_loss
from colossal_lite.parallel.padding import SeenPadding, seen_padding
from colossal_lite.parallel.parallelize import Parallelized, facts_of, parallelize
from colossal_lite.parallel.samples_apart import FirstBatch, check_samples_apart
from colossal_lite.pipeline.layer_profile import Profiler
from colossal_lite.pipeline.model_units import Sections, has_stated_units, traced_units
from colossal_lite.pipeline.partition import Unit
from colossal_lite.pipeline.stages import Stages, check_hooks, drop_other_stages, lay_out, one_stage
from colossal_lite.planner.dry_run import ValuesError
from colossal_lite.planner.planner import plan as plan_of
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.activation_checkpoint import apply_activation_checkpoint, blocks_of
from colossal_lite.transforms.batch_statistics import (
    check_batchwide,
    check_max_norm,
    check_tables,
    free_statistics,
    hold_statistics,
    is_synced,
    mark_synced,
)
from colossal_lite.transforms.compile import compile_blocks
from colossal_lite.transforms.compiled_units import compiled_units, leave_untraced, trace_again
from colossal_lite.transforms.key_cache import give_key_cache_back
from colossal_lite.transforms.module_modes import modes_of, set_modes
from colossal_lite.zero.budget_messages import Forecast, room_problems
from colossal_lite.zero.build_chunks import build_chunks, build_frozen, pack_chunks
from colossal_lite.zero.parameter_order import by_order, order_of_use, warn_if_out_of_order
from colossal_lite.zero.user_optimizer import Factory, check_apart


@with_form(
    "cl.initialize",
    "cl.initialize(model, context=context), with the context of cl.launch. By name too: criterion, plan, optimizer, "
    "lr_lambda, example, directory, store, task",
)
def initialize(
    model: nn.Module | Callable[[], nn.Module],
    *,
    context: Context,
    criterion: Criterion | Literal["model"] | None = None,
    plan: Literal["auto"] | Mapping[str, str] = "auto",
    optimizer: Factory | None = None,
    lr_lambda: Callable[[int], float] | None = None,
    example: Any = None,
    directory: str | Path | None = None,
    store: HostStore | None = None,
    task: str = "model",
) -> Engine:
    """Build an engine that trains `model`. Collective.

    An nn.Module keeps its values, which must be the same on every rank (hashes are compared).  A callable is run with
    parameters on the meta device. Its initialisers are replayed from the seed, so the model need not fit on one rank.
    Parameters that require a gradient now are trained.  All checks run before anything is allocated.  Raises
    ConfigError for a model that the config cannot split.  Raises ValueError for one that cannot be built or differs
    between ranks.
    `criterion`: takes (logits, labels) and replaces the built-in cross-entropy.  "model": the loss that the model's own
    forward returns for the labels.  It must be a mean over valid labels, which is proven on a small copy.
    `optimizer` makes a torch optimizer over a list of parameters, and replaces `config.optimizer`.
    `lr_lambda`: takes the number of steps made, and gives a factor on the learning rate of every group.  It is asked
    once a step, on every rank, and replaces `lr_scheduler`.
    `example`: a batch of this rank as in `train_step`, for a model that does not run on random ids.  The plan, the
    model's own loss and its stages are proven with it.  All ranks take the first samples of rank 0.
    `pipeline.partition='profiled'` times the layers with it.  A model that states no sizes needs one there.
    `directory`: the folder of this run's checkpoints.  If measured times cut the pipeline of the newest one, they are
    used again.  So the run has the same stages and the same bits.
    `store`: host memory in which the engine parks its state under the name `task` when it is closed.  The next engine
    of that task in this process resumes from it, as if there had been one engine.  Parked are weights, masters,
    moments, step counts, loss scale and buffers.  Frozen parameters are the model's.  Raises ValueError on every rank
    if the parked state does not fit this engine; it stays parked.  ConfigError if memory.host_budget is too small.
    """
    _check_values(model, context, plan)
    _check_rates(lr_lambda, optimizer, context)
    records, wrappers = _records_of(task, store, optimizer, context), None
    try:
        if isinstance(model, nn.Module):
            wrappers = CompileWrappers(model)
            model = wrappers.model
        with outside_inference():
            return _initialize(
                model, context, criterion, plan, optimizer, lr_lambda, example, directory, records, wrappers,
                outlives=store is not None and store.parks,
            )  # fmt: skip
    except BaseException:
        records.give_up()
        if wrappers is not None:
            wrappers.put_back()
        if isinstance(model, nn.Module):
            give_key_cache_back(model)
            hugging_face.unbind(model)
            free_statistics(model)
            trace_again(model)
        raise


def _check_values(model: object, context: object, plan: object) -> None:
    """Raises ValueError for values of other types."""
    if not isinstance(context, Context):
        raise ValueError(
            f"context: {type(context).__name__}; legal: the context that cl.launch(config) gives"
        )
    if not callable(model):
        raise ValueError(
            f"model: {type(model).__name__}; legal: an nn.Module, or a function that makes one, such as lambda: "
            f"cl.models.GPT(config)"
        )
    if not isinstance(plan, Mapping) and not (isinstance(plan, str) and plan == "auto"):
        raise ValueError(f"plan: {shown(plan)}; legal: 'auto', or a dict from name patterns to roles")


def _records_of(
    task: str, store: HostStore | None, optimizer: Factory | None, context: Context
) -> TaskRecords:
    """The records of state in host memory. Raises ValueError for a store that cannot park this optimizer's."""
    if store is None:
        return TaskRecords(task, context.device)
    if optimizer is not None and store.parks:
        raise ValueError(
            "store: what an optimizer of your own keeps, only it knows; legal: a type of config.optimizer"
        )
    return store.open(task, beside=context.device)


def _initialize(
    model: nn.Module | Callable[[], nn.Module], context: Context, criterion: Criterion | Literal["model"] | None,
    plan: Literal["auto"] | Mapping[str, str], optimizer: Factory | None, lr_lambda: Callable[[int], float] | None,
    example: Any, directory: str | Path | None, records: TaskRecords, wrappers: CompileWrappers | None, *,
    outlives: bool,
) -> Engine:  # fmt: skip
    config = context.config
    module, recipes = (model, None) if isinstance(model, nn.Module) else build_on_meta(model)
    with told_to_all(context.mesh.world):
        facts = _check_model(module, context, criterion, has_values=recipes is None)
        first_batch, seen = _of_batches(module, context)
    shown, few = _example(example, module, facts, context, criterion)
    loss = _loss_by(criterion, module, context, few)
    _check_whole_sequences(module, context)
    streams = DropoutStreams(config.seed)
    # a batch of a criterion may have any inputs, and `plan` takes ids
    forecast_batch = None if callable(criterion) else _forecast_batch(model, context, plan)
    originals = dict(module.named_parameters())
    check_same_model(module, context.mesh.world, values=recipes is None)
    micro_batch = None if shown is None else _first_micro_batch(shown, context)
    own = loss if isinstance(loss, ModelLoss) else None
    sections = traced_units(module, micro_batch, own) if config.parallel.pipeline.is_staged else None
    parallelized = _swap_layers(module, context, plan, streams, loss, few)
    if _is_by_proof(parallelized, config):
        forecast_batch = None  # `plan` makes no proof
    _check_optimizer(optimizer, module, parallelized.specs, context)
    _check_device(context)
    names = GlobalNames.of(module, parallelized.specs)
    measure = _seconds_of_before(directory, context) or _measure(
        module, facts, parallelized, streams, context, micro_batch, loss
    )
    stages = _lay_out(module, facts, context, measure, sections)
    trainable = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    _check_stage_by_stage(optimizer, trainable, stages, context)
    order = None if isinstance(model, nn.Module) or type(module) is GPT else order_of_use(on_meta(model))
    numels = by_order({n: p.numel() for n, p in module.named_parameters() if p.is_floating_point()}, order)
    blocks = tuple(blocks_of(module))
    all_packed = pack_chunks(
        numels, parallelized.specs, config, context.mesh.layout, stages.homes, blocks,
        numels.keys() - trainable.keys(), context.device.type,
    )  # fmt: skip
    dtype = Precision.of(config.precision).compute
    drop_other_stages(module, stages, torch.empty(0, dtype=dtype, device=context.device))
    chunks, frozen = _build_chunks(
        module, names, originals, recipes, parallelized, all_packed, stages, context, tuple(numels), records
    )  # fmt: skip
    if order is None:
        _warn_of_order(module, chunks, names, context)
    buffers_to_device(module, context.device)
    built = Built(
        module, names, stages, parallelized, streams, all_packed, chunks, frozen, trainable, records, blocks,
        outlives=outlives, first_batch=first_batch, seen_padding=seen, wrappers=wrappers,
    )  # fmt: skip
    engine = Engine(built, context, loss, optimizer, forecast_batch, lr_lambda)
    sync_statistics(module, context.mesh.axis("data"))
    hold_statistics(module, _cuts(context, splits(config)), recomputes(config))
    context.models.add(module)
    engine.on_step(partial(_tell_of_end, context), reads_weights=False)
    return engine


def _is_by_proof(parallelized: Parallelized, config: Config) -> bool:
    """Whether only a proof has found how ranks share the layers."""
    form = parallelized.form
    is_given = config.parallel.tensor.sequence_parallel != "auto" and not form.whole_sizes
    return form != Form(regather_inputs=form.regather_inputs) and not is_given


def _warn_of_order(module: nn.Module, chunks: Sequence[Chunk], names: GlobalNames, context: Context) -> None:
    """Let the main rank warn if a forward uses chunks out of order. It does not watch a compiled model."""
    if context.is_main and not compiled_units(module):
        found = {id(p): name for name, p in names.parameters(module).items()}
        warn_if_out_of_order(module, [chunk.spec for chunk in chunks], found)


def _check_rates(lr_lambda: Any, optimizer: Factory | None, context: Context) -> None:
    """Raises ValueError for an `lr_lambda` that cannot be called, or that is one of two schedules."""
    if lr_lambda is None:
        return
    if not callable(lr_lambda):
        raise ValueError(
            f"lr_lambda={lr_lambda!r}; legal: None, or a function such as lambda step: 0.99**step. It takes the "
            f"number of steps made, and gives a factor on the learning rates"
        )
    if (kind := context.config.lr_scheduler.type) != "constant":
        raise ValueError(
            f"lr_lambda beside lr_scheduler.type={kind!r}; legal: one of the two (lr_scheduler.type='constant', or no "
            f"lr_lambda)"
        )
    if optimizer is not None:
        raise ValueError(
            "lr_lambda beside optimizer=, which has learning rates of its own; legal: one of the two. Set lr in the "
            "param_groups of that optimizer, or by a scheduler of torch that its callable makes"
        )


def _loss_by(
    criterion: Criterion | Literal["model"] | None, module: nn.Module, context: Context, example: Batch | None
) -> Criterion | ModelLoss | None:
    """The callable that computes the loss; None: the engine's own."""
    is_model = isinstance(criterion, str) and criterion == "model"
    if criterion is not None and not is_model and not callable(criterion):
        raise ValueError(f"criterion={criterion!r}; legal: a callable, 'model' or None")
    return _own_loss(module, context, example) if isinstance(criterion, str) else criterion


def _of_batches(module: nn.Module, context: Context) -> tuple[FirstBatch | None, SeenPadding]:
    """What looks at the first batch, and the padding that tokens of data ranks see. Raises ValueError for a model whose
    samples see each other, where a batch is cut."""
    repeats = RepeatedForwards(splits(context.config), context.config.activation_checkpoint)
    first_batch = check_samples_apart(module, _cuts(context, repeats.splits), repeats)
    if norms := tuple(filter(is_synced, module.modules())):
        return first_batch, SeenPadding(statistics=norms)
    return first_batch, seen_padding(module) if context.mesh.size("data") > 1 else SeenPadding()


def _check_device(context: Context) -> None:
    """Raises ConfigError for memory settings that this device cannot have."""
    config, data = context.config, context.mesh.size("data")
    refuse(device_problems(config.memory, config.zero, data, context.device.type))
    refuse(room_problems(config.memory.device_budget, context.device))


def _check_stage_by_stage(
    optimizer: Factory | None, trainable: Mapping[str, torch.Size], stages: Stages, context: Context
) -> None:
    """Raises ValueError for an optimizer of the user's own whose step cannot be made stage by stage."""
    if optimizer is not None and context.config.parallel.pipeline.is_staged:
        of_stages = [[n for n in trainable if stage in stages.homes[n]] for stage in sorted(stages.placement)]
        check_apart(optimizer, trainable, of_stages, context.device)


def _tell_of_end(context: Context, result: StepResult) -> None:
    """Warn in the first step after the schedule of the learning rate has ended."""
    scheduler = context.config.lr_scheduler
    if context.is_main and result.step - 1 == scheduler.total_steps:
        if told := told_of_end(scheduler, result.step):
            warn(told)


def _check_model(
    module: nn.Module, context: Context, criterion: Criterion | Literal["model"] | None, *, has_values: bool
) -> ModelFacts | None:
    """The sizes of a model, if it states them. Raises ConfigError for sizes that the config cannot split. Raises
    ValueError for a model that cannot be trained, or not in parts."""
    if has_values:
        check_values(module)
    check_lazy(module)
    check_other_engines(module)
    check_own_state(module)
    facts = facts_of(module)
    if module in context.models:
        raise ValueError(
            "model: an engine trains it already; legal: one call of initialize for a model, or engine.close() before "
            "the next"
        )
    if is_in_parts(module):
        raise ValueError(
            "model: an engine has cut it for ranks of a tensor, sequence or pipeline axis; legal: a model built anew"
        )
    if facts is not None:
        context.config.check_model(facts)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("model: no parameter requires a gradient; there is nothing to train")
    scripted = next((n for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ValueError(
            f"model: {scripted or 'it'} is a torch.jit module, which takes no hooks; legal: the module before "
            f"torch.jit.script or trace"
        )
    check_labels_optional(module, own_loss=criterion == "model")
    if shares_statistics(context.config, context.mesh):
        mark_synced(module)
    check_batchwide(module, _cuts(context, splits(context.config)), recomputes(context.config))
    check_max_norm(module, _copies(context))
    check_tables(module, _cuts(context, splits(context.config)))
    if name := next((n for n, p in module.named_parameters() if p.is_complex()), None):
        raise ValueError(
            f"model: the parameter {name} is complex. Masters and moments are real. Legal: a real parameter, and "
            f"torch.view_as_complex of it in forward"
        )
    check_storages(module)
    if context.config.parallel.pipeline.is_staged:
        check_hooks(module)
    return facts


def _check_whole_sequences(module: nn.Module, context: Context) -> None:
    """Raises ValueError where code that is shown whole sequences would see a part: between stages of one rank, and in a
    recomputation that the gathers of ZeRO-3 run themselves."""
    config, size = context.config, context.mesh.size("sequence")
    if size == 1 or not sees_whole_sequences(module):
        return
    kind, pipeline = type(module).__name__, config.parallel.pipeline
    legal = "models.GPT, or Hugging Face's GPT-2 and Llama without dropout of attention"
    if pipeline.is_staged and pipeline.size == 1:
        raise ValueError(
            f"parallel.pipeline.stages_per_rank={pipeline.stages_per_rank} with parallel.sequence={size}: the code of "
            f"{kind} is shown whole sequences (docs/sequences.md), which is not built beside it. Legal: one of the "
            f"two, {legal}"
        )
    if config.zero.stage == 3 and config.activation_checkpoint != "none":
        raise ValueError(
            f"activation_checkpoint={config.activation_checkpoint!r} with zero.stage=3 and parallel.sequence={size}: "
            f"the code of {kind} would be run again on a part of a sequence. Legal: one of the three less, {legal}"
        )


def _own_loss(module: nn.Module, context: Context, example: Batch | None) -> ModelLoss:
    """The loss of the model itself, for criterion='model'. Raises ValueError if its code would not see whole inputs."""
    if context.mesh.size("sequence") > 1 and not sees_whole_sequences(module):
        raise ValueError(
            f"criterion='model' with parallel.sequence, where code of {type(module).__name__} sees a part of each "
            f"sequence; legal: criterion=None, which trains on the model's logits, or parallel.sequence=1"
        )
    if context.config.parallel.pipeline.is_staged and has_stated_units(module):
        raise ValueError(
            f"criterion='model' in a pipeline of {type(module).__name__}, whose stages do not run its forward; legal: "
            f"criterion=None, which trains on the model's logits"
        )
    return model_loss(module, example)


def _swap_layers(
    module: nn.Module, context: Context, plan: Literal["auto"] | Mapping[str, str], streams: DropoutStreams,
    criterion: Criterion | ModelLoss | None, example: Batch | None,
) -> Parallelized:  # fmt: skip
    """Replace layers by this rank's shards of them, with activation checkpointing and compilation as configured. Split
    parameters have no values afterwards."""
    config, modes = context.config, modes_of(module)
    parallelized = parallelize(
        module,
        context.mesh,
        plan,
        sequence_parallel=config.parallel.tensor.sequence_parallel,
        regather_inputs=config.parallel.tensor.regather_inputs,
        sequence_mode=config.parallel.sequence.mode,
        kernels=config.kernels,
        compiled=config.compile == "block",
        device_type=context.device.type,
        streams=streams,
        criterion=criterion if isinstance(criterion, ModelLoss) else None,
        example=example,
    )
    if plan == "auto" and parallelized.plan and context.is_main and type(module) is not GPT:
        tell(f"plan='auto' is {dict(parallelized.plan)}", sys.stderr)
    apply_activation_checkpoint(module, config.activation_checkpoint, streams)
    if config.compile == "block":
        compile_blocks(blocks_of(module), context.device)
    leave_untraced(compiled_units(module))
    set_modes(module, modes)
    return parallelized


def _cuts(context: Context, of_a_rank: Sequence[str]) -> tuple[str, ...]:
    """The settings that give a module parts of a batch: data ranks, and those `of_a_rank`."""
    data = context.mesh.size("data")
    return (*([f"data={data}"] if data > 1 else ()), *of_a_rank)


def _copies(context: Context) -> tuple[str, ...]:
    """The settings that keep copies of a weight besides the one that forward reads."""
    config = context.config
    precision, memory = Precision.of(config.precision), config.memory
    found = {
        f"{axis}={context.mesh.size(axis)}": context.mesh.size(axis) > 1 for axis in ("data", "sequence")
    } | {
        f"precision with {precision.master} masters": precision.master != precision.compute,
        f"memory.placement={memory.placement!r}": memory.moves or memory.records_tier != "device",
    }
    return tuple(name for name, keeps in found.items() if keeps)


def _example(
    example: Any, module: nn.Module, facts: ModelFacts | None, context: Context,
    criterion: Criterion | Literal["model"] | None,
) -> tuple[Batch | None, Batch | None]:  # fmt: skip
    """The user's example, and the samples of it that small copies run on. Collective. Raises ValueError if only some
    ranks have one, or if it is no batch. Also for arguments that no proof takes."""
    world = context.mesh.world
    with world.ledger.paused():
        has_one = world.gather_json(example is not None)
    if len({*has_one}) > 1:
        ranks = [rank for rank, has in enumerate(has_one) if has]
        raise ValueError(f"example: given on the ranks {ranks} alone; legal: on every rank, or on none")
    if example is None:
        return None, None
    loss: LossOf = "shown" if isinstance(criterion, str) else reader_of(criterion)
    check_batch(example, StatedSizes(facts.vocabulary if facts else None), ForwardArguments.of(module), loss)
    shown = read_batch(example, device=context.device)
    with world.ledger.paused():
        few = few_of_rank_0(shown, world, context.device)
    size = context.mesh.size("sequence")
    if few is not None and size > 1 and is_more_than_words(few):
        raise ValueError(
            f"example: {', '.join(named(few.args, few.kwargs))} with parallel.sequence={size}, which is proven with "
            f"ids alone; legal: an example of ids, or parallel.sequence=1"
        )
    return shown, few


def _first_micro_batch(example: Batch, context: Context) -> Batch:
    """What a pipeline is traced and timed with."""
    pipeline, unit = context.config.parallel.pipeline, context.config.parallel.tensor.sample_parts
    first = example.cut(min(context.config.gradient_accumulation, max(1, example.size)))[0]
    return first.cut(pipeline.parts_of([first.size], 1, unit))[0]


def _measure(
    module: nn.Module, facts: ModelFacts | None, parallelized: Parallelized, streams: DropoutStreams, context: Context,
    example: Batch | None, criterion: Criterion | ModelLoss | None,
) -> Callable[[Sections, Sequence[Unit]], Sequence[Unit]] | None:  # fmt: skip
    """The function that times the units of the model, for `pipeline.partition='profiled'`."""
    if not context.config.parallel.pipeline.is_profiled:
        return None
    dtype = Precision.of(context.config.precision).compute
    profiler = Profiler(
        module,
        parallelized,
        streams,
        context.mesh,
        context.device,
        dtype,
        example,
        Loss(parallelized, None if example is None else checked(criterion)),
    )
    return partial(profiler.costs, facts=facts)


def _seconds_of_before(
    directory: str | Path | None, context: Context
) -> Callable[[Sections, Sequence[Unit]], Sequence[Unit]] | None:
    """Gives units the measured times of this run's earlier cut, as rank 0 reads them; None for a new run. Collective if
    there is a directory."""
    if directory is None or not context.config.parallel.pipeline.is_profiled:
        return None
    mine = last_unit_seconds(Path(directory)) if context.is_main else None
    seconds = context.mesh.world.gather_json(mine)[0]
    if seconds is None:
        return None

    def measured(sections: Sections, units: Sequence[Unit]) -> Sequence[Unit]:
        if len(seconds) != len(units):
            raise ValueError(
                f"directory: {directory} is of a model of {len(seconds)} units, this one has {len(units)}; legal: the "
                f"same model, or a new directory"
            )
        return [
            replace(unit, forward=f, input=i, weight=w)
            for unit, (f, i, w) in zip(units, seconds, strict=True)
        ]

    return measured


def _lay_out(
    module: nn.Module,
    facts: ModelFacts | None,
    context: Context,
    measure: Callable[[Sections, Sequence[Unit]], Sequence[Unit]] | None,
    sections: Sections | None,
) -> Stages:
    """The units of the model on each stage of the pipeline; without a pipeline all are here."""
    pipeline, mesh = context.config.parallel.pipeline, context.mesh
    if not pipeline.is_staged:
        return one_stage(module)
    stages = lay_out(module, facts, pipeline, mesh.coord("pipeline"), measure, sections)
    if pipeline.is_profiled and context.is_main:
        counts = [stop - start for start, stop in stages.cut.bounds]
        warn(
            f"initialize: pipeline.partition='profiled' cuts by the clock, now {counts} units; another run may be cut "
            f"otherwise, and then has other bits; partition={counts} or initialize(directory=...) repeats it"
        )
    return stages


def _forecast_batch(
    model: nn.Module | Callable[[], nn.Module], context: Context, layers: Literal["auto"] | Mapping[str, str]
) -> Forecast | None:
    """The forecasts of `plan` for a step, for a model that can be built again. None for any other model, and for one
    whose forward reads values."""
    by_the_clock = context.config.parallel.pipeline.is_profiled  # stages that `plan` cannot know
    if by_the_clock or (isinstance(model, nn.Module) and type(model) is not GPT):
        return None
    frozen = {n: not p.requires_grad for n, p in model.named_parameters()} if isinstance(model, GPT) else {}
    builder = partial(GPT, model.config) if isinstance(model, GPT) else model

    def again() -> nn.Module:
        module = on_meta(builder)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not frozen.get(name, False))
        return module

    def forecast_batch(
        samples: int,
        tokens: int,
        *,
        found: Callable[[], Config],
        changes: Sequence[str] = (),
        trains: bool = True,
    ) -> Mapping[str, int] | None:
        if frozen and set(frozen) != {name for name, _ in again().named_parameters()}:
            return None  # it was changed after it was built
        mesh = context.mesh
        if not trains and context.config.parallel.pipeline.is_staged:
            return None  # `plan` has no evaluation of a pipeline
        try:
            config = Config.load(context.config, changes).settled(
                "memory", update_on=found().memory.update_on
            )
            with torch.enable_grad():  # an evaluation may ask
                made = plan_of(
                    config, again, batch=samples * mesh.size("data"), sequence=tokens, layers=layers,
                    world_size=mesh.world_size, rank=mesh.rank, one_host=mesh.shares_memory, trains=trains,
                )  # fmt: skip
        except ConfigError:
            if not changes:
                raise
            return None
        except ValuesError:
            return None  # it is measured in the first step instead
        activations = made.bytes_of("activations") + made.bytes_of("logits")
        beside = {kind: made.bytes_of(kind) for kind in ("temporaries", "exchange", "gathered", "messages")}
        return {"activations": activations, "device": made.peak_bytes} | beside

    return forecast_batch


def _check_optimizer(
    optimizer: object, module: nn.Module, specs: Mapping[str, ShardSpec], context: Context
) -> None:
    """Refuse parameters or state that the optimizer cannot update here, before anything is allocated."""
    config, mesh = context.config, context.mesh
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    in_parts = {n for n in shapes if config.zero.stage or mesh.size(*specs[n].sharding_axes) > 1}
    if optimizer is None:
        groups = groups_of(config.optimizer)
        return check_whole_tensors(shapes, assign_groups(shapes, groups), groups, in_parts)
    if not callable(optimizer):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} is not callable; legal is a callable that takes the list of "
            f"parameters and returns an optimizer, such as functools.partial(torch.optim.NAdam, lr=1e-3)"
        )
    if in_parts or config.memory.placement != "device":
        raise ValueError(
            f"optimizer: one of your own needs whole tensors and whole state on each device. Legal: "
            f"zero.stage=0 (now {config.zero.stage}), memory.placement='device' (now {config.memory.placement!r}) "
            f"and no tensor axis (now {mesh.size('tensor')}); or a type of config.optimizer"
        )
    if config.precision.master_dtype == "split":
        raise ValueError(
            "optimizer: one of your own updates whole float32 weights, which precision.master='split' keeps nowhere; "
            "legal: 'auto', or a type of config.optimizer"
        )
    if config.optimizer.update_when == "backward":
        raise ValueError(
            "optimizer: one of your own updates all weights at once, which optimizer.update_when='backward' does "
            "chunk by chunk; legal: 'step', or a type of config.optimizer"
        )
    if config.optimizer != OptimizerConfig():
        warn("optimizer: config.optimizer has no effect beside one of your own")


def _build_chunks(
    module: nn.Module, names: GlobalNames, originals: Mapping[str, nn.Parameter], recipes: Mapping[str, Recipe] | None,
    parallelized: Parallelized, packed: Sequence[ChunkSpec], stages: Stages, context: Context,
    order: Sequence[str], records: TaskRecords,
) -> tuple[tuple[Chunk, ...], tuple[FrozenChunk, ...]]:  # fmt: skip
    """Allocate and fill the chunks of this rank's parameters; `order` names all parameters in order of use.

    Trainable chunks are not filled if their records were parked. Parameters in no chunk are converted in place. Those
    of integers keep their dtype."""
    config, device = context.config, context.device
    specs, ops = parallelized.specs, parallelized.ops
    precision = Precision.of(config.precision)
    layout, coords = context.mesh.layout, context.mesh.coords
    _materialise(module, device, precision.compute)
    named = names.parameters(module)

    def initial(name: str, start: int, stop: int) -> Tensor:
        def fetch(start: int, stop: int) -> Tensor:
            if recipes is None:
                return originals[name].detach().reshape(-1)[start:stop]
            return replay(recipes[name], config.seed, name, start, stop, device, ops)

        return to_device(cut_range(specs[name], layout, coords, fetch, start, stop), device)

    in_turn = {name: named[name] for name in order if name in named}
    mine = [spec for spec in packed if stages.is_holder(spec.key.stages)]
    if (base := config.memory.shared_base) is not None and config.memory.moves:
        kept = [entry.name for spec in mine if not spec.key.trains for entry in spec.entries]
        form = {name: (named[name].shape, precision.compute) for name in kept}
        state_base(records, base, form, context.mesh.world)
    chunks = build_chunks(
        in_turn, mine, specs, config, context.mesh, device,
        lambda spec: stages.is_first_holder(spec.key.stages), records, ops,
    )  # fmt: skip
    frozen = build_frozen(mine, config, context.mesh, device, records)
    changes = OwnChanges(named)
    for chunk in (*chunks, *frozen):
        left = records.kept is not None and chunk.spec.key.trains
        chunk.changes = changes
        chunk.adopt(named, None if left else initial)
    packed_names = {entry.name for spec in packed for entry in spec.entries}
    for name in named.keys() - packed_names:
        parameter = named[name]
        dtype = precision.compute if parameter.is_floating_point() else parameter.dtype
        parameter.data = initial(name, 0, parameter.numel()).view(parameter.shape).to(dtype)
    return chunks, frozen


def _materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace parameters on meta by real ones without storage of their own; ties stay ties."""
    real: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in real:
                kept = dtype if parameter.is_floating_point() else parameter.dtype
                empty = torch.empty((), dtype=kept, device=device).expand(parameter.shape)
                real[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            owner._parameters[name] = real[id(parameter)]
