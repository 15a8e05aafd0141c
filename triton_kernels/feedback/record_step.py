"""Recording of a step's committed rows in slabs, and of its misses in sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..op import op
from ..optional_triton import cdiv, jit, next_power_of_2, strides_of, tl
from ..verify.verification_result import VerificationResult

_COLUMNS = 1024  # of a program


class SlabTensors(NamedTuple):
    """G slabs of W rows each, and sums of S request slots; contiguous, on one device.

    Row i of a slab belongs to the token x_p, p = begin + i. A row's place depends only on its
    position, so a repeated step writes the same rows.
    """

    states: torch.Tensor  # [G, W, 3·Ht], the target's states at x_p, columns low, mid, high
    last: torch.Tensor  # [G, W, Ht], of the same dtype, what the target's LM head reads at x_p
    token: torch.Tensor  # [G, W] int32, x_{p+1}
    begin: torch.Tensor  # [G] int32, first position
    end: torch.Tensor  # [G] int32, position after the newest row; `begin` if there is none
    of_slot: torch.Tensor  # [S] int32, the slab of the request in each slot; −1: not recorded
    # [S] fp32, s [SpecBlock, eq. 8], as far as a step can know it: 1 for every walk that ends at a
    # node with children, whose probabilities all went to wrong tokens.
    missed: torch.Tensor
    steps: torch.Tensor  # [S] int32, target steps with a tree
    committed: torch.Tensor  # [S] int32, tokens committed in these

    @classmethod
    def empty(
        cls,
        slabs: int,
        rows: int,
        hidden: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> SlabTensors:
        """No request is recorded. `rows` is W, `hidden` Ht."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)

        return cls(
            zeros(slabs, rows, 3 * hidden, dtype=dtype),
            zeros(slabs, rows, hidden, dtype=dtype),
            zeros(slabs, rows),
            zeros(slabs),
            zeros(slabs),
            zeros(slots).fill_(-1),
            zeros(slots, dtype=torch.float32),
            zeros(slots),
            zeros(slots),
        )


class StepToRecord(NamedTuple):
    """What a step committed, and the verdicts on the trees it ran on.

    T rows, R requests, B rows of the target's batch, N nodes.
    """

    request: torch.Tensor  # [T] int64, request of each row
    source: torch.Tensor  # [T] int64, its row of `states` and `last`
    token: torch.Tensor  # [T] int64, x_{p+1}
    position: torch.Tensor  # [T] int64, p
    cache_slot: torch.Tensor  # [T] int64, −1 for padding
    newest: torch.Tensor  # [R] int64, the newest row of each request
    # [B, Ht] each, of the low, mid and high layer.
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    last: torch.Tensor  # [B, Ht], of the same dtype
    result: VerificationResult  # `score` and `temperatures` are not read
    parent: torch.Tensor  # [S, N] int32, parents of nodes 1 … N of the trees under verification


def record_step_triton(slabs: SlabTensors, step: StepToRecord) -> None:
    """Launch the kernel; see `record_step`."""
    result, of_step = step.result, (*step.states, step.last)
    low, mid, high, last = (x if x.stride(1) == 1 else x.contiguous() for x in of_step)
    step = step._replace(states=(low, mid, high), last=last)
    rows, count, hidden = len(step.request), len(result.req_idx), slabs.last.shape[2]
    _record_step_kernel[(rows + count, cdiv(hidden, _COLUMNS))](
        slabs,
        step,
        tuple(x.stride(0) for x in (low, mid, high, last)),
        strides_of(result),
        rows,
        WIDTH=slabs.token.shape[1],
        HIDDEN=hidden,
        NUM_NODES=step.parent.shape[1],
    )


