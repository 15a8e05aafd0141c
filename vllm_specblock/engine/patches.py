"""Patches of vLLM: each callable once, with the original kept.

Only what vLLM has no registry for is patched (docs/architecture.md lists it, with reasons). Calls
that do not concern SpecBlock go to the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Function = Callable[..., Any]

PATCHES: dict[str, Function] = {}
"""Patched name → the original callable."""


def patch(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace `owner.name` by `make(original)`, once."""
    label = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if label in PATCHES:
        return
    static = inspect.getattr_static(owner, name)
    original: Any = static.fget if isinstance(static, property) else getattr(owner, name)
    PATCHES[label] = original
    replacement: Any = wraps(original)(make(original))
    if isinstance(static, classmethod | property):
        replacement = type(static)(replacement)
    setattr(owner, name, replacement)


def replaces(owner: Any, name: str) -> Callable[[Function], Function]:
    """Decorate the function that replaces `owner.name`, once; its first argument is the original.

    Each call costs one more than with `patch`, which is for what runs in every step.
    """

    def decorate(function: Function) -> Function:
        patch(owner, name, lambda given: lambda *args, **more: function(given, *args, **more))
        return function

    return decorate


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
