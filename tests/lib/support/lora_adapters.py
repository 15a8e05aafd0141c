"""LoRA adapters for the example target, random and large enough to change what it says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.engines import TARGET

RANK = 8
EMBEDDINGS = ("embed_tokens", "lm_head")


def write_adapter(folder: Path, seed: int, modules: list[str]) -> Path:
    """An adapter in PEFT's files, of linear modules in every layer and of `EMBEDDINGS`."""
    draw = torch.Generator().manual_seed(seed)
    config = json.loads((TARGET / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, kept = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    linear = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, kept),
        "self_attn.v_proj": (hidden, kept),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    sizes = {
        f"model.layers.{layer}.{name}": size
        for layer in range(config["num_hidden_layers"])
        for name, size in linear.items()
        if name.split(".")[1] in modules
    }
    if "lm_head" in modules:
        sizes["lm_head"] = hidden, config["vocab_size"]
    tensors = {}
    for name, (width, out) in sizes.items():
        down = torch.randn(RANK, width, generator=draw) * width**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        up = torch.randn(out, RANK, generator=draw) * 0.05
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    if "embed_tokens" in modules:
        table = torch.randn(RANK, config["vocab_size"], generator=draw)
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = table
        up = torch.randn(hidden, RANK, generator=draw) * 0.005
        tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = up
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(TARGET),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
