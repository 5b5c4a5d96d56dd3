"""Runs `colossal-lite plan`: what a run will hold and move, before there is one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional, Suppress

from colossal_lite.config.config import Config

if TYPE_CHECKING:
    from colossal_lite.models import GPTConfig


@dataclass(frozen=True)
class PlanCommand:
    """What a run will hold and move on one rank, in a world that need not exist. Exit code 1 if it does not fit.

    Options after the file (`--parallel.tensor.size 2`) lie over it, as in `config show`.
    """

    path: Positional[str]
    """Configuration: a .py file (`file.py:name` for another dict than `config`), .json or .toml."""
    model: str
    """gpt2-SIZE, llama-SIZE, fields of GPTConfig (`layers=6,width=384`), or both."""
    batch: int
    """Samples of a step, over all ranks."""
    sequence: int
    """Tokens of a sample."""
    world: int
    """Ranks."""
    rank: int = 0
    """Which of them."""
    device_memory: str | None = None
    """Of one device, such as 80GiB; left out: that of the device here, if there is one."""
    one_host: bool = False
    """All ranks are processes of one host's CPUs, which exchange through shared memory."""
    compare: Literal["tensor"] | None = None
    """tensor: every tensor mode that this world can have, side by side, in the place of the plan of one."""
    overrides: Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        from rich.console import Console

        from colossal_lite.planner import planner, run_plan

        config = Config.load(self.path, self.overrides)
        model = planner.parse_model(self.model)
        if self.compare is not None:
            return self._compare(config, model)
        memory = planner.device_memory(self.device_memory)
        plan = planner.plan(
            config, model, batch=self.batch, sequence=self.sequence, world_size=self.world, rank=self.rank,
            device_bytes=memory, one_host=self.one_host,
        )  # fmt: skip
        for line in (*config.notices, *config.warnings()):
            print(line, file=sys.stderr)
        Console().print(run_plan.table(plan))
        if plan.schedule:
            print(f"\n{plan.schedule}")
        return 1 if plan.fits is False else 0

    def _compare(self, config: Config, model: GPTConfig) -> int:
        from rich.console import Console

        from colossal_lite.planner import compare

        made = compare.compare_tensor(
            config, model, batch=self.batch, sequence=self.sequence, world_size=self.world
        )
        Console(width=max(Console().width, 130)).print(compare.table(made))
        return 0
