"""Committed tokens of a step: their rows in the batch and their KV slots."""

from __future__ import annotations

import torch

from vllm_specblock.triton_kernels.kv_cache.committed_tokens import (
    CommittedRows,
    StepRows,
    committed_tokens_triton,
)
from vllm_specblock.triton_kernels.op import op


@op(committed_tokens_triton)
def committed_tokens(step: StepRows, num_rows: int) -> CommittedRows:
    """Return a step's committed rows for the drafters; `num_rows`: rows of the batch."""
    request, base, local = step.request, step.base, step.local
    start = step.query_start[request]
    beyond = local - base[request] + 1  # position on the path, ≤ 0 up to the root
    on_path = step.path[request, beyond.clamp(min=0)]
    source = start + torch.where(beyond > 0, base[request] - 1 + on_path, local)
    # Entries beyond the accepted path, and without a verified node, are stale.
    source = source.clamp(max=num_rows - 1)
    real = beyond <= step.accepted[request]
    place = (start + local).clamp(max=num_rows - 1)
    position = step.positions[step.query_start][request] + local
    ahead = (position + 1).clamp(max=step.text.shape[1] - 1)
    token = torch.where(real, step.text[step.req_idx[request], ahead].long(), 0)
    stored = real & (position >= step.first[request])
    kv_slot = torch.where(stored, step.slot_mapping[place], -1)
    index = position - step.hidden[request]
    last = step.row_start[:-1] + base - 1 + step.accepted
    temperature = step.temperature[step.req_idx]
    return CommittedRows(source, token, position, index, kv_slot, last, temperature)
