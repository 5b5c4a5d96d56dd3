"""Proves that a model whose layers were replaced is the plain model: loss and every gradient, on emulated ranks.

Note: the proof.
A small model is run as it is.  It is run again as every rank of a small world runs it after the swap: threads of this
process, with real collectives between them.  Both have the same random values in float64.  What a rank gives must be
its part of what the plain model gives.  The loss of an evaluation is compared as well, if it is not that of training.
Norms and softmax convert to lower precision.  Both sides leave that out, so that the two agree to rounding.  No message
leaves the process, and nothing is drawn from torch's generator.  So every rank of the real world finds the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.distributed.emulated_ranks import EmulatedWorld, EndedError, run_emulated
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import TORCH
from colossal_lite.layers.layer_swap import cut_values, fill_placeholders
from colossal_lite.layers.tensor_modes import ModeResult, TensorStrategy
from colossal_lite.numerics.generators import drawn_between, generators_kept, states
from colossal_lite.numerics.proof_modes import TOLERANCE, Plainly
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.parallel.small_copy import deep_copy
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec

LONGEST_S = 20.0
NO_CONTEXT = nullcontext()
Replace = Callable[[nn.Module, Mesh], ModeResult]


class NotRunError(ValueError):
    """The plain model does not run on what it is given, so nothing can be said of it."""


class NoLogitsError(ValueError):
    """The plain model runs, and gives no logits."""


@dataclass(frozen=True)
class Difference:
    """How a replaced model differs from the plain one. `where`: module names, in the order in which they run."""

    what: str
    where: tuple[str, ...] = ()


@dataclass
class Calls:
    """Which modules of one model are being called."""

    stack: list[str] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True)
            module.register_forward_hook(self._leave)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.stack.append(name)

        return hook

    def _leave(self, *_: Any) -> None:
        self.stack.pop()

    @property
    def place(self) -> str:
        return self.stack[-1] if self.stack else ""


@dataclass(frozen=True)
class PlainRun:
    """What a run of a model gave: its loss and gradients (None where none came)."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    evaluated: float | None
    """The loss in eval(); None if there is none."""

    @property
    def in_evaluation(self) -> float:
        return self.loss if self.evaluated is None else self.evaluated


@dataclass(frozen=True)
class Truth:
    """What the plain model gives, torch's random state behind its run, and how long that took."""

    run: PlainRun
    random: Tensor
    took_s: float


def truth_of(model: nn.Module, batch: Batch, criterion: ModelLoss | None = None) -> Truth:
    """The run of the plain model, which several proofs may share. Raises NotRunError if it does not run by itself, and
    NoLogitsError if it gives none."""
    with _plain_copy(model) as plain:
        began_s = time.monotonic()
        run = _plain_run(plain, batch, criterion)
        return Truth(run, torch.get_rng_state(), time.monotonic() - began_s)


def with_labels(model: nn.Module, batch: Batch) -> Batch:
    """The batch with random numbers for labels, in the shape of the logits of the plain model. Raises as `truth_of`."""
    with _plain_copy(model) as plain, torch.no_grad(), Plainly():
        shape = _logits(plain, batch).shape
    if not shape:
        raise NotRunError("its logits are one number")
    generator = torch.Generator().manual_seed(1)
    return replace(batch, labels=torch.randn(shape, generator=generator, dtype=torch.float64))


@contextmanager
def _plain_copy(model: nn.Module) -> Iterator[nn.Module]:
    """A copy in training to be run. What its code raises is a NotRunError with the place, or a NoLogitsError."""
    calls = Calls()
    plain = deep_copy(model).train()
    calls.watch(plain)
    with generators_kept():
        try:
            yield plain
        except NoLogitsError:
            raise
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(
                f"{calls.place or type(model).__name__}: {type(error).__name__}: {_line(error)}"
            ) from error


