"""The training step, on one page, and what it needs around it.

Note: a step.
`train_step` executes a plan: F and B of each micro-batch, REDUCE of each chunk (begun by hooks while B runs), then one
small all-reduce in which the ranks agree on the sums of loss, tokens and squares, on which parameters were used, and on
whether to stop, then UPDATE of each chunk, at once or beside the next forward (updates.py).  Backward is seeded with
the *sum* of the token losses, so that no count is needed before it; the division by the global number of valid tokens
is done together with the clip factor inside the optimizer.  Hence the loss is the mean over all valid tokens of the
global batch whatever the cut, with what a model emits beside it (auxiliary.py), and gradients are those of that loss.
A step whose loss or gradient is not finite, or that has no valid token, is skipped and says so.

Cost of data parallelism per step: what zero/stages.py says of each gradient chunk (at stage 0 one all-reduce), one
all-reduce of `5 + parameters` float64, and, where the model has dropout or auxiliary losses, one all-gather of the
ranks' batch sizes.

With `optimizer.update_when="backward"` the UPDATE of each chunk stands right behind its REDUCE, while backward runs,
and loss and tokens are agreed on before it too (zero/in_backward.py).  There a gradient that is not finite cannot be
skipped: the step raises, and nothing goes on but from a checkpoint.  Until `step` is over some weights are new and
others are not, so whatever else would read or change them is refused.

A pipeline is the same step with a longer plan (pipeline/schedule.py `step_plan`): this rank's stages, messages between
them, TIED_REDUCE of what several stages use.  Its cost beside: the messages, and the all-gather of batch sizes in any
case, so that all data ranks cut into as many micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from colossal_lite.checkpoint.checkpointer import Checkpointer, Saving
from colossal_lite.checkpoint.run_state import Loaded, RunFacts
from colossal_lite.config.config import Config
from colossal_lite.data.batch import Batch
from colossal_lite.engine.context import Context, noting_faults, reason_of
from colossal_lite.engine.full_state import FullState, GlobalNames, own_config
from colossal_lite.engine.memory_report import LinkMarks, LinkRow, MemoryRow, Metering, rows_of_state
from colossal_lite.engine.micro_batches import MicroBatches
from colossal_lite.engine.step_totals import LocalSums, StepTotals, all_reduce_totals
from colossal_lite.engine.task_resume import TaskResume
from colossal_lite.engine.update_timing import Updates, refuse_second_backward, spoilt
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.disk_file import DiskError
from colossal_lite.memory.packing import ChunkSpec, stages_of
from colossal_lite.memory.task_records import ParkedState, TaskRecords
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.lr_schedules import learning_rate_factor
from colossal_lite.numerics.precision import LossScale
from colossal_lite.numerics.random import CountedOnly, DropoutStreams
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.parallel.loss import Criterion, Loss, logits_of, refuse_means
from colossal_lite.parallel.parallelize import Parallelized, facts_of
from colossal_lite.pipeline.runtime import Runtime, Work
from colossal_lite.pipeline.stages import Stages
from colossal_lite.pipeline.step_plan import splits_backward
from colossal_lite.pipeline.step_plans import StepPlans, report_of
from colossal_lite.schedule.drawing import ScheduleReport
from colossal_lite.schedule.footprint import most_arrivals
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.transforms.activation_checkpoint import remove_activation_checkpoint
from colossal_lite.transforms.auxiliary_loss import unbind
from colossal_lite.transforms.split_backward import (
    DeferredWeightGrads,
    WeightGradStore,
    defer_weights,
    restore_weights,
)
from colossal_lite.zero.build_chunks import chunk_optimizer, sharding_of
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.grad_norm import fast_squares, in_order, ordered_squares
from colossal_lite.zero.gradient_hooks import StageHooks
from colossal_lite.zero.memory_budget import Forecast, MemoryBudget
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather, weights_of
from colossal_lite.zero.user_optimizer import Factory, OwnOptimizer

MIXED = "a load failed halfway, or a step has spoilt them: the weights are a mix; load a checkpoint first"


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` 0-d, equal on every rank; `grad_norm` before clipping; `lr` of the default group."""

    step: int
    loss: Tensor
    grad_norm: float
    tokens: int
    skipped: bool
    lr: float


