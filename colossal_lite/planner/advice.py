"""Searches for the configurations that fit and are nearest to one that does not.

Note: the search.
A candidate changes some of: ZeRO stage, parts of a step, recomputation, tensor and pipeline size, tiers of state.  Each
change saves memory.  Candidates are ordered by what their changes cost a run (`Choice.distance`).  A candidate is
skipped if one that fits changes no more in every field.  It is skipped too if its least memory is too much:
its state, cut evenly, and activations that shrink with the parts of a step.  All others are planned on every stage of
the pipeline, as `colossal-lite plan` does.  The number of plans bounds the time: some 0.1 s each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from colossal_lite.config.config import Config
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.rules import divisors, legal_tensor_sizes
from colossal_lite.models import GPTConfig
from colossal_lite.observe.tables import size
from colossal_lite.planner.dry_run import Builder
from colossal_lite.planner.planner import facts_of_model, plan
from colossal_lite.planner.run_plan import RunPlan

MOST_PLANS = 16
PLACEMENTS = ("device", "host", "auto")


SHARDED_FROM = {"weights": 3, "gradients": 2, "masters": 1, "optimizer": 1}
"""Kinds of state, and the ZeRO stage from which each is cut over the data axis."""
EVEN = 0.97
"""Share of an even split that is certain; the rest may be alignment, or the same at any size."""
Settings = tuple[tuple[str, str | int], ...]


class Choice(NamedTuple):
    """The settings of a candidate; a larger value needs less memory on a device."""

    stage: int
    parts: int
    """gradient_accumulation"""
    recomputes: int
    tensor: int
    pipeline: int
    place: int
    """Index in PLACEMENTS; beyond it for any other placement, which stays."""

    @property
    def state(self) -> tuple[int, ...]:
        """The fields that decide the bytes of state."""
        return self.stage, self.tensor, self.pipeline, self.place

    def goes_as_far_as(self, other: Choice) -> bool:
        """Whether it needs no more memory than `other` in every field."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def distance(self, given: Choice) -> float:
        """The cost of the changes for a run: each counts, and more if it moves, waits or computes more."""
        changed = sum(mine != theirs for mine, theirs in zip(self, given, strict=True))
        return (
            changed
            + (0.0, 0.1, 0.2, 1.0)[self.stage]
            + 0.2 * math.log2(self.parts / given.parts)
            + 1.0 * (self.recomputes - given.recomputes)
            + 0.8 * math.log2(self.tensor / given.tensor)
            + 1.2 * math.log2(self.pipeline / given.pipeline)
            + 1.5 * (self.place - given.place)
        )


@dataclass(frozen=True)
class Fit:
    """A configuration that fits: its changes, and the plan of its fullest rank."""

    settings: Settings
    plan: RunPlan

    @property
    def options(self) -> str:
        """The changes as command-line options: `--zero.stage 3`."""
        return " ".join(f"--{path} {value}" for path, value in self.settings)


