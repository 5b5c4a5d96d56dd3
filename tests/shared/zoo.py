"""Trains Hugging Face's text families in each mode, and writes docs/models.md: an error, or the words of a refusal.

`python -m tests.shared.zoo` measures all cells, which takes 15 minutes; `... "Gemma*" "1d*"` measures those of
families and modes that match, and leaves the others as the page has them. It exits with 1 if a cell is neither exact
nor refused.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.numerics.proof_modes import Wide
from tests.shared import matrix
from tests.shared.pool import RankEnv, run_world

STEPS, SAMPLES, TOKENS, WORDS = 3, 4, 8, 37
SIZES: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, use_cache=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_STILL: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
_LLAMA_31 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", dict(n_inner=32, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "Llama": ("Llama", dict()),
    "Llama, padded": ("Llama", dict(pad_token_id=0)),
    "Llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "Llama, biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "Llama, rope of 3.1": ("Llama", dict(rope_parameters=_LLAMA_31)),
    "Mistral, windowed": ("Mistral", dict(sliding_window=4)),
    "Qwen2": ("Qwen2", dict()),
    "Qwen3": ("Qwen3", dict(head_dim=4)),
    "Gemma": ("Gemma", dict(head_dim=4)),
    "Gemma, unpadded": ("Gemma", dict(head_dim=4, pad_token_id=None)),
    "Gemma-2": ("Gemma2", dict(head_dim=4)),
    "Gemma-3": ("Gemma3Text", dict(head_dim=4)),
    "Phi": ("Phi", dict()),
    "Phi-3": ("Phi3", dict(pad_token_id=0)),
    "OLMo": ("Olmo", dict(pad_token_id=1)),
    "OLMo-2": ("Olmo2", dict()),
    "StableLM": ("StableLm", dict()),
    "Starcoder2": ("Starcoder2", dict(residual_dropout=0.0, embedding_dropout=0.0)),
    "GPT-NeoX": ("GPTNeoX", dict()),
    "OPT": ("OPT", dict(ffn_dim=32, word_embed_proj_dim=16, dropout=0.0)),
    "Bloom": ("Bloom", dict(n_layer=2, n_head=4, hidden_dropout=0.0)),
    "Falcon": ("Falcon", dict(num_kv_heads=2, new_decoder_architecture=True)),
    "Falcon, one key head": ("Falcon", dict(multi_query=True)),
    "Cohere": ("Cohere", dict()),
    "Granite": ("Granite", dict()),
    "Nemotron": ("Nemotron", dict()),
    "SmolLM3": ("SmolLM3", dict(pad_token_id=0)),
    "GLM": ("Glm", dict(head_dim=4, pad_token_id=0)),
    "BERT": ("Bert", _STILL),
    "RoBERTa": ("Roberta", _STILL | dict(max_position_embeddings=20)),
}
"""Name -> prefix of the config's class, and settings beside the sizes."""


@dataclass(frozen=True)
class Mode:
    """A world, and how it is used."""

    ranks: int
    config: Mapping[str, Any] = field(default_factory=dict)


def _parallel(ranks: int, **parallel: Any) -> Mode:
    return Mode(ranks, dict(parallel=parallel))


MODES: dict[str, Mode] = {
    "data": Mode(2),
    "ZeRO-1": Mode(2, dict(zero=dict(stage=1))),
    "ZeRO-3": Mode(2, dict(zero=dict(stage=3))),
    "1d cut": _parallel(2, tensor=dict(size=2, sequence_parallel=True)),
    "1d whole": _parallel(2, tensor=dict(size=2, sequence_parallel=False)),
    "pipeline": _parallel(2, pipeline=dict(size=2, micro_batches=2)),
    "ring": _parallel(2, sequence=dict(size=2, mode="ring")),
    "checkpointing": Mode(2, dict(activation_checkpoint="full")),
    "accumulation": Mode(2, dict(gradient_accumulation=2)),
    "host": Mode(2, dict(zero=dict(stage=3), memory=dict(placement="host"))),
    "2d": _parallel(4, tensor=dict(size=4, mode="2d")),
}
"""Columns of docs/models.md."""
MORE_MODES: dict[str, Mode] = {
    "data on 4": Mode(4),
    "ZeRO-3 on 4": Mode(4, dict(zero=dict(stage=3))),
    "1d on 4": _parallel(4, tensor=dict(size=4)),
    "1d x ZeRO-3": Mode(4, dict(parallel=dict(tensor=dict(size=2)), zero=dict(stage=3))),
    "zb-h1": _parallel(2, pipeline=dict(size=2, micro_batches=2, schedule="zb-h1")),
    "pipeline x 1d": _parallel(4, pipeline=dict(size=2, micro_batches=2), tensor=dict(size=2)),
    "ring on 4": _parallel(4, sequence=dict(size=4, mode="ring")),
}


