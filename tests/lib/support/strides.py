"""Tensors whose rows or elements are not side by side, for kernels that take any strides."""

from __future__ import annotations

import torch


def column(x: torch.Tensor, other: float = 1 << 30) -> torch.Tensor:
    """The same values as a column of a table, between columns of `other`."""
    table = torch.full((*x.shape, 3), other, dtype=x.dtype, device=x.device)
    table[..., 1] = x
    return table[..., 1]


def wide(x: torch.Tensor, other: float = 1 << 30) -> torch.Tensor:
    """The same values as the front of longer rows, which end in `other`."""
    return torch.nn.functional.pad(x, (0, 3), value=other)[..., : x.shape[-1]]


def on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A copy on a device with the same strides, where `to` would lay it out anew."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return there.copy_(x)
