"""Proves a model again at lengths of sequences where its code takes another path.

Note: paths.
A proof runs a small copy on sequences of one length.  Code may decide by the length, as in `if x.shape[1] > window`.
So before the first batch of a length the copy runs forward at it, in training and in evaluation.  Its path is the set
of pairs of operations that follow each other, each with the module that runs it.  A new pair is proven: at that length
the copy in parts must be the plain one.  So must the padded copy, where padding has another path.  A loop over more
tokens has no new pair.  Lengths at which the copy does not run are not seen, as tables of positions have few rows
there.  Above `MOST_TOKENS` nothing is proven, and a warning names a new path.
Cost: two forwards of a small copy for each new length, and seconds for a new path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from colossal_lite.layers.roles import Role
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.proof_modes import Plainly
from colossal_lite.numerics.torch_modes import DispatchMode
from colossal_lite.observe.printed_lines import warn
from colossal_lite.parallel.copy_batches import words
from colossal_lite.parallel.padding import Padding
from colossal_lite.parallel.plan_proof import is_our_own, on_a_copy
from colossal_lite.parallel.small_copy import (
    NoCopyError,
    SmallCopy,
    deep_copy,
    few_tokens,
    on_meta_copy,
)
from colossal_lite.parallel.swap_proof import Calls, NotRunError, difference_of_parts

MOST_TOKENS = 512
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two operations that follow each other, each with the module that runs it."""
Proof = Callable[[SmallCopy, int], str]
"""How a copy in parts differs from the plain one at so many tokens, or ""."""


class _Path(DispatchMode):
    """Notes the pairs of operations of one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pairs = set[Pair]()
        self._calls, self._last = Calls(), ("", "")
        self._calls.watch(model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Blocks and experts are alike, and which expert has tokens is no path.
        now = re.sub(r"\d+", "*", self._calls.place), str(func)
        self.pairs.add((self._last, now))
        self._last = now
        return func(*args, **(kwargs or {}))


@dataclass
class LengthProofs:
    """The paths of a model that are proven, and the proofs of new ones."""

    small: SmallCopy
    proofs: Sequence[Proof]
    pads: Padding
    cuts: str
    """The settings that cut the model, for messages."""
    proven: dict[bool, set[Pair] | None]
    """Pairs of the paths that are proven, with values and on meta; None where the copy does not run so. Those on meta
    are missing until a sequence is that long."""
    warns: bool = True
    """Whether a warning may be given: once, and by one rank."""
    _seen: set[int] = field(default_factory=set)

    def check(self, tokens: int) -> None:
        """Before a forward on sequences of `tokens`. Raises ValueError where the model is not that of one process on
        the path which it takes."""
        if tokens in self._seen:
            return
        self._seen.add(tokens)
        padded, on_meta = tokens + -tokens % self.pads.parts, tokens > MOST_TOKENS
        proven = self._proven_on_meta() if on_meta else self.proven[False]
        if proven is None:
            return
        try:
            plain = pairs_of(self.small, tokens, on_meta=on_meta)
            longer = plain if padded == tokens else pairs_of(self.small, padded, on_meta=on_meta)
        except NotRunError:
            return
        is_new, is_other = not plain | longer <= proven, plain != longer
        if on_meta and (is_new or is_other):
            self._tell(tokens)
        elif is_new or is_other:
            found = self._difference(tokens, padded, is_new=is_new, is_other=is_other)
            if found:
                self._seen.discard(tokens)
                raise ValueError(
                    f"inputs: at {tokens} tokens the code of {self._kind} takes another path. With {self.cuts} it "
                    f"is not that of one process there. Found on a small copy: {found}. Legal: other lengths, code "
                    f"that does not decide by the length, or a run without {self.cuts}"
                )
            proven |= plain | longer

    def _proven_on_meta(self) -> set[Pair] | None:
        if True not in self.proven:
            self.proven[True] = None
            with suppress(NotRunError):
                self.proven[True] = pairs_of(self.small, few_tokens(self.small.model), on_meta=True)
        return self.proven[True]

    def _difference(self, tokens: int, padded: int, *, is_new: bool, is_other: bool) -> str:
        try:
            found = [each for proof in self.proofs if is_new and (each := proof(self.small, padded))]
            if is_other and not found:
                batch = words(2, tokens, self.small.words, ())
                part = difference_of_parts(
                    self.small.model, batch, [replace(self.pads, longest=None).of(batch)]
                )
                found = [f"padding to {padded} tokens changes the {part}"] if part else []
        except (NoCopyError, NotRunError):  # nothing can be said of it
            return ""
        return found[0] if found else ""

    def _tell(self, tokens: int) -> None:
        if self.warns:
            self.warns = False
            warn(
                f"inputs: at {tokens} tokens the code of {self._kind} takes a path that no proof has seen "
                f"(docs/plans.md)"
            )

    @property
    def _kind(self) -> str:
        return type(self.small.model).__name__


def pairs_of(small: SmallCopy, tokens: int, *, on_meta: bool) -> set[Pair]:
    """The path of a copy on sequences of `tokens`, in training and in evaluation. Raises NotRunError if it does not run
    at that length."""
    found = set[Pair]()
    ids = words(2, tokens, small.words, small.padding).inputs
    ids = torch.empty_like(ids, device="meta") if on_meta else ids
    for trains in (True, False):
        try:
            model = on_meta_copy(small.model) if on_meta else deep_copy(small.model)  # its buffers may change
            path = _Path(model.train(trains))
            with generators_kept(), torch.no_grad(), Plainly(), ids.device, path:
                model(ids)
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(error).__name__}: {error}") from error
        found |= path.pairs
    return found


def proofs_at(
    model: nn.Module, plan: Mapping[str, str], roles: Mapping[str, Role], proofs: Sequence[Proof], pads: Padding,
    cuts: str, *, warns: bool = True,
) -> LengthProofs | None:  # fmt: skip
    """The paths of a whole model that is proven at one length. None where no small copy runs, or none is needed."""
    if not proofs or is_our_own(model, plan):
        return None

    def tried(small: SmallCopy) -> LengthProofs | None:
        if small.tokens is not None:  # it takes no other length
            return None
        first = pairs_of(small, few_tokens(small.model), on_meta=False)
        return LengthProofs(small, tuple(proofs), pads, cuts, {False: first}, warns)

    try:
        return on_a_copy(model, roles, tried, is_quick=True)
    except NoCopyError:
        return None
