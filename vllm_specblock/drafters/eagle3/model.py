"""The EAGLE-3 drafter: decoder layers, mostly one, run once per drafted level (arXiv 2503.01840).

A row is (embedding of a token, feature of the token before it, RoPE position). Its feature is
the target's for committed tokens, and the state that the drafter itself left for drafted ones.
Parameter names are those of the authors' checkpoints. Any number of leading dimensions will do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.layers import MLP, Attend, Attention, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.triton_kernels.layers.norms import add_norm, norm_pair
from vllm_specblock.triton_kernels.layers.rope import Rope
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens

_SHARED_AT_ONCE = 8192
"""Tokens whose embeddings are compared at a time."""

AttendInLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query, key, value): `layers.Attend` of the drafter's layer with that number."""


class Eagle3Model(nn.Module):
    """Feature fusion, the layers, and an embedding and an LM head only if the checkpoint has them.

    Args:
        own_embedding: whether it embeds tokens itself. If not, the target's embedding is used.
        own_head: whether it has an LM head. If not, it wants the target's, by `share_head`.
        fc_bias: whether `fc` has a bias, of which no config says anything.
    """

    d2t: Tensor
    lm_head: nn.Linear

    def __init__(
        self,
        shape: Eagle3Shape,
        own_embedding: bool = False,
        own_head: bool = True,
        fc_bias: bool = False,
    ) -> None:
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
        self.fc = nn.Linear(fused, size, bias=fc_bias)
        self.midlayer = Layer(shape)
        # By their numbers, as in the checkpoints.
        further = (str(index) for index in range(1, shape.num_hidden_layers))
        self.layers = nn.ModuleDict({index: Layer(shape, first=False) for index in further})
        self.norm = RMSNorm(size, eps)
        self.wants_head = not own_head
        if own_head:
            self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape, shape.rotary_dim)
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

    def share_head(self, weight: Tensor) -> None:
        """Take the target's LM head: weight [V, Ht], which is read and never written."""
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)
        self.wants_head = False

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
        attend: AttendInLayer,
        keep: Tensor | None = None,
    ) -> Tensor:
        """One step over any rows.

        Args:
            embedding: [..., H], of each row's token.
            feature: [..., H], of the token before it: from `fuse`, or from `carry`.
            position: [...] int64.
            attend: see `AttendInLayer`.
            keep: [Q] int64, rows whose states are wanted (default all; rows then have one
                leading dimension). The others give the last layer keys and values only.

        Returns:
            [..., H] or [Q, H], the state before the final norm, for `logits` and `carry`.
        """
        rope = self.rotary(position.flatten(), self.dtype)
        last, embedding = len(self.layers), embedding.to(self.dtype)
        state = self.midlayer(feature, rope, partial(attend, 0), None if last else keep, embedding)
        for index, layer in enumerate(self.layers.values(), start=1):
            state = layer(state, rope, partial(attend, index), keep if index == last else None)
        return state

    def carry(self, state: Tensor) -> Tensor:
        """What a row after this one takes as its feature: [..., H] -> [..., H]."""
        return self.norm(state) if self.config.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """[..., H], as `run` returns it -> [..., Vd] float32."""
        logits = self.lm_head(self.norm(state)).float()
        scale = self.config.logit_scale
        return logits if scale == 1 else logits * scale

    def best(self, state: Tensor, width: int, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `width` likeliest tokens after each state.

        state [R, ..., H], sharpness [R] float32 (None: 1, see `feedback/calibration.py`) ->
        log-probabilities over the draft vocabulary [R, ..., width] float32, best first, and
        target ids [R, ..., width] int64.
        """
        logits = self.lm_head(self.norm(state))
        return topk_tokens(logits, self.d2t, width, self.config.logit_scale, beta)


class Layer(nn.Module):
    """A Llama or Qwen3 layer; the first one's attention reads embedding and feature side by side.

    Args:
        first: whether it is that one.
    """

    def __init__(self, shape: Eagle3Shape, first: bool = True) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        if first:
            self.hidden_norm = RMSNorm(size, eps)
        in_size = 2 * size if first else size
        self.self_attn = Attention(shape, in_size, shape.qkv_bias, shape.output_bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(shape, shape.mlp_bias)
        self.norm_before_residual = shape.norm_before_residual

    def forward(
        self,
        feature: Tensor,
        rope: Rope,
        attend: Attend,
        keep: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """feature [..., H], in a later layer the state before it; keep [Q]; embedding [..., H] in
        the first layer only -> [... or Q, H]."""
        residual = feature
        if embedding is None:
            inputs = self.input_layernorm(feature)
        else:
            inputs = norm_pair(embedding, feature, self.input_layernorm, self.hidden_norm)
            if self.norm_before_residual:
                # The cast only matters under autocast.
                residual = inputs[..., embedding.shape[-1] :].to(feature.dtype)
        mixed = self.self_attn(inputs, rope, attend, keep)
        hidden, normed = add_norm(residual, mixed, self.post_attention_layernorm, keep)
        return self.mlp(normed, hidden)
