"""The trunk of drafters whose rows each carry a group of entries: input, layers, who sees whom.

An entry sees some entries of earlier rows (the prefix) and some of its own row's group, never
other rows' groups. Symbols: B windows, R rows, n entries per row, H hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specblock.draft.config import DrafterConfig, TargetInfo
from vllm_specblock.draft.config_json import rope_of
from vllm_specblock.draft.model import Attend, DecoderLayer, RMSNorm
from vllm_specblock.draft.rope import Rotary

KeyValue = tuple[Tensor, Tensor]


def sizes_like(
    target_config: Any, draft_vocab_size: int, block_size: int, **changes: Any
) -> DrafterConfig:
    """Sizes of decoder layers built like the target's, with `block_size` entries per row.

    Args:
        target_config: transformers config of a Llama- or Qwen3-like target.
        changes: keys of DrafterConfig, such as `intermediate_size` and `num_hidden_layers`.
    """
    raw = target_config.to_dict()
    theta, scaling = rope_of(raw)
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    return DrafterConfig(
        **{
            "hidden_size": size,
            "target_hidden_size": size,
            "num_attention_heads": heads,
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or size // heads,
            "intermediate_size": raw["intermediate_size"],
            "num_hidden_layers": 2,
            "block_size": block_size,
            "vocab_size": raw["vocab_size"],
            "draft_vocab_size": draft_vocab_size,
            "rms_norm_eps": raw["rms_norm_eps"],
            "rope_theta": theta,
            "rope_scaling": scaling,
            "qk_norm": raw["model_type"] == "qwen3",
            "target": TargetInfo(hidden_size=size, vocab_size=raw["vocab_size"]),
            **changes,
        }
    )


class GroupTrunk(nn.Module):
    """Input of real rows, and decoder layers over groups of `config.block_size` entries."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        for weight in self.parameters():
            if weight.dim() == 2:  # the others are norms
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def condition(self, features: Tensor) -> Tensor:
        """The target's features [..., 3·Ht] -> [..., H]."""
        return self.condition_proj(features.to(self.condition_proj.weight.dtype))

    def entry(self, condition: Tensor, embedding: Tensor) -> Tensor:
        """condition [..., H], embedding of the token after it [..., H] -> [..., H]."""
        token = self.token_norm(embedding.to(condition.dtype))
        return self.fuse(torch.cat([self.condition_norm(condition), token], dim=-1))

    def forward(self, entries: Tensor, base: Tensor, attend: Attend) -> Tensor:
        """entries [B, R, n, H], base [B, R] int64 RoPE position of each row's first entry ->
        [B, R, n, H] before the final norm."""
        rope = self.rotary(base.flatten(), entries.dtype)
        hidden = entries.flatten(0, 1)
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, rope, attend, None)
        return hidden.unflatten(0, base.shape)


class Kept:
    """Keys and values of earlier passes, per layer, joined along dimension `dim`."""

    def __init__(self, dim: int):
        self.dim, self.layers = dim, dict[int, KeyValue]()

    def extend(self, layer: int, key: Tensor, value: Tensor) -> KeyValue:
        """Add a pass's key and value; returns all of the layer's."""
        new = (key, value)
        if layer in self.layers:
            new = tuple(torch.cat(pair, self.dim) for pair in zip(self.layers[layer], new))
        self.layers[layer] = new
        return new

    def held(self, layer: int, *_: Tensor) -> KeyValue:
        """The layer's, without what this pass brings."""
        return self.layers[layer]

    def map(self, change: Callable[[Tensor], Tensor], dim: int) -> Kept:
        """What `change` makes of every key and value, to be joined along `dim` from now on."""
        copy = Kept(dim)
        copy.layers = {
            layer: (change(key), change(value)) for layer, (key, value) in self.layers.items()
        }
        return copy


def group_attention(
    query: Tensor, prefix: KeyValue, own: KeyValue, sees: Tensor, inside: Tensor
) -> Tensor:
    """Attention of each row's group over the prefix and over its own entries.

    Plain products: a mask over all groups' entries at once would be R times as wide as `own`.

    Args:
        query: [B, R, n, nh, D].
        prefix: key and value, [B, P, nkv, D] each.
        own: key and value, [B, R, m, nkv, D] each.
        sees: [B, R, P] bool, whether the row's entries see the prefix's entry.
        inside: [n, m] bool, whether entry n sees own entry m; one at least.

    Returns:
        [B, R, n, nh, D].
    """
    query = query.unflatten(3, (own[0].shape[3], -1)) / math.sqrt(query.shape[-1])
    far = torch.einsum("brnhgd,bphd->brnhgp", query, prefix[0])
    far = far.masked_fill(~sees[:, :, None, None, None], -math.inf)
    near = torch.einsum("brnhgd,brmhd->brnhgm", query, own[0])
    near = near.masked_fill(~inside[:, None, None], -math.inf)
    weight = torch.cat([far, near], dim=-1).softmax(-1).to(own[1].dtype)
    far, near = weight.split([far.shape[-1], near.shape[-1]], dim=-1)
    mixed = torch.einsum("brnhgp,bphd->brnhgd", far, prefix[1])
    mixed = mixed + torch.einsum("brnhgm,brmhd->brnhgd", near, own[1])
    return mixed.flatten(3, 4)


def earlier_rows(document: Tensor, row: slice, stride: int = 1) -> Tensor:
    """Which rows lie a multiple of `stride` before each of the rows `row`, in the same document.

    document [B, L] int64, ascending along a window -> [B, R, row.stop] bool.
    """
    column = torch.arange(row.stop, device=document.device)
    distance = column[row, None] - column
    same = document[:, row, None] == document[:, None, : row.stop]
    return same & (distance > 0) & (distance % stride == 0)
