"""Drafters whose rows each carry a group of entries: sizes, layers, and attention in training.

An entry sees some entries of earlier rows (the prefix) and some of its own row's group, never
other rows' groups. Symbols: B windows, R rows, n entries per row, H hidden size, D head size.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from vllm_specblock.drafters.common.config import (
    Count,
    check_rope_scaling,
    default_layer_ids,
    layers_of,
)
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.specblock.config import DrafterConfig, TargetInfo

KeyValue = tuple[Tensor, Tensor]
Shape = TypeVar("Shape", bound=BaseModel)


# ParallelSpec's shape is `DrafterConfig`, whose `block_size` is the positions of one forward. What
# that says of the rank head and the shift is not read, here and in `FalconShape`.


class MedusaShape(BaseModel):
    """Attributes: hidden_size: Ht, the target's; num_heads: K; num_layers: blocks of each head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Count
    vocab_size: Count
    draft_vocab_size: Count
    num_heads: Count
    num_layers: Count

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """What follows all layers of the target: the state that its LM head reads."""
        return (num_layers,)


class FalconShape(DrafterConfig):
    """`block_size` is k, tokens of one forward.

    k divides every block of vLLM's cache, which holds a multiple of 16 tokens.

    Attributes:
        forwards: F; the tree is at most F·k deep.
        lstm_layers: before the decoder layers.
    """

    block_size: Literal[1, 2, 4, 8, 16]
    hidden_size: Annotated[int, Field(ge=2, multiple_of=2)]
    forwards: Count
    lstm_layers: Count


def shape_like(
    kind: type[Shape],
    target_config: Any,
    draft_vocab_size: int,
    layer_ids: tuple[int, int, int] | None = None,
    **changes: Any,
) -> Shape:
    """Return a shape whose layers are like those of a Llama- or Qwen3-like target.

    layer_ids: of the target's features, None: the usual ones; changes: other fields, such as
    `intermediate_size`.
    """
    raw, fields = target_config.to_dict(), kind.model_fields
    size, vocab_size = raw["hidden_size"], raw["vocab_size"]
    if layer_ids is None and "layer_ids" in fields:
        layer_ids = default_layer_ids(raw["num_hidden_layers"])
    like = {
        "hidden_size": size,
        "target_hidden_size": size,
        "num_attention_heads": raw["num_attention_heads"],
        "intermediate_size": raw["intermediate_size"],
        "rms_norm_eps": raw["rms_norm_eps"],
        **layers_of(raw, "The target's config"),
        "num_hidden_layers": 2,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "qk_norm": raw["model_type"] == "qwen3",
        "layer_ids": layer_ids,
        "target": TargetInfo(hidden_size=size, vocab_size=vocab_size, layer_ids=layer_ids),
        **changes,
    }
    check_rope_scaling(like["rope_scaling"])  # YaRN's factor goes into weights that are loaded
    return kind(**{name: value for name, value in like.items() if name in fields})


def draw_weights(network: nn.Module) -> None:
    """Draw the first weights of matrices, whose outputs have unit size."""
    for weight in network.parameters():
        if weight.dim() == 2:  # the others are norms
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def extend(kept: dict[int, KeyValue], layer: int, new: KeyValue) -> KeyValue:
    """Add a pass's entries to those of earlier passes [B, R, m, nkv, D]; returns the layer's."""
    if layer in kept:
        new = tuple(torch.cat(pair, 2) for pair in zip(kept[layer], new))
    kept[layer] = new
    return new


def group_attention(
    query: Tensor, prefix: KeyValue, own: KeyValue, sees: Tensor, inside: Tensor
) -> Tensor:
    """Attention of each row's group over the prefix and over its own entries.

    Args:
        query: [B, R, n, nh, D].
        prefix: key and value, [B, P, nkv, D] each.
        own: key and value, [B, R, m, nkv, D] each.
        sees: [B, R, P] bool, whether the row's entries see the prefix's entry.
        inside: [n, m] bool, whether entry n sees own entry m; one at least.

    Returns:
        [B, R, n, nh, D].
    """
    group = query.shape[3] // own[0].shape[3]
    (far_key, far_value), (key, value) = (
        [each.repeat_interleave(group, -2) for each in pair] for pair in (prefix, own)
    )
    far = torch.einsum("brnhd,bphd->bhrnp", query, far_key)
    near = torch.einsum("brnhd,brmhd->bhrnm", query, key)
    may = [sees[:, None, :, None].expand_as(far), inside.expand_as(near)]
    scores = torch.cat([far, near], -1).masked_fill(~torch.cat(may, -1), -math.inf)
    weight = (scores * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype)
    far, near = weight.split([far.shape[-1], near.shape[-1]], -1)
    mixed = torch.einsum("bhrnp,bphd->brnhd", far, far_value)
    return mixed + torch.einsum("bhrnm,brmhd->brnhd", near, value)


def earlier_rows(document: Tensor, stride: int = 1) -> Tensor:
    """Return which rows are a multiple of `stride` before each row, in the same document.

    document [B, R] int64 -> [B, R, R] bool.
    """
    column = torch.arange(document.shape[1], device=document.device)
    distance = column[:, None] - column
    same = document[:, :, None] == document[:, None]
    return same & (distance > 0) & (distance % stride == 0)


class Trunk(nn.Module):
    """Input and decoder layers of drafters that read the target's features, as EAGLE does.

    An entry is a feature of a token, the target's or the drafter's own, fused with the embedding of
    the token after it.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.rotary = Rotary(config)  # every entry has a position of its own
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))

    def condition(self, features: Tensor) -> Tensor:
        """The target's features [..., 3·Ht] -> [..., H]."""
        # Linear layers may keep their weights in another dtype.
        return self.condition_proj(features.to(self.condition_norm.weight.dtype))

    def entry(self, condition: Tensor, embedding: Tensor) -> Tensor:
        """condition [..., H], embedding of the token after it [..., H] -> [..., H]."""
        token = self.token_norm(embedding.to(condition.dtype))
        return self.fuse(torch.cat([self.condition_norm(condition), token], dim=-1))

    def forward(
        self, entries: Tensor, position: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """Run all layers over n entries [..., H] at RoPE `position` [...] int64.

        attend: called with the layer's number, query [n, 1, nh, D], key and value [n, 1, nkv, D].
        keep: [Q] int64, entries whose states are returned; None: all.

        Returns:
            [..., H] or [Q, H], before the final norm.
        """
        rope = self.rotary(position.flatten(), entries.dtype)
        hidden = entries.reshape(-1, 1, entries.shape[-1])
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, rope, attend, keep if index == last else None)
        return hidden[:, 0] if keep is not None else hidden.view(entries.shape)
