"""Saves checkpoints atomically and loads them on any mesh, with every byte checked.

Note: a save.
1. Rank 0 makes a hidden directory beside the final one.
2. Every rank streams the slices that it owns into its own files, reads them back and fsyncs them.
3. Rank 0 joins the ranks' rows into the manifest, fsyncs it and the directory, and renames the directory to
   `step-NNNNNNNN`.  It fsyncs the parent, and only then deletes checkpoints beyond `keep`.
So a directory of that name is always complete, whichever process is killed.  A valid checkpoint is never
overwritten.  Ranks agree through keys of the context's store, not through collectives.  So a save can run in a thread
beside training.  A rank that saves alone gets an error that names the missing ranks.

A load reads the newest complete checkpoint.  Each slice is read, checked, and copied into the tensors of the rank.  A
slice that fits is read into them directly.  A fault names the file and the tensor, and all ranks try the checkpoint
before it.  A disk that does not answer is a permanent fault: a late read could overwrite tensors of another load.

Cost: a load allocates nine slices of 16 MiB, none for slices read in place.  A synchronous save allocates three.  An
asynchronous save copies the rank's tensors.
Files are safetensors, readable by its own library; nothing is pickled, nothing outside the directory is opened.
"""

from __future__ import annotations

import atexit
import difflib
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from colossal_lite.checkpoint.files import (
    DTYPES,
    STEP,
    LateError,
    box_of,
    inspect,
    listed,
    read_manifest,
    stream,
)
from colossal_lite.checkpoint.manifest import (
    MANIFEST,
    MISFITS,
    Change,
    CheckpointError,
    ExtraError,
    Manifest,
    MisfitError,
    Read,
    TensorSlice,
    changes,
    encode,
    misfits,
    model_changes,
    plain,
    reads,
    unexpected,
    writes,
)
from colossal_lite.checkpoint.owner import OWNER, FolderClaims, FolderOwnedError
from colossal_lite.checkpoint.rendezvous import Heartbeat, SaveRendezvous, shared
from colossal_lite.checkpoint.run_state import HeldTensor, Loaded, RunFacts
from colossal_lite.checkpoint.writer import LineOfDescent, SaveJob
from colossal_lite.config.renamed import renamed
from colossal_lite.distributed.key_value_store import KeyValueStore
from colossal_lite.memory.transfers import to_host
from colossal_lite.observe.printed_lines import tell, warn
from colossal_lite.sharding.mesh_layout import MeshLayout

SLICE_BYTES = 16 * 2**20
FILE_BYTES = 2**30
GRACE_S = 5.0
"""after `timeout_s`, so that an error of the thread itself is raised first"""
FITS = (
    "the model and settings of then, or another directory; cl.Run(..., fresh=True) renames these checkpoints. "
    "For weights alone: an engine of then loads it, and its full_state_dict() goes to load_full_state_dict here"
)


