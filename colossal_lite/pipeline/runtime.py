"""Executes one rank's list of actions; the plan decides their order.

Note: lifetimes.
F saves, for a stage and micro-batch, the input leaves and one scalar, the *root* of its graph.  This node passes to the
outputs the gradients it finds when backward begins.  I leaves what W will run.  So outputs are freed once they are
sent, however long the graph lives.  A received tensor is in a slot.  The RECV takes the slot, and the last I, W or B of
that stage and micro-batch frees it.  Slots are counted from the plan and allocated once.  SENDs are asynchronous, and
at most `IN_FLIGHT` of them hold their tensors.  Waiting for the oldest cannot block for ever: the checker has proved
the plan for SENDs that wait for their RECV.  Between stages of one rank nothing is copied.

Shapes are agreed once.  The first step with micro-batches of a new shape runs the plan whose RECVs block.  Then every
message has a header: structure, dtypes, shapes, and which tensors take a gradient.  Later steps post their RECVs ahead,
and a stage whose output then has another structure raises.  A micro-batch without samples is skipped on both sides.
Cost of a message: its bytes, in the ledger; headers are not counted.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from colossal_lite.distributed.communicator import Communicator, PendingCollective
from colossal_lite.distributed.progress import Progress
from colossal_lite.memory.arena import Pool
from colossal_lite.memory.transfers import to_device, to_host
from colossal_lite.numerics.torch_modes import without_modes
from colossal_lite.observe.clock import Mark, host_seconds, mark
from colossal_lite.schedule.footprint import HEADER_BYTES, IN_FLIGHT, Subject
from colossal_lite.schedule.footprint import subject_of as _subject
from colossal_lite.schedule.plan import COMPUTE_KINDS, MESSAGES, SENDS, Action, ActionKind, Plan
from colossal_lite.schedule.simulator import ActionSpan, ScheduleTimeline
from colossal_lite.transforms.split_backward import BackwardRoot, DeferredWeightGrads

WORDS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward",
    ActionKind.W: "backward",
    ActionKind.UPDATE: "update",
}


@dataclass(frozen=True)
class Work:
    """What the engine does for an action of a stage and micro-batch.

    - forward: (stage, micro-batch, what came in) -> what goes out, of the last stage the loss
    - before_backward: gradients of this stage and micro-batch come now, by B, I or W, and which were deferred until
      this W
    - defer_weight_grads: backward inside leaves those of weights for later
    - forwards_ended: behind the last F of the list
    - is_empty: nothing of this micro-batch is here, and its forward is passed over
    - gather: does FETCH, UNSHARD and RESHARD
    - is_in_slot: whether a tensor is a gathered weight, or a view of one
    """

    forward: Callable[[int, int, Any], Any]
    before_backward: Callable[[int, int, ActionKind, DeferredWeightGrads], None]
    around_backward: Callable[[], AbstractContextManager[None]]
    defer_weight_grads: Callable[[], AbstractContextManager[DeferredWeightGrads]]
    forwards_ended: Callable[[], None]
    pass_over: Callable[[], None]
    is_empty: Callable[[int], bool]
    gather: Callable[[Action], None]
    is_in_slot: Callable[[Tensor], bool]
    reduce: Callable[[Action], None]
    tied_reduce: Callable[[Action], None]


KINDS: Mapping[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (tuple, list, dict, OrderedDict)}
"""Of what may pass on beside a tensor: the next stage gets one of the same kind."""


@dataclass(frozen=True)
class MessageMeta:
    """A message: keys of a dict, or the number of a tuple's members, or None for one tensor; and each tensor."""

    keys: tuple[str, ...] | int | None
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    """dtype, shape, and whether a gradient is sent back."""
    kind: str = "tuple"
    """One of `KINDS`, where there are keys or a number."""

    @classmethod
    def of(cls, carried: Any) -> MessageMeta:
        keys, tensors = flat(carried)
        rows = tuple((_name(t.dtype), tuple(t.shape), t.requires_grad) for t in tensors)
        return cls(keys, rows) if keys is None else cls(keys, rows, type(carried).__name__)

    def encode(self) -> Tensor:
        text = json.dumps([self.keys, self.tensors, self.kind]).encode()
        if len(text) > HEADER_BYTES:
            raise ValueError(
                f"parallel.pipeline: a stage gives {len(self.tensors)} tensors; send fewer at once"
            )
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, header: Tensor) -> MessageMeta:
        keys, rows, kind = json.loads(bytes(header.tolist()))
        return cls(
            tuple(keys) if isinstance(keys, list) else keys,
            tuple((dtype, tuple(shape), takes) for dtype, shape, takes in rows),
            kind,
        )

    def __str__(self) -> str:
        keys = self.keys if isinstance(self.keys, tuple) else ("",) * len(self.tensors)
        rows = zip(keys, self.tensors, strict=True)
        told = " and ".join(
            f"{key}{' ' * bool(key)}{list(shape)} {dtype}{'' if takes else ' without gradient'}"
            for key, (dtype, shape, takes) in rows
        )
        return f"a {self.kind} of {told or 'nothing'}" if isinstance(self.keys, int) else told

    def legal_beside(self, agreed: MessageMeta) -> str:
        """What to do where a message has this form, and another one is agreed."""
        forms = [(form.kind, form.keys, [row[:2] for row in form.tensors]) for form in (self, agreed)]
        if forms[0] == forms[1]:  # but for gradients
            return "parameters that are frozen before the first step, not between two (requires_grad_(False))"
        return "tensors that follow from the shape of the inputs alone"

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        if self.keys is None:
            return tensors[0]
        members = tensors if isinstance(self.keys, int) else zip(self.keys, tensors, strict=True)
        return KINDS[self.kind](members)


