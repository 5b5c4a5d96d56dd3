"""Compiles every kernel as its op launches it, for GPUs that are not there, and reads what the assembler made
of it.

    python -m tests.shared.compile_gate [ARCHITECTURE ...] [--only PART_OF_A_NAME]     (default: sm_90 sm_80)

Note: each case calls an op of the table, forward and backward, on meta tensors of production size.  The
launches are noted instead of run, so what is compiled is what a GPU would be given: types, divisibility,
tiles.  (It also shows that no op waits for the device: meta tensors have no values.)  Triton's wheel holds
ptxas, cuobjdump and nvdisasm.  A row fails if it spills, exceeds the shared memory of an architecture, streams
without 128-bit loads, multiplies without tensor cores, multiplies sizes in 32 bits (which 2**31 elements overflow), or
rounds otherwise than a CPU where its bits are those of one.  gfx942 has to compile; the rest of its rows is reported
only.  Exit status 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SHARED_LIMIT_BYTES = {
    "sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024,
}  # fmt: skip
INSTRUCTION_BYTES = 16
TRITON_TYPE = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.bool: "i1",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel as it would be compiled."""

    case: str
    file: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """What came of it; counts are instructions."""

    launch: Launch
    arch: str
    registers: int = 0
    warps: int = 0
    spills: int = 0
    shared_bytes: int = 0
    loads_128: int = 0
    loads: int = 0
    tensor_core: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """What the compiler made of one launch; `code`: instructions that have not been read yet."""

    row: Row
    ttir: str = ""
    ptx: str = ""
    code: bytes = b""


# -------------------------------------------------------------------------------------------- noting launches


