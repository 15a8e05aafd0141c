"""Starting again on a CPU: what vLLM has compiled is read from disk, and not compiled anew.

vLLM keeps the compiled model, and then cannot load it on a CPU: it asks what it has loaded to
`finalize_loading`, as its own backend's artifacts can. A CPU compiles with `DYNAMO_TRACE_ONCE`
through Inductor, whose artifact is a plain function, with nothing to finalise. So every start took
a minute more than it has to.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_specblock.engine.patches import Function, patch


def install() -> None:
    """Let such artifacts be loaded; idempotent."""

    def make(original: Function) -> Function:
        def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
            return finalisable(original(*args, **kwargs))

        return load_compiled_function

    patch(torch.compiler, "load_compiled_function", make)


def finalisable(loaded: Any) -> Any:
    """A loaded artifact whose function vLLM can ask to `finalize_loading`."""
    compiled = loaded._artifacts.compiled_fn
    if not hasattr(compiled, "finalize_loading"):
        compiled.finalize_loading = _nothing_to_finalise
    return loaded


def _nothing_to_finalise(config: VllmConfig) -> None:
    """All of it was loaded already."""
