"""Recording of a step's committed rows in slabs, and of its misses in sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..op import op
from ..optional_triton import cdiv, jit, next_power_of_2, tl
from .slab_tensors import SlabTensors, StepToRecord

_COLUMNS = 1024  # of a program


def record_step_triton(slabs: SlabTensors, step: StepToRecord) -> None:
    """Launch the kernel; see `record_step`."""
    result = step.result
    states = [x if x.stride(1) == 1 else x.contiguous() for x in (*step.states, step.last)]
    rows, count, hidden = len(step.request), len(result.req_idx), slabs.last.shape[2]
    if rows + count:
        _record_step_kernel[(rows + count, cdiv(hidden, _COLUMNS))](
            slabs,
            RowPointers._make(getattr(step, name) for name in RowPointers._fields),
            *states,
            tuple(x.stride(0) for x in states),
            result,
            result.strides,
            step.parent,
            rows,
            WIDTH=slabs.token.shape[1],
            HIDDEN=hidden,
            NUM_NODES=step.parent.shape[1],
            NODES=next_power_of_2(step.parent.shape[1]),
        )


@op(record_step_triton)
def record_step(slabs: SlabTensors, step: StepToRecord) -> None:
    """Write a step's rows into the slabs, and add to the sums.

    Padding, requests without a slab and positions outside it are skipped.
    """
    width, result = slabs.token.shape[1], step.result
    req_idx = result.req_idx.long()
    slab = slabs.of_slot[req_idx].long()
    owner = slab[step.request]
    place = step.position - slabs.begin[owner]
    kept = (owner >= 0) & (step.cache_slot >= 0) & (place >= 0) & (place < width)
    at, source = (owner[kept], place[kept]), step.source[kept]
    slabs.states[at] = torch.cat([state[source] for state in step.states], -1)
    slabs.last[at], slabs.token[at] = step.last[source], step.token[kept].int()
    recorded = slab >= 0
    owner = slab[recorded]
    newest = (step.position[step.newest[recorded]] + 1).minimum(slabs.begin[owner] + width)
    slabs.end[owner] = slabs.end[owner].maximum(newest.int())

    run, origin, parent = result.num_run, result.origin[req_idx], step.parent[req_idx]
    live = recorded & (run > 0) & (origin[:, 0] > 0)
    stopped = result.path.gather(1, result.accepted.long()[:, None])
    node = torch.arange(parent.shape[1], device=parent.device)
    missed = ((parent == stopped) & (node < run[:, None])).any(1) & live
    slabs.missed.index_add_(0, req_idx, missed.float())
    slabs.steps.index_add_(0, req_idx, live.int())
    slabs.committed.index_add_(0, req_idx, (result.accepted.int() + 1) * live)


class RowPointers(NamedTuple):
    """Committed rows of a step, as in `StepToRecord`."""

    request: torch.Tensor  # [T] int64, as the four after it
    source: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    cache_slot: torch.Tensor
    newest: torch.Tensor  # [R] int64


# States may be slices: do not specialise on alignment.
@jit(do_not_specialize=["low_ptr", "mid_ptr", "high_ptr", "last_ptr", "num_rows"])
def _record_step_kernel(
    slabs,  # SlabTensors
    rows,  # RowPointers
    low_ptr,  # [B, HIDDEN], as the three after it
    mid_ptr,
    high_ptr,
    last_ptr,
    state_strides,  # of these four
    result,  # VerificationResult
    strides,  # ResultStrides
    parent_ptr,  # [S, NUM_NODES] int32
    num_rows,  # T
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr = _COLUMNS,
):
    """Copy BLOCK columns of one row, or add the sums of one request."""
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if program < num_rows:
        of = tl.load(rows.request + program)
        slab = tl.load(slabs.of_slot + tl.load(result.req_idx + of * strides.req_idx)).to(tl.int64)
        place = tl.load(rows.position + program) - tl.load(slabs.begin + tl.maximum(slab, 0))
        padding = tl.load(rows.cache_slot + program) < 0
        if (slab >= 0) & (place >= 0) & (place < WIDTH) & (padding == 0):
            row, to = tl.load(rows.source + program), slab * WIDTH + place
            column = part * BLOCK + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            out = slabs.states + to * (3 * HIDDEN) + column
            tl.store(
                out, tl.load(low_ptr + row * state_strides[0] + column, mask=inside), mask=inside
            )
            value = tl.load(mid_ptr + row * state_strides[1] + column, mask=inside)
            tl.store(out + HIDDEN, value, mask=inside)
            value = tl.load(high_ptr + row * state_strides[2] + column, mask=inside)
            tl.store(out + 2 * HIDDEN, value, mask=inside)
            value = tl.load(last_ptr + row * state_strides[3] + column, mask=inside)
            tl.store(slabs.last + to * HIDDEN + column, value, mask=inside)
            if part == 0:
                tl.store(slabs.token + to, tl.load(rows.token + program).to(tl.int32))
    elif part == 0:
        of = program - num_rows
        owner = tl.load(result.req_idx + of * strides.req_idx).to(tl.int64)
        slab = tl.load(slabs.of_slot + owner).to(tl.int64)
        if slab >= 0:
            after = tl.load(rows.position + tl.load(rows.newest + of)) + 1
            limit = tl.load(slabs.begin + slab) + WIDTH
            after = tl.minimum(after, limit).to(tl.int32)
            tl.store(slabs.end + slab, tl.maximum(after, tl.load(slabs.end + slab)))
            run = tl.load(result.num_run + of * strides.num_run)
            if (run > 0) & (tl.load(result.origin + owner * NUM_NODES) > 0):
                depth = tl.load(result.accepted + of * strides.accepted)
                stopped = tl.load(result.path + of * strides.path + depth)
                node = tl.arange(0, NODES)
                seen = (node < NUM_NODES) & (node < run)
                above = tl.load(parent_ptr + owner * NUM_NODES + node, mask=seen, other=-1)
                wrong = tl.max((above == stopped).to(tl.int32), 0)
                # Slots that several rows share belong to no request, and have no slab.
                tl.store(slabs.missed + owner, tl.load(slabs.missed + owner) + wrong)
                tl.store(slabs.steps + owner, tl.load(slabs.steps + owner) + 1)
                tl.store(slabs.committed + owner, tl.load(slabs.committed + owner) + depth + 1)
