"""Declares, loads and launches the Triton kernels of this package.

Note: a kernel stands in its op's file under `@jit`, which only registers it.  Importing triton costs a second, and a
CPU run does not need it.  `load` imports triton, compiles nothing, and puts the real `triton.language` and jitted
functions into the files' namespaces; `select` calls it once a Triton path is chosen.  Triton does not specialise on
parameters annotated with a type other than constexpr (a step, a key). So a new value never compiles anew.  Launches
pass enable_fp_fusion themselves, because its default differs between versions.  Tile sizes stand in tiles.json, by
kernel, architecture and width: measured or compiled once, never tuned at run time, where ranks would disagree
(NVIDIA/Megatron-LM #6966).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

tl: Any = None
"""triton.language once `load` has run; kernels import the name."""

MOST_PROGRAMS = 65_535
"""In any dimension of a grid but the first: CUDA's limit."""
_declared: list[_Declared] = []


__all__ = [
    "DENSE", "FLAT", "FLOATS", "INDEX", "ROWS", "SCALAR", "WHOLE", "Takes", "TritonOp", "architecture", "check_alike",
    "interpreting",
    "jit", "launch", "load", "matrix", "power_of_2", "programs", "signed32", "tile", "tl",
]  # fmt: skip


class _Declared:
    """A kernel before triton is there."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.jitted: Any = None
        _declared.append(self)

    def plain_parameters(self) -> list[str]:
        return [name for name, kind in self.fn.__annotations__.items() if "constexpr" not in str(kind)]


if TYPE_CHECKING:  # a kernel's body is no Python that a type checker could read
    from typing import no_type_check as jit
else:
    jit = _Declared


def load() -> None:
    """Make every declared kernel launchable.  Raises ImportError without triton."""
    import triton
    import triton.language

    for kernel in _declared:
        if kernel.jitted is None:
            kernel.jitted = triton.jit(kernel.fn, do_not_specialize=kernel.plain_parameters())
            kernel.fn.__globals__["tl"] = triton.language
    for kernel in _declared:  # kernels call kernels of other files
        names = kernel.fn.__globals__
        for name, value in list(names.items()):
            if isinstance(value, _Declared):
                names[name] = value.jitted


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    fuse: bool = True,
    **named: Any,
) -> None:
    """Run one program per grid point on the device of the first tensor; an empty grid is no launch.

    fuse=False forbids fused multiply-adds, for results that equal torch's bit for bit.
    """
    if 0 in grid:
        return
    if max(grid[1:], default=1) > MOST_PROGRAMS:
        raise ValueError(
            f"{kernel.fn.__name__}: {max(grid[1:]):,} programs in one dimension; legal is at most {MOST_PROGRAMS:,}: "
            "give it fewer samples or heads at once"
        )
    named.update(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fuse)
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **named)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **named)


def interpreting() -> bool:
    """Whether triton, if loaded now, runs kernels in its interpreter (set by a person who tests kernels)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Takes:
    """What a tensor argument of a Triton path may be.  `like`: the argument whose dtype it must have.

    Layouts: any; rows (one stride between rows, the last dimension dense); apart (rows that do not overlap, to be
    written); dense (the last dimension alone); contiguous; scalar (one element).
    """

    dtypes: tuple[torch.dtype, ...] = FLOATS
    layout: Literal["any", "rows", "apart", "dense", "contiguous", "scalar"] = "contiguous"
    like: str = ""

    def check(self, op: str, name: str, x: Tensor, like: Tensor | None = None) -> None:
        """Raises ValueError for a dtype or strides that the kernel would misread."""
        dtypes = self.dtypes if like is None else (like.dtype,)
        if x.dtype not in dtypes:
            legal = " or ".join(str(d) for d in dtypes)
            as_other = f", as {self.like}" if like is not None else ""
            raise ValueError(f"{op}: {name} is {x.dtype}; legal is {legal}{as_other}")
        if self.layout in ("rows", "apart"):
            flat = matrix(op, name, x)
            if self.layout == "apart" and len(flat) > 1 and flat.stride(0) < flat.shape[1]:
                strides = f"{op}: {name} {tuple(x.shape)} has strides {x.stride()}"
                raise ValueError(f"{strides}; legal are rows that do not overlap, as it is written")
        elif self.layout == "dense" and not (x.dim() and (x.stride(-1) == 1 or x.shape[-1] == 1)):
            raise ValueError(
                f"{op}: {name} {tuple(x.shape)} has strides {x.stride()}; legal is a dense last dimension"
            )
        elif self.layout == "contiguous" and not x.is_contiguous():
            raise ValueError(f"{op}: {name} {tuple(x.shape)} has strides {x.stride()}; legal is contiguous")
        elif self.layout == "scalar" and x.numel() != 1:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; legal is one element")


