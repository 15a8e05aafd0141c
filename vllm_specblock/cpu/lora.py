"""LoRA on a CPU: tokens without an adapter.

vLLM marks them by −1, which its CPU kernels use as an index: in a batch with adapters, such tokens
would get the last one, with or without trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Skip tokens without an adapter. Idempotent."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            patch(module, name, _sparing)


def _sparing(original: Function) -> Function:
    def kernel(
        inputs: torch.Tensor,  # [T, ·]
        weights: torch.Tensor,
        output: torch.Tensor,
        adapter: torch.Tensor,  # [T] int64, −1: none
        *args: Any,
        **kwargs: Any,
    ) -> None:
        inputs = inputs.masked_fill((adapter < 0)[:, None], 0)
        original(inputs, weights, output, adapter, *args, **kwargs)

    return kernel
