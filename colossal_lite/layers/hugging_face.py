"""Binds the attention of Hugging Face's GPT-2 and Llama to ours, for use with a sequence axis.

Note: binding.
transformers looks up attention by a name in the model's config.  `bind` registers one function under our name.  It
gives every attention module an `ops`, which `parallelize` fills as in our own model.  Nothing else of theirs changes,
and no other model notices.  Under a name without a mask function transformers makes no mask.  So `causal` is read from
the config, and `attention_mask` [B, T] says which keys are hidden. It is passed as [B, 1, 1, T], a shape that
transformers leaves alone.  What this attention cannot do is rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.kernels import TORCH, Mask

NAME = "colossal_lite"
BEFORE = "_attention_before"
MODELS = ("gpt2", "llama")
# Settings of a config under which attention is another function, or its products need a generator.
PLAIN: dict[str, tuple[Any, ...]] = {
    "attn_pdrop": (0.0,),
    "attention_dropout": (0.0,),
    "add_cross_attention": (False,),
    "reorder_and_upcast_attn": (False,),
}
ROPE_OF_LENGTH = ("dynamic", "longrope")
# Arguments that other models hand to attention; None and False are none.
UNKNOWN = ("softcap", "sliding_window", "position_bias", "s_aux", "cache", "output_attentions")


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, which is not imported for it."""
    return any(c.__name__ == "PreTrainedModel" for c in type(module).__mro__)


def is_bound(module: nn.Module) -> bool:
    """Whether `bind` is made for a model."""
    return is_hugging_face(module) and not any(True for _ in faults(module))


def faults(module: nn.Module) -> Iterator[str]:
    """What keeps a model of transformers from a sequence axis."""
    config: Any = module.config
    if config.model_type not in MODELS:
        yield f"model_type={config.model_type!r}; legal: {', '.join(map(repr, MODELS))}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if (kind := rope.get("rope_type")) in ROPE_OF_LENGTH:
        yield f"rope_type={kind!r}, whose angles follow from the longest position, which few ranks see"
    for name, legal in PLAIN.items():
        if getattr(config, name, legal[0]) not in legal:
            yield f"{name}={getattr(config, name)!r}; legal: {legal[0]!r}"


def bind(module: nn.Module) -> None:
    """Make the attention of a model ours; every attention module gets `ops` for `parallelize` to set."""
    import_module("transformers").AttentionInterface.register(NAME, attend)
    config: Any = module.config
    module.__dict__.setdefault(BEFORE, config._attn_implementation)
    config._attn_implementation = NAME
    for owner in module.modules():
        if hasattr(owner, "is_causal"):
            setattr(owner, "ops", TORCH)  # noqa: B010  (nn.Module types its attributes as tensors and modules)


def unbind(module: nn.Module) -> None:
    """Give a model its own attention back."""
    if (own := module.__dict__.pop(BEFORE, None)) is not None:
        config: Any = module.config
        config._attn_implementation = own


def local_arguments(batch: Batch) -> Batch:
    """A batch as their models take it: positions [1, T] in the place of [T], hidden keys [B, 1, 1, T]."""
    kwargs = dict(batch.kwargs)
    kwargs["position_ids"] = kwargs["position_ids"][None]
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = kwargs["attention_mask"][:, None, None]
    return replace(batch, kwargs=kwargs)


def attend(
    module: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, attention_mask: Tensor | None, *,
    dropout: float = 0.0, scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """(out [B, T, H, K], no weights), as transformers asks for it. `attention_mask` [B, 1, 1, T]: keys that are seen.

    Raises ValueError for what a model asks beyond that.
    """
    if not hasattr(module, "ops"):
        raise ValueError(
            f"model: {type(module).__name__} has its config from another model, which an engine has on a sequence "
            f"axis. Legal: a config for each model, such as copy.deepcopy(config)"
        )
    asked = [name for name in UNKNOWN if more.get(name) not in (None, False)] + ["dropout"] * (dropout != 0.0)
    if asked:
        raise ValueError(
            f"sequence: attention of {type(module).__name__} asks for {', '.join(asked)}, which it has not"
        )
    q, k, v = (x.transpose(1, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
    documents = None
    if attention_mask is not None:  # every query is of document 1, and so is every key that may be seen
        seen = attention_mask[:, 0, 0].ne(0).long()
        documents = (torch.ones_like(seen), seen)
    given = more.get("is_causal")
    causal = getattr(module.config, "is_causal", True) if given is None else given
    return module.ops.attend(q, k, v, mask=Mask(causal, documents), scale=scaling), None
