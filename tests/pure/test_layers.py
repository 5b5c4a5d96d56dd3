"""The shape of the house, read from the source: who may import whom, and who may touch the outside world.

Imports go down only. A file is found in LEVELS by its longest matching prefix; it may import files of a lower
level, files of its own room (folder), and the neighbours that NEIGHBOURS names. Every rule is one function
from a source file to complaints, and PLANTED shows for each what it catches and what it lets through.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lowest first. "kernels" and the pure files are both at the bottom, and neither imports the other.
PURE = {
    *("config", "config_rules", "config_source", "legacy_keys", "problems", "settings"),
    *("layout", "manifest", "plan", "shard", "simulate", "slices"),
    *("memory.pack", "memory.placement", "memory.records", "memory.timeline", "multi.sharp", "multi.spill"),
    *(
        "parallel.roles",
        "pipeline.footprint",
        "pipeline.partition",
        "pipeline.schedule",
        "zero.budget",
        "zero.bound",
        "zero.interleave",
        "zero.stages",
    ),
}
LEVELS: tuple[set[str], ...] = (
    {"exchange", "kernels", "memory.lane", "memory.rules", "watch", *PURE},
    {
        "comm",
        "host_wire",
        "keep",
        "memory.arena",
        "memory.disk",
        "memory.forms",
        "memory.host",
        "memory.mover",
        "memory.store",
        "memory.tracer",
        "mesh",
        "models",
        "observe",
        "precision",
        "rng",
    },
    {
        "auxiliary",
        "batch",
        "batchwide",
        "checkpoint",
        "checkpoint_files",
        "conjugate",
        "context",
        "data",
        "deferral",
        "memory.chunk",
        "memory.weight_chunk",
        "optim",
        "tokens",
    },
    {"agreement", "compiled", "parallel", "pipeline.runtime", "recompute", "zero"},
    {"loss", "micro_batches", "pipeline.units"},
    {"dry_run", "handover", "pipeline.profile", "pipeline.step_plans", "report", "run_plan", "whole"},
    {"planned_step", "updates"},
    {"checkpoint_tools", "compare", "doctor", "engine", "multi.trainer", "planner", "staged_plan"},
    {"build"},
    {"__init__", "launcher"},
    {"cli"},
    {"__main__", "examples"},
)
NEIGHBOURS = {
    ("comm", "host_wire"): "one of the two ways by which a communicator reaches its peers",
    ("mesh", "host_wire"): "each group is given the way that its ranks have",
    ("memory.disk", "memory.host"): "direct access wants whole pages, as locking them does",
    ("memory.store", "memory.host"): "what rests on the host is locked beside a device",
    ("mesh", "comm"): "a mesh is a set of communicators, one per group",
    ("tokens", "data"): "windows and batches of the ids that it reads",
    ("compare", "planner"): "a comparison is a plan for each mode",
    ("planner", "staged_plan"): "a plan of a run with a pipeline",
    ("checkpoint", "checkpoint_files"): "what a directory holds, and how ranks come to agree on one",
    ("context", "data"): "a context knows which part of a batch its rank loads",
}
OF_THE_ROOT = {"colossal_lite.__version__", "colossal_lite.stands_aside"}
"""What every file may import from the package's root: it hides no other file."""

ONLY = {"models": {"kernels"}}
"""Rooms that may import less than their level allows."""

EMPTY_PACKAGES = {"memory", "multi", "pipeline"}
"""Folders whose files are on several levels: their __init__ holds nothing, so it is on no level."""

COLLECTIVES = {
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
    ),
    *(
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
    ),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
}
DISTRIBUTED = {"comm", "mesh", "launcher"}
ENVIRONMENT = {"launcher.env"}
DEVICE_COPIES = {
    "memory.mover": "the one place",
    "kernels.optimizer": "one scalar: torch's fused optimizers want the gradient scale beside the parameter",
}


