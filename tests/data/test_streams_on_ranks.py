"""Ranks that read a stream otherwise than each other are refused, before anything is updated by it."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

import colossal_lite as cl
from colossal_lite.data.batch_read import BatchRead, read_of
from colossal_lite.data.checksums import checksum
from colossal_lite.data.dataloader import dataloader
from colossal_lite.data.dataset_facts import dataset_facts, dataset_fault, steady_fields
from colossal_lite.data.loader import Place
from tests.shared.pool import RankEnv, run_world

SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
GPT = dict(vocabulary=32, sequence=8, width=8, layers=2, heads=2)
ROWS = [row.split([8, 8]) for row in torch.randint(32, (23, 16), generator=torch.Generator().manual_seed(0))]
Row = Any


def torn(number: int) -> Row:
    raise ValueError(f"sample {number} is torn")


class Rows(IterableDataset[Row]):
    """The samples of `ROWS`, as `what` gives them on a rank."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank, self.epoch, self.reads = what, rank, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        rows, self.reads = list(ROWS), self.reads + 1
        drawn = 1000 * self.rank + self.reads
        match self.what:
            case "one seed":
                random.Random(self.epoch).shuffle(rows)
            case "shorter":
                rows = rows[: 23 - 8 * self.rank]
            case "one sample more":
                rows = rows[: 22 + self.rank]
            case "shorter by a whole number of batches":
                rows = rows[: 20 - 8 * self.rank]
            case "torn":
                return (row if number < 9 else torn(number) for number, row in enumerate(rows))
            case "no seed":
                random.Random(drawn).shuffle(rows)
            case "another order after the first":
                rest = rows[1:]
                random.Random(self.rank).shuffle(rest)
                rows = [*rows[:1], *rest]
            case "one other sample":
                rows[9] = rows[9 + self.rank]
            case "no seed, the same mask":
                random.Random(drawn).shuffle(rows)
                return iter([dict(input_ids=x, labels=y, attention_mask=torch.ones(8) > 0) for x, y in rows])
            case "drawn anew" | "wholly drawn anew" | "numbered":
                words = torch.Generator().manual_seed(drawn)
                rows = [(torch.randint(32, (8,), generator=words), y) for _, y in rows]
                if self.what != "drawn anew":
                    rows = [(x, x.roll(-1)) for x, _ in rows]
                if self.what == "numbered":
                    rows = [(*row, number) for number, row in enumerate(rows)]
        return iter(rows)


