"""Vectors as long as the CPU's registers, of float32 arrays: what `simd` has for eight lanes.

Arithmetic is `simd`'s, which takes vectors of either length.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd import (
    LANES,
    WIDTH,
    Vector,
    address,
    f32x8,
    floats,
    intrinsic,
    load_from,
    splat,
)

f32wide: Any = Vector(WIDTH) if WIDTH != LANES else f32x8
_WIDE = ir.VectorType(ir.FloatType(), WIDTH)


@intrinsic
def wide_load(typing_context: Any, array: Any, offset: Any) -> Any:
    """array[offset : offset + WIDTH]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_from(context, builder, array, args[0], args[1], _WIDE)

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
