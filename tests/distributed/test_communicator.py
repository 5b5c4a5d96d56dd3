"""Tests the collectives of one axis: values, payload bytes, recording mode, and pairs that are adjoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import CommError, Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.pool import RankEnv, run_world

N = 12


@contextmanager
def live_mesh(env: RankEnv, layout: MeshLayout | None = None, timeout_s: float = 20) -> Iterator[Mesh]:
    """A mesh of the pool's ranks with any layout, tensor axes included, which no config can ask for yet."""
    dist.init_process_group("gloo", store=env.store, rank=env.rank, world_size=env.world_size)
    mesh = Mesh.create(layout or MeshLayout.build(data=env.world_size), env.rank, timeout_s=timeout_s)
    try:
        yield mesh
    finally:
        mesh.destroy()
        dist.destroy_process_group()


def collectives(env: RankEnv) -> dict[str, Any]:
    with live_mesh(env) as mesh:
        return _collectives(env, mesh)


def _collectives(env: RankEnv, mesh: Mesh) -> dict[str, Any]:
    comm, n, r = mesh.axis("data"), env.world_size, env.rank
    base = torch.arange(float(n * 2)).view(n, 2)
    out = {
        "all_reduce": comm.all_reduce(base + r),
        "max": comm.all_reduce(torch.tensor([float(r)]), "max"),
        "all_gather": comm.all_gather(base[r : r + 1]),
        "reduce_scatter": comm.reduce_scatter(base * (r + 1)),
        "broadcast": comm.broadcast(base + r, n - 1),
        "all_to_all": comm.all_to_all(base + 100 * r),
        "shift": comm.shift(torch.tensor([float(r)])),
        "json": comm.gather_json({"rank": r, "text": "x" * r}),
    }
    reduced = comm.reduce(base * (r + 1), 0)
    out["reduce"] = reduced if r == 0 else None
    comm.barrier()
    out["rows"] = [(row.operation, row.calls, row.payload_bytes) for row in mesh.ledger.rows()]
    middle = torch.arange(float(n * 4)).view(2, n, 2)
    out["along"] = comm.all_gather(middle[:, r : r + 1].transpose(0, 2), dim=1)
    out["scattered along"] = comm.reduce_scatter(middle.transpose(0, 2) * (r + 1), dim=1)
    in_place = torch.zeros(n, 3)
    in_place[r] = r
    out["in_place"] = comm.all_gather(in_place[r : r + 1], out=in_place)
    return out


@pytest.mark.parametrize("n", [2, 3, 4])
def test_collectives_give_what_their_names_say_and_count_the_logical_payload(n: int) -> None:
    base = torch.arange(float(n * 2)).view(n, 2)
    total = n * (n + 1) / 2
    for rank, out in enumerate(run_world(collectives, n)):
        assert torch.equal(out["all_reduce"], base * n + n * (n - 1) / 2)
        assert out["max"].item() == n - 1
        assert torch.equal(out["all_gather"], base)
        assert torch.equal(out["reduce_scatter"], base[rank : rank + 1] * total)
        assert torch.equal(out["broadcast"], base + n - 1)
        assert torch.equal(out["all_to_all"], torch.stack([base[rank] + 100 * r for r in range(n)]))
        assert out["shift"].item() == (rank - 1) % n
        assert out["json"] == [{"rank": r, "text": "x" * r} for r in range(n)]
        if rank == 0:
            assert torch.equal(out["reduce"], base * total)
        middle = torch.arange(float(n * 4)).view(2, n, 2).transpose(0, 2)
        assert torch.equal(out["along"], middle) and out["along"].is_contiguous()
        assert torch.equal(out["scattered along"], middle[:, rank : rank + 1] * total)
        assert torch.equal(out["in_place"], torch.arange(float(n)).view(n, 1).expand(n, 3))
        rows = dict((op, (calls, size)) for op, calls, size in out["rows"])
        full = n * 2 * 4
        assert rows["all_reduce"] == (2, full + 4)
        assert (
            rows["reduce_scatter"] == rows["broadcast"] == rows["reduce"] == rows["all_to_all"] == (1, full)
        )
        assert rows["send"] == (1, 4)
        assert rows["all_gather"][0] == 3  # of tensors once, twice for the JSON: lengths, then padded text


def adjoints(env: RankEnv) -> dict[str, float]:
    """<A x, y> and <x, A* y>, summed over the ranks, for each conjugate function."""
    with live_mesh(env) as mesh:
        return _adjoints(env, mesh.axis("data"))


