"""What is installed is what is in the tree, it asks for what it imports, and what is tested is pinned."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import colossal_lite
from colossal_lite.launcher import new_command
from tests.house.test_layers import house, type_checking_blocks
from tests.house.test_readme import snippets

ROOT = Path(__file__).parents[2]
MAPPED = ("kernels", "launcher")

# Modules whose distribution comes along with one that setup.cfg asks for.
DISTRIBUTION_OF = {"pydantic_core": "pydantic", "annotated_types": "pydantic"}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def rows(section: str, option: str) -> list[str]:
    return [line for line in setup_cfg()[section][option].splitlines() if line and not line.startswith("#")]


def requirement_name(row: str) -> str:
    return re.split(r"[<>=;\[ ]", row)[0].lower().replace("_", "-")


def test_the_packages_listed_are_the_folders_that_hold_python() -> None:
    inside = {p.parent.relative_to(ROOT) for p in (ROOT / "colossal_lite").rglob("*.py")}
    mapped = {p.parent.relative_to(ROOT) for top in MAPPED for p in (ROOT / top).rglob("*.py")}
    expected = {".".join(p.parts) for p in inside} | {"colossal_lite." + ".".join(p.parts) for p in mapped}
    assert set(rows("options", "packages")) == expected
    assert all((ROOT / p / "__init__.py").exists() for p in inside | mapped)


def test_the_root_holds_what_it_is_made_of_and_nothing_that_a_run_has_written() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    folders = {"colossal_lite", "kernels", "launcher", "tests", "examples", "docs", ".ci"}
    files = {
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
        "mkdocs.yml",
        "README.md",
        "LICENSE",
        ".gitignore",
    }
    assert {line.split("/")[0] for line in listed.splitlines()} == folders | files


def test_every_public_name_exists_and_is_typed() -> None:
    for name in colossal_lite.__all__:
        assert getattr(colossal_lite, name) is not None
    tree = ast.parse((ROOT / "colossal_lite/__init__.py").read_text())
    typed = {
        (alias.asname, node.module)
        for body in type_checking_blocks(tree)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {
        (name, "colossal_lite" if name == module else f"colossal_lite.{module}")
        for name, module in colossal_lite._MODULE_OF.items()
    }
    assert typed == lazy


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lunch'"):
        colossal_lite.lunch  # noqa: B018


def test_every_import_is_declared() -> None:
    required = {requirement_name(row) for row in rows("options", "install_requires")}
    extras = {
        requirement_name(row)
        for extra in ("hf", "tok", "log")
        for row in rows("options.extras_require", extra)
    }
    for file in house().values():
        if file.name.startswith("examples."):
            continue
        lines = {node.lineno for node in file.tree.body}
        for line, name in file.imports():
            module = name.split(".")[0]
            if module in sys.stdlib_module_names or module == "colossal_lite":
                continue
            wanted = DISTRIBUTION_OF.get(module, module).replace("_", "-")
            # What an extra brings may be imported where it is used, never when the file is loaded.
            legal = required if line in lines else required | extras
            assert wanted in legal, f"{file.name}:{line}: imports {module}, which setup.cfg does not ask for"


def test_what_is_tested_is_pinned_once() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in pins)
    names = [pin.split("==")[0] for pin in pins]
    assert len(set(names)) == len(names)
    asked = rows("options", "install_requires")
    asked += [row for extra in ("docs", "test") for row in rows("options.extras_require", extra)]
    assert {requirement_name(row) for row in asked} <= set(names)
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(pins)


def copy_of_the_tree(tree: Path) -> Path:
    """What is packaged, elsewhere: installing from the tree itself would write into its build/."""
    tree.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in ("colossal_lite", *MAPPED):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def without_pythonpath() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def python(code: str, cwd: Path, path: Path | None = None, executable: Path | None = None) -> str:
    """What `code` prints, run with -c: `cwd` comes first on sys.path, then `path`, then what is installed."""
    environment = without_pythonpath()
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [str(executable or sys.executable), "-c", code]
    run = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def pip(executable: Path | str, *arguments: str) -> None:
    """Build and install without a network: what builds is what this environment has."""
    command = [str(executable), "-m", "pip", *arguments, "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(command, env=without_pythonpath(), check=True)


# ----------------------------------------------------------------------------------------------------
# A wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a tree in which an older build has left a file that is gone, and an editable install its links."""
    out = tmp_path_factory.mktemp("wheel")
    tree = copy_of_the_tree(out / "tree")
    for folder in ("lib", "__editable__.colossal_lite-0.0.9-py3-none-any"):
        left = tree / "build" / folder / "colossal_lite" / "gone.py"
        left.parent.mkdir(parents=True)
        left.touch()
    pip(sys.executable, "wheel", "-w", str(out), str(tree))
    assert left.exists(), "building a wheel must not break an editable install"
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_the_tree_under_one_name(wheel: zipfile.ZipFile) -> None:
    kinds = {".py", ".json", ".tmpl", ".typed"}
    expected = {p.relative_to(ROOT) for p in (ROOT / "colossal_lite").rglob("*") if p.suffix in kinds}
    for top in MAPPED:
        expected |= {
            "colossal_lite" / p.relative_to(ROOT) for p in (ROOT / top).rglob("*") if p.suffix in kinds
        }
    held = {Path(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    info = {Path(name).name for name in wheel.namelist() if ".dist-info/" in name}
    assert {"LICENSE", "entry_points.txt"} <= info


def test_an_installed_wheel_needs_no_source_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import colossal_lite, colossal_lite.kernels as k, colossal_lite.launcher as l;"
        "print(colossal_lite.__file__, k.__file__, l.__file__, *colossal_lite.__path__)"
    )
    printed = python(code, tmp_path).split()
    assert len(printed) == 4, "an installed package must not look outside itself"
    assert all(Path(path).is_relative_to(tmp_path) for path in printed)


# ----------------------------------------------------------------------------------------------------
# The tree, with its root on sys.path


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A folder of installed packages: a public `kernels`, of a version that transformers takes, and a `launcher`."""
    for name, version in zip(MAPPED, (KERNELS_MIN_VERSION, "3.0"), strict=True):
        info = tmp_path / f"{name}-{version}.dist-info"
        (tmp_path / name / "layer").mkdir(parents=True)
        (tmp_path / name / "layer/__init__.py").write_text(f"from {name} import __version__ as LAYER_OF\n")
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {version!r}\n" + HUB)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path


HUB = """
from unittest.mock import MagicMock

def use_kernel_forward_from_hub(name):
    return lambda cls: cls

use_kernelized_func = use_kernel_forward_from_hub

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return MagicMock()

from . import layer
"""


@pytest.mark.parametrize("name", MAPPED)
def test_under_its_bare_name_a_folder_is_the_public_package(name: str, public: Path) -> None:
    code = (
        f"import {name}, {name}.layer, importlib.util, sys\n"
        f"assert {name}.layer.LAYER_OF == {name}.__version__ and importlib.util.find_spec('{name}.layer')\n"
        f"assert not {{'torch', 'triton', 'colossal_lite.{name}'}} & {{*sys.modules}}\n"
        f"import colossal_lite.{name} as ours\n"
        f"print({name}.__file__, {name}.layer.__file__, importlib.util.find_spec({name!r}).origin, ours.__file__)"
    )
    *theirs, ours = map(Path, python(code, ROOT, public).split())
    assert theirs == [public / name / file for file in ("__init__.py", "layer/__init__.py", "__init__.py")]
    assert ours == ROOT / name / "__init__.py"


def skip_where_installed(name: str) -> None:
    if PathFinder.find_spec(name, [sysconfig.get_path("purelib")]):
        pytest.skip(f"a public package {name} is installed here")


@pytest.mark.parametrize("name", MAPPED)
def test_under_its_bare_name_a_folder_is_empty_without_a_public_package(name: str) -> None:
    """It looks as a folder without __init__.py does, which transformers takes for not installed."""
    skip_where_installed(name)
    module = "env" if name == "launcher" else "philox"
    code = (
        f"import {name}, importlib.util, sys\n"
        f"assert {name}.__file__ is None and not hasattr({name}, '__version__') and not [*{name}.__path__]\n"
        f"assert importlib.util.find_spec('{name}.{module}') is None\n"
        "assert not {'torch', 'triton'} & {*sys.modules}\n"
        f"import colossal_lite.{name}.{module}\n"
        f"print([m for m in sys.modules if m.startswith('{name}')])"
    )
    assert python(code, ROOT) == f"[{name!r}]\n"


def test_two_checkouts_on_the_path_hide_nothing(public: Path, tmp_path: Path) -> None:
    """Each stands aside for what comes after it, so the search ends."""
    other = copy_of_the_tree(tmp_path / "other")
    code = "import sys; sys.path[1:1] = [{other!r}, '']; import kernels; print(kernels.__file__)"
    printed = python(code.format(other=str(other)), ROOT, public)
    assert Path(printed.strip()) == public / "kernels/__init__.py"


@pytest.mark.parametrize("installed", [False, True])
def test_transformers_works_at_the_root(installed: bool, public: Path) -> None:
    if not installed:
        skip_where_installed("kernels")
    code = (
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import kernels; print(LlamaForCausalLM.__name__, is_kernels_available(), kernels.__file__)"
    )
    file = public / "kernels/__init__.py" if installed else None
    assert python(code, ROOT, public if installed else None) == f"LlamaForCausalLM {installed} {file}\n"


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_folder_is_one_module_however_it_is_reached(name: str) -> None:
    module = importlib.import_module(f"colossal_lite.{name}")
    assert Path(str(module.__file__)) == ROOT / name / "__init__.py"
    bare = importlib.import_module(name)
    assert bare is not module and getattr(bare, "__file__", None) != module.__file__


# ----------------------------------------------------------------------------------------------------
# An editable install


@dataclass(frozen=True)
class Installed:
    """A copy of the tree, the Python of an environment in which it is installed, and a folder outside both."""

    tree: Path
    python: Path
    outside: Path


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("editable")
    tree, outside = copy_of_the_tree(home / "tree"), home / "outside"
    outside.mkdir()
    venv.create(home / "venv", symlinks=True)
    executable = home / "venv/bin/python"
    purelib = Path(
        python("import sysconfig; print(sysconfig.get_path('purelib'))", home, None, executable).strip()
    )
    (purelib / "host.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # its packages, not its .pth files
    pip(executable, "install", "-e", str(tree))
    return Installed(tree, executable, outside)


def test_an_editable_install_runs_the_tree_with_its_new_files(editable: Installed) -> None:
    """Type checkers read links, which a pull does not add to: what runs must not depend on them."""
    names = ["colossal_lite.added", *(f"colossal_lite.{name}.added" for name in MAPPED)]
    files = [editable.tree / path / "added.py" for path in ("colossal_lite", *MAPPED)]
    for file in files:
        file.touch()
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    for cwd in (editable.outside, editable.tree):
        assert [Path(line) for line in python(code, cwd, None, editable.python).split()] == files


PROJECT = """\
import colossal_lite as cl
from colossal_lite.kernels import TORCH

with reveal_type(cl.launch({"seed": 7})) as context:
    config = reveal_type(cl.models.GPTConfig(layers=2))
    engine = reveal_type(cl.initialize(cl.models.GPT(config), context=context))
    reveal_type(engine.train_step({}).loss)
    reveal_type(TORCH)
cl.models.GPTConfig(layers="two")
cl.lunch
typo: cl.ConfigDict = dict(optimizer=dict(type="adamw", learning_rate=1e-3), parallel=dict(tensor=2, pipelin=2))
typo = dict(precison="bf16")
value: cl.ConfigDict = dict(zero=dict(stage="3"), kernels="cuda", parallel=dict(tensor=dict(size=2, mode="2d")))
cl.launch(dict(sed=7))
"""
WRONG = [
    *[(9, "arg-type"), (10, "attr-defined"), (11, "typeddict-unknown-key"), (11, "typeddict-unknown-key")],
    *[(12, "typeddict-unknown-key"), (13, "typeddict-item"), (13, "typeddict-item"), (14, "arg-type")],
]
"""Line and kind of each error of the project."""
UNTYPED = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-any-generics\n"
"""A reader's own modules carry no types."""


@pytest.mark.timeout(300)  # mypy reads all of torch if its cache is empty; a slow machine is no fault
def test_a_project_outside_the_tree_sees_types_and_the_pages_have_no_error(
    editable: Installed, pytestconfig: pytest.Config
) -> None:
    """Each name has its own type, and what is wrong is told, a misspelt key too: Any would pass. One run of mypy."""
    (editable.outside / "project.py").write_text(PROJECT)
    files = {f"{name.replace('-', '_')}.py": code for name, code in snippets()}
    first = next(iter(files.values()))
    files["planted.py"] = re.sub(r"(config: cl.ConfigDict = dict\()", r"\1sed=1, ", first)
    for name in ("train.py", "config.py"):  # of a new project, which is typed throughout
        (editable.outside / name).write_text(new_command.rendered("first", new_command.GPT)[name])
    for name, code in files.items():
        (editable.outside / name).write_text(UNTYPED + code)
    kept = getattr(pytestconfig, "cache", None)  # none under -p no:cacheprovider
    cache = kept.mkdir("mypy") if kept else editable.outside / "cache"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        f"--cache-dir={cache}",
        "project.py",
        "train.py",
        *files,
    ]
    run = subprocess.run(
        [*command, f"--python-executable={editable.python}"],
        cwd=editable.outside, env=without_pythonpath(), text=True, capture_output=True,
    )  # fmt: skip
    revealed = re.findall(r'Revealed type is "[\w.]*?(\w+)"', run.stdout)
    assert revealed == ["Context", "GPTConfig", "Engine", "Tensor", "Ops"], run.stdout + run.stderr
    wrong = re.findall(r"project.py:(\d+): error: .*\[([\w-]+)\]", run.stdout)
    assert [(int(line), kind) for line, kind in wrong] == WRONG, run.stdout
    elsewhere = [line for line in run.stdout.splitlines() if " error: " in line and "project.py" not in line]
    assert len(elsewhere) == 1 and elsewhere[0].startswith("planted.py") and '"sed"' in elsewhere[0], (
        run.stdout
    )