def trained(
    env: RankEnv, what: str, config: dict[str, Any], way: str = "train", workers: int = 0, **options: Any
) -> tuple[int, str]:
    """The steps that have been made of 9, and why the next one was refused. Nothing has changed by that one."""
    with env.launch(SGD | config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(cl.models.GPT(cl.models.GPTConfig(**GPT)), context=context)
        state, given, rows = engine.full_state_dict(), 0, Rows(what, env.rank)
        data: Any = rows
        if workers:  # ranks of the pool would begin theirs by a server, which lives on
            data = DataLoader(rows, batch_size=4, num_workers=workers, multiprocessing_context="fork")
        try:
            for batch in context.dataloader(data, global_batch=4, **options).take(9):
                _used(engine, batch, way)
                state, given = engine.full_state_dict(), given + 1
        except ValueError as error:
            told = re.sub(r"^rank \d stopped: \w+: ", "", str(error))
            engine.zero_grad()
            after = engine.full_state_dict()
            assert all(torch.equal(value, state[name]) for name, value in after.items())
            return given, told
        return given, ""


def _used(engine: Any, batch: Any, way: str) -> None:
    if way == "train":
        engine.train_step(batch)
    elif way == "evaluate":
        engine.eval_step(batch)
    else:  # a loop of the user's own, by halves of a batch
        inputs, labels = batch
        for x, y in zip(inputs.split(1), labels.split(1), strict=True):
            engine.backward(F.cross_entropy(engine(x).flatten(0, 1), y.flatten()), count=y.numel())
        engine.step()


def unnumbered(rows: list[Row]) -> Any:
    return default_collate([row[:2] for row in rows])


BACKWARD = dict(optimizer=dict(type="sgd", lr=0.1, update_when="backward"))
ENDS, OTHER = (
    "a stream ends after {} samples of the run on rank {}, and goes on on rank {}. Nothing",
    "a stream gives another sample {} of the run on",
)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, str]] = {
    "shorter": ("shorter", {}, dict(drop_last=False), 2, ENDS.format(15, 1, 0)),
    "shorter, worker": ("shorter", {}, dict(drop_last=False, workers=1), 2, ENDS.format(15, 1, 0)),
    "shorter, resumed": ("shorter", {}, dict(drop_last=False, start=8), 0, ENDS.format(15, 1, 0)),
    "shorter, dropped": ("shorter", {}, {}, 2, ENDS.format(15, 1, 0)),
    "at a batch's end": ("shorter by a whole number of batches", {}, {}, 2, ENDS.format(12, 1, 0)),
    "longer": ("one sample more", {}, dict(drop_last=False), 4, ENDS.format(22, 0, 1)),
    "no seed": ("no seed", {}, {}, 0, OTHER.format(0)),
    "no seed, mask": ("no seed, the same mask", {}, {}, 0, "a stream gives another sample 0 of the run on"),
    "no field": ("wholly drawn anew", {}, {}, 0, OTHER.format(0)),
    "order": ("another order after the first", {}, {}, 0, OTHER.format(1)),
    "updates in backward": ("another order after the first", BACKWARD, {}, 0, OTHER.format(1)),
    "tensor": ("another order after the first", dict(parallel=dict(tensor=2)), {}, 0, OTHER.format(1)),
    "pipeline": ("shorter", dict(parallel=dict(pipeline=2)), {}, 2, ENDS.format(15, 1, 0)),
    "one sample": ("one other sample", {}, {}, 2, OTHER.format(9)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:dataset. Rows can only be iterated")
def test_the_first_batch_that_ranks_read_otherwise_is_refused_on_every_rank(case: str) -> None:
    what, config, options, steps, words = CASES[case]
    for given, told in run_world(_with_options, 2, what, config, "train", options):
        assert words in told and "legal: the same samples in the same order on every rank" in told
        assert given == steps


@pytest.mark.parametrize("way", ["evaluate", "own loop"])
def test_evaluations_and_loops_of_the_users_own_are_refused_too(way: str) -> None:
    for given, told in run_world(trained, 2, "one other sample", {}, way):
        assert given == 2 and OTHER.format(9) in told


def _with_options(
    env: RankEnv, what: str, config: dict[str, Any], way: str, options: dict[str, Any]
) -> tuple[int, str]:
    told = trained(env, what, config, way, **options)
    for worker in multiprocessing.active_children():  # which end with their loader
        worker.join(timeout=30)
    return told


@pytest.mark.parametrize("what", ["one seed", "drawn anew", "numbered"])
@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_ranks_read_alike_or_draw_anew_beside_a_field_that_stays_are_trained_on(
    what: str, workers: int
) -> None:
    collate = unnumbered if what == "numbered" else None
    options = dict(workers=workers, drop_last=False, collate=collate)
    assert run_world(_with_options, 2, what, {}, "train", options) == [(9, "")] * 2
    assert run_world(_with_options, 2, what, {}, "own loop", options) == [(9, "")] * 2


def one_pass(env: RankEnv) -> tuple[int, str]:
    """The steps of one pass over a stream that is shorter on rank 1, and why they ended."""
    with env.launch(SGD) as context:
        engine = cl.initialize(cl.models.GPT(cl.models.GPTConfig(**GPT)), context=context)
        try:
            for batch in context.dataloader(Rows("shorter", env.rank), global_batch=4):
                engine.train_step(batch)
        except ValueError as error:
            return engine.steps, str(error)
        return engine.steps, ""


def test_a_pass_that_ends_on_one_rank_alone_is_refused_before_its_loop_ends() -> None:
    for steps, told in run_world(one_pass, 2):
        assert steps == 2 and ENDS.format(15, 1, 0) in told


def without_marks(env: RankEnv) -> list[float]:
    """Losses of steps in which rank 1 makes the tensors of each batch anew."""
    with env.launch(SGD) as context:
        torch.manual_seed(0)
        engine = cl.initialize(cl.models.GPT(cl.models.GPTConfig(**GPT)), context=context)
        losses = []
        for batch in context.dataloader(Rows("one seed", env.rank), global_batch=4).take(3):
            made = tuple(x.clone() for x in batch) if env.rank else batch
            losses.append(float(engine.train_step(made).loss))
        return losses


def test_a_batch_that_one_rank_makes_anew_is_not_compared() -> None:
    one, other = run_world(without_marks, 2)
    assert one == other and len(one) == 3


# ------------------------------------------------------------------------------------------- what is compared


def test_tensors_of_a_batch_and_views_of_them_carry_what_was_read() -> None:
    place = Place(2, 1, compares=True)
    first, second = dataloader(Rows("one seed", 0), place=place, global_batch=4).take(2)
    assert read_of(first) == read_of(dict(labels=first[1])) == read_of(first[0][1:])
    found = [read_of(first), read_of(second), read_of(first[0].clone())]
    assert [read and (read.start, len(read.samples), read.ahead) for read in found] == [
        (0, 4, 4),
        (4, 4, 4),
        None,
    ]
    alone = next(iter(dataloader(Rows("one seed", 0), place=Place(), global_batch=4)))
    assert read_of(alone) is None


@pytest.mark.parametrize("compares", [False, True])
def test_a_sample_that_cannot_be_read_fails_when_its_batch_is_asked_for(compares: bool) -> None:
    loader = dataloader(Rows("torn", 0), place=Place(2, 1, compares=compares), global_batch=4)
    batches = iter(loader)
    reads = [read_of(next(batches)) for _ in range(2)]
    assert [read.ahead for read in reads if read] == [4, 4] * compares
    with pytest.raises(ValueError, match="sample 9 is torn"):
        next(batches)
    assert loader.samples == 8


def test_a_mark_sees_every_part_of_a_read() -> None:
    reads = [
        BatchRead(4, (1, 2), 3),
        BatchRead(5, (1, 2), 3),
        BatchRead(4, (2, 1), 3),
        BatchRead(4, (1, 2), 0),
    ]
    marks = {read.mark for read in reads}
    assert len(marks) == 4 and all(0 <= mark < 1 << 24 for mark in marks)


@pytest.mark.parametrize(
    "samples",
    [
        [[1, 2], [2, 1], [1, 2, 0], [1.0, 2.0], ["1", "2"], [1 << 70], [None]],
        [(torch.ones(2), [3]), (torch.ones(2), [4]), (torch.ones(1, 2), [3]), (torch.ones(2).bool(), [3])],
        [b"ab", b"ba", "ab", 1, 1.5, None, {}],
        [dict(a=[1]), dict(b=[1]), dict(a=[2]), dict(a=[[1]])],
    ],
)
def test_samples_that_differ_have_other_checksums(samples: list[Any]) -> None:
    assert len({checksum(sample) for sample in samples}) == len(samples)


def test_a_checksum_of_fields_sees_no_other_field() -> None:
    one, other = (torch.zeros(2), 5), (torch.ones(2), 5)
    assert checksum(one, ["1"]) == checksum(other, ["1"]) != checksum((torch.zeros(2), 6), ["1"])
    assert checksum(one, ["0", "1"]) != checksum(other, ["0", "1"])


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("one seed", None),
        ("drawn anew", ("1",)),
        ("numbered", ("2",)),
        ("wholly drawn anew", None),
        ("no seed, the same mask", None),
    ],
)
def test_a_stream_that_is_drawn_anew_is_compared_by_fields_that_tell_its_samples_apart(
    what: str, fields: tuple[str, ...] | None
) -> None:
    told: list[dict[str, Any]] = [dataset_facts(Rows(what, rank), None, {}) for rank in range(2)]
    assert steady_fields(told) == fields


