"""Decoder layers of drafters: RMS norm, attention projections, MLP.

Shapes: ... any leading dimensions, I input size, H hidden size, D head size. `fold` joins the
weights that read the same input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.drafters.common.linear import PackedLinear, Stacked, add_linear, silu_mul
from vllm_specblock.drafters.specblock.config import NetworkShape
from vllm_specblock.triton_kernels.layers.layers_numba import rms_norm_numba, runs_loop
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(query [Q..., nh, D], key [T..., nkv, D], value [T..., nkv, D]) -> [Q..., nh, D].

Keys and queries carry their RoPE. Q = T, except in a forward with `keep`. The callable owns
what was before, the mask and the scaling by 1/sqrt(D).
"""

FEW_ROWS = 256


class RMSNorm(nn.RMSNorm):
    """RMS norm with float32 arithmetic inside."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n], in the dtype of x.

        Autocast would make float32 of the result on a GPU.
        """
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._norm(x)
        return self._norm(x)

    def _norm(self, x: Tensor) -> Tensor:
        if runs_loop(x, self.weight) and x.is_contiguous():
            return rms_norm_numba(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections and RoPE around `attend`; with `qk_norm` those of Qwen3.

    Args:
        in_size: I.
        qkv_bias, output_bias: of the projections.
    """

    def __init__(
        self, sizes: NetworkShape, in_size: int, qkv_bias: bool = False, output_bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        width = sizes.num_attention_heads * sizes.head_dim
        kv_width = sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(in_size, width, bias=qkv_bias)
        self.k_proj = nn.Linear(in_size, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(in_size, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, sizes.hidden_size, bias=output_bias)
        self.qkv: Stacked | None = None
        self.qk_norm = sizes.qk_norm
        if sizes.qk_norm:
            self.q_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)
            self.k_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)

    def fold(self) -> None:
        """Make one product of queries, keys and values."""
        self.qkv = Stacked(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, normed: Tensor, rope: Rope, attend: Attend, keep: Tensor | None) -> Tensor:
        """normed [T..., I], keep [Q] of its rows -> [T... or Q..., H]."""
        query, key, value = (
            x.unflatten(-1, (-1, self.head_dim)) for x in self._project(normed, keep)
        )
        norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        query, key = rotate_pair(query, key, rope, keep, norms)
        return self.o_proj(attend(query, key, value).flatten(-2))

    def _project(self, normed: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
        """Keys and values of all rows, queries of those or of the kept ones: [..., heads · D]."""
        # A product of few rows takes as long as reading its weights; packed, it is only whole.
        packed = self.qkv is not None and isinstance(self.qkv.product, PackedLinear)
        few = normed.is_cuda and normed.shape[:-1].numel() <= FEW_ROWS
        whole = keep is None or len(keep) == len(normed) or few or packed
        asking = normed if whole else normed[keep]
        if self.qkv is None:
            return self.q_proj(asking), self.k_proj(normed), self.v_proj(normed)
        if whole:
            return self.qkv(normed)
        return *self.qkv(asking, slice(0, 1)), *self.qkv(normed, slice(1, 3))


class MLP(nn.Module):
    """SiLU-gated feed-forward layer.

    Args:
        bias: of the projections.
    """

    def __init__(self, sizes: NetworkShape, bias: bool = False) -> None:
        super().__init__()
        size, inner = sizes.hidden_size, sizes.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.gate_up: Stacked | None = None

    def fold(self) -> None:
        """Make one product of gate and up."""
        self.gate_up = Stacked(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, normed: Tensor, residual: Tensor) -> Tensor:
        """[..., H] -> residual [..., H] + what the layer gives.

        Folded on CUDA the sum is written to `residual`, which no other code may read.
        """
        if self.gate_up is not None:
            return add_linear(residual, silu_mul(self.gate_up.product(normed)), self.down_proj)
        return residual + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
