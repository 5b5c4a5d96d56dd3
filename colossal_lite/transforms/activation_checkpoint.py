"""Recomputes a block's activations in backward instead of saving them (activation checkpointing).

Note: the saved tensors.  B batch, T tokens, D width, H heads, G key heads, K head width, F feed-forward width.
- `full` (1604.06174): of each block its input alone, B T D elements; backward runs the block's forward again.
- `selective`: also the outputs of matrix products and of attention, which are costly to compute and cheap to save.
  Norms, activations, dropout, rotary and residual sums are computed again.  (Dropping attention alone, 2205.05198,
  section 5, has no point where attention saves no T x T matrix.)  A product whose terms are summed over tensor ranks is
  saved after the sum (`save_for_recompute`).  So it has the size of the residual stream, and the sum does not run
  again.  Neither does the gather before a column-wise linear, unless several share one.  A token takes 4 D + (D + 2 G
  K) + F elements (2 F with a gate). Attention adds H log-sums in float32. Outside the blocks (embeddings, head, logits)
  nothing changes.

The second forward gives the same bits as the first.  It reads the same weights.  Dropout resets its counters to the
start of the block (`DropoutStreams.place`), whatever other micro-batches have run since.  No generator state is saved,
because none is read.  Blocks are the members of every outermost `nn.ModuleList`, `ModuleDict` or `Sequential`. They
must have one class, and layers of their own.
Cost: `full` computes about a third more, and runs the block's
collectives again.  `selective` computes the elementwise part again, plus some microseconds of Python for each operation
of a block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import checkpoint

from colossal_lite.numerics.random import DropoutStreams, Place
from colossal_lite.transforms.key_cache import switch_off_key_cache
from colossal_lite.transforms.saved_results import SavedResults
from colossal_lite.transforms.second_forward import Buffers, SecondForward

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers of a model's blocks."""
Mode = Literal["none", "selective", "full"]

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
# Arguments through which a block of a Hugging Face model writes keys into a cache.  A second run would write them
# twice.
CACHES = ("past_key_value", "past_key_values", "layer_past")


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in its order; empty if it has none."""
    return dict(_blocks(module, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        members = child._modules if isinstance(child, LISTS) else {}
        kinds, grown = {type(m) for m in members.values()}, list(members.values())[:1]
        if kinds == {ParametrizationList}:  # the weights of a module, in the form of other ones
            continue
        if len(kinds) == 1 and any(True for m in grown if m is not None for _ in m.children()):
            yield from ((f"{prefix}{name}.{key}", m) for key, m in members.items() if m is not None)
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def apply_activation_checkpoint(module: nn.Module, mode: Mode, streams: DropoutStreams) -> tuple[str, ...]:
    """Replace the forward of every block of `module` by one that saves less, in place. Returns the blocks' names.

    Raises ValueError for a model without blocks.
    """
    if mode == "none":
        return ()
    blocks = blocks_of(module)
    if not blocks:
        raise ValueError(
            f"activation_checkpoint={mode!r}: {type(module).__name__} has no nn.ModuleList, ModuleDict or Sequential "
            f"of blocks of one class, with modules in them; hold its blocks in one, or use 'none'"
        )
    # Torch imports this in its first `checkpoint`, and the import keeps that call's tensors until a collection.
    importlib.import_module("torch._dynamo")
    switch_off_key_cache(module)
    buffers = Buffers(module)
    for name, block in blocks.items():
        # On the instance: names of modules and parameters, and hooks on the block, do not change.
        block.forward = CheckpointedBlock(name, block, block.forward, mode, streams, buffers)
    return tuple(blocks)


def surround_recomputation(
    module: nn.Module, around: Callable[[nn.Module], AbstractContextManager[Any]]
) -> None:
    """Have the second forward of each block run in the context `around` it."""
    for block in blocks_of(module).values():
        if isinstance(forward := block.__dict__.get("forward"), CheckpointedBlock):
            block.forward = replace(forward, around=around)


def part_of(block: nn.Module, part: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a block's forward, run as the block itself: twice if the block is recomputed."""
    whole = block.__dict__.get("forward")
    return replace(whole, forward=part, is_part=True) if isinstance(whole, CheckpointedBlock) else part


def remove_activation_checkpoint(module: nn.Module) -> None:
    """Restore every block's own forward."""
    for block in blocks_of(module).values():
        if isinstance(changed := block.__dict__.get("forward"), CheckpointedBlock):
            if getattr(changed.forward, "__func__", None) is type(block).forward:
                del block.forward
            else:
                block.forward = changed.forward


@dataclass(frozen=True, eq=False)
class CheckpointedBlock:
    """The forward of one block. It runs now for its output, and in backward for the results it did not save."""

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    mode: Mode
    streams: DropoutStreams
    buffers: Buffers
    """Those of the whole model."""
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda block: nullcontext()
    """Context of the second forward: what gates of the block's own weights do in the first, which calls the block."""
    is_part: bool = False
    """Whether `forward` is a part of the block: the stage of another part may have updated that one's weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        given = dict(zip(signature(self.forward).parameters, args, strict=False)) | kwargs
        if any(given.get(name) is not None for name in CACHES):
            raise ValueError(
                f"activation_checkpoint: {self.name} is handed a cache of keys, which a second forward would fill "
                f"twice; legal: a call without one"
            )
        return checkpoint(  # arguments in a tuple: torch would raise its own error for a changed one
            _called, self.forward, args, kwargs,
            use_reentrant=False, preserve_rng_state=False, context_fn=partial(self._contexts, given),
        )  # fmt: skip

    def _contexts(
        self, given: dict[str, Any]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if self.mode == "selective":
            kept = SavedResults(KEPT)
            first, again = kept.first(), kept.again()
        watch = SecondForward(self.name, f"activation_checkpoint={self.mode!r}", self.buffers, given)
        return first, _RecomputeContext(self, watch, self.streams.place(), again)

    @property
    def versions(self) -> list[int]:
        """The version counters of the block's weights; none for a part, whose backward the plan puts before its
        update."""
        return [] if self.is_part else [parameter._version for parameter in self.block.parameters()]


def _called(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


class _RecomputeContext:
    """The second forward of a block. It sets dropout's counters back to the block's start, and restores them at exit,
    even after an early stop. Weights that have changed since the first forward raise an error. Autograd would not
    notice, because it saved none of them."""

    def __init__(
        self, block: CheckpointedBlock, watch: SecondForward, place: Place, inner: AbstractContextManager[Any]
    ) -> None:
        self._block, self._streams, self._place, self._inner = block, block.streams, place, inner
        self._watch = watch
        self._now, self._versions = place, block.versions
        self._draws: AbstractContextManager[Any] = nullcontext()
        self._weights: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        if self._block.versions != self._versions:
            raise ValueError(
                f"backward: the weights of {self._block.name} have been updated since the forward that it belongs to; "
                f"call backward before step"
            )
        self._now = self._streams.place()
        self._streams.go_to(self._place)
        self._weights = self._block.around(self._block.block)  # anew, as a graph that is kept runs again
        self._draws = self._block.streams.functional(self._block.block)
        self._weights.__enter__()
        self._draws.__enter__()
        self._inner.__enter__()
        self._watch.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._streams.go_to(self._now)
        self._watch.close()
        done = self._inner.__exit__(kind, error, trace)
        self._draws.__exit__(kind, error, trace)
        self._weights.__exit__(None, None, None)
        self._watch.check(error)
        return done
