"""Encodes, decodes and checks the manifest of a checkpoint, plans reads and writes, and compares configurations.

Note: the manifest.
`manifest.json` is one line of JSON, `{"crc32": ..., "content": ...}`.  The checksum is that of the content's bytes, so
any changed byte is found.  The content lists every tensor by its global name with dtype, global shape and slices.  A
slice is a box of the tensor, a file, an interval of its bytes, and a checksum.  A file's safetensors header follows
from its slices.  So a file is correct if its header equals that one byte for byte, and each slice has its checksum.
The manifest holds no code and no path outside its directory.
Cost: about 150 bytes a slice, checked in full before a tensor is read.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as dataclass_of_pydantic

from colossal_lite.checkpoint.manifest_parser import bounded, parse
from colossal_lite.config.config import Config
from colossal_lite.sharding.boxes import Box, Fragment, cut, extent, held, intersect, volume, within, written
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec

MANIFEST = "manifest.json"
LIMIT_BYTES = 1 << 30
"""of a manifest; a manifest of 4,096 ranks has a tenth of this"""
MOST_DIMS = 8
PAIRS_A_BOX = 256
"""comparisons of slices, for each slice of a tensor"""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_ENVELOPE = re.compile(rb'\{"crc32":"([0-9a-f]{8})","content":(.*)\}\n', re.DOTALL)

_SERIAL = re.compile(rb'\{"format":1,"serial":([0-9]{1,15}),')


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The text names the directory, the file and the tensor; control
    characters in these names are escaped."""

    def __init__(self, text: str) -> None:
        super().__init__(escaped(text))


class MisfitError(CheckpointError, ValueError):
    """A checkpoint of another model, or of settings with which it cannot be loaded."""


class ExtraError(CheckpointError, ValueError):
    """What a user gives as `extra` is not what a manifest holds."""


STRICT = ConfigDict(extra="forbid", strict=True)


class _Part(BaseModel):
    model_config = STRICT | ConfigDict(frozen=True, ser_json_inf_nan="constants")


