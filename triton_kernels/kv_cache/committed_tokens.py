"""Committed tokens of a step: source rows, positions, KV slots.

The reference in `commit.py` would be some thirty launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import cdiv, jit, strides_of, tl

_ROWS = 128  # of a program


class StepRows(NamedTuple):
    """The T rows of a step that drafters read, and their batch of R requests.

    A request's rows are its base rows and, with drafts, D rows for its path, accepted or not. The
    first four attributes are an `AcceptedRows`.
    """

    query_start: torch.Tensor
    base: torch.Tensor
    path: torch.Tensor
    accepted: torch.Tensor
    request: torch.Tensor  # [T] int64, request of each row
    local: torch.Tensor  # [T] int64, the row's index in that request
    row_start: torch.Tensor  # [R+1] int32, first row of each request
    positions: torch.Tensor  # [≥ batch rows] int64, of the batch's rows
    slot_mapping: torch.Tensor  # [≥ batch rows] int64
    req_idx: torch.Tensor  # [R] integers, the request slot
    text: torch.Tensor  # [slots, longest request] int32, this step's tokens included
    temperature: torch.Tensor  # [slots] fp32
    hidden: torch.Tensor  # [R] int64, tokens in masked blocks
    first: torch.Tensor  # [R] int64, the first position to store


class CommittedRows(NamedTuple):
    """The rows for the drafters, as in `CommittedTokens`."""

    source: torch.Tensor  # [T] int64, as the four after it
    token: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor  # `index` there
    kv_slot: torch.Tensor
    last: torch.Tensor  # [R] int64
    temperature: torch.Tensor  # [R] fp32


def committed_tokens_triton(step: StepRows, num_rows: int) -> CommittedRows:
    """Launch the kernel; see `committed_tokens`. All [T], `hidden` and `first` are contiguous."""
    rows, count, device = len(step.request), len(step.req_idx), step.path.device
    sizes = [rows] * 5 + [count]
    numbers = [torch.empty(size, dtype=torch.int64, device=device) for size in sizes]
    out = CommittedRows._make([*numbers, step.temperature.new_empty(count)])
    _committed_tokens_kernel[(cdiv(rows, _ROWS),)](
        step, strides_of(step), out, step.text.shape[1], rows, count, num_rows - 1
    )
    return out


@jit(do_not_specialize=["num_rows", "num_requests", "last_row"])
def _committed_tokens_kernel(
    step,  # StepRows
    strides,  # StepRows, their strides
    out,  # CommittedRows
    text_len,
    num_rows,  # T
    num_requests,  # R
    last_row,  # of the batch
    BLOCK: tl.constexpr = _ROWS,
):
    """Handle BLOCK rows, and as many requests: every request has a row, so the programs suffice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    of = tl.load(step.request + at, mask=inside, other=0)
    here = tl.load(step.local + at, mask=inside, other=0)
    start = tl.load(step.query_start + of * strides.query_start, mask=inside, other=0)
    root = tl.load(step.base + of * strides.base, mask=inside, other=0) - 1
    beyond = here - root  # position on the path, 0 or less up to the root
    node = tl.load(step.path + of * strides.path + beyond, mask=inside & (beyond > 0), other=0)
    row = start + tl.where(beyond > 0, root + node, here)
    tl.store(out.source + at, tl.minimum(row, last_row), mask=inside)

    real = inside & (beyond <= tl.load(step.accepted + of * strides.accepted, mask=inside, other=0))
    place = tl.load(step.positions + start, mask=inside, other=0) + here
    tl.store(out.position + at, place, mask=inside)
    tl.store(out.place + at, place - tl.load(step.hidden + of, mask=inside, other=0), mask=inside)
    whose = tl.load(step.req_idx + of * strides.req_idx, mask=inside, other=0).to(tl.int64)
    ahead = tl.minimum(place + 1, text_len - 1)
    word = tl.load(step.text + whose * strides.text + ahead, mask=real, other=0).to(tl.int64)
    tl.store(out.token + at, word, mask=inside)
    where = step.slot_mapping + tl.minimum(start + here, last_row)
    stored = real & (place >= tl.load(step.first + of, mask=inside, other=0))
    tl.store(out.kv_slot + at, tl.load(where, mask=stored, other=-1), mask=inside)

    inside = at < num_requests
    begin = tl.load(step.row_start + at, mask=inside, other=0).to(tl.int64)
    root = tl.load(step.base + at * strides.base, mask=inside, other=0) - 1
    end = tl.load(step.accepted + at * strides.accepted, mask=inside, other=0)
    tl.store(out.last + at, begin + root + end, mask=inside)
    whose = tl.load(step.req_idx + at * strides.req_idx, mask=inside, other=0).to(tl.int64)
    temperature = tl.load(step.temperature + whose, mask=inside, other=0.0)
    tl.store(out.temperature + at, temperature, mask=inside)
