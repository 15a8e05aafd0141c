"""LLVM IR helpers of the CPU kernels, and numba views of torch memory.

Vectors have 16 lanes of fp32: one AVX-512 register, two of AVX2, four of NEON; LLVM cuts them.
Addresses are int64. Importing this module needs numba.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

FP32, BF16, FP16, FP8 = 0, 1, 2, 3  # FP8: e4m3 without infinities, read only

_HOST = binding.get_host_cpu_features()

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_V = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    __hash__ = ir.Type.__hash__


_BYTES = {FP32: 4, BF16: 2, FP16: 2, FP8: 1}


def _call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _splat(builder, x):
    vector = builder.insert_element(
        ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined), x, _I32(0)
    )
    zero = ir.Constant(_VI, [0] * LANES)
    return builder.shuffle_vector(vector, vector, zero)


def _const(value):
    if isinstance(value, int):
        return ir.Constant(_VI, [value] * LANES)
    return ir.Constant(_V, [value] * LANES)


def _pointer(builder, address, to):
    return builder.inttoptr(address, to.as_pointer())


def _read(builder, address, element=FP32):
    """16 elements at `address` (an int64 value) as fp32."""
    if element == FP32:
        return builder.load(_pointer(builder, address, _V), align=4)
    if element == BF16:
        raw = builder.load(_pointer(builder, address, ir.VectorType(_I16, LANES)), align=2)
        wide = builder.shl(builder.zext(raw, _VI), _const(16))
        return builder.bitcast(wide, _V)
    halves = ir.VectorType(ir.HalfType(), LANES)
    if element == FP8:
        # In a half's places the exponent, its bias 8 smaller, is 2^-8 of the number. Subnormals
        # of half stay exact, also if the processor flushes those of fp32.
        raw = builder.load(_pointer(builder, address, ir.VectorType(_I8, LANES)), align=1)
        wide = builder.sext(raw, ir.VectorType(_I16, LANES))
        sign, rest = (ir.Constant(wide.type, [mask] * LANES) for mask in (-(1 << 15), 0x3F80))
        seven = ir.Constant(wide.type, [7] * LANES)
        bits = builder.or_(builder.and_(wide, sign), builder.and_(builder.shl(wide, seven), rest))
        return builder.fmul(builder.fpext(builder.bitcast(bits, halves), _V), _const(256.0))
    raw = builder.load(_pointer(builder, address, halves), align=2)
    return builder.fpext(raw, _V)


def _write(builder, value, address, element=FP32):
    """16 fp32 lanes to `address` as `element`, rounded to the nearest, ties to even."""
    if element == FP32:
        builder.store(value, _pointer(builder, address, _V), align=4)
    elif element == BF16 and _HOST.get("avx512bf16"):
        short = builder.fptrunc(value, ir.VectorType(_BFloat(), LANES))
        builder.store(short, _pointer(builder, address, short.type), align=2)
    elif element == BF16:
        bits = builder.bitcast(value, _VI)
        odd = builder.and_(builder.lshr(bits, _const(16)), _const(1))
        bits = builder.add(bits, builder.add(odd, _const(0x7FFF)))
        short = builder.trunc(builder.lshr(bits, _const(16)), ir.VectorType(_I16, LANES))
        builder.store(short, _pointer(builder, address, short.type), align=2)
    else:
        short = builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
        builder.store(short, _pointer(builder, address, short.type), align=2)


def _fma(builder, a, b, c):
    return _call(builder, "llvm.fma.v16f32", _V, a, b, c)


def _times_power_of_two(builder, value, exponent):
    """value · 2^exponent of normal numbers."""
    if _HOST.get("avx512f"):
        every, to_nearest = ir.Constant(_I16, -1), _I32(4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return _call(builder, name, _V, value, exponent, _const(0.0), every, to_nearest)
    places = builder.shl(builder.fptosi(exponent, _VI), _const(23))
    return builder.bitcast(builder.add(builder.bitcast(value, _VI), places), _V)


def _at(builder, base, index, scale):
    return builder.add(base, builder.mul(index, _I64(scale)))


def _ints(count):
    return (types.int64,) * count


def view_of(dtype):
    """→ f(address, count): memory as a numpy array; inside numba only."""
    element = types.CPointer(dtype)

    @intrinsic
    def pointer(context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(element))

        return element(types.int64), generate

    @njit(nogil=True)
    def view(address, count):
        return carray(pointer(address), (count,))

    return view
