"""Replacements of Model Runner V2's kernels on a CPU.

In Triton's interpreter they would cost 10 to 100 steps of a small model. A replacement declares the
kernel arguments that it reads, without the suffix `_ptr`, and writes what the kernel writes. All
tensors are in host memory, so `.tolist()` is free. Runs with and without SpecBlock use the same
replacements, so exactness does not depend on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_specblock.triton_kernels.op import views
from vllm_specblock.triton_kernels.optional_numba import njit

Function = Callable[..., Any]

REPLACED: dict[str, tuple[Function, bool]] = {}
"""Kernel → its replacement, and whether it takes numpy arrays."""


def replaces_kernel(path: str, compiled: bool = False) -> Callable[[Function], Function]:
    """Decorate the replacement of a kernel.

    Args:
        path: the kernel, in `vllm.v1.worker`.
        compiled: compile the function with Numba; it takes numpy arrays.
    """

    def decorate(function: Function) -> Function:
        function = njit(function) if compiled else function
        REPLACED[f"vllm.v1.worker.{path}"] = function, compiled
        return function

    return decorate


def overrides() -> dict[str, Function]:
    """Return functions with the kernels' arguments, for vLLM's `register_kernels`."""
    return {path: _launcher(path, *replacement) for path, replacement in REPLACED.items()}


def _launcher(path: str, function: Function, compiled: bool) -> Function:
    module, _, kernel = path.rpartition(".")
    names = [name.removesuffix("_ptr") for name in getattr(import_module(module), kernel).arg_names]
    wanted = list(inspect.signature(function).parameters)

    def launch(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args)) | kwargs
        values = [given[name] for name in wanted]
        function(*(views(values) if compiled else values))

    return launch
