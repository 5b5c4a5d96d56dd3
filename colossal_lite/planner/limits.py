"""Refuses sizes for which planning would take minutes, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from colossal_lite.config.config import Config
from colossal_lite.config.errors import Problem, refuse
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.schedule.pipeline_schedules import MOST_SUBJECTS

MOST_LAYERS = 4_096
MOST_RANKS = 1_000_000
MOST_TURNS = 100_000
MOST_BYTES = 2**60
"""Largest size of one tensor: torch counts its bytes in 63 bits."""


def check_sizes(
    config: Config, facts: ModelFacts | None, *, batch: int, sequence: int, world_size: int, rank: int = 0
) -> None:
    """Raises ConfigError for sizes that are not positive or not within the mesh, and for those too large to plan."""
    refuse(_problems(config, facts, batch, sequence, world_size, rank))


def _problems(
    config: Config, facts: ModelFacts | None, batch: int, sequence: int, world_size: int, rank: int
) -> Iterator[Problem]:
    given = {"batch": batch, "sequence": sequence}
    for name, value in given.items():
        if value < 1:
            yield Problem(name, value, "is out of range", "an int >= 1")
    if not 1 <= world_size <= MOST_RANKS:
        yield Problem("world", world_size, "is out of range", f"1 to {MOST_RANKS:,} ranks")
    elif not 0 <= rank < world_size:
        yield Problem("rank", rank, "is out of range", f"0 to {world_size - 1}")
    if config.gradient_accumulation > MOST_TURNS:
        yield Problem(
            "gradient_accumulation",
            config.gradient_accumulation,
            "is too many to plan",
            f"up to {MOST_TURNS:,}",
        )
    pipeline = config.parallel.pipeline
    most = MOST_SUBJECTS // pipeline.stages
    if pipeline.is_staged and (pipeline.micro_batches or 1) > most:
        rule = f"is too many to plan on {pipeline.stages} stages"
        yield Problem("parallel.pipeline.micro_batches", pipeline.micro_batches, rule, f"up to {most:,}")
    if facts is None:
        return
    if facts.layers > MOST_LAYERS:
        yield Problem("model.layers", facts.layers, "is too many to plan", f"up to {MOST_LAYERS:,}")
    widest = max(facts.vocabulary, 3 * facts.ffn, 3 * facts.width)
    if max(batch * sequence, facts.width, 1) * widest * 8 > MOST_BYTES:
        rule = f"makes a tensor of more than {MOST_BYTES:,} bytes, with batch={batch}, sequence={sequence}"
        sizes = f"vocabulary={facts.vocabulary}, ffn={facts.ffn}, width={facts.width}"
        yield Problem("model", sizes, rule, "smaller sizes")
