"""Committed tokens of a step: source rows, positions, KV slots.

Index arithmetic over a few hundred rows: as torch operations it is some thirty launches that each
take longer to start than to run. The torch reference is in `commit/committed_tokens.py`.
"""

from __future__ import annotations

import torch

from ..optional_triton import cdiv, jit, tl

_ROWS = 128  # of a program


def committed_tokens_triton(
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
    """Launch the kernel; arguments and results as `commit.rows.committed_tokens` has them."""
    rows, count, device = len(request), len(req_idx), path.device
    source, token, position, index, kv_slot, last = (
        torch.empty(size, dtype=torch.int64, device=device) for size in (*[rows] * 5, count)
    )
    req_temperature = torch.empty(count, dtype=temperature.dtype, device=device)
    if rows:
        _committed_tokens_kernel[(cdiv(rows, _ROWS),)](
            request,
            local,
            row_start,
            query_start,
            query_start.stride(0),
            base,
            base.stride(0),
            path,
            path.stride(0),
            accepted,
            accepted.stride(0),
            positions,
            slot_mapping,
            req_idx,
            req_idx.stride(0),
            text,
            text.stride(0),
            text.shape[1],
            temperature,
            hidden,
            first,
            source,
            token,
            position,
            index,
            kv_slot,
            last,
            req_temperature,
            rows,
            count,
            num_rows - 1,
            BLOCK=_ROWS,
        )
    return source, token, position, index, kv_slot, last, req_temperature


@jit(do_not_specialize=["num_rows", "num_requests", "last_row"])
def _committed_tokens_kernel(
    request,  # [T] int64
    local,  # [T] int64
    row_start,  # [R + 1] int32
    query_start,  # [R] int64
    query_stride,
    base,  # [R] int64
    base_stride,
    path,  # [R, D + 1] int64
    path_stride,
    accepted,  # [R] int32
    accepted_stride,
    positions,  # [batch rows] int64
    slot_mapping,  # [batch rows] int64
    req_idx,  # [R] integers
    req_idx_stride,
    text,  # [slots, text_len] int32; may lie in the host's memory
    text_stride,
    text_len,
    temperature,  # [slots] fp32
    hidden,  # [R] int64
    first,  # [R] int64
    source,  # [T] int64
    token,  # [T] int64
    position,  # [T] int64
    index,  # [T] int64
    kv_slot,  # [T] int64
    last,  # [R] int64
    req_temperature,  # [R] fp32
    num_rows,  # T
    num_requests,  # R
    last_row,  # of the batch
    BLOCK: tl.constexpr,
):
    """BLOCK rows, and as many requests: every request has a row, so the programs suffice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    of = tl.load(request + at, mask=inside, other=0)
    here = tl.load(local + at, mask=inside, other=0)
    start = tl.load(query_start + of * query_stride, mask=inside, other=0)
    root = tl.load(base + of * base_stride, mask=inside, other=0) - 1
    beyond = here - root  # position on the path, 0 or less up to the root
    node = tl.load(path + of * path_stride + beyond, mask=inside & (beyond > 0), other=0)
    row = start + tl.where(beyond > 0, root + node, here)
    tl.store(source + at, tl.minimum(row, last_row), mask=inside)

    real = inside & (beyond <= tl.load(accepted + of * accepted_stride, mask=inside, other=0))
    place = tl.load(positions + start, mask=inside, other=0) + here
    tl.store(position + at, place, mask=inside)
    tl.store(index + at, place - tl.load(hidden + of, mask=inside, other=0), mask=inside)
    whose = tl.load(req_idx + of * req_idx_stride, mask=inside, other=0).to(tl.int64)
    ahead = tl.minimum(place + 1, text_len - 1)
    word = tl.load(text + whose * text_stride + ahead, mask=real, other=0).to(tl.int64)
    tl.store(token + at, word, mask=inside)
    where = slot_mapping + tl.minimum(start + here, last_row)
    stored = real & (place >= tl.load(first + of, mask=inside, other=0))
    tl.store(kv_slot + at, tl.load(where, mask=stored, other=-1), mask=inside)

    inside = at < num_requests
    begin = tl.load(row_start + at, mask=inside, other=0).to(tl.int64)
    root = tl.load(base + at * base_stride, mask=inside, other=0) - 1
    end = tl.load(accepted + at * accepted_stride, mask=inside, other=0)
    tl.store(last + at, begin + root + end, mask=inside)
    whose = tl.load(req_idx + at * req_idx_stride, mask=inside, other=0).to(tl.int64)
    tl.store(
        req_temperature + at, tl.load(temperature + whose, mask=inside, other=0.0), mask=inside
    )
