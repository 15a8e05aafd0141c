"""Targets whose weights have fewer bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.platforms import CpuArchEnum, current_platform

from vllm_specblock.config import OptionError
from vllm_specblock.engine.config import validate

X86 = current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.X86

AMX, AVX512 = "torch.cpu._is_amx_tile_supported", "torch.cpu._is_avx512_supported"


def hold(monkeypatch, lacking: list[str], quantization, said, says: str | None) -> None:
    """A target is taken on a processor that has everything, and refused on one that lacks some."""
    config = SimpleNamespace(quantization_config=said) if said else SimpleNamespace()
    target = SimpleNamespace(model="some/target", quantization=quantization, hf_config=config)
    for feature in (AMX, AVX512):
        monkeypatch.setattr(feature, lambda: True)
    validate.check_quantization(target)
    for feature in lacking:
        monkeypatch.setattr(feature, lambda: False)
    if says is None:
        validate.check_quantization(target)
        return
    with pytest.raises(OptionError, match=says):
        validate.check_quantization(target)


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}


@pytest.mark.parametrize(
    ("quantization", "said", "refused"),
    [
        (None, None, False),
        ("fp8", {"quant_method": "fp8"}, True),
        ("fp8", None, True),  # asked for while a checkpoint of more bits is loaded
        ("awq", {"quant_method": "awq", "bits": 4}, False),
        ("compressed-tensors", {"weights": {"type": "float", "num_bits": 8}}, True),
        ("compressed-tensors", {"weights": {"type": "int", "num_bits": 8}}, False),
    ],
)
@pytest.mark.skipif(not current_platform.is_cpu(), reason="of vLLM's CPU build")
def test_targets_in_float8_want_tiles(monkeypatch, quantization, said, refused):
    if quantization == "compressed-tensors":
        said = COMPRESSED | {"config_groups": {"group_0": said}}
    says = r"float8 weights.*AMX tiles.*unquantised target\.$" if refused else None
    hold(monkeypatch, [AMX], quantization, said, says)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"quant_method": "awq", "bits": 4}, True),
        ({"quant_method": "gptq", "bits": 8}, False),
        (COMPRESSED | {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, True),
        (COMPRESSED | {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, False),
    ],
)
@pytest.mark.skipif(not X86, reason="of vLLM's CPU build for x86")
def test_targets_in_4_bits_want_avx_512(monkeypatch, said, refused):
    says = r"4-bit weights.*AVX-512.*unquantised target\.$" if refused else None
    hold(monkeypatch, [AMX, AVX512], "any", said, says)


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int"}])
def test_rounded_activations_are_warned_of(monkeypatch, activations):
    group = {"weights": {"type": "int", "num_bits": 8}, "input_activations": activations}
    said = COMPRESSED | {"config_groups": {"group_0": group}}
    config = SimpleNamespace(quantization_config=said)
    warnings = []
    monkeypatch.setattr(validate.logger, "warning", warnings.append)
    validate.check_quantization(
        SimpleNamespace(model="some/target", quantization="compressed-tensors", hf_config=config)
    )
    assert len(warnings) == (activations is not None)
