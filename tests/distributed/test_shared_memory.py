"""Tests shared memory between ranks of one host: messages arrive, parts are used again, faults raise errors."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.distributed.communicator import CommError, Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.distributed.send_buffer import ALIGN_BYTES, SendBuffer
from colossal_lite.distributed.shared_memory import MOST_LENT, Exchange
from colossal_lite.distributed.shared_memory_collectives import WHOLE_BYTES
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.pool import RankEnv, WorldError, run_world


def exchange_of(mesh: Mesh) -> Exchange:
    assert mesh._exchange is not None, "these ranks share no memory"
    return mesh._exchange


def shared_mesh(
    env: RankEnv,
    stack: ExitStack,
    layout: MeshLayout | None = None,
    timeout_s: float = 20,
    share: bool = True,
) -> Mesh:
    dist.init_process_group("gloo", store=env.store, rank=env.rank, world_size=env.world_size)
    stack.callback(dist.destroy_process_group)
    layout = layout or MeshLayout.build(data=env.world_size)
    mesh = Mesh.create(layout, env.rank, timeout_s=timeout_s, share_memory=share)
    stack.callback(mesh.destroy)
    return mesh


# ---- places ----


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3)), min_size=1, max_size=40), st.randoms())
def test_places_that_are_lent_never_overlap_and_the_lowest_free_one_is_taken(
    wanted: list[tuple[int, int]], random: Any
) -> None:
    offload_buffer, lent = SendBuffer(), dict[int, tuple[int, int]]()
    try:
        for size, readers in wanted:
            offset = offload_buffer.lend(size, readers)
            end = offset + max(size, 1)
            assert offset % ALIGN_BYTES == 0
            assert all(end <= start or stop <= offset for start, (stop, _) in lent.items())
            starts = [0, *(-(-stop // ALIGN_BYTES) * ALIGN_BYTES for stop, _ in lent.values())]
            rounded = -(-max(size, 1) // ALIGN_BYTES) * ALIGN_BYTES
            free = [
                at for at in starts
                if all(at + rounded <= start or stop <= at for start, (stop, _) in lent.items())
            ]  # fmt: skip
            assert offset == min(free)
            lent[offset] = (end, readers)
            if random.random() < 0.5:
                offset = random.choice(list(lent))
                for _ in range(lent.pop(offset)[1]):
                    offload_buffer.give_back(offset)
        assert offload_buffer.lent == len(lent)
    finally:
        os.close(offload_buffer.descriptor)


# ---- values and bits ----

OPERATIONS = (
    "sum",
    "max",
    "gathered",
    "along",
    "scattered",
    "scattered along",
    "spread",
    "one",
    "to one",
    "on",
)


def bits(env: RankEnv, share: bool, numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with ExitStack() as stack:
        mesh = shared_mesh(env, stack, share=share)
        assert mesh.shares_memory == share
        comm, n = mesh.axis("data"), env.world_size
        generator = torch.Generator().manual_seed(env.rank)
        x = torch.randn(n, numel, 2, generator=generator).to(dtype)
        out = {
            "sum": comm.all_reduce(x.clone()),
            "max": comm.all_reduce(x.clone(), "max"),
            "gathered": comm.all_gather(x),
            "along": comm.all_gather(x.transpose(0, 2), dim=1),
            "scattered": comm.reduce_scatter(x),
            "scattered along": comm.reduce_scatter(x.transpose(0, 1), dim=1),
            "spread": comm.all_to_all(x),
            "one": comm.broadcast(x.clone(), n - 1),
            "to one": comm.reduce(x.clone(), 1),
            "on": comm.shift(x, 1),
        }
        if env.rank != 1:
            del out["to one"]
        return out


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("numel", "dtype"), [(5, torch.float64), (WHOLE_BYTES, torch.float32), (0, torch.bfloat16)]
)
def test_shared_memory_gives_what_gloo_gives(world_size: int, numel: int, dtype: torch.dtype) -> None:
    """Bit by bit where each adds in rank order, or adds nothing; gloo's own sums have an order of their own."""
    shared = run_world(bits, world_size, True, numel, dtype)
    other = run_world(bits, world_size, False, numel, dtype)
    for ours, theirs in zip(shared, other, strict=True):
        assert ours.keys() == theirs.keys() and set(ours) <= set(OPERATIONS)
        for name, value in ours.items():
            exact = world_size == 2 or name not in ("sum", "to one")
            torch.testing.assert_close(
                value, theirs[name], rtol=0 if exact else 1e-6, atol=0 if exact else 1e-5, msg=name
            )
    assert all(torch.equal(shared[0]["sum"], each["sum"]) for each in shared)


