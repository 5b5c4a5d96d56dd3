"""Trains sixteen low-rank adapters over one Hugging Face base on one device: one base on the host, loaded once for all.

PYTHONPATH=. python examples/many_models/adapters.py
torchrun --nproc-per-node 2 examples/many_models/adapters.py

The base has the weights of a seed, so nothing is downloaded.  In its place `base` may return
`AutoModelForCausalLM.from_pretrained(...)`; then give `cl.Task(build=...)` the module itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import colossal_lite as cl
from examples.many_models.tasks import SEQUENCE, train

STAGES = 4


class LowRank(nn.Module):
    """base(x) + up(down(x)) of a frozen linear, arXiv 2106.09685: `down` [rank, in], `up` [out, rank]."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def base(layers: int, width: int) -> nn.Module:
    """A Llama over bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def adapted(rank: int, layers: int, width: int) -> nn.Module:
    """The base, frozen, with an adapter on the queries and values of each block."""
    model = base(layers, width)
    model.requires_grad_(False)
    for block in model.get_submodule("model.layers"):
        attention: Any = block.get_submodule("self_attn")
        attention.q_proj = LowRank(attention.q_proj, rank)
        attention.v_proj = LowRank(attention.v_proj, rank)
    return model


def config(micro_batches: int) -> dict[str, Any]:
    """All state rests on the host. Stages are loaded one after the other, each for all micro-batches of all tasks."""
    shares = dict.fromkeys(("weights", "gradients", "optimizer"), 1.0)
    return dict(
        precision="fp32", zero=dict(stage=3, sum_order="ordered"), seed=1,
        parallel=dict(
            pipeline=dict(size=1, schedule="bfs", stages_per_rank=STAGES, micro_batches=micro_batches)
        ),
        memory=dict(placement="static", host_fraction=shares, update_on="host", shared_base="llama"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", type=int, default=16, help="adapters, each with a learning rate of its own"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--directory", default="runs/adapters")
    args = parser.parse_args()
    rates = [1e-2 * 0.8**number for number in range(args.tasks)]
    tasks = [
        cl.Task(
            f"lr{rate:.2e}", partial(adapted, args.rank, args.layers, args.width), data=train, steps=args.steps,
            global_batch=8, config=dict(optimizer=dict(lr=rate)),
        )
        for rate in rates
    ]  # fmt: skip
    print(cl.train_many(tasks, config=config(micro_batches=2), directory=args.directory))


if __name__ == "__main__":  # workers import this file
    torch.set_num_threads(1)
    main()
