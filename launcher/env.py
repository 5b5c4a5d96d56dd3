"""Detects the launcher and this rank's place in its world: the only file that reads the environment.

Note: launchers.
`detect` is a pure function of a mapping.  A process belongs to the first launcher whose variables it has:
- **torchrun**, or another program that sets `RANK`: its variables are used as they are.
- **openmpi**, `OMPI_COMM_WORLD_*`: before SLURM, because a batch script that calls mpirun has both.
- **slurm**, `SLURM_PROCID` inside a step.  The batch script itself has `SLURM_PROCID=0` and no peers: a world of one.
- torchrun's own arguments `PET_*`, in a pod that runs one process and no torchrun.
- **none**: a world of one.
Variables that contradict each other are refused, because a job with a wrong guess hangs.  The address of rank 0 is
never guessed across nodes, except from SLURM's own node list.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

LauncherKind = Literal["torchrun", "slurm", "openmpi", "gang", "none"]
DEFAULT_PORT = 29500
# Ports derived from a job's id are below Linux's ephemeral range.  A job has 16, one for each of its steps.
DERIVED_PORT_FIRST, DERIVED_PORT_COUNT, STEPS_PER_JOB = 20000, 12288, 16


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC = (":4096:8", ":16:8")
"""Values of that variable with which cuBLAS gives the same bits twice."""


class LaunchError(ValueError):
    """The environment contradicts itself. The text names the variables, their values and the legal ones."""


@dataclass(frozen=True)
class Launch:
    """This process's place as its launcher gives it. `local_*` count the ranks of this node."""

    kind: LauncherKind
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """0 if the launcher does not set it."""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """0 if no port is needed: a world of one."""
    restart_count: int = 0
    run_id: str = ""
    agent_store: bool = False
    """Whether the launcher itself serves the store; otherwise rank 0 does."""
    has_agent: bool = False
    """Whether the parent of this process is torchrun's agent, without which the run cannot continue."""
    note: str = ""
    """One line for people if the situation is legal but perhaps not intended."""

    @property
    def one_node(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def store_address(self) -> str:
        """Address of rank 0's store: within a node the loopback interface."""
        if self.agent_store or not self.one_node or is_loopback(self.master_address):
            return self.master_address
        return "127.0.0.1"

    def describe(self) -> str:
        """One line: `torchrun: rank 3 of 8 (3 of 4 on this node), rank 0 at [::1]:29500`."""
        if self.world_size == 1:
            return f"{self.kind}: a world of one"
        of = f" of {self.local_world_size}" if self.local_world_size else ""  # 0: not counted yet
        where = f"{self.local_rank}{of} on this node"
        restart = f", restart {self.restart_count}" if self.restart_count else ""
        master = endpoint(self.master_address, self.master_port)
        return f"{self.kind}: rank {self.rank} of {self.world_size} ({where}), rank 0 at {master}{restart}"


def environment() -> dict[str, str]:
    """This process's environment, as it is now."""
    return dict(os.environ)


@contextmanager
def gloo_on_loopback(wanted: bool) -> Iterator[None]:
    """Within it, gloo opens its sockets on the loopback interface, unless the user has named one.

    Gloo reads the interface from the environment only.  Without it, gloo listens on the address of the host's name, and
    fails if that name does not resolve.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if not wanted or loopback is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def show_one_device(local_rank: int) -> None:
    """Hide all CUDA devices from this process but the one of this local rank. To be called before CUDA begins."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if shown and local_rank >= len(shown):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={','.join(shown)} shows no device for local rank {local_rank}; legal: as many "
            f"processes as devices"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = shown[local_rank] if shown else str(local_rank)


def workspace_of_cublas(*, deterministic: bool) -> str:
    """The variable that makes cuBLAS give the same bits twice, which is set here unless it is; "" if nothing asks.

    cuBLAS reads it once, at the first product.  Raises LaunchError for a value that lets it choose as it likes."""
    if not deterministic:
        return ""
    value = os.environ.setdefault(CUBLAS, DETERMINISTIC[0])
    if value not in DETERMINISTIC:
        legal = " and ".join(DETERMINISTIC)
        raise LaunchError(f"deterministic=True: {CUBLAS}={value} lets sums differ; legal are {legal}")
    return value


def detect(environ: Mapping[str, str]) -> Launch:
    """The launcher and the place of this process in its world. Raises LaunchError."""
    if "RANK" in environ:
        return _checked(_torchrun(environ))
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _checked(_openmpi(environ))
    if _in_slurm_step(environ):
        return _checked(_slurm(environ))
    if "PET_NNODES" in environ:
        return _checked(_pod(environ))
    if _whole(environ, "WORLD_SIZE", 1, default=1) > 1:
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not, so this process has no place "
            "in that world; start it with torchrun, or set RANK, or unset WORLD_SIZE"
        )
    tasks = _whole(environ, "SLURM_NTASKS", 1, default=1)
    if tasks > 1 and "SLURM_PROCID" in environ:
        note = f"inside a SLURM batch script of {tasks} tasks but not under srun: a world of one"
        return Launch("none", note=note)
    return Launch("none")


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process is its node's first. An error that all ranks find is printed once a node."""
    ours = ("LOCAL_RANK", "RANK") if "RANK" in environ else ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    name = _first_of(environ, *ours)
    return name is None or not environ[name].strip().isdecimal() or int(environ[name]) == 0


