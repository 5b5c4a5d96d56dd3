"""Compares the tensor modes of one world: traffic, number of calls and memory of each.

Note: where the figures come from.
Layer traffic is the modes' own `planned_payload`.  Weights, activations and gradients come from `planner.plan` for the
same mesh, so a row equals a run.  *Payload* is the bytes that a rank passes to collectives.  *Wire* is the least that
it must send: 2 (n-1)/n of an all-reduce, (n-1)/n of every other collective.  Each call waits for the slowest peer.

Wire is linear in the tokens T of a micro-batch: a T + b.  1D moves no weights, so its b is 0; grids have a smaller a.
Above the crossing of the lines of two modes, on as many ranks, the second one sends less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from colossal_lite.config.config import Config
from colossal_lite.config.parallel_schema import FLAT, TENSOR_MODES, ModelFacts, TensorConfig, token_parts
from colossal_lite.config.rules import divisors
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.tensor_modes import LayerSizes, mode_file
from colossal_lite.models import GPTConfig
from colossal_lite.numerics.precision import Precision
from colossal_lite.observe.tables import size
from colossal_lite.planner.limits import check_sizes
from colossal_lite.planner.planner import facts_of_config, plan
from colossal_lite.sharding.mesh_layout import MeshLayout


@dataclass(frozen=True)
class ModeCost:
    """The step of one rank under one tensor mode. Bytes of all its micro-batches."""

    tensor: TensorConfig
    data: int
    layers_payload_bytes: int
    layers_wire_bytes: int
    calls: int
    """Calls of the layers: how often a rank waits for others."""
    gradients_wire_bytes: int
    weights_bytes: int
    activations_bytes: int
    """Kept for backward by one micro-batch, logits included."""
    peak_bytes: int
    pays_above_tokens: float | None = None
    """Tokens of a micro-batch above which the layers send less than in 1D on as many ranks; None: never."""

    @property
    def wire_bytes(self) -> int:
        return self.layers_wire_bytes + self.gradients_wire_bytes

    @property
    def title(self) -> str:
        return title_of(self.tensor, self.data)


@dataclass(frozen=True)
class Refused:
    """A mesh that this model or batch cannot have, and the first reason."""

    title: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The legal modes, by what a rank sends; prints as a table."""

    rows: tuple[ModeCost, ...]
    refused: tuple[Refused, ...]
    width: int

    @property
    def verdict(self) -> tuple[str, ...]:
        """The mode that moves least, the mode that holds least, and the size above which a grid pays, in words."""
        least, lightest = self.rows[0], min(self.rows, key=lambda row: row.peak_bytes)
        said = [
            f"{least.title} moves least: {size(least.wire_bytes)} a rank and step",
            f"{lightest.title} holds least: {size(lightest.peak_bytes)}",
        ]
        for row in self.rows:
            if row.tensor.mode != FLAT and row.tensor.size > 1:
                if row.pays_above_tokens is None:
                    when = f"moves more than {FLAT} on as many ranks at any length"
                else:
                    ratio = row.pays_above_tokens / self.width
                    when = (
                        f"moves less than {FLAT} on as many ranks above {math.ceil(row.pays_above_tokens):,} tokens "
                        f"a micro-batch ({ratio:.2g} times the width)"
                    )
                said.append(f"{row.title} {when}")
        return tuple(said)

    def __str__(self) -> str:
        lines = [
            f"{row.title:<24} wire {size(row.wire_bytes):>12}  calls {row.calls:>5}  peak {size(row.peak_bytes):>12}"
            for row in self.rows
        ]
        lines += [f"{row.title:<24} refused: {row.reason}" for row in self.refused]
        return "\n".join((*lines, *self.verdict))


