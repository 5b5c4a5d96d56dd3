"""Writes one checkpoint: hidden directory, files of every rank, manifest, rename, removal of old checkpoints."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from colossal_lite.checkpoint.files import STEP, listed, next_serial, sync_directory, write_file
from colossal_lite.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    CheckpointError,
    ExtraError,
    Manifest,
    Stored,
    TensorSlice,
    Write,
    decode,
    encode,
)
from colossal_lite.checkpoint.owner import FolderClaims
from colossal_lite.checkpoint.rendezvous import Heartbeat, SaveRendezvous, shared
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.memory.transfers import to_host
from colossal_lite.observe.tables import size
from colossal_lite.sharding.mesh_layout import MeshLayout

ATTEMPTS = 2
"""how often a save is tried before it fails"""
_HIDDEN = ".tmp-"


@dataclass
class LineOfDescent:
    """The checkpoints whose every byte this run has checked, by writing or loading them, oldest first."""

    checked: dict[Path, None] = field(default_factory=dict)

    def whole(self, path: Path) -> None:
        """Record that the state of the run is that of `path`."""
        self.checked.pop(path, None)
        self.checked[path] = None

    def parent(self, directory: Path) -> str | None:
        """The name of the last checkpoint, with its folder if that is another one."""
        last = next(reversed(self.checked), None)
        if last is None:
            return None
        return (last.name if last.parent == directory else f"{last.parent.name}/{last.name}")[-40:]


@dataclass(frozen=True)
class SaveJob:
    """One save on one rank, from its first message to its last."""

    meeting: SaveRendezvous
    directory: Path
    plan: Mapping[str, Sequence[Write]]
    held: Sequence[HeldTensor]
    parts: Sequence[TensorSlice]
    facts: RunFacts
    layout: MeshLayout
    keep: int
    needed_bytes: int
    pulse: Heartbeat
    claims: FolderClaims
    line: LineOfDescent
    refused: str = ""
    """Why rank 0 refuses what the user gives."""

    def run(self) -> Path:
        """The new checkpoint. Raises CheckpointError, the same on every rank, after `ATTEMPTS`."""
        for attempt in range(ATTEMPTS):
            end = self._attempt(attempt)
            if end["name"] is not None:
                return self.directory / str(end["name"])
        kind = ExtraError if end["faults"][0].startswith(EXTRA) else CheckpointError
        raise kind("\n  ".join([f"save: nothing was written to {self.directory}", *end["faults"]]))

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
        """Rank 0: own the folder, remove leftovers of this run and of dead owners, make an empty hidden directory."""
        name = f"{_HIDDEN}step-{self.facts.step:08}-{self._mark()}"
        if self.refused:
            return {"name": name, "faults": [self.refused]}
        try:
            if (self.directory / MANIFEST).exists() or STEP.fullmatch(self.directory.name):
                fault = f"{self.directory} is itself a checkpoint, or named as one; legal: {self.directory.parent}"
                return {"name": name, "faults": [f"{fault}, or another folder"]}
            if refused := self.claims.claim(self.directory):
                return {"name": name, "faults": [refused]}
            for run in self.claims.leftovers(self.directory):
                for path in self.directory.glob(f"{_HIDDEN}*-{run}-*"):
                    _remove(path)
            free = shutil.disk_usage(self.directory).free
            if free < self.needed_bytes:
                need = f"{size(self.needed_bytes)} needed, {size(free)} free; legal: a folder with room"
                return {"name": name, "faults": [f"{self.directory}: {need}"]}
            (self.directory / name).mkdir()
        except OSError as error:
            return {
                "name": name,
                "faults": [f"{error.filename or self.directory}: {error.strerror or error}"],
            }
        facts = self.facts
        return {
            "name": name, "faults": [], "step": facts.step, "samples": facts.samples, "loaded": facts.loaded
        }  # fmt: skip

    def _mark(self) -> str:
        """The suffix of a hidden name: of this run, and new."""
        return f"{self.claims.run}-{secrets.token_hex(4)}"

    def _write(self, path: Path, begin: Mapping[str, Any]) -> dict[str, Any]:
        """Write this rank's files. Returns its rows of the manifest, or the fault."""
        rank, mine = self.meeting.rank, {"step": self.facts.step, "samples": self.facts.samples}
        theirs = {key: begin[key] for key in mine}
        if mine != theirs:
            return {"faults": [f"rank {rank} saves {mine}, rank 0 {theirs}"]}
        if self.facts.loaded != begin["loaded"]:
            told = f"load_full_state_dict: rank {rank} has loaded other values than rank 0, or one has loaded none"
            return {"faults": [f"{told}; legal: the same state on every rank, after the same step"]}
        found: dict[str, list[dict[str, Any]]] = {}
        at = path
        try:
            shared(lambda: None, path, self.meeting)
            for file, rows in self.plan.items():
                at = path / file
                for write, crc32 in zip(rows, self._write_one(at, rows), strict=True):
                    row = replace(write.slice, crc32=crc32)
                    found.setdefault(self.parts[write.part].name, []).append(asdict(row))
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
                self.line.whole(self.directory / name)
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
                    "serial": next_serial(self.directory),
                    "parent": self.line.parent(self.directory),
                    "step": facts.step,
                    "samples": facts.samples,
                    "seed": facts.seed,
                    "config": dict(facts.config),
                    "mesh": {leaf.name: leaf.size for leaf in self.layout.leaves},
                    "model": None if facts.model is None else dict(facts.model),
                    "updates": {name: count for row in rows for name, count in row["updates"].items()},
                    "extra": dict(facts.extra),
                    "loss_scale": facts.loss_scale,
                    "unit_seconds": facts.unit_seconds,
                    "most_samples": facts.most_samples,
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
        """Delete checkpoints older than the newest `keep` whose every byte this run has checked."""
        whole = 0
        for path in listed(self.directory):
            if whole >= self.keep:
                gone = self.directory / f"{_HIDDEN}old-{path.name}-{self._mark()}"
                try:
                    os.rename(path, gone)  # a half-deleted checkpoint must not keep its name
                    _remove(gone)
                except OSError as error:
                    warnings.warn(f"{path}: could not be deleted: {error.strerror or error}", stacklevel=2)
                continue
            whole += path in self.line.checked


def _remove(path: Path) -> None:
    """Delete a folder, or what has the name of one. The target of a link stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
