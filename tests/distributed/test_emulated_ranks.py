"""Ranks that are threads: every collective gives what its definition says, and none waits for one that has failed."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor

from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.emulated_ranks import EmulatedWorld, run_emulated
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.sharding.mesh_layout import MeshLayout

RANKS = 3


def of(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def collectives(mesh: Mesh) -> dict[str, Tensor]:
    comm, rank = mesh.axis("tensor"), mesh.rank
    return {
        "sum": comm.all_reduce(of(rank, 2, 3)),
        "max": comm.all_reduce(of(rank, 2, 3), "max"),
        "gather 0": comm.all_gather(of(rank, 2, 3)),
        "gather 1": comm.all_gather(of(rank, 2, 3), dim=1),
        "scatter 0": comm.reduce_scatter(of(rank, 6, 3)),
        "scatter 1": comm.reduce_scatter(of(rank, 2, 6), dim=1),
        "broadcast": comm.broadcast(of(rank, 2), 1),
        "reduce": comm.reduce(of(rank, 2), 2),
        "all_to_all": comm.all_to_all(of(rank, 6, 2)),
        "shift": comm.shift(of(rank, 2)),
        "exchange_sum": comm.exchange_sum(of(rank, 2), range(RANKS)),
    }


def test_every_collective_is_its_definition() -> None:
    world = EmulatedWorld(10.0)
    meshes = Mesh.emulated(MeshLayout.build(tensor=RANKS), world)
    found = run_emulated(world, [partial(collectives, mesh) for mesh in meshes])
    every = range(RANKS)
    for rank, got in enumerate(found):
        right = {
            "sum": sum(of(r, 2, 3) for r in every),
            "max": torch.stack([of(r, 2, 3) for r in every]).amax(0),
            "gather 0": torch.cat([of(r, 2, 3) for r in every]),
            "gather 1": torch.cat([of(r, 2, 3) for r in every], 1),
            "scatter 0": sum(of(r, 6, 3) for r in every)[2 * rank : 2 * rank + 2],  # type: ignore[index]
            "scatter 1": sum(of(r, 2, 6) for r in every)[:, 2 * rank : 2 * rank + 2],  # type: ignore[index]
            "broadcast": of(1, 2),
            "all_to_all": torch.cat([of(r, 6, 2)[2 * rank : 2 * rank + 2] for r in every]),
            "shift": of((rank - 1) % RANKS, 2),
            "exchange_sum": sum(of(r, 2) for r in every),
        }
        if rank == 2:
            right["reduce"] = sum(of(r, 2) for r in every)
        for name, expected in right.items():
            torch.testing.assert_close(got[name], expected, msg=name)


def gradient(mesh: Mesh) -> Tensor:
    x = of(mesh.rank, 2, 3).requires_grad_()
    y = autograd_collectives.gather(x, mesh.axis("tensor"), 1)
    (y * (mesh.rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


def test_backward_communicates_too() -> None:
    world = EmulatedWorld(10.0)
    meshes = Mesh.emulated(MeshLayout.build(tensor=RANKS), world)
    for got in run_emulated(world, [partial(gradient, mesh) for mesh in meshes]):
        assert torch.equal(got, torch.full((2, 3), 6.0, dtype=torch.float64))


def test_ranks_that_wait_for_a_failed_one_are_woken_and_its_error_is_raised() -> None:
    world = EmulatedWorld(60.0)
    meshes = Mesh.emulated(MeshLayout.build(tensor=RANKS), world)

    def run(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise KeyError("this rank")
        mesh.axis("tensor").all_reduce(torch.ones(1))

    began = time.perf_counter()
    with pytest.raises(KeyError, match="this rank"):
        run_emulated(world, [partial(run, mesh) for mesh in meshes])
    assert time.perf_counter() - began < 10


def test_the_error_of_the_first_rank_is_raised_whichever_fails_first_in_time() -> None:
    world = EmulatedWorld(10.0)

    def first(coord: int) -> None:
        world.meeting((0, 1)).all_of(coord, torch.ones(1))
        time.sleep(0.05)
        world.meeting((0, 1)).all_of(coord, torch.ones(1))  # no rank of it has ended
        if coord == 0:
            raise KeyError("of rank 0")

    def last() -> None:
        raise KeyError("of rank 2")

    with pytest.raises(KeyError, match="of rank 0"):
        run_emulated(world, [partial(first, 0), partial(first, 1), last])


def two_messages(mesh: Mesh) -> list[Tensor]:
    """The second is waited for before the first, as a schedule with several stages on a rank does."""
    comm, here = mesh.axis("tensor"), mesh.rank
    if here:
        return [comm.send_async(of(number, 2), 0).wait() for number in (1, 2)]
    first, second = (comm.receive_async(torch.zeros(2, dtype=torch.float64), 1) for _ in range(2))
    return [second.wait(), first.wait()]


def test_messages_come_in_the_order_of_their_receives_whichever_is_waited_for_first() -> None:
    world = EmulatedWorld(10.0)
    meshes = Mesh.emulated(MeshLayout.build(tensor=2), world)
    second, first = run_emulated(world, [partial(two_messages, mesh) for mesh in meshes])[0]
    assert torch.equal(first, of(1, 2)) and torch.equal(second, of(2, 2))
