"""LoRA adapters of the example pair's target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lib.pair import TARGET

RANK = 8
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter of all linear layers of the pair's target, in PEFT's files."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(TARGET / "model.safetensors").items():
        if name.split(".")[-2] in LINEAR:
            (out, width), prefix = weight.shape, f"base_model.model.{name.removesuffix('weight')}"
            down = torch.randn(RANK, width, generator=draw) * width**-0.5
            tensors[f"{prefix}lora_A.weight"] = down
            tensors[f"{prefix}lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": LINEAR}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
