"""Recording a step in one launch, or in one loop, is what torch does of it, row after row."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
from support.recorded_rows import some_slabs, some_step
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors, StepToRecord

from vllm_specblock.feedback.verified_trees import VerifiedTrees


def on(device: torch.device, found):
    """Tensors of a dataclass on a device, strides as they are."""
    if isinstance(found, torch.Tensor):
        there = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=device)
        return there.copy_(found)
    if isinstance(found, tuple):
        return tuple(on(device, each) for each in found)
    if isinstance(found, SlabTensors | StepToRecord | VerifiedTrees):
        return type(found)(*(on(device, getattr(found, f.name)) for f in fields(found)))
    return found


def same(mine: SlabTensors, theirs: SlabTensors) -> None:
    for field in fields(SlabTensors):
        one, other = getattr(mine, field.name).cpu(), getattr(theirs, field.name)
        assert one.dtype == other.dtype and torch.equal(one, other), field.name


def plainly(slabs: SlabTensors, step: StepToRecord) -> SlabTensors:
    """One row after the other."""
    slabs, (_, width) = copy.deepcopy(slabs), slabs.token.shape
    result = step.result
    for t, request in enumerate(step.request.tolist()):
        slab = int(slabs.of_slot[result.req_idx[request]])
        place = int(step.position[t] - slabs.begin[slab])
        if slab < 0 or step.cache_slot[t] < 0 or not 0 <= place < width:
            continue
        row = step.source[t]
        slabs.states[slab, place] = torch.cat([state[row] for state in step.states])
        slabs.last[slab, place] = step.last[row]
        slabs.token[slab, place] = step.token[t]
        slabs.end[slab] = max(int(slabs.end[slab]), int(step.position[t]) + 1)
    for request, slot in enumerate(result.req_idx.tolist()):
        slab, accepted = int(slabs.of_slot[slot]), int(result.accepted[request])
        newest = int(step.position[step.newest[request]]) + 1
        if slab >= 0 and newest > slabs.begin[slab] + width:  # rows beyond the slab
            slabs.end[slab] = slabs.begin[slab] + width
        run = int(result.num_run[request])
        if slab < 0 or not run or not result.origin[slot, 0]:
            continue
        end = int(result.path[request, accepted])
        slabs.missed[slot] += end in step.parent[slot, :run].tolist()
        slabs.steps[slot] += 1
        slabs.committed[slot] += accepted + 1
    return slabs


SHAPES = [
    # slabs, rows of each, Ht, slots, requests, nodes
    (1, 5, 1, 3, 1, 1),
    (4, 9, 7, 7, 6, 12),
    (3, 33, 96, 6, 4, 60),
    (5, 16, 1030, 9, 8, 3),
    (16, 64, 24, 40, 37, 256),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("spread", "seed"), [(False, 0), (True, 1)], ids=["plain", "strided"])
def test_torch_records_row_after_row(shape, spread, seed):
    slabs, rows, hidden, slots, requests, nodes = shape
    made = some_slabs(seed, slabs, rows, hidden, slots, torch.float32)
    step = some_step(seed, made, requests, nodes, spread=spread)
    wanted = plainly(made, step)
    record_step.reference(made, step)
    same(made, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "strided"])
def test_as_torch_does(forms, dtype, shape, spread):
    slabs, rows, hidden, slots, requests, nodes = shape
    for seed in range(3):
        made = some_slabs(seed, slabs, rows, hidden, slots, dtype)
        step = some_step(seed, made, requests, nodes, spread=spread, fillers=seed)
        mine = on(forms.device, made)
        forms.load("record_step").record_step_triton(mine, on(forms.device, step))
        record_step.reference(made, step)
        same(mine, made)


def test_a_repeated_row_is_written_once_more(forms):
    """A step that is repeated leaves the same rows; only sums grow."""
    made = some_slabs(1, 4, 20, 8, 9, torch.float32)
    step = some_step(1, made, 8)
    record_step.reference(made, step)
    mine = on(forms.device, made)
    forms.load("record_step").record_step_triton(mine, on(forms.device, step))
    for name in ("states", "last", "token", "end"):
        assert torch.equal(getattr(mine, name).cpu(), getattr(made, name)), name


def test_nobody_is_recorded(forms):
    made = some_slabs(2, 3, 12, 8, 9, torch.float32)
    made.of_slot.fill_(-1)
    step = some_step(2, made, 8)
    mine = on(forms.device, made)
    forms.load("record_step").record_step_triton(mine, on(forms.device, step))
    same(mine, made)
    record_step.reference(mine_cpu := on(torch.device("cpu"), made), step)
    same(mine_cpu, made)
