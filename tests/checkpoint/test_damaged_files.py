"""Damaged and hostile checkpoints: found, named, and harmless."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from colossal_lite.checkpoint import checkpointer, manifest
from colossal_lite.checkpoint.checkpointer import Checkpointer
from colossal_lite.checkpoint.files import inspect, listed, read_manifest, verify
from colossal_lite.checkpoint.manifest import CheckpointError, header
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of
from tests.checkpoint.test_checkpointer import peak_bytes, reset_peak

ROOT = Path(__file__).parents[2]
SHAPES = {
    "model/a.weight": (7, 5),
    "model/a.bias": (7,),
    "exp_avg/a.weight": (7, 5),
    "exp_avg_sq/a.weight": (7, 5),
}


def held_of(fill: Callable[[tuple[int, ...]], torch.Tensor] = torch.rand) -> list[HeldTensor]:
    return [HeldTensor(name, ShardSpec(name, dims_of(shape)), fill(shape)) for name, shape in SHAPES.items()]


def disk() -> Checkpointer:
    return Checkpointer(MeshLayout.build(), 0, HashStore(), keep=3, timeout_s=5, heard=str)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of 4 tensors, 9 slices and 4 files."""
    monkeypatch.setattr(checkpointer, "SLICE_BYTES", 60)
    monkeypatch.setattr(checkpointer, "FILE_BYTES", 140)
    torch.manual_seed(0)
    facts = RunFacts(5, 50, 7, {"seed": 7}, None, {"a.weight": 5}, {})
    return disk().save(tmp_path / "run", held_of(), facts, asynchronous=False).wait()


# ---------------------------------------------------------------------------------------------------- damage

Damage = Callable[[Path, random.Random], list[str]]


def _any_file(path: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path.iterdir()))


def _named(path: Path, file: Path, at: int) -> list[str]:
    """What must be named for byte `at` of a file: the file, and the tensor if it is data."""
    if file.name == "manifest.json":
        return [str(file)]
    rows = inspect(path).by_file()[file.name]
    base = len(header(rows))
    return [str(file), *(name for name, _, part in rows if part.start <= at - base < part.stop)]


def flip(path: Path, chance: random.Random) -> list[str]:
    file = _any_file(path, chance)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    named = _named(path, file, at)
    data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return named


def overwrite(path: Path, chance: random.Random) -> list[str]:
    file = _any_file(path, chance)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    named = _named(path, file, at)
    data[at] = (data[at] + chance.randrange(1, 256)) % 256
    file.write_bytes(data)
    return named


def truncate(path: Path, chance: random.Random) -> list[str]:
    file = _any_file(path, chance)
    os.truncate(file, chance.randrange(file.stat().st_size))
    return [str(file)]


def append(path: Path, chance: random.Random) -> list[str]:
    file = _any_file(path, chance)
    with open(file, "ab") as out:
        out.write(bytes(chance.randrange(1, 20)))
    return [str(file)]


def drop(path: Path, chance: random.Random) -> list[str]:
    file = _any_file(path, chance)
    file.unlink()
    return [str(file)]


def swap_files(path: Path, chance: random.Random) -> list[str]:
    a, b = chance.sample(sorted(path.glob("*.safetensors")), 2)
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)
    return [str(min(a, b))]


