"""Small tasks for the trainer's tests: what a worker imports by name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import colossal_lite as cl
from tests.shared.parity import adapt
from tests.shared.pool import RankEnv

CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="adamw", lr=1e-2), seed=5, timeout_s=30)
SHAPE = cl.models.GPTConfig(vocabulary=32, layers=1, heads=2, width=8, sequence=8, dropout=0.1)
TOKENS = torch.randint(32, (41, 9), generator=torch.Generator().manual_seed(0))
TRAIN = [(row[:-1], row[1:]) for row in TOKENS[:22]]
VALID = [(row[:-1], row[1:]) for row in TOKENS[22:]]


def gpt() -> cl.models.GPT:
    return cl.models.GPT(SHAPE)


def train() -> list[Any]:
    return TRAIN


def raises() -> cl.models.GPT:
    raise ValueError("no such weights")


def dies_once(mark: Path, deaths: int) -> None:
    """Kill this process, at most so many times in all."""
    with mark.open("a+") as file:
        file.seek(0)
        if len(file.read()) >= deaths:
            return
        file.write("x")
        file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(list[Any]):
    """Data whose sample `at` kills the worker, at most `deaths` times."""

    def __init__(self, mark: Path, at: int = 12, deaths: int = 1) -> None:
        super().__init__(TRAIN)
        self.mark, self.at, self.deaths = mark, at, deaths

    def __reduce__(self) -> Any:
        return Dying, (self.mark, self.at, self.deaths)

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            dies_once(self.mark, self.deaths)
        return super().__getitem__(index)


class Raising(list[Any]):
    """Data whose sample `at` cannot be read."""

    def __init__(self, at: int = 12) -> None:
        super().__init__(TRAIN)
        self.at = at

    def __reduce__(self) -> Any:
        return Raising, (self.at,)

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            raise ValueError(f"sample {index} is torn")
        return super().__getitem__(index)


AWAY = dict(placement="static", host_fraction=dict.fromkeys(("weights", "gradients", "optimizer"), 1.0))
STAGES = dict(size=1, schedule="bfs", stages_per_rank=3, micro_batches=2)
SPILLED: dict[str, Any] = dict(
    parallel=dict(pipeline=STAGES), zero=dict(stage=3, prefetch=0), memory=AWAY | dict(update_on="host")
)
"""Trains one stage after the other, with all state on the host."""
BUDGET: dict[str, Any] = dict(
    gradient_accumulation=2, zero=dict(sum_order="ordered"),
    memory=dict(placement="auto", device_budget=1_300_000, update_on="host"),
)  # fmt: skip
"""Has no room for the weights of `deep`."""


def deep() -> cl.models.GPT:
    return cl.models.GPT(replace(SHAPE, layers=3, width=32, tied=False))


def over_a_base() -> cl.models.GPT:
    """Adapters of rank 2 over the frozen weights of `deep`."""
    model = deep()
    adapt(model, 2)
    return model


def over_another_base() -> cl.models.GPT:
    """The same, with other values."""
    model = over_a_base()
    torch.nn.init.constant_(model.get_submodule("blocks")[1].norm1.weight, 2.0)
    return model


def adapted(name: str, lr: float = 1e-2, steps: int = 12, **more: Any) -> cl.Task:
    """A task of those that share their base."""
    return task(name, lr, steps, **(dict(build=over_a_base, config=SPILLED) | more))


def pictures() -> torch.nn.Module:
    """A classifier that does not run on ids."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
            image_size=8, patch_size=4,
        )
    )  # fmt: skip


def of_pictures() -> list[dict[str, torch.Tensor]]:
    values = torch.randn(12, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [dict(pixel_values=x, labels=torch.tensor(i % 3)) for i, x in enumerate(values)]


def of_texts() -> torch.nn.Module:
    """A causal model of another library."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip


def texts(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A collator, which makes labels of the ids."""
    ids = torch.stack(samples)
    return dict(input_ids=ids, labels=ids)


def drawn() -> list[Any]:
    """Data without a seed of its own."""
    return [(row[:-1], row[1:]) for row in torch.randint(32, (22, 9))]


class Joining:
    """A collator that is an object."""

    def join(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return texts(samples)

    __call__ = join


class Counting(torch.nn.Module):
    """A loss that grows with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def noisy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that draws."""
    return Counting()(logits + torch.randn_like(logits), labels)


class Late(torch.nn.Module):
    """A loss that draws from its fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.counting(logits, labels)
        return loss if self.counting.calls < 4 else loss * torch.rand(())


class LateDraws(torch.nn.Module):
    """A loss whose 16th call and later ones draw, and do not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= 16:
            torch.rand(())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that is NaN where the batch has sample 12."""
    has = bool((labels == TRAIN[12][1]).all(-1).any())
    return Counting()(logits, labels) * (torch.nan if has else 1)


def torn_draw(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that draws where the batch has sample 12."""
    if torn(logits.detach(), labels).isnan():
        torch.rand(())
    return Counting()(logits, labels)


def partly_labelled() -> list[Any]:
    """Data most of whose samples have no label: a batch of one sample may count none."""
    return [
        (ids, labels if n % 3 == 0 else torch.full_like(labels, -100))
        for n, (ids, labels) in enumerate(TRAIN)
    ]


def reports_badly(name: str, step: int, metrics: Any) -> Any:
    raise KeyError("my table")


def reports_a_word(name: str, step: int, metrics: Any) -> Any:
    return "halt"


def task(name: str, lr: float = 1e-2, steps: int = 12, **more: Any) -> cl.Task:
    given: dict[str, Any] = dict(build=gpt, data=TRAIN, evaluate=VALID, config={}) | more
    build, config = given.pop("build"), dict(optimizer=dict(lr=lr)) | given.pop("config")
    return cl.Task(name, build, steps=steps, global_batch=4, config=config, **given)


def alone(env: RankEnv, task: cl.Task, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses, weights and held-out loss of a plain `cl.Run` of this task in this world."""
    losses = []
    assert callable(task.build)
    with env.launch(task.settings(CONFIG)) as context:
        engine = cl.initialize(task.build, context=context, criterion=task.criterion)
        run = cl.Run(folder, engine)
        for batch in run.batches(task.data, steps=task.steps, global_batch=task.global_batch, **task.loader):
            losses.append(float(run.step(batch).loss))
        held_out = run.evaluate(task.evaluate, global_batch=task.global_batch)
        weights = engine.full_state_dict()
    return losses, weights, held_out


def weights_in(task: cl.Task, folder: Path) -> dict[str, torch.Tensor]:
    """What a task's newest checkpoint holds."""
    config = CONFIG | dict(optimizer=task.settings(CONFIG)["optimizer"])
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = cl.initialize(task.build, context=context)
        engine.load(folder / "checkpoints")
        return engine.full_state_dict()
