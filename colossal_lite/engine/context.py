"""Holds one rank's mesh, device and configuration, as `launch` returns them, and frees them when closed.

Note: the life of a context.
A context owns what `launch` made for it. `close` frees that once, in reverse order; a second `close` does nothing.  Two
rules for ranks that end early:
- A rank that leaves the `with` block by an exception writes `rank 1 stopped: ValueError: ...` into the store.  It does
  so *before* it closes its connections, and never overwrites another rank's reason.  The collectives of the others then
  fail on a closed connection.  They read the reason and raise a `CommError` that begins with it.  A rank also does so
  after a caught error of its engine, unless a later call of the engine succeeded.
- SIGTERM, SIGINT, SIGHUP and SIGUSR1 do not end a rank. They are recorded, and the ranks agree on the step after which
  all stop (engine/stopping.py).  A rank that raises `Stopped` with code 0 has not failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload
from weakref import WeakSet

from colossal_lite.config.call_forms import with_form
from colossal_lite.data.dataloader import dataloader as build_loader
from colossal_lite.data.dataset_facts import dataset_facts, dataset_fault, steady_fields
from colossal_lite.data.loader import Collate, LabelForm, Loader, Place, cut, cut_batch
from colossal_lite.data.map_loader import MapDataset
from colossal_lite.distributed.key_value_store import LimitedStore
from colossal_lite.distributed.progress import LEFT, reason_of
from colossal_lite.engine.determinism import refused_by_name
from colossal_lite.engine.open_engines import OpenEngines
from colossal_lite.engine.stopping import Stopped, StopSignals, worker_died
from colossal_lite.numerics.torch_modes import outside_compiler, outside_inference

Held = TypeVar("Held")

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from colossal_lite.config.config import Config
    from colossal_lite.distributed.mesh import Mesh


@dataclass(frozen=True, eq=False, repr=False)
class Context:
    """One rank of one launched world. Use it in a `with` statement, or call `close`."""

    config: Config
    """The configuration, checked for this world: `parallel.data` is a number."""
    mesh: Mesh
    device: torch.device
    local_rank: int
    store: LimitedStore
    """Key-value store of the ranks of this context; its keys are its own, and every answer has a limit."""
    launched: str
    """One line for people: the launcher, and this rank's place in its world."""
    _failure_board: FailureBoard
    _signals: StopSignals
    _owned: ExitStack
    _leaving: Callable[[BaseException, str], None]
    """Called with an error that ends the context, and with `first_failure`."""
    _endings: list[Callable[[], Stopped | None]] = field(default_factory=list)
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """The models that engines of this context train."""
    engines: OpenEngines = field(default_factory=OpenEngines)
    """Where each engine of this context saves, and where a loop over several may stop."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Of the saves and loads of all engines of this context: no two may share keys in the store."""

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has received a stop signal. Other ranks may not have."""
        return self._signals.received is not None

    @property
    def stop_signal(self) -> str:
        """The name of the stop signal that this rank has received, or ""."""
        return self._signals.name

    @overload
    def local_batch(self, global_batch: int) -> slice: ...
    @overload
    def local_batch(self, global_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...
    @overload
    def local_batch(self, global_batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]: ...

    def local_batch(self, global_batch: Any) -> Any:
        """This rank's samples of a global batch: split over the data axis as `tensor_split` does.

        For a number of samples it returns a slice. For a batch as `train_step` takes it, it returns the batch of this
        rank. Ranks of one data coordinate get the same samples. It may be empty. Raises ValueError for anything else.
        """
        place = self.mesh.size("data"), self.mesh.coord("data")
        return (
            slice(*cut(global_batch, *place))
            if isinstance(global_batch, int)
            else cut_batch(global_batch, *place)
        )

    @with_form("context.dataloader", "context.dataloader(dataset, global_batch=...)")
    def dataloader(
        self, dataset: MapDataset | Iterable[Any] | DataLoader[Any], *, global_batch: int | None = None,
        start: int = 0, shuffle: bool | None = None, drop_last: bool | None = None, workers: int | None = None,
        collate: Collate | None = None, labels: LabelForm = "shifted",
    ) -> Loader:  # fmt: skip
        """This rank's loader; the order depends on `config.seed` alone. See `data.dataloader.dataloader`.

        Collective: ranks compare settings, length and samples. Raises ValueError on every rank if these differ. A
        step raises if ranks have read a dataset that can only be iterated otherwise than each other.
        """
        place = Place(
            self.mesh.size("data"), self.mesh.coord("data"), self.device, self.is_main, self.world_size > 1
        )
        loader = build_loader(
            dataset, place=place, start=start, global_batch=global_batch, shuffle=shuffle, drop_last=drop_last,
            workers=workers, collate=collate, labels=labels, seed=self.config.seed, timeout_s=self.config.timeout_s,
        )  # fmt: skip
        settings = loader.settings
        asked = dict(
            start=start, global_batch=settings.global_batch, shuffle=settings.shuffle,
            drop_last=settings.drop_last, labels=labels,
        )  # fmt: skip
        facts = dataset_facts(loader.dataset, loader.num_samples, asked, loader.soon())
        told = self.mesh.world.gather_json(facts)
        if fault := dataset_fault(told):
            raise ValueError(fault)
        loader.fields = steady_fields(told)
        return loader

    def first_failure(self) -> str:
        """`rank r stopped: reason` if a rank has left this world by an error, else ""."""
        return self._failure_board.first_failure()

    def first_loss(self) -> str:
        """`first_failure`, or which ranks of this host have died, and in which phase; "" if no failure is known."""
        return self.first_failure() or self._failure_board.ended()

    def standing(self, ranks: Sequence[int]) -> str:
        """What these ranks are doing; for those that do not answer, where they last reported."""
        return self._failure_board.standing(ranks)

    def report_failure(self, reason: str) -> None:
        """Write into the store why this rank stops, unless another rank was first."""
        self._failure_board.say(reason)

    def tell_fault(self) -> None:
        """`report_failure`, if the last call of an engine raised and its caller caught the error."""
        if fault := self.mesh.progress.fault:
            self.report_failure(fault)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the context is closed, before anything is freed; the last one added runs first."""
        self._owned.callback(callback)

    def hold(self, manager: AbstractContextManager[Held]) -> Held:
        """Enter `manager`, and leave it when the context closes, as `on_close`, with the error that ends it."""
        return self._owned.enter_context(manager)

    def on_finish(self, ask: Callable[[], Stopped | None]) -> None:
        """Call `ask` when the `with` block has ended without an error and all is closed; what it returns is raised."""
        self._endings.append(ask)

    def close(self) -> None:
        """Destroy groups and restore signal handlers. A second call does nothing."""
        self._owned.__exit__(*sys.exc_info())  # in a `finally` block, the error that is propagating

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.report_failure(reason_of(error))
            if self.mesh.world_size > 1:  # alone, what is left of a step can still be done
                self.mesh.progress.breaks(reason_of(error))
            self._leaving(error, self.first_failure())
        else:
            self.mesh.progress.phase = LEFT
        self._owned.__exit__(kind, error, trace)
        asked = [ask() for ask in self._endings] if error is None else []
        asked.append(worker_died(error, self._signals, self.mesh.progress.step, speaks=self.is_main))
        self._endings.clear()
        for stopped in filter(None, asked):
            self._leaving(stopped, "")
            raise stopped from error

    def __repr__(self) -> str:
        return f"Context({self.mesh!r} on {self.device}, {self.launched})"


