"""Optional Triton: a stub lets kernel modules be imported without it.

Without Triton only the torch references run. Kernels list numbers that change between steps in
`do_not_specialize`: otherwise serving recompiles them for each value that is 1 or a multiple of 16.
Triton applies that to parameters only, not to members of a NamedTuple.

Kernels take related arguments as one NamedTuple, at no cost. In Triton 3.7 a member of a constant
is a plain number, which `tl.static_range` and `tl.zeros` refuse: assign it to a `tl.constexpr`, or
use `tl.full`.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["cdiv", "constexpr_function", "jit", "larger", "next_power_of_2", "strides_of", "tl"]

Tensors = TypeVar("Tensors", bound=tuple[Any, ...])

try:
    import triton
    import triton.language as tl

    constexpr_function, jit = triton.constexpr_function, triton.jit
except ImportError:  # the references do without
    triton = tl = None

    def jit(kernel: Any = None, **options: Any) -> Any:
        """Return `kernel` unchanged: it is never launched without Triton."""
        return kernel if kernel is not None else lambda kernel: kernel

    constexpr_function = jit


def strides_of(tensors: Tensors) -> Tensors:
    """Return a NamedTuple of tensors with their first strides in their places; 0 for None."""
    strides = [0 if x is None else x.stride(0) for x in tensors]
    return type(tensors)._make(strides)  # type: ignore[attr-defined]


def cdiv(x: int, y: int) -> int:
    """ceil(x / y)."""
    return -(-x // y)


@constexpr_function
def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for n >= 1; also in kernels, of constants."""
    return 1 << (n - 1).bit_length()


@jit
def larger(a, b):
    """Return the larger one, for scans."""
    return tl.maximum(a, b)
