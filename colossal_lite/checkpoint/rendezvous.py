"""Exchanges messages between the ranks of one save or load, and reports which ranks are late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.distributed.key_value_store import KeyValueStore

SHARED_S = 10.0
"""how long a network file system may take to show one rank's directory to another"""


@dataclass(frozen=True)
class SaveRendezvous:
    """Messages between the ranks of one save or load. A rank sends each key at most once."""

    store: KeyValueStore
    key: str
    what: str
    rank: int
    world_size: int
    timeout_s: float
    heard: Callable[[], str]
    """Which rank has stopped or died, and why; empty if no failure is known."""
    standing: Callable[[Sequence[int]], str] = lambda ranks: ""
    """What these ranks are doing, or where they last reported."""

    def say(self, word: str, value: Any = None) -> None:
        self.store.set(f"{self.key}/{word}/{self.rank}", json.dumps(value))

    def hear(self, word: str, rank: int = 0) -> Any:
        return self.hear_each(word, (rank,))[0]

    def forget(self, word: str) -> None:
        """Delete the messages of all ranks from the store."""
        for rank in range(self.world_size):
            self.store.delete_key(f"{self.key}/{word}/{rank}")

    def hear_all(self, word: str) -> list[Any]:
        return self.hear_each(word, range(self.world_size))

    def hear_each(self, word: str, ranks: Sequence[int]) -> list[Any]:
        """The messages of these ranks. After `timeout_s` raises CheckpointError with the ranks that sent none."""
        end, pause_s = time.monotonic() + self.timeout_s, 0.0005
        keys = {rank: f"{self.key}/{word}/{rank}" for rank in ranks}
        missing = list(keys)
        reason = ""
        try:
            while missing := [rank for rank in missing if not self.store.check([keys[rank]])]:
                if reason or time.monotonic() > end:
                    who = ", ".join(map(str, missing))
                    text = (
                        f"rank {self.rank}: {self.what} waited for {word!r} of ranks {who}; timeout "
                        f"{self.timeout_s:g} s. Every rank must call it, the same number of times"
                    )
                    rows = (reason, text, "" if reason else self.standing(missing))
                    raise CheckpointError("\n".join(filter(None, rows)))
                if reason := self.heard():
                    continue  # a rank may have sent its message just before it stopped
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            return [json.loads(self.store.get(key)) for key in keys.values()]
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            text = f"rank {self.rank}: {self.what}: the store is gone: {error}"
            raise CheckpointError("\n".join(filter(None, (text, self.standing(list(keys)))))) from error


class Heartbeat:
    """The current operation of a save and its start time. The save's thread writes it; waiting callers read it."""

    def __init__(self) -> None:
        self.at("its beginning")

    def at(self, what: object) -> None:
        self.what, self.since_s = what, time.monotonic()


def shared(read: Callable[[], Any], path: Path, meeting: SaveRendezvous) -> Any:
    """The result of `read`, once a network file system shows `path` to this rank too."""
    end = time.monotonic() + SHARED_S
    while not path.exists():
        if not meeting.rank:
            raise CheckpointError(f"{path} is gone: another process deletes checkpoints there")
        if time.monotonic() > end:
            raise CheckpointError(
                f"rank {meeting.rank} does not see {path}, which rank 0 sees: all ranks must share one directory"
            )
        time.sleep(0.05)
    return read()
