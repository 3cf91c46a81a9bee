"""Float32 vectors as numba values, and the operations on them that the CPU kernels are written in.

numba's own loops leave it to LLVM's vectoriser to find the vectors, which then keeps no accumulator in a
register across a loop. Here a kernel says which registers it wants; LLVM still chooses the instructions: two
SSE or NEON halves, one AVX register. Vectors have eight lanes; those of `wide` are as long as the CPU's, and arithmetic
takes both. Owns no algorithm beyond exp2 and in-register shuffles.

Loads and stores take a one-dimensional C-contiguous array and an element offset, unaligned and unchecked. An
array's dtype names its number format: float32 and int8 are themselves, uint16 holds bfloat16 bits, int16 float16 bits
and uint8 those of e4m3 (fp8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.core import config
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, overload, register_model

cgutils: Any = numba_cgutils


def intrinsic(function: Any) -> Any:
    """numba's, for type checkers: the result is called with other arguments than `function` has."""
    return numba_intrinsic(function)


LANES = 8


def _compiles_for(feature: str) -> bool:
    """Whether kernels are compiled for a CPU with LLVM's `feature`; NUMBA_CPU_FEATURES may say otherwise than it is."""
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is not None:
        return f"+{feature}" in features.split(",")
    return bool(llvm.get_host_cpu_features().get(feature))


HAS_AVX512 = _compiles_for("avx512f")
"""32 registers of 16 lanes."""
WIDTH = 16 if HAS_AVX512 else LANES
"""Lanes of the CPU's registers."""
HAS_VNNI = HAS_AVX512 and _compiles_for("avx512vnni")
"""Sums of products of bytes, 64 at a time."""
LOG2_E = 1.4426950408889634

_F32, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_F32X8, _I32X8 = (ir.VectorType(lane, LANES) for lane in (_F32, _I32))
_FUSE = ("contract",)


class Vector(types.Type):
    """The numba type of `lanes` float32 numbers."""

    def __init__(self, lanes: int) -> None:
        super().__init__(f"octavo_f32x{lanes}")
        self.lanes = lanes


f32x8: Any = Vector(LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, ir.VectorType(_F32, numba_type.lanes))


def floats(value: float, lanes: int = LANES) -> ir.Constant:
    """LLVM's constant of `lanes` numbers."""
    return ir.Constant(ir.VectorType(_F32, lanes), [value] * lanes)


def _ints(value: int, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, lanes), [value] * lanes)


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """LLVM's vector of `lanes` times `scalar`."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, _ints(0, lanes))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(_I32X8, lanes))


def address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, pointee: ir.Type) -> Any:
    """Of array[offset], as LLVM's pointer to `pointee`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), pointee.as_pointer())


def load_from(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, loaded: ir.Type) -> Any:
    """LLVM's value of the type `loaded` from array[offset] on."""
    value = builder.load(address(context, builder, array_type, array, offset, loaded))
    value.align = array_type.dtype.bitwidth // 8
    return value


def _widen(builder: Any, bits: Any, dtype: Any) -> Any:
    """Eight numbers of a narrower format, exactly, infinities and NaN included (of e4m3's two NaN 480 is made).

    In integer arithmetic because a float16 conversion becomes a library call, absent here, on a CPU without one.
    """
    if dtype == types.int8:
        return builder.sitofp(bits, _F32X8)
    wide = builder.zext(bits, _I32X8)
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(wide, _ints(16)), _F32X8)
    # Sign, then exponent and mantissa, to their places. The exponent's bias is 127 there, and here 7 or 15; the
    # product also normalises subnormals.
    sign_mask, mantissa_shift, bias = (0x80, 20, 7) if dtype == types.uint8 else (0x8000, 13, 15)
    sign = builder.shl(builder.and_(wide, _ints(sign_mask)), _ints(32 - sign_mask.bit_length()))
    magnitude = builder.shl(builder.and_(wide, _ints(sign_mask - 1)), _ints(mantissa_shift))
    factor = floats(2.0 ** (127 - bias))
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, _F32X8), factor), _I32X8)
    if dtype == types.int16:
        special = builder.icmp_unsigned(">=", magnitude, _ints(0x7C00 << 13))
        value = builder.select(special, builder.or_(magnitude, _ints(0x7F800000)), value)
    return builder.bitcast(builder.or_(value, sign), _F32X8)


