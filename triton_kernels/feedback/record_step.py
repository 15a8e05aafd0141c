"""What a step committed, into the slabs of whoever is recorded, and what its drafts missed, into
sums: one launch.

A program for every committed row and one for every request. Nobody counts rows: where one belongs
follows from its position.
"""

from __future__ import annotations

import torch

from ..optional_numba import takes
from ..optional_triton import cdiv, jit, next_power_of_2, tl
from .record_step_numba import record_step_numba
from .slab_tensors import SlabTensors, StepToRecord

_COLUMNS = 1024  # of a program


def record_step(slabs: SlabTensors, step: StepToRecord) -> None:
    """Write a step's rows into the slabs, and add to the sums. CUDA tensors go to the kernel.

    Rows of padding, of requests without a slab and of positions before or beyond it are left out.
    """
    if slabs.token.is_cuda:
        record_step_triton(slabs, step)
    elif takes(slabs.token):
        record_step_numba(slabs, step)
    else:
        record_step_reference(slabs, step)


def record_step_reference(slabs: SlabTensors, step: StepToRecord) -> None:
    """`record_step` in torch, without a shape that depends on values."""
    count, width = slabs.token.shape
    result, req_idx = step.result, step.result.req_idx.long()
    slab = slabs.of_slot[req_idx].long()
    first = slabs.begin.long()[slab.clamp(min=0)]

    place = step.position - first[step.request]
    owner = slab[step.request]
    kept = (owner >= 0) & (step.cache_slot >= 0) & (place >= 0) & (place < width)
    # Which row each place takes; one place more for those that have none.
    rows = torch.arange(len(place), device=place.device)
    writer = torch.full((count * width + 1,), -1, device=place.device)
    writer[torch.where(kept, owner * width + place, count * width)] = rows
    writer = writer[:-1].view(count, width)
    if len(rows):
        written, row = writer >= 0, writer.clamp(min=0)
        source = step.source[row]
        states = torch.cat([state[source] for state in step.states], -1)
        slabs.states.copy_(torch.where(written[..., None], states, slabs.states))
        slabs.last.copy_(torch.where(written[..., None], step.last[source], slabs.last))
        slabs.token.copy_(torch.where(written, step.token[row].int(), slabs.token))

        newest = (step.position[step.newest] + 1).minimum(first + width)
        end = torch.nn.functional.pad(slabs.end, (0, 1))
        at = torch.where(slab >= 0, slab, count)
        end[at] = end[at].maximum(newest.int())
        slabs.end.copy_(end[:count])

    run, origin, parent = result.num_run, result.origin[req_idx], step.parent[req_idx]
    live = (slab >= 0) & (run > 0) & (origin[:, 0] > 0)
    stopped = result.path.gather(1, result.accepted.long()[:, None])
    node = torch.arange(parent.shape[1], device=parent.device)
    missed = ((parent == stopped) & (node < run[:, None])).any(1) & live
    slabs.missed.index_add_(0, req_idx, missed.float())
    slabs.steps.index_add_(0, req_idx, live.int())
    slabs.committed.index_add_(0, req_idx, (result.accepted.int() + 1) * live)


def record_step_triton(slabs: SlabTensors, step: StepToRecord) -> None:
    """Launch the kernel; see `record_step`."""
    result = step.result
    states = [x if x.stride(1) == 1 else x.contiguous() for x in (*step.states, step.last)]
    rows, count, hidden = len(step.request), len(result.req_idx), slabs.last.shape[2]
    given = (result.req_idx, result.num_run, result.accepted, result.path)
    if rows + count:
        _record_step_kernel[(rows + count, cdiv(hidden, _COLUMNS))](
            slabs.states, slabs.last, slabs.token, slabs.begin, slabs.end, slabs.of_slot,
            slabs.missed, slabs.steps, slabs.committed, step.request, step.source, step.token,
            step.position, step.cache_slot, step.newest, *states, *(x.stride(0) for x in states),
            *given, *(x.stride(0) for x in given), result.origin, step.parent, rows,
            WIDTH=slabs.token.shape[1], HIDDEN=hidden, NUM_NODES=step.parent.shape[1],
            NODES=next_power_of_2(step.parent.shape[1]), BLOCK=_COLUMNS,
        )  # fmt: skip


