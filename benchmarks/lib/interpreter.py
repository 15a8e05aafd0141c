"""Patches that Triton's interpreter, `triton.runtime.interpreter`, needs to run our kernels."""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType

import numpy as np
import torch


@cache
def teach(interpreter: ModuleType) -> None:
    """Apply all patches, once."""
    for add in (teach_bf16_dot, teach_e4m3_rounding, teach_whole_arrays, keep_tables):
        add(interpreter)


def teach_bf16_dot(interpreter: ModuleType) -> None:
    """The interpreter keeps bf16 as bit patterns, and its dot multiplies these as integers."""
    tl, plain = interpreter.tl, interpreter.InterpreterBuilder.create_dot

    def widen(builder, operand):
        return builder.cast_impl(operand, tl.float32) if operand.dtype == tl.bfloat16 else operand

    def create_dot(self, a, b, *rest):
        return plain(self, widen(self, a), widen(self, b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def teach_e4m3_rounding(interpreter: ModuleType) -> None:
    """Round to e4m3 with torch: the interpreter drops a carry into the exponent."""
    tl, plain = interpreter.tl, interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, source, wanted, rounding):
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.float8e4nv):
            return plain(self, source, wanted, rounding)
        rounded = torch.from_numpy(source.data).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), wanted.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def teach_whole_arrays(interpreter: ModuleType) -> None:
    """Reductions and scans combine slices along their axis; the interpreter takes elements."""
    plain = interpreter.ReduceOps.generic_reduce

    def combined(self, input):
        """Yield each array's slices up to the first, the second, …, combined from the first on."""
        total = ()
        for place in range(input[0].handle.data.shape[self.axis]):
            slices = [x.handle.data.take(place, self.axis) for x in input]
            here = tuple(self.to_tensor(x, y.dtype) for x, y in zip(slices, input))
            made = self.combine_fn.fn(*total, *here) if total else here
            total = made if isinstance(made, tuple) else (made,)
            yield [x.handle.data for x in total]

    def generic_reduce(self, input):
        if self.axis is None:
            return plain(self, input)
        *_, values = combined(self, input)
        shape = list(input[0].handle.data.shape)
        shape[self.axis : self.axis + 1] = [1] * self.keep_dims
        return [self.to_tensor(x.reshape(shape), y.dtype) for x, y in zip(values, input)]

    def generic_scan(self, input):
        values = (np.stack(each, self.axis) for each in zip(*combined(self, input)))
        shape = input[0].handle.data.shape
        return [self.to_tensor(x.reshape(shape), y.dtype) for x, y in zip(values, input)]

    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan


def keep_tables(interpreter: ModuleType) -> None:
    """Cache the tables that the interpreter builds anew in every operation and launch."""
    is_builtin, numpy_dtype = interpreter.tl.core.is_builtin, cache(interpreter._get_np_dtype)

    @cache
    def builtins(package):
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, builder, scope):
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):  # within a launch it is patched
                interpreter._patch_attr(package, name, member, builder, scope)

    def get_np_dtype(kind):
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else numpy_dtype(kind.scalar)

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype


def note_launches(interpreter: ModuleType) -> list[str]:
    """Names of the kernels that are launched from now on, in their order."""
    launched: list[str] = []
    plain = interpreter.GridExecutor.__call__

    def noting(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return plain(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noting
    return launched
