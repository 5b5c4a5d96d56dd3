"""Reads the forms of a batch, `(inputs, labels)` or a mapping, into arguments of the model's forward and labels."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

FORMS = "(inputs, labels), ((x, y), labels) for several arguments, or a dict of 'labels' and the forward's arguments"
ALIKE = 0.8
"""From which likeness on a key that goes into `**kwargs` is taken for a misspelt name."""


def parts_of_batch(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """(positional arguments, arguments by name, labels). Raises ValueError for another form."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            near = difflib.get_close_matches("labels", map(str, batch), 1)
            raise ValueError(
                f"batch: a mapping of {', '.join(map(str, batch)) or 'nothing'} without 'labels'"
                f"{f' (is {near[0]!r} it?)' if near else ''}; legal: {FORMS}"
            )
        return (), {str(name): x for name, x in batch.items() if name != "labels"}, batch["labels"]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else type(batch).__name__
        raise ValueError(f"batch: {what}; legal: {FORMS}")
    inputs, labels = batch
    is_several = isinstance(inputs, tuple | list) and any(isinstance(x, Tensor) for x in inputs)
    return (tuple(inputs) if is_several else (inputs,)), {}, labels


def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that messages have for them."""
    names = ["inputs"] if len(args) == 1 else [f"inputs[{place}]" for place in range(len(args))]
    return dict(zip(names, args, strict=True)) | dict(kwargs)


@dataclass(frozen=True)
class ForwardArguments:
    """What the forward of a model takes."""

    model: str
    taken: tuple[Parameter, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ForwardArguments:
        return cls(type(model).__name__, tuple(inspect.signature(model.forward).parameters.values()))

    @property
    def names(self) -> list[str]:
        """Those that can be given by name, in order."""
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        return [each.name for each in self.taken if each.kind in kinds]

    @property
    def makes_tokens(self) -> bool:
        """Whether labels are of other tokens than the inputs: a decoder's."""
        return "decoder_input_ids" in self.names

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError for arguments that the forward does not take, and for one that it lacks."""
        kinds = [each.kind for each in self.taken]
        by_place = [
            p.name
            for p in self.taken
            if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        ]
        takes = f"legal: labels, and what {self.model}.forward takes: {', '.join(self.names) or 'any name'}"
        if len(args) > len(by_place) and Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(f"inputs: {len(args)} arguments; legal: at most {len(by_place)}. {takes}")
        faults = []
        for name in kwargs:
            cutoff = ALIKE if Parameter.VAR_KEYWORD in kinds else 0.6
            near = difflib.get_close_matches(name, [*self.names, "labels"], 1, cutoff)
            if name not in self.names and (near or Parameter.VAR_KEYWORD not in kinds):
                faults.append(f"unknown key {name!r}{_hint(name, near)}")
        given = {*by_place[: len(args)], *kwargs}
        faults += [
            f"no key {each.name!r}{MAY_BE_LABELS.get(each.name, '')}"
            for each in self.taken
            if each.default is Parameter.empty
            and each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            and each.name not in given
        ]
        if faults:
            raise ValueError(f"batch: {', '.join(faults)}; {takes}")

    def check_decoder(self, kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError for a mapping from which a decoder gets no ids: models would make them of the inputs."""
        if self.makes_tokens and kwargs and not {"decoder_input_ids", "decoder_inputs_embeds"} & {*kwargs}:
            raise ValueError(
                f"batch: no key 'decoder_input_ids' for {self.model}, whose forward gets no labels to make them of. "
                f"Legal: these ids, as DataCollatorForSeq2Seq(tokenizer, model=model) gives them, or criterion='model'"
            )


MAY_BE_LABELS = {
    name: f" (if these are the labels: {name}=None in its signature, and criterion='model')"
    for name in ("y", "tgt")
}
"""What to say of a missing argument that is an input of some models and the labels of others."""


def _hint(name: str, near: Sequence[str]) -> str:
    if name == "token_type_ids":
        return " (tokenizer(..., return_token_type_ids=False) gives none)"
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_known(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ValueError for other names than the `known`, or without ids: of a model whose forward is not at hand."""
    faults = []
    for name in kwargs:
        if name not in known:
            faults.append(f"unknown key {name!r}{_hint(name, difflib.get_close_matches(name, known, 1))}")
    if faults or "input_ids" not in kwargs:
        faults += [] if "input_ids" in kwargs else ["no key 'input_ids'"]
        raise ValueError(f"batch: {', '.join(faults)}; legal: {', '.join(known)}")
