"""RoPE of the drafter: half-split over the whole head, position k of a row at base + k.

YaRN's frequencies are those of its paper (arXiv 2309.00071). Its factor on cos and sin, and RoPE
over a part of the head, are no business of a step: a checkpoint is rewritten for them on loading
(`drafters/eagle3/rewritten.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.drafters.specblock.config import NetworkShape, rope_type
from vllm_specblock.triton_kernels.layers.layers_numba import loops_take
from vllm_specblock.triton_kernels.layers.rope import Rope


class Rotary(nn.Module):
    """The angles of one forward, for all its layers.

    What does not change is kept: `offset` [K] int64, and `turn` [D] float32, the frequencies
    twice, with the signs that `Rope` wants.

    Args:
        rotary_dim: dimensions of a head that turn, as pairs of its halves' first ones; default: D.
        block_size: K, positions of a row.
    """

    turn: Tensor
    offset: Tensor

    def __init__(
        self, config: NetworkShape, rotary_dim: int | None = None, block_size: int = 1
    ) -> None:
        super().__init__()
        self.config, self.rotary_dim = config, rotary_dim or config.head_dim
        self.block_size = block_size
        for name, table in self._tables().items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> dict[str, Tensor]:
        frequency = inverse_frequencies(self.config, self.rotary_dim)
        # A pair without a frequency stays as it is: cos 0 = 1, sin 0 = 0.
        frequency = F.pad(frequency, (0, self.config.head_dim // 2 - len(frequency)))
        return {
            "turn": torch.cat([-frequency, frequency]),
            "offset": torch.arange(self.block_size),
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `drafter.to(bfloat16)` would round the frequencies, and a meta device lose them.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has not typed it
        for name, table in self._tables().items():
            setattr(self, name, table.to(getattr(self, name).device))
        return self

    def forward(self, base: Tensor, dtype: torch.dtype) -> Rope:
        """base [T] int64, the position of each row's first draft position; k is at base + k.

        dtype: of the states that will be turned.
        """
        fused = not torch.is_grad_enabled() and (base.is_cuda or loops_take(base, dtype))
        return Rope(base, self.turn, None if fused else self.table(base, dtype))

    def table(self, base: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """base [T] int64 -> cos and signed sin, each [T, K, 1, D]."""
        angle = (base[:, None] + self.offset)[..., None, None] * self.turn
        # Rounded on the way out, not by a launch of their own.
        cos, sin = (torch.empty_like(angle, dtype=dtype) for _ in range(2))
        return torch.cos(angle, out=cos), torch.sin(angle, out=sin)


def inverse_frequencies(config: NetworkShape, rotary_dim: int | None = None) -> Tensor:
    """RoPE radians per position [rotary_dim/2] float32, scaled as `rope_scaling` says.

    rotary_dim: dimensions that turn, default D.
    """
    dim = rotary_dim or config.head_dim
    half = torch.arange(0, dim, 2).float()
    frequency = 1.0 / config.rope_theta ** (half / dim)
    scaling = config.rope_scaling
    if scaling is None or rope_type(scaling) == "default":
        return frequency
    slowed = frequency / scaling["factor"]
    if rope_type(scaling) == "linear":
        return slowed
    if rope_type(scaling) == "yarn":
        slow = _yarn_ramp(scaling, config.rope_theta, dim)
        return slow * slowed + (1 - slow) * frequency
    # llama3: wavelengths that fit often into the trained context stay, those that do not fit
    # are slowed, and in between the two are mixed.
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * slowed


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """What YaRN multiplies cos and sin by, of queries and of keys; 1 without YaRN."""
    if scaling is None or rope_type(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, over, under = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if over and under:
        return _yarn_scale(factor, over) / _yarn_scale(factor, under)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_ramp(scaling: dict[str, Any], theta: float, dim: int) -> Tensor:
    """[dim/2] float32, how much of each frequency is slowed: from 0 to 1 between the pairs that
    turn `beta_fast` and `beta_slow` times within the trained context."""
    context = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        pair_that_turns(scaling.get(key) or default)
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
