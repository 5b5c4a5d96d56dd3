"""Reads and writes token files, packs documents into windows, trains a byte-pair tokenizer.

Note: a token file has nanoGPT's form: raw little-endian uint16 or uint32, nothing else.  It is mapped, never read
whole.  `write_tokens` leaves NAME.json beside it (dtype, count, vocabulary).  Without that file the reader states the
dtype.  Packing puts documents end to end.  A token attends to its own document only: `attention_mask` is the number
of the document in its window, from 1.  Its position counts from the start of that document in the window.  The last
token of a document has no successor in it, so it is not scored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from corpus import Corpus, TokenWindows, data_error
from torch import Tensor

TokenDtype = Literal["uint16", "uint32"]
PARTS = ("train.bin", "val.bin")
HASH_BYTES = 16 * 2**20
BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels")
IGNORED = -100
"""a label that is not scored"""


def write_tokens(
    path: str | Path, tokens: npt.ArrayLike, vocabulary: int, *, text_bytes: int | None = None
) -> None:
    """Write ids below `vocabulary` as a token file, in the narrowest dtype. The file appears when it is complete.

    `text_bytes`: length of the text that the ids encode, from which losses per byte follow."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens: shape {ids.shape}, {ids.dtype}; legal: one dim of integers")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary <= 1 << 32:
        raise ValueError(f"tokens: {ids.min()} to {ids.max()}; legal: 0 to {vocabulary - 1} (the vocabulary)")
    dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
    target, part = Path(path), Path(f"{path}.part")
    ids.astype(f"<{np.dtype(dtype).str[1:]}").tofile(part)
    sidecar = {"dtype": dtype, "count": int(ids.size), "vocabulary": vocabulary}
    sidecar |= {} if text_bytes is None else {"text_bytes": text_bytes}
    _sidecar(target).write_text(json.dumps(sidecar))
    os.replace(part, target)


def read_tokens(path: str | Path, dtype: TokenDtype | None = None) -> npt.NDArray[Any]:
    """The ids of a token file, mapped. `dtype`: as its sidecar says, else uint16. Raises ConfigError if it is none."""
    target, stated = Path(path), dict[str, Any]()
    try:
        size = target.stat().st_size
        if _sidecar(target).exists():
            stated = json.loads(_sidecar(target).read_text())
    except (OSError, ValueError) as error:
        raise data_error(str(path), f"is no token file: {error}", "raw ids") from error
    kind = dtype or stated.get("dtype", "uint16")
    if kind not in ("uint16", "uint32") or stated.get("dtype", kind) != kind:
        rule = f"dtype {kind!r}, stated {stated.get('dtype')!r}"
        raise data_error(str(path), rule, "'uint16', 'uint32', as stated")
    width = np.dtype(kind).itemsize
    if size == 0 or size % width or stated.get("count", size // width) != size // width:
        raise data_error(str(path), f"{size} bytes", f"{stated.get('count', 'some')} ids of {width} bytes")
    return np.memmap(target, dtype=f"<u{width}", mode="r")


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def is_token_folder(path: str | Path | None) -> bool:
    """Whether `path` holds train.bin and val.bin, the form that nanoGPT's data has."""
    return path is not None and all((Path(path) / name).is_file() for name in PARTS)


def read_token_corpus(folder: str | Path) -> Corpus:
    """The corpus of a folder with train.bin and val.bin, mapped. Both are read once, for their hash.

    Vocabulary and length of the text come from their sidecars. Raises ConfigError if one is no token file.
    """
    paths = [Path(folder) / name for name in PARTS]
    train, held_out = (read_tokens(path) for path in paths)
    stated = [json.loads(_sidecar(p).read_text()) if _sidecar(p).exists() else {} for p in paths]
    known = [row["vocabulary"] for row in stated if "vocabulary" in row]
    sha256 = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                sha256.update(block)
    return Corpus(
        str(folder), train, held_out, sha256.hexdigest(), len(paths), "tokens",
        vocabulary=max(known) if len(known) == len(paths) else None,
        bytes_per_token=stated[1].get("text_bytes", len(held_out)) / len(held_out),
    )  # fmt: skip


class PackedDocuments:
    """Windows of `sequence` tokens over documents that lie end to end, each ended by the id `end`.

    Item i is a dict of [T] int64: input_ids, labels, attention_mask, position_ids.
    """

    def __init__(self, tokens: npt.NDArray[Any], sequence: int, end: int, name: str = "tokens") -> None:
        self._windows, self.end = TokenWindows(tokens, sequence, name), end

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self._windows[index]
        is_last = inputs == self.end
        number = is_last.cumsum(0) - is_last.long() + 1  # the end belongs to the document that it ends
        place = torch.arange(len(inputs))
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), is_last[:-1]])
        begin = torch.where(is_first, place, 0).cummax(0).values
        return {
            "input_ids": inputs,
            "labels": labels.masked_fill(is_last, IGNORED),
            "attention_mask": number,
            "position_ids": place - begin,
        }


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows of a Hugging Face dataset: each known key as int64 [B, T]. Rows must be of one length.

    Without labels, they are the inputs one token on, and the last is not scored.
    """
    keys = [key for key in BATCH_KEYS if key in rows[0]]
    lengths = {len(row["input_ids"]) for row in rows}
    if len(lengths) > 1:
        raise ValueError(f"rows: lengths {sorted(lengths)}; legal: one length (pack them, or pad them)")
    batch = {key: torch.stack([torch.as_tensor(row[key], dtype=torch.int64) for row in rows]) for key in keys}
    if "labels" not in batch:
        ignored = torch.full_like(batch["input_ids"][:, :1], IGNORED)
        batch["labels"] = torch.cat([batch["input_ids"][:, 1:], ignored], dim=1)
    return batch


def train_bpe(texts: Iterable[str], vocabulary: int, end: str = "<|end|>") -> Any:
    """A byte-level BPE tokenizer of these texts, made here (`tokenizers.Tokenizer`); id 0 is `end`.

    `.encode(text).ids`, `.decode(ids)`, `.save(path)`. Raises ValueError if `tokenizers` is not installed.
    """
    if vocabulary < 257:
        raise ValueError(f"vocabulary: {vocabulary}; legal: 257 or more, the bytes and the end")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(f"tokenizer: {error}; install it with pip install 'colossal_lite[tok]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
