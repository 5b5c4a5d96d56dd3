"""Runs a training loop in a folder: resumes, saves, logs, evaluates, and stops at a signal.

Note: what belongs to a run.
A folder holds one run: its checkpoints, its rows, the log of each rank.  `Run` resumes from it at once, on any mesh.
Every step of the engine is logged, and every `save_every` steps saved, in any loop.  The position in the data is the
number of samples used, and is saved with the weights.
A signal saves within the step (engine/stopping.py).  The loop may still evaluate that step: `Stopped` is raised when it
asks for the next batch.  So the rows of a stopped and resumed run are those of an uninterrupted run.
A loop that ends early by `break` has its last step saved when the context closes.
"""

from __future__ import annotations

import inspect
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from colossal_lite.checkpoint.files import folder_given
from colossal_lite.checkpoint.manifest import EXTRA, Change, CheckpointError, ExtraError, changes, plain
from colossal_lite.checkpoint.owner import FolderClaims
from colossal_lite.checkpoint.run_state import Loaded
from colossal_lite.checks.batch_sizes import refuse_sizes
from colossal_lite.config.call_forms import with_form
from colossal_lite.data.loader import Loader
from colossal_lite.engine.engine import BATCH, Engine
from colossal_lite.engine.loader_arguments import loader_names, refuse_unknown, whole
from colossal_lite.engine.step_measurements import leave_measurements
from colossal_lite.engine.step_totals import StepResult
from colossal_lite.engine.stopping import SAVES_FAILED, Stopped
from colossal_lite.numerics.lr_schedules import told_of_end
from colossal_lite.numerics.precision import Precision
from colossal_lite.observe.flops import device_peak_flops
from colossal_lite.observe.printed_lines import tell
from colossal_lite.observe.report import REPORT
from colossal_lite.observe.run_log import RankLog, RunLog, Scale
from colossal_lite.observe.sinks import check_sinks, run_sinks

ORDERING = ("global_batch", "shuffle", "drop_last", "labels")
"""Settings of a loader that decide which samples a step trains on, and how."""


