"""Defines the plan language: a step as a list of actions for each rank, with its text form.

Note ---- Generators write this one language: pipeline schedules, chunk prefetch and eviction, spilled models,
many-model orders, the interleaved optimizer.  Passes over a plan add communication, ZeRO and offload.  `Reading`
(schedule/checker.py) has the rules of the kinds.  `check` rejects plans that break them, and the simulator takes its
dependencies from them.

What a list means.  It is issued in order.  Work on `compute` blocks the issuer.  All other work only queues on its
resource, which runs it first in, first out, once its needs are there.  So a RECV or FETCH is posted where it stands,
and its first use waits for it.  A SEND may block until its RECV is posted.  Messages from one rank to another arrive in
the order in which they were sent.  With `strict`, a RECV blocks too, as where both directions between two ranks share
one stream.

Order.  The micro-batches of a stage run ascending in each of F, I, W and B.  So sums have the order of plain
accumulation and are bitwise the same.  The slices of a micro-batch ascend in F and descend after it.

Memory.  F leaves the stage's activations on the device until B or W of the same micro-batch.  A chunk has a home tier.
FETCH leaves the copy at home and moves any other.  EVICT leaves nothing behind.  UPDATE makes every other copy stale.
A stale copy must not be used.  At the end each chunk is at home in its newest version.

Text form, a line for each rank: words `[tTASK:][STAGE]KIND[MICRO_BATCH][.SLICE][#CHUNK][@RESOURCE]`, for example
`2F0`, `1SEND_B3`, `0FETCH#4`, `t1:0UPDATE#7@cpu`.  It extends the grammar of torch.distributed.pipelining.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

COMPUTE, H2D, D2H, CPU, DISK = "compute", "h2d", "d2h", "cpu", "disk"


def net(axis: str) -> str:
    """The resource that collectives and messages of a mesh axis occupy."""
    return f"net:{axis}"


class ActionKind(StrEnum):
    """What an action does. `stage` and `micro_batch` name its subject, or `chunk` for the lower half."""

    F = "F"
    """Forward of a stage."""
    I = "I"  # noqa: E741  (the name in arXiv 2401.10241 and in torch)
    """Gradient with respect to the stage's input."""
    W = "W"
    """Gradient with respect to the stage's weights; frees the activations that F saved."""
    B = "B"
    """I and W in one."""
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the stage before."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the stage before."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""
    UNSHARD = "UNSHARD"
    """Gather the weights of a stage (or one chunk of it) from the ranks that share them."""
    RESHARD = "RESHARD"
    """Drop the gathered weights."""
    FETCH = "FETCH"
    """Copy a chunk one tier up: h2d host to device, disk to host. Without chunk: activations of F."""
    EVICT = "EVICT"
    """Move a chunk one tier down: d2h device to host, host to disk. Without chunk: activations of F."""
    REDUCE = "REDUCE"
    """Sum the gradient of a chunk over the ranks that share it."""
    TIED_REDUCE = "TIED_REDUCE"
    """Sum the gradient of a weight that several stages share; the ranks concerned meet here."""
    UPDATE = "UPDATE"
    """Optimizer step of a chunk, on `compute` (device) or `cpu` (host)."""


COMPUTE_KINDS = frozenset({ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B})
MOVES = {
    (ActionKind.FETCH, H2D): ("host", "device"),
    (ActionKind.FETCH, DISK): ("disk", "host"),
    (ActionKind.EVICT, D2H): ("device", "host"),
    (ActionKind.EVICT, DISK): ("host", "disk"),
}
"""Source tier and target tier of a move."""
SENDS = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
MESSAGES = frozenset(SENDS) | frozenset(SENDS.values())

RESOURCES: dict[ActionKind, str] = {
    **dict.fromkeys(COMPUTE_KINDS | {ActionKind.RESHARD, ActionKind.UPDATE}, COMPUTE),
    **dict.fromkeys(MESSAGES | {ActionKind.TIED_REDUCE}, net("pipeline")),
    **dict.fromkeys((ActionKind.UNSHARD, ActionKind.REDUCE), net("data")),
    ActionKind.FETCH: H2D,
    ActionKind.EVICT: D2H,
}
"""Where an action of a kind runs if it does not say."""

