"""Vectors as long as the CPU's registers, of float32 arrays: what `simd` has for eight lanes.

Arithmetic is `simd`'s, which takes vectors of either length. Owns the form of exp2 for AVX-512.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd import (
    HAS_AVX512,
    LANES,
    Vector,
    address,
    cgutils,
    exp2_near_zero,
    f32x8,
    floats,
    intrinsic,
    splat,
    vexp2,
)

WIDTH = 16 if HAS_AVX512 else LANES

f32wide: Any = Vector(WIDTH) if WIDTH != LANES else f32x8
_WIDE = ir.VectorType(ir.FloatType(), WIDTH)


@intrinsic
def wide_load(typing_context: Any, array: Any, offset: Any) -> Any:
    """array[offset : offset + WIDTH]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(address(context, builder, array, args[0], args[1], _WIDE))
        value.align = 4
        return value

    return f32wide(array, types.intp), generate


@intrinsic
def wide_store(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """array[offset : offset + WIDTH] = value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address(context, builder, array, args[0], args[1], _WIDE)).align = 4
        return context.get_dummy_value()

    return types.none(array, types.intp, f32wide), generate


@intrinsic
def wide_splat(typing_context: Any, scalar: Any) -> Any:
    """`scalar`, rounded to float32, in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0], WIDTH)

    return f32wide(types.float32), generate


@intrinsic
def wide_between(typing_context: Any, value: Any, low: Any, x: Any, high: Any) -> Any:
    """Lanes of `value` where low <= x < high, minus infinity elsewhere (also where the lane holds NaN)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, low, x, high = args
        inside = builder.and_(builder.fcmp_ordered(">=", x, low), builder.fcmp_ordered("<", x, high))
        return builder.select(inside, value, floats(float("-inf"), WIDTH))

    return f32wide(f32wide, f32wide, f32wide, f32wide), generate


@intrinsic
def wide_finite_or_zero(typing_context: Any, x: Any) -> Any:
    """x, but 0 where it is minus infinity."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest = builder.fcmp_ordered("==", args[0], floats(float("-inf"), WIDTH))
        return builder.select(lowest, floats(0.0, WIDTH), args[0])

    return f32wide(f32wide), generate


@intrinsic
def _scaled_exp2(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, mask = ir.IntType(32), ir.IntType(16)
        # Minus infinity has no fraction; 2**-200 is 0 in float32. The comparison keeps NaN.
        lowest = floats(-200.0, WIDTH)
        clamped = builder.select(builder.fcmp_ordered(">", lowest, args[0]), lowest, args[0])
        scale = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_WIDE, [_WIDE, number, _WIDE, mask, number]),
            "llvm.x86.avx512.mask.rndscale.ps.512",
        )
        whole = builder.call(scale, [clamped, number(8), clamped, mask(0xFFFF), number(4)])
        power = exp2_near_zero(builder, builder.fsub(clamped, whole))
        scalef = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_WIDE, [_WIDE, _WIDE, _WIDE, mask, number]),
            "llvm.x86.avx512.mask.scalef.ps.512",
        )
        return builder.call(scalef, [power, whole, power, mask(0xFFFF), number(4)])

    return f32wide(f32wide), generate


wide_exp2 = _scaled_exp2 if HAS_AVX512 else vexp2
"""2**x for x < 128, within 2 units in the last place; 0 for x <= -150; NaN stays NaN."""
