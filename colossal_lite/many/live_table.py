"""Shows many tasks while they train: a table in a terminal, else a line where a task ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from colossal_lite.many.coordinator import Coordinator
from colossal_lite.many.results import number
from colossal_lite.observe.printed_lines import tell

REFRESH_S = 0.5


class LiveTable:
    """Task, step, loss, device, and the share of the time in which the task waited."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._console = coordinator, Console(highlight=False, soft_wrap=True)
        self._begun_s = self._shown_s = time.monotonic()
        self._told: set[str] = set()
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self._console.is_terminal:
            with Live(self._table(), console=self._console, auto_refresh=False) as self._live:
                yield
        else:
            yield

    def show(self, *, last: bool = False) -> None:
        """Bring it up to date, at most every half second."""
        if not last and time.monotonic() - self._shown_s < REFRESH_S:
            return
        self._shown_s = time.monotonic()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for name, state in self._coordinator.states.items():
            if state.status != "open" and name not in self._told:
                self._told.add(name)
                loss = "" if state.loss is None else f", loss {number(state.loss)}"
                held_out = "" if state.held_out is None else f", held out {number(state.held_out)}"
                cause = f": {state.cause}" if state.cause else ""
                tell(f"{name}: {state.status} at step {state.step:,}{loss}{held_out}{cause}")

    def _table(self) -> Table:
        table = Table("task", "status", "step", "loss", "device", "waited")
        long_s = max(time.monotonic() - self._begun_s, 1e-9)
        for name, state in self._coordinator.states.items():
            device = ", ".join(map(str, state.busy_on))
            table.add_row(
                name, state.status, f"{state.step:,} of {state.task.steps:,}",
                number(state.loss), device,
                f"{max(0.0, 1 - state.busy_s / long_s):.0%}" if state.status == "open" else "",
            )  # fmt: skip
        return table