_WORD = re.compile(
    r"(?:t(?P<task>\d+):)?(?P<stage>\d+)?(?P<kind>[A-Z](?:[A-Z_]*[A-Z])?)(?P<micro_batch>\d+)?"
    r"(?:\.(?P<slice>\d+))?(?:#(?P<chunk>\d+))?(?:@(?P<resource>\S+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one rank. Prints and parses as a word of the text form.

    - task: which model, for plans of several
    - stage, micro_batch, slice (of a micro-batch's tokens), chunk: indices from 0, None where the kind has none
    - resource: what it occupies, by default what its kind does

    Raises ValueError if an index that the kind needs is missing or the resource cannot do it.
    """

    kind: ActionKind
    task: int = 0
    stage: int | None = None
    micro_batch: int | None = None
    slice: int | None = None
    chunk: int | None = None
    resource: str = ""

    def __post_init__(self) -> None:
        if not self.resource:
            object.__setattr__(self, "resource", RESOURCES[self.kind])
        if self.kind in COMPUTE_KINDS or self.kind in MESSAGES:
            if self.stage is None or self.micro_batch is None:
                raise ValueError(f"{self}: {self.kind} needs a stage and a micro-batch")
        elif self.stage is None and self.chunk is None:
            raise ValueError(f"{self}: {self.kind} needs a stage or a chunk")
        if self.kind in (ActionKind.FETCH, ActionKind.EVICT):
            legal = self.resource in (H2D if self.kind is ActionKind.FETCH else D2H, DISK)
        elif RESOURCES[self.kind] == COMPUTE:
            legal = self.resource == COMPUTE or (self.kind is ActionKind.UPDATE and self.resource == CPU)
        else:
            legal = self.resource.startswith("net:")
        if not legal:
            raise ValueError(f"{self}: {self.resource!r} cannot do {self.kind}")

    def __str__(self) -> str:
        def part(mark: str, value: object) -> str:
            return "" if value is None else f"{mark}{value}"

        return "".join(
            (
                f"t{self.task}:" if self.task else "",
                part("", self.stage),
                self.kind,
                part("", self.micro_batch),
                part(".", self.slice),
                part("#", self.chunk),
                f"@{self.resource}" if self.resource != RESOURCES[self.kind] else "",
            )
        )

    def of_kind(self, kind: ActionKind) -> Action:
        """The same piece of work as another kind of action, on what does that kind."""
        return Action(kind, self.task, self.stage, self.micro_batch, self.slice, self.chunk)

    @classmethod
    def parse(cls, word: str) -> Action:
        """The action that prints as `word`. Raises ValueError with the grammar if there is none."""
        match = _WORD.fullmatch(word)
        if match is None or match["kind"] not in ActionKind.__members__:
            raise ValueError(
                f"{word!r} is no action: [tTASK:][STAGE]KIND[MICRO_BATCH][.SLICE][#CHUNK][@RESOURCE] "
                f"with KIND one of {', '.join(ActionKind)}"
            )
        index = {
            k: None if match[k] is None else int(match[k]) for k in ("stage", "micro_batch", "slice", "chunk")
        }
        return cls(
            ActionKind(match["kind"]), int(match["task"] or 0), **index, resource=match["resource"] or ""
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: for each rank (of the pipeline axis, or each device) its list of actions."""

    ranks: tuple[tuple[Action, ...], ...]

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.ranks)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that prints as `text`: a line for each rank. Raises ValueError at the first bad word."""
        return cls(tuple(tuple(map(Action.parse, line.split())) for line in text.split("\n")))

    def placement(self, task: int = 0) -> dict[int, int]:
        """Rank of each stage of a task, by where its forward runs."""
        return {
            action.stage: rank
            for rank, actions in enumerate(self.ranks)
            for action in actions
            if action.kind is ActionKind.F and action.task == task and action.stage is not None
        }

    def only(self, *kinds: ActionKind) -> Plan:
        """The actions of these kinds alone: `only(Kind.F)` of a compute plan is its evaluation."""
        return Plan(tuple(tuple(a for a in actions if a.kind in kinds) for actions in self.ranks))

    def grid(self, marks: Iterable[tuple[int, int]] = (), columns: int = 16) -> str:
        """Lists side by side, action i in column i; marked places (rank, i) in brackets, the first one
        centred."""
        marked = set(marks)
        longest = max(map(len, self.ranks), default=0)
        first = max(0, min(min((i for _, i in marked), default=0) - columns // 2, longest - columns))
        shown = range(first, min(longest, first + columns))
        lines = []
        for rank, actions in enumerate(self.ranks):
            words = [str(actions[i]) if i < len(actions) else "" for i in shown]
            lines.append([f"[{w}]" if (rank, i) in marked else w for i, w in zip(shown, words, strict=True)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head = f"actions {first} to {shown.stop - 1} of at most {longest}" if len(shown) < longest else ""
        rows = (" ".join(w.ljust(n) for w, n in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(
            ([head] if head else []) + [f"rank {r} | {row}".rstrip() for r, row in enumerate(rows)]
        )


class PlanError(ValueError):
    """A plan that must not run: its faults, and the lists with the actions concerned in brackets."""

    def __init__(self, plan: Plan, problems: list[tuple[str, tuple[tuple[int, int], ...]]]) -> None:
        self.plan, self.problems = plan, tuple(text for text, _ in problems)
        shown = "\n".join(f"- {text}" for text in self.problems[:8])
        more = f"\n- and {len(problems) - 8} more" if len(problems) > 8 else ""
        marks = [place for _, places in problems[:8] for place in places]
        super().__init__(f"the plan must not run:\n{shown}{more}\n{plan.grid(marks)}")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan must do for a task: each stage, micro-batch and slice forward, and backward where it
    trains.

    trainable: for each stage, whether any of its parameters trains; None if all do. A stage that does not needs no W,
    and no I either if no stage before it trains. by_visit: gradients that are not summed once a step are summed after
    each run of neighbouring ones of a stage. Otherwise they are summed after each micro-batch.
    """

    stages: int
    micro_batches: int
    slices: int = 1
    trainable: tuple[bool, ...] | None = None
    backward: bool = True
    by_visit: bool = False

    def backward_kinds(self, stage: int) -> tuple[ActionKind, ...]:
        """What a stage must run after F: (I, W), which B is as well; (I,), or nothing."""
        trainable = self.trainable or (True,) * self.stages
        if not self.backward or not any(trainable[: stage + 1]):
            return ()
        return (ActionKind.I, ActionKind.W) if trainable[stage] else (ActionKind.I,)

    @classmethod
    def of(cls, plan: Plan, task: int) -> Shape:
        """The smallest shape that holds all actions of a task."""
        mine = [a for actions in plan for a in actions if a.task == task and a.kind in COMPUTE_KINDS]
        return cls(
            1 + max((a.stage or 0 for a in mine), default=-1),
            1 + max((a.micro_batch or 0 for a in mine), default=-1),
            1 + max((a.slice or 0 for a in mine), default=0),
            backward=any(a.kind is not ActionKind.F for a in mine),
        )


Chunk = tuple[int, int]
"""Task and chunk."""
Activations = tuple[int, int, int, int]
"""Task, stage, micro-batch and slice of one F."""
Key = Chunk | Activations


@dataclass(frozen=True)
class Memory:
    """Chunks, tiers and their budgets, for each rank alike.

    - home: tier of a chunk between steps
    - uses: the chunks that a (task, stage) reads on the device
    - sizes_bytes, activation_bytes (for one F of a (task, stage)): 0 where left out
    - budget_bytes: for each tier, no limit where left out
    - reads, writes: chunks that UPDATE of a chunk reads and overwrites besides it, on the tier where it runs
    - spent: gradients, which the UPDATE that reads them uses up on every tier
    - made: those of them that the backward of a (task, stage) makes on the device; the others are there at first
    - awaited: chunks that must have left the device before a FETCH or UPDATE of a chunk that has their place.
      Of the backward of a stage: before what follows it up to the next computing. By kind, then (task, chunk) or
      (task, stage)
    - blocking: chunks whose FETCH is a part of the backward before it, and the issuer waits for it
    - flushed: chunks that must have left the device when the backward of a (task, stage) is over, with such FETCHes
    - apart: chunks that on a tier share the budget of this name, and not the tier's
    - sharded: of `uses`, those that ranks share. They take their bytes on the device from FETCH or UNSHARD to RESHARD.
      Their `reads` are what FETCH copies from the host
    - offloaded: ranks and those of them whose shard there rests on the host. A FETCH brings it before the UNSHARD
    """

    home: Mapping[Chunk, str]
    uses: Mapping[tuple[int, int], tuple[Chunk, ...]]
    sizes_bytes: Mapping[Chunk, int] = field(default_factory=dict)
    activation_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[Chunk, tuple[Chunk, ...]] = field(default_factory=dict)
    writes: Mapping[Chunk, tuple[Chunk, ...]] = field(default_factory=dict)
    spent: frozenset[Chunk] = frozenset()
    made: Mapping[tuple[int, int], tuple[Chunk, ...]] = field(default_factory=dict)
    awaited: Mapping[tuple[ActionKind, tuple[int, int]], tuple[Chunk, ...]] = field(default_factory=dict)
    blocking: frozenset[Chunk] = frozenset()
    flushed: Mapping[tuple[int, int], tuple[Chunk, ...]] = field(default_factory=dict)
    apart: Mapping[tuple[Chunk, str], str] = field(default_factory=dict)
    sharded: frozenset[Chunk] = frozenset()
    offloaded: frozenset[tuple[int, Chunk]] = frozenset()

    @classmethod
    def of(cls, plan: Plan) -> Memory:
        """The memory that the moves of a plan imply. A chunk's home is the source of its first move, its user the
        stage that the move names. A chunk that is gathered too is fetched for its gather."""
        home: dict[Chunk, str] = {}
        uses: dict[tuple[int, int], tuple[Chunk, ...]] = {}
        every = [action for actions in plan for action in actions]
        gathered = {(a.task, a.chunk) for a in every if a.kind is ActionKind.UNSHARD}
        fetched = set[Chunk]()
        for action in every:
            if action.kind in (ActionKind.FETCH, ActionKind.EVICT) and action.chunk is not None:
                chunk = action.task, action.chunk
                if chunk in gathered:
                    fetched.add(chunk)
                    continue
                home.setdefault(chunk, MOVES[action.kind, action.resource][0])
                if action.stage is not None and chunk not in uses.get((action.task, action.stage), ()):
                    uses[action.task, action.stage] = (*uses.get((action.task, action.stage), ()), chunk)
        return cls(home, uses, sharded=frozenset(fetched))
