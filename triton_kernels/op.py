"""Ops: a reference in torch or numpy, and a Triton kernel launcher, with one signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from .optional_numba import takes

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A function that has a kernel or a compiled loop.

    The first tensor argument decides: on CUDA the kernel runs, elsewhere the loop or the reference.
    The reference also runs if a gradient is needed, and where there is no kernel.

    Attributes:
        reference: in torch, for any device, or for host memory in numpy or as a loop.
        loop: compiled loop for CPUs, registered in `cpu/loops.py`; None: the reference runs.
    """

    def __init__(self, reference: Callable[P, R], kernel: Callable[P, R] | None = None) -> None:
        update_wrapper(self, reference)
        self.reference, self.kernel = reference, kernel or reference
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
    """Decorate the reference of a kernel's launcher."""
    return lambda reference: Op(reference, kernel)


def views(given: Iterable[Any]) -> Any:
    """Return numpy views of the tensors in `given`, as a list or in the same NamedTuple.

    References run in every step of a CPU, where a numpy call takes a third of a torch call's time.
    """
    make = getattr(given, "_make", list)
    return make([x.numpy() if isinstance(x, torch.Tensor) else x for x in given])  # a host tensor


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
