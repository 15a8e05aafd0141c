"""Optional Numba: compiled CPU loops instead of dozens of small torch calls.

vLLM's CPU build installs it; training does not need it. A kernel's CPU form is in
`<kernel>_numba.py`, and the dispatching code checks `AVAILABLE`.

Machine code is cached beside the source or in the user's cache directory; if neither is writable,
every process compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

try:
    import numba
except ImportError:  # the torch references do without
    numba = None

AVAILABLE = numba is not None


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`numba.njit` with a cache if possible; without Numba a plain function.

    A function may call others of its folder, and of no other folder of ours.
    """
    if function is None:
        return lambda function: njit(function, **options)
    if numba is None:
        return function
    folder = Path(function.__code__.co_filename).parent
    changed = sum(each.stat().st_mtime_ns for each in folder.glob("*.py"))
    try:
        compiled = numba.njit(cache=True, nogil=True, **options)(function)
        # numba itself would notice a change of the function's own file only.
        file = compiled._cache._cache_file
        file._source_stamp = *file._source_stamp, changed
        return compiled
    except (RuntimeError, AttributeError):  # no place to write to, or another numba
        return numba.njit(nogil=True, **options)(function)


def takes(tensor: torch.Tensor) -> bool:
    """Return whether a compiled loop can run on a tensor and others like it.

    It must be in host memory, and no mode may intercept torch calls (fake tensors, recordings,
    tests for host reads).
    """
    return AVAILABLE and tensor.device.type == "cpu" and _get_current_dispatch_mode() is None