def compare_tensor(
    config: Config | Mapping[str, Any], model: GPTConfig, *, batch: int, sequence: int, world_size: int
) -> Comparison:
    """Compares every split of the ranks that `config` leaves to data and tensor parallelism, in every tensor mode.

    `batch`: samples a step, over all ranks.  Nothing is allocated.  Raises ConfigError where no mode is legal.
    """
    config = Config.load(config)
    check_sizes(config, facts_of_config(model), batch=batch, sequence=sequence, world_size=world_size)
    inner = config.parallel.pipeline.size * config.parallel.sequence.size
    rows: list[ModeCost] = []
    refused: list[Refused] = []
    for tensor in candidates(max(1, world_size // inner), config.parallel.tensor):
        data = world_size // inner // tensor.size
        try:
            rows.append(_cost(_with(config, tensor), model, batch, sequence, world_size))
        except ValueError as error:
            refused.append(Refused(title_of(tensor, data), str(error).splitlines()[-1].strip()))
    if not rows:
        plan(config, model, batch=batch, sequence=sequence, world_size=world_size)  # says why
        raise ValueError(
            "compare: no tensor mode is legal: " + "; ".join(f"{r.title}: {r.reason}" for r in refused)
        )
    return Comparison(tuple(sorted(rows, key=lambda row: row.wire_bytes)), tuple(refused), model.width)


def candidates(ranks: int, like: TensorConfig | None = None) -> Iterator[TensorConfig]:
    """Tensor meshes whose size divides `ranks`: none, and every mode of every size that it fits; 1d as in `like`."""
    chosen = like or TensorConfig()
    yield TensorConfig()
    for number, (name, mode) in product(divisors(ranks)[1:], TENSOR_MODES.items()):
        options = {each: getattr(chosen, each) for each in mode.reads - {"depth"}}
        if "depth" not in mode.reads:
            depths = [1]
        else:  # 2105.14500: a depth of at most q
            depths = [d for d in divisors(number)[1:] if d * d * d <= number]
        for depth in depths:
            tensor = TensorConfig(size=number, mode=name, depth=depth, **options)
            if tensor.fits(number):
                yield tensor


def title_of(tensor: TensorConfig, data: int) -> str:
    """For people: `2.5d 8 (depth 2) x data 2`."""
    if tensor.size == 1:
        return f"data {data}"
    depth = f" (depth {tensor.depth})" if "depth" in tensor.rule.reads else ""
    return f"{tensor.mode} {tensor.size}{depth}" + (f" x data {data}" if data > 1 else "")


def _with(config: Config, tensor: TensorConfig) -> Config:
    options = {"data": "auto"} | {f"tensor.{name}": value for name, value in tensor.model_dump().items()}
    return Config.load(config, [f"--parallel.{name}={value}" for name, value in options.items()])


def _cost(config: Config, model: GPTConfig, batch: int, sequence: int, world_size: int) -> ModeCost:
    made = plan(config, model, batch=batch, sequence=sequence, world_size=world_size)
    config = config.check_world(world_size)
    layout, facts = config.layout(), facts_of_config(model)
    itemsize = Precision.of(config.precision).compute.itemsize
    parts = token_parts(config.parallel.tensor, config.parallel.sequence)
    tokens = -(-sequence // parts) * parts // config.parallel.sequence.size
    rows = [
        row
        for samples in made.micro_batches
        if samples
        for row in layer_traffic(layout, config.parallel.tensor, model, facts, samples, tokens, itemsize)
    ]
    layers = wire_bytes(rows, layout)
    tensor = config.parallel.tensor
    return ModeCost(
        tensor=tensor,
        data=layout.size("data"),
        layers_payload_bytes=sum(row.payload_bytes for row in rows),
        layers_wire_bytes=layers,
        calls=sum(row.calls for row in rows),
        gradients_wire_bytes=wire_bytes(made.traffic, layout) - layers,
        weights_bytes=made.bytes_of("weights"),
        activations_bytes=made.bytes_of("activations") + made.bytes_of("logits"),
        peak_bytes=made.peak_bytes,
        pays_above_tokens=pays_above_tokens(tensor, model, itemsize) if tensor.mode != FLAT else None,
    )


def layer_traffic(
    layout: MeshLayout, tensor: TensorConfig, model: GPTConfig, facts: ModelFacts, batch: int, sequence: int,
    itemsize: int,
) -> tuple[LedgerRow, ...]:  # fmt: skip
    """Forward and backward of one micro-batch on the tensor axes, by the formula of the mode."""
    if tensor.size == 1:
        return ()
    mesh = Mesh.recording(layout)
    gated, centred = model.activation == "swiglu", model.norm == "layer"
    sizes = LayerSizes(facts, batch, sequence, itemsize, model.bias, gated, centred)
    return mode_file(tensor.mode).planned_payload(mesh, tensor, sizes)


def wire_bytes(rows: Sequence[LedgerRow], layout: MeshLayout) -> int:
    """The bytes that one rank must send for these rows, with optimal algorithms (parallel.md 1.0)."""
    total = 0.0
    for row in rows:
        axes = [axis.name for axis in layout.axes] if row.axis == "world" else row.axis.split("*")
        ranks = layout.size(*axes)
        share = 1.0 if row.operation == "send" else (ranks - 1) / ranks
        total += row.payload_bytes * share * (2 if row.operation == "all_reduce" else 1)
    return round(total)


def pays_above_tokens(tensor: TensorConfig, model: GPTConfig, itemsize: int) -> float | None:
    """Tokens of a micro-batch above which the layers send less than those of 1D on as many ranks; None: never."""
    grid, flat = (
        _line(mode, model, itemsize)
        for mode in (tensor, TensorConfig(size=tensor.size, sequence_parallel=tensor.sequence_parallel))
    )
    if grid[0] >= flat[0]:
        return None
    return max(0.0, (grid[1] - flat[1]) / (flat[0] - grid[0]))


def _line(tensor: TensorConfig, model: GPTConfig, itemsize: int) -> tuple[float, float]:
    """(bytes a token, constant bytes) that one rank sends for a micro-batch."""
    layout = MeshLayout.build(tensor=tensor.axis())
    batch, facts = tensor.size**2, facts_of_config(model)  # every mode divides it
    one, two = (
        wire_bytes(layer_traffic(layout, tensor, model, facts, n * batch, 1, itemsize), layout)
        for n in (1, 2)
    )
    return (two - one) / batch, float(2 * one - two)


def table(made: Comparison) -> Any:
    """A comparison as a rich table, with the verdict and the refused meshes below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    out = Table(title="one rank, one step", title_justify="left", box=None, pad_edge=False)
    columns = ("mode", "layers: sent", "calls", "gradients: sent", "weights", "activations", "peak")
    for index, column in enumerate(columns):
        out.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in made.rows:
        numbers = (
            size(row.layers_wire_bytes), f"{row.calls:,}", size(row.gradients_wire_bytes), size(row.weights_bytes),
            size(row.activations_bytes), size(row.peak_bytes),
        )  # fmt: skip
        out.add_row(row.title, *numbers)
    refused = [Text(f"{row.title} refused: {row.reason}") for row in made.refused]
    return Group(out, Text(""), *map(Text, made.verdict), *refused)