class Saving:
    """A save that has begun. `wait()` returns the checkpoint's directory, or raises CheckpointError. It raises
    LateError if, by its `pulse`, one operation of the save has taken longer than `timeout_s`."""

    def __init__(
        self,
        work: Callable[[], Path],
        pulse: Heartbeat,
        *,
        step: int,
        in_thread: bool,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.step = step
        self._work, self._pulse, self._rank, self._timeout_s = work, pulse, rank, timeout_s
        self._path = Path()
        self._error: CheckpointError | None = None
        self._late: LateError | None = None
        self._thread = (
            threading.Thread(target=self._run, name="checkpoint", daemon=True) if in_thread else None
        )
        self.is_reported = False
        if self._thread:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a thread's exception would be lost; wait() raises it
            self._error = CheckpointError(f"save: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def failure(self) -> CheckpointError | None:
        """The error of a save that failed. A save that was late may have completed since."""
        return self._error if self.is_done else self._late

    def wait(self) -> Path:
        while self._thread is not None and not self.is_done:
            left_s = self._pulse.since_s + self._timeout_s + GRACE_S - time.monotonic()
            if left_s <= 0:
                self.is_reported = True
                self._late = LateError(
                    f"save: rank {self._rank}: its thread has been at {self._pulse.what} for more than "
                    f"{self._timeout_s:g} s (timeout_s): the disk does not answer. No checkpoint of this step is there "
                    f"unless the thread comes to its end; those before it are as they were, and training may go on"
                )
                raise self._late
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
        store: KeyValueStore,
        *,
        keep: int,
        timeout_s: float,
        heard: Callable[[], str],
        standing: Callable[[Sequence[int]], str] = lambda ranks: "",
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers`: of the saves and loads of all checkpointers that share `store`; None if there is no other."""
        self._layout, self._rank, self._store = layout, rank, store
        self._keep, self._timeout_s, self._heard, self._standing = keep, timeout_s, heard, standing
        self._numbers = count(1) if numbers is None else numbers
        self._last: Saving | None = None
        self.is_mixed = False
        """a load failed halfway: the tensors that it filled are part old, part new"""
        self._claims, self._line = FolderClaims(), LineOfDescent()
        self.failures = 0
        """consecutive saves that failed"""
        self.failure: CheckpointError | None = None
        """the last of these failures"""
        self.last_saved: tuple[int, Path] | None = None
        """step and directory of the last whole save since a load"""
        self._late: LateError | None = None
        """a read of a load has not ended, and may still write into the tensors of that load"""

    def save(
        self, directory: Path, held: Sequence[HeldTensor], facts: RunFacts, *, asynchronous: bool
    ) -> Saving:
        """Write a checkpoint. Collective. If `asynchronous`, a thread writes a copy of the tensors that this rank owns.
        Its errors come from `wait()`, or as a warning of the next call."""
        self.settle()
        refused, extra = "", dict[str, Any]()
        try:
            extra = plain(facts.extra) if self._rank == 0 else extra  # the others' is not written
        except ExtraError as error:
            refused = str(error)
        facts = replace(facts, extra=extra)
        meeting, pulse = self._meet("save"), Heartbeat()
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
        work = SaveJob(
            meeting,
            directory,
            plan,
            held,
            parts,
            facts,
            self._layout,
            self._keep,
            needed,
            pulse,
            self._claims,
            self._line,
            refused,
        )
        self._last = saving = Saving(
            work.run,
            pulse,
            step=facts.step,
            in_thread=asynchronous,
            rank=self._rank,
            timeout_s=self._timeout_s,
        )
        if asynchronous:
            atexit.register(self._end_with_process)  # of a script that leaves its context open
            return saving
        try:
            saving.wait()
        finally:
            self.settle()
        return saving

    def settle(self) -> None:
        """Wait for the save in flight and count its outcome. A failure that was not raised yet becomes a warning."""
        atexit.unregister(self._end_with_process)
        last, self._last = self._last, None
        if last is None:
            return
        if not last.is_reported:
            try:
                last.wait()
            except CheckpointError as error:
                warn(f"checkpoint not saved: {error}")
        if last.failure is None:
            self.failures, self.last_saved = 0, (last.step, last.wait())
        else:
            self.failures, self.failure = self.failures + 1, last.failure

    def close(self, *, waits: bool = True) -> None:
        """Wait for the save in flight, and release the folders. Without `waits` it does neither. The process ends, and
        the next run takes the folders over, with all leftovers in them."""
        if not waits:
            atexit.unregister(self._end_with_process)
            return
        self.settle()
        self._claims.close()

    def _end_with_process(self) -> None:
        """Wait for the save in flight, unless an interrupt has ended the script."""
        if not issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt):
            self.settle()

    def load(
        self,
        directory: Path,
        held: Sequence[HeldTensor],
        config: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None = None,
        missing_ok: bool = False,
        step: int = 0,
    ) -> Loaded | None:
        """Fill `held` from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        None if there is none at all and `missing_ok`; the run begins at its `step`. Raises CheckpointError if none is
        whole. Raises it too if the whole one does not fit; then nothing has changed.  After a LateError on this rank
        every later load raises it again: start another process.
        """
        if self._late is not None:
            raise self._late
        self.settle()
        self.last_saved = None
        parts = [one.part() for one in held]
        refused = self._own(directory) if self._rank == 0 and missing_ok else ""
        paths, skipped = self._candidates(directory) if self._rank == 0 else ([], [])
        tried = set[Path]()
        while True:
            meeting = self._meet("load")
            if self._rank == 0:
                meeting.say("choose", self._choose(directory, paths, skipped, tried) | {"refused": refused})
            choice = meeting.hear("choose")
            if choice["refused"]:
                legal = f"a folder of checkpoints that no running process owns, or a copy without its {OWNER}"
                raise FolderOwnedError(f"resume: {choice['refused']}; legal: {legal}")
            skipped = choice["skipped"]
            if choice["name"] is None:
                if missing_ok and not skipped:
                    if self._rank == 0:
                        tell(_starts_at(step, directory))
                    return None
                legal = "legal: a folder of engine.save; engine.load_full_state_dict takes a state dict"
                raise CheckpointError(
                    "\n  ".join([f"load: no whole checkpoint in {directory}; {legal}", *skipped])
                )
            path = directory / choice["name"]
            manifest, changed = self._agree(meeting, path, parts, config, model, choice["crc32"])
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
                self._line.whole(path)
                return Loaded(path, manifest, changed, tuple(skipped))
            skipped = skipped + faults

    def _own(self, directory: Path) -> str:
        """Own the folder that a run resumes from; returns who else owns it. A read-only folder has no owner."""
        if directory.exists() and not directory.is_dir():
            return f"{directory} is no folder"
        is_one = (directory / MANIFEST).exists() or STEP.fullmatch(directory.name) is not None
        try:
            return self._claims.claim(directory.parent if is_one else directory)
        except OSError:
            return ""

    def _candidates(self, directory: Path) -> tuple[list[Path], list[str]]:
        """Paths of checkpoints, the newest first, and the reason if there is none."""
        try:
            if (directory / MANIFEST).exists() or STEP.fullmatch(directory.name):
                return [directory], []
            return listed(directory), []
        except OSError as error:
            return [], [f"{error.filename}: {error.strerror}"]

    def _choose(
        self, directory: Path, paths: list[Path], skipped: list[str], tried: set[Path]
    ) -> dict[str, Any]:
        """The next path whose files look right, taken off `paths`. Reasons for passed-over paths join `skipped`. After
        the last it lists again what it has not `tried`. Another run may save there, and delete its older ones."""
        while True:
            if not paths and tried:
                paths += [path for path in self._candidates(directory)[0] if path not in tried]
            if not paths:
                return {"name": None, "skipped": skipped}
            path = paths.pop(0)
            tried.add(path)
            try:
                manifest = inspect(path)
            except CheckpointError as error:
                skipped = [*skipped, str(error)]
                continue
            name = "" if path == directory else path.name
            return {"name": name, "crc32": zlib.crc32(encode(manifest)), "skipped": skipped}

    def _agree(
        self,
        meeting: SaveRendezvous,
        path: Path,
        parts: Sequence[TensorSlice],
        config: Mapping[str, Any],
        model: Mapping[str, Any] | None,
        crc32: int,
    ) -> tuple[Manifest, tuple[Change, ...]]:
        """The same manifest on every rank, checked to fit; or the same CheckpointError on every rank."""
        faults: list[str] = []
        manifest = None
        try:
            manifest = shared(lambda: read_manifest(path), path, meeting)
            if zlib.crc32(encode(manifest)) != crc32:
                faults = [
                    f"rank {self._rank} sees another manifest than rank 0: all ranks must share one directory"
                ]
            else:
                found = _changes(manifest, config, model)
                faults = [f"setting: {change}" for change in found if change.meaning == "impossible"]
                wanted = [part for part in parts if _is_stored(part.name, manifest)]
                faults += misfits(wanted, manifest)
        except CheckpointError as error:
            faults = [str(error)]
        meeting.say("fits", {"faults": faults, "held": self._held_of_stage(parts, manifest)})
        if self._rank == 0:
            said = meeting.hear_all("fits")
            rows = list(dict.fromkeys(fault for each in said for fault in each["faults"]))
            if manifest is not None and all(row.startswith(MISFITS) for row in rows):
                names, places = list(manifest.tensors), {place for each in said for place in each["held"]}
                rows += unexpected({names[place] for place in places}, manifest)
            meeting.say("misfits", rows)
        if rows := meeting.hear("misfits"):
            text = "\n  ".join([f"load: {path} does not fit this run", *_by_kind(rows)])
            if any(row.startswith(MISFITS) for row in rows):
                raise MisfitError(f"{text}\nlegal: {FITS}")
            raise CheckpointError(text)
        assert manifest is not None
        old = renamed(manifest.config)[1]
        if old and self._rank == 0:
            warn(f"{path} has settings by older names: {', '.join(old)}")
        return manifest, _changes(manifest, config, model)

    def _held_of_stage(self, parts: Sequence[TensorSlice], manifest: Manifest | None) -> list[int]:
        """The places in a manifest of the tensors of this rank's stage, which its first rank alone tells."""
        coords = self._layout.coords(self._rank)
        if manifest is None or any(coord for axis, coord in coords.items() if axis != "pipeline"):
            return []
        names = {part.name for part in parts}
        return [place for place, name in enumerate(manifest.tensors) if name in names]

    def _fill(
        self, path: Path, held: Sequence[HeldTensor], plan: Sequence[Read], manifest: Manifest
    ) -> str | None:
        """Read slices into the held tensors. Returns the first fault, after which these tensors are a mix. Raises
        LateError; other ranks receive the reason when this rank's context closes."""
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

    def _meet(self, what: str) -> SaveRendezvous:
        key = f"checkpoint/{next(self._numbers)}"
        world = self._layout.world_size
        return SaveRendezvous(
            self._store, key, what, self._rank, world, self._timeout_s, self._heard, self._standing
        )


def _changes(
    manifest: Manifest, config: Mapping[str, Any], model: Mapping[str, Any] | None
) -> tuple[Change, ...]:
    """The settings of the run, and of its model, that differ from those of the checkpoint."""
    return (*model_changes(manifest.model, model), *changes(renamed(manifest.config)[0], config))


def _starts_at(step: int, directory: Path) -> str:
    """The notice of a run that found no checkpoint. It names a similar folder, in case of a typing error."""
    around = directory.parent.iterdir() if directory.parent.is_dir() else ()
    names = [path.name for path in around if path.is_dir() and path != directory]
    near = difflib.get_close_matches(directory.name, names, n=1)
    beside = f"; beside it is {directory.parent / near[0]}" if near else ""
    return f"no checkpoint in {directory} yet: begins at step {step}{beside}"


def _by_kind(faults: Sequence[str]) -> list[str]:
    """Faults in which tensors of one kind of misfit are one row: the first weight, and the number of the others."""
    found: dict[str, list[str]] = {}
    for fault in sorted(faults, key=lambda fault: ": model/" not in fault):
        kind = next((kind for kind in MISFITS if fault.startswith(kind)), fault)
        found.setdefault(kind, []).append(fault)
    return [f"{rows[0]}{f'; and {len(rows) - 1} more' if rows[1:] else ''}" for rows in found.values()]


def _is_stored(name: str, manifest: Manifest) -> bool:
    """Whether a checkpoint should hold this tensor. An imported one has weights alone; moments start at zero."""
    return not manifest.is_imported or name.startswith("model/")


def _scatter(read: Read, data: Tensor, held: Sequence[HeldTensor], layout: MeshLayout) -> None:
    """Copy a slice into the held tensors that it overlaps."""
    corner = [start for start, _ in read.slice.box]
    for index, fragment in read.into:
        inner = tuple(slice(a - c, b - c) for (a, b), c in zip(fragment.box, corner, strict=True))
        held[index].view(fragment, layout, write=True).copy_(data[inner])


def _place(read: Read, held: Sequence[HeldTensor], layout: MeshLayout) -> Tensor | None:
    """The tensor that a slice can be read into without a copy. It holds the slice whole, once, in its stored dtype."""
    if len(read.into) != 1:
        return None
    ((index, fragment),) = read.into
    tensor = held[index].tensor
    if fragment.box != read.slice.box or tensor.device.type != "cpu" or tensor.dtype != DTYPES[read.dtype]:
        return None
    if held[index].fetch is not None:
        return None
    place = held[index].view(fragment, layout)
    return place if place.is_contiguous() else None
