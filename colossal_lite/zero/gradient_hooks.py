"""Accumulates gradients from autograd in chunks, and reduces the chunks while backward is still running.

Note: the order of reductions.
A hook on every trainable parameter copies its finished gradient to its chunk and frees autograd's own tensor.  A tied
parameter arrives once, with the sum of its uses.  Complete chunks are reduced at once, asynchronously.  That is in the
last micro-batch of a step, or in each if gradients are reduced by micro-batch.  Chunks are launched strictly in reverse
forward order, as ranks may use different parameters and collectives must have one order.  `reduce` launches the rest,
with zeros for absent gradients, and waits.  Where weights are gathered in backward too, `limit` says how many chunks
may launch.  At most `in_flight_of` reductions that need slots run at once, and none where no other rank sums.  After a
backward that raised, `give_up` makes the remaining reductions, so that all ranks have made the same ones.
Cost: one copy of each gradient per micro-batch, and the reductions of schedule/step_moments.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from colossal_lite.memory.chunk import Chunk, GradientState
from colossal_lite.schedule.step_moments import sums_in_flight
from colossal_lite.zero.held_gradient import HeldGradients


def in_flight_of(chunks: Sequence[Chunk]) -> int:
    """Sums of these chunks that may be on their way when another begins."""
    return sums_in_flight(chunk.groups.all.size for chunk in chunks)


class GradientHooks:
    """Moves gradients of one model into its chunks and sums each chunk over its own axes."""

    def __init__(
        self, chunks: Sequence[Chunk], parameters: Mapping[str, nn.Parameter], in_flight: int | None = None
    ) -> None:
        """`in_flight`: sums on their way at once, where these chunks are a part of a model's."""
        self._chunks = tuple(chunks)
        self._most = in_flight_of(chunks) if in_flight is None else in_flight
        self.limit = len(self._chunks)
        """Chunks, counted from the last, that may be launched when they are complete."""
        self._seed = 1.0
        self._reduces = False  # whether this backward's chunks go when they are complete
        self._ends = False  # whether no gradients of this step come after this backward
        self._frees = False  # whether weights may leave their places
        self._is_reduced = False  # whether all sums were asked for, and have come
        self._missing: list[int] = []  # per chunk: gradients that have not arrived in this backward
        self._is_once = False  # whether each gradient comes once in this backward
        self._arrived: set[tuple[int, int]] = set()  # chunk and entry, where it does
        self._next = -1  # the chunk to launch next; counts down
        self._in_flight: deque[Chunk] = deque()
        self.summed: Callable[[Chunk], None] = nothing
        """Called with each chunk whose gradient is final, in the order of the launches; in backward where it can be."""
        self.concludes = False
        """Whether a gradient is final, and used, as soon as it is summed for the last time: at once, in backward."""
        self._passed: set[int] = set()  # chunks with which it was called
        rooms = [number for number, chunk in enumerate(self._chunks) if chunk.takes_room]
        self._ended_by = dict(zip(rooms, rooms[self._most :], strict=False))
        """Chunk -> the one whose sum is over when its own begins: both take room, and there is no more of it."""
        self.began = [len(self._chunks) - 1 - number for number in range(len(self._chunks))]
        """For each chunk the number of chunks, counted from the last, that were complete when its first gradient came.
        The least so far; where none has come, or only later, as many as come before it."""
        self._complete = 0  # of those, in this backward
        self.expects = False
        """Whether a backward of the engine runs. A gradient that comes at any other time is refused."""
        # The garbage collector does not look into this kind of hook: one with a reference to `self` would also keep its
        # parameter alive. Then no model would ever be freed after an engine that was not closed.
        owner = ref(self)
        self._parameters: dict[str, nn.Parameter] = {}
        self._chunk_of: dict[int, int] = {}  # by the identity of a parameter
        self._handles: list[Any] = []
        for number, chunk in enumerate(self._chunks):
            for index, entry in enumerate(chunk.spec.entries):
                own = self._parameters[entry.name] = parameters[entry.name]
                own.grad = None  # of a loop before this engine
                self._chunk_of[id(own)] = number
                hook = partial(_hand_on, owner, number, index)
                self._handles.append(own.register_post_accumulate_grad_hook(hook))

    def begin(
        self, *, is_last: bool, seed: float = 1.0, to_come: Sequence[Tensor] | None = None, ends: bool = False,
        frees: bool = False,
    ) -> None:  # fmt: skip
        """Before the backward of a micro-batch, which starts with `seed`. `is_last`: the sum over the ranks follows, so
        complete chunks may launch. `ends`: it is the last of the step, so sums over copies may follow. `frees`: no
        forward comes before the step, so time-shared weights are dropped with their gradients. `to_come`: the
        parameters whose gradients arrive now, once for each time; None: all, once."""
        for name, own in self._parameters.items():
            if own.grad is not None:
                raise ValueError(
                    f"backward: {name}.grad was set by other code than the engine. It would be added to the gradient "
                    f"of this step; legal: .grad=None, clip_grad_norm of the config, engine.full_gradients()"
                )
        self._reduces, self._ends, self._frees, self._seed = is_last, is_last and ends, frees, seed
        self._is_once, self._is_reduced = is_last and to_come is None, False
        self._arrived.clear()
        self._passed.clear()
        self._missing = [len(chunk.spec.entries) if to_come is None else 0 for chunk in self._chunks]
        for parameter in to_come or ():
            if (number := self._chunk_of.get(id(parameter))) is not None:
                self._missing[number] += 1
        self._next, self._complete = len(self._chunks) - 1, 0

    @property
    def launched(self) -> int:
        """Chunks, counted from the last, whose sums have begun in this backward."""
        return len(self._chunks) - 1 - self._next

    @property
    def ready(self) -> int:
        """Chunks, counted from the last, whose gradients have all come in this backward."""
        complete = self._next
        while complete >= 0 and self._missing[complete] == 0:
            complete -= 1
        return len(self._chunks) - 1 - complete

    def launch(self, count: int) -> None:
        """Launch until `count` chunks, from the last, are on their way; absent gradients are zero. Collective."""
        while self.launched < count:
            self._launch()

    def reduce(self, index: int, *, ends: bool = False) -> None:
        """Wait for the sum of chunk `index`, launching first all chunks before it; `ends` as in `begin`. Collective.

        Those that may be in flight beside it are launched too, as in a backward that launched them. So buffers are used
        in the planned order, and ranks make collectives in the same order."""
        if not self._reduces:
            self.begin(is_last=True, ends=ends)
        self.launch(min(len(self._chunks), len(self._chunks) - index + self._most))
        while self._chunks[index].state is GradientState.REDUCING:
            self._finish_first()
        self._is_reduced |= index == 0

    def conclude(self) -> None:
        """All micro-batches of the step are in: every chunk REDUCED. Collective."""
        left = [chunk for chunk in self._chunks if chunk.state is not GradientState.REDUCED]
        for chunk in reversed(left):
            chunk.start_copies()
        for chunk in left:
            chunk.conclude()
            self._pass_on(chunk)
        self._passed.clear()

    def give_up(self) -> bool:
        """After a backward that failed: make every reduction that it makes here or on another rank, and discard the
        gradients. False: it had launched none. Collective where it had."""
        for parameter in self._parameters.values():
            parameter.grad = None
        if not self._reduces or self._is_reduced:
            return False
        summed, self.summed = self.summed, nothing
        self.launch(len(self._chunks))
        while self._in_flight:
            self._finish_first()
        self.summed = summed
        for chunk in self._chunks:
            chunk.settle()
        return True

    def clear(self) -> None:
        for chunk in self._chunks:
            chunk.clear()
        self._reduces = self._ends = self._frees = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _launch(self) -> None:
        chunk = self._chunks[self._next]
        self._next -= 1
        if self._frees:
            chunk.give_weights()
            chunk.bring_sums()
        while self._most and chunk.takes_room and sum(c.takes_room for c in self._in_flight) >= self._most:
            self._finish_first()
        ended = self._ended_by.get(self._next + 1)
        # The order of these must not depend on the backward either.
        if self._ends and ended is not None and not self.concludes:
            self._chunks[ended].start_copies()
        chunk.start_reduce()
        self._in_flight.append(chunk)
        if not self._most or (self._ends and self.summed is not nothing):  # used while backward goes on
            while len(self._in_flight) > self._most:
                self._finish_first()

    def _finish_first(self) -> None:
        """Of the chunks on their way the first is summed."""
        chunk = self._in_flight.popleft()
        chunk.finish_reduce()
        if self._ends and self.concludes:
            chunk.conclude()
            self._pass_on(chunk)
        elif self._ends and chunk.is_final_when_summed:
            self._pass_on(chunk)

    def _pass_on(self, chunk: Chunk) -> None:
        if chunk.spec.id not in self._passed:
            self._passed.add(chunk.spec.id)
            self.summed(chunk)

    def _arrive(self, number: int, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # its layer has put it off (transforms/split_backward.py)
            return
        chunk = self._chunks[number]
        name = chunk.spec.entries[index].name
        if not self.expects:
            raise ValueError(
                f"backward: a gradient of {name} comes from a backward that the engine did "
                f"not run. It would be in no update; legal: engine.backward(loss) of engine(x), engine.train_step, or "
                f"a model without an engine (engine.close). Around a loss of another model: "
                f"engine.model.requires_grad_(False)"
            )
        if self._is_once and (number, index) in self._arrived:
            raise ValueError(
                f"backward: the gradient of {name} comes a second time in one backward. It "
                f"would be left out of the sum over the ranks. torch.utils.checkpoint(..., use_reentrant=True) around "
                f"a module that is used more than once does that; legal: use_reentrant=False, or "
                f"activation_checkpoint of the config"
            )
        self._arrived.add((number, index))
        if self._reduces:
            self.began[number] = min(self.began[number], self._complete)
        if self._reduces and number > self._next:
            raise ValueError(
                f"backward: the gradient of {name} comes after its sum over the ranks has "
                f"begun. At zero.stage=3 a model must use its modules in the order of its first step, and each forward "
                f"needs a backward of its own. zero.stage=2 has no such rule"
            )
        chunk.accept(index, parameter.grad, seed=self._seed)
        parameter.grad = None
        if self._reduces:
            self._missing[number] -= 1
            while self._complete < len(self._chunks) and self._missing[-1 - self._complete] == 0:
                self._complete += 1
            while self._next >= 0 and self._missing[self._next] == 0 and self.launched < self.limit:
                self._launch()


def _hand_on(owner: ref[GradientHooks], number: int, index: int, parameter: Tensor) -> None:
    """Pass a gradient on; if the engine was deleted with its hooks, the gradient stays at its parameter."""
    if (hooks := owner()) is not None:
        hooks._arrive(number, index, parameter)


def nothing(chunk: Chunk) -> None:
    """Does nothing: the gradient waits for the step."""


class StageHooks:
    """The hooks of the pipeline stages on this rank. Chunks of each stage are by themselves, and so are those that
    several stages use. These are complete only when the last stage ends its step, and are always summed then. Chunks
    are named by their numbers."""

    def __init__(self, chunks: Sequence[Chunk], parameters: Mapping[str, nn.Parameter]) -> None:
        groups: dict[tuple[int, ...], list[Chunk]] = {}
        self._place: dict[int, tuple[tuple[int, ...], int]] = {}
        for chunk in chunks:
            stages = chunk.spec.key.stages
            self._place[chunk.spec.id] = stages, len(groups.setdefault(stages, []))
            groups[stages].append(chunk)
        self._chunks = {chunk.spec.id: chunk for chunk in chunks}
        self.held = HeldGradients({e.name: parameters[e.name] for c in chunks for e in c.spec.entries})
        most = in_flight_of(chunks)
        self._hooks = {stages: GradientHooks(group, parameters, most) for stages, group in groups.items()}

    @property
    def only(self) -> GradientHooks:
        """The hooks where one stage has all chunks."""
        (hooks,) = self._hooks.values()
        return hooks

    @property
    def began(self) -> Sequence[int] | None:
        """As `GradientHooks.began`; None with several stages on this rank."""
        return self.only.began if len(self._hooks) == 1 else None

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Around a backward of the engine, in which gradients are expected."""
        for hooks in self._hooks.values():
            hooks.expects = True
        try:
            yield
        finally:
            for hooks in self._hooks.values():
                hooks.expects = False

    def hand_on(self, summed: Callable[[Chunk], None], *, concludes: bool = False) -> None:
        """Set the callback for gradients that are final; `concludes` as `GradientHooks`."""
        for hooks in self._hooks.values():
            hooks.summed, hooks.concludes = summed, concludes

    def chunk(self, number: int) -> Chunk:
        return self._chunks[number]

    def begin(
        self, stage: int, *, is_last: bool, seed: float = 1.0, is_whole: bool = True,
        to_come: Sequence[Tensor] | None = None, frees: bool = False, sums: bool = False,
    ) -> None:  # fmt: skip
        """Before the backward of a micro-batch on a stage, the last of a step or not. `is_whole`: after it no gradients
        of this micro-batch come. Then complete chunks may go if it is the last, or with `sums`: a REDUCE follows.
        `to_come` and `frees` as `GradientHooks`."""
        goes = is_whole and (is_last or sums)
        for stages, hooks in self._hooks.items():
            if stage in stages:
                own = goes and len(stages) == 1
                hooks.begin(is_last=own, seed=seed, to_come=to_come, ends=is_last, frees=frees)

    def reduce(self, number: int, *, ends: bool = False) -> None:
        """Wait for the sum of a chunk, launching first all chunks before it on its stage; `ends`: no gradients of this
        step come behind it. Collective."""
        stages, index = self._place[number]
        self._hooks[stages].reduce(index, ends=ends or len(stages) > 1)

    def conclude(self) -> None:
        for hooks in self._hooks.values():
            hooks.conclude()

    def give_up(self) -> bool:
        """As `GradientHooks.give_up`; whether any sum was begun."""
        return any([hooks.give_up() for hooks in self._hooks.values()])

    def clear(self) -> None:
        self.held.drop()
        for hooks in self._hooks.values():
            hooks.clear()

    @property
    def is_clear(self) -> bool:
        return all(chunk.state is GradientState.EMPTY for chunk in self._chunks.values())

    def remove(self) -> None:
        self.held.drop()
        for hooks in self._hooks.values():
            hooks.remove()
