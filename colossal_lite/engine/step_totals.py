"""Sums loss, tokens and squares of a step, on this rank and then in one all-reduce over the world.

Note: the all-reduce has one row of `5 + parameters` float64.  It holds the sums of loss, tokens and squares, whether
ranks differ (rank_comparison.py), and which parameters were used.  One number holds the request to stop and the
samples.  With `sum_order="ordered"` a square for each block of 1,024 elements replaces their sum.  Every rank has the
same row afterwards, so all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_lite.checks.rank_comparison import RankComparison
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.transfers import sent
from colossal_lite.numerics.precision import LossScale
from colossal_lite.observe.printed_lines import warn

STOP = 1 << 32
"""the value of a request to stop, above the samples: exact for 2**32 samples a step on 2**20 ranks"""


@dataclass(frozen=True)
class StepTotals:
    """Sums over the world, equal on every rank."""

    loss: float
    weight: float
    squares: float
    stop: bool
    samples: int
    used: Mapping[int, tuple[bool, ...]]
    """For each chunk of the whole pipeline, by its number: the entries for which some rank has a gradient."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.squares)

    @property
    def why_skipped(self) -> str:
        """Why a step with these totals is skipped."""
        if not self.weight:
            return "no label of the global batch counts"
        if not math.isfinite(self.loss):
            return f"its loss is {self.loss}"
        return f"its gradient is not finite (the sum of squares is {self.squares})"

    @property
    def grad_norm(self) -> float:
        return math.sqrt(self.squares) / self.weight if self.weight else 0.0

    @property
    def mean_loss(self) -> Tensor:
        """0-d; NaN without tokens."""
        return torch.tensor(self.loss / self.weight if self.weight else math.nan, dtype=torch.float64)

    def clip_factor(self, limit: float | None) -> float:
        """Factor on gradients so that their norm is at most `limit`."""
        return min(1.0, limit / (self.grad_norm + 1e-6)) if limit is not None else 1.0


@dataclass
class SkippedSteps:
    """Warns of skipped steps, and ends a run that skips too many in a row."""

    limit: int | None
    hides_weights: bool = False
    """Whether weights are NaN where no module reads them."""
    fixed_scale: float | None = None
    """The factor on the loss, where a smaller one may keep gradients finite and steps do not lower it."""
    in_a_row: int = 0

    def note(self, skipped: int | None, totals: StepTotals, *, tells: bool) -> None:
        """Record a step; `skipped`: its number if it was skipped. Warns if this rank `tells`. Raises ValueError on
        every rank at the limit."""
        self.in_a_row = 0 if skipped is None else self.in_a_row + 1
        if skipped is None:
            return
        told = f"step {skipped} changed nothing, as {totals.why_skipped}"
        if self.hides_weights and math.isnan(totals.loss):
            told += (
                " (zero and offload keep NaN for a weight that is read between steps, or by another module)"
            )
        cure = "a checkpoint from before, with a lower lr, clip_grad_norm or other data; None for no limit"
        if self.fixed_scale is not None and totals.weight and math.isfinite(totals.loss):
            told += f" with the fixed precision.loss_scale={self.fixed_scale:g}"
            cure = "precision.loss_scale='dynamic', which follows overflows, or a smaller number"
        if self.limit is not None and self.in_a_row >= self.limit:
            raise ValueError(
                f"{told}; that is {self.in_a_row} in a row, and optimizer.max_skipped_steps={self.limit}; legal: {cure}"
            )
        if tells:
            warn(f"{told} ({self.in_a_row} in a row)")


