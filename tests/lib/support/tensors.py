"""Tensors for kernels that take any strides and devices, and results compared bit for bit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from vllm_specblock.tree import DraftTree


def column(x: torch.Tensor, other: float = 1 << 30) -> torch.Tensor:
    """The same values as a column of a table, between columns of `other`."""
    table = torch.full((*x.shape, 3), other, dtype=x.dtype, device=x.device)
    table[..., 1] = x
    return table[..., 1]


def wide(x: torch.Tensor, other: float = 1 << 30) -> torch.Tensor:
    """The same values as the front of longer rows, which end in `other`."""
    return torch.nn.functional.pad(x, (0, 3), value=other)[..., : x.shape[-1]]


def on(device: torch.device | str, x: Any) -> Any:
    """Copies of all tensors in tuples, dicts and dataclasses, with their strides.

    `Tensor.to` would lay them out anew.
    """
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    if isinstance(x, dict):
        return {name: on(device, each) for name, each in x.items()}
    if isinstance(x, tuple | list):
        items = [on(device, each) for each in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if is_dataclass(x):
        return type(x)(**{each.name: on(device, getattr(x, each.name)) for each in fields(x)})
    return x


def assert_equal(found: Any, wanted: Any) -> None:
    """The same dtypes, shapes and bits, on any device; in sequences, dicts and trees, too."""
    if isinstance(wanted, DraftTree):
        found, wanted = ({k: getattr(x, k) for k in DraftTree.TENSORS} for x in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, check_device=False)
