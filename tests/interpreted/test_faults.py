"""What the tests of the kernels are worth: planted faults are caught, by the reference or by the sanitizer."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_lite import kernels
from colossal_lite.kernels import select
from colossal_lite.kernels.launch import jit, launch, load, tl
from tests.shared.interpreter import SANITIZER, sanitized
from tests.shared.kernel_cases import cases, check
from tests.shared.places import Finder

OPS = select("triton", "cpu", strict=True)
CASES = {case.name: case for case in cases()}


@jit
def _move(x, y, n, by, STEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(y + i // LANES + by, tl.load(x + i, mask=i < n), mask=i < n)


load()


def move(x: torch.Tensor, y: torch.Tensor, n: int = 8, by: int = 0, step: int = 4, lanes: int = 1) -> None:
    """Two programs of four lanes."""
    launch(_move, (2,), x, y, n, by, STEP=step, LANES=lanes, BLOCK=4)


@pytest.mark.parametrize(
    ("what", "plant"),
    [
        ("out of bounds in a load", lambda x: move(x[:5], torch.empty(8))),
        ("out of bounds in a store", lambda x: move(x, torch.empty(8), by=1)),
        ("two lanes write one place", lambda x: move(x, torch.empty(8), lanes=2)),
        ("writes what another program wrote", lambda x: move(x, torch.empty(8), step=2)),
        ("reads what another program wrote", lambda x: move(x, x, by=4)),
        ("writes what another program read", lambda x: move(x[4:], x)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_sanitizer_sees(what: str, plant: Callable[[torch.Tensor], None]) -> None:
    with pytest.raises(AssertionError, match=what), sanitized():
        plant(torch.arange(12.0))


def test_the_sanitizer_passes_a_clean_kernel_in_either_order() -> None:
    for reverse in (False, True):
        y = torch.empty(8)
        with sanitized(reverse):
            move(torch.arange(8.0), y)
        assert y.tolist() == list(range(8)) and not SANITIZER.faults


def test_fresh_tensors_start_as_nan_under_the_sanitizer() -> None:
    with sanitized():
        assert torch.empty(4).isnan().all()


WHOLE, LAST = "attend edge of a whole tile", "attend edge of the last tile"
LOSS = "cross_entropy 5 x 11, smoothing 0.1, z-loss 0.01"
FAULTS = [
    # a mask that is off by one
    ("_visible", "distance >= 0", "distance > 0", "attend causal"),
    ("_visible", "distance < window", "distance <= window", "attend window"),
    ("_range_of_keys", "first + 1", "first + 2", WHOLE),
    ("_range_of_keys", "tl.maximum(first + QUERIES, 0)", "tl.maximum(first + QUERIES - 1, 0)", LAST),
    ("_range_of_queries", "tl.maximum(begin - lag, 0)", "tl.maximum(begin - lag + QUERIES, 0)", "attend causal"),
    ("_visible", "of_query == of_key", "of_query >= of_key", "attend documents"),
    ("_norm_backward", "tl.sum(g, axis=0) / features", "0.0", "layer_norm 37"),
    ("_norm_forward", "tl.where(inside, value - centre, 0.0)", "value - centre", "layer_norm 37"),
    ("_partial_kernel", "(label >= 0) & (label < columns)", "label > 0", LOSS),
    # a scale that is missing
    ("_attend_keys_kernel", "dk_tile * natural_scale", "dk_tile", "attend causal"),
    ("_attend_queries_kernel", "dq_tile * natural_scale", "dq_tile", "attend causal"),
    ("_forward_tile", "total * shrink[:, None]", "total", "attend causal over tiles"),
    ("_delta_kernel", "tl.load(dlse + at, mask=i < queries, other=0.0)",
     "-tl.load(dlse + at, mask=i < queries, other=0.0)", "attend causal"),
    ("_dropout_kernel", "value.to(tl.float32) * scale", "value.to(tl.float32)", "dropout 37"),
    ("_gradient_kernel", "2.0 * z_loss", "z_loss", LOSS),
    ("_adamw_rule", "tl.div_rn(tl.sqrt_rn(v), root)", "tl.sqrt_rn(v)", "adamw 1024 by a number"),
    ("_gelu_parts", "h * tl.exp(-0.5 * h * h)", "tl.exp(-0.5 * h * h)", "gelu exact bias 37"),
    # a race, or a place outside
    ("_norm_backward", "dweight + program.to(tl.int64) * features", "dweight", "rms_norm 37"),
    ("_norm_backward", "stream.to(tl.float32)", "0.0",
     "stream_rms_norm 37"),
    ("_embedding_kernel", "v != before", "v == v", "embedding_grad_"),
    ("_square_kernel", "sums + first + program", "sums + first", "square_sum"),
    ("_rotary_kernel", "h < heads", "h <= heads", "rotary 5 x 6"),
    ("_swiglu_forward", "(r < rows) & (c < features)", "c < features", "swiglu 37"),
]  # fmt: skip
"""A function by its name in whatever file, an expression that stands in it once, the fault, and the case."""


def mutated(source: str, function: str, old: str, new: str) -> str:
    """The source with one expression of a function replaced, however it is laid out. Fails unless it is there once."""
    (body,) = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function
    )
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    found = [n for n in ast.walk(body) if isinstance(n, ast.expr) and ast.dump(n) == wanted]
    assert len(found) == 1, f"{function} has {old!r} {len(found)} times, not once"
    (node,) = found
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    raw = source.encode()
    return (raw[:begin] + f"({new})".encode() + raw[end:]).decode()


def planted(function: str, old: str, new: str, folder: Path) -> dict[str, Callable[..., Any]]:
    """Triton paths by op, of the file with the fault and of copies of the files that take their kernels from it."""
    finder = kernel_files()
    faulty = finder.module_of(function)
    sources = {faulty: mutated(finder.files[faulty].read_text(), function, old, new)}
    table: dict[str, Callable[..., Any]] = {}
    with ExitStack() as stack:
        for name in (faulty, *callers_of(faulty)):
            stem = name.rpartition(".")[2]
            module = loaded(f"planted_{stem}", sources.get(name) or finder.files[name].read_text(), folder)
            stack.enter_context(patch.dict(sys.modules, {name: module}))
            stack.enter_context(patch.object(kernels, stem, module))
            table |= {op: path.run for op, path in getattr(module, "TRITON", {}).items()}
    load()
    return table


def kernel_files() -> Finder:
    package = kernels.__name__
    return Finder({package: Path(kernels.__file__).parent})


def callers_of(module: str) -> list[str]:
    """The files with a table of Triton paths that import a file of kernels, or such a file."""
    found = [module]
    for caller in found:
        stem = re.escape(caller.rpartition(".")[2])
        imports = re.compile(
            rf"^(?:from \.{stem} import|import {kernels.__name__}\.{stem} as)\b", re.MULTILINE
        )
        for name, path in kernel_files().files.items():
            text = path.read_text()
            if name not in found and imports.search(text) and re.search("^TRITON = ", text, re.MULTILINE):
                found.append(name)
    return found[1:]


def loaded(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{kernels.__name__}.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("function", "old", "new", "name"), FAULTS, ids=lambda x: str(x)[:40])
def test_a_planted_fault_is_caught(function: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    table: dict[str, Any] = planted(function, old, new, tmp_path)
    assert table, f"no op's Triton path leads to {function}"
    with pytest.raises(AssertionError), sanitized():
        check(CASES[name], replace(OPS, **table), torch.float32)


OF_EACH_FILE = {kernel_files().module_of(fault[0]): fault for fault in FAULTS}


@pytest.mark.parametrize("file", OF_EACH_FILE)
def test_what_is_caught_is_the_fault_and_not_the_copy_of_its_file(file: str, tmp_path: Path) -> None:
    function, old, _, name = OF_EACH_FILE[file]
    table: dict[str, Any] = planted(function, old, old, tmp_path)
    with sanitized():
        check(CASES[name], replace(OPS, **table), torch.float32)


@pytest.mark.parametrize("old", ["b", "a + c"])
def test_an_expression_that_is_not_there_once_is_refused(old: str) -> None:
    source = "def one(a, b):\n    return b * (a +\n        b)\n\ndef two(a, c):\n    return a + c\n"
    with pytest.raises(AssertionError, match="times, not once"):
        mutated(source, "one", old, "a")
    assert mutated(source, "one", "a + b", "a - b").startswith("def one(a, b):\n    return b * ((a - b))\n")
