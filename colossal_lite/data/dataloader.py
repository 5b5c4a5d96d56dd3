"""Makes the loader of one data coordinate from a dataset, or from a torch DataLoader.

Note: which loader.  A dataset with `len(d)` and `d[i]` gets a `MapLoader`: shuffled by `config.seed`, resumed at once.
One that can only be iterated gets a `StreamLoader`: in its own order, resumed by skipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from colossal_lite.data.loader import Collate, LabelForm, Loader, LoaderSettings, Place
from colossal_lite.data.map_loader import MapDataset, MapLoader
from colossal_lite.data.stream_loader import StreamLoader
from colossal_lite.data.torch_dataloader import settings_of


def dataloader(
    dataset: MapDataset | Iterable[Any] | DataLoader[Any], *, place: Place, start: int = 0,
    global_batch: int | None = None, shuffle: bool | None = None, drop_last: bool | None = None,
    workers: int | None = None, collate: Collate | None = None, labels: LabelForm = "shifted", seed: int = 0,
    timeout_s: float = 600.0,
) -> Loader:  # fmt: skip
    """The loader of a data coordinate over a dataset. Arguments not given here are taken from a torch DataLoader.

    `global_batch`: samples per optimizer step over all coordinates.  `start`: samples seen so far, which
    `Loader.samples` was.  `shuffle` None: if the dataset can be.  `drop_last` None: True, or as the DataLoader has it.
    `collate` makes a batch of a list of samples (None: stacks them).  `labels="unshifted"`: they equal the inputs, as
    from Hugging Face's collators, and are shifted here.  Raises ValueError with the argument, its value and the legal
    values.
    """
    given = dict(
        global_batch=global_batch, shuffle=shuffle, drop_last=drop_last, workers=workers, collate=collate
    )
    found = settings_of(dataset) if isinstance(dataset, DataLoader) else {}
    found |= {name: _plain(value) for name, value in given.items() if value is not None}
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    if "global_batch" not in found:
        raise ValueError("global_batch: none given; legal: the samples of an optimizer step over all ranks")
    is_stream = is_iterable_only(samples)
    if found.get("shuffle") is None:
        found["shuffle"] = not is_stream
    if found.get("timeout_s") is None:
        found["timeout_s"] = timeout_s
    if not found.get("workers"):
        found |= dict(prefetch_factor=None, persistent_workers=False, multiprocessing_context=None)
    settings = LoaderSettings(**found, labels=labels, seed=seed)
    return (StreamLoader if is_stream else MapLoader)(samples, settings, place, _plain(start))


def _plain(value: Any) -> Any:
    """A number of numpy as Python has it, which JSON knows."""
    return value.item() if isinstance(value, np.generic) else value


def is_iterable_only(dataset: Any) -> bool:
    """Whether a dataset has no length or no indices. Raises ValueError for what can be iterated but once, or not."""
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"dataset: {type(dataset).__name__} of {', '.join(map(repr, list(dataset)[:8]))}; legal: one of them, such "
            f"as dataset[{next(iter(dataset), '')!r}]"
        )
    is_map = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if is_map and not isinstance(dataset, IterableDataset):
        return False
    if not isinstance(dataset, Iterable):
        raise ValueError(
            f"dataset: {type(dataset).__name__}; legal: a dataset with __len__ and __getitem__, one with __iter__, or "
            f"a torch DataLoader"
        )
    if iter(dataset) is dataset:
        raise ValueError(
            f"dataset: {type(dataset).__name__} can be iterated but once, so that no run could go on; legal: a dataset "
            f"with __len__ and __getitem__, such as list(dataset), or an IterableDataset"
        )
    return True
