"""A target small enough to be asked for its whole law."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_target() -> LlamaForCausalLM:
    """A random Llama of 20 tokens, width 32 and 5 layers, far from uniform, that never ends."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()
