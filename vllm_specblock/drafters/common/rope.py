"""RoPE of the drafter: half-split over the whole head, position k of a row at base + k.

YaRN's factor on cos and sin, and RoPE over a part of the head, cost a step nothing: a checkpoint is
rewritten for them on loading (`drafters/published/checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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
    if config.rope_scaling is None or rope_type(config.rope_scaling) == "default":
        return 1.0 / config.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    return _scaled(config.rope_scaling, config.rope_theta, dim)[0]


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """YaRN's factor on cos and sin, of queries and of keys; 1 without YaRN."""
    if scaling is None or rope_type(scaling) != "yarn":
        return 1.0
    return _scaled(scaling, theta=1e4, dim=2)[1]


def _scaled(scaling: dict[str, Any], theta: float, dim: int) -> tuple[Tensor, float]:
    """Frequencies [dim/2] and attention factor, as transformers has them."""
    # Here: it takes a second.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope_type(scaling)
    # `dim` is the part of a head that turns, so it is whole here.
    whole = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": 1.0}
    config = SimpleNamespace(
        rope_parameters=scaling | whole,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    with torch.device("cpu"):  # a model may be made on a meta device
        frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return frequency, float(factor)
