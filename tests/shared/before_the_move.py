"""Writes what version 0.1.0 of the old layout saved: `python -m tests.shared.before_the_move FOLDER`.

Checkpoints on three meshes with the losses and states of the steps after them.  Run once, at commit 7937e4a;
`tests/shared/fixtures/before_the_move` holds the output, with sums of the states of the steps after, made at f52aa93^
from the same checkpoints.  The configs keep the setting names of that version, because they
must still load.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import colossal_lite as cl
from tests.shared.pool import RankEnv, pool, run_world

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "fixtures" / "before_the_move"
SAMPLES = 8  # of a step
MODEL: dict[str, Any] = dict(vocabulary=37, layers=4, heads=4, width=16, sequence=12, dropout=0.1)
BASE: dict[str, Any] = dict(
    precision="fp64",
    optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1),
    clip_grad_norm=0.05,
    gradient_accumulation=2,
    seed=7,
    timeout_s=60,
)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2": (4, dict(zero=dict(stage=2, reduce="micro_batch", reduction="ordered", shard=2))),
    "tensor": (
        2,
        dict(
            parallel=dict(tensor=dict(size=2, regather=False)),
            memory=dict(placement="host", update="host"),
            optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1, update="step"),
        ),
    ),
    "pipeline": (
        2,
        dict(parallel=dict(pipeline=dict(size=2, schedule="interleaved", micro_batches=2, chunks=2))),
    ),
}


def digest(state: dict[str, Tensor]) -> str:
    """SHA-256 of the bytes of all tensors in the order of their names."""
    done = hashlib.sha256()
    for name in sorted(state):
        done.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return done.hexdigest()


def moments(state: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Two sums of each tensor: its norm, and its elements weighted by the cosine of their index."""
    flat = {name: value.detach().double().cpu().flatten() for name, value in state.items()}
    return {
        name: (float(value.norm()), float(value @ torch.arange(value.numel(), dtype=value.dtype).cos()))
        for name, value in sorted(flat.items())
    }


def state_of(engine: cl.Engine) -> dict[str, Tensor]:
    """Weights and optimizer states, whole."""
    states = engine.full_optimizer_state()
    state = {f"{kind}/{name}": value for name, kinds in states.items() for kind, value in kinds.items()}
    return state | {f"model/{name}": value for name, value in engine.full_state_dict().items()}


def train(engine: cl.Engine, steps: range) -> list[str]:
    """The loss of each step as a hexadecimal number."""
    cut, losses = engine.context.local_batch(SAMPLES), []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(MODEL["vocabulary"], (SAMPLES, MODEL["sequence"] + 1), generator=generator)
        losses.append(float(engine.train_step((text[cut, :-1], text[cut, 1:])).loss).hex())
    return losses


def go_on(env: RankEnv, config: dict[str, Any], folder: str, save: bool) -> dict[str, Any]:
    """Saves after two steps, or loads what was saved there; then two steps more."""
    with env.launch(config) as context:
        engine = cl.initialize(lambda: cl.models.GPT(cl.models.GPTConfig(**MODEL)), context=context)
        if save:
            train(engine, range(2))
            engine.save(folder, samples=2 * SAMPLES, extra={"made": "before the move"}).wait()
        else:
            engine.load(folder)
        saved = digest(state_of(engine))
        losses = train(engine, range(2, 4))
        found = dict(
            saved=saved, losses=losses, state=moments(state_of(engine)), notices=context.config.notices
        )
        engine.close()
        return found


def write(folder: Path) -> None:
    expected: dict[str, Any] = {"meshes": {}}
    for name, (ranks, config) in MESHES.items():
        saved = folder / name
        shutil.rmtree(saved, ignore_errors=True)
        found = run_world(go_on, ranks, BASE | config, str(saved), True)
        assert all(row == found[0] for row in found)
        expected["meshes"][name] = {key: found[0][key] for key in ("saved", "losses", "state")}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    pool().close()


if __name__ == "__main__":
    from tests.shared import before_the_move  # ranks import functions by the module's name

    torch.set_num_threads(1)
    before_the_move.write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
