"""Small DFlash and JetSpec drafters: their files, and their arithmetic read plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from vllm_specblock.drafters.dflash.config import from_json
from vllm_specblock.drafters.dflash.model import DFlashModel

# The keys of a published checkpoint's config.json; sizes are ours.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3, 5]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "max_window_layers": 2,
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
    "use_cache": True,
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


def plain_logits(
    weights: dict[str, Tensor], raw: dict[str, Any], head: Tensor, features: Tensor, block: Tensor
) -> Tensor:
    """Logits [S, V] of a block [S, H] of embeddings behind a text with features [T, n·H].

    weights: of the checkpoint; head: [V, H], the target's.
    """
    size, length = raw["head_dim"], len(features)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], raw["rms_norm_eps"])

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}_proj.weight"])

    def turned(x: Tensor, first: int) -> Tensor:  # x [n, heads, D], at positions first, first + 1 …
        where = torch.arange(first, first + len(x)).float()
        angle = where[:, None] / raw["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    context = norm(linear(features, weights["fc.weight"]), "hidden_norm")
    sees = torch.ones(len(block), length + len(block), dtype=torch.bool)
    if raw["dflash_config"].get("causal_head"):
        sees = sees.tril(length)
    state = block
    for layer in range(raw["num_hidden_layers"]):
        at, attention = f"layers.{layer}", f"layers.{layer}.self_attn"
        normed = norm(state, f"{at}.input_layernorm")
        both = torch.cat([context, normed])
        query, key, value = (
            project(x, f"{attention}.{name}").unflatten(-1, (-1, size))
            for x, name in ((normed, "q"), (both, "k"), (both, "v"))
        )
        query = turned(norm(query, f"{attention}.q_norm"), length)
        key = turned(norm(key, f"{attention}.k_norm"), 0)
        rows = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed = scaled_dot_product_attention(*rows, attn_mask=sees, enable_gqa=True)[0]
        state = state + project(mixed.transpose(0, 1).flatten(1), f"{attention}.o")
        normed = norm(state, f"{at}.post_attention_layernorm")
        gate, up = (project(normed, f"{at}.mlp.{name}") for name in ("gate", "up"))
        state = state + project(silu(gate) * up, f"{at}.mlp.down")
    return linear(norm(state, "norm"), head)
