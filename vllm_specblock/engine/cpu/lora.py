"""LoRA on a CPU: requests without an adapter.

vLLM marks their tokens by −1, which its kernels for CPUs read as an index: beside a request that
has an adapter they get the one in the last slot, with trees or without. What a request is answered
would depend on its company.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    import torch

KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def install() -> None:
    """P8: tokens without an adapter get none; idempotent."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in KERNELS:
            patch(module, name, _sparing)


def _sparing(original: Function) -> Function:
    def kernel(
        inputs: torch.Tensor,  # [T, ·]
        weights: torch.Tensor,  # [adapters, …]
        output: torch.Tensor,  # [T, ·]
        adapter: torch.Tensor,  # [T] int64, −1: none
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Nothing comes of zeros.
        inputs = inputs.masked_fill((adapter < 0)[:, None], 0)
        original(inputs, weights, output, adapter, *args, **kwargs)

    return kernel