@dataclass(frozen=True)
class Built:
    """What `initialize` has made of a model: this rank's part of it, and how the whole lies."""

    model: nn.Module
    names: GlobalNames
    stages: Stages
    parallelized: Parallelized
    streams: DropoutStreams
    packed: tuple[ChunkSpec, ...]
    """Chunks of the whole pipeline that train."""
    chunks: tuple[Chunk, ...]
    """Those of this rank."""
    frozen: tuple[WeightChunk, ...]
    """This rank's chunks that do not train; none where frozen parameters are whole."""
    trainable: Mapping[str, torch.Size]
    """Trainable parameters of the whole pipeline, in the model's order, with their shapes on a rank of it."""
    records: TaskRecords
    """What rests on the host."""
    outlives: bool
    """Whether that is to be there for another engine."""

    def apart(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Those of this rank that are in no chunk: frozen and whole."""
        chunks: tuple[WeightChunk, ...] = (*self.chunks, *self.frozen)
        in_chunks = {entry.name for chunk in chunks for entry in chunk.spec.entries}
        return [parameter for name, parameter in parameters.items() if name not in in_chunks]


class Engine:
    """A model in training. Made by `initialize`; see DESIGN 2 for the two ways to drive it."""

    def __init__(
        self, built: Built, context: Context, criterion: Criterion | None, optimizer: Factory | None = None,
        forecast_batch: Forecast | None = None,
    ) -> None:  # fmt: skip
        config, mesh, done = context.config, context.mesh, built.parallelized
        model, chunks = built.model, built.chunks
        self.model, self.context, self.mesh = model, context, mesh
        self.steps, self.stop_agreed = 0, False
        self._parallelized, self._streams, self._auxiliary = done, built.streams, done.auxiliary
        self._stages, self._packed = built.stages, built.packed
        self._chunks, self._frozen = chunks, built.frozen
        self._facts, self._sharding = facts_of(model), sharding_of(config)
        self._parameters = named = built.names.parameters(model)
        self._apart = built.apart(named)
        self._in_order = in_order(built.packed, dict.fromkeys(built.names.first.values()))
        # gradients, weights, and state of the optimizer
        self._hooks = hooks = StageHooks(chunks, named, by_micro_batch=self._sharding.by_micro_batch)
        weights = weights_of(model, named, chunks, hooks, mesh.world, config.zero, built.frozen)
        self._weights, self._queue = weights, _queue_of(model, config)
        self._optimizer = state = _optimizer_of(built, context, optimizer, named)
        if isinstance(weights, ParameterGather) and state.tiers:
            weights.up = state.tiers.up
        self._memory_budget = _memory_budget_of(built, context, weights, state, hooks, self._apart)
        self._forecast_batch, self._metering, self._marks = forecast_batch, Metering(), LinkMarks(state.links)
        self._updates = Updates(chunks, state, weights, hooks, self._metering, mesh, config)
        # forward and backward
        self._micro_batches = MicroBatches(context, done, self._facts.vocabulary if self._facts else None)
        self._plans = StepPlans(config, built.stages, built.packed)
        self._runtime = Runtime(mesh.axis("pipeline"), built.stages.placement, context.device, mesh.progress)
        self._randomness = CountedOnly()
        self._loss, self._loss_scale = Loss(done, criterion), LossScale.of(config.precision)
        # Ranks of one data coordinate compute the same loss; one of those with the last stage tells it.
        self._tells_loss = done.strategy.owns_loss and built.stages.last in built.stages.here
        self._sums = LocalSums(context.device)  # since the last step
        self._totals: StepTotals | None = None
        self._by_count: bool | None = None  # manual mode: whether backward was given counts
        self._calls = 0  # manual mode: of backward since the last step
        self._callbacks: list[Callable[[StepResult], None]] = []
        self._reads_weights = False  # whether one of them may
        # what goes in and out
        self._whole = FullState(
            model, mesh, built.names, built.stages, done.specs, chunks, weights, state, built.frozen
        )
        self._checkpoints = Checkpointer(
            mesh.layout, mesh.rank, context.store, keep=config.checkpoint.keep,
            timeout_s=config.timeout_s, heard=context.first_failure,
        )  # fmt: skip
        self._task_resume = TaskResume(built.records, built.outlives, model, state, mesh.world)
        self._at_end = ExitStack()  # of the context, unless this is closed before: that may be long after
        self._at_end.callback(self._end)
        self._at_end.callback(self._checkpoints.settle)
        context.on_close(self._at_end.close)
        context.on_close(context.tell_fault)
        self._take_up()
        built.records.on_flush = self._rest

    # ---- a step ----

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's part of the global batch."""
        self.forward_backward(batch)
        return self.step()

    @noting_faults
    def forward_backward(self, batch: Any) -> Tensor:
        """Gradients of the global mean loss, which is returned: 0-d, equal on every rank."""
        with self._measured():
            parts = self._begin(batch)
        self._forecast([part.inputs for part in parts])
        with self._measured():
            self.model.train()
            self._run(parts, self._sums)
            self._auxiliary.check_delivered()
            self._hooks.conclude()
            self._totals = self._agree()
            self._auxiliary.check_count(self._totals.weight)
        self._settle()
        return self._totals.mean_loss

    @noting_faults
    def step(self) -> StepResult:
        """Update the parameters from the gradients gathered since the last step.

        With `optimizer.update_when="backward"` backward has updated them: the step is counted, and what some rank has
        lacked a gradient for is updated. Then raises ValueError for gradients that were not finite: the weights have
        been updated with them, and a checkpoint has to be loaded."""
        if self._totals is None:
            self._finish_manual()
        totals = self._totals
        assert totals is not None
        factor = self._rate_factor
        skipped = not totals.is_finite or totals.weight == 0
        self._weights.flush()  # of modules that were not used, the weights may still be on their way
        if self._updates.under_way:
            self._updates.end(totals)
            if not totals.is_finite:
                self._spoil(
                    f"step: a gradient is not finite (norm {totals.grad_norm}), and has updated weights"
                )
        deferred = (
            None if skipped or self._updates.within_backward else self._updates.deferred(totals, factor)
        )
        if totals.weight:
            self._loss_scale = self._loss_scale.after(totals.is_finite)
        tokens = (
            int(totals.weight) if self._by_count is not False else 0
        )  # unknown when backward got no counts
        self._forget()
        if deferred is None:
            self._hooks.clear()  # of a step that was skipped, or updated in backward
            self._updates.remake()
        elif self._updates.defers:
            self._weights.defer(deferred)
        else:
            self._weights.update(deferred)
        self.steps += 1
        self.mesh.progress.phase, self.mesh.progress.step = "between steps", self.steps
        self.stop_agreed = totals.stop
        result = StepResult(
            self.steps, totals.mean_loss, totals.grad_norm, tokens, skipped,
            self._optimizer.peak_lr * factor,
        )  # fmt: skip
        if self._reads_weights:
            self._weights.for_readers()
        for callback in self._callbacks:
            callback(result)
        return result

    @torch.no_grad()
    @noting_faults
    def eval_step(self, batch: Any) -> Tensor:
        """The global mean loss of a batch, without gradients: 0-d, equal on every rank."""
        self._updates.refuse_within("eval_step")
        parts = self._read(batch)
        self._forecast([part.inputs for part in parts])
        self._rest()
        was_training = self.model.training
        self.model.eval()
        sums = LocalSums(self.context.device)
        with nullcontext() if self._memory_budget is None else self._memory_budget.evaluated():
            self._run(parts, sums)
        self.model.train(was_training)
        loss_sum, count = self.mesh.world.all_reduce(sums.reported_loss(self._tells_loss)).tolist()
        self._auxiliary.check_count(count)
        return torch.tensor(loss_sum / count if count else math.nan, dtype=torch.float64)

    # ---- the Colossal-AI manner: the user's own loop ----

    @noting_faults
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch; logits come over the full vocabulary."""
        self._refuse_own_loop("engine(x)")
        self._updates.refuse_within("engine(x)")
        inputs = args[0] if args else kwargs["input_ids"]
        first = self._micro_batches.first_sample(self._micro_batches.sizes(inputs))
        samples = torch.arange(first, first + inputs.shape[0], device=self.context.device)
        strategy = self._parallelized.strategy
        local = strategy.local_part(Batch(args, kwargs, labels=samples, samples=samples))
        self._streams.begin(self.steps, local.samples, local.token_positions)
        self._forecast([inputs] * self.context.config.gradient_accumulation)
        with self._measured(), self._weights.forward():
            outputs = self.model(*local.args, **local.kwargs)
        logits = getattr(outputs, "logits", outputs)
        if not isinstance(logits, Tensor):
            return outputs
        whole = strategy.whole_batch(strategy.whole_vocabulary(logits))
        if logits is outputs:
            return whole
        outputs.logits = whole
        return outputs

    @noting_faults
    def zero_grad(self) -> None:
        """Forget gradients that no step has used. Collective after a step that was given up on every rank: an error in
        its forward or backward that was caught. Raises ValueError where they have updated weights already
        (`optimizer.update_when="backward"`): a checkpoint has to be loaded."""
        self._forget()
        mixed = self._updates.under_way
        if (
            self._weights.has_deferred
        ):  # then there are none: they come after a forward, before which all is paid
            return
        self._give_up()
        self._hooks.clear()
        self._updates.remake()
        if mixed:
            self._spoil("zero_grad: the gradients of this step have updated weights")

    @noting_faults
    def backward(self, loss: Tensor, count: int | Tensor | None = None) -> None:
        """Add the gradient of `loss` (0-d); where gradients are reduced by micro-batch, every rank makes as many
        calls.

        `count`: the loss is a mean over so many tokens, and the step divides by
        the global number; None: every data rank weighs the same, and the losses of several calls add up.
        With `optimizer.update_when="backward"` the weights are updated when this returns, up to those that `step`
        updates; there is one call a step."""
        self._refuse_own_loop("backward")
        if self._by_count is not None and self._by_count != (count is not None):
            raise ValueError(
                "backward: count is given in some calls of this step and not in others; give it in all or none"
            )
        self._updates.refuse_within("backward")
        if self._by_count is not None:
            refuse_second_backward(self.context.config)
        self._by_count = count is not None
        is_scaled = self.loss_scale != 1.0  # then, and only then, a count on the device is waited for
        seed = self._loss_scale.seed(int(count) if is_scaled and count is not None else 1)
        self._before_backward()
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        total = wide if count is None else wide * count
        self._sums.add(total.detach(), 0 if count is None else count)
        if self._updates.within_backward:
            if count is None:
                self._sums.weigh_alike()
            self._updates.begin(self._sums.reported_loss(self._tells), self._rate_factor)
        self._calls += 1
        is_last = self._calls == self.context.config.gradient_accumulation
        self._hooks.begin(0, is_last=False, seed=seed, frees=is_last)
        with self._measured(), self._weights.backward():
            (total if seed == 1.0 else total * seed).backward()
        if self._sharding.by_micro_batch:
            self._reduce_all()

    # ---- whole tensors ----

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the global mean loss, unclipped, by the serial model's parameter names.

        After `forward_backward`, before `step`. A parameter that no rank used has zeros.
        """
        if self._updates.within_backward:
            raise ValueError(
                "full_gradients: optimizer.update_when='backward' keeps none, each is used up in backward; "
                "legal: 'step'"
            )
        if self._totals is None:
            raise ValueError("full_gradients: there are none; call it after forward_backward and before step")
        return self._whole.gradients(self._totals.weight)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict()`: copies in host memory, parameters in the master dtype, frozen ones in
        their own. Collective."""
        self._updates.refuse_within("full_state_dict")
        self._rest()
        return self._whole.state_dict()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For each trainable parameter its state tensors in its own shape, and `step`, the updates it has taken.
        Collective."""
        self._updates.refuse_within("full_optimizer_state")
        self._rest()
        return self._whole.optimizer_state()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from a serial state dict.

        Raises ValueError listing every missing, unexpected and misshapen tensor, and then changes nothing.
        """
        self._updates.refuse_within("load_full_state_dict")
        self._rest()
        self._optimizer.changing(self._frozen)
        try:
            self._whole.load(state)
        except ValueError:  # of tensors that do not fit
            self._optimizer.unchanged()
            raise

    # ---- checkpoints ----

    def save(
        self, directory: str | Path, *, samples: int = 0, extra: Mapping[str, Any] | None = None
    ) -> Saving:
        """Write a checkpoint `directory/step-NNNNNNNN`, whole or not at all. Collective: every rank calls it.

        `samples`: what the run has used of its stream (`Loader.samples`); `extra`: JSON of one's own.  With
        `checkpoint.asynchronous` it returns when this rank's state is copied; `.wait()` then tells how it ended.
        Raises CheckpointError, on every rank alike, if it failed twice; training may go on.
        """
        self._updates.refuse_within("save")
        if self._checkpoints.is_mixed:
            raise ValueError(f"save: {MIXED}")
        with suppress(DiskError):  # who reads the records is told it again, and tells every rank
            self._rest()
        config = self.context.config
        facts = RunFacts(
            self.steps, samples, config.seed, config.values(), own_config(self.model), self._optimizer.updates(),
            extra or {}, self._loss_scale.state,
        )  # fmt: skip
        with self.mesh.progress.during("save"):
            held = list(self._whole.held())
            return self._checkpoints.save(
                Path(directory), held, facts, asynchronous=config.checkpoint.asynchronous
            )

    def load(self, directory: str | Path) -> Loaded:
        """Continue from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        Any mesh may have saved it.  Raises CheckpointError, on every rank alike, if there is none, or if it does not
        fit (and then changes nothing). After an error halfway the weights are a mix, and no step begins until another
        load has gone well.
        """
        loaded = self._load(directory, missing_ok=False)
        assert loaded is not None
        return loaded

    def resume(self, directory: str | Path) -> Loaded | None:
        """`load`, or None where `directory` holds no checkpoint yet."""
        return self._load(directory, missing_ok=True)

    def _load(self, directory: str | Path, *, missing_ok: bool) -> Loaded | None:
        self._regain_weights()
        if self._optimizer.tiers is None and self._weights.discard():  # else copies are where nobody knows
            self._checkpoints.is_mixed = True
        if not self._weights.has_deferred:
            self._give_up()
        with suppress(DiskError):  # as in `save`
            self._rest()
        held, complete = list(self._whole.held()), self.mesh.size("pipeline") == 1
        settings = self.context.config.values()
        self._optimizer.changing(self._frozen)
        try:
            with self.mesh.progress.during("load"):
                loaded = self._checkpoints.load(
                    Path(directory), held, settings, complete=complete, missing_ok=missing_ok
                )
        except BaseException:
            if not self._checkpoints.is_mixed:
                self._optimizer.unchanged()
            raise
        if loaded is None:
            self._optimizer.unchanged()
        if loaded is not None:
            for chunk in self._chunks:
                with self._optimizer.at_hand(chunk):
                    chunk.publish(0, chunk.owned[1] - chunk.owned[0])
                chunk.start_gather()
            for kept in self._frozen:
                kept.count_change()
            self._optimizer.settle()
            self._weights.flush()
            self._forget()
            self._hooks.clear()
            self._updates.give_up()
            self._optimizer.set_updates(loaded.manifest.updates)
            self._loss_scale = self._loss_scale.at(loaded.manifest.loss_scale)
            self.steps = loaded.step
        return loaded

    def memory_report(self) -> tuple[MemoryRow, ...]:
        """Bytes of weights, masters, gradients and optimizer state on this rank and on which tier (of a kind that rests
        on several a row each), of the slots in which gradients wait to be summed, of those through which state visits
        the device, of what these share under a budget, of messages of a pipeline, and of frozen parameters. All are
        allocated once, at the start, in the first step or when a budget is settled; of slots the peak is what steps
        have used. A model whose backward leaves parameters out may take more of them than were planned. After `metered`
        steps, what those held beside it."""
        device = self.context.device.type
        rows = rows_of_state(
            self._chunks,
            self._weights,
            self._optimizer,
            self.context.config,
            device,
            self._frozen,
            self._apart,
        )
        if self._runtime.comm.size > 1:
            rows = (*rows, MemoryRow("messages", device, *self._runtime.slot_bytes))
        return (*rows, *self._metering.rows(self._forecast_batch, device, self.mesh.shared_bytes))

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Meter the steps within: `memory_report` then has rows more, with the peaks of what a step held beside the
        state: `activations`, what a forward leaves for backward, logits included; `temporaries`, on top at the worst
        moment; `exchange`, what lay in the host's memory for other ranks to read, since the launch.

        Costs a call of Python for each operation of torch (on a CPU a step of 12 ms took 28, one of 1.8 s no longer),
        and nothing outside. Raises ValueError before the first
        step, which makes what stays, and with `compile`, whose code does not tell.
        """
        if self.steps == 0 or self.context.config.compile != "none":
            raise ValueError(
                f"metered: after {self.steps} steps, with compile={self.context.config.compile!r}; legal: after the "
                f"first step, with compile='none'"
            )
        with self._metering.of(self.model):
            yield

    def memory_timeline(self) -> MemoryTimeline:
        """What this rank held over the moments of a metered step (of the one that held most), by kind and tier, beside
        the forecast: `.json()`, `.svg()`. Raises ValueError without `metered` steps."""
        return self._metering.timeline(self.memory_report())

    def timeline(self) -> ScheduleTimeline:
        """What each rank of this pipeline did in the last step, and when, by its host's clock. Collective."""
        return self._runtime.timeline()

    def schedule_report(self) -> ScheduleReport:
        """The last step or evaluation of this pipeline as its plan foretold it, by the costs that it is cut by, and as
        it was measured: `.trace()` for Perfetto, `.svg()`. Collective. Raises ValueError before the first step."""
        if self._runtime.plan is None:
            raise ValueError("schedule_report: no step has run; legal: after train_step or eval_step")
        return report_of(self._runtime.plan, self._stages, self._runtime.timeline())

    def on_step(self, callback: Callable[[StepResult], None], *, reads_weights: bool | None = None) -> None:
        """Call `callback` with the result of every step from now on.

        It finds the model's parameters as new as the step where ranks keep them whole between steps, which waits for
        updates and gathers that would otherwise run beside the next forward; `reads_weights=False` says that it reads
        none, and waits for nothing.  At zero.stage=3 parameters have no values between steps (they read as NaN): there
        a callback reads `full_state_dict()`, on every rank, and True raises ValueError."""
        if reads_weights and isinstance(self._weights, ParameterGather):
            raise ValueError(
                "on_step: reads_weights=True at zero.stage=3, where a rank has a shard of each weight between steps; "
                "legal: a callback that reads engine.full_state_dict(), on every rank"
            )
        self._reads_weights |= reads_weights is not False
        self._callbacks.append(callback)

    @property
    def loss_scale(self) -> float:
        """What fp16 gradients are multiplied with while they are fp16; 1 in every other dtype."""
        return self._loss_scale.scale

    def link_report(self) -> tuple[LinkRow, ...]:
        """Of each link between tiers, since the last step began; empty where all state rests on the device.  What a
        step owes to its updates counts in the one in which they run."""
        return self._marks.rows(self._optimizer.links)

    @property
    def ledger(self) -> Any:
        """Payload bytes and calls per (operation, axis) since the last step began."""
        return self.mesh.ledger

    def close(self) -> None:
        """Take the hooks off the model; its parameters keep their values. A save in flight is waited for.  With a
        store, all state is there from now on, for the next engine of its task."""
        self._checkpoints.settle()
        self._regain_weights()
        kept = self._kept()
        self._hooks.remove()
        remove_activation_checkpoint(self.model)
        restore_weights(self.model)
        unbind(self.model)
        self._weights.remove()
        self._optimizer.close()
        self._leave(kept)
        self._at_end.pop_all()

    def _end(self) -> None:
        """The context closes: what is owed and on its way comes while there are links and ranks to come from, unless a
        rank stops by an error. Then what this rank owes is lost, and whoever reads it is told so."""
        fault = self.mesh.progress.fault
        kept = None
        try:
            is_whole = not self._weights.has_failed  # that was told when it did
            if is_whole and (self.mesh.world_size == 1 or not self.context.first_failure()):
                self._weights.flush()
                kept = None if fault else self._kept()
        except DiskError as error:
            if reason_of(error) != fault:  # else it was told when it came
                raise
        finally:
            self._weights.mark_failed()
            self._optimizer.close()
            self._leave(kept)

    # ---- what outlives it ----

    def _take_up(self) -> None:
        """Go on where the engine before this one has ended, if there was one. Collective with a store."""
        facts = self._task_resume.take_up()
        if facts is None:
            return
        for chunk in self._chunks:
            chunk.start_gather()
        self._weights.flush()
        self._loss_scale = self._loss_scale.at(facts["loss_scale"])
        self.steps = facts["steps"]

    def _kept(self) -> ParkedState | None:
        """All state, brought to the store, and what is not there; None where nothing is to outlive the engine."""
        if not self._task_resume.is_due or self._checkpoints.is_mixed or self._updates.under_way:
            return None
        self._regain_weights()
        self._rest()
        return self._task_resume.kept(self.steps, self._loss_scale.state)

    def _regain_weights(self) -> None:
        """What nobody may read between backward and step, is made of its masters again: the step is given up."""
        if self._updates.lacks_weights:
            self.zero_grad()

    def _leave(self, kept: ParkedState | None) -> None:
        """The records are no longer this engine's."""
        if self._task_resume.is_due:
            self._forget()  # gradients that rested there are gone
        self._task_resume.leave(kept)

    # ---- what the actions do ----

    def _begin(self, batch: Any) -> tuple[Batch, ...]:
        self.mesh.progress.phase = "batch"
        if self._checkpoints.is_mixed:
            raise ValueError(f"forward_backward: {MIXED}")
        if not self._hooks.is_clear and not self._weights.has_deferred:
            raise ValueError(
                "forward_backward: the gradients of the last one were not used; call step or zero_grad"
            )
        self._forget()  # the losses of one that was given up before any gradient came
        self.mesh.ledger.clear()
        self._marks.begin(self._optimizer.links)
        self._metering.begin()
        return self._read(batch)

    def _read(self, batch: Any) -> tuple[Batch, ...]:
        self._optimizer.check()
        return self._micro_batches.of(batch)

    def _run(self, parts: tuple[Batch, ...], sums: LocalSums) -> None:
        """Execute the plan of a step on its micro-batches; loss and weight are added to `sums`."""
        trains = torch.is_grad_enabled()
        shapes = [(trains, part.size, *part.inputs.shape[1:], part.inputs.dtype) for part in parts]
        ahead = self._runtime.knows({s for s, part in zip(shapes, parts, strict=True) if part.size})

        def forward(stage: int, i: int, carried: Any) -> Any:
            outputs = self._forward(stage, parts[i], carried, sums)
            self._metering.forward_ended([part.inputs.shape for part in parts])
            return outputs

        def before_backward(stage: int, i: int, kind: ActionKind, later: DeferredWeightGrads) -> None:
            self._before_backward()
            if self._updates.within_backward:
                self._updates.begin(sums.reported_loss(self._tells), self._rate_factor)
            self._auxiliary.seed = self._seed(parts[i])
            self._hooks.begin(
                stage,
                is_last=i == len(parts) - 1,
                seed=self._seed(parts[i]),
                is_whole=kind is not ActionKind.I,
                frees=i == len(parts) - 1,
                to_come=[leaf for each in later for leaf in each.leaves()] if kind is ActionKind.W else None,
            )

        work = Work(
            forward=forward,
            before_backward=before_backward,
            around_backward=self._weights.backward,
            defer_weight_grads=self._queue.open,
            pass_over=self._pass_over,
            is_empty=lambda i: parts[i].size == 0,
            reduce=lambda action: self._hooks.reduce(_chunk_of(action)),
            tied_reduce=self._tied_reduce,
        )
        posts_ahead = self.context.device.type != "cuda"
        plans = {
            each: self._plans.of(len(parts), backward=trains, ahead=each)
            for each in {ahead and posts_ahead, posts_ahead}
        }
        slots = max(most_arrivals(plan[self._runtime.comm.coord]) for plan in plans.values())
        self._runtime.run(plans[ahead and posts_ahead], work, shapes, slots=slots)

    def _pass_over(self) -> None:
        """The forward of a micro-batch without samples."""
        with self._weights.forward():
            return

    def _forward(self, stage: int, part: Batch, carried: Any, sums: LocalSums) -> Any:
        """What a stage gives for a micro-batch: of the last one the sum of the token losses, ready for backward."""
        local = self._parallelized.strategy.local_part(part)
        self._streams.begin(self.steps, local.samples, local.token_positions)
        heard = self._auxiliary.heard(sums.auxiliary, len(local.samples))
        with self._weights.forward(), self._randomness.held(self.model.training), heard:
            outputs = self._stages.run(stage, carried, local)
        if stage < self._stages.last:
            return outputs
        refuse_means(outputs, type(self.model).__name__)
        outputs = logits_of(outputs)
        loss, count = self._loss.of(outputs, local.labels)
        sums.add(loss.detach(), count)
        seed = self._seed(part)
        # not backward(seed): torch looks at the shape of one by its symbolic shapes, which import 45 MB of sympy
        return loss if seed == 1.0 else loss * seed

    def _seed(self, part: Batch) -> float:
        """What the loss of a micro-batch is multiplied with in backward; the same on every stage."""
        return self._loss_scale.seed(part.labels.numel())

    def _tied_reduce(self, action: Action) -> None:
        """Sum a chunk over the stages that use it, before anything of it is sharded."""
        chunk = self._hooks.chunk(_chunk_of(action))
        holders = self._stages.holders(stages_of(chunk.spec))
        self._runtime.comm.exchange_sum(chunk.completed(), holders, str(action))

    def _refuse_own_loop(self, what: str) -> None:
        """Raises ValueError where the engine alone can go through a step."""
        if self._runtime.comm.size > 1:
            raise ValueError(
                f"{what}: a pipeline runs forward and backward of many micro-batches by its plan; legal: train_step, "
                f"forward_backward and step, eval_step, or parallel.pipeline=1"
            )
        if self._auxiliary.names:
            raise ValueError(
                f"{what}: the model has an auxiliary loss, {self._auxiliary.names[0]}, which is weighed against labels "
                f"that a loop of your own does not show; legal: train_step, forward_backward and step, eval_step"
            )

    def _agree(self) -> StepTotals:
        """Every rank knows the same sums afterwards. The ranks that hold one sum of a chunk add the squares of a share
        each, so that no element counts twice."""
        self.mesh.progress.phase = "agreement"
        if self._sharding.ordered:
            squares = ordered_squares(self._chunks, self._in_order, self.mesh, self.context.device)
        elif not self._chunks:
            squares = torch.zeros(1, dtype=torch.float64, device=self.context.device)
        else:
            squares = fast_squares(self._chunks)
        return all_reduce_totals(
            self.mesh,
            self._sums.reported_loss(self._tells),
            squares,
            self._chunks,
            self._packed,
            stop=self.context.stop_requested,
        )

    @property
    def _tells(self) -> bool:
        """Whether this rank's sums count; in a loop of the user's own every tensor rank has the whole micro-batch's
        loss."""
        if self._by_count is None:
            return self._tells_loss
        return self.mesh.coord("pipeline", "sequence", "tensor") == 0

    @property
    def _rate_factor(self) -> float:
        """What the learning rates of this step are multiplied with."""
        return learning_rate_factor(self.context.config.lr_scheduler, self.steps)

    def _give_up(self) -> None:
        """Of a step that did not come to its end: what other ranks may have begun, this one does too. Collective."""
        if any([self._weights.give_up(), self._hooks.give_up()]):
            self.mesh.world.barrier()  # a rank that has not given up must not go on with what the others have left

    def _rest(self) -> None:
        """Everything that is owed or on its way is where it rests."""
        self._weights.flush()
        self._optimizer.rest()

    def _before_backward(self) -> None:
        """Gradients come now; what of the optimizer's state is needed first may come meanwhile."""
        # The forward has, unless this backward is not of the last one: places have their order.
        self._weights.run_deferred()
        if self._memory_budget is None or self._memory_budget.placement is not None:
            self._optimizer.prepare()

    def _spoil(self, why: str) -> NoReturn:
        """Weights have been updated by a step that is none. Raises ValueError."""
        self._updates.give_up()
        self._hooks.clear()
        self._rest()
        self._forget()
        self._checkpoints.is_mixed = True
        raise spoilt(why)

    def _finish_manual(self) -> None:
        if self._by_count is None:
            raise ValueError("step: there are no gradients; call forward_backward, or backward, first")
        if not self._by_count:
            self._sums.weigh_alike()  # however many calls
        if not self._sharding.by_micro_batch:
            self._reduce_all()
        with self._measured():
            self._hooks.conclude()
            self._totals = self._agree()
        self._settle()

    def _forecast(self, inputs: Sequence[Tensor]) -> None:
        """Before a batch under a budget, whose micro-batches have such inputs [B, T]: one that `plan` foretells not to
        fit is refused. Models and losses that `plan` does not know, and the kernels of a GPU, are measured."""
        if self._memory_budget is None:
            return
        known = self._facts is not None and self._loss.criterion is None and self.context.device.type == "cpu"
        samples, tokens = sum(len(ids) for ids in inputs), inputs[0].shape[1] if inputs[0].dim() > 1 else 1
        self._memory_budget.forecast(
            samples, tokens, self._forecast_batch if known else None, trains=torch.is_grad_enabled()
        )

    def _settle(self) -> None:
        """Before the first update under a budget: where everything rests from now on."""
        if self._memory_budget is not None:
            self._memory_budget.settle()

    def _measured(self) -> AbstractContextManager[None]:
        return nullcontext() if self._memory_budget is None else self._memory_budget.measured()

    def _reduce_all(self) -> None:
        for chunk in reversed(self._chunks):
            self._hooks.reduce(chunk.spec.id)

    def _forget(self) -> None:
        self._totals, self._by_count, self._calls = None, None, 0
        self._sums.clear()


def _queue_of(model: nn.Module, config: Config) -> WeightGradStore:
    """Where layers put off the gradients of their weights, if the schedule computes them apart."""
    queue = WeightGradStore()
    if splits_backward(config.parallel.pipeline):
        defer_weights(model, queue)
    return queue


def _optimizer_of(
    built: Built, context: Context, factory: Factory | None, parameters: Mapping[str, nn.Parameter]
) -> ChunkOptimizer | OwnOptimizer:
    """That of the config, or what the user's own `factory` makes. Collective, and refuses, as `chunk_optimizer`."""
    config = context.config
    if factory is not None:
        scheduled = config.lr_scheduler.type != "constant"
        return OwnOptimizer(built.chunks, built.trainable, factory, scheduled=scheduled)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    ops = built.parallelized.ops
    return chunk_optimizer(built.chunks, config, ops, shapes, context.mesh, built.records, built.frozen)


def _memory_budget_of(
    built: Built, context: Context, weights: ForwardGates, optimizer: ChunkOptimizer | OwnOptimizer,
    hooks: StageHooks, apart: Sequence[nn.Parameter],
) -> MemoryBudget | None:  # fmt: skip
    """Where everything rests, if not all of it on the device for good. Raises ConfigError as `MemoryBudget`."""
    memory = context.config.memory
    if not (memory.moves or memory.device_budget is not None or memory.host_budget is not None):
        return None
    try:
        return MemoryBudget(
            context.config, built.chunks, weights, optimizer, context.mesh.world, device=context.device,
            frozen=built.frozen, apart_bytes=sum(p.nbytes for p in apart), outlives=built.outlives,
            began=lambda: hooks.began,
        )  # fmt: skip
    except BaseException:
        optimizer.close()  # it may have a file
        raise


def _chunk_of(action: Action) -> int:
    assert action.chunk is not None
    return action.chunk