def flat(carried: Any, giver: str = "a stage") -> tuple[tuple[str, ...] | int | None, tuple[Tensor, ...]]:
    """The form of what passes between stages, as `Form.keys`, and its tensors. Raises ValueError, naming the giver, for
    other things."""
    if isinstance(carried, Tensor):
        return None, (carried,)
    named, several = isinstance(carried, Mapping), type(carried) in KINDS.values()
    members = tuple(carried.values() if named else carried) if several else ()
    odd = {type(member).__name__ for member in members if not isinstance(member, Tensor)}
    odd |= {f"key {key!r}" for key in carried if not isinstance(key, str)} if named else set()
    if odd or not several:
        what = f"{type(carried).__name__} of {', '.join(sorted(odd))}" if several else type(carried).__name__
        raise ValueError(
            f"parallel.pipeline: {giver} gives a {what}; legal: a tensor, or a flat tuple, list or dict (by words) of "
            f"tensors"
        )
    return tuple(carried) if named else len(members), members


class Inlet(torch.autograd.Function):
    """A leaf as its stage may use it. Code that writes in place, as `ReLU(inplace=True)`, may not write to a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def inlet(leaf: Tensor) -> Tensor:
    """What code of a stage gets in the place of a leaf."""
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return leaf
    inner: Tensor = Inlet.apply(leaf)  # type: ignore[no-untyped-call]
    return inner


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class _Held:
    """What F of one stage and micro-batch leaves behind."""

    leaves: tuple[Tensor, ...]
    root: Tensor | None
    given: list[Tensor]


@dataclass
class _Arriving:
    """A message posted: its form, tensors in a slot, what to wait for."""

    form: MessageMeta
    tensors: list[Tensor]
    pending: list[PendingCollective]

    def wait(self) -> tuple[Tensor, ...]:
        for each in self.pending:
            each.wait()
        return tuple(self.tensors)


@dataclass
class Runtime:
    """One rank's end of a pipeline. `comm` is its axis, `placement` the coordinate of each stage there."""

    comm: Communicator
    placement: Mapping[int, int]
    device: torch.device
    progress: Progress
    plan: Plan | None = None
    """That of the last run."""
    ran: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    """What ran from when to when in the last run."""
    live_peak: int = 0
    """Most activations (of one F each) that were held at once in the last run."""
    _agreed: set[Hashable] = field(default_factory=set)
    _forms: dict[tuple[Hashable, ActionKind, int], MessageMeta] = field(default_factory=dict)
    """Of received and sent messages, by shape of micro-batch, RECV or SEND, and stage."""
    _slots: dict[torch.dtype, Pool] = field(default_factory=dict)

    @property
    def posts_ahead(self) -> bool:
        """Whether receives are posted before they are needed. NCCL has one queue for each group, where they would stop
        the sends behind them."""
        return self.device.type != "cuda"

    def knows(self, shapes: Iterable[Hashable]) -> bool:
        """Whether the forms of all messages of micro-batches of these shapes are agreed."""
        return self.comm.size == 1 or self._agreed.issuperset(shapes)

    def run(self, plan: Plan, work: Work, shapes: Sequence[Hashable] = (), *, slots: int = 0) -> None:
        """Execute this rank's list of `plan` but for its UPDATEs.

        `slots`: most messages that this rank holds at once in this and in later runs. `shapes`: what the form of a
        micro-batch's messages follows from, alike on all ranks. Forms that are not known yet are agreed, which needs a
        plan whose RECVs block.
        """
        actions = [action for action in plan[self.comm.coord] if action.kind is not ActionKind.UPDATE]
        here = {shape for i, shape in enumerate(shapes) if not work.is_empty(i)}
        step = _Step(self, actions, work, shapes, slots, agrees=not self.knows(here))
        self.plan, self.ran, self.live_peak = plan, [], 0
        try:
            for action in step.actions:
                self.progress.phase = self._phase(action)
                step.start = mark(self.device)
                step.do(action)
                if action is step.last_forward:
                    work.forwards_ended()
                self.ran.append((action, step.start, mark(self.device)))
            step.finish()
        except BaseException as error:
            if self.comm.size > 1:  # other ranks wait for its messages, or have sent theirs
                self.progress.breaks(f"rank {self.comm.rank} stopped in {self.progress.phase}: {error!r}")
            raise
        self._agreed |= here

    @property
    def spans(self) -> list[ActionSpan]:
        """What ran when in the last run, in seconds of this host's clock. Waits for the device."""
        marks = [at for _, *both in self.ran for at in both]
        times = iter(host_seconds(marks, self.device))
        return [ActionSpan(self.comm.coord, action, next(times), next(times)) for action, *_ in self.ran]

    def timeline(self) -> ScheduleTimeline:
        """What each rank did in the last run, and when, by its host's clock; a GPU tells by events. Collective."""
        mine = [[str(span.action), span.start_s, span.end_s] for span in self.spans]
        with self.comm.ledger.paused():
            rows = self.comm.gather_json(mine)
        spans = (
            ActionSpan(rank, Action.parse(word), *times)
            for rank, row in enumerate(rows)
            for word, *times in row
        )
        return ScheduleTimeline(
            len(rows), tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.end_s)))
        )

    def _phase(self, action: Action) -> str:
        word = WORDS.get(action.kind, action.kind.lower())
        if action.kind is ActionKind.F and not torch.is_grad_enabled():
            word = "evaluation"
        return f"{word} of {_about(action)}" if len(self.placement) > 1 and action.stage is not None else word

    def slots(self, dtype: torch.dtype, numel: int, planned: int) -> Pool:
        """Buffers of at least `numel` elements; larger ones take the place of those that are too small."""
        found = self._slots.get(dtype)
        if found is None or found.numel < numel:
            with without_modes():
                found = self._slots[dtype] = Pool(numel, planned, dtype, self.device)
        return found

    @property
    def slot_bytes(self) -> tuple[int, int, int]:
        """Held for messages, in use at once at the most, and planned to be."""
        pools = self._slots.values()
        held, most = sum(each.bytes for each in pools), sum(each.most_bytes for each in pools)
        return held, most, sum(each.planned_bytes for each in pools)


