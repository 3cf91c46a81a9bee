"""Arrays at addresses: how the kernels that run at every layer get their tensors.

Handing numba an array costs about 2 microseconds each, an integer 0.05; at one row a layer's arithmetic takes some
tens. Owns the view and hints to the caches; whoever passes an address keeps the tensor alive and answers for its size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]

from octavo.kernels.cpu import emit
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import intrinsic


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@compiled()
def float32_at(address: int, size: int) -> Any:
    """float32 [size]."""
    return carray(_pointer(address), size, np.float32)


@compiled()
def int32_at(address: int, size: int) -> Any:
    """int32 [size]."""
    return carray(_pointer(address), size, np.int32)


@compiled()
def int64_at(address: int, size: int) -> Any:
    """int64 [size]."""
    return carray(_pointer(address), size, np.int64)


def _make_prefetch(write: bool) -> Any:
    def typed(typing_context: Any, array: Any, offset: Any) -> Any:
        if not isinstance(array, types.Array):
            return None

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(array)(context, builder, args[0]).data
            place = builder.bitcast(builder.gep(data, [args[1]]), emit.BYTE.as_pointer())
            emit.prefetch(builder, place, write=write)
            return context.get_dummy_value()

        return types.none(array, types.intp), generate

    return intrinsic(typed)


prefetch, prefetch_to_write = _make_prefetch(False), _make_prefetch(True)
"""Ask for the cache line of array[offset]; a hint, harmless at any address."""


@intrinsic
def line_elements(typing_context: Any, array: Any) -> Any:
    """Elements of `array` in a cache line of 64 bytes.

    A constant to the compiler, which `array.itemsize` is not: loops that step by that divide to find their length.
    """
    if not isinstance(array, types.Array):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.IntType(64)(512 // array.dtype.bitwidth)

    return types.intp(array), generate