class StepSizes:
    """Tells, once after a load, that steps have more or fewer samples than before."""

    def __init__(self) -> None:
        self.most = 0
        """Samples of the largest step so far; a load sets it."""
        self._before, self._since = 0, list[int]()

    def loaded(self, most: int) -> None:
        """A load sets the run to a state before which the largest step had `most` samples; 0: unknown."""
        self.most = self._before = most
        self._since = []

    def note(self, samples: int) -> str:
        """The warning about a step of so many samples, or "". The first step after a load may be the last of its epoch,
        and smaller."""
        before, self.most = self._before, max(self.most, samples)
        if not before:
            return ""
        self._since.append(samples)
        if samples == before or len(self._since) == 2 or samples > before:
            self._before = 0
            if samples != before:
                return (
                    f"samples of a step: {max(self._since)} since the load, and {before} before it. The losses are no "
                    f"longer those of the saved run, unless the global batch is {before} again"
                )
        return ""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` 0-d, equal on every rank; `grad_norm` before clipping; `lr` of the default group."""

    step: int
    loss: Tensor
    grad_norm: float
    tokens: int
    skipped: bool
    lr: float


class LocalSums:
    """Sums of this rank over the micro-batches of a step. They stay on its device, so adding does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._row = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, weight: Tensor | int | float) -> None:
        """Add loss and weight of the labels of a micro-batch."""
        self._row[0] += loss
        self._row[1] += weight

    @property
    def auxiliary(self) -> Tensor:
        """The sum of auxiliary losses, 0-d."""
        return self._row[2]

    def weigh_alike(self) -> None:
        """Give the losses so far the weight 1, like the losses of every other data rank."""
        self._row[1] = 1.0

    def clear(self) -> None:
        self._row.zero_()

    def reported_loss(self, tells: bool) -> Tensor:
        """(loss, weight) that this rank reports: auxiliary losses always, the loss of the labels if `tells`."""
        loss, weight, auxiliary = self._row
        return torch.stack([loss + auxiliary, weight] if tells else [auxiliary, torch.zeros_like(weight)])


class OpenStep:
    """The current step: its number, its loss scale, and its sums so far."""

    def __init__(self, loss_scale: LossScale, device: torch.device) -> None:
        self.number = 0
        """Steps made before this one."""
        self.loss_scale = loss_scale
        self.sums = LocalSums(device)
        self.totals: StepTotals | None = None
        """None until backward has ended on all ranks."""
        self.by_count: bool | None = None
        """In a loop of the user's own, whether `backward` gets counts; None before its first call."""
        self.calls = 0
        """In a loop of the user's own, the calls of `backward`."""
        self.samples = 0
        """In a loop of the user's own, the samples of all data ranks in these calls."""
        self.own_samples = 0
        """Samples that this data coordinate has trained on in this step."""
        self.samples_before = 0
        """Samples of all earlier steps, or the number that a save or a load has set since."""
        self.sizes = StepSizes()
        self.changed_buffer = ""
        """A buffer that a forward of this step has changed; known once `totals` are."""
        self.rate_factor: float | None = None
        """Factor on the learning rates of this step; None until it is asked for."""

    def clear(self) -> None:
        """Drop the sums and totals. The counts of earlier steps and samples, and the loss scale, stay."""
        self.own_samples, self.rate_factor, self.changed_buffer = 0, None, ""
        self.totals, self.by_count, self.calls, self.samples = None, None, 0, 0
        self.sums.clear()


def all_reduce_totals(
    mesh: Mesh, told: Tensor, squares: Tensor, chunks: Sequence[Chunk], packed: Sequence[ChunkSpec],
    comparison: RankComparison, *, stop: bool, samples: int,
) -> StepTotals:  # fmt: skip
    """All-reduces over the world (loss, weight) `told` [2], the terms of the sum of `squares`, and entries in use.
    The sum also carries each rank's request to `stop`, and its data coordinate's `samples`. Collective.

    `packed`: the chunks of the whole pipeline.  Raises as `RankComparison.check` if batches or buffers
    differ, and as `Mesh.check_together` if collectives do."""
    here = {chunk.spec.id: chunk.used for chunk in chunks}
    used = [here.get(spec.id, [False] * len(spec.entries)) for spec in packed]
    counted = samples if mesh.coord("pipeline", "sequence", "tensor") == 0 else 0
    flags = [stop * STOP + counted, *(flag for mine in used for flag in mine)]
    marks = sent(torch.tensor(flags, dtype=torch.float64), told.device)
    differs = comparison.term()
    differs[0] += mesh.collectives_differ
    row = mesh.world.all_reduce(torch.cat([told, differs, marks, squares]))
    told = torch.cat([row[: 5 + len(flags)], row[5 + len(flags) :].sum(0, keepdim=True)])
    # the one wait for the device in a step
    loss, weight, apart, lengths, at_left, stops_and_samples, *counts, total = mesh.world.numbers(told)
    mesh.check_together(comparison.check(apart, lengths, at_left))
    stops, all_samples = divmod(int(stops_and_samples), STOP)
    found, start = dict[int, tuple[bool, ...]](), 0
    for spec in packed:
        found[spec.id] = tuple(count > 0 for count in counts[start : start + len(spec.entries)])
        start += len(spec.entries)
    return StepTotals(loss, weight, total, stops > 0, all_samples, found)
