"""The norm's loop for CPUs against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.layers.rms_norm_numba import rms_norm_numba

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # bf16: one step of 2^-8, of sums apart


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.no_grad()
def test_norm(dtype):
    x, norm = torch.randn(3, 4, 72, dtype=dtype), nn.RMSNorm(72, 1e-2).to(dtype)
    norm.weight.uniform_(0.5, 2.0)
    x[1, 2] = 0
    found = rms_norm_numba(x, norm.weight, norm.eps)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(found, norm(x), atol=near, rtol=near)
    assert not found[1, 2].any()