@dataclass(frozen=True)
class Source:
    """One parsed file. `name` is its import name less `colossal_lite.`; a package is `parallel.__init__`."""

    name: str
    tree: ast.Module
    known: frozenset[str] = frozenset()
    """The names of all files, to tell a module from a name inside one."""

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of what it imports when it runs, absolute; of `from a import b`, a.b and a."""
        skipped = {id(n) for body in type_checking_blocks(self.tree) for s in body for n in ast.walk(s)}
        for node in ast.walk(self.tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = ["colossal_lite", *self.name.split(".")][: -node.level] if node.level else []
                base = ".".join([*package, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            elif isinstance(node, ast.Call) and called(node) in ("importlib.import_module", "__import__"):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield node.lineno, str(node.args[0].value)

    def edges(self) -> Iterator[tuple[int, str]]:
        """(line, file) for each file of this project that it imports; `__init__` is the package's root."""
        for line, name in self.imports():
            if name.split(".")[0] == "colossal_lite" and name not in OF_THE_ROOT:
                yield line, self._file(name.split(".")[1:])

    def _file(self, parts: list[str]) -> str:
        while parts:
            dotted = ".".join(parts)
            if dotted in self.known:
                return dotted
            if f"{dotted}.__init__" in self.known:
                return f"{dotted}.__init__"
            parts = parts[:-1]
        return "__init__"


def type_checking_blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield node.body


def called(node: ast.Call) -> str:
    return ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""


def source(name: str, text: str, known: frozenset[str] = frozenset()) -> Source:
    return Source(name, ast.parse(text), known | {name})


def read_house(root: Path) -> dict[str, Source]:
    """Every product file and example, by name."""
    paths = {}
    for top, prefix in (("colossal_lite", ()), ("kernels", ("kernels",)), ("launcher", ("launcher",))):
        for path in sorted((root / top).rglob("*.py")):
            paths[".".join((*prefix, *path.relative_to(root / top).with_suffix("").parts))] = path
    for path in sorted((root / "examples").rglob("*.py")):
        paths[".".join(path.relative_to(root).with_suffix("").parts)] = path
    known = frozenset(paths)
    return {name: Source(name, ast.parse(path.read_text(), str(path)), known) for name, path in paths.items()}


def level(name: str) -> int | None:
    """Index in LEVELS by the longest prefix; None for a package that holds nothing."""
    parts = name.split(".")
    if parts[-1] == "__init__" and ".".join(parts[:-1]) in EMPTY_PACKAGES:
        return None
    for length in range(len(parts), 0, -1):
        for index, names in enumerate(LEVELS):
            if ".".join(parts[:length]) in names:
                return index
    raise KeyError(f"{name} is on no level: give it one in LEVELS")


def room(name: str) -> str:
    """Files of one room may import each other: the pure files, a folder without those, or a file alone."""
    if name in PURE:
        return "pure"
    return name.split(".")[0]


# ----------------------------------------------------------------------------------------------------
# Rules: a source file to (line, complaint)

Complaints = Iterator[tuple[int, str]]


def imports_go_down(file: Source) -> Complaints:
    own = level(file.name)
    for line, target in file.edges():
        other = level(target)
        if target == file.name or other is None or own is None:
            continue
        if room(file.name) in ONLY and room(target) not in ONLY[room(file.name)] | {room(file.name)}:
            yield line, f"may import {', '.join(ONLY[room(file.name)])} only, not {target}"
        elif target == "__init__" and own < len(LEVELS) - 1:
            yield line, "imports the root of the package, which hides what it needs: import the file itself"
        elif other > own:
            yield line, f"imports {target}, which is above it"
        elif other == own and room(file.name) != room(target) and (file.name, target) not in NEIGHBOURS:
            yield line, f"imports {target}, which is beside it: the engine passes a callable instead"


def mapped_folders_have_one_name(file: Source) -> Complaints:
    for line, name in file.imports():
        if name.split(".")[0] in ("kernels", "launcher", "tests"):
            yield (
                line,
                f"imports {name}: its name is colossal_lite.{name}, and tests are no part of the product",
            )


def empty_packages_hold_nothing(file: Source) -> Complaints:
    if file.name.removesuffix(".__init__") in EMPTY_PACKAGES:
        for node in file.tree.body:
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                yield (
                    node.lineno,
                    "this folder has files on several levels: nothing may run when it is imported",
                )


