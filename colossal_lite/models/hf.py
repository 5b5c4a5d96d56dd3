"""Converts GPT-2 and Llama tensors between our names and Hugging Face's, by tables.

Note: a row lists their tensors that make one of ours.  Several are joined along the output dimension (q, k, v; gate,
up).  GPT-2 stores its linears transposed (Conv1D).  Both directions use the same rows, so one inverts the other bit for
bit.  Rotary embeddings pair feature i with i + K/2 in both formats, so no row is permuted.  Features that the other
format cannot express (scaled rotary positions, biases on part of the linears) are rejected by name.  This file uses no
process group and no download.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from colossal_lite.models.gpt import GPT, GPTConfig

FILE_BYTES = 4 * 10**9
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights may have."""


@dataclass(frozen=True)
class NameRule:
    """One tensor of ours: `theirs` joined along dim 0 in pieces of `sizes` rows, each transposed if `transposed`."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False


def rows(config: GPTConfig) -> Iterator[NameRule]:
    """The tensors of a model in the order of its forward. Raises ValueError for a model of neither family."""
    yield from {"gpt2": _gpt2_rows, "llama": _llama_rows}[family_of(config)](config)


def family_of(config: GPTConfig) -> str:
    """ "gpt2" or "llama". For any other model raises ValueError with the settings of both families."""
    gpt2: dict[str, Any] = dict(
        position="learned", norm="layer", activation="gelu", bias=True, key_heads=config.heads, causal=True
    )
    llama: dict[str, Any] = dict(position="rotary", norm="rms", activation="swiglu", causal=True)
    misses = {}
    for name, wanted in {"gpt2": gpt2, "llama": llama}.items():
        misses[name] = [f"{key}={value!r}" for key, value in wanted.items() if getattr(config, key) != value]
        if not misses[name]:
            return name
    texts = [f"{name} needs {', '.join(rules)}" for name, rules in misses.items()]
    raise ValueError(f"model: Hugging Face has no family for it; {'; '.join(texts)}")


def _gpt2_rows(config: GPTConfig) -> Iterator[NameRule]:
    yield NameRule("token.weight", ("transformer.wte.weight",))
    yield NameRule("position.weight", ("transformer.wpe.weight",))
    for i in range(config.layers):
        for ours, theirs, is_linear in (
            ("norm1", "ln_1", False),
            ("attention.qkv", "attn.c_attn", True),
            ("attention.out", "attn.c_proj", True),
            ("norm2", "ln_2", False),
            ("mlp.up", "mlp.c_fc", True),
            ("mlp.down", "mlp.c_proj", True),
        ):
            name = f"transformer.h.{i}.{theirs}"
            yield NameRule(f"blocks.{i}.{ours}.weight", (f"{name}.weight",), transposed=is_linear)
            yield NameRule(f"blocks.{i}.{ours}.bias", (f"{name}.bias",))
    yield from (NameRule(f"norm.{kind}", (f"transformer.ln_f.{kind}",)) for kind in ("weight", "bias"))
    if not config.tied:
        yield NameRule("head.weight", ("lm_head.weight",))


def _llama_rows(config: GPTConfig) -> Iterator[NameRule]:
    keys = config.key_heads * config.head_width
    yield NameRule("token.weight", ("model.embed_tokens.weight",))
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        yield NameRule(f"blocks.{i}.norm1.weight", (f"{layer}.input_layernorm.weight",))
        yield NameRule(f"blocks.{i}.norm2.weight", (f"{layer}.post_attention_layernorm.weight",))
        for kind in ("weight", "bias") if config.bias else ("weight",):
            qkv = tuple(f"{layer}.self_attn.{name}_proj.{kind}" for name in "qkv")
            yield NameRule(f"blocks.{i}.attention.qkv.{kind}", qkv, (config.width, keys, keys))
            yield NameRule(f"blocks.{i}.attention.out.{kind}", (f"{layer}.self_attn.o_proj.{kind}",))
            gate_up = tuple(f"{layer}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            yield NameRule(f"blocks.{i}.mlp.gate_up.{kind}", gate_up, (config.ffn_width,) * 2)
            yield NameRule(f"blocks.{i}.mlp.down.{kind}", (f"{layer}.mlp.down_proj.{kind}",))
    yield NameRule("norm.weight", ("model.norm.weight",))
    if not config.tied:
        yield NameRule("head.weight", ("lm_head.weight",))


def to_hf(config: GPTConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours (a GPT's state dict); views where nothing is transposed.

    Raises ValueError for names that a GPT of `config` has not, or lacks, as of a model with adapters.
    """
    table = list(rows(config))
    refuse_other_names(state.keys(), {row.ours for row in table}, {"head.weight"} if config.tied else set())
    found = {}
    for row in table:
        pieces = state[row.ours].split(row.sizes) if row.sizes else (state[row.ours],)
        for name, piece in zip(row.theirs, pieces, strict=True):
            found[name] = (piece.t() if row.transposed else piece).contiguous()
    return found


