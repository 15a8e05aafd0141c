"""Loading of the compiled models that vLLM has stored."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specblock.engine.patches import Function, replaces


def load_compiled_models() -> None:
    """Let vLLM load the compiled models that it has stored, instead of compiling for minutes.

    It calls `finalize_loading`, which Inductor's function for a CPU lacks.
    """

    @replaces(torch.compiler, "load_compiled_function")
    def load_compiled_function(original: Function, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda config: None
        return loaded
