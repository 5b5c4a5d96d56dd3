"""Writes the numbers of a run to TensorBoard or to wandb, offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A place besides the run's own files that receives its numbers."""

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder/tensorboard`: `tensorboard --logdir runs`. Rows of an earlier start are hidden after the
    step that the run resumes from. Without a checkpoint all are."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in _numbers(values):
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """An offline run in `folder/wandb`, a new one at each start. Nothing leaves the machine until `wandb sync` is
    called on it. It prints nothing, and leaves printed text alone."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], resumed_step: int) -> None:
        import wandb

        self._run = wandb.init(
            mode="offline", dir=str(folder), project="colossal_lite", name=folder.name,
            config={**facts, "resumed_step": resumed_step}, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in _numbers(values)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)


SINKS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""What each imports."""


def check_sinks(names: str | Sequence[str], *, makes: bool) -> None:
    """Raises ValueError for other types, and for an unknown name. If this rank `makes` them, also for one whose package
    is not installed."""
    if not isinstance(names, Sequence):
        raise ValueError(f"log: {names!r}; legal: a list of names, of {', '.join(SINKS)}")
    names = [names] if isinstance(names, str) else names
    if unknown := [name if isinstance(name, str) else repr(name) for name in names if name not in [*SINKS]]:
        raise ValueError(f"log: {', '.join(unknown)}; legal: {', '.join(SINKS)}")
    try:
        for name in names if makes else ():
            import_module(PACKAGES[name])
    except ImportError as error:
        raise ValueError(f'log: {error}; legal after: pip install -e ".[log]"') from error


def run_sinks(
    names: str | Sequence[str], folder: Path | None, facts: Mapping[str, Any], resumed_step: int = 0
) -> tuple[Sink, ...]:
    """Makes the named sinks of a run that resumes after `resumed_step`; none if `folder` is None. `facts` describe the
    run. Raises as `check_sinks`."""
    check_sinks(names, makes=folder is not None)
    names = [names] if isinstance(names, str) else names
    return () if folder is None else tuple(SINKS[name](folder, facts, resumed_step) for name in names)
