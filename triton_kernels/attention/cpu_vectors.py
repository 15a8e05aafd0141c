"""CPU vector and AMX intrinsics for numba, and numba views of torch memory.

numba has no vector types, and LLVM does not form register tiles from loops. So each function is a
short piece of LLVM IR on addresses (int64), callable from numba. Vectors have 16 lanes of fp32: one
AVX-512 register, two of AVX2, four of NEON; LLVM cuts them. Lengths and strides are in elements
unless they say bytes. Importing this module needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..optional_numba import njit

LANES = 16
FP32, BF16, FP16, FP8 = 0, 1, 2, 3  # FP8: e4m3 without infinities, read only
BYTES = (4, 2, 2, 1)
ROWS = 8  # of a register tile: 8 × 2 sums, 2 columns and a broadcast fit into 32 registers
COLUMNS = 2 * LANES  # tokens or head dimensions that one tile covers
TILE_ROWS = 16  # of an AMX tile

# 2^x = Σ c_i x^i for |x| ≤ 1/2, within 3e-9; and within 4e-6, where the result is a bf16 number.
_EXP2 = (
    0.9999999999595487,
    0.6931472067106197,
    0.2402265121359562,
    0.05550327214209098,
    0.009618025602930222,
    0.0013400432165596966,
    0.0001546973198677251,
)
_EXP2_BF16 = (
    1.00000007549535,
    0.6931210339915466,
    0.24022107355830377,
    0.055922035647263016,
    0.009676037097879857,
)

_HOST = binding.get_host_cpu_features()
_AMX = _HOST.get("amx-bf16", False)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_V = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    __hash__ = ir.Type.__hash__


def _call(builder, name, result, *arguments, fastmath=()):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=fastmath)


def _splat(builder, x):
    vector = builder.insert_element(
        ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined), x, _I32(0)
    )
    zero = ir.Constant(_VI, [0] * LANES)
    return builder.shuffle_vector(vector, vector, zero)


def _const(value):
    return ir.Constant(_VI if isinstance(value, int) else _V, [value] * LANES)


def _pointer(builder, address, to):
    return builder.inttoptr(address, to.as_pointer())


def _read(builder, address, element=FP32):
    """16 elements at `address` (an int64 value) as fp32."""
    kind = ir.VectorType((_F32, _I16, _F16, _I8)[element], LANES)
    raw = builder.load(_pointer(builder, address, kind), align=BYTES[element])
    if element == FP32:
        return raw
    if element == FP16:
        return builder.fpext(raw, _V)
    if element == BF16:
        return builder.bitcast(builder.shl(builder.zext(raw, _VI), _const(16)), _V)
    # In a half's places the exponent, its bias 8 smaller, is 2^-8 of the number. Subnormals of
    # half stay exact, also if the processor flushes those of fp32.
    wide = builder.sext(raw, ir.VectorType(_I16, LANES))
    sign, rest, seven = (ir.Constant(wide.type, [x] * LANES) for x in (-(1 << 15), 0x3F80, 7))
    bits = builder.or_(builder.and_(wide, sign), builder.and_(builder.shl(wide, seven), rest))
    halves = builder.bitcast(bits, ir.VectorType(_F16, LANES))
    return builder.fmul(builder.fpext(halves, _V), _const(256.0))


def _write(builder, value, address, element=FP32):
    """16 fp32 lanes to `address` as `element`, rounded to the nearest, ties to even."""
    if element == BF16 and _HOST.get("avx512bf16"):
        value = builder.fptrunc(value, ir.VectorType(_BFloat(), LANES))
    elif element == BF16:
        bits = builder.bitcast(value, _VI)
        odd = builder.and_(builder.lshr(bits, _const(16)), _const(1))
        bits = builder.add(bits, builder.add(odd, _const(0x7FFF)))
        value = builder.trunc(builder.lshr(bits, _const(16)), ir.VectorType(_I16, LANES))
    elif element == FP16:
        value = builder.fptrunc(value, ir.VectorType(_F16, LANES))
    builder.store(value, _pointer(builder, address, value.type), align=BYTES[element])


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


def _cases(builder: Any, element: Any, choices: tuple[int, ...]) -> Iterator[int]:
    """Yield each choice, within code that runs if `element` is that: numba caches one function for
    all elements, but none that a Python function made for one of them."""
    for choice in choices:
        with builder.if_then(builder.icmp_signed("==", element, _I64(choice))):
            yield choice


@intrinsic
def _void_pointer(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit
def view(address, count, dtype):
    """Memory as a numpy array; inside numba only."""
    return carray(_void_pointer(address), (count,), dtype)


@intrinsic
def multiply(context, element, a, a_stride, b, b_stride, c, c_stride, depth, add):
    """8 × 32 results: c = a·b, or c += a·b if add.

    a [8, depth] fp32, b [depth, 32] of `element`, c [8, 32] fp32.
    """

    def generate(context, builder, signature, arguments):
        element, a, a_stride, b, b_stride, c, c_stride, depth, add = arguments
        sums = [[cgutils.alloca_once(builder, _V) for _ in range(2)] for _ in range(ROWS)]
        a_rows, c_rows = [a], [c]
        a_bytes, c_bytes = (builder.mul(s, _I64(4)) for s in (a_stride, c_stride))
        for _ in range(ROWS - 1):
            a_rows.append(builder.add(a_rows[-1], a_bytes))
            c_rows.append(builder.add(c_rows[-1], c_bytes))
        with builder.if_else(builder.icmp_signed("!=", add, _I64(0))) as (then, otherwise):
            with then:
                for row, place in zip(sums, c_rows):
                    for half, total in enumerate(row):
                        at = builder.add(place, _I64(64 * half))
                        builder.store(_read(builder, at), total)
            with otherwise:
                for row in sums:
                    for total in row:
                        builder.store(_const(0.0), total)
        for stored in _cases(builder, element, (FP32, BF16, FP16, FP8)):
            size = BYTES[stored]
            b_bytes = builder.mul(b_stride, _I64(size))
            with cgutils.for_range(builder, depth) as loop:
                at = builder.add(b, builder.mul(loop.index, b_bytes))
                columns = [
                    _read(builder, builder.add(at, _I64(LANES * size * half)), stored)
                    for half in range(2)
                ]
                for row, place in zip(sums, a_rows):
                    here = _pointer(builder, _at(builder, place, loop.index, 4), _F32)
                    x = _splat(builder, builder.load(here))
                    for total, column in zip(row, columns):
                        builder.store(_fma(builder, x, column, builder.load(total)), total)
        for row, place in zip(sums, c_rows):
            for half, total in enumerate(row):
                _write(builder, builder.load(total), builder.add(place, _I64(64 * half)))
        return context.get_dummy_value()

    return types.void(*_ints(9)), generate


@intrinsic
def amx_begin(context, config):
    """Configure the tiles by the 64 bytes at `config`. Without AMX the three functions end the
    process."""

    def generate(context, builder, signature, arguments):
        if _AMX:
            at = _pointer(builder, arguments[0], _I8)
            _call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), at)
        else:
            _call(builder, "llvm.trap", ir.VoidType())
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def amx_end(context):
    def generate(context, builder, signature, arguments):
        _call(builder, "llvm.x86.tilerelease" if _AMX else "llvm.trap", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def amx_multiply(context, a, a_bytes, b, b_step, c, c_bytes, steps, add):
    """16 × 32 results: c = a·b, or c += a·b if add.

    a [16, 32 · steps] bf16, rows a_bytes apart; c [16, 32] fp32, rows c_bytes apart. b is packed:
    a tile of 1024 bytes for 32 rows and 16 columns, the tiles of one set of columns one after
    the other, b_step bytes from one set to the next.
    """

    def generate(context, builder, signature, arguments):
        a, a_bytes, b, b_step, c, c_bytes, steps, add = arguments
        void = ir.VoidType()
        if not _AMX:
            _call(builder, "llvm.trap", void)
            return context.get_dummy_value()

        def load(tile, address, stride):
            at = _pointer(builder, address, _I8)
            _call(builder, "llvm.x86.tileloadd64", void, _I8(tile), at, stride)

        places = c, builder.add(c, _I64(64))
        with builder.if_else(builder.icmp_signed("!=", add, _I64(0))) as (then, otherwise):
            with then:
                for tile, place in zip((6, 7), places):
                    load(tile, place, c_bytes)
            with otherwise:
                for tile in (6, 7):
                    _call(builder, "llvm.x86.tilezero", void, _I8(tile))
        with cgutils.for_range(builder, steps) as loop:
            load(0, _at(builder, a, loop.index, 64), a_bytes)
            at = _at(builder, b, loop.index, 1024)
            for tile, place in ((2, at), (3, builder.add(at, b_step))):
                load(tile, place, _I64(64))
                _call(builder, "llvm.x86.tdpbf16ps", void, _I8(tile + 4), _I8(0), _I8(tile))
        for tile, place in zip((6, 7), places):
            at = _pointer(builder, place, _I8)
            _call(builder, "llvm.x86.tilestored64", void, _I8(tile), at, c_bytes)
        return context.get_dummy_value()

    return types.void(*_ints(8)), generate


@intrinsic
def row_max(context, x, count, mask, mask_from):
    """Maximum of x [count] fp32, after mask [count − mask_from] was added behind mask_from.

    `count` and `mask_from` are multiples of 16; x is changed in place.
    """

    def generate(context, builder, signature, arguments):
        x, count, mask, mask_from = arguments
        tops = [cgutils.alloca_once(builder, _V) for _ in range(4)]
        for top in tops:
            builder.store(_const(float("-inf")), top)

        def fold(top, value):
            old = builder.load(top)
            bigger = builder.fcmp_ordered(">", value, old)
            builder.store(builder.select(bigger, value, old), top)

        four = builder.ashr(mask_from, _I64(6))
        with cgutils.for_range(builder, four) as loop:
            at = _at(builder, x, loop.index, 256)
            for part, top in enumerate(tops):
                fold(top, _read(builder, builder.add(at, _I64(64 * part))))
        rest = builder.shl(four, _I64(2))
        with cgutils.for_range(
            builder, builder.sub(builder.ashr(mask_from, _I64(4)), rest)
        ) as loop:
            fold(tops[0], _read(builder, _at(builder, x, builder.add(loop.index, rest), 64)))
        masked = builder.ashr(builder.sub(count, mask_from), _I64(4))
        x = builder.add(x, builder.mul(mask_from, _I64(4)))
        with cgutils.for_range(builder, masked) as loop:
            at = _at(builder, x, loop.index, 64)
            value = builder.fadd(
                _read(builder, at), _read(builder, _at(builder, mask, loop.index, 64))
            )
            _write(builder, value, at)
            fold(tops[0], value)
        for top in tops[1:]:
            fold(tops[0], builder.load(top))
        return _call(builder, "llvm.vector.reduce.fmax.v16f32", _F32, builder.load(tops[0]))

    return types.float32(*_ints(4)), generate


@intrinsic
def row_exp2(context, element, x, out, count, scale, shift):
    """Return the sum of out = 2^(scale·x − shift), written as `element` (fp32 or bf16).

    x [count] fp32; out [count], which may lie on x; count a multiple of 16. What is below 2^-126
    becomes 0.
    """

    def generate(context, builder, signature, arguments):
        element, x, out, count, scale, shift = arguments
        scale, shift = _splat(builder, scale), _splat(builder, builder.fneg(shift))
        totals = [cgutils.alloca_once(builder, _V) for _ in range(2)]
        for total in totals:
            builder.store(_const(0.0), total)

        def one(index, total, target):
            power = _fma(builder, _read(builder, _at(builder, x, index, 64)), scale, shift)
            # Masked scores are −inf, and subnormal results are slow.
            tiny = builder.fcmp_ordered("<", power, _const(-126.0))
            power = builder.select(tiny, _const(-126.0), power)
            whole = _call(builder, "llvm.rint.v16f32", _V, power)
            rest = builder.fsub(power, whole)
            factors = _EXP2_BF16 if target == BF16 else _EXP2
            value = _const(factors[-1])
            for factor in factors[-2::-1]:
                value = _fma(builder, value, rest, _const(factor))
            value = _times_power_of_two(builder, value, whole)
            value = builder.select(tiny, _const(0.0), value)
            builder.store(builder.fadd(builder.load(total), value), total)
            _write(builder, value, _at(builder, out, index, LANES * BYTES[target]), target)

        vectors = builder.ashr(count, _I64(4))
        pairs = builder.ashr(vectors, _I64(1))
        done = builder.shl(pairs, _I64(1))
        for target in _cases(builder, element, (FP32, BF16)):
            with cgutils.for_range(builder, pairs) as loop:
                first = builder.shl(loop.index, _I64(1))
                one(first, totals[0], target)
                one(builder.add(first, _I64(1)), totals[1], target)
            with builder.if_then(builder.icmp_signed("<", done, vectors)):
                one(done, totals[0], target)
        total = builder.fadd(*(builder.load(total) for total in totals))
        given = "llvm.vector.reduce.fadd.v16f32", _F32, _F32(-0.0), total
        return _call(builder, *given, fastmath=("reassoc",))

    return types.float32(*_ints(4), types.float32, types.float32), generate


@intrinsic
def scale_row(context, source, target, x, out, count, factor):
    """out = factor · x [count], from `source` to `target` elements (fp32, bf16 or fp16)."""

    def generate(context, builder, signature, arguments):
        source, target, x, out, count, factor = arguments
        factor, vectors = _splat(builder, factor), builder.ashr(count, _I64(4))
        elements = FP32, BF16, FP16
        for old in _cases(builder, source, elements):
            for new in _cases(builder, target, elements):
                with cgutils.for_range(builder, vectors) as loop:
                    at = _at(builder, x, loop.index, LANES * BYTES[old])
                    value = builder.fmul(_read(builder, at, old), factor)
                    _write(builder, value, _at(builder, out, loop.index, LANES * BYTES[new]), new)
        return context.get_dummy_value()

    return types.void(*_ints(5), types.float32), generate