@dataclass(frozen=True)
class FailureBoard:
    """Shares through the store which rank stopped first, and why. No method raises: both run while ranks end."""

    store: LimitedStore
    rank: int
    ended: Callable[[], str] = str
    """Which ranks of this host have died."""
    standing: Callable[[Sequence[int]], str] = lambda ranks: ""
    """What these ranks are doing."""

    def say(self, reason: str) -> None:
        """Write the reason, unless another rank was first."""
        try:
            self.store.compare_set("stopped", "", f"rank {self.rank} stopped: {reason}")
            self.store.set("news", "")
        except RuntimeError:  # the rank or launcher that served the store has ended
            return

    def first_failure(self) -> str:
        """`rank r stopped: reason` of the rank that stopped first, or "" if none has said so."""
        try:
            return self.store.get("stopped").decode() if self.store.check(["stopped"]) else ""
        except RuntimeError:  # its server has ended or is stopped, as the watchdog will say
            return ""


class _OfMesh(Protocol):
    @property
    def mesh(self) -> Mesh: ...


Owner = TypeVar("Owner", bound=_OfMesh)
Given = ParamSpec("Given")
Found = TypeVar("Found")


def noting_faults(
    call: Callable[Concatenate[Owner, Given], Found],
) -> Callable[Concatenate[Owner, Given], Found]:
    """Record what the call raised, so that ranks that wait for this one can report it."""

    def noted(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        what = {"__call__": "engine(x)"}.get(call.__name__, call.__name__)
        with (
            self.mesh.engine_call(what, gives_up=what == "zero_grad"),
            refused_by_name(),
            outside_inference(),
        ):
            return call(self, *args, **kwargs)

    untraced: list[Callable[Concatenate[Owner, Given], Found]] = []

    @wraps(call)
    def noting(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        if "torch._dynamo" not in sys.modules:  # else a user may have compiled the function that calls
            return noted(self, *args, **kwargs)
        if not untraced:
            untraced.append(outside_compiler(noted))
        return untraced[0](self, *args, **kwargs)

    return noting
