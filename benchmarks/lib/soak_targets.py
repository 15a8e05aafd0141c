"""Targets of the soak beside the pair's own: its LoRA adapters, and one with short convolutions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Lfm2Config

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
    """Write a random LFM2, attention and short convolutions, with the pair's tokenizer.

    vLLM's own Mamba-2 layers fail on a CPU with such traffic.
    """
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        block_ff_dim=192,
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        conv_dim=128,
        conv_dim_out=128,
        initializer_range=0.15,  # logits far apart
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "w2.weight")):
            weight.data *= (
                0.05  # next tokens depend on the last one most: answers repeat themselves
            )
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(TARGET / name, folder)
    return folder
