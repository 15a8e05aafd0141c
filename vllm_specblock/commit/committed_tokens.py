"""Committed tokens of a step: their rows in the batch and their KV slots."""

from __future__ import annotations

import torch

from vllm_specblock.triton_kernels.kv_cache.committed_tokens import committed_tokens_triton
from vllm_specblock.triton_kernels.kv_cache.committed_tokens_numba import committed_tokens_numba
from vllm_specblock.triton_kernels.optional_numba import takes


def committed_sources(
    query_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch rows of the accepted nodes, before and after they are brought together.

    A request's rows are its `base` rows up to and including the root, then its nodes in tree
    order. Position j of the path belongs right behind position j − 1.

    A parent's index is below its child's, so path[j] ≥ j: every node moves down or stays, and
    the row it moves to holds either itself, a rejected node, or a node that moves down too.
    Reading all rows before writing any is therefore enough.

    Args:
        query_start: [R] int64, first batch row of each request.
        base: [R] int64.
        path: [R, D+1] int64, column 0 is the root.
        accepted: [R] int32.

    Returns:
        source, target: [R, D] int64, batch rows of position 1 … D.
        moves: [R, D] bool, False for what is in place already and beyond the path.
    """
    position = torch.arange(1, path.shape[1], device=path.device)
    root = (query_start + base - 1)[:, None]
    source, target = root + path[:, 1:], root + position
    return source, target, (position <= accepted[:, None]) & (source != target)


def committed_tokens(
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
    """What a drafter is told of the T rows of a step. CUDA tensors go to the kernel.

    A request's committed rows are its base rows and, where it had drafts, D for its path,
    whatever was accepted.

    Args:
        request, local: [T] int64, whose each row is, and which of that request's rows.
        row_start: [R+1] int32, first row of each request.
        query_start, base, path, accepted: as in `committed_sources`.
        num_rows: rows of the batch.
        positions, slot_mapping: [≥ num_rows] int64, of the batch's rows.
        req_idx: [R] integers, the slot of each request.
        text: [slots, longest request] int32, this step's tokens included.
        temperature: [slots] fp32.
        hidden: [R] int64, tokens in masked blocks.
        first: [R] int64, the first position to store.

    Returns:
        source, token, position, index, kv_slot: [T] int64, as in `CommittedTokens`.
        last: [R] int64.
        temperature: [R] fp32.
    """
    if path.is_cuda or takes(path):
        op = committed_tokens_triton if path.is_cuda else committed_tokens_numba
        return op(
            request,
            local,
            row_start,
            query_start,
            base,
            path,
            accepted,
            num_rows,
            positions,
            slot_mapping,
            req_idx,
            text,
            temperature,
            hidden,
            first,
        )
    start = query_start[request]
    beyond = local - base[request] + 1  # position on the path, ≤ 0 up to the root
    on_path = path[request, beyond.clamp(min=0)]
    source = start + torch.where(beyond > 0, base[request] - 1 + on_path, local)
    # Beyond the accepted path, and where no node was verified, stands an older one.
    source = source.clamp(max=num_rows - 1)
    real = beyond <= accepted[request]
    place = (start + local).clamp(max=num_rows - 1)
    position = positions[query_start][request] + local
    ahead = (position + 1).clamp(max=text.shape[1] - 1)
    token = torch.where(real, text[req_idx[request], ahead].long(), 0)
    kv_slot = torch.where(real & (position >= first[request]), slot_mapping[place], -1)
    last = row_start[:-1] + base - 1 + accepted
    index = position - hidden[request]
    return source, token, position, index, kv_slot, last, temperature[req_idx]
