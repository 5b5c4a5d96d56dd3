"""Small Hugging Face models with random weights, made here: GPT-2 and Llama, without a download."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCABULARY, SEQUENCE = 37, 16


def gpt2(dropout: float = 0.0, tied: bool = True, causal: bool = True) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=4, attn_pdrop=0.0,
        embd_pdrop=dropout, resid_pdrop=dropout, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(_attending(config, causal))


def llama(dropout: float = 0.0, tied: bool = False, causal: bool = True) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    assert not dropout, "Llama has no dropout"
    model = LlamaForCausalLM(_attending(config, causal))
    # Its own norm rounds to float32 whatever it is given, and parity is measured in float64.
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(owner, name, nn.RMSNorm(16, eps=child.variance_epsilon))
    return model


def _attending(config: Any, causal: bool) -> Any:
    if not causal:
        config.is_causal = False
    return config


MODELS = {"hf-gpt2": gpt2, "hf-llama": llama}
