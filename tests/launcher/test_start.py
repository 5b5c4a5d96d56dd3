"""Launching worlds of 1, 2 and 4: groups, the shared default group, last words, signals, refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_lite.config.config import ConfigError
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.distributed.communicator import CommError
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.launcher import LaunchError, launch
from colossal_lite.launcher import start as start_module
from colossal_lite.launcher.env import Launch
from colossal_lite.launcher.start import _device
from colossal_lite.launcher.versions import source_hash
from tests.shared.pool import RankEnv, WorldError, run_world

ROOT = Path(__file__).parents[2]


def summed(mesh: Mesh, *axes: str) -> float:
    return mesh.axis(*axes).all_reduce(torch.tensor([float(mesh.rank + 1)])).item()


# -------------------------------------------------------------------------------------------- worlds


def places(env: RankEnv) -> tuple[Any, ...]:
    with env.launch() as context:
        assert context.config.parallel.data == env.world_size
        return (
            (context.rank, context.world_size, context.mesh.coord("data"), context.is_main),
            context.local_batch(6),
            summed(context.mesh, "data"),
            str(context.device),
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_its_place_and_the_cuts_of_a_batch_are_those_of_tensor_split(world_size: int) -> None:
    cuts = torch.arange(6).tensor_split(world_size)
    for rank, (place, cut, total, device) in enumerate(run_world(places, world_size)):
        assert place == (rank, world_size, rank, rank == 0)
        assert torch.arange(6)[cut].equal(cuts[rank])
        assert total == world_size * (world_size + 1) / 2
        assert device == "cpu"


def no_group(env: RankEnv) -> bool:
    with launch({}, rank=0, world_size=1) as context:
        assert context.mesh.world.all_reduce(torch.ones(1)).item() == 1
        context.store.set("key", "value")
        return dist.is_initialized()


def test_a_world_of_one_makes_no_group_unless_it_is_given_a_store() -> None:
    assert run_world(no_group, 1) == [False]
    assert run_world(group_is_open_inside_and_closed_after, 1) == [(True, False)]


def group_is_open_inside_and_closed_after(env: RankEnv) -> tuple[bool, bool]:
    context = env.launch()
    opened = dist.is_initialized()
    context.close()
    context.close()  # a second close does nothing
    with context:  # nor does leaving the block of a closed context
        pass
    return opened, dist.is_initialized()


def test_closing_twice_is_closing_once() -> None:
    assert run_world(group_is_open_inside_and_closed_after, 2) == [(True, False)] * 2


def many_launches(env: RankEnv) -> list[float]:
    sums = []
    for _ in range(5):
        with env.launch() as context:
            sums.append(summed(context.mesh, "data"))
    return sums


def test_one_store_serves_launch_after_launch() -> None:
    assert run_world(many_launches, 2) == [[3.0] * 5] * 2


def two_contexts(env: RankEnv, first_closes_first: bool) -> list[float]:
    a, b = env.launch({"seed": 1}), env.launch({"seed": 2})
    assert a.mesh.axis("data") is not b.mesh.axis("data")
    sums = [summed(a.mesh, "data"), summed(b.mesh, "data")]
    ends, stays = (a, b) if first_closes_first else (b, a)
    ends.close()
    assert dist.is_initialized(), "the default group is gone while a context uses it"
    sums.append(summed(stays.mesh, "data"))
    stays.close()
    assert not dist.is_initialized()
    return sums


@pytest.mark.parametrize("first_closes_first", [True, False])
def test_two_contexts_share_the_default_group_and_the_last_one_ends_it(first_closes_first: bool) -> None:
    assert run_world(two_contexts, 2, first_closes_first) == [[3.0] * 3] * 2


def serial_inside(env: RankEnv) -> list[int]:
    with env.launch() as world, launch({}, rank=0, world_size=1) as alone:
        return [
            world.world_size,
            alone.world_size,
            int(summed(world.mesh, "data")),
            int(summed(alone.mesh, "data")),
        ]


def test_a_serial_context_lives_inside_a_world() -> None:
    assert run_world(serial_inside, 2) == [[2, 1, 3, 1]] * 2


def foreign_group(env: RankEnv) -> tuple[float, bool]:
    theirs = dist.PrefixStore("theirs", env.store)
    dist.init_process_group("gloo", store=theirs, rank=env.rank, world_size=env.world_size)
    for _ in range(2):
        with env.launch() as context:
            total = summed(context.mesh, "data")
    left_open = dist.is_initialized()
    dist.destroy_process_group()
    return total, left_open


def test_a_default_group_of_somebody_else_is_used_and_left_open() -> None:
    assert run_world(foreign_group, 2) == [(3.0, True)] * 2


def test_ranks_that_do_not_come_are_named() -> None:
    started = time.monotonic()
    texts = run_world(waits_for_rank_2, 2)
    assert time.monotonic() - started < 20
    for rank, text in enumerate(texts):
        assert text == f"rank {rank}: ranks 2 of 3 have not arrived; timeout_s is 1"


def waits_for_rank_2(env: RankEnv) -> str:
    with pytest.raises(CommError) as caught:
        launch({"timeout_s": 1.0}, store=env.store, rank=env.rank, world_size=3)
    assert not dist.is_initialized()
    return str(caught.value)


def a_world_within_another(env: RankEnv) -> str:
    with env.launch(), pytest.raises(LaunchError) as caught:
        launch({}, store=dist.PrefixStore("b", env.store), rank=1 - env.rank, world_size=2)
    return str(caught.value)


def test_a_process_is_not_in_two_worlds_at_once() -> None:
    texts = run_world(a_world_within_another, 2)
    assert texts[0].startswith("this process is rank 0 of 2 already and cannot be rank 1 of 2 as well")


def differing_configs(env: RankEnv) -> str:
    with pytest.raises(ConfigError) as caught:
        env.launch({"seed": 7 if env.rank == 1 else 8})
    assert not dist.is_initialized()
    return str(caught.value)


def test_ranks_with_different_configurations_all_refuse_and_name_the_difference() -> None:
    for text in run_world(differing_configs, 4):
        assert "rank 1 has seed=7 against 8 on rank 0" in text


def loads(env: RankEnv) -> list[int]:
    with env.launch({"seed": 3}) as context:
        samples = list(context.dataloader(list(range(10)), global_batch=5))
        whole = [int(x) for batch in samples for x in batch]
        return whole


def test_the_loader_gives_each_data_coordinate_its_piece_of_one_order() -> None:
    [serial] = run_world(loads, 1)
    first, second = run_world(loads, 2)
    assert sorted(serial) == list(range(10)) and serial != sorted(serial)
    assert [*first[:3], *second[:2], *first[3:], *second[2:]] == serial


# -------------------------------------------------------------------------------------------- refusals


def refused(env: RankEnv, config: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        env.launch(config, **more)
    assert not dist.is_initialized() and not env.store.check([f"colossal_lite/0/launches/{env.rank}"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"parallel": {"data": 3}}, ["parallel.data = 3", "the world has 2 ranks", "data 2"]),
        ({"parallel": {"dta": 2}}, ["parallel.dta", "unknown key", "parallel.data"]),
        ({"parallel": {"data": 0}}, ["parallel.data = 0", "legal"]),
        ({"backend": "nccl"}, ["backend = 'nccl'", "no CUDA device is visible", "'auto', 'gloo'"]),
        ({"zero": {"stage": 9}}, ["zero.stage = 9", "out of range"]),
        ({"kernels": "triton"}, ["kernels = 'triton'", "no kernels for device 'cpu'", "'auto', 'torch'"]),
    ],
)
def test_a_world_that_cannot_be_is_refused_before_the_ranks_meet(
    config: dict[str, Any], says: list[str]
) -> None:
    for text in run_world(refused, 2, config):
        assert all(part in text for part in says), text


@pytest.mark.parametrize(
    ("backend", "devices", "launched", "chosen"),
    [
        ("auto", 0, Launch("torchrun", 1, 2, 1, 2), "cpu"),
        ("auto", 2, Launch("torchrun", 5, 8, 1, 2), "cuda:1"),
        ("nccl", 2, Launch("torchrun", 5, 8, 1, 2), "cuda:1"),
        ("gloo", 2, Launch("torchrun", 5, 8, 1, 2), "cpu"),
        ("auto", 1, Launch("slurm", 5, 8, 1, 2), "cuda:0"),  # SLURM shows each task its own device
        ("auto", 1, Launch("torchrun", 5, 8, 1, 2), "1 CUDA device visible, none for local rank 1"),
        ("auto", 2, Launch("slurm", 5, 8, 2, 4), "legal: 'gloo', or at most 2 ranks a node"),
    ],
)
def test_a_rank_takes_the_device_of_its_local_rank(
    backend: str, devices: int, launched: Launch, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if " " in chosen:
        with pytest.raises(ConfigError) as caught:
            _device(backend, launched)
        assert chosen in str(caught.value) and not current
    else:
        assert str(_device(backend, launched)) == chosen
        assert current == ([int(chosen[-1])] if "cuda" in chosen else [])


def refused_model(env: RankEnv) -> str:
    facts = ModelFacts(
        layers=2, heads=3, kv_heads=3, width=32, ffn=128, vocabulary=64, sequence=16, tied=True
    )
    return refused(env, {}, model_facts=facts)


def test_a_model_that_cannot_be_cut_is_refused_before_the_ranks_meet() -> None:
    for text in run_world(refused_model, 2):
        assert "model.heads = 3" in text and "width=32" in text


@pytest.mark.parametrize(
    "place", [{"rank": 1}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": 0, "world_size": 2}]
)
def test_half_a_place_is_refused(place: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match=r"legal: "):
        launch({}, **place)


def test_overrides_lie_over_the_config_and_faults_of_both_are_told_together() -> None:
    with launch({"seed": 1}, rank=0, world_size=1, overrides=["--seed", "5"]) as context:
        assert context.config.seed == 5
    with pytest.raises(ConfigError) as caught:
        launch({"sed": 1}, rank=0, world_size=1, overrides=["--zero.stage", "7"])
    assert {problem.path for problem in caught.value.problems} == {"sed", "zero.stage"}


def refused_versions(env: RankEnv, what: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        other = start_module.versions() | ({what: "other"} if env.rank == 1 else {})
        patch.setattr(start_module, "versions", lambda: other)
        with pytest.raises(ConfigError) as caught:
            env.launch()
    return str(caught.value)


@pytest.mark.parametrize(
    "what",
    ["version of colossal_lite", "version of torch", "version of python", "source of colossal_lite"],
)
def test_a_rank_with_another_version_or_source_is_named_on_every_rank(what: str) -> None:
    for text in run_world(refused_versions, 3, what):
        assert f"rank 1 has {what}='other' against '" in text and "on rank 0" in text


def test_the_hash_of_the_source_changes_with_any_file_of_any_room(tmp_path: Path) -> None:
    for name in ("colossal_lite/a.py", "kernels/b.py", "launcher/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    hashes = {source_hash(tmp_path)}
    for path in sorted(tmp_path.rglob("*.py")):
        path.write_text("x = 2")
        hashes.add(source_hash(tmp_path))
    path.rename(path.with_name("d.py"))
    assert len(hashes | {source_hash(tmp_path)}) == 5


# -------------------------------------------------------------------------------------------- last words


def stops(env: RankEnv, culprit: int) -> None:
    with env.launch() as context:
        summed(context.mesh, "data")
        if context.rank == culprit:
            raise ValueError("batch: NaN in sample 3\nand more")
        summed(context.mesh, "data")


@pytest.mark.parametrize("world_size, culprit", [(2, 0), (4, 3)])
def test_the_others_stop_within_seconds_and_say_who_stopped_and_why(world_size: int, culprit: int) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(stops, world_size, culprit)
    assert time.monotonic() - started < 10
    for failure in caught.value.failures:
        assert failure.kind == "raised", failure
        if failure.rank == culprit:
            assert failure.summary.startswith("ValueError: batch: NaN in sample 3")
        else:
            first, second = failure.summary.splitlines()[:2]
            assert first == f"CommError: rank {culprit} stopped: ValueError: batch: NaN in sample 3"
            assert second.startswith(f"rank {failure.rank}: all_reduce of [1] float32 on axis 'data' failed")


def first_words_stay(env: RankEnv) -> str:
    try:
        with env.launch() as context:
            store = context.store
            context.mesh.world.barrier()
            if context.rank == 0:
                raise KeyError("first")
            store.wait(["stopped"], timedelta(seconds=10))
            raise RuntimeError("second")
    except (KeyError, RuntimeError):
        return store.get("stopped").decode()


def test_nobody_writes_over_the_first_words() -> None:
    assert run_world(first_words_stay, 2) == ["rank 0 stopped: KeyError: 'first'"] * 2


def clean_exits(env: RankEnv) -> tuple[bool, bool]:
    heard = []
    for code in (0, 3):
        try:
            with env.launch() as context:
                store = context.store
                raise SystemExit(code)
        except SystemExit:
            heard.append(store.check(["stopped"]))
    return heard[0], heard[1]


def test_exit_code_0_is_no_failure_and_others_are() -> None:
    assert run_world(clean_exits, 1) == [(False, True)]


# -------------------------------------------------------------------------------------------- signals


def record_signals(env: RankEnv) -> list[bool]:
    seen = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        before = signal.getsignal(number)
        with env.launch() as context:
            seen.append(context.stop_requested)
            if context.rank == 0:
                os.kill(os.getpid(), number)
            seen.append(context.stop_requested)
            summed(context.mesh, "data")  # the signal ended nothing
        assert signal.getsignal(number) == before
    return seen


def test_stop_signals_are_recorded_and_end_nothing() -> None:
    assert run_world(record_signals, 2) == [[False, True] * 4, [False, False] * 4]


@pytest.mark.parametrize("outer_closes_first", [True, False])
def test_handlers_of_nested_contexts_are_put_back_in_any_order(outer_closes_first: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    outer, inner = launch({}, rank=0, world_size=1), launch({}, rank=0, world_size=1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert outer.stop_requested and inner.stop_requested
    for context in (outer, inner) if outer_closes_first else (inner, outer):
        context.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_came_later_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with launch({}, rank=0, world_size=1):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_a_thread_launches_without_handlers() -> None:
    before, outcomes = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with launch({}, rank=0, world_size=1) as context:
            outcomes.append((signal.getsignal(signal.SIGTERM) == before, context.stop_requested))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert outcomes == [(True, False)]


# ------------------------------------------------------------------------------------- real processes

SCRIPT = """
import sys, time, torch, psutil
import colossal_lite as cl

