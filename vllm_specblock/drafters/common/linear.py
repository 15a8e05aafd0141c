"""Linear layers of a served drafter: joined, in 8 bits or packed once its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize

ALL = slice(None)
Quantization = Literal["fp8", "int8"]

KEPT = ("rank_head",)  # small
RAW = ("condition_proj", "fc")  # read the target's states, whose outliers need more than 8 bits
KERNELS = ("shift_proj",)  # read by a kernel without 8 bits


class Fp8Linear(nn.Module):
    """`linear` without a gradient, weights in 8 bits (`triton_kernels/layers/fp8_linear.py`)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out], in the dtype of x; outputs: which of them are wanted."""
        out = fp8_linear(x, self.weight[outputs], self.scale[outputs])
        return out if self.bias is None else out + self.bias[outputs]


class PackedLinear(nn.Module):
    """`linear` without a gradient in bfloat16 on a CPU, by vLLM's kernel for its size."""

    cpu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        self.size, self.bias = linear.out_features, _bias(linear)
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)  # sets `cpu_linear`

    @staticmethod
    def packs() -> bool:
        """Whether the processor has products in bfloat16; one with AVX2 alone has none."""
        there = torch.backends.mkldnn.is_available()
        return there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Whether a layer can be packed; vLLM's CPU build alone has the kernels."""
        from vllm.platforms import current_platform

        weight = linear.weight
        here = weight.device.type == "cpu" and current_platform.is_cpu()
        return here and weight.dtype == torch.bfloat16 and cls.packs()

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out], or the slice `outputs` of it."""
        if not x.numel():  # which oneDNN divides by
            return x.new_empty(*x.shape[:-1], self.size)[..., outputs]
        return self.cpu_linear(x, self.weight, self.bias)[..., outputs]


class Int8Linear(PackedLinear):
    """`linear` without a gradient, multiplied in 8-bit integers on a CPU with AMX.

    Weights have a scale per output, inputs one per row.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        weight, bias = linear.weight.detach().float(), _bias(linear)
        self.scale = weight.abs().amax(1).clamp(min=1e-12) / 127
        rounded = (weight / self.scale[:, None]).round().to(torch.int8)
        self.weight = torch.ops._C.convert_weight_packed(rounded)
        self.bias = None if bias is None else bias.float()

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Whether a layer can be in 8 bits."""
        weight = linear.weight
        there = torch.cpu._is_amx_tile_supported() and hasattr(torch.ops._C, "weight_packed_linear")
        fits = weight.shape[0] % 32 == 0 and weight.shape[1] % 32 == 0
        return super().takes(linear) and there and fits

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out]; outputs: which of them are wanted."""
        out = torch.ops._C.int8_scaled_mm_with_quant(
            x.flatten(0, -2).contiguous(), self.weight, self.scale, self.bias, x.dtype, True
        )
        return out.view(*x.shape[:-1], len(self.scale))[..., outputs]


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
    """residual + linear(x) without a gradient; on CUDA one launch, unless there is a bias.

    residual [..., out] and x [..., in], contiguous. There the sum may take the place of
    `residual`, and is rounded once where two launches round twice.
    """
    if not residual.is_cuda or linear.bias is not None:
        return residual + linear(x)
    if isinstance(linear, Fp8Linear):
        return fp8_linear(x, linear.weight, linear.scale, residual)
    # In place: given a tensor of its own, torch copies the summand there first.
    residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.T)
    return residual


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) · up of a product [..., 2I], gate first; it may be overwritten."""
    gate, up = both.chunk(2, -1)
    if not both.is_cuda:
        return F.silu(gate, inplace=True).mul_(up)
    import vllm._custom_ops  # noqa: F401 (loads the kernels)

    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(out, both)  # one launch in place of two
    return out


def _bias(linear: nn.Linear) -> Tensor | None:
    bias: Tensor | None = linear.bias
    return None if bias is None else bias.detach()


def _frozen(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


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
        elif not issubclass(kind, PackedLinear) or kind.takes(child):
            setattr(module, name, kind(child))
