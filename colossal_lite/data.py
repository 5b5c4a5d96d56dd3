"""Text, windows, order and batches.

Note: data
    *Position.* The order of a run is one endless stream of samples: epoch e is the keyed permutation (seed,
    e) of the dataset, epochs follow one another, and a batch is the next `global_batch` samples of the
    stream. So the whole state of a loader is one integer, the samples seen; no rank has anything of its own
    to save.
    *Cut.* Each data coordinate takes a contiguous piece of every global batch by the rule of `tensor_split`.
    The stream does not know the number of pieces: joined in order of coordinate they are the same batch at
    any world size.
    *Cost.* The permutation takes O(1) memory and about 0.1 ms for a batch of any usual size; a rank fetches
    the samples of its own piece and no others.
    *Corpus.* The default text is the source of Python's own standard library, so nothing is downloaded. Its
    hash is kept with the run, since patch releases of Python differ.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import lzma
import math
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from colossal_lite.comm import AxisComm
from colossal_lite.memory.mover import to_device
from colossal_lite.problems import ConfigError, Problem

Batch = tuple[Tensor, Tensor] | dict[str, Tensor]
Ids = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]

BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels")
IGNORED = -100


class MapDataset(Protocol):
    """What the loader reads: a length, and a sample for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


# ------------------------------------------------------------------------------------------------------ order


