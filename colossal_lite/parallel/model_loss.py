"""Trains on the loss that a model's own forward gives: finds its argument of labels, and proves that it is a mean.

Note: the proof.
A step weighs the loss of a part of a batch by its number of valid labels.  That is the whole batch's loss if the
model's loss is a mean over valid labels, of any function.  So a small copy is run on a batch and on its parts, with all
labels valid, and with some ignored.  Losses and gradients must add up.  A forward shows which labels it may
ignore: each `ignore_index`, and numbers with which labels are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import IGNORED
from colossal_lite.layers.roles import Role
from colossal_lite.layers.tensor_modes import TensorStrategy
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.proof_modes import TOLERANCE, Plainly
from colossal_lite.parallel.copy_batches import is_more_than_words, labels_samples
from colossal_lite.parallel.small_copy import (
    NoCopyError,
    SmallCopy,
    few_ids,
    set_back,
    small_copy,
    table_roles,
)
from colossal_lite.transforms.batch_statistics import is_over_the_batch

CLEAR_NAMES = ("targets", "labels", "lm_labels", "target", "label")
NAMES = (*CLEAR_NAMES, "y", "tgt")
"""Arguments by which forwards take labels; the `CLEAR_NAMES` mean nothing else."""
IGNORED_BY_MODELS = (IGNORED, -1)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
MOST_NAMED = 24
LIMIT_WHOLE = 1 << 11  # whole numbers up to it are exact in fp16
LIMIT_BYTES = 1 << 30
LEGAL = "legal: a mean over the valid labels, or criterion=None, which trains on the model's logits"


class ModelLossError(ValueError):
    """A model on whose own loss nothing can be trained exactly; the text says why."""


@dataclass(frozen=True)
class ModelLoss:
    """How a model is asked for its loss. `labels`: the argument; `ignored`: the label that it gets for those to be
    ignored, None if it passes over none."""

    labels: str
    ignored: int | None
    is_shown: bool = False
    """Whether it is proven on an example, with labels of that form."""
    others: tuple[int, ...] = ()
    """Further labels that it passes over."""

    def valid(self, labels: Tensor) -> Tensor:
        """Which labels count."""
        found = labels != IGNORED
        for label in (self.ignored, *self.others):
            found = found if label is None else found & (labels != label)
        return found

    def asked(self, batch: Batch) -> Batch:
        """The batch with its labels among the arguments of the model, if it has a valid one. Raises ModelLossError for
        labels to be ignored, if the model ignores none."""
        valid = self.valid(batch.labels)
        if not bool(valid.any()):
            return batch
        if self.ignored is None and not bool(valid.all()):
            raise ModelLossError(
                f"labels: {IGNORED} (to be ignored) under criterion='model', whose model ignores no label "
                f"({', '.join(map(str, IGNORED_BY_MODELS))} were tried); {LEGAL}"
            )
        told = batch.labels if self.ignored in (None, IGNORED) else batch.labels.where(valid, self.ignored)
        return replace(batch, kwargs={**batch.kwargs, self.labels: told})

    def of(self, outputs: Any, labels: Tensor) -> tuple[Tensor, int]:
        """(sum, count) of a micro-batch."""
        count = int(self.valid(labels).sum())
        if count == 0:
            return next(t for t in _members(outputs) if t.is_floating_point()).sum() * 0.0, 0
        loss = loss_in(outputs)
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * count, count


def loss_in(outputs: Any) -> Tensor:
    """The loss among what a model gives: by that name, or the one tensor of one element. Raises ModelLossError."""
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    found = [named] if isinstance(named, Tensor) else [t for t in _members(outputs) if t.numel() == 1]
    if len(found) != 1 or found[0].numel() != 1 or not found[0].is_floating_point():
        raise ModelLossError(
            f"criterion='model': among what the model gives, a {type(outputs).__name__}, {len(found)} tensors may be "
            f"the loss; legal: one number named 'loss', or a tuple in which one tensor has one element"
        )
    return found[0].reshape(())


def _members(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    values = values if isinstance(outputs, Mapping | tuple | list) else [outputs]
    return [value for value in values if isinstance(value, Tensor)]


def model_loss(model: nn.Module, example: Batch | None = None) -> ModelLoss:
    """How `model` is asked for its loss. A small copy is run on random words, or on an `example` where these do not
    do. Raises ModelLossError for a loss that is not a mean over valid labels. Also for a model that takes no labels, or
    that cannot be run."""
    name = _argument(model)
    made, why = None, ""
    tables = table_roles(model)
    copies: list[tuple[dict[str, Role], bool]] = [(tables, True), (tables, False), ({}, True)]
    has_words = example is not None and not is_more_than_words(example) and not labels_samples(example)
    shown = [None, example] if has_words else [example]
    for batch, (roles, keeps_all) in product(shown, copies):
        try:
            small = small_copy(model, roles, None, LIMIT_BYTES, keeps_all=keeps_all)
            made = _Trial(small, name, batch)
            with generators_kept():
                if kept := made.kept():
                    for owner in (model, made.model):
                        owner.register_forward_hook(partial(_hand_out, kept))
                made.run(made.labels)
            break
        except ModelLossError:
            raise
        except Exception as error:  # of the model's own code, or no copy
            kind = "" if isinstance(error, NoCopyError) else f"{type(error).__name__}: "
            made, why = None, f"{kind}{(str(error).splitlines() or [''])[0][:200]}"
    if made is None:
        raise ModelLossError(
            f"criterion='model': the loss of {type(model).__name__} cannot be proven on a small copy: {why}; {LEGAL}"
            + (
                ""
                if example
                else "; or cl.initialize(..., example=batch), if no ids are its inputs, or its labels are of samples"
            )
        )
    with generators_kept():
        first, *others = made.ignored() or (None,)
        return ModelLoss(
            name, first, is_shown=batch is not None, others=tuple(n for n in others if n is not None)
        )


def _hand_out(name: str, module: nn.Module, args: Any, outputs: Any) -> dict[str, Any] | None:
    """A hook: what a model gives, with the loss that it keeps as an attribute."""
    kept = getattr(module, name)
    return {"loss": kept, "logits": outputs} if isinstance(kept, Tensor) else None


def _argument(model: nn.Module) -> str:
    """The argument of labels of a model's forward."""
    taken = signature(model.forward).parameters
    by_name = [name for name in NAMES if name in taken]
    rest = [n for n, p in taken.items() if p.kind is not Parameter.VAR_KEYWORD][1:]
    if by_name:
        return by_name[0]
    if len(rest) == 1 and taken[rest[0]].default is None:
        return rest[0]
    raise ModelLossError(
        f"criterion='model': {type(model).__name__}.forward{signature(model.forward)} has no argument for labels; "
        f"legal: one named {', '.join(NAMES[:2])}, as in forward(idx, targets=None). "
        f"Or, on data ranks, a loop of engine.backward(engine(**batch).loss) and engine.step()"
    )


