"""RoPE of the drafter: half-split over the whole head, position k of a row at base + k.

Checkpoints with YaRN's factor, or RoPE over a part of the head, are rewritten on loading.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.drafters.common.config import DecoderShape, NetworkShape, rope_type
from vllm_specblock.triton_kernels.layers.rope import Rope


class Rotary(nn.Module):
    """The angles of one forward, for all its layers; K = `block_size` positions of a row.

    rotary_dim: dimensions of a head that turn, as pairs of its halves' first ones; default: D.
    """

    turn: Tensor  # [D] float32, see `Rope`
    offset: Tensor  # [K] int64

    def __init__(
        self, config: NetworkShape, rotary_dim: int | None = None, block_size: int = 1
    ) -> None:
        super().__init__()
        self.config, self.rotary_dim = config, rotary_dim or config.head_dim
        self.block_size = block_size
        for name, table in self._tables().items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> dict[str, Tensor]:
        frequency, _ = inverse_frequencies(self.config, self.rotary_dim)
        # A pair without a frequency stays as it is: cos 0 = 1, sin 0 = 0.
        frequency = F.pad(frequency, (0, self.config.head_dim // 2 - len(frequency)))
        return {"turn": torch.cat([-frequency, frequency]), "offset": torch.arange(self.block_size)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `drafter.to(bfloat16)` would round the frequencies, and a meta device lose them.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has not typed it
        for name, table in self._tables().items():
            setattr(self, name, table.to(getattr(self, name).device))
        return self

    def forward(self, base: Tensor, dtype: torch.dtype) -> Rope:
        """base [T] int64, of each row's first draft position; dtype: of the states to turn."""
        fused = base.is_cuda and not torch.is_grad_enabled()
        return Rope(base, self.turn, None if fused else self.table(base, dtype))

    def table(self, base: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """base [T] int64 -> cos and signed sin, each [T, K, 1, D]."""
        angle = (base[:, None] + self.offset)[..., None, None] * self.turn
        cos, sin = (torch.empty_like(angle, dtype=dtype) for _ in range(2))
        return torch.cos(angle, out=cos), torch.sin(angle, out=sin)  # no launch to round


def inverse_frequencies(config: NetworkShape, dim: int) -> tuple[Tensor, float]:
    """Return radians per position [dim/2] float32, and YaRN's factor on cos and sin (or 1).

    dim: dimensions that turn.
    """
    scaling = config.rope_scaling
    if scaling is None or rope_type(scaling) == "default":
        return 1.0 / config.rope_theta ** (torch.arange(0, dim, 2).float() / dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes a second

    kind = rope_type(scaling)
    # `dim` is the part of a head that turns, so it is whole here.
    whole = {"rope_type": kind, "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
    of_transformers = SimpleNamespace(
        rope_parameters=scaling | whole,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    with torch.device("cpu"):  # a model may be made on a meta device
        frequency, factor = ROPE_INIT_FUNCTIONS[kind](of_transformers, "cpu")
    return frequency, float(factor)


def rewritten(tensors: dict[str, Tensor], config: DecoderShape) -> dict[str, Tensor]:
    """Rewrite tensors for RoPE that turns whole heads by halves, without a factor.

    Scores do not change if the dimensions of query and key are permuted together. Where RoPE turns
    the first R of D dimensions, in pairs (i, i + R/2), both projections' rows are laid out for
    pairs (i, i + D/2), of which those behind R/2 have no frequency. YaRN's factor on cos and sin
    goes into the rows that they turn.
    """
    dim = config.head_dim
    turned = config.rotary_dim or dim
    _, factor = inverse_frequencies(config, turned)
    if factor == 1 and turned == dim:
        return tensors
    ids = torch.arange(dim)
    order = torch.cat([*(torch.cat(x) for x in zip(ids[:turned].chunk(2), ids[turned:].chunk(2)))])
    scale = torch.where(order < turned, factor, 1.0)
    out = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else name
        if part in ("q_norm", "k_norm"):
            tensor = tensor.float()[order] * scale
        elif part in ("q_proj", "k_proj"):
            heads = tensor.float().unflatten(0, (-1, dim))[:, order]
            if not config.qk_norm:  # else the norm would take it out again
                heads = heads * scale.view(-1, *[1] * (tensor.dim() - 1))
            tensor = heads.flatten(0, 1)
        out[name] = tensor
    return out
