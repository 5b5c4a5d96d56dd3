"""Loads the batches of one data coordinate, from any position of a run.

Note: position and cut.
The order of a run is one endless stream of samples.  Epoch e is the keyed permutation (seed, e) of the dataset.
Epochs follow one another, and a batch is the next `global_batch` samples of the stream.  So the state of a loader is
one integer, the number of samples seen, and no rank saves anything of its own.
Each data coordinate takes a contiguous piece of every global batch, by the rule of `tensor_split`.  The stream does
not depend on the number of pieces.  Joined in order of coordinate they are the same batch at any world size.
Cost: O(1) memory and about 0.1 ms for the permutation of a batch of usual size.  A rank fetches its own samples only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from colossal_lite.data.sample_order import Ids, Order
from colossal_lite.data.worker_signals import leave_signals_to_the_parent
from colossal_lite.memory.transfers import to_device

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A dataset with a length, and a sample for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
    """Piece `part` of a batch: of each tensor of a tuple, list or mapping along its first dimension.

    Raises ValueError for anything else, and for tensors of different lengths.
    """
    entries: dict[Any, Any] = {}
    if isinstance(batch, (Mapping, tuple, list)):
        entries = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    sizes = {len(x) for x in entries.values() if isinstance(x, Tensor) and x.dim()}
    if len(sizes) != 1 or not all(isinstance(x, Tensor) and x.dim() for x in entries.values()):
        raise ValueError(
            f"local_batch: {type(batch).__name__}; legal: the number of samples of a global batch, or a tuple, list or "
            f"mapping of tensors with the same number of samples first"
        )
    piece = slice(*cut(sizes.pop(), parts, part))
    taken = {name: x[piece] for name, x in entries.items()}
    return taken if isinstance(batch, Mapping) else tuple(taken.values())


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
            worker_init_fn=leave_signals_to_the_parent,
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
