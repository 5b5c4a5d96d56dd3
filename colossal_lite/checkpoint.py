"""Checkpoints: written whole or not at all, read on any mesh, checked byte by byte.

Note: a save.
Rank 0 makes a hidden directory beside the final one; every rank streams the slices it owns into files of its own, reads
them back and fsyncs them; rank 0 joins the ranks' rows into the manifest, fsyncs it and the directory, renames the
directory to `step-NNNNNNNN`, fsyncs the parent, and only then deletes what exceeds `keep`.  So a directory of that name
is complete, at any moment, whatever is killed; what is written over is never one that counts.  Ranks agree through keys
of the context's store, not through collectives: a save can run in a thread beside training, and a rank that saves alone
is told whom it waits for.

A load reads the newest checkpoint that is whole.  Each slice is read entirely, checked, and copied where it meets what
the rank holds, or read there at once if it fits as it is; a fault names the file and the tensor, and all ranks go on
with the checkpoint before it.  A disk that does not answer is a fault too, and for good: a read that wakes later would
write into what another load has filled.

Cost: extra memory of nine slices (16 MiB each) when loading, none for what is read in place; three when saving in
step; asynchronous, what the rank owns.
Files are safetensors, readable by its own library; nothing is pickled, nothing outside the directory is opened.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from colossal_lite.checkpoint_files import (
    DTYPES,
    NAMES,
    STEP,
    LateError,
    box_of,
    inspect,
    listed,
    read_manifest,
    stream,
    sync_directory,
    write_file,
)
from colossal_lite.layout import MeshLayout
from colossal_lite.manifest import (
    MANIFEST,
    Change,
    CheckpointError,
    Manifest,
    Part,
    Read,
    Stored,
    Write,
    changes,
    decode,
    encode,
    misfits,
    reads,
    writes,
)
from colossal_lite.memory.mover import to_host
from colossal_lite.shard import ShardSpec
from colossal_lite.slices import Fragment, extent, strides_of

SLICE_BYTES = 16 * 2**20
FILE_BYTES = 2**30
ATTEMPTS = 2
"""how often a save is tried before it is given up"""
SHARED_S = 10.0
"""how long a network file system may take to show one rank's directory to another"""
GRACE_S = 5.0
"""how much longer a save in a thread is waited for: what it waits for itself is told of first"""
_HIDDEN = ".tmp-"


