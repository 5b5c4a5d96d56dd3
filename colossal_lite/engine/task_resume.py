"""Parks an engine's state in the host store when it closes, and resumes the task's next engine from it.

Note: the records of a task (`TaskRecords`) are in host memory that outlives the engine.  They stay there.
Steps, step counts, loss scale and buffers are parked beside them, and the layout of the records.  An engine compares
that layout with its own.  All ranks resume the same step. If one cannot, all raise the reason and none resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.memory.task_records import ParkedState
from colossal_lite.memory.transfers import to_host
from colossal_lite.zero.optimizer import ChunkOptimizer


class TaskResume:
    """Begins and ends one engine's use of the records of its task."""

    def __init__(self, parts: EngineParts) -> None:
        built = parts.built
        assert not built.outlives or isinstance(parts.optimizer, ChunkOptimizer)
        self.outlives = built.outlives
        """Whether another engine may resume from the records."""
        self._records, self._model = built.records, built.model
        self._optimizer, self._world = parts.optimizer, parts.context.mesh.world
        self._has_left = False

    @property
    def is_due(self) -> bool:
        """Whether the engine still has to release records that outlive it."""
        return self.outlives and not self._has_left

    def resume(self) -> Mapping[str, Any] | None:
        """Use the records of the engine before. Returns its facts; None if there was no engine. Collective with a
        store.

        Raises ValueError on every rank if one cannot resume."""
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

    def park(self, steps: int, samples: int, loss_scale: Any) -> ParkedState:
        """Copy all state to the store; no copy may be in flight. Returns the state outside the records."""
        self._chunked.park(steps)
        facts = {
            "steps": steps,
            "samples": samples,
            "updates": self._chunked.updates(),
            "loss_scale": loss_scale,
            "buffers": {name: to_host(buffer) for name, buffer in self._model.named_buffers()},
        }
        return ParkedState(self._form(), facts)

    def release(self, parked: ParkedState | None) -> None:
        """Release the records. None: the state is not complete, and no engine may resume from it."""
        if self._has_left:
            return
        self._has_left = True
        if self.outlives:
            self._records.leave(parked)
        else:
            self._records.close()

    @property
    def _chunked(self) -> ChunkOptimizer:
        assert isinstance(self._optimizer, ChunkOptimizer), "the state of a user's own optimizer is unknown"
        return self._optimizer

    def _form(self) -> dict[str, list[Any]]:
        """The layout that an engine must have to resume from this one."""
        buffers = [[name, [*b.shape], str(b.dtype)] for name, b in self._model.named_buffers()]
        return self._chunked.form() | {"buffers": [buffers]}


def _differs(was: Any, wanted: Any) -> str:
    """The first difference of a chunk's entries, owned elements, dtype and records."""
    if was is None or wanted is None:
        return "there is none now" if wanted is None else "it is new"
    for what, old, new in zip(("entries", "owned elements", "dtype", "records"), was, wanted, strict=False):
        if old != new:
            return f"{what} were {str(old)[:120]}, this engine has {str(new)[:120]}"
    return "is the same"
