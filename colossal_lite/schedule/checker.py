"""Checks that a plan does all of its work once and in order, cannot block, and fits its memory.

`Reading` applies the rules of the kinds: order, coverage, needs and messages.  What each rank holds is checked by
its `RankWalk` (schedule/rank_walk.py).  `check` raises one PlanError with everything that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from colossal_lite.schedule.plan import (
    COMPUTE_KINDS,
    MESSAGES,
    SENDS,
    Action,
    ActionKind,
    Memory,
    Plan,
    PlanError,
    Shape,
)
from colossal_lite.schedule.plan_nodes import PlanNodes, work_of
from colossal_lite.schedule.rank_walk import RankWalk


@dataclass(frozen=True)
class Footprint:
    """What a checked plan takes at most, rank by rank. `live` counts activations of one F each, `bytes` is for each
    tier the sum of `Memory`'s sizes."""

    live: tuple[int, ...]
    bytes: tuple[Mapping[str, int], ...]
    messages: int


class Reading(PlanNodes):
    """A plan read under the rules of the language.

    A node is the number of an action in the lists, one rank after the other. hops: in a plan without messages, the SEND
    that a need on another rank stands for. sender: SEND node of each RECV. meets: nodes of each TIED_REDUCE.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[int, Shape] | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(plan, shapes)
        self.messages = any(action.kind in MESSAGES for action in self.actions)
        self.hops: dict[tuple[int, int], Action] = {}
        self.sender: dict[int, int] = {}
        self.meets: list[list[int]] = []
        self._runs: set[bool] = set()  # with these values of `strict` it was seen to run to its end
        self.placement = {
            (a.task, a.stage, a.micro_batch): self.places[n][0]
            for n, a in enumerate(self.actions)
            if a.kind is ActionKind.F
        }
        self.updates: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._index()
        if self.problems:
            raise PlanError(plan, self.problems)
        self._order()
        self._cover()
        for node in range(len(self.actions)):
            self._follow(node)
        self._match()
        memory = memory or Memory.of(plan)
        walks = [RankWalk(self, rank, memory) for rank in range(len(plan))]
        self._meet()
        self.footprint = Footprint(
            tuple(walk.peak for walk in walks),
            tuple(dict(walk.tiers.peak) for walk in walks),
            len(self.sender),
        )

    def refuse(self, strict: bool = False) -> None:
        """Raises PlanError if anything is wrong, or if the plan cannot run to its end."""
        if not self.problems and strict not in self._runs:
            for node, others in self.blocked(strict).items():
                for other in others:
                    self.fault(f"waits for ever for rank {self.places[other][0]} {self.actions[other]}", node)
        if self.problems:
            raise PlanError(self.plan, self.problems)
        self._runs.add(strict)

    def _index(self) -> None:
        """Check that all indices are within the shapes; without that nothing else can be checked."""
        for node, action in enumerate(self.actions):
            shape = self.shapes.get(action.task)
            if shape is None:
                self.fault("no such task", node)
            elif action.kind in COMPUTE_KINDS or action.kind in MESSAGES:
                limits = (shape.stages, shape.micro_batches, shape.slices)
                _, stage, i, k = work_of(action)
                if stage >= limits[0] or i >= limits[1] or k >= limits[2]:
                    self.fault("outside {} stages, {} micro-batches, {} slices".format(*limits), node)
            elif (
                action.kind is ActionKind.UPDATE
                and action.stage is not None
                and action.micro_batch is not None
            ):
                self.updates[action.task, action.stage, action.micro_batch].append(node)

    def _order(self) -> None:
        """Check that compute and messages are on the rank of their stage, once, and ascending. B counts as I and as
        W."""
        last: dict[tuple[Hashable, ...], int] = {}
        for node, action in enumerate(self.actions):
            if action.kind not in COMPUTE_KINDS and action.kind not in MESSAGES:
                continue
            if action.kind in COMPUTE_KINDS and self._home(action) != self.places[node][0]:
                self.fault("the forward of this stage is not on this rank", node)
            work = work_of(action)
            for part in (ActionKind.I, ActionKind.W) if action.kind is ActionKind.B else (action.kind,):
                if (part, *work) in self.where:
                    self.fault("done twice", self.where[part, *work], node)
                self.where[part, *work] = node
                lane = (part, action.task, action.stage, self.places[node][0])
                if part in COMPUTE_KINDS and lane in last and not _ascends(self.actions[last[lane]], action):
                    self.fault("out of order", last[lane], node)
                last[lane] = node

    def _home(self, action: Action) -> int | None:
        return self.placement.get((action.task, action.stage, action.micro_batch))

    def _cover(self) -> None:
        for task, shape in self.shapes.items():
            for stage in range(shape.stages):
                due = (ActionKind.F, *shape.backward_kinds(stage))
                for i in range(shape.micro_batches):
                    for k in range(shape.slices):
                        for kind in COMPUTE_KINDS - {ActionKind.B}:
                            node = self.where.get((kind, task, stage, i, k))
                            if (node is None) is (kind not in due):
                                continue
                            word = Action(kind, task, stage, i, k if shape.slices > 1 else None)
                            if node is None:
                                self.fault(f"{word} is never done")
                            else:
                                self.fault(f"{word} is not needed: nothing there trains", node)

    def _after(self, node: int, kind: ActionKind) -> None:
        """`node` needs the `kind` of its own stage and micro-batch, earlier in its list."""
        other = self.where.get((kind, *work_of(self.actions[node])))
        if other is not None and other < node and self.places[other][0] == self.places[node][0]:
            self.needs[node].append(other)
        else:
            self.fault(f"no {kind} of it before", node)

    def _after_update(self, node: int) -> None:
        """An F waits for the UPDATEs of the micro-batch before; only they let a stage move to another rank."""
        task, stage, i, _ = work_of(self.actions[node])
        for update in self.updates[task, stage, i - 1]:
            self.needs[node].append(update)
            if update > node and self.places[update][0] == self.places[node][0]:
                self.fault("comes before the update that it needs", node, update)
        before = self.placement.get((task, stage, i - 1), self.places[node][0])
        if before != self.places[node][0] and not self.updates[task, stage, i - 1]:
            self.fault(
                f"the stage moves here from rank {before} with no UPDATE of the micro-batch before", node
            )

    def _follow(self, node: int) -> None:
        """Record what a compute action or a SEND waits for."""
        action = self.actions[node]
        if action.kind in (ActionKind.F, ActionKind.I, ActionKind.B):
            send, step = (ActionKind.SEND_F, -1) if action.kind is ActionKind.F else (ActionKind.SEND_B, 1)
            made_by = ActionKind.F if action.kind is ActionKind.F else ActionKind.I
            if made_by is ActionKind.I:
                self._after(node, ActionKind.F)
            else:
                self._after_update(node)
            task, stage, *rest = work_of(action)
            source = self.where.get((made_by, task, stage + step, *rest))
            if source is None:
                return
            if self.places[source][0] == self.places[node][0]:
                if source > node:
                    self.fault("comes before what it needs", node, source)
                self.needs[node].append(source)
            elif self.messages:
                self._after(node, SENDS[send])
            else:
                self.needs[node].append(source)
                self.hops[source, node] = self.actions[source].of_kind(send)
        elif action.kind is ActionKind.W:
            self._after(node, ActionKind.I)
        elif action.kind in SENDS:
            self._after(node, ActionKind.F if action.kind is ActionKind.SEND_F else ActionKind.I)

    def _match(self) -> None:
        """The k-th message sent from one rank to another must be the k-th that the other receives from it."""
        sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for node, action in enumerate(self.actions):
            if action.kind not in MESSAGES:
                continue
            assert action.stage is not None
            step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
            other = (action.task, action.stage + step, action.micro_batch)
            here, there = self.places[node][0], self.placement.get(other)
            if there is None or there == here:
                self.fault("there is no other rank to talk to", node)
            elif action.kind in SENDS:
                sent[here, there].append(node)
            else:
                received[there, here].append(node)
        for (a, b), sends in sent.items():
            for send, receive in zip_longest(sends, received.pop((a, b), []), fillvalue=None):
                if send is None or receive is None:
                    self.fault("has no partner", *(n for n in (send, receive) if n is not None))
                elif not _answers(self.actions[send], self.actions[receive]):
                    self.fault(f"messages from rank {a} to rank {b} do not pair", send, receive)
                else:
                    self.sender[receive] = send
                    self.needs[receive].append(send)
        for receives in received.values():
            for node in receives:
                self.fault("has no partner", node)

    def _meet(self) -> None:
        groups: defaultdict[tuple[Hashable, ...], list[int]] = defaultdict(list)
        for node, action in enumerate(self.actions):
            if action.kind is ActionKind.TIED_REDUCE:
                groups[action.task, action.chunk, action.micro_batch].append(node)
        for nodes in groups.values():
            ranks = {self.places[n][0] for n in nodes}
            if len(ranks) < max(2, len(nodes)):
                self.fault("TIED_REDUCE meets once on each of two or more ranks", *nodes)
            tied = self.actions[nodes[0]]
            for node, action in enumerate(self.actions):
                same = (action.task, action.chunk) == (tied.task, tied.chunk)
                if action.kind is ActionKind.REDUCE and same and self.places[node][0] not in ranks:
                    self.fault("has no TIED_REDUCE before it, as the other ranks of its chunk have", node)
        self.meets = list(groups.values())

    def blocked(self, strict: bool = False) -> dict[int, list[int]]:
        """The first action of each rank that can never run, and the actions that it waits for. SENDs block until their
        RECV is posted; with `strict`, RECVs also block until their SEND is. Empty if the plan runs to its end."""

        def before(node: int) -> list[int]:
            return [node - 1] if self.places[node][1] else []

        waits: list[list[int]] = []
        for node, needs in enumerate(self.needs):
            messages = self.actions[node].kind in MESSAGES
            waits.append([] if messages else needs + [self.sender[n] for n in needs if n in self.sender])
            waits[node] += before(node)
        for receive, send in self.sender.items():
            waits[send] += before(receive)
            waits[receive] += before(send) if strict else []
        for nodes in self.meets:
            for node in nodes:
                waits[node] += [other for member in nodes for other in before(member)]
        done = _reachable(waits)
        first: dict[int, int] = {}
        for node, (rank, _) in enumerate(self.places):
            if node not in done:
                first.setdefault(rank, node)
        return {node: sorted(n for n in {*waits[node]} if n not in done) for node in first.values()}


def _ascends(before: Action, after: Action) -> bool:
    """Micro-batches ascend; slices ascend in F and descend in what follows."""
    sign = 1 if after.kind is ActionKind.F else -1
    (*_, i, k), (*_, j, m) = work_of(before), work_of(after)
    return (i, sign * k) < (j, sign * m)


def _answers(send: Action, receive: Action) -> bool:
    """Whether this RECV takes what this SEND sends."""
    (task, stage, *work), step = work_of(send), 1 if send.kind is ActionKind.SEND_F else -1
    same = send.chunk == receive.chunk and send.resource == receive.resource
    return same and receive.kind is SENDS[send.kind] and work_of(receive) == (task, stage + step, *work)


def _reachable(waits: list[list[int]]) -> set[int]:
    """The nodes that can run when each waits for those listed (Kahn's algorithm)."""
    left = [len(nodes) for nodes in waits]
    then: list[list[int]] = [[] for _ in waits]
    for node, nodes in enumerate(waits):
        for other in nodes:
            then[other].append(node)
    ready = [node for node, n in enumerate(left) if n == 0]
    done: set[int] = set()
    while ready:
        node = ready.pop()
        done.add(node)
        for other in then[node]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return done


def check(
    plan: Plan,
    *,
    shapes: Mapping[int, Shape] | None = None,
    memory: Memory | None = None,
    cap: int | None = None,
    strict: bool = False,
) -> Footprint:
    """Proves that a plan does all of its work once and in order, cannot block, and fits its memory.

    Messages must pair, and whatever an action uses must be there.

    shapes: for each task what must be done; by default what the plan's largest indices say. memory: chunks,
    tiers and budgets; by default what its moves say. cap: most activations (of one F) that a rank may hold.
    strict: a RECV blocks as a SEND does. Raises PlanError with everything that is wrong and the lists drawn.
    """
    reading = Reading(plan, shapes, memory)
    for rank, live in enumerate(reading.footprint.live):
        if cap is not None and live > cap:
            reading.fault(f"rank {rank} holds {live} activations where {cap} are allowed")
    reading.refuse(strict)
    return reading.footprint