def main():
    for turn in range(2):
        with cl.launch({"timeout_s": 20.0}, overrides=sys.argv[3:]) as context:
            total = context.mesh.world.all_reduce(torch.ones(1)).item()
            if sys.argv[1] == "stop":
                if context.rank == int(sys.argv[2]):
                    raise ValueError("bad news")
                time.sleep(1.5)  # computes; the other would long be gone, and the store with it
            total += context.mesh.world.all_reduce(torch.ones(1)).item()
            sockets = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
            away = [ip for ip in sockets if ip not in ("127.0.0.1", "::1")]
            print(f"turn {turn}: {total:g} over {context.world_size}, listening beyond: {away}", flush=True)

main()
"""


def start(script: Path, environ: dict[str, str], *args: str) -> subprocess.Popen[str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "RANK", "WORLD", "GLOO"))
    }
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def by_hand(rank: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_NODELIST": "elsewhere",
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": str(port),
    }


def openmpi(rank: int, port: int) -> dict[str, str]:
    prefix = "OMPI_COMM_WORLD_"
    return {
        f"{prefix}RANK": str(rank),
        f"{prefix}SIZE": "2",
        f"{prefix}LOCAL_RANK": str(rank),
        f"{prefix}LOCAL_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def outcomes(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each; whatever happens, none outlives this."""
    try:
        texts = [process.communicate(timeout=60) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("environ", [by_hand, slurm, openmpi])
def test_launchers_meet_twice_and_rank_0_serves_on_loopback_only(script: Path, environ: Any) -> None:
    port = free_port()
    for code, printed, errors in outcomes([start(script, environ(rank, port), "go") for rank in range(2)]):
        assert code == 0, errors
        assert printed == "".join(f"turn {t}: 4 over 2, listening beyond: []\n" for t in range(2))


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ranks_meet_over_ipv6(script: Path) -> None:
    port = free_port("::1")
    environs = [by_hand(rank, port, "[::1]") for rank in range(2)]
    for code, printed, errors in outcomes([start(script, environ, "go") for environ in environs]):
        assert code == 0 and "turn 1: 4 over 2, listening beyond: []" in printed, errors


@pytest.mark.parametrize("culprit", [0, 1])
def test_processes_stop_together_and_the_reason_outlives_the_rank_that_served_the_store(
    script: Path, culprit: int
) -> None:
    port = free_port()
    processes = [start(script, slurm(rank, port), "stop", str(culprit)) for rank in range(2)]
    ended = outcomes(processes)
    code, _, errors = ended[culprit]
    assert code == 1 and "ValueError: bad news" in errors and "CommError" not in errors
    code, _, errors = ended[1 - culprit]
    assert code == 1 and f"rank {1 - culprit} ends, as rank {culprit} stopped: ValueError: bad news" in errors


def torchrun(script: Path, *args: str) -> subprocess.Popen[str]:
    path = script.with_name("torchrun.py")
    path.write_text("from torch.distributed.run import main; main()")
    return start(path, {}, "--standalone", "--nproc-per-node", "2", str(script), *args)


def test_what_all_ranks_find_is_printed_once(script: Path) -> None:
    port = free_port()
    first, second = outcomes([start(script, slurm(rank, port), "go", "0", "--seed=x") for rank in range(2)])
    assert first[0] == second[0] == 2 and "seed = 'x'" in first[2]
    assert second[2] == ""


def test_ranks_whose_configurations_differ_both_refuse_in_words_where_rank_0_serves_the_store(
    script: Path,
) -> None:
    port = free_port()
    ended = outcomes([start(script, slurm(rank, port), "go", "0", f"--seed={rank}") for rank in range(2)])
    (first, _, errors), (second, printed, silence) = ended
    assert first == 2 and "rank 1 has seed=1 against 0 on rank 0" in errors and "Traceback" not in errors
    assert second == 2 and printed == silence == "", silence


def test_torchrun_starts_a_world_and_its_summary_names_the_error(script: Path) -> None:
    [(code, printed, errors)] = outcomes([torchrun(script, "go")])
    assert code == 0 and printed.count("turn 1: 4 over 2, listening beyond: []") == 2, errors
    [(code, printed, errors)] = outcomes([torchrun(script, "go", "", "--seed=x")])
    summary = errors.partition("Root Cause")[2]
    assert code == 1 and "ConfigError: the configuration has 1 problem" in summary and "seed = 'x'" in summary
    assert "in launch" not in summary  # the message is enough


def test_groups_of_one_node_are_made_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], dist.init_process_group

    def recorded(*args: Any, **more: Any) -> None:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        real(*args, **more)

    monkeypatch.setattr(dist, "init_process_group", recorded)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    launch({}, store=dist.HashStore()).close()
    assert seen in (["lo"], ["lo0"]) and "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_taken_port_is_named_with_what_to_do(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        [(code, _, errors)] = outcomes([start(script, by_hand(0, port), "go")])
    assert code == 2 and "Traceback" not in errors
    assert f"rank 0 cannot serve at 127.0.0.1:{port}: " in errors and "Address already in use" in errors
    assert "set MASTER_PORT to a free port" in errors
