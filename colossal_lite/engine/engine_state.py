"""Reads, writes, saves and loads the state of an engine, between its steps.

Note: state at rest.
Updates of a step may still run, and shards may be on their way between tiers.  `rest` waits for all of it, so it comes
before every read and write here.  Within a step that updates in backward some weights are new and others are old.
Reading or changing them raises an error.

Note: mixed weights.
A load that failed halfway leaves weights that are part old, part new.  So does a step that updated in backward and then
failed.  Both set `checkpoints.is_mixed`; save and the next step are refused until a load has succeeded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from colossal_lite.checkpoint.checkpointer import Checkpointer, Saving
from colossal_lite.checkpoint.manifest import CheckpointError, ExtraError, plain
from colossal_lite.checkpoint.run_state import Loaded, RunFacts
from colossal_lite.checks.model_structure import ModelStructure
from colossal_lite.checks.rank_comparison import RankComparison
from colossal_lite.distributed.progress import reason_of
from colossal_lite.engine.context import Context, noting_faults
from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.engine.full_state import FullState, own_config
from colossal_lite.engine.loader_arguments import whole
from colossal_lite.engine.step_totals import OpenStep
from colossal_lite.engine.stopping import SAVES_FAILED, Stopped, StopPoint
from colossal_lite.engine.task_resume import TaskResume
from colossal_lite.engine.update_timing import spoilt
from colossal_lite.memory.disk_file import DiskError
from colossal_lite.memory.frozen_records import FrozenError
from colossal_lite.memory.task_records import ParkedState
from colossal_lite.observe.printed_lines import tell

MIXED = "a load failed halfway, or a step has spoilt them: the weights are a mix; load a checkpoint first"


def last_save_failed(checkpoints: Checkpointer, context: Context, step: OpenStep) -> Stopped | None:
    """The error that ends a finished run whose last save failed. Holds no engine: a context outlives many."""
    head = "the run has ended, and its last save failed"
    return _saves_failed(head, checkpoints, context, step) if checkpoints.failures else None


def _samples_given(samples: Any) -> int:
    return whole("samples", samples, "0 or more samples that the run has used, a whole number", least=0)


def _saves_failed(head: str, checkpoints: Checkpointer, context: Context, step: OpenStep) -> Stopped:
    last = checkpoints.last_saved
    text = f"{head}: {checkpoints.failure}; last saved: {last[1] if last else 'nothing'}"
    if context.is_main:
        tell(text, sys.stderr)
    return Stopped(text, code=SAVES_FAILED, step=step.number, checkpoint=last[1] if last else None)


class EngineState:
    """The state of one engine. Public names of `Engine` keep their names here, and are documented there."""

    def __init__(self, parts: EngineParts, step: OpenStep, comparison: RankComparison) -> None:
        """`step` is cleared if its gradients are dropped, and set by a load."""
        built, context, mesh = parts.built, parts.context, parts.context.mesh
        self.mesh = mesh
        self._context, self._step, self._updates, self._parts = context, step, parts.updates, parts
        self._comparison = comparison
        self._model, self._chunks, self._frozen = built.model, built.chunks, built.frozen
        self.structure = ModelStructure(built.model, speaks=context.is_main)
        self._hooks, self._weights, self._optimizer = parts.hooks, parts.weights, parts.optimizer
        times = tuple((unit.forward, unit.input, unit.weight) for unit in built.stages.cut.units)
        self._unit_seconds = times if context.config.parallel.pipeline.is_profiled else None
        self.full = FullState(parts)
        self.checkpoints = Checkpointer(
            mesh.layout, mesh.rank, context.store, keep=context.config.checkpoint.keep,
            timeout_s=context.config.timeout_s, heard=context.first_loss,
            standing=context.standing, numbers=context.numbers,
        )  # fmt: skip
        self.stop_point = StopPoint(speaks=context.is_main)
        self._task_resume = TaskResume(parts)

    # ---- full tensors ----

    def full_gradients(self) -> dict[str, Tensor]:
        if self._updates.within_backward:
            raise ValueError(
                "full_gradients: optimizer.update_when='backward' keeps none, each is used up in backward; "
                "legal: 'step'"
            )
        if self._step.totals is None:
            raise ValueError(
                "full_gradients: there are none; call it after forward_backward or backward, and before step"
            )
        return self.full.gradients(self._step.totals.weight)

    def full_state_dict(self) -> dict[str, Tensor]:
        self._updates.refuse_within("full_state_dict")
        self.refuse_changed("full_state_dict")
        self.rest()
        return self.full.state_dict()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        self._updates.refuse_within("full_optimizer_state")
        self.rest()
        return self.full.optimizer_state()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._updates.refuse_within("load_full_state_dict")
        self.rest()
        self._optimizer.changing(self._frozen)
        try:
            self.full.load(state)
            self._note_versions()
        except ValueError:  # some tensors do not fit
            self._optimizer.unchanged()
            raise

    # ---- checkpoints ----

    def save(
        self, directory: Path, *, samples: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> Saving:
        self._updates.refuse_within("save")
        self.refuse_mixed("save")
        self.refuse_changed("save")
        self._context.engines.saves("save", directory, self)
        self.checkpoints.settle()
        self._end_after_failures()
        extra = {} if extra is None else extra
        kept = self.stop_point.extra
        with suppress(ExtraError):  # which the save below raises on every rank
            kept = plain(extra) if self._context.is_main else {}  # as in a save, rank 0's counts
        self.stop_point = self.stop_point.after(directory, kept)
        if samples is not None:
            self._step.samples_before = _samples_given(samples)
        try:
            return self._save(directory, extra)
        except CheckpointError:
            self._end_after_failures()
            raise

    def _save(self, directory: Path, extra: Mapping[str, Any]) -> Saving:
        with suppress(DiskError):  # reading the records raises it again, on every rank
            self.rest()
        config = self._parts.config
        facts = RunFacts(
            self._step.number, self._step.samples_before, config.seed, config.values(), own_config(self._model),
            self._optimizer.updates(), extra, self._step.loss_scale.state, self._unit_seconds,
            self._step.sizes.most, self._comparison.loaded,
        )  # fmt: skip
        with self.mesh.progress.during("save"):
            held = list(self.full.held())
            return self.checkpoints.save(directory, held, facts, asynchronous=config.checkpoint.asynchronous)

    def stop_all(self) -> Stopped:
        """Stop this engine and the others of its loop. Returns the error to raise, with the worst code. Collective."""
        stopped = [each.stop() for each in (self, *self._context.engines.others(self))]
        return max(stopped, key=lambda each: int(each.code or 0))

    def stop(self) -> Stopped:
        """Save at the stop point and print it; returns the error to raise. Collective."""
        self.checkpoints.settle()

        def save(point: StopPoint) -> Path:
            assert point.directory is not None
            if point.samples is not None:
                self._step.samples_before = _samples_given(point.samples())
            self._context.engines.saves("save", point.directory, self)
            self.refuse_mixed("save")
            return self._save(point.directory, point.extra).wait()

        return self.stop_point.stop(
            self._step.number, self._context.stop_signal, self.checkpoints.last_saved, save
        )

    def close_checkpoints(self) -> None:
        """Called when the engine ends: wait for the save in flight, unless a second SIGINT ends the run."""
        self.checkpoints.close(waits=not isinstance(sys.exc_info()[1], KeyboardInterrupt))

    def _end_after_failures(self) -> None:
        """Raises Stopped if the maximum of consecutive saves has failed."""
        if self.checkpoints.failures >= (limit := self._context.config.checkpoint.max_failures):
            head = f"{limit} saves in a row have failed (checkpoint.max_failures)"
            raise _saves_failed(head, self.checkpoints, self._context, self._step)

    def load(self, directory: Path, *, missing_ok: bool = False) -> Loaded | None:
        self.regain_weights()
        if (
            self._optimizer.tiers is None and self._weights.discard()
        ):  # else copies may be in flight on a link
            self.checkpoints.is_mixed = True
        if not self._weights.has_deferred:
            self._give_up()
        with suppress(DiskError):  # as in `save`
            self.rest()
        held = list(self.full.held())
        settings = self._parts.config.values()
        self._optimizer.changing(self._frozen)
        try:
            with self.mesh.progress.during("load"):
                loaded = self.checkpoints.load(
                    directory, held, settings, model=own_config(self._model), missing_ok=missing_ok,
                    step=self._step.number,
                )  # fmt: skip
        except BaseException:
            if not self.checkpoints.is_mixed:
                self._optimizer.unchanged()
            raise
        if loaded is None:
            self._optimizer.unchanged()
            self.stop_point = self.stop_point.after(directory, {})
        else:
            self._use_loaded(loaded)
            folder = directory.parent if directory == loaded.path else directory
            self._context.engines.takes(folder, self)
            self.stop_point = self.stop_point.after(folder, loaded.manifest.extra)
        return loaded

    def _use_loaded(self, loaded: Loaded) -> None:
        """Gather the weights anew from the loaded masters, and continue from their step."""
        try:
            self.full.settle()
        except FrozenError:
            self.checkpoints.is_mixed = True
            raise
        for chunk in self._chunks:
            with self._optimizer.at_hand(chunk):
                chunk.publish(0, chunk.owned_numel)
            chunk.start_gather()
        for frozen in self._frozen:
            frozen.count_change()
        self._note_versions()
        self._optimizer.settle()
        self._weights.flush()
        self._step.clear()
        self._hooks.clear()
        self._updates.give_up()
        self._optimizer.set_updates(loaded.manifest.updates)
        self._step.loss_scale = self._step.loss_scale.at(loaded.manifest.loss_scale)
        self._step.number, self._step.samples_before = loaded.step, loaded.samples
        self._step.sizes.loaded(loaded.manifest.most_samples)
        self.mesh.progress.call_succeeded()

    def _note_versions(self) -> None:
        for chunk in (*self._chunks, *self._frozen):
            chunk.regain_parameters()

    # ---- steps that do not end well ----

    def refuse_changed(self, what: str) -> None:
        """Raises ValueError if a parameter was changed in place, and the change will be lost. Also if the model has
        other parameters, or is compiled now."""
        if (told := self.structure.change()) is not None:
            raise ValueError(
                f"{what}: {told} since the engine was made. It would not train; legal: changes of the model before "
                f"cl.initialize, engine.load_full_state_dict, engine.close and a new engine"
            )
        config = self._context.config
        self.structure.check_compiled(what)
        where = f"zero.stage={config.zero.stage}, precision.dtype={config.precision.dtype!r}"
        for chunk in (*self._chunks, *self._frozen):
            if name := chunk.lost_change():
                raise ValueError(
                    f"{what}: {name} was changed in place by other code than the engine (an optimizer of its own, "
                    f"max_norm, p.data = ..., or a hand). The change would be lost, as the value that is updated is "
                    f"elsewhere ({where}); legal: engine.step, initialize(optimizer=...), or "
                    f"engine.load_full_state_dict. Of parts of one tensor also: nn.Parameter(part.clone()) for each, "
                    f"as torch counts their changes together"
                )

    def refuse_mixed(self, what: str) -> None:
        """Raises ValueError while the weights are part old, part new."""
        if self.checkpoints.is_mixed:
            raise ValueError(f"{what}: {MIXED}")

    @noting_faults
    def zero_grad(self) -> None:
        self._step.clear()
        mixed = self._updates.under_way
        if self._weights.has_deferred:
            return  # no gradients yet: they come after a forward, and that runs deferred updates first
        self._give_up()
        self._hooks.clear()
        self._updates.remake()
        if mixed:
            self.spoil("zero_grad: the gradients of this step have updated weights")

    def spoil(self, why: str) -> NoReturn:
        """End a step that has updated weights and cannot be completed. Raises ValueError."""
        self._updates.give_up()
        self._hooks.clear()
        self.rest()
        self._step.clear()
        self.checkpoints.is_mixed = True
        raise spoilt(why)

    def rest(self) -> None:
        """Wait until deferred updates have run and every shard is back on its tier."""
        self._weights.flush()
        self._optimizer.rest()

    def regain_weights(self) -> None:
        """Between backward and step, compute weights that have no buffer from their masters. Drops the step."""
        if self._updates.lacks_weights:
            self.zero_grad()

    def _give_up(self) -> None:
        """End the collectives of a step that was interrupted, as other ranks may have begun them. Collective."""
        self._updates.drain()
        begun = any([self._weights.give_up(), self._hooks.give_up()])
        if not self.mesh.meet_after_fault("zero_grad") and begun:
            self.mesh.world.barrier()  # all ranks must have given up before one communicates again

    # ---- the next engine of the task ----

    def resume_task(self) -> None:
        """Continue from the engine that ran this task before, if there was one. Collective with a store."""
        facts = self._task_resume.resume()
        if facts is None:
            return
        for chunk in self._chunks:
            chunk.start_gather()
        self._weights.flush()
        self._step.loss_scale = self._step.loss_scale.at(facts["loss_scale"])
        self._step.number, self._step.samples_before = facts["steps"], facts["samples"]

    def park(self) -> ParkedState | None:
        """Copy all state to the store. Returns the state outside the records; None where no engine may resume."""
        if not self._task_resume.is_due or self.checkpoints.is_mixed or self._updates.under_way:
            return None
        self.regain_weights()
        self.rest()
        return self._task_resume.park(
            self._step.number, self._step.samples_before, self._step.loss_scale.state
        )

    def release(self, parked: ParkedState | None) -> None:
        """Release the records; this engine does not use them again."""
        if self._task_resume.is_due:
            self._step.clear()  # gradients in the records are gone
        self._task_resume.release(parked)

    def end(self) -> None:
        """The context closes: run deferred updates while links and ranks exist, then close the optimizer.

        After an error on any rank they are dropped, and a later read of the weights raises."""
        fault = self.mesh.progress.fault
        parked = None
        try:
            is_whole = not (
                self._weights.has_failed or self.mesh.progress.broken
            )  # that error was raised before
            if is_whole and (self.mesh.world_size == 1 or not self._context.first_failure()):
                self._weights.flush()
                parked = None if fault else self.park()
        except DiskError as error:
            if reason_of(error) != fault:  # else it was raised before
                raise
        finally:
            self._weights.mark_failed()
            try:
                self._optimizer.close()
            finally:
                self.release(parked)
