"""Describes the pipeline: size, schedule, micro-batches and stages, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colossal_lite.schedule.pipeline_schedules import SCHEDULES, check_stages_per_rank

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto"]


class PipelineConfig(BaseModel):
    """`parallel.pipeline`; an int is the size alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size: Annotated[int, Field(ge=1)] = 1
    """Ranks on the `pipeline` axis. With 1 and several stages_per_rank each rank runs all stages, one after the
    other."""
    schedule: ScheduleName = "1f1b"
    """Order of the work; `colossal-lite schedule` draws it. `auto` searches within activation_cap."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Parts of one batch in flight; None: 4 for each rank, or as many as there are samples."""
    stages_per_rank: Annotated[int, Field(ge=1)] = 1
    """Stages on each rank; default: the least that the schedule allows."""
    partition: Literal["balanced", "profiled", "uniform"] | tuple[Annotated[int, Field(ge=1)], ...] = (
        "balanced"
    )
    """Units on each stage. balanced: by a cost formula. profiled: by the measured cost of one micro-batch. uniform:
    equal counts. Or the counts of all size x stages_per_rank stages."""
    activation_cap: Annotated[int, Field(ge=1)] | None = None
    """Most activations that a rank may hold, each of one stage and micro-batch. `auto` searches within it; any other
    schedule that holds more is refused. None: no cap; for auto, size x stages_per_rank, as 1f1b holds."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"size": value}
        if isinstance(value, dict) and "stages_per_rank" not in value and value.get("schedule") in SCHEDULES:
            value = value | {"stages_per_rank": SCHEDULES[value["schedule"]].stages_per_rank[0]}
        return value

    @model_validator(mode="after")
    def _rules(self) -> PipelineConfig:
        counts = len(self.partition) if isinstance(self.partition, tuple) else None
        check_stages_per_rank(self.schedule, self.stages_per_rank, self.size, counts)
        if isinstance(self.partition, tuple) and len(self.partition) != self.stages:
            raise ValueError(
                f"partition: {len(self.partition)} counts for {self.stages} stages "
                f"(size {self.size} x stages_per_rank {self.stages_per_rank}); give one count for each stage"
            )
        return self

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.size * self.stages_per_rank

    @property
    def is_staged(self) -> bool:
        """Whether a model is cut into stages, of several ranks or of one."""
        return self.stages > 1

    @property
    def is_profiled(self) -> bool:
        """Whether measured times decide where a model is cut."""
        return self.is_staged and self.partition == "profiled"

    @property
    def reduces_by_visit(self) -> bool:
        """Whether gradients may be summed over all micro-batches of a visit of a stage (arXiv 2211.05953)."""
        return self.is_staged and self.schedule == "bfs" and self.micro_batches != 1

    def parts(self, samples: int) -> int:
        """Micro-batches for a batch of `samples` on one data rank. Raises ValueError if there are too few."""
        if self.micro_batches is None:
            return max(1, min(samples, 4 * self.size)) if self.is_staged else 1
        if samples == 0:
            raise ValueError(
                f"micro_batches={self.micro_batches}: a part of the batch has no samples on a data rank, and each "
                f"micro-batch needs one. Use at least {self.micro_batches} samples for each data rank and accumulated "
                f"part, or micro_batches=None, which skips empty parts"
            )
        if samples < self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches}: the batch has {samples} samples on this data rank; "
                f"legal: at most {samples} micro-batches, None, a larger global batch, or drop_last=True of a loader"
            )
        return self.micro_batches

    def parts_of(self, sizes: Sequence[int], accumulation_steps: int, unit: int = 1) -> int:
        """Micro-batches of each of `accumulation_steps` parts of a batch, the same on all data ranks; `sizes`: the
        samples of each. By default `unit` divides each micro-batch, if it can. Raises ValueError as `parts`."""
        if not self.is_staged:
            return 1
        if self.micro_batches is None:
            most = self.parts(-(-max(sizes) // accumulation_steps))
            return _whole_units(most, sizes, accumulation_steps, unit)
        return self.parts(min(sizes) // accumulation_steps)

    def fewer_of(self, sizes: Sequence[int], accumulation_steps: int, unit: int = 1) -> int:
        """For evaluation, which takes any batch: no more micro-batches than samples."""
        if not self.is_staged:
            return 1
        most = min(
            self.micro_batches or 4 * self.size, max(1, *(-(-size // accumulation_steps) for size in sizes))
        )
        return _whole_units(most, sizes, accumulation_steps, unit)


def _whole_units(most: int, sizes: Sequence[int], accumulation_steps: int, unit: int) -> int:
    """The largest number of micro-batches up to `most` such that each has whole units of samples; 1 if none does."""
    if unit == 1:
        return most
    turns = {size // accumulation_steps for size in sizes} | {
        -(-size // accumulation_steps) for size in sizes
    }
    return next(n for n in range(most, 0, -1) if n == 1 or not any(turn % (n * unit) for turn in turns))