def swap_bytes(path: Path, chance: random.Random) -> list[str]:
    """Two elements of one file change places."""
    file = chance.choice(sorted(path.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    base = len(header(inspect(path).by_file()[file.name]))
    i, j = chance.sample(range(base, len(data), 4), 2)
    named = _named(path, file, i)
    data[i : i + 4], data[j : j + 4] = data[j : j + 4], data[i : i + 4]
    file.write_bytes(data)
    return named


def edit(path: Path, chance: random.Random) -> list[str]:
    """A number in the manifest is another one."""
    file = path / "manifest.json"
    text = file.read_text()
    digits = [i for i, letter in enumerate(text) if letter.isdigit()]
    at = chance.choice(digits)
    file.write_text(text[:at] + str((int(text[at]) + chance.randrange(1, 10)) % 10) + text[at + 1 :])
    return [str(file)]


DAMAGES: tuple[Damage, ...] = (flip, overwrite, truncate, append, drop, swap_files, swap_bytes, edit)


def test_each_of_500_damages_is_found_and_named(saved: Path) -> None:
    assert list(verify(saved)) == []
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    for seed in range(500):
        chance = random.Random(seed)
        damage = DAMAGES[seed % len(DAMAGES)]
        named = damage(saved, chance)
        after = {file.name: file.read_bytes() for file in saved.iterdir()}
        faults = list(verify(saved))
        assert after != before and faults, f"{damage.__name__} {seed} was not found"
        assert any(all(name in fault for name in named) for fault in faults), (damage.__name__, named, faults)
        with pytest.raises(CheckpointError) as caught:
            disk().load(saved, held_of(), {"seed": 7})
        assert named[0] in str(caught.value)
        for name, data in before.items():
            if after.get(name) != data:
                (saved / name).write_bytes(data)
    assert list(verify(saved)) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_for_the_one_before(saved: Path, damage: Damage) -> None:
    older = saved.parent / "step-00000004"
    shutil.copytree(saved, older)
    rewrite(older, lambda content: content.update(step=4))
    damage(saved, random.Random(1))
    held = held_of(torch.zeros)
    loaded = disk().load(saved.parent, held, {"seed": 7})
    assert loaded is not None and loaded.path == older and len(loaded.skipped) == 1
    assert all(one.tensor.any() for one in held)


def renamed(path: Path) -> Path:
    return path.rename(path.with_name("step-00000009"))


def linked_from(path: Path) -> Path:
    """Another run's folder, linked from this one."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir()
    path.rename(elsewhere / "theirs")
    path.symlink_to(elsewhere / "theirs")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, "holds step 5: it was renamed; legal: step-00000005, or a name that is no step's"),
        (linked_from, "/elsewhere/theirs, and a run resumes only from a folder of its own; legal: a copy"),
    ],
)
def test_a_step_folder_that_is_renamed_or_linked_is_told_and_the_one_before_is_taken(
    saved: Path, change: Callable[[Path], Path], said: str
) -> None:
    older = saved.parent / "step-00000004"
    shutil.copytree(saved, older)
    rewrite(older, lambda content: content.update(step=4))
    path = change(saved)
    loaded = disk().load(saved.parent, held_of(torch.zeros), {"seed": 7})
    assert loaded is not None and loaded.path == older
    (skipped,) = loaded.skipped
    assert (
        skipped.startswith(f"{path}: ")
        and said in skipped
        and [said in fault for fault in verify(path)] == [True]
    )
    with pytest.raises(CheckpointError, match=path.name):
        disk().load(path, held_of(), {"seed": 7})
    other = path.resolve().rename(path.parent / "best")
    best = disk().load(other, held_of(torch.zeros), {"seed": 7})
    assert best is not None and best.step == 5


# --------------------------------------------------------------------------------------------------- malice


class Evil:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("EXECUTED",)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with a right checksum and wrong content."""
    content = json.loads((path / "manifest.json").read_bytes())["content"]
    change(content)
    sign(path, json.dumps(content).encode())


def sign(path: Path, content: bytes) -> None:
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","content":%s}\n' % (zlib.crc32(content), content))


def first(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"]["model/a.weight"]
    return found


def set_slice(**values: Any) -> Callable[[Path], object]:
    return lambda path: rewrite(path, lambda content: first(content)["slices"][0].update(values))


def set_tensor(**values: Any) -> Callable[[Path], object]:
    return lambda path: rewrite(path, lambda content: first(content).update(values))


def set_top(**values: Any) -> Callable[[Path], object]:
    return lambda path: rewrite(path, lambda content: content.update(values))


def shard(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


def replaced(data: bytes) -> Callable[[Path], object]:
    return lambda path: shard(path).write_bytes(data)


def zipped(size: int) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(size))
    return out.getvalue()


def torch_file() -> bytes:
    out = BytesIO()
    torch.save({"a": torch.ones(3)}, out)
    return out.getvalue()


def linked(name: Callable[[Path], Path], to: str) -> Callable[[Path], object]:
    def link(path: Path) -> None:
        file = name(path)
        shutil.move(file, path.parent.parent / "moved")
        file.symlink_to(to.format(moved=path.parent.parent / "moved"))

    return link


def odd(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def swap(path: Path) -> None:
        file = shard(path)
        file.unlink()
        make(file)

    return swap


def header_says(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A shard whose own header is changed, with the same length."""

    def rewrite_header(path: Path) -> None:
        data = shard(path).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        change(entries)
        text = json.dumps(entries, separators=(",", ":")).encode()[:size].ljust(size)
        shard(path).write_bytes(data[:8] + text + data[8 + size :])

    return rewrite_header


def sparse(path: Path) -> None:
    """A tensor of 4 TiB in a file of holes, and a manifest that agrees with it."""
    name = "shard-00001-000.safetensors"
    row = {"box": [[0, 1 << 40]], "file": name, "start": 0, "stop": 1 << 42, "crc32": 0}
    rewrite(path, lambda c: c["tensors"].update(big={"dtype": "F32", "shape": [1 << 40], "slices": [row]}))
    text = header(read_manifest(path).by_file()[name])
    with open(path / name, "wb") as file:
        file.write(text)
        try:
            file.truncate(len(text) + (1 << 42))
        except OSError:  # the file system does not hold such files: what is there is too short then
            return


MALICE: dict[str, Callable[[Path], object]] = {
    # code in disguise
    "pickle as manifest": lambda path: (path / "manifest.json").write_bytes(pickle.dumps(Evil())),
    "pickle as shard": replaced(pickle.dumps(Evil())),
    "pickle in the content": lambda path: sign(path, pickle.dumps(Evil())),
    "torch file as shard": replaced(torch_file()),
    "torch file as manifest": lambda path: (path / "manifest.json").write_bytes(torch_file()),
    "zip bomb as shard": replaced(zipped(1 << 26)),
    "zip bomb as manifest": lambda path: (path / "manifest.json").write_bytes(zipped(1 << 26)),
    "python as manifest": lambda path: (path / "manifest.json").write_text(
        "__import__('os').mkdir('EXECUTED')"
    ),
    "python as config": set_top(config="__import__('os').mkdir('EXECUTED')"),
    # places outside
    "file above": set_slice(file="../moved"),
    "file above by another way": set_slice(file="shard-00000-000.safetensors/../../moved"),
    "absolute file": set_slice(file="/etc/passwd"),
    "file of a user": set_slice(file="~/secret"),
    "file with a NUL": set_slice(file="shard-00000-000.safetensors\0"),
    "file with a newline": set_slice(file="shard-00000-000.safetensors\n"),
    "file of other digits": set_slice(file="shard-0000٣-000.safetensors"),
    "file of the manifest": set_slice(file="manifest.json"),
    "no file name": set_slice(file=""),
    "a number as file": set_slice(file=0),
    "a URL as file": set_slice(file="http://127.0.0.1/shard-00000-000.safetensors"),
    "shard is a link outside": linked(shard, "{moved}"),
    "shard is a link to a device": linked(shard, "/dev/zero"),
    "manifest is a link outside": linked(lambda path: path / "manifest.json", "{moved}"),
    "shard is a pipe": odd(os.mkfifo),
    "shard is a folder": odd(os.mkdir),
    "shard is a link to itself": odd(lambda file: file.symlink_to(file)),
    # sizes
    "header of 2**62 bytes": lambda path: shard(path).write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "header of 2**64 - 1 bytes": lambda path: shard(path).write_bytes(b"\xff" * 8 + b"{}"),
    "empty shard": replaced(b""),
    "shard of 8 bytes": replaced(bytes(8)),
    "sparse file of 4 TiB": sparse,
    "shape of 2**47": set_tensor(shape=[1 << 47, 1 << 47]),
    "shape that overflows": set_tensor(shape=[1 << 63, 5]),
    "negative shape": set_tensor(shape=[-7, 5]),
    "shape of fractions": set_tensor(shape=[7.5, 5]),
    "shape of text": set_tensor(shape=["7", "5"]),
    "shape of nine dims": set_tensor(shape=[1] * 9),
    "shape of another order": set_tensor(shape=[5, 7]),
    "no shape": set_tensor(shape=None),
    # slices
    "box outside": set_slice(box=[[0, 9], [0, 5]]),
    "box backwards": set_slice(box=[[3, 0], [0, 5]]),
    "box of another rank": set_slice(box=[[0, 3]]),
    "interval outside": set_slice(start=1 << 40, stop=(1 << 40) + 60),
    "interval backwards": set_slice(start=60, stop=0),
    "negative interval": set_slice(start=-60, stop=0),
    "checksum too large": set_slice(crc32=1 << 32),
    "checksum of another": set_slice(crc32=1),
    "a slice twice": lambda path: rewrite(path, lambda c: first(c)["slices"].append(first(c)["slices"][0])),
    "a slice missing": lambda path: rewrite(path, lambda c: first(c)["slices"].pop()),
    "unknown key of a slice": set_slice(load="EXECUTED"),
    # dtypes
    "unknown dtype": set_tensor(dtype="O"),
    "dtype of the same size": set_tensor(dtype="I32"),
    "dtype of another size": set_tensor(dtype="F64"),
    "header with another dtype": header_says(lambda h: next(iter(h.values())).update(dtype="I32")),
    "header with other offsets": header_says(lambda h: next(iter(h.values())).update(data_offsets=[0, 0])),
    "header with metadata": header_says(lambda h: h.update(__metadata__={"a": "b"})),
    # text
    "a million keys": lambda path: sign(
        path, b'{"config":{%s}}' % b",".join(b'"%d":0' % i for i in range(10**6))
    ),
    "nested a hundred thousand deep": lambda path: sign(
        path, b'{"config":' * 100_000 + b"1" + b"}" * 100_000
    ),
    "a number of a million digits": lambda path: sign(path, b'{"step":' + b"9" * 10**6 + b"}"),
    "not a number": lambda path: sign(path, b'{"step":NaN}'),
    "not text": lambda path: sign(path, b'{"step":"\xff\xfe"}'),
    "no object": lambda path: sign(path, b"[]"),
    "nothing": lambda path: (path / "manifest.json").write_bytes(b""),
    "another format": set_top(format=2),
    "a negative step": set_top(step=-1),
    "a step of text": set_top(step="5"),
    "no tensors": set_top(tensors={}),
    "unknown key": set_top(code="print()"),
}


def test_there_are_60_hostile_inputs() -> None:
    assert len(MALICE) >= 60


def everything(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(root.rglob("*"))}


@pytest.mark.parametrize("name", MALICE)
def test_hostile_input_does_nothing_and_is_named(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    MALICE[name](saved)
    before = everything(tmp_path)
    held = held_of(torch.zeros)
    start = time.monotonic()  # one that hangs or fills the memory is no answer
    with pytest.raises(CheckpointError) as caught:
        disk().load(saved.parent, held, {"seed": 7})
    assert time.monotonic() - start < 20
    assert str(saved) in str(caught.value) and len(str(caught.value)) < 2000
    assert everything(tmp_path) == before and not (tmp_path / "EXECUTED").exists()
    if name != "sparse file of 4 TiB":
        assert [str(saved) in fault for fault in verify(saved)][0]


def test_a_folder_of_other_things_holds_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step-1", "step-00000001.bak", ".tmp-step-00000001-ab", "latest", "step-00000001-x"):
        (tmp_path / name).mkdir()
    assert listed(tmp_path) == [] and listed(tmp_path / "none") == []
    assert disk().load(tmp_path, held_of(), {}, missing_ok=True) is None


# ----------------------------------------------------------------------------------------------- the bounds

BOMB = """
import os, resource, sys, time, zlib
from pathlib import Path
from colossal_lite.checkpoint.files import read_manifest
from colossal_lite.checkpoint.manifest import CheckpointError

for path in sys.argv[1:]:
    if child := os.fork():  # a child has no memory of the manifests before, and imports nothing anew
        assert os.waitpid(child, 0)[1] == 0
        continue
    before, start, text = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), "read"
    try:
        read_manifest(Path(path))
    except CheckpointError as error:
        text = str(error)[:200]
    took_s = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(grown, took_s, repr(text), sep="|", flush=True)
    os._exit(0)
"""
HEAD = b'"step":1,"samples":0,"seed":0,"config":{},"mesh":{},'
ROW = b'{"box":[[%d,%d],[0,4]],"file":"shard-00000-000.safetensors","start":%d,"stop":%d,"crc32":7}'


def one_tensor(slices: Iterator[bytes], shape: bytes) -> bytes:
    return b'{"format":1,%s"tensors":{"t":{"dtype":"F32","shape":%s,"slices":[%s]}}}' % (
        HEAD,
        shape,
        b",".join(slices),
    )


def bombs(size: int) -> dict[str, bytes]:
    """Texts of about `size` bytes; all but one are not a manifest."""
    stuff = {
        "lists": b"[" + b"[]," * (size // 3) + b"0]",
        "objects": b"[" + b"{}," * (size // 3) + b"0]",
        "floats": b"[" + b"1.5," * (size // 4) + b"0]",
        "keys": b"{" + b",".join(b'"%x":0' % i for i in range(size // 10)) + b"}",
    }
    found = {f"{name} as {key}": b'{"format":1,%s"%s":%s}' % (HEAD, key.encode(), text)
             for name, text in stuff.items() for key in ("extra", "updates", "tensors")}  # fmt: skip
    count = size // 110
    rows = (ROW % (i, i + 1, 16 * i, 16 * i + 16) for i in range(count))
    found["rows of slices"] = one_tensor(rows, b"[%d,4]" % count)
    same = (ROW % (0, 4, 64 * i, 64 * i + 64) for i in range(count))
    found["the same slice"] = one_tensor(same, b"[%d,4]" % (4 * count))
    apart = (  # all begin in one place of each dimension, and only a comparison of pairs tells that none meet
        b'{"box":[[%d,%d],[%d,%d]],"file":"shard-00000-000.safetensors","start":0,"stop":4,"crc32":7}'
        % ((0, count - i, i, i + 1) if i % 2 else (count - i, count, i, i + 1))
        for i in range(count)
    )
    found["slices that interleave"] = one_tensor(apart, b"[%d,%d]" % (count, count))
    return found


def read(folder: Path, manifests: Mapping[str, bytes]) -> dict[str, tuple[float, float, str]]:
    """For each manifest its bytes of memory over its size, the CPU seconds, and what is said of it."""
    for name, text in manifests.items():
        (folder / name).mkdir()
        sign(folder / name, text)
    paths = [str(folder / name) for name in manifests]
    run = subprocess.run([sys.executable, "-c", BOMB, *paths], env=os.environ | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, timeout=300)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = {}
    for (name, text), line in zip(manifests.items(), run.stdout.splitlines(), strict=True):
        grown, took_s, said = line.split("|", 2)
        found[name] = ((int(grown) - 2**20) / len(text), float(took_s), ast.literal_eval(said))
    return found


def test_a_manifest_takes_ten_times_its_bytes_at_most_and_its_facts_24_times_theirs_and_09_mb_two_seconds(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, bombs(900_000))
    for name, (times, took_s, said) in found.items():
        most = 24 if name.endswith(" as extra") else 10  # facts are parsed whole, and have at most 4 MiB
        assert times <= most and took_s < 2.0, (name, times, took_s)
        assert (said == "read") == (name == "rows of slices"), said


def test_slices_that_no_dimension_tells_apart_are_refused_before_all_pairs_are_compared() -> None:
    """Bars along three dimensions: none meets another, and each dimension has a third of them at every place."""
    whole, count = (0, 2000), 1000
    near = [(2 * i, 2 * i + 1) for i in range(count)]
    far = [(2 * i + 1, 2 * i + 2) for i in range(count)]
    bars = [(whole, a, a) for a in near] + [(b, whole, b) for b in far]
    bars += [(a, b, whole) for a, b in zip(near, far, strict=True)]
    with pytest.raises(ValueError, match="3000 slices that no dimension tells apart"):
        manifest.overlaps(bars)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["lists as tensors", "rows of slices", "keys as updates"])
def test_nor_does_one_of_24_mb(name: str, tmp_path: Path) -> None:
    times, took_s, _ = read(tmp_path, {name: bombs(24_000_000)[name]})[name]
    assert times <= 10 and took_s < 60.0


def test_names_reach_a_terminal_escaped(saved: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["tensors"]["\x1b[2J\x07\u202emodel/x"] = content["tensors"].pop("model/a.bias") | {
            "dtype": "F64"
        }

    rewrite(saved, rename)
    with pytest.raises(CheckpointError) as caught:
        disk().load(saved, held_of(), {"seed": 7})
    for text in (str(caught.value), *verify(saved)):
        assert text.isprintable() or "\n" in text and "".join(text.split("\n")).isprintable()
        assert "tensor \\x1b[2J\\x07\\u202emodel/x" in text


PIECES = [*b'[ ] { } , : " 0 -1 1e999 null \\u0000 \xff [[[['.split(), b"9" * 30]


def mutated(clean: bytes, chance: random.Random, *, same_length: bool = False) -> bytes:
    """With one to four pieces replaced, by some of JSON or by its own."""
    data = bytearray(clean)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data))
        piece = chance.choice([*PIECES, bytes(data[chance.randrange(len(data)) :][:40])])
        cut = min(len(piece), len(data) - at) if same_length else chance.randrange(0, 12)
        data[at : at + cut] = piece[:cut] if same_length else piece
    return bytes(data)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_2000_mutated_manifests_and_headers_are_refused_in_words_or_load_what_was_saved(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chance, manifest = random.Random(5), (saved / "manifest.json").read_bytes()
    content = json.dumps(json.loads(manifest)["content"], separators=(",", ":")).encode()
    file = sorted(saved.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    whole_state, held = held_of(torch.zeros), held_of(torch.zeros)
    disk().load(saved, whole_state, {"seed": 7})
    ends = {"manifest loaded": 0, "manifest refused": 0, "header loaded": 0, "header refused": 0}
    reset_peak()
    before = peak_bytes()
    for number in range(2000):
        what = "header" if number % 2 else "manifest"
        if what == "manifest":
            file.write_bytes(whole)
            sign(saved, mutated(content, chance))
        else:
            (saved / "manifest.json").write_bytes(manifest)
            file.write_bytes(mutated(whole[:head], chance, same_length=number % 4 == 1) + whole[head:])
        untouched, start = everything(tmp_path), time.monotonic()
        try:
            disk().load(saved, held, {"seed": 7})
            ends[f"{what} loaded"] += 1
            assert all(map(torch.equal, (h.tensor for h in held), (w.tensor for w in whole_state))), number
        except CheckpointError as error:
            ends[f"{what} refused"] += 1
            assert str(saved) in str(error) and len(str(error)) < 2000, number
        faults = list(verify(saved))
        assert time.monotonic() - start < 2, number
        assert everything(tmp_path) == untouched and all(str(saved) in fault for fault in faults), number
    print(ends)
    assert peak_bytes() - before < 32 * 2**20
    assert ends["manifest refused"] > 900 and ends["header refused"] > 950
