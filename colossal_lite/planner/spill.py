"""Chooses how a model larger than its device trains there: layer by layer, or stage by stage, within its budget.

Note: the choice.
Each way is planned as `colossal-lite plan` does, so its bytes are those of the engine.  Of the ways that fit, the one
with the fewest bytes over the link is taken; of equals the one with fewer stages.  Layer by layer, weights go up twice
for each micro-batch.  Stage by stage (arXiv 2110.08633) they go up twice for all of them; but all micro-batches are
then in flight.  So a device with room for their activations has stages, and a smaller one has layers.
All ways have the bits of a run without a budget: the choice is made only where sums are ordered.  Stages are tried only
where no two of them share a weight: its gradients would be added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from colossal_lite.config.config import Config
from colossal_lite.numerics.random import on_meta
from colossal_lite.observe.tables import size, table
from colossal_lite.planner.dry_run import Builder, ValuesError
from colossal_lite.planner.planner import plan
from colossal_lite.transforms.activation_checkpoint import blocks_of

Options = tuple[str, ...]
ROOM = 0.97
"""Share of the budget that a way may plan with: a first step has held up to 2 % more than its forecast."""


@dataclass(frozen=True)
class Way:
    """One way of training within a budget, planned."""

    name: str
    options: Options
    """Settings over those of the config, as a command line has them."""
    peak_bytes: int
    """On the device."""
    link_bytes: int
    """Over the link in a step, both ways."""
    fits: bool


@dataclass(frozen=True)
class Spill:
    """The ways that were planned, and the one that is taken. Prints as a table."""

    ways: tuple[Way, ...]
    chosen: Way | None
    """None: the config as it is."""

    @property
    def options(self) -> Options:
        return () if self.chosen is None else self.chosen.options

    def __str__(self) -> str:
        rows = []
        for way in self.ways:
            fits = "*" if way is self.chosen else "yes" if way.fits else "no"
            rows.append([way.name, size(way.peak_bytes), size(way.link_bytes), fits])
        return table(["way", "on the device", "over the link", "fits"], rows)


def spill(config: Config, model: Builder, *, batch: int, sequence: int) -> Spill:
    """How a task on one device trains `batch` samples of `sequence` tokens a step within `memory.device_budget`.

    Settings that the config gives stay as they are.  Nothing is planned without `memory.placement='auto'` and a budget,
    with stages of the user's own, or without `zero.sum_order='ordered'`.  Raises ConfigError for a config that cannot
    be planned."""
    memory, given = config.memory, {row.path for row in config.resolved() if row.origin != "default"}
    is_free = config.zero.stage == 3 or "zero.stage" not in given
    asks = memory.placement == "auto" and memory.device_budget is not None
    if not (asks and is_free and config.zero.sum_order == "ordered") or config.parallel.pipeline.is_staged:
        return Spill((), None)
    try:
        whole = _planned("as given", (), config, model, batch, sequence)
    except ValuesError:  # only a step shows what this model needs
        return Spill((), None)
    if whole.fits:
        return Spill((whole,), None)
    ways = [whole]
    for name, options in _candidates(config, model):
        try:
            ways.append(_planned(name, options, config, model, batch, sequence))
        except ValueError:  # a model that cannot be cut so: it is no way
            continue
    fitting = [way for way in ways if way.fits]
    return Spill(tuple(ways), min(fitting, key=lambda way: way.link_bytes, default=None))


def _planned(name: str, options: Options, config: Config, model: Builder, batch: int, sequence: int) -> Way:
    budget = f"--memory.device_budget={int(ROOM * (config.memory.device_budget or 0))}"
    made = plan(Config.load(config, (*options, budget)), model, batch=batch, sequence=sequence, world_size=1)
    return Way(name, options, made.peak_bytes, made.link_bytes, bool(made.fits))


def _candidates(config: Config, model: Builder) -> Iterator[tuple[str, Options]]:
    """Layer by layer; then each number of stages that has another number of layers in its largest stage."""
    sharded = ("--zero.stage=3",) if config.zero.stage != 3 else ()
    if sharded:
        yield "layer by layer", sharded
    module = on_meta(model)
    parts, layers = config.gradient_accumulation, len(blocks_of(module))
    names = [len(list(module.named_parameters(remove_duplicate=once))) for once in (True, False)]
    if parts == 1 or names[0] != names[1]:
        return  # with one micro-batch a stage saves nothing
    for stages in sorted({-(-layers // most): most for most in range(layers - 1, 0, -1)}):
        yield f"{stages} stages", (
            *sharded, "--gradient_accumulation=1", "--parallel.pipeline.size=1", "--parallel.pipeline.schedule=bfs",
            f"--parallel.pipeline.stages_per_rank={stages}", f"--parallel.pipeline.micro_batches={parts}",
        )  # fmt: skip
