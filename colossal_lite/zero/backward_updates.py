"""Updates that are made while backward runs, each as soon as the gradient of its chunk is summed over the ranks.

Note: what has to be known before.
An update divides its gradient by the number of valid tokens of all ranks.  That number is known when the forward ends,
so it is summed then, with the loss: 16 bytes in one all-reduce before backward.  Of a step whose loss is not finite, or
that counts no token, gradients are summed and forgotten, and nothing changes.  A gradient that is not finite shows only
when others have been used: such a step has spoilt the weights, and says so.
What a parameter's update may not know before the end of backward is whether some other rank had a gradient for it.  A
rank that had one for every parameter of a chunk need not ask.  One that had not keeps the gradient of this chunk, and
of those after it, until the ranks have agreed: more memory than planned, on this rank alone, and no number is another.
Nobody reads the weights of a chunk in backward once all its gradients are there: whoever does is told so, by torch or,
of sharded weights, by the version of what it saved.  Other ranks fetch the new weights when the step is over, in
forward order, as they do after any step.
So what is computed is what a step without clipping would have computed, in another order of chunks: the bits are the
same.  Gradients take the slots in which they fill and are summed, and no more.
Source: fused backward and update as in arXiv 2306.09782 (LOMO), here for every elementwise rule, with sharded state.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossal_lite.memory.chunk import Chunk
from colossal_lite.zero.deferred_updates import DeferredUpdates


class UpdatesInBackward:
    """What one step at a time has updated, and what it still has to."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._place = {chunk.spec.id: place for place, chunk in enumerate(chunks)}
        self._deferred: DeferredUpdates | None = None
        self._waits = False  # from the first chunk on of which this rank lacks a gradient

    @property
    def goes(self) -> bool:
        """Whether a step is under way that updates; the same on all ranks."""
        return self._deferred is not None

    def begin(self, deferred: DeferredUpdates | None) -> None:
        """A backward begins, whose updates are `deferred`, from the last chunk to the first; None: nothing is
        updated."""
        self._deferred, self._waits = deferred, False

    def summed(self, chunk: Chunk) -> None:
        """The gradient of a chunk is whole."""
        chunk.keep_squares()
        self._waits |= not all(chunk.used)
        if self._deferred is None:
            chunk.free_gradient()
        elif not self._waits:
            self._deferred.until(self._place[chunk.spec.id])

    def finish(self) -> None:
        """The ranks have agreed: what is left is updated."""
        if self._deferred is not None:
            self._deferred.finish()

    def over(self) -> None:
        """The step is over, or given up."""
        self._deferred = None
