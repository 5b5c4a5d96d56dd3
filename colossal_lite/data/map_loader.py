"""Loads the batches of one data coordinate from a dataset with a length, from any position of a run.

Note: position and cut.
The order of a run is one endless stream of samples.  Epoch e is the keyed permutation (seed, e) of the dataset.  Epochs
follow one another, and a batch is the next `global_batch` samples of the stream.  So the state of a loader is one
integer, the number of samples seen.  No rank saves anything of its own.  Each data coordinate takes a contiguous piece
of every global batch, by the rule of `tensor_split`.  The stream does not depend on the number of pieces.  Joined in
order of coordinate they are the same batch at any world size.  A dataset that can only be iterated has a loader of its
own (stream_loader.py).
Cost: O(1) memory and about 0.1 ms for the permutation of a batch of usual size.  A rank fetches its own samples only.

Note: samples that draw.
A random crop reads the global generators.  They are seeded for each sample, by the seed and its position in the stream.
So it is the same on any mesh, with any workers and in a resumed run.  Each epoch has another.  A collator draws for a
rank's part: its numbers follow from the position of that part.  Seeding takes 36 us a sample, so it begins with the
first piece that draws, which is read again.
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
from colossal_lite.numerics.generators import drawn_between, generators_kept, seed_from, states

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
        self._fetch = _Fetch(dataset, settings.collate, settings.seed)
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


_Piece = tuple[int, Ids]
"""Position of its first sample in the stream, and dataset indices."""


@dataclass
class _Pieces:
    """The pieces of the epoch that a loader is in; read anew where workers live on. It knows no loader: workers end
    with theirs, and would not in a cycle."""

    order: Order
    place: Place
    starts: range = range(0)

    def __iter__(self) -> Iterator[_Piece]:
        return map(self._piece, self.starts)

    def _piece(self, start: int) -> _Piece:
        """This coordinate's piece of the batch that begins at `start`."""
        first, last = cut(self.order.stop(start) - start, self.place.parts, self.place.part)
        return start + first, self.order.ids(start + first, start + last)


@dataclass
class _Fetch:
    """Piece -> collated batch; a dataset whose samples are batches, so that workers can hold it."""

    dataset: MapDataset
    collate: Collate | None
    seed: int
    draws: bool = False
    """Whether a sample has drawn so far, in this process."""

    def __getitem__(self, piece: _Piece) -> Any:
        position, indices = piece[0], [int(i) for i in piece[1]]
        try:
            with generators_kept():
                rows = self._rows(position, indices)
                form = [] if rows else self._rows(position, [0])
                seed_from("collate", self.seed, position)
                return collated(self.collate, rows, *form)
        except (IndexError, StopIteration) as error:
            raise ValueError(
                f"dataset: {type(error).__name__} for a sample of {indices}: {error}; legal: a sample for every index "
                f"below len(dataset) = {len(self.dataset)}"
            ) from error

    def _rows(self, position: int, indices: list[int]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)  # torch's name for several samples in one read
        if not self.draws:
            before = states()
            rows = list(at_once(indices)) if at_once and indices else [self.dataset[i] for i in indices]
            self.draws = bool(drawn_between(before, states()))
            if not self.draws:
                return rows
        return [self._row(position + k, i) for k, i in enumerate(indices)]

    def _row(self, position: int, index: int) -> Any:
        seed_from("sample", self.seed, position)
        return self.dataset[index]
