"""A clock that only planted seconds move, and links that run on it: what a real run waits for, without a real second.

Note: a link copies when it is asked to, so bytes are where they would be.  Its seconds pass when the clock moves: one
copy of a bus runs after the other, each after those that it names.  Copies and updates on the host share the host's
memory: while they ask for more than there is, each is slowed down by the same factor.  Whoever waits moves the clock to
that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any
from unittest.mock import patch

from colossal_lite.memory import link
from colossal_lite.memory.copy_streams import Bus, ThreadExecutor
from colossal_lite.offload import host_updates, optimizer_states, state_storage


@dataclass
class Clock:
    now_s: float = 0.0
    computed_s: float = 0.0
    order: list[str] = field(default_factory=list)
    planted_s: dict[str, float] = field(default_factory=dict)
    """Of whatever links of these names do, in the place of what their speed says."""
    planted_bytes: dict[str, float] = field(default_factory=dict)
    """Of host memory that it moves, in the place of the bytes that are copied."""
    host_bytes_per_s: float = inf
    """Of the host's memory, which all links share."""
    lanes: dict[Bus, deque[VirtualTransfer]] = field(default_factory=dict)
    """What has not ended on each bus."""

    def compute(self, what: str, seconds: float) -> None:
        self.order.append(what)
        self.pass_until(self.now_s + seconds)
        self.computed_s += seconds

    def pass_until(self, moment_s: float) -> None:
        """Move to this moment."""
        while self._step(moment_s):
            pass
        self.now_s = moment_s

    def pass_to_end_of(self, transfer: VirtualTransfer) -> None:
        """Move to the moment at which it ends; stay if it has ended."""
        while not transfer.has_ended:
            assert self._step(inf), "it waits for what nobody runs"

    def _step(self, moment_s: float) -> bool:
        """Move to the next end of anything that runs, if it comes before this moment."""
        running = [
            lane[0] for lane in self.lanes.values() if lane and all(t.has_ended for t in lane[0].before)
        ]
        asked = sum(transfer.host_bytes_per_s for transfer in running)
        slow = max(1.0, asked / self.host_bytes_per_s)
        factor = {t: slow if t.host_bytes_per_s else 1.0 for t in running}
        first = min(running, key=lambda t: t.left_s * factor[t], default=None)
        if first is None:
            return False
        passed_s = min(first.left_s * factor[first], moment_s - self.now_s)
        is_over = self.now_s + first.left_s * factor[first] <= moment_s
        self.now_s += passed_s
        for transfer in running:
            transfer.left_s -= passed_s / factor[transfer]
        if is_over:
            first.has_ended = True
            self.lanes[first.link.bus].popleft()
        return is_over

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within, every link that is made runs on this clock."""

        def link(name: str, executor: ThreadExecutor, **_: Any) -> VirtualLink:
            return VirtualLink(self, name, executor)

        with ExitStack() as stack:
            for module in (optimizer_states, state_storage, host_updates):
                stack.enter_context(patch.object(module, "Link", link))
            yield


@dataclass(eq=False)
class VirtualTransfer:
    link: VirtualLink
    left_s: float
    host_bytes_per_s: float
    before: Sequence[VirtualTransfer]
    has_ended: bool = False

    def wait(self) -> None:
        start_s = self.link.clock.now_s
        self.link.clock.pass_to_end_of(self)
        self.link.blocked_s += self.link.clock.now_s - start_s

    finish = wait
    is_prefetch, after, is_revoked = False, (), False

    def revoke(self) -> bool:
        return False


class VirtualLink(link.Link):
    def __init__(self, clock: Clock, name: str, executor: ThreadExecutor) -> None:
        super().__init__(name, executor)
        self.speed, self.bus = executor.speed, executor.bus
        super().close()
        self.clock = clock
        self.timeout_s = 600.0
        self.spent_s = 0.0

    def run(
        self,
        work: Callable[[], object],
        size_bytes: int,
        *,
        after: Sequence[VirtualTransfer] = (),
        prefetch: bool = False,
        then: Callable[[], object] | None = None,
    ) -> VirtualTransfer:  # type: ignore[override]
        work()
        if then is not None:
            then()
        self.moved_bytes += size_bytes
        seconds = self.clock.planted_s.get(self.name, self.speed.seconds(size_bytes))
        self.spent_s += seconds
        host_bytes = self.clock.planted_bytes.get(self.name, size_bytes)
        transfer = VirtualTransfer(self, seconds, host_bytes / seconds if seconds else 0.0, tuple(after))
        self.clock.lanes.setdefault(self.bus, deque()).append(transfer)
        return transfer

    @property
    def busy_s(self) -> float:
        return self.spent_s

    def close(self) -> None:
        return
