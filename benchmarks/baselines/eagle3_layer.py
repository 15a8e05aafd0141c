"""The one layer of EAGLE-3 (arXiv 2503.01840), as vLLM's `llama_eagle3` computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.draft.model import MLP, RMSNorm
from vllm_specblock.draft.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(query [..., nh, D], key [..., nkv, D], value [..., nkv, D]) -> [..., nh, D].

Keys and queries carry their RoPE. The callable owns what was before, the mask and the scaling.
"""


@dataclass(frozen=True)
class Sizes:
    """Shape of the drafter. Its width is the target's, because it reads the target's embedding.

    Attributes:
        vocab_size: V of the target.
        layer_ids: target layers of the features, indices into transformers' `hidden_states`.
        rope_scaling: as in a transformers config, or None.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    layer_ids: tuple[int, int, int]
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = None


class Layer(nn.Module):
    """A Llama layer whose attention reads embedding and feature side by side."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(sizes)

    def forward(
        self, embedding: Tensor, feature: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """embedding and feature [..., H], rope 2 × [..., 1, D] -> [..., H]."""
        normed = torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)
        hidden = feature + self.self_attn(normed, rope, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Projections and RoPE around `attend`."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        size, self.head_dim = sizes.hidden_size, sizes.head_dim
        width = sizes.num_attention_heads * sizes.head_dim
        kv_width = sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(2 * size, width, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)

    def forward(self, normed: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """normed [..., 2·H] -> [..., H]."""
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        rope = tuple(part.to(query.dtype) for part in rope)
        mixed = attend(rotate(query, *rope), rotate(key, *rope), value)
        return self.o_proj(mixed.flatten(-2))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [B, Q, nh, D], key and value [B, T, nkv, D], mask [B, Q, T] bool -> [B, Q, nh, D]."""
    # Repeated by hand: fused kernels that take a mask know no groups.
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return mixed.transpose(1, 2)
