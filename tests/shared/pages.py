"""Reads README and the pages of docs: code blocks, sentences, links, anchors, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = 30
"""In a sentence that a user reads."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block of a language."""
    return [
        (text.count("\n", 0, match.start()) + 1, match[2])
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text without code blocks and without indented ones."""
        return re.sub(r"^ {4}\S.*$", "", FENCE.sub("", self.text), flags=re.MULTILINE)

    @cached_property
    def anchors(self) -> frozenset[str]:
        return frozenset(anchor_of(title) for title in re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE))

    def links(self) -> list[str]:
        """Targets of links and pictures that are not of the web."""
        found = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in found if not re.match(r"[a-z]+://", target)]

    def paths(self) -> list[str]:
        """Files and folders of the repository that the text names."""
        return re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|txt|cfg|toml))`", self.text)

    def code(self) -> list[str]:
        """Commands and other code: what stands between backticks, and the lines of bash blocks."""
        inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose)]
        lines = [line for _, block in blocks(self.text, "bash") for line in block.splitlines()]
        return inline + [part for line in lines for part in line.split(" && ")]


def pages() -> list[Page]:
    """README, then the pages of docs."""
    return [Page(ROOT / "README.md"), *map(Page, sorted(DOCS.rglob("*.md")))]


def anchor_of(title: str) -> str:
    """The anchor that the site makes of a title."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", title)).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def sentences(prose: str) -> Iterator[str]:
    """The sentences of paragraphs, list items and cells of tables. A stop, `!` or `?` ends one; a colon or a semicolon
    does not. Code counts as one word each."""
    prose = re.sub(r"`[^`]+`", "CODE", prose)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)\s]+\)", r"\1", prose)
    for block in re.split(r"\n\s*\n", prose):
        lines = [line.strip() for line in block.splitlines()]
        parts = [""]
        for line in lines:
            if line.startswith("#"):
                continue
            if line.startswith("|"):
                parts += line.strip("|").split("|")
            elif re.match(r"[-*] |\d+\. ", line):
                parts.append(re.sub(r"^([-*]|\d+\.) ", "", line))
            else:
                parts[-1] += " " + line
        for part in parts:
            ends = re.split(r"(?<=[.!?])[\"')*]*\s+", part)
            yield from (found for each in ends if (found := each.strip()))


def words(sentence: str) -> int:
    return len(re.findall(r"\w[\w'.,/%-]*", sentence))


def long_sentences(prose: str, most: int = MOST_WORDS) -> list[str]:
    return [f"{n} words: {each}" for each in sentences(prose) if (n := words(each)) > most]
