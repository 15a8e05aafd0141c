"""EAGLE-3 checkpoints, whose tensors have several names and may be fused or absent."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from vllm_specblock.drafters.common.checkpoint_files import (
    CheckpointReader,
    Stored,
    Tensors,
    check_mapping,
)
from vllm_specblock.drafters.common.rope import rewritten
from vllm_specblock.drafters.eagle3.config import Eagle3Shape, from_json
from vllm_specblock.drafters.eagle3.model import Eagle3Model

_UNUSED = ("t2d", "mask_hidden", "rotary_emb.inv_freq")
"""The mapping's other direction, an input of parallel drafting, and RoPE, which is computed."""


def _model(config: Eagle3Shape, names: Collection[str]) -> Eagle3Model:
    # The target's embedding will do only where it is as wide, and its LM head where it also names
    # the same tokens.
    narrow = config.hidden_size != config.target_hidden_size
    return Eagle3Model(
        config,
        own_embedding="embed_tokens.weight" in names or narrow,
        own_head="lm_head.weight" in names
        or narrow
        or config.draft_vocab_size != config.vocab_size,
        fc_bias="fc.bias" in names,
    )


def _named(found: Tensors, config: Eagle3Shape, directory: Path) -> Tensors:
    """Rename the tensors; without a d2t add that of t2d, or of a whole vocabulary."""
    stored, count = _unfused(found, config), config.draft_vocab_size
    marks = next((entry for name, entry in found.items() if name.endswith("t2d")), None)
    if "d2t" not in stored and count == config.vocab_size:
        stored["d2t"] = Stored.of(torch.zeros(count, dtype=torch.int64))
    elif "d2t" not in stored and marks is not None:
        targets = marks.read().nonzero()[:, 0]
        stored["d2t"] = Stored.of(targets - torch.arange(len(targets)))
    if "d2t" in stored and stored["d2t"].shape == (count,):
        check_mapping(stored["d2t"].read(), config.vocab_size, directory)
    return stored


def _unfused(stored: Tensors, config: Eagle3Shape) -> Tensors:
    """Return the used tensors by the network's names, fused ones taken apart."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        ".qkv_proj.": {".q_proj.": heads, ".k_proj.": kv_heads, ".v_proj.": kv_heads},
        ".gate_up_proj.": {".gate_proj.": inner, ".up_proj.": inner},
    }
    out = {}
    for name, entry in stored.items():
        if any(part in name for part in _UNUSED):
            continue
        name = name.removeprefix("model.")
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name.startswith("layers.") and ".hidden_norm." in name:
            continue  # of a feature, which only the first layer reads
        whole = next((key for key in fused if key in name), None)
        if whole is None or entry.shape[:1] != (sum(fused[whole].values()),):
            out[name] = entry
            continue
        first = 0
        for part, rows in fused[whole].items():
            out[name.replace(whole, part)] = entry.rows(first, rows)
            first += rows
    return out


FILES = CheckpointReader(from_json, _model, _named, rewritten)
