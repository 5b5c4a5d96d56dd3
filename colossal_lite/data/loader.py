"""Describes a loader: its settings, the rank it loads for, and how its batches are handed out.

Note: `dataloader` makes one.  What reads samples is in map_loader.py and stream_loader.py.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import default_collate

from colossal_lite.data.batch_read import BatchRead
from colossal_lite.data.unshifted_labels import shift_labels
from colossal_lite.memory.transfers import sent

Collate = Callable[[list[Any]], Any]
LabelForm = Literal["shifted", "unshifted"]


# -------------------------------------------------------------------------------------------------------- cut


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


def cut_batch(batch: Any, parts: int, part: int) -> Any:
    """Piece `part` of a batch: of each tensor of a tuple, list or mapping along its first dimension. A tuple or list
    may stand in the place of a tensor.

    Raises ValueError for anything else, and for tensors of different lengths.
    """
    leaves: list[Any] = []
    for each in () if not isinstance(batch, Mapping | tuple | list) else _values(batch):
        leaves += each if isinstance(each, tuple | list) and each else [each]
    sizes = {len(x) for x in leaves if isinstance(x, Tensor) and x.dim()}
    if len(sizes) != 1 or not all(isinstance(x, Tensor) and x.dim() for x in leaves):
        raise ValueError(
            f"local_batch: {type(batch).__name__}; legal: the number of samples of a global batch; or a tuple, list or "
            f"mapping of tensors with the same number of samples first"
        )
    piece = slice(*cut(sizes.pop(), parts, part))
    return apply_to_tensors(tuple(batch) if type(batch) is list else batch, lambda x: x[piece])


def _values(batch: Mapping[Any, Any] | tuple[Any, ...] | list[Any]) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch


# -------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class LoaderSettings:
    """How samples become batches; the same on every rank."""

    global_batch: int
    """Samples of an optimizer step over all ranks."""
    shuffle: bool = True
    drop_last: bool = True
    workers: int = 0
    """Processes that load."""
    collate: Collate | None = None
    """Makes a batch of a list of samples; None: `stacked`."""
    labels: LabelForm = "shifted"
    """Whether labels are next tokens, or equal the inputs, as Hugging Face's collators give them, and are shifted."""
    seed: int = 0
    timeout_s: float = 600.0
    """How long workers are waited for; then a RuntimeError of torch's."""
    worker_init: Callable[[int], object] | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: Any = None

    def __post_init__(self) -> None:
        if not _is_whole(self.global_batch, 1):
            raise ValueError(
                f"global_batch: {self.global_batch!r}; legal: 1 or more samples per optimizer step, a whole number"
            )
        if not _is_whole(self.workers, 0):
            raise ValueError(f"workers: {self.workers!r}; legal: 0 or more, a whole number")
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: {getattr(self, name)!r}; legal: True or False")
        if self.collate is not None and not callable(self.collate):
            raise ValueError(
                f"collate: {self.collate!r}; legal: a callable that makes a batch of a list of samples, or None"
            )
        if self.labels not in get_args(LabelForm):
            raise ValueError(f"labels: {self.labels!r}; legal: {', '.join(map(repr, get_args(LabelForm)))}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Place:
    """Which data coordinate loads: part `part` of `parts` of each batch, for a device."""

    parts: int = 1
    part: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    tells: bool = True
    compares: bool = False
    """Whether other ranks read too, so that reads are compared."""

    def __post_init__(self) -> None:
        cut(0, self.parts, self.part)


# ----------------------------------------------------------------------------------------------------- loader


class Loader(ABC):
    """Batches of one data coordinate; `for batch in loader` ends with the epoch; the next goes on from there.

    `loader.samples` counts the samples of all ranks that have been handed out. Give it as `start` to go on
    from there, with any number of ranks and of workers. `loader.take(k)` yields k batches across
    as many epochs as it takes. `len(loader)` is the number of batches left in the epoch.
    """

    num_samples: int | None = None
    """Of the dataset; None if it can only be iterated."""
    fields: tuple[str, ...] | None = None
    """Of the samples of a stream, those by which ranks compare them; None: all."""

    def __init__(self, dataset: Any, settings: LoaderSettings, place: Place, start: int) -> None:
        """Raises ValueError for a negative start."""
        if not _is_whole(start, 0):
            raise ValueError(f"start: {start!r}; legal: 0 or more samples, a whole number")
        self.dataset, self.settings, self.place, self.samples = dataset, settings, place, start

    @abstractmethod
    def __len__(self) -> int: ...

    def soon(self) -> list[int]:
        """Indices of a few samples of the next batch, for all ranks to compare; none of a stream."""
        return []

    def batch_sizes(self, batches: int | None) -> set[int]:
        """Sizes of the next `batches` global batches (None: to the end of the epoch); none of a stream."""
        return set()

    @abstractmethod
    def _batches(self) -> Iterator[tuple[int, Any, BatchRead | None]]:
        """(samples when it is handed out, batch, what ranks compare) to the end of the epoch; at least one."""

    def __iter__(self) -> Iterator[Any]:
        for samples, batch, read in self._batches():
            self.samples = samples
            given = shift_labels(batch) if self.settings.labels == "unshifted" else batch
            given = apply_to_tensors(given, lambda x: sent(x, self.place.device))
            yield given if read is None else apply_to_tensors(given, read.carried_by)

    def take(self, num_batches: int) -> Iterator[Any]:
        """The next `num_batches` batches, over as many epochs as that takes. ValueError for a negative number."""
        if not _is_whole(num_batches, 0):
            raise ValueError(f"take: {num_batches!r}; legal: 0 or more batches, a whole number")
        epochs = itertools.chain.from_iterable(iter(self) for _ in itertools.count())
        return itertools.islice(epochs, num_batches)


def stacked(rows: list[Any]) -> Any:
    """torch's default batch of samples, in which lists of numbers, as Hugging Face's datasets give them, are tensors.

    Raises ValueError for samples of different shapes, and for those that torch makes no tensors of."""

    def as_tensors(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        return {key: torch.tensor(x) if isinstance(x, list) and x else x for key, x in row.items()}

    try:
        return default_collate([as_tensors(row) for row in rows])
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        what = str(error).splitlines()[0]
        what = f"some have no key {what}" if isinstance(error, KeyError) else what
        raise ValueError(
            f"dataset: its samples make no batch: {what}; legal: samples of one shape, or "
            f"collate=, such as a collator of transformers, which pads"
        ) from error


def collated(collate: Collate | None, rows: list[Any], form: Any = None) -> Any:
    """The batch of `rows`; of none, an empty one in the form of that sample."""
    make = collate or stacked
    return make(rows) if rows else apply_to_tensors(make([form]), lambda x: x[:0])


def apply_to_tensors(batch: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`batch` with `fn` applied to every tensor in its tuples, lists and mappings (which become dicts)."""
    match batch:
        case Tensor():
            return fn(batch)
        case Mapping():
            return {key: apply_to_tensors(value, fn) for key, value in batch.items()}
        case list() | tuple():
            values = [apply_to_tensors(value, fn) for value in batch]
            is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
            return type(batch)(*values) if is_named else values if isinstance(batch, list) else tuple(values)
    return batch