def refuse_other_names(names: Iterable[str], needed: set[str], optional: set[str]) -> None:
    """Raise ValueError with the names that their model would not read, or would fill with random values."""
    found = set(names)
    faults = [f"missing: {name}" for name in sorted(needed - found)]
    faults += [f"unexpected: {name}" for name in sorted(found - needed - optional)]
    if faults:
        more = [f"and {len(faults) - 6} more"] if len(faults) > 6 else []
        raise ValueError(
            "\n  ".join(["Hugging Face model: its modules are not those of its config:", *faults[:6], *more])
            + "\nlegal: a model as its config builds it; merge adapters into their bases, and save that model"
        )


def refuse_changed_modules(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if `from_pretrained` would not read `state` whole into the class that `config` names.

    Asks nothing without transformers, or of a class that is not theirs.
    """
    if importlib.util.find_spec("transformers") is None:
        return
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, config["architectures"][0], None)
    if kind is None:
        return
    with torch.device("meta"):
        plain = kind(transformers.AutoConfig.for_model(**config))
    needed = {name for name, _ in plain.named_parameters()}
    refuse_other_names(
        state.keys(), needed, set(plain.state_dict()) | {name for name, _ in plain.named_buffers()}
    )


def from_hf(config: GPTConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT's state dict from their tensors. Raises ValueError that lists missing, unexpected and misshapen tensors.
    So it does for whole numbers, and for a head that differs from the embedding it is tied to."""
    table = list(rows(config))
    bare = config.position == "learned" and "wte.weight" in theirs  # GPT-2 without its language-model head
    if bare:
        theirs = {f"transformer.{name}": value for name, value in theirs.items()}
    known = {name for row in table for name in row.theirs}
    tied = {"lm_head.weight"} if config.tied else set()
    masks = {
        name for name in theirs if name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"))
    }
    faults = [f"missing: {name}" for name in sorted(known - theirs.keys())]
    faults += [f"unexpected: {name}" for name in sorted(theirs.keys() - known - tied - masks)]
    if faults := faults or _misfits(config, table, theirs):
        raise ValueError("Hugging Face model:\n  " + "\n  ".join(faults))
    ours = {}
    for row in table:
        pieces = [theirs[name].t() if row.transposed else theirs[name] for name in row.theirs]
        ours[row.ours] = torch.cat(pieces) if row.sizes else pieces[0].contiguous()
    return ours | ({"head.weight": ours["token.weight"]} if config.tied else {})


def _misfits(config: GPTConfig, table: Sequence[NameRule], theirs: Mapping[str, Tensor]) -> list[str]:
    """Shapes and dtypes of their tensors that a model of `config` cannot have, and a tied head of other values."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
    faults = []
    for row in table:
        first, *others = shapes[row.ours]
        for name, size in zip(row.theirs, row.sizes or (first,), strict=True):
            shape, dtype = tuple(theirs[name].shape), theirs[name].dtype
            title = name if row.sizes else row.ours
            if (found := shape[::-1] if row.transposed else shape) != (wanted := (size, *others)):
                faults.append(f"shape: {title} is {found}, its config says {wanted}")
            if dtype not in WEIGHTS:
                faults.append(f"dtype: {name} is {dtype}; legal: {', '.join(map(str, WEIGHTS))}")
    head, token = theirs.get("lm_head.weight"), theirs[table[0].theirs[0]]
    if config.tied and head is not None and not _is_equal(head, token):
        faults.append(
            "tied: lm_head.weight is not the embedding, and its config ties them. Legal: tie_word_embeddings=false in "
            "config.json, or a model without lm_head.weight"
        )
    return faults


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same weights, in whatever dtypes."""
    return one.shape == other.shape and one.dtype in WEIGHTS and bool((one == other).all())


def config_to_hf(config: GPTConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of their config.json."""
    both = {"vocab_size": config.vocabulary, "tie_word_embeddings": config.tied, "dtype": dtype}
    if family_of(config) == "gpt2":
        return both | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": config.sequence,
            "n_embd": config.width,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.ffn_width,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    return both | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": config.sequence,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def config_from_hf(theirs: Mapping[str, Any]) -> GPTConfig:
    """Our configuration from their config.json. Raises ValueError for settings that our model does not have."""
    kind = theirs.get("model_type")
    _refuse(theirs, is_causal=(True, None), quantization_config=(None,))
    try:
        if kind == "gpt2":
            _refuse(theirs, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
                    scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))  # fmt: skip
            return GPTConfig(
                vocabulary=theirs["vocab_size"], layers=theirs["n_layer"], heads=theirs["n_head"],
                width=theirs["n_embd"], sequence=theirs["n_positions"], ffn=theirs.get("n_inner"),
                tied=theirs.get("tie_word_embeddings", True), dropout=float(theirs.get("resid_pdrop", 0.1)),
                eps=theirs.get("layer_norm_epsilon", 1e-5),
            )  # fmt: skip
        if kind == "llama":
            return _llama_config(theirs)
    except KeyError as error:
        raise ValueError(f"Hugging Face config: {error.args[0]} is missing") from error
    raise ValueError(f"Hugging Face config: model_type={kind!r}; legal are 'gpt2' and 'llama'")


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")


def warn_of_dropout(theirs: Mapping[str, Any]) -> None:
    """Warn of dropouts in their config.json that our model trains without, or at another rate."""
    is_gpt2 = theirs["model_type"] == "gpt2"
    default = 0.1 if is_gpt2 else 0.0
    found = {name: default if (rate := theirs.get(name)) is None else rate for name in DROPOUTS}
    rate = found["resid_pdrop"]
    ours = {"embd_pdrop": rate, "attn_pdrop": 0.0} if is_gpt2 else {"attention_dropout": 0.0}
    other = [
        f"{name}={found[name]}, and GPT trains with {rate}"
        for name, rate in ours.items()
        if found[name] != rate
    ]
    if other:
        warnings.warn(
            f"Hugging Face config: {'; '.join(other)}. So training differs from that of transformers, and evaluation "
            f"does not. Legal without a warning: {', '.join(f'{name}={rate}' for name, rate in ours.items())}. A "
            f"transformers model handed to cl.initialize trains with all of its dropouts",
            stacklevel=3,
        )


def _llama_config(theirs: Mapping[str, Any]) -> GPTConfig:
    bias, rope = theirs.get("attention_bias", False), theirs.get("rope_parameters") or {}
    scaling = rope.get("rope_type", "default") if rope else theirs.get("rope_scaling")
    if scaling not in ("default", None):
        raise ValueError(
            f"Hugging Face config: rope_scaling={scaling!r}; legal is the default form of rotary positions"
        )
    _refuse(theirs, hidden_act=("silu",), mlp_bias=(bias,), pretraining_tp=(1,))
    config = GPTConfig(
        vocabulary=theirs["vocab_size"], layers=theirs["num_hidden_layers"], heads=theirs["num_attention_heads"],
        width=theirs["hidden_size"], sequence=theirs["max_position_embeddings"], ffn=theirs["intermediate_size"],
        kv_heads=theirs.get("num_key_value_heads"), position="rotary", norm="rms", activation="swiglu", bias=bias,
        tied=theirs.get("tie_word_embeddings", False), eps=theirs.get("rms_norm_eps", 1e-6),
        rotary_base=float(rope.get("rope_theta") or theirs.get("rope_theta", 10000.0)),
    )  # fmt: skip
    _refuse(theirs, head_dim=(None, config.head_width))
    return config


def _refuse(theirs: Mapping[str, Any], **legal: tuple[Any, ...]) -> None:
    for name, values in legal.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(
                f"Hugging Face config: {name}={theirs[name]!r}; legal: {', '.join(map(repr, values))}"
            )


# ------------------------------------------------------------------------------------------------------ folders


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A folder that `from_pretrained` opens: config.json and safetensors of at most `FILE_BYTES` each.

    The folder appears when it is complete; ValueError if there is one already.
    """
    if folder.exists():
        raise ValueError(f"{folder}: is there already; legal: the name of a folder to be made")
    part = folder.with_name(f".{folder.name}.part")
    if part.is_dir():
        shutil.rmtree(part)  # of a write that did not end
    part.mkdir(parents=True)
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > FILE_BYTES:
            groups.append({})
        groups[-1][name] = tensor
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups, strict=True):
        save_file(group, part / name, metadata={"format": "pt"})
    if len(groups) > 1:
        where = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = sum(tensor.nbytes for tensor in tensors.values())
        (part / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        )
    (part / "config.json").write_text(json.dumps(dict(config), indent=2))
    os.rename(part, folder)


def read_hf(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a Hugging Face folder. Only safetensors are read, only inside the folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if (folder / INDEX).exists():
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()), key=str)
        else:
            files = [WHOLE]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder}: is no Hugging Face model: {error}") from error
    if files != [WHOLE] and (folder / WHOLE).exists():
        raise ValueError(f"{folder}: has {WHOLE} and {INDEX}, which are two models; legal: one of them")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{folder / INDEX}: names the file {file!r}; legal: files of that folder")
        try:
            with safe_open(folder / file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file}: {error}; legal: weights as safetensors") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: is no object")
    return config, tensors


def load_pretrained(folder: str | Path) -> GPT:
    """A GPT with the weights of a Hugging Face folder, in their dtype; of several, in one that holds all. Warns of
    dropouts that a GPT has not."""
    theirs, tensors = read_hf(Path(folder))
    config = config_from_hf(theirs)
    warn_of_dropout(theirs)
    state = from_hf(config, tensors)
    model = GPT(config)
    model.to(reduce(torch.promote_types, (value.dtype for value in state.values()))).load_state_dict(state)
    return model
