"""The pool of ranks itself: results, every way to fail, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.shared.pool import RANK_ENVIRONMENT, RankEnv, WorldError, pool, run_world


def all_end(pids: list[int]) -> bool:
    """Whether the processes are gone within 10 s, or zombies that a container does not reap."""

    def is_running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def open_group(env: RankEnv) -> None:
    dist.init_process_group("gloo", store=env.store, rank=env.rank, world_size=env.world_size)


def sum_of_ranks(env: RankEnv, scale: torch.Tensor) -> torch.Tensor:
    open_group(env)
    total = scale * (env.rank + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total


def who(env: RankEnv) -> tuple[int, int, int, int]:
    return env.rank, env.world_size, torch.get_num_threads(), os.getpid()


def raises_on(env: RankEnv, rank: int) -> str:
    open_group(env)
    if env.rank == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()
    return "unreachable"


def all_raise(env: RankEnv) -> None:
    raise ValueError(f"rank {env.rank} says no")


def leaves(env: RankEnv) -> None:
    sys.exit(3)


def sleeps_on(env: RankEnv, rank: int) -> None:
    open_group(env)
    if env.rank == rank:
        time.sleep(100)
    dist.barrier()


def never_comes_back_on(env: RankEnv, rank: int) -> str:
    if env.rank == rank:
        threading.Event().wait()
    return "done"


def is_killed_on(env: RankEnv, rank: int) -> None:
    open_group(env)
    if env.rank == rank:
        print("about to go", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stops_on(env: RankEnv, rank: int) -> None:
    if env.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def leaves_the_group_open(env: RankEnv) -> None:
    open_group(env)


def spoils_the_process(env: RankEnv) -> None:
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(123)


def state_of_the_process(env: RankEnv) -> tuple[str | None, str, torch.dtype, float]:
    return os.environ.get("SPOILED"), os.getcwd(), torch.get_default_dtype(), torch.rand(()).item()


def has_a_child(env: RankEnv) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(child.pid, flush=True)
    raise ValueError(f"child {child.pid}")


def listens_on(env: RankEnv) -> list[str]:
    open_group(env)
    dist.barrier()
    sockets = psutil.Process().net_connections(kind="inet")
    dist.destroy_process_group()
    return [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]


def speaks(env: RankEnv) -> None:
    print(f"I am {env.rank}")


class Holder:
    @staticmethod
    def method(env: RankEnv, word: str) -> str:
        return word * env.rank


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_returns_its_result_in_rank_order(world_size: int) -> None:
    expected = torch.full((3,), world_size * (world_size + 1) / 2, dtype=torch.float64)
    for result in run_world(sum_of_ranks, world_size, torch.ones(3, dtype=torch.float64)):
        assert torch.equal(result, expected)
    rows = run_world(who, world_size)
    assert [row[:3] for row in rows] == [(rank, world_size, 1) for rank in range(world_size)]
    assert run_world(Holder.method, 2, "ab") == ["", "ab"]


def test_ranks_survive_from_one_world_to_the_next_and_a_world_is_cheap() -> None:
    first = run_world(who, 4)
    start = time.perf_counter()
    for _ in range(10):
        run_world(sum_of_ranks, 4, torch.ones(1))
    assert time.perf_counter() - start < 10, "a world of 4 must cost milliseconds: 10 of them took over 10 s"
    assert run_world(who, 4) == first


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_are_ended_with_it() -> None:
    before = pool().pids()
    with pytest.raises(WorldError, match="rank 1 says no") as caught:
        run_world(raises_on, 4, 1)
    failure = caught.value.failures[1]
    assert failure.kind == "raised" and "in raises_on" in failure.text and "Traceback" in failure.text
    assert all(f.kind in ("raised", "waiting") for f in caught.value.failures)
    assert all_end(before)
    assert len(run_world(who, 4)) == 4


def test_all_ranks_that_raise_are_heard() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(all_raise, 3)
    assert [f.summary for f in caught.value.failures] == [f"ValueError: rank {r} says no" for r in range(3)]


def test_a_rank_that_leaves_is_an_error() -> None:
    with pytest.raises(WorldError, match="SystemExit: 3"):
        run_world(leaves, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_timeout_names_the_rank_that_never_came_and_where_it_was(late: int) -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match="within 2 s") as caught:
        run_world(sleeps_on, 2, late, timeout_s=2)
    assert time.monotonic() - start < 10
    assert caught.value.ranks("late") == [late]
    assert caught.value.ranks("waiting") == [1 - late]
    assert "in sleeps_on" in caught.value.failures[late].summary
    assert "in barrier" in caught.value.failures[1 - late].text


def test_a_timeout_tells_the_ranks_that_were_done() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(never_comes_back_on, 3, 2, timeout_s=1)
    assert caught.value.ranks("done") == [0, 1] and caught.value.ranks("late") == [2]
    assert "in never_comes_back_on" in caught.value.failures[2].text
    assert run_world(never_comes_back_on, 3, -1) == ["done"] * 3


def test_a_rank_that_is_killed_is_named_with_the_signal_and_what_it_had_printed() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(is_killed_on, 2, 1)
    failure = caught.value.failures[1]
    assert (failure.kind, failure.summary) == ("died", "signal SIGKILL") and "about to go" in failure.text
    assert run_world(who, 2)[1][0] == 1


def test_a_stopped_rank_is_named_and_ended() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(stops_on, 2, 0, timeout_s=1)
    assert caught.value.failures[0].kind == "late" and "does not answer" in caught.value.failures[0].summary


def test_an_open_process_group_is_an_error() -> None:
    with pytest.raises(WorldError, match="left torch's default process group open"):
        run_world(leaves_the_group_open, 2)


def test_a_world_finds_environment_directory_dtype_and_seed_as_they_were() -> None:
    clean = run_world(state_of_the_process, 1)
    run_world(spoils_the_process, 1)
    assert run_world(state_of_the_process, 1) == clean
    assert clean[0][0] is None and clean[0][2] == torch.float32


def test_children_of_a_failed_rank_are_ended_with_it() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(has_a_child, 1)
    child = int(caught.value.failures[0].summary.split()[-1])
    assert all_end([child])


def test_ranks_listen_on_the_loopback_interface_only() -> None:
    assert RANK_ENVIRONMENT["GLOO_SOCKET_IFNAME"] == "lo"
    addresses = [ip for rank in run_world(listens_on, 4) for ip in rank]
    assert addresses and set(addresses) <= {"127.0.0.1", "::1"}


def test_what_a_rank_prints_is_shown_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_world(speaks, 2)
    assert capsys.readouterr().out == "[rank 0] I am 0\n[rank 1] I am 1\n"


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    def local(env: RankEnv) -> None: ...

    for fn in (local, lambda env: None):
        with pytest.raises(ValueError, match="only a module-level function"):
            run_world(fn, 1)
    with pytest.raises(ValueError, match="world_size must be 1 to 16, got 0"):
        run_world(who, 0)


def test_nothing_outlives_a_session_that_is_killed() -> None:
    """A test process dies by SIGKILL while one of its ranks hangs: its ranks go with it."""
    code = (
        "from tests.shared.pool import *; from tests.house.test_pool import *;"
        "run_world(who, 2); print(*pool().pids(), flush=True);"
        "run_world(never_comes_back_on, 2, 1, timeout_s=100)"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert session.stdout is not None
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 2
    session.kill()
    session.wait()
    session.stdout.close()
    assert all_end(pids)
