"""Linear layers of a served drafter: joined, in 8 bits or packed once its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.triton_kernels.layers.fp8_linear import ALL, Fp8Linear, fp8_linear

KEPT = ("rank_head",)  # small
KERNELS = ("shift_proj",)  # read by a kernel without 8 bits


class PackedLinear(nn.Module):
    """`linear` without a gradient in float32 or bfloat16, by vLLM's CPU kernel for its size."""

    cpu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        self.size = linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)  # sets `cpu_linear`

    @staticmethod
    def packs() -> bool:
        """Return whether the processor has bfloat16 products; one with AVX2 alone has none."""
        there = torch.backends.mkldnn.is_available()
        return there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Return whether a layer can be packed; vLLM's CPU build alone has the kernels."""
        from vllm.platforms import current_platform

        weight = linear.weight
        here = weight.device.type == "cpu" and current_platform.is_cpu()
        short = weight.dtype == torch.bfloat16 and cls.packs()
        return here and (short or weight.dtype == torch.float32)

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out], or the slice `outputs` of it."""
        if not x.numel():  # which oneDNN divides by
            return x.new_empty(*x.shape[:-1], self.size)[..., outputs]
        return self.cpu_linear(x, self.weight, self.bias)[..., outputs]


class Joined(nn.Linear):
    """Linear layers of the same input as one, without a gradient: all with a bias, or none."""

    def __init__(self, *layers: nn.Linear) -> None:
        bias, size = layers[0].bias is not None, sum(layer.out_features for layer in layers)
        super().__init__(layers[0].in_features, size, bias=bias, device="meta")
        self.weight = _frozen([layer.weight for layer in layers])
        if bias:
            self.bias = _frozen([layer.bias for layer in layers])

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out]; outputs: which of them are wanted."""
        return F.linear(x, self.weight[outputs], None if self.bias is None else self.bias[outputs])


def add_linear(residual: Tensor, x: Tensor, linear: nn.Linear | Fp8Linear | PackedLinear) -> Tensor:
    """Return residual [..., out] + linear(x [..., in]) of contiguous tensors, without a gradient.

    On CUDA, without a bias, it is one launch, rounds once, and may overwrite `residual`.
    """
    if not residual.is_cuda or linear.bias is not None:
        return residual + linear(x)
    if isinstance(linear, Fp8Linear):
        return fp8_linear(x, linear.weight, linear.scale, residual)
    # In place: given a tensor of its own, torch copies the summand there first.
    residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.T)
    return residual


def silu_mul(both: Tensor) -> Tensor:
    """Return silu(gate) · up of a product [..., 2I], gate first, which may be overwritten."""
    gate, up = both.chunk(2, -1)
    if not both.is_cuda:
        return F.silu(gate, inplace=True).mul_(up)
    import vllm._custom_ops  # noqa: F401 (loads the kernels)

    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(out, both)  # one launch in place of two
    return out


def _frozen(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


@torch.no_grad()
def process_after_loading(
    drafter: nn.Module, quantization: Literal["fp8"] | None, serves: torch.device | None = None
) -> nn.Module:
    """Fold, quantise and pack a loaded drafter in place; it can no longer be trained.

    Args:
        quantization: "fp8": linear layers in float8 e4m3, a scale per output.
        serves: device on which the weights will serve; None: where they are.
    """
    # A list of all modules would keep folded ones in memory.
    foldable: list[Any] = [module for module in drafter.modules() if hasattr(module, "fold")]
    for module in foldable:
        module.fold()
    if quantization == "fp8":
        _replace(drafter, Fp8Linear, KEPT + KERNELS)
    elif serves is None or serves.type == "cpu":
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
        elif kind is Fp8Linear or PackedLinear.takes(child):
            setattr(module, name, kind(child))
