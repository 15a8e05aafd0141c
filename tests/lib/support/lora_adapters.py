"""LoRA adapters for the example target, random and large enough to change what it says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.engines import TARGET

RANK = 8


def write_adapter(folder: Path, seed: int, modules: list[str]) -> Path:
    """An adapter in PEFT's files, of `modules` in every layer, `embed_tokens` and `lm_head`."""
    draw = torch.Generator().manual_seed(seed)
    # The target's LM head is its embedding.
    weights = load_file(TARGET / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    tensors = {}
    for name, weight in weights.items():
        *_, module, _ = name.split(".")
        if module not in modules:
            continue
        (out, width), prefix = weight.shape, f"base_model.model.{name.removesuffix('weight')}"
        if module == "embed_tokens":
            down = torch.randn(RANK, out, generator=draw)
            tensors[f"{prefix}lora_embedding_A"] = down
            up = torch.randn(width, RANK, generator=draw) * 0.005
            tensors[f"{prefix}lora_embedding_B"] = up
        else:
            down = torch.randn(RANK, width, generator=draw) * width**-0.5
            tensors[f"{prefix}lora_A.weight"] = down
            tensors[f"{prefix}lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK}
    config |= {"lora_alpha": 2 * RANK, "target_modules": modules}
    config["base_model_name_or_path"] = str(TARGET)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
