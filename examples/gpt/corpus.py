"""Reads a text as bytes: a training part and a held-out part, cut into windows of tokens.

The default text is the source of Python's own standard library, so nothing is downloaded.  Patch releases of Python
differ, so the SHA-256 of the text is printed and kept with the run.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import colossal_lite as cl

# ---------------------------------------------------------------------------------------------------- windows


class TokenWindows:
    """Windows of `sequence` tokens, end to end: item i -> (inputs_T, labels_T), int64, labels one token on.

    The tokens after the last whole window are left out; `dropped` says how many. Raises ValueError where
    there is not one window.
    """

    def __init__(self, tokens: npt.NDArray[Any], sequence: int, name: str = "tokens") -> None:
        if sequence < 1:
            raise ValueError(f"sequence: {sequence}; legal: 1 or more tokens")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{name}: shape {tokens.shape}, {tokens.dtype}; legal: one dim of integers")
        if len(tokens) < sequence + 1:
            raise ValueError(
                f"{name}: {len(tokens)} tokens found, {sequence + 1} needed for one window and its labels"
            )
        self.tokens, self.sequence = tokens, sequence
        self.dropped = (len(tokens) - 1) % sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence
        window = torch.from_numpy(self.tokens[start : start + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


# ----------------------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes, or as ids of a tokenizer, in two parts that share no file."""

    name: str
    train: npt.NDArray[Any]
    held_out: npt.NDArray[Any]
    sha256: str
    """of all files in order of path, those of both parts"""
    num_files: int
    unit: str = "bytes"
    vocabulary: int | None = 256
    """ids are below it; None where nobody has said"""
    bytes_per_token: float = 1.0
    """of the held-out text; 1 where nobody has said"""

    def __str__(self) -> str:
        parts = f"{len(self.train):,} {self.unit} to train on and {len(self.held_out):,} held out"
        return f"{self.name}: {self.num_files} files, {parts}, sha256 {self.sha256}"

    def check(self, vocabulary: int) -> None:
        """Raises ConfigError where a model of `vocabulary` ids cannot read it."""
        if self.vocabulary is not None and self.vocabulary > vocabulary:
            rule = f"its ids go up to {self.vocabulary - 1}, and the model has {vocabulary}"
            raise data_error(self.name, rule, f"--vocabulary {self.vocabulary} or more")

    def windows(self, sequence: int, global_batch: int) -> tuple[TokenWindows, TokenWindows]:
        """(train, held-out) windows; ConfigError unless there is one global batch and one window held out."""
        need, need_held_out = global_batch * sequence + 1, sequence + 1
        if len(self.train) < need or len(self.held_out) < need_held_out:
            found = f"{len(self.train):,} {self.unit} found to train on and {len(self.held_out):,} held out"
            rule = f"{found}, {need:,} and {need_held_out:,} needed"
            legal = (
                f"a global_batch (now {global_batch}) and a sequence (now {sequence}) that fit, or more text"
            )
            raise data_error(self.name, rule, legal)
        return TokenWindows(self.train, sequence, "train"), TokenWindows(self.held_out, sequence, "held_out")


HELD_OUT_EVERY = 20
TEXT = "a text file, or a folder of text files"
_NOT_LIBRARY = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
)


def read_corpus(source: str | Path | None = None) -> Corpus:
    """The corpus of a text file, of the text files below a folder, or (None) of Python's standard library.

    Every 20th file in order of path is held out; of fewer than 20 files, the last twentieth of the bytes. In
    a folder, hidden files and files with a NUL byte in their first 8 KiB (git's rule for binary ones) are
    left out. Raises ConfigError where there is no such path or fewer than 20 bytes.
    """
    if source is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"standard library of Python {platform.python_version()}"
        paths = _walk(root, lambda folder: folder not in _NOT_LIBRARY, lambda file: file.endswith(".py"))
    else:
        root, name = Path(source), str(source)
        if not root.exists():
            raise data_error(name, "is not there", TEXT)
        paths = [root] if root.is_file() else _walk(root, _is_shown, _is_shown)
    try:
        texts = [path.read_bytes() for path in paths]
    except OSError as error:
        raise data_error(name, f"cannot read {error.filename}: {error.strerror}", TEXT) from error
    if root.is_dir():
        texts = [text for text in texts if b"\0" not in text[:8192]]
    found = sum(map(len, texts))
    if found < HELD_OUT_EVERY:
        rule = f"{found} bytes found in {len(texts)} text files, {HELD_OUT_EVERY} or more needed"
        raise data_error(name, rule, TEXT)
    sha256 = hashlib.sha256()
    for text in texts:
        sha256.update(text)
    train, held_out = (np.frombuffer(part, np.uint8) for part in _split(texts))
    return Corpus(name, train, held_out, sha256.hexdigest(), len(texts))


def data_error(source: str, rule: str, legal: str) -> cl.ConfigError:
    """What text there is depends on the machine alone, so all ranks of a node find the same."""
    return cl.ConfigError([cl.Problem("data", source, rule, legal)])


def _is_shown(entry: str) -> bool:
    return not entry.startswith(".")


def _walk(root: Path, into: Callable[[str], bool], keep: Callable[[str], bool]) -> list[Path]:
    """Files below `root` in order of their path, as POSIX text: the same order on every system."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = filter(into, folders)
        found += [Path(folder, file) for file in files if keep(file) and Path(folder, file).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _split(texts: Sequence[bytes]) -> tuple[bytes, bytes]:
    if len(texts) < HELD_OUT_EVERY:
        text = b"".join(texts)
        at = len(text) - len(text) // HELD_OUT_EVERY
        return text[:at], text[at:]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [text for i, text in enumerate(texts, 1) if i % HELD_OUT_EVERY]
    return b"".join(train), b"".join(held_out)


@dataclass(frozen=True)
class Yardsticks:
    """Bits per byte that need no model, of one text; what a language model of it should beat."""

    unigram: float
    zlib: float
    lzma: float

    def __str__(self) -> str:
        return f"unigram {self.unigram:.3f}, zlib {self.zlib:.3f}, lzma {self.lzma:.3f} bits per byte"


def yardsticks(text: npt.NDArray[np.uint8], limit_bytes: int = 1 << 18) -> Yardsticks:
    """Entropy of the bytes, and what zlib -9 and lzma make of the first `limit_bytes` (256 KiB take 0.1 s)."""
    data = text[:limit_bytes].tobytes()
    if not data:
        raise ValueError("text: 0 bytes found, at least 1 needed")
    share = np.bincount(np.frombuffer(data, np.uint8)) / len(data)
    entropy = -float(np.sum(share[share > 0] * np.log2(share[share > 0])))
    bits = 8 / len(data)
    return Yardsticks(entropy, len(zlib.compress(data, 9)) * bits, len(lzma.compress(data)) * bits)
