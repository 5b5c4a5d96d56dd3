"""Runs training steps: forward, backward, gradient reduction, one agreement of the ranks, and updates.

Note: the numbers of a step.
Backward is seeded with the *sum* of the token losses, so it needs no token count.  The optimizer divides by the global
number of valid tokens, together with the clip factor.  So the loss is the mean over all valid tokens of the global
batch, however it is split.  Auxiliary losses (transforms/auxiliary_loss.py) are added to it.  The gradients are those
of that loss.  A step is skipped if its loss or gradient is not finite, or if it has no valid token.

Cost of data parallelism per step: the collectives of each gradient chunk (zero/state_bytes.py; at stage 0 one
all-reduce), and one all-reduce of `5 + parameters` float64.  Dropout or auxiliary losses add one all-gather of the
ranks' batch sizes.

Note: a pipeline.
The step is the same with a longer plan (pipeline/step_plan.py).  The plan has this rank's stages, the messages between
them, and TIED_REDUCE of chunks that several stages use.  It adds the cost of the messages.  The batch sizes are always
gathered, so all data ranks cut their batch into equally many micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossal_lite.checkpoint.checkpointer import Saving
from colossal_lite.checkpoint.files import folder_given
from colossal_lite.checkpoint.manifest import plain
from colossal_lite.checkpoint.run_state import Loaded
from colossal_lite.checks.batch_arguments import AllowedArguments
from colossal_lite.checks.foreign_steps import ForeignSteps
from colossal_lite.checks.model_structure import OwnForward
from colossal_lite.checks.rank_comparison import RankComparison, changes_apart
from colossal_lite.config.call_forms import with_form
from colossal_lite.config.config import Config
from colossal_lite.config.errors import shown
from colossal_lite.data.batch import Batch, first_input
from colossal_lite.data.batch_forms import named
from colossal_lite.engine.context import Context, noting_faults
from colossal_lite.engine.determinism import enforced
from colossal_lite.engine.engine_parts import Built, assemble
from colossal_lite.engine.engine_reports import EngineReports
from colossal_lite.engine.engine_state import EngineState, last_save_failed
from colossal_lite.engine.memory_report import LinkRow, MemoryReport
from colossal_lite.engine.micro_batches import MicroBatches
from colossal_lite.engine.other_names import refuse_closure, told_instead
from colossal_lite.engine.step_totals import (
    LocalSums,
    OpenStep,
    SkippedSteps,
    StepResult,
    StepTotals,
    all_reduce_totals,
)
from colossal_lite.engine.stopping import StopPoint
from colossal_lite.engine.update_watch import UpdateWatch
from colossal_lite.engine.user_loop import UserLoop
from colossal_lite.memory.pinned import give_back_freed
from colossal_lite.numerics.lr_schedules import factor_by, learning_rate_factor
from colossal_lite.numerics.precision import LossScale
from colossal_lite.numerics.torch_modes import naming_transforms, outside_inference, refuse_without_gradients
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.observe.printed_lines import warn
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.observe.tables import Rows
from colossal_lite.parallel.loss import Criterion, ModelLoss, reader_of, refuse_means
from colossal_lite.parallel.parallelize import facts_of, stated_sizes
from colossal_lite.pipeline.runtime import Runtime, Work
from colossal_lite.pipeline.step_plans import StepPlans
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.transforms.module_modes import modes_kept
from colossal_lite.transforms.split_backward import DeferredWeightGrads
from colossal_lite.zero.budget_messages import Forecast
from colossal_lite.zero.build_chunks import sharding_of
from colossal_lite.zero.grad_norm import in_order, squares_of
from colossal_lite.zero.memory_budget import lengths_of
from colossal_lite.zero.user_optimizer import Factory
from colossal_lite.zero.weight_slots import ShardedWeights

BATCH = "where a batch is one value: (inputs, labels), or a dict"


class Engine:
    """Trains a model. Made by `initialize`; see DESIGN 2 for the two ways to drive it.

    The phases of a step, in `forward_backward` (1 to 4) and `step` (5 and 6):
    1. `_begin`: check the batch, cut it into micro-batches, start the counts of the step.
    2. `_run`: run the plan, F and B of each micro-batch. Hooks start the REDUCE of a chunk while B runs.
    3. `StageHooks.conclude`: wait until every chunk is reduced.
    4. `_agree`: one all-reduce of loss, tokens, squares, parameters in use, and the request to stop.
    5. UPDATE of each chunk: at once, beside the next forward, or already in phase 2 (update_timing.py).
    6. Count the step, and call the callbacks. If a rank has received a stop signal: save and raise `Stopped`.

    `EngineState` reads, saves and loads between steps; `EngineReports` reports; `UserLoop` is phase 2 of a loop that
    the user writes."""

    def __init__(
        self, built: Built, context: Context, criterion: Criterion | ModelLoss | None,
        optimizer: Factory | None = None, forecast_batch: Forecast | None = None,
        lr_lambda: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        config, mesh, done = context.config, context.mesh, built.parallelized
        parts = assemble(built, context, optimizer)
        self.model, self.context, self.mesh = built.model, context, mesh
        self._is_closed = False
        self._parts, self._parallelized, self._stages = parts, done, built.stages
        self._streams, self._auxiliary = built.streams, done.auxiliary
        self._chunks, self._packed = built.chunks, built.packed
        self._facts, self._sharding = facts_of(built.model), sharding_of(config)
        self._in_order = in_order(built.packed, dict.fromkeys(built.names.first.values()))
        self._hooks, self._weights, self._optimizer = parts.hooks, parts.weights, parts.optimizer
        self._memory_budget, self._updates = parts.memory_budget, parts.updates
        self._lr_lambda = lr_lambda
        self._metering = parts.metering
        forecast_batch = self._forecast_batch = forecast_batch and partial(
            forecast_batch, found=lambda: parts.config
        )
        # forward and backward
        self._comparison = RankComparison(mesh, built.model, context.device, changes_apart(config))
        stated = stated_sizes(built.model, built.names.state)
        allowed = AllowedArguments.of(built.model, mesh, config.parallel, done.padding.cuts, done.shown)
        self._micro_batches = MicroBatches(
            context, done, stated, self._comparison, built.first_batch, allowed, seen_padding=built.seen_padding,
            loss=reader_of(criterion),
        )  # fmt: skip
        self._plans = StepPlans(config, mesh.layout, built.stages, built.all_packed)
        self._runtime = Runtime(mesh.axis("pipeline"), built.stages.placement, context.device, mesh.progress)
        self._loss = parts.loss(criterion)
        guard = OwnForward.of(built.model, mesh)
        self._running = nullcontext if guard is None else guard.running
        # whether ranks have different parts of a batch
        self._is_shared = mesh.size("data", "sequence") * config.parallel.tensor.sample_parts > 1
        # Ranks of one data coordinate compute the same loss. One of those with the last stage reports it.
        self._tells_loss = done.strategy.owns_loss and built.stages.last in built.stages.here
        self._open = OpenStep(LossScale.of(config.precision), context.device)
        self._callbacks: list[Callable[[StepResult], None]] = []
        self._after_evaluation: list[Callable[[int], object]] = []
        self._end_run: Callable[[], object] = lambda: None
        self._reads_weights = False  # whether one of them may
        hides = config.zero.stage > 0 or config.memory.placement != "device"
        self._skips = SkippedSteps(config.optimizer.max_skipped_steps, hides, self._open.loss_scale.fixed)
        self._loop = UserLoop(parts, self._open, self._micro_batches, self._comparison)
        self._reports = EngineReports(parts, self._runtime, self._open, forecast_batch)
        self._state = EngineState(parts, self._open, self._comparison)
        self._watch = UpdateWatch(parts, self._state.rest)
        self._at_end = ExitStack()  # runs when the context closes, unless the engine was closed before
        self._switched = ExitStack()  # what torch was switched to for this engine
        self._register_ends()
        self._state.resume_task()
        built.records.on_flush = self._state.rest
        self._is_made = True

    def _register_ends(self) -> None:
        """What runs when the engine or its context is closed, the last first."""
        context = self.context
        if context.config.deterministic:
            self._switched.callback(enforced())
        self._switched.callback(ForeignSteps(self.model).close)
        context.on_close(self._switched.close)
        self._at_end.callback(self._let_go)
        self._at_end.callback(self._state.end)
        self._at_end.callback(self._state.close_checkpoints)
        context.on_close(self._at_end.close)
        context.on_close(context.tell_fault)
        context.on_finish(partial(last_save_failed, self._state.checkpoints, context, self._open))

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__ and not name.startswith("_"):
            raise ValueError(
                f"engine.{name} = {shown(value)}: nothing reads attributes set on an engine, so training would not "
                f"change. Legal: the config of cl.launch (optimizer.lr, lr_scheduler, clip_grad_norm), or a variable. "
                f"Or cl.initialize(lr_lambda=...) for learning rates of your own"
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # to a type checker, a name that is not here is a mistake

        def __getattr__(self, name: str) -> Any:
            if (told := told_instead(name, self.__dict__.get("model"))) is not None:
                raise AttributeError(told, name=name, obj=self)
            return super().__getattribute__(name)

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed; then it trains no more."""
        return self._is_closed

    @property
    def config(self) -> Config:
        """The configuration, with all that was found: the mix of updates may be found anew between two steps."""
        return self._parts.config

    @property
    def steps(self) -> int:
        """Optimizer steps made so far, those before a checkpoint was loaded included."""
        return self._open.number

    @property
    def samples(self) -> int:
        """Samples that these steps have used, on all ranks. A load sets it, and so does a save that states samples."""
        return self._open.samples_before

    # ---- a step ----

    @with_form("engine.train_step", f"engine.train_step(batch), {BATCH}")
    def train_step(self, batch: Any) -> StepResult:
        """Run one optimizer step on this rank's part of the global batch. Raises as `step`."""
        self.forward_backward(batch)
        return self.step()

    @noting_faults
    @with_form("engine.forward_backward", f"engine.forward_backward(batch), {BATCH}")
    def forward_backward(self, batch: Any) -> Tensor:
        """Compute gradients of the global mean loss. Returns that loss: 0-d, equal on every rank."""
        with self._parts.measured():
            parts = self._begin(batch)
        self._open.own_samples = sum(part.size for part in parts)
        self._forecast([part.inputs for part in parts], parts[0].arguments)
        if self._watch.begin([part.inputs for part in parts]):
            self._reports.begin_step()
        with self._parts.measured(), self._comparison.giving_up(self.zero_grad), self._watch.computing():
            self._state.structure.train()
            self._run(parts, self._open.sums)
            self._auxiliary.check_delivered()
            self._hooks.conclude()
            totals = self._open.totals = self._agree()
            self._comparison.delivered()
            self._auxiliary.check_count(totals.weight)
        self._settle()
        self._hooks.held.hold()
        return totals.mean_loss

    @noting_faults
    def step(self, closure: None = None) -> StepResult:
        """Update the parameters from the gradients gathered since the last step. Raises ValueError for a closure, as
        torch's optimizers take it.

        With `optimizer.update_when="backward"` backward has updated them. Then this counts the step, and updates
        chunks for which some rank had no gradient. It raises ValueError if a gradient was not finite. The weights have
        been updated with it then, so load a checkpoint.

        If a rank has received a stop signal, raises `Stopped` after the callbacks, on every rank. The state is saved
        first, in the directory of `save_on_stop`, or where this engine last saved or resumed. In a loop over several
        engines the last of a round raises it, and all are saved (engine/open_engines.py)."""
        refuse_closure(closure)
        self._hooks.held.release()
        if self._open.totals is None:
            self._finish_user_step()
        totals = self._open.totals
        assert totals is not None
        factor = self._rate_factor()
        skipped = not totals.is_finite or totals.weight == 0
        self._weights.flush()  # weights of unused modules may still be in a copy or gather
        if self._updates.under_way:
            self._updates.end(totals)
            if not totals.is_finite:
                self._state.spoil(
                    f"step: a gradient is not finite (norm {totals.grad_norm}), and has updated weights"
                )
        deferred = (
            None if skipped or self._updates.within_backward else self._updates.deferred(totals, factor)
        )
        if totals.weight:
            self._open.loss_scale = self._open.loss_scale.after(totals.is_finite)
        tokens = int(totals.weight) * (self._open.by_count is not False)  # 0: backward got no counts
        self._open.samples_before += totals.samples
        self._open.clear()
        if skipped:
            self._weights.watch_again()
        if deferred is None:
            self._hooks.clear()  # the step was skipped, or has updated in backward
            self._updates.remake()
        elif self._updates.defers:
            self._weights.defer(deferred)
        else:
            self._weights.update(deferred)
        self._open.number += 1
        if self._parts.first_step.is_open and self.context.device.type == "cpu":
            give_back_freed()  # memory that lies between what the first step has allocated for good
        self._parts.first_step.is_open = False
        self.mesh.progress.phase, self.mesh.progress.step = "between steps", self.steps
        rate = self._optimizer.peak_lr * factor
        result = StepResult(self.steps, totals.mean_loss, totals.grad_norm, tokens, skipped, rate)
        if self._reads_weights:
            self._weights.for_readers()
        for callback in self._callbacks:
            callback(result)
        if (told := self._open.sizes.note(totals.samples)) and self.context.is_main:
            warn(told)
        self._skips.note(self.steps if skipped else None, totals, tells=self.context.is_main)
        if self.context.engines.stepped(self._state, stop=totals.stop):
            raise self._state.stop_all()
        return result

    @with_form("engine.eval_step", f"engine.eval_step(batch), {BATCH}")
    def eval_step(self, batch: Any) -> Tensor:
        """The global mean loss of a batch, without gradients: 0-d, equal on every rank."""
        loss_sum, count = self.eval_sums(batch)
        return torch.tensor(loss_sum / count if count else math.nan, dtype=torch.float64)

    @torch.no_grad()
    @noting_faults
    @with_form("engine.eval_sums", f"engine.eval_sums(batch), {BATCH}")
    def eval_sums(self, batch: Any) -> tuple[float, float]:
        """The sum of the loss over the valid labels of a global batch, and their number; `eval_step` divides the two.
        Over many batches they add up to the mean over all of them. Equal on every rank."""
        began_ns = time.perf_counter_ns()
        self._refuse_closed("eval_step")
        self._loop.forget_loss()
        self._updates.refuse_within("eval_step")
        self._state.refuse_changed("eval_step")
        parts = self._read(batch)
        self._forecast([part.inputs for part in parts], parts[0].arguments)
        self._state.rest()
        sums = LocalSums(self.context.device)
        budget = nullcontext() if self._memory_budget is None else self._memory_budget.evaluated()
        with modes_kept(self.model), budget:
            self.model.eval()
            self._run(parts, sums)
        row = torch.cat([sums.reported_loss(self._tells_loss), self._comparison.term()])
        loss_sum, count, *apart = self.mesh.world.numbers(self.mesh.world.all_reduce(row))
        self._comparison.check(*apart)
        self._auxiliary.check_count(count)
        for callback in self._after_evaluation:
            callback(time.perf_counter_ns() - began_ns)
        return loss_sum, count

    # ---- the Colossal-AI manner: the user's own loop ----

    @noting_faults
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch. Logits cover the full vocabulary: [B, T, V]."""
        self._refuse_closed("engine(x)")
        self._state.refuse_changed("engine(x)")
        self._loss.refuse_calls(self.mesh.size("tensor"))
        local = self._loop.local_part(args, kwargs)
        inputs = first_input(args, kwargs)
        self._open.own_samples += inputs.shape[0] * torch.is_grad_enabled()
        self._forecast([inputs], named(args, kwargs), self.context.config.gradient_accumulation)
        first, watched = self._parts.first_step.forward(None), self._comparison.forward(local)
        with self._parts.measured(), self._weights.forward(), first, self._streams.forward(), watched:
            with naming_transforms(), self._running():
                outputs = self.model(*local.args, **local.kwargs)
        return self._loop.whole_outputs(outputs)

    @noting_faults
    def all_samples(self, x: Tensor) -> Tensor:
        """The rows of all data ranks of x [samples of this rank, ...], in the order of ranks. For a loss between
        samples, such as a contrastive one, in a loop of your own. Every rank computes it of all samples, or the mean of
        its own samples' terms. Its gradient is that of one process. Collective, and so is the backward of what it
        gives. Raises ValueError where ranks have tensors of other shapes."""
        self._refuse_closed("all_samples")
        return self._loop.all_samples(x)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used, as torch does with `set_to_none=True`. Collective after a forward or
        backward whose error was caught, on every rank. Raises ValueError if they have updated weights already
        (`optimizer.update_when="backward"`): a checkpoint has to be loaded."""
        if not set_to_none:
            raise ValueError(
                "zero_grad: set_to_none=False would keep gradients of 0, and the engine keeps none. Legal: True"
            )
        self._comparison.clear()
        self._loop.drop()
        self._comparison.drop(gradients=self._open.calls > 0 or self._open.totals is not None)
        self._state.zero_grad()

    @noting_faults
    @with_form(
        "engine.backward", "engine.backward(loss), or with the count of labels: engine.backward(loss, count)"
    )
    def backward(
        self, loss: Tensor, count: int | Tensor | None = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss` (0-d). Every rank makes equally many calls if each micro-batch is reduced.

        `count`: the loss is a mean over so many tokens, and the step divides by the global number.  0: a loss of
        NaN adds nothing, if its gradient is finite.  None: every data rank has the same weight, and the losses of
        several calls add up.  Then `step` raises RanksDifferError on every rank if ranks have other numbers of samples.
        So for valid labels that the model gets.  With updates in backward this call does.  A warning names means that
        divide by other numbers.  Raises ValueError for a sum over samples on data ranks, and for a count below 0.
        `retain_graph`: keep the graph for a further loss of the same forward.
        With `optimizer.update_when="backward"` the weights are updated when this returns, except those that `step`
        updates. Then a step has as many calls as `gradient_accumulation` says, and the last one updates."""
        self._refuse_closed("backward")
        self._loop.backward(loss, count, self._rate_factor(), retain_graph=retain_graph)

    # ---- full tensors ----

    @outside_inference()
    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the global mean loss, unclipped, by the serial model's parameter names.

        After `forward_backward`, or after the last `backward` of a loop of your own, before `step`. Zeros for a
        parameter that no rank used. Copies in host memory. Collective. Raises ValueError where there are none.
        """
        if (
            self._open.totals is None
            and self._open.by_count is not None
            and not self._updates.within_backward
        ):
            self._hooks.held.release()
            self._finish_user_step()
            self._hooks.held.hold()
        return self._state.full_gradients()

    @outside_inference()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict()`: copies in host memory, parameters in the master dtype, frozen ones in
        their own. Collective."""
        self._refuse_ended("full_state_dict")
        return self._state.full_state_dict()

    @outside_inference()
    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For each trainable parameter its state tensors in its own shape, and `step`, the updates it has taken.
        Collective."""
        self._refuse_ended("full_optimizer_state")
        return self._state.full_optimizer_state()

    @outside_inference()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from a serial state dict.

        Raises ValueError listing every missing, unexpected and misshapen tensor, and then changes nothing. So it does
        for other types than mappings of tensors. Every rank loads the same: the next step compares, and raises
        RanksDifferError. A save before it raises CheckpointError.
        """
        self._refuse_ended("load_full_state_dict")
        self._state.load_full_state_dict(state)
        self._comparison.add_loaded(state, self.steps)

    # ---- checkpoints ----

    @outside_inference()
    def save(
        self, directory: str | Path, *, samples: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> Saving:
        """Write a checkpoint `directory/step-NNNNNNNN`, whole or not at all. Collective: every rank calls it.

        `samples`: samples that the run has used (`Loader.samples`), None: as this engine has counted them; `extra`:
        the caller's own JSON.  With `checkpoint.asynchronous` it returns when this rank's state is copied; `.wait()`
        then returns or raises.  Raises CheckpointError on every rank if it failed twice; training may go on.  Raises
        `Stopped` with exit code 4 if that were `checkpoint.max_failures` saves in a row.

        Between backward and step it writes the state before the step.  Raises ValueError there if a forward of the step
        has changed a buffer. Raises ValueError if another open engine of this context saves to the directory.
        """
        self._refuse_half_step("save")
        return self._state.save(folder_given("save", directory), samples=samples, extra=extra)

    @outside_inference()
    def load(self, directory: str | Path) -> Loaded:
        """Continue from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        Any mesh may have saved it.  Raises CheckpointError on every rank if there is none, or if it does not fit; then
        nothing has changed. After an error halfway the weights are part old, part new. No step begins until another
        load has succeeded.
        """
        if self.config.zero.stage == 3:  # its weights are gathered no more
            self._refuse_closed("load")
        loaded = self._state.load(folder_given("load", directory))
        assert loaded is not None, "a load without a checkpoint raises"
        self._comparison.restart()
        return loaded

    @outside_inference()
    def resume(self, directory: str | Path) -> Loaded | None:
        """`load`, or None if `directory` holds no checkpoint yet."""
        if self.config.zero.stage == 3:  # its weights are gathered no more
            self._refuse_closed("resume")
        loaded = self._state.load(folder_given("resume", directory), missing_ok=True)
        if loaded is not None:
            self._comparison.restart()
        return loaded

    def save_on_stop(
        self, directory: str | Path, *, samples: Callable[[], int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Save to this directory when a signal stops the run: what `extra` has then, and `samples()` (None: as
        counted). Otherwise that is where the engine has saved to last, or resumed from, with the `extra` of then.
        Raises ValueError if another open engine of this context saves there."""
        folder = folder_given("save_on_stop", directory)
        plain({} if extra is None else extra)
        self.context.engines.saves("save_on_stop", folder, self._state)
        self._state.stop_point = StopPoint(
            self.context.is_main, folder, {} if extra is None else extra, samples, is_given=True
        )

    # ---- reports ----

    def memory_report(self) -> MemoryReport:
        """Bytes on this rank by kind (`MemoryReport` lists them) and tier. Buffers are allocated once: at the start, in
        the first step, or when a budget chooses a placement. The peak of a buffer is the most that steps have used. It
        may exceed the plan if backward leaves parameters out. After `metered` steps there are also activations,
        temporaries and exchange."""
        return self._reports.memory_report()

    def metered(self) -> AbstractContextManager[None]:
        """Meter the steps within. `memory_report` then has three rows more, with peaks beside the state.
        `activations`: saved by forward for backward, logits included. `temporaries`: on top of these at the peak.
        `exchange`: in host memory for other ranks to read, since the launch.

        Costs a call of Python for each torch operation: on a CPU a step of 12 ms took 28, one of 1.8 s no longer. It
        costs nothing outside. Raises ValueError before the first step, which allocates the state. Raises it with
        `compile` too, because compiled operations cannot be metered."""
        return self._reports.metered()

    def memory_timeline(self) -> MemoryTimeline:
        """Bytes on this rank by kind and tier, over the metered step with the highest peak, beside the forecast. Has
        `.json()` and `.svg()`. Raises ValueError without `metered` steps."""
        return self._reports.memory_timeline()

    def timeline(self) -> ScheduleTimeline:
        """The actions of each rank of this pipeline in the last step, in seconds of its host's clock. Collective."""
        return self._reports.timeline()

    def schedule_report(self) -> ScheduleReport:
        """The last step or evaluation of this pipeline: as simulated from the costs of its units, and as measured.
        `.trace()` for Perfetto, `.svg()`. Collective. Raises ValueError before the first step."""
        return self._reports.schedule_report()

    def on_step(self, callback: Callable[[StepResult], None], *, reads_weights: bool | None = None) -> None:
        """Call `callback` with the result of every step from now on.

        Where ranks hold full weights between steps, the callback finds the updated ones. For that the step waits for
        updates and gathers that would otherwise run beside the next forward. `reads_weights=False`: it reads none, and
        the step does not wait.  At zero.stage=3 parameters read as NaN between steps. There a callback reads
        `full_state_dict()`, on every rank, and True raises ValueError."""
        if reads_weights and isinstance(self._weights, ShardedWeights):
            raise ValueError(
                "on_step: reads_weights=True at zero.stage=3, where a rank has a shard of each weight between steps; "
                "legal: a callback that reads engine.full_state_dict(), on every rank"
            )
        self._reads_weights |= reads_weights is not False
        self._callbacks.append(callback)

    def begin_run(self, end: Callable[[], object]) -> None:
        """A `Run` of this engine begins, and the one before ends. `end`: ends it in its turn."""
        before, self._end_run = self._end_run, end
        before()

    def on_evaluation(self, callback: Callable[[int], object]) -> None:
        """Call `callback` after each evaluation, with its nanoseconds."""
        self._after_evaluation.append(callback)

    @property
    def loss_scale(self) -> float:
        """The factor that scales fp16 gradients; 1 for every other dtype."""
        return self._open.loss_scale.scale

    def link_report(self) -> Rows[LinkRow]:
        """Bytes and waiting seconds of each link between tiers since the last step began. Empty if all state is on the
        device.  Copies of a deferred update count in the step in which they run."""
        return self._reports.link_report()

    @property
    def ledger(self) -> Any:
        """Payload bytes and calls per (operation, axis) since the last step began."""
        return self.mesh.ledger

    @outside_inference()
    def close(self) -> None:
        """Remove the hooks from the model; its parameters keep their values. Waits for a save in flight.  At
        `zero.stage=3`, weights that rest on the host are whole there. With a store, all state is in it afterwards, for
        the next engine of the task."""
        if self.config.zero.stage == 3:  # whose weights are gathered for the model
            self._refuse_ended("close")
        self._is_closed = True
        self._loop.forget_loss()
        self.context.models.discard(self.model)
        self.context.engines.closed(self._state)
        self._state.close_checkpoints()
        self._state.regain_weights()
        parked = self._state.park()
        self._parts.detach()
        self._parts.remove_gates()
        self._optimizer.close()
        self._state.release(parked)
        self._at_end.pop_all()
        self._switched.close()

    def _let_go(self) -> None:
        """Called when the context closes before the engine. Gates stay on sharded weights: a forward through them
        raises."""
        self._is_closed = True
        self._loop.forget_loss()
        self.context.engines.closed(self._state)
        self._parts.detach()
        is_whole = not isinstance(self._weights, ShardedWeights) and not self._weights.has_deferred
        if is_whole and (self.mesh.world_size == 1 or not self.context.first_failure()):
            self._parts.remove_gates()

    # ---- the phases ----

    def _refuse_closed(self, what: str) -> None:
        """Raises ValueError after `close`: without its hooks the model would return a loss and train nothing."""
        if self._is_closed:
            raise ValueError(
                f"{what}: this engine is closed; make a new one with cl.initialize(model, context=...)"
            )

    def _refuse_half_step(self, what: str) -> None:
        """Raises ValueError between backward and step, if buffers belong to this step and weights to the one before."""
        name = self._open.changed_buffer or self._comparison.changed_buffer
        if name and (self._open.totals is not None or self._open.calls):
            raise ValueError(
                f"{what}: a forward of this step has changed the buffer {name}. After a resume the step would begin "
                f"anew, and change it twice. Legal: after step or zero_grad"
            )

    def _refuse_ended(self, what: str) -> None:
        """Raises ValueError after the context has closed, where this rank has a part of the weights or of their
        state."""
        axes = self.mesh.size("pipeline", "sequence", "tensor") > 1
        if self.mesh.is_ended and self.mesh.world_size > 1 and (self.config.zero.stage > 0 or axes):
            raise ValueError(
                f"{what}: the context is closed, and ranks no longer reach each other for their parts of the weights. "
                f"Legal: the same call within the with block of cl.launch"
            )

    def _begin(self, batch: Any) -> tuple[Batch, ...]:
        self._refuse_closed("forward_backward")
        self._loop.forget_loss()
        refuse_without_gradients("forward_backward")
        self.mesh.progress.phase = "batch"
        self._state.refuse_mixed("forward_backward")
        self._state.refuse_changed("forward_backward")
        if not self._hooks.is_clear and not self._weights.has_deferred:
            raise ValueError(
                "forward_backward: the gradients of the last one were not used; call step or zero_grad"
            )
        self._open.clear()  # losses of a step that ended before any gradient
        self._comparison.clear()
        self.mesh.ledger.clear()
        self._reports.begin_step()
        self._parts.linear_hooks.look()
        self._comparison.begin(batch)
        return self._read(batch)

    def _read(self, batch: Any) -> tuple[Batch, ...]:
        self._optimizer.check()
        return self._micro_batches.of(batch, self._open.samples_before)

    def _run(self, parts: tuple[Batch, ...], sums: LocalSums) -> None:
        """Run the plan of a step on its micro-batches; add loss and weight to `sums`."""
        self._loss.is_cut = len(parts) > 1 or self._is_shared
        trains = torch.is_grad_enabled()
        input_shapes = [part.inputs.shape for part in parts]
        shapes = [(trains, part.size, *part.inputs.shape[1:], part.inputs.dtype) for part in parts]
        knows_shapes = self._runtime.knows({s for s, part in zip(shapes, parts, strict=True) if part.size})

        def forward(stage: int, i: int, carried: Any) -> Any:
            self._weights.arrive(stage)
            outputs = self._forward(stage, parts[i], carried, sums)
            self._metering.forward_ended(input_shapes)
            return outputs

        def forwards_ended() -> None:
            if trains and self._updates.within_backward:
                self._rate_factor()  # which ranks compare
                self._updates.announce(sums.reported_loss(self._tells), self._comparison)

        def before_backward(stage: int, i: int, kind: ActionKind, later: DeferredWeightGrads) -> None:
            self._parts.before_backward()
            self._weights.arrive(stage)
            if self._updates.within_backward and i == len(parts) - 1:
                self._updates.begin(self._rate_factor(), self._comparison)
            self._auxiliary.seed = self._seed(parts[i])
            self._hooks.begin(
                stage,
                is_last=i == len(parts) - 1,
                seed=self._seed(parts[i]),
                is_whole=kind is not ActionKind.I,
                frees=i == len(parts) - 1,
                sums=(stage, i) in summed,
                to_come=[leaf for each in later for leaf in each.leaves()] if kind is ActionKind.W else None,
            )

        work = Work(
            forward=forward,
            before_backward=before_backward,
            around_backward=self._parts.around_backward,
            defer_weight_grads=self._parts.weight_grads.open,
            forwards_ended=forwards_ended,
            pass_over=self._pass_over,
            is_empty=lambda i: parts[i].size == 0,
            gather=self._weights.gather,
            is_in_slot=self._weights.is_in_slot,
            reduce=lambda action: self._hooks.reduce(_chunk_of(action)),
            tied_reduce=self._tied_reduce,
        )
        coord, ahead = self._runtime.comm.coord, self._runtime.posts_ahead
        plan, slots = self._plans.of_step(
            len(parts), coord, backward=trains, knows_shapes=knows_shapes, posts_ahead=ahead
        )
        summed = {(a.stage, a.micro_batch) for a in plan[coord] if a.kind is ActionKind.REDUCE}
        self._weights.follow(plan[coord])
        with self._hooks.expecting():
            self._runtime.run(plan, work, shapes, slots=slots)
        if trains and self._updates.within_backward:  # a rank whose stages are frozen has had no backward
            self._updates.begin(self._rate_factor(), self._comparison)

    def _pass_over(self) -> None:
        """Take part in the weight gathers of a forward without samples on this rank."""
        with self._weights.forward():
            return

    def _forward(self, stage: int, part: Batch, carried: Any, sums: LocalSums) -> Any:
        """Run a stage on a micro-batch. The last stage returns the sum of the token losses, scaled for backward."""
        local = self._parallelized.local_part(part)
        is_part, tokens = local.positions is not None, local.tokens
        self._streams.begin(self.steps, local.samples, local.token_positions, is_part=is_part, tokens=tokens)
        heard = self._auxiliary.heard(sums.auxiliary, len(local.samples))
        first, watched = self._parts.first_step.forward(stage), self._comparison.forward(local)
        seed = self._seed(part)
        told = self._loss.told(local, seed)
        with (
            self._weights.forward(stage),
            first,
            self._streams.forward(),
            heard,
            watched,
            told,
            self._running(),
        ):
            outputs = self._stages.run(stage, carried, self._loss.asked(local))
        if stage < self._stages.last:
            return outputs
        refuse_means(outputs, type(self.model).__name__)
        loss, count = self._loss.of(outputs, local)
        sums.add(loss.detach(), count)
        # Not backward(seed): torch would check its shape by symbolic shapes, which import 45 MB of sympy.
        return loss if seed == 1.0 else loss * seed

    def _seed(self, part: Batch) -> float:
        """Factor on the loss of a micro-batch in backward; the same on every stage."""
        return self._open.loss_scale.seed(part.labels.numel())

    def _tied_reduce(self, action: Action) -> None:
        """Sum a chunk over the stages that use it, before it is sharded."""
        chunk = self._hooks.chunk(_chunk_of(action))
        holders = self._stages.holders(chunk.spec.key.stages)
        self._runtime.comm.exchange_sum(chunk.completed(), holders, str(action))

    def _agree(self) -> StepTotals:
        """Sum loss, weight and squares over all ranks."""
        self.mesh.progress.phase = "agreement"
        self._rate_factor()  # which ranks compare
        self._open.changed_buffer = self._comparison.changed_buffer
        order = self._in_order if self._sharding.ordered else None
        squares = squares_of(self._chunks, order, self.mesh, self.context.device)
        return all_reduce_totals(
            self.mesh, self._open.sums.reported_loss(self._tells), squares, self._chunks, self._packed,
            self._comparison, stop=self.context.stop_requested, samples=self._open.own_samples,
        )  # fmt: skip

    @property
    def _tells(self) -> bool:
        """Whether this rank reports its loss and weight; in a user's own loop `UserLoop` decides."""
        return self._tells_loss if self._open.by_count is None else self._loop.tells_loss

    def _rate_factor(self) -> float:
        """Factor on the learning rates of this step. Code of the user's own is asked once, and ranks compare it."""
        if self._open.rate_factor is None:
            if self._lr_lambda is None:
                return learning_rate_factor(self.context.config.lr_scheduler, self.steps)
            self._open.rate_factor = factor_by(self._lr_lambda, self.steps)
            self._comparison.add_rate(self._open.rate_factor)
        return self._open.rate_factor

    def _finish_user_step(self) -> None:
        """End the backward of a user's own loop: run the remaining reductions, and agree."""
        self._loop.finish()
        with self._parts.measured(), self._comparison.giving_up(self.zero_grad):
            self._hooks.conclude()
            self._open.totals = self._agree()
        self._settle()

    def _forecast(
        self, inputs: Sequence[Tensor], given: Mapping[str, Any] | None = None, times: int = 1
    ) -> None:
        """Under a budget, refuse a batch that `plan` forecasts not to fit. `inputs` [B, T] of its micro-batches, each
        `times`; `given`: the arguments of the first. If `plan` does not know the model or loss, and on a GPU, the
        first step measures instead."""
        if self._memory_budget is None:
            return
        known = self._facts is not None and self._loss.criterion is None and self.context.device.type == "cpu"
        samples = times * sum(len(ids) for ids in inputs)
        lengths = lengths_of(inputs[0], {} if known else given or {})
        self._memory_budget.forecast(
            samples, lengths, self._forecast_batch if known else None, trains=torch.is_grad_enabled()
        )

    def _settle(self) -> None:
        """Under a budget, before the first update: choose the placement of all state. Lists of a pipeline fetch from
        then on what rests on the host."""
        if self._memory_budget is None:
            return
        plan, comm = self._runtime.plan, self._runtime.comm
        if self._memory_budget.settle(() if plan is None else plan[comm.coord], self._runtime.slot_bytes[0]):
            self._plans.place((*self._chunks, *self._parts.built.frozen), comm)


def _chunk_of(action: Action) -> int:
    assert action.chunk is not None
    return action.chunk
