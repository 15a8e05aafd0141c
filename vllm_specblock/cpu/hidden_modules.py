"""Modules that vLLM's search for kernels must not see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Hide a package from `sys.modules` within this context.

    vLLM searches every module for copies of a kernel, and fails on the library handle of Numba's
    llvmlite, which resolves any attribute name.
    """
    found = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in found:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(found)
