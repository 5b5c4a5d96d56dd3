"""The mesh of one rank: its layout, its coordinates, and a communicator for each axis.

Note: groups.
All groups are made at once, in the layout's order, by every rank: no communicator is born inside a step, so none can
be born in a different order on two ranks.  Sets of axes with the same ranks share a group.  A group of one rank has
no process group.  `axis("data")` and `axis("data", "sequence")` look up; they never create.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from colossal_lite.comm import AxisComm, Ledger
from colossal_lite.layout import AXES, MeshLayout
from colossal_lite.watch import Progress, Watch


class Mesh:
    """What every layer receives: `mesh.axis(name)` to talk, `mesh.coord(name)` and `mesh.size(name)` to know."""

    def __init__(
        self,
        layout: MeshLayout,
        rank: int,
        *,
        groups: dict[tuple[str, ...], dist.ProcessGroup] | None = None,
        recording: bool = False,
        timeout_s: float = 0.0,
        explain: Callable[[], str] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.layout, self.rank, self.coords = layout, rank, layout.coords(rank)
        self.ledger = Ledger()
        self._groups = groups or {}
        self._recording, self._timeout_s, self._explain = recording, timeout_s, explain
        self._watch = watch
        self.progress = watch.progress if watch else Progress()
        """What this rank is doing: whoever is asked why others wait for it says so."""
        self._axes: dict[tuple[str, ...], AxisComm] = {}

    @classmethod
    def serial(cls) -> Mesh:
        """A world of one: every axis has size 1 and no collective is ever made."""
        return cls(MeshLayout.build(), 0)

    @classmethod
    def recording(cls, layout: MeshLayout, rank: int = 0) -> Mesh:
        """Rank `rank` of a world that need not exist: collectives are counted in the ledger and return at once."""
        return cls(layout, rank, recording=True)

    @classmethod
    def create(
        cls,
        layout: MeshLayout,
        rank: int,
        *,
        timeout_s: float,
        backend: str | None = None,
        explain: Callable[[], str] | None = None,
        watch: Watch | None = None,
    ) -> Mesh:
        """Create the groups of a live world. Collective: every rank of the default group calls it.

        Needs torch's default process group of `layout.world_size` ranks unless the world is one.
        """
        groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        for names in layout.communicating_groups():
            for ranks in layout.groups(*names):
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
                if rank in ranks:
                    groups[names] = group
        return cls(layout, rank, groups=groups, timeout_s=timeout_s, explain=explain, watch=watch)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def size(self, *names: str) -> int:
        return self.layout.size(*names)

    def coord(self, *names: str) -> int:
        return self.layout.coord(self.rank, *names)

    def axis(self, *names: str) -> AxisComm:
        """The communicator along these axes; ValueError names the axes that exist."""
        if names not in self._axes:
            self._axes[names] = AxisComm(
                "world" if names == AXES else "*".join(names),
                self.layout.group(self.rank, *names),
                self.rank,
                self.ledger,
                group=self._groups.get(self.layout.spanning(*names)),
                recording=self._recording,
                timeout_s=self._timeout_s,
                explain=self._explain,
                watch=self._watch,
            )
        return self._axes[names]

    @property
    def world(self) -> AxisComm:
        return self.axis(*AXES)

    def destroy(self) -> None:
        """Give back the groups this mesh made. Call once, on every rank."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
        self._axes.clear()

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank}: {self.layout.describe()})"
