"""The DFlash drafter: Qwen3 layers over blocks of masks (arXiv 2602.06036).

The target's states enter nowhere but in the keys and values of every layer, made by the projections
that also serve the block. Parameter names are those of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.layers import MLP, Attend, Attention, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary
from vllm_specblock.drafters.dflash.config import DFlashShape
from vllm_specblock.drafters.eagle3.model import AttendInLayer
from vllm_specblock.triton_kernels.layers.norms import add_norm
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


class DFlashModel(nn.Module):
    """Feature fusion, the layers, and the target's LM head, by `share_head`."""

    d2t: Tensor
    lm_head: nn.Linear
    wants_head = True

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.config = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(shape.layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(shape)

    def share_head(self, weight: Tensor) -> None:
        """Take the target's LM head: weight [V, H], which is read and never written."""
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)
        # It names tokens as the target does.
        self.d2t = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
        self.wants_head = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic; linear layers may keep their weights in another."""
        return self.norm.weight.dtype

    def context(self, features: Tensor, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of committed tokens, layer by layer.

        Args:
            features: [T, n·H], the target's states side by side, low layers first.
            position: [T] int64.

        Yields:
            key, with its RoPE, and value, [T, kv heads, D] each.
        """
        fused = self.hidden_norm(self.fc(features.to(self.dtype)))
        rope = self.rotary(position, self.dtype)
        for layer in self.layers:
            assert isinstance(layer, Layer)  # which a ModuleList does not say
            yield layer.self_attn.keys_values(fused, rope)

    def forward(self, embedding: Tensor, position: Tensor, attend: AttendInLayer) -> Tensor:
        """Blocks, which see their context, and of themselves what `attend` lets them.

        Args:
            embedding: [n, H], of roots and masks.
            position: [n] int64.
            attend: see `AttendInLayer`.

        Returns:
            [n, H], after the last layer.
        """
        rope, state = self.rotary(position, self.dtype), embedding.to(self.dtype)
        for index, layer in enumerate(self.layers):
            state = layer(state, rope, lambda *rows, at=index: attend(at, *rows))
        return state

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., V], of each row's own token."""
        return self.lm_head(self.norm(state))

    def best(self, state: Tensor, width: int, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `width` likeliest tokens at each mask.

        state [R, ..., H], beta [R] float32 (None: 1, see `feedback/calibration.py`) ->
        log-probabilities [R, ..., width] float32, best first, and ids [R, ..., width] int64.
        """
        return topk_tokens(self.logits(state), self.d2t, width, 1.0, beta)


class DFlashAttention(Attention):
    """Differs in that keys and values are also made of states that ask nothing."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape, shape.hidden_size, shape.attention_bias, shape.attention_bias)

    def keys_values(self, states: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """states [T, H] -> key, with its RoPE, and value, [T, kv heads, D] each."""
        if self.qkv is None:
            key, value = self.k_proj(states), self.v_proj(states)
        else:
            key, value = self.qkv(states, slice(1, 3))
        key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in (key, value))
        # The launch turns queries, too: the keys stand in for them.
        _, key = rotate_pair(key, key, rope, None, (self.k_norm, self.k_norm))
        return key, value


class Layer(nn.Module):
    """A Qwen3 layer."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DFlashAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, state: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """[n, H] -> [n, H]."""
        mixed = self.self_attn(self.input_layernorm(state), rope, attend, None)
        hidden, normed = add_norm(state, mixed, self.post_attention_layernorm)
        return self.mlp(normed, hidden)
