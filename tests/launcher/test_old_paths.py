"""An import of a module of before version 0.2 names the new place."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from colossal_lite.launcher.old_paths import MOVED

ROOT = Path(__file__).parents[2]
PACKAGES = [old for old in MOVED if (ROOT / "colossal_lite" / old).is_dir()]


def assert_there(place: str) -> None:
    """A module that can be imported, or a file of the examples."""
    if "/" in place:
        assert (ROOT / place).is_file()
    else:
        importlib.import_module(place)


@pytest.mark.parametrize("old", sorted(set(MOVED) - set(PACKAGES)))
def test_an_old_module_is_refused_with_modules_that_exist(old: str) -> None:
    with pytest.raises(ImportError, match=rf"colossal_lite\.{old} is now ") as caught:
        importlib.import_module(f"colossal_lite.{old}")
    for place in str(caught.value).partition(" is now ")[2].partition(";")[0].split(", "):
        assert_there(place)


@pytest.mark.parametrize("old", PACKAGES)
def test_a_module_that_is_a_package_now_says_where_its_names_are(old: str) -> None:
    with pytest.raises(
        ImportError, match=f"colossal_lite.{old} is a package now; look for Anything in "
    ) as caught:
        exec(f"from colossal_lite.{old} import Anything")
    for place in str(caught.value).partition(" in ")[2].split(", "):
        assert place.removeprefix("colossal_lite.") in MOVED[old].split()
        assert_there(place)
    assert str(caught.value).count(", ") == len(MOVED[old].split()) - 1


@pytest.mark.parametrize(
    "code, words",
    [
        (
            "from colossal_lite import comm",
            "colossal_lite.comm is now colossal_lite.distributed.communicator",
        ),
        ("from colossal_lite.zero.hooks import X", "colossal_lite.zero.hooks is now"),
        ("from colossal_lite.cli import main", "; the command colossal-lite of an older install asks for it"),
        ("import colossal_lite.nowhere", "No module named 'colossal_lite.nowhere'"),
        ("from colossal_lite import lunch", "cannot import name 'lunch' from 'colossal_lite'"),
        (
            "from colossal_lite.engine.engine import X",
            "cannot import name 'X' from 'colossal_lite.engine.engine'",
        ),
    ],
)
def test_other_imports_fail_as_everywhere(code: str, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1]
