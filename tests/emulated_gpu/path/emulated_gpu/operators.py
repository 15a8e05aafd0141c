"""torch's operators on the emulated GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

NAMES = """
empty.memory_format empty_strided as_strided view view.dtype _reshape_alias alias
set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor set_ resize_
record_stream is_pinned _pin_memory _local_scalar_dense unfold view_as_real view_as_complex
is_set_to _has_same_storage_numel _fused_sdp_choice _efficientzerotensor
"""
NATIVE = frozenset(f"aten::{name}" for name in NAMES.split())
"""Operators that launch no kernel: memory, views, and calls of the runtime."""
LIBRARY = torch.library.Library("aten", "IMPL")


def install() -> None:
    import _emulated_gpu

    LIBRARY.impl("_fused_rms_norm_backward", fused_rms_norm_backward, "CPU")
    LIBRARY.impl("_thnn_fused_lstm_cell", fused_lstm_cell, "CPU")
    replace([*with_cuda_kernel("aten::"), "aten::copy_"])
    # A CPU has fused attention under another name only.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    if os.environ.get("EMU_POISON") == "1":
        _emulated_gpu.install_poison()


def fused_rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    """Return gradients of x and weight: a CPU has no kernel of this operator."""
    inner = tuple(range(-len(normalized_shape), 0))
    outer = tuple(range(x.dim() - len(normalized_shape)))
    scaled, unit = grad if weight is None else grad * weight, x * rstd
    of_x = (scaled - unit * (scaled * unit).mean(inner, keepdim=True)) * rstd
    return of_x.to(x.dtype), None if weight is None else (grad * unit).sum(outer).to(weight.dtype)


def fused_lstm_cell(of_input, of_state, cell, *biases):
    """Return the new state and cell, and the gates."""
    gates = of_input + of_state + sum(bias for bias in biases if bias is not None)
    enter, keep, value, leave = gates.chunk(4, -1)
    enter, keep, value, leave = enter.sigmoid(), keep.sigmoid(), value.tanh(), leave.sigmoid()
    cell = keep * cell + enter * value
    return leave * cell.tanh(), cell, torch.cat([enter, keep, value, leave], -1)


def with_cuda_kernel(prefix: str) -> list[str]:
    """Return the names of a library's operators that have a CUDA kernel of their own."""
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
        and name not in NATIVE
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    ]


def replace(names: Iterable[str]) -> None:
    """Compute these operators by the CPU's kernels."""
    import _emulated_gpu

    _emulated_gpu.install([tuple(name.partition(".")[::2]) for name in names])
