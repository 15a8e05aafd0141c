"""Targets whose weights have fewer bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.platforms import CpuArchEnum, current_platform

from vllm_specblock.config import OptionError
from vllm_specblock.engine.config import validate

X86 = current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.X86
TILES, AVX512 = "torch.cpu._is_amx_tile_supported", "torch.cpu._is_avx512_supported"


def target(quantization=None, **said) -> SimpleNamespace:
    """said: the `quantization_config` of a config.json."""
    config = SimpleNamespace(quantization_config=said) if said else SimpleNamespace()
    return SimpleNamespace(model="some/target", quantization=quantization, hf_config=config)


def compressed(**group) -> SimpleNamespace:
    return target("compressed-tensors", config_groups={"group_0": group})


@pytest.mark.skipif(not X86, reason="of vLLM's CPU build for x86")
@pytest.mark.parametrize(
    ("model", "needs"),
    [
        (target(), ()),
        (target("fp8", quant_method="fp8"), (TILES, AVX512)),
        (target("fp8"), (TILES, AVX512)),  # asked for while a checkpoint of more bits is loaded
        (compressed(weights={"type": "float", "num_bits": 8}), (TILES, AVX512)),
        (compressed(weights={"type": "int", "num_bits": 8}), ()),
        (compressed(weights={"num_bits": 4}), (AVX512,)),
        (target("awq", quant_method="awq", bits=4), (AVX512,)),
        (target("gptq", quant_method="gptq", bits=8), ()),
    ],
)
def test_weights_that_this_cpu_has_no_kernel_for_are_refused(monkeypatch, model, needs):
    for feature in (TILES, AVX512):
        monkeypatch.setattr(feature, lambda: True)
    validate.check_quantization(model)
    for feature in (TILES, AVX512):  # no processor has tiles alone
        monkeypatch.setattr(feature, lambda: False)
        if feature not in needs:
            validate.check_quantization(model)
            continue
        says = "float8 weights.*AMX tiles" if TILES in needs else r"4-bit weights.*AVX-512"
        with pytest.raises(OptionError, match=rf"{says}.*unquantised target\.$"):
            validate.check_quantization(model)


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int"}])
def test_rounded_activations_are_warned_of(monkeypatch, activations):
    warnings = []
    monkeypatch.setattr(validate.logger, "warning", warnings.append)
    weights = {"type": "int", "num_bits": 8}
    validate.check_quantization(compressed(weights=weights, input_activations=activations))
    assert len(warnings) == (activations is not None)
