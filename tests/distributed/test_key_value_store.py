"""Every question to a store that ranks share has a limit, and a store that has ended is asked no more."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore

from colossal_lite.distributed.key_value_store import LimitedStore, NoAnswerError, answered


class Gated(HashStore):
    """Answers when the gate is open, as a server that is stopped and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def check(self, keys: list[str]) -> bool:
        return self.gate.wait(60) and super().check(keys)


def test_a_silent_store_is_given_up_after_the_limit_then_at_once_until_it_answers_again() -> None:
    inner = Gated()
    store = LimitedStore(inner, 0.3)
    store.set("key", "value")
    assert store.get("key") == b"value" and store.within(5).check(["key"])
    inner.gate.clear()
    for least_s, most_s in ((0.3, 2.0), (0.0, 0.2)):
        start = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"the store has not answered for 0\.\d+ s"):
            store.check(["key"])
        assert least_s <= time.monotonic() - start < most_s
    inner.gate.set()
    end = time.monotonic() + 10
    while store._asked.open and time.monotonic() < end:
        time.sleep(0.01)
    assert store.check(["key"])


def test_a_key_that_nobody_sets_is_waited_for_within_the_limit() -> None:
    store = LimitedStore(HashStore(), 0.2)
    with pytest.raises(NoAnswerError, match=r"no absent in the store within 0.2 s"):
        store.get("absent")
    with pytest.raises(NoAnswerError, match=r"within 0.1 s"):
        store.wait(["absent"], timedelta(seconds=0.1))


def test_a_store_whose_server_has_ended_is_asked_once() -> None:
    class Gone(HashStore):
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            raise DistNetworkError("Broken pipe\nand more")

    inner = Gone()
    store = LimitedStore(inner, 5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"^Broken pipe"):
            store.within(1).check(["key"])
    assert inner.asked == 1


def test_a_call_of_torchs_has_a_limit_too() -> None:
    assert answered(lambda: 3, 5) == 3
    with pytest.raises(ZeroDivisionError):
        answered(lambda: 1 // 0, 5)
    gate = threading.Event()
    with pytest.raises(NoAnswerError):
        answered(gate.wait, 0.05)
    gate.set()
