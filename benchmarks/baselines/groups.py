"""Drafters whose rows each carry a group of entries: their sizes, and who sees whom in training.

An entry sees some entries of earlier rows (the prefix) and some of its own row's group, never
other rows' groups. Symbols: B windows, R rows, n entries per row, H hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_specblock.draft.baselines.trunk import Trunk
from vllm_specblock.draft.config import TargetInfo
from vllm_specblock.draft.config_json import rope_of

KeyValue = tuple[Tensor, Tensor]


def sizes_like(
    target_config: Any,
    draft_vocab_size: int,
    block_size: int,
    layer_ids: tuple[int, int, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Keys of a DrafterConfig of layers built like the target's, `block_size` entries per row.

    Args:
        target_config: transformers config of a Llama- or Qwen3-like target.
        layer_ids: of the target's features; None: the usual ones.
        changes: keys that shall be others, such as `intermediate_size` and `num_hidden_layers`.
    """
    raw = target_config.to_dict()
    theta, scaling = rope_of(raw)
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    target = TargetInfo(hidden_size=size, vocab_size=raw["vocab_size"], layer_ids=layer_ids)
    return {
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
        "target": target,
        **changes,
    }


def draw_weights(trunk: Trunk) -> None:
    """First weights, from the global generator: inputs are normed, and outputs of unit size."""
    for weight in trunk.parameters():
        if weight.dim() == 2:  # the others are norms
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


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
