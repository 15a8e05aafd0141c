"""A compiled model that vLLM has kept can be loaded on a CPU, too."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from vllm.compilation import decorators

from vllm_specblock.cpu import compile_cache
from vllm_specblock.engine.patches import PATCHES


def artifact(function) -> SimpleNamespace:
    return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))


def test_a_plain_function_has_nothing_to_finalise():
    loaded = artifact(lambda x: x + 1)
    assert compile_cache.finalisable(loaded) is loaded
    assert loaded._artifacts.compiled_fn.finalize_loading(None) is None
    assert loaded._artifacts.compiled_fn(1) == 2


def test_who_can_is_asked():
    class Artifact:
        def finalize_loading(self, config):
            return "done"

    loaded = compile_cache.finalisable(artifact(Artifact()))
    assert loaded._artifacts.compiled_fn.finalize_loading(None) == "done"


def test_what_vllm_loads_goes_through_it(monkeypatch):
    """Whoever loads asks torch by the name that is replaced, and then for `finalize_loading`."""
    source = inspect.getsource(decorators._try_load_aot_compiled_fn)
    assert "torch.compiler.load_compiled_function(" in source
    assert "._artifacts.compiled_fn.finalize_loading(" in source
    monkeypatch.setattr(
        torch.compiler, "load_compiled_function", lambda path: artifact(lambda text: text + path)
    )
    label = "torch.compiler.load_compiled_function"
    kept = dict(PATCHES)
    PATCHES.pop(label, None)
    compile_cache.install()
    loaded = torch.compiler.load_compiled_function("!")
    assert loaded._artifacts.compiled_fn("a") == "a!"
    loaded._artifacts.compiled_fn.finalize_loading(None)
    PATCHES.clear()
    PATCHES.update(kept)
