"""Numba when it is installed: compiled loops, for CPUs, in place of dozens of small torch calls.

vLLM's CPU build brings it along; training and the tests of the references do without. A kernel's
CPU form stands in `<kernel>_numba.py`, and the dispatching code checks `AVAILABLE`.

Machine code is cached beside the source, or in the user's cache directory where that cannot be
written; where neither can, it is compiled anew in every process. The cache knows only the file in
which a function stands: what a function calls must stand in the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

try:
    import numba
except ImportError:  # the torch references do without
    numba = None

AVAILABLE = numba is not None


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`numba.njit` that keeps its machine code where it can; without Numba a plain function."""
    if function is None:
        return lambda function: njit(function, **options)
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no place to write to
        return numba.njit(nogil=True, **options)(function)


def takes(tensor: torch.Tensor) -> bool:
    """Whether a compiled loop may have a tensor, and those beside it.

    It has to lie in host memory, and no mode may intercept torch's calls: fake tensors, recordings
    and the tests that look for host reads see those calls alone.
    """
    return AVAILABLE and tensor.device.type == "cpu" and _get_current_dispatch_mode() is None


if AVAILABLE:
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def _pointer(typing_context, address):
        """An address as a pointer to nothing in particular."""

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return numba.types.voidptr(address), generate

    @numba.njit(inline="always")
    def at_address(address, count):
        """The `count` bytes from there on, in compiled code only."""
        return numba.carray(_pointer(address), (count,), np.uint8)
else:
    at_address = None
