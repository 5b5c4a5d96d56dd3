"""Runs a drawn case: on the ranks of a world, on those of the world that resumes it, and in a plain loop.

Note. The plain loop shares with the product the model, its initial values, the counters of dropout and the factor of
the learning rate; faults are planted on ranks only.  A rank hands back all that it saw, how it ended included, so that
one case that fails does not cost the ranks of the pool.
"""

from __future__ import annotations

import hashlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.schema import LRSchedulerConfig
from colossal_lite.distributed.communicator import CommError
from colossal_lite.numerics.lr_schedules import learning_rate_factor
from colossal_lite.numerics.random import build_on_meta, replay
from tests.shared.drawn_cases import DISK, STEPS, DrawnCase
from tests.shared.drawn_models import OWN_PLAN, build_model, given, make_batch
from tests.shared.emitting import emits_plainly
from tests.shared.parity import DTYPE, counted_dropout, resize_chunks
from tests.shared.places import patched
from tests.shared.plain_optimizers import Muon, plain_optimizers
from tests.shared.pool import RankEnv

OWN_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
OURS = ("moments", "update_when", "max_skipped_steps")
"""Settings of an optimizer that change no number of a plain loop."""


@dataclass(frozen=True)
class Ended:
    """Why a rank did not come to the end. kind: "refused" (a ValueError of the product), "left" (a peer was gone or did
    not answer), "raised" (anything else)."""

    kind: str
    phase: str
    words: str
    trace: str


