"""Targets of the soak beside the pair's own: its LoRA adapters, and one with Mamba-2 layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconH1Config

from lib.pair import TARGET

RANK = 8
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


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


def write_hybrid(folder: Path, vocab: int) -> Path:
    """Write a random Falcon-H1, attention and Mamba-2 in each layer, with the pair's tokenizer."""
    torch.manual_seed(0)
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    mamba = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
    config = FalconH1Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        max_position_embeddings=2048,
        mamba_chunk_size=32,
        initializer_range=0.15,  # logits far apart
        tie_word_embeddings=True,
        **attention,
        **mamba,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(TARGET / name, folder)
    return folder
