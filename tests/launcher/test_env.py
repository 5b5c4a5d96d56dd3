"""Who launched this process, from environments as real launchers leave them."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.launcher import env
from colossal_lite.launcher.env import (
    Launch,
    LaunchError,
    detect,
    endpoint,
    expand_hosts,
    is_loopback,
    speaks,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STANDALONE = TORCHRUN | {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "vm",
    "MASTER_PORT": "38211",
}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_NPROCS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_JOB_NODELIST": "gpu[001-012]",
    "SLURM_NODELIST": "gpu[001-012]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_TASKS_PER_NODE": "4(x12)",
    "ENVIRONMENT": "BATCH",
}
ONE_NODE_STEP = STEP | {
    "SLURM_STEP_NODELIST": "gpu007",
    "SLURM_STEP_TASKS_PER_NODE": "7",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "5",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[001-002]",
    "ENVIRONMENT": "BATCH",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-77@1",
}
MPIRUN_TWO_NODES = MPIRUN | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29511",
}
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_no_launcher_is_a_world_of_one() -> None:
    assert detect({"PATH": "/bin", "MASTER_ADDR": "old", "LOCAL_RANK": "3"}) == Launch("none")
    assert detect({}).describe() == "none: a world of one"


def test_torchrun_is_taken_as_it_is() -> None:
    assert detect(TORCHRUN) == Launch(
        "torchrun", 5, 8, 1, 4, "node01", 29400, 2, "run", agent_store=True, has_agent=True
    )
    assert detect(STANDALONE) == Launch(
        "torchrun", 1, 2, 1, 2, "vm", 38211, 2, "run", agent_store=True, has_agent=True
    )


def test_torchrun_variables_win_over_those_of_the_scheduler_that_started_torchrun() -> None:
    for outer in (STEP, MPIRUN, POD):
        assert detect(outer | TORCHRUN) == detect(TORCHRUN)


def test_variables_set_by_hand_are_one_node_on_loopback_and_else_one_process_a_node() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    local = detect(by_hand | {"MASTER_ADDR": "127.0.0.1"})
    assert (local.local_rank, local.local_world_size, local.one_node) == (1, 2, True)
    pods = detect(by_hand | {"MASTER_ADDR": "worker-0"})
    assert (pods.local_rank, pods.local_world_size, pods.one_node) == (0, 1, False)
    uncounted = detect(by_hand | {"MASTER_ADDR": "worker-0", "LOCAL_RANK": "1"})
    assert (uncounted.local_rank, uncounted.local_world_size, uncounted.one_node) == (1, 0, False)
    assert not local.agent_store and not pods.agent_store


def test_a_world_of_one_needs_no_address() -> None:
    for environ in (
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
        {"PET_NNODES": "1"},
    ):
        launch = detect(environ)
        assert (launch.rank, launch.world_size, launch.one_node) == (0, 1, True), environ
        assert launch.describe() == f"{launch.kind}: a world of one"


def test_slurm_takes_the_step_not_the_job() -> None:
    launch = detect(STEP)
    assert (launch.kind, launch.rank, launch.world_size) == ("slurm", 5, 7)
    assert (launch.local_rank, launch.local_world_size) == (1, 3)
    assert (launch.master_address, launch.run_id, launch.agent_store) == ("gpu007", "4711", False)


@pytest.mark.parametrize("node, tasks", [(0, 2), (1, 2), (2, 3)])
def test_slurm_counts_the_tasks_of_its_own_node(node: int, tasks: int) -> None:
    assert detect(STEP | {"SLURM_NODEID": str(node)}).local_world_size == tasks


def test_slurm_works_from_the_plain_names() -> None:
    plain = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODELIST": "node[01-03,7],gpu5",
        "SLURM_JOB_ID": "12",
    }
    launch = detect(plain)
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 8, 1)
    assert (launch.master_address, launch.local_world_size) == ("node01", 2)  # 8 tasks on 5 nodes


def test_a_slurm_step_on_one_node_stays_on_loopback() -> None:
    launch = detect(ONE_NODE_STEP)
    assert launch.one_node and launch.master_address == launch.store_address == "127.0.0.1"


def test_slurm_ports_agree_within_a_step_and_differ_between_steps_and_neighbouring_jobs() -> None:
    def port(**changes: str) -> int:
        return detect(STEP | changes).master_port

    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == port()
    pairs = itertools.product(range(4700, 4740), range(3))
    ports = [port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job, step in pairs]
    assert len(set(ports)) == len(ports) and all(20000 <= p < 32768 for p in ports)
    assert port(MASTER_PORT="1234") == 1234


def test_a_batch_script_outside_srun_is_a_world_of_one_and_says_so() -> None:
    launch = detect(BATCH_SCRIPT)
    assert (launch.kind, launch.world_size) == ("none", 1)
    assert "srun" in launch.note and "8 tasks" in launch.note
    assert detect(BATCH_SCRIPT | {"SLURM_NTASKS": "1"}).note == ""


def test_mpirun_in_a_batch_script_is_mpirun() -> None:
    assert detect(BATCH_SCRIPT | MPIRUN).kind == "openmpi"
    assert detect(STEP | MPIRUN) == detect(MPIRUN)


def test_openmpi_on_one_node_derives_a_port_from_its_job() -> None:
    launch = detect(MPIRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (3, 4, 3, 4)
    assert launch.store_address == "127.0.0.1"
    first = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect(MPIRUN | first).master_port == launch.master_port
    assert detect(MPIRUN | {"PMIX_NAMESPACE": "prterun-vm-78@1"}).master_port != launch.master_port


def test_openmpi_across_nodes_takes_the_address_it_was_given() -> None:
    launch = detect(MPIRUN_TWO_NODES)
    assert (launch.master_address, launch.master_port, launch.one_node) == ("head", 29511, False)


def test_a_pod_of_one_process_a_node_needs_no_torchrun() -> None:
    assert detect(POD) == Launch("torchrun", 1, 2, 0, 1, "job-node-0-0.job", 29400)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (TORCHRUN | {"RANK": "8"}, "torchrun: rank 8 must be below the world size 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not legal; legal: a whole number, at least 0"),
        (TORCHRUN | {"RANK": "five"}, "RANK='five' is not legal"),
        (TORCHRUN | {"RANK": ""}, "RANK='' is not legal"),
        (TORCHRUN | {"RANK": "1_0"}, "RANK='1_0' is not legal"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not legal; legal: a whole number, at least 1"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 must be below the local world size 4"),
        (TORCHRUN | {"RANK": "1", "LOCAL_RANK": "3"}, "local rank 3 is above the rank 1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "local world size 9 is above the world size 8"),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "MASTER_PORT='70000' is not legal; legal: a whole number, 1 to 65535",
        ),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR='' is not a host"),
        (TORCHRUN | {"MASTER_ADDR": "node01:29500"}, "MASTER_ADDR='node01:29500' is not a host"),
        (TORCHRUN | {"MASTER_ADDR": "tcp://node01"}, "is not a host"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set, and a world of 8 needs rank 0's address"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set, and a world of 8 needs rank 0's port"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        (STEP | {"SLURM_PROCID": "7"}, "slurm: rank 7 must be below the world size 7"),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 is not in SLURM_STEP_TASKS_PER_NODE=2(x2),3"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two' is not a list"),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[7"}, "the node list 'gpu[7' cannot be read"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_NTASKS is not set"),
        (
            without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
            "none of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST is set",
        ),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "openmpi: rank 4 must be below the world size 4"),
        (without(MPIRUN_TWO_NODES, "MASTER_ADDR"), "mpirun -x MASTER_ADDR=<host of rank 0>"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        (POD | {"PET_NPROC_PER_NODE": "auto"}, "start it as `torchrun SCRIPT`"),
        (POD | {"PET_NNODES": "1:4"}, "start it as `torchrun SCRIPT`"),
        (without(POD, "PET_MASTER_ADDR"), "PET_MASTER_ADDR is not set"),
        (without(POD, "PET_NODE_RANK"), "PET_NODE_RANK is not set"),
    ],
)
def test_contradictions_are_refused_in_one_line_that_names_them(environ: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("gpu5", ["gpu5"]),
        ("a,b", ["a", "b"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02].cluster", ["r1n01.cluster", "r1n02.cluster", "r2n01.cluster", "r2n02.cluster"]),
        ("dgx-a[1,3]-b,login-1", ["dgx-a1-b", "dgx-a3-b", "login-1"]),
    ],
)
def test_node_lists_expand_in_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[1--2]", "n[1,]", "a,,b", "a b", "n[[1]]", ",a"],
)
def test_broken_node_lists_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(LaunchError, match="node list"):
        list(expand_hosts(text))


def test_the_first_host_of_an_endless_list_costs_nothing() -> None:
    assert next(expand_hosts("n[1-999999999]m[1-999999999]")) == "n1m1"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 120), st.integers(0, 4)), min_size=1, max_size=4
    )
)
def test_what_is_written_as_ranges_comes_back_as_hosts(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{start:03d}-{start + more:03d}]" for name, start, more in parts)
    hosts = [f"{name}{start + i:03d}" for name, start, more in parts for i in range(more + 1)]
    assert list(expand_hosts(text)) == hosts


@given(st.text(alphabet="ab01[]-, ", max_size=12))
def test_any_text_is_either_hosts_or_refused(text: str) -> None:
    try:
        hosts = list(itertools.islice(expand_hosts(text), 50))
    except LaunchError:
        return
    assert hosts and all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.parametrize("address", ["[fd00::1]", "fd00::1", " fd00::1 "])
def test_ipv6_addresses_lose_their_brackets_and_get_them_back_beside_a_port(address: str) -> None:
    launch = detect(TORCHRUN | {"MASTER_ADDR": address})
    assert launch.master_address == launch.store_address == "fd00::1"
    assert "[fd00::1]:29400" in launch.describe()


def test_loopback_is_told_from_the_rest() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.8.8", "::1"]))
    assert not any(
        map(is_loopback, ["10.0.0.1", "0.0.0.0", "::", "node01", "fe80::1%eth0", "localhost.evil.org"])
    )
    assert endpoint("::1", 80) == "[::1]:80" and endpoint("node01", 80) == "node01:80"


def test_a_store_of_one_node_is_reached_over_loopback_unless_the_launcher_serves_it() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert detect(by_hand | {"MASTER_ADDR": "vm"}).store_address == "127.0.0.1"
    assert detect(by_hand | {"MASTER_ADDR": "::1"}).store_address == "::1"
    assert detect(STANDALONE).store_address == "vm"
    assert (
        detect(TORCHRUN).store_address
        == detect(without(TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE")).store_address
    )


def test_one_process_a_node_speaks() -> None:
    assert speaks({}) and speaks({"LOCAL_RANK": "0", "RANK": "8"}) and speaks(BATCH_SCRIPT)
    assert not speaks(TORCHRUN) and not speaks(MPIRUN) and not speaks(STEP)
    assert not speaks({"RANK": "1", "WORLD_SIZE": "2"})
    assert speaks({"LOCAL_RANK": "3"})  # left over: RANK, which would make it count, is not set
    assert speaks({"RANK": "1", "LOCAL_RANK": "three"})  # wrong, and somebody has to say so


def test_the_environment_is_a_copy() -> None:
    environ = env.environment()
    environ["COLOSSAL_LITE_TEST"] = "1"
    assert "COLOSSAL_LITE_TEST" not in os.environ


def test_gloo_is_bound_to_loopback_only_inside_and_never_against_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with env.gloo_on_loopback(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    with env.gloo_on_loopback(False):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    with pytest.raises(ZeroDivisionError), env.gloo_on_loopback(True):
        raise ZeroDivisionError
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with env.gloo_on_loopback(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_cublas_gets_a_workspace_that_gives_the_same_bits_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(env.CUBLAS, ":0:0")
    assert env.workspace_of_cublas(deterministic=False) == ""
    with pytest.raises(
        LaunchError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 lets sums differ; legal are :4096:8 and :16:8"
    ):
        env.workspace_of_cublas(deterministic=True)
    for value in env.DETERMINISTIC:
        monkeypatch.setenv(env.CUBLAS, value)
        assert env.workspace_of_cublas(deterministic=True) == value
    monkeypatch.delenv(env.CUBLAS)
    assert env.workspace_of_cublas(deterministic=True) == os.environ[env.CUBLAS] == ":4096:8"
