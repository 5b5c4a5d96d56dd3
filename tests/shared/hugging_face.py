"""Small Hugging Face models with random weights, made here: GPT-2 and Llama, without a download."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCABULARY, SEQUENCE = 37, 16
SIZES: dict[str, Any] = dict(vocabulary=VOCABULARY, sequence=SEQUENCE, layers=2, heads=4, width=16)


def gpt2(dropout: float = 0.0, tied: bool = True, causal: bool = True, layers: int = 2) -> nn.Module:
    return sized("hf-gpt2", **SIZES | dict(layers=layers), dropout=dropout, tied=tied, causal=causal)


def llama(dropout: float = 0.0, tied: bool = False, causal: bool = True, layers: int = 2) -> nn.Module:
    assert not dropout, "Llama has no dropout"
    return sized("hf-llama", **SIZES | dict(layers=layers), ffn=32, kv_heads=2, tied=tied, causal=causal)


def sized(
    kind: str, *, vocabulary: int, sequence: int, layers: int, heads: int, width: int, tied: bool, causal: bool = True,
    dropout: float = 0.0, ffn: int | None = None, kv_heads: int | None = None,
) -> nn.Module:  # fmt: skip
    """A GPT-2 (`ffn` None: 4 width) or a Llama of these sizes."""
    shared: dict[str, Any] = dict(vocab_size=vocabulary, tie_word_embeddings=tied, use_cache=False)
    shared |= dict(bos_token_id=None, eos_token_id=None)
    if kind == "hf-gpt2":
        config = GPT2Config(
            n_positions=sequence, n_embd=width, n_layer=layers, n_head=heads, n_inner=ffn, attn_pdrop=0.0,
            embd_pdrop=dropout, resid_pdrop=dropout, **shared,
        )  # fmt: skip
        return GPT2LMHeadModel(_attending(config, causal))
    config = LlamaConfig(
        max_position_embeddings=sequence, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, **shared,
    )  # fmt: skip
    model = LlamaForCausalLM(_attending(config, causal))
    # Its own norm rounds to float32 whatever it is given, and parity is measured in float64.
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(owner, name, nn.RMSNorm(width, eps=child.variance_epsilon))
    return model


def _attending(config: Any, causal: bool) -> Any:
    if not causal:
        config.is_causal = False
    return config


MODELS = {"hf-gpt2": gpt2, "hf-llama": llama}
