"""What a mapping or a tuple of arguments may hold, by the forward of its model and by what reads the labels."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossal_lite.data.batch import read_batch, take_rows
from colossal_lite.data.batch_checks import LossOf, StatedSizes, check_batch, valid_labels
from colossal_lite.data.batch_forms import ForwardArguments

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
ONE = torch.tensor([0, 2])
VECTORS = torch.rand(2, 3)


class Towers(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Two(nn.Module):
    def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor: ...


class Words(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor: ...


class Decoder(nn.Module):
    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor: ...


class AnyName(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor: ...


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (Two, ((VECTORS, IDS), ONE), "logits"),
        (Two, [[VECTORS, IDS], ONE], "logits"),
        (Two, dict(x=VECTORS, ids=IDS[:, 0], mask=VECTORS > 0, labels=ONE), "logits"),
        (Two, dict(x=VECTORS, ids=IDS, mask=VECTORS - math.inf, labels=ONE), "logits"),
        (Two, dict(x=VECTORS, ids=-IDS, labels=VECTORS), "own"),
        (Words, (IDS, ONE), "logits"),
        (Words, (IDS, ONE + 1000), "own"),
        (Words, (IDS, VECTORS), "own"),
        (Words, dict(input_ids=IDS, labels=IDS[:, 1:3]), "own"),
        (Words, dict(input_ids=IDS, pixel_values=torch.rand(2, 3, 4, 4), labels=IDS.roll(1)), "logits"),
        (Decoder, dict(input_ids=IDS, decoder_input_ids=IDS[:, :2], labels=IDS[:, 1:3]), "logits"),
        (Decoder, dict(input_ids=IDS, decoder_input_ids=IDS, labels=IDS), "logits"),
        (Decoder, dict(input_ids=IDS, labels=IDS[:, 1:3]), "model"),
        (AnyName, dict(anything=VECTORS, labels=ONE), "logits"),
    ],
)
def test_arguments_of_the_forward_and_labels_that_a_loss_can_read_pass(
    model: type[nn.Module], batch: Any, loss: LossOf
) -> None:
    check_batch(batch, StatedSizes(vocabulary=10), ForwardArguments.of(model()), loss)
    read = read_batch(batch, device=torch.device("cpu"))
    assert read.size == 2 and [len(x) for x in read.tensors.values()] == [2] * len(read.tensors)
    assert len(read.tensors) == len(read.args) + len(read.kwargs) + 1


@pytest.mark.parametrize(
    ("model", "batch", "loss", "message"),
    [
        (Two, dict(x=VECTORS, idz=IDS, labels=ONE), "logits", "batch: unknown key 'idz' (did you mean 'ids'?), no key"),
        (Two, dict(x=VECTORS, labels=ONE), "logits", "no key 'ids'; legal: labels, and what Two.forward takes: x, ids"),
        (Two, (VECTORS, ONE), "logits", "batch: no key 'ids'; legal: labels, and what Two.forward takes: x, ids, mask"),
        (Towers, (VECTORS, ONE), "logits", "no key 'y' (if these are the labels: y=None in its signature, and"),
        (Two, ((VECTORS, IDS, VECTORS, IDS), ONE), "logits", "inputs: 4 arguments; legal: at most 3"),
        (Two, (VECTORS, IDS, ONE), "logits", "tuple of 3; legal: (inputs, labels), ((x, y), labels)"),
        (Two, dict(x=VECTORS, ids=IDS[:1], labels=ONE), "logits", "ids: shape (1, 4); legal: a batch of 2"),
        (Two, dict(x=VECTORS, ids=IDS, mask=None, labels=ONE), "logits", "mask: NoneType; legal: a torch.Tensor"),
        (Two, dict(x=VECTORS, ids=torch.tensor(1), labels=ONE), "logits", "ids: shape (); legal: batch first"),
        (Two, dict(x=VECTORS, ids=IDS, mask=VECTORS * math.nan, labels=ONE), "logits", "mask[0, 0]: nan"),
        (Two, ((VECTORS, IDS.tolist()), ONE), "logits", "inputs[1]: list; legal: a torch.Tensor"),
        (Two, ((VECTORS, None), ONE), "logits", "inputs[1]: NoneType; legal: a torch.Tensor"),
        (Words, dict(input_ids=IDS, attention_msk=IDS, labels=ONE), "own", "(did you mean 'attention_mask'?)"),
        (Words, (IDS, IDS[:, 1:3]), "logits", "one label a sample, (2,); others with criterion="),
        (Words, (IDS, ONE), "model", "(2, 4). Others, such as one label a sample, (2,): with criterion="),
        (
            Words,
            (IDS, VECTORS),
            "logits",
            "labels: dtype torch.float32; legal: torch.int64; others with criterion=, a function of yours",
        ),
        (Words, (IDS, ONE.int()), "own", "labels: dtype torch.int32; legal: torch.int64"),
        (Words, (IDS, ONE[:1]), "own", "labels: shape (1,); legal: a batch of 2"),
        (Words, dict(input_ids=IDS, attention_mask=IDS[:, :2], labels=ONE), "own", "legal: the shape of the inputs"),
        (Decoder, dict(input_ids=IDS, labels=IDS[:, 1:3]), "logits", "no key 'decoder_input_ids' for Decoder"),
        (Words, dict(labels=IDS), "logits", "no key 'input_ids'"),
        (AnyName, dict(labels=IDS), "logits", "batch: labels alone; legal: the inputs beside them"),
    ],
)  # fmt: skip
def test_other_arguments_and_labels_are_refused_by_name(
    model: type[nn.Module], batch: Any, loss: LossOf, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_batch(batch, StatedSizes(vocabulary=10), ForwardArguments.of(model()), loss)


def test_whole_labels_may_be_ignored_and_all_other_numbers_count() -> None:
    labels = torch.tensor([[-100, 1], [2, -100]])
    assert int(valid_labels(labels)) == 2 and int(valid_labels(labels.double())) == 4


def test_as_many_tensors_as_samples_are_each_cut_and_none_is_taken_for_a_row() -> None:
    pair = (IDS, VECTORS)

    def last(rows: Any) -> Any:
        return rows[1:]

    found = take_rows(pair, 2, last)
    assert len(found) == 2 and torch.equal(found[0], IDS[1:]) and torch.equal(found[1], VECTORS[1:])
    assert take_rows(("a", "b"), 2, last) == ("b",) and take_rows(("a", "b"), 3, last) == ("a", "b")
