"""Draws cases over the whole schema: a world, a model, batches, habits, a configuration, and another mesh to resume on.

Note. `draw(world, seed, number)` is pure: the same three numbers give the same case on every machine.  It knows the
rules of division, so most cases train; it knows nothing of how a setting is built.  Where a rule of the product
forbids a combination that is drawn here, the case is refused, and the refusal is counted.
"""

from __future__ import annotations

import ast
import math
import pprint
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, TypeVar

from tests.shared.drawn_models import NO_MATRICES, PATTERNS
from tests.shared.drawn_rarities import rare_of
from tests.shared.written_models import STYLES, WORDS
from tests.shared.written_models import TOKENS as WRITTEN_TOKENS

T = TypeVar("T")
STEPS = 3
"""Before the save; one more is made after it, on the other mesh."""
DISK = "DISK"
"""Stands for a fresh directory in a case."""
TOKEN_KINDS = {"gpt": 42, "hf-gpt2": 14, "hf-llama": 12, "own": 12, "written": 12}
WITHOUT_TOKENS = {"perceptron": 14}
OWN_LOSS = {"written": 6, "hf-gpt2": 6, "hf-llama": 6}
ELEMENTWISE = {"sgd": 34, "adamw": 24, "adam": 10, "lion": 8}


@dataclass(frozen=True)
class DrawnCase:
    """All that a case is. `config` and `resume` are configurations as a user writes them; `resume_world` 0: no save."""

    world: int
    seed: int
    model: Mapping[str, Any]
    batch: Mapping[str, Any]
    habits: Mapping[str, Any]
    config: Mapping[str, Any]
    resume_world: int
    resume: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        given = self.config["precision"]
        return str(given["dtype"] if isinstance(given, Mapping) else given)

    def text(self) -> str:
        """A dict that `case_of` reads back."""
        return pprint.pformat(asdict(self), width=118, sort_dicts=False)


def case_of(text: str) -> DrawnCase:
    """The case in a text that `DrawnCase.text` wrote."""
    return DrawnCase(**ast.literal_eval(text))


@dataclass(frozen=True)
class Shared:
    """What is drawn once and holds for both meshes."""

    kind: str
    causal: bool
    optimizer: Mapping[str, Any]
    precision: Mapping[str, Any]
    clip: float | None
    whole_tensors: bool
    own_optimizer: str | None
    rare: Mapping[str, Any]

    @property
    def in_backward(self) -> bool:
        return self.optimizer.get("update_when") == "backward"

    @property
    def one_micro_batch(self) -> bool:
        return self.precision.get("gradient") == "bf16"


