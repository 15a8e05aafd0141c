"""The gate of an MLP in one launch, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from vllm_specblock.triton_kernels.layers.silu_mul import silu_mul_reference

# The interpreter truncates where it should round to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def both_of(*shape, dtype=torch.float32, device="cpu"):
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * 4).to(device, dtype)


def test_reference_is_the_formula():
    both = both_of(3, 2, 10)
    gate, up = both[..., :5].clone(), both[..., 5:].clone()
    torch.testing.assert_close(silu_mul_reference(both), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 4, 80), (5, 2 * 1025), (0, 8)], ids=str)
def test_as_torch_gates(kernels, shape, dtype):
    both = both_of(*shape, dtype=dtype, device=kernels.device)
    before = both.clone()
    got = kernels.load("silu_mul").silu_mul_triton(both)
    assert torch.equal(both, before) and got.dtype == dtype
    wanted = silu_mul_reference(both)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_strided_rows_and_far_numbers(kernels):
    wide = both_of(4, 3, 48, device=kernels.device)
    wide[0, 0, :4] = torch.tensor([-200.0, 200.0, 0.0, -1e-30])
    got = kernels.load("silu_mul").silu_mul_triton(wide[:, 0, :32])
    torch.testing.assert_close(got, silu_mul_reference(wide[:, 0, :32].clone()))
