"""Makes what small copies run on: random words, or a few samples of the batch that a user shows.

Note: which samples.
Proofs must find the same on every rank.  So each rank takes a few samples of rank 0, of two labels if there are two.  A
proof that needs more of them repeats them, with numbers that are a little larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import BATCH_KEYS
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.transfers import to_device, to_host

FEW = 4
"""Samples that all ranks get, at the most."""
CPU = torch.device("cpu")
ROWS = 37
"""Words of a copy: few, and a number that few numbers of ranks divide, so that padding is in it."""


def words(samples: int, tokens: int, vocabulary: int, padding: Sequence[int], seed: int = 1) -> Batch:
    """Random words with every padding word among them, and random labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (samples, tokens), generator=generator)
    for place, word in enumerate(padding):
        ids[:, -1 - place] = word
    labels = torch.randint(vocabulary, (samples, tokens), generator=generator)
    return Batch((ids,), {}, labels=labels, samples=torch.arange(samples))


def few_of_rank_0(batch: Batch, world: Communicator, device: torch.device) -> Batch | None:
    """A few samples of the batch of rank 0, on the CPU of each rank; None if that has none. Collective."""
    places = [] if world.coord else _few(batch.labels)
    few = _mapped(batch, lambda x: x[places].contiguous())
    mine = [*few.args, *few.kwargs.values(), few.labels]
    forms = [[str(x.dtype).removeprefix("torch."), *x.shape] for x in mine]
    names, forms = world.gather_json([[*few.kwargs], forms])[0]
    if not forms[-1][1]:
        return None
    received = (
        [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, *shape in forms]
        if world.coord
        else mine
    )
    for x in received:
        world.broadcast(x.view(-1).view(torch.uint8), 0)
    *inputs, labels = map(to_host, received)
    count = len(inputs) - len(names)
    samples = torch.arange(len(labels))
    return Batch(tuple(inputs[:count]), dict(zip(names, inputs[count:], strict=True)), labels, samples)


def _few(labels: Tensor) -> list[int]:
    """The first samples. One with another label is the second, because proofs ask for several."""
    places = range(len(labels))
    others = (place for place in places if not labels[place].equal(labels[0]))
    return [*dict.fromkeys([*places[:1], *islice(others, 1), *places])][:FEW]


def is_more_than_words(example: Batch) -> bool:
    """Whether a forward has other arguments beside the one of its samples: words alone do not show what these do."""
    others = [name for name in example.kwargs if name not in BATCH_KEYS]
    return len(example.args) + len(others) > ("input_ids" not in example.kwargs)


def labels_samples(example: Batch) -> bool:
    """Whether its labels are of samples, where its inputs are ids of tokens."""
    return not example.inputs.is_floating_point() and example.labels.shape != example.inputs.shape


def samples_of(example: Batch, count: int, device: torch.device = CPU, *, cut_rows: int = 0) -> Batch:
    """So many samples of it: numbers in float64, ids that tables of `ROWS` rows have, and labels that all count.
    `cut_rows`: classes of a head that has `ROWS` in the copy. Other labels stay as they are."""
    number = torch.arange(count, device=device)

    def taken(x: Tensor) -> Tensor:
        return to_device(x, device)[number % len(x)]

    def drawn(x: Tensor) -> Tensor:
        some = taken(x)
        if some.is_floating_point():
            larger = 1 + number.div(len(x), rounding_mode="floor") / 8
            return some.double() * larger.view(-1, *[1] * (some.dim() - 1))
        return some if some.dtype == torch.bool else some.remainder(ROWS)

    made = _mapped(example, drawn)
    if made.labels.is_floating_point() or made.labels.dtype == torch.bool:
        return replace(made, samples=number)
    labels = taken(example.labels)
    labels = torch.where((labels >= 0) & (labels < cut_rows), labels % ROWS, labels)
    return replace(made, labels=_all_valid(labels), samples=number)


def _all_valid(labels: Tensor) -> Tensor:
    """Labels with others of them in the place of ignored ones, which proofs set by themselves."""
    ignored = labels < 0
    if labels.is_meta or not ignored.any():
        return labels
    others = labels[~ignored] if not ignored.all() else labels.new_zeros(1)
    filled = labels.clone()
    filled[ignored] = others[torch.arange(int(ignored.sum()), device=labels.device) % len(others)]
    return filled


def _mapped(batch: Batch, each: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with another tensor for each argument and the labels."""
    args, kwargs = tuple(map(each, batch.args)), {n: each(x) for n, x in batch.kwargs.items()}
    return replace(batch, args=args, kwargs=kwargs, labels=each(batch.labels))
