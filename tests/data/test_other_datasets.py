"""Datasets as people have them: torch DataLoaders, Hugging Face rows and collators, and what can only be iterated."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from colossal_lite.data.dataloader import dataloader
from colossal_lite.data.dataset_facts import dataset_facts, dataset_fault
from colossal_lite.data.loader import Place
from colossal_lite.data.unshifted_labels import shift_labels

ROWS = [torch.tensor([i, i + 1]) for i in range(22)]


def load(dataset: Any, parts: int = 1, part: int = 0, **options: Any) -> Any:
    return dataloader(dataset, place=Place(parts, part), **options)


def first(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


def batches(loader: Any, count: int) -> list[list[int]]:
    return [first(batch) for batch in loader.take(count)]


# ------------------------------------------------------------------------------------------- a torch DataLoader


def doubled(rows: list[torch.Tensor]) -> torch.Tensor:
    return 2 * torch.stack(rows)


def test_a_torch_dataloader_gives_dataset_collator_batch_size_and_whether_it_shuffles() -> None:
    for shuffle in (False, True):
        given = DataLoader(ROWS, batch_size=4, shuffle=shuffle, collate_fn=doubled)
        loader, plain = load(given), load(ROWS, global_batch=4, shuffle=shuffle, drop_last=False)
        assert len(loader) == len(plain) == 6, "drop_last=False is torch's default"
        assert [first(b) for b in loader] == [[2 * i for i in first(b)] for b in plain]
    assert len(load(DataLoader(ROWS, batch_size=4, drop_last=True))) == 5
    assert load(DataLoader(ROWS, batch_size=4), global_batch=8, drop_last=True).settings.global_batch == 8


def told(seen: Any, worker: int) -> None:
    seen.put(worker)


def test_workers_of_a_torch_dataloader_are_begun_by_its_function_and_live_on() -> None:
    seen = torch.multiprocessing.get_context("fork").SimpleQueue()
    given = DataLoader(
        ROWS, batch_size=4, num_workers=1, worker_init_fn=partial(told, seen), persistent_workers=True,
        prefetch_factor=1, timeout=60, multiprocessing_context="fork",
    )  # fmt: skip
    loader = load(given, 3, 1, seed=5)
    assert loader.settings.timeout_s == 60
    expected = load(ROWS, 3, 1, global_batch=4, shuffle=False, drop_last=False)
    assert batches(loader, 8) == batches(expected, 8), "over the end of an epoch"
    assert seen.get() == 0 and seen.empty(), "one worker, begun once"


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


REFUSED: dict[str, tuple[Any, str]] = {
    "sampler": (
        DataLoader(ROWS, batch_size=2, sampler=WeightedRandomSampler([0.5] * 22, 22)),
        "sampler: WeightedRandomSampler, and the order of samples follows from config.seed; legal: shuffle",
    ),
    "a sampler of other samples": (
        DataLoader(ROWS, batch_size=2, sampler=RandomSampler(range(10))),
        r"sampler: of 10 samples, and the dataset has 22; legal: torch.utils.data.Subset",
    ),
    "generator": (DataLoader(ROWS, batch_size=2, shuffle=True, generator=torch.Generator()), "generator: given"),
    "batch_sampler": (
        DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 2, False)), "batch_sampler: batches are",
    ),
    "no batches": (DataLoader(ROWS, batch_size=None), "batch_size=None: batches are cut over ranks here; legal"),
    "order": (DataLoader(ROWS, batch_size=2, in_order=False), "in_order=False"),
    "iter": (Own(ROWS), "Own has an __iter__ of its own"),
    "pin": (DataLoader(ROWS, batch_size=2, pin_memory_device="cuda:1"), "pin_memory_device='cuda:1'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_setting_of_a_torch_dataloader_that_is_not_honoured_is_refused_by_name(what: str) -> None:
    loader, words = REFUSED[what]
    with pytest.raises(ValueError, match=f"DataLoader: .*{words}"):
        load(loader)


# ------------------------------------------------------------------------------------------- Hugging Face


class Table:
    """The protocol of a Hugging Face dataset: rows are dicts of lists, several are read at once."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.reads += 1
        return [self.rows[i] for i in indices]


TABLE = [dict(input_ids=[i, i + 1, i + 2], labels=[i, -100, i + 2]) for i in range(8)]


def test_rows_of_lists_are_stacked_and_read_at_once() -> None:
    table = Table(TABLE)
    batch = next(iter(load(table, global_batch=4, shuffle=False)))
    assert {name: x.tolist()[1] for name, x in batch.items()} == dict(
        input_ids=[1, 2, 3], labels=[1, -100, 3]
    )
    assert table.reads == 1
    with pytest.raises(ValueError, match="its samples make no batch: .*legal: samples of one shape, or coll"):
        next(iter(load([*TABLE, dict(input_ids=[1], labels=[1])], global_batch=9)))


