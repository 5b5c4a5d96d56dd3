"""Defines the runs of `--config NAME`: functions of the number of steps that return dicts.

    model            keyword arguments of `cl.models.GPTConfig`
    steps            optimizer steps
    global_batch     sequences per optimizer step, over all ranks
    evaluate_every   steps between evaluations on held-out text
    config           what `cl.launch` takes

Text is read as bytes, so ids are below 256. The published models keep their own vocabularies all the same:
then time, memory and traffic are those of the real ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

Recipe = dict[str, Any]


def small(steps: int = 600) -> Recipe:
    """0.8 million parameters, for two CPU cores: below the unigram entropy in ten seconds."""
    return dict(
        model=dict(vocabulary=256, layers=4, heads=4, width=128, sequence=128),
        steps=steps,
        global_batch=16,
        evaluate_every=100,
        config=dict(
            precision="fp32",
            optimizer=_adamw(lr=3e-3),
            lr_scheduler=_cosine(steps),
            clip_grad_norm=1.0,
        ),
    )


def small_llama(steps: int = 600) -> Recipe:
    """`small` in the form of Llama: rotary positions, RMSNorm, SwiGLU, two key heads for four query heads."""
    recipe = small(steps)
    llama = dict(position="rotary", norm="rms", activation="swiglu", kv_heads=2, tied=False, bias=False)
    norms = _adamw(
        lr=3e-3, vectors=("*norm*.weight",)
    )  # it has no biases, and a pattern that fits nothing is refused
    return recipe | dict(model=recipe["model"] | llama, config=recipe["config"] | dict(optimizer=norms))


def small_fp64(steps: int = 50) -> Recipe:
    """`small` in double precision: 1 rank and 2 ranks give the same losses to ten digits."""
    recipe = small(steps)
    return recipe | dict(config=recipe["config"] | dict(precision="fp64"))


def small_tensor(steps: int = 600) -> Recipe:
    """`small` with every layer cut over two ranks, activations along the sequence."""
    return _parallel(steps, tensor=2)


def small_2d(steps: int = 600) -> Recipe:
    """`small` on a grid of 2 x 2 ranks (SUMMA): every layer and every activation is cut both ways."""
    return _parallel(steps, tensor=dict(size=4, mode="2d"))


def small_2p5d(steps: int = 600) -> Recipe:
    """`small` on two sheets of such grids, 8 ranks, that share the batch (Tesseract)."""
    return _parallel(steps, tensor=dict(size=8, mode="2.5d", depth=2))


def small_3d(steps: int = 600) -> Recipe:
    """`small` on a cube of 2 x 2 x 2 ranks; a micro-batch must divide into 4 parts."""
    return _parallel(steps, tensor=dict(size=8, mode="3d"))


def small_ring(steps: int = 600) -> Recipe:
    """`small` with sequences cut over two ranks; another way of doing it with `--parallel.sequence.mode ulysses`."""
    return _parallel(steps, sequence=dict(size=2, mode="ring"))


def zero1(steps: int = 600) -> Recipe:
    """`small` with the optimizer's state cut over the ranks of the data axis."""
    return _zero(steps, stage=1)


def zero2(steps: int = 600) -> Recipe:
    """`small` with gradients cut as well."""
    return _zero(steps, stage=2)


def zero3(steps: int = 600) -> Recipe:
    """`small` with weights cut as well: gathered block by block, one ahead, in forward and again in backward."""
    return _zero(steps, stage=3)


def zero3_host(steps: int = 600) -> Recipe:
    """`zero3` with the optimizer's state resting in host memory."""
    recipe = zero3(steps)
    return recipe | dict(config=recipe["config"] | dict(memory=dict(placement="host")))


def zero3_disk(steps: int = 600) -> Recipe:
    """`zero3` with the optimizer's state in a file in the temporary folder, which nobody sees and nothing leaves."""
    recipe = zero3(steps)
    memory = dict(placement="disk", disk_dir=tempfile.gettempdir())
    return recipe | dict(config=recipe["config"] | dict(memory=memory))


def gemini(steps: int = 600) -> Recipe:
    """`zero3` within a budget for each device, activations included: what has no room rests in host memory, by the plan
    that the first step leads to. With two ranks a part of it does."""
    recipe = zero3(steps)
    memory = dict(placement="auto", device_budget="42MiB")
    return recipe | dict(config=recipe["config"] | dict(memory=memory))


def small_pipeline(steps: int = 600) -> Recipe:
    """`small` on a pipeline of two ranks, weight gradients in its bubbles: other ways with `--parallel.pipeline.*`."""
    return _parallel(steps, pipeline=dict(size=2, schedule="zb-v", micro_batches=4))


def small_pipeline_tensor(steps: int = 600) -> Recipe:
    """`small` on a pipeline of two stages, each cut over two ranks; further ranks share the batch."""
    return _parallel(steps, pipeline=dict(size=2, schedule="1f1b", micro_batches=4), tensor=2)


def small_pipeline_ring(steps: int = 600) -> Recipe:
    """`small` on a pipeline of two stages, sequences cut over two ranks each; gradients sharded as they come."""
    recipe = _parallel(steps, pipeline=dict(size=2, schedule="zb-h1", micro_batches=4), sequence=2)
    return recipe | dict(config=recipe["config"] | dict(zero=dict(stage=2, reduce_every="micro_batch")))


def gpt2_124m(steps: int = 2000) -> Recipe:
    """GPT-2 with 124 million parameters, for GPUs."""
    return _large(steps, dict(vocabulary=50257, layers=12, heads=12, width=768, sequence=1024), 32, 6e-4)


def gpt2_355m(steps: int = 2000) -> Recipe:
    """GPT-2 with 355 million parameters, for GPUs."""
    return _large(steps, dict(vocabulary=50257, layers=24, heads=16, width=1024, sequence=1024), 32, 3e-4)


def _parallel(steps: int, **parallel: Any) -> Recipe:
    recipe = small(steps)
    return recipe | dict(config=recipe["config"] | dict(parallel=parallel))


def _zero(steps: int, **zero: Any) -> Recipe:
    recipe = small(steps)
    return recipe | dict(config=recipe["config"] | dict(zero=zero))


def _large(steps: int, model: dict[str, Any], global_batch: int, lr: float) -> Recipe:
    return dict(
        model=model,
        steps=steps,
        global_batch=global_batch,
        evaluate_every=250,
        config=dict(
            precision="bf16",
            optimizer=_adamw(lr),
            lr_scheduler=_cosine(steps),
            clip_grad_norm=1.0,
        ),
    )


def _adamw(lr: float, vectors: tuple[str, ...] = ("*.bias", "*norm*.weight")) -> dict[str, Any]:
    """Weight decay for matrices only."""
    groups = [dict(match=pattern, weight_decay=0.0) for pattern in vectors]
    return dict(type="adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1, groups=groups)


def _cosine(steps: int) -> dict[str, Any]:
    return dict(type="cosine", warmup_steps=min(50, steps // 10), total_steps=steps, final_ratio=0.1)


CONFIGS: dict[str, Callable[..., Recipe]] = {
    function.__name__: function
    for function in (
        *(small, small_llama, small_fp64, small_tensor, small_2d, small_2p5d, small_3d, small_ring),
        *(small_pipeline, small_pipeline_tensor, small_pipeline_ring),
        *(zero1, zero2, zero3, zero3_host, zero3_disk, gemini, gpt2_124m, gpt2_355m),
    )
}
