"""RoPE of the drafter: half-split over the whole head, position k of a row at base + k."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vllm_specblock.draft.config import DrafterConfig, rope_type


class Rotary(nn.Module):
    """The angles: one (cos, sin) per forward serves all layers."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.register_buffer("frequency", inverse_frequencies(config), persistent=False)

    def _apply(self, fn, recurse=True):
        # `drafter.to(bfloat16)` would round the frequencies, and a meta device lose them.
        super()._apply(fn, recurse)
        self.frequency = inverse_frequencies(self.config).to(self.frequency.device)
        return self

    def forward(self, base: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """base [T] int64 -> cos and signed sin, each [T, K, 1, D]; position k is at base + k."""
        offset = torch.arange(self.config.block_size, device=base.device)
        angle = (base[:, None] + offset)[..., None, None].float() * self.frequency
        cos, sin = angle.cos(), angle.sin()
        # The minus of the rotation sits in sin, so that `rotate` need not negate.
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of states [T, K, heads, D] by cos and signed sin [T, K, 1, D]."""
    swapped = states.roll(states.shape[-1] // 2, -1)
    return torch.addcmul(states * cos, swapped, sin)


def inverse_frequencies(config: DrafterConfig) -> Tensor:
    """RoPE radians per position [D/2] float32, scaled as `rope_scaling` says."""
    half = torch.arange(0, config.head_dim, 2).float()
    frequency = 1.0 / config.rope_theta ** (half / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None or rope_type(scaling) == "default":
        return frequency
    slowed = frequency / scaling["factor"]
    if rope_type(scaling) == "linear":
        return slowed
    # llama3: wavelengths that fit often into the trained context stay, those that do not fit
    # are slowed, and in between the two are mixed.
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * slowed
