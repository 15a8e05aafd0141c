"""LoRA adapters of the example pair's target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lib.pair import TARGET

RANK = 8
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, seed: int, modules: Sequence[str] = LINEAR) -> Path:
    """Write a random adapter of `modules` in every layer, `embed_tokens` and `lm_head`, as PEFT."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    weights = load_file(TARGET / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # they are one
    for name, weight in weights.items():
        module = name.split(".")[-2]
        if module not in modules:
            continue
        (out, width), prefix = weight.shape, f"base_model.model.{name.removesuffix('weight')}"
        if module == "embed_tokens":
            tensors[f"{prefix}lora_embedding_A"] = torch.randn(RANK, out, generator=draw)
            up = torch.randn(width, RANK, generator=draw) * 0.005
            tensors[f"{prefix}lora_embedding_B"] = up
        else:
            down = torch.randn(RANK, width, generator=draw) * width**-0.5
            tensors[f"{prefix}lora_A.weight"] = down
            tensors[f"{prefix}lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    config["target_modules"] = list(modules)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
