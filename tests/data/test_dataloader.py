"""The order of samples is one stream that no world size can change; a bad batch is refused by name."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter, UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from colossal_lite.data.batch_checks import StatedSizes, check_batch
from colossal_lite.data.dataloader import dataloader
from colossal_lite.data.loader import Loader, Place, cut, cut_batch
from colossal_lite.data.sample_order import Order, Permutation

SIZES = st.one_of(st.integers(1, 70), st.integers(1, 5000))
SEEDS = st.integers(0, 2**63)
PINNED = [1, 4, 0, 9, 2, 7, 8, 5, 3, 6]


# ------------------------------------------------------------------------------------------------ permutation


@given(SIZES, SEEDS, st.integers(0, 1000))
def test_a_permutation_is_a_bijection_of_every_range(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch)(np.arange(n))) == list(range(n))


@given(st.integers(1, 2**62 - 1), SEEDS, st.data())
def test_a_permutation_of_a_huge_range_stays_in_it_and_sends_no_two_to_one(
    n: int, seed: int, data: st.DataObject
) -> None:
    points = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    values = Permutation(n, seed)(points).tolist()
    assert all(0 <= v < n for v in values) and len(set(values)) == len(points)


@given(SIZES, SEEDS, st.data())
def test_a_value_does_not_depend_on_what_else_is_asked(n: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(n, seed)
    whole = permutation(np.arange(n))
    point = data.draw(st.integers(0, n - 1))
    assert permutation(point) == whole[point]
    assert permutation([[point], [0]]).shape == (2, 1)


def test_epochs_and_seeds_give_orders_that_look_unrelated() -> None:
    n = 4000
    orders = [Permutation(n, seed, epoch)(np.arange(n)) for seed in (0, 1) for epoch in (0, 1)]
    orders.append(np.arange(n))
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() <= 10  # fixed points are Poisson(1): 11 or more have probability 1e-8
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.1  # standard deviation 0.016


def test_every_permutation_of_four_comes_up_evenly() -> None:
    """24 orders over 4,800 seeds: chi-square of 23 degrees of freedom stays below its 1 - 1e-6 quantile."""
    counts = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4800))
    assert len(counts) == math.factorial(4)
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 67


def test_the_order_is_pinned_because_a_changed_one_would_break_resumed_runs() -> None:
    assert Permutation(10, seed=1024)(np.arange(10)).tolist() == PINNED
    assert Permutation(10, seed=1024, epoch=1)(np.arange(10)).tolist() != PINNED


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_a_range_that_cannot_be_permuted_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"n: {n} .*legal: 1 to"):
        Permutation(n, 0)


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_the_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{index} to {index}; legal: 0 to n - 1 = 4")):
        Permutation(5, 0)(index)


# -------------------------------------------------------------------------------------------------------- cut


@given(st.integers(0, 200), st.integers(1, 40))
def test_cut_is_tensor_split(n: int, parts: int) -> None:
    expected = [piece.tolist() for piece in torch.arange(n).tensor_split(parts)]
    assert [list(range(*cut(n, parts, part))) for part in range(parts)] == expected


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_a_cut_that_does_not_exist_is_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="legal"):
        cut(*arguments)


# ----------------------------------------------------------------------------------------------------- loader


def numbers(n: int) -> list[torch.Tensor]:
    return [torch.tensor([i, i + 1]) for i in range(n)]


def load(n: int, parts: int = 1, part: int = 0, **options: Any) -> Loader:
    return dataloader(numbers(n), place=Place(parts, part), **options)


def ids(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


ORDERS = st.fixed_dictionaries(
    {
        "global_batch": st.integers(1, 12),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 5),
    }
)


def possible(n: int, options: dict[str, Any]) -> None:
    assume(n >= options["global_batch"] or not options["drop_last"])


@given(st.integers(1, 40), st.integers(1, 9), ORDERS)
@settings(max_examples=50)
def test_the_pieces_of_all_parts_joined_are_the_batch_of_one_part(
    n: int, parts: int, options: dict[str, Any]
) -> None:
    possible(n, options)
    whole = [ids(batch) for batch in load(n, **options).take(8)]
    pieces = [[ids(batch) for batch in load(n, parts, part, **options).take(8)] for part in range(parts)]
    assert [sum(batch, []) for batch in zip(*pieces, strict=True)] == whole
    sizes = [[len(piece) for piece in batch] for batch in zip(*pieces, strict=True)]
    assert all(max(row) - min(row) <= 1 and row == sorted(row, reverse=True) for row in sizes)


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 4), ORDERS)
@settings(max_examples=50)
def test_a_run_resumed_with_the_samples_seen_is_the_run_that_never_stopped(
    n: int, stopped_after: int, parts: int, options: dict[str, Any]
) -> None:
    possible(n, options)
    straight = [ids(batch) for batch in load(n, **options).take(stopped_after + 8)]
    first = load(n, **options)
    before = [ids(batch) for batch in first.take(stopped_after)]
    assert first.samples == sum(map(len, before))
    resumed = [load(n, parts, part, start=first.samples, **options).take(8) for part in range(parts)]
    after = [sum(map(ids, pieces), []) for pieces in zip(*resumed, strict=True)]
    assert before + after == straight


@given(st.integers(1, 40), ORDERS)
def test_an_epoch_yields_each_sample_once_less_a_dropped_rest(n: int, options: dict[str, Any]) -> None:
    possible(n, options)
    loader = load(n, **options)
    for _ in range(3):
        expected_batches = len(loader)
        batches = [ids(batch) for batch in loader]
        seen = sum(batches, [])
        assert len(batches) == expected_batches
        assert len(set(seen)) == len(seen) == n - n % options["global_batch"] * options["drop_last"]
        assert all(len(batch) == options["global_batch"] for batch in batches[:-1])


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 12), st.booleans())
def test_batches_from_any_position_are_whole_and_end_with_the_epoch(
    n: int, position: int, global_batch: int, drop_last: bool
) -> None:
    assume(n >= global_batch or not drop_last)
    order = Order(n, global_batch, seed=0, drop_last=drop_last)
    spans = [(start, order.stop(start)) for start in order.starts(position)]
    epochs = {start // order.epoch_samples for start, _ in spans} | {
        (stop - 1) // order.epoch_samples for _, stop in spans
    }
    assert spans and len(epochs) == 1
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    sizes = [stop - start for start, stop in spans]
    assert all(size == global_batch for size in (sizes if drop_last else sizes[:-1])) and min(sizes) > 0
    assert spans[0][0] == position or drop_last and spans[0][0] % order.epoch_samples == 0


def test_epochs_differ_when_shuffled_and_repeat_when_not() -> None:
    shuffled, plain = load(50, global_batch=10), load(50, global_batch=10, shuffle=False)
    orders = [sum(map(ids, shuffled), []) for _ in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert [sum(map(ids, plain), []) for _ in range(2)] == [list(range(50))] * 2


def test_an_empty_piece_has_the_form_of_a_batch() -> None:
    dataset = [
        {"input_ids": torch.ones(3, dtype=torch.int64), "labels": torch.ones(3, dtype=torch.int64)}
    ] * 5
    batch = next(iter(dataloader(dataset, place=Place(4, 3), global_batch=2)))
    assert {key: (tuple(x.shape), x.dtype) for key, x in batch.items()} == {
        "input_ids": ((0, 3), torch.int64),
        "labels": ((0, 3), torch.int64),
    }


def test_workers_give_the_same_batches_and_leave_the_global_generator_alone() -> None:
    options = dict(global_batch=4, seed=3)
    plain, worked = load(22, 3, 1, **options), load(22, 3, 1, workers=2, **options)
    state = torch.get_rng_state()
    got = [ids(batch) for batch in worked.take(7)]
    assert torch.equal(torch.get_rng_state(), state)
    assert got == [ids(batch) for batch in plain.take(7)] and worked.samples == plain.samples == 28


class Drawn:
    """Samples that begin with their index; torch's, Python's and numpy's generators draw the rest."""

    def __init__(self, at_once: bool = False) -> None:
        if at_once:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class DrawnStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Drawn().__getitem__, range(10))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Drawn(), Drawn(at_once=True), DrawnStream()], ids=["one", "many", "stream"]
)
def test_what_samples_draw_is_one_stream_on_any_mesh_and_in_a_resumed_run(dataset: Any, workers: int) -> None:
    """Workers drew the same numbers in every epoch and on every rank; a resumed run drew those of its begin."""

    def rows(parts: int, begin: int, count: int) -> list[list[float]]:
        pieces = []
        for part in range(parts):
            torch.manual_seed(part), random.seed(part), np.random.seed(part)
            loader = dataloader(
                dataset, place=Place(parts, part), start=begin, global_batch=4, workers=workers
            )
            pieces.append(list(loader.take(count)))
        return [row for batch in zip(*pieces, strict=True) for piece in batch for row in piece.tolist()]

    straight = rows(1, 0, 6)
    assert rows(2, 0, 3) + rows(3, 12, 3) == straight
    assert len({number for row in straight for number in row[1:]}) == 3 * len(straight), "none is drawn twice"


