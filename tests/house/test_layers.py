"""The shape of the house, read from the source: who may import whom, and who may touch the outside world.

ORDER is the one statement of the layers: a room (package) imports only rooms that stand before it, for types too.
`python -m tests.house.test_layers` prints the order with what each room says of itself.  Every rule is one function
from a source file to complaints, and PLANTED shows for each what it catches and what it lets through.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ORDER = (
    *(
        "kernels",
        "sharding",
        "schedule",
        "config",
        "models",
        "numerics",
        "transforms",
        "observe",
        "distributed",
    ),
    *(
        "memory",
        "data",
        "checkpoint",
        "layers",
        "checks",
        "parallel",
        "offload",
        "zero",
        "pipeline",
        "planner",
        "engine",
    ),
    *("many", "search", "launcher"),
)
"""Rooms, lowest first. search (over configurations) is not built yet."""
PURE_ROOMS = {"sharding", "schedule", "config"}
PURE_FILES = {
    *("many.build_timetable", "many.jobs", "many.policies", "many.timetable", "many.timetable_drawing"),
    *("checkpoint.manifest", "memory.disk_layout", "memory.packing", "observe.memory_timeline"),
    *("observe.report", "observe.schedule_report", "observe.svg", "observe.tables"),
    *("offload.pieces", "offload.placement", "pipeline.partition", "zero.state_bytes"),
}
"""Files of other rooms that compute with ints and plain values, and load no torch."""
ONLY: dict[str, set[str]] = {
    "kernels": set(),
    "sharding": set(),
    "schedule": set(),
    "config": {"sharding", "schedule"},
    "models": {"kernels"},
}
"""Rooms that may import less than stands before them."""
WITH_NAMES = {"kernels", "launcher", "models"}
"""Rooms whose names are reached through the room."""
ABOVE_ALL = {"__init__", "__main__", "examples"}
"""What stands above every room: the package's root, its command, and the examples."""
OF_THE_ROOT = {"colossal_lite.__version__", "colossal_lite.stands_aside"}
"""What every file may import from the package's root: it hides no other file."""

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
COMMUNICATOR = "distributed.communicator"
DISTRIBUTED = {COMMUNICATOR, "distributed.mesh", "launcher.script_end", "launcher.start"}
ENVIRONMENT = {"launcher.env"}
DEVICE_COPIES = {
    "memory.link": "what travels in a step",
    "memory.transfers": "what is moved once",
    "kernels.optimizer": "one scalar: torch's fused optimizers want the gradient scale beside the parameter",
}


