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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossal_lite.checkpoint.checkpointer import Saving
from colossal_lite.checkpoint.run_state import Loaded
from colossal_lite.data.batch import Batch
from colossal_lite.engine.context import Context, noting_faults
from colossal_lite.engine.engine_parts import Built, assemble
from colossal_lite.engine.engine_reports import EngineReports
from colossal_lite.engine.engine_state import EngineState
from colossal_lite.engine.memory_report import LinkRow, MemoryRow
from colossal_lite.engine.micro_batches import MicroBatches
from colossal_lite.engine.step_totals import LocalSums, OpenStep, StepTotals, all_reduce_totals
from colossal_lite.engine.user_loop import UserLoop
from colossal_lite.memory.packing import stages_of
from colossal_lite.numerics.lr_schedules import learning_rate_factor
from colossal_lite.numerics.precision import LossScale
from colossal_lite.numerics.random import CountedOnly
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.parallel.loss import Criterion, Loss, logits_of, refuse_means
from colossal_lite.parallel.parallelize import facts_of
from colossal_lite.pipeline.runtime import Runtime, Work
from colossal_lite.pipeline.step_plans import StepPlans
from colossal_lite.schedule.drawing import ScheduleReport
from colossal_lite.schedule.footprint import most_arrivals
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.transforms.activation_checkpoint import remove_activation_checkpoint
from colossal_lite.transforms.auxiliary_loss import unbind
from colossal_lite.transforms.split_backward import (
    DeferredWeightGrads,
    restore_weights,
)
from colossal_lite.zero.build_chunks import sharding_of
from colossal_lite.zero.grad_norm import fast_squares, in_order, ordered_squares
from colossal_lite.zero.memory_budget import Forecast
from colossal_lite.zero.sharded_weights import ParameterGather
from colossal_lite.zero.user_optimizer import Factory


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` 0-d, equal on every rank; `grad_norm` before clipping; `lr` of the default group."""

    step: int
    loss: Tensor
    grad_norm: float
    tokens: int
    skipped: bool
    lr: float


class Engine:
    """A model in training. Made by `initialize`; see DESIGN 2 for the two ways to drive it."""

    def __init__(
        self, built: Built, context: Context, criterion: Criterion | None, optimizer: Factory | None = None,
        forecast_batch: Forecast | None = None,
    ) -> None:  # fmt: skip
        config, mesh, done = context.config, context.mesh, built.parallelized
        parts = assemble(built, context, optimizer)
        self.model, self.context, self.mesh = built.model, context, mesh
        self.stop_agreed = False
        self._parts, self._parallelized, self._stages = parts, done, built.stages
        self._streams, self._auxiliary = built.streams, done.auxiliary
        self._chunks, self._packed = built.chunks, built.packed
        self._facts, self._sharding = facts_of(built.model), sharding_of(config)
        self._in_order = in_order(built.packed, dict.fromkeys(built.names.first.values()))
        self._hooks, self._weights, self._optimizer = parts.hooks, parts.weights, parts.optimizer
        self._memory_budget, self._updates, self._metering = (
            parts.memory_budget,
            parts.updates,
            parts.metering,
        )
        self._forecast_batch = forecast_batch
        # forward and backward
        self._micro_batches = MicroBatches(context, done, self._facts.vocabulary if self._facts else None)
        self._plans = StepPlans(config, built.stages, built.packed)
        self._runtime = Runtime(mesh.axis("pipeline"), built.stages.placement, context.device, mesh.progress)
        self._randomness = CountedOnly()
        self._loss = Loss(done, criterion)
        # Ranks of one data coordinate compute the same loss. One of those with the last stage reports it.
        self._tells_loss = done.strategy.owns_loss and built.stages.last in built.stages.here
        self._open = OpenStep(LossScale.of(config.precision), context.device)
        self._callbacks: list[Callable[[StepResult], None]] = []
        self._reads_weights = False  # whether one of them may
        self._loop = UserLoop(parts, self._open, self._micro_batches)
        self._reports = EngineReports(parts, self._runtime, self._open, forecast_batch)
        self._state = EngineState(parts, self._open)
        self._at_end = ExitStack()  # of the context, unless this is closed before: that may be long after
        self._at_end.callback(self._state.end)
        self._at_end.callback(self._state.checkpoints.settle)
        context.on_close(self._at_end.close)
        context.on_close(context.tell_fault)
        self._state.resume_task()
        built.records.on_flush = self._state.rest

    @property
    def steps(self) -> int:
        """Optimizer steps made so far, those before a checkpoint was loaded included."""
        return self._open.number

    # ---- a step ----

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's part of the global batch."""
        self.forward_backward(batch)
        return self.step()

    @noting_faults
    def forward_backward(self, batch: Any) -> Tensor:
        """Gradients of the global mean loss, which is returned: 0-d, equal on every rank."""
        with self._parts.measured():
            parts = self._begin(batch)
        self._forecast([part.inputs for part in parts])
        with self._parts.measured():
            self.model.train()
            self._run(parts, self._open.sums)
            self._auxiliary.check_delivered()
            self._hooks.conclude()
            totals = self._open.totals = self._agree()
            self._auxiliary.check_count(totals.weight)
        self._settle()
        return totals.mean_loss

    @noting_faults
    def step(self) -> StepResult:
        """Update the parameters from the gradients gathered since the last step.

        With `optimizer.update_when="backward"` backward has updated them: the step is counted, and what some rank has
        lacked a gradient for is updated. Then raises ValueError for gradients that were not finite: the weights have
        been updated with them, and a checkpoint has to be loaded."""
        if self._open.totals is None:
            self._finish_user_step()
        totals = self._open.totals
        assert totals is not None
        factor = self._rate_factor
        skipped = not totals.is_finite or totals.weight == 0
        self._weights.flush()  # of modules that were not used, the weights may still be on their way
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
        tokens = (
            int(totals.weight) if self._open.by_count is not False else 0
        )  # unknown when backward got no counts
        self._open.clear()
        if deferred is None:
            self._hooks.clear()  # of a step that was skipped, or updated in backward
            self._updates.remake()
        elif self._updates.defers:
            self._weights.defer(deferred)
        else:
            self._weights.update(deferred)
        self._open.number += 1
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
        self._state.rest()
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
        local = self._loop.local_part(args, kwargs)
        inputs = args[0] if args else kwargs["input_ids"]
        self._forecast([inputs] * self.context.config.gradient_accumulation)
        with self._parts.measured(), self._weights.forward():
            outputs = self.model(*local.args, **local.kwargs)
        return self._loop.whole_outputs(outputs)

    def zero_grad(self) -> None:
        """Forget gradients that no step has used. Collective after a step that was given up on every rank: an error in
        its forward or backward that was caught. Raises ValueError where they have updated weights already
        (`optimizer.update_when="backward"`): a checkpoint has to be loaded."""
        self._state.zero_grad()

    @noting_faults
    def backward(self, loss: Tensor, count: int | Tensor | None = None) -> None:
        """Add the gradient of `loss` (0-d); where gradients are reduced by micro-batch, every rank makes as many
        calls.

        `count`: the loss is a mean over so many tokens, and the step divides by
        the global number; None: every data rank weighs the same, and the losses of several calls add up.
        With `optimizer.update_when="backward"` the weights are updated when this returns, up to those that `step`
        updates; there is one call a step."""
        self._loop.backward(loss, count, self._rate_factor)

    # ---- whole tensors ----

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the global mean loss, unclipped, by the serial model's parameter names.

        After `forward_backward`, before `step`. A parameter that no rank used has zeros.
        """
        return self._state.full_gradients()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict()`: copies in host memory, parameters in the master dtype, frozen ones in
        their own. Collective."""
        return self._state.full_state_dict()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For each trainable parameter its state tensors in its own shape, and `step`, the updates it has taken.
        Collective."""
        return self._state.full_optimizer_state()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from a serial state dict.

        Raises ValueError listing every missing, unexpected and misshapen tensor, and then changes nothing.
        """
        self._state.load_full_state_dict(state)

    # ---- checkpoints ----

    def save(
        self, directory: str | Path, *, samples: int = 0, extra: Mapping[str, Any] | None = None
    ) -> Saving:
        """Write a checkpoint `directory/step-NNNNNNNN`, whole or not at all. Collective: every rank calls it.

        `samples`: what the run has used of its stream (`Loader.samples`); `extra`: JSON of one's own.  With
        `checkpoint.asynchronous` it returns when this rank's state is copied; `.wait()` then tells how it ended.
        Raises CheckpointError, on every rank alike, if it failed twice; training may go on.
        """
        return self._state.save(Path(directory), samples=samples, extra=extra)

    def load(self, directory: str | Path) -> Loaded:
        """Continue from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        Any mesh may have saved it.  Raises CheckpointError, on every rank alike, if there is none, or if it does not
        fit (and then changes nothing). After an error halfway the weights are a mix, and no step begins until another
        load has gone well.
        """
        return self._state.load(Path(directory))

    def resume(self, directory: str | Path) -> Loaded | None:
        """`load`, or None where `directory` holds no checkpoint yet."""
        return self._state.resume(Path(directory))

    # ---- reports ----

    def memory_report(self) -> tuple[MemoryRow, ...]:
        """Bytes of weights, masters, gradients and optimizer state on this rank and on which tier (of a kind that rests
        on several a row each), of the slots in which gradients wait to be summed, of those through which state visits
        the device, of what these share under a budget, of messages of a pipeline, and of frozen parameters. All are
        allocated once, at the start, in the first step or when a budget is settled; of slots the peak is what steps
        have used. A model whose backward leaves parameters out may take more of them than were planned. After `metered`
        steps, what those held beside it."""
        return self._reports.memory_report()

    def metered(self) -> AbstractContextManager[None]:
        """Meter the steps within: `memory_report` then has rows more, with the peaks of what a step held beside the
        state: `activations`, what a forward leaves for backward, logits included; `temporaries`, on top at the worst
        moment; `exchange`, what lay in the host's memory for other ranks to read, since the launch.

        Costs a call of Python for each operation of torch (on a CPU a step of 12 ms took 28, one of 1.8 s no longer),
        and nothing outside. Raises ValueError before the first
        step, which makes what stays, and with `compile`, whose code does not tell.
        """
        return self._reports.metered()

    def memory_timeline(self) -> MemoryTimeline:
        """What this rank held over the moments of a metered step (of the one that held most), by kind and tier, beside
        the forecast: `.json()`, `.svg()`. Raises ValueError without `metered` steps."""
        return self._reports.memory_timeline()

    def timeline(self) -> ScheduleTimeline:
        """What each rank of this pipeline did in the last step, and when, by its host's clock. Collective."""
        return self._reports.timeline()

    def schedule_report(self) -> ScheduleReport:
        """The last step or evaluation of this pipeline as its plan foretold it, by the costs that it is cut by, and as
        it was measured: `.trace()` for Perfetto, `.svg()`. Collective. Raises ValueError before the first step."""
        return self._reports.schedule_report()

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
        return self._open.loss_scale.scale

    def link_report(self) -> tuple[LinkRow, ...]:
        """Of each link between tiers, since the last step began; empty where all state rests on the device.  What a
        step owes to its updates counts in the one in which they run."""
        return self._reports.link_report()

    @property
    def ledger(self) -> Any:
        """Payload bytes and calls per (operation, axis) since the last step began."""
        return self.mesh.ledger

    def close(self) -> None:
        """Take the hooks off the model; its parameters keep their values. A save in flight is waited for.  With a
        store, all state is there from now on, for the next engine of its task."""
        self._state.checkpoints.settle()
        self._state.regain_weights()
        parked = self._state.park()
        self._hooks.remove()
        remove_activation_checkpoint(self.model)
        restore_weights(self.model)
        unbind(self.model)
        self._weights.remove()
        self._optimizer.close()
        self._state.release(parked)
        self._at_end.pop_all()

    # ---- what the actions do ----

    def _begin(self, batch: Any) -> tuple[Batch, ...]:
        self.mesh.progress.phase = "batch"
        self._state.refuse_mixed("forward_backward")
        if not self._hooks.is_clear and not self._weights.has_deferred:
            raise ValueError(
                "forward_backward: the gradients of the last one were not used; call step or zero_grad"
            )
        self._open.clear()  # the losses of one that was given up before any gradient came
        self.mesh.ledger.clear()
        self._reports.begin_step()
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
            self._parts.before_backward()
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
            defer_weight_grads=self._parts.weight_grads.open,
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
        return self._open.loss_scale.seed(part.labels.numel())

    def _tied_reduce(self, action: Action) -> None:
        """Sum a chunk over the stages that use it, before anything of it is sharded."""
        chunk = self._hooks.chunk(_chunk_of(action))
        holders = self._stages.holders(stages_of(chunk.spec))
        self._runtime.comm.exchange_sum(chunk.completed(), holders, str(action))

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
            self._open.sums.reported_loss(self._tells),
            squares,
            self._chunks,
            self._packed,
            stop=self.context.stop_requested,
        )

    @property
    def _tells(self) -> bool:
        """Whether this rank's sums count; in a loop of the user's own every tensor rank has the whole micro-batch's
        loss."""
        return self._tells_loss if self._open.by_count is None else self._loop.tells_loss

    @property
    def _rate_factor(self) -> float:
        """What the learning rates of this step are multiplied with."""
        return learning_rate_factor(self.context.config.lr_scheduler, self.steps)

    def _finish_user_step(self) -> None:
        """End the backward of a user's own loop: reduce what is left, and agree."""
        self._loop.finish()
        with self._parts.measured():
            self._hooks.conclude()
            self._open.totals = self._agree()
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


def _chunk_of(action: Action) -> int:
    assert action.chunk is not None
    return action.chunk