class Counted(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8))


@pytest.mark.parametrize("dataset", [numbers(8), Counted()], ids=["map", "stream"])
def test_a_collator_that_draws_draws_anew_in_each_epoch_and_leaves_the_generators_alone(dataset: Any) -> None:
    def noise(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.rand(len(rows))

    state = torch.get_rng_state()
    parts = [dataloader(dataset, place=Place(2, part), global_batch=4, collate=noise) for part in range(2)]
    drawn = [torch.cat(list(loader.take(4))).tolist() for loader in parts]
    assert len({*drawn[0], *drawn[1]}) == 16 and torch.equal(torch.get_rng_state(), state)
    resumed = dataloader(dataset, place=Place(2, 1), global_batch=4, collate=noise, start=12)
    assert torch.cat(list(resumed.take(1))).tolist() == drawn[1][-2:]


def test_workers_leave_signals_to_their_parent() -> None:
    """Launchers and terminals signal the process group of a rank; a dead worker would take its last batch away."""
    before = set(multiprocessing.active_children())
    batches = iter(load(40, 3, 1, global_batch=4, seed=3, workers=1))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None and os.getpgid(worker.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert sum(1 for _ in batches) == 9
    worker.join(30)


class Asleep:
    """A dataset whose samples never come."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


def test_workers_whose_samples_do_not_come_are_not_waited_for_for_ever() -> None:
    late = dataloader(Asleep(), place=Place(), global_batch=2, workers=1, timeout_s=0.5)
    before = set(multiprocessing.active_children())  # ranks of the pool, which live on
    with pytest.raises(RuntimeError, match="timed out after 0.5 seconds"):
        next(iter(late))
    for worker in (
        set(multiprocessing.active_children()) - before
    ):  # torch ends it, and does not wait for its end
        worker.join(timeout=30)


def test_tuples_stay_tuples_and_collate_is_called_with_the_samples_of_the_piece() -> None:
    windows = [(torch.arange(i, i + 4), torch.arange(i + 1, i + 5)) for i in range(0, 40, 4)]
    inputs, labels = next(iter(dataloader(windows, place=Place(2), global_batch=4, shuffle=False)))
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    batches = dataloader(windows, place=Place(), global_batch=3, collate=len)
    assert list(batches) == [3, 3, 3]


def test_batches_come_on_the_device_asked_for() -> None:
    place = Place(device=torch.device("meta"))
    batch = next(iter(dataloader(numbers(4), place=place, global_batch=2)))
    assert batch.device.type == "meta" and batch.shape == (2, 2)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ((i for i in range(9)), {}, "dataset: generator can be iterated but once"),
        (7, {}, "dataset: int; legal: a dataset with __len__ and __getitem__, one with __iter__, or a torch"),
        ([1, 2], {"global_batch": None}, "global_batch: none given"),
        ([1, 2], {"labels": "next"}, "labels: 'next'; legal: 'shifted', 'unshifted'"),
        (
            dict(train=[1], test=[2]),
            {},
            r"dataset: dict of 'train', 'test'; legal: one of them, .* dataset\['train'\]",
        ),
        ([], {}, "dataset: 0 samples found"),
        ([1, 2], {"global_batch": 3}, "2 samples found, 3 needed for one batch; legal: .*global_batch <= 2"),
        ([1, 2], {"global_batch": 0}, "global_batch: 0; legal: 1 or more"),
        ([1, 2], {"global_batch": "8"}, "global_batch: '8'; legal: 1 or more .* a whole number"),
        ([1, 2], {"global_batch": 8.0}, "global_batch: 8.0; legal: 1 or more"),
        ([1, 2], {"global_batch": True}, "global_batch: True; legal: 1 or more"),
        ([1, 2], {"shuffle": "no"}, "shuffle: 'no'; legal: True or False"),
        ([1, 2], {"drop_last": 2}, "drop_last: 2; legal: True or False"),
        ([1, 2], {"collate": "pad"}, "collate: 'pad'; legal: a callable"),
        ([1, 2], {"workers": 0.5}, "workers: 0.5; legal: 0 or more"),
        ([1, 2], {"start": -1}, "start: -1"),
        ([1, 2], {"start": 1.0}, "start: 1.0; legal: 0 or more"),
        ([1, 2], {"workers": -1}, "workers: -1"),
    ],
)
def test_a_loader_that_cannot_load_is_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataloader(dataset, place=Place(), **{"global_batch": 1, **options})


def test_numbers_of_numpy_are_counts_too() -> None:
    loader: Any = dataloader(
        [1, 2, 3], place=Place(), global_batch=np.int64(2), start=np.int32(0), drop_last=np.bool_(False)
    )
    assert len(loader) == 2 and type(loader.settings.global_batch) is int and type(loader.samples) is int


@pytest.mark.parametrize("steps", [2.0, "2", -1, True])
def test_a_count_of_batches_that_is_no_whole_number_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"take: {steps!r}; legal: 0 or more batches"):
        dataloader([1, 2], place=Place(), global_batch=1).take(steps)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(torch.zeros(2), None)] * 2, "found <class 'NoneType'>; legal: samples of one shape, or collate="),
        ([dict(a=1, labels=2), dict(a=1)], "some have no key 'labels'; legal: samples"),
        (
            [dict(input_ids=["a", "b"])],
            "its samples make no batch: too many dimensions 'str'; legal: samples",
        ),
        ([torch.zeros(2), torch.zeros(3)], "its samples make no batch: stack expects each tensor"),
    ],
)
def test_samples_that_make_no_batch_are_refused_by_name(rows: list[Any], says: str) -> None:
    loader = dataloader(rows, place=Place(), global_batch=len(rows), shuffle=False)
    with pytest.raises(ValueError, match=re.escape(says)):
        next(iter(loader))


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="part 2 of 2"):
        Place(2, 2)


# ------------------------------------------------------------------------------------------------------ batch


def tokens(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


X, Y = tokens([3, 1, 4, 1], [5, 9, 2, 6]), tokens([1, 4, 1, 5], [9, 2, 6, -100])
NAN = torch.tensor([[0.0, 1.0], [float("nan"), 2.0]])


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        {"input_ids": X, "labels": Y},
        {"input_ids": X, "labels": Y, "position_ids": X + 100, "attention_mask": X > 0},
        UserDict(input_ids=X, labels=Y, attention_mask=X > 0),  # what a tokenizer gives is one
        (X.int(), Y),
        (X[:0], Y[:0]),
        (X, torch.full_like(X, -100)),
        (tokens([7, 7, 7]), tokens([7, 7, 7])),  # a run of one token: its next tokens are its own
        (tokens([7]), tokens([7])),
        (torch.rand(2, 3, 8), torch.rand(2, 3)),
        (torch.rand(2, 3), tokens([1], [2])),
    ],
)
def test_a_good_batch_passes(batch: Any) -> None:
    check_batch(batch)
    check_batch(batch, StatedSizes(vocabulary=10))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, "batch: Tensor of 2; legal: (inputs, labels), ((x, y), labels)"),
        ((X,), "batch: tuple of 1; legal"),
        ((X, Y, Y), "batch: tuple of 3; legal"),
        (None, "batch: NoneType; legal"),
        ({}, "batch: a mapping of nothing without 'labels'; legal: (inputs, labels)"),
        ({"labels": Y}, "no key 'input_ids'; legal: input_ids, attention_mask"),
        ({"input_ids": X, "label": Y}, "a mapping of input_ids, label without 'labels' (is 'label' it?)"),
        ({"input_ids": X, "labels": Y, "token_type_ids": X}, "unknown key 'token_type_ids'"),
        (
            {"input_id": X, "labels": Y},
            "unknown key 'input_id' (did you mean 'input_ids'?), no key 'input_ids'",
        ),
        ((X.tolist(), Y), "inputs: list; legal: a torch.Tensor"),
        ((X, None), "labels: NoneType; legal: a torch.Tensor"),
        (
            (X, Y[:, :3]),
            "labels: shape (2, 3); legal: the shape of the inputs, (2, 4), one label a sample, (2,)",
        ),
        (((X, Y[:1]), Y), "inputs[1]: shape (1, 4); legal: a batch of 2"),
        ((X, Y[0]), "labels: shape (4,); legal: a batch of 2"),
        ((X[0], Y[0]), "inputs: shape (4,); legal: (batch, tokens)"),
        ((torch.rand(3, 2), tokens([1], [2])), "labels: shape (2, 1); legal: a batch of 3"),
        ((torch.tensor(1.0), torch.tensor(1)), "inputs: shape (); legal: batch first"),
        ((X.byte(), Y), "inputs: dtype torch.uint8; legal: torch.int64"),
        ((X, Y.int()), "labels: dtype torch.int32; legal: torch.int64"),
        ((X, Y.double()), "labels: dtype torch.float64; legal: torch.int64"),
        ({"input_ids": X.float(), "labels": Y}, "input_ids: dtype torch.float32; legal: torch.int64"),
        ({"input_ids": X, "labels": Y, "position_ids": X.bool()}, "position_ids: dtype torch.bool"),
        ((NAN, tokens([1], [2])), "inputs[1, 0]: nan; legal: finite numbers"),
        ((torch.tensor([[math.inf]]), tokens([1])), "inputs[0, 0]: inf; legal: finite numbers"),
        (
            {"input_ids": NAN.long() * 0, "labels": Y[:, :2], "attention_mask": NAN},
            "attention_mask[1, 0]: nan",
        ),
        ((tokens([1, -2, 3]), tokens([2, 3, 4])), "inputs[0, 1]: -2; legal: 0 to 9 (the vocabulary)"),
        ((tokens([1, 2, 10]), tokens([2, 3, 4])), "inputs[0, 2]: 10; legal: 0 to 9"),
        (
            (tokens([1, 2, 3]), tokens([2, 10, 4])),
            "labels[0, 1]: 10; legal: 0 to 9 (the vocabulary), or -100",
        ),
        ((tokens([1, 2, 3]), tokens([2, -1, 4])), "labels[0, 1]: -1; legal: 0 to 9"),
        ({"input_ids": X, "labels": Y, "position_ids": -X}, "position_ids[0, 0]: -3; legal: 0 or more"),
        ((X, X), "labels: equal to the inputs; legal: already shifted"),
        ((X, X.where(X != 9, -100)), "labels: equal to the inputs"),
        (
            (tokens([11, -1, 3]), tokens([2, 3, 12])),
            "inputs[0, 0]: 11; legal: 0 to 9 (the vocabulary); labels[0, 2]",
        ),
    ],
)
def test_a_bad_batch_is_refused_with_path_value_and_rule(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_batch(batch, StatedSizes(vocabulary=10))


def test_a_sequence_or_position_beyond_what_the_model_states_is_refused() -> None:
    sizes = StatedSizes(tokens=2, positions=2)
    with pytest.raises(ValueError, match=re.escape("inputs: shape (2, 4); legal: at most 2 tokens")):
        check_batch((X, Y), sizes)
    check_batch({"input_ids": X, "labels": Y, "position_ids": X % 2}, sizes)  # packed documents
    with pytest.raises(ValueError, match=r"position_ids\[0, 0\]: 2; legal: 0 to 1 \(the positions that"):
        check_batch({"input_ids": X, "labels": Y, "position_ids": X % 2 + 2 - X[:1, :1] % 2}, sizes)


def test_a_model_that_takes_ids_is_given_no_floating_point() -> None:
    for batch in ((X.double(), Y), {"input_ids": X.double(), "labels": Y}):
        with pytest.raises(
            ValueError, match=r": dtype torch.float64; legal: torch.int64, torch.int32 \(the model"
        ):
            check_batch(batch, StatedSizes(takes_ids=True))
    check_batch((X.int(), Y), StatedSizes(takes_ids=True))


def test_labels_of_masked_words_may_be_the_inputs_by_chance() -> None:
    kept = X.where(X != 9, -100)
    with pytest.raises(ValueError, match="says causal=False in its config"):
        check_batch((X, kept))
    check_batch((X, kept), StatedSizes(causal=False))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.data())
def test_next_tokens_are_never_taken_for_unshifted_labels(text: list[int], data: st.DataObject) -> None:
    inputs, labels = tokens(text[:-1]), tokens(text[1:])
    ignored = data.draw(st.lists(st.booleans(), min_size=len(text) - 1, max_size=len(text) - 1))
    check_batch((inputs, labels.masked_fill(torch.tensor([ignored]), -100)))


def test_a_local_batch_of_a_batch_is_cut_as_its_number_of_samples_is() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    for part in range(3):
        piece = slice(*cut(5, 3, part))
        assert [t.tolist() for t in cut_batch((x, y), 3, part)] == [x[piece].tolist(), y[piece].tolist()]
        taken = cut_batch(UserDict(input_ids=x, labels=y), 3, part)
        assert list(taken) == ["input_ids", "labels"] and torch.equal(taken["labels"], y[piece])
        (one, other), labels = cut_batch(((x, y), y), 3, part)
        assert torch.equal(one, x[piece]) and torch.equal(other, labels) and torch.equal(labels, y[piece])


@pytest.mark.parametrize(
    "batch", [None, "text", torch.zeros(4), (torch.zeros(4), torch.zeros(3)), (1, 2), ()]
)
def test_a_local_batch_of_anything_else_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="local_batch: .*; legal: the number of samples"):
        cut_batch(batch, 2, 0)