def late(env: RankEnv) -> list[float]:
    """Many posts before anything is waited for, one rank far behind, waits in another order than posts."""
    with ExitStack() as stack:
        mesh = shared_mesh(env, stack)
        comm = mesh.axis("data")
        if env.rank == 0:
            time.sleep(0.2)
        count = 4 * MOST_LENT
        sums = [comm.all_reduce_async(torch.tensor([float(i + env.rank)])) for i in range(count)]
        coming = [comm.receive_async(torch.empty(3), 1 - env.rank) for _ in range(count)]
        for i in range(count):
            comm.send_async(torch.full((3,), float(i)), 1 - env.rank)
        last = [float(each.wait()[0]) for each in reversed(coming)]
        assert last == [float(i) for i in reversed(range(count))]
        found = [float(each.wait()) for each in sums]
        comm.barrier()
        return [*found, float(exchange_of(mesh).send_buffer.peak_bytes)]


def test_posts_wait_for_nobody_and_places_are_used_again() -> None:
    for found in run_world(late, 2):
        *sums, peak_bytes = found
        assert sums == [2.0 * i + 1 for i in range(4 * MOST_LENT)]
        assert peak_bytes < 8 * MOST_LENT * ALIGN_BYTES + (1 << 16)


def steady(env: RankEnv) -> tuple[int, int]:
    with ExitStack() as stack:
        mesh = shared_mesh(env, stack)
        comm = mesh.axis("data")
        for _ in range(50):
            comm.all_reduce(torch.ones(10_000))
        comm.barrier()
        return mesh.shared_bytes, exchange_of(mesh).send_buffer.lent


def test_an_outbox_holds_what_is_in_flight_and_not_what_was() -> None:
    for peak_bytes, _ in run_world(steady, 2):
        assert peak_bytes <= 2 * 40_000 + 4 * ALIGN_BYTES


def axes(env: RankEnv) -> list[float]:
    """Collectives of two axes and messages, begun in turns on the same pairs of ranks."""
    with ExitStack() as stack:
        mesh = shared_mesh(env, stack, MeshLayout.build(data=2, tensor=2))
        data, tensor, world = mesh.axis("data"), mesh.axis("tensor"), mesh.world
        one = torch.tensor([float(env.rank)])
        pending = [data.all_reduce_async(one.clone()), tensor.all_reduce_async(one.clone())]
        came = tensor.receive_async(torch.empty(1), 1 - tensor.coord)
        pending.append(world.all_reduce_async(one.clone()))
        tensor.send_async(one, 1 - tensor.coord)
        return [float(each.wait()) for each in (*reversed(pending), came)]


def test_groups_and_messages_have_sequences_of_their_own() -> None:
    for rank, found in enumerate(run_world(axes, 4)):
        assert found == [6.0, float(rank ^ 1) + rank, float(rank ^ 2) + rank, float(rank ^ 1)]


def in_stages(env: RankEnv) -> list[bool]:
    """Sums of two stages beside other operations: a rank that comes late takes them up before it posts the
    next."""
    with ExitStack() as stack:
        comm, n = shared_mesh(env, stack).axis("data"), env.world_size
        numel = WHOLE_BYTES
        pending, expected = [], []
        if env.rank == 1:
            time.sleep(0.3)
        for i in range(4):
            pending.append(comm.all_reduce_async(torch.full((numel,), float(10 * i + env.rank))))
            expected.append(torch.full((numel,), 10.0 * i * n + n * (n - 1) / 2))
            pending.append(comm.all_gather_async(torch.full((numel,), float(i + env.rank))))
            expected.append(torch.cat([torch.full((numel,), float(i + j)) for j in range(n)]))
        return [torch.equal(one.wait(), other) for one, other in zip(pending, expected, strict=True)]


@pytest.mark.parametrize("world_size", [3, 4])
def test_operations_of_two_stages_keep_their_place_in_the_sequence(world_size: int) -> None:
    assert run_world(in_stages, world_size) == [[True] * 8] * world_size


def beside_autograd(env: RankEnv) -> list[float]:
    """A tensor that autograd has saved lies beside one that a message lands in."""
    with ExitStack() as stack:
        comm = shared_mesh(env, stack).axis("data")
        first, second = torch.zeros(2, 3).unbind()
        pending = comm.receive_async(second, 1 - env.rank)
        weight = torch.ones(3, requires_grad=True)
        loss = (first.fill_(2.0) * weight).sum()
        comm.send_async(torch.full((3,), 5.0), 1 - env.rank)
        pending.wait()
        loss.backward()
        comm.all_reduce(weight)
        return [*weight.grad.tolist(), *second.tolist(), *weight.tolist()]


