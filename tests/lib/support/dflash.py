"""Small DFlash and JetSpec drafters: their files, and one block of theirs without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_specblock.drafters.dflash.config import from_json
from vllm_specblock.drafters.dflash.model import DFlashModel

# Keys of a published checkpoint's config.json; sizes are ours.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3, 5]},
    "dtype": "bfloat16",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 64,
}
"""DFlash's."""

JETSPEC = PUBLISHED | {
    "block_size": 7,
    "dflash_config": PUBLISHED["dflash_config"] | {"causal_head": True},
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
}
"""JetSpec's: the same class and keys, and one more."""

_OWN = {"mask_token_id": 2047, "target_layer_ids": [0, 2, 4, 5]}
_TINY = PUBLISHED | {
    "hidden_size": 192,
    "head_dim": 32,
    "num_attention_heads": 6,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "num_target_layers": 7,
    "dflash_config": _OWN,
}
FOR_TINY_PAIR = {
    "dflash": _TINY,
    # vLLM reads `causal`, the authors write `causal_head`; with the same meaning.
    "jetspec": _TINY | {"dflash_config": _OWN | {"causal_head": True, "causal": True}},
}
"""By kind, for the target of `examples/tiny_pair`."""


def make_model(raw: dict[str, Any] = PUBLISHED, std: float = 0.25) -> DFlashModel:
    """With random weights; it still wants the target's LM head."""
    torch.manual_seed(0)
    model = DFlashModel(from_json(raw, "config.json")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=std)
            if name.endswith("norm.weight"):
                weight.add_(1)
    return model


def write(folder: Path, model: DFlashModel, raw: dict[str, Any] = PUBLISHED) -> Path:
    """As the authors publish them: neither an embedding nor an LM head."""
    folder.mkdir(exist_ok=True)
    tensors = {name: w.detach() for name, w in model.named_parameters() if "lm_head" not in name}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: w.contiguous() for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


def plain_logits(model: DFlashModel, features: Tensor, block: Tensor) -> Tensor:
    """Logits [S, V] of a block [S, H] of embeddings behind a text with features [T, n·H]."""
    length, size = len(features), len(block)
    position = torch.arange(length + size)
    context = list(model.context(features, position[:length]))
    sees = torch.ones(size, length + size, dtype=torch.bool)
    if model.config.causal:
        sees = sees.tril(length)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = (torch.cat(pair) for pair in zip(context[layer], (key, value)))
        rows = (x.transpose(0, 1)[None] for x in (query, *both))
        mixed = scaled_dot_product_attention(*rows, attn_mask=sees, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    state = DFlashModel.forward(model, block, position[length:], attend)
    return model.lm_head(model.norm(state))
