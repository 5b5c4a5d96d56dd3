"""Writes a rank's list of actions in brief: what repeats with the next micro-batch, chunk or stage is written once.

Note: `0F0..3` are four forwards, `UPDATE#5..0` the updates of six chunks, the last first.  `(1F4 0B0) x 12;` is a part
that runs twelve times, each time with the next micro-batch; without micro-batches, with the next chunk. Its words are
those of the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossal_lite.schedule.plan import Action

LONGEST = 64
"""Words at most of a part that is looked for."""
WORTH = 4
"""Words that a part leaves out at least, if its numbers do not simply count on."""
NUMBERS = ("stage", "micro_batch", "chunk")
Steps = tuple[int | None, ...]
"""How much higher each of `NUMBERS` is; None where no word has it."""


@dataclass(frozen=True, slots=True)
class Word:
    """An action, with a mark behind its chunk where a chunk has several parts."""

    action: Action
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.action}{self.mark}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """Parts that run `times` times, each time with numbers higher by `steps`."""

    parts: tuple[Part, ...]
    times: int
    steps: Steps

    def __str__(self) -> str:
        first = self.parts[0]
        changes = [(name, n) for name, n in zip(NUMBERS, self.steps, strict=True) if n]
        if len(self.parts) == 1 and isinstance(first, Word) and _is_plain(self.steps):
            return _range(first, *changes[0], self.times)
        told = " and ".join(f"{name} {n:+}".replace("_", "-") for name, n in changes)
        told = f", each time {told}" if told else ", all alike"
        if changes == [("micro_batch", 1)] or (changes == [("chunk", 1)] and self.steps[1] is None):
            told = ""
        return f"({' '.join(map(str, self.parts))}) x {self.times}{told};"


Part = Word | Repeated


def brief(words: Sequence[Word]) -> str:
    """The list in one line of text."""
    parts: list[Part] = list(words)
    for length in range(1, LONGEST + 1):
        parts = list(_folded(parts, length))
    return " ".join(map(str, parts)).rstrip(";")


def _folded(parts: Sequence[Part], length: int) -> Iterator[Part]:
    """The parts, with runs of `length` parts that repeat as one."""
    start = 0
    while start < len(parts):
        steps = _steps(parts[start : start + length], parts[start + length : start + 2 * length])
        times, stop = 1, start + length
        while steps is not None and _steps(parts[stop - length : stop], parts[stop : stop + length]) == steps:
            times, stop = times + 1, stop + length
        if steps is None or not (_is_plain(steps) or length * (times - 1) >= WORTH):
            yield parts[start]
            start += 1
        else:
            yield Repeated(tuple(parts[start : start + length]), times, steps)
            start = stop


def _is_plain(steps: Steps) -> bool:
    """Whether the micro-batch or the chunk alone counts on."""
    return sum(bool(n) for n in steps) == 1 and not steps[0]


def _steps(before: Sequence[Part], after: Sequence[Part]) -> Steps | None:
    """The steps from some parts to others, the same for all words; None where they are not alike."""
    if len(before) != len(after):
        return None
    found: Steps = (None,) * len(NUMBERS)
    for one, other in zip(before, after, strict=True):
        steps = _steps_of(one, other)
        if steps is None or any(None not in (a, b) and a != b for a, b in zip(found, steps, strict=True)):
            return None
        found = tuple(b if a is None else a for a, b in zip(found, steps, strict=True))
    return found


def _steps_of(one: Part, other: Part) -> Steps | None:
    if isinstance(one, Repeated) and isinstance(other, Repeated):
        alike = (one.times, one.steps) == (other.times, other.steps)
        return _steps(one.parts, other.parts) if alike else None
    if not isinstance(one, Word) or not isinstance(other, Word) or _bare(one) != _bare(other):
        return None
    pairs = [(getattr(one.action, name), getattr(other.action, name)) for name in NUMBERS]
    if any((a is None) is not (b is None) for a, b in pairs):
        return None
    return tuple(None if a is None else b - a for a, b in pairs)


def _bare(word: Word) -> tuple[object, ...]:
    a = word.action
    return a.kind, a.task, a.slice, a.resource, word.mark


def _range(word: Word, name: str, step: int, times: int) -> str:
    """`0F0..3`, `0F0,2..6` or `REDUCE#5..0`: the last number stands behind the one that changes."""
    first: int = getattr(word.action, name)
    between = ".." if abs(step) == 1 else "," if times == 2 else f",{first + step}.."
    text, head = str(word), f"#{first}" if name == "chunk" else f"{word.action.kind}{first}"
    at = text.index(head) + len(head)
    return f"{text[:at]}{between}{first + step * (times - 1)}{text[at:]}"
