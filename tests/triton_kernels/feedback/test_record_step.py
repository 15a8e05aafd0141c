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
    if isinstance(found, SlabTensors | VerifiedTrees):
        return type(found)(*(on(device, each) for each in found))
    if isinstance(found, tuple):
        return tuple(on(device, each) for each in found)
    if isinstance(found, StepToRecord):
        return type(found)(*(on(device, getattr(found, f.name)) for f in fields(found)))
    return found


def same(mine: SlabTensors, theirs: SlabTensors) -> None:
    for name, one, other in zip(SlabTensors._fields, mine, theirs):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other), name


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
def test_torch_records_row_after_row(shape):
    slabs, rows, hidden, slots, requests, nodes = shape
    made = some_slabs(1, slabs, rows, hidden, slots, torch.float32)
    step = some_step(1, made, requests, nodes, spread=True)
    wanted = plainly(made, step)
    record_step.reference(made, step)
    same(made, wanted)


@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.bfloat16, False), (torch.float32, True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch_does(forms, dtype, shape, spread):
    slabs, rows, hidden, slots, requests, nodes = shape
    for seed in range(2):
        made = some_slabs(seed, slabs, rows, hidden, slots, dtype)
        step = some_step(seed, made, requests, nodes, spread=spread, fillers=seed)
        mine = on(forms.device, made)
        forms.load("record_step").record_step_triton(mine, on(forms.device, step))
        record_step.reference(made, step)
        same(mine, made)