class Run:
    """One run of an engine in a folder.

    run = cl.Run("runs/first", engine, save_every=500)
    for batch in run.batches(train, global_batch=32, steps=5000):
        result = run.step(batch)

    The folder gets `checkpoints/`, `report.html` and `logs/rank-N.log`. Rows: `metrics.jsonl`, `timing.jsonl`,
    `evaluation.jsonl`, `run.json`, `trace.json`. Measurements: `measured.json` (memory of the second step) and
    `schedule.json` (times of the third). The last step is always saved. The next run of the engine ends this one."""

    @with_form("cl.Run", "cl.Run(directory, engine), and by name: save_every, log, facts, fresh, ...")
    def __init__(
        self, directory: str | Path, engine: Engine, *, save_every: int | None = None, log: str | Sequence[str] = (),
        facts: Mapping[str, Any] | None = None, bytes_per_token: float | None = None, flops_per_token: float = 0.0,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        """Resume from the newest whole checkpoint in `directory`, if there is one. Collective.

        `save_every`: steps between saves (None: at the end, and when a signal stops the run).  `log`: further sinks of
        the numbers, "tensorboard" and "wandb" (offline).  `facts`: JSON of the caller's own, the same on every rank,
        for the manifest of each checkpoint and run.json.  `bytes_per_token` of the text, for losses in bits per byte.
        `flops_per_token` of forward and backward, for mfu.  `fresh`: start over; earlier checkpoints are renamed, not
        deleted.  Raises ValueError on every rank for a folder that cannot be written, or that another running process
        owns.  Also if `facts`, `save_every` or `fresh` differ between ranks."""
        if save_every is not None:
            save_every = whole("save_every", save_every, "1 or more steps, or None for the last step alone")
        if not isinstance(engine, Engine):
            raise ValueError(f"cl.Run: engine is {type(engine).__name__}; legal: cl.Run(directory, engine)")
        self.engine, self.context = engine, engine.context
        self.directory = folder_given("cl.Run", directory)
        self.checkpoints = self.directory / "checkpoints"
        self._save_every = save_every
        self._extra: dict[str, Any] = {"facts": dict(facts or {})}  # for manifests
        self._loader: Loader | None = None
        self._result: StepResult | None = None
        self._stopped: Stopped | None = None
        self._check_folder(dict(save_every=save_every, fresh=fresh))
        self._check_log(log)
        self._files, self._has_ended = self.context.hold(ExitStack()), False
        engine.begin_run(self._end)
        if fresh:
            self._set_aside()
        loaded = engine.resume(self.checkpoints)
        self._data_before: Mapping[str, Any] = self._tell(loaded) if loaded else {}
        self._saved_step = engine.steps if loaded else -1
        folder = self.directory if self.context.is_main else None  # only one rank logs
        peak = device_peak_flops(self.context.device, self.context.config.precision.dtype)
        self._log = RunLog(
            folder, scale=Scale(bytes_per_token, flops_per_token, peak * self.context.world_size if peak else None),
            device=self.context.device, resumed_step=engine.steps, 
            also=run_sinks(log, folder, self._extra["facts"], engine.steps),
        )  # fmt: skip
        self._folder, self._begun, self._measures = folder, engine.steps, False
        self._files.enter_context(self._opened())
        engine.save_on_stop(self.checkpoints, samples=lambda: self._samples, extra=self._extra)
        engine.on_step(self._after_step, reads_weights=False)
        engine.on_evaluation(self._log.leave_out)

    # ---- the loop ----

    @with_form("run.batches", "run.batches(dataset, steps=..., global_batch=...)")
    def batches(self, dataset: Any, *, steps: int, **loader: Any) -> Iterator[Any]:
        """This rank's batches until the engine has made `steps` steps in all; `loader` as `context.dataloader`.

        `steps` is the total, with the steps made before a resume. A run that has made them gives no batch, and says so.
        Continues at the position in the data. Saves after the last step. Raises `Stopped` after the step in which a
        signal came. Raises ValueError if a resumed run's dataset had another length. Collective."""
        self._refuse_ended()
        refuse_unknown("run.batches", loader, ["steps", *loader_names(less=["start"])])
        steps = whole("steps", steps, "1 or more whole steps, those made before a resume included")
        start = self._samples
        self._loader = self.context.dataloader(dataset, start=start, **loader)
        found = self._loader.num_samples
        before = self._data_before.get("samples", found)
        if start and before != found:
            raise ValueError(
                f"dataset: {found} samples, and {before} when {self.directory} was begun: their order "
                f"would be another; legal: the dataset of then, or a new directory and "
                f"engine.load({str(self.checkpoints)!r})"
            )
        if (made := self.engine.steps) >= steps:
            state = "complete:" if made == steps else "already at step"
            self._log.say(f"{state} {made} of {steps}{' steps' if made == steps else ''}, nothing to do")
            return iter(())
        refuse_sizes("dataset", self._loader, self.context.config, steps=steps - made)
        self._extra["data"] = {
            "samples": found,
            **{name: getattr(self._loader.settings, name) for name in ORDERING},
        }
        if start:
            self._tell_other_order(self._extra["data"])
        self._log.total_steps = steps
        self._tell_settings(steps)
        rows = self.engine.config.resolved()
        config = {row.path: row.value for row in rows}
        changed = [row.path for row in rows if row.origin != "default"]
        self._log.describe({**self._extra, "steps": steps, "config": config, "changed": changed})
        return self._batches(self._loader, steps)

    def _batches(self, loader: Loader, steps: int) -> Iterator[Any]:
        stream = loader.take(steps - self.engine.steps)
        while (before := self.engine.steps) < steps:
            yield next(stream)
            self._raise_stop()
            if self.engine.steps == before:
                raise ValueError(
                    "run.batches: a batch was given, and no step was made with it; legal: one run.step(batch), or one "
                    "engine.step(), for each batch"
                )
        self._save_last()

    @with_form("run.step", f"run.step(batch), {BATCH}")
    def step(self, batch: Any) -> StepResult:
        """One optimizer step, as `engine.train_step`. A signal saves within it, and ends the run before the next."""
        self._raise_stop()
        # the second step allocates nothing, so its memory is that of every further step
        made = self.engine.steps - self._begun
        meters = self._folder and made == 1 and self.context.config.compile == "none"
        self._measures = made == 2
        try:
            with self._log.timeline.span("step"), self.engine.metered() if meters else nullcontext():
                return self.engine.train_step(batch)
        except Stopped as stopped:
            if stopped.code == SAVES_FAILED:
                raise
            self._stopped = stopped
            assert self._result is not None, "a signal stops a step after its callbacks"
            return self._result

    @with_form("run.evaluate", "run.evaluate(dataset), and by name what context.dataloader takes")
    def evaluate(self, dataset: Any, **loader: Any) -> float:
        """The mean loss over all valid labels of a held-out `dataset`, every sample once; equal on every rank.

        Its batches are those of training, or of a torch DataLoader, but neither shuffled nor dropped; `loader` changes
        that. Auxiliary losses are weighed in each batch. Collective."""
        self._refuse_ended()
        refuse_unknown("run.evaluate", loader, loader_names())
        total, count = 0.0, 0.0
        with self._log.timeline.span("evaluate"):
            for batch in self._held_out("evaluate", dataset, loader):
                loss_sum, labels = self.engine.eval_sums(batch)
                total, count = total + loss_sum, count + labels
        if not count:
            raise ValueError("evaluate: no label of the dataset counts; legal: labels other than -100")
        self._log.evaluated(self.engine.steps, total / count)
        return total / count

    def _held_out(self, name: str, dataset: Any, options: Mapping[str, Any]) -> Loader:
        """The loader of an evaluation. Raises ValueError for a dataset that cannot be evaluated. Collective."""
        whole = {**self._options_of(dataset), "shuffle": False, "drop_last": False, **options}
        loader = self.context.dataloader(dataset, **whole)
        refuse_sizes(name, loader, self.context.config)
        return loader

    def save(self) -> None:
        """Save now. A failed save is printed and the run continues, until `checkpoint.max_failures` consecutive saves
        have failed. Raises ValueError for a run that has ended. Collective."""
        self._refuse_ended()
        self._saved_step = self.engine.steps
        with self._log.timeline.span("save"):
            try:
                self.engine.save(self.checkpoints, samples=self._samples, extra=self._extra)
            except CheckpointError as error:  # raised alike on every rank
                self._log.say(f"NOT SAVED: {error}")
        self._log.lap()

    def report(self) -> Path:
        """Write report.html now and return its path; the end of the run writes it anyway. Raises ValueError before the
        first step."""
        if self._result is None and self._saved_step < 0:
            raise ValueError(
                f"run.report: {self.directory} has no step yet; legal: a call after the first step"
            )
        self._log.report()
        return self.directory / REPORT

    # ---- what happens around it ----

    @property
    def _samples(self) -> int:
        """The position in the data."""
        return self._loader.samples if self._loader is not None else self.engine.samples

    def _options_of(self, dataset: Any) -> dict[str, Any]:
        """The options of the training loader that also apply to another dataset."""
        if self._loader is None:
            return {}
        names = (
            ("labels",)
            if isinstance(dataset, DataLoader)
            else ("labels", "global_batch", "collate", "workers")
        )
        return {name: getattr(self._loader.settings, name) for name in names}

    def _after_step(self, result: StepResult) -> None:
        if self._has_ended:
            return
        self._result = result
        self._log.step(result, self.engine.ledger.payload_bytes)
        if self._measures:
            self._measures = False
            self._log.dropped.attempt(partial(leave_measurements, self.engine, self._folder))
        if self._save_every and result.step % self._save_every == 0:
            self.save()

    def _end(self) -> None:
        """Another run of the engine begins. The last step is saved if it was this run's."""
        if self._result is None or self._result.step != self.engine.steps:
            self._saved_step = self.engine.steps
        try:
            self._files.close()
        finally:
            self._has_ended = True

    def _raise_stop(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        if self._has_ended:
            raise ValueError(
                f"run: that in {self.directory} ended when another of its engine began; legal: that one, or a new run"
            )

    def _save_last(self) -> None:
        if self.engine.steps > max(self._saved_step, 0):
            self.save()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Open the files of the run. At the end of a context without an error, save the last step after a `break`."""
        with RankLog(self.directory / "logs", self.context.rank), self._log:
            yield
            self._raise_stop()
            if not self.engine.is_closed:
                self._save_last()

    def _check_log(self, log: str | Sequence[str]) -> None:
        """Raises ValueError on every rank, if a rank lacks the package of a sink. Collective."""
        fault = ""
        try:
            check_sinks(log, makes=self.context.is_main)
        except ValueError as error:
            fault = str(error)
        if told := next(filter(None, self.context.mesh.world.gather_json(fault)), ""):
            raise ValueError(told)

    def _check_folder(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError, on every rank, if a rank cannot write to the folder. Also if ranks differ in facts or
        arguments."""
        fault = ""
        try:
            self._extra = {"facts": plain(self._extra["facts"])}
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except ExtraError as error:
            raise ValueError(f"facts: {str(error).removeprefix(EXTRA)}") from error
        except OSError as error:
            fault = f"{self.directory}: {error.strerror}"
        told = self.context.mesh.world.gather_json([fault, self._extra["facts"], arguments])
        for rank, (reason, facts, given) in enumerate(told):
            if reason:
                raise ValueError(
                    f"directory: rank {rank} cannot write to {reason}; legal: a folder that every rank can write to"
                )
            first = told[0][1]
            for name in sorted({*first, *facts}):
                theirs, mine = (json.dumps(some.get(name), sort_keys=True) for some in (first, facts))
                if mine != theirs:  # as texts, because nan is not equal to itself
                    found = f"{facts.get(name)} on rank {rank}, {first.get(name)} on rank 0"
                    raise ValueError(f"facts: {name} is {found}; legal: the same on every rank")
            for name, value in told[0][2].items():
                if given[name] != value:
                    found = f"{given[name]} on rank {rank}, {value} on rank 0"
                    raise ValueError(f"{name}: {found}; legal: the same on every rank")

    def _set_aside(self) -> None:
        """Rename the folder of earlier checkpoints, unless a running process owns it."""
        refused = ""
        if self.context.is_main and self.checkpoints.exists():
            claims = FolderClaims()
            refused = claims.claim(self.checkpoints)
            claims.close()
            names = (self.checkpoints.with_name(f"checkpoints.{i}") for i in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            if not refused:
                self.checkpoints.rename(aside)
                tell(f"fresh: earlier checkpoints are in {aside}")
        if refused := self.context.mesh.world.gather_json(refused)[0]:
            raise ValueError(f"fresh: {refused}; legal: another directory")

    def _tell_other_order(self, data: Mapping[str, Any]) -> None:
        """Print the settings of the data that are others than before the resume."""
        for name, value in data.items():
            if (then := self._data_before.get(name, value)) != value:
                self._log.say(str(Change(f"data.{name}", then, value, "numeric")))

    def _tell_settings(self, steps: int) -> None:
        """Print settings that are defaults, and a schedule that ends before the run."""
        config = self.context.config
        if told := told_of_end(config.lr_scheduler, steps):
            self._log.say(told)
        if any(row.path == "precision.dtype" and row.origin == "default" for row in config.resolved()):
            masters = str(Precision.of(config.precision).master).removeprefix("torch.")
            self._log.say(f"precision: {config.precision.dtype}, by default; masters and state in {masters}")

    def _tell(self, loaded: Loaded) -> Mapping[str, Any]:
        """Print the point from which the run resumes; returns the known facts of its data."""
        before = loaded.manifest.extra
        if self.context.is_main:
            changed = changes(before.get("facts", {}), self._extra["facts"])
            tell("\n".join([str(loaded), *(f"  {change}" for change in changed)]))
        data: Mapping[str, Any] = before.get("data", {})
        return data


@with_form("cl.fit", "cl.fit(engine, dataset, directory=..., steps=..., global_batch=...)")
def fit(
    engine: Engine, dataset: Any, *, directory: str | Path, steps: int, valid: Any = None,
    save_every: int | None = None, evaluate_every: int | None = None, log: str | Sequence[str] = (), **loader: Any,
) -> Run:  # fmt: skip
    """Train to `steps` steps in all, in a folder. The same call resumes there, and does nothing after the last step.
    Collective.

    `valid` is evaluated every `evaluate_every` steps (None: with each save), and after the last. Other arguments are as
    for `Run` and `Run.batches`."""
    own = [name for name in inspect.signature(fit).parameters if name not in ("engine", "dataset", "loader")]
    refuse_unknown("fit", loader, [*own, *loader_names(less=["start"])])
    if evaluate_every is not None:
        evaluate_every = whole("evaluate_every", evaluate_every, "1 or more steps, or None for each save")
    steps = whole("steps", steps, "1 or more whole steps, those made before a resume included")
    run = Run(directory, engine, save_every=save_every, log=log)
    every = evaluate_every or save_every or steps
    batches = run.batches(dataset, steps=steps, **loader)
    if valid is not None and engine.steps < steps:
        run._held_out("valid", valid, {})  # what cannot be evaluated is refused before it trains
    for batch in batches:
        step = run.step(batch).step
        if valid is not None and (step % every == 0 or step == steps):
            run.evaluate(valid)
    return run
