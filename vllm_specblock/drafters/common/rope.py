"""RoPE of the drafter: half-split over the whole head, position k of a row at base + k."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.specblock.config import rope_type
from vllm_specblock.triton_kernels.layers.layers_numba import loops_take
from vllm_specblock.triton_kernels.layers.rope import Rope


class Turns(Protocol):
    """What a drafter's config says of its RoPE."""

    @property
    def head_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> dict[str, Any] | None: ...


class Rotary(nn.Module):
    """The angles of one forward, for all its layers.

    What does not change is kept: `offset` [K] int64, and `turn` [D] float32, the frequencies
    twice, with the signs that `Rope` wants.
    """

    turn: Tensor
    offset: Tensor

    def __init__(self, config: Turns) -> None:
        super().__init__()
        self.config = config
        for name, table in self._tables().items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> dict[str, Tensor]:
        frequency = inverse_frequencies(self.config)
        return {
            "turn": torch.cat([-frequency, frequency]),
            "offset": torch.arange(self.config.block_size),
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


def inverse_frequencies(config: Turns) -> Tensor:
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
