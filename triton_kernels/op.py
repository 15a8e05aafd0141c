"""Ops: a torch reference and a Triton kernel launcher with one signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from .optional_numba import takes

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A torch function that has a kernel.

    The first tensor argument decides: on CUDA the kernel runs, elsewhere torch. torch also runs if
    a gradient is needed.

    Attributes:
        reference: the torch function, on any device, or a loop in its place.
        loop: compiled loop for CPUs, registered in `cpu/loops.py`; None: the reference runs.
    """

    def __init__(self, reference: Callable[P, R], kernel: Callable[P, R]) -> None:
        update_wrapper(self, reference)
        self.reference, self.kernel = reference, kernel
        self.loop: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args, *kwargs.values())
        if torch.is_grad_enabled() and any(map(_needs_gradient, given)):
            return self.reference(*args, **kwargs)
        where = _first_tensor(given[0])
        if where.is_cuda:
            return self.kernel(*args, **kwargs)
        if self.loop is not None and takes(where):
            return self.loop(*args, **kwargs)
        return self.reference(*args, **kwargs)


def op(kernel: Callable[P, R]) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorate the torch reference of a kernel's launcher."""
    return lambda reference: Op(reference, kernel)


def _needs_gradient(x: object) -> bool:
    if isinstance(x, nn.Module):
        return any(parameter.requires_grad for parameter in x.parameters())
    return isinstance(x, torch.Tensor) and x.requires_grad


def _first_tensor(x: Any) -> torch.Tensor:
    """Return the first tensor of a tensor, a sequence or an object with attributes."""
    while not isinstance(x, torch.Tensor):
        parts = x if isinstance(x, tuple | list) else vars(x).values()
        x = next(part for part in parts if isinstance(part, torch.Tensor) or part)
    return x