@op(record_step_triton)
def record_step(slabs: SlabTensors, step: StepToRecord) -> None:
    """Write a step's rows into the slabs, and add to the sums.

    Padding, requests without a slab and positions outside it are skipped.
    """
    width, result, req_idx = slabs.token.shape[1], step.result, step.result.req_idx.long()
    slab = slabs.of_slot[req_idx].long()
    owner = slab[step.request]
    place = step.position - slabs.begin[owner]  # owner −1: any number
    kept = (owner >= 0) & (step.cache_slot >= 0) & (place >= 0) & (place < width)
    row = kept.nonzero()[:, 0]  # a host tensor
    at, source = (owner[row], place[row]), step.source[row]
    slabs.states[at] = torch.cat([state[source] for state in step.states], -1)
    slabs.last[at] = step.last[source]
    slabs.token[at] = step.token[row].int()

    recorded = (slab >= 0).nonzero()[:, 0]  # a host tensor
    slab, req_idx = slab[recorded], req_idx[recorded]
    newest = (step.position[step.newest[recorded]] + 1).minimum(slabs.begin[slab] + width)
    slabs.end[slab] = slabs.end[slab].maximum(newest.int())
    run, accepted = result.num_run[recorded, None], result.accepted[recorded].long()
    live = (run[:, 0] > 0) & (result.origin[req_idx, 0] > 0)
    stopped = result.path[recorded, accepted]
    node = torch.arange(step.parent.shape[1], device=run.device)
    missed = (step.parent[req_idx] == stopped[:, None]) & (node < run)
    slabs.missed[req_idx] += missed.any(1) & live
    slabs.steps[req_idx] += live
    slabs.committed[req_idx] += (accepted.int() + 1) * live


@jit(do_not_specialize=["num_rows"])
def _record_step_kernel(
    slabs,  # SlabTensors
    step,  # StepToRecord, elements of a state are consecutive
    state_strides,  # of the low, mid, high and last states
    strides,  # VerificationResult, their strides
    num_rows,  # T
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK: tl.constexpr = _COLUMNS,
):
    """Copy BLOCK columns of one row, or add the sums of one request."""
    result, program = step.result, tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if program < num_rows:
        of = tl.load(step.request + program)
        slab = tl.load(slabs.of_slot + tl.load(result.req_idx + of * strides.req_idx)).to(tl.int64)
        place = tl.load(step.position + program) - tl.load(slabs.begin + tl.maximum(slab, 0))
        padding = tl.load(step.cache_slot + program) < 0
        if (slab >= 0) & (place >= 0) & (place < WIDTH) & (padding == 0):
            row, to = tl.load(step.source + program), slab * WIDTH + place
            column = part * BLOCK + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            out = slabs.states + to * (3 * HIDDEN) + column
            for layer in tl.static_range(3):
                state = step.states[layer] + row * state_strides[layer]
                tl.store(out + layer * HIDDEN, tl.load(state + column, mask=inside), mask=inside)
            value = tl.load(step.last + row * state_strides[3] + column, mask=inside)
            tl.store(slabs.last + to * HIDDEN + column, value, mask=inside)
            if part == 0:
                tl.store(slabs.token + to, tl.load(step.token + program).to(tl.int32))
    elif part == 0:
        of = program - num_rows
        owner = tl.load(result.req_idx + of * strides.req_idx).to(tl.int64)
        slab = tl.load(slabs.of_slot + owner).to(tl.int64)
        if slab >= 0:
            after = tl.load(step.position + tl.load(step.newest + of)) + 1
            limit = tl.load(slabs.begin + slab) + WIDTH
            after = tl.minimum(after, limit).to(tl.int32)
            tl.store(slabs.end + slab, tl.maximum(after, tl.load(slabs.end + slab)))
            run = tl.load(result.num_run + of * strides.num_run)
            if (run > 0) & (tl.load(result.origin + owner * NUM_NODES) > 0):
                depth = tl.load(result.accepted + of * strides.accepted)
                stopped = tl.load(result.path + of * strides.path + depth)
                node = tl.arange(0, next_power_of_2(NUM_NODES))
                seen = (node < NUM_NODES) & (node < run)
                above = tl.load(step.parent + owner * NUM_NODES + node, mask=seen, other=-1)
                wrong = tl.max((above == stopped).to(tl.int32), 0)
                # Slots that several rows share belong to no request, and have no slab.
                tl.store(slabs.missed + owner, tl.load(slabs.missed + owner) + wrong)
                tl.store(slabs.steps + owner, tl.load(slabs.steps + owner) + 1)
                tl.store(slabs.committed + owner, tl.load(slabs.committed + owner) + depth + 1)