def _adjoints(env: RankEnv, comm: Communicator) -> dict[str, float]:
    generator = torch.Generator().manual_seed(env.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    functions = {
        "copy-all_reduce": lambda x: autograd_collectives.all_reduce(
            autograd_collectives.copy(x, comm) * 1.0, comm
        ),
        "gather": lambda x: autograd_collectives.gather(x, comm, 1),
        "gather0": lambda x: autograd_collectives.gather(x, comm, 0),
        "reduce_scatter": lambda x: autograd_collectives.reduce_scatter(x, comm, 1),
        "tokens_to_heads": lambda x: _to_heads(x, comm),
        "heads_to_tokens": lambda x: autograd_collectives.heads_to_tokens(x.view(1, N, N, 1), comm),
        "shift": lambda x: autograd_collectives.shift(x, comm, 1),
        "broadcast": lambda x: autograd_collectives.broadcast(x, comm, 1),
        "reduce": lambda x: autograd_collectives.reduce(x, comm, 1),
    }
    found = {}
    for name, function in functions.items():
        x = random(N, N).requires_grad_()
        y = function(x)
        if (
            name == "copy-all_reduce"
        ):  # each rank's y is the same tensor: a gradient of it is the same on all ranks
            dy = torch.ones_like(y)
            y.backward(dy)
            found[name] = float((x.grad - env.world_size).abs().max())
            continue
        dy = random(*y.shape)
        y.backward(dy)
        both = torch.stack([(y * dy).sum(), (x * x.grad).sum()]).detach()
        left, right = comm.all_reduce(both).tolist()
        found[name] = abs(left - right) / abs(left)
    # split then join is the identity for a tensor that all ranks hold, forward and backward
    same = torch.arange(float(N * N), dtype=torch.float64).view(N, N).requires_grad_()
    whole = autograd_collectives.join(autograd_collectives.split(same, comm, 1), comm, 1)
    whole.backward(same.detach())
    found["split-join"] = float((whole - same).abs().max() + (same.grad - same).abs().max())
    return found


def _to_heads(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Two tensors of different numbers of heads in one exchange, weighed so that neither can take the other's place."""
    wide, narrow = x.view(2, N // 2, N, 1), x.view(2, N // 2, N, 1)[:, :, : comm.size] * 3
    wide, narrow = autograd_collectives.tokens_to_heads((wide, narrow), comm)
    return torch.cat((wide, narrow), 2)


@pytest.mark.parametrize("n", [2, 3])
def test_each_conjugate_backward_is_the_adjoint_of_its_forward(n: int) -> None:
    for found in run_world(adjoints, n):
        assert all(error < 1e-12 for error in found.values()), found


def recorded(env: RankEnv, recording: bool) -> list[tuple[str, str, int, int]]:
    layout = MeshLayout.build(data=2, tensor=2)
    if recording:
        return _some_calls(Mesh.recording(layout, env.rank), "meta")
    with live_mesh(env, layout) as mesh:
        return _some_calls(mesh, "cpu")


def _some_calls(mesh: Mesh, device: str) -> list[tuple[str, str, int, int]]:
    for axis in ("data", "tensor"):
        comm = mesh.axis(axis)
        x = torch.zeros(4, 4, device=device, requires_grad=True)
        y = autograd_collectives.gather(
            autograd_collectives.reduce_scatter(autograd_collectives.copy(x, comm), comm, 0), comm, 0
        )
        autograd_collectives.shift(
            autograd_collectives.heads_to_tokens(y.view(1, 4, 2, 2), comm), comm
        ).sum().backward()
    mesh.world.all_reduce(torch.zeros(3, device=device))
    return [(row.operation, row.axis, row.calls, row.payload_bytes) for row in mesh.ledger.rows()]


def test_recording_on_meta_tensors_counts_what_a_live_world_counts() -> None:
    live = run_world(recorded, 4, False)
    assert live == run_world(recorded, 4, True)
    assert ("all_reduce", "world", 1, 12) in live[0] and len(
        live[0]
    ) == 11  # five operations on two axes, one on the world


def test_a_group_of_one_makes_no_call_and_changes_nothing() -> None:
    mesh = Mesh.serial()
    comm, x = mesh.axis("data"), torch.arange(4.0)
    assert comm.all_reduce(x) is x
    assert torch.equal(comm.all_gather(x), x) and torch.equal(comm.reduce_scatter(x), x)
    assert torch.equal(comm.all_to_all(x), x) and torch.equal(comm.shift(x), x)
    assert mesh.ledger.rows() == ()


def test_a_dim_that_the_axis_does_not_divide_is_refused_with_what_is_legal() -> None:
    comm = Mesh.recording(MeshLayout.build(data=3)).axis("data")
    with pytest.raises(ValueError, match="multiple of 3"):
        autograd_collectives.reduce_scatter(torch.zeros(4, 2), comm, 0)


def one_rank_stays_away(env: RankEnv) -> str:
    with live_mesh(env, timeout_s=1) as mesh:
        if env.rank == 0:
            env.store.get("rank 1 has given up")
            return ""
        try:
            mesh.axis("data").all_reduce(torch.zeros(5))
        except CommError as error:
            env.store.set("rank 1 has given up", "")
            return str(error)
    raise AssertionError("an all-reduce without rank 0 came to an end")


def test_whoever_waits_in_vain_says_for_whom_in_which_collective() -> None:
    text = run_world(one_rank_stays_away, 2)[1]
    for word in ("rank 1", "all_reduce of [5] float32", "'data'", "ranks 0", "timeout 1 s"):
        assert word in text, text