def _load_widened(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    if array_type.dtype == types.float32:
        return load_from(context, builder, array_type, array, offset, _F32X8)
    narrow = ir.VectorType(_lane(array_type), LANES)
    return _widen(builder, load_from(context, builder, array_type, array, offset, narrow), array_type.dtype)


def _lane(array_type: Any) -> ir.Type:
    """Of an array's format, as it is stored."""
    if array_type.dtype == types.float32:
        return _F32
    return _I16 if array_type.dtype.bitwidth == 16 else _I8


def _is_storage(array_type: Any) -> bool:
    return (
        isinstance(array_type, types.Array)
        and array_type.ndim == 1
        and array_type.layout == "C"
        and array_type.dtype in (types.float32, types.uint16, types.int16, types.int8, types.uint8)
    )


@intrinsic
def vload(typing_context: Any, array: Any, offset: Any) -> Any:
    """array[offset : offset + 8], widened to float32."""
    if not _is_storage(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_widened(context, builder, array, args[0], args[1])

    return f32x8(array, types.intp), generate


@intrinsic
def vload_lanes(typing_context: Any, array: Any, offset: Any, count: Any) -> Any:
    """array[offset : offset + count] widened in the first `count` < 8 lanes, 0 elsewhere; reads no further."""
    if not _is_storage(array):
        return None
    lane_type = _lane(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector_type = ir.VectorType(lane_type, LANES)
        slot = cgutils.alloca_once(builder, vector_type)
        builder.store(ir.Constant(vector_type, None), slot)
        first = builder.bitcast(slot, lane_type.as_pointer())
        size = ir.IntType(64)(array.dtype.bitwidth // 8)
        source = address(context, builder, array, args[0], args[1], lane_type)
        cgutils.raw_memcpy(builder, first, source, args[2], size)
        value = builder.load(slot)
        return value if lane_type is _F32 else _widen(builder, value, array.dtype)

    return f32x8(array, types.intp, types.intp), generate


@intrinsic
def vload_splat(typing_context: Any, array: Any, offset: Any) -> Any:
    """array[offset], float32, in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, load_from(context, builder, array, args[0], args[1], _F32))

    return f32x8(array, types.intp), generate


@intrinsic
def vstore(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """array[offset : offset + 8] = value; the array is float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store = builder.store(args[2], address(context, builder, array, args[0], args[1], _F32X8))
        store.align = 4
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x8), generate


@intrinsic
def vstore_lanes(typing_context: Any, array: Any, offset: Any, value: Any, count: Any) -> Any:
    """array[offset : offset + count] = the first `count` < 8 lanes; writes no further."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        slot = cgutils.alloca_once(builder, _F32X8)
        builder.store(args[2], slot)
        target = address(context, builder, array, args[0], args[1], _F32)
        source = builder.bitcast(slot, _F32.as_pointer())
        cgutils.raw_memcpy(builder, target, source, args[3], ir.IntType(64)(4))
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x8, types.intp), generate


@intrinsic
def vstore_bytes(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """array[offset : offset + 8] = `value` + 128, rounded to integers; uint8. Meaningless for what does not fit."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # As in `vexp2`: the integer lands in the low bits.
        bits = builder.bitcast(builder.fadd(args[2], floats(1.5 * 2.0**23)), _I32X8)
        numbers = builder.trunc(builder.add(bits, _ints(128)), ir.VectorType(_I8, LANES))
        place = address(context, builder, array, args[0], args[1], numbers.type)
        builder.store(numbers, place).align = 1
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x8), generate


@intrinsic
def vsplat(typing_context: Any, scalar: Any) -> Any:
    """`scalar`, rounded to float32, in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return f32x8(types.float32), generate


@intrinsic
def vsplat_like(typing_context: Any, vector: Any, scalar: Any) -> Any:
    """`scalar`, rounded to float32, in every lane of a vector as long as `vector`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[1], vector.lanes)

    return vector(vector, types.float32), generate


def _binary(generate_binary: Any) -> Any:
    def typed(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return generate_binary(builder, args[0], args[1])

        return a(a, a), generate

    return intrinsic(typed)


vadd = _binary(lambda builder, a, b: builder.fadd(a, b))
vsub = _binary(lambda builder, a, b: builder.fsub(a, b))
vmul = _binary(lambda builder, a, b: builder.fmul(a, b))
vdiv = _binary(lambda builder, a, b: builder.fdiv(a, b))
vmax = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """|a| or |b|. As integers, magnitudes are in the same order, and NaN is behind infinity."""
    one, other = (builder.and_(builder.bitcast(each, _I32X8), _ints(0x7FFFFFFF)) for each in (a, b))
    return builder.bitcast(builder.select(builder.icmp_signed(">", one, other), one, other), _F32X8)


vlarger = _binary(_larger)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """LLVM's value of a * b + c, vectors of any length."""
    # "contract" fuses where the CPU can; an explicit fma would call a slow library function where it cannot.
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


@intrinsic
def vfma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_add(builder, *args)

    return a(a, a, a), generate


@intrinsic
def vkeep(typing_context: Any, value: Any, first: Any, last: Any) -> Any:
    """Lanes first <= i < last of `value`, minus infinity elsewhere (also where the lane holds NaN)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_I32X8, list(range(LANES)))
        low, high = (splat(builder, builder.trunc(bound, _I32)) for bound in args[1:])
        inside = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return builder.select(inside, args[0], floats(float("-inf")))

    return f32x8(f32x8, types.intp, types.intp), generate


# Of 2**f on [-0.5, 0.5], the highest power first: the polynomial of that degree with the smallest relative error, 2e-9,
# among those that are 1 at 0. Taylor's takes one more term to come below 5e-9.
_EXP2_TERMS = (
    1.5353362e-4,
    1.3398875e-3,
    9.6184374e-3,
    5.5503325e-2,
    0.24022648,
    0.6931472,
    1.0,
)


@intrinsic
def vexp2(typing_context: Any, x: Any) -> Any:
    """2**x for x < 128, within 2 units in the last place; 0 for x < -126; NaN stays NaN.

    Splits x into the nearest integer, which is added to the exponent, and a rest in [-0.5, 0.5] for a polynomial.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = x.lanes
        # Adding 1.5 * 2**23 leaves no room for a fraction: the integer lands in the low bits, rounded.
        shifter = floats(1.5 * 2.0**23, lanes)
        shifted = builder.fadd(args[0], shifter)
        rest = builder.fsub(args[0], builder.fsub(shifted, shifter))
        power, *terms = (floats(term, lanes) for term in _EXP2_TERMS)
        for term in terms:
            power = multiply_add(builder, power, rest, term)
        bits = ir.VectorType(_I32, lanes)
        exponent = builder.shl(builder.bitcast(shifted, bits), _ints(23, lanes))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, bits), exponent), power.type)
        too_small = builder.fcmp_ordered("<", args[0], floats(-126.0, lanes))
        return builder.select(too_small, floats(0.0, lanes), scaled)

    return x(x), generate


