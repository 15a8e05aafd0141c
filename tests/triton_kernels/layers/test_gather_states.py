"""Rows of several layers side by side, in one launch, as torch gathers and joins them."""

from __future__ import annotations

import pytest
import torch


def some_states(layers: int, rows: int, size: int, dtype: torch.dtype, device) -> list:
    torch.manual_seed(layers + size)
    return [torch.randn(rows, size).to(device, dtype) for _ in range(layers)]


def joined(states, source):
    return torch.cat([state[source] for state in states], dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# More columns than a program's, more layers than a launch's.
@pytest.mark.parametrize(("layers", "size"), [(1, 8), (2, 1), (3, 96), (3, 2050), (8, 33), (17, 5)])
def test_as_torch_gathers(kernels, layers, size, dtype):
    gather = kernels.load("gather_states").gather_states_triton
    states = some_states(layers, 9, size, dtype, kernels.device)
    source = torch.tensor([8, 0, 3, 3, 7], device=kernels.device)
    found = gather(states, source)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found, joined(states, source))


def test_a_part_of_a_batch(kernels):
    """States that are the front of a buffer, and rows from the midst of a step's."""
    gather = kernels.load("gather_states").gather_states_triton
    buffers = some_states(3, 12, 40, torch.float32, kernels.device)
    whole = torch.randperm(12, device=kernels.device)
    table = torch.full((12, 2), 1 << 40, device=kernels.device)
    table[:, 0] = whole
    for states in ([x[:9] for x in buffers], [x[:, 3:35] for x in buffers]):
        for source in (whole[whole < 9][2:5], table[:, 0][whole < 9], whole[:0]):
            assert torch.equal(gather(states, source), joined(states, source))


def test_layers_that_lie_differently(kernels):
    gather = kernels.load("gather_states").gather_states_triton
    states = some_states(3, 6, 7, torch.float32, kernels.device)
    states[1] = states[1].t().contiguous().t()
    states[2] = torch.nn.functional.pad(states[2], (0, 2))[:, :7]
    source = torch.tensor([5, 1], device=kernels.device)
    assert torch.equal(gather(states, source), joined(states, source))