class _Step:
    """One run of a list: received tensors, saved graphs, tensors to send."""

    def __init__(
        self, runtime: Runtime, actions: Sequence[Action], work: Work, shapes: Sequence[Hashable], slots: int, *,
        agrees: bool,
    ) -> None:  # fmt: skip
        self.runtime, self.actions, self.work = runtime, actions, work
        self.shapes, self.agrees = shapes, agrees
        self.last_use = {_subject(a): a for a in actions if a.kind in COMPUTE_KINDS}
        self.last_forward = next((a for a in reversed(actions) if a.kind is ActionKind.F), None)
        self.came: dict[tuple[ActionKind, Subject], _Arriving] = {}  # by RECV_F or RECV_B
        self.held: dict[Subject, _Held] = {}
        self.leaving: dict[tuple[ActionKind, Subject], tuple[MessageMeta, list[Tensor]]] = {}
        self.lent: dict[Subject, list[tuple[Pool, Tensor]]] = {}
        self.flying: deque[list[PendingCollective]] = deque()
        self.start: Mark = 0.0  # of the action that is done, what it waits for not included
        self.live: set[Subject] = set()
        self.later: dict[Subject, DeferredWeightGrads] = {}
        self.sends = {(a.kind, _subject(a)) for a in actions if a.kind in SENDS}
        self.planned = slots

    def do(self, action: Action) -> None:
        if action.kind in COMPUTE_KINDS or action.kind in MESSAGES:
            assert action.micro_batch is not None
            if self.work.is_empty(action.micro_batch):
                return self._pass_over(action)
        match action.kind:
            case ActionKind.F:
                self._forward(_subject(action))
            case ActionKind.B:
                self._backward(_subject(action))
            case ActionKind.I:
                with self.work.defer_weight_grads() as later:
                    self._backward(_subject(action), ActionKind.I)
                self.later[_subject(action)] = later
            case ActionKind.W:
                self._weights(_subject(action))
            case ActionKind.SEND_F | ActionKind.SEND_B:
                self._send(action)
            case ActionKind.RECV_F | ActionKind.RECV_B:
                self._receive(action)
            case ActionKind.FETCH | ActionKind.UNSHARD | ActionKind.RESHARD:
                self.work.gather(action)
            case ActionKind.REDUCE:
                self.work.reduce(action)
            case ActionKind.TIED_REDUCE:
                self.work.tied_reduce(action)
            case _:
                raise AssertionError(f"{action}: no part of a run")
        if action.kind in COMPUTE_KINDS and self.last_use[_subject(action)] is action:
            self._free(_subject(action))

    def _pass_over(self, action: Action) -> None:
        """An action of a micro-batch without samples: other ranks may have some of it."""
        if action.kind is ActionKind.F:
            self.work.pass_over()
        elif action.kind is ActionKind.W:
            self.work.before_backward(*_subject(action), ActionKind.W, [])
        elif action.kind is ActionKind.B:
            self.work.before_backward(*_subject(action), ActionKind.B, [])
            with self.work.around_backward():
                return

    def finish(self) -> None:
        """Wait for messages that are still being sent."""
        while self.flying:
            self._land()
        assert not (self.held or self.came or self.leaving or self.live), (
            "a checked plan leaves nothing behind"
        )

    # ---- compute ----

    def _forward(self, subject: Subject) -> None:
        stage, micro_batch = subject
        leaves: tuple[Tensor, ...] = ()
        carried = None
        if stage:
            came = self.came.pop((ActionKind.RECV_F, subject))
            leaves = tuple(
                tensor.detach().requires_grad_(takes)
                for tensor, (_, _, takes) in zip(self._arrived(came), came.form.tensors, strict=True)
            )
            carried = came.form.packed([inlet(leaf) for leaf in leaves])
        outputs = self.work.forward(stage, micro_batch, carried)
        form, given = MessageMeta.of(outputs), list[Tensor]()
        tensors = [t for t in flat(outputs)[1]]
        grown = [t for t in tensors if t.requires_grad]
        if self.last_use[subject].kind is not ActionKind.F:
            self.live.add(subject)
            self.runtime.live_peak = max(self.runtime.live_peak, len(self.live))
            root = None
            if grown:
                is_loss = stage == len(self.runtime.placement) - 1
                root = grown[0] if is_loss else BackwardRoot.apply(given, *grown)  # type: ignore[no-untyped-call]
            self.held[subject] = _Held(leaves, root, given)
        if stage < len(self.runtime.placement) - 1:
            self._pass_on(
                ActionKind.SEND_F, ActionKind.RECV_F, subject, (stage + 1, micro_batch), form, tensors
            )

    def _backward(self, subject: Subject, kind: ActionKind = ActionKind.B) -> None:
        stage, micro_batch = subject
        held, came = self.held.pop(subject), self.came.pop((ActionKind.RECV_B, subject), None)
        self.work.before_backward(stage, micro_batch, kind, [])
        if came is not None:
            held.given += self._arrived(came)
        with self.work.around_backward():
            if held.root is not None:
                held.root.backward()
        gradients = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in held.leaves
            if leaf.requires_grad
        ]
        if stage and self._goes_on((stage - 1, micro_batch)):
            form = MessageMeta(0, tuple((_name(g.dtype), tuple(g.shape), True) for g in gradients))
            self._pass_on(
                ActionKind.SEND_B, ActionKind.RECV_B, subject, (stage - 1, micro_batch), form, gradients
            )

    def _arrived(self, came: _Arriving) -> tuple[Tensor, ...]:
        tensors = came.wait()
        self.start = mark(self.runtime.device)
        return tensors

    def _weights(self, subject: Subject) -> None:
        """The weight gradients that I has deferred."""
        later = self.later.pop(subject)
        self.work.before_backward(*subject, ActionKind.W, later)
        with torch.no_grad():  # as backward is
            for each in later:
                each.work()

    def _goes_on(self, to: Subject) -> bool:
        """Whether the plan takes gradients on to the stage before."""
        if self.runtime.placement[to[0]] == self.runtime.comm.coord:
            return self.last_use[to].kind is not ActionKind.F
        return (ActionKind.SEND_B, (to[0] + 1, to[1])) in self.sends

    def _pass_on(
        self,
        send: ActionKind,
        receive: ActionKind,
        subject: Subject,
        to: Subject,
        form: MessageMeta,
        tensors: list[Tensor],
    ) -> None:
        """To a stage here at once, to one elsewhere by a SEND to come. Raises ValueError for another form than is
        agreed: a slot of it would keep some of what it held before."""
        stage, micro_batch = subject
        agreed = self.runtime._forms.setdefault((self.shapes[micro_batch], send, stage), form)
        if form != agreed:
            raise ValueError(
                f"parallel.pipeline: stage {stage} passes on {form} for micro-batch {micro_batch}, where {agreed} is "
                f"agreed; legal: {form.legal_beside(agreed)}"
            )
        # A tensor that a stage passes on unchanged is in a slot, of messages or of gathered weights. That is reused
        # before this message is sent or read.
        slots = {flat.untyped_storage().data_ptr() for _, flat in self.lent.get(subject, ())}
        tensors = [
            tensor.detach().clone()
            if tensor.untyped_storage().data_ptr() in slots or self.work.is_in_slot(tensor)
            else tensor.detach()
            for tensor in tensors
        ]
        if self.runtime.placement[to[0]] == self.runtime.comm.coord:
            self.came[receive, to] = _Arriving(form, tensors, [])
        else:
            self.leaving[send, subject] = form, tensors

    def _free(self, subject: Subject) -> None:
        """The last that a stage does with a micro-batch is done."""
        self.live.discard(subject)
        self.later.pop(subject, None)
        for slots, tensor in self.lent.pop(subject, ()):
            slots.give(tensor)

    # ---- messages ----

    def _send(self, action: Action) -> None:
        comm, subject = self.runtime.comm, _subject(action)
        form, tensors = self.leaving.pop((action.kind, subject))
        to = self._peer(action)
        about = f"{_about(action)}, to rank {comm.ranks[to]}"
        if self.agrees:
            self._send_header(form, to, about)
        pending = [comm.send_async(tensor.contiguous(), to, about) for tensor in tensors]
        self.flying.append(pending)
        while len(self.flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        for pending in self.flying.popleft():
            pending.wait()

    def _receive(self, action: Action) -> None:
        comm, subject = self.runtime.comm, _subject(action)
        source = self._peer(action)
        about = f"{_about(action)}, from rank {comm.ranks[source]}"
        form = self._form(action, source, about)
        tensors = []
        for dtype, shape, _ in form.tensors:
            slots = self.runtime.slots(getattr(torch, dtype), prod(shape), self.planned * len(form.tensors))
            flat = slots.take(prod(shape))
            self.lent.setdefault(subject, []).append((slots, flat))
            tensors.append(flat.view(shape).data)  # slots are one storage, and would share a version
        pending = [comm.receive_async(tensor, source, about) for tensor in tensors]
        self.came[action.kind, subject] = _Arriving(form, tensors, pending)
        if self.agrees:
            self.came[action.kind, subject].wait()

    def _form(self, action: Action, source: int, about: str) -> MessageMeta:
        """What will come: agreed before, or by a header now; gradients are what was sent the other way."""
        stage, micro_batch = _subject(action)
        key = self.shapes[micro_batch], action.kind, stage
        if self.agrees:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.runtime.device)
            self.runtime.comm.receive_async(header, source, f"header of {about}").wait()
            self.runtime._forms[key] = MessageMeta.decode(to_host(header))
        return self.runtime._forms[key]

    def _send_header(self, form: MessageMeta, to: int, about: str) -> None:
        comm = self.runtime.comm
        with comm.ledger.paused():
            header = to_device(form.encode(), self.runtime.device)
            self.flying.append([comm.send_async(header, to, f"header of {about}")])

    def _peer(self, action: Action) -> int:
        """The pipeline coordinate at the other end of a message."""
        assert action.stage is not None
        step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
        return self.runtime.placement[action.stage + step]


def _about(action: Action) -> str:
    """An action for people."""
    parts = [str(action), f"stage {action.stage}"]
    parts += [] if action.micro_batch is None else [f"micro-batch {action.micro_batch}"]
    return ", ".join(parts)
