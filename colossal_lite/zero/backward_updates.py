"""Updates each chunk during backward, as soon as its gradient is reduced.

Note: what must be known before.
An update divides its gradient by the number of valid tokens of all ranks.  The forward knows that number, so it is
summed with the loss before backward: 16 bytes in one all-reduce.  If the loss is not finite, or no token counts,
gradients are reduced and dropped, and nothing changes.  A gradient that is not finite shows only after other updates.
Such a step has spoilt the weights, and raises an error.  An update must know whether any rank had a gradient for a
parameter.  A rank with gradients for all parameters of a chunk need not ask.  A rank without holds the gradient of this
chunk, and of those after it, until the ranks have agreed.  This rank uses more memory than planned.  Results do not
change.  Backward does not read the weights of a chunk whose gradients are complete.  If it does, torch raises an error,
or for sharded weights the version of the saved tensor does.  Other ranks gather the new weights after the step, in
forward order, as always.  Stages of a pipeline may end in another order than that of their chunks.  Then an update
waits for those of the chunks behind it, so updates and their copies have one order.  So the computation is that of a
step without clipping, in another order of chunks: the bits are the same.  Where a step has one micro-batch, gradients
use the slots in which they accumulate and are reduced, and no more.  With several only the last backward updates, and
the sum of the others has a place until then.  An update on the host only starts here.  Its gradient leaves its slot by
a copy, and the next user of the slot waits for that copy.
Source: fused backward and update as in arXiv 2306.09782 (LOMO), here for every elementwise rule, with sharded state.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossal_lite.memory.chunk import Chunk
from colossal_lite.zero.deferred_updates import DeferredUpdates


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
        """A backward begins, whose updates are `deferred`, from the last chunk to the first; None: nothing is
        updated."""
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
