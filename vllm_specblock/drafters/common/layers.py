"""Decoder layers of drafters, and an LM head.

Shapes: ... any leading dimensions, I input size, H hidden size, D head size. `fold` joins the
weights that read the same input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.drafters.common.config import NetworkShape
from vllm_specblock.drafters.common.linear import Joined, add_linear, silu_mul
from vllm_specblock.triton_kernels.layers.norms import add_norm
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens
from vllm_specblock.triton_kernels.optional_numba import takes

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query [Q..., nh, D], key [T..., nkv, D], value [T..., nkv, D]) -> [Q..., nh, D].

Keys and queries carry their RoPE. Q = T, except in the last layer of a forward with `keep`. The
callable owns the cache, the mask and the scaling by 1/sqrt(D).
"""


class RMSNorm(nn.RMSNorm):
    """RMS norm with float32 arithmetic inside; gives the dtype of its input."""

    eps: float
    # f(x, weight, eps) for CPUs, registered in `cpu/install.py`; None: torch's own.
    loop: ClassVar[Callable[[Tensor, Tensor, float], Tensor] | None] = None

    def forward(self, x: Tensor) -> Tensor:
        loop, alike = RMSNorm.loop, x.dtype == self.weight.dtype
        if loop is not None and alike and takes(x) and not torch.is_grad_enabled():
            return loop(x, self.weight, self.eps)
        # Autocast would make float32 of the result on a GPU.
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of I = `in_size` numbers and RoPE around `attend`; with `qk_norm` Qwen3's."""

    def __init__(self, sizes: NetworkShape, in_size: int) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        width = sizes.num_attention_heads * sizes.head_dim
        kv_width = sizes.num_key_value_heads * sizes.head_dim
        self.widths = (width, kv_width, kv_width)
        qkv_bias, output_bias, _ = sizes.biases
        self.q_proj = nn.Linear(in_size, width, bias=qkv_bias)
        self.k_proj = nn.Linear(in_size, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(in_size, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, sizes.hidden_size, bias=output_bias)
        self.qkv: nn.Module | None = None
        self.qk_norm = sizes.qk_norm
        if sizes.qk_norm:
            self.q_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)
            self.k_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)

    def fold(self) -> None:
        self.qkv = Joined(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(
        self, index: int, normed: Tensor, rope: Rope, attend: Attend, keep: Tensor | None
    ) -> Tensor:
        """normed [T..., I], keep [Q] of its rows -> [T... or Q..., H]."""
        if self.qkv is None:
            states = (self.q_proj(normed), self.k_proj(normed), self.v_proj(normed))
        else:
            states = self.qkv(normed).split(self.widths, dim=-1)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in states)
        if keep is not None:
            query = query[keep]
        norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        query, key = rotate_pair(query, key, rope, keep, norms)
        return self.o_proj(attend(index, query, key, value).flatten(-2))

    def key_value(self, states: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """states [T, I] -> key, with its RoPE, and value, [T, nkv, D] each."""
        if self.qkv is None:
            key, value = self.k_proj(states), self.v_proj(states)
        else:
            outputs = slice(self.widths[0], None)
            key, value = self.qkv(states, outputs).chunk(2, dim=-1)
        key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in (key, value))
        # The kernel also rotates queries: pass the keys in their place.
        _, key = rotate_pair(key, key, rope, None, (self.k_norm, self.k_norm))
        return key, value


class MLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, sizes: NetworkShape) -> None:
        super().__init__()
        size, inner, bias = sizes.hidden_size, sizes.intermediate_size, sizes.biases[2]
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.gate_up: nn.Module | None = None

    def fold(self) -> None:
        self.gate_up = Joined(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, normed: Tensor, residual: Tensor) -> Tensor:
        """Return residual + layer output, [..., H]; folded on CUDA, it overwrites `residual`."""
        if self.gate_up is not None:
            return add_linear(residual, silu_mul(self.gate_up(normed)), self.down_proj)
        return residual + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer; with `qk_norm` a Qwen3 layer. Attention reads `in_size` (or H)."""

    def __init__(self, sizes: NetworkShape, in_size: int | None = None) -> None:
        super().__init__()
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(sizes, in_size or size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(sizes)

    def forward(
        self,
        index: int,
        hidden: Tensor,
        rope: Rope,
        attend: Attend,
        keep: Tensor | None = None,
        normed: Tensor | None = None,  # [T..., I], what attention reads; default: of `hidden`
    ) -> Tensor:
        """hidden [T..., H], keep [Q] -> [T... or Q..., H]."""
        if normed is None:
            normed = self.input_layernorm(hidden)
        mixed = self.self_attn(index, normed, rope, attend, keep)
        hidden, normed = add_norm(hidden, mixed, self.post_attention_layernorm, keep)
        return self.mlp(normed, hidden)


class DraftLM(nn.Module):
    """A network that names draft tokens by an LM head, its own or the target's."""

    norm: Any  # before the LM head
    lm_head: nn.Linear  # [Vd, H]
    d2t: Tensor  # [Vd] int64, target id − draft id
    embed_tokens: nn.Embedding | None  # its own
    logit_scale = 1.0
    wants_head = False  # it lacks an LM head, see `share_head`

    def make_tables(self, shape: Any, own_embedding: bool, own_head: bool) -> None:
        """Make embedding and LM head, unless they are the target's, and the mapping."""
        size, count = shape.hidden_size, shape.draft_vocab_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, size) if own_embedding else None
        self.wants_head = not own_head
        if own_head:
            self.lm_head = nn.Linear(size, count, bias=False)
        # Until a mapping is loaded: the first Vd target ids.
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64))

    @torch.no_grad()
    def embedding(self, embed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what embeds its tokens; a table that equals the target's is dropped."""
        own = self.embed_tokens
        if own is None:
            return embed
        ids = torch.arange(own.num_embeddings, device=own.weight.device)
        if all(torch.equal(own(part), embed(part)) for part in ids.split(8192)):
            self.embed_tokens = None
            return embed
        return own

    def share_head(self, weight: Tensor) -> None:
        """Take the target's LM head: weight [V, H], which is read and never written."""
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)
        self.wants_head = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.norm.weight.dtype

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., Vd], before `logit_scale`."""
        return self.lm_head(self.norm(state))

    def best(self, state: Tensor, width: int, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the `width` likeliest tokens at each state.

        state [R, ..., H], beta [R] float32 (None: 1, see `feedback/calibration.py`) ->
        log-probabilities over the draft vocabulary [R, ..., width] float32, best first, and
        target ids [R, ..., width] int64.
        """
        return topk_tokens(self.logits(state), self.d2t, width, self.logit_scale, beta)