def test_what_lands_in_a_buffer_does_not_disturb_what_autograd_saved_beside_it() -> None:
    assert run_world(beside_autograd, 2) == [[2.0] * 3 + [5.0] * 3 + [2.0] * 3] * 2


# ---- faults ----


def strays(env: RankEnv, guilty: int) -> str:
    with ExitStack() as stack:
        comm: Communicator = shared_mesh(env, stack).axis("data")
        try:
            if env.rank == guilty:
                comm.broadcast(torch.ones(8), guilty)
                comm.all_reduce(torch.ones(8))
            comm.all_reduce(torch.ones(8))
        except CommError as error:
            return str(error)
    return ""


def test_another_operation_is_told_at_once() -> None:
    start = time.monotonic()
    told = run_world(strays, 2, 1)
    assert (
        "rank 1 has come with broadcast of [8] float32, this rank with all_reduce of [8] float32" in told[0]
    )
    assert time.monotonic() - start < 15


def ends(env: RankEnv) -> str:
    with ExitStack() as stack:
        comm = shared_mesh(env, stack).axis("data")
        if env.rank == 1:
            comm.all_gather_async(torch.ones(3))  # its last words are read yet
            return ""
        gathered = comm.all_gather(torch.zeros(3)).tolist()
        assert gathered == [0.0] * 3 + [1.0] * 3
        env.store.set("read", "")
        try:
            comm.all_reduce(torch.ones(3))
        except CommError as error:
            return str(error)
    return "an all-reduce without rank 1 came to its end"


def test_what_a_rank_posted_is_read_after_its_end_and_then_its_end_is_told() -> None:
    assert "Connection closed by rank 1" in run_world(ends, 2)[0]


def sends_to_nobody(env: RankEnv) -> str:
    with ExitStack() as stack:
        comm = shared_mesh(env, stack).axis("data")
        if env.rank == 1:
            return ""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                comm.send_async(torch.ones(3), 1).wait()
            except CommError as error:
                return str(error)
    return "nobody said that rank 1 has gone"


def test_a_message_to_a_rank_that_has_ended_fails() -> None:
    told = run_world(sends_to_nobody, 2)[0]
    assert "rank 0: send of [3] float32" in told and "Connection closed by rank 1" in told


def killed(env: RankEnv) -> None:
    with ExitStack() as stack:
        comm = shared_mesh(env, stack).axis("data")
        comm.barrier()
        if env.rank == 1:
            os._exit(9)
        comm.all_reduce(torch.ones(3))


def test_a_rank_that_dies_is_noticed_before_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(killed, 2)
    assert "Connection closed by rank 1" in caught.value.failures[0].summary
    assert time.monotonic() - start < 15


def stranger(env: RankEnv) -> list[float]:
    """A process that finds the address of a rank that still listens, without this world's token."""
    import colossal_lite.distributed.mesh as module
    from colossal_lite.distributed.host_handshake import HostHandshake

    class Watched(HostHandshake):
        def join(self, cards: Any, timeout_s: float) -> Exchange | None:
            if env.rank == 0:
                knock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                assert self._listener is not None
                knock.connect(self._listener.getsockname())
                socket.send_fds(knock, [b"x" * 16 + (1).to_bytes(8, "little")], [0])
                stack.callback(knock.close)
            return super().join(cards, timeout_s)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HostHandshake", Watched)
        comm = shared_mesh(env, stack).axis("data")
        return comm.all_reduce(torch.tensor([1.0 + env.rank])).tolist()


def test_a_stranger_is_not_let_in() -> None:
    assert run_world(stranger, 2) == [[3.0]] * 2


def apart(env: RankEnv) -> tuple[bool, bool, float]:
    """Ranks 0 and 1 on one host, 2 and 3 on another: an axis within a host shares memory, one across has gloo."""
    import colossal_lite.distributed.host_handshake as module

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_host", lambda: bytes([env.rank // 2]) * 32)
        mesh = shared_mesh(env, stack, MeshLayout.build(data=2, tensor=2))
        tensor, data = mesh.axis("tensor"), mesh.axis("data")
        total = data.all_reduce(tensor.all_reduce(torch.tensor([float(env.rank)])))
        total += mesh.world.all_reduce(torch.tensor([float(env.rank)]))
        return tensor._host is not None, data._host is not None, float(total)


def test_ranks_of_two_hosts_share_memory_within_a_host_only() -> None:
    assert run_world(apart, 4) == [(True, False, 12.0)] * 4
