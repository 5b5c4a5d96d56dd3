"""A clock that only planted seconds move, and links that run on it: what a real run waits for, without a real second.

Note: a link copies when it is asked to, so bytes are where they would be; when the copy would have begun and ended is
worked out from when the link was free and from what it came after.  Whoever waits moves the clock to that end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from colossal_lite.memory import link
from colossal_lite.memory.copy_streams import ThreadExecutor
from colossal_lite.offload import host_updates, optimizer_states, state_storage


@dataclass
class Clock:
    now_s: float = 0.0
    computed_s: float = 0.0
    order: list[str] = field(default_factory=list)
    planted_s: dict[str, float] = field(default_factory=dict)
    """Of whatever links of these names do, in the place of what their speed says."""

    def compute(self, what: str, seconds: float) -> None:
        self.order.append(what)
        self.now_s += seconds
        self.computed_s += seconds

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
    end_s: float

    @property
    def link_name(self) -> str:
        return self.link.name

    def wait(self) -> None:
        clock = self.link.clock
        self.link.blocked_s += max(0.0, self.end_s - clock.now_s)
        clock.now_s = max(clock.now_s, self.end_s)

    finish = wait
    priority, after, is_revoked = link.Priority.DEMAND, (), False

    def revoke(self) -> bool:
        return False


class VirtualLink(link.Link):
    def __init__(self, clock: Clock, name: str, executor: ThreadExecutor) -> None:
        super().__init__(name, executor)
        self.speed, self.bus = executor.speed, executor.bus
        super().close()
        self.clock = clock
        self.timeout_s = 600.0

    def run(
        self,
        work: Callable[[], object],
        size_bytes: int,
        *,
        after: Sequence[VirtualTransfer] = (),
        priority: link.Priority = link.Priority.DEMAND,
        then: Callable[[], object] | None = None,
    ) -> VirtualTransfer:  # type: ignore[override]
        work()
        if then is not None:
            then()
        self.moved_bytes += size_bytes
        start_s = max(self.clock.now_s, *(transfer.end_s for transfer in after), 0.0)
        seconds = self.clock.planted_s.get(self.name, self.speed.seconds(size_bytes))
        return VirtualTransfer(self, self.bus.take(start_s, seconds))

    def close(self) -> None:
        return