@dataclass
class Seen:
    """What a rank saw in its part of a case."""

    phase: str = "launch"
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: float | None = None
    told: str = ""
    """What the refused batch was told."""
    digest: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Weights after each step, where they are read there."""
    ended: Ended | None = None


# ---- loss and models ----


def summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A criterion of a user's own: the sum over valid labels, and their number."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = wide.flatten(0, -2), labels.flatten()
    total = nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    total, count = summed(logits, labels)
    return total / count


CRITERIA: dict[str, Any] = {"none": None, "mean": mean, "sum and count": summed, "model": "model"}


def logits_of(outputs: Any) -> Tensor:
    """What a model of any kind gives."""
    found: Tensor = getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)
    return found


def new_model(case: DrawnCase) -> Any:
    """What `initialize` is given: a callable, or a module with values of its own."""
    build = partial(build_model, case.model)
    if case.habits["build"] == "callable":
        return build
    torch.manual_seed(case.seed)
    return build()


# ---- on a rank ----


def first_part(env: RankEnv, case: DrawnCase, folder: str, fault: str | None = None) -> Seen:
    """Three steps, an evaluation, a refused batch and a save."""
    return _guarded(lambda seen: _train_and_save(env, case, folder, seen), fault)


def second_part(env: RankEnv, case: DrawnCase, folder: str, fault: str | None = None) -> Seen:
    """A load on the other mesh, a step and an evaluation."""
    return _guarded(lambda seen: _resume(env, case, folder, seen), fault)


def _guarded(run: Callable[[Seen], None], fault: str | None) -> Seen:
    seen = Seen()
    try:
        with warnings.catch_warnings(action="ignore"), nullcontext() if fault is None else planted(fault):
            run(seen)
    except Exception as error:  # the other end judges every kind
        seen.ended = _ended(error, seen.phase)
    return seen


def planted(fault: str) -> AbstractContextManager[None]:
    """A fault of the table, by its name: argument and result of a rank are plain data."""
    from tests.house.drawn_faults import FAULTS

    return patched(*FAULTS[fault])


def _ended(error: Exception, phase: str) -> Ended:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = any(f"/{room}/" in last for room in ("colossal_lite", "kernels", "launcher"))
    kind = "left" if isinstance(error, CommError) else "raised"
    if isinstance(error, ValueError) and (ours or type(error).__module__.startswith("colossal_lite")):
        kind = "refused"
    words = f"{type(error).__name__}: {error}"
    return Ended(kind, phase, words, "".join(traceback.format_exception(error)))


def _train_and_save(env: RankEnv, case: DrawnCase, folder: str, seen: Seen) -> None:
    with env.launch(_placed(case.config, f"{folder}/disk")) as context:
        engine = _start(case, context, seen)
        for number in range(STEPS):
            _beside_steps(engine, context, case, number, seen)
            _step(engine, context, case, number, seen)
        _beside_steps(engine, context, case, STEPS, seen)
        if case.resume_world:
            seen.phase = "save"
            engine.save(f"{folder}/saved", samples=STEPS * case.batch["samples"]).wait()
        _end(engine, env, seen)


def _resume(env: RankEnv, case: DrawnCase, folder: str, seen: Seen) -> None:
    with env.launch(_placed(case.resume, f"{folder}/disk2")) as context:
        engine = _start(case, context, seen)
        seen.phase = "load"
        engine.load(f"{folder}/saved")
        _step(engine, context, case, STEPS, seen)
        seen.phase = "evaluation"
        seen.evaluated = _evaluated(engine, context, case, -2)
        _end(engine, env, seen)


def _placed(config: Mapping[str, Any], disk: str) -> dict[str, Any]:
    """The configuration with a directory for its disk tier."""
    memory = dict(config.get("memory", {}))
    if memory.get("disk_dir") == DISK:
        Path(disk).mkdir(exist_ok=True)
        memory["disk_dir"] = disk
    return {**config, "memory": memory} if memory else dict(config)


def _start(case: DrawnCase, context: cl.Context, seen: Seen) -> cl.Engine:
    seen.phase = "initialize"
    if size := case.habits["chunk_bytes"]:
        resize_chunks(size, context)
    batch = make_batch(case, 0, case.batch["samples"])
    example = given(batch, case.batch["form"], context.local_batch(case.batch["samples"]))
    return cl.initialize(
        new_model(case),
        context=context,
        criterion=CRITERIA[case.habits["criterion"]],
        plan=OWN_PLAN if case.model["kind"] == "own" and context.mesh.size("tensor") > 1 else "auto",
        optimizer=OWN_OPTIMIZERS.get(case.habits["optimizer"]),
        example=example if case.habits["example"] else None,
    )


def _step(engine: cl.Engine, context: cl.Context, case: DrawnCase, number: int, seen: Seen) -> None:
    seen.phase = f"step {number}"
    samples = case.batch["samples"]
    batch = given(make_batch(case, number, samples), case.batch["form"], context.local_batch(samples))
    if case.habits["drive"] == "train_step":
        result = engine.train_step(batch)
    elif case.habits["drive"] == "own loop":
        for part in _micro_batches(batch, context.config.gradient_accumulation):
            inputs, labels = part
            outputs = engine(**inputs) if isinstance(inputs, dict) else engine(inputs)
            total, count = summed(logits_of(outputs), labels)
            engine.backward(total / count.clamp(min=1), int(count))
        result = engine.step()
    else:
        engine.forward_backward(batch)
        if case.habits["gradients"]:
            seen.gradients.append(engine.full_gradients())
        result = engine.step()
    seen.losses.append(float(result.loss))
    seen.norms.append(float(result.grad_norm))
    seen.skipped.append(bool(result.skipped))
    if case.habits["reads"] == "weights":
        seen.states.append(engine.full_state_dict())
    elif case.habits["reads"] == "state" and case.habits["optimizer"] is None:
        engine.full_optimizer_state()
    elif case.habits["reads"] == "reports":
        engine.memory_report()


def _micro_batches(batch: Any, parts: int) -> Iterator[tuple[Any, Tensor]]:
    """(inputs, labels) of each micro-batch, as a user's loop cuts them."""
    for part in range(parts):
        if isinstance(batch, dict):
            mine = {name: value.tensor_split(parts)[part] for name, value in batch.items()}
            labels = mine.pop("labels")
            yield mine, labels
        else:
            inputs, labels = (value.tensor_split(parts)[part] for value in batch)
            yield inputs, labels


def _beside_steps(engine: cl.Engine, context: cl.Context, case: DrawnCase, number: int, seen: Seen) -> None:
    """The refused batch, halved weights and the evaluation, if they come before step `number`."""
    if case.habits["refuse_after"] == number:
        seen.phase = "refused batch"
        try:
            engine.train_step(refused_batch(case))
            seen.told = "accepted"
        except ValueError as error:
            seen.told = f"{type(error).__name__}: {error}"
    if case.habits["load_before"] == number:
        seen.phase = "load of halved weights"
        buffers = dict(build_model(case.model).named_buffers())
        state = engine.full_state_dict()
        engine.load_full_state_dict({n: value if n in buffers else value / 2 for n, value in state.items()})
    if case.habits["evaluate_after"] == number:
        seen.phase = "evaluation"
        seen.evaluated = _evaluated(engine, context, case, -1)


