"""Lists, verifies and converts checkpoints to and from Hugging Face, for `colossal-lite ckpt`, in one process.

Note: `to_hf` and `from_hf` hold the weights in host memory once, and no optimizer state.  They check every byte of
the folder that they convert.  A model that cannot be converted raises before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from colossal_lite.checkpoint.checkpointer import Checkpointer
from colossal_lite.checkpoint.files import inspect, listed, tensors, verify
from colossal_lite.checkpoint.manifest import CheckpointError, Manifest
from colossal_lite.checkpoint.run_state import HeldTensor, RunFacts
from colossal_lite.distributed.key_value_store import LocalStore
from colossal_lite.models.gpt import GPTConfig
from colossal_lite.models.hf import (
    config_from_hf,
    config_to_hf,
    from_hf,
    read_hf,
    refuse_changed_modules,
    to_hf,
    warn_of_dropout,
    write_hf,
)
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of

EXPORTED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a folder. `fault` describes an error in its structure, if there is one."""

    path: Path
    manifest: Manifest | None
    fault: str = ""

    def __str__(self) -> str:
        if self.manifest is None:
            return f"{self.path.name}  DAMAGED  {self.fault}"
        m = self.manifest
        mesh = " x ".join(f"{axis} {size}" for axis, size in m.mesh.items() if size > 1) or "1 rank"
        count = f"{len(m.tensors)} tensors, {m.data_bytes / 1e6:,.1f} MB"
        return f"{self.path.name}  step {m.step}  samples {m.samples}  {count}  saved on {mesh}"


def ls(folder: Path) -> Iterator[Listed]:
    """Checkpoints in a folder, the newest first. Tensor data is not read."""
    for path in checkpoints(folder):
        try:
            yield Listed(path, inspect(path))
        except CheckpointError as error:
            yield Listed(path, None, str(error))


def last_unit_seconds(folder: Path) -> tuple[tuple[float, float, float], ...] | None:
    """Seconds of F, I and W of each unit, from the newest readable checkpoint of a folder. None if it has none."""
    found = ls(folder) if folder.is_dir() and listed(folder) else iter(())
    return next((each.manifest.unit_seconds for each in found if each.manifest), None)


def checkpoints(folder: Path) -> list[Path]:
    """The folder itself if it is a checkpoint, else those in it. Raises ValueError if there is none."""
    found = [folder] if (folder / "manifest.json").exists() else listed(folder)
    if not found:
        raise ValueError(
            f"{folder}: holds no checkpoint; legal: a folder with step-NNNNNNNN in it, or one of these"
        )
    return found


def check(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every checkpoint with its faults, every byte read."""
    for path in checkpoints(folder):
        yield path, list(verify(path))


def export(folder: Path, target: Path, dtype: str = "fp32") -> Path:
    """Write the newest whole checkpoint of `folder` as a Hugging Face model; returns the checkpoint.

    Raises ValueError for a model of no known family, or with other modules than its config says, as adapters are.
    Raises CheckpointError if none is whole.
    """
    if dtype not in EXPORTED:
        raise ValueError(f"dtype: {dtype!r}; legal: {', '.join(EXPORTED)}")
    faults = []
    for path in checkpoints(folder):
        try:
            manifest = inspect(path)
            config = _config_of(path, manifest)
            names = [name for name in manifest.tensors if name.startswith("model/")]
            state = {
                name.removeprefix("model/"): value for name, value in tensors(path, manifest, names).items()
            }
        except CheckpointError as error:
            faults.append(str(error))
            continue
        state = {
            name: value.to(EXPORTED[dtype]) if value.is_floating_point() else value
            for name, value in state.items()
        }
        if isinstance(config, GPTConfig):
            words = config_to_hf(config, str(EXPORTED[dtype]).removeprefix("torch."))
            write_hf(target, words, to_hf(config, state))
        else:  # a Hugging Face model was trained as it is
            refuse_changed_modules(config, state)
            write_hf(target, config, state)
        return path
    raise CheckpointError("\n  ".join([f"{folder}: holds no whole checkpoint", *faults]))


def _config_of(path: Path, manifest: Manifest) -> GPTConfig | dict[str, Any]:
    facts = manifest.model or {}
    if "model_type" in facts:
        return dict(facts)
    if set(facts) != {field.name for field in fields(GPTConfig)}:
        raise ValueError(
            f"{path}: its model is neither a cl.models.GPT nor Hugging Face's; only these can be exported"
        )
    return GPTConfig(**facts)


def import_(folder: Path, target: Path) -> Path:
    """Write a checkpoint of step 0 to `target` from a Hugging Face folder. `engine.load` starts new moments from it."""
    theirs, found = read_hf(folder)
    config = config_from_hf(theirs)
    warn_of_dropout(theirs)
    state = from_hf(config, found)
    if config.tied:
        del state["head.weight"]
    held = [
        HeldTensor(f"model/{name}", ShardSpec(name, dims_of(value.shape)), value.contiguous())
        for name, value in state.items()
    ]
    facts = RunFacts(0, 0, 0, {}, asdict(config), {}, {"imported": str(folder)})
    disk = Checkpointer(MeshLayout.build(), 0, LocalStore(), keep=1 << 20, timeout_s=60, heard=str)
    try:
        return disk.save(target, held, facts, asynchronous=False).wait()
    finally:
        disk.close()
