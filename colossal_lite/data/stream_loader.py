"""Loads the batches of one data coordinate from a dataset that can only be iterated, and resumes by skipping.

Note: position in a stream.
Every rank reads the whole stream, and collates its own piece of each global batch.  An epoch is one pass.  The position
is the number of samples handed out, as of any loader.  To go on from there the samples before it are read and dropped.
Whole passes are not, once the length of one is known.  So every pass must have the same number of samples.  A stream
must give the same samples again: `set_epoch` is called where a dataset has it.

Note: a stream that draws.
In each pass it has global generators of its own.  The seed of the run and the number of the pass seed them.  So a
random crop is the same on every rank and in a resumed run.  A collator draws for a rank's part, by the position of the
part.

Note: what ranks compare.
Each rank notes what it reads of a global batch.  The next one is read ahead, and its size is noted too.  The step
compares the notes (batch_read.py).  So ranks also know together that a pass ends.  Cost: a checksum of each sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from colossal_lite.data.batch_read import BatchRead
from colossal_lite.data.checksums import checksum
from colossal_lite.data.loader import Loader, LoaderSettings, Place, collated, cut
from colossal_lite.data.worker_signals import begin_worker
from colossal_lite.numerics.generators import OwnDraws, generators_kept, seed_from
from colossal_lite.observe.printed_lines import warn

Given = tuple[int, Any, BatchRead | None]


@dataclass(frozen=True)
class _Pass(IterableDataset[Given]):
    """For each global batch of a pass its samples, this coordinate's piece, and what was read. At last (samples of the
    pass, None, None)."""

    dataset: Any
    settings: LoaderSettings
    place: Place
    skipped: int
    begun: int
    """Samples of the run before this pass."""
    epoch: int
    fields: tuple[str, ...] | None

    def __iter__(self) -> Iterator[Given]:
        settings, draws = self.settings, OwnDraws("pass", self.settings.seed, self.epoch)
        with draws.turn():
            source = iter(self.dataset)
            total = sum(1 for _ in itertools.islice(source, self.skipped))

        def read_rows() -> list[Any]:
            with draws.turn():
                return list(itertools.islice(source, settings.global_batch))

        needed = settings.global_batch if settings.drop_last else 1
        rows = read_rows()
        while (count := len(rows)) >= needed:
            batch, read = self._piece(rows, total), None
            ahead, failed = None, None
            if self.place.compares:
                marks = tuple(checksum(row, self.fields) for row in rows)
                try:
                    rows = ahead = read_rows()
                except Exception as error:  # raised when that batch is asked for
                    failed = error
                read = BatchRead(
                    self.begun + total, marks, settings.global_batch if ahead is None else len(ahead)
                )
            total += count
            yield count, batch, read
            if failed is not None:
                raise failed
            if ahead is None:
                rows = read_rows()
        yield total + count, None, None

    def _piece(self, rows: list[Any], total: int) -> Any:
        """This coordinate's piece of the batch `rows`, which begins after `total` samples of the pass."""
        first, last = cut(len(rows), self.place.parts, self.place.part)
        with generators_kept():
            seed_from("collate", self.settings.seed, self.begun + total + first)
            return collated(self.settings.collate, rows[first:last], rows[0])


class StreamLoader(Loader):
    """Batches of an iterable dataset; `Loader` says how it is used."""

    def __init__(self, dataset: Any, settings: LoaderSettings, place: Place, start: int) -> None:
        """Raises ValueError for settings that a stream cannot have."""
        super().__init__(dataset, settings, place, start)
        if settings.shuffle:
            raise ValueError(
                f"shuffle: True, and {type(dataset).__name__} can only be iterated; legal: False, and a dataset that "
                f"shuffles itself with a seed, such as dataset.shuffle(seed=...) of Hugging Face"
            )
        if settings.workers > 1 or settings.persistent_workers:
            raise ValueError(
                f"workers: {settings.workers}, persistent_workers: {settings.persistent_workers} of "
                f"{type(dataset).__name__}, which can only be iterated, and by several in no order; legal: 0 or 1 "
                f"worker, for one pass"
            )
        if settings.drop_last and start % settings.global_batch:
            raise ValueError(
                f"start: {start} of {type(dataset).__name__}, which goes on in whole batches; legal: a multiple of "
                f"global_batch={settings.global_batch}, or drop_last=False"
            )
        self._epoch, self._begun, self._length = 0, 0, 0
        self._live: Iterator[Given] | None = None
        self._position = start

    def __len__(self) -> int:
        raise TypeError(f"loader: {type(self.dataset).__name__} has no length; legal: loader.take(batches)")

    def _batches(self) -> Iterator[Given]:
        has_given = False
        while True:
            if self._live is None or self._position != self.samples:
                self._live = self._open()
            count, batch, read = next(self._live)
            if batch is not None:
                self._position = self.samples + count
                has_given = True
                yield self._position, batch, read
                continue
            self._end(count)
            if has_given:
                return

    def _open(self) -> Iterator[Given]:
        """A pass from the position on."""
        if self._position != self.samples:
            self._epoch, self._begun, self._position = 0, 0, self.samples
        if self._length:
            passes, _ = divmod(self.samples - self._begun, size := self._samples_of(self._length))
            self._epoch, self._begun = self._epoch + passes, self._begun + passes * size
        skipped = self.samples - self._begun
        if skipped and self.place.tells:
            warn(
                f"dataset: {type(self.dataset).__name__} can only be iterated, so {skipped} samples of pass "
                f"{self._epoch} are read and skipped, to go on after {self.samples}"
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        one = _Pass(self.dataset, self.settings, self.place, skipped, self._begun, self._epoch, self.fields)
        return iter(one) if self.settings.workers == 0 else iter(self._through_worker(one))

    def _through_worker(self, one: _Pass) -> DataLoader[Any]:
        settings = self.settings
        return DataLoader(
            one, batch_size=None, num_workers=1, timeout=settings.timeout_s,
            worker_init_fn=partial(begin_worker, settings.worker_init), prefetch_factor=settings.prefetch_factor,
            multiprocessing_context=settings.multiprocessing_context, generator=torch.Generator().manual_seed(0),
            pin_memory=self.place.device.type == "cuda",
        )  # fmt: skip

    def _samples_of(self, length: int) -> int:
        return length - length % self.settings.global_batch * self.settings.drop_last

    def _end(self, length: int) -> None:
        """Raises ValueError for a pass without a batch, and for one of another length than the first."""
        name, needed = (
            type(self.dataset).__name__,
            self.settings.global_batch if self.settings.drop_last else 1,
        )
        if length < needed:
            raise ValueError(
                f"dataset: {length} samples found, {needed} needed for one batch; legal: more data, a smaller "
                f"global_batch, or drop_last=False"
            )
        if self._length not in (0, length):
            raise ValueError(
                f"dataset: pass {self._epoch} of {name} ended after {length} samples, and an earlier one after "
                f"{self._length}. A run goes on from a number of samples; legal: the same number in each pass"
            )
        self._length, self._live = length, None
        self._epoch, self._begun = self._epoch + 1, self._begun + self._samples_of(length)
