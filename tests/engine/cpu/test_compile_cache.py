"""A compiled model that vLLM has kept can be loaded on a CPU, too."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm_specblock.engine.compile_cache import load_compiled_models
from vllm_specblock.engine.patches import PATCHES


def artifact(function) -> SimpleNamespace:
    return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))


def test_what_vllm_loads_goes_through_it(monkeypatch):
    monkeypatch.setattr(
        torch.compiler, "load_compiled_function", lambda path: artifact(lambda text: text + path)
    )
    label = "torch.compiler.load_compiled_function"
    kept = dict(PATCHES)
    PATCHES.pop(label, None)
    load_compiled_models()
    loaded = torch.compiler.load_compiled_function("!")
    assert loaded._artifacts.compiled_fn("a") == "a!"
    loaded._artifacts.compiled_fn.finalize_loading(None)
    PATCHES.clear()
    PATCHES.update(kept)
