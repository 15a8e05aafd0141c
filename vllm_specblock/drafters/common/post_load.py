"""Weight processing after loading: fused projections, quantization."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from vllm_specblock.drafters.common.linear import Fp8Linear, Int8Linear, PackedLinear

Quantization = Literal["fp8", "int8"]

KEPT = ("rank_head",)  # small
RAW = ("condition_proj", "fc")  # read the target's states, whose outliers need more than 8 bits
KERNELS = ("shift_proj",)  # read by a kernel without 8 bits


@torch.no_grad()
def process_after_loading(
    drafter: nn.Module, quantization: Quantization | None, serves: torch.device | None = None
) -> nn.Module:
    """Fold, quantise and pack a loaded drafter in place; it can no longer be trained.

    Args:
        quantization: "fp8": linear layers in float8 e4m3, a scale per output; "int8": layers and
            their inputs in 8-bit integers, on a CPU with AMX.
        serves: device on which the weights will serve; None: where they are.
    """
    # A list of all modules would keep folded ones in memory.
    foldable: list[Any] = [module for module in drafter.modules() if hasattr(module, "fold")]
    for module in foldable:
        module.fold()
    if quantization == "fp8":
        _replace(drafter, Fp8Linear, KEPT + KERNELS)
    elif serves is None or serves.type == "cpu":
        if quantization == "int8":
            _replace(drafter, Int8Linear, KEPT + RAW)
        _replace(drafter, PackedLinear, KEPT)
    return drafter


def _replace(
    module: nn.Module, kind: type[Fp8Linear] | type[PackedLinear], kept: tuple[str, ...]
) -> None:
    for name, child in module.named_children():
        if name in kept:
            continue
        if not isinstance(child, nn.Linear):
            _replace(child, kind, kept)
        elif kind.takes(child):
            setattr(module, name, kind(child))