@dataclass(frozen=True)
class Source:
    """One parsed file. `name` is its import name less `colossal_lite.`; a package is `parallel.__init__`."""

    name: str
    tree: ast.Module
    known: frozenset[str] = frozenset()
    """The names of all files, to tell a module from a name inside one."""

    def imports(self, types: bool = True) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of what it imports, absolute; of `from a import b`, a.b. types: for types alone too."""
        blocks = [] if types else type_checking_blocks(self.tree)
        skipped = {id(n) for body in blocks for s in body for n in ast.walk(s)}
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


def room(name: str) -> str:
    return name.split(".")[0]


def is_pure(name: str) -> bool:
    return room(name) in PURE_ROOMS or name in PURE_FILES


def level(name: str) -> int:
    """Where its room stands in ORDER. Raises KeyError for a room that is not there."""
    if room(name) in ABOVE_ALL:
        return len(ORDER)
    if room(name) not in ORDER:
        raise KeyError(f"{name} is in no room: give {room(name)} its place in ORDER")
    return ORDER.index(room(name))


# ----------------------------------------------------------------------------------------------------
# Rules: a source file to (line, complaint)

Complaints = Iterator[tuple[int, str]]


def imports_go_down(file: Source) -> Complaints:
    for line, target in file.edges():
        legal = ONLY.get(room(file.name), set(ORDER)) | {room(file.name)}
        if level(file.name) < len(ORDER) and target != "__init__" and room(target) not in legal:
            yield line, f"may import {', '.join(ONLY[room(file.name)]) or 'no other room'}, not {target}"
        elif target == "__init__" and level(file.name) < len(ORDER):
            yield line, "imports the root of the package, which hides what it needs: import the file itself"
        elif level(target) > level(file.name):
            yield line, f"imports {target}, which is above it"


def rooms_hold_nothing_themselves(file: Source) -> Complaints:
    """Importing one file of a room loads that file alone."""
    parts = file.name.split(".")
    if parts[-1] != "__init__" or len(parts) == 1 or parts[0] in WITH_NAMES:
        return
    for node in file.tree.body:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node.lineno, "a room's __init__ says what is inside, and runs nothing"


def mapped_folders_have_one_name(file: Source) -> Complaints:
    for line, name in file.imports(types=False):
        if name.split(".")[0] in ("kernels", "launcher", "tests"):
            yield (
                line,
                f"imports {name}: its name is colossal_lite.{name}, and tests are no part of the product",
            )


def collectives_only_in_communicator(file: Source) -> Complaints:
    """Few files may make groups, and of these one may use them."""
    for node in ast.walk(file.tree) if file.name != COMMUNICATOR else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist" and node.attr in COLLECTIVES:
            yield node.lineno, f"dist.{node.attr}: ask distributed/communicator.py"
    if file.name in DISTRIBUTED or file.name.startswith("examples.benchmarks."):
        return  # a benchmark runs torch's own trainers beside ours
    for line, name in file.imports(types=False):
        if f"{name}.".startswith("torch.distributed."):
            yield line, f"imports {name}: ask distributed/communicator.py"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed: ask distributed/communicator.py"


def environment_only_in_env(file: Source) -> Complaints:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if file.name in ENVIRONMENT:
        return
    for line, name in file.imports(types=False):
        if name in {f"os.{n}" for n in names}:
            yield line, f"imports {name}: launcher/env.py reads the environment"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield node.lineno, f"os.{node.attr}: launcher/env.py reads the environment"


def copies_between_devices_only_in_transfers(file: Source) -> Complaints:
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
            yield node.lineno, f"{ast.unparse(node)} copies between devices: ask memory/transfers.py"


def pure_files_know_no_tensor_and_no_device(file: Source) -> Complaints:
    if not is_pure(file.name):
        return
    for line, name in file.imports(types=False):
        if name.split(".")[0] in ("torch", "triton", "multiprocessing", "socket", "subprocess", "threading"):
            yield line, f"imports {name}: a pure file computes with ints and plain values"


def kernels_never_communicate(file: Source) -> Complaints:
    if room(file.name) == "kernels":
        for line, name in file.imports(types=False):
            own = name.startswith("colossal_lite.kernels") or name in OF_THE_ROOT
            if name.startswith("colossal_lite.") and not own:
                yield line, f"imports {name}: kernels stand alone"


def nothing_is_pickled(file: Source) -> Complaints:
    modules = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    objects = {
        *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
        *("scatter_object_list", "send_object_list"),
    }
    for line, name in file.imports(types=False):
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
    rooms_hold_nothing_themselves,
    collectives_only_in_communicator,
    environment_only_in_env,
    copies_between_devices_only_in_transfers,
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


@dataclass(frozen=True)
class Sign:
    """What a room's `__init__` says: one sentence, the rooms that it imports, the file to read first."""

    inside: str
    imports: list[str]
    first: str


def sign_of(name: str) -> Sign:
    text = " ".join((ast.get_docstring(house()[f"{name}.__init__"].tree) or "").split())
    match = re.fullmatch(r"(.+?\.) May import: (.+?)\. Read first: `(\w+)`\.( .*)?", text)
    assert match, (
        f"{name}/__init__.py says {text!r}, not: WHAT IS INSIDE. May import: ROOMS. Read first: `FILE`."
    )
    return Sign(match[1], match[2].split(", "), match[3])


@functools.cache
def house() -> dict[str, Source]:
    return read_house(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[[Source], Complaints]) -> None:
    complaints = [f"{file.name}:{line}: {text}" for file in house().values() for line, text in rule(file)]
    assert not complaints, "\n".join(complaints)


def test_no_file_imports_itself_by_a_detour() -> None:
    assert not cycle(house()), " <- ".join(cycle(house()))


def test_every_file_is_in_a_room_and_the_root_holds_nothing_else() -> None:
    for name in house():
        level(name)
    root = ROOT / "colossal_lite"
    entries = {entry.name for entry in root.iterdir() if entry.name != "__pycache__"}
    rooms = {entry for entry in entries if (root / entry).is_dir()}
    assert entries - rooms == {"__init__.py", "__main__.py", "py.typed"}
    assert rooms <= set(ORDER) and len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize(
    "name", [name for name in ORDER if (ROOT / "colossal_lite" / name).is_dir() or (ROOT / name).is_dir()]
)
def test_a_room_says_what_is_inside_what_it_imports_and_what_to_read_first(name: str) -> None:
    sign = sign_of(name)
    assert re.match(r"[A-Z`].*\.$", sign.inside)
    imported = {
        room(target) for file in house().values() if room(file.name) == name for _, target in file.edges()
    }
    measured = [other for other in ORDER if other in imported - {name}]
    assert sign.imports == (measured or ["nothing of ours"])
    assert f"{name}.{sign.first}" in house()


