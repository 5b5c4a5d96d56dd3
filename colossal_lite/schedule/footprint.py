"""Computes what one rank's list of actions holds: slots of messages, live bytes, unread sends.

Note
----
The walks do what the runtime does with each action, with bytes in the place of tensors.  The output of a stage lives
until its SEND has left and `IN_FLIGHT` more have.  Where the next stage is on this rank, it lives until that stage's
backward is done.  A gradient from a stage of this rank lives until backward.  What arrives from another rank is in a
slot.  So the forecast is the maximum over the plan's moments, not a bound on each part.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from colossal_lite.schedule.plan import COMPUTE_KINDS, SENDS, Action, ActionKind, Plan

IN_FLIGHT = 4
"""Sends that hold their tensors at once."""
HEADER_BYTES = 4096
"""Of what precedes a message whose form is not agreed yet."""
Subject = tuple[int, int]
"""Stage and micro-batch."""


def subject_of(action: Action) -> Subject:
    assert action.stage is not None and action.micro_batch is not None
    return action.stage, action.micro_batch


def most_arrivals(actions: Sequence[Action]) -> int:
    """Most messages that a rank holds at once, from the RECV to the last compute of its stage and micro-batch."""
    last = {subject_of(a): a for a in actions if a.kind in COMPUTE_KINDS}
    held: Counter[Subject] = Counter()
    most = 0
    for action in actions:
        if action.kind in SENDS.values():
            held[subject_of(action)] += 1
            most = max(most, held.total())
        elif action.kind in COMPUTE_KINDS and last[subject_of(action)] is action:
            held.pop(subject_of(action), None)
    return most


def most_unread(plan: Plan, rank: int, sent_bytes: Callable[[Action], int], *, blocks: bool) -> int:
    """Most bytes of a rank's messages that it cannot know to be read. A message that it has read shows all that its
    sender did before.

    sent_bytes: of a SEND, and of a TIED_REDUCE to all others; blocks: RECVs wait for their message, else their first
    use does.
    """
    at = {
        (a.kind, *subject_of(a)): (r, i)
        for r, actions in enumerate(plan)
        for i, a in enumerate(actions)
        if a.stage is not None and a.micro_batch is not None
    }

    def reader(send: Action) -> tuple[int, int]:
        """The rank that reads a message, and the position in its list."""
        stage, i = subject_of(send)
        stage += 1 if send.kind is ActionKind.SEND_F else -1
        uses = (ActionKind.F,) if send.kind is ActionKind.SEND_F else (ActionKind.I, ActionKind.B)
        kinds = (SENDS[send.kind],) if blocks else uses
        return next(at[kind, stage, i] for kind in kinds if (kind, stage, i) in at)

    came: dict[int, tuple[int, int]] = {}  # position of this rank's read -> the sender, and its position
    for sender, actions in enumerate(plan):
        for place, action in enumerate(actions):
            if action.kind in SENDS and reader(action)[0] == rank:
                came[reader(action)[1]] = sender, place
    known: Counter[int] = Counter()
    unread: list[tuple[int, int, int]] = []
    most = 0
    for place, action in enumerate(plan[rank]):
        if place in came:
            sender, done = came[place]
            known[sender] = max(known[sender], done)
        unread = [each for each in unread if each[1] >= known[each[0]]]
        if action.kind in SENDS:
            unread.append((*reader(action), sent_bytes(action)))
        elif action.kind is ActionKind.TIED_REDUCE:
            unread.append((rank, len(plan[rank]), sent_bytes(action)))
        most = max(most, sum(each for *_, each in unread))
    return most


@dataclass(frozen=True)
class StageCost:
    """Cost of one micro-batch on one stage of this rank.

    Live bytes when its forward ends, its output among them, and when that has gone. Those between I and W. The most
    in each action, from the beginning of the forward on. Bytes of its logits and of its message to the next stage.
    Payload and calls by operation and axis.
    """

    ended: int
    kept: int
    waiting: int
    peaks: Mapping[ActionKind, int]
    logits: int
    sent: int
    payload: Mapping[tuple[str, str], int] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Walk:
    """Computes the live bytes beside the state of a rank and the slots of its messages, action by action.

    cost_of: of a stage and micro-batch, None where that has no samples; tied_bytes: what a TIED_REDUCE of a chunk needs
    beside it. Afterwards `kept` is the most that a forward has left, `logits` the logits in it, and `most` the peak.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        placement: Mapping[int, int],
        cost_of: Callable[[int, int], StageCost | None],
        tied_bytes: Mapping[int, int],
    ) -> None:
        self.placement, self.cost_of, self.tied_bytes = placement, cost_of, tied_bytes
        self.last_use = {subject_of(a): a for a in actions if a.kind in COMPUTE_KINDS}
        self.sends = {(a.kind, *subject_of(a)) for a in actions if a.kind in SENDS}
        self.graphs: dict[Subject, int] = {}
        self.logits_of: dict[Subject, int] = {}
        self.came: dict[Subject, int] = {}  # from a stage here, to the end of backward
        self.gradients: dict[Subject, int] = {}  # from a stage here, until backward
        self.leaving: dict[tuple[ActionKind, int, int], int] = {}
        self.flying: deque[int] = deque(maxlen=IN_FLIGHT)
        self.kept = self.logits = self.most = 0
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        if action.kind is ActionKind.TIED_REDUCE:
            self._reach(self.tied_bytes[action.chunk or 0])
        if action.stage is None or action.micro_batch is None:
            return
        subject = subject_of(action)
        cost = self.cost_of(*subject)
        if cost is None:
            return
        if action.kind in SENDS:
            self.flying.append(self.leaving.pop((action.kind, *subject)))
        if action.kind not in COMPUTE_KINDS:
            return
        self.graphs.pop(subject, None)
        self._reach(cost.peaks[action.kind])
        if action.kind is ActionKind.F:
            self._forward(subject, cost)
        else:
            self.logits_of.pop(subject, None)
        if action.kind in (ActionKind.I, ActionKind.B):
            self._backward(subject, cost)
        if self.last_use[subject] is action:
            self.graphs.pop(subject, None)
            self.came.pop(subject, None)

    def _now(self) -> int:
        each = (self.graphs, self.came, self.gradients, self.leaving)
        return sum(sum(kind.values()) for kind in each) + sum(self.flying)

    def _reach(self, on_top: int) -> None:
        self.most = max(self.most, self._now() + on_top)

    def _forward(self, subject: Subject, cost: StageCost) -> None:
        stage, i = subject
        self.logits_of[subject] = cost.logits
        if self._now() + cost.ended > self.kept:
            self.kept, self.logits = self._now() + cost.ended, sum(self.logits_of.values())
        self.graphs[subject] = cost.kept
        if stage + 1 not in self.placement:
            return
        if self.placement[stage + 1] == self.placement[stage]:
            self.came[stage + 1, i] = cost.sent
        else:
            self.leaving[ActionKind.SEND_F, stage, i] = cost.sent

    def _backward(self, subject: Subject, cost: StageCost) -> None:
        stage, i = subject
        self.gradients.pop(subject, None)
        self.graphs[subject] = cost.waiting
        source = self.cost_of(stage - 1, i) if stage else None
        if source is None:
            return
        if (ActionKind.SEND_B, stage, i) in self.sends:
            self.leaving[ActionKind.SEND_B, stage, i] = source.sent
        elif self.placement[stage - 1] == self.placement[stage]:
            if self.last_use[stage - 1, i].kind is not ActionKind.F:
                self.gradients[stage - 1, i] = source.sent
