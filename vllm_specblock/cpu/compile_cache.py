"""vLLM's cache of compiled models on a CPU.

vLLM stores the compiled model, but cannot load it on a CPU: it calls `finalize_loading`, which
Inductor's plain function lacks. Each start would then compile for a minute.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_specblock.engine.patches import Function, replaces


def install() -> None:
    """Add a no-op `finalize_loading` to loaded functions. Idempotent."""

    @replaces(torch.compiler, "load_compiled_function")
    def load_compiled_function(original: Function, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda config: None
        return loaded
