"""Reports which rank is missing when a collective does not end, and what each rank was doing.

Note: records and alarms.
A rank that survives a hang knows only that others are missing.  The rank that hangs knows nothing.  So every rank has a
record: phase, step, and per axis the number and the last descriptions of its collectives.  That costs an append a
collective and no message.  A rank whose collective fails raises an alarm in the context's store.  A thread of each rank
looks there every `LOOK_S`. It answers with its record and the current line of its main thread.  The rank that failed
compares.  A rank with fewer calls on that axis is missing.  A rank with another call at that number has diverged.  A
rank that does not answer has died or is stopped. Then its last beat is shown, at most `LOOK_S` old.  Every rank reads
the beat of the rank that serves the store too, as the store ends with it.
Cost in a run without faults: at most four short questions to the store every `LOOK_S`, beside the training.

Note: errors of one rank.
The thread of a rank whose engine has raised writes the error into the store (distributed/progress.py says which count).
The threads of others read it there.  If a rank then waits in one collective for `PATIENCE_S`, its thread ends the wait
by its transports' `breakers`.  From then on no collective begins on that rank (`Progress.broken`). The reason is the
first on the board, so all ranks end with one cause.

Note: waits for a device.
A wait for a collective of NCCL returns at once, and so none times out.  The host waits where it reads numbers
(`Communicator.numbers`).  If that has no end within `timeout_s`, this thread asks the others which collective they have
not come to, and says so.  It ends the wait by aborting the groups, before NCCL's own watchdog would end the process.

Note: a lost store or launcher.
A rank whose launcher has ended, or whose store has, can neither save nor learn anything.  Its thread says so, ends
its waits, and ends the process after `LEAVE_S`, if a launcher had started it.

Ranks that leave the common sequence need not hang.  gloo and NCCL accept another operation or dtype of as many bytes,
and the numbers are wrong.  So each rank also folds all collectives of a group into one number
(`CollectiveFingerprint`).  The all-reduce of a step's totals compares these before any update
(`Mesh.collectives_differ`).  That adds 8 bytes to it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from colossal_lite.distributed.key_value_store import LimitedStore, NoAnswerError, SharedStore
from colossal_lite.distributed.presence import ProcessCard
from colossal_lite.distributed.progress import KEPT, LEFT, Progress
from colossal_lite.observe.printed_lines import tell

LOOK_S = 0.25
ANSWER_S = 1.5
"""seconds that a failed rank waits for the records of the others, or for one answer of the store"""
PATIENCE_S = 1.0
"""seconds that a rank goes on waiting when another has raised: all ranks may give up the step"""
GRACE_S = 30.0
"""seconds that NCCL may wait longer than `timeout_s`: then its own watchdog ends the process, and names no rank"""
LEAVE_S = 5.0
"""seconds after which a rank whose store or launcher is gone is ended"""
END_S = 10.0
"""seconds that `close` waits for the thread, which may be in a call of the store"""


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
    """Writes one rank's record, answers alarms, hears of errors of other ranks, and watches store and launcher.

    `server`: the rank that serves the store; None if a launcher does.  `parent`: the process number of the launcher
    that started this process, 0 if none is watched.  `ends_process`: a launcher started this process, so it may be
    ended when store or launcher are gone.
    """

    def __init__(
        self, store: SharedStore, rank: int, world_size: int, *, server: int | None = None, parent: int = 0,
        ends_process: bool = False,
    ) -> None:  # fmt: skip
        self.progress = Progress()
        self.breakers: list[Callable[[str], None]] = []
        """Each ends, from another thread, the waits of one transport; its argument says why."""
        self._store = store if isinstance(store, LimitedStore) else LimitedStore(store, ANSWER_S)
        self._store = self._store.within(ANSWER_S)
        self._rank, self._world_size, self._server = rank, world_size, server
        self._parent, self._ends_process = parent, ends_process
        self._answered = self._is_ending = self._has_news = False
        self._published = self._withdrawn = self._passed = 0
        self._mine: set[int] = set()
        self._heard, self._heard_s = "", 0.0
        self._beaten = ""
        self._last_of_server: dict[str, Any] | None = None
        self._cards: dict[int, ProcessCard] = {}
        self._lost_s: float | None = None
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread = (
            threading.Thread(target=self._run, name="watch", daemon=True) if world_size > 1 else None
        )
        if self._thread:
            self._thread.start()
            atexit.register(self.close)  # a thread in the store's code aborts a process that ends around it

    def close(self) -> None:
        """End the thread. If it does not end within `END_S`, abandon it with a warning."""
        atexit.unregister(self.close)
        self._end.set()
        self._wake.set()
        if self._thread:
            self._thread.join(END_S)
        if self._thread and self._thread.is_alive():
            warnings.warn(
                f"rank {self._rank}: its watch has not ended in {END_S:g} s, because the store does not answer it; "
                f"nothing is lost, and the thread ends with the process",
                stacklevel=2,
            )

    def look_now(self) -> None:
        """Let the thread look at once: this rank has met an error, or goes on after one."""
        self._wake.set()

    # ---- asked by the main thread, when a collective has failed ----

    def blame(self, axis: str, ranks: Sequence[int], what: str, call: int) -> str:
        """Name which of `ranks` prevented the end of collective number `call` of this rank on `axis`, `what`."""
        peers = [rank for rank in ranks if rank != self._rank]
        try:
            answers = self._ask(peers)
        except NoAnswerError:
            return self._silent_store()
        except RuntimeError as error:
            return self._gone_store(error)
        made = {self._rank: what} | {
            rank: dict(map(tuple, record.get("history", {}).get(axis, ()))).get(call, "")
            for rank, record in answers.items()
        }
        if what.startswith(("send", "receive")):  # ranks of a pipeline make different calls
            return "; ".join(_standing(rank, answers.get(rank)) for rank in peers)
        most, _ = Counter(text for text in made.values() if text).most_common(1)[0]
        told = [_account(rank, answers.get(rank), axis, call, made.get(rank, ""), most) for rank in peers]
        if what != most:
            told.append(f"rank {self._rank} itself made {what} as call {call}, where most made {most}")
        return "; ".join(text for text in told if text) or "all ranks have come to it"

    def standing(self, ranks: Sequence[int]) -> str:
        """What each of `ranks` is doing; of those that do not answer alone, if there are any."""
        peers = [rank for rank in ranks if rank != self._rank]
        try:
            answers = self._ask(peers)
        except NoAnswerError:
            return self._silent_store()
        except RuntimeError as error:
            return self._gone_store(error)
        silent = [rank for rank in peers if answers.get(rank, {}).get("is_silent", True)]
        return "; ".join(_standing(rank, answers.get(rank)) for rank in silent or peers)

    def meet(self, word: str, value: Any, timeout_s: float) -> list[Any]:
        """What all ranks have brought to the meeting `word`, in rank order: plain values. Through the store alone.

        Raises RuntimeError if a rank has stopped, or has not come within `timeout_s`."""
        self._store.set(f"{word}/{self._rank}", json.dumps(value))
        end, missing = time.monotonic() + timeout_s, list(range(self._world_size))
        while missing := [rank for rank in missing if not self._store.check([f"{word}/{rank}"])]:
            if self._store.check(["stopped"]):
                raise RuntimeError(self._store.get("stopped").decode())
            if time.monotonic() > end:
                raise RuntimeError(f"no end within {timeout_s:g} s: {self.standing(missing)}")
            time.sleep(0.02)
        return [json.loads(self._store.get(f"{word}/{rank}")) for rank in range(self._world_size)]

    def ended(self, ranks: Sequence[int]) -> str:
        """Those of `ranks` whose process has died, with where they were last heard; empty if none is known to have."""
        told = []
        try:
            for rank in ranks:
                if rank != self._rank and self.has_ended(rank):
                    beat = self._beat_of(rank)
                    has_left = beat is not None and beat["phase"] == LEFT
                    told.append(
                        _standing(rank, beat) if has_left else f"rank {rank} has died; {_last_heard(beat)}"
                    )
        except RuntimeError:  # whoever asks needs the store too, and hears of it there
            return ""
        return "; ".join(told)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of this rank is known to have died. Raises RuntimeError without a store."""
        return self._end_of(rank) == "has died"

    def _ask(self, peers: Sequence[int]) -> dict[int, Any]:
        """The records of ranks that answer an alarm, and the last beats of the others."""
        self._announce("alarm")
        self._tell()
        end, found = time.monotonic() + ANSWER_S, dict[int, Any]()
        waited = list(peers)
        while waited and time.monotonic() < end:
            for rank in waited:
                if self._store.check([f"record/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"record/{rank}"))
            waited = [rank for rank in waited if rank not in found and not self._end_of(rank)]
            time.sleep(0.02)
        for rank in peers:
            if rank not in found and (beat := self._beat_of(rank)) is not None:
                found[rank] = beat | {"is_silent": True}
        return found

    def _beat_of(self, rank: int) -> dict[str, Any] | None:
        if not self._store.check([f"beat/{rank}"]):
            return None
        beat: dict[str, Any] = json.loads(self._store.get(f"beat/{rank}"))
        return beat

    def _end_of(self, rank: int) -> str:
        """Whether the process of this rank has died or is stopped, as far as this host can know."""
        if rank not in self._cards and self._store.check([f"process/{rank}"]):
            self._cards[rank] = ProcessCard(**json.loads(self._store.get(f"process/{rank}")))
        return self._cards[rank].end() if rank in self._cards else ""

    def _silent_store(self) -> str:
        if self._server is None:
            return "the store does not answer: the launcher that serves it has died or is stopped"
        return (
            f"the store does not answer: rank {self._server}, which serves it, has died or is stopped; "
            + _last_heard(self._last_of_server)
        )

    def _gone_store(self, error: RuntimeError) -> str:
        if self._server is None:
            return f"the store is gone: {_first_line(error)}"
        return (
            f"the store is gone: rank {self._server}, which served it, has ended ({_first_line(error)}); "
            + _last_heard(self._last_of_server)
        )

    def _announce(self, key: str, value: str = "") -> None:
        """Set a key, and let every rank look."""
        self._store.set(key, value)
        self._store.set("news", "")

    # ---- the thread ----

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                if self._lost_s is None:
                    self._beat()
                    self._look()
            except NoAnswerError:  # its server is stopped, and may go on
                pass
            except RuntimeError as error:
                if self._is_ending or not self._ends_process:
                    return  # ranks leave in peace, or the store is another's: no rank can ask any more
                self._lose(self._gone_store(error))
            if self._parent and os.getppid() != self._parent and self._lost_s is None:
                self._lose(f"its launcher (process {self._parent}) has ended")
            if self._lost_s is not None and time.monotonic() > self._lost_s + LEAVE_S:
                say(f"rank {self._rank}: it has not left by itself in {LEAVE_S:g} s, and is ended")
                os._exit(1)
            self._wake.wait(LOOK_S)
            self._wake.clear()
        if self.progress.phase == LEFT and self._lost_s is None:
            with suppress(RuntimeError):  # the store may have ended before
                self._beat()

    def _look(self) -> None:
        """Tell of this rank's errors, hear of those of others, and end a wait that is in vain."""
        self._publish()
        self._end_stall()
        self._has_news = self._has_news or self._store.check(["news"])
        if not self._has_news:
            return
        self._is_ending = self._is_ending or self._store.check(["leaving"])
        if not self._answered and self._store.check(["alarm"]):
            self._tell()
        cause = self._cause()
        if cause != self._heard:
            self._heard, self._heard_s = cause, time.monotonic()
        since_s = self.progress.waiting_since_s
        if cause and since_s is not None and time.monotonic() > max(since_s, self._heard_s) + PATIENCE_S:
            self._break(cause)

    def _end_stall(self) -> None:
        """Name the ranks for which the main thread has waited as long as it may, and end the wait."""
        seen = self.progress
        since_s, limit_s = seen.waiting_since_s, seen.waiting_limit_s
        if since_s is None or limit_s is None or seen.broken or time.monotonic() < since_s + limit_s:
            return
        at = f"in phase {seen.phase!r} of step {seen.step}"
        text = f"rank {self._rank}: collectives have no end within {limit_s:g} s, {at}"
        say(text)  # before anybody is asked: answers may not come
        peers = sorted({rank for ranks in seen.groups.values() for rank in ranks} - {self._rank})
        answers = self._ask(peers)
        late = [
            self._late(axis, rank, answers.get(rank)) for axis in seen.groups for rank in seen.groups[axis]
        ]
        told = "; ".join(filter(None, late)) or "; ".join(
            _standing(rank, answers.get(rank)) for rank in peers
        )
        say(f"rank {self._rank}: {told}")
        self._break(f"{text}: {told}")

    def _late(self, axis: str, rank: int, record: Any) -> str:
        """The collective on `axis` that another rank has not come to, or may not have; empty if it has."""
        made = dict([*self.progress.history[axis]])  # the main thread may go on
        is_silent = record is None or record.get("is_silent", False)
        call = max(made) if is_silent else record["calls"].get(axis, 0) + 1
        what = made.get(call, "")
        if rank == self._rank or not what or what.startswith(("send", "receive", "exchange")):
            return ""
        fault = (
            _standing(rank, record)
            if is_silent
            else f"rank {rank} has not come to it: {_standing(rank, record)}"
        )
        return f"{what} on axis {axis!r} (call {call} there): {fault}"

    def _publish(self) -> None:
        """Write this rank's errors where no other rank was first, and which of them lie behind."""
        seen = self.progress
        while self._published < seen.raised:
            number = self._published + 1
            told = f"rank {self._rank} stopped: {seen.fault}"
            if self._store.compare_set(f"fault/{number}", "", told).decode() == told:
                self._mine.add(number)
            self._store.set("news", "")
            self._published = number
        while self._withdrawn < min(seen.went_on, self._published):
            self._withdrawn += 1
            if self._withdrawn in self._mine:
                self._store.set(f"back/{self._withdrawn}", "")

    def _cause(self) -> str:
        """Which rank has stopped, or has raised more often than this one and does not go on; empty if none."""
        if self._store.check(["stopped"]):
            return self._store.get("stopped").decode()
        number = max(self.progress.raised, self._passed) + 1
        while self._store.check([f"fault/{number}"]):
            if not self._store.check([f"back/{number}"]):
                return self._store.get(f"fault/{number}").decode()
            self._passed, number = number, number + 1
        return ""

    def _break(self, cause: str) -> None:
        """End the wait of the main thread, and all that could follow."""
        if self.progress.broken:
            return
        with suppress(RuntimeError):  # first: the others are to hear this cause, not what follows from it
            self._store.compare_set("stopped", "", cause)
        self.progress.breaks(cause)
        for each in self.breakers:
            each(cause)

    def _lose(self, why: str) -> None:
        """Store or launcher are gone: nothing can be saved or told. End the waits; the process ends in `LEAVE_S`."""
        say(
            f"rank {self._rank}: {why}: this rank ends, in phase {self.progress.phase!r} of step {self.progress.step}"
        )
        self._lost_s = time.monotonic()
        self.progress.breaks(why)
        for each in self.breakers:
            each(why)

    def _beat(self) -> None:
        # Reading the main thread's frames would hold its tensors, so a beat does not.
        seen = self.progress
        words = json.dumps({"phase": seen.phase, "step": seen.step, "fault": seen.fault})
        if not self._beaten:
            self._store.set(f"process/{self._rank}", json.dumps(asdict(ProcessCard.own())))
        if words != self._beaten:
            self._store.set(f"beat/{self._rank}", words)
            self._beaten = words
        if self._server is not None and self._server != self._rank:
            self._last_of_server = self._beat_of(self._server) or self._last_of_server

    def _tell(self) -> None:
        if not self._answered:
            self._answered = True
            self._store.set(f"record/{self._rank}", json.dumps(self._record()))

    def _record(self) -> dict[str, Any]:
        seen = self.progress
        calls = {axis: list(rows) for axis, rows in list(seen.history.items())}
        return {
            "phase": seen.phase,
            "step": seen.step,
            "fault": seen.fault,
            "calls": dict(seen.calls),
            "history": calls,
            "where": _where(),
        }


def say(line: str) -> None:
    """Print a line for people at once, whatever follows."""
    tell(line, sys.stderr)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0] or repr(error)


def _last_heard(record: Any) -> str:
    return f"it was last heard {_at(record)}" if record else "it was never heard, so it is in phase 'start'"


def _at(record: Any) -> str:
    at = f"in phase {record['phase']!r} of step {record['step']}"
    return at + (f", where it has met {record['fault']}" if record["fault"] else "")


def _standing(rank: int, record: Any) -> str:
    """What one rank is doing."""
    if record is None:
        return f"rank {rank} does not answer and has never been heard"
    if record["phase"] == LEFT:
        return f"rank {rank} has left its context without an error, after step {record['step']}"
    if record.get("is_silent"):
        return f"rank {rank} does not answer: it has died or is stopped; {_last_heard(record)}"
    return f"rank {rank} is {_at(record)}, at {record['where']}"


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
    """File, line and function of the main thread, outside torch, this file and the standard library's waiting."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    rows = traceback.extract_stack(frame) if frame else []
    stack = [row for row in rows if "/torch/" not in row.filename and row.filename != __file__]
    return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "an unknown place"
