"""What we ask of vLLM on a CPU. Kernels: test_kernels.py, and tests/triton_kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_specblock.engine.patches import PATCHES, load_compiled_models

if torch.cuda.is_available():
    pytest.skip("of vLLM's CPU build", allow_module_level=True)

from vllm.v1.attention.backends import cpu_attn

from vllm_specblock.cpu import attention

KV_HEADS, SIZE, BLOCK = 2, 64, 32


def test_tile_registers_are_requested(monkeypatch):
    """A drafter without weights runs no kernel of ours that would, and vLLM's does not."""
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")
    packing = SimpleNamespace(head_stride=2 * BLOCK * SIZE)
    monkeypatch.setattr(attention, "packing_on_cpu", lambda *_: packing)
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    attention.packed_cache(cache, "auto")
    assert asked


def test_a_compiled_model_that_vllm_has_kept_can_be_loaded(monkeypatch):
    def load(path):
        return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=lambda text: text + path))

    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    label = "torch.compiler.load_compiled_function"
    kept = dict(PATCHES)
    PATCHES.pop(label, None)
    load_compiled_models()
    loaded = torch.compiler.load_compiled_function("!")
    assert loaded._artifacts.compiled_fn("a") == "a!"
    loaded._artifacts.compiled_fn.finalize_loading(None)
    PATCHES.clear()
    PATCHES.update(kept)
