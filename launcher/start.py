"""Launches: creates a `Context` on every rank from a configuration and the environment.

Note: the order of a launch, and ownership.
Everything that can be refused from numbers alone is refused first: then no store is opened and no group created.  Next
the ranks meet in the store.  They count themselves, so that a missing rank is named.  They compare configurations,
versions and source (launcher/versions.py); if two ranks differ, all refuse.  Groups are created last.

- *Store.*  Torchrun's agent serves it, or rank 0 does, on the loopback interface if the world is one node.  The server
  lives as long as the process.  Each launch has its own prefix in it.
- *Default group.*  The first context creates it and the last destroys it.  Each rank counts its contexts in the group's
  own store.  A group that other code created is used and not destroyed.
- *Sub-groups* belong to the context's mesh.  A world of one creates no group unless a store is given.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from colossal_lite import kernels
from colossal_lite.config.call_forms import with_form
from colossal_lite.config.config import Config, ConfigError, Problem
from colossal_lite.config.config_dict import ConfigDict
from colossal_lite.distributed import host_handshake
from colossal_lite.distributed.communicator import CommError, everyones, group_timeout, leave_group
from colossal_lite.distributed.key_value_store import LimitedStore, answered
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.distributed.watchdog import ANSWER_S, Watchdog, say
from colossal_lite.engine.context import Context, FailureBoard
from colossal_lite.engine.stopping import StopSignals
from colossal_lite.launcher import env
from colossal_lite.launcher.doctor import DoctorRow
from colossal_lite.launcher.env import Launch, LaunchError
from colossal_lite.launcher.script_end import ScriptEnd
from colossal_lite.launcher.versions import versions

if TYPE_CHECKING:
    from colossal_lite.config.parallel_schema import ModelFacts

__all__ = ["LaunchError", "findings", "launch"]

# How long rank 0 keeps serving its store for ranks that have not closed yet.
LINGER_S = 3.0
LOOPBACK = "127.0.0.1"
# Extra time for torch's calls beyond their own timeout.
MARGIN_S = 0.3


@with_form(
    "cl.launch",
    "cl.launch(config), with a dict or the name of a file; cl.launch({}) has the defaults. By name too: "
    "overrides, store, rank, world_size",
)
def launch(
    config: ConfigDict | str | Path | Config,
    model_facts: ModelFacts | None = None,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
) -> Context:
    """Join this process to its world. Collective: every rank calls it, with the same configuration.

    `config` is a dict, a .py, .json or .toml file, or a Config. `cl.ConfigDict` types the keys of a dict; `Config.load`
    takes any mapping. `overrides` are options that replace its values (`--parallel.tensor.size 2`).  Place and world
    come from the environment (torchrun, SLURM, OpenMPI, none).  Or `rank` and `world_size` give them, with a `store`
    that all those ranks share.

    Raises ConfigError for a configuration that cannot run in this world (with `model_facts`, with this model).  Raises
    LaunchError for an environment that contradicts itself, and CommError if ranks do not arrive within `timeout_s`.
    """
    if store is None:
        ScriptEnd.installed()  # before the environment is read, so that its faults end a script as others do
    return _launch(config, model_facts, store, _place(store, rank, world_size), overrides)


def launch_gang(
    config: ConfigDict | Config, *, rank: int, world_size: int, port: int = 0, name: str = ""
) -> Context:
    """Join this process, which sees one device, to a gang of `train_many`; a gang of one needs no store.

    `port`: of `serve_gangs`.  `name`: of the gang, another each time that it meets."""
    store, place = None, Launch("gang", rank, world_size, local_world_size=world_size)
    if world_size > 1:
        timeout = timedelta(seconds=Config.load(config).timeout_s)
        server = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(name, server)
    return _launch(config, None, store, place, ())


def serve_gangs() -> tuple[dist.Store, int]:
    """A store in which the gangs of this host meet, and its port. It serves as long as it is held."""
    listener = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    fd = listener.detach()
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def _launch(
    config: ConfigDict | str | Path | Config, model_facts: ModelFacts | None, store: dist.Store | None, place: Launch,
    overrides: Sequence[str],
) -> Context:  # fmt: skip
    """Join this process to its world, at this place of it."""
    end = ScriptEnd.installed() if store is None else None
    if end is not None:
        end.place = place
    loaded = Config.load(config, overrides)
    loaded.check_built()
    checked = loaded.check_world(place.world_size, model_facts)
    if model_facts is not None:
        checked.check_model(model_facts)
    device = _device(checked.backend, place)
    _check_kernels(checked.kernels, device)
    env.workspace_of_cublas(deterministic=checked.deterministic and device.type == "cuda")
    if place.rank == 0:
        for line in filter(None, (place.note, *checked.notices, *checked.warnings())):
            warnings.warn(line, stacklevel=2)
    owned = ExitStack()
    try:
        context = _join(place, checked, device, store, owned, end)
    except BaseException:
        owned.close()
        raise
    if end is not None:
        sys.excepthook = (
            end  # replaces the hook of torch's groups, which would hold back the message of an exit
        )
    return context


def findings() -> Iterator[DoctorRow]:
    """The rows of `doctor` about launchers and backends. Starts and ends a world of one on gloo."""
    try:
        place = env.detect(env.environment())
        yield DoctorRow("launch", "launcher", place.describe(), "note" if place.note else "ok", place.note)
    except LaunchError as error:
        yield DoctorRow("launch", "launcher", "refused", "fault", str(error))
    try:
        with launch({"backend": "gloo"}, store=dist.HashStore(), rank=0, world_size=1):
            everyones(b"works", 1)
        yield DoctorRow("launch", "gloo", "works")
    except RuntimeError as error:
        yield DoctorRow("launch", "gloo", "fails", "fault", str(error).partition("\n")[0])
    if (why := host_handshake.why_not()) is None:
        yield DoctorRow("launch", "shared memory", "works between ranks of one host")
    else:
        yield DoctorRow("launch", "shared memory", "not used", "note", why)
    if torch.cuda.is_available() and dist.is_nccl_available():
        yield DoctorRow("launch", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        why = "no CUDA device" if dist.is_nccl_available() else "torch is built without it"
        yield DoctorRow("launch", "nccl", "not used", "note" if torch.cuda.is_available() else "ok", why)


# ------------------------------------------------------------------------------------------ who, and on what


def _place(store: dist.Store | None, rank: int | None, world_size: int | None) -> Launch:
    if rank is None and world_size is None:
        return env.detect(env.environment())
    if rank is None or world_size is None or not 0 <= rank < world_size:
        legal = "both or neither, and 0 <= rank < world_size"
        raise LaunchError(f"rank={rank}, world_size={world_size}; legal: {legal}")
    if store is None and world_size > 1:
        raise LaunchError(
            f"rank={rank}, world_size={world_size} without a store; legal: a torch.distributed store"
        )
    # The nodes of these ranks are unknown: choose devices as on one node, and sockets as on several.
    return Launch("none", rank, world_size, local_rank=rank, local_world_size=1 if world_size == 1 else 0)


def _device(backend: str, place: Launch) -> torch.device:
    """CUDA where there is any, one device a rank, unless the backend is gloo."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "gloo" or (backend == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ConfigError([Problem("backend", backend, "no CUDA device is visible", "'auto', 'gloo'")])
    # SLURM may show each task its own device only.
    index = 0 if place.kind == "slurm" and count == 1 else place.local_rank
    if index >= count:
        seen = f"{count} CUDA device{'s' if count > 1 else ''} visible, none for local rank {index}"
        raise ConfigError([Problem("backend", backend, seen, f"'gloo', or at most {count} ranks a node")])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_kernels(choice: str, device: torch.device) -> None:
    """Refuse kernels that were requested by name and cannot run here: there is no silent fallback."""
    why = kernels.why_not_triton(device.type) if choice == "triton" else None
    if why is not None:
        raise ConfigError([Problem("kernels", choice, why, kernels.LEGAL_WITHOUT)])


