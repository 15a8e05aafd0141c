"""Triton on a machine without a GPU: its interpreter, behind a backend that answers to "cpu".

vLLM's CPU build wants a backend of that name. The entry point group `triton.backends` would
register it in every process of the environment.
"""

from __future__ import annotations

import importlib
import os
import sys


def enable() -> None:
    """Register the backend and switch the interpreter on, before any `@triton.jit` is seen."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.backends import Backend, backends
        from triton.backends.compiler import BaseBackend
        from triton.backends.driver import DriverBase
    except ImportError:
        return  # vLLM says itself that Model Runner V2 needs Triton

    # Abstract classes will do: the interpreter runs before any compiler or driver is asked.
    backends.setdefault("cpu", Backend(compiler=BaseBackend, driver=DriverBase))
    # Interpret `tl.max` and its like, too: vLLM loads them before any plugin.
    language = sys.modules.get("triton.language")
    if language is None:
        return
    for name in ("standard", "random"):
        module = importlib.import_module(f"triton.language.{name}")
        before = {key: value for key, value in vars(module).items() if not key.startswith("__")}
        importlib.reload(module)
        for key, value in before.items():
            if getattr(language, key, None) is value:
                setattr(language, key, getattr(module, key))