def cut(n: int, parts: int, part: int) -> tuple[int, int]:
    """[start, stop) of piece `part` of range(n), cut as `torch.tensor_split` does: the first ones are longer.

    >>> [cut(5, 3, part) for part in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    if n < 0 or parts < 1 or not 0 <= part < parts:
        raise ValueError(f"cut: part {part} of {parts} of {n} samples; legal: n >= 0 and 0 <= part < parts")
    each, longer = divmod(n, parts)
    start = part * each + min(part, longer)
    return start, start + each + (part < longer)


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of range(n): `Permutation(n, seed, epoch)(indices)`; state and memory are O(1).

    A Feistel network over Z_a x Z_b with addition modulo a and b, where a * b is the least such product near
    n, and cycle walking for the few values that fall outside range(n) (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 5). Not meant to be secret, only to be even.
    """

    n: int
    seed: int
    epoch: int = 0

    NUM_ROUNDS = 8

    def __post_init__(self) -> None:
        if not 1 <= self.n < 1 << 62:
            raise ValueError(f"n: {self.n} samples cannot be permuted; legal: 1 to 2**62 - 1")

    @cached_property
    def _keys(self) -> npt.NDArray[np.uint64]:
        name = f"colossal_lite.data.Permutation/{self.n}/{self.seed}/{self.epoch}"
        return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8 * self.NUM_ROUNDS).digest(), "<u8")

    @cached_property
    def _sides(self) -> tuple[np.uint64, np.uint64]:
        a = math.isqrt(self.n)
        return np.uint64(a), np.uint64(-(-self.n // a))

    def __call__(self, indices: npt.ArrayLike) -> Ids:
        """The values at `indices` (integers in [0, n), any shape), int64."""
        given = np.asarray(indices, dtype=np.int64)
        if given.size and not 0 <= given.min() <= given.max() < self.n:
            raise ValueError(f"indices: {given.min()} to {given.max()}; legal: 0 to n - 1 = {self.n - 1}")
        values = self._network(given.reshape(-1).astype(np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64).reshape(given.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        a, b = self._sides
        left, right = x % a, x // a
        for key_left, key_right in self._keys.reshape(-1, 2):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        return right * a + left


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014, figure 16); arrays wrap silently."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Which samples make up which batch, for the whole run; positions count samples along the stream."""

    num_samples: int
    global_batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("dataset: 0 samples found, at least 1 needed")
        if self.global_batch < 1:
            raise ValueError(
                f"global_batch: {self.global_batch}; legal: 1 or more samples per optimizer step"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ValueError(
                f"dataset: {self.num_samples} samples found, {self.global_batch} needed for one batch; "
                f"legal: more data, global_batch <= {self.num_samples}, or drop_last=False"
            )

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch yields: all, less the ragged last batch where that is dropped."""
        return self.num_samples - self.num_samples % self.global_batch * self.drop_last

    def starts(self, position: int) -> range:
        """Where the batches from stream position `position` to the end of its epoch begin; never empty.

        A rest too short for a batch, which only a position off the multiples of `global_batch` can leave, is
        passed over.
        """
        size = self.epoch_samples
        end = (position // size + 1) * size
        if self.drop_last and end - position < self.global_batch:
            position, end = end, end + size
        return range(position, end - (self.global_batch - 1) * self.drop_last, self.global_batch)

    def stop(self, start: int) -> int:
        """Where the batch that begins at `start` ends: after `global_batch` samples, or with the epoch."""
        size = self.epoch_samples
        return min(start + self.global_batch, (start // size + 1) * size)

    def ids(self, start: int, stop: int) -> Ids:
        """Dataset indices of stream positions [start, stop), which lie in one epoch."""
        epoch, first = divmod(start, self.epoch_samples)
        offsets = np.arange(first, first + stop - start, dtype=np.int64)
        return Permutation(self.num_samples, self.seed, epoch)(offsets) if self.shuffle else offsets


# ----------------------------------------------------------------------------------------------------- loader


class Loader:
    """Batches of one data coordinate; `for batch in loader` ends with the epoch; the next goes on from there.

    `loader.samples` counts the samples of all ranks that have been handed out: give it as `start` to go on
    from there, with any number of ranks and any number of workers. `loader.take(k)` yields k batches across
    as many epochs as it takes. `len(loader)` is the number of batches left in the epoch.
    """

    def __init__(
        self, order: Order, fetch: _Fetch, *,
        parts: int, part: int, start: int, workers: int, device: Any, timeout_s: float,
    ):  # fmt: skip
        self.order, self.samples, self.device = order, start, torch.device(device)
        self._fetch, self._parts, self._part, self._workers = fetch, parts, part, workers
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.order.starts(self.samples))

    def __iter__(self) -> Iterator[Any]:
        starts = self.order.starts(self.samples)
        for start, batch in zip(starts, self._fetched(starts), strict=True):
            self.samples = self.order.stop(start)
            yield _tensors(batch, lambda x: to_device(x, self.device))

    def take(self, num_batches: int) -> Iterator[Any]:
        """The next `num_batches` batches, over as many epochs as that takes."""
        epochs = itertools.chain.from_iterable(iter(self) for _ in itertools.count())
        return itertools.islice(epochs, num_batches)

    def _piece(self, start: int) -> Ids:
        """Dataset indices of this coordinate's piece of the batch that begins at `start`."""
        first, last = cut(self.order.stop(start) - start, self._parts, self._part)
        return self.order.ids(start + first, start + last)

    def _fetched(self, starts: range) -> Iterable[Any]:
        pieces = map(self._piece, starts)
        if self._workers == 0:
            return map(self._fetch.__getitem__, pieces)
        # A generator of its own, because torch's loader would draw its seed from the process's global one.
        return DataLoader(
            self._fetch,  # type: ignore[arg-type]
            sampler=pieces,
            batch_size=None,
            num_workers=self._workers,
            timeout=self._timeout_s,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(self.order.seed % (1 << 63)),
        )


@dataclass(frozen=True)
class _Fetch:
    """Dataset indices -> collated batch; a dataset whose samples are batches, so that workers can hold it."""

    dataset: MapDataset
    collate: Collate

    def __getitem__(self, ids: Ids) -> Any:
        if len(ids):
            return self.collate([self.dataset[int(i)] for i in ids])
        return _tensors(self.collate([self.dataset[0]]), lambda x: x[:0])  # sample 0 shows shapes and dtypes


def dataloader(
    dataset: MapDataset,
    *,
    num_parts: int,
    part: int,
    global_batch: int,
    start: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    workers: int = 0,
    collate: Collate | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    timeout_s: float = 600.0,
) -> Loader:
    """The loader of data coordinate `part` of `num_parts` over a map-style dataset (`len(d)`, `d[i]`).

    `global_batch` is samples per optimizer step over all coordinates; `start` is the samples seen so far (a
    multiple of `global_batch`, or whatever `Loader.samples` was). `collate` makes a batch of a list of
    samples (default: torch's); `timeout_s`: how long `workers` are waited for (then a RuntimeError of torch's).
    Raises ValueError with the argument, its value and what is legal.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    ):
        raise ValueError(
            f"dataset: {type(dataset).__name__} can only be iterated: it cannot be shuffled or resumed; "
            "legal: a dataset with __len__ and __getitem__, such as list(dataset)"
        )
    if start < 0 or workers < 0:
        raise ValueError(f"start: {start}, workers: {workers}; legal: 0 or more")
    cut(0, num_parts, part)
    order = Order(len(dataset), global_batch, seed, shuffle, drop_last)
    fetch = _Fetch(dataset, collate or default_collate)
    return Loader(
        order,
        fetch,
        parts=num_parts,
        part=part,
        start=start,
        workers=workers,
        device=device,
        timeout_s=timeout_s,
    )


def _tensors(batch: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`batch` with `fn` applied to every tensor in its tuples, lists (which become tuples) and dicts."""
    match batch:
        case Tensor():
            return fn(batch)
        case dict():
            return {key: _tensors(value, fn) for key, value in batch.items()}
        case list() | tuple():
            return tuple(_tensors(value, fn) for value in batch)
    return batch


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
            raise _data_error(self.name, rule, f"--vocabulary {self.vocabulary} or more")

    def assert_same(self, world: AxisComm) -> None:
        """Raises ConfigError, on every rank alike, where ranks have read different texts."""
        found = world.gather_json(self.sha256)
        if odd := [rank for rank, sha256 in enumerate(found) if sha256 != found[0]]:
            rule = f"ranks {odd} read another text than rank 0"
            raise _data_error(self.name, rule, "the same text, or the same Python, on every node")

    def windows(self, sequence: int, global_batch: int) -> tuple[TokenWindows, TokenWindows]:
        """(train, held-out) windows; ConfigError unless there is one global batch and one window held out."""
        need, need_held_out = global_batch * sequence + 1, sequence + 1
        if len(self.train) < need or len(self.held_out) < need_held_out:
            found = f"{len(self.train):,} {self.unit} found to train on and {len(self.held_out):,} held out"
            rule = f"{found}, {need:,} and {need_held_out:,} needed"
            legal = (
                f"a global_batch (now {global_batch}) and a sequence (now {sequence}) that fit, or more text"
            )
            raise _data_error(self.name, rule, legal)
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
            raise _data_error(name, "is not there", TEXT)
        paths = [root] if root.is_file() else _walk(root, _is_shown, _is_shown)
    try:
        texts = [path.read_bytes() for path in paths]
    except OSError as error:
        raise _data_error(name, f"cannot read {error.filename}: {error.strerror}", TEXT) from error
    if root.is_dir():
        texts = [text for text in texts if b"\0" not in text[:8192]]
    found = sum(map(len, texts))
    if found < HELD_OUT_EVERY:
        rule = f"{found} bytes found in {len(texts)} text files, {HELD_OUT_EVERY} or more needed"
        raise _data_error(name, rule, TEXT)
    sha256 = hashlib.sha256()
    for text in texts:
        sha256.update(text)
    train, held_out = (np.frombuffer(part, np.uint8) for part in _split(texts))
    return Corpus(name, train, held_out, sha256.hexdigest(), len(texts))


def _data_error(source: str, rule: str, legal: str) -> ConfigError:
    """What text there is depends on the machine alone, so all ranks of a node find the same."""
    return ConfigError([Problem("data", source, rule, legal)])


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


def yardsticks(text: npt.NDArray[np.uint8], limit_bytes: int = 1 << 20) -> Yardsticks:
    """Entropy of the bytes, and what zlib -9 and lzma make of the first `limit_bytes` (1 MiB takes 0.4 s)."""
    data = text[:limit_bytes].tobytes()
    if not data:
        raise ValueError("text: 0 bytes found, at least 1 needed")
    share = np.bincount(np.frombuffer(data, np.uint8)) / len(data)
    entropy = -float(np.sum(share[share > 0] * np.log2(share[share > 0])))
    bits = 8 / len(data)
    return Yardsticks(entropy, len(zlib.compress(data, 9)) * bits, len(lzma.compress(data)) * bits)


# ------------------------------------------------------------------------------------------------------ batch


def check_batch(batch: Any, vocabulary: int | None = None) -> None:
    """Raises ValueError, with path, value, rule and what is legal, where `batch` is no batch to train on.

    A batch is (inputs, labels), or a dict of `BATCH_KEYS` with at least input_ids and labels. Inputs are ids
    (B, T) in int64 or int32, or floating point (B, ...). Beside ids every entry is (B, T), labels are int64,
    and ids and labels lie below `vocabulary` where that is given. All that is asked of the values is asked at
    once: one wait for the device.
    """
    entries = _entries(batch)
    inputs, *_ = entries.values()
    for path, x in entries.items():
        _check_form(path, x, inputs)
    rules = [rule for path, x in entries.items() for rule in _value_rules(path, x, inputs, vocabulary)]
    broken = torch.stack([broken for broken, _ in rules]).tolist()
    if faults := [describe() for (_, describe), bad in zip(rules, broken, strict=True) if bad]:
        raise ValueError("; ".join(faults))


def _entries(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name, the inputs first."""
    if isinstance(batch, dict):
        faults = [f"unknown key {key!r}{_nearest(key)}" for key in batch if key not in BATCH_KEYS]
        faults += [f"no key {key!r}" for key in ("input_ids", "labels") if key not in batch]
        if faults:
            raise ValueError(f"batch: {', '.join(faults)}; legal: {', '.join(BATCH_KEYS)}")
        entries = {key: batch[key] for key in BATCH_KEYS if key in batch}
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        entries = {"inputs": batch[0], "labels": batch[1]}
    else:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else type(batch).__name__
        raise ValueError(f"batch: {what}; legal: (inputs, labels), or a dict of {', '.join(BATCH_KEYS)}")
    for path, x in entries.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{path}: {type(x).__name__}; legal: a torch.Tensor")
    return entries


def _nearest(key: object) -> str:
    near = difflib.get_close_matches(str(key), BATCH_KEYS, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_form(path: str, x: Tensor, inputs: Tensor) -> None:
    """Shapes and dtypes, which are known without a look at the values."""
    ids = not inputs.is_floating_point()
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        "labels": (torch.int64,) if ids else (torch.int64, *_FLOATS),
        "attention_mask": (torch.bool, torch.int64, torch.int32, *_FLOATS),
        "inputs": (torch.int64, torch.int32, *_FLOATS),
    }
    legal = dtypes.get(path, (torch.int64, torch.int32))
    if x.dtype not in legal:
        raise ValueError(f"{path}: dtype {x.dtype}; legal: {', '.join(map(str, legal))}")
    if x.ndim == 0 or (ids and inputs.ndim != 2 and x is inputs):
        rule = "(batch, tokens)" if ids else "batch first"
        raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")
    if ids and x.shape != inputs.shape or x.shape[0] != inputs.shape[0]:
        rule = f"the shape of the inputs, {tuple(inputs.shape)}" if ids else f"a batch of {inputs.shape[0]}"
        raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_Rule = tuple[Tensor, Callable[[], str]]
"""whether it is broken, as a 0-d bool on the device of the batch, and what to say if so"""


def _value_rules(path: str, x: Tensor, inputs: Tensor, vocabulary: int | None) -> Iterator[_Rule]:
    def first(bad: Tensor) -> str:
        where = tuple(bad.nonzero()[0].tolist())
        return f"{path}[{', '.join(map(str, where))}]: {x[where].item()}"

    if x.is_floating_point():
        bad = ~x.isfinite()
        yield bad.any(), lambda: f"{first(bad)}; legal: finite numbers"
        return
    if path == "attention_mask":
        return
    if vocabulary is None or path == "position_ids":
        outside, legal = x < 0, "0 or more"
    else:
        outside, legal = (x < 0) | (x >= vocabulary), f"0 to {vocabulary - 1} (the vocabulary)"
    if path == "labels":
        outside, legal = outside & (x != IGNORED), f"{legal}, or {IGNORED} for a position to be ignored"
    yield outside.any(), lambda: f"{first(outside)}; legal: {legal}"
    if path == "labels" and not inputs.is_floating_point():
        # Next tokens equal the inputs only along a run of one token, and such a run is no fault.
        counted = x != IGNORED
        unshifted = counted[:, :-1] & (inputs[:, 1:] != inputs[:, :-1])
        rule = "legal: already shifted, labels[:, t] = inputs[:, t + 1]"
        equal = (~counted | (x == inputs)).all() & unshifted.any()
        yield equal, lambda: f"labels: equal to the inputs; {rule}"
