"""Part of what was plan."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from colossal_lite.schedule.plan import (
    COMPUTE,
    COMPUTE_KINDS,
    MESSAGES,
    MOVES,
    SENDS,
    Action,
    ActionKind,
    Chunk,
    Key,
    Memory,
    Plan,
    PlanError,
    Shape,
)


@dataclass(frozen=True)
class Footprint:
    """What a checked plan takes at most, rank by rank, and says: `live` counts activations of one F each,
    `bytes` is for each tier the sum of `Memory`'s sizes."""

    live: tuple[int, ...]
    bytes: tuple[Mapping[str, int], ...]
    messages: int


class _Tiers:
    """Copies on the tiers of one rank while its list is read: versions, bytes, and who must wait for whom."""

    def __init__(self, memory: Memory, chunks: Iterable[Chunk], reading: Reading) -> None:
        self.memory, self.reading = memory, reading
        self.newest: dict[Key, int] = {}
        self.version: dict[tuple[Key, str], int] = {}
        self.used: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.writer: dict[tuple[Key, str], int] = {}
        self.readers: defaultdict[tuple[Key, str], list[int]] = defaultdict(list)
        # Space that a queued EVICT will free counts as taken by whoever can do without it, oldest first.
        self.freeing: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)
        self.awaited: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.chunks = sorted(chunks)
        made = {chunk for of_stage in memory.made.values() for chunk in of_stage}
        for chunk in self.chunks:
            self.newest[chunk] = 0
            for tier in self._resting(chunk) if chunk not in made else ():
                self.version[chunk, tier] = 0
                self.used[tier] += self._size_bytes(chunk)
        self.peak.update(self.used)

    def _resting(self, chunk: Chunk) -> set[str]:
        return {self.memory.home[chunk]} | {tier for other, tier in self.memory.also if other == chunk}

    def _size_bytes(self, key: Key) -> int:
        if len(key) == 2:
            return self.memory.sizes_bytes.get(key, 0)
        return self.memory.activation_bytes.get(key[:2], 0)

    def fresh(self, key: Key, tier: str) -> bool:
        return self.version.get((key, tier)) == self.newest.get(key, -1)

    def read(self, node: int, key: Key, tier: str) -> None:
        if key not in self.newest:
            self.reading.fault(f"{_name(key)}: nothing says where it lies", node)
        elif not self.fresh(key, tier):
            state = "is stale" if (key, tier) in self.version else "is not"
            self.reading.fault(f"{_name(key)} {state} on the {tier}", node)
        if (key, tier) in self.writer:
            self.reading.needs[node].append(self.writer[key, tier])
        self.readers[key, tier].append(node)

    def write(self, node: int, key: Key, tier: str, version: int) -> None:
        if (key, tier) not in self.version:
            self._take(node, key, tier)
        self._overwrite(node, key, tier)
        if (key, tier) in self.writer:
            self.reading.needs[node].append(self.writer[key, tier])
        self.version[key, tier] = self.newest[key] = version
        self.writer[key, tier] = node

    def _take(self, node: int, key: Key, tier: str) -> None:
        size, budget = self._size_bytes(key), self.memory.budget_bytes.get(tier)
        self.used[tier] += size
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        if budget is None or not size:  # what takes no room waits for none
            return
        if self.used[tier] > budget:
            self.reading.fault(
                f"{_name(key)}: {self.used[tier]} bytes on the {tier}, which has {budget}", node
            )
        while self.freeing[tier] and self.used[tier] + sum(n for _, n in self.freeing[tier]) > budget:
            freer, _ = self.freeing[tier].popleft()
            self.awaited[tier][self.reading.actions[freer].resource] = freer
        self.reading.needs[node] += self.awaited[tier].values()

    def drop(self, node: int, key: Key, tier: str) -> None:
        if self.version.pop((key, tier), None) is None:
            self.reading.fault(f"{_name(key)} is not on the {tier}", node)
            return
        self.used[tier] -= self._size_bytes(key)
        if self.reading.actions[node].resource != COMPUTE:
            self.freeing[tier].append((node, self._size_bytes(key)))
        self._overwrite(node, key, tier)
        self.writer.pop((key, tier), None)

    def _overwrite(self, node: int, key: Key, tier: str) -> None:
        self.reading.needs[node] += [other for other in self.readers.pop((key, tier), []) if other != node]

    def move(self, node: int, key: Key, tier: str, to: str) -> None:
        """FETCH (up) and EVICT (down): a clean copy below is kept, a stale one above is thrown away."""
        up = self.reading.actions[node].kind is ActionKind.FETCH
        if up or not self.fresh(key, to):
            if up and self.fresh(key, to):
                self.reading.fault(f"{_name(key)} is already on the {to}", node)
            self.read(node, key, tier)
            if key in self.newest:
                self.write(node, key, to, self.newest[key])
        if not (up and len(key) == 2 and self.memory.home.get(key) == tier):
            self.drop(node, key, tier)

    def close(self, last: int) -> None:
        """At the end of the list each chunk must lie where it lay, in its newest version."""
        for chunk in self.chunks:
            there = {tier for key, tier in self.version if key == chunk}
            stale = {tier for tier in there if not self.fresh(chunk, tier)}
            rests = set() if chunk in self.memory.spent else self._resting(chunk)
            if stale or there != rests:
                now = ", ".join(sorted(f"{t} (stale)" if t in stale else t for t in there)) or "nowhere"
                must = ", ".join(sorted(rests)) or "nowhere"
                self.reading.fault(f"{_name(chunk)} ends on {now} and must end on {must}", last)


