"""Lets several trainings of one process take turns: each on a thread of its own, and exactly one runs at a time.

Note: who is next is no matter of time.  Thread i runs until it calls `turn(i)`.  Then the next thread runs, in the
order of their numbers.  One that has ended is left out.  So the order is the same in every run, and tasks whose lists
have turns alike run abreast (schedule/abreast.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Turnstile(Generic[T]):
    """Runs works by turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []  # in the order in which they go on
        self._now: int | None = None
        self._since_s = 0.0
        self.ran_s: list[float] = []
        """Seconds of the turns of each thread."""

    def run(self, works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Run each work on its own thread; what it returns or raises."""
        found: list[T | BaseException] = [RuntimeError("it has not run")] * len(works)

        def runs(number: int) -> None:
            self._wait(number)
            try:
                found[number] = works[number]()
            except BaseException as error:
                found[number] = error
            finally:
                self._pass_on()

        self._waiting, self.ran_s = [*range(len(works))], [0.0] * len(works)
        threads = [
            threading.Thread(target=runs, args=(number,), name=f"turn {number}") for number in self._waiting
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        return found

    def turn(self, number: int) -> None:
        """End the turn of thread `number`; returns when its next one begins. Nothing where no thread runs."""
        if self._now != number:
            return
        with self._changed:
            self._waiting.append(number)
        self._pass_on()
        self._wait(number)

    def _pass_on(self) -> None:
        with self._changed:
            now_s = time.monotonic()
            if self._now is not None:
                self.ran_s[self._now] += now_s - self._since_s
            self._now, self._since_s = self._waiting.pop(0) if self._waiting else None, now_s
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._now == number)
