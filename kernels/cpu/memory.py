"""Arrays at addresses: how the kernels that run at every layer get their tensors.

Handing numba an array costs about 2 microseconds each, an integer 0.05; at one row a layer's arithmetic takes some
tens. Owns nothing but the view; whoever passes an address keeps the tensor alive and answers for the size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

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
