"""Runs `colossal-lite plan`: forecasts the memory and traffic of a run before there is one."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional, Suppress

from colossal_lite.config.config import Config

if TYPE_CHECKING:
    from colossal_lite.models import GPTConfig
    from colossal_lite.planner.dry_run import Builder
    from colossal_lite.schedule.simulator import ScheduleTimeline

WIDTH = 100
"""Columns of an answer at most."""


@dataclass(frozen=True)
class PlanCommand:
    """Forecast the memory and traffic of one rank, in a world that need not exist. Exit code 1 if it does not fit.

    Options after the file (`--parallel.tensor.size 2`) override it, as in `config show`.
    """

    path: Positional[str]
    """Configuration: a .py file (`file.py:name` for another dict than `config`), .json or .toml."""
    model: str
    """gpt2-SIZE, llama-SIZE, fields of GPTConfig (`layers=6,width=384`), or both. Or a Hugging Face folder
    (config.json), or a function that builds the model: `module:function`, `file.py:function`."""
    batch: int
    """Samples of a step, over all ranks."""
    sequence: int
    """Tokens of a sample."""
    world: int
    """Ranks."""
    rank: int = 0
    """Which of them."""
    device_memory: str | None = None
    """Memory of one device, such as 80GiB; default: that of the device here, if there is one."""
    one_host: bool = False
    """All ranks are processes of one host's CPUs, which exchange through shared memory."""
    svg: Path | None = None
    """Draw the pipeline's schedule into this file."""
    compare: Literal["tensor"] | None = None
    """tensor: every tensor mode that this world can have, side by side, instead of the plan of one."""
    overrides: Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        gc.disable()  # collections that walk the modules of torch are a quarter of the time
        from colossal_lite.planner import advice as advice

        gc.freeze()
        gc.enable()
        try:
            return self._answer()
        finally:
            gc.unfreeze()

    def _answer(self) -> int:
        from rich.console import Console

        from colossal_lite.planner import advice, model_source, planner, run_plan

        if self.svg is not None and not self.svg.parent.is_dir():
            raise ValueError(
                f"--svg {self.svg}: there is no folder {self.svg.parent}; legal: a file in one that exists"
            )
        config = Config.load(self.path, self.overrides)
        model = model_source.find_model(self.model)
        if self.compare is not None:
            return self._compare(config, model)
        memory = planner.device_memory(self.device_memory)
        plan = planner.plan(
            config, model, batch=self.batch, sequence=self.sequence, world_size=self.world, rank=self.rank,
            device_bytes=memory, one_host=self.one_host,
        )  # fmt: skip
        if self.svg is not None:
            _draw(self.svg, plan.timeline)
        for line in (*config.notices, *config.warnings()):
            print(line, file=sys.stderr)
        print("\n".join(plan.head))
        if plan.fits is False and plan.device_bytes is not None:
            asked = advice.Request(
                model, self.batch, self.sequence, self.world, plan.device_bytes, self.one_host
            )
            print(advice.advise(config, asked))
        print()
        Console(width=min(Console().width, WIDTH)).print(run_plan.table(plan))
        if plan.schedule:
            print(f"\n{plan.schedule}")
        if plan.step_list:
            print(f"\n{plan.step_list}")
        if self.svg is not None:
            print(f"{self.svg}: the schedule, by the costs of its stages")
        return 1 if plan.fits is False else 0

    def _compare(self, config: Config, model: GPTConfig | Builder) -> int:
        from rich.console import Console

        from colossal_lite.models import GPTConfig
        from colossal_lite.planner import compare

        if not isinstance(model, GPTConfig):
            raise ValueError(
                f"--compare: the formulas are for GPT-2 and Llama, not {self.model}; legal: without --compare"
            )

        made = compare.compare_tensor(
            config, model, batch=self.batch, sequence=self.sequence, world_size=self.world
        )
        Console(width=min(Console().width, WIDTH)).print(compare.table(made))
        return 0


def _draw(path: Path, timeline: ScheduleTimeline | None) -> None:
    from colossal_lite.observe.schedule_report import svg

    if timeline is None:
        raise ValueError(
            f"--svg {path}: a run without a pipeline has no schedule to draw; legal: with parallel.pipeline.size of 2 "
            f"or more"
        )
    path.write_text(svg(timeline), encoding="utf-8")
