"""From what a user hands to a step to the micro-batches of this rank.

Note: all data ranks cut into as many micro-batches, whatever they were handed, so that they execute one plan; what is
too little for that is empty on some.  They tell each other how many samples they have only where someone asks: dropout,
whose masks follow from a sample's place in the global batch, a pipeline, and auxiliary losses, for valid labels too.
Cost, where someone does: one all-gather over `data`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colossal_lite.data.batch import Batch, read_batch
from colossal_lite.data.batch_checks import check_batch
from colossal_lite.engine.context import Context
from colossal_lite.parallel.parallelize import Parallelized


class MicroBatches:
    """Reads batches, all of one form."""

    def __init__(self, context: Context, parallelized: Parallelized, vocabulary: int | None) -> None:
        """`vocabulary`: ids are below it, where it is known."""
        self._mesh, self._device, self._config = context.mesh, context.device, context.config
        self._parallelized, self._vocabulary = parallelized, vocabulary

    def of(self, batch: Any) -> tuple[Batch, ...]:
        """Those of a step, or of an evaluation where no gradients are computed; some of them perhaps empty. Collective
        as `sizes`. Raises ValueError for a batch that has another form, or too few samples."""
        check_batch(batch, vocabulary=self._vocabulary)
        labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
        sizes = self.sizes(labels)
        whole = read_batch(batch, device=self._device, first_sample=self.first_sample(sizes))
        pipeline, accumulation_steps = self._config.parallel.pipeline, self._config.gradient_accumulation
        count = (
            pipeline.parts_of(sizes, accumulation_steps)
            if torch.is_grad_enabled()
            else pipeline.fewer_of(sizes, accumulation_steps)
        )
        parts = tuple(part for turn in whole.cut(accumulation_steps) for part in turn.cut(count))
        if pipeline.size > 1:
            for part in parts:  # what cannot be cut is told by every stage, before any waits for another
                if part.size:
                    self._parallelized.strategy.local_part(part)
        return parts

    def sizes(self, labels: Tensor) -> list[int]:
        """The samples of each data rank, from its `labels`; of this one alone where nobody asks for more. Collective
        where someone does."""
        auxiliary, told = self._parallelized.auxiliary, self._parallelized.reported_loss
        row = [labels.shape[0], *([int((labels != -100).sum())] if auxiliary.names else [])]
        rows, data = [row], self._mesh.axis("data")
        if data.size > 1 and (told or self._config.parallel.pipeline.size > 1):
            rows = data.all_gather(torch.tensor(rows, device=self._device)).tolist()
        if auxiliary.names:
            auxiliary.begin(samples=sum(size for size, _ in rows), labels=sum(n for _, n in rows))
        return [int(size) for size, *_ in rows]

    def first_sample(self, sizes: Sequence[int]) -> int:
        """Where this rank's samples begin in the global batch; only dropout asks."""
        return sum(sizes[: self._mesh.coord("data")]) if self._parallelized.has_dropout else 0
