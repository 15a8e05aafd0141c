"""Input and decoder layers of drafters that read the target's features, as EAGLE does.

An entry is a feature of a token, the target's or the drafter's own, fused with the embedding of the
token after it. The caller decides on attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.specblock.config import DrafterConfig


class Trunk(nn.Module):
    """Input of entries, and decoder layers over any number of them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.rotary = Rotary(config)  # every entry has a position of its own
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.condition_norm.weight.dtype

    def condition(self, features: Tensor) -> Tensor:
        """The target's features [..., 3·Ht] -> [..., H]."""
        return self.condition_proj(features.to(self.dtype))

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