def check_labels_optional(model: nn.Module, *, own_loss: bool) -> None:
    """Raises ModelLossError for a forward that cannot be called without labels, as copies, plans and evaluation do.
    `own_loss`: the model gives the loss. Else a required `y` or `tgt` is an input, as of `nn.Transformer`."""
    taken = signature(model.forward).parameters
    name = next((name for name in (NAMES if own_loss else CLEAR_NAMES) if name in taken), None)
    if name is not None and taken[name].default is Parameter.empty and len(taken) > 1:
        raise ModelLossError(
            f"model: {type(model).__name__}.forward{signature(model.forward)} requires {name}, and a model gets the "
            f"inputs; legal: {name}=None in its signature. With it, criterion='model' trains on the loss that forward "
            f"gives, and criterion=None on its logits"
        )


def gather_logits(
    model: nn.Module, roles: Mapping[str, Role], strategy: TensorStrategy, criterion: ModelLoss | None
) -> None:
    """Have the head of a split model gather the vocabulary, if the model's own code reads its logits."""
    if criterion is None:
        return
    head = next(name for name, role in roles.items() if role.name == "lm_head")
    model.get_submodule(head).register_forward_hook(lambda module, args, out: strategy.whole_vocabulary(out))


class _Trial:
    """A small copy with three samples, of ids or of an example."""

    def __init__(self, small: SmallCopy, name: str, example: Batch | None) -> None:
        model = small.model
        self.model, self.name, self.mode = model.eval(), name, ""
        ids = few_ids(model, 3)
        words = Batch((ids,), {}, labels=ids.roll(1, 1), samples=torch.arange(3))
        self.batch = words if example is None else small.samples_of(example, 3)
        self.labels = self.batch.labels
        self.what = f"criterion='model': the loss of {type(model).__name__}"
        if example is not None and len(self.labels.unique()) == 1:
            raise ModelLossError(
                f"example: all labels of its first samples are {example.labels.max().item()}, and a proof asks for "
                f"other losses. Legal: samples with several labels"
            )

    def run(self, labels: Tensor, samples: slice = slice(None)) -> tuple[float, list[Tensor]]:
        """Loss and gradients of some samples."""
        self.model.zero_grad()
        back = set_back(self.model)
        try:
            with torch.enable_grad(), Plainly():
                args = [x[samples] for x in self.batch.args]
                named = {n: x[samples] for n, x in {**self.batch.kwargs, self.name: labels}.items()}
                loss = loss_in(self.model(*args, **named))
                loss.backward()  # which may run code of the forward again
        finally:
            back()
        return float(loss.detach()), [
            torch.zeros_like(p) if p.grad is None else p.grad
            for p in self.model.parameters()
            if p.requires_grad
        ]

    def kept(self) -> str:
        """The attribute in which a model keeps its loss, if it gives none; else ""."""
        with torch.enable_grad(), Plainly():
            outputs = self.model(*self.batch.args, **self.batch.kwargs, **{self.name: self.labels})
        if [t for t in _members(outputs) if t.numel() == 1] or not isinstance(outputs, Tensor):
            return ""
        now = [
            n for n, x in vars(self.model).items() if isinstance(x, Tensor) and x.numel() == 1 and x.grad_fn
        ]
        for name in now:
            setattr(self.model, name, None)  # a result of a run cannot be copied
        return now[0] if len(now) == 1 else ""

    def ignored(self) -> tuple[int, ...]:
        """The labels that the model passes over, in evaluation and in training. Raises ModelLossError for a loss that
        is no mean."""
        found = self._ignored()
        if any(map(is_over_the_batch, self.model.modules())):
            return found  # parts of a batch have other statistics, which a step takes from all of them
        self.model.train()
        self.mode = " in training"
        if (trained := self._ignored()) != found:
            in_training, in_eval = (", ".join(map(str, x)) or "none" for x in (trained, found))
            raise ModelLossError(
                f"{self.what} ignores the label {in_training} in training and {in_eval} in eval(); legal: one for both"
            )
        return found

    def _ignored(self) -> tuple[int, ...]:
        with _NamedLabels(self.labels) as seen:
            whole = self.run(self.labels)
        if seen.weighs:
            raise ModelLossError(
                f"{self.what}{self.mode} weighs classes by {seen.weighs}, so it is no mean over labels; {LEGAL}"
            )
        plain = self._without(seen.named)
        tried = dict.fromkeys((*IGNORED_BY_MODELS, *sorted(seen.named)))
        passed = tuple(label for label in tried if self._passes_over(label, plain))
        cuts = slice(0, 1), slice(1, 3)
        counts = [sum(label not in passed for label in self.labels[cut].flatten().tolist()) for cut in cuts]
        labels = self.labels if min(counts) > 0 else plain
        counts = counts if min(counts) > 0 else [1, 2]
        whole = whole if labels is self.labels else self.run(labels)
        parts = [self.run(labels, cut) for cut in cuts]
        if not _adds_up(whole, parts, counts):
            a, b = (loss for loss, _ in parts)
            kind = "a sum" if abs(a + b - whole[0]) <= TOLERANCE * abs(whole[0]) else "no mean over tokens"
            raise ModelLossError(
                f"{self.what}{self.mode} is {kind}: {whole[0]:.6g} of three samples, {a:.6g} of the first, {b:.6g} of "
                f"the others; {LEGAL}"
            )
        self._refuse_shifts(plain)
        return passed

    def _refuse_shifts(self, labels: Tensor) -> None:
        """Raises ModelLossError for a loss that does not read the first label of a sample."""
        first = labels.clone()
        flat = first.view(len(first), -1)
        flat[:, 0] += 1
        if not first.is_floating_point():
            flat[:, 0] %= int(labels.max() + 1)
        if self.run(first)[0] == self.run(labels)[0]:
            raise ModelLossError(
                f"{self.what} does not read the first label of a sample: it shifts labels itself. Those of a batch "
                f"are shifted already; legal: criterion=None, which trains on the model's logits"
            )

    def _without(self, named: set[int]) -> Tensor:
        """The labels, with others of them in the place of the `named`. As they are if that leaves a single one."""
        if self.labels.is_floating_point() or not named:
            return self.labels
        out = torch.isin(
            self.labels, torch.tensor(sorted(named), dtype=self.labels.dtype, device=self.labels.device)
        )
        others = self.labels[~out]
        if not out.any() or len(others.unique()) < 2:
            return self.labels
        labels = self.labels.clone()
        labels[out] = others[torch.arange(int(out.sum()), device=labels.device) % len(others)]
        return labels

    def _passes_over(self, label: int, plain: Tensor) -> bool:
        labels = plain.clone()
        flat = labels.view(len(labels), -1)
        count = flat.shape[1]
        flat[0, max(1, count // 4) :], flat[1, : max(1, 5 * count // 8)] = label, label
        counts = [int((labels[part] != label).sum()) for part in (slice(0, 1), slice(1, 3))]
        try:
            with _Guarded():
                whole = self.run(labels)
                parts = [self.run(labels, slice(0, 1)), self.run(labels, slice(1, 3))]
                return _adds_up(whole, parts, counts) and self._adds_nothing(label)
        except Exception:  # of the model's own code: no such label
            return False

    def _adds_nothing(self, label: int) -> bool:
        """Whether a sample of this label alone trains nothing. A loss over the number of positives counts the others
        too. Models that find the end of a sample by its labels cannot run so."""
        try:
            loss, gradients = self.run(torch.full_like(self.labels, label), slice(0, 1))
        except Exception:  # of the model's own code
            return True
        return not math.isfinite(loss) or not any(bool(g.any()) for g in gradients)


class _NamedLabels(TorchFunctionMode):
    """Notes the whole numbers that a forward may pass over: `named`. These are each `ignore_index`, and numbers that it
    compares `labels` with. `weighs`: the other weights by which it means over classes, or ""."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.labels = labels
        self.named: set[int] = set()
        self.weighs = ""
        dtype = labels.dtype
        whole = not dtype.is_floating_point and dtype != torch.bool
        self._range = (
            (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if whole else (-LIMIT_WHOLE, LIMIT_WHOLE)
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            given = dict(
                zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)
            )
            self._note_mean({**given, **(kwargs or {})})
        elif getattr(func, "__name__", "").strip("_") in COMPARISONS and len(args) == 2:
            x, y = args
            if isinstance(x, Tensor) and self._is_labels(x):
                value = y.item() if isinstance(y, Tensor) and y.numel() == 1 else y
                if isinstance(value, int | float) and math.isfinite(value):
                    self._note(*(int(value) + more for more in (-1, 0, 1)))
        return func(*args, **(kwargs or {}))

    def _note(self, *labels: int) -> None:
        """Note those that labels may be. Not more than `MOST_NAMED`, as a loop over classes compares with each."""
        least, most = self._range
        if len(self.named) < MOST_NAMED:
            self.named |= {label for label in labels if least <= label <= most}

    def _is_labels(self, x: Tensor) -> bool:
        return x.numel() == self.labels.numel() and bool((x.flatten() == self.labels.flatten()).all())

    def _note_mean(self, given: Mapping[str, Any]) -> None:
        self._note(given.get("ignore_index", IGNORED))
        weight = given.get("weight")
        if weight is not None and given.get("reduction", "mean") == "mean" and len(weight.unique()) > 1:
            self.weighs = f"{weight.min().item():.4g} to {weight.max().item():.4g}"


class _Guarded(TorchFunctionMode):
    """Raises ValueError for labels below 0 in torch's CTC loss, which would read and write memory of others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.ctc_loss, torch.ctc_loss) and bool((args[1] < 0).any()):
            raise ValueError("ctc_loss takes no label below 0")
        return func(*args, **(kwargs or {}))


def _adds_up(
    whole: tuple[float, list[Tensor]], parts: list[tuple[float, list[Tensor]]], counts: list[int]
) -> bool:
    total = sum(counts)
    mean = sum(loss * n for (loss, _), n in zip(parts, counts, strict=True)) / total
    if not abs(mean - whole[0]) <= TOLERANCE * abs(whole[0]):
        return False
    largest = max(float(g.norm()) for g in whole[1])
    for index, expected in enumerate(whole[1]):
        found = sum(g[index] * n for (_, g), n in zip(parts, counts, strict=True)) / total
        if not float((found - expected).norm()) <= TOLERANCE * (float(expected.norm()) + 1e-3 * largest):
            return False
    return True