# ---------------------------------------------------------------------------------------------- how they meet


def _join(
    place: Launch, config: Config, device: torch.device, given: dist.Store | None, owned: ExitStack,
    end: ScriptEnd | None,
) -> Context:  # fmt: skip
    """Meet the other ranks and create the groups. `owned` collects resources for `close`; `end` learns of errors."""
    timeout = timedelta(seconds=config.timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    group_limit = group_timeout(config.timeout_s, backend)
    alone = place.world_size == 1 and given is None
    with env.gloo_on_loopback(place.one_node and not alone):
        if alone:
            shared: dist.Store = dist.HashStore()
        else:
            shared = _own_keys(given or _launchers_store(place, timeout), place)
        store = LimitedStore(shared, config.timeout_s)
        watch = _watch(store, place, given)
        if given is None and not alone:
            owned.callback(_leave_together, store, place, watch)
        owned.callback(watch.close)
        if not alone:
            _roll_call(store, place, config, timeout, watch)
            if place.world_size > 1 or not dist.is_initialized():
                with _meeting(place, watch):
                    limit_s = config.timeout_s + MARGIN_S
                    answered(
                        lambda: _enter_default_group(shared, place, backend, device, group_limit), limit_s
                    )
                owned.callback(_leave_default_group, place, watch)
        everyone = range(place.world_size)
        board = FailureBoard(
            store.within(ANSWER_S), place.rank, lambda: watch.ended(everyone), watch.standing
        )
        with _meeting(place, watch):
            mesh = Mesh.create(
                config.layout(),
                place.rank,
                timeout_s=config.timeout_s,
                backend=backend,
                share_memory=device.type == "cpu" and config.backend == "auto",
                explain=board.first_failure,
                watch=watch,
            )
    owned.callback(mesh.destroy)
    # Last: until here a rank may wait long for others, and SIGTERM must end it.
    signals = StopSignals(answers=place.rank == 0)
    owned.callback(signals.restore)
    signals.install()
    leaving = end.leaving if end is not None else lambda error, first_failure: None
    return Context(
        config, mesh, device, place.local_rank, store, place.describe(), board, signals, owned, leaving
    )


def _watch(store: LimitedStore, place: Launch, given: dist.Store | None) -> Watchdog:
    """The watchdog of this rank. It may end the process if a launcher started it."""
    return Watchdog(
        store,
        place.rank,
        place.world_size,
        server=None if place.agent_store or given is not None else 0,
        parent=os.getppid() if place.has_agent and given is None else 0,
        ends_process=given is None,
    )


@contextmanager
def _meeting(place: Launch, watch: Watchdog) -> Iterator[None]:
    """Context of the creation of groups. An error of torch becomes a CommError that names the missing ranks."""
    try:
        yield
    except (CommError, ValueError):
        raise
    except RuntimeError as error:
        text = f"rank {place.rank}: the ranks do not meet in a group: {str(error).partition(chr(10))[0]}"
        say(text)
        text = f"{text}\n{watch.standing(range(place.world_size))}"
        say(text)
        raise CommError(text) from error


def _launchers_store(place: Launch, timeout: timedelta) -> dist.Store:
    """A connection to the store of this process's launcher; rank 0 serves it where no agent does."""
    address, port = place.store_address, place.master_port
    if place.rank == 0 and not place.agent_store:
        _serve(address, port)
    try:
        return dist.TCPStore(address, port, place.world_size, is_master=False, timeout=timeout)
    except RuntimeError as error:
        where, reason = env.endpoint(address, port), str(error).partition("\n")[0]
        raise CommError(f"{place.describe()}: no store at {where} within {timeout}: {reason}") from error


@functools.cache
def _serve(address: str, port: int) -> dist.Store:
    """The store's server, kept for the process: one rank may begin its next launch before another ends this one."""
    try:
        if not env.is_loopback(address):
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        # A socket that torch makes listens on every interface, and the store has no authentication.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        fd = listener.detach()
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    except (OSError, RuntimeError) as error:
        where, reason = env.endpoint(address, port), str(error).partition("\n")[0]
        raise LaunchError(
            f"rank 0 cannot serve at {where}: {reason}; set MASTER_PORT to a free port"
        ) from error


def file_store(path: str, world_size: int) -> dist.Store:
    """A store for the ranks of one world on this machine, in a file that does not exist yet."""
    return dist.FileStore(path, world_size)


def _own_keys(store: dist.Store, place: Launch) -> dist.Store:
    """A prefix for this launch. Ranks agree on it because each has launched as often as the others."""
    ours = dist.PrefixStore(f"colossal_lite/{place.restart_count}", store)
    return dist.PrefixStore(str(ours.add(f"launches/{place.rank}", 1)), ours)


def _roll_call(
    store: LimitedStore, place: Launch, config: Config, timeout: timedelta, watch: Watchdog
) -> None:
    """Return when all ranks are here with one configuration, one set of versions, and the same source of this
    package. Raises CommError, ConfigError."""
    settings = json.loads(json.dumps(config.values())) | versions()
    store.set(f"here/{place.rank}", "")
    if place.rank == 0:
        store.set("config", json.dumps(settings))
    _await("config", "here", store, place, timeout, watch)
    first = json.loads(store.get("config"))
    differ = [path for path in {**first, **settings} if first.get(path) != settings.get(path)]
    if differ:
        rows = ", ".join(f"{path}={settings.get(path)!r} against {first.get(path)!r}" for path in differ)
        store.compare_set("differ", "", f"rank {place.rank} has {rows} on rank 0")
    store.set(f"arrived/{place.rank}", "")
    if store.add("arrived", 1) == place.world_size:
        store.set("complete", "")
    _await("complete", "arrived", store, place, timeout, watch)
    if store.check(["differ"]):
        text = store.get("differ").decode()
        raise ConfigError([Problem("config", text, "differs between ranks", "the same on every rank")])


def _await(
    key: str, sign: str, store: LimitedStore, place: Launch, timeout: timedelta, watch: Watchdog
) -> None:
    """Wait until a rank has set this key. Raises CommError with the ranks that have given no `sign`."""
    try:
        store.within(timeout.total_seconds()).wait([key], timeout)
    except RuntimeError as error:
        within = f"timeout_s is {timeout.total_seconds():g}"
        say(f"rank {place.rank}: ranks have not arrived; {within}")
        text = f"rank {place.rank}: {_late(sign, store.within(ANSWER_S), place, watch)}; {within}"
        say(text)
        raise CommError(text) from error


def _late(sign: str, store: LimitedStore, place: Launch, watch: Watchdog) -> str:
    """Which ranks have not arrived, as far as the store answers."""
    try:
        missing = [rank for rank in range(place.world_size) if not store.check([f"{sign}/{rank}"])]
        unseen = [rank for rank in missing if not store.check([f"here/{rank}"])]
    except RuntimeError:
        return watch.standing(range(place.world_size))
    ranks = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    if not missing:
        return "a rank stopped on arrival"
    text = f"ranks {ranks} of {place.world_size} have not arrived"
    return text if missing == unseen else f"{text}: {watch.standing(missing)}"


def _enter_default_group(
    store: dist.Store, place: Launch, backend: str, device: torch.device, timeout: timedelta
) -> None:
    """Create torch's default group, or use it. Raises LaunchError if it is another world's."""
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,  # communicators are made now, not in a step
        )
    elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
        here, there = (
            f"rank {place.rank} of {place.world_size}",
            f"rank {dist.get_rank()} of {dist.get_world_size()}",
        )
        raise LaunchError(
            f"this process is {there} already and cannot be {here} as well; close that context first"
        )
    elif _count_contexts(place, 0) == 0:
        _count_contexts(place, 1)  # created by other code: one use that no context releases
    _count_contexts(place, 1)


