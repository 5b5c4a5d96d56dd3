"""Loads the batches of one data coordinate from a dataset with a length, from any position of a run.

Note: position and cut.
The order of a run is one endless stream of samples.  Epoch e is the keyed permutation (seed, e) of the dataset.  Epochs
follow one another, and a batch is the next `global_batch` samples of the stream.  So the state of a loader is one
integer, the number of samples seen.  No rank saves anything of its own.  Each data coordinate takes a contiguous piece
of every global batch, by the rule of `tensor_split`.  The stream does not depend on the number of pieces.  Joined in
order of coordinate they are the same batch at any world size.  A dataset that can only be iterated has a loader of its
own (stream_loader.py).
Cost: O(1) memory and about 0.1 ms for the permutation of a batch of usual size.  A rank fetches its own samples only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from colossal_lite.data.batch_read import BatchRead
from colossal_lite.data.loader import Collate, Loader, LoaderSettings, Place, collated, cut
from colossal_lite.data.sample_order import Ids, Order
from colossal_lite.data.worker_signals import begin_worker

COMPARED = 6
"""Samples of the next batch that ranks compare. No others: one that cannot be read must not fail before its step."""


class MapDataset(Protocol):
    """A dataset with a length, and a sample for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapLoader(Loader):
    """Batches of a dataset with a length, in the order of `Order`."""

    def __init__(self, dataset: MapDataset, settings: LoaderSettings, place: Place, start: int) -> None:
        super().__init__(dataset, settings, place, start)
        self.num_samples = len(dataset)
        self.order = Order(
            self.num_samples, settings.global_batch, settings.seed, settings.shuffle, settings.drop_last
        )
        self._fetch = _Fetch(dataset, settings.collate)
        self._pieces = _Pieces(self.order, place)
        self._through_workers: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return len(self.order.starts(self.samples))

    def soon(self) -> list[int]:
        start = self.order.starts(self.samples)[0]
        ids = self.order.ids(start, self.order.stop(start))
        return [int(i) for i in ids[:: max(1, len(ids) // COMPARED)][:COMPARED]]

    def batch_sizes(self, batches: int | None) -> set[int]:
        found, position = set[int](), self.samples
        for _ in range(2 if batches else 1):  # all later epochs are as the second
            starts = self.order.starts(position)[:batches]
            found |= {self.order.stop(start) - start for start in (*starts[:1], *starts[-1:])}
            batches = batches and batches - len(starts)
            position = self.order.stop(starts[-1]) if starts else position
        return found

    def _batches(self) -> Iterator[tuple[int, Any, BatchRead | None]]:
        if len(self.dataset) != self.num_samples:
            raise ValueError(
                f"dataset: {len(self.dataset)} samples now, and {self.num_samples} when its loader was made; legal: a "
                f"dataset that does not change, or a new loader"
            )
        starts = self._pieces.starts = self.order.starts(self.samples)
        batches = iter(self._workers) if self.settings.workers else map(self._fetch.__getitem__, self._pieces)
        for start, batch in zip(starts, batches, strict=True):
            yield self.order.stop(start), batch, BatchRead(start, (), 0) if self.place.compares else None

    @property
    def _workers(self) -> DataLoader[Any]:
        settings = self.settings
        if self._through_workers is None or not settings.persistent_workers:
            # A generator of its own, because torch's loader would draw its seed from the process's global one.
            self._through_workers = DataLoader(
                self._fetch,  # type: ignore[arg-type]
                sampler=self._pieces,
                batch_size=None,
                num_workers=settings.workers,
                timeout=settings.timeout_s,
                pin_memory=self.place.device.type == "cuda",
                worker_init_fn=partial(begin_worker, settings.worker_init),
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=settings.persistent_workers,
                multiprocessing_context=settings.multiprocessing_context,
                generator=torch.Generator().manual_seed(settings.seed % (1 << 63)),
            )
        return self._through_workers


@dataclass
class _Pieces:
    """The pieces of the epoch that a loader is in; read anew where workers live on. It knows no loader: workers end
    with theirs, and would not in a cycle."""

    order: Order
    place: Place
    starts: range = range(0)

    def __iter__(self) -> Iterator[Ids]:
        return map(self._piece, self.starts)

    def _piece(self, start: int) -> Ids:
        """Dataset indices of this coordinate's piece of the batch that begins at `start`."""
        first, last = cut(self.order.stop(start) - start, self.place.parts, self.place.part)
        return self.order.ids(start + first, start + last)


@dataclass(frozen=True)
class _Fetch:
    """Dataset indices -> collated batch; a dataset whose samples are batches, so that workers can hold it."""

    dataset: MapDataset
    collate: Collate | None

    def __getitem__(self, ids: Ids) -> Any:
        indices = [int(i) for i in ids]
        try:
            return collated(self.collate, self._rows(indices), *([] if indices else self._rows([0])))
        except (IndexError, StopIteration) as error:
            raise ValueError(
                f"dataset: {type(error).__name__} for a sample of {indices}: {error}; legal: a sample for every index "
                f"below len(dataset) = {len(self.dataset)}"
            ) from error

    def _rows(self, indices: list[int]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)  # torch's name for several samples in one read
        return list(at_once(indices)) if at_once and indices else [self.dataset[i] for i in indices]
