"""Replacements of Model Runner V2's kernels on a CPU.

Triton's interpreter would run them at 10 to 100 times the cost of a whole step of a small model. A
replacement takes those of its kernel's arguments that it reads, by the kernel's names without
`_ptr`, and writes what the kernel writes. All tensors are in host memory: `.tolist()` is free.
Runs with and without SpecBlock use the same replacements, so exactness does not depend on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from vllm_specblock.triton_kernels.optional_numba import njit

Function = Callable[..., Any]

REPLACED: dict[str, tuple[Function, bool]] = {}
"""Kernel → its replacement, and whether that takes arrays."""


def replaces_kernel(path: str, compiled: bool = False) -> Callable[[Function], Function]:
    """Decorate the replacement of a kernel.

    Args:
        path: of the kernel, in `vllm.v1.worker.gpu`.
        compiled: Numba compiles the function, and it takes arrays in place of tensors.
    """

    def decorate(function: Function) -> Function:
        function = njit(function) if compiled else function
        REPLACED[f"vllm.v1.worker.gpu.{path}"] = function, compiled
        return function

    return decorate


def overrides() -> dict[str, Function]:
    """Return what takes the arguments of each kernel, for vLLM's `register_kernels`."""
    return {path: _launcher(path, *replacement) for path, replacement in REPLACED.items()}


def _launcher(path: str, function: Function, compiled: bool) -> Function:
    module, _, kernel = path.rpartition(".")
    names = [name.removesuffix("_ptr") for name in getattr(import_module(module), kernel).arg_names]
    wanted = list(inspect.signature(function).parameters)

    def launch(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args)) | kwargs
        values = [given[name] for name in wanted]
        if compiled:
            values = [x.numpy() if isinstance(x, torch.Tensor) else x for x in values]
        function(*values)

    return launch