ROWS = Takes(layout="rows")
DENSE = Takes(layout="dense")
FLAT = Takes()
SCALAR = Takes((*FLOATS, torch.float64), "scalar")
INDEX = Takes((torch.int64,), "any")


@dataclass(frozen=True)
class TritonOp:
    """The Triton path of an op, with its torch path's signature; `refuses` says why a call cannot take it, and
    `takes` what each tensor argument may be."""

    run: Callable[..., Any]
    takes: Mapping[str, Takes]
    refuses: Callable[..., str | None] = lambda *args, **named: None


# ------------------------------------------------------------------------------------------------------ tiles


@cache
def _tiles() -> dict[str, dict[str, list[dict[str, int]]]]:
    table: dict[str, dict[str, list[dict[str, int]]]] = json.loads(
        Path(__file__).with_name("tiles.json").read_text()
    )
    return table


@cache
def architecture(device: torch.device) -> str:
    """ "sm_90" and so on; the interpreter takes the tiles of sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tile(kernel: str, width: int, arch: str) -> dict[str, Any]:
    """Launch options of the first row of the table that takes this width; an architecture without rows takes
    "any"."""
    rows = _tiles()[kernel]
    for row in rows.get(arch, rows["any"]):
        if width <= row["width"]:
            return {name: value for name, value in row.items() if name != "width"}
    raise ValueError(f"{kernel}: width {width}; legal is at most {rows.get(arch, rows['any'])[-1]['width']}")


def programs(device: torch.device) -> int:
    """How many programs fill the device once."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


# ----------------------------------------------------------------------------------------------------- checks


def check_alike(op: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors given are floating, and of the first one's dtype and on its device."""
    first, x = "", None
    for name, other in tensors.items():
        if other is None:
            continue
        if x is None:
            first, x = name, other
            if not x.is_floating_point():
                raise ValueError(f"{op}: {first} is {x.dtype}; legal is a floating dtype")
        elif other.dtype != x.dtype:
            mixed = ""
            if torch.is_autocast_enabled(x.device.type):
                mixed = ". torch.autocast makes them so: leave it out, and set precision of the config"
            raise ValueError(f"{op}: {name} is {other.dtype}; legal is {x.dtype}, as {first}{mixed}")
        elif other.device != x.device:
            raise ValueError(f"{op}: {name} is on {other.device}; legal is {x.device}, as {first}")


def matrix(op: str, name: str, x: Tensor) -> Tensor:
    """x [..., D] as rows [N, D] without a copy; a ValueError if its strides have no row stride or D is not
    dense."""

    def refused() -> ValueError:
        return ValueError(
            f"{op}: {name} {tuple(x.shape)} has strides {x.stride()}; "
            "legal are rows of one stride, dense in the last dimension"
        )

    if not x.dim() or (x.stride(-1) != 1 and x.shape[-1] != 1):
        raise refused()
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    except RuntimeError as error:
        raise refused() from error


def power_of_2(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << max(0, n - 1).bit_length()


def signed32(word: int) -> int:
    """A 32-bit word as the int32 with its bits, so that every key has one type."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