class Store(Protocol):
    """What ranks agree through: torch's stores have it."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class LocalStore:
    """A store for one process."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._words[key] = value

    def get(self, key: str, /) -> bytes:
        return self._words[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._words for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._words.pop(key, None) is not None


@dataclass(frozen=True)
class Held:
    """A tensor of this rank to save or to fill: elements [start, start + numel) of the flattened local tensor of
    `spec`, contiguous. `flat_axes`: leaf axes whose ranks hold other intervals (ZeRO). `is_copy`: a rank of another
    pipeline stage saves it. `fetch` gives the elements where `tensor` has none of them (it is on the meta device), for
    a while, to be changed if it is given True."""

    name: str
    spec: ShardSpec
    tensor: Tensor
    start: int = 0
    flat_axes: tuple[str, ...] = ()
    is_copy: bool = False
    fetch: Callable[[bool], Tensor] | None = None

    def part(self) -> Part:
        stop = self.start + self.tensor.numel()
        dtype = NAMES[self.tensor.dtype]
        return Part(self.name, dtype, self.spec, self.start, stop, self.flat_axes, self.is_copy)

    def elements(self, *, write: bool = False) -> Tensor:
        """The tensor in memory, to be changed if `write`."""
        return self.tensor if self.fetch is None else self.fetch(write)

    def view(self, fragment: Fragment, layout: MeshLayout, *, write: bool = False) -> Tensor:
        """The elements of a fragment, in its shape, sharing memory; to be changed if `write`."""
        tensor = self.elements(write=write)
        assert tensor.is_contiguous(), f"{self.name}: only a contiguous tensor can be sliced flat"
        offset = tensor.storage_offset() + fragment.offset - self.start
        return tensor.as_strided(extent(fragment.box), strides_of(self.spec.local_shape(layout)), offset)


@dataclass(frozen=True)
class Facts:
    """What a save states beside its tensors; see `Manifest`. `updates` are this rank's own."""

    step: int
    samples: int
    seed: int
    config: Mapping[str, Any]
    model: Mapping[str, Any] | None
    updates: Mapping[str, int]
    extra: Mapping[str, Any]
    loss_scale: tuple[float, int] | None = None


@dataclass(frozen=True)
class Loaded:
    """What a load found: where, the manifest, what differs from the run, and what it passed over, with reasons."""

    path: Path
    manifest: Manifest
    changes: tuple[Change, ...]
    skipped: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def samples(self) -> int:
        return self.manifest.samples

    def __str__(self) -> str:
        lines = [f"resumed from {self.path}: step {self.step}, {self.samples} samples"]
        return "\n".join(
            [*lines, *(f"  passed over {text}" for text in self.skipped), *map("  {}".format, self.changes)]
        )


# --------------------------------------------------------------------------------------------- between ranks


@dataclass(frozen=True)
class Meeting:
    """Words between ranks for one save or load: each key is said once by each rank that says it."""

    store: Store
    key: str
    what: str
    rank: int
    world_size: int
    timeout_s: float
    heard: Callable[[], str]

    def say(self, word: str, value: Any = None) -> None:
        self.store.set(f"{self.key}/{word}/{self.rank}", json.dumps(value))

    def hear(self, word: str, rank: int = 0) -> Any:
        return self.hear_each(word, (rank,))[0]

    def forget(self, word: str) -> None:
        """Free the store of what all ranks said."""
        for rank in range(self.world_size):
            self.store.delete_key(f"{self.key}/{word}/{rank}")

    def hear_all(self, word: str) -> list[Any]:
        return self.hear_each(word, range(self.world_size))

    def hear_each(self, word: str, ranks: Sequence[int]) -> list[Any]:
        """What these ranks said. Raises CheckpointError with those that did not, after `timeout_s`."""
        end, pause_s = time.monotonic() + self.timeout_s, 0.0005
        keys = {rank: f"{self.key}/{word}/{rank}" for rank in ranks}
        missing = list(keys)
        try:
            while missing := [rank for rank in missing if not self.store.check([keys[rank]])]:
                reason = self.heard()
                if reason or time.monotonic() > end:
                    who = ", ".join(map(str, missing))
                    raise CheckpointError(
                        f"{reason}\n"
                        * bool(reason)
                        + f"rank {self.rank}: {self.what} waited for {word!r} of ranks "
                        f"{who}; timeout {self.timeout_s:g} s. Every rank must call it, the same number of times"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            return [json.loads(self.store.get(key)) for key in keys.values()]
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"rank {self.rank}: {self.what}: the store is gone: {error}") from error


class Pulse:
    """What a save is at, and since when: written by its thread, read by whoever waits for that."""

    def __init__(self) -> None:
        self.at("its beginning")

    def at(self, what: object) -> None:
        self.what, self.since_s = what, time.monotonic()


class Saving:
    """A save that has begun. `wait()` returns the checkpoint's directory, or raises CheckpointError: a LateError if,
    by its `pulse`, it has been at one thing for longer than `timeout_s`."""

    def __init__(
        self, work: Callable[[], Path], pulse: Pulse, *, in_thread: bool, rank: int, timeout_s: float
    ) -> None:
        self._work, self._pulse, self._rank, self._timeout_s = work, pulse, rank, timeout_s
        self._path, self._error = Path(), None
        self._thread = (
            threading.Thread(target=self._run, name="checkpoint", daemon=True) if in_thread else None
        )
        self.is_reported = False
        if self._thread:
            self._thread.start()
        else:
            self._run()

    _error: CheckpointError | None

    def _run(self) -> None:
        try:
            self._path = self._work()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # in a thread nobody would hear of it; wait() tells it
            self._error = CheckpointError(f"save: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        while self._thread is not None and not self.is_done:
            left_s = self._pulse.since_s + self._timeout_s + GRACE_S - time.monotonic()
            if left_s <= 0:
                self.is_reported = True
                raise LateError(
                    f"save: rank {self._rank}: its thread has been at {self._pulse.what} for more than "
                    f"{self._timeout_s:g} s (timeout_s): the disk does not answer. No checkpoint of this step is there "
                    f"unless the thread comes to its end; those before it are as they were, and training may go on"
                )
            self._thread.join(left_s)
        if self._error is not None:
            self.is_reported = True
            raise self._error
        return self._path


class Checkpointer:
    """Saves and loads of one engine: one at a time, numbered alike on every rank."""

    def __init__(
        self,
        layout: MeshLayout,
        rank: int,
        store: Store,
        *,
        keep: int,
        timeout_s: float,
        heard: Callable[[], str],
    ) -> None:
        self._layout, self._rank, self._store = layout, rank, store
        self._keep, self._timeout_s, self._heard = keep, timeout_s, heard
        self._calls = 0
        self._last: Saving | None = None
        self.is_mixed = False
        """a load has failed halfway: what it was to fill is part old, part new"""
        self._late: LateError | None = None
        """a read of a load has not ended, and may yet write into what that was to fill"""

    def save(self, directory: Path, held: Sequence[Held], facts: Facts, *, asynchronous: bool) -> Saving:
        """Write a checkpoint. Collective. In a thread (from a copy of what this rank owns) if `asynchronous`: errors
        then come from `wait()`, or as a warning of the next call."""
        self.settle()
        meeting, pulse = self._meet("save"), Pulse()
        parts = [one.part() for one in held]
        plan = writes(parts, self._layout, self._rank, slice_bytes=SLICE_BYTES, file_bytes=FILE_BYTES)
        if asynchronous:
            owned = {write.part for rows in plan.values() for write in rows}
            held = [
                replace(one, tensor=to_host(one.elements()), fetch=None) if i in owned else one
                for i, one in enumerate(held)
            ]
        needed = sum(
            part.spec.numel * one.tensor.element_size() for part, one in zip(parts, held, strict=True)
        )
        work = _Save(meeting, directory, plan, held, parts, facts, self._layout, self._keep, needed, pulse)
        self._last = Saving(
            work.run, pulse, in_thread=asynchronous, rank=self._rank, timeout_s=self._timeout_s
        )
        if not asynchronous:
            self._last.wait()
        return self._last

    def settle(self) -> None:
        """Wait for the save in flight; a failure that nobody has heard of becomes a warning."""
        if self._last is not None and not self._last.is_reported:
            try:
                self._last.wait()
            except CheckpointError as error:
                warnings.warn(f"checkpoint not saved: {error}", stacklevel=3)
        self._last = None

    def load(
        self,
        directory: Path,
        held: Sequence[Held],
        config: Mapping[str, Any],
        *,
        complete: bool,
        missing_ok: bool = False,
    ) -> Loaded | None:
        """Fill `held` from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        None if there is none at all and `missing_ok`. Raises CheckpointError if none is whole, or if the one that is
        does not fit; in the latter case nothing has changed.  After a LateError on this rank every later load raises it
        again: another process has to go on.
        """
        if self._late is not None:
            raise self._late
        self.settle()
        parts = [one.part() for one in held]
        paths, skipped = self._candidates(directory) if self._rank == 0 else ([], [])
        while True:
            meeting = self._meet("load")
            if self._rank == 0:
                meeting.say("choose", self._choose(directory, paths, skipped))
            choice = meeting.hear("choose")
            skipped = choice["skipped"]
            if choice["name"] is None:
                if missing_ok and not skipped:
                    return None
                raise CheckpointError("\n  ".join([f"load: no whole checkpoint in {directory}", *skipped]))
            path = directory / choice["name"]
            manifest, changed = self._agree(meeting, path, parts, config, choice["crc32"], complete)
            self.is_mixed = True
            stored = [one for one in held if _is_stored(one.name, manifest)]
            plan = reads([one.part() for one in stored], manifest, self._layout, self._rank)
            meeting.say("read", self._fill(path, stored, plan, manifest))
            if self._rank == 0:
                meeting.say("faults", sorted({fault for fault in meeting.hear_all("read") if fault}))
            faults = meeting.hear("faults")
            if not faults:
                for one in held:
                    if not _is_stored(one.name, manifest):
                        one.elements(write=True).zero_()
                self.is_mixed = False
                return Loaded(path, manifest, changed, tuple(skipped))
            skipped = skipped + faults

    def _candidates(self, directory: Path) -> tuple[list[Path], list[str]]:
        """What may be loaded, the newest first, and why nothing can be, if so."""
        try:
            if (directory / MANIFEST).exists() or STEP.fullmatch(directory.name):
                return [directory], []
            return listed(directory), []
        except OSError as error:
            return [], [f"{error.filename}: {error.strerror}"]

    def _choose(self, directory: Path, paths: list[Path], skipped: list[str]) -> dict[str, Any]:
        """The next path whose files look right, taken off `paths`; what was passed over joins `skipped`."""
        while paths:
            path = paths.pop(0)
            try:
                manifest = inspect(path)
            except CheckpointError as error:
                skipped = [*skipped, str(error)]
                continue
            name = "" if path == directory else path.name
            return {"name": name, "crc32": zlib.crc32(encode(manifest)), "skipped": skipped}
        return {"name": None, "skipped": skipped}

    def _agree(
        self,
        meeting: Meeting,
        path: Path,
        parts: Sequence[Part],
        config: Mapping[str, Any],
        crc32: int,
        complete: bool,
    ) -> tuple[Manifest, tuple[Change, ...]]:
        """The same manifest on every rank, and that it fits; or the same CheckpointError on every rank."""
        faults: list[str] = []
        manifest = None
        try:
            manifest = _shared(lambda: read_manifest(path), path, meeting)
            if zlib.crc32(encode(manifest)) != crc32:
                faults = [
                    f"rank {self._rank} sees another manifest than rank 0: all ranks must share one directory"
                ]
            else:
                faults = [str(c) for c in changes(manifest.config, config) if c.meaning == "impossible"]
                wanted = [part for part in parts if _is_stored(part.name, manifest)]
                faults += misfits(wanted, manifest, complete=complete)
        except CheckpointError as error:
            faults = [str(error)]
        meeting.say("fits", faults)
        if self._rank == 0:
            meeting.say("misfits", list(dict.fromkeys(f for rows in meeting.hear_all("fits") for f in rows)))
        if rows := meeting.hear("misfits"):
            raise CheckpointError("\n  ".join([f"load: {path} does not fit this run", *rows]))
        assert manifest is not None
        return manifest, changes(manifest.config, config)

    def _fill(self, path: Path, held: Sequence[Held], plan: Sequence[Read], manifest: Manifest) -> str | None:
        """Read slices into what is held; the first fault, after which what is held is a mix. Raises LateError: the
        others are told why when this rank's context closes."""
        places = [_place(read, held, self._layout) for read in plan]
        slices = stream(path, plan, manifest, places=places, timeout_s=self._timeout_s)
        try:
            with closing(slices):
                for (read, data), place in zip(slices, places, strict=True):
                    if isinstance(data, str):
                        return f"{path / read.slice.file}: tensor {read.name}{box_of(read.slice)}: {data}"
                    if place is None:
                        _scatter(read, data, held, self._layout)
        except LateError as error:
            self._late = LateError(
                f"load: rank {self._rank}: {error}. A read that ends later would write into the weights: start the run "
                f"again, where the disk answers"
            )
            raise self._late from error
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def _meet(self, what: str) -> Meeting:
        self._calls += 1
        key = f"checkpoint/{self._calls}"
        world = self._layout.world_size
        return Meeting(self._store, key, what, self._rank, world, self._timeout_s, self._heard)


def _is_stored(name: str, manifest: Manifest) -> bool:
    """Whether a checkpoint should hold this tensor: an imported one has weights alone, and moments start at zero."""
    return not manifest.is_imported or name.startswith("model/")


def _scatter(read: Read, data: Tensor, held: Sequence[Held], layout: MeshLayout) -> None:
    """Copy a slice where it meets what is held."""
    corner = [start for start, _ in read.slice.box]
    for index, fragment in read.into:
        inner = tuple(slice(a - c, b - c) for (a, b), c in zip(fragment.box, corner, strict=True))
        held[index].view(fragment, layout, write=True).copy_(data[inner])


def _place(read: Read, held: Sequence[Held], layout: MeshLayout) -> Tensor | None:
    """Where a slice may be read to without a copy: what is held holds it whole, once, as it is stored."""
    if len(read.into) != 1:
        return None
    ((index, fragment),) = read.into
    tensor = held[index].tensor
    if fragment.box != read.slice.box or tensor.device.type != "cpu" or tensor.dtype != DTYPES[read.dtype]:
        return None
    place = held[index].view(fragment, layout)
    return place if place.is_contiguous() else None


def _shared(read: Callable[[], Any], path: Path, meeting: Meeting) -> Any:
    """What `read` returns, once a network file system shows `path` to this rank too."""
    end = time.monotonic() + (SHARED_S if meeting.rank else 0.0)
    while not path.exists():
        if time.monotonic() > end:
            raise CheckpointError(
                f"rank {meeting.rank} does not see {path}, which rank 0 sees: all ranks must share one directory"
            )
        time.sleep(0.05)
    return read()


@dataclass(frozen=True)
class _Save:
    """One save on one rank, from first to last word."""

    meeting: Meeting
    directory: Path
    plan: Mapping[str, Sequence[Write]]
    held: Sequence[Held]
    parts: Sequence[Part]
    facts: Facts
    layout: MeshLayout
    keep: int
    needed_bytes: int
    pulse: Pulse

    def run(self) -> Path:
        """The new checkpoint. Raises CheckpointError, the same on every rank, after `ATTEMPTS`."""
        for attempt in range(ATTEMPTS):
            end = self._attempt(attempt)
            if end["name"] is not None:
                return self.directory / str(end["name"])
        raise CheckpointError("\n  ".join([f"save: nothing was written to {self.directory}", *end["faults"]]))

    def _attempt(self, attempt: int) -> dict[str, Any]:
        say, hear, at = self.meeting.say, self.meeting.hear, self.pulse.at
        if self.meeting.rank == 0:
            at(self.directory)
            say(f"begin {attempt}", self._begin())
        at("rank 0's word that it has begun")
        begin = hear(f"begin {attempt}")
        rows: dict[str, Any] = {"faults": begin["faults"]}
        if not begin["faults"]:
            rows = self._write(self.directory / begin["name"], begin)
        say(f"rows {attempt}", rows)
        if self.meeting.rank == 0:
            at("the words of all ranks that they have written")
            rows_of_all = self.meeting.hear_all(f"rows {attempt}")
            self.meeting.forget(f"rows {attempt}")
            at(self.directory)
            say(f"end {attempt}", self._commit(begin, rows_of_all))
        at("rank 0's word that it has ended")
        end: dict[str, Any] = hear(f"end {attempt}")
        return end

    def _begin(self) -> dict[str, Any]:
        """Rank 0: an empty hidden directory, after what killed runs have left is gone."""
        name = f"{_HIDDEN}step-{self.facts.step:08}-{secrets.token_hex(4)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.glob(f"{_HIDDEN}*"):
                shutil.rmtree(path)
            free = shutil.disk_usage(self.directory).free
            if free < self.needed_bytes:
                need = f"{self.needed_bytes / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free"
                return {"name": name, "faults": [f"{self.directory}: {need}"]}
            (self.directory / name).mkdir()
        except OSError as error:
            return {"name": name, "faults": [f"{error.filename or self.directory}: {error.strerror}"]}
        return {"name": name, "faults": [], "step": self.facts.step, "samples": self.facts.samples}

    def _write(self, path: Path, begin: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's files; its rows of the manifest, or what went wrong."""
        rank, mine = self.meeting.rank, {"step": self.facts.step, "samples": self.facts.samples}
        theirs = {key: begin[key] for key in mine}
        if mine != theirs:
            return {"faults": [f"rank {rank} saves {mine}, rank 0 {theirs}"]}
        found: dict[str, list[dict[str, Any]]] = {}
        at = path
        try:
            _shared(lambda: None, path, self.meeting)
            for file, rows in self.plan.items():
                at = path / file
                for write, crc32 in zip(rows, self._write_one(at, rows), strict=True):
                    row = write.slice.model_copy(update={"crc32": crc32})
                    found.setdefault(self.parts[write.part].name, []).append(row.model_dump())
        except OSError as error:
            return {"faults": [f"rank {rank}: {error.filename or at}: {error.strerror}"]}
        except CheckpointError as error:
            return {"faults": [str(error)]}
        stored = {p.name: {"dtype": p.dtype, "shape": p.spec.shape} for p in self.parts}
        return {"faults": [], "slices": found, "stored": stored, "updates": dict(self.facts.updates)}

    def _write_one(self, path: Path, rows: Sequence[Write]) -> list[int]:
        """One file, written, synced and read back; the checksums of its slices."""

        def data() -> Iterator[Tensor]:
            for write in rows:
                self.pulse.at(path)
                held = self.held[write.part]
                view = held.view(write.fragment, self.layout)
                stays = held.fetch is None and view.device.type == "cpu"
                yield view if stays and view.is_contiguous() else to_host(view).contiguous()

        named = [
            (part.name, Stored(dtype=part.dtype, shape=part.spec.shape, slices=()), write.slice)
            for write in rows
            for part in (self.parts[write.part],)
        ]
        return write_file(path, named, data(), self.meeting.timeout_s)

    def _commit(self, begin: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Rank 0: make the checkpoint visible, or remove it; its name, or the faults of all ranks."""
        path = self.directory / begin["name"]
        faults = list(dict.fromkeys(fault for row in rows for fault in row["faults"]))
        if not faults:
            try:
                name = self._publish(path, rows)
                self._prune()
                return {"name": name, "faults": []}
            except (OSError, CheckpointError) as error:
                faults = [f"rank 0: {error}"]
        shutil.rmtree(path, ignore_errors=True)
        return {"name": None, "faults": faults}

    def _publish(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        stored = {name: dict(facts) for row in rows for name, facts in row["stored"].items()}
        for name, row in stored.items():
            row["slices"] = [part for each in rows for part in each["slices"].get(name, ())]
        facts = self.facts
        manifest = Manifest.model_validate_json(
            json.dumps(
                {
                    "step": facts.step,
                    "samples": facts.samples,
                    "seed": facts.seed,
                    "config": dict(facts.config),
                    "mesh": {leaf.name: leaf.size for leaf in self.layout.leaves},
                    "model": None if facts.model is None else dict(facts.model),
                    "updates": {name: count for row in rows for name, count in row["updates"].items()},
                    "extra": dict(facts.extra),
                    "loss_scale": facts.loss_scale,
                    "tensors": stored,
                }
            )
        )
        data = encode(manifest)
        decode(data, str(path / MANIFEST))  # what the ranks wrote covers every tensor once
        with open(path / MANIFEST, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)
        name = f"step-{facts.step:08}"
        taken = {path.name for path in listed(self.directory)}
        if name in taken:
            name = next(f"{name}-{n}" for n in range(2, 1 << 20) if f"{name}-{n}" not in taken)
        os.rename(path, self.directory / name)
        sync_directory(self.directory)
        return name

    def _prune(self) -> None:
        """Delete what is older than the newest `keep` whole checkpoints."""
        whole = 0
        for path in listed(self.directory):
            if whole >= self.keep:
                gone = self.directory / f"{_HIDDEN}old-{path.name}-{secrets.token_hex(4)}"
                try:
                    os.rename(path, gone)  # never half there under its own name
                    shutil.rmtree(gone)
                except OSError as error:
                    warnings.warn(f"{path}: could not be deleted: {error.strerror}", stacklevel=2)
                continue
            try:
                inspect(path)
                whole += 1
            except CheckpointError:
                continue
