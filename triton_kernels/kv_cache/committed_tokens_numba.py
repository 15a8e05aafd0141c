"""Committed tokens of a step, for CPUs; see `committed_tokens.py`.

See `kv_cache/committed_tokens.py`; the torch reference is
`vllm_specblock.commit.committed_tokens.committed_tokens`.
"""

from __future__ import annotations

import torch

from ..optional_numba import njit


def committed_tokens_numba(
    request: torch.Tensor,
    local: torch.Tensor,
    row_start: torch.Tensor,
    query_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    num_rows: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    req_idx: torch.Tensor,
    text: torch.Tensor,
    temperature: torch.Tensor,
    hidden: torch.Tensor,
    first: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Arguments and results as `vllm_specblock.commit.committed_tokens.committed_tokens` has
    them."""
    made = torch.empty(5, len(request), dtype=torch.int64)
    last, req_temperature = torch.empty(len(req_idx), dtype=torch.int64), torch.empty(len(req_idx))
    _committed_tokens(
        request.numpy(),
        local.numpy(),
        row_start.numpy(),
        query_start.contiguous().numpy(),
        base.contiguous().numpy(),
        path.contiguous().numpy(),
        accepted.contiguous().numpy(),
        num_rows,
        positions.numpy(),
        slot_mapping.numpy(),
        req_idx.contiguous().numpy(),
        text.numpy(),
        temperature.numpy(),
        hidden.numpy(),
        first.numpy(),
        made.numpy(),
        last.numpy(),
        req_temperature.numpy(),
    )
    return *made.unbind(), last, req_temperature


@njit
def _committed_tokens(
    request,  # [T] int64
    local,  # [T] int64
    row_start,  # [R+1] int32
    query_start,  # [R] int64
    base,  # [R] int64
    path,  # [R, D+1] int64
    accepted,  # [R] int32
    num_rows,
    positions,  # [≥ num_rows] int64
    slot_mapping,  # [≥ num_rows] int64
    req_idx,  # [R] integers
    text,  # [slots, longest request] int32
    temperature,  # [slots] fp32
    hidden,  # [R] int64
    first,  # [R] int64
    made,  # [5, T] int64: source, token, position, index, slot
    last,  # [R] int64
    req_temperature,  # [R] fp32
):
    longest = text.shape[1] - 1
    for t in range(len(request)):
        r, own = request[t], local[t]
        start, beyond = query_start[r], own - base[r] + 1
        source = start + (base[r] - 1 + path[r, beyond] if beyond > 0 else own)
        position = positions[start] + own
        real = beyond <= accepted[r]
        made[0, t] = min(source, num_rows - 1)
        made[1, t] = text[req_idx[r], min(position + 1, longest)] if real else 0
        made[2, t] = position
        made[3, t] = position - hidden[r]
        stored = real and position >= first[r]
        made[4, t] = slot_mapping[min(start + own, num_rows - 1)] if stored else -1
    for r in range(len(req_idx)):
        last[r] = row_start[r] + base[r] - 1 + accepted[r]
        req_temperature[r] = temperature[req_idx[r]]
