"""Draws the pictures of docs from the product's own values: meshes, shards, plans, placements and simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import torch

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.config.schema import ZeroConfig
from colossal_lite.config.zero_stage import Sharding
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.sequence_parallel import Pieces
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.schedule_report import LOOKS, OTHER
from colossal_lite.observe.schedule_report import svg as schedule_svg
from colossal_lite.observe.svg import PALETTE, Scale, box, drawing, legend, line, text, x_axis
from colossal_lite.observe.tables import SECONDS
from colossal_lite.offload.pieces import Name, StateKind, StatePiece
from colossal_lite.offload.placement import place, spill_to_disk
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.schedule.optimizer_updates import run_of
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.plan import COMPUTE, CPU, D2H, H2D, Action, ActionKind, Plan, net
from colossal_lite.schedule.simulator import ScheduleTimeline, StageCosts, simulate
from colossal_lite.schedule.step_passes import add_step
from colossal_lite.schedule.update_mix import mix_of
from colossal_lite.schedule.update_rates import Rates, UpdateBytes, equal_parts, simulated_updates
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.zero.state_bytes import forecast

WIDTH = 720
LANES = {
    COMPUTE: "device", net("data"): "network", H2D: "host to device", D2H: "device to host", CPU: "host",
}  # fmt: skip
COLOURS = {name: colour for name, colour, _ in LOOKS.values()}


def mesh() -> str:
    """Every rank of 2 x 2 x 2, with what it holds."""
    layout = MeshLayout.build(pipeline=2, data=2, tensor=2)
    out, wide, high = [text(4, 16, f"{layout.world_size} ranks: {layout.describe()}")], 150, 74
    for stage in range(2):
        left = 12 + stage * 354
        words = f"stage {stage}: {'first' if stage == 0 else 'second'} half of the layers"
        out += [*box(left, 30, 342, 212, PALETTE[stage] + "40"), text(left + 10, 48, words)]
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        x, y = 28 + at["pipeline"] * 354 + at["tensor"] * 160, 62 + at["data"] * 94
        rows = (
            f"rank {rank}", f"tensor half {at['tensor']}", f"samples {at['data'] * 4}-{at['data'] * 4 + 3}",
            f"state part {at['data']} of 2",
        )  # fmt: skip
        out += box(x, y, wide, high, PALETTE[2 + at["data"]])
        out += [text(x + wide / 2, y + 17 + 16 * i, row, "middle", "in") for i, row in enumerate(rows)]
    groups = {axis: layout.group(0, axis) for axis in ("tensor", "data", "pipeline")}
    told = ", ".join(f"{axis} {{{', '.join(map(str, ranks))}}}" for axis, ranks in groups.items())
    out.append(text(12, 262, f"groups of rank 0: {told}"))
    return drawing(WIDTH, 272, out, "A mesh of 2 x 2 x 2 ranks")


def schedules() -> str:
    """1F1B above zb-v, four ranks and eight micro-batches, on one axis."""
    found = {}
    for name in ("1f1b", "zb-v"):
        plan = generate(name, 4, 8)
        chunks = len(plan.placement()) // 4
        found[name] = simulate(plan, StageCosts.uniform(4 * chunks, *(1.0 / chunks,) * 3))
    longest_s = max(timeline.makespan_s for timeline in found.values())
    out, y = [], 0.0
    for name, timeline in found.items():
        inner = schedule_svg(timeline, width=round(60 + (WIDTH - 60) * timeline.makespan_s / longest_s))
        high = float(inner.split('height="')[1].split('"')[0])
        moved = inner.replace("predicted:", f"{name}, simulated:").replace("<svg ", f'<svg y="{y:.0f}" ', 1)
        out.append(moved)
        y += high + 8
    return drawing(WIDTH, y, out, "1F1B beside zb-v")


def lanes(timeline: ScheduleTimeline, title: str, *, until_s: float | None = None) -> str:
    """A row for each lane of one rank, a box for each action, with its seconds as a tip."""
    end_s = until_s or timeline.makespan_s
    used = [lane for lane in LANES if any(span.action.resource == lane for span in timeline.spans)]
    scale = Scale(0.0, end_s, 110, WIDTH - 16, SECONDS)
    shown = [span for span in timeline.spans if span.end_s > span.start_s and span.start_s < end_s]
    looks = {look[0]: look[1] for span in shown for look in (_look(span.action),)}
    out, y = legend(looks, 26, 4, WIDTH)
    for lane in used:
        out += [
            *box(scale.start, y + 4, scale.stop - scale.start, 20, "#80808020"),
            text(4, y + 18, LANES[lane]),
        ]
        for span in (span for span in shown if span.action.resource == lane):
            x, stop = scale.at(span.start_s), scale.at(min(span.end_s, end_s))
            number = span.action.chunk if span.action.chunk is not None else span.action.stage
            words = "" if number is None else str(number)
            out += box(x, y + 4, max(stop - x - 1, 0.5), 20, _look(span.action)[1], str(span.action), words)
        y += 26
    return drawing(WIDTH, y + 44, [text(4, 16, title), *out, *x_axis(scale, y + 6, "time")], title)


def _look(action: Action) -> tuple[str, str]:
    named = {
        ActionKind.FETCH: ("fetch", PALETTE[4]), ActionKind.EVICT: ("evict", PALETTE[6]),
        ActionKind.REDUCE: ("reduce", PALETTE[5]),
    }  # fmt: skip
    if action.kind is ActionKind.UPDATE and action.resource == CPU:
        return "update on the host", PALETTE[3]
    return named.get(action.kind) or LOOKS.get(action.kind, OTHER)[:2]


def data() -> str:
    """Reductions beside backward: six blocks, each with a chunk."""
    blocks = range(6)
    forward = [Action(ActionKind.F, stage=block, micro_batch=0) for block in blocks]
    backward = [Action(ActionKind.B, stage=block, micro_batch=0) for block in reversed(blocks)]
    costs = StageCosts((0.1,) * 6, (0.1,) * 6, (0.1,) * 6)
    others = {ActionKind.REDUCE: 0.15, ActionKind.UPDATE: 0.03}
    plan = add_step(Plan(((*forward, *backward),)))
    timeline = simulate(plan, lambda action: others.get(action.kind) or costs(action))
    return lanes(timeline, "simulated: chunks are reduced while backward runs (numbers: blocks and chunks)")


def step() -> str:
    """A step whose optimizer state is on the host: its updates run in the next forward."""
    blocks, fetch_s = 5, 0.12
    plan, memory = run_of([[block] for block in range(blocks)], 3, ahead=1)
    seconds = {ActionKind.F: 0.1, ActionKind.B: 0.2, ActionKind.UPDATE: 0.02}
    timeline = simulate(plan, lambda action: seconds.get(action.kind, fetch_s), memory=memory)
    title = (
        "simulated: state on the host, fetched and updated in the next forward (numbers: blocks and chunks)"
    )
    return lanes(timeline, title, until_s=3.2)


def updates() -> str:
    """Eight chunks, some updated on the host and some streamed, at the rates of the page."""
    work = UpdateBytes(elements=8 * 10**8, chunks=8, record=12, gradient=0, weight=2, host_memory=28)
    rates = Rates(host_update=4e9, device_update=130e9, up=50e9, down=50e9)
    timeline = simulated_updates(equal_parts(work, 8), rates, mix_of(Fraction(1, 2), range(8)))
    return lanes(
        timeline,
        "simulated: eight chunks, every second one updated on the host (8-15 gradients, 16-23 weights)",
    )


def tiers() -> str:
    """Pieces of eight chunks over device, host and disk, as two budgets place them."""
    sizes = {StateKind.WEIGHTS: (2, 2, 1), StateKind.GRADIENTS: (4, 1, 1), StateKind.OPTIMIZER: (12, 1, 1)}
    unit = 2**20
    pieces = [
        StatePiece(Name(chunk, kind), each * unit, ups, downs)
        for chunk in range(8)
        for kind, (each, ups, downs) in sizes.items()
    ]
    placed = place(pieces, {"activations": 16 * unit}, 112 * unit)
    placed = spill_to_disk(placed, 96 * unit)
    on_disk = sum(held for _, tier, held in placed.rows if tier == "disk")
    title = (
        f"8 chunks of 18 MiB under device_budget 112 MiB and host_budget 96 MiB: {placed.device_bytes // unit}, "
        f"{placed.host_bytes // unit} and {on_disk // unit} MiB used"
    )
    out, colours = [text(4, 16, title)], dict(zip(sizes, PALETTE, strict=False))
    entries, y = legend({str(kind): colour for kind, colour in colours.items()}, 26, 4, WIDTH)
    for tier in ("device", "host", "disk"):
        entries += [text(4, y + 44, tier), line(60, y + 82, WIDTH - 8, y + 82, grid=True)]
        for chunk in range(8):
            x, top = 66 + chunk * 81.0, y + 6.0
            for kind, (each, _, _) in sizes.items():
                if placed.tier_of(Name(chunk, kind)) == tier:
                    high = 8 + 2.6 * each
                    tip = f"{kind} of chunk {chunk}: {each} MiB"
                    entries += box(
                        x, top, 74, high - 2, colours[kind], tip, f"{each} MiB" if high > 14 else ""
                    )
                    top += high
            if tier == "disk":
                entries.append(text(x + 37, y + 99, f"chunk {chunk}", "middle"))
        y += 88
    return drawing(WIDTH, y + 24, [*out, *entries], title)


def zero() -> str:
    """Bytes of a parameter on one of eight ranks: bf16 weights, float32 masters and gradients, AdamW."""
    ranks, out = (
        8,
        [
            text(
                4,
                16,
                "bytes of a parameter on one of 8 ranks: bf16 weights, float32 masters and gradients, AdamW",
            )
        ],
    )
    kinds = ("weights", "gradients", "masters", "moments")
    entries, y = legend(dict(zip(kinds, PALETTE, strict=False)), 26, 4, WIDTH)
    scale = Scale(0.0, 18.0, 80, WIDTH - 40)
    for stage in range(4):
        sharding = Sharding.of(ZeroConfig(stage=stage), micro_batches=1)
        held = forecast(sharding, ranks, 1, weight=2, master_bits=32, gradient=4)
        owned = 1 if sharding.state else ranks
        shares = {kind: held.get(kind, 8 * owned) / ranks for kind in kinds}
        x = scale.start
        for kind, colour in zip(kinds, PALETTE, strict=False):
            wide = scale.at(shares[kind]) - scale.start
            entries += box(x, y + 6, wide, 24, colour, f"{kind}: {shares[kind]:g} bytes", f"{shares[kind]:g}")
            x += wide
        entries += [text(4, y + 22, f"stage {stage}"), text(x + 6, y + 22, f"{sum(shares.values()):g}")]
        y += 36
    return drawing(WIDTH, y + 8, [*out, *entries], "Bytes of a parameter on a rank by ZeRO stage")


Blocks = Mapping[tuple[tuple[int, int], tuple[int, int]], Sequence[int]]
"""Ranges of rows and of columns -> the ranks that hold this block."""


def blocks_of(weight: str, tensor: TensorConfig) -> tuple[tuple[int, int], Blocks]:
    """Shape of a weight of our GPT, and which ranks of a tensor mode hold which block of it."""
    layout = MeshLayout.build(tensor=tensor.axis())
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=16, layers=1, heads=8, width=32, sequence=8))
    spec = parallelize(model, Mesh.recording(layout)).specs[weight]
    found: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for rank in range(layout.world_size):
        rows, columns = spec.pieces(layout, layout.coords(rank))
        for row in rows:
            for column in columns:
                key = (row.start, row.start + row.length), (column.start, column.start + column.length)
                found.setdefault(key, []).append(rank)
    height, width = spec.shape
    return (height, width), found


def shards(panels: Iterable[tuple[str, str, TensorConfig]], title: str, columns: int) -> str:
    """A panel for each weight: its blocks with the ranks that hold them."""
    out, panels = [text(4, 16, title)], list(panels)
    wide = (WIDTH - 20) / columns
    bottom = 0.0
    for i, (words, weight, tensor) in enumerate(panels):
        (rows, cols), found = blocks_of(weight, tensor)
        unit = min(wide - 30, 300) / max(rows, cols)
        left, top = 10 + (i % columns) * wide, 52.0 + (i // columns) * 0
        out.append(text(left, 40, words))
        for ((r0, r1), (c0, c1)), ranks in found.items():
            told = ",".join(map(str, ranks))
            x, y = left + c0 * unit, top + r0 * unit
            colour = PALETTE[min(ranks) % 8]
            tip = f"rows {r0}-{r1 - 1}, columns {c0}-{c1 - 1}: rank {told}"
            out += box(x, y, (c1 - c0) * unit - 1, (r1 - r0) * unit - 1, colour, tip, told)
        bottom = max(bottom, top + rows * unit)
    return drawing(WIDTH, bottom + 12, out, title)


def tensor_1d() -> str:
    four = TensorConfig(size=4)
    panels = [
        ("column-wise: rows [4D, D]", "blocks.0.mlp.up.weight", four),
        ("row-wise: columns [D, 4D]", "blocks.0.mlp.down.weight", four),
    ]
    return shards(panels, "a pair of linears on 4 ranks: which rank holds which part", 2)


def tensor_grids() -> str:
    weight = "blocks.0.attention.out.weight"
    panels = [
        ("2d, 4 ranks", weight, TensorConfig(size=4, mode="2d")),
        ("2.5d, 8 ranks, depth 2", weight, TensorConfig(size=8, mode="2.5d", depth=2)),
        ("3d, 8 ranks", weight, TensorConfig(size=8, mode="3d")),
    ]
    return shards(panels, "the weight [D, D] behind attention: which ranks hold which block", 3)


def sequence() -> str:
    """The tokens of each of four ranks, contiguous and zigzag."""
    out, y = (
        [text(4, 16, "which rank holds which tokens: a sequence on 4 ranks, first token to the left")],
        30.0,
    )
    for name, modes in (("ulysses", "contiguous"), ("ring", "zigzag: a rank has an early and a late piece")):
        pieces = Pieces.of(4, 1, name)
        out.append(text(4, y + 12, f"{name}, {modes}"))
        wide = (WIDTH - 16) / pieces.total
        for rank, mine in enumerate(pieces.by_rank):
            for piece in mine:
                out += box(
                    8 + piece * wide, y + 20, wide - 1, 26, PALETTE[rank], f"piece {piece}", f"rank {rank}"
                )
        y += 60
    return drawing(WIDTH, y + 4, out, "Tokens of each rank, contiguous and zigzag")


PICTURES: Mapping[str, Callable[[], str]] = {
    "mesh": mesh,
    "schedules": schedules,
    "data": data,
    "lanes": step,
    "updates": updates,
    "tiers": tiers,
    "zero": zero,
    "tensor-1d": tensor_1d,
    "tensor-grids": tensor_grids,
    "sequence": sequence,
}
"""Name of a file in docs/pictures -> what draws it."""
