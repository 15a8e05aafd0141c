"""The EAGLE-3 drafter: one decoder layer, run once per drafted level (arXiv 2503.01840).

A row is (embedding of a token, feature of the token before it, RoPE position). Its feature is
the target's for committed tokens, and the state that the drafter itself left for drafted ones.
Parameter names are those of the authors' checkpoints. Any number of leading dimensions will do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm_specblock.draft.eagle3.config import Eagle3Shape
from vllm_specblock.draft.model import MLP, RMSNorm
from vllm_specblock.draft.rope import Rotary
from vllm_specblock.triton_kernels.read_heads_reference import top_logprobs
from vllm_specblock.triton_kernels.rope import rotate_pair

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(query [Q..., nh, D], key [T..., nkv, D], value [T..., nkv, D]) -> [Q..., nh, D].

Keys and queries carry their RoPE. Q = T, except in a forward with `keep`. The callable owns
what was before, the mask and the scaling by 1/sqrt(D).
"""

_SHARED_AT_ONCE = 8192
"""Tokens whose embeddings are compared at a time."""


class Eagle3Drafter(nn.Module):
    """Feature fusion, the layer, the LM head, and an embedding only if the checkpoint has one.

    Args:
        own_embedding: whether it embeds tokens itself. If not, the target's embedding is used.
    """

    def __init__(self, shape: Eagle3Shape, own_embedding: bool = False):
        super().__init__()
        self.config = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        fused = shape.num_features * shape.target_hidden_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, size) if own_embedding else None
        self.input_norm = RMSNorm(fused, eps) if shape.norm_before_fc else None
        self.fc_norm = None
        if shape.fc_norm:
            each = (RMSNorm(shape.target_hidden_size, eps) for _ in range(shape.num_features))
            self.fc_norm = nn.ModuleList(each)
        self.fc = nn.Linear(fused, size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape)
        # What a draft id lacks to its target id. Until it is loaded: the first Vd target ids.
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    @torch.no_grad()
    def share_embedding(self, embed: Callable[[Tensor], Tensor]) -> None:
        """Give up an embedding of its own that is the target's: it would lie in memory twice.

        embed: [n] target ids -> [n, Ht]. For start-up: reads the device.
        """
        own = self.embed_tokens
        if own is not None:
            ids = torch.arange(own.num_embeddings, device=own.weight.device)
            if all(torch.equal(own(part), embed(part)) for part in ids.split(_SHARED_AT_ONCE)):
                self.embed_tokens = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.norm.weight.dtype

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states side by side, low layers first [..., n·Ht] -> [..., H]."""
        hidden = hidden.to(self.dtype)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(hidden)

    def run(
        self,
        embedding: Tensor,
        feature: Tensor,
        position: Tensor,
        attend: Attend,
        keep: Tensor | None = None,
    ) -> Tensor:
        """One step over any rows.

        Args:
            embedding: [..., H], of each row's token.
            feature: [..., H], of the token before it: from `fuse`, or from `carry`.
            position: [...] int64.
            attend: see `Attend`.
            keep: [Q] int64, rows whose states are wanted (default all; rows then have one
                leading dimension). The others give keys and values only.

        Returns:
            [..., H] or [Q, H], the state before the final norm, for `logits` and `carry`.
        """
        rope = self.rotary(position.flatten(), self.dtype)
        rope = tuple(part.view(*position.shape, 1, -1) for part in rope)
        return self.midlayer(embedding.to(self.dtype), feature, rope, attend, keep)

    def carry(self, state: Tensor) -> Tensor:
        """What a row after this one takes as its feature: [..., H] -> [..., H]."""
        return self.norm(state) if self.config.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """[..., H], as `run` returns it -> [..., Vd] float32."""
        logits = self.lm_head(self.norm(state)).float()
        scale = self.config.logit_scale
        return logits if scale == 1 else logits * scale

    def best(
        self, state: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `width` likeliest tokens after each state.

        state [R, ..., H], sharpness [R] float32 (None: 1, see `draft/sharpness.py`) ->
        log-probabilities over the draft vocabulary [R, ..., width] float32, best first, and
        target ids [R, ..., width] int64.
        """
        logits = self.logits(state)
        top = logits.topk(width)
        logprob = top_logprobs(logits, top.values, sharpness)
        return logprob, top.indices + self.d2t[top.indices]


class Layer(nn.Module):
    """A Llama layer whose attention reads embedding and feature side by side."""

    def __init__(self, shape: Eagle3Shape):
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(shape)
        self.norm_before_residual = shape.norm_before_residual

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Attend,
        keep: Tensor | None = None,
    ) -> Tensor:
        """embedding and feature [..., H], rope 2 × [..., 1, D], keep [Q] -> [... or Q, H]."""
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        both = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        mixed = self.self_attn(both, rope, attend, keep)
        hidden = (residual if keep is None else residual[keep]) + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Projections and RoPE around `attend`; with `qk_norm` those of Qwen3."""

    def __init__(self, shape: Eagle3Shape):
        super().__init__()
        size, self.head_dim = shape.hidden_size, shape.head_dim
        width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * size, width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(2 * size, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(2 * size, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(width, size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self, both: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, keep: Tensor | None
    ) -> Tensor:
        """both [..., 2·H] -> [... or Q, H]."""
        per_head = (-1, self.head_dim)
        key = self.k_norm(self.k_proj(both).unflatten(-1, per_head))
        value = self.v_proj(both).unflatten(-1, per_head)
        # The casts only matter under autocast.
        rope = (rope[0].to(key.dtype), rope[1].to(key.dtype))
        asking = both if keep is None else both[keep]
        query = self.q_norm(self.q_proj(asking).unflatten(-1, per_head))
        query, key = rotate_pair(query, key, *rope, keep)
        return self.o_proj(attend(query, key, value).flatten(-2))
