"""What Triton's interpreter lacks for our kernels, added to it.

`interpreter`: the module `triton.runtime.interpreter`; `put`: `setattr`, or a test's monkeypatch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

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


def teach_e4m3_rounding(interpreter: ModuleType, put: Put = setattr) -> None:
    """The interpreter loses what rounding carries into the exponent."""
    plain = interpreter.InterpreterBuilder.create_fp_to_fp
    tl = interpreter.tl

    def create_fp_to_fp(self, source, wanted, rounding):
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.float8e4nv):
            return plain(self, source, wanted, rounding)
        rounded = torch.from_numpy(source.data).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), wanted.scalar)

    put(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)


def teach_whole_arrays(interpreter: ModuleType, put: Put = setattr) -> None:
    """What sorts are made of, the interpreter does element by element: seconds for a hundred."""
    plain = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, input):
        if self.combine_fn is not interpreter.tl.standard._xor_combine:
            return plain(self, input)
        (tensor,) = input
        values = np.bitwise_xor.reduce(tensor.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(values, tensor.dtype)]

    put(interpreter.ReduceOps, "generic_reduce", generic_reduce)


def note_launches(interpreter: ModuleType, put: Put = setattr) -> list[str]:
    """Names of the kernels that are launched from now on, in their order."""
    launched: list[str] = []
    plain = interpreter.GridExecutor.__call__

    def noting(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return plain(self, *args, **kwargs)

    put(interpreter.GridExecutor, "__call__", noting)
    return launched
