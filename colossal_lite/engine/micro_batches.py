"""Cuts the batch of a step into the micro-batches of this rank.

Note: all data ranks cut into equally many micro-batches, so that they run one plan.  With too few samples, some ranks
get empty micro-batches.  Ranks exchange batch sizes only where these are needed.  Dropout masks depend on a sample's
place in the global batch.  A pipeline needs equal counts, and auxiliary losses the number of valid labels.  Cost there:
one all-gather over `data`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from colossal_lite.checks.batch_arguments import AllowedArguments
from colossal_lite.checks.rank_comparison import RankComparison
from colossal_lite.data.batch import Batch, first_input, read_batch
from colossal_lite.data.batch_checks import LossOf, StatedSizes, check_batch, valid_labels
from colossal_lite.data.batch_forms import named, parts_of_batch
from colossal_lite.data.loader import apply_to_tensors
from colossal_lite.engine.context import Context
from colossal_lite.memory.transfers import host_copy, to_host
from colossal_lite.parallel.padding import SeenPadding
from colossal_lite.parallel.parallelize import Parallelized
from colossal_lite.parallel.samples_apart import FirstBatch


class FirstLook(Protocol):
    """A proof with the arguments of the first forward that it waits for."""

    def waits_for(self, samples: int) -> bool:
        """Whether it looks at a forward with so many samples."""

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> bool | None:
        """Look at arguments on the CPU. Raises ValueError for a model that would be another one. Returns whether it
        looks at later forwards too."""


UNSEEN = 10_000
"""Samples that other ranks may have more than this one, so that ranks with fewer refuse nothing that others take."""


class MicroBatches:
    """Checks batches and cuts them into micro-batches."""

    def __init__(
        self, context: Context, parallelized: Parallelized, stated: StatedSizes, comparison: RankComparison,
        first_batch: FirstBatch | None, allowed: AllowedArguments, *, seen_padding: SeenPadding, loss: LossOf,
    ) -> None:  # fmt: skip
        """Batches must fit the sizes that the model has `stated`, and are added to `comparison`. `seen_padding`: by
        its tokens. `loss`: what reads the labels."""
        looks: tuple[FirstLook | None, ...] = first_batch, parallelized.first_swap
        self._looks = [each for each in looks if each is not None]
        self._first_batch = first_batch
        self._refusal = first_batch.refusal if first_batch else ""
        self._seen_padding = seen_padding
        self._allowed, self._loss = allowed, loss
        self._comparison = comparison
        self._mesh, self._device, self._config = context.mesh, context.device, context.config
        self._parallelized, self._stated = parallelized, stated

    def of(self, batch: Any, samples_before: int) -> tuple[Batch, ...]:
        """The micro-batches of a step, or of an evaluation if gradients are off; some may be empty. Collective as
        `sizes`. Raises ValueError for a batch of another form, or with too few samples. `samples_before`: of all
        steps."""
        seen = apply_to_tensors(batch, host_copy)
        check_batch(seen, self._stated, self._allowed.forward, self._loss)
        args, kwargs, labels = parts_of_batch(seen)
        self._allowed.check(args, kwargs, labels)
        sizes = self.sizes(labels, named(args, kwargs), keeps_modes=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._check_accumulation(sizes, samples_before)
        whole = read_batch(batch, device=self._device, first_sample=self.first_sample(sizes))
        self.look(whole.args, whole.kwargs, whole.labels)
        if len(whole.args) + len(whole.kwargs) > 1 and "attention_mask" not in whole.kwargs:
            self._check_shapes(whole)
        if self._refusal and torch.is_grad_enabled():
            raise ValueError(self._refusal)
        self._comparison.add_read(batch)
        self._comparison.add_batch({name: host_copy(x) for name, x in whole.tensors.items()})
        pipeline, accumulation_steps = self._config.parallel.pipeline, self._config.gradient_accumulation
        count_of = pipeline.parts_of if torch.is_grad_enabled() else pipeline.fewer_of
        count = count_of(sizes, accumulation_steps, self._config.parallel.tensor.sample_parts)
        parts = tuple(part for turn in whole.cut(accumulation_steps) for part in turn.cut(count))
        if pipeline.is_staged:
            for (
                part
            ) in parts:  # every stage raises for a batch that cannot be split, before one waits for another
                if part.size:
                    self._parallelized.local_part(part)
        return parts

    def look(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], labels: Tensor | None = None, *,
        is_own_loop: bool = False,
    ) -> None:  # fmt: skip
        """Look at the arguments of a forward. Raises ValueError for samples that see each other, or a swap of layers
        that makes another model, by the first ones. Also for a length at which the model in parts is another. And for
        ids of other lengths on other ranks, if padding is seen; collective then. `is_own_loop`: its loss may be a
        number that the forward gives."""
        inputs = first_input(args, kwargs)
        samples = len(inputs)
        if self._seen_padding.behind and inputs.dim() == 2 and "attention_mask" not in kwargs:
            self._check_lengths(inputs.shape[1] if samples else 0)
        if inputs.dim() == 2 and self._mesh.size("data") > 1:
            at_left = self._seen_padding.at_left(kwargs, labels)
            self._comparison.add_length(inputs.shape[1] if samples else 0, at_left=at_left)
        proofs = self._parallelized.lengths
        if proofs is not None and samples and inputs.dim() == 2 and not inputs.is_floating_point():
            with _disable_current_modes():  # a meter does not count what copies make
                proofs.check(inputs.shape[1])
        if now := [each for each in self._looks if each.waits_for(samples)]:
            args, kwargs = apply_to_tensors((args, dict(kwargs)), to_host)
            with _disable_current_modes():
                for each in now:
                    if is_own_loop and each is self._first_batch:
                        self._first_batch.check_numbers(args, kwargs, samples)
                    if not each.check(args, kwargs, samples):
                        self._looks.remove(each)
                        self._first_batch = None if each is self._first_batch else self._first_batch

    def _check_accumulation(self, sizes: Sequence[int], samples_before: int) -> None:
        """Raises ValueError for more accumulated parts than samples, where no batch has filled them. Allows one more
        on each data rank, as ranks need not have equally many, and `UNSEEN` where this rank knows its own alone. The
        last batch of an epoch may be smaller."""
        parts, ranks = self._config.gradient_accumulation, self._mesh.size("data")
        unseen = UNSEEN if len(sizes) < ranks else 0
        if parts > ranks * (max(sizes) + 1) + unseen + samples_before:
            here = " on this rank" if len(sizes) < ranks else ""
            raise ValueError(
                f"gradient_accumulation={parts}: so many parts of a batch of {sum(sizes)} samples{here}; "
                f"legal: at most {max(1, sum(sizes))}, or larger batches"
            )

    def _check_lengths(self, tokens: int) -> None:
        """Raises ValueError for sequences of other lengths on other data ranks; 0 tokens: none here. Collective."""
        lengths = self._mesh.axis("data").all_gather(torch.tensor([tokens])).tolist()
        if len({*lengths} - {0}) > 1:
            raise ValueError(
                f"batch: {lengths} tokens on the data ranks, which collators pad for each rank alone. The model's "
                f"tokens see padding, so its numbers would depend on the number of ranks. Legal: one length, an "
                f"attention_mask that the model takes, or data=1"
            )

    def _check_shapes(self, batch: Batch) -> None:
        """Raises ValueError for arguments of other shapes on other data ranks. Collective."""
        mark = _mark_of(batch.arguments) if batch.size else -1
        if len({*self._mesh.axis("data").all_gather(torch.tensor([mark])).tolist()} - {-1}) > 1:
            raise ValueError(
                f"batch: its arguments have other shapes on other data ranks, and on this one "
                f"{_shapes_of(batch.arguments)} beside the "
                f"samples. Collators pad for each rank alone, and tokens may see padding. Legal: one length, an "
                f"attention_mask that the model takes, or data=1"
            )

    def sizes(self, labels: Tensor, given: Mapping[str, Any], *, keeps_modes: bool) -> list[int]:
        """The number of samples of each data rank, from its `labels`; collective. Of this rank alone if no part needs
        the others; then not collective. `given`: the arguments of the forward by name. `keeps_modes`: modules in
        training stay so. Raises ValueError for a rank without any, or with samples of another shape, if statistics of
        all are read."""
        auxiliary, data = self._parallelized.auxiliary, self._mesh.axis("data")
        reads_all = keeps_modes and any(norm.training for norm in self._seen_padding.statistics)
        row = [labels.shape[0], *([int(valid_labels(labels))] if auxiliary.names else [])]
        row += [_mark_of(given)] if reads_all else []
        rows, told = [row], self._parallelized.reported_loss or reads_all
        if data.size > 1 and (told or self._config.parallel.pipeline.is_staged):
            rows = data.all_gather(torch.tensor(rows)).tolist()  # on the host, which waits for no device
        sizes = [int(size) for size, *_ in rows]
        if reads_all:
            _check_statistics(sizes, {mark for *_, mark in rows}, given)
        if auxiliary.names:
            auxiliary.begin(samples=sum(sizes), labels=sum(n for _, n, *_ in rows))
        return sizes

    def first_sample(self, sizes: Sequence[int]) -> int:
        """The index of this rank's first sample in the global batch; 0 without dropout, which alone needs it."""
        return sum(sizes[: self._mesh.coord("data")]) if self._parallelized.has_dropout else 0


def _shapes_of(given: Mapping[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """What the tensors of each argument have beside samples."""
    return {
        name: [(*x.shape[1:],) for x in tree_leaves(given[name]) if isinstance(x, Tensor)]
        for name in sorted(given)
    }


def _mark_of(given: Mapping[str, Any]) -> int:
    """A number that is equal where `_shapes_of` is."""
    return zlib.crc32(repr(_shapes_of(given)).encode())


def _check_statistics(sizes: Sequence[int], marks: Collection[int], given: Mapping[str, Any]) -> None:
    """Raises ValueError where statistics would not be those of one process. Then a data rank has no samples, or pads
    them to a shape of its own."""
    if not all(sizes):
        raise ValueError(
            f"batch: {list(sizes)} samples on the data ranks, and a batch norm reads those of all. Legal: at least one "
            f"sample on each, such as drop_last=True leaves"
        )
    if len(marks) > 1:
        raise ValueError(
            f"batch: its arguments have other shapes on other data ranks, and on this one {_shapes_of(given)} beside "
            f"the samples. A batch norm reads padding, masked or not. Legal: one shape, or data=1"
        )
