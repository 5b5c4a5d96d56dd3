"""Parses the JSON of a manifest member by member, in memory of a few times its bytes for any input.

Note: a hostile item of a few bytes takes over 60 as an object, and 250 in a parser of whole texts.  So tensors and
slices are parsed one by one, each of a bounded length.  An item of another shape is refused before it is built.  The
other members are bounded in length, lists and depth.  They are parsed whole: at most 4 MiB takes 40 times as much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

LIMIT_FACTS = 1 << 22
"""bytes of each member but `tensors` and `updates`"""
LIMIT_ITEMS, LIMIT_TEXTS, LIMIT_DEPTH = 1 << 15, 1 << 17, 64
"""of one member: lists, dicts and names; texts; depth. More names are read where they are long ones"""
BYTES_A_FACT = 16
"""for each name of a longer member; 21,843 labels of a model are 43,686 names of 20 bytes"""
BYTES_A_NAME = 24
"""of the whole text, for each name in `updates` and `tensors`, which take a dict entry"""
_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_NAME = re.compile(rb"\s*(" + _TEXT + rb")\s*:\s*", re.DOTALL)
_NEXT, _CLOSE = re.compile(rb"\s*,\s*"), re.compile(rb"\s*\}\s*")
_TOKEN = re.compile(rb"[\[\]{}]|" + _TEXT + rb"(\s*:)?", re.DOTALL)
_SCALAR = re.compile(_TEXT + rb'|[^\s,\[\]{}"]{1,400}', re.DOTALL)
_COUNT = re.compile(rb"\d{1,15}")
_HEAD = re.compile(
    rb'\{\s*("dtype"\s*:\s*[^,\[\]{}]{1,20},\s*"shape"\s*:\s*\[[^\[\]{}]{0,200}\])\s*,\s*"slices"\s*:\s*\[\s*'
)
_SLICE = re.compile(rb"\s*(\{[^{}]{1,1000}\})\s*(,|\]\s*\})")
_NO_SLICES = re.compile(rb"\]\s*\}")
S = TypeVar("S")
T = TypeVar("T")


def parse(
    data: bytes,
    start: int,
    end: int,
    *,
    slice_of: Callable[[bytes], S],
    tensor_of: Callable[[bytes, list[S]], T],
) -> tuple[bytes, dict[str, int], dict[str, T]]:
    """Parse data[start:end], an object: its members as JSON, except `updates` and `tensors`. Raises ValueError."""
    text = _Text(data, start, end)
    facts: list[bytes] = []
    updates: dict[str, int] = {}
    tensors: dict[str, T] = {}

    def member(name: str) -> None:
        if name == "updates":
            text.members(lambda each: updates.__setitem__(each, int(text.take(_COUNT, f"updates.{each}")[0])))
        elif name == "tensors":
            text.members(lambda each: tensors.__setitem__(each, text.tensor(each, slice_of, tensor_of)))
        else:
            facts.append(json.dumps(name).encode() + b":" + text.value(name))

    text.members(member)
    if text.at != end:
        raise ValueError(f"bytes follow its end at {text.at - start}")
    return b"{" + b",".join(facts) + b"}", updates, tensors


def bounded(data: bytes, name: str) -> None:
    """Raises ValueError for a value that `parse` would refuse."""
    _Text(data, 0, len(data)).value(name)


class _Text:
    """A position in the bytes of a JSON object. Every method advances it, or raises ValueError."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end
        self.names_left = 64 + (end - at) // BYTES_A_NAME

    def take(self, pattern: re.Pattern[bytes], what: str) -> re.Match[bytes]:
        found = pattern.match(self.data, self.at, self.end)
        if found is None:
            near = bytes(self.data[self.at : min(self.at + 40, self.end)])
            raise ValueError(f"{what[:200]}: not what JSON allows there: {near!r}")
        self.at = found.end()
        return found

    def members(self, read: Callable[[str], None]) -> None:
        """Call `read` for each member of an object, with the position at its value."""
        if self.data[self.at : self.at + 1] != b"{":
            raise ValueError("not what JSON allows there: an object is expected")
        self.at += 1
        if _CLOSE.match(self.data, self.at, self.end):
            self.take(_CLOSE, "object")
            return
        while True:
            found = self.take(_NAME, "name")
            self.names_left -= 1
            if self.names_left < 0 or len(found[1]) > 4096:
                raise ValueError("more names, or longer ones, than tensors have")
            read(str(json.loads(found[1])))
            if _CLOSE.match(self.data, self.at, self.end):
                self.take(_CLOSE, "object")
                return
            self.take(_NEXT, "object")

    def value(self, name: str) -> bytes:
        """The bytes of any value."""
        start, depth, items, texts = self.at, 0, 0, 0
        stop = min(self.end, start + LIMIT_FACTS)
        if self.data[start : start + 1] not in (b"[", b"{"):
            return self.take(_SCALAR, name)[0]
        for token in _TOKEN.finditer(self.data, start, stop):
            change = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
            texts, depth = texts + (not change), depth + change
            items += bool(change or token[1])
            most = max(LIMIT_ITEMS, (token.end() - start) // BYTES_A_FACT)
            if items > most or texts > LIMIT_TEXTS or depth > LIMIT_DEPTH:
                raise ValueError(
                    f"{name[:100]}: {most} names, lists and dicts, {LIMIT_TEXTS} texts and a depth of {LIMIT_DEPTH} "
                    f"at most"
                )
            if depth == 0:
                self.at = token.end()
                return self.data[start : self.at]
        raise ValueError(f"{name[:100]}: {LIMIT_FACTS} characters at most, and closed by what JSON allows")

    def tensor(
        self, name: str, slice_of: Callable[[bytes], S], tensor_of: Callable[[bytes, list[S]], T]
    ) -> T:
        head = self.take(_HEAD, f"tensors.{name}")[1]
        slices: list[S] = []
        more = _NO_SLICES.match(self.data, self.at, self.end) is None
        if not more:
            self.take(_NO_SLICES, name)
        while more:
            found = self.take(_SLICE, f"tensors.{name}.slices.{len(slices)}")
            slices.append(slice_of(found[1]))
            more = found[2] == b","
        return tensor_of(head, slices)
