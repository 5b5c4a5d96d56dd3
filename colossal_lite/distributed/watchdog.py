"""Reports which rank is missing when a collective does not end, and what each rank was doing.

Note: records and alarms.
A rank that survives a hang knows only that others are missing.  The rank that hangs knows nothing.  So every rank has
a record: phase, step, and per axis the number and the last descriptions of its collectives.  That costs an append a
collective and no message.  A rank whose collective fails raises an alarm in the context's store.  A thread of each
rank looks there every `LOOK_S`, and answers with its record and the current line of its main thread.  The rank that
failed compares.  A rank with fewer calls on that axis is missing.  A rank with another call at that number has
diverged.  A rank that does not answer has died or is stopped: then its last record is shown, at most `BEAT_S` old.
Cost in a run without faults: one look in the store every `LOOK_S`, one small write every `BEAT_S`, beside the training.

Ranks that leave the common sequence need not hang.  gloo and NCCL accept another operation or dtype of as many bytes,
and the numbers are wrong.  So each rank also folds all collectives of a group into one number
(`CollectiveFingerprint`).  The all-reduce of a step's totals compares these before any update
(`Mesh.collectives_differ`).  That adds 8 bytes to it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from colossal_lite.distributed.key_value_store import KeyValueStore

LOOK_S = 0.25
BEAT_S = 5.0
ANSWER_S = 1.5
"""seconds that a failed rank waits for the records of the others"""
END_S = 30.0
"""seconds that `close` waits for the thread, which may be in a call of the store"""
KEPT = 32
"""descriptions recorded for each axis"""


@dataclass
class Progress:
    """What one rank is doing. Its main thread writes it, its watchdog reads it."""

    phase: str = "start"
    step: int = 0
    fault: str = ""
    """The error of the engine's last call, in one line; empty if there was none."""
    calls: Counter[str] = field(default_factory=Counter)
    history: dict[str, deque[tuple[int, str]]] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set a phase within another one. An error leaves it set, otherwise the outer one returns."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def called(self, axis: str, description: str) -> None:
        """Record that a collective begins."""
        self.calls[axis] += 1
        self.history.setdefault(axis, deque(maxlen=KEPT)).append((self.calls[axis], description))


@dataclass
class CollectiveFingerprint:
    """The collectives of one rank in one group, messages between two ranks left out. Equal on all its ranks."""

    calls: int = 0
    mark: int = 0
    """A checksum of 24 bits: other sequences differ, but for one in 16 million."""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, description: str) -> None:
        self.calls += 1
        self.mark = zlib.crc32(description.encode(), self.mark) & 0xFFFFFF
        self.last.append(description)


