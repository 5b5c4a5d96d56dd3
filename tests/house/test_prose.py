"""The product's prose is read once: few riddle words, and no long sentence where a user reads it.

A sentence ends as `tests.shared.pages.sentences` says. A line indented below its docstring is a formula or an example.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.shared.pages import ROOT, long_sentences

FILES = sorted(
    path for room in ("colossal_lite", "kernels", "launcher") for path in (ROOT / room).rglob("*.py")
)
AIM_WORDS = 20
MOST_LONGER = 410
"""Sentences of more than AIM_WORDS words in docstrings and strings, private ones too."""
LIMITS = {"what is": 17, "told": 9, "lies": 3, "nobody": 2, "of which": 4}
"""Times that a word may stand in docstrings, comments and strings; once 155, 102, 51, 45 and 36."""


def text_of(node: ast.AST) -> str | None:
    """A string, with `X` for each value of an f-string; None for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
    return None


@cache
def strings(path: Path) -> list[tuple[str, bool, ast.expr]]:
    """(name of the owner, whether it is a docstring, string) of every string; fields have docstrings too."""
    found: list[tuple[str, bool, ast.expr]] = []
    skipped: set[int] = set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for owner in nodes:
        body = getattr(owner, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and text_of(each.value) is not None:
                found.append((getattr(owner, "name", ""), True, each.value))
                skipped.add(id(each.value))
        if isinstance(owner, ast.JoinedStr):
            skipped |= {id(part) for part in owner.values}
    others = (
        node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped
    )
    return found + [("", False, node) for node in others if text_of(node)]


def prose(path: Path) -> Iterator[tuple[str, int, str]]:
    """(name of the owner, line, text) of every string, of docstrings without their formulas and examples."""
    for name, is_docstring, node in strings(path):
        text = text_of(node) or ""
        if "\n:root" in text or text.startswith("<!doctype"):  # a style sheet or a page
            continue
        first, *rest = text.split("\n")
        indents = [len(line) - len(line.lstrip()) for line in rest]
        base = min((indent for line, indent in zip(rest, indents, strict=True) if line), default=0)
        if is_docstring:
            kept = [line if n < base + 4 else "" for line, n in zip(rest, indents, strict=True)]
            text = "\n".join([first, *kept])
        yield name, node.lineno, text


def test_no_public_docstring_error_or_help_text_has_a_long_sentence() -> None:
    found = [
        f"{path}:{line}: {sentence}"
        for path in FILES
        for name, line, text in prose(path)
        if not name.startswith("_")
        for sentence in long_sentences(text)
    ]
    assert not found, f"{len(found)}:\n" + "\n".join(found)


def test_few_sentences_have_more_than_twenty_words() -> None:
    found = [
        f"{path}:{line}: {sentence}"
        for path in FILES
        for _, line, text in prose(path)
        for sentence in long_sentences(text, AIM_WORDS)
    ]
    assert len(found) <= MOST_LONGER, f"{len(found)}:\n" + "\n".join(found)


def test_words_that_hide_their_subject_are_few() -> None:
    texts = []
    for path in FILES:
        texts += [text_of(node) or "" for _, _, node in strings(path)]
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        texts.append("\n".join(token.string for token in tokens if token.type == tokenize.COMMENT))
    joined = re.sub(r"[\s#]+", " ", "\n".join(texts))
    counts = {word: len(re.findall(rf"\b{word}\b", joined, re.IGNORECASE)) for word in LIMITS}
    assert all(counts[word] <= LIMITS[word] for word in LIMITS), counts