@dataclass(frozen=True)
class Advice:
    """The nearest configurations that fit, and how many were planned; prints as lines."""

    fits: tuple[Fit, ...]
    planned: int

    def __str__(self) -> str:
        if not self.fits:
            return (
                f"none of {self.planned} configurations near it fits; what would: more ranks, a shorter sequence, a "
                f"smaller model"
            )
        lines = [f"nearest that fit, of {self.planned} that were planned:"]
        for fit in self.fits:
            lines += [f"  {fit.options}", f"      peak {size(fit.plan.peak_bytes)}, {fit.plan.moved}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Request:
    """Arguments of `plan` besides the configuration."""

    model: GPTConfig | Builder
    batch: int
    sequence: int
    world_size: int
    device_bytes: int
    one_host: bool = False

    def plan(self, config: Config, rank: int = 0) -> RunPlan:
        return plan(
            config, self.model, batch=self.batch, sequence=self.sequence, world_size=self.world_size, rank=rank,
            device_bytes=self.device_bytes, one_host=self.one_host,
        )  # fmt: skip


def advise(config: Config, asked: Request, count: int = 3) -> Advice:
    """The `count` configurations nearest to `config` whose every rank fits; `launch` and `initialize` take each.

    Raises ConfigError for a `config` that cannot be planned.
    """
    base = asked.plan(config)
    search = _Search(config, asked, base, facts_of_model(asked.model))
    found: dict[Choice, Fit] = {}
    planned = 1
    for choice in search.choices():
        if len(found) == count or planned >= MOST_PLANS:
            break
        if any(map(choice.goes_as_far_as, found)) or search.least_bytes(choice) > asked.device_bytes:
            continue
        settings = search.settings(choice)
        plans = list(_until_one_does_not_fit(config, settings, choice.pipeline, asked))
        planned += len(plans)
        if plans:
            search.learn(choice, plans[0])
        if len(plans) == choice.pipeline and plans[-1].fits:
            found[choice] = Fit(settings, max(plans, key=lambda made: made.peak_bytes))
    return Advice(tuple(found.values()), planned)


def _until_one_does_not_fit(
    config: Config, settings: Settings, pipeline: int, asked: Request
) -> Iterator[RunPlan]:
    """Plans of one rank of each stage of the pipeline; none for a configuration that is refused."""
    try:
        changed = Config.load(config, [f"--{path}={value}" for path, value in settings])
        for coord in range(pipeline):
            made = asked.plan(changed, coord * (asked.world_size // pipeline))
            yield made
            if not made.fits:
                return
    except ValueError:  # this candidate is refused: it is no advice
        return


@dataclass
class _Search:
    """The candidates around one configuration, and the least memory that each can have."""

    config: Config
    asked: Request
    base: RunPlan
    facts: ModelFacts | None
    kept: dict[Choice, tuple[int, int]] = field(default_factory=dict)
    """Of each planned choice: samples of a part, and the bytes that they keep for backward."""
    floors: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By `Choice.state`: planned bytes besides activations and temporaries."""

    def __post_init__(self) -> None:
        place = self.config.memory.placement
        self.given = Choice(
            self.config.zero.stage,
            self.config.gradient_accumulation,
            int(self.config.activation_checkpoint == "full"),
            self.config.parallel.tensor.size,
            self.config.parallel.pipeline.size,
            PLACEMENTS.index(place) if place in PLACEMENTS else len(PLACEMENTS),
        )
        self.learn(self.given, self.base)

    def learn(self, choice: Choice, made: RunPlan) -> None:
        """Record the bytes that backward needs: in proportion to the samples, at best cut evenly over tensor ranks."""
        kept = made.bytes_of("activations") + made.bytes_of("logits")
        self.kept[choice] = self._part_samples(choice), kept
        self.floors[choice.state] = made.peak_bytes - kept - made.bytes_of("temporaries")

    def choices(self) -> list[Choice]:
        """Every candidate, the nearest first."""
        found = {choice for cut in self._cuts() for choice in self._within(*cut)}
        return sorted(found - {self.given}, key=lambda choice: (choice.distance(self.given), choice))

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Tensor and pipeline sizes that the model allows and that divide the world."""
        parallel, world_size = self.config.parallel, self.asked.world_size
        if self.facts is None:
            yield self.given.tensor, self.given.pipeline
            return
        stages = self.facts.layers // parallel.pipeline.stages_per_rank
        for tensor in legal_tensor_sizes(parallel.tensor, parallel.sequence, self.facts):
            for pipeline in divisors(world_size):
                fills = world_size % (tensor * pipeline * parallel.sequence.size) == 0
                if fills and tensor >= self.given.tensor and self.given.pipeline <= pipeline <= stages:
                    yield tensor, pipeline

    def _within(self, tensor: int, pipeline: int) -> Iterator[Choice]:
        """All other changes."""
        given = self.given
        shards = self._data(tensor, pipeline) * self.config.parallel.sequence.size
        local_samples = self.asked.batch // self._data(tensor, pipeline)
        powers = range(max(1, local_samples // given.parts).bit_length())
        places = range(given.place, len(PLACEMENTS)) if given.place < len(PLACEMENTS) else [given.place]
        for place, recomputes, power in product(places, range(given.recomputes, 2), powers):
            for stage in range(given.stage, 4 if shards > 1 else given.stage + 1):
                yield Choice(stage, given.parts << power, recomputes, tensor, pipeline, place)

    def _data(self, tensor: int, pipeline: int) -> int:
        return self.asked.world_size // (tensor * pipeline * self.config.parallel.sequence.size)

    def settings(self, choice: Choice) -> Settings:
        """The settings that differ from the given configuration, as options."""
        named: dict[str, tuple[int | str, int | str]] = {
            "zero.stage": (choice.stage, self.given.stage),
            "gradient_accumulation": (choice.parts, self.given.parts),
            "activation_checkpoint": (
                "full" if choice.recomputes else "",
                "full" if self.given.recomputes else "",
            ),
            "parallel.tensor.size": (choice.tensor, self.given.tensor),
            "parallel.pipeline.size": (choice.pipeline, self.given.pipeline),
        }
        made = [(path, new) for path, (new, old) in named.items() if new != old]
        if (
            self._data(choice.tensor, choice.pipeline) != self.config.parallel.data
            and self.config.parallel.data != "auto"
        ):
            made.append(("parallel.data", self._data(choice.tensor, choice.pipeline)))
        if choice.place != self.given.place:
            made.append(("memory.placement", PLACEMENTS[choice.place]))
            if PLACEMENTS[choice.place] == "auto":
                made.append(("memory.device_budget", self.asked.device_bytes))
        return tuple(made)

    def least_bytes(self, choice: Choice) -> int:
        """The least bytes of the fullest rank: its even share of the state, and activations if they are known."""
        zero, sequence = self.config.zero, self.config.parallel.sequence.size

        def shards(stage: int, data: int, from_stage: int) -> int:
            return (zero.shard_size or data) * sequence if stage >= from_stage else 1

        given_data = self._data(self.given.tensor, self.given.pipeline)
        data, total = self._data(choice.tensor, choice.pipeline), 0.0
        share = self.base.parameters / (choice.tensor * choice.pipeline * max(1, self.base.local_parameters))
        for kind, stage in SHARDED_FROM.items():
            if choice.place == 0 or (choice.place == 1 and stage > 1):
                whole = self.base.bytes_of(kind) * shards(self.given.stage, given_data, stage)
                total += EVEN * share * whole / shards(choice.stage, data, stage)
        samples = self._part_samples(choice)
        known = [
            held * samples / of * known.tensor / choice.tensor
            for known, (of, held) in self.kept.items()
            if (known.recomputes, known.pipeline) == (choice.recomputes, choice.pipeline)
            and known.tensor <= choice.tensor
        ]
        total = max(total, self.floors.get(choice.state, 0))
        return round(total + EVEN * max(known, default=0))

    def _part_samples(self, choice: Choice) -> int:
        """Samples that the fullest rank has in a part of a step."""
        return math.ceil(
            math.ceil(self.asked.batch / self._data(choice.tensor, choice.pipeline)) / choice.parts
        )
