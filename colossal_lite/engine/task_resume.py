"""What an engine leaves to the next one of its task, and takes up of the one before it (memory/store.py).

Note: records stay where they rest, in memory of the host that outlives the engine; what is handed over beside them are
facts that are no record (steps, step counts, loss scale, buffers) and the form, from which the next engine sees whether
the records are its own.  Every rank takes up the same, or all are told what does not fit; then nothing is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.task_records import ParkedState, TaskRecords
from colossal_lite.memory.transfers import to_host
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.user_optimizer import OwnOptimizer


class TaskResume:
    """The two ends of one engine's use of the records of its task."""

    def __init__(
        self, records: TaskRecords, outlives: bool, model: nn.Module, optimizer: ChunkOptimizer | OwnOptimizer,
        world: Communicator,
    ) -> None:  # fmt: skip
        """`outlives`: whether the records are to be there for another engine."""
        assert not outlives or isinstance(optimizer, ChunkOptimizer)
        self.outlives = outlives
        self._records, self._model, self._optimizer, self._world = records, model, optimizer, world
        self._has_left = False

    @property
    def is_due(self) -> bool:
        """Whether the engine has yet to leave what is to outlive it."""
        return self.outlives and not self._has_left

    def take_up(self) -> Mapping[str, Any] | None:
        """The facts of the engine before, whose records are this one's now; None if there was none. Collective with a
        store. Raises ValueError, on every rank, for what cannot be taken up."""
        if not self.outlives:
            return None
        kept, faults = self._records.kept, list(self._records.misfits)
        if kept is not None:
            form = self._form()
            odd = [name for name in {**kept.form, **form} if kept.form.get(name) != form.get(name)]
            faults += [f"{name}: {_differs(kept.form.get(name), form.get(name))}" for name in odd[:4]]
        rows = self._world.gather_json([None if kept is None else kept.facts["steps"], faults])
        faults = [f"rank {rank}: {fault}" for rank, (_, told) in enumerate(rows) for fault in told]
        if len({steps for steps, _ in rows}) > 1:
            faults.append(f"ranks have it after different steps (None: not at all): {[s for s, _ in rows]}")
        if faults:
            self._has_left = True
            self._optimizer.close()  # it may have a file
            raise ValueError(
                f"store: what was left of task {self._records.task!r} cannot be taken up:\n  "
                + "\n  ".join(faults)
                + "\nlegal: the model and the config that it was trained with, a checkpoint, or store.drop"
            )
        if self._records.take_up() is None or kept is None:
            return None
        self._chunked.take_up()
        self._chunked.set_updates(kept.facts["updates"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(kept.facts["buffers"][name])
        return kept.facts

    def kept(self, steps: int, loss_scale: Any) -> ParkedState:
        """All state, at rest, is brought to the store; what is not there."""
        self._chunked.park(steps)
        facts = {
            "steps": steps,
            "updates": self._chunked.updates(),
            "loss_scale": loss_scale,
            "buffers": {name: to_host(buffer) for name, buffer in self._model.named_buffers()},
        }
        return ParkedState(self._form(), facts)

    def leave(self, kept: ParkedState | None) -> None:
        """The records are no longer this engine's; None: what it leaves is not whole."""
        if self._has_left:
            return
        self._has_left = True
        if self.outlives:
            self._records.leave(kept)
        else:
            self._records.close()

    @property
    def _chunked(self) -> ChunkOptimizer:
        assert isinstance(self._optimizer, ChunkOptimizer), "what one's own keeps, only it knows"
        return self._optimizer

    def _form(self) -> dict[str, list[Any]]:
        """What an engine must have to take up what this one leaves."""
        buffers = [[name, [*b.shape], str(b.dtype)] for name, b in self._model.named_buffers()]
        return self._chunked.form() | {"buffers": [buffers]}


def _differs(was: Any, wanted: Any) -> str:
    """The first of a chunk's entries, owned elements, dtype and records in which it is another."""
    if was is None or wanted is None:
        return "there is none now" if wanted is None else "it is new"
    for what, old, new in zip(("entries", "owned elements", "dtype", "records"), was, wanted, strict=False):
        if old != new:
            return f"{what} were {str(old)[:120]}, this engine has {str(new)[:120]}"
    return "is the same"
