"""Batches of nobody: what vLLM runs to measure memory and time, and to keep in step with others.

The heads draft on them as on any batch, or their cost would be missed. Whatever they leave
behind lies in the spare request slot and in vLLM's null block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.draft.head import CacheLayer


def of_nobody(batch: InputBatch, spare: int) -> InputBatch:
    """A dummy batch of vLLM, which names real request slots, moved to the slot `spare`.

    No request of it is done with its prompt: none counts as drafted for.
    """
    count = batch.num_reqs
    return replace(
        batch,
        idx_mapping=torch.full_like(batch.idx_mapping, spare),
        idx_mapping_np=np.full(count, spare, dtype=np.intp),
        prefill_len_np=np.full(count, np.iinfo(np.int32).max, dtype=np.int32),
    )


def null_caches(
    layers: list[CacheLayer], block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Caches of the null block alone, one per layer, for before vLLM has made any.

    Args:
        block_size: tokens per block.

    Returns:
        per layer [1, kv heads, block size · entries per token, 2 · head dim].
    """
    return [
        torch.zeros(
            1,
            block_size * layer.entries_per_token,
            layer.num_kv_heads,
            2 * layer.head_dim,
            dtype=dtype,
            device=device,
        ).transpose(1, 2)
        for layer in layers
    ]
