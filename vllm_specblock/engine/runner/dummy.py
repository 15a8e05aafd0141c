"""Dummy batches, which vLLM runs to measure memory and time, and to keep ranks in step.

The drafters draft on them too, so that their cost is measured. Results go to the scratch request
slot and vLLM's null block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.drafters.interface import CacheLayer, Drafter
from vllm_specblock.engine.runner.graphs import StepInputs
from vllm_specblock.engine.runner.step_batch import StepBatch


def to_scratch_slot(batch: InputBatch, scratch_idx: int) -> InputBatch:
    """A dummy batch of vLLM, which names real request slots, moved to the slot `scratch_idx`.

    No request of it is done with its prompt: none counts as drafted for.
    """
    count = batch.num_reqs
    return replace(
        batch,
        idx_mapping=torch.full_like(batch.idx_mapping, scratch_idx),
        idx_mapping_np=np.full(count, scratch_idx, dtype=np.intp),
        prefill_len_np=np.full(count, np.iinfo(np.int32).max, dtype=np.int32),
    )


def null_inputs(
    rows: StepBatch, hidden_states: list[torch.Tensor], block_size: int, max_model_len: int
) -> StepInputs:
    """Return inputs of a dummy step before vLLM allocates caches; all blocks are null blocks.

    Args:
        hidden_states: per layer that a drafter reads [≥ batch rows, Ht].
        block_size: tokens per block.
    """
    count, device = rows.batch.num_reqs, rows.base.device
    # With few requests, vLLM's have more tokens than a real one can.
    longest = int(rows.batch.num_scheduled_tokens[:count].max())  # a host array
    blocks = -(-max(max_model_len, longest) // block_size)
    return StepInputs(
        rows,
        torch.full((rows.batch.num_tokens,), -1, dtype=torch.int64, device=device),
        [],
        hidden_states,
        torch.zeros(count, blocks, dtype=torch.int32, device=device),
        block_size,
        torch.zeros(2, count, dtype=torch.int64, device=device),
        chain=None,
    )


def bind_null_caches(
    drafters: list[Drafter], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Bind drafters to caches of one null block, until vLLM allocates the real ones.

    Args:
        block_size: tokens per block.
    """
    for drafter in drafters:
        drafter.bind(
            [_null_cache(layer, block_size, dtype, device) for layer in drafter.cache_layers()]
        )


def _null_cache(
    layer: CacheLayer, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[1, kv heads, block size · entries per token, 2 · head dim], as vLLM lays them out."""
    entries = block_size * layer.entries_per_token
    shape = (1, entries, layer.num_kv_heads, 2 * layer.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)
