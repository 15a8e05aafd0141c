"""Recording of a step's committed rows, for CPUs; see `record_step.py`.

States are passed as addresses and copied as bytes, so any dtype works.
"""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import at_address, njit
from .slab_tensors import SlabTensors, StepToRecord


def record_step_numba(slabs: SlabTensors, step: StepToRecord) -> None:
    """Record a step; arguments as in `record_step.record_step`."""
    states = [x if x.stride(1) == 1 else x.contiguous() for x in (*step.states, step.last)]
    size, result = states[0].element_size(), step.result
    sources = tuple((x.data_ptr(), x.stride(0) * size) for x in states)
    given = (result.req_idx, result.num_run, result.accepted, result.path)
    _record_step(
        slabs.states.data_ptr(),
        slabs.last.data_ptr(),
        slabs.last.shape[2] * size,
        sources,
        *map(_array, (slabs.token, slabs.begin, slabs.end, slabs.of_slot, slabs.missed)),
        *map(_array, (slabs.steps, slabs.committed, step.request, step.source, step.token)),
        *map(_array, (step.position, step.cache_slot, step.newest, *given)),
        _array(result.origin),
        _array(step.parent),
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


@njit
def _record_step(
    states,  # address of [G, W, 3 * Ht]
    last,  # address of [G, W, Ht]
    size,  # bytes of a row of a layer
    sources,  # four of (address of [B, Ht], bytes from row to row): low, mid, high, last
    token,  # [G, W] int32, written as all up to `committed` but `begin` and `of_slot`
    begin,  # [G] int32
    end,  # [G] int32
    of_slot,  # [S] int32
    missed,  # [S] fp32
    steps,  # [S] int32
    committed,  # [S] int32
    request,  # [T] int64
    source,  # [T] int64
    new_token,  # [T] int64
    position,  # [T] int64
    cache_slot,  # [T] int64
    newest,  # [R] int64
    req_idx,  # [R] integers
    num_run,  # [R] integers
    accepted,  # [R] int32
    path,  # [R, D + 1] int64
    origin,  # [S, N] uint8
    parent,  # [S, N] int32
):
    width = token.shape[1]
    for t in range(len(request)):
        slab = of_slot[req_idx[request[t]]]
        if slab < 0 or cache_slot[t] < 0:
            continue
        place = position[t] - begin[slab]
        if place < 0 or place >= width:
            continue
        token[slab, place] = new_token[t]
        to = slab * width + place
        for layer in range(3):
            address, row = sources[layer]
            _copy(address + source[t] * row, states + (3 * to + layer) * size, size)
        address, row = sources[3]
        _copy(address + source[t] * row, last + to * size, size)
    for r in range(len(req_idx)):
        at = req_idx[r]
        slab = of_slot[at]
        if slab < 0:
            continue
        end[slab] = max(end[slab], min(position[newest[r]] + 1, begin[slab] + width))
        run = min(num_run[r], parent.shape[1])
        if run <= 0 or origin[at, 0] == 0:
            continue
        stopped = path[r, accepted[r]]
        for node in range(run):
            if parent[at, node] == stopped:
                missed[at] += 1
                break
        steps[at] += 1
        committed[at] += accepted[r] + 1


@njit
def _copy(source, to, size):
    at_address(to, size)[:] = at_address(source, size)
