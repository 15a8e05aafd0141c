"""Linear layers of a served drafter: joined, in 8 bits, packed for a CPU, with a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize

ALL = slice(None)


class Fp8Linear(nn.Module):
    """nn.Linear without a gradient, weights in 8 bits (`triton_kernels/layers/fp8_linear.py`).

    Args:
        linear: the layer it replaces.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """All layers."""
        return True

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out], in the dtype of x; outputs: which of them are wanted."""
        out = fp8_linear(x, self.weight[outputs], self.scale[outputs])
        return out if self.bias is None else out + self.bias[outputs]


class PackedLinear(nn.Module):
    """nn.Linear without a gradient in bfloat16 on a CPU, by vLLM's kernel for its size.

    Args:
        linear: the layer it replaces.
    """

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
        if not torch.backends.mkldnn.is_available():
            return False
        multiplies: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return multiplies

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Whether a layer can be packed."""
        weight = linear.weight
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and cls.packs()

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out], or the slice `outputs` of it."""
        if not x.numel():  # which oneDNN divides by
            return x.new_empty(*x.shape[:-1], self.size)[..., outputs]
        return self.cpu_linear(x, self.weight, self.bias)[..., outputs]


class Int8Linear(PackedLinear):
    """nn.Linear without a gradient in bfloat16 on a CPU with AMX, multiplied in 8-bit integers.

    Weights have a scale per output, inputs one per row.

    Args:
        linear: the layer it replaces.
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
    """Linear layers of the same input as one, without a gradient."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        bias, size = layers[0].bias is not None, sum(layer.out_features for layer in layers)
        super().__init__(layers[0].in_features, size, bias=bias, device="meta")
        self.weight = _frozen([layer.weight for layer in layers])
        if bias:
            self.bias = _frozen([layer.bias for layer in layers])

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """[..., in] -> [..., out]; outputs: which of them are wanted."""
        return F.linear(x, self.weight[outputs], None if self.bias is None else self.bias[outputs])


class Stacked(nn.Module):
    """Linear layers of the same input, multiplied at once: all with a bias, or none."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.product = Joined(layers)

    def forward(self, x: Tensor, layers: slice = ALL) -> tuple[Tensor, ...]:
        """[..., in] -> each layer's [..., out], as views, or those of the slice `layers`."""
        sizes, before = self.sizes[layers], sum(self.sizes[: layers.start or 0])
        outputs = slice(before, before + sum(sizes))
        return self.product(x, outputs).split(sizes, dim=-1)


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