class Middle:
    """A dataset of 23 samples whose first, middle and last are the same on all ranks. `crops`: draws a field anew."""

    def __init__(self, rank: int, crops: bool) -> None:
        self.rank, self.crops = rank, crops

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = ROWS[index if index in (0, 11, 22) else (index + 3 * self.rank) % 23]
        return (torch.rand(8) if self.crops else x), y


@pytest.mark.parametrize("crops", [False, True])
def test_a_dataset_that_differs_between_its_first_and_middle_sample_is_told(crops: bool) -> None:
    facts: list[dict[str, Any]] = [dataset_facts(Middle(rank, crops), 23, {}, [11, 3]) for rank in range(2)]
    assert "sample 3 is another on rank 1 than on rank 0" in dataset_fault(facts)
    assert dataset_fault(facts[:1] * 2) == ""
    assert dataset_fault([dataset_facts(Middle(0, crops), 23, {}) for _ in range(2)]) == ""


def compared(env: RankEnv, start: int, shuffle: bool) -> str:
    """Why a dataset that differs between its first and middle sample is refused."""
    with env.launch(SGD) as context:
        try:
            context.dataloader(Middle(env.rank, False), global_batch=8, start=start, shuffle=shuffle)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("start", "shuffle"), [(0, True), (8, True), (0, False), (8, False)])
def test_ranks_compare_samples_of_the_next_batch_of_a_dataset_with_a_length(
    start: int, shuffle: bool
) -> None:
    for told in run_world(compared, 2, start, shuffle):
        assert re.match(
            r"dataset: sample \d+ is another on rank 1 than on rank 0; legal: the same dataset", told
        )


@pytest.mark.parametrize("length", [1, 2, 7, 23])
@pytest.mark.parametrize("batch", [1, 5, 6, 23])
def test_few_samples_are_compared_and_only_of_the_next_batch(length: int, batch: int) -> None:
    loader = dataloader(range(length), place=Place(), global_batch=batch, drop_last=False, seed=2)
    for start in (0, length - 1, 3 * length + 2):
        loader.samples = start
        soon = loader.soon()
        assert 1 <= len(soon) <= 6 and {*soon} <= {*next(iter(loader)).tolist()}
