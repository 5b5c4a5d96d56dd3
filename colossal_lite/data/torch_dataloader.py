"""Reads the settings of a torch DataLoader, so that its batches can be cut over ranks and resumed.

Note: what of it is taken.
Its dataset, collator, workers, timeout, `drop_last` and whether it shuffles; `batch_size` is the global batch.  Its
batches are not: the order of samples follows from `config.seed`. So a run can resume at a number of samples on any
mesh.  A setting with which that order would be another is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

ORDER = "the order of samples follows from config.seed"


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The fields of `LoaderSettings` that it gives. Raises ValueError naming every setting that cannot be honoured."""
    if faults := list(_faults(loader)):
        raise ValueError(f"DataLoader: {'; '.join(faults)}")
    is_stream = isinstance(loader.dataset, IterableDataset)
    workers = dict(
        worker_init=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
    )
    found = dict(
        global_batch=loader.batch_size,
        shuffle=None if is_stream else isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        workers=loader.num_workers,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        timeout_s=loader.timeout or None,
    )
    return found | (workers if loader.num_workers else {})


def _faults(loader: DataLoader[Any]) -> Iterator[str]:
    kind: Any = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        yield f"{kind.__name__} has an __iter__ of its own; legal: torch's DataLoader, or its dataset"
        return
    if loader.batch_size is None:
        what = "batch_size=None" if loader.batch_sampler is None else "batch_sampler"
        yield f"{what}: batches are cut over ranks here; legal: batch_size, the samples of a step over all ranks"
    sampler = loader.sampler
    draws_plainly = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    )
    is_known = (
        draws_plainly or type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset)
    )
    source: Any = getattr(sampler, "data_source", loader.dataset)
    if type(sampler) in (RandomSampler, SequentialSampler) and source is not loader.dataset:
        yield from _other_source(source, loader.dataset)
    if loader.batch_size is not None and not is_known:
        yield f"sampler: {type(sampler).__name__}, and {ORDER}; legal: shuffle=True or False, torch.utils.data.Subset"
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        yield f"generator: given, and {ORDER}; legal: none, and a seed in the config"
    if not getattr(loader, "in_order", True):
        yield f"in_order=False: batches would come in any order, and {ORDER}; legal: True"
    if loader.pin_memory_device:
        yield f"pin_memory_device={loader.pin_memory_device!r}: batches are pinned for the context's device; legal: ''"


def _other_source(source: Any, dataset: Any) -> Iterator[str]:
    """A fault where a sampler draws from another number of samples than the dataset has."""
    if (drawn := len(source)) != (held := len(dataset)):
        yield (
            f"sampler: of {drawn} samples, and the dataset has {held}; legal: torch.utils.data.Subset(dataset, "
            f"range({min(drawn, held)}))"
        )
