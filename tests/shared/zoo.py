"""Hugging Face classes with layers of their own, trained in each mode: exact, or refused by name.

`python -m tests.shared.zoo` trains all of them in all modes and prints the table of outcomes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.parallel.swap_proof import Wide
from tests.shared.pool import RankEnv, run_world

STEPS, SAMPLES, TOKENS, WORDS = 3, 4, 8, 37
SIZES: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Name -> prefix of the config's class, and settings beside the sizes.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma": ("Gemma", dict(head_dim=4)),
    "Gemma, unpadded": ("Gemma", dict(head_dim=4, pad_token_id=None)),
    "Gemma-2": ("Gemma2", dict(head_dim=4)),
    "Cohere": ("Cohere", dict()),
    "Nemotron": ("Nemotron", dict()),
    "OLMo": ("Olmo", dict(pad_token_id=1)),
    "Llama, padded": ("Llama", dict(pad_token_id=0)),
    "Llama": ("Llama", dict()),
}
_STILL: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "Llama, biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "Mistral, windowed": ("Mistral", dict(sliding_window=4)),
    "Qwen2": ("Qwen2", dict()),
    "Qwen3": ("Qwen3", dict(head_dim=4)),
    "Gemma-3": ("Gemma3Text", dict(head_dim=4)),
    "Phi": ("Phi", dict()),
    "Phi-3": ("Phi3", dict(pad_token_id=0)),
    "OLMo-2": ("Olmo2", dict()),
    "StableLM": ("StableLm", dict()),
    "Starcoder2": ("Starcoder2", dict(residual_dropout=0.0, embedding_dropout=0.0)),
    "GPT-NeoX": ("GPTNeoX", dict()),
    "OPT": ("OPT", dict(ffn_dim=32, word_embed_proj_dim=16, dropout=0.0)),
    "Bloom": ("Bloom", dict(n_layer=2, n_head=4, hidden_dropout=0.0)),
    "Falcon": ("Falcon", dict(num_kv_heads=2, new_decoder_architecture=True)),
    "Falcon, one key head": ("Falcon", dict(multi_query=True)),
    "Granite": ("Granite", dict()),
    "SmolLM3": ("SmolLM3", dict(pad_token_id=0)),
    "GLM": ("Glm", dict(head_dim=4, pad_token_id=0)),
    "BERT": ("Bert", _STILL),
    "RoBERTa": ("Roberta", _STILL | dict(max_position_embeddings=20)),
}
"""Families whose roles plan="auto" reads from a run."""


@dataclass(frozen=True)
class Mode:
    """A world, and how it is used."""

    ranks: int
    config: Mapping[str, Any] = field(default_factory=dict)


def _parallel(ranks: int, **parallel: Any) -> Mode:
    return Mode(ranks, dict(parallel=parallel))


MODES: dict[str, Mode] = {
    "one rank": Mode(1),
    "data 2": Mode(2),
    "data 4": Mode(4),
    "ZeRO-3 on 1": Mode(1, dict(zero=dict(stage=3))),
    "ZeRO-3 on 2": Mode(2, dict(zero=dict(stage=3))),
    "ZeRO-3 on 4": Mode(4, dict(zero=dict(stage=3))),
    "1d on 2": _parallel(2, tensor=dict(size=2)),
    "1d on 2, whole sequences": _parallel(2, tensor=dict(size=2, sequence_parallel=False)),
    "1d on 4": _parallel(4, tensor=dict(size=4)),
    "1d x ZeRO-3": Mode(4, dict(parallel=dict(tensor=dict(size=2)), zero=dict(stage=3))),
    "2d on 4": _parallel(4, tensor=dict(size=4, mode="2d")),
    "pipeline on 2": _parallel(2, pipeline=dict(size=2, micro_batches=2)),
    "zb-h1 on 2": _parallel(2, pipeline=dict(size=2, micro_batches=2, schedule="zb-h1")),
    "pipeline 2 x 1d 2": _parallel(4, pipeline=dict(size=2, micro_batches=2), tensor=dict(size=2)),
    "ring on 2": _parallel(2, sequence=dict(size=2, mode="ring")),
    "ring on 4": _parallel(4, sequence=dict(size=4, mode="ring")),
}


def model(name: str) -> nn.Module:
    """A tiny model of a class, with random weights, off their initial values."""
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # transformers looks for a package of that name
    import transformers

    prefix, settings = (CLASSES | FAMILIES)[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**SIZES | settings)
    kind = (
        transformers.AutoModelForMaskedLM
        if "Bert" in prefix or prefix == "Roberta"
        else transformers.AutoModelForCausalLM
    )
    made: nn.Module = kind.from_config(config).double()
    with torch.no_grad():
        for parameter in made.parameters():  # ones and zeros hide what a norm does with its weight
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


def batch(step: int, padding: int | None) -> tuple[Tensor, Tensor]:
    """Words and labels [SAMPLES, TOKENS]: with padding at the right ends, whose labels do not count, and where a row
    begins, so that its table's row would get a gradient."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=generator) for _ in range(2))
    if padding is not None:
        behind = torch.arange(TOKENS)[None] >= TOKENS - torch.arange(SAMPLES)[:, None]
        ids, labels = ids.masked_fill(behind, padding), labels.masked_fill(behind, -100)
        ids[::2, 0] = padding
    return ids, labels