def prove(
    model: nn.Module, batch: Batch, replace: Replace, layout: MeshLayout, criterion: ModelLoss | None = None,
    truth: Truth | None = None,
) -> Difference | None:  # fmt: skip
    """How `replace`, which swaps the layers of a copy for one rank of `layout`, makes `model` another; None if not.

    `criterion`: the loss is the model's own.  `model` has float64 values on the CPU and is changed in no way but its
    gradients. `truth`: of `model` on `batch`, if it is known. Raises NotRunError if it does not run by itself.
    """
    truth = truth or truth_of(model, batch, criterion)
    wait_s = max(LONGEST_S, 4 * layout.world_size * truth.took_s)  # for the work of all the others
    with generators_kept():
        torch.set_rng_state(truth.random)
        before, world = states(), EmulatedWorld(wait_s)
        meshes = Mesh.emulated(layout, world)
        ranks = [_Rank(deep_copy(model).train(), mesh, batch, replace, Calls(), criterion) for mesh in meshes]
        try:
            found = run_emulated(world, [rank.differences(truth.run) for rank in ranks])
        except (_FailedError, EndedError) as failed:
            cause = failed.__cause__ or failed
            where = (failed.place,) if isinstance(failed, _FailedError) and failed.place else ()
            told = f"{type(cause).__name__}: {_line(cause)}"
            return Difference(told + _of_draws(drawn_between(before, states())), where)
        drew = drawn_between(before, states())
    every = [each for each in found if each is not None]
    if not every:
        return None
    places = dict.fromkeys(place for each in every for place in each.where)
    return Difference(every[0].what + _of_draws(drew), tuple(places))


def _of_draws(generator: str) -> str:
    """What to say of a difference between ranks that share a `generator` which has drawn."""
    return (
        generator and f", and code that draws from {generator}, which gives each emulated rank other numbers"
    )


def check_finite(model: nn.Module, batch: Batch, criterion: ModelLoss | None = None) -> None:
    """Raises NotRunError if the loss of a small copy is not finite: nothing can be compared with it."""
    with generators_kept():
        try:
            loss = _plain_run(deep_copy(model).train(), batch, criterion).loss
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(error).__name__}: {_line(error)}") from error
    if not math.isfinite(loss):
        raise NotRunError(f"its loss is {loss}")


def run_plainly(
    model: nn.Module, batch: Batch, within: AbstractContextManager[Any] = NO_CONTEXT
) -> None:  # fmt: skip
    """Run a small copy forward, for the hooks that are on it. `within`: what sees its calls before they are made plain.
    Raises NotRunError if it does not run."""
    with generators_kept(), torch.enable_grad(), Plainly(), within:
        try:
            model(*batch.args, **batch.kwargs)
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(error).__name__}: {_line(error)}") from error


LossOf = Callable[[Tensor, Tensor], tuple[Tensor, Any]]


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over all labels, and their number."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel()


def _plain_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy of ids. Of numbers in the shape of the logits, the squared distance, which one word has too."""
    if not labels.is_floating_point():
        return cross_entropy(logits, labels)
    return (logits - labels).square().sum(), labels.numel()


def _loss_of_part(strategy: TensorStrategy, logits: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """As `_plain_loss`, of a rank's part of the logits."""
    if not labels.is_floating_point():
        return strategy.cross_entropy(TORCH, logits, labels)
    return _plain_loss(strategy.whole_vocabulary(logits), labels)


