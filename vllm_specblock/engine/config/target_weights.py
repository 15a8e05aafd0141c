"""Checks of quantised targets."""

from __future__ import annotations

import logging

import torch
from vllm.config import ModelConfig

from vllm_specblock.config import OptionError

logger = logging.getLogger("vllm.specblock")


def check_quantization(target: ModelConfig) -> None:
    """Refuse targets in float8 or 4 bits if vLLM has no kernel for them on this CPU.

    vLLM itself fails only after loading. A target that rounds activations gets a warning.

    Raises:
        OptionError: float8 without AMX tiles, or 4 bits without AVX-512.
    """
    from vllm.platforms import CpuArchEnum, current_platform

    said = getattr(target.hf_config, "quantization_config", None) or {}
    groups = said.get("config_groups", {}).values()
    if any(group.get("input_activations") for group in groups):
        logger.warning(
            "The target rounds activations: by a sum's last bit, a token may be another than in "
            "plain decoding."
        )
    if not current_platform.is_cpu() or torch.cpu._is_amx_tile_supported():
        return
    weights = [group.get("weights") or {} for group in groups]
    if target.quantization in ("fp8", "fbgemm_fp8") or any(
        (each.get("type"), each.get("num_bits")) == ("float", 8) for each in weights
    ):
        raise OptionError(
            f"The target {target.model!r} has weights in float8, which vLLM multiplies by on CPUs "
            "with AMX tiles only, and this one has none: take the target in 4 bits (AWQ, GPTQ, "
            "compressed-tensors), in int8, or as it was."
        )
    has_kernel = (
        current_platform.get_cpu_architecture() != CpuArchEnum.X86
        or torch.cpu._is_avx512_supported()
    )
    four = 4 in (said.get("bits"), *(each.get("num_bits") for each in weights))
    if four and not has_kernel:
        raise OptionError(
            f"The target {target.model!r} has weights in 4 bits, which vLLM multiplies by on CPUs "
            "with AVX-512 only, and this one has none: take the target in int8 or as it was."
        )