def model(name: str) -> nn.Module:
    """A tiny model of a class, with random weights, off their initial values."""
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # transformers looks for a package of that name
    import transformers

    prefix, settings = FAMILIES[name]
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


@dataclass(frozen=True)
class Trained:
    """Losses and whole weights after STEPS; whether layers were left whole."""

    losses: list[float]
    weights: Mapping[str, Tensor]
    left_whole: bool = False


@cache
def plain(name: str) -> Trained:
    """What a plain loop makes of a family."""
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
    return Trained(losses, {n: p.detach() for n, p in made.named_parameters()})


def on_ranks(env: RankEnv, name: str, config: Mapping[str, Any]) -> Trained | str:
    """What an engine makes of it; the words of a refusal."""
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=1, timeout_s=60)
    made = model(name)
    with env.launch(base | dict(config)) as context, Wide(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
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
        return Trained(
            losses, engine.full_state_dict(), any("left whole" in str(each.message) for each in told)
        )


def outcome(name: str, mode: Mode) -> tuple[float, bool] | str:
    """The largest relative difference of a loss or a weight, and whether layers were left whole; or the words of a
    refusal that all ranks give."""
    ranks = run_world(on_ranks, mode.ranks, name, mode.config)
    errors, left_whole = [], False
    for each in ranks:
        if isinstance(each, str):
            assert set(ranks) == {each}, "ranks refuse alike"
            return each
        errors.append(difference(plain(name), each))
        left_whole |= each.left_whole
    return max(errors), left_whole


def difference(right: Trained, found: Trained) -> float:
    of_losses = max(abs(a - b) / abs(a) for a, b in zip(right.losses, found.losses, strict=True))
    theirs = found.weights
    of_weights = max(
        float((theirs[n] - w).norm() / w.norm()) for n, w in right.weights.items() if n in theirs
    )
    return max(of_losses, of_weights)


# ---- the page ----

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BOUND = 1e-9
TITLE = "\n## Every family in every mode\n"
HEAD = f"""# Models and modes, measured

Text families of Hugging Face, with random weights and small sizes, in float64. Each is handed to `cl.initialize` as
transformers makes it, with `plan="auto"`. It trains {STEPS} steps of SGD on 2 ranks, and on 4 in 2d. Losses and weights
are compared with those of a plain loop. How such a model is trained: [Hugging Face models](hugging-face.md).

| in a cell | |
|---|---|
| a number | the largest relative error; the bound is {BOUND:.0e} |
| a number with w | exact, but layers of attention or MLP are left whole, which a warning tells |
| **R** with a number | refused by name; the words are below |

| column | config, beside precision and optimizer |
|---|---|
"""


def page(found: matrix.Matrix) -> str:
    """The page for states `exact 1e-15` and `refused WORDS` by family and mode."""
    columns = "".join(f"| {name} | `{dict(mode.config)}` |\n" for name, mode in MODES.items())
    source = (
        f"`python -m tests.shared.zoo`, {date.today():%-d %B %Y}, transformers {version('transformers')}. Weights are "
        f"drawn with seed 0, and the batch of step s with seed s: {SAMPLES} x {TOKENS} tokens.\n"
    )
    return f"{HEAD}{columns}{TITLE}\n{source}\n{matrix.write(found, list(FAMILIES), list(MODES))}"


def read() -> dict[tuple[str, str], str]:
    """The states that the page holds."""
    return matrix.read(PAGE.read_text().partition(TITLE)[2]) if PAGE.exists() else {}


def one_line(refusal: str) -> str:
    """The words of a refusal without the place of packages on this machine."""
    return re.sub(r"\S*/site-packages/", "", " ".join(refusal.split()))


def cell(name: str, mode: str) -> str:
    """What the page has for a family in a mode. A failure, for which it has no place, is raised."""
    found = outcome(name, MODES[mode])
    if isinstance(found, str):
        return f"refused {one_line(found)}"
    error, left_whole = found
    assert error <= BOUND, f"{name} in mode {mode}: {error:.0e}"
    return f"exact {error:.0e}{' w' * left_whole}"


def main(families: str = "*", modes: str = "*") -> int:
    """Measure cells whose names match, and write the page. How many are neither exact nor refused."""
    found, faults = read(), 0
    cells = [(name, mode) for name in FAMILIES for mode in MODES]
    for name, mode in cells:
        if fnmatch(name, families) and fnmatch(mode, modes):
            found.pop((name, mode), None)
            try:
                found[name, mode] = cell(name, mode)
            except Exception as error:  # of a rank, with its traceback
                faults += 1
                print(f"{name} in mode {mode}: {error}", file=sys.stderr)
            else:
                print(f"{name} in mode {mode}: {found[name, mode]}", flush=True)
            PAGE.write_text(page({each: found[each] for each in cells if each in found}))
    return faults


if __name__ == "__main__":
    from tests.shared import zoo

    sys.exit(min(1, zoo.main(*sys.argv[1:])))
