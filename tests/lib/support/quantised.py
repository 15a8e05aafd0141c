"""The example target with its linear layers in 4 or 8 bits, in the files of the usual formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.engines import TARGET

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
FORMS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict]] = {
    "awq": (_awq, {"quant_method": "awq", "zero_point": True, "version": "gemm", **FOUR}),
    "gptq": (_gptq, {"quant_method": "gptq", "sym": True, "desc_act": False, **FOUR}),
    "int4": (_int4, _compressed("pack-quantized", weights=GROUPS)),
    # Activations are rounded, too, each row by its own scale.
    "int8": (_int8, _compressed("int-quantized", weights=CHANNELS, input_activations=TOKENS)),
}


def write_quantised(folder: Path, form: str) -> Path:
    """A copy of the example target whose linear layers are of one of `FORMS`."""
    quantise, said = FORMS[form]
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        for part, value in quantise(tensor.float()).items():
            tensors[name.removesuffix("weight") + part] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder
