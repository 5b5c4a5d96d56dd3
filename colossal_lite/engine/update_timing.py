"""Decides when the updates of a step run: at its end, beside the next forward, or within its backward.

Note: three times, one list of actions.
An update needs its summed gradient, and two numbers of the step: the divisor (tokens and clip factor) and the learning
rate.  Both are known at the end of a step, and every update runs then.  If state is copied over a link, updates are
deferred and run beside the next forward.  With `optimizer.update_when="backward"` the ranks agree on the tokens before
the last backward, and nothing is clipped. Each update then follows the REDUCE of its chunk.  The actions are the same,
`Updates._actions` (zero/deferred_updates.py).  Cost within backward: one more all-reduce of three float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.checks.rank_comparison import RankComparison
from colossal_lite.config.config import Config
from colossal_lite.distributed.communicator import PendingCollective
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.engine.memory_report import Metering
from colossal_lite.engine.step_totals import StepTotals
from colossal_lite.memory.chunk import Chunk
from colossal_lite.observe.printed_lines import warn
from colossal_lite.schedule.optimizer_updates import holds_up
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.zero.build_chunks import defers_updates, sharding_of
from colossal_lite.zero.deferred_updates import DeferredUpdates, UpdatesInBackward
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.gradient_hooks import StageHooks
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.user_optimizer import OwnOptimizer

Used = Mapping[int, Sequence[bool]]
"""For each chunk, by its number: the entries for which some rank has a gradient."""


class Updates:
    """Runs the updates of this rank's chunks, step after step."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        optimizer: ChunkOptimizer | OwnOptimizer,
        weights: ForwardGates,
        hooks: StageHooks,
        metering: Metering,
        mesh: Mesh,
        config: Config,
    ) -> None:
        self._chunks, self._optimizer, self._weights, self._hooks = chunks, optimizer, weights, hooks
        self._metering, self._mesh, self._config = metering, mesh, config
        self._in_backward = UpdatesInBackward(chunks) if sharding_of(config).updates_in_backward else None
        self._used: dict[int, Sequence[bool]] = {}  # known so far in backward
        self._told: PendingCollective | None = None  # (loss, weight, terms of the comparison) of all ranks
        if self._in_backward is not None:
            hooks.hand_on(self._in_backward.summed, concludes=True)
        elif isinstance(optimizer, ChunkOptimizer) and optimizer.tiers and optimizer.mix.early:
            hooks.hand_on(optimizer.send_gradient)

    @property
    def within_backward(self) -> bool:
        """Whether updates run within backward; then no gradient is kept."""
        return self._in_backward is not None

    @property
    def under_way(self) -> bool:
        """Whether a step that updates within backward has begun and not ended; the same on all ranks."""
        return self._in_backward is not None and self._in_backward.deferred is not None

    @property
    def defers(self) -> bool:
        """Whether updates run beside the next forward: if state is copied over a link."""
        return self._optimizer.tiers is not None and defers_updates(self._config)

    # ---- at the end of a step ----

    def deferred(self, totals: StepTotals, factor: float) -> DeferredUpdates:
        """The updates of a step; `factor` of the learning rate. Counts the weights as changed now, although the updates
        may run later."""
        for chunk in self._chunks:
            if any(totals.used[chunk.spec.id]):
                chunk.count_change()
        scale = totals.weight / totals.clip_factor(self._config.clip_grad_norm)
        return self._actions(totals.used, factor, scale)

    # ---- within backward ----

    def announce(self, told: Tensor, comparison: RankComparison) -> None:
        """After the last forward of a step on this rank: begin to sum each rank's (loss, weight) `told`. Stages end
        their forwards at different times, and none waits here. Collective."""
        self._told = self._mesh.world.all_reduce_async(torch.cat([told, comparison.term()]))

    def begin(self, factor: float, comparison: RankComparison) -> None:
        """Before each last backward of a step, on every stage. The first begins the updates, when what all ranks have
        told is here: then no forward is left on any. Collective. Raises as `RankComparison.check`; in a pipeline
        without names, as its ranks cannot meet here."""
        assert self._in_backward is not None
        if self._told is None:
            return
        loss, weight, apart, lengths, at_left = self._mesh.world.numbers(self._told.wait())
        self._told = None
        is_alike = not apart and not (lengths and at_left)
        if not is_alike and self._mesh.size("pipeline") > 1:  # earlier stages wait for this one
            raise ValueError(
                "batch or model: ranks have other batches, lengths or rates, or a forward changes a buffer. Nothing "
                'was updated. Legal: optimizer.update_when="step", which names the difference'
            )
        comparison.check(apart, lengths, at_left)
        if not math.isfinite(loss) or weight == 0:
            self._in_backward.begin(None)
            return
        self._used = {chunk.spec.id: (True,) * len(chunk.spec.entries) for chunk in self._chunks}
        self._in_backward.begin(self._actions(self._used, factor, weight))

    def end(self, totals: StepTotals) -> None:
        """Run the updates that are left, and start the gathers of their weights, unless a gradient was not finite."""
        assert self._in_backward is not None
        self._used.update(totals.used)
        if (deferred := self._in_backward.deferred) is not None:
            deferred.finish()
        self._in_backward.deferred = None
        for chunk in self._chunks if totals.is_finite else ():
            self._weights.updated(chunk, changed=any(totals.used[chunk.spec.id]))

    def give_up(self) -> None:
        """Drop the updates that backward has not run."""
        if self._told is not None:
            self._told.wait()
            self._told = None
        if self._in_backward is not None:
            self._in_backward.deferred = None

    def drain(self) -> None:
        """Before weights are loaded: wait for the updates on the host that backward has started."""
        if self._in_backward is not None and self._in_backward.deferred is not None:
            self._in_backward.deferred.drain()

    # ---- without updates ----

    @property
    def lacks_weights(self) -> bool:
        """Whether some time-shared weights have no buffer until their update (memory/chunk.py)."""
        return not self._weights.has_deferred and any(chunk.lacks_weights for chunk in self._chunks)

    def remake(self) -> None:
        """After a step without updates: compute weights that have no buffer from their masters."""
        optimizer = self._optimizer
        if not self.lacks_weights or not isinstance(optimizer, ChunkOptimizer):
            return

        def remake(action: Action) -> None:
            assert action.chunk is not None
            optimizer.remake(self._chunks[action.chunk])

        optimizer.defer()
        handlers = {ActionKind.UPDATE: remake, **optimizer.moves_to_remake}
        self._weights.update(DeferredUpdates(optimizer.plan[0], handlers, partial(optimizer.finish, 0.0)))

    def refuse_within(self, what: str) -> None:
        """Raises ValueError while some weights are new and others old, or some have no buffer."""
        if self.lacks_weights:
            raise ValueError(
                f"{what}: between the last backward of a step and its updates the device has gradients in the place of "
                f"weights (memory.placement={self._config.memory.placement!r}); legal: after step or zero_grad"
            )
        if self.under_way:
            raise ValueError(
                f"{what}: backward has updated weights (optimizer.update_when='backward'), and the step is "
                f"not over; legal: after step"
            )

    # ---- the actions ----

    def _actions(self, used: Used, factor: float, scale: float) -> DeferredUpdates:
        """The updates of the parameters in `used`, in the order of the optimizer's plan."""
        self._optimizer.begin()
        self._optimizer.defer()
        # The last backward has done this, unless there were fewer than planned.
        for chunk in self._chunks:
            chunk.give_weights()
        for chunk in self._chunks:
            chunk.bring_sums()
            chunk.have_sums()

        def end() -> None:
            self._optimizer.finish(factor)
            self._warn_if_unchanged(factor)
            self._hooks.clear()

        def update(action: Action) -> None:
            self._update(action, used, factor, scale)

        def arrive(index: int) -> None:
            self._optimizer.arrived(self._chunks[index])
            if self._in_backward is None:
                self._updated(self._chunks[index], used)
            else:  # the gathers of all chunks come after the last update
                self._metering.updated(self._chunks[index].spec.id)

        return DeferredUpdates(
            self._optimizer.plan[0], {ActionKind.UPDATE: update, **self._optimizer.moves}, end, arrive,
            by_gradient=self._in_backward is not None, wait=self._optimizer.finish_on_host,
            in_order=any(chunk.weights_at_rest is not None for chunk in self._chunks),
        )  # fmt: skip

    def _update(self, action: Action, used: Used, factor: float, scale: float) -> None:
        """Run the update of a chunk; on the host only start it."""
        assert action.chunk is not None
        chunk = self._chunks[action.chunk]
        with self._mesh.progress.during("update"):
            if self._in_backward is not None and any(used[chunk.spec.id]):
                chunk.count_change()
            self._optimizer.update(chunk, used[chunk.spec.id], factor=factor, grad_scale=scale)
            if self._in_backward is not None:
                assert isinstance(self._optimizer, ChunkOptimizer)
                chunk.free_gradient(*self._optimizer.leaving(chunk))
            elif holds_up(action):
                chunk.free_gradient()

    def _updated(self, chunk: Chunk, used: Used) -> None:
        """After the update of a chunk: start the gather of its new weights if the next forward needs it."""
        self._metering.updated(chunk.spec.id)
        chunk.run_deferred()
        self._weights.updated(chunk, changed=any(used[chunk.spec.id]))

    def _warn_if_unchanged(self, factor: float) -> None:
        lr = self._optimizer.peak_lr * factor
        if lr and self._chunks and not self._optimizer.changed and self._mesh.rank == 0:
            warn(
                f"step: it changed no parameter that rank 0 holds; either all gradients are zero, or steps at "
                f"lr={lr:g} are lost in rounding ({self._config.precision.master_dtype} master weights)"
            )


def spoilt(why: str) -> ValueError:
    """The error for weights that an incomplete step has updated."""
    return ValueError(
        f"{why} in backward (optimizer.update_when='backward'), so they are a mix; legal: load a checkpoint, or "
        f"optimizer.update_when='step', which skips such a step"
    )
