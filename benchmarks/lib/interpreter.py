"""What Triton's interpreter lacks for our kernels, added to it.

`interpreter`: the module `triton.runtime.interpreter`; `put`: `setattr`, or a test's monkeypatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

Put = Callable[[Any, str, Any], None]


def teach_bf16_dot(interpreter: ModuleType, put: Put = setattr) -> None:
    """The interpreter keeps bf16 as bit patterns, and its dot multiplies these as integers."""
    plain = interpreter.InterpreterBuilder.create_dot
    tl = interpreter.tl

    def widen(builder, operand):
        return builder.cast_impl(operand, tl.float32) if operand.dtype == tl.bfloat16 else operand

    def create_dot(self, a, b, *rest):
        return plain(self, widen(self, a), widen(self, b), *rest)

    put(interpreter.InterpreterBuilder, "create_dot", create_dot)


def teach_whole_arrays(interpreter: ModuleType, put: Put = setattr) -> None:
    """Reductions and scans combine slices along their axis; the interpreter takes elements."""

    def combined(self: Any, arrays: list[np.ndarray], kinds: list[Any]) -> Iterator[list[Any]]:
        """Yield each array's slices up to the first, the second, …, combined from the first on."""
        axis, total = self.axis or 0, ()
        for place in range(arrays[0].shape[axis]):
            slices = [x.take(place, axis) for x in arrays]
            here = tuple(map(self.to_tensor, slices, kinds))
            made = self.combine_fn.fn(*total, *here) if total else here
            total = made if isinstance(made, tuple) else (made,)
            yield [x.handle.data.reshape(y.shape) for x, y in zip(total, slices)]

    def generic_reduce(self, input):
        kinds, shape = [x.dtype for x in input], input[0].handle.data.shape
        arrays = [x.handle.data if self.axis is not None else x.handle.data.ravel() for x in input]
        *_, values = combined(self, arrays, kinds)
        if self.keep_dims:
            kept = [1 if self.axis in (None, i) else size for i, size in enumerate(shape)]
            values = [x.reshape(kept) for x in values]
        return list(map(self.to_tensor, values, kinds))

    def generic_scan(self, input):
        kinds = [x.dtype for x in input]
        each = zip(*combined(self, [x.handle.data for x in input], kinds))
        return [self.to_tensor(np.stack(x, self.axis), kind) for x, kind in zip(each, kinds)]

    put(interpreter.ReduceOps, "generic_reduce", generic_reduce)
    put(interpreter.ScanOps, "generic_scan", generic_scan)


def keep_tables(interpreter: ModuleType, put: Put = setattr) -> None:
    """The interpreter lists all dtypes in each operation, and the language in each launch."""
    tl, numpy_dtype = interpreter.tl, cache(interpreter._get_np_dtype)

    @cache
    def builtins(package):
        members = inspect.getmembers(package)
        return [name for name, member in members if tl.core.is_builtin(member)]

    def patch_builtin(package, builder, scope):
        for name in builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not within a launch, where it is patched already
                interpreter._patch_attr(package, name, member, builder, scope)

    def get_np_dtype(kind):
        element = kind.scalar
        return np.dtype(np.uint64) if element.is_ptr() else numpy_dtype(element)

    put(interpreter, "_patch_builtin", patch_builtin)
    put(interpreter, "_get_np_dtype", get_np_dtype)


def note_launches(interpreter: ModuleType, put: Put = setattr) -> list[str]:
    """Names of the kernels that are launched from now on, in their order."""
    launched: list[str] = []
    plain = interpreter.GridExecutor.__call__

    def noting(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return plain(self, *args, **kwargs)

    put(interpreter.GridExecutor, "__call__", noting)
    return launched
