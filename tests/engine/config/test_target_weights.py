"""A warning for targets whose activations are rounded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_specblock.engine.config import validate


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int"}])
def test_rounded_activations_are_warned_of(monkeypatch, activations):
    warnings = []
    monkeypatch.setattr(validate.logger, "warning", warnings.append)
    group = {"weights": {"type": "int", "num_bits": 8}, "input_activations": activations}
    said = {"config_groups": {"group_0": group}}
    validate.warn_of_rounding(SimpleNamespace(hf_config=SimpleNamespace(quantization_config=said)))
    assert len(warnings) == (activations is not None)