def collectives_only_in_comm(file: Source) -> Complaints:
    """Few files may make groups, and of these one may use them."""
    for node in ast.walk(file.tree) if file.name != "comm" else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist" and node.attr in COLLECTIVES:
            yield node.lineno, f"dist.{node.attr}: ask comm.py"
    if file.name.split(".")[0] in DISTRIBUTED or file.name.startswith("examples.benchmarks."):
        return  # a benchmark runs torch's own trainers beside ours
    for line, name in file.imports():
        if f"{name}.".startswith("torch.distributed."):
            yield line, f"imports {name}: ask comm.py"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed: ask comm.py"


def environment_only_in_env(file: Source) -> Complaints:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if file.name in ENVIRONMENT:
        return
    for line, name in file.imports():
        if name in {f"os.{n}" for n in names}:
            yield line, f"imports {name}: launcher/env.py reads the environment"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield node.lineno, f"os.{node.attr}: launcher/env.py reads the environment"


def copies_between_devices_only_in_mover(file: Source) -> Complaints:
    """What moves a tensor to another device: .cuda(), .cpu(), .pin_memory(), .to(a device), non_blocking=."""
    if file.name in DEVICE_COPIES or file.name.startswith("examples."):
        return
    for node in ast.walk(file.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        first = ast.unparse(node.args[0]) if node.args else ""
        is_device = first.startswith(("'", *"0123456789")) or "device" in first
        to_device = is_device and first != "'meta'"  # meta holds no bytes
        moves = (
            node.func.attr in ("cuda", "cpu", "pin_memory")
            or (node.func.attr == "to" and (to_device or "device" in keywords))
            or (node.func.attr in ("to", "copy_") and "non_blocking" in keywords)
        )
        if moves:
            yield node.lineno, f"{ast.unparse(node)} copies between devices: ask memory/mover.py"


def pure_files_know_no_tensor_and_no_device(file: Source) -> Complaints:
    if file.name not in PURE:
        return
    for line, name in file.imports():
        if name.split(".")[0] in ("torch", "triton", "multiprocessing", "socket", "subprocess", "threading"):
            yield line, f"imports {name}: a pure file computes with ints and plain values"


def kernels_never_communicate(file: Source) -> Complaints:
    if room(file.name) == "kernels":
        for line, name in file.imports():
            own = name.startswith("colossal_lite.kernels") or name in OF_THE_ROOT
            if name.startswith("colossal_lite.") and not own:
                yield line, f"imports {name}: kernels stand alone"


def nothing_is_pickled(file: Source) -> Complaints:
    modules = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    objects = {
        *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
        *("scatter_object_list", "send_object_list"),
    }
    for line, name in file.imports():
        if name.split(".")[0] in modules or name.split(".")[-1] in objects:
            yield line, f"imports {name}: pickle runs code that it reads"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute):
            if node.attr in objects or ast.unparse(node) in ("torch.load", "torch.save"):
                yield node.lineno, f"{ast.unparse(node)}: pickle runs code that it reads"


def no_global_state(file: Source) -> Complaints:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: pass it, or hold it in an object"


def errors_are_not_swallowed(file: Source) -> Complaints:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except: name what is expected"
            elif ast.unparse(node.type) in ("Exception", "BaseException") and isinstance(
                node.body[0], ast.Pass
            ):
                yield node.lineno, "every error is swallowed: name what is expected"


RULES: tuple[Callable[[Source], Complaints], ...] = (
    imports_go_down,
    mapped_folders_have_one_name,
    empty_packages_hold_nothing,
    collectives_only_in_comm,
    environment_only_in_env,
    copies_between_devices_only_in_mover,
    pure_files_know_no_tensor_and_no_device,
    kernels_never_communicate,
    nothing_is_pickled,
    no_global_state,
    errors_are_not_swallowed,
)