def sum_of_squares(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over all samples, and their number."""
    return outputs.square().sum(), labels.numel()


def _plain_run(
    model: nn.Module, batch: Batch, criterion: ModelLoss | None = None, loss_of: LossOf = _plain_loss,
    seed: float = 1.0,
) -> PlainRun:  # fmt: skip
    """`seed`: what backward starts with. Gradients are divided by it."""
    with torch.enable_grad():
        loss = _loss(model, batch, criterion, loss_of)
        with Plainly():  # which recomputes what the forward has computed
            (loss * seed).backward()
    gradients = {
        n: None if p.grad is None else p.grad.div_(seed)
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    evaluated = None
    if model.training:
        with torch.no_grad(), suppress(Exception):  # it may have no loss without its labels
            evaluated = float(_loss(model.eval(), batch, criterion, loss_of))
        model.train()
    trained = float(loss.detach())
    return PlainRun(
        trained, gradients, evaluated if evaluated is not None and math.isfinite(evaluated) else None
    )


def _loss(model: nn.Module, part: Batch, criterion: ModelLoss | None, loss_of: LossOf) -> Tensor:
    """The sum of the losses of a batch, by its own `criterion`, or by `loss_of` logits and labels."""
    with Plainly():
        if criterion is not None:
            asked = criterion.asked(part)
            return criterion.of(model(*asked.args, **asked.kwargs), part.labels)[0]
        logits, labels = _logits(model, part), part.labels
        if labels.dim() > 1 and not labels.is_floating_point():
            labels = _last(labels, logits)
        return loss_of(logits, labels)[0]


def _logits(model: nn.Module, part: Batch) -> Tensor:
    outputs = model(*part.args, **part.kwargs)
    try:
        return logits_of(outputs)
    except ValueError as error:
        raise NoLogitsError(f"{error}; or parallel.tensor=1 and parallel.sequence=1") from error


def difference_of_parts(
    model: nn.Module, batch: Batch, parts: Sequence[Batch], loss_of: LossOf = cross_entropy, seed: float = 1.0
) -> str:
    """What of loss and gradients of `model` as it is differs between a batch and the sum over `parts`, in training or
    evaluation, or "". Backward of the parts starts with `seed`. Raises NotRunError if it does not run on them, or draws
    random numbers."""
    with generators_kept():
        before = states()
        try:
            truth, *found = [
                _plain_run(deep_copy(model).train(), each, None, loss_of, start)
                for each, start in ((batch, 1.0), *((part, seed) for part in parts))
            ]
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(model).__name__}: {type(error).__name__}: {_line(error)}") from error
        if not math.isfinite(truth.loss) or drawn_between(before, states()):
            raise NotRunError(f"its loss is {truth.loss}, or it draws random numbers")
    if name := next((n for n, g in truth.gradients.items() if g is not None and not g.isfinite().all()), ""):
        raise NotRunError(f"the gradient of {name} is not finite")
    return difference_of_runs(truth, found)


def runs_in_turn(
    model: nn.Module, parts: Sequence[Batch], loss_of: LossOf,
    between: Callable[[nn.Module], Callable[[], None]] | None = None,
) -> list[PlainRun]:  # fmt: skip
    """Runs of this very model, in training, on one part after another. `between` makes a call behind each.
    Raises NotRunError if it does not run on them, or draws random numbers."""
    runs, set_back = [], None if between is None else between(model)
    with generators_kept():
        before = states()
        try:
            for part in parts:
                runs.append(_plain_run(model.train(), part, None, loss_of))
                model.zero_grad(set_to_none=True)
                if set_back is not None:
                    set_back()
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(model).__name__}: {type(error).__name__}: {_line(error)}") from error
        if not all(math.isfinite(run.loss) for run in runs) or drawn_between(before, states()):
            raise NotRunError(f"its loss is {runs[-1].loss}, or it draws random numbers")
    return runs


def difference_of_runs(truth: PlainRun, found: Sequence[PlainRun]) -> str:
    """What of loss and gradients differs between a run and the sum of others, or ""."""
    for right, got in (
        (truth.loss, sum(run.loss for run in found)),
        (truth.in_evaluation, sum(run.in_evaluation for run in found)),
    ):
        if not abs(got - right) <= TOLERANCE * abs(right):
            return "loss"
    bound = 0.01 * max((float(g.norm()) for g in truth.gradients.values() if g is not None), default=0.0)
    for name, expected in truth.gradients.items():
        own = [g for run in found if (g := run.gradients[name]) is not None]
        if (expected is None) != (not own):
            return name
        if expected is not None:
            total = torch.stack(own).sum(0)
            if not float((total - expected).norm()) <= TOLERANCE * (float(expected.norm()) + bound):
                return name
    return ""


@dataclass
class _FailedError(Exception):
    """A rank has failed in the module `place`, by the error that is the cause."""

    place: str


@dataclass(frozen=True)
class _Rank:
    """One emulated rank."""

    model: nn.Module
    mesh: Mesh
    batch: Batch
    replace: Replace
    calls: Calls
    criterion: ModelLoss | None

    def differences(self, truth: PlainRun) -> Callable[[], Difference | None]:
        def run() -> Difference | None:
            try:
                return self._compared(truth)
            except EndedError:
                raise
            except Exception as error:  # of a user's code, whatever it is
                raise _FailedError(self.calls.place) from error

        return run

    def _compared(self, truth: PlainRun) -> Difference | None:
        originals = dict(self.model.named_parameters())
        strategy, specs, *_ = self.replace(self.model, self.mesh)
        fill_placeholders(self.model, originals, specs, self.mesh)
        self.calls.watch(self.model)
        part = strategy.local_part(self.batch)
        loss_of = partial(_loss_of_part, strategy)
        with torch.enable_grad():
            total = _loss(self.model, part, self.criterion, loss_of)
        with Plainly():
            total.backward()
        differs = self._of_loss(total, truth.loss, strategy) or self._of_gradients(specs, truth)
        if differs is not None or truth.evaluated is None:
            return differs
        with torch.no_grad():
            total = _loss(self.model.eval(), part, self.criterion, loss_of)
        return self._of_loss(total, truth.evaluated, strategy, " in eval()")

    def _of_loss(
        self, own: Tensor, truth: float, strategy: TensorStrategy, mode: str = ""
    ) -> Difference | None:
        """`own`: the loss of this rank."""
        told = own.detach().double() if strategy.owns_loss else torch.zeros((), dtype=torch.float64)
        loss, count = float(self.mesh.world.all_reduce(told.clone())), self.batch.labels.numel()
        if abs(loss - truth) <= TOLERANCE * abs(truth):
            return None
        return Difference(f"its loss{mode} is {loss / count:.6f}, that of one process {truth / count:.6f}")

    def _of_gradients(self, specs: Mapping[str, ShardSpec], truth: PlainRun) -> Difference | None:
        largest = max((float(g.norm()) for g in truth.gradients.values() if g is not None), default=0.0)
        named, wrong = dict(self.model.named_parameters()), dict[str, str]()
        for name, expected in truth.gradients.items():
            spec, own = specs[name], named[name]
            local = torch.zeros_like(own) if own.grad is None else own.grad.clone()
            if axes := spec.sync_axes(self.mesh.layout):
                local = self.mesh.axis(*axes).all_reduce(local.contiguous())
            whole = torch.zeros(spec.shape, dtype=torch.float64) if expected is None else expected
            right = cut_values(spec, self.mesh.layout, self.mesh.coords, whole)
            bound = TOLERANCE * (float(right.norm()) + 0.01 * largest)
            if not float((local - right).norm()) <= bound:
                wrong[name] = f"{float(local.norm()):.4g} for {float(right.norm()):.4g}"
        if not wrong:
            return None
        name, sizes = next(iter(wrong.items()))
        owners = dict.fromkeys(each.rpartition(".")[0] for each in wrong)
        return Difference(
            f"its loss is right, but the gradient of {name} is not (norm {sizes})", tuple(owners)
        )


def _last(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels of the tokens that have logits: a forward without targets may give those of the last ones only. Of logits
    without a dim of tokens, one for each sample."""
    if logits.dim() == 2 and len(logits) == len(labels):
        return labels[:, -1]
    return labels[:, labels.shape[1] - logits.shape[1] :] if logits.dim() == 3 else labels


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:300]
