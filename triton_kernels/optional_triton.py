"""Triton when it is installed, and a stand-in that lets the kernel modules be imported without it.

Some CPU installs of torch come without Triton. There only the torch references run, so the
kernels need to be defined, never compiled. Annotations stay strings (`from __future__ import
annotations`), which is why a kernel's `tl.constexpr` does not have to exist at import.

Kernels name the numbers that change from step to step in `do_not_specialize`: otherwise they are
compiled anew, in the midst of serving, for each that is 1 or a multiple of 16. Triton heeds that
for parameters alone, not for what is in a group: what is not to be specialized stays out of groups.

Kernels take what belongs together as one NamedTuple: pointers, strides, or constants where the
parameter is a `tl.constexpr`. It is taken apart when a kernel is compiled, and costs nothing there.
To Triton 3.6 a member of such a constant is a plain number, which `tl.static_range` and functions
of Triton's library that take a list (`tl.zeros`) refuse: name it as a `tl.constexpr`, or `tl.full`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

__all__ = ["cdiv", "group_of", "jit", "next_power_of_2", "tl", "triton"]

Group = TypeVar("Group", bound=NamedTuple)

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    cdiv = triton.cdiv
    next_power_of_2 = triton.next_power_of_2
except ImportError:  # the references do without
    triton = tl = None

    def jit(kernel: Any = None, **options: Any) -> Any:
        """Leave `kernel` a plain function: it is never launched without Triton."""
        return kernel if kernel is not None else lambda kernel: kernel

    def cdiv(x: int, y: int) -> int:
        """ceil(x / y)."""
        return -(-x // y)

    def next_power_of_2(n: int) -> int:
        """The smallest power of two that is >= n, for n >= 1."""
        return 1 << (n - 1).bit_length()


def group_of(kind: type[Group], holder: object) -> Group:
    """A NamedTuple, of two fields or more, of what `holder` has under their names."""
    return kind._make(_getter(kind)(holder))


@cache
def _getter(kind: type[NamedTuple]) -> Callable[[object], tuple[Any, ...]]:
    return attrgetter(*kind._fields)
