"""Recording a step in one launch is what torch does of it."""

from __future__ import annotations

import pytest
import torch
from support.recorded_rows import some_slabs, some_step
from support.tensors import assert_equal, on
from vllm_specblock.triton_kernels.feedback.record_step import record_step

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
        assert_equal(mine, made)