def note(case: str, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """What triton's own binder would make of the arguments."""
    jitted = getattr(kernel, "jitted", kernel)
    options = {"num_warps": named.pop("num_warps", 4), "num_stages": named.pop("num_stages", 3)}
    options["enable_fp_fusion"] = named.pop("fuse", True)
    values = dict(zip(jitted.arg_names, args, strict=False)) | named
    signature, constants, divisible = {}, {}, []
    for place, parameter in enumerate(jitted.params):
        name, value = parameter.name, values[parameter.name]
        one = type(value) is int and value == 1 and not parameter.annotation  # specialised on, as triton does
        if parameter.is_constexpr or value is None or one:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{TRITON_TYPE[value.dtype]}"
            divisible.append(place)
        elif isinstance(value, float):
            signature[name] = parameter.annotation or "fp32"
        else:
            signature[name] = parameter.annotation or ("i32" if -(2**31) <= value < 2**31 else "i64")
            if value % 16 == 0 and not parameter.annotation:
                divisible.append(place)
    return Launch(
        case, jitted.fn.__module__, jitted.fn.__name__, tuple(signature.items()), tuple(constants.items()),
        tuple(divisible), tuple(options.items()),
    )  # fmt: skip


def noted(cases: dict[str, Callable[[], None]], arch: str) -> list[Launch]:
    """The distinct launches of all cases, with the tiles of one architecture."""
    found: dict[tuple[Any, ...], Launch] = {}
    current = ""

    def instead(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if 0 not in grid:
            made = note(current, kernel, args, named)
            found.setdefault(tuple(vars(made).values())[1:], made)

    files = [m for name, m in sys.modules.items() if name.startswith("colossal_lite.kernels.")]
    with contextlib.ExitStack() as patches:
        for file in files:
            for name, value in (("launch", instead), ("architecture", lambda device: arch)):
                if hasattr(file, name):
                    patches.enter_context(mock.patch.object(file, name, value))
        for current, case in cases.items():  # noqa: B007
            case()
    return list(found.values())


# -------------------------------------------------------------------------------------------------- compiling


def compiled(task: tuple[Launch, str]) -> Made:
    """Compile one launch for one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from colossal_lite.kernels.launch import load

    load()
    launch, arch = task
    jitted = getattr(sys.modules[launch.file], launch.kernel)
    attributes = {(place,): [["tt.divisibility", 16]] for place in launch.divisible}
    source = ASTSource(
        fn=jitted, signature=dict(launch.signature), constexprs=dict(launch.constants), attrs=attributes
    )
    amd = not arch.startswith("sm_")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch[3:]), 32)
    try:
        made = triton.compile(source, target=target, options=dict(launch.options))
    except Exception as error:  # any failure of the compiler is this row's fault
        return Made(Row(launch, arch, faults=(f"does not compile: {type(error).__name__} {error}"[:300],)))
    return Made(amd_row(launch, arch, made)) if amd else nvidia_made(launch, arch, made)


def nvidia_made(launch: Launch, arch: str, made: Any) -> Made:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
    row = Row(
        launch, arch,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        warps=made.metadata.num_warps,
        shared_bytes=made.metadata.shared,
    )  # fmt: skip
    return Made(row, made.asm["ttir"], made.asm["ptx"], instructions(made.asm["cubin"]))


def tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia as nvidia

    path = os.path.join(os.path.dirname(nvidia.__file__), "bin", name)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def instructions(cubin: bytes) -> bytes:
    """The sections of code of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    texts = sections[names][4]
    found = b""
    for name, _, _, _, start, length in sections:
        if cubin[texts + name :].startswith(b".text."):
            found += cubin[start : start + length]
    return found


def read(found: Sequence[Made]) -> list[Row]:
    """The rows of what has been made for one architecture, with what its code holds. The disassembler takes 0.4 s to
    start, so it is given the code of all of them in one piece."""
    codes = [made.code for made in found]
    if not any(codes):
        return [made.row for made in found]
    arch = found[0].row.arch
    raw = arch.upper().replace("_", "") + "a" * (int(arch[3:]) >= 90)  # what Triton compiles for
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        lines = re.findall(
            r"^\s*/\*[0-9a-f]+\*/ .*", tool("nvdisasm", "--binary", raw, file.name), re.MULTILINE
        )
    sizes = [len(code) // INSTRUCTION_BYTES for code in codes]
    assert len(lines) == sum(sizes), "the disassembler has not read every instruction"
    rows = []
    for made, size in zip(found, sizes, strict=True):
        code, lines = lines[:size], lines[size:]
        rows.append(counted(made, "\n".join(code)) if code else made.row)
    return rows


def counted(made: Made, code: str) -> Row:
    def count(*words: str) -> int:
        return len(re.findall("|".join(words), code))

    row = replace(
        made.row,
        spills=count(r"\bSTL", r"\bLDL"),
        loads_128=count(r"\bLDG\.E\S*\.128", r"\bLDGSTS\.E\S*\.128", r"\bUTMALDG"),
        loads=count(r"\bLDG\.", r"\bLDGSTS\.", r"\bUTMALDG"),
        tensor_core=count(r"\bHGMMA", r"\bHMMA", r"\bIMMA", r"\bUTC\w*MMA"),
    )
    return replace(row, faults=tuple(faults(row, made.ttir, made.ptx)))


def faults(row: Row, ttir: str, ptx: str) -> list[str]:
    """What breaks a rule."""
    found = []
    if row.spills:
        found.append(f"{row.spills} spills")
    if row.shared_bytes > SHARED_LIMIT_BYTES[row.arch]:
        found.append(
            f"{row.shared_bytes} bytes of shared memory; the limit is {SHARED_LIMIT_BYTES[row.arch]}"
        )
    if row.registers * 32 * row.warps > 65536:
        found.append(f"{row.registers} registers x {row.warps} warps exceed 65536")
    if row.launch.kernel not in GATHERS and not row.loads_128:
        found.append("no 128-bit load")
    if row.launch.kernel in MULTIPLIES and not row.tensor_core:
        found.append("no tensor-core instruction")
    if row.launch.kernel in HAVE_THE_BITS_OF_A_CPU:
        found += inexact(row.launch, ptx)
    narrow = narrow_products(ttir, is_short=row.launch.kernel in SHORT)
    return found + [f"a product of sizes in 32 bits: {line}" for line in narrow]


def inexact(launch: Launch, ptx: str) -> list[str]:
    """What would not have a CPU's bits: operations that are not rounded to nearest, and multiply-adds but those of the
    source."""
    found = [f"{word}, which is not rounded to nearest" for word in ROUGH if re.search(word, ptx)]
    constants, options = dict(launch.constants), dict(launch.options)
    if options.get("enable_fp_fusion", True):
        found.append("the compiler may fuse a product and a sum")
    if (rule := constants.get("RULE")) is not None:
        due = FUSED[rule] * constants["BLOCK"] // (32 * options["num_warps"])
        words = re.findall(r"\bfma\.[\w.]+", ptx)
        if (made := sum(2 if word.endswith("x2") else 1 for word in words)) != due:  # x2: of two elements
            found.append(f"{made} fused multiply-adds a thread; the source has {due}")
    return found


def narrow_products(ttir: str, *, is_short: bool = False) -> list[str]:
    """Products in 32 bits that sizes beyond 2**31 would overflow: of two numbers known at run time only, or of the
    program's index and a tile; the latter is right where it counts the tokens of one sequence or the columns of one
    row (`is_short`)."""
    made: dict[str, tuple[str, list[str]]] = {}
    found = []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%\S+?)(?::\d+)? = (\S+) ?(.*)", line)
        if match is None:
            continue
        name, op, rest = match[1], match[2], match[3]
        made[name] = (rest if op == "tt.get_program_id" else op, re.findall(r"%[\w#-]+", rest))
        if op == "arith.muli" and re.search(r": (tensor<\S+xi32>|i32)( loc|$)", line):
            kinds = sorted(_kind(operand, made) for operand in made[name][1][:2])
            if kinds == ["runtime", "runtime"] or ("index" in kinds and "runtime" in kinds):
                found.append(line.strip()[:100])
            elif "index" in kinds and not is_short:
                found.append(line.strip()[:100])
    return found


def _kind(name: str, made: dict[str, tuple[str, list[str]]]) -> str:
    """What a value is: constant, the program's first index, or known at run time only."""
    op, operands = made.get(name, ("argument", []))
    if op in ("arith.constant", "tt.make_range"):
        return "constant"
    if op.startswith("x "):
        return "index"
    if op in ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi"):
        return _kind(operands[0], made)
    if op in ("arith.addi", "arith.subi") and all(_kind(x, made) == "constant" for x in operands[:2]):
        return "constant"
    return "runtime"


def amd_row(launch: Launch, arch: str, made: Any) -> Row:
    code = made.asm["amdgcn"]

    def meta(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])  # type: ignore[index]

    return Row(
        launch, arch, registers=meta("vgpr_count"), warps=made.metadata.num_warps,
        spills=meta("vgpr_spill_count"), shared_bytes=made.metadata.shared, loads_128=code.count("load_dwordx4"),
        loads=code.count("global_load"), tensor_core=code.count("v_mfma"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ cases

GATHERS = {"_draw_kernel"}
"""Kernels that load next to nothing."""
HAVE_THE_BITS_OF_A_CPU = {"_draw_kernel", "_step_kernel"}
ROUGH = (r"div\.full", r"\.approx", r"\.ftz")
FUSED = {
    "adamw": 2,
    "lion": 0,
    "plain": 2,
    "momentum": 2,
    "momentum first": 2,
    "nesterov": 3,
    "nesterov first": 3,
}
"""Multiply-adds an element that a rule of a step has, as the CPU's code has them."""
MULTIPLIES = {"_attend_forward_kernel", "_attend_keys_kernel", "_attend_queries_kernel"}
SHORT = {*MULTIPLIES, "_delta_kernel", "_norm_weights_wide"}
"""Kernels whose first program index counts tiles of the tokens of one sequence, or of the columns of one row, of which
there are less than 2**31."""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


def both(out: Any) -> None:
    """Forward is done: run backward."""
    outs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
    total = [o for o in outs if o.requires_grad]
    torch.autograd.backward(total, [torch.empty_like(o) for o in total])


def production_cases() -> dict[str, Callable[[], None]]:
    """Every op of the table that has a Triton path, at the sizes of a 124 M to an 8 B model."""
    from colossal_lite.kernels import FULL, Draws, Mask, Rows, triton_paths

    op = {name: path.run for name, path in triton_paths().items()}
    rows = Rows((1, 2), 3, meta(4, dtype=torch.int64), meta(4096, dtype=torch.int64))
    cases: dict[str, Callable[[], None]] = {}
    for width in (768, 4096):
        cases[f"dropout {width}"] = lambda w=width: both(op["dropout"](meta(4, 4096, w), 0.1, rows))
        cases[f"dropout_add {width}"] = lambda w=width: both(
            op["dropout_add"](meta(4, 4096, w), meta(4, 4096, w), 0.1, rows)
        )
    for width in (768, 8192, 32768):
        for norm in ("layer_norm", "rms_norm"):
            bias = (meta(width),) if norm == "layer_norm" else ()
            cases[f"{norm} {width}"] = lambda n=norm, w=width, b=bias: both(
                op[n](meta(4, 4096, w), meta(w), *b, 1e-5)
            )
            cases[f"add_{norm} {width}"] = lambda n=norm, w=width, b=bias: both(
                op[f"add_{n}"](meta(4, 4096, w), meta(4, 4096, w), meta(w), *b, 1e-5, 0.1, rows)
            )
            cases[f"stream_{norm} {width}"] = lambda n=norm, w=width, b=bias: both(
                op[f"add_{n}"](meta(4, 4096, w), None, meta(w), *b, 1e-5)
            )
    for width in (3072, 14336):
        for exact in ("tanh", "none"):
            cases[f"gelu bias {exact} {width}"] = lambda w=width, a=exact: both(
                op["gelu"](meta(4, 4096, w), meta(w), a)
            )
        cases[f"gelu {width}"] = lambda w=width: both(op["gelu"](meta(4, 4096, w)))
        cases[f"swiglu {width}"] = lambda w=width: both(op["swiglu"](meta(4, 4096, 2 * w)))
    for heads, width in ((24, 64), (40, 128)):
        cases[f"rotary {heads} x {width}"] = lambda h=heads, w=width: both(
            op["rotary"](meta(4, 4096, h, w), meta(4096, dtype=torch.int64), 1e4)
        )
    labels = meta(16384, dtype=torch.int64)
    for vocabulary in (2048, 50304, 128256):
        cases[f"cross_entropy {vocabulary}"] = lambda v=vocabulary: both(
            op["cross_entropy"](meta(16384, v), labels)
        )
    cases["linear_cross_entropy"] = lambda: both(
        op["linear_cross_entropy"](meta(16384, 4096), meta(128256, 4096), labels)
    )
    flat = functools.partial(meta, 1 << 28, dtype=torch.float32, grad=False)
    half = functools.partial(meta, 1 << 28, grad=False)
    adamw = dict(step=3, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    scale = torch.empty((), device="meta")
    cases["adamw_"] = lambda: op["adamw_"](
        flat(), half(), flat(), flat(), grad_scale=scale, low=half(), **adamw
    )
    cases["adamw_ float32"] = lambda: op["adamw_"](flat(), flat(), flat(), flat(), **adamw)
    halves = dict(residual=meta(1 << 28, dtype=torch.int16), ties=meta(1 << 25, dtype=torch.uint8))
    cases["adamw_ split"] = lambda: op["adamw_"](
        half(), half(), flat(), flat(), grad_scale=scale, **halves, **adamw
    )
    draws = Draws((1, 2), 64)
    cases["adamw_ narrow"] = lambda: op["adamw_"](
        flat(), half(), half(), half(), grad_scale=scale, low=half(), draws=draws, **adamw
    )
    cases["adamw_ split, narrow"] = lambda: op["adamw_"](
        half(), half(), half(), half(), grad_scale=scale, draws=draws, **halves, **adamw
    )
    cases["sgd_ split"] = lambda: op["sgd_"](
        half(), half(), flat(), lr=0.1, momentum=0.9, nesterov=True, **halves
    )
    cases["lion_ split"] = lambda: op["lion_"](
        half(), half(), flat(), lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, **halves
    )
    cases["sgd_"] = lambda: op["sgd_"](
        flat(), half(), flat(), lr=0.1, momentum=0.9, nesterov=True, low=half()
    )
    cases["lion_"] = lambda: op["lion_"](
        flat(), half(), flat(), lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1
    )
    cases["square_sum"] = lambda: op["square_sum"]([half(), flat()])
    ids, table = meta(4, 4096, dtype=torch.int64), meta(128256, 4096, dtype=torch.float32, grad=False)
    cases["embedding_grad_"] = lambda: op["embedding_grad_"](table, meta(4, 4096, 4096), ids)
    documents = meta(4, 4096, dtype=torch.int64)
    for head in (64, 128):
        q, k = meta(4, 4096, 2048 // head, head), meta(4, 4096, 512 // head, head)
        attentions: dict[str, dict[str, Any]] = {
            "causal": {}, "full": dict(mask=FULL), "window": dict(window=512), "ring step": dict(offsets=(4096, 1024)),
            "documents": dict(mask=Mask(documents=documents)),
        }  # fmt: skip
        for kind, options in attentions.items():
            cases[f"attend {kind} {head}"] = lambda q=q, k=k, o=options: both(op["attend_lse"](q, k, k, **o))
        wide = [meta(4, 4096, n, head, dtype=torch.float32) for n in (2048 // head, 512 // head)]
        cases[f"attend float32 {head}"] = lambda q=wide[0], k=wide[1]: both(op["attend_lse"](q, k, k))
    widest = meta(2, 4096, 8, 256)
    cases["attend causal 256"] = lambda: both(op["attend_lse"](widest, widest, widest))
    huge = functools.partial(meta, (1 << 32) + 1024, grad=False)  # sizes that need 64 bits are other types
    wide = functools.partial(meta, (1 << 32) + 1024, dtype=torch.float32, grad=False)
    cases["adamw_ beyond 2**31"] = lambda: op["adamw_"](wide(), huge(), wide(), wide(), low=huge(), **adamw)
    cases["square_sum beyond 2**31"] = lambda: op["square_sum"]([huge()])
    cases["gelu beyond 2**31"] = lambda: both(op["gelu"](meta(1 << 20, 4096)))
    cases["rms_norm beyond 2**31"] = lambda: both(op["rms_norm"](meta(1 << 20, 4096), meta(4096), 1e-5))
    cases["cross_entropy beyond 2**31"] = lambda: both(
        op["cross_entropy"](meta(20000, 128256), meta(20000, dtype=torch.int64))
    )
    for draw in ("normal", "uniform"):
        cases[draw] = lambda d=draw: op[d]((1, 2), 0, 1 << 28, device="meta")
    return cases


# ------------------------------------------------------------------------------------------------------- main


def table(rows: list[Row]) -> str:
    columns = ("case", "kernel", "arch", "warps", "regs", "spill", "shared", "128/loads", "mma")
    layout = "{:30} {:24} {:7} {:>5} {:>4} {:>5} {:>7} {:>9} {:>4}"
    lines = [
        layout.format(
            r.launch.case, r.launch.kernel, r.arch, r.warps, r.registers, r.spills, r.shared_bytes,
            f"{r.loads_128}/{r.loads}", r.tensor_core,
        )
        + "".join(f"  FAULT {fault}" for fault in r.faults)
        for r in rows
    ]  # fmt: skip
    head = layout.format(*columns)
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", default=["sm_90", "sm_80"])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter compiles nothing"
    from colossal_lite.kernels.launch import load

    load()
    cases = {name: case for name, case in production_cases().items() if arguments.only in name}
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        # Forks of a process that has loaded torch and triton, and has no thread yet (backward makes them).
        with multiprocessing.get_context("fork").Pool(2) as pool:
            tasks = [(launch, arch) for arch in arguments.architectures for launch in noted(cases, arch)]
            found = pool.map(compiled, tasks, chunksize=1)
    rows = [
        row
        for arch in arguments.architectures
        for row in read([made for made in found if made.row.arch == arch])
    ]
    print(table(rows))
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
