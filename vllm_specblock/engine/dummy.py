"""Batches of nobody: what vLLM runs to measure memory and time, and to keep in step with others.

The heads draft on them as on any batch, or their cost would be missed. Whatever they leave
behind lies in the spare request slot and in vLLM's null block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.draft.head import CacheLayer, Head
from vllm_specblock.engine.graphs import StepInputs
from vllm_specblock.engine.rows import StepRows


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


def null_inputs(
    rows: StepRows, hidden_states: list[torch.Tensor], block_size: int, max_model_len: int
) -> StepInputs:
    """What a dummy step reads from before vLLM made the caches: every block is one of no use.

    Args:
        hidden_states: per layer that a head reads [≥ batch rows, Ht].
        block_size: tokens per block.
    """
    count, device = rows.batch.num_reqs, rows.base.device
    blocks = -(-max_model_len // block_size)
    return StepInputs(
        rows,
        torch.full((rows.batch.num_tokens,), -1, dtype=torch.int64, device=device),
        hidden_states,
        torch.zeros(count, blocks, dtype=torch.int32, device=device),
        block_size,
        chain=None,
    )


def bind_null_caches(
    heads: list[Head], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give heads caches of the null block alone, for before vLLM has made any.

    Args:
        block_size: tokens per block.
    """
    for head in heads:
        head.bind([_null_cache(layer, block_size, dtype, device) for layer in head.cache_layers()])


def _null_cache(
    layer: CacheLayer, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[1, kv heads, block size · entries per token, 2 · head dim], as vLLM lays them out."""
    entries = block_size * layer.entries_per_token
    shape = (1, entries, layer.num_kv_heads, 2 * layer.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)