def _padding(made: Any) -> int | None:
    word = made.config.pad_token_id
    return None if word is None else int(word)


Outcome = tuple[list[float], dict[str, Tensor]]


@cache
def plain(name: str) -> Outcome:
    """Losses and weights of a plain loop."""
    made, losses = model(name), list[float]()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for step in range(STEPS):
        ids, labels = batch(step, _padding(made))
        with Wide():
            loss = nn.functional.cross_entropy(made(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in made.named_parameters()}


def on_ranks(env: RankEnv, name: str, config: Mapping[str, Any]) -> Outcome | str:
    """Losses and weights of an engine; the words of a refusal."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, timeout_s=60)
    made = model(name)
    with env.launch(base | dict(config)) as context, Wide():
        padding = _padding(made)
        try:
            engine = cl.initialize(made, context=context)
        except ValueError as error:
            return str(error)
        size, coord = context.mesh.size("data"), context.mesh.coord("data")
        losses = []
        for step in range(STEPS):
            ids, labels = (each.chunk(size)[coord] for each in batch(step, padding))
            losses.append(float(engine.train_step((ids, labels)).loss))
        return losses, engine.full_state_dict()


def outcome(name: str, mode: Mode) -> float | str:
    """The largest relative difference of a loss or a weight, or the words of a refusal that all ranks give."""
    ranks = run_world(on_ranks, mode.ranks, name, mode.config)
    if isinstance(ranks[0], str):
        assert set(ranks) == {ranks[0]}, "ranks refuse alike"
        return ranks[0]
    losses, weights = plain(name)
    return max(difference(losses, weights, *each) for each in ranks)


def difference(
    losses: list[float], weights: Mapping[str, Tensor], their_losses: list[float], theirs: Mapping[str, Tensor]
) -> float:  # fmt: skip
    of_losses = max(abs(a - b) / abs(a) for a, b in zip(losses, their_losses, strict=True))
    of_weights = max(float((theirs[n] - w).norm() / w.norm()) for n, w in weights.items() if n in theirs)
    return max(of_losses, of_weights)


def rows() -> Iterator[str]:
    yield f"| | {' | '.join(MODES)} |"
    yield "|---" * (len(MODES) + 1) + "|"
    for name in CLASSES:
        cells = []
        for mode in MODES.values():
            found = outcome(name, mode)
            cells.append(found if isinstance(found, str) else f"{found:.0e}")
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    from tests.shared import zoo

    for row in zoo.rows():
        print(row, flush=True)
