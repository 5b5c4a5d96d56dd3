"""Converts a text to tokens, with a byte-pair tokenizer trained on it.

    python examples/gpt/prepare.py tokens --vocabulary 4096

Writes train.bin and val.bin, in nanoGPT's form, and tokenizer.json; then `train.py --data tokens --vocabulary 4096`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import tyro
from corpus import read_corpus
from generate import TOKENIZER
from tokens import PARTS, train_bpe, write_tokens

PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Options:
    """Make tokens of a text."""

    out: Annotated[Path, tyro.conf.Positional]
    """the folder to write"""
    data: Path | None = None
    """a text file or a folder of them; by default the source of Python's standard library"""
    vocabulary: int = 4096
    """ids, the 256 bytes and the end among them"""


def main(options: Options) -> int:
    try:
        corpus = read_corpus(options.data)
        tokenizer = train_bpe(pieces(corpus.train), options.vocabulary)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out / TOKENIZER))
    for name, text in zip(PARTS, (corpus.train, corpus.held_out), strict=True):
        ids = np.concatenate([encoded(tokenizer, piece) for piece in pieces(text)])
        write_tokens(options.out / name, ids, tokenizer.get_vocab_size(), text_bytes=len(text))
        print(f"{options.out / name}: {len(ids):,} tokens of {len(text):,} bytes")
    return 0


def pieces(text: npt.NDArray[np.uint8]) -> Iterator[str]:
    """The text in pieces of whole lines, about `PIECE_BYTES` each."""
    data, start = text.tobytes(), 0
    while start < len(data):
        stop = data.find(b"\n", start + PIECE_BYTES) + 1 or len(data)
        yield data[start:stop].decode(errors="replace")
        start = stop


def encoded(tokenizer: Any, piece: str) -> npt.NDArray[np.uint32]:
    return np.asarray(tokenizer.encode(piece).ids, np.uint32)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