def _leave_default_group(place: Launch, watch: Watchdog) -> None:
    if dist.is_initialized() and _count_contexts(place, -1) <= 0:
        assert dist.group.WORLD is not None
        leave_group(dist.group.WORLD, aborts=bool(watch.progress.broken))


def _count_contexts(place: Launch, change: int) -> int:
    """Uses of the default group by this process, after the change; 0 if its store has ended or is silent."""
    group = dist.group.WORLD
    assert group is not None
    count = LimitedStore(group.get_group_store(), ANSWER_S)
    try:
        return count.add(f"colossal_lite/contexts/{place.rank}", change)
    except RuntimeError:
        return 0


def _leave_together(store: LimitedStore, place: Launch, watch: Watchdog) -> None:
    """On rank 0, wait while it serves the store: other ranks may still read there why a rank stopped. Ranks that are
    known to have died are not waited for."""
    store, ranks = store.within(ANSWER_S), range(place.world_size)
    try:
        store.set("leaving", "")
        store.set("news", "")
        store.set(f"left/{place.rank}", "")
        end, missing = time.monotonic() + LINGER_S, list(ranks)
        while place.rank == 0 and not place.agent_store and missing and time.monotonic() < end:
            missing = [r for r in missing if not (store.check([f"left/{r}"]) or watch.has_ended(r))]
            time.sleep(0.05 if missing else 0.0)
    except RuntimeError:  # a rank has died or is stopped, or rank 0 was the first to leave
        return
