"""Eq. 3 of the SpecBlock paper: the reference against plain loops, the kernel against it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels.layers.layer_shift import layer_shift, shift

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(rows, block_len, size, dtype=torch.float32, device="cpu"):
    torch.manual_seed(rows + block_len + size)
    hidden = torch.randn(rows, block_len, size).to(device, dtype)
    weight = (torch.randn(size, 2 * size) / size**0.5).to(device, dtype)
    return hidden, weight


def layers(size, device="cpu"):
    return nn.Linear(2 * size, size, bias=False).to(device), nn.RMSNorm(size, 1e-2).to(device)


def test_reference_is_equation_3():
    (hidden, _), (linear, norm) = inputs(3, 4, 6), layers(6)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    shifted, normed = layer_shift(hidden, linear, norm)
    torch.testing.assert_close(normed, norm(shifted))
    for t in range(3):
        for k in range(4):
            pair = torch.cat([hidden[t, k], hidden[t, max(k - 1, 0)]])
            torch.testing.assert_close(shifted[t, k], linear(pair))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 16), (1, 5, 64), (3, 4, 40), (9, 7, 33), (45, 3, 136)],
    ids=str,
)
def test_kernel_matches_reference(kernels, shape, dtype):
    hidden, weight = inputs(*shape, dtype, kernels.device)
    got = kernels.load("layer_shift").layer_shift_triton(hidden, weight)
    wanted = shift.reference(hidden.float(), weight.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_kernel_takes_strided_hidden_and_no_rows(kernels):
    launch = kernels.load("layer_shift").layer_shift_triton
    hidden, weight = inputs(6, 4, 24, device=kernels.device)
    every_other = hidden[::2]
    torch.testing.assert_close(launch(every_other, weight), shift.reference(every_other, weight))
    assert launch(hidden[:0], weight).shape == (0, 4, 24)


def test_a_needed_gradient_takes_the_reference(kernels):
    # On CUDA the kernel has no backward: the result must still carry a graph.
    given = inputs(2, 3, 16, device=kernels.device)[0], *layers(16, kernels.device)
    assert all(x.requires_grad for x in layer_shift(*given))
    with torch.no_grad():
        assert not any(x.requires_grad for x in layer_shift(*given))