def _evaluated(engine: cl.Engine, context: cl.Context, case: DrawnCase, number: int) -> float:
    samples = case.habits["evaluate_samples"]
    batch = make_batch(case, number, samples)
    return float(engine.eval_step(given(batch, case.batch["form"], context.local_batch(samples))))


def refused_batch(case: DrawnCase) -> Any:
    """A batch that every rank is given whole and has to refuse."""
    batch = make_batch(case, 0, case.batch["samples"])
    inputs, labels, kind = batch["inputs"].clone(), batch["labels"].clone(), case.habits["refuse"]
    if kind == "no labels":
        return {"input_ids": inputs} if case.batch["form"] == "dict" else (inputs,)
    if kind == "negative id":
        inputs[0, 0] = -1
    elif kind == "id":
        inputs[-1, -1] = case.model["sizes"]["vocabulary"]
    elif kind == "label":
        labels.view(-1)[0] = -5
    elif kind == "not finite":
        inputs[0, 0] = math.nan
    elif kind == "too long":
        times = case.model["sizes"]["sequence"] // inputs.shape[1] + 1
        inputs, labels = inputs.repeat(1, times), labels.repeat(1, times)
        batch = {}
    elif kind == "shape":
        labels = torch.cat([labels, labels])
    return given({**batch, "inputs": inputs, "labels": labels}, case.batch["form"])


