"""A target small enough to be asked for its whole law, and a config without any weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
"""A scaling of RoPE."""


def tiny_target(**changes) -> LlamaForCausalLM:
    """A random Llama, by default of 20 tokens and 5 layers, far from uniform, that never ends."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 20,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "eos_token_id": None,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def write_target(directory: Path, **changes) -> Path:
    """A folder with nothing but a config.json, of 9 layers and 160 tokens."""
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "vocab_size": 160,
        "intermediate_size": 96,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes | changes))
    return directory


def edit_config(directory: Path, **changes) -> None:
    """Change keys of the config.json in a folder; `...` removes one."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
