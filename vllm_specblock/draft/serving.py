"""What is done to a loaded drafter before it serves, and would be in the way of training."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vllm_specblock.triton_kernels.fp8_linear import fp8_linear, quantize

Quantization = Literal["fp8"]


class Fp8Linear(nn.Module):
    """nn.Linear without a gradient whose weights lie in 8 bits; see `triton_kernels/fp8_linear.py`.

    Args:
        linear: what it stands for from now on.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of x."""
        out = fp8_linear(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias


KEPT = ("shift_proj", "rank_head")
"""Modules whose weights stay as they are: those of the first go to a kernel of their own, those of
the second are few and decide."""


@torch.no_grad()
def prepare(drafter: nn.Module, quantization: Quantization | None) -> nn.Module:
    """Fold what does not change from step to step, and shorten weights if asked for.

    Args:
        drafter: a loaded drafter of any kind; changed in place, and no longer one to train.
        quantization: "fp8": linear layers in float8 e4m3, a scale per output.

    Returns:
        the drafter.
    """
    for module in list(drafter.modules()):
        if hasattr(module, "fold"):
            module.fold()
    if quantization == "fp8":
        _shorten(drafter)
    return drafter


def _shorten(module: nn.Module) -> None:
    for name, child in module.named_children():
        if name in KEPT:
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, Fp8Linear(child))
        else:
            _shorten(child)