def _horizontal(combine: Any) -> Any:
    def typed(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = args[0]
            for distance in (4, 2, 1):
                moved = _shuffle(
                    builder, vector, vector, [(lane + distance) % LANES for lane in range(LANES)]
                )
                vector = combine(builder, vector, moved)
            return builder.extract_element(vector, _I32(0))

        return types.float32(f32x8), generate

    return intrinsic(typed)


vsum_lanes = _horizontal(lambda builder, a, b: builder.fadd(a, b))
vmax_lanes = _horizontal(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
vlarger_lane = _horizontal(_larger)

# Pairs of lanes that change places when two rows of a matrix are halfway transposed, by step.
_INTERLEAVE = (
    ([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]),
    ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
)


@intrinsic
def vsum_each(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """[sum of a's lanes, sum of b's lanes, ..., sum of h's lanes]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = list(args)
        for low, high in _INTERLEAVE:
            rows = [
                builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high))
                for x, y in zip(rows[::2], rows[1::2], strict=True)
            ]
        return rows[0]

    return f32x8(*[f32x8] * LANES), generate


@intrinsic
def vtranspose(
    typing_context: Any,
    source: Any,
    offset: Any,
    stride: Any,
    target: Any,
    target_offset: Any,
    target_stride: Any,
) -> Any:
    """target[j, i] = source[i, j] for i, j < 8; both are given as (array, offset of [0, 0], row stride)."""
    if not _is_storage(source):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def row_offset(base: Any, row_stride: Any, row: int) -> Any:
            return builder.add(base, builder.mul(row_stride, row_stride.type(row)))

        rows = [
            _load_widened(context, builder, source, args[0], row_offset(args[1], args[2], row))
            for row in range(LANES)
        ]
        for step, (low, high) in enumerate(_INTERLEAVE):
            distance = 1 << step
            swapped = list(rows)
            for row in range(LANES):
                if not row & distance:
                    swapped[row] = _shuffle(builder, rows[row], rows[row | distance], low)
                    swapped[row | distance] = _shuffle(builder, rows[row], rows[row | distance], high)
            rows = swapped
        for row in range(LANES):
            place = address(context, builder, target, args[3], row_offset(args[4], args[5], row), _F32X8)
            builder.store(rows[row], place).align = 4
        return context.get_dummy_value()

    intp = types.intp
    return types.none(source, intp, intp, target, intp, intp), generate


@intrinsic
def fetch_add(typing_context: Any, counter: Any, amount: Any) -> Any:
    """Add to counter[0], an int64 array, atomically; the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, counter, args[0], ir.IntType(64)(0), ir.IntType(64))
        return builder.atomic_rmw("add", place, args[1], "monotonic")

    return types.int64(counter, types.int64), generate


def readable(array: Any, widened: Any) -> Any:
    """`array` itself if it is float32, else `widened`, chosen when the caller is compiled."""
    return array if array.dtype == np.float32 else widened


@overload(readable)
def _compile_readable(array: Any, widened: Any) -> Any:
    def same(array: Any, widened: Any) -> Any:
        return array

    def other(array: Any, widened: Any) -> Any:
        return widened

    return same if array.dtype == types.float32 else other
