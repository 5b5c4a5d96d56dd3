"""What the tests of the kernels are worth: planted faults are caught, by the reference or by the sanitizer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from colossal_lite import kernels
from colossal_lite.kernels import select
from colossal_lite.kernels.launch import jit, launch, load, tl
from tests.shared.interpreter import SANITIZER, sanitized
from tests.shared.kernel_cases import cases, check

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
    ("attention_triton", "(distance >= 0)", "(distance > 0)", "attend causal"),
    ("attention_triton", "(distance < window)", "(distance <= window)", "attend window"),
    ("attention_triton", "tl.maximum(first + 1, 0) // KEYS", "tl.maximum(first + 2, 0) // KEYS", WHOLE),
    ("attention_triton", "end, tl.maximum(first + QUERIES, 0)", "end, tl.maximum(first + QUERIES - 1, 0)", LAST),
    ("attention_triton", "tl.maximum(begin - lag, 0) //", "tl.maximum(begin - lag + QUERIES, 0) //", "attend causal"),
    ("attention_triton", "(of_query == of_key)", "(of_query >= of_key)", "attend documents"),
    ("norm", "out -= tl.sum(g, axis=0) / features", "out -= 0.0", "layer_norm 37"),
    ("norm", "centred = tl.where(inside, value - centre, 0.0)", "centred = value - centre", "layer_norm 37"),
    ("cross_entropy", "here = (label >= 0) & (label < columns)\n    at", "here = label > 0\n    at", LOSS),
    # a scale that is missing
    ("attention_triton", "dk_tile * natural_scale", "dk_tile", "attend causal"),
    ("attention_triton", "dq_tile * natural_scale", "dq_tile", "attend causal"),
    ("attention_triton", "total * shrink[:, None]", "total", "attend causal over tiles"),
    ("attention_triton", "total -= tl.load(dlse + at", "total += tl.load(dlse + at", "attend causal"),
    ("dropout", "value.to(tl.float32) * scale", "value.to(tl.float32)", "dropout 37"),
    ("cross_entropy", "1.0 + 2.0 * z_loss", "1.0 + z_loss", LOSS),
    ("optimizer_triton", "/ (tl.sqrt(v) * correction2 + eps)", "/ (tl.sqrt(v) + eps)", "adamw 1024 by a number"),
    ("activation", "slope = phi + h * tl.exp", "slope = phi + tl.exp", "gelu exact bias 37"),
    # a race, or a place outside
    ("norm", "dweight + program.to(tl.int64) * features", "dweight", "rms_norm 37"),
    ("embedding", "if (v != before) &", "if (v == v) &", "embedding_grad_"),
    ("flat", "tl.store(sums + first + program", "tl.store(sums + first", "square_sum"),
    ("rotary", "(h < heads) & (i < half)", "(h <= heads) & (i < half)", "rotary 5 x 6"),
    ("activation", "inside = (r < rows) & (c < features)\n    g", "inside = c < features\n    g", "swiglu 37"),
]  # fmt: skip


def planted(file: str, old: str, new: str, folder: Path) -> ModuleType:
    """The kernels of one file with one fault, beside the right ones; those of x_triton.py come with a copy of x.py."""
    source = source_of(file)
    assert old in source, f"{file}.py has no {old!r} any more"
    module = loaded(f"planted_{file}", source.replace(old, new), folder)
    if file.endswith("_triton"):
        caller, imported = file.removesuffix("_triton"), f"from . import {file} as"
        source = source_of(caller)
        assert imported in source, f"{caller}.py does not call {file}.py any more"
        module = loaded(
            f"planted_{caller}", source.replace(imported, f"from . import planted_{file} as"), folder
        )
    load()
    return module


def source_of(file: str) -> str:
    return Path(kernels.__file__).with_name(f"{file}.py").read_text()


def loaded(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"colossal_lite.kernels.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("file", "old", "new", "name"), FAULTS, ids=lambda x: str(x)[:40])
def test_a_planted_fault_is_caught(file: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    table: dict[str, Any] = {op: path.run for op, path in planted(file, old, new, tmp_path).TRITON.items()}
    faulty = replace(OPS, **table)
    with pytest.raises(AssertionError), sanitized():
        check(CASES[name], faulty, torch.float32)
