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

FIXTURES = Path(__file__).parents[2] / "fixtures"
PUBLISHED: dict[str, Any] = json.loads((FIXTURES / "dflash.json").read_text())
"""Keys of a published DFlash checkpoint's config.json; sizes are ours."""

WINDOWS = PUBLISHED | {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 6,
}
"""Layers with causal windows, and one without, in which a block sees itself whole."""

DFLASH2 = PUBLISHED | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": PUBLISHED["dflash_config"]
    | {
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 5,
        "input_embedding_scale": 1.5,
        "output_multiplier": 0.8,
        "final_logit_softcapping": 20.0,
    },
}


def speculators(kind: str, layer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A config.json in the speculators layout, with a vocabulary of its own; `layer`: changes."""
    left_out = {"block_size", "dflash_config", "architectures", "auto_map", "num_target_layers"}
    described = {key: value for key, value in PUBLISHED.items() if key not in left_out}
    return {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": described | (layer or {}),
        "draft_vocab_size": 40,
        "target_hidden_size": None,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 60,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **keys,
    }


DSPARK = speculators("dspark", markov_rank=6, sample_from_anchor=True)
FLAT_DSPARK = {
    key: PUBLISHED[key] for key in PUBLISHED.keys() - {"block_size", "dflash_config"}
} | {
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": 6,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [1, 3, 5],
}
WINDOWED = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
"""Changes of a layer."""

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
_LAYER = {key: _TINY[key] for key in _TINY.keys() - {"dflash_config", "architectures", "auto_map"}}
_HEADS = DFLASH2["dflash_config"] | _OWN
_BESIDE = {
    "aux_hidden_state_layer_ids": [1, 3, 5, 6],
    "mask_token_id": 2047,
    "draft_vocab_size": 1500,
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 4}],
        "verifier": {"name_or_path": "org/target"},
    },
}
FOR_TINY_PAIR = {
    "dflash": _TINY,
    # vLLM reads `causal`, the authors write `causal_head`; with the same meaning.
    "jetspec": _TINY | {"dflash_config": _OWN | {"causal_head": True, "causal": True}},
    "windows": speculators("dflash", _LAYER | WINDOWED | {"sliding_window": 12}, **_BESIDE),
    "dflash2": _TINY | {"architectures": ["DFlash2DraftModel"], "dflash_config": _HEADS},
    "dspark": speculators(
        "dspark", _LAYER, markov_rank=6, sample_from_anchor=True, block_size=4, **_BESIDE
    ),
}
"""By kind, for the target of `examples/tiny_pair`."""


def make_model(raw: dict[str, Any] = PUBLISHED, std: float = 0.25) -> DFlashModel:
    """With random weights; in the authors' layout it still wants the target's LM head."""
    torch.manual_seed(0)
    config, whole = from_json(raw, "config.json"), "speculators_model_type" in raw
    model = DFlashModel(config, whole, whole).eval()
    with torch.no_grad():
        named = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        model.d2t.copy_(named - torch.arange(len(named)))
        for name, weight in model.named_parameters():
            weight.normal_(std=std)
            if name.endswith("norm.weight"):
                weight.add_(1)
    return model


def write(folder: Path, model: DFlashModel, raw: dict[str, Any] = PUBLISHED) -> Path:
    """As the authors publish them: neither an embedding nor an LM head."""
    folder.mkdir(exist_ok=True)
    tensors = {name: w.detach() for name, w in model.state_dict().items()}
    if "speculators_model_type" not in raw:
        tensors = {k: w for k, w in tensors.items() if k not in ("lm_head.weight", "d2t")}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: w.contiguous() for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


def plain_states(model: DFlashModel, features: Tensor, block: Tensor) -> Tensor:
    """Normed states [S, H] of a block [S, H] of embeddings behind a text with features [T, n·H]."""
    config, length, size = model.config, len(features), len(block)
    position = torch.arange(length + size)
    context = list(model.context(features, position[:length]))
    ahead = position[length:, None] - position

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sees = torch.ones(size, length + size, dtype=torch.bool)
        if window := config.layer_windows[layer]:
            # Without causality all rows see as many entries before the block.
            sees = ahead < window if config.layer_causal[layer] else position >= length - window
            sees = sees.expand(size, -1)
        if config.layer_causal[layer]:
            sees = sees & (ahead >= 0)
        both = (torch.cat(pair) for pair in zip(context[layer], (key, value)))
        rows = (x.transpose(0, 1)[None] for x in (query, *both))
        mixed = scaled_dot_product_attention(*rows, attn_mask=sees, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    return model.norm(DFlashModel.forward(model, block, position[length:], attend))
