"""The EAGLE-3 network: decoder layers, mostly one, run once per drafted level (arXiv 2503.01840).

A row is (embedding of a token, feature of the token before it, RoPE position). The feature is the
target's for committed tokens, the drafter's own state for drafted ones. Parameter names are those
of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import (
    CheckpointReader,
    Stored,
    Tensors,
    own_tables,
    with_d2t,
)
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, DraftLM, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary, rewritten
from vllm_specblock.drafters.eagle3.config import Eagle3Shape, from_json
from vllm_specblock.triton_kernels.layers.norms import norm_pair

_UNUSED = ("t2d", "rotary_emb.inv_freq")
"""The mapping's other direction, and RoPE, which is computed."""


class FirstLayer(DecoderLayer):
    """Its attention reads embedding and feature side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, in_size=2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Eagle3Model(DraftLM):
    """Feature fusion, the layers, and an embedding and an LM head only if the checkpoint has them.

    Without its own it uses the target's embedding, and wants the target's LM head by `share_head`.
    """

    def __init__(
        self,
        shape: Eagle3Shape,
        own_embedding: bool = False,
        own_head: bool = True,
        fc_bias: bool = False,  # which no config says
    ) -> None:
        super().__init__()
        self.config, self.logit_scale = shape, shape.logit_scale
        size, eps = shape.hidden_size, shape.rms_norm_eps
        fused = shape.num_features * shape.target_hidden_size
        self.make_tables(shape, own_embedding, own_head)
        self.input_norm = RMSNorm(fused, eps) if shape.norm_before_fc else None
        self.fc_norm = None
        if shape.fc_norm:
            each = (RMSNorm(shape.target_hidden_size, eps) for _ in range(shape.num_features))
            self.fc_norm = nn.ModuleList(each)
        self.fc = nn.Linear(fused, size, bias=fc_bias)
        self.midlayer = FirstLayer(shape)
        # By their numbers, as in the checkpoints.
        further = (str(index) for index in range(1, shape.num_hidden_layers))
        self.layers = nn.ModuleDict({index: DecoderLayer(shape) for index in further})
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(shape, shape.rotary_dim)
        self.mask_hidden: nn.Parameter | None = None  # P-EAGLE's masks have it for features
        if shape.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(fused))

    def fuse(self, hidden: Tensor) -> Tensor:
        """Fuse the target's hidden states [..., n·Ht], low layers first, into [..., H]."""
        hidden = hidden.to(self.dtype)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(hidden)

    def run(
        self,
        embedding: Tensor,  # [..., H], of each row's token
        feature: Tensor,  # [..., H], of the token before it: from `fuse`, or from `carry`
        position: Tensor,  # [...] int64
        attend: Attend,
        keep: Tensor | None = None,  # [Q] int64, rows whose states are wanted; default: all
    ) -> Tensor:
        """Run the layers over any rows, with one leading dimension if `keep` is given.

        Returns:
            [..., H] or [Q, H], the state before the final norm, for `logits` and `carry`.
        """
        rope, embedding = self.rotary(position.flatten(), self.dtype), embedding.to(self.dtype)
        first = self.midlayer
        normed = norm_pair(embedding, feature, first.input_layernorm, first.hidden_norm)
        if self.config.norm_before_residual:
            # The cast only matters under autocast.
            feature = normed[..., embedding.shape[-1] :].to(feature.dtype)
        state = first(0, feature, rope, attend, None if self.layers else keep, normed)
        for index, layer in enumerate(self.layers.values(), start=1):
            kept = keep if index == len(self.layers) else None
            state = layer(index, state, rope, attend, kept)
        return state

    def carry(self, state: Tensor) -> Tensor:
        """Return the feature of the next row: [..., H] -> [..., H]."""
        return self.norm(state) if self.config.norm_output else state


def _model(config: Eagle3Shape, names: Collection[str]) -> Eagle3Model:
    return Eagle3Model(config, *own_tables(config, names), fc_bias="fc.bias" in names)


def _named(stored: Tensors, config: Eagle3Shape, directory: Path) -> Tensors:
    """Return the used tensors by the network's names, fused ones taken apart, and d2t."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        ".qkv_proj.": {".q_proj.": heads, ".k_proj.": kv_heads, ".v_proj.": kv_heads},
        ".gate_up_proj.": {".gate_proj.": inner, ".up_proj.": inner},
    }
    unused = _UNUSED if config.mask_token_id is not None else (*_UNUSED, "mask_hidden")
    out: Tensors = {}
    for name, entry in stored.items():
        if any(part in name for part in unused):
            continue
        name = name.removeprefix("model.")
        if name == "mask_hidden":  # stored as [1, 1, n·Ht]
            entry = Stored.of(entry.read().flatten(), entry.name)
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
    return with_d2t(out, stored, config, directory)


def _filed(name: str, found: Collection[str]) -> str:
    first = "midlayer." if any("midlayer." in each for each in found) else "layers.0."
    prefixed = any(each.startswith("model.") for each in found)
    prefix = "model." if prefixed and not name.startswith(("lm_head.", "d2t")) else ""
    return prefix + name.replace("midlayer.", first)


FILES = CheckpointReader(from_json, _model, _named, rewritten, filed=_filed)
"""Reads checkpoints, whose tensors have several names and may be fused or absent."""