def _end(engine: cl.Engine, env: RankEnv, seen: Seen) -> None:
    seen.phase = "end"
    state = engine.full_state_dict()
    done = hashlib.sha256()
    for tensors in (state, *seen.gradients):
        for name in sorted(tensors):
            done.update(
                name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    seen.digest = done.hexdigest()
    if env.rank == 0:
        seen.weights = state
    else:
        seen.gradients, seen.states = [], []
    engine.close()


# ---- the plain loop ----


@dataclass(frozen=True)
class Truth:
    """What the plain loop gives: of each step, and after step 3 and the last one."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    initial: dict[str, Tensor]
    saved: dict[str, Tensor]
    last: dict[str, Tensor]
    evaluated: tuple[float, float]
    own: frozenset[int] = frozenset()
    """Steps at the weights that the ranks had before them, with the evaluations there."""
    follows_signs: bool = False
    """Whether Lion took the signs of the ranks where rounding decides a sign."""


def plain_run(
    case: DrawnCase,
    dtype: str,
    skipped: Sequence[bool],
    after_step: Callable[[PlainLoop, int, float, Mapping[str, Tensor]], None] | None = None,
) -> Truth:
    """All steps on one process, whole batches, in `dtype`. `skipped`: steps that fp16's loss scale skipped.

    `after_step` is given the loop, and number, norm and gradients of each step that is done."""
    loop = PlainLoop(case, dtype)
    losses, norms, gradients, evaluated, kept = [], [], [], [math.nan, math.nan], []
    for number in range(STEPS + 1):
        if case.habits["load_before"] == number:
            loop.halve()
        if case.habits["evaluate_after"] == number and number < STEPS:
            evaluated[0] = loop.evaluate(-1)
        if number == STEPS:
            kept.append(loop.weights())
            if case.habits["evaluate_after"] == STEPS:
                evaluated[0] = loop.evaluate(-1)
        loss, norm, gradient = loop.step(number, skip=skipped[number] and case.dtype == "fp16")
        losses.append(loss)
        norms.append(norm)
        gradients.append(gradient)
        if after_step is not None:
            after_step(loop, number, norm, gradient)
    evaluated[1] = loop.evaluate(-2)
    return Truth(
        losses, norms, gradients, loop.initial, kept[0], loop.weights(), (evaluated[0], evaluated[1])
    )


def at_own_weights(case: DrawnCase, truth: Truth, first: Seen, second: Seen | None, dtype: str) -> Truth:
    """`truth` with the step after the save, and evaluations behind it, at the weights that the ranks had there.

    Updates that normalise a gradient turn its rounding into steps of full size, so that runs part: in 16 bits, and in
    any where a gradient is rounding alone. What a forward and a backward give at given weights is not touched by
    that."""
    losses, norms, gradients = list(truth.losses), list(truth.norms), list(truth.gradients)
    evaluated = list(truth.evaluated)
    if second is not None:
        loop = PlainLoop(case, dtype, first.weights)
        losses[STEPS], norms[STEPS], gradients[STEPS] = loop.step(STEPS, skip=True)
        evaluated[1] = PlainLoop(case, dtype, second.weights).evaluate(-2)
    if case.habits["evaluate_after"] == STEPS:
        evaluated[0] = PlainLoop(case, dtype, first.weights).evaluate(-1)
    return replace(
        truth,
        losses=losses,
        norms=norms,
        gradients=gradients,
        evaluated=(evaluated[0], evaluated[1]),
        own=frozenset({STEPS}),
    )


def at_weights_of_each_step(case: DrawnCase, truth: Truth, states: Sequence[Mapping[str, Tensor]]) -> Truth:
    """`truth` in fp64 with each step at the weights that the ranks had before it. `states`: after each step before the
    save."""
    losses, norms, gradients = list(truth.losses), list(truth.norms), list(truth.gradients)
    evaluated, before = truth.evaluated[0], case.habits["evaluate_after"]
    for number in range(1, STEPS):
        loop = PlainLoop(case, "fp64", states[number - 1])
        if case.habits["load_before"] == number:
            loop.halve()
        if before == number:
            evaluated = loop.evaluate(-1)
        losses[number], norms[number], gradients[number] = loop.step(number, skip=True)
    return replace(
        truth, losses=losses, norms=norms, gradients=gradients, evaluated=(evaluated, truth.evaluated[1]),
        own=truth.own | {*range(1, STEPS)},
    )  # fmt: skip


class PlainLoop:
    """The loop that anybody would write; a 16-bit model has float32 master weights beside it."""

    def __init__(self, case: DrawnCase, dtype: str, values: Mapping[str, Tensor] | None = None) -> None:
        """`values`: of the parameters, as ranks computed with them; None: those before the first step."""
        self.case, self.dtype, config = case, dtype, case.config
        wide = torch.promote_types(DTYPE[dtype], torch.float32)
        self.model = build_model(case.model).to(DTYPE[dtype]).train()
        self.named = dict(self.model.named_parameters())
        initial = initial_values(
            case
        )  # frozen ones are kept in the case's own dtype, the others in a master's
        kept = {n: v if self.named[n].requires_grad else v.to(DTYPE[case.dtype]) for n, v in initial.items()}
        if values is not None:
            kept = {n: values[n].to(DTYPE[case.dtype]) for n in initial}
        self.initial = {name: value.to(wide) for name, value in kept.items()}
        self.trained = {
            n: nn.Parameter(self.initial[n].clone()) for n, p in self.named.items() if p.requires_grad
        }
        self.masters = {name: value.clone() for name, value in self.initial.items()}
        self.masters |= {n: p.detach() for n, p in self.trained.items()}
        given_precision = config["precision"]
        master = given_precision.get("master") if isinstance(given_precision, Mapping) else None
        self.keeps_masters = master != "none" or dtype != case.dtype
        self.streams = counted_dropout(self.model, config["seed"])
        self.emitted = emits_plainly(self.model)
        self.scale = 1024.0 if dtype == "fp16" else 1.0
        if own := OWN_OPTIMIZERS.get(case.habits["optimizer"]):
            self.optimizers = [own(list(self.trained.values()))]
        else:
            settings = {n: v for n, v in config["optimizer"].items() if n not in OURS}
            self.optimizers = plain_optimizers(settings, self.trained)
            for each in self.optimizers:
                if isinstance(each, Muon):
                    each.half = DTYPE[dtype].itemsize == 2
        self.peaks = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.schedule = LRSchedulerConfig.model_validate(config.get("lr_scheduler", {}))

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.masters.items()}

    def take(self, values: Mapping[str, Tensor], where: Mapping[str, Tensor]) -> None:
        """Set the elements that `where` names to those of `values`."""
        for name, chosen in where.items():
            self.masters[name][chosen] = values[name][chosen].to(self.masters[name].dtype)

    def halve(self) -> None:
        """Halve all weights, as somebody does who loads a state dict between steps."""
        for master in self.masters.values():
            master.div_(2)

    def _loss(self, number: int, samples: int) -> Tensor:
        with torch.no_grad():
            for name, master in self.masters.items():
                self.named[name].copy_(master)
                if not self.keeps_masters:
                    master.copy_(self.named[name])
        batch = make_batch(self.case, number, samples)
        inputs, labels = batch.pop("inputs"), batch.pop("labels")
        inputs = inputs.to(DTYPE[self.dtype]) if inputs.is_floating_point() else inputs
        positions = torch.arange(1 if inputs.is_floating_point() else inputs.shape[1])
        self.streams.begin(number, sample_numbers(self.case, number, samples), positions)
        if self.case.habits["criterion"] == "model":
            own: Tensor = self._own_loss(inputs, labels, batch)  # in the model's dtype, as on the ranks
            own = sum(self.emitted, own)
            self.emitted.clear()
            return own
        outputs = (
            self.model(input_ids=inputs, **batch) if self.case.batch["form"] == "dict" else self.model(inputs)
        )
        total, count = summed(logits_of(outputs), labels)
        loss: Tensor = sum(self.emitted, total / count)
        self.emitted.clear()
        return loss

    def _own_loss(self, inputs: Tensor, labels: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        if self.case.model["kind"] == "written":
            found: Tensor = self.model(inputs, labels)[1]
        else:
            found = self.model(input_ids=inputs, labels=labels, **batch).loss
        return found

    def step(self, number: int, skip: bool) -> tuple[float, float, dict[str, Tensor]]:
        """(loss, norm, gradients); a step without a valid label changes nothing."""
        loss = self._loss(number, self.case.batch["samples"])
        self.model.zero_grad()
        if not loss.isfinite():
            return float(loss.detach()), math.nan, {}
        (loss * self.scale).backward()
        for name, master in self.trained.items():
            grad = self.named[name].grad
            master.grad = None if grad is None else grad.to(master.dtype) / self.scale
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.trained.items()
        }
        limit = self.case.config.get("clip_grad_norm")
        norm = nn.utils.clip_grad_norm_(self.trained.values(), math.inf if limit is None else limit)
        factor = learning_rate_factor(self.schedule, number)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if not skip:
                optimizer.step()
        return float(loss.detach()), float(norm), gradients

    @torch.no_grad()
    def evaluate(self, number: int) -> float:
        self.model.eval()
        loss = float(self._loss(number, self.case.habits["evaluate_samples"]))
        self.model.train()
        return loss


def sample_numbers(case: DrawnCase, step: int, samples: int) -> Tensor:
    """The place of each sample in its step, which decides its dropout masks: that in the batch, or, in a user's own
    loop, behind all samples of the micro-batches before."""
    numbers = torch.arange(samples)
    if case.habits["drive"] != "own loop" or step < 0:
        return numbers
    resumed = step == STEPS and case.resume_world > 0
    config, world = (case.resume, case.resume_world) if resumed else (case.config, case.world)
    parallel = config.get("parallel", {})
    inner = math.prod(
        parallel[name]["size"] for name in ("pipeline", "tensor", "sequence") if name in parallel
    )
    parts = [
        cut.tensor_split(config.get("gradient_accumulation", 1))
        for cut in numbers.tensor_split(world // inner)
    ]
    order = torch.cat([piece for turn in zip(*parts, strict=True) for piece in turn])
    return numbers.new_empty(samples).scatter_(0, order, numbers)


def initial_values(case: DrawnCase) -> dict[str, Tensor]:
    """Parameters before the first step: of the configuration's seed, or of the module itself."""
    if case.habits["build"] == "module":
        return {name: p.detach().clone() for name, p in new_model(case).named_parameters()}
    module, recipes = build_on_meta(partial(build_model, case.model))
    seed = case.config["seed"]
    return {
        name: replay(recipes[name], seed, name, 0, p.numel()).view(p.shape)
        for name, p in module.named_parameters()
    }
