"""Refuses a dataset whose last batch the mesh cannot cut, before a run trains.

Note: which batches.  A dataset with a length gives batches of known sizes.  Only the last of an epoch is smaller,
unless it is dropped.  A dataset that can only be iterated has no length, and its last batch is refused at its step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from colossal_lite.config.config import Config
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.data.loader import Loader, cut


def refuse_sizes(name: str, loader: Loader, config: Config, *, steps: int | None = None) -> None:
    """Raises ValueError if a loader's last batch cannot be cut. Also if batches of a training have fewer samples
    than accumulated parts. `steps`: batches to train on; None: an evaluation."""
    trains, whole, found = steps is not None, loader.settings.global_batch, loader.num_samples
    if trains and config.gradient_accumulation > whole:
        raise ValueError(
            f"gradient_accumulation={config.gradient_accumulation}: so many parts of "
            f"global_batch={whole} samples; legal: at most {whole}, or a larger global_batch"
        )
    pipeline, unit = config.parallel.pipeline, config.parallel.tensor.sample_parts
    cuts = _Cuts(pipeline, loader.place.parts, config.gradient_accumulation, unit, trains)
    fault = cuts.fault(loader.batch_sizes(steps))
    if found is None or not fault or cuts.fault({whole}):
        return
    below = _nearest(range(found - 1, max(0, found - whole - 1), -1), whole, cuts)
    legal = [
        f"{below} or {_nearest(range(found + 1, found + whole + 1), whole, cuts)} samples".removeprefix(
            "0 or "
        )
    ]
    if trains and found > whole:
        legal.append("drop_last=True")
    unset = replace(cuts, pipeline=pipeline.model_copy(update={"micro_batches": None}))
    if not unset.fault({whole, found % whole}):
        legal.append("micro_batches=None in parallel.pipeline")
    raise ValueError(f"{name}: {found} samples in batches of {whole}: {fault}; legal: {', '.join(legal)}")


def _nearest(counts: Sequence[int], whole: int, cuts: _Cuts) -> int:
    """The first number of samples whose batches, of at most `whole`, can all be cut; 0 if none is."""
    return next((n for n in counts if not cuts.fault({min(n, whole), n % whole})), 0)


@dataclass(frozen=True)
class _Cuts:
    """All cuts of a global batch: over data ranks, accumulated parts, micro-batches and the ranks of a grid."""

    pipeline: PipelineConfig
    data: int
    turns: int
    unit: int
    trains: bool

    def fault(self, sizes: Collection[int]) -> str:
        """Why a global batch of one of these sizes cannot be cut, or ""."""
        return next((fault for size in sorted({*sizes} - {0}) if (fault := self._fault(size))), "")

    def _fault(self, size: int) -> str:
        ranks = _pieces(size, self.data)
        count_of: Callable[..., int] = self.pipeline.parts_of if self.trains else self.pipeline.fewer_of
        try:
            count = count_of(ranks, self.turns, self.unit)
        except ValueError:
            given = f"micro_batches={self.pipeline.micro_batches}"
            return f"a batch of {size} gives a data rank fewer samples than {given} x {self.turns} accumulated parts"
        parts = [
            part for rank in ranks for turn in _pieces(rank, self.turns) for part in _pieces(turn, count)
        ]
        odd = next((part for part in parts if part % self.unit), 0)
        return (
            f"a batch of {size} has a micro-batch of {odd}, cut into {self.unit} equal parts" if odd else ""
        )


def _pieces(size: int, parts: int) -> list[int]:
    """The sizes of the pieces of a batch, as `tensor_split` makes them."""
    return [stop - start for start, stop in (cut(size, parts, part) for part in range(parts))]
