"""What `specblock data` asks of vLLM, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm_specblock.engine.offline import target
from vllm_specblock.engine.offline.target import VllmAnswerer


@pytest.mark.parametrize(
    ("cpu", "runner", "engine", "chunked"),
    [
        (True, None, {}, False),
        (True, False, {}, False),
        (True, True, {}, None),
        (False, None, {}, None),
        (True, None, {"enable_chunked_prefill": True}, True),
    ],
)
def test_a_cpus_first_runner_takes_whole_prompts(monkeypatch, cpu, runner, engine, chunked):
    """Else it fails at the first seeded prompt that is cut: its generators cannot be set back."""
    asked = {}
    monkeypatch.setattr(target, "LLM", lambda **settings: asked.update(settings))
    monkeypatch.setattr(type(target.current_platform), "is_cpu", lambda self: cpu)
    monkeypatch.setattr(target.envs, "VLLM_USE_V2_MODEL_RUNNER", runner, raising=False)
    VllmAnswerer(Path("target"), max_length=64, engine=engine)
    assert asked.get("enable_chunked_prefill") == chunked
    assert asked["max_model_len"] == 64
