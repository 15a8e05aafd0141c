"""Weights in 8 bits: what is lost by rounding them, and nothing by the kernel."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(rows, out_size, in_size, dtype=torch.float32, device="cpu"):
    torch.manual_seed(rows + out_size + in_size)
    x = torch.randn(rows, in_size).to(device, dtype)
    # Rows of very different size: one scale for all of them would lose the small ones.
    weight = torch.randn(out_size, in_size) * torch.logspace(-4, 1, out_size)[:, None]
    return x, (weight / in_size**0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_weight_is_within_half_a_step(dtype):
    _, weight = inputs(1, 40, 64, dtype)
    weight[3] = 0
    short, scale = quantize(weight)
    assert short.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    back = short.float() * scale[:, None]
    # Three bits of mantissa: half a step is 1/16 of a value, below the smallest normal a constant.
    step = weight.float().abs() / 16 + scale[:, None] * 2.0**-10
    assert ((back - weight.float()).abs() <= step * 1.001).all()
    assert torch.equal(back[3], torch.zeros(64))
    assert short.float().abs().amax(1)[weight.abs().amax(1) > 0].min() == 448


@pytest.mark.parametrize(
    ("summed", "dtype"),
    [(False, torch.float16), (True, torch.bfloat16), (True, torch.float32)],
    ids=["alone", "onto a sum", "onto a sum, fp32"],
)
@pytest.mark.parametrize(
    "shape", [(1, 32, 256), (3, 40, 72), (17, 33, 528), (64, 16, 16), (70, 130, 200)], ids=str
)
def test_kernel_matches_reference(kernels, shape, dtype, summed):
    x, weight = inputs(*shape, dtype, kernels.device)
    short, scale = quantize(weight)
    residual = torch.randn(shape[:2]).to(kernels.device, dtype) if summed else None
    before = residual.clone() if summed else None
    got = kernels.load("fp8_linear").fp8_linear_triton(x, short, scale, residual)
    wanted = fp8_linear.reference(x.float(), short, scale, residual.float() if summed else None)
    assert got.dtype == dtype and got.shape == shape[:2]
    assert not summed or torch.equal(residual, before)
    # Outputs are as different in size as the rows of the weight.
    size = wanted.abs().amax(0)
    torch.testing.assert_close(
        got.float() / size, wanted / size, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_few_rows_have_the_range_of_float16(kernels):
    """What lies beyond is taken for the largest there is, and does not become infinite."""
    launch = kernels.load("fp8_linear").fp8_linear_triton
    x, weight = inputs(5, 40, 264, torch.bfloat16, kernels.device)
    x[2, 7], x[4, 100] = 2.0**20, -(2.0**17)
    short, scale = quantize(weight)
    got = launch(x, short, scale).float()
    wanted = fp8_linear.reference(x.float().clamp(-65504, 65504), short, scale)
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)
    assert not torch.allclose(wanted, fp8_linear.reference(x.float(), short, scale), rtol=0.1)


def test_any_leading_shape_strides_and_no_rows(kernels):
    launch = kernels.load("fp8_linear").fp8_linear_triton
    x, weight = inputs(24, 20, 48, device=kernels.device)
    short, scale = quantize(weight)
    blocks = x.view(2, 3, 4, 48)[:, ::2]
    got, wanted = launch(blocks, short, scale), fp8_linear.reference(blocks, short, scale)
    assert got.shape == (2, 2, 4, 20)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
    assert launch(x[:0], short, scale).shape == (0, 20)
