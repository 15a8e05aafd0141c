"""Recording a step in one launch gives what torch gives."""

from __future__ import annotations

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


SHAPES = [
    # slabs, rows of each, Ht, slots, requests, nodes
    (1, 5, 1, 3, 1, 1),
    (4, 9, 7, 7, 6, 12),
    (3, 33, 96, 6, 4, 60),
    (5, 16, 1030, 9, 8, 3),
    (16, 64, 24, 40, 37, 256),
]


@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.bfloat16, False), (torch.float32, True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch_does(kernels, dtype, shape, spread):
    slabs, rows, hidden, slots, requests, nodes = shape
    for seed in range(2):
        made = some_slabs(seed, slabs, rows, hidden, slots, dtype)
        step = some_step(seed, made, requests, nodes, spread=spread, fillers=seed)
        mine = on(kernels.device, made)
        kernels.load("record_step").record_step_triton(mine, on(kernels.device, step))
        record_step.reference(made, step)
        same(mine, made)
