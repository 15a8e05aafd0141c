"""Linear layers in one launch: the layer-wise shift (Eq. 3 of the SpecBlock paper), and 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize
from vllm_specblock.triton_kernels.layers.layer_shift import layer_shift, shift

SHIFTED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHORT = SHIFTED | {torch.float32: 1e-4}


# ---- Layer-wise shift ----
def shift_inputs(rows, block_len, size, dtype=torch.float32, device="cpu"):
    torch.manual_seed(rows + block_len + size)
    hidden = torch.randn(rows, block_len, size).to(device, dtype)
    weight = (torch.randn(size, 2 * size) / size**0.5).to(device, dtype)
    return hidden, weight


def layers(size, device="cpu"):
    return nn.Linear(2 * size, size, bias=False).to(device), nn.RMSNorm(size, 1e-2).to(device)


def test_the_shift_is_equation_3():
    (hidden, _), (linear, norm) = shift_inputs(3, 4, 6), layers(6)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    shifted, normed = layer_shift(hidden, linear, norm)
    torch.testing.assert_close(normed, norm(shifted))
    for t in range(3):
        for k in range(4):
            pair = torch.cat([hidden[t, k], hidden[t, max(k - 1, 0)]])
            torch.testing.assert_close(shifted[t, k], linear(pair))


@pytest.mark.parametrize("dtype", SHIFTED, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (1, 5, 64), (3, 4, 40), (9, 7, 33), (45, 3, 136)], ids=str
)
def test_shift_matches_reference(kernels, shape, dtype):
    hidden, weight = shift_inputs(*shape, dtype, kernels.device)
    got = kernels.load("layer_shift").layer_shift_triton(hidden, weight)
    wanted = shift.reference(hidden.float(), weight.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, atol=SHIFTED[dtype], rtol=SHIFTED[dtype])


def test_shift_of_strided_hidden_and_no_rows(kernels):
    launch = kernels.load("layer_shift").layer_shift_triton
    hidden, weight = shift_inputs(6, 4, 24, device=kernels.device)
    every_other = hidden[::2]
    torch.testing.assert_close(launch(every_other, weight), shift.reference(every_other, weight))
    assert launch(hidden[:0], weight).shape == (0, 4, 24)


def test_a_shift_with_a_needed_gradient_takes_the_reference(kernels):
    # On CUDA the kernel has no backward: the result must still carry a graph.
    given = shift_inputs(2, 3, 16, device=kernels.device)[0], *layers(16, kernels.device)
    assert all(x.requires_grad for x in layer_shift(*given))
    with torch.no_grad():
        assert not any(x.requires_grad for x in layer_shift(*given))


# ---- Weights in 8 bits: what is lost by rounding them, and nothing by the kernel ----
def inputs(rows, out_size, in_size, dtype=torch.float32, device="cpu"):
    torch.manual_seed(rows + out_size + in_size)
    x = torch.randn(rows, in_size).to(device, dtype)
    # Rows of very different size: one scale for all of them would lose the small ones.
    weight = torch.randn(out_size, in_size) * torch.logspace(-4, 1, out_size)[:, None]
    return x, (weight / in_size**0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
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
def test_short_weights_match_reference(kernels, shape, dtype, summed):
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
        got.float() / size, wanted / size, atol=SHORT[dtype], rtol=SHORT[dtype]
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


def test_short_weights_by_any_leading_shape_strides_and_no_rows(kernels):
    launch = kernels.load("fp8_linear").fp8_linear_triton
    x, weight = inputs(24, 20, 48, device=kernels.device)
    short, scale = quantize(weight)
    blocks = x.view(2, 3, 4, 48)[:, ::2]
    got, wanted = launch(blocks, short, scale), fp8_linear.reference(blocks, short, scale)
    assert got.shape == (2, 2, 4, 20)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
    assert launch(x[:0], short, scale).shape == (0, 20)
