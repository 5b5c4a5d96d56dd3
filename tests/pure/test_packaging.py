"""What is installed is what is in the tree, it asks for what it imports, and what is tested is pinned."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import colossal_lite
from tests.pure.test_layers import house, type_checking_blocks

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
        for extra in ("hf", "tok", "log", "plot")
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
    asked = rows("options", "install_requires") + rows("options.extras_require", "test")
    assert {requirement_name(row) for row in asked} <= set(names)
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(pins)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the tree, built in a copy (a build folder in the tree would go into the next wheel)."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in ("colossal_lite", *MAPPED):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(tree),
    ]
    subprocess.run(command, check=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_the_tree_under_one_name(wheel: zipfile.ZipFile) -> None:
    kinds = {".py", ".json", ".typed"}
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
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert len(run.stdout.split()) == 4, "an installed package must not look outside itself"
    assert all(Path(path).is_relative_to(tmp_path) for path in run.stdout.split())


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_folder_is_refused_under_its_bare_name(name: str) -> None:
    run = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 1 and f"colossal_lite.{name}" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_folder_is_one_module_however_it_is_reached(name: str) -> None:
    module = importlib.import_module(f"colossal_lite.{name}")
    assert Path(str(module.__file__)).parts[-2:] == (name, "__init__.py")
    assert sys.modules.get(name) is None  # absent, or marked as not installed (tests/hugging_face.py)
