"""Declares the key-value store through which ranks exchange words, and asks it with a limit on every question.

Note: limits.
torch's TCPStore waits for its server without a limit in `check`, `get`, `set` and `add`.  A server that is stopped, not
ended, would hang every rank that asks.  So each question of a `LimitedStore` runs in a thread of its own, and whoever
asks waits `limit_s` for it.  While a question is overdue the next ones are refused at once: one thread is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

Found = TypeVar("Found")


class KeyValueStore(Protocol):
    """What ranks share: torch's stores have these methods."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class SharedStore(KeyValueStore, Protocol):
    """A store of several ranks: torch's stores are."""

    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class NoAnswerError(RuntimeError):
    """A call has not returned within its limit."""


class LocalStore:
    """A store for one process."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._words[key] = value

    def get(self, key: str, /) -> bytes:
        return self._words[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._words for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._words.pop(key, None) is not None


class LimitedStore:
    """A store whose every answer is waited for at most `limit_s`. Raises NoAnswerError after that, and RuntimeError as
    the store does if its server has ended. Safe to use from several threads."""

    def __init__(self, store: SharedStore, limit_s: float, asked: _Asked | None = None) -> None:
        self.inner, self.limit_s = store, limit_s
        self._asked = asked or _Asked()

    def within(self, limit_s: float) -> LimitedStore:
        """The same store with another limit."""
        return LimitedStore(self.inner, limit_s, self._asked)

    def set(self, key: str, value: str, /) -> None:
        self._ask(lambda: self.inner.set(key, value))

    def get(self, key: str, /) -> bytes:
        """The value, once the key is there: waits for it at most `limit_s`."""
        if not self.check([key]):
            self.wait([key])
        return self._ask(lambda: self.inner.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self._ask(lambda: self.inner.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        return self._ask(lambda: self.inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._ask(lambda: self.inner.compare_set(key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        return self._ask(lambda: self.inner.delete_key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, /) -> None:
        """Return when all keys are there. Raises NoAnswerError after `timeout`, `limit_s` by default."""
        limit_s = self.limit_s if timeout is None else timeout.total_seconds()
        end, pause_s = time.monotonic() + limit_s, 0.0005
        while not self.check(list(keys)):
            if time.monotonic() > end:
                raise NoAnswerError(f"no {', '.join(keys)} in the store within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _ask(self, call: Callable[[], Found]) -> Found:
        if self._asked.gone:  # torch prints a stack for every further question
            raise RuntimeError(self._asked.gone)
        now, open_ones = time.monotonic(), tuple(self._asked.open)
        if (silent_s := max((now - each.start_s for each in open_ones), default=0.0)) > self.limit_s:
            raise NoAnswerError(f"the store has not answered for {silent_s:.1f} s")
        question = _Question(call, self._asked.open)
        if not question.ended.wait(self.limit_s):
            raise NoAnswerError(f"the store has not answered for {self.limit_s:g} s")
        try:
            return question.answer()
        except RuntimeError as error:
            if type(error).__name__ == "DistNetworkError":  # torch's, whose store this is
                self._asked.gone = str(error).partition("\n")[0]
            raise


@dataclass
class _Asked:
    """What all views of one store share."""

    open: set[_Question[Any]] = field(default_factory=set)
    """Questions without an answer so far."""
    gone: str = ""
    """What torch said when its server had ended."""


def answered(call: Callable[[], Found], limit_s: float) -> Found:
    """What `call` returns or raises, in a daemon thread. Raises NoAnswerError after `limit_s`; the thread goes on."""
    question = _Question(call, set())
    if not question.ended.wait(limit_s):
        raise NoAnswerError(f"no end within {limit_s:g} s")
    return question.answer()


class _Question(Generic[Found]):
    """A call in a thread. It is among `asked` until it has ended."""

    def __init__(self, call: Callable[[], Found], asked: set[_Question[Any]]) -> None:
        self.start_s, self.ended = time.monotonic(), threading.Event()
        self._call, self._asked = call, asked
        self._found: list[Found] = []
        self._error: BaseException | None = None
        asked.add(self)
        threading.Thread(target=self._run, name="question", daemon=True).start()

    def answer(self) -> Found:
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # raised again in the thread that asks
            self._error = error
        self._asked.discard(self)
        self.ended.set()