def test_readme_lists_the_rooms_as_they_say_of_themselves() -> None:
    rows = re.findall(
        r"^\| `(?:colossal_lite/)?(\w+)/` \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    built = [name for name in reversed(ORDER) if f"{name}.__init__" in house()]
    assert rows == [(name, sign_of(name).inside) for name in built]


def test_pure_files_load_no_torch() -> None:
    """What the syntax shows is also true when they run: `config show` and `schedule` start without torch."""
    names = [f"colossal_lite.{name}" for name in sorted(house()) if is_pure(name)]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
        "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert PURE_FILES <= set(house())


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
            "config.config",
            "config.parallel_schema",
            "data.dataloader",
            "distributed.communicator",
        ),
        *("distributed.mesh", "engine.engine", "kernels.__init__", "kernels.norm", "launcher.__init__"),
        *("launcher.start", "models.gpt", "numerics.random", "parallel.__init__", "layers.roles"),
        *("sharding.mesh_layout", "zero.gradient_hooks"),
    }
)

# rule, file, its text, whether the rule complains
PLANTED: list[tuple[Callable[[Source], Complaints], str, str, bool]] = [
    (imports_go_down, "distributed.communicator", "from colossal_lite.engine.engine import Engine", True),
    (imports_go_down, "distributed.communicator", "from ..engine.engine import Engine", True),
    (imports_go_down, "distributed.communicator", "def f():\n    import colossal_lite.engine.engine", True),
    (
        imports_go_down,
        "distributed.communicator",
        "import importlib\nimportlib.import_module('colossal_lite.engine.engine')",
        True,
    ),
    (imports_go_down, "layers.roles", "from ..engine.engine import Engine", True),
    (
        imports_go_down,
        "distributed.communicator",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import colossal_lite.engine.engine",
        True,
    ),
    (
        imports_go_down,
        "engine.engine",
        "from colossal_lite.distributed import communicator\nfrom ..layers import roles",
        False,
    ),
    (imports_go_down, "engine.engine", "from colossal_lite import launch", True),
    (imports_go_down, "engine.engine", "from colossal_lite import __version__", False),
    (imports_go_down, "numerics.random", "from colossal_lite.distributed.mesh import Mesh", True),
    (
        imports_go_down,
        "distributed.mesh",
        "from colossal_lite.distributed.communicator import Communicator",
        False,
    ),
    (imports_go_down, "zero.gradient_hooks", "import colossal_lite.layers.roles", False),
    (imports_go_down, "models.gpt", "from colossal_lite.kernels import TORCH", False),
    (imports_go_down, "models.gpt", "from colossal_lite.config.config import Config", True),
    (imports_go_down, "kernels.norm", "from colossal_lite.config.config import Config", True),
    (imports_go_down, "config.config", "from colossal_lite.kernels import TORCH", True),
    (imports_go_down, "config.config", "from colossal_lite.sharding.mesh_layout import MeshLayout", False),
    (imports_go_down, "examples.gpt.train", "import colossal_lite as cl", False),
    (mapped_folders_have_one_name, "engine.engine", "from kernels import TORCH", True),
    (mapped_folders_have_one_name, "engine.engine", "from colossal_lite.kernels import TORCH", False),
    (rooms_hold_nothing_themselves, "memory.__init__", '"""Memory."""\nfrom .pack import pack', True),
    (rooms_hold_nothing_themselves, "memory.__init__", '"""Memory."""', False),
    (collectives_only_in_communicator, "engine.engine", "import torch.distributed as dist", True),
    (collectives_only_in_communicator, "engine.engine", "from torch import distributed", True),
    (collectives_only_in_communicator, "engine.engine", "from torch.distributed import all_reduce", True),
    (collectives_only_in_communicator, "engine.engine", "import torch\ntorch.distributed.barrier()", True),
    (collectives_only_in_communicator, "launcher.start", "import torch.distributed as dist", False),
    (
        collectives_only_in_communicator,
        "distributed.mesh",
        "import torch.distributed as dist\ndist.all_gather(a, b)",
        True,
    ),
    (
        collectives_only_in_communicator,
        "distributed.mesh",
        "import torch.distributed as dist\ndist.new_group([0])",
        False,
    ),
    (collectives_only_in_communicator, "engine.engine", "from torch.distributions import Normal", False),
    (environment_only_in_env, "engine.engine", "import os\nos.environ['RANK']", True),
    (environment_only_in_env, "engine.engine", "import os\nos.getenv('RANK')", True),
    (environment_only_in_env, "examples.gpt.train", "from os import environ", True),
    (environment_only_in_env, "launcher.env", "import os\nos.environ['RANK']", False),
    (environment_only_in_env, "engine.engine", "import os\nos.getpid()", False),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.cuda()", True),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.cpu()", True),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.to('cuda')", True),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.to(self.device, torch.float32)", True),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.to(device=d)", True),
    (copies_between_devices_only_in_transfers, "engine.engine", "x.copy_(y, non_blocking=True)", True),
    (
        copies_between_devices_only_in_transfers,
        "engine.engine",
        "x.to(torch.float32); x.to(y.dtype); x.to('meta'); x.copy_(y)",
        False,
    ),
    (copies_between_devices_only_in_transfers, "memory.transfers", "x.to(device)", False),
    (pure_files_know_no_tensor_and_no_device, "config.config", "import torch", True),
    (pure_files_know_no_tensor_and_no_device, "schedule.plan", "from torch import nn", True),
    (pure_files_know_no_tensor_and_no_device, "engine.engine", "import torch", False),
    (
        kernels_never_communicate,
        "kernels.norm",
        "from colossal_lite.distributed.communicator import Communicator",
        True,
    ),
    (kernels_never_communicate, "kernels.norm", "from colossal_lite.kernels import philox", False),
    (kernels_never_communicate, "kernels.__init__", "from colossal_lite import stands_aside", False),
    (nothing_is_pickled, "engine.engine", "import pickle", True),
    (nothing_is_pickled, "engine.engine", "import torch\ntorch.load('x')", True),
    (nothing_is_pickled, "distributed.communicator", "dist.broadcast_object_list([1])", True),
    (nothing_is_pickled, "distributed.communicator", "from torch.distributed import all_gather_object", True),
    (nothing_is_pickled, "engine.engine", "engine.load('x'); engine.save('x')", False),
    (no_global_state, "engine.engine", "def f():\n    global x\n    x = 1", True),
    (no_global_state, "engine.engine", "def f():\n    x = 1\n    def g():\n        nonlocal x", False),
    (errors_are_not_swallowed, "engine.engine", "try:\n    f()\nexcept:\n    raise", True),
    (errors_are_not_swallowed, "engine.engine", "try:\n    f()\nexcept Exception:\n    pass", True),
    (errors_are_not_swallowed, "engine.engine", "try:\n    f()\nexcept OSError:\n    pass", False),
]