Size = Annotated[int, Field(ge=0, lt=1 << 48)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass_of_pydantic(frozen=True, slots=True, config=STRICT)
class Slice:
    """One box of a tensor, in bytes [start, stop) of the data of `file`."""

    box: Annotated[tuple[tuple[Size, Size], ...], Field(max_length=MOST_DIMS)]
    file: Annotated[str, Field(pattern=r"^shard-\d{5,8}-\d{3,6}\.safetensors$")]
    start: Size
    stop: Size
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass_of_pydantic(frozen=True, slots=True, config=STRICT)
class Stored:
    """A whole tensor: its safetensors dtype, global shape, and slices that are disjoint and cover it."""

    dtype: Literal[tuple(ITEM_BYTES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[Size, ...], Field(max_length=MOST_DIMS)]
    slices: tuple[Slice, ...]


class _Facts(_Part):
    """Facts that a checkpoint states beside its tensors."""

    format: Literal[1] = 1
    serial: Size = 0
    """number of this save into its folder, 0: unknown; the newest has the highest, whatever its step"""
    parent: str | None = Field(default=None, max_length=40)
    """the checkpoint that the run had loaded or saved before it"""
    step: Size
    samples: Size
    """samples of the run's stream that the steps have used"""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    """of initial weights, dropout and the order of samples: with step and samples, all of their state"""
    config: dict[str, Any]
    """resolved settings by path"""
    mesh: dict[str, Size]
    model: dict[str, Any] | None = None
    """the model's own configuration, if it states one"""
    updates: dict[str, Size] = {}
    """optimizer steps that each parameter has taken"""
    loss_scale: tuple[Annotated[float, Field(gt=0)], Size] | None = None
    """fp16 with a dynamic scale: the scale, and the finite steps since it last changed"""
    extra: dict[str, Any] = {}
    """facts of the run that is being trained"""
    unit_seconds: tuple[tuple[Seconds, Seconds, Seconds], ...] | None = None
    """of F, I and W of each unit, by which a profiled pipeline was cut"""
    most_samples: Size = 0
    """of one step of the run, 0: unknown"""


class Manifest(_Facts):
    """The content of a manifest: all tensors, and the facts of the run."""

    tensors: dict[str, Stored] = Field(min_length=1)

    def by_file(self) -> dict[str, list[tuple[str, Stored, Slice]]]:
        """The slices of every file, in order of their bytes."""
        found: dict[str, list[tuple[str, Stored, Slice]]] = {}
        for name, stored in self.tensors.items():
            for part in stored.slices:
                found.setdefault(part.file, []).append((name, stored, part))
        return {file: sorted(rows, key=lambda row: row[2].start) for file, rows in sorted(found.items())}

    @property
    def is_imported(self) -> bool:
        """Whether it comes from no run: it has weights, and no configuration."""
        return not self.config

    @property
    def data_bytes(self) -> int:
        return sum(part.stop - part.start for stored in self.tensors.values() for part in stored.slices)


EXTRA = "extra: "
"""How a fault of it begins."""
PLAIN = (
    "legal: a dict of texts, numbers, None, lists, and dicts with texts as keys; for a tensor x x.tolist()"
)


def plain(extra: Any) -> dict[str, Any]:
    """A copy of `extra`, as a manifest holds it. Tuples are lists in it. Raises ExtraError for what it
    cannot hold, and for keys that would come back as texts."""
    if not isinstance(extra, Mapping):
        raise ExtraError(f"{EXTRA}{type(extra).__name__}; {PLAIN}")
    copied = dict[str, Any]()
    for key, value in extra.items():
        try:
            text = json.dumps(value, ensure_ascii=False)
            f"{key}{text}".encode()
            _refuse_keys({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise ExtraError(f"{EXTRA}{key!r}: {error}; {PLAIN}") from error
        copied[key] = json.loads(text)
    try:
        bounded(json.dumps(copied, ensure_ascii=False, separators=(",", ":")).encode(), "extra")
    except ValueError as error:
        raise ExtraError(f"{error}; {PLAIN}") from error
    return copied


def _refuse_keys(value: Any) -> None:
    """Raises ValueError for a key that JSON would give as a text."""
    for key in value if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} would come back as a text")
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _refuse_keys(inner)


def encode(manifest: Manifest) -> bytes:
    content = manifest.model_dump_json().encode()
    return b'{"crc32":"%08x","content":%s}\n' % (zlib.crc32(content), content)


def serial_of(data: bytes) -> int | None:
    """The serial of a manifest whose checksum is right; None for any other."""
    match = _ENVELOPE.fullmatch(data)
    if match is None or zlib.crc32(memoryview(data)[match.start(2) : match.end(2)]) != int(match[1], 16):
        return None
    head = _SERIAL.match(data, match.start(2))
    return int(head[1]) if head else 0


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, checked in itself. Raises CheckpointError with `where` and the fault."""
    match = _ENVELOPE.fullmatch(data)
    if match is None:
        raise CheckpointError(f"{where}: is not a checkpoint manifest, or is cut short")
    found = zlib.crc32(memoryview(data)[match.start(2) : match.end(2)])
    if found != int(match[1], 16):
        raise CheckpointError(f"{where}: checksum is {found:08x}, not {match[1].decode()} as stated")
    try:
        facts, updates, tensors = parse(
            data, match.start(2), match.end(2), slice_of=_SLICE.validate_json, tensor_of=_stored
        )
        known = dict(_Facts.model_validate_json(facts))
        manifest = Manifest.model_validate(known | {"updates": updates, "tensors": tensors})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{where}: {path}: {first['msg']} ({error.error_count()} faults)") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {str(error)[:300]}") from None
    fault = next(_faults(manifest), None)
    if fault is not None:
        raise CheckpointError(f"{where}: {fault}")
    return manifest


_SLICE, _HEAD = TypeAdapter(Slice), TypeAdapter(Stored)


def _stored(head: bytes, slices: list[Slice]) -> Stored:
    """A tensor of its dtype and shape, as JSON, and its slices."""
    empty = _HEAD.validate_json(b'{%s,"slices":[]}' % head)
    return replace(empty, slices=tuple(slices))


def escaped(text: str) -> str:
    """The text with every character that a terminal obeys, or does not show, as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def header(rows: list[tuple[str, Stored, Slice]]) -> bytes:
    """The safetensors header of one file with these slices: length and padding included."""
    entries = {
        _entry_name(name, stored, part): {
            "dtype": stored.dtype,
            "shape": list(extent(part.box)),
            "data_offsets": [part.start, part.stop],
        }
        for name, stored, part in rows
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry_name(name: str, stored: Stored, part: Slice) -> str:
    if extent(part.box) == stored.shape:
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in part.box)}]"


def _faults(manifest: Manifest) -> Iterator[str]:
    """Yields faults of contents whose checksum is right: this package never writes them."""
    for name, stored in manifest.tensors.items():
        for part in stored.slices:
            inside = len(part.box) == len(stored.shape) and all(
                start < stop <= size for (start, stop), size in zip(part.box, stored.shape, strict=False)
            )
            if not inside:
                yield f"tensor {name}: slice {part.box} does not lie in its shape {stored.shape}"
            elif part.stop - part.start != volume(part.box) * ITEM_BYTES[stored.dtype]:
                yield f"tensor {name}: slice {part.box} has {part.stop - part.start} bytes"
        boxes = [part.box for part in stored.slices]
        numel = volume(tuple((0, size) for size in stored.shape))
        if sum(map(volume, boxes)) != numel or overlaps(boxes):
            yield f"tensor {name}: its slices do not cover its shape {stored.shape} once"
    for file, rows in manifest.by_file().items():
        ends = [0, *(part.stop for _, _, part in rows)]
        for end, (name, _, part) in zip(ends, rows, strict=False):
            if part.start != end:
                yield f"{file}: bytes of tensor {name} begin at {part.start}, not at {end}"


def overlaps(boxes: Sequence[Box]) -> bool:
    """Whether two boxes meet. Raises ValueError if that would take more than `PAIRS_A_BOX` comparisons a box."""
    if len(boxes) < 2:
        return False
    if not boxes[0]:
        return True
    for dim in range(len(boxes[0])):
        groups: dict[tuple[int, int], list[Box]] = {}
        for box in boxes:
            groups.setdefault(box[dim], []).append(box[:dim] + box[dim + 1 :])
        order = sorted(groups)
        if all(a[1] <= b[0] for a, b in itertools.pairwise(order)):
            return any(overlaps(group) for group in groups.values())
    return _sweep(boxes, min(range(len(boxes[0])), key=lambda dim: _most_at_once(boxes, dim)))


def _sweep(boxes: Sequence[Box], dim: int) -> bool:
    """`overlaps`, comparing each box only with those that begin within it in one dimension."""
    order = sorted(boxes, key=lambda box: box[dim])
    pairs_left = PAIRS_A_BOX * len(boxes)
    for index, box in enumerate(order):
        for later in range(index + 1, len(order)):
            if (other := order[later])[dim][0] >= box[dim][1]:
                break
            pairs_left -= 1
            if pairs_left < 0:
                raise ValueError(f"a tensor has {len(boxes)} slices that no dimension tells apart")
            if intersect(box, other) is not None:
                return True
    return False


def _most_at_once(boxes: Sequence[Box], dim: int) -> int:
    """The most boxes over one index of a dimension."""
    ends = sorted(end for box in boxes for end in ((box[dim][0], 1), (box[dim][1], -1)))
    return max(itertools.accumulate(step for _, step in ends))


# ---------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class TensorSlice:
    """The elements [start, stop) that one rank holds of its flattened local tensor (stop None: to the end).

    `flat_axes`: leaf axes whose ranks hold other intervals of the same local tensor. `is_copy`: a rank of another
    pipeline stage writes it.
    """

    name: str
    dtype: str
    spec: ShardSpec
    start: int = 0
    stop: int | None = None
    flat_axes: tuple[str, ...] = ()
    is_copy: bool = False


@dataclass(frozen=True)
class Write:
    """One slice to write (its checksum is not known yet) from a fragment of part number `part`."""

    part: int
    fragment: Fragment
    slice: Slice


@dataclass(frozen=True)
class Read:
    """One slice to read, and the fragments of parts that it fills."""

    name: str
    dtype: str
    slice: Slice
    into: tuple[tuple[int, Fragment], ...]


def writes(
    parts: Sequence[TensorSlice], layout: MeshLayout, rank: int, *, slice_bytes: int, file_bytes: int
) -> dict[str, list[Write]]:
    """The slices that a rank writes, by file: at most `slice_bytes` a slice and `file_bytes` a file."""
    # Stages hold different tensors, so the writer does not depend on a rank's pipeline coordinate.
    coords = {axis: 0 if axis == "pipeline" else coord for axis, coord in layout.coords(rank).items()}
    files = dict[str, list[Write]]()
    name, at = "", file_bytes
    for index, part in enumerate(parts):
        if part.is_copy:
            continue
        item = ITEM_BYTES[part.dtype]
        for fragment in written(part.spec, layout, coords, part.start, part.stop, part.flat_axes):
            for box in cut(fragment.box, max(1, slice_bytes // item)):
                size = volume(box) * item
                if at and at + size > file_bytes:
                    name, at = f"shard-{rank:05}-{len(files):03}.safetensors", 0
                row = Slice(box=box, file=name, start=at, stop=at + size, crc32=0)
                inner = within(fragment, box, part.spec.local_shape(layout))
                files.setdefault(name, []).append(Write(index, inner, row))
                at += size
    return files


def reads(parts: Sequence[TensorSlice], manifest: Manifest, layout: MeshLayout, rank: int) -> list[Read]:
    """The slices that a rank needs, ordered by file and offset. The parts must fit (`misfits`)."""
    coords, found = layout.coords(rank), list[Read]()
    wanted = [(i, p, list(held(p.spec, layout, coords, p.start, p.stop))) for i, p in enumerate(parts)]
    for index, part, fragments in wanted:
        stored = manifest.tensors[part.name]
        for row in stored.slices:
            into = tuple(
                (index, within(fragment, common, part.spec.local_shape(layout)))
                for fragment in fragments
                if (common := intersect(fragment.box, row.box)) is not None
            )
            if into:
                found.append(Read(part.name, stored.dtype, row, into))
    return sorted(found, key=lambda read: (read.slice.file, read.slice.start))


MISFITS = ("missing: ", "shape: ", "dtype: ", "unexpected: ", "setting: ")
"""How a misfit begins: not in the checkpoint, of another shape or dtype, not in the run, of another setting."""


def misfits(parts: Sequence[TensorSlice], manifest: Manifest) -> list[str]:
    """Why a checkpoint cannot fill these parts."""
    mine = {part.name: part for part in parts}
    faults = [
        f"missing: {name} {part.spec.shape} is not in the checkpoint"
        for name, part in mine.items()
        if name not in manifest.tensors
    ]
    faults += [
        f"shape: {name} is {manifest.tensors[name].shape}, the run has {part.spec.shape}"
        for name, part in mine.items()
        if name in manifest.tensors and manifest.tensors[name].shape != part.spec.shape
    ]
    faults += [
        f"dtype: {name} is {manifest.tensors[name].dtype}, the run has {part.dtype}"
        for name, part in mine.items()
        if name in manifest.tensors and not _converts(manifest.tensors[name].dtype, part.dtype)
    ]
    return faults


def unexpected(names: Container[str], manifest: Manifest) -> list[str]:
    """The tensors of a checkpoint that a world with tensors of these names has not."""
    return [
        f"unexpected: {name} {stored.shape} is not in this run"
        for name, stored in manifest.tensors.items()
        if name not in names
    ]


def _converts(saved: str, wanted: str) -> bool:
    """Whether values may be converted: between floating-point formats only."""
    return saved == wanted or all("F" in dtype for dtype in (saved, wanted))


# ---------------------------------------------------------------------------------------------------- resuming

Meaning = Literal["harmless", "numeric", "impossible"]

# First match wins. A setting in no row counts as numeric: it changes the following steps.
MEANINGS: tuple[tuple[str, Meaning], ...] = (
    ("parallel.*", "harmless"),
    ("zero.*", "harmless"),
    ("memory.*", "harmless"),
    ("checkpoint.*", "harmless"),
    ("kernels", "harmless"),
    ("compile", "harmless"),
    ("activation_checkpoint", "harmless"),
    ("gradient_accumulation", "harmless"),
    ("backend", "harmless"),
    ("timeout_s", "harmless"),
    ("optimizer.type", "impossible"),
    ("model.transformers_version", "harmless"),
    ("model._name_or_path", "harmless"),
    ("model.*heads", "impossible"),
    ("model.*n_head", "impossible"),
    ("model.norm", "impossible"),
)
CHANGED: Mapping[Meaning, str] = {
    "harmless": "the same numbers, up to the order of sums",
    "numeric": "later steps differ from those of a run without the change",
    "impossible": "the saved state does not fit",
}
ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """One setting that differs between a checkpoint and the run that loads it."""

    path: str
    saved: Any
    now: Any
    meaning: Meaning

    def __str__(self) -> str:
        return f"{escaped(self.path)} was {self.saved!r}, is {self.now!r}: {CHANGED[self.meaning]}"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """The settings that differ between two resolved configurations (path -> value), the gravest first.

    Empty if `saved` is empty. A setting that is newer than the checkpoint had its default."""
    if not saved:
        return ()
    defaults = Config().values()
    saved = {path: defaults[path] for path in now if path in defaults} | dict(saved)
    found = [
        Change(path, saved.get(path, ABSENT), now.get(path, ABSENT), _meaning(path))
        for path in {**saved, **now}
        if saved.get(path, ABSENT) != now.get(path, ABSENT)
    ]
    order = ("impossible", "numeric", "harmless")
    return tuple(sorted(found, key=lambda change: order.index(change.meaning)))


def model_changes(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> tuple[Change, ...]:
    """The settings of the model itself that differ, where both state a value."""
    both = {name: (value, (now or {}).get(name)) for name, value in (saved or {}).items()}
    return tuple(
        Change(path := f"model.{name}", then, value, _meaning(path))
        for name, (then, value) in both.items()
        if None not in (then, value) and then != value
    )


def _meaning(path: str) -> Meaning:
    return next((meaning for pattern, meaning in MEANINGS if fnmatchcase(path, pattern)), "numeric")