# -------------------------------------------------------------------------------------------------- launchers


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank, world_size = _whole(environ, "RANK", 0), _whole(environ, "WORLD_SIZE", 1)
    hint = "torchrun sets it; by hand: MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
    address, port = _master(environ, world_size, hint)
    # Without LOCAL_RANK: one node if rank 0 is on the loopback interface.  Otherwise one process a node, as in a job of
    # one container a rank.
    alone, counted = not is_loopback(address), "LOCAL_RANK" not in environ
    return Launch(
        "torchrun",
        rank,
        world_size,
        local_rank=_whole(environ, "LOCAL_RANK", 0, default=0 if alone else rank),
        local_world_size=_whole(
            environ, "LOCAL_WORLD_SIZE", 1, default=int(counted) if alone else world_size
        ),
        master_address=address,
        master_port=port,
        restart_count=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        has_agent="TORCHELASTIC_RUN_ID" in environ,
    )


def _openmpi(environ: Mapping[str, str]) -> Launch:
    rank, world_size = _whole(environ, "OMPI_COMM_WORLD_RANK", 0), _whole(environ, "OMPI_COMM_WORLD_SIZE", 1)
    local_world_size = _whole(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, default=1)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    address, port = "127.0.0.1", _derived_port(zlib.crc32(job.encode()) if job else None)
    if local_world_size < world_size or "MASTER_ADDR" in environ:
        hint = "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        address, port = _master(environ, world_size, hint, default_port=port)
    return Launch(
        "openmpi",
        rank,
        world_size,
        local_rank=_whole(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_world_size=local_world_size,
        master_address=address,
        master_port=port if world_size > 1 else 0,
        run_id=job,
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return "SLURM_PROCID" in environ and (in_step or environ.get("ENVIRONMENT") != "BATCH")


def _slurm(environ: Mapping[str, str]) -> Launch:
    tasks = _first_of(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    rank, world_size = _whole(environ, "SLURM_PROCID", 0), _whole(environ, tasks or "SLURM_NTASKS", 1)
    job = _whole(environ, "SLURM_JOB_ID", 0, default=0)
    step = _whole(environ, _first_of(environ, "SLURM_STEP_ID", "SLURM_STEPID") or "", 0, default=0)
    port = _derived_port(job * STEPS_PER_JOB + step if job else None)
    local_world_size = _slurm_local_world_size(environ, world_size)
    address = "127.0.0.1"
    if "MASTER_ADDR" in environ:
        address = _host(environ, "MASTER_ADDR")
    elif local_world_size < world_size:
        address = next(_slurm_hosts(environ))
    return Launch(
        "slurm",
        rank,
        world_size,
        local_rank=_whole(environ, "SLURM_LOCALID", 0),
        local_world_size=local_world_size,
        master_address=address,
        master_port=_whole(environ, "MASTER_PORT", 1, 65535, default=port) if world_size > 1 else 0,
        restart_count=_whole(environ, "SLURM_RESTART_COUNT", 0, default=0),
        run_id=environ.get("SLURM_JOB_ID", ""),
    )


def _slurm_hosts(environ: Mapping[str, str]) -> Iterator[str]:
    """The nodes of this step. LaunchError without a list of them."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = _first_of(environ, *names)
    if name is None:
        raise LaunchError(f"none of {', '.join(names)} is set, so the nodes of this step are unknown")
    return expand_hosts(environ[name])


def _slurm_local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node: SLURM_NODEID's entry in a list such as `4(x2),3`, or else an equal share."""
    name = _first_of(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if world_size == 1:
        return 1
    if name is None:
        per_node = _whole(environ, "SLURM_NTASKS_PER_NODE", 1, default=0)
        return min(per_node, world_size) or math.ceil(world_size / sum(1 for _ in _slurm_hosts(environ)))
    node = remaining = _whole(environ, "SLURM_NODEID", 0, default=0)
    for item in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise LaunchError(f"{name}={environ[name]!r} is not a list such as 4(x2),3")
        if remaining < int(match[2] or 1):
            return int(match[1])
        remaining -= int(match[2] or 1)
    raise LaunchError(f"SLURM_NODEID={node} is not in {name}={environ[name]}")


def _pod(environ: Mapping[str, str]) -> Launch:
    """The place of a process that has torchrun's arguments but no torchrun: a torchrun of one worker."""
    workers, nodes = environ.get("PET_NPROC_PER_NODE", "1"), environ["PET_NNODES"]
    if workers != "1" or not nodes.isdecimal():
        raise LaunchError(
            f"PET_NNODES={nodes} and PET_NPROC_PER_NODE={workers} ask torchrun for workers, and this process "
            "is not one of them: start it as `torchrun SCRIPT`, which reads PET_*, or unset PET_NNODES"
        )
    world_size = _whole(environ, "PET_NNODES", 1)
    rank = _whole(environ, "PET_NODE_RANK", 0, default=0 if world_size == 1 else None)
    hint = "or start it as `torchrun SCRIPT`"
    address, port = _master(environ, world_size, hint, prefix="PET_", default_port=DEFAULT_PORT)
    return Launch("torchrun", rank, world_size, 0, 1, address, port, run_id=environ.get("PET_RDZV_ID", ""))


def _checked(launch: Launch) -> Launch:
    """The launch, checked by the rules of every launcher."""
    pairs = (
        ("rank", launch.rank, "world size", launch.world_size),
        ("local rank", launch.local_rank, "local world size", launch.local_world_size),
    )
    for name, value, bound_name, bound in pairs:
        if value >= bound > 0:
            raise LaunchError(f"{launch.kind}: {name} {value} must be below the {bound_name} {bound}")
    if launch.local_world_size > launch.world_size:
        sizes = f"local world size {launch.local_world_size} is above the world size {launch.world_size}"
        raise LaunchError(f"{launch.kind}: {sizes}")
    if launch.local_rank > launch.rank:
        raise LaunchError(f"{launch.kind}: local rank {launch.local_rank} is above the rank {launch.rank}")
    return launch


# -------------------------------------------------------------------------------------------------- addresses


def is_loopback(address: str) -> bool:
    """Whether this address, or the name localhost, never leaves the machine."""
    if address.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return False


def endpoint(address: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts of a SLURM node list, in order: `n[01-03,7],gpu5` is n01, n02, n03, n7, gpu5.

    Lazy: the first host of a list of any length is cheap. Raises LaunchError.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\])+(?:,(?:[^\[\],\s]|\[[0-9,-]+\])+)*", text):
        raise LaunchError(f"the node list {text!r} cannot be read; legal: n[01-03,7],gpu5")
    for item in re.split(r",(?![^\[]*\])", text):
        yield from _expand(item, text)


def _expand(item: str, text: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for span in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(
                f"the node list {text!r} cannot be read: {span!r} is no number and no rising range"
            )
        low, high = match[1], match[2] or match[1]
        for number in range(int(low), int(high) + 1):
            for end in _expand(tail, text):
                yield f"{head}{number:0{len(low)}d}{end}"


def _master(
    environ: Mapping[str, str],
    world_size: int,
    hint: str,
    *,
    prefix: str = "",
    default_port: int | None = None,
) -> tuple[str, int]:
    """Address and port of rank 0; a world of one needs neither."""
    address, port = f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"
    if world_size == 1:
        return "127.0.0.1", 0
    if address not in environ:
        raise LaunchError(f"{address} is not set, and a world of {world_size} needs rank 0's address; {hint}")
    if port not in environ and default_port is None:
        raise LaunchError(f"{port} is not set, and a world of {world_size} needs rank 0's port; {hint}")
    return _host(environ, address), _whole(environ, port, 1, 65535, default=default_port)


def _host(environ: Mapping[str, str], name: str) -> str:
    """A host name or address without brackets."""
    value = environ[name].strip()
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    bare_ipv6 = value.count(":") > 1
    if not value or re.search(r"[\s/\[\]]", value) or (":" in value and not bare_ipv6):
        raise LaunchError(
            f"{name}={environ[name]!r} is not a host; legal: a name or an address without a port"
        )
    return value


def _derived_port(number: int | None) -> int:
    """A port that all ranks of a job derive from its id. Neighbouring jobs on the node derive others."""
    return DEFAULT_PORT if number is None else DERIVED_PORT_FIRST + number % DERIVED_PORT_COUNT


def _first_of(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of these names that is set."""
    return next((name for name in names if name in environ), None)


def _whole(
    environ: Mapping[str, str], name: str, low: int, high: int | None = None, *, default: int | None = None
) -> int:
    """The whole number in this variable. Without a default, it must be set."""
    if name not in environ:
        if default is None:
            raise LaunchError(f"{name} is not set, though the launcher's other variables are")
        return default
    text, bound = environ[name].strip(), 10**18 if high is None else high
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not low <= int(text) <= bound:
        legal = f"at least {low}" if high is None else f"{low} to {high}"
        raise LaunchError(f"{name}={environ[name]!r} is not legal; legal: a whole number, {legal}")
    return int(text)