@pytest.mark.parametrize("rule, name, text, complains", PLANTED)
def test_a_rule_catches_what_it_is_for_and_no_more(
    rule: Callable[[Source], Complaints], name: str, text: str, complains: bool
) -> None:
    assert bool(list(rule(source(name, text, FILES)))) == complains


def test_every_rule_is_shown_red_and_green() -> None:
    for rule in RULES:
        assert {complains for r, _, _, complains in PLANTED if r is rule} == {True, False}


def test_a_file_without_a_room_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere is in no room"):
        level("nowhere")


@pytest.mark.parametrize(
    "texts, found",
    [
        ({"a.one": "import colossal_lite.a.two", "a.two": "from .one import x"}, {"a.one", "a.two"}),
        # a.one imports a file of b, so b/__init__ runs first, and that imports a.one.
        (
            {
                "a.one": "from colossal_lite.b.two import x",
                "b.__init__": "from ..a.one import y",
                "b.two": "",
            },
            {"a.one", "b.__init__"},
        ),
        ({"b.__init__": "from . import two", "b.two": "x = 1"}, set()),
        ({"a.one": "", "a.two": "from .one import x", "b.two": "from ..a import one, two"}, set()),
        (
            {"a.one": "if TYPE_CHECKING:\n    from .two import x", "a.two": "from .one import x"},
            {"a.one", "a.two"},
        ),
    ],
)
def test_cycles_are_found_through_packages_too(texts: dict[str, str], found: set[str]) -> None:
    known = frozenset(texts)
    assert set(cycle({name: source(name, text, known) for name, text in texts.items()})) == found


if __name__ == "__main__":  # the order of the rooms on one screen, highest first
    for room_name in reversed(ORDER):
        told = f"{room_name:12} " + (
            sign_of(room_name).inside if f"{room_name}.__init__" in house() else "not built yet"
        )
        print(told)