def differences(told: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The groups in which ranks have made different collectives, with the ranks and the first difference on record.

    `told`: of each rank its groups, each with `ranks`, and `calls`, `mark` and `last` of its fingerprint.
    """
    groups: dict[tuple[int, ...], dict[int, Mapping[str, Any]]] = {}
    for rank, rows in enumerate(told):
        for row in rows:
            groups.setdefault(tuple(row["ranks"]), {})[rank] = row
    lines = []
    for ranks, rows_of in groups.items():
        none = {"calls": 0, "mark": 0, "last": []}
        made = {rank: rows_of.get(rank, none) for rank in ranks}
        most, _ = Counter(row["mark"] for row in made.values()).most_common(1)[0]
        like = next(rank for rank in ranks if made[rank]["mark"] == most)
        odd = [rank for rank in ranks if made[rank]["mark"] != most]
        lines += [
            f"in the group of ranks {list(ranks)}, {_first_difference(like, rank, made)}" for rank in odd
        ]
    return "; ".join(lines)


def _first_difference(like: int, odd: int, made: Mapping[int, Mapping[str, Any]]) -> str:
    theirs, ours = (
        {made[r]["calls"] - len(made[r]["last"]) + i + 1: text for i, text in enumerate(made[r]["last"])}
        for r in (like, odd)
    )
    for call in sorted(theirs.keys() & ours.keys()):
        if theirs[call] != ours[call]:
            return f"call {call} of rank {odd} was {ours[call]}, that of rank {like} {theirs[call]}"
    if made[odd]["calls"] != made[like]["calls"]:
        return f"rank {odd} has made {made[odd]['calls']} collectives, rank {like} {made[like]['calls']}"
    return f"rank {odd} has made others than rank {like} before the last {KEPT}"


class Watchdog:
    """Writes one rank's record and answers alarms, in a thread."""

    def __init__(self, store: KeyValueStore, rank: int, world_size: int) -> None:
        self.progress = Progress()
        self._store, self._rank, self._answered = store, rank, False
        self._end = threading.Event()
        self._thread = (
            threading.Thread(target=self._run, name="watch", daemon=True) if world_size > 1 else None
        )
        if self._thread:
            self._thread.start()

    def close(self) -> None:
        """End the thread. If the store blocks it longer than `END_S`, abandon it with a warning."""
        self._end.set()
        if self._thread:
            self._thread.join(END_S)
        if self._thread and self._thread.is_alive():
            warnings.warn(
                f"rank {self._rank}: its watch has not ended in {END_S:g} s, because the store does not answer it; "
                f"nothing is lost, and the thread ends with the process",
                stacklevel=2,
            )

    def blame(self, axis: str, ranks: Sequence[int], what: str, call: int) -> str:
        """Name which of `ranks` prevented the end of collective number `call` of this rank on `axis`, `what`."""
        peers = [rank for rank in ranks if rank != self._rank]
        try:
            self._store.set("alarm", "")
            self._tell()
            answers = self._answers(peers)
        except RuntimeError as error:
            return f"the store is gone: {str(error).splitlines()[0] if str(error) else error!r}"
        made = {self._rank: what} | {
            rank: dict(map(tuple, record["history"].get(axis, ()))).get(call, "")
            for rank, record in answers.items()
        }
        if what.startswith(("send", "receive")):  # ranks of a pipeline make different calls
            return "; ".join(_standing(rank, answers.get(rank)) for rank in peers)
        most, _ = Counter(text for text in made.values() if text).most_common(1)[0]
        told = [_account(rank, answers.get(rank), axis, call, made.get(rank, ""), most) for rank in peers]
        if what != most:
            told.append(f"rank {self._rank} itself made {what} as call {call}, where most made {most}")
        return "; ".join(text for text in told if text) or "all ranks have come to it"

    def _answers(self, peers: Sequence[int]) -> dict[int, Any]:
        """The records of ranks that answer the alarm, and the last beats of the others."""
        end, found = time.monotonic() + ANSWER_S, dict[int, Any]()
        while len(found) < len(peers) and time.monotonic() < end:
            for rank in peers:
                if rank not in found and self._store.check([f"record/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"record/{rank}"))
            time.sleep(0.02)
        for rank in peers:
            if rank not in found and self._store.check([f"beat/{rank}"]):
                found[rank] = json.loads(self._store.get(f"beat/{rank}")) | {"is_silent": True}
        return found

    def _run(self) -> None:
        next_beat = 0.0
        try:
            while not self._end.wait(LOOK_S):
                if not self._answered and self._store.check(["alarm"]):
                    self._tell()
                if time.monotonic() > next_beat:
                    # Reading the main thread's frames would hold its tensors, so a beat does not.
                    self._store.set(f"beat/{self._rank}", json.dumps(self._record()))
                    next_beat = time.monotonic() + BEAT_S
        except RuntimeError:  # the store has ended: no rank can ask
            return

    def _tell(self) -> None:
        if not self._answered:
            self._answered = True
            self._store.set(f"record/{self._rank}", json.dumps(self._record() | {"where": _where()}))

    def _record(self) -> dict[str, Any]:
        seen = self.progress
        calls = {axis: list(rows) for axis, rows in list(seen.history.items())}
        return {
            "phase": seen.phase,
            "step": seen.step,
            "fault": seen.fault,
            "calls": dict(seen.calls),
            "history": calls,
        }


def _standing(rank: int, record: Any) -> str:
    """What one rank is doing."""
    if record is None:
        return f"rank {rank} does not answer and has never been heard"
    at = f"in phase {record['phase']!r} of step {record['step']}"
    at += f", where it has met {record['fault']}" if record["fault"] else ""
    if record.get("is_silent"):
        return f"rank {rank} does not answer: it has died or is stopped; it was last heard {at}"
    return f"rank {rank} is {at}, at {record['where']}"


def _account(rank: int, record: Any, axis: str, call: int, made: str, most: str) -> str:
    """The part of one rank in the failure of call `call` on `axis`; empty if none."""
    if record is None or record.get("is_silent"):
        return _standing(rank, record)
    if record["calls"].get(axis, 0) < call:
        return f"rank {rank} has not come to it: {_standing(rank, record)}"
    if made and made != most:
        return (
            f"rank {rank} made {made} as call {call} there, where most made {most}; {_standing(rank, record)}"
        )
    return ""


def _where() -> str:
    """File, line and function of the main thread, outside torch and the standard library's waiting."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [row for row in traceback.extract_stack(frame) if "/torch/" not in row.filename] if frame else []
    return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "an unknown place"
