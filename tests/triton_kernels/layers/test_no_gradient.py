"""Kernels stand in for torch on CUDA alone, for one dtype, and where no gradient is needed."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm_specblock.triton_kernels.layers.no_gradient import runs_kernel


def test_when_a_kernel_runs():
    with FakeTensorMode():  # nothing is computed, so no GPU is needed
        state, weight = torch.empty(2, 4, device="cuda"), torch.empty(4, device="cuda")
        assert runs_kernel(state, weight)
        assert not runs_kernel(state, weight.bfloat16())
        assert not runs_kernel(torch.empty(2, 4), torch.empty(4))
        assert not runs_kernel(state, torch.empty(4))
        weight.requires_grad_()
        assert not runs_kernel(state, weight)
        with torch.no_grad():
            assert runs_kernel(state, weight)