@dataclass(frozen=True)
class Mesh:
    """A drawn mesh, and what it asks of a model and a batch."""

    data: int
    pipeline: Mapping[str, Any] | None
    tensor: Mapping[str, Any] | None
    sequence: Mapping[str, Any] | None
    accumulation: int

    @property
    def tensor_size(self) -> int:
        return self.tensor["size"] if self.tensor else 1

    @property
    def sequence_size(self) -> int:
        return self.sequence["size"] if self.sequence else 1

    @property
    def stages(self) -> int:
        return self.pipeline["size"] * self.pipeline.get("stages_per_rank", 1) if self.pipeline else 1

    @property
    def grid(self) -> bool:
        return bool(self.tensor) and self.tensor.get("mode", "1d") != "1d"  # type: ignore[union-attr]

    @property
    def edge(self) -> int:
        mode, size = (self.tensor or {}).get("mode", "1d"), self.tensor_size
        if mode == "1d":
            return size
        return round((size // (self.tensor or {}).get("depth", 1)) ** (1 / (3 if mode == "3d" else 2)))

    @property
    def head_parts(self) -> int:
        ranks = self.sequence or {}
        inner = {"ulysses": ranks.get("size", 1), "usp": ranks.get("ulysses", 1)}.get(ranks.get("mode"), 1)
        return self.edge * inner

    @property
    def hidden_parts(self) -> int:
        return self.edge ** (2 if (self.tensor or {}).get("mode") == "3d" else 1)

    @property
    def token_parts(self) -> int:
        zigzag = self.sequence is not None and self.sequence["mode"] in ("ring", "usp", "allgather_kv")
        cut = self.tensor is not None and not self.grid and self.tensor.get("sequence_parallel", True)
        pieces = self.sequence_size * (2 if zigzag else 1)
        return math.lcm(pieces, self.sequence_size * (self.tensor_size if cut else 1))

    @property
    def sample_parts(self) -> int:
        """A micro-batch is a multiple of this."""
        mode = (self.tensor or {}).get("mode", "1d")
        depth = (self.tensor or {}).get("depth", 1)
        return {"1d": 1, "2d": self.edge, "2.5d": self.edge * depth, "3d": self.edge**2}[mode]

    @property
    def micro_batches(self) -> int:
        return (self.pipeline or {}).get("micro_batches") or 1


def choose(rng: Random, weights: Mapping[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


def maybe(rng: Random, chance: float, **settings: Any) -> dict[str, Any]:
    """`settings` with this chance, else nothing: then the default holds."""
    return settings if rng.random() < chance else {}


def draw(world: int, seed: int, number: int) -> DrawnCase:
    rng = Random(f"{seed} {world} {number}")
    shared = _draw_shared(rng, rare_of(world, number))
    resume_world = (
        world if rng.random() < 0.7 else rng.choice([n for n in (1, 2, 4, 8) if n <= max(2, world)])
    )
    first = _draw_mesh(rng, shared, world)
    second = _draw_mesh(rng, shared, resume_world)
    model = _draw_model(rng, shared, (first, second))
    batch = _draw_batch(rng, shared, model, (first, second))
    rest = _rest(rng, shared)
    config, resume = (_draw_config(rng, shared, mesh) | rest for mesh in (first, second))
    habits = _draw_habits(rng, shared, model, batch, (first, second))
    if shared.own_optimizer is not None:  # no checkpoint holds its state
        resume_world, resume = 0, {}
    return DrawnCase(world, rng.randrange(1000), model, batch, habits, config, resume_world, resume)


# ---- what holds for both meshes ----


def _draw_shared(rng: Random, rare: Mapping[str, Any]) -> Shared:
    kind = rare.get("kind") or choose(rng, TOKEN_KINDS if len(rare) > 2 else TOKEN_KINDS | WITHOUT_TOKENS)
    precision = _draw_precision(rng)
    if "precision" in rare:
        precision = {"dtype": "bf16"} | ({"master": "split"} if rare["precision"] == "split" else {})
    elif rare and rng.random() < 0.75:
        precision = {"dtype": "fp64"}
    whole = rare.get("optimizer") in ("muon", "lamb") or not rare and rng.random() < 0.08
    if kind not in NO_MATRICES and rare.get("optimizer") == "muon":
        kind = "gpt"
    given = rare.get("optimizer") or (
        "lamb" if whole and (kind not in NO_MATRICES or rng.random() < 0.5) else ""
    )
    optimizer = _draw_optimizer(rng, kind, precision["dtype"], "" if given == "muon" else given)
    if whole and optimizer["type"] != "lamb":
        optimizer = _muon(rng, kind)
    clip = None if rng.random() < 0.5 else rng.choice([0.01, 0.05, 1.0, 100.0])
    own = None
    if not whole and not rare and precision.get("master") != "split" and rng.random() < 0.15:
        own, optimizer = rng.choice(["nadam", "adagrad", "sgd"]), {"type": "adamw"}
        precision.pop("master", None)  # in 16 bits alone, torch's own end in NaN
    elif not whole and clip is None and precision["dtype"] != "fp16" and rng.random() < 0.15:
        optimizer["update_when"] = "backward"
    causal = rare.get("causal", kind != "gpt" or rng.random() < 0.8)
    return Shared(kind, causal, optimizer, precision, clip, whole or own is not None, own, rare)


def _draw_precision(rng: Random) -> dict[str, Any]:
    dtype = choose(rng, {"fp64": 60, "fp32": 14, "bf16": 18, "fp16": 8})
    found: dict[str, Any] = {"dtype": dtype}
    if dtype == "bf16":
        found |= maybe(rng, 0.4, master=rng.choice(["fp32", "split", "none"]))
        found |= maybe(rng, 0.3, gradient="bf16")
    if dtype == "fp16":
        found |= maybe(rng, 0.4, loss_scale=rng.choice([1.0, 1024.0, "dynamic"]))
        found |= maybe(rng, 0.2, master=rng.choice(["fp32", "none"]))
    return found


def _draw_optimizer(rng: Random, model: str, dtype: str, kind: str = "") -> dict[str, Any]:
    kind = kind or choose(rng, ELEMENTWISE)
    found = _settings_of(rng, kind)
    found = {"type": kind, "lr": {"sgd": 0.05, "lion": 1e-3}.get(kind, 1e-2)} | found
    if kind in ("adamw", "adam") and dtype != "fp64":
        found |= maybe(rng, 0.2, moments="bf16")
    # A loss scale begins by skipping: two steps in a row end a run in fp16 as they should.
    found |= maybe(rng, 0.15, max_skipped_steps=30 if dtype == "fp16" else rng.choice([2, 30]))
    if rng.random() < 0.35:
        patterns = rng.sample(PATTERNS[model], rng.choice([1, 1, 2]))
        found["groups"] = tuple(_draw_group(rng, kind, pattern) for pattern in patterns)
    return found


def _settings_of(rng: Random, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = maybe(rng, 0.5, weight_decay=rng.choice([0.0, 0.01, 0.3]))
    if kind in ("adamw", "adam", "lion", "lamb"):
        found |= maybe(rng, 0.4, betas=rng.choice([(0.8, 0.95), (0.0, 0.9), (0.9, 0.99)]))
    if kind in ("adamw", "adam", "lamb"):
        found |= maybe(rng, 0.3, eps=rng.choice([1e-6, 1e-3]))
    if kind in ("sgd", "muon"):
        found |= maybe(rng, 0.5, momentum=rng.choice([0.5, 0.9]))
        if found.get("momentum"):
            found |= maybe(rng, 0.4, nesterov=True)
    return found


def _draw_group(rng: Random, kind: str, pattern: str) -> dict[str, Any]:
    if rng.random() < 0.3:
        other = choose(rng, ELEMENTWISE)
        return {"match": pattern, "type": other, "lr": 1e-3} | _settings_of(rng, other)
    changes = maybe(rng, 0.6, lr=rng.choice([0.0, 3e-3])) | maybe(
        rng, 0.6, weight_decay=rng.choice([0.0, 0.1])
    )
    return {"match": pattern} | (changes or {"lr": 2e-3})


def _muon(rng: Random, model: str) -> dict[str, Any]:
    groups = tuple({"match": name, "type": "adamw", "lr": 1e-2} for name in NO_MATRICES[model])
    return {"type": "muon", "lr": 2e-2, "groups": groups} | _settings_of(rng, "muon")


# ---- meshes ----


def _draw_mesh(rng: Random, shared: Shared, world: int) -> Mesh:
    sizes = dict.fromkeys(("data", "pipeline", "tensor", "sequence"), 1)
    weights = {"data": 34.0, "tensor": 28.0, "pipeline": 20.0, "sequence": 18.0}
    if shared.kind == "perceptron":
        weights |= {"tensor": 0.0, "sequence": 0.0}
    if shared.kind == "own" or shared.kind == "written" and world > WRITTEN_TOKENS // 2:
        weights |= {"sequence": 0.0}
    if shared.whole_tensors:
        weights |= {"tensor": 0.0}
    left, alone = world, rng.random() < 0.35 or shared.kind == "written"  # its modes stand alone
    axis = choose(rng, weights)
    if weights.get(rare := shared.rare.get("axis", "")):
        axis, alone = rare, True
    while left > 1:
        axis = axis if alone else choose(rng, weights)
        sizes[axis] *= 2
        left //= 2
    accumulation = 1 if shared.one_micro_batch else choose(rng, {1: 60, 2: 28, 3: 12})
    tensor = _draw_tensor(rng, sizes["tensor"], shared)
    parts = Mesh(sizes["data"], None, tensor, None, accumulation).sample_parts
    pipeline = _draw_pipeline(rng, shared, sizes["pipeline"], parts)
    sequence = _draw_sequence(rng, shared, sizes["sequence"])
    return Mesh(sizes["data"], pipeline, tensor, sequence, accumulation)


def _draw_tensor(rng: Random, size: int, shared: Shared) -> dict[str, Any] | None:
    if size == 1:
        return None
    modes: dict[str, float] = {"1d": 5}
    if shared.kind != "written":
        modes |= {2: {"2.5d": 0.6}, 4: {"2d": 4, "2.5d": 1}, 8: {"2.5d": 3, "3d": 3}}.get(size, {})
    mode = wanted if (wanted := shared.rare.get("tensor")) in modes else choose(rng, modes)
    found: dict[str, Any] = {"size": size} | ({} if mode == "1d" else {"mode": mode})
    if mode == "1d":
        found |= maybe(rng, 0.35, sequence_parallel=False)
        found |= maybe(rng, 0.25, regather_inputs=False) if "sequence_parallel" not in found else {}
    if mode == "2.5d":
        found["depth"] = {2: 2, 4: 1, 8: 2}[size]
    return found


def _draw_pipeline(rng: Random, shared: Shared, size: int, parts: int) -> dict[str, Any] | None:
    spills = size == 1 and rng.random() < 0.12
    if size == 1 and not spills:
        return None
    names = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "auto")
    name = shared.rare.get("schedule") or choose(rng, dict(zip(names, (2, 4, 3, 2, 3, 3, 2), strict=True)))
    name = "bfs" if spills else name
    found: dict[str, Any] = {"size": size, "schedule": name}
    if name in ("interleaved", "zb-v"):
        found["stages_per_rank"] = 2
    elif name in ("bfs", "auto"):
        found["stages_per_rank"] = rng.choice([1, 2])
    if name == "bfs" and found["stages_per_rank"] == 1 and (spills or rng.random() < 0.7):
        found["stages_per_rank"] = 2 + spills
    found["micro_batches"] = 1 if shared.one_micro_batch else rng.choice([1, 2, 3, 4])
    if parts == 1 and not shared.one_micro_batch and rng.random() < 0.35:
        found["micro_batches"] = None
    found |= maybe(rng, 0.25, partition=rng.choice(["uniform", "uniform", "profiled"]))
    if name == "auto":
        found |= maybe(rng, 0.3, activation_cap=2 * size * found["stages_per_rank"])
    return found


def _draw_sequence(rng: Random, shared: Shared, size: int) -> dict[str, Any] | None:
    if size == 1:
        return None
    modes = {"ring": 4, "ulysses": 3, "usp": 3, "allgather_kv": 2, "ring_full": 0 if shared.causal else 6}
    mode = shared.rare.get("sequence") or choose(rng, modes)
    divisors = [n for n in (1, 2, 4, 8) if size % n == 0]
    return {"size": size, "mode": mode} | ({"ulysses": rng.choice(divisors)} if mode == "usp" else {})


# ---- model ----


def _draw_model(rng: Random, shared: Shared, meshes: tuple[Mesh, ...]) -> dict[str, Any]:
    if shared.kind == "perceptron":
        sizes = {
            "features": rng.choice([1, 3, 8]), "width": rng.choice([7, 9, 16]), "classes": rng.choice([2, 5, 17]),
            "layers": max(2, *(mesh.stages for mesh in meshes)), "dropout": rng.choice([0.0, 0.0, 0.2]),
        }  # fmt: skip
        pipes = any(mesh.pipeline for mesh in meshes)
        return {
            "kind": shared.kind,
            "sizes": sizes | ({} if pipes else maybe(rng, 0.3, unused=True)),
        } | _frozen(rng, shared, ["norm0*", "*first*", "*bias", "*linear*"])
    model = {"kind": shared.kind, "sizes": _draw_sizes(rng, shared, meshes)}
    grid = any(mesh.grid for mesh in meshes)
    if grid:
        model["grid"] = True
    cut_tokens = grid or any(mesh.token_parts > 1 for mesh in meshes)
    if shared.kind not in ("own", "written") and (rng.random() < 0.12 or "auxiliary" in shared.rare):
        kinds = ["element"] + ["token"] * (not grid) + ["sample"] * (not cut_tokens)
        model["auxiliary"] = tuple(sorted(rng.sample(kinds, rng.choice([1, min(2, len(kinds))]))))
    chance = (
        0.0 if "axis" in shared.rare or shared.kind == "written" else 0.1
    )  # adapters are refused on most axes
    if not grid and not shared.whole_tensors and "auxiliary" not in model and rng.random() < chance:
        dropout = model["sizes"].get("dropout", 0.0)
        kinds_of = ["plain", "modular"] if dropout else ["plain"]
        return model | {"adapters": rng.choice([1, 2, 3]), "adapter_kind": rng.choice(kinds_of)}
    bottom = {"gpt": ("token*", "position*"), "own": ("embed*",)}.get(
        shared.kind, ("*wte*", "*wpe*", "*embed*")
    )
    return model | _frozen(rng, shared, ["*bias", "*norm*", "*.0.*", "*1.*", bottom[0], *bottom, "*head*"])


def _frozen(rng: Random, shared: Shared, patterns: list[str]) -> dict[str, Any]:
    if (
        rng.random() >= 0.22 or shared.rare and "groups" in shared.optimizer
    ):  # a group of frozen ones is refused
        return {}
    return {"frozen": tuple(sorted({rng.choice(patterns) for _ in range(rng.choice([1, 1, 2, 3]))}))}


def _draw_sizes(rng: Random, shared: Shared, meshes: tuple[Mesh, ...]) -> dict[str, Any]:
    if shared.kind == "written":
        # ALiBi's float32 buffer beside scores in 16 bits is an error of torch's
        styles = [s for s in STYLES if shared.precision["dtype"] in ("fp64", "fp32") or "ALiBi" not in s]
        sizes: dict[str, Any] = {"style": rng.choice(styles), "layers": rng.choice([1, 2, 3])}
        sizes["layers"] = max(sizes["layers"], *(mesh.stages for mesh in meshes))
        return sizes | {"vocabulary": WORDS, "sequence": WRITTEN_TOKENS}
    parts = math.lcm(*(mesh.head_parts for mesh in meshes))
    hidden = math.lcm(*(mesh.hidden_parts for mesh in meshes))
    heads = parts * (rng.choice([1, 2, 3]) if parts <= 4 else 1)
    width = heads * rng.choice(
        [n for n in (2, 4, 6, 8) if n * heads >= 8]
    )  # a norm of few features amplifies rounding
    while width % hidden:
        width += heads * 2
    tokens = math.lcm(*(mesh.token_parts for mesh in meshes))
    stages = max(mesh.stages for mesh in meshes)
    sizes = {
        "vocabulary": rng.choice([max(11, hidden), 16, 37, 64, 101]),
        "layers": max(stages, rng.choice([1, 2, 2, 3])),
        "heads": heads,
        "width": width,
    }
    ffn = hidden * rng.choice([3, 4, 8])
    if shared.kind == "own":
        return sizes | {"ffn": ffn}
    sizes["sequence"] = tokens * max(1, rng.choice([4, 8, 12, 16]) // tokens)
    sizes["tied"] = shared.rare.get("tied", rng.random() < 0.5)
    sizes |= maybe(rng, 0.25 if shared.kind != "hf-llama" else 0.0, dropout=rng.choice([0.1, 0.3]))
    grouped = [
        n for n in range(1, heads + 1)
        if heads % n == 0 and all(n % m.head_parts == 0 or m.head_parts % n == 0 for m in meshes)
    ]  # fmt: skip
    if shared.kind == "hf-llama":
        return sizes | {"ffn": ffn, "kv_heads": rng.choice(grouped)}
    sizes |= maybe(rng, 0.4, ffn=ffn)
    if shared.kind == "gpt":
        sizes |= maybe(rng, 0.5, kv_heads=rng.choice(grouped))
        sizes |= {"kv_heads": wanted} if (wanted := shared.rare.get("kv_heads")) in grouped else {}
        sizes |= maybe(rng, 0.5, position="rotary") | maybe(rng, 0.5, norm="rms")
        sizes |= {"bias": False} if shared.optimizer["type"] == "muon" else maybe(rng, 0.4, bias=False)
        sizes |= maybe(rng, 0.5, activation="swiglu") | ({} if shared.causal else {"causal": False})
    return sizes


# ---- batches ----


def _draw_batch(
    rng: Random, shared: Shared, model: dict[str, Any], meshes: tuple[Mesh, ...]
) -> dict[str, Any]:
    """Samples of the global batch, tokens, ignored labels, and the form in which a user hands it over."""
    if any(mesh.grid for mesh in meshes):
        unit = math.lcm(
            *(m.data * m.accumulation * m.micro_batches * m.sample_parts for m in meshes if m.grid)
        )
        least = max(m.data * m.accumulation * m.micro_batches for m in meshes)
        samples = unit * max(rng.choice([1, 1, 2]), -(-least // unit))
    else:
        explicit = [m for m in meshes if m.pipeline and m.pipeline["micro_batches"]]
        least = max((m.data * m.accumulation * m.micro_batches for m in explicit), default=1)
        samples = (
            least + rng.choice([0, 0, 1, 2, 3, 5]) if rng.random() < 0.75 else max(least, rng.choice([1, 2]))
        )
        samples = max(least, shared.rare.get("samples", samples))
    kinds = {"full": 34, "ragged": 22, "sparse": 20, "one sample": 8, "a step without": 4}
    found = {"samples": samples, "labels": choose(rng, kinds), "form": "tuple"}
    if shared.kind == "perceptron":
        return found
    tokens = math.lcm(*(mesh.token_parts for mesh in meshes))
    longest = model["sizes"].get("sequence", tokens * max(1, rng.choice([4, 8, 12]) // tokens))
    found |= {"tokens": tokens * rng.randint(1, longest // tokens) if rng.random() < 0.3 else longest}
    found |= {"mask": "none", "positions": False}
    if shared.kind not in ("own", "written") and (rng.random() < 0.4 or "mask" in shared.rare):
        masks = {"none": 2, "documents": 2} if shared.kind == "gpt" else {"none": 2, "right": 3, "left": 1}
        found |= {
            "form": "dict",
            "mask": shared.rare.get("mask") or choose(rng, masks),
            "positions": rng.random() < 0.3,
        }
        if shared.kind.startswith("hf-") and any(mesh.sequence for mesh in meshes):
            found["positions"] = False
    return found


# ---- configuration ----


def _draw_config(rng: Random, shared: Shared, mesh: Mesh) -> dict[str, Any]:
    parallel: dict[str, Any] = maybe(rng, 0.3, data=mesh.data)
    for name in ("pipeline", "tensor", "sequence"):
        if (section := getattr(mesh, name)) is not None:
            parallel[name] = dict(section)
    found: dict[str, Any] = {"parallel": parallel} if parallel else {}
    placed = _draw_memory(rng, shared, mesh)
    if zero := _draw_zero(rng, shared, mesh, moves=placed.get("placement") in ("static", "auto")):
        found["zero"] = zero
    if placed:
        found["memory"] = placed
    if mesh.accumulation > 1 or rng.random() < 0.1:
        found["gradient_accumulation"] = mesh.accumulation
    if rng.random() < (0.02 if shared.kind in ("own", "perceptron") else 0.4):  # blocks in an nn.ModuleList
        found["activation_checkpoint"] = choose(rng, {"full": 4, "selective": 4})
    found |= maybe(rng, 0.15, backend="gloo") | maybe(rng, 0.15, kernels="torch")
    found |= maybe(rng, 0.1, deterministic=True)
    return found


def _draw_zero(rng: Random, shared: Shared, mesh: Mesh, *, moves: bool) -> dict[str, Any]:
    if shared.whole_tensors:
        return {}
    stages = {0: 30, 1: 20, 2: 22, 3: 40}
    stage = shared.rare.get("zero") or choose(rng, stages)
    found: dict[str, Any] = {"stage": stage} if stage else {}
    found |= maybe(rng, 0.25, sum_order="ordered")
    if stage == 2:
        found |= maybe(rng, 0.5, reduce_every="micro_batch")
    divisors = [n for n in (1, 2, 4, 8) if mesh.data % n == 0]
    if stage and mesh.data > 1:
        found |= maybe(rng, 0.3, shard_size=rng.choice(divisors))
    if stage == 3:
        copy = found.get("shard_size", mesh.data)
        near = [n for n in divisors if 1 < n < copy and copy % n == 0 and not moves]
        found |= maybe(rng, 0.4, reshard_after_forward=rng.choice([False, *near, *near]))
        found |= maybe(rng, 0.4, prefetch=rng.choice([0, 1, 2, 5]))
    return found


def _draw_memory(rng: Random, shared: Shared, mesh: Mesh) -> dict[str, Any]:
    if shared.own_optimizer is not None:
        return {}
    weights: dict[str, float] = {"device": 50, "host": 22, "disk": 7, "static": 11, "auto": 8}
    if shared.in_backward:
        weights |= {"static": 0.2, "auto": 0.2}
    place = shared.rare.get("memory") or choose(rng, weights)
    sized = maybe(rng, 0.1, chunk_bytes=rng.choice([512, 3000, 2**15]))
    if place == "device":
        return maybe(rng, 0.1, placement="device") | sized
    found: dict[str, Any] = {"placement": place} | sized
    if place in ("static", "auto"):
        found |= maybe(rng, 0.2, shared_base="base")
    if place == "disk":
        found["disk_dir"] = DISK
    if place == "static":
        shares = {n: rng.choice([0.0, 0.3, 0.5, 1.0]) for n in ("weights", "gradients", "optimizer")}
        shares["optimizer"] = shares["optimizer"] or 0.5
        found["host_fraction"] = shares
    if place == "auto":
        found["device_budget"] = int(10 ** rng.uniform(4.7, 7))
    if place in ("host", "auto") and not shared.in_backward:
        found |= maybe(rng, 0.2, host_budget=int(10 ** rng.uniform(4.5, 7)), disk_dir=DISK)
    found |= maybe(
        rng, 0.5, update_on=rng.choice(["host", {"every": 2}, {"every": 3}, {"host": 0.4}, "auto"])
    )
    if found.get("update_on") == "auto":
        found["rates"] = dict(
            host_update=1e9, device_update=1e10, up=rng.choice([10**9, 10**10]), down=10**10
        ) | maybe(rng, 0.5, host_memory=10**10, call_s=1e-5)
    speeds = maybe(rng, 0.2, up=10**9, down=10**9) | maybe(rng, 0.2, latency_s=1e-5)
    return found | ({"rates": speeds | found.get("rates", {})} if speeds else {})


def _rest(rng: Random, shared: Shared) -> dict[str, Any]:
    found: dict[str, Any] = {"precision": dict(shared.precision), "seed": rng.randrange(100), "timeout_s": 12}
    if len(shared.precision) == 1 and rng.random() < 0.5:
        found["precision"] = shared.precision["dtype"]
    if shared.own_optimizer is None:
        found["optimizer"] = dict(shared.optimizer)
        if rng.random() < 0.35:
            found["lr_scheduler"] = _draw_schedule(rng)
    if shared.clip is not None:
        found["clip_grad_norm"] = shared.clip
    found |= maybe(rng, 0.3, checkpoint={"asynchronous": True} | maybe(rng, 0.5, keep=1, max_failures=2))
    return found


def _draw_schedule(rng: Random) -> dict[str, Any]:
    kind = rng.choice(["constant", "cosine", "linear", "wsd", "one_cycle", "polynomial"])
    if kind == "constant":
        return {"type": kind}
    total = rng.choice([3, 5, 10])
    found = {"type": kind, "total_steps": total} | maybe(rng, 0.6, warmup_steps=rng.choice([1, 2]))
    found |= maybe(rng, 0.5, final_ratio=rng.choice([0.1, 0.5]))
    if kind == "wsd":
        found["decay_steps"] = rng.randint(1, total - found.get("warmup_steps", 0))
    if kind == "polynomial":
        found |= maybe(rng, 0.7, power=2.0)
    if kind == "one_cycle":
        found |= maybe(rng, 0.5, start_ratio=0.2)
    return found


# ---- habits of the user ----


def _draw_habits(
    rng: Random, shared: Shared, model: dict[str, Any], batch: dict[str, Any], meshes: tuple[Mesh, ...]
) -> dict[str, Any]:
    own_loop = 0 if any(m.pipeline for m in meshes) or "auxiliary" in model else 18
    drive = choose(rng, {"train_step": 40, "forward_backward": 42, "own loop": own_loop})
    drive = shared.rare.get("drive", drive) if own_loop else drive
    shown = any((m.pipeline or {}).get("partition") == "profiled" for m in meshes)
    own_loss = OWN_LOSS.get(shared.kind, 0)
    if shared.kind.startswith("hf-") and any(m.sequence for m in meshes):  # their code sees whole sequences
        own_loss = 0
    refused = ["negative id", "shape", "no labels", "label"] + ["id"] * (shared.kind == "gpt")
    refused += ["too long"] * (shared.kind in ("gpt", "hf-gpt2"))  # rotary positions have no end
    if shared.kind == "perceptron":
        refused = ["not finite", "shape", "no labels"]
    return {
        "build": "module" if shared.kind == "written" else rng.choice(["callable", "module"]),
        "drive": drive,
        "gradients": drive == "forward_backward" and not shared.in_backward,
        "criterion": choose(rng, {"none": 6, "mean": 2, "sum and count": 2, "model": own_loss})
        if drive != "own loop"
        else "none",
        "optimizer": shared.own_optimizer,
        "example": shown,
        "chunk_bytes": rng.choice([None, 1024, 4096, 16384]),
        "evaluate_after": rng.randrange(STEPS + 1),
        "evaluate_samples": batch["samples"] if any(m.grid for m in meshes) else rng.choice([1, 2, 5, 9]),
        "refuse_after": rng.randrange(STEPS + 1),
        "refuse": rng.choice(refused),
        "reads": choose(rng, {"nothing": 5, "weights": 2, "state": 1, "reports": 1}),
        "load_before": shared.rare.get("load_before", choose(rng, {None: 80, 0: 5, 1: 5, 2: 5, STEPS: 5})),
    }