def test_a_collator_may_give_any_mapping_and_unshifted_labels() -> None:
    def collate(rows: list[dict[str, Any]]) -> UserDict[str, torch.Tensor]:  # as a BatchEncoding is one
        return UserDict({name: torch.tensor([row[name] for row in rows]) for name in rows[0]})

    options = dict(collate=collate, labels="unshifted", shuffle=False, global_batch=2)
    batch = next(iter(load(TABLE, 3, 2, **options)))
    assert {name: tuple(x.shape) for name, x in batch.items()} == dict(input_ids=(0, 3), labels=(0, 3))
    batch = next(iter(load(TABLE, **options)))
    assert type(batch) is dict and batch["labels"].tolist() == [[-100, 2, -100], [-100, 3, -100]]
    inputs, labels = shift_labels((batch["input_ids"], batch["input_ids"]))
    assert labels[:, :-1].tolist() == inputs[:, 1:].tolist() and set(labels[:, -1].tolist()) == {-100}
    with pytest.raises(ValueError, match="labels: shape .2,. with labels='unshifted'; legal: a tensor .samp"):
        shift_labels(dict(input_ids=inputs, labels=labels[:, 0]))


def test_the_loss_of_shifted_labels_is_that_of_transformers() -> None:
    from tests.shared.hugging_face import llama

    torch.manual_seed(0)
    model = llama().double()
    ids = torch.randint(37, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5], [7]])
    labels = ids.masked_fill(~mask, -100)
    truth = model(input_ids=ids, attention_mask=mask.long(), labels=labels)
    shifted = shift_labels(dict(input_ids=ids, labels=labels))["labels"]
    logits = truth.logits.float()  # as transformers takes its loss
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    assert abs(float(ours - truth.loss)) <= 1e-6 * float(truth.loss)


# ------------------------------------------------------------------------------------------- only iterated


class Stream(IterableDataset[torch.Tensor]):
    """`length` samples a pass, in another order in each."""

    def __init__(self, length: int = 10, shrinks: int = 0) -> None:
        self.length, self.shrinks, self.epoch = length, shrinks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.length - self.shrinks * self.epoch):
            yield torch.tensor([(i + self.epoch) % self.length, self.epoch])


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:dataset. Stream can only be iterated")
def test_a_stream_is_resumed_by_skipping_on_any_number_of_parts(workers: int, drop_last: bool) -> None:
    options = dict(global_batch=4, drop_last=drop_last, workers=workers)
    straight = batches(load(Stream(), **options), 9)
    whole = load(Stream(), **options)
    before = batches(whole, 4)
    assert before + batches(whole, 5) == straight, "and goes on where it was left"
    start = sum(map(len, straight[:4]))
    pieces = [batches(load(Stream(), 3, part, start=start, **options), 5) for part in range(3)]
    assert [sum(batch, []) for batch in zip(*pieces, strict=True)] == straight[4:]
    epoch = [first(batch) for batch in load(Stream(), **options)]
    assert epoch == ([[0, 1, 2, 3], [4, 5, 6, 7]] if drop_last else [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])


def test_skipping_is_told() -> None:
    with pytest.warns(UserWarning, match="Stream can only be iterated, so 4 samples of pass 0 are read and"):
        next(iter(load(Stream(), global_batch=4, start=4)))


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        (Stream(), dict(shuffle=True), "shuffle: True, and Stream can only be iterated; legal: False"),
        (Stream(), dict(workers=2), "workers: 2, .* of Stream, which can only be iterated"),
        (Stream(), dict(start=3), "start: 3 of Stream, which goes on in whole batches; legal: a multiple of"),
        (Stream(3), {}, "dataset: 3 samples found, 4 needed for one batch"),
        (Stream(0), dict(drop_last=False), "dataset: 0 samples found, 1 needed"),
        (Stream(8, shrinks=1), {}, "pass 1 of Stream ended after 7 samples, and an earlier one after 8"),
    ],
)
def test_a_stream_that_cannot_be_loaded_exactly_is_refused(
    stream: Stream, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        list(load(stream, global_batch=4, **options).take(9))
    with pytest.raises(TypeError, match="loader: Stream has no length"):
        len(load(Stream(), global_batch=4))


# ------------------------------------------------------------------------------------------- bad data


class Lying(list[Any]):
    """A dataset that ends before its length."""

    error: type[Exception] = IndexError

    def __getitem__(self, index: Any) -> Any:
        if index > 3:
            raise self.error("gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [IndexError, StopIteration])
def test_a_dataset_that_ends_inside_an_epoch_is_named(error: type[Exception]) -> None:
    dataset = Lying(ROWS[:8])
    dataset.error = error
    loader = load(dataset, global_batch=4, shuffle=False)
    with pytest.raises(
        ValueError, match=f"dataset: {error.__name__} for a sample of .4, 5, 6, 7.: gone; leg"
    ):
        list(loader)
    assert loader.samples == 4, "what was handed out"


def test_a_dataset_that_grows_is_refused_when_its_next_epoch_begins() -> None:
    dataset = list(ROWS[:8])
    loader = load(dataset, global_batch=4)
    list(loader)
    dataset.append(ROWS[8])
    with pytest.raises(ValueError, match="dataset: 9 samples now, and 8 when its loader was made; legal"):
        list(loader)


def test_ranks_with_other_settings_or_streams_are_told_apart() -> None:
    def facts(dataset: Any, length: int | None, **settings: Any) -> dict[str, Any]:
        return dataset_facts(dataset, length, settings)

    one = facts(ROWS, 22, start=8)
    assert dataset_fault([one, facts(ROWS, 22, start=8)]) == ""
    assert "start: 8 on rank 0, 0 on rank 1; legal" in dataset_fault([one, facts(ROWS, 22, start=0)])
    other = Stream()
    other.epoch = 3
    assert "sample 0 is another on rank 1" in dataset_fault([facts(Stream(), None), facts(other, None)])