def cycle(files: dict[str, Source]) -> list[str]:
    """Files that import each other, as a path; empty if none. Importing a.b runs a/__init__ first."""
    graph: dict[str, set[str]] = {}
    for file in files.values():
        targets = {target for _, target in file.edges()}
        packages = {
            ".".join([*t.split(".")[:i], "__init__"]) for t in targets for i in range(t.count(".") + 1)
        }
        own = {".".join([*file.name.split(".")[:i], "__init__"]) for i in range(file.name.count(".") + 1)}
        graph[file.name] = ((packages & set(files)) - own | targets) - {file.name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


# ----------------------------------------------------------------------------------------------------
# The house as it is


@functools.cache
def house() -> dict[str, Source]:
    return read_house(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[[Source], Complaints]) -> None:
    complaints = [f"{file.name}:{line}: {text}" for file in house().values() for line, text in rule(file)]
    assert not complaints, "\n".join(complaints)


def test_no_file_imports_itself_by_a_detour() -> None:
    assert not cycle(house()), " <- ".join(cycle(house()))


def test_every_file_is_on_one_level_and_every_exception_is_needed() -> None:
    for name in house():
        level(name)
    names = [name for names in LEVELS for name in names]
    assert len(names) == len(set(names))
    edges = {(file.name, target) for file in house().values() for _, target in file.edges()}
    for pair in NEIGHBOURS:
        assert not set(pair) <= set(house()) or pair in edges, f"{pair} is allowed and not used"


def test_pure_files_load_no_torch() -> None:
    """What the syntax shows is also true when they run: `config show` and `plan` start without torch."""
    names = [f"colossal_lite.{name}" for name in sorted(PURE) if name in house()]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr


def test_importing_the_package_loads_neither_torch_nor_triton_nor_transformers() -> None:
    heavy = "{'torch', 'triton', 'transformers', 'pydantic'}"
    code = f"import sys, colossal_lite; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ----------------------------------------------------------------------------------------------------
# The rules themselves

FILES = frozenset(
    {
        *(
            "__init__",
            "comm",
            "config",
            "data",
            "engine",
            "kernels.__init__",
            "kernels.norm",
            "launcher.__init__",
        ),
        *("mesh", "models.gpt", "parallel.__init__", "parallel.roles", "rng", "zero.hooks"),
    }
)

# rule, file, its text, whether the rule complains
PLANTED: list[tuple[Callable[[Source], Complaints], str, str, bool]] = [
    (imports_go_down, "comm", "from colossal_lite.engine import Engine", True),
    (imports_go_down, "comm", "from .engine import Engine", True),
    (imports_go_down, "comm", "def f():\n    import colossal_lite.engine", True),
    (imports_go_down, "comm", "import importlib\nimportlib.import_module('colossal_lite.engine')", True),
    (imports_go_down, "parallel.roles", "from ..comm import Ledger", True),
    (
        imports_go_down,
        "comm",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import colossal_lite.engine",
        False,
    ),
    (imports_go_down, "engine", "from colossal_lite import comm\nfrom .parallel import roles", False),
    (imports_go_down, "engine", "from colossal_lite import launch", True),
    (imports_go_down, "engine", "from colossal_lite import __version__", False),
    (imports_go_down, "rng", "from colossal_lite.mesh import Mesh", True),
    (imports_go_down, "mesh", "from colossal_lite.comm import AxisComm", False),
    (imports_go_down, "zero.hooks", "import colossal_lite.parallel", True),
    (imports_go_down, "models.gpt", "from colossal_lite.kernels import TORCH", False),
    (imports_go_down, "models.gpt", "from colossal_lite.config import Config", True),
    (imports_go_down, "kernels.norm", "from colossal_lite.config import Config", True),
    (imports_go_down, "config", "from colossal_lite.kernels import TORCH", True),
    (imports_go_down, "config", "from colossal_lite.parallel.roles import ModelFacts", False),
    (imports_go_down, "examples.gpt.train", "import colossal_lite as cl", False),
    (mapped_folders_have_one_name, "engine", "from kernels import TORCH", True),
    (mapped_folders_have_one_name, "engine", "from colossal_lite.kernels import TORCH", False),
    (empty_packages_hold_nothing, "memory.__init__", '"""Memory."""\nfrom .pack import pack', True),
    (empty_packages_hold_nothing, "memory.__init__", '"""Memory."""', False),
    (collectives_only_in_comm, "engine", "import torch.distributed as dist", True),
    (collectives_only_in_comm, "engine", "from torch import distributed", True),
    (collectives_only_in_comm, "engine", "from torch.distributed import all_reduce", True),
    (collectives_only_in_comm, "engine", "import torch\ntorch.distributed.barrier()", True),
    (collectives_only_in_comm, "launcher.__init__", "import torch.distributed as dist", False),
    (collectives_only_in_comm, "mesh", "import torch.distributed as dist\ndist.all_gather(a, b)", True),
    (collectives_only_in_comm, "mesh", "import torch.distributed as dist\ndist.new_group([0])", False),
    (collectives_only_in_comm, "engine", "from torch.distributions import Normal", False),
    (environment_only_in_env, "engine", "import os\nos.environ['RANK']", True),
    (environment_only_in_env, "engine", "import os\nos.getenv('RANK')", True),
    (environment_only_in_env, "examples.gpt.train", "from os import environ", True),
    (environment_only_in_env, "launcher.env", "import os\nos.environ['RANK']", False),
    (environment_only_in_env, "engine", "import os\nos.getpid()", False),
    (copies_between_devices_only_in_mover, "engine", "x.cuda()", True),
    (copies_between_devices_only_in_mover, "engine", "x.cpu()", True),
    (copies_between_devices_only_in_mover, "engine", "x.to('cuda')", True),
    (copies_between_devices_only_in_mover, "engine", "x.to(self.device, torch.float32)", True),
    (copies_between_devices_only_in_mover, "engine", "x.to(device=d)", True),
    (copies_between_devices_only_in_mover, "engine", "x.copy_(y, non_blocking=True)", True),
    (
        copies_between_devices_only_in_mover,
        "engine",
        "x.to(torch.float32); x.to(y.dtype); x.to('meta'); x.copy_(y)",
        False,
    ),
    (copies_between_devices_only_in_mover, "memory.mover", "x.to(device)", False),
    (pure_files_know_no_tensor_and_no_device, "config", "import torch", True),
    (pure_files_know_no_tensor_and_no_device, "parallel.roles", "from torch import nn", True),
    (pure_files_know_no_tensor_and_no_device, "engine", "import torch", False),
    (kernels_never_communicate, "kernels.norm", "from colossal_lite.comm import AxisComm", True),
    (kernels_never_communicate, "kernels.norm", "from colossal_lite.kernels import philox", False),
    (kernels_never_communicate, "kernels.__init__", "from colossal_lite import stands_aside", False),
    (nothing_is_pickled, "engine", "import pickle", True),
    (nothing_is_pickled, "engine", "import torch\ntorch.load('x')", True),
    (nothing_is_pickled, "comm", "dist.broadcast_object_list([1])", True),
    (nothing_is_pickled, "comm", "from torch.distributed import all_gather_object", True),
    (nothing_is_pickled, "engine", "engine.load('x'); engine.save('x')", False),
    (no_global_state, "engine", "def f():\n    global x\n    x = 1", True),
    (no_global_state, "engine", "def f():\n    x = 1\n    def g():\n        nonlocal x", False),
    (errors_are_not_swallowed, "engine", "try:\n    f()\nexcept:\n    raise", True),
    (errors_are_not_swallowed, "engine", "try:\n    f()\nexcept Exception:\n    pass", True),
    (errors_are_not_swallowed, "engine", "try:\n    f()\nexcept OSError:\n    pass", False),
]


@pytest.mark.parametrize("rule, name, text, complains", PLANTED)
def test_a_rule_catches_what_it_is_for_and_no_more(
    rule: Callable[[Source], Complaints], name: str, text: str, complains: bool
) -> None:
    assert bool(list(rule(source(name, text, FILES)))) == complains


def test_every_rule_is_shown_red_and_green() -> None:
    for rule in RULES:
        assert {complains for r, _, _, complains in PLANTED if r is rule} == {True, False}


def test_a_file_without_a_level_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere is on no level"):
        level("nowhere")


@pytest.mark.parametrize(
    "texts, found",
    [
        ({"comm": "import colossal_lite.mesh", "mesh": "from .comm import x"}, {"comm", "mesh"}),
        # config imports a file of parallel/, so parallel/__init__ runs first, and that imports config.
        (
            {
                "config": "from colossal_lite.parallel.roles import x",
                "parallel.__init__": "from colossal_lite.config import y",
                "parallel.roles": "",
            },
            {"config", "parallel.__init__"},
        ),
        ({"parallel.__init__": "from . import roles", "parallel.roles": "x = 1"}, set()),
        ({"comm": "", "mesh": "from .comm import x", "engine": "from . import comm, mesh"}, set()),
    ],
)
def test_cycles_are_found_through_packages_too(texts: dict[str, str], found: set[str]) -> None:
    known = frozenset(texts)
    assert set(cycle({name: source(name, text, known) for name, text in texts.items()})) == found
