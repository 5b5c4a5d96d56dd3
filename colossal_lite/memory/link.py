"""Copies between two tiers in one direction, in order, by a thread or a stream of a GPU.

Note: what travels in a step goes over a `Link`, each copy with a `Transfer` to wait for.  Two links run at once, so
both directions of a bus are in use.
Order.  Demanded copies run in order on a link; sums and written records rely on it.  A prefetch names the copies that
it comes after, and runs in order among prefetches.  A demanded copy may overtake it, and it can be revoked.  Waiting
for a prefetch demands it, and everything before it.  There is no deadlock: a copy follows only copies that were
requested earlier.  A link begins a copy only when nothing holds it back.  So the oldest copy that has not begun can
always begin.  A copy on a stream may come after work of a thread.  Then the link's thread enqueues it when that work is
done.  Other copies are enqueued at once, and then cannot be revoked.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from colossal_lite.memory.copy_streams import CopyExecutor, Event, ended


class Transfer:
    """A copy in flight. Its errors are raised in the thread that waits for it."""

    def __init__(
        self, link: Link, begin: Callable[[], Event | None], after: Sequence[Transfer], is_prefetch: bool,
        size_bytes: int,
    ) -> None:  # fmt: skip
        """`begin`: the work, which returns the event of its end, or None where it has ended."""
        self.link, self.after, self.size_bytes = link, tuple(after), size_bytes
        self._begin: Callable[[], Event | None] | None = begin
        self._is_handed = False
        self.error: BaseException | None = None
        """What `begin` has raised."""
        self._event: Event | None = None  # what it has returned
        self._until_handed = threading.Lock()
        self._until_handed.acquire()
        self.watched_by: list[Link] = []
        """Links whose threads are woken when this is handed. Whether it is already, ask after an entry."""
        self.is_prefetch = is_prefetch
        """Whether demanded copies may overtake it: no thread waits for it, and no later copy relies on its order."""
        self.is_revoked = False
        self.told: Future[None] | None = None
        """Ends when `then` has been called; None: there is no `then`, or it is a part of the copy."""

    def wait(self) -> None:
        """Make later computing find the bytes in the target. On a GPU the device waits, not the host."""
        self.expedite()
        for root in self.roots():
            root.link.executor.block_compute_until(root.handed)

    def finish(self) -> None:
        """The target holds the bytes when this returns: for a host that reads or frees them itself."""
        self.expedite()
        start = time.perf_counter()
        for root in self.roots():
            if (event := root.handed()) is not None:
                ended(event, root.link.timeout_s)
            if root.told is not None:
                root.told.result(timeout=root.link.timeout_s)
        self.link.blocked_s += time.perf_counter() - start

    def expedite(self) -> None:
        """Demand it, and everything before it, over any link."""
        if self.is_handed or not self.is_prefetch:
            return
        with self.link._changed:
            self.is_prefetch = False
            self.link._changed.notify_all()
        for transfer in self.after:
            transfer.expedite()

    def revoke(self) -> bool:
        """Cancel a copy that has not begun. True if it had not: then it never runs, and its bytes are not counted.
        Its target may be written after the copies that it comes after; a wait for it waits for these. A copy that a
        stream was given has begun."""
        link = self.link
        with link._changed:
            if self not in link._queue:
                return False
            del link._queue[self]
            link.moved_bytes -= self.size_bytes
            self.is_revoked = True
            link._changed.notify_all()
        self._begin = None
        self._hand()
        return True

    def serve(self) -> None:
        """Run the work, which is dropped with its tensors; an error is raised in the thread that waits."""
        begin, self._begin = self._begin, None
        assert begin is not None, "the copy was served or revoked before"
        try:
            self._event = begin()
        except BaseException as error:
            self.error = error
        self._hand()

    def _hand(self) -> None:
        self._is_handed = True
        self._until_handed.release()
        for link in self.watched_by:
            with link._changed:
                link._changed.notify_all()

    def roots(self) -> Iterator[Transfer]:
        """The copies that must end before its successors begin: itself, or, if revoked, those that it comes after."""
        if not self.is_revoked:
            yield self
            return
        for transfer in self.after:
            yield from transfer.roots()

    def tell(self, then: Callable[[], object]) -> None:
        """Call `then` when the copy has ended."""
        if (event := self.handed()) is not None:
            ended(event, self.link.timeout_s)
        then()

    @property
    def is_handed(self) -> bool:
        """Whether its executor was given it, or it has ended or was revoked."""
        return self._is_handed

    def handed(self) -> Event | None:
        """Wait until its executor was given it: the event of its end, or None where it has ended."""
        if not self.is_handed:
            if not self._until_handed.acquire(timeout=self.link.timeout_s):
                raise self.link.late()
            self._until_handed.release()
        if self.error is not None:
            raise self.error
        return self._event


class Link:
    """One direction between two tiers. It copies one after the other, in the order of the Note."""

    def __init__(self, name: str, executor: CopyExecutor, *, timeout_s: float = 600.0) -> None:
        self.name, self.executor, self.timeout_s = name, executor, timeout_s
        self.moved_bytes = 0
        """Bytes of all copies so far that were not revoked."""
        self.blocked_s = 0.0
        """Seconds that the host has waited for bytes that it reads itself."""
        self._thread = ThreadPoolExecutor(1, f"link-{name}", executor.begin_thread)
        # starts its thread at the first `then`
        self._teller = ThreadPoolExecutor(1, f"link-{name}-ends", executor.begin_thread)
        self._changed = threading.Condition()
        self._queue: dict[Transfer, None] = {}  # in the order of the requests
        self._serving = 0
        self._is_turning = False  # whether a thread serves the queue, or is about to
        self._waits = False  # whether it waits for what comes before
        self._last: Transfer | None = None  # the last that the executor was given

    @property
    def waited_s(self) -> float:
        """Seconds waited for copies: by a GPU's computing, by its own clock, and by the host."""
        return self.executor.held.seconds + self.blocked_s

    @property
    def busy_s(self) -> float:
        """Seconds for which it has copied."""
        return self.executor.busy.seconds

    def copy(
        self, target: Tensor, source: Tensor, *, after: Sequence[Transfer] = (),
        prefetch: bool = False, then: Callable[[], object] | None = None,
    ) -> Transfer:  # fmt: skip
        """Copy `source` to `target` of the same size and dtype, after all `after` and all computing so far. Neither
        may be written until then, nor `target` read. A thread calls `then` when the bytes are there, before any wait
        on the host returns."""
        assert target.shape == source.shape and target.dtype == source.dtype
        work = partial(target.copy_, source, non_blocking=self.executor.on_stream)
        return self.run(work, source.nbytes, after=after, prefetch=prefetch, then=then)

    def run(
        self, work: Callable[[], object], size_bytes: int, *, after: Sequence[Transfer] = (),
        prefetch: bool = False, then: Callable[[], object] | None = None,
    ) -> Transfer:  # fmt: skip
        """As `copy`, where `work` moves the `size_bytes`."""
        told = then if not self.executor.on_stream else None
        begin = partial(self._begin, work, size_bytes, after, self.executor.now(), told)
        transfer = Transfer(self, begin, after, prefetch, size_bytes)
        if not prefetch:
            for each in after:
                each.expedite()
        with self._changed:
            self.moved_bytes += size_bytes
            is_idle = not self._queue and not self._serving
            is_next = self.executor.on_stream and is_idle and next(_missing(transfer), None) is None
            if is_next:
                self._serving += 1
            else:
                self._queue[transfer] = None
                begins, self._is_turning = not self._is_turning, True
                if self._waits:
                    self._changed.notify_all()  # it may overtake what the thread waits for
        if is_next:
            self._serve(transfer)
            if transfer.error is not None and not isinstance(transfer.error, Exception):
                raise transfer.error  # an interrupt of this thread
        elif begins:
            self._thread.submit(self._turns)
        if then is not None and self.executor.on_stream:
            transfer.told = self._teller.submit(transfer.tell, then)
        return transfer

    def drain(self) -> None:
        """Wait until all copies so far have ended. Their memory may then be freed."""
        with self._changed:
            left = [*self._queue]
        for transfer in left:
            transfer.handed()  # in its own order
        if not self._changed_until(lambda: not self._serving):
            raise self.late()
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        """Finish the copies; none may be requested any more. One that ends too late is abandoned with a warning."""
        self.executor.skip_emulated_delay()
        if not self._changed_until(lambda: not self._queue and not self._serving):
            warnings.warn(
                f"{self.late()}; it is left behind, and what it was to write may be old", stacklevel=2
            )
            with self._changed:
                self._queue.clear()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._teller.shutdown(wait=False, cancel_futures=True)
            return
        self._thread.shutdown()
        if self.executor.on_stream and self._last is not None and self._last.error is None:
            self._last.finish()
        self._teller.shutdown()

    def late(self) -> TimeoutError:
        return TimeoutError(
            f"a copy over the link {self.name} has not ended in {self.timeout_s:g} s (timeout_s)"
        )

    # ---- order ----

    def _turns(self) -> None:
        """Serve copies until none is left."""
        while (transfer := self._take()) is not None:
            self._serve(transfer)

    def _take(self) -> Transfer | None:
        """The next copy, when it waits for nothing. One that has waited too long is returned too, and fails."""
        end_s, watched = time.monotonic() + self.timeout_s, set[Transfer]()
        with self._changed:
            while self._queue:
                # Of each candidate the last that is missing is watched: as a rule it ends last.
                # Then all are asked again. So a copy that is handed after that wakes the thread.
                missing = {each: [*_missing(each)] for each in self._candidates()}
                found = next((each for each, roots in missing.items() if not roots), None)
                if found is None and (left_s := end_s - time.monotonic()) > 0:
                    new = {roots[-1] for roots in missing.values()} - watched
                    watched |= new
                    for root in new:
                        root.watched_by.append(self)
                    if not new:
                        self._waits = True
                        self._changed.wait(left_s)
                        self._waits = False
                    continue
                found = found or [*missing][-1]
                del self._queue[found]
                self._serving += 1
                return found
            self._is_turning = False
        return None

    def _candidates(self) -> tuple[Transfer, ...]:
        """The first demanded copy, if there is one, and the first of all: no other may be the next."""
        demanded = next((each for each in self._queue if not each.is_prefetch), None)
        first = next(iter(self._queue))
        return (first,) if demanded is None else (demanded, first)

    def _serve(self, transfer: Transfer) -> None:
        try:
            transfer.serve()
        finally:
            transfer.after = ()  # else each would hold all before it
            with self._changed:
                self._serving -= 1
                self._last = transfer
                self._changed.notify_all()

    def _changed_until(self, is_so: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, self.timeout_s)

    def _begin(
        self, work: Callable[[], object], size_bytes: int, after: Sequence[Transfer], now: Event | None,
        then: Callable[[], object] | None,
    ) -> Event | None:  # fmt: skip
        roots = [root for transfer in after for root in transfer.roots()]
        for root in roots:
            if not root.is_handed:  # the timeout has passed
                raise root.link.late()
        ends = (now, *(root.handed() for root in roots))
        end = self.executor.run(work, size_bytes, [end for end in ends if end is not None], self.timeout_s)
        if then is not None:
            then()
        return end


def _missing(transfer: Transfer) -> Iterator[Transfer]:
    """The copies that a copy still waits for."""
    for each in transfer.after:
        yield from (root for root in each.roots() if not root.is_handed)
