"""Targets of fewer bits on a CPU are verified as trees: in 4 bits the tokens are vLLM's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import TARGET, make_engine
from support.matrix import PROMPTS, params
from support.targets import edit_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="other kernels on a GPU")

GROUP = 32  # inputs that share a scale, of 4-bit weights
Tensors = dict[str, torch.Tensor]


def _pack(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """4-bit numbers, eight in an int32 along the last dimension: place i has number order[i]."""
    eights = numbers.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    packed = (eights << 4 * torch.arange(8)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] → numbers around 8, of the same shape, and scales [out, in / GROUP]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).half().float()
    return ((groups / scale[..., None]).round().clamp(-8, 7) + 8).flatten(-2), scale


def _awq(weight: torch.Tensor) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    number, scale = _four_bits(weight)
    zero = torch.full_like(scale.T, 8)
    return {"qweight": _pack(number.T, order), "qzeros": _pack(zero, order), "scales": scale.T}


def _gptq(weight: torch.Tensor) -> Tensors:
    number, scale = _four_bits(weight)
    return {
        "qweight": _pack(number).T,
        "qzeros": _pack(torch.full_like(scale.T, 7)),  # one less than it is
        "scales": scale.T,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _int4(weight: torch.Tensor) -> Tensors:
    number, scale = _four_bits(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _pack(number), "weight_scale": scale, "weight_shape": shape}


def _int8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _compressed(form: str, **group: dict) -> dict:
    """The config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    }


WHOLE = {"type": "int", "symmetric": True}
GROUPS = WHOLE | {"num_bits": 4, "strategy": "group", "group_size": GROUP}
CHANNELS = WHOLE | {"num_bits": 8, "strategy": "channel"}
TOKENS = WHOLE | {"num_bits": 8, "strategy": "token", "dynamic": True}
FOUR = {"bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "zero_point": True, "version": "gemm", **FOUR}
GPTQ = {"quant_method": "gptq", "sym": True, "desc_act": False, **FOUR}
FORMS = {
    "weights in 4 bits, AWQ": (_awq, AWQ),
    "weights in 4 bits, GPTQ": (_gptq, GPTQ),
    "weights in 4 bits, compressed-tensors": (_int4, _compressed("pack-quantized", weights=GROUPS)),
}
"""What the support table says of them → how tensors are written, and the config of it."""
# Activations are rounded, too, each row by its own scale.
INT8 = _int8, _compressed("int-quantized", weights=CHANNELS, input_activations=TOKENS)


def write_quantised(folder: Path, quantise: Callable[[torch.Tensor], Tensors], said: dict) -> Path:
    """A copy of the example target whose linear layers are of a form."""
    shutil.copytree(TARGET, folder)
    edit_config(folder, quantization_config=said)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        for part, value in quantise(tensor.float()).items():
            tensors[name.removesuffix("weight") + part] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM multiplies by 4 bits with AVX-512"
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_are_vllms_own(form, tmp_path):
    """In half precision, the longer one of the two that vLLM has for these formats."""
    target = write_quantised(tmp_path / "target", *form)
    plain, ours = (
        make_engine(speculative, model=str(target), dtype="float16")
        for speculative in (None, {"num_speculative_tokens": 16})
    )
    for temperature in (0.0, 1.0):
        requests = params(4, temperature=temperature, max_tokens=40)
        assert ours.generate(PROMPTS[:4], requests) == plain.generate(PROMPTS[:4], requests)
    accepted = ours.speculator.counters.as_dict()["accepted_nodes", 1]
    assert accepted > 40, "hardly a draft was right"


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX, vLLM's int8 kernel takes no float32"
)
def test_int8_answers_leave_vllms_where_two_tokens_are_close(tmp_path):
    """Activations are rounded to 8 bits, by sums that a tree adds up in another order."""
    target = write_quantised(tmp_path / "target", *INT8)
    plain, ours = (
        make_engine(speculative, model=str(target))
        for speculative in (None, {"num_speculative_tokens": 16})
    )
    requests = params(logprobs=2)
    gaps = []
    for (mine,), (other,) in zip(
        ours.generate(PROMPTS, requests), plain.generate(PROMPTS, requests)
    ):
        places = zip(mine.tokens, other.tokens, other.logprobs)
        left = next((both for a, b, both in places if a != b), None)
        if left is not None:
            best, second, *_ = sorted((value for value, _ in left.values()), reverse=True)
            gaps.append(best - second)
    assert ours.speculator.counters.as_dict()["accepted_nodes", 1] > 100
    # Of a chain and a tree most answers are the same ones to the end.
    assert len(gaps) <= len(PROMPTS) // 2 and all(gap < 0.1 for gap in gaps), gaps
