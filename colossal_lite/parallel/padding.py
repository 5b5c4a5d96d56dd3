"""Pads sequences to lengths that ranks can cut, so that no number of a step changes.

Note: padding.
Ranks that each see a part of every sequence need equal parts.  Other lengths get tokens at the end, and the outputs are
cut back.  They are exact if no real token sees the padding:
- its labels are ignored, so no gradient comes from it;
- with causal attention no real token attends to it, as it stands last.  Full attention masks it by `attention_mask`;
- real tokens keep their positions.  Padding repeats the last one, so no table of positions must be longer;
- real tokens keep the counters of their dropouts;
- a token that is masked with all before it sees no padding, or its label is ignored.
This holds for our GPT.  Any other model is tried on a small copy, with padding and without (`proven`).  If the two
differ, lengths that do not divide raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.config.parallel_schema import ModelFacts, SequenceConfig, TensorConfig, token_parts
from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import IGNORED
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers import hugging_face
from colossal_lite.layers.roles import Role
from colossal_lite.layers.tensor_modes import mode_of
from colossal_lite.models import GPT
from colossal_lite.parallel.copy_batches import words
from colossal_lite.parallel.plan_proof import TOKENS, is_our_own, on_a_copy
from colossal_lite.parallel.small_copy import NoCopyError, SmallCopy, table_roles
from colossal_lite.parallel.swap_proof import difference_of_parts


@dataclass(frozen=True)
class Padding:
    """How a model's sequences are padded: until `parts` divides their length."""

    parts: int = 1
    cuts: str = ""
    """The settings that cut sequences, for messages."""
    masks: bool = False
    """Attention is not causal, so `attention_mask` hides padding."""
    hidden: int = 0
    """The entry of `attention_mask` for padding: no real token has it, so none attends to it."""
    positions: bool = False
    """Padding gets `position_ids`."""
    longest: int | None = None
    """The most tokens that the model takes, if it counts positions itself."""
    refused: str = ""
    """Why the model takes no padding; "" if it does."""
    sees_behind_masks: bool = False
    """A token before which all is masked, and which is masked itself, sees padding."""

    def of(self, batch: Batch) -> Batch:
        """The batch, padded where that is needed. Raises ValueError if it cannot be."""
        ids = batch.inputs
        if self.parts == 1 or ids.dim() != 2 or ids.is_floating_point() or not ids.shape[1] % self.parts:
            return batch
        tokens, more = ids.shape[1], -ids.shape[1] % self.parts
        if why := self._why_not(batch, tokens + more):
            raise ValueError(
                f"inputs: {tokens} tokens do not divide into {self.parts} parts ({self.cuts}), and {why}; legal: "
                f"lengths that are multiples of {self.parts}, or without {self.cuts.partition(' ')[0]}"
            )
        kwargs = {name: self._longer(name, x, more) for name, x in batch.kwargs.items()}
        if self.positions and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = _repeated(torch.arange(tokens, device=ids.device).expand_as(ids), more)
        if self.masks and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = self._longer("attention_mask", torch.ones_like(ids), more)
        labels = batch.labels
        return replace(
            batch,
            args=(_repeated(batch.args[0], more), *batch.args[1:]) if batch.args else (),
            kwargs=kwargs,
            labels=_filled(labels, more, IGNORED) if labels.shape == ids.shape else labels,
            tokens=tokens,
        )

    def _why_not(self, batch: Batch, length: int) -> str:
        if self.refused:
            return self.refused
        others = (*batch.args[1:], *(x for name, x in batch.kwargs.items() if name not in _KNOWN))
        if any(isinstance(x, Tensor) and x.dim() > 1 for x in others):
            return f"arguments beside {', '.join(_KNOWN)} are not padded"
        if self.longest is not None and length > self.longest:
            return f"the model takes no more than {self.longest}, padding included"
        if self.sees_behind_masks and _counts_masked(batch.kwargs.get("attention_mask"), batch.labels):
            return "attention_mask begins with 0, where a label counts whose token would see padding"
        return ""

    def _longer(self, name: str, x: Tensor, more: int) -> Tensor:
        if name not in _KNOWN or not isinstance(x, Tensor) or x.dim() < 2:
            return x
        if name != "attention_mask":
            return _repeated(x, more)
        return _filled(x.long() if x.dtype == torch.bool else x, more, self.hidden)