def _name(key: Key) -> str:
    parts = ("task", "stage", "micro-batch", "slice") if len(key) == 4 else ("task", "chunk")
    shown = [f"{part} {value}" for part, value in zip(parts, key, strict=True) if part != "task" or value]
    return ("activations of " if len(key) == 4 else "") + " ".join(shown)


class Reading:
    """A plan read under the rules of the language. Nodes are its actions, counted rank after rank.

    needs[node]: nodes whose work must be done before it starts, beside the order of its lane; hops: for a
    need on another rank in a plan without messages, the SEND that it stands for; sender: SEND node of each
    RECV; meets: nodes of each TIED_REDUCE. problems: what is wrong, with places.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[int, Shape] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.plan = plan
        self.places = [(rank, i) for rank, actions in enumerate(plan) for i in range(len(actions))]
        self.actions = [action for actions in plan for action in actions]
        self.messages = any(action.kind in MESSAGES for action in self.actions)
        self.needs: list[list[int]] = [[] for _ in self.actions]
        self.hops: dict[tuple[int, int], Action] = {}
        self.sender: dict[int, int] = {}
        self.meets: list[list[int]] = []
        self.problems: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        tasks = sorted({action.task for action in self.actions})
        self.shapes = shapes if shapes is not None else {task: Shape.of(plan, task) for task in tasks}
        self.placement = {
            (a.task, a.stage, a.micro_batch): self.places[n][0]
            for n, a in enumerate(self.actions)
            if a.kind is ActionKind.F
        }
        self.updates: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.where: dict[tuple[Hashable, ...], int] = {}
        self._index()
        if self.problems:
            raise PlanError(plan, self.problems)
        self._order()
        self._cover()
        for node in range(len(self.actions)):
            self._follow(node)
        self._match()
        memory = memory or Memory.of(plan)
        walks = [_Walk(self, rank, memory) for rank in range(len(plan))]
        self._meet()
        self.footprint = Footprint(
            tuple(walk.peak for walk in walks),
            tuple(dict(walk.tiers.peak) for walk in walks),
            len(self.sender),
        )

    def fault(self, text: str, *nodes: int) -> None:
        """Note what is wrong at these nodes."""
        named = ", ".join(f"rank {self.places[n][0]} {self.actions[n]}" for n in nodes)
        self.problems.append((f"{named}: {text}" if named else text, tuple(self.places[n] for n in nodes)))

    def refuse(self, strict: bool = False) -> None:
        """Raises PlanError if anything is wrong, or if the plan cannot run to its end."""
        if not self.problems:
            for node, others in self.blocked(strict).items():
                for other in others:
                    self.fault(f"waits for ever for rank {self.places[other][0]} {self.actions[other]}", node)
        if self.problems:
            raise PlanError(self.plan, self.problems)

    def _index(self) -> None:
        """What there is must lie in the shapes; nothing else can be said of a plan where it does not."""
        for node, action in enumerate(self.actions):
            shape = self.shapes.get(action.task)
            if shape is None:
                self.fault("no such task", node)
            elif action.kind in COMPUTE_KINDS or action.kind in MESSAGES:
                limits = (shape.stages, shape.micro_batches, shape.slices)
                if any(i >= n for i, n in zip(_subject(action)[1:], limits, strict=True)):
                    self.fault("outside {} stages, {} micro-batches, {} slices".format(*limits), node)
            elif (
                action.kind is ActionKind.UPDATE
                and action.stage is not None
                and action.micro_batch is not None
            ):
                self.updates[action.task, action.stage, action.micro_batch].append(node)

    def _order(self) -> None:
        """Each on the rank of its stage, once, and ascending. B counts as I and as W."""
        last: dict[tuple[Hashable, ...], int] = {}
        for node, action in enumerate(self.actions):
            if action.kind not in COMPUTE_KINDS and action.kind not in MESSAGES:
                continue
            if action.kind in COMPUTE_KINDS and self._home(action) != self.places[node][0]:
                self.fault("the forward of this stage is not on this rank", node)
            for part in (ActionKind.I, ActionKind.W) if action.kind is ActionKind.B else (action.kind,):
                if (part, *_subject(action)) in self.where:
                    self.fault("done twice", self.where[part, *_subject(action)], node)
                self.where[part, *_subject(action)] = node
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
                            word = Action(kind, task, stage, i, k if shape.slices > 1 else None)
                            if node is None and kind in due:
                                self.fault(f"{word} is never done")
                            elif node is not None and kind not in due:
                                self.fault(f"{word} is not needed: nothing there trains", node)

    def _after(self, node: int, kind: ActionKind) -> None:
        """`node` needs the `kind` of its own stage and micro-batch, earlier in its list."""
        other = self.where.get((kind, *_subject(self.actions[node])))
        if other is not None and other < node and self.places[other][0] == self.places[node][0]:
            self.needs[node].append(other)
        else:
            self.fault(f"no {kind} of it before", node)

    def _after_update(self, node: int) -> None:
        """An F waits for the UPDATEs of the micro-batch before; only they let a stage move to another rank."""
        task, stage, i, _ = _subject(self.actions[node])
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
        """What a compute action or a SEND waits for."""
        action = self.actions[node]
        if action.kind in (ActionKind.F, ActionKind.I, ActionKind.B):
            send, step = (ActionKind.SEND_F, -1) if action.kind is ActionKind.F else (ActionKind.SEND_B, 1)
            made_by = ActionKind.F if action.kind is ActionKind.F else ActionKind.I
            if made_by is ActionKind.I:
                self._after(node, ActionKind.F)
            else:
                self._after_update(node)
            task, stage, *rest = _subject(action)
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
                self.hops[source, node] = replace(self.actions[source], kind=send, resource="")
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
                elif _answer(self.actions[send]) != self.actions[receive]:
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
        """The first action of each rank that can never run, and what it waits for, if SENDs block until their
        RECV is posted and, with `strict`, RECVs until their SEND is. Empty if the plan runs to its end."""

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


def _subject(action: Action) -> tuple[int, int, int, int]:
    assert action.stage is not None and action.micro_batch is not None
    return action.task, action.stage, action.micro_batch, action.slice or 0


def _ascends(before: Action, after: Action) -> bool:
    """Micro-batches ascend; slices ascend in F and descend in what follows."""
    sign = 1 if after.kind is ActionKind.F else -1
    (*_, i, k), (*_, j, m) = _subject(before), _subject(after)
    return (i, sign * k) < (j, sign * m)


def _answer(send: Action) -> Action:
    """The RECV that takes what a SEND sends."""
    assert send.stage is not None
    return replace(
        send, kind=SENDS[send.kind], stage=send.stage + (1 if send.kind is ActionKind.SEND_F else -1)
    )


def _reachable(waits: list[list[int]]) -> set[int]:
    """Nodes that run when each waits for those listed (Kahn's algorithm)."""
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


class _Walk:
    """One rank's list in order: what lies where, what is gathered, what is summed and updated."""

    def __init__(self, reading: Reading, rank: int, memory: Memory) -> None:
        self.reading, self.memory = reading, memory
        self.nodes = [n for n, (r, _) in enumerate(reading.places) if r == rank]
        mine = [reading.actions[n] for n in self.nodes]
        chunks = {(a.task, a.chunk) for a in mine if a.chunk is not None}
        stages = {(a.task, a.stage) for a in mine}
        chunks |= {chunk for stage, used in memory.uses.items() if stage in stages for chunk in used}
        chunks |= {
            c for key in set(chunks) for table in (memory.reads, memory.writes) for c in table.get(key, ())
        }
        chunks |= {chunk for stage, made in memory.made.items() if stage in stages for chunk in made}
        self.tiers = _Tiers(memory, chunks & memory.home.keys(), reading)
        self.live = self.peak = 0
        self.gathered: set[tuple[int, int | None, int | None]] = set()
        self.sharded = {_weights(a) for a in mine if a.kind is ActionKind.UNSHARD}
        self.begun: set[tuple[int, int | None]] = set()
        self.due = Counter((a.task, a.stage) for a in mine if self._frees(a))
        self.sums = Counter(_weights(a) for a in mine if a.kind is ActionKind.REDUCE)
        self.summed: dict[tuple[Hashable, ...], int] = {}
        for node in self.nodes:
            action = reading.actions[node]
            match action.kind:
                case ActionKind.F | ActionKind.I | ActionKind.W | ActionKind.B:
                    self._compute(node, action)
                case ActionKind.FETCH | ActionKind.EVICT:
                    self._move(node, action)
                case ActionKind.UNSHARD | ActionKind.RESHARD:
                    self._gather(node, action)
                case ActionKind.REDUCE | ActionKind.TIED_REDUCE | ActionKind.UPDATE:
                    self._step(node, action)
        self._close(mine)

    def _frees(self, action: Action) -> bool:
        """Whether this is the last that its stage does with a micro-batch's activations."""
        if action.kind not in COMPUTE_KINDS:
            return False
        due = self.reading.shapes[action.task].backward_kinds(action.stage or 0)
        return bool(due) and action.kind in (due[-1], ActionKind.B)

    def _compute(self, node: int, action: Action) -> None:
        assert action.stage is not None
        stage, activations = (action.task, action.stage), _subject(action)
        self.begun.add(stage)
        for chunk in self.memory.uses.get(stage, ()):
            self.tiers.read(node, chunk, "device")
        for weights in self.sharded - self.gathered:
            if weights[:2] == stage:
                self.reading.fault("its weights are not gathered", node)
        if action.kind is not ActionKind.F:
            self.tiers.read(node, activations, "device")
        elif self.reading.shapes[action.task].backward_kinds(action.stage):
            self.tiers.write(node, activations, "device", 0)
            self._count(+1)
        if self._frees(action):
            self.due[stage] -= 1
            self._count(-1)
            self.tiers.drop(node, activations, "device")
            for chunk in self.memory.made.get(stage, ()):
                self.tiers.write(node, chunk, "device", self.tiers.newest[chunk] + 1)

    def _count(self, change: int) -> None:
        self.live += change
        self.peak = max(self.peak, self.live)

    def _move(self, node: int, action: Action) -> None:
        tier, to = MOVES[action.kind, action.resource]
        if action.chunk is not None:
            self.tiers.move(node, (action.task, action.chunk), tier, to)
        elif action.micro_batch is None:
            self.reading.fault("needs a chunk, or the micro-batch whose activations it moves", node)
        else:
            self.tiers.move(node, _subject(action), tier, to)
            self._count({"device": -1}.get(tier, 0) + {"device": 1}.get(to, 0))

    def _gather(self, node: int, action: Action) -> None:
        weights = _weights(action)
        if (action.kind is ActionKind.UNSHARD) == (weights in self.gathered):
            self.reading.fault("is gathered already" if weights in self.gathered else "is not gathered", node)
        (self.gathered.add if action.kind is ActionKind.UNSHARD else self.gathered.discard)(weights)

    def _step(self, node: int, action: Action) -> None:
        """REDUCE, TIED_REDUCE and UPDATE. An UPDATE before its stage's first F belongs to the step before."""
        weights, stage = _weights(action), (action.task, action.stage)
        first = action.micro_batch is None and stage not in self.begun and self.due[stage] > 0
        deferred = action.kind is ActionKind.UPDATE and first
        last = self.reading.where.get((ActionKind.W, action.task, action.stage, action.micro_batch, 0), -1)
        if (
            self.due[stage]
            and not deferred
            and (action.micro_batch is None or not self.nodes[0] <= last < node)
        ):
            self.reading.fault("its gradient is not complete", node)
        done = (action.kind, *weights, action.micro_batch)
        if done in self.summed:
            self.reading.fault("done twice", self.summed[done], node)
        self.summed[done] = node
        if action.kind is ActionKind.REDUCE:
            self.sums[weights] -= 1
            tied = self.summed.get((ActionKind.TIED_REDUCE, *weights, action.micro_batch))
            self.reading.needs[node] += [] if tied is None else [tied]
        elif (
            action.kind is ActionKind.TIED_REDUCE
            and (ActionKind.REDUCE, *weights, action.micro_batch) in self.summed
        ):
            self.reading.fault("must come before its REDUCE", node)
        elif action.kind is ActionKind.UPDATE:
            self._update(node, action, deferred)

    def _update(self, node: int, action: Action, deferred: bool) -> None:
        weights = _weights(action)
        part = (ActionKind.REDUCE, *weights, action.micro_batch)
        late = self.sums[weights] if action.micro_batch is None else part not in self.summed
        if late and weights in self.sums and not deferred:
            self.reading.fault("comes before its REDUCE", node)
        self.reading.needs[node] += [
            n for done, n in self.summed.items() if done[:4] == (ActionKind.REDUCE, *weights)
        ]
        chunk = None if action.chunk is None else (action.task, action.chunk)
        tier = "device" if action.resource == COMPUTE else "host"
        if chunk is not None and chunk in self.memory.home:
            for read in (chunk, *self.memory.reads.get(chunk, ())):
                self.tiers.read(node, read, tier)
            for written in (chunk, *self.memory.writes.get(chunk, ())):
                self.tiers.write(node, written, tier, self.tiers.newest[written] + 1)
            for gradient in self.memory.spent.intersection(self.memory.reads.get(chunk, ())):
                self.tiers.drop(node, gradient, tier)

    def _close(self, mine: list[Action]) -> None:
        last = self.nodes[-1] if self.nodes else 0
        for weights in sorted(self.gathered, key=str):
            self.reading.fault(f"the weights of stage {weights[1]} stay gathered", last)
        done = {k: {_weights(a) for a in mine if a.kind is k} for k in (ActionKind.REDUCE, ActionKind.UPDATE)}
        for weights in sorted(done[ActionKind.REDUCE] ^ done[ActionKind.UPDATE], key=str):
            lacks = ActionKind.UPDATE if weights in done[ActionKind.REDUCE] else ActionKind.REDUCE
            if any(a.kind is lacks and a.task == weights[0] for a in self.reading.actions):
                self.reading.fault(f"stage {weights[1]} chunk {weights[2]} has no {lacks}", last)
        parts: defaultdict[tuple[ActionKind, int, int | None, int | None], set[int | None]] = defaultdict(set)
        for action in mine:
            if action.kind in (ActionKind.REDUCE, ActionKind.UPDATE):
                parts[action.kind, *_weights(action)].add(action.micro_batch)
        for (kind, task, stage, chunk), done_in in parts.items():
            whole = {a.micro_batch for a in mine if self._frees(a) and (a.task, a.stage) == (task, stage)}
            if done_in not in ({None}, whole):
                self.reading.fault(f"stage {stage} chunk {chunk} has no {kind} for every micro-batch", last)
        self.tiers.close(last)


def _weights(action: Action) -> tuple[int, int | None, int | None]:
    return action.task, action.stage, action.chunk


def check(
    plan: Plan,
    *,
    shapes: Mapping[int, Shape] | None = None,
    memory: Memory | None = None,
    cap: int | None = None,
    strict: bool = False,
) -> Footprint:
    """Proves that a plan does all of its work once and in order, pairs its messages, cannot block, uses
    nothing before it is there, and stays within its memory.

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
