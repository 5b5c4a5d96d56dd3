"""Walks one rank's list in order and checks its state: copies on tiers, gathered weights, sums, updates.

Copies have versions.  An UPDATE makes every other copy of a chunk stale; a stale copy must not be read.  Each tier
counts its bytes against its budget, in the order of the list.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence

from colossal_lite.schedule.plan import COMPUTE, MOVES, Action, ActionKind, Chunk, Key, Memory
from colossal_lite.schedule.plan_nodes import PlanNodes, work_of


class TierCopies:
    """Copies on the tiers of one rank, while its list is read: versions, bytes, and the nodes to wait for."""

    def __init__(self, memory: Memory, chunks: Iterable[Chunk], table: PlanNodes) -> None:
        self.memory, self.table = memory, table
        self.newest: dict[Key, int] = {}
        self.version: dict[tuple[Key, str], int] = {}
        self.used: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.writer: dict[tuple[Key, str], int] = {}
        self.readers: defaultdict[tuple[Key, str], list[int]] = defaultdict(list)
        self.left: dict[tuple[Key, str], int] = {}
        # Space that a queued EVICT will free counts as taken until an action needs it, oldest first.
        self.freeing: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)
        self.awaited: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.chunks = sorted(chunks)
        made = {chunk for of_stage in memory.made.values() for chunk in of_stage}
        for chunk in self.chunks:
            self.newest[chunk] = 0
            if chunk not in made:
                tier = memory.home[chunk]
                self.version[chunk, tier] = 0
                self.used[self._budget_of(chunk, tier)] += self._size_bytes(chunk)
        self.peak.update(self.used)

    def _budget_of(self, key: Key, tier: str) -> str:
        return self.memory.apart.get((key, tier), tier) if len(key) == 2 else tier

    def _size_bytes(self, key: Key) -> int:
        if len(key) == 2:
            return self.memory.sizes_bytes.get(key, 0)
        return self.memory.activation_bytes.get(key[:2], 0)

    def fresh(self, key: Key, tier: str) -> bool:
        return self.version.get((key, tier)) == self.newest.get(key, -1)

    def read(self, node: int, key: Key, tier: str) -> None:
        if key not in self.newest:
            self.table.fault(f"{_name(key)}: nothing says where it is", node)
        elif not self.fresh(key, tier):
            state = "is stale" if (key, tier) in self.version else "is not"
            self.table.fault(f"{_name(key)} {state} on the {tier}", node)
        if (key, tier) in self.writer:
            self.table.needs[node].append(self.writer[key, tier])
        self.readers[key, tier].append(node)

    def write(self, node: int, key: Key, tier: str, version: int) -> None:
        if (key, tier) not in self.version:
            self.take(node, key, tier)
        self._overwrite(node, key, tier)
        if (key, tier) in self.writer:
            self.table.needs[node].append(self.writer[key, tier])
        self.version[key, tier] = self.newest[key] = version
        self.writer[key, tier] = node

    def take(self, node: int, key: Key, tier: str) -> None:
        """Count the bytes of a copy against the budget of its tier."""
        tier = self._budget_of(key, tier)
        size, budget = self._size_bytes(key), self.memory.budget_bytes.get(tier)
        self.used[tier] += size
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        if budget is None or not size:  # what takes no room waits for none
            return
        if self.used[tier] > budget:
            self.table.fault(f"{_name(key)}: {self.used[tier]} bytes on the {tier}, which has {budget}", node)
        while self.freeing[tier] and self.used[tier] + sum(n for _, n in self.freeing[tier]) > budget:
            freer, _ = self.freeing[tier].popleft()
            self.awaited[tier][self.table.actions[freer].resource] = freer
        self.table.needs[node] += self.awaited[tier].values()

    def drop(self, node: int, key: Key, tier: str) -> None:
        if self.version.pop((key, tier), None) is None:
            self.table.fault(f"{_name(key)} is not on the {tier}", node)
            return
        self.free(node, key, tier)
        self._overwrite(node, key, tier)
        self.writer.pop((key, tier), None)
        self.left[key, tier] = node

    def use_up(self, node: int, key: Key, tier: str) -> None:
        """Drop a gradient that was read on this tier, and its copy on the other."""
        self.drop(node, key, tier)
        for other in ("device", "host"):
            if (key, other) in self.version:
                self.drop(node, key, other)

    def free(self, node: int, key: Key, tier: str) -> None:
        """The bytes of a copy are free when this action is done."""
        budget = self._budget_of(key, tier)
        self.used[budget] -= self._size_bytes(key)
        if self.table.actions[node].resource != COMPUTE:
            self.freeing[budget].append((node, self._size_bytes(key)))

    def _overwrite(self, node: int, key: Key, tier: str) -> None:
        self.table.needs[node] += [other for other in self.readers.pop((key, tier), []) if other != node]

    def move(self, node: int, key: Key, tier: str, to: str) -> None:
        """Apply a FETCH (up) or an EVICT (down). A clean copy below is not overwritten, a stale one above is
        dropped."""
        up = self.table.actions[node].kind is ActionKind.FETCH
        if up or not self.fresh(key, to):
            if up and self.fresh(key, to):
                self.table.fault(f"{_name(key)} is already on the {to}", node)
            self.read(node, key, tier)
            if key in self.newest:
                self.write(node, key, to, self.newest[key])
        if not (up and len(key) == 2 and self.memory.home.get(key) == tier):
            self.drop(node, key, tier)

    def close(self, last: int) -> None:
        """Check that at the end of the list each chunk is on its home tier, in its newest version."""
        tiers: defaultdict[Key, set[str]] = defaultdict(set)
        for key, tier in self.version:
            tiers[key].add(tier)
        for chunk in self.chunks:
            there = tiers[chunk]
            stale = {tier for tier in there if not self.fresh(chunk, tier)}
            rests = set() if chunk in self.memory.spent else {self.memory.home[chunk]}
            if stale or there != rests:
                now = ", ".join(sorted(f"{t} (stale)" if t in stale else t for t in there)) or "nowhere"
                must = ", ".join(sorted(rests)) or "nowhere"
                self.table.fault(f"{_name(chunk)} ends on {now} and must end on {must}", last)


class RankWalk:
    """Reads one rank's list in order: chunks on tiers, gathered weights, sums and updates."""

    def __init__(self, table: PlanNodes, rank: int, memory: Memory) -> None:
        self.table, self.memory = table, memory
        self.rank = rank
        self.nodes = range(table.firsts[rank], table.firsts[rank + 1])
        mine = [table.actions[n] for n in self.nodes]
        chunks = {(a.task, a.chunk) for a in mine if a.chunk is not None}
        stages = {(a.task, a.stage) for a in mine}
        chunks |= {chunk for stage, used in memory.uses.items() if stage in stages for chunk in used}
        chunks |= {
            c for key in set(chunks) for table in (memory.reads, memory.writes) for c in table.get(key, ())
        }
        chunks |= {chunk for stage, made in memory.made.items() if stage in stages for chunk in made}
        self.tiers = TierCopies(memory, chunks & memory.home.keys(), table)
        self.live = self.peak = 0
        self.gathered: dict[tuple[int, int | None, int | None], int] = {}  # and the UNSHARD
        self.fetched: dict[Chunk, int] = {}  # for its gather, by this FETCH
        self.copied: dict[Chunk | None, tuple[int, ...]] = {}  # and the versions that its copy has
        self.sharded = {_weights(a) for a in mine if a.kind is ActionKind.UNSHARD}
        self.begun: set[tuple[int, int | None]] = set()
        self.due = Counter((a.task, a.stage) for a in mine if table.frees(a))
        self.sums = Counter(_weights(a) for a in mine if a.kind is ActionKind.REDUCE)
        self.summed: dict[tuple[Hashable, ...], int] = {}
        self.reduced: defaultdict[tuple[int, int | None, int | None], list[int]] = defaultdict(list)
        # Of the last computing: what must leave, what must leave when it is over, and FETCHes that are a part of it.
        self.awaited: Sequence[Chunk] = []
        self.flushed: Sequence[Chunk] = []
        self.blocking: list[int] = []
        for node in self.nodes:
            action = table.actions[node]
            self._await_computing(node, action)
            if memory.awaited and action.chunk is not None:
                self._await(node, memory.awaited.get((action.kind, (action.task, action.chunk)), ()))
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

    def _await_computing(self, node: int, action: Action) -> None:
        """An action starts when all is done that the issuer waits for at the end of the last computing."""
        is_part = action.kind is ActionKind.FETCH and (action.task, action.chunk) in self.memory.blocking
        self.table.needs[node] += self.blocking
        self._await(node, self.awaited)
        self._await(node, () if is_part else self.flushed)
        if is_part:
            self.blocking.append(node)
        elif action.resource == COMPUTE:
            self.awaited, self.flushed, self.blocking = [], [], []

    def _await(self, node: int, chunks: Sequence[Chunk]) -> None:
        """An action starts when these have left the device."""
        left = (self.tiers.left.get((chunk, "device")) for chunk in chunks)
        self.table.needs[node] += [evicted for evicted in left if evicted is not None]

    def _compute(self, node: int, action: Action) -> None:
        assert action.stage is not None
        stage, activations = (action.task, action.stage), work_of(action)
        self.begun.add(stage)
        uses = self.memory.uses.get(stage, ())
        gathered = {(t, chunk): unshard for (t, _, chunk), unshard in self.gathered.items()} if uses else {}
        for chunk in uses:
            if chunk not in self.memory.sharded:
                self.tiers.read(node, chunk, "device")
            elif chunk in gathered:
                self.table.needs[node].append(gathered[chunk])
            else:
                self.table.fault(f"{_name(chunk)} is not gathered", node)
        for weights in self.sharded - self.gathered.keys():
            if weights[:2] == stage:
                self.table.fault("its weights are not gathered", node)
        for weights, gather in self.gathered.items():
            if weights[:2] == stage:
                self.table.needs[node].append(gather)
                self._refuse_old(node, weights)
        if action.kind is not ActionKind.F:
            self.tiers.read(node, activations, "device")
        elif self.table.due[action.task][action.stage]:
            self.tiers.write(node, activations, "device", 0)
            self._count(+1)
        if self.table.frees(action):
            self.awaited = self.memory.awaited.get((ActionKind.B, stage), ())
            self.flushed = self.memory.flushed.get(stage, ())
            self.due[stage] -= 1
            self._count(-1)
            self.tiers.drop(node, activations, "device")
            for chunk in self.memory.made.get(stage, ()):
                self.tiers.write(node, chunk, "device", self.tiers.newest[chunk] + 1)

    def _refuse_old(self, node: int, weights: tuple[int, int | None, int | None]) -> None:
        chunk = None if weights[2] is None else (weights[0], weights[2])
        if chunk in self.memory.sharded and self.copied[chunk] != self._versions(chunk):
            self.table.fault(f"{_name(chunk)} was gathered before the update of its weights", node)

    def _count(self, change: int) -> None:
        self.live += change
        self.peak = max(self.peak, self.live)

    def _move(self, node: int, action: Action) -> None:
        tier, to = MOVES[action.kind, action.resource]
        if action.chunk is not None and (chunk := (action.task, action.chunk)) in self.memory.sharded:
            self._fetch_shard(node, chunk)
        elif action.chunk is not None:
            self.tiers.move(node, chunk, tier, to)
        elif action.micro_batch is None:
            self.table.fault("needs a chunk, or the micro-batch whose activations it moves", node)
        else:
            self.tiers.move(node, work_of(action), tier, to)
            self._count({"device": -1}.get(tier, 0) + {"device": 1}.get(to, 0))

    def _fetch_shard(self, node: int, chunk: Chunk) -> None:
        """A FETCH of this rank's shard to its place in the slot of its chunk."""
        is_here = chunk in self.fetched or any((task, c) == chunk for task, _, c in self.gathered)
        if is_here or self.table.actions[node].kind is not ActionKind.FETCH:
            self.table.fault(
                f"{_name(chunk)} is {'' if is_here else 'not '}on the device for its gather", node
            )
            return
        for read in self.memory.reads.get(chunk, ()):
            self.tiers.read(node, read, "host")
        self.fetched[chunk], self.copied[chunk] = node, self._versions(chunk)
        self.tiers.take(node, chunk, "device")

    def _gather(self, node: int, action: Action) -> None:
        weights = _weights(action)
        if (action.kind is ActionKind.UNSHARD) == (weights in self.gathered):
            self.table.fault("is gathered already" if weights in self.gathered else "is not gathered", node)
        chunk = None if action.chunk is None else (action.task, action.chunk)
        if action.kind is ActionKind.UNSHARD:
            self.gathered[weights] = node
            self.copied.setdefault(chunk, self._versions(chunk))
            if chunk is not None and (fetch := self.fetched.pop(chunk, None)) is not None:
                self.table.needs[node].append(fetch)
            elif chunk is not None and (self.rank, chunk) in self.memory.offloaded:
                self.table.fault(f"the shard of {_name(chunk)} is on the host", node)
            elif chunk in self.memory.sharded:
                self.tiers.take(node, chunk, "device")
        elif self.gathered.pop(weights, None) is not None and chunk in self.memory.sharded:
            del self.copied[chunk]
            self.tiers.free(node, chunk, "device")

    def _versions(self, chunk: Chunk | None) -> tuple[int, ...]:
        """Of what a gather of this chunk copies."""
        copied = () if chunk is None else self.memory.reads.get(chunk, ())
        return tuple(self.tiers.newest[each] for each in copied)

    def _step(self, node: int, action: Action) -> None:
        """Apply a REDUCE, TIED_REDUCE or UPDATE. An UPDATE before its stage's first F belongs to the step before."""
        weights, stage = _weights(action), (action.task, action.stage)
        first = action.micro_batch is None and stage not in self.begun and self.due[stage] > 0
        deferred = action.kind is ActionKind.UPDATE and first
        last = self.table.where.get((ActionKind.W, action.task, action.stage, action.micro_batch, 0), -1)
        if (
            self.due[stage]
            and not deferred
            and (action.micro_batch is None or not self.nodes[0] <= last < node)
        ):
            self.table.fault("its gradient is not complete", node)
        done = (action.kind, *weights, action.micro_batch)
        if done in self.summed:
            self.table.fault("done twice", self.summed[done], node)
        self.summed[done] = node
        if action.kind is ActionKind.REDUCE:
            self.reduced[weights].append(node)
            self.sums[weights] -= 1
            tied = self.summed.get((ActionKind.TIED_REDUCE, *weights, action.micro_batch))
            self.table.needs[node] += [] if tied is None else [tied]
        elif (
            action.kind is ActionKind.TIED_REDUCE
            and (ActionKind.REDUCE, *weights, action.micro_batch) in self.summed
        ):
            self.table.fault("must come before its REDUCE", node)
        elif action.kind is ActionKind.UPDATE:
            self._update(node, action, deferred)

    def _update(self, node: int, action: Action, deferred: bool) -> None:
        weights = _weights(action)
        part = (ActionKind.REDUCE, *weights, action.micro_batch)
        late = self.sums[weights] if action.micro_batch is None else part not in self.summed
        if late and weights in self.sums and not deferred:
            self.table.fault("comes before its REDUCE", node)
        self.table.needs[node] += self.reduced[weights]
        chunk = None if action.chunk is None else (action.task, action.chunk)
        tier = "device" if action.resource == COMPUTE else "host"
        if chunk is not None and chunk in self.memory.home:
            for read in (chunk, *self.memory.reads.get(chunk, ())):
                self.tiers.read(node, read, tier)
            for written in (chunk, *self.memory.writes.get(chunk, ())):
                self.tiers.write(node, written, tier, self.tiers.newest[written] + 1)
            for gradient in self.memory.spent.intersection(self.memory.reads.get(chunk, ())):
                self.tiers.use_up(node, gradient, tier)

    def _close(self, mine: list[Action]) -> None:
        last = self.nodes[-1] if mine else 0
        for weights in sorted(self.gathered, key=str):
            self.table.fault(f"the weights of stage {weights[1]} stay gathered", last)
        for shard in sorted(self.fetched):
            self.table.fault(f"{_name(shard)} is fetched for a gather that never comes", last)
        done = {k: {_weights(a) for a in mine if a.kind is k} for k in (ActionKind.REDUCE, ActionKind.UPDATE)}
        for weights in sorted(done[ActionKind.REDUCE] ^ done[ActionKind.UPDATE], key=str):
            lacks = ActionKind.UPDATE if weights in done[ActionKind.REDUCE] else ActionKind.REDUCE
            if (lacks, weights[0]) in self.table.kinds:
                self.table.fault(f"stage {weights[1]} chunk {weights[2]} has no {lacks}", last)
        parts: defaultdict[tuple[ActionKind, int, int | None, int | None], set[int | None]] = defaultdict(set)
        for action in mine:
            if action.kind in (ActionKind.REDUCE, ActionKind.UPDATE):
                parts[action.kind, *_weights(action)].add(action.micro_batch)
        freed, visited = self._freed(mine), self._visited(mine)
        for (kind, task, stage, chunk), done_in in parts.items():
            by_visit = kind is ActionKind.REDUCE and self.table.shapes[task].by_visit
            if done_in not in ({None}, (visited if by_visit else freed)[task, stage]):
                self.table.fault(f"stage {stage} chunk {chunk} has no {kind} for every micro-batch", last)
        self.tiers.close(last)

    def _freed(self, mine: Sequence[Action]) -> defaultdict[tuple[int, int | None], set[int | None]]:
        """The micro-batches of each task and stage whose activations are freed."""
        found: defaultdict[tuple[int, int | None], set[int | None]] = defaultdict(set)
        for action in filter(self.table.frees, mine):
            found[action.task, action.stage].add(action.micro_batch)
        return found

    def _visited(self, mine: Sequence[Action]) -> defaultdict[tuple[int, int | None], set[int | None]]:
        """The micro-batches of each task and stage that end a visit: those of another stage come next, or none."""
        found: defaultdict[tuple[int, int | None], set[int | None]] = defaultdict(set)
        ended: dict[int, Action] = {}
        ends = [a for a in mine if a.kind in (ActionKind.W, ActionKind.B)]
        for action in reversed(ends):
            then = ended.get(action.task)
            if then is None or then.stage != action.stage:
                found[action.task, action.stage].add(action.micro_batch)
            ended[action.task] = action
        return found


def _name(key: Key) -> str:
    parts = ("task", "stage", "micro-batch", "slice") if len(key) == 4 else ("task", "chunk")
    shown = [f"{part} {value}" for part, value in zip(parts, key, strict=True) if part != "task" or value]
    return ("activations of " if len(key) == 4 else "") + " ".join(shown)


def _weights(action: Action) -> tuple[int, int | None, int | None]:
    return action.task, action.stage, action.chunk