def _counts_masked(mask: object, labels: Tensor) -> bool:
    """Whether a label may count at the left of a sequence, where `mask` has hidden all. Labels of another shape do."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    hidden = (mask != 0).cumsum(1) == 0
    return bool((hidden & (labels != IGNORED) if labels.shape == mask.shape else hidden).any())


_KNOWN = ("input_ids", "attention_mask", "position_ids")


def _filled(x: Tensor, more: int, value: int) -> Tensor:
    return nn.functional.pad(x, (0, more), value=value)


def _repeated(x: Tensor, more: int) -> Tensor:
    return torch.cat((x, x[:, -1:].expand(-1, more)), 1)


# ---- facts of a model ----


def padding_of(
    model: nn.Module, mesh: Mesh, facts: ModelFacts | None, plan: Mapping[str, str], roles: Mapping[str, Role], *,
    sequence_parallel: bool, sequence_mode: str, longest: int | None, has_auxiliary: bool,
) -> Padding:  # fmt: skip
    """The padding of a whole model, before its layers are swapped. `longest`: the most tokens that it takes."""
    tensor = TensorConfig(
        size=mesh.size("tensor"), mode=mode_of(mesh), sequence_parallel=sequence_parallel
    )  # fmt: skip
    sequence = mesh.size("sequence")
    parts = token_parts(tensor, SequenceConfig.model_validate(dict(size=sequence, mode=sequence_mode)))
    if parts == 1:
        return Padding()
    settings = [f"parallel.tensor.sequence_parallel on {tensor.size} ranks"] * tensor.cuts_sequence
    settings += [f"parallel.sequence on {sequence} ranks, mode {sequence_mode!r}"] * (sequence > 1)
    is_ours, is_theirs = isinstance(model, GPT), hugging_face.is_hugging_face(model)
    positions = is_ours or (is_theirs and "position_ids" in _arguments(model))
    padding = Padding(
        parts, " and ".join(settings), masks=not (facts is None or facts.causal),
        hidden=-1 if is_ours else 0, positions=positions and sequence == 1,
        longest=None if positions else longest,
    )  # fmt: skip
    if has_auxiliary:
        return replace(padding, refused="auxiliary losses would count padding")
    if mesh.is_recording or is_our_own(model, plan):
        return padding
    return proven(model, roles, padding)


def proven(model: nn.Module, roles: Mapping[str, Role], padding: Padding) -> Padding:
    """Try `padding` on a small copy of the model, without and with a mask. Returns what is exact, or refused padding.

    Does not communicate."""

    takes_mask = "attention_mask" in _arguments(model)

    def tried(small: SmallCopy) -> Padding:
        tokens = 2 * padding.parts - 1
        batch = words(2, tokens, small.words, ())
        for masks in (False, True)[: 1 + takes_mask]:
            trial = replace(padding, masks=masks)
            if not _difference(small.model, batch, trial):
                sees = takes_mask and _difference(small.model, _left_padded(batch), trial)
                return replace(trial, sees_behind_masks=bool(sees))
        return replace(padding, refused=f"padding changes what {type(model).__name__} gives for other tokens")

    try:
        return on_a_copy(model, roles, tried)
    except NoCopyError as error:
        why = f"{type(model).__name__} is not proven to take padding on a small copy ({error})"
        return replace(padding, refused=why)


def _difference(model: nn.Module, batch: Batch, padding: Padding) -> str:
    """What `padding` changes of a model's loss and gradients on a batch, or ""."""
    return difference_of_parts(model, batch, [replace(padding, longest=None).of(batch)])


def _left_padded(batch: Batch) -> Batch:
    """The batch with the first token of its first sample masked."""
    mask = torch.ones_like(batch.inputs)
    mask[0, 0] = 0
    return replace(batch, kwargs={**batch.kwargs, "attention_mask": mask})


@dataclass(frozen=True)
class SeenPadding:
    """Which padding the tokens of a model see, if each data rank pads to a length of its own."""

    behind: bool = False
    """At the right, if nothing masks it."""
    before: bool = False
    """At the left, under `attention_mask`."""
    before_positions: bool = False
    """At the left, under `attention_mask` and with `position_ids`."""
    statistics: tuple[nn.Module, ...] = ()
    """Modules that read all padding in training, masked or not: they normalise over the batch."""

    def at_left(self, kwargs: Mapping[str, Any], labels: Tensor | None) -> bool:
        """Whether tokens of a batch see padding at its left, or labels there count."""
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool((mask[:, :1] == 0).any()):
            return False
        if self.before if kwargs.get("position_ids") is None else self.before_positions:
            return True
        return labels is not None and labels.shape == mask.shape and _counts_masked(mask, labels)


def seen_padding(model: nn.Module) -> SeenPadding:
    """Tries padding on a quick small copy. None is seen by a model that has none. Does not communicate."""
    names = _arguments(model)

    def tried(small: SmallCopy) -> SeenPadding:
        batch = words(2, TOKENS - 1, small.words, ())
        padding = Padding(parts=TOKENS)
        behind = bool(_difference(small.model, batch, padding))
        if "attention_mask" not in names or _difference(small.model, batch, replace(padding, masks=True)):
            return SeenPadding(behind)
        before, with_positions = (
            _sees_before(small.model, batch, positions) for positions in (False, "position_ids" in names)
        )
        return SeenPadding(behind, before, with_positions)

    try:
        if is_our_own(model, {}) or isinstance(model, GPT):
            return SeenPadding()
        return on_a_copy(model, table_roles(model), tried, is_quick=True)
    except NoCopyError:
        return SeenPadding()


def _sees_before(model: nn.Module, batch: Batch, positions: bool) -> bool:
    """Whether one more token at the left, masked and without a label, changes loss or gradients of a model."""
    ids = batch.inputs
    mask, places = torch.ones_like(ids), torch.arange(ids.shape[1]).expand_as(ids)

    def of(ids: Tensor, mask: Tensor, labels: Tensor, places: Tensor) -> Batch:
        kwargs = dict(attention_mask=mask) | (dict(position_ids=places) if positions else {})
        return replace(batch, args=(ids,), kwargs=kwargs, labels=labels)

    longer = [nn.functional.pad(x, (1, 0)) for x in (ids, mask, places)]
    padded = of(longer[0], longer[1], nn.functional.pad(batch.labels, (1, 0), value=IGNORED), longer[2])
    return bool(difference_of_parts(model, of(ids, mask, batch.labels, places), [padded]))


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
