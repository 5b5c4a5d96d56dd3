"""Runs the updates of a step during the next forward, or during its own backward.

Note: beside the next forward, without speculation.
When a step ends, the values that its updates need are known.  Only the copies over the link are slow.  So the step
returns, and the updates run in forward order.  A chunk is updated when a gate (zero/forward_hooks.py) is about to let a
module read its weights.  The computation and its order are those of an immediate update: so are the bits.  Any other
read or change of weights or optimizer state first runs all of them.  Until then the weights are placeholders.  Updates
on the host start as soon as no update on the device comes before them in the plan.  A read of a chunk waits until its
new weights have arrived (`arrive`).  Those that rest on the host arrive at once.  Chunks arrive in their order,
wherever they are updated.  So ranks gather them in one order, also if one of them owns nothing of a chunk.
Source: arXiv 2410.21316; unlike the delayed update of 2101.06840, no forward sees weights of a step before.

Note: in backward.
An update divides its gradient by the valid tokens of all ranks.  That number is summed with the loss before backward.
If the loss is not finite, or no token counts, gradients are reduced and dropped.  A gradient that is not finite shows
only after other updates.  Such a step has spoilt the weights, and raises an error.  An update must know whether any
rank had a gradient for a parameter.  A rank that lacks one holds the gradient of this chunk, and of those after it.
When the ranks have agreed it goes on; it uses more memory than planned.  Stages may end in another order than that of
their chunks.  Then an update waits for those of the chunks behind it.
Source: fused backward and update as in arXiv 2306.09782 (LOMO), here for every elementwise rule, with sharded state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from colossal_lite.memory.chunk import Chunk
from colossal_lite.schedule.optimizer_updates import ChunkPart, holds_up, part_of
from colossal_lite.schedule.plan import Action, ActionKind

Subject = TypeVar("Subject", Action, int)


class DeferredUpdates:
    """Runs the actions of a step's updates, as far as they are requested."""

    def __init__(
        self, actions: Sequence[Action], handlers: Mapping[ActionKind, Callable[[Action], None]],
        end: Callable[[], None], arrive: Callable[[int], None] = lambda chunk: None, *,
        by_gradient: bool = False, in_order: bool = False, wait: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`handlers` do the actions of their kind; `arrive`, in the order of chunks, waits for the new weights of one
        whose update has started; `wait`, before the end, for those that no `arrive` has waited for; `end` is called
        when all are done; `by_gradient`: the gradient of a chunk is there from its turn on, so no action of another one
        starts with it; `in_order`: an update on the device waits for those before it, so that its chunk arrives before
        its weights go home. Weights that the host has updated go up when they are needed. So those that rest there can
        go before them."""
        self._in_order = in_order
        self._actions, self._handlers, self._end, self._arrive = tuple(actions), handlers, end, arrive
        self._wait = wait
        self._next = 0
        self._stops = _stops_of(self._actions, by_gradient=by_gradient, in_order=in_order)
        self._coming: list[tuple[int, bool]] = []
        """A heap: chunks whose updates have started, and whether they must be waited for."""
        self._failure: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an action has raised: some weights are of this step, and others will never be."""
        return self._failure is not None

    def until(self, chunk: int) -> None:
        """The chunk with this number in the plan is updated, and all those before it."""
        self._run(self._stops[chunk])
        self._settle(chunk)

    def start(self, chunk: int) -> None:
        """As `until`, but updates on the host only start."""
        self._run(self._stops[chunk])

    def drain(self) -> None:
        """Wait for the updates on the host that have started; the others never run. One that fails only tells what the
        caller knows: some weights are of this step and others are not."""
        while self._coming:
            try:
                self._arrive(heapq.heappop(self._coming)[0])
            except Exception as error:
                self.mark_failed(error)

    def finish(self) -> None:
        """Run all that is left. If an action has raised, this raises the same, each time."""
        if self._next <= len(self._actions):
            self._run(len(self._actions))
            self._settle(None)
            self._do(lambda _: self._wait(), 0)
            self._next = len(self._actions) + 1
            self._end()

    def mark_failed(self, why: Exception) -> None:
        """The remaining updates never run: a request raises `why`, or the error of an earlier action."""
        self._failure = self._failure or why

    def _run(self, stop: int) -> None:
        if self._failure is not None:
            raise self._failure
        while self._next < stop:
            action = self._actions[self._next]
            self._next += 1
            if self._in_order and holds_up(action):
                self._settle((action.chunk or 0) - 1)
            self._do(self._handlers[action.kind], action)
            if action.kind is ActionKind.UPDATE:
                heapq.heappush(self._coming, (action.chunk or 0, not holds_up(action)))
                self._settle(-1)

    def _settle(self, last: int | None) -> None:
        """Wait for the chunks up to `last` whose updates have started; None: all. Those behind them that need no wait
        arrive too."""
        while self._coming and (last is None or self._coming[0] <= (last, True) or not self._coming[0][1]):
            self._do(self._arrive, heapq.heappop(self._coming)[0])

    def _do(self, call: Callable[[Subject], None], subject: Subject) -> None:
        """Note a failure. An interrupted action counts as one that raised: its effect is unknown."""
        try:
            call(subject)
        except Exception as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = ValueError(
                f"step: {type(error).__name__} has ended its updates halfway, so the weights are a mix; legal: load a "
                f"checkpoint, where state rests off the device into a new engine"
            )
            raise


class UpdatesInBackward:
    """Runs the updates of one step at a time during its backward."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._place = {chunk.spec.id: place for place, chunk in enumerate(chunks)}
        self.deferred: DeferredUpdates | None = None
        """The updates of the step that is under way; None: none is, or it updates nothing. The same on all ranks."""
        self._summed: set[int] = set()  # places of chunks with final gradients
        self._next = -1  # the place of the next update; counts down
        self._waits = False  # from the first chunk on that lacks a gradient on this rank

    def begin(self, deferred: DeferredUpdates | None) -> None:
        """A backward begins, whose updates are `deferred`, from the last chunk to the first; None: none are made."""
        self.deferred, self._waits = deferred, False
        self._next, self._summed = len(self._place) - 1, set()

    def summed(self, chunk: Chunk) -> None:
        """The gradient of a chunk is reduced."""
        chunk.keep_squares()
        self._waits |= not all(chunk.used)
        if self.deferred is None:
            chunk.free_gradient()
            return
        self._summed.add(self._place[chunk.spec.id])
        while not self._waits and self._next in self._summed:
            self.deferred.start(self._next)
            self._next -= 1


@lru_cache(maxsize=16)
def _stops_of(actions: tuple[Action, ...], *, by_gradient: bool, in_order: bool) -> Mapping[int, int]:
    """For each chunk the number of actions that run when its update is requested. Actions behind an update that do not
    block start with it: the computing that follows hides them."""
    stops: dict[int, int] = {}
    stop, num_chunks = len(actions), sum(action.kind is ActionKind.UPDATE for action in actions)
    on_host = {a.chunk for a in actions if a.kind is ActionKind.UPDATE and not holds_up(a)}
    for number, action in reversed([*enumerate(actions)]):
        part, chunk = part_of(action.chunk or 0, max(num_chunks, 1))
        goes_up = action.kind is ActionKind.FETCH and part is ChunkPart.WEIGHTS and chunk in on_host
        if action.kind is ActionKind.UPDATE or goes_up:  # whichever comes last
            stops.setdefault(chunk, stop)
        is_own = action.kind is ActionKind.UPDATE or part is not ChunkPart.RECORD and chunk in on_host
        if holds_up(action) or by_gradient and is_own or in_order and goes_up:
            stop = number
    if not by_gradient:  # an update on the host may stand before that of an earlier chunk
        behind = 0
        for chunk in sorted(stops):
            behind = stops[chunk] = max(behind, stops[chunk])
    return stops