# States and what is of the requests may be parts of something, and begin anywhere.
@jit(
    do_not_specialize=[
        "low", "mid", "high", "top", "req_idx", "num_run", "accepted", "path", "num_rows"
    ]
)  # fmt: skip
def _record_step_kernel(
    states,  # [G, WIDTH, 3 * HIDDEN]
    last,  # [G, WIDTH, HIDDEN]
    token,  # [G, WIDTH] int32
    begin, end,  # [G] int32
    of_slot,  # [S] int32
    missed,  # [S] fp32
    steps, committed,  # [S] int32
    request, source, new_token, position, cache_slot,  # [T] int64
    newest,  # [R] int64
    low, mid, high, top,  # [B, HIDDEN]
    low_stride, mid_stride, high_stride, top_stride,
    req_idx, num_run,  # [R] integers
    accepted,  # [R] int32
    path,  # [R, D + 1] int64
    req_idx_stride, run_stride, accepted_stride, path_stride,
    origin,  # [S, NUM_NODES] uint8
    parent,  # [S, NUM_NODES] int32
    num_rows,  # T
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row, or the sums of one request."""
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if program < num_rows:
        of = tl.load(request + program)
        slab = tl.load(of_slot + tl.load(req_idx + of * req_idx_stride)).to(tl.int64)
        place = tl.load(position + program) - tl.load(begin + tl.maximum(slab, 0))
        padding = tl.load(cache_slot + program) < 0
        if (slab >= 0) & (place >= 0) & (place < WIDTH) & (padding == 0):
            row, to = tl.load(source + program), slab * WIDTH + place
            column = part * BLOCK + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            out = states + to * (3 * HIDDEN) + column
            tl.store(out, tl.load(low + row * low_stride + column, mask=inside), mask=inside)
            value = tl.load(mid + row * mid_stride + column, mask=inside)
            tl.store(out + HIDDEN, value, mask=inside)
            value = tl.load(high + row * high_stride + column, mask=inside)
            tl.store(out + 2 * HIDDEN, value, mask=inside)
            value = tl.load(top + row * top_stride + column, mask=inside)
            tl.store(last + to * HIDDEN + column, value, mask=inside)
            if part == 0:
                tl.store(token + to, tl.load(new_token + program).to(tl.int32))
    elif part == 0:
        of = program - num_rows
        owner = tl.load(req_idx + of * req_idx_stride).to(tl.int64)
        slab = tl.load(of_slot + owner).to(tl.int64)
        if slab >= 0:
            after = tl.load(position + tl.load(newest + of)) + 1
            limit = tl.load(begin + slab) + WIDTH
            after = tl.minimum(after, limit).to(tl.int32)
            tl.store(end + slab, tl.maximum(after, tl.load(end + slab)))
            run = tl.load(num_run + of * run_stride)
            if (run > 0) & (tl.load(origin + owner * NUM_NODES) > 0):
                depth = tl.load(accepted + of * accepted_stride)
                stopped = tl.load(path + of * path_stride + depth)
                node = tl.arange(0, NODES)
                seen = (node < NUM_NODES) & (node < run)
                above = tl.load(parent + owner * NUM_NODES + node, mask=seen, other=-1)
                wrong = tl.max((above == stopped).to(tl.int32), 0)
                # Slots that several rows share, those of nobody, have no slab.
                tl.store(missed + owner, tl.load(missed + owner) + wrong)
                tl.store(steps + owner, tl.load(steps + owner) + 1)
                tl.store(committed + owner, tl.load(committed + owner) + depth + 1)
