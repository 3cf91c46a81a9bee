"""The innermost product of `gemm`: a few rows by one panel of a weight, its sums in registers.

Written as LLVM instructions, not as a loop that LLVM is to find the vectors in: which sums stay in registers is what
decides its speed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import HAS_AVX512, cgutils, intrinsic, multiply_add

_WIDTH = 16 if HAS_AVX512 else 8
_VECTORS = 4 if HAS_AVX512 else 2
PANEL = _WIDTH * _VECTORS
"""Outputs of a panel, a multiple of 8. With `TILE_ROWS` rows 24 of 32 registers hold sums, or 12 of 16."""
TILE_ROWS = 6

LINE = 64
"""Bytes of a cache line."""
LINES_OF_OUTPUTS = PANEL * 4 // LINE
"""Cache lines that hold a panel's weights of one input."""

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(8)


def _make_tile(rows: int) -> Any:
    """sums[rows, PANEL] (+)= x[rows, depth] @ panel[depth, PANEL]; see `multiply_tile` for the arguments."""
    vector = ir.VectorType(_FLOAT, _WIDTH)

    def splat(builder: Any, scalar: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), [0] * _WIDTH)
        return builder.shuffle_vector(first, undefined, zeros)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, x_stride, panel_at, panel_stride, sums_at, sums_stride, depth, resume, ahead_at, ahead_step = (
            args
        )
        x, panel, sums = (builder.inttoptr(at, _FLOAT.as_pointer()) for at in (x_at, panel_at, sums_at))
        ahead = builder.inttoptr(ahead_at, _BYTE.as_pointer())
        number = ir.IntType(32)
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [ahead.type, number, number, number]),
            "llvm.prefetch.p0",
        )
        x_rows = [builder.gep(x, [builder.mul(x_stride, _INT(row))]) for row in range(rows)]
        places = [
            [
                builder.bitcast(
                    builder.gep(sums, [builder.add(builder.mul(sums_stride, _INT(row)), _INT(v * _WIDTH))]),
                    vector.as_pointer(),
                )
                for v in range(_VECTORS)
            ]
            for row in range(rows)
        ]
        before = builder.block
        loop, done = builder.append_basic_block("products"), builder.append_basic_block("store")
        builder.branch(loop)

        builder.position_at_end(loop)
        k, ahead_k = builder.phi(_INT), builder.phi(ahead.type)
        totals = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
        zero = ir.Constant(vector, [0.0] * _WIDTH)
        k.add_incoming(_INT(0), before)
        ahead_k.add_incoming(ahead, before)
        for row in totals:
            for total in row:
                total.add_incoming(zero, before)
        panel_k = builder.gep(panel, [builder.mul(k, panel_stride)])
        weights = []
        for v in range(_VECTORS):
            place = builder.bitcast(builder.gep(panel_k, [_INT(v * _WIDTH)]), vector.as_pointer())
            weight = builder.load(place)
            weight.align = 4
            weights.append(weight)
        for part in range(LINES_OF_OUTPUTS):
            # For reading, into the second-level cache, as data.
            place = builder.gep(ahead_k, [builder.mul(ahead_step, _INT(part))])
            builder.call(prefetch, [place, number(0), number(2), number(1)])
        following = []
        for x_row, row in zip(x_rows, totals, strict=True):
            factor = splat(builder, builder.load(builder.gep(x_row, [k])))
            following.append(
                [
                    multiply_add(builder, factor, weight, total)
                    for weight, total in zip(weights, row, strict=True)
                ]
            )
        next_k = builder.add(k, _INT(1))
        next_ahead = builder.gep(ahead_k, [builder.mul(ahead_step, _INT(LINES_OF_OUTPUTS))])
        k.add_incoming(next_k, builder.block)
        ahead_k.add_incoming(next_ahead, builder.block)
        for row, row_following in zip(totals, following, strict=True):
            for total, value in zip(row, row_following, strict=True):
                total.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, done)

        builder.position_at_end(done)
        add = builder.trunc(resume, ir.IntType(1))
        for row_places, row_following in zip(places, following, strict=True):
            for place, value in zip(row_places, row_following, strict=True):
                earlier = builder.load(place)
                earlier.align = 4
                builder.store(builder.select(add, builder.fadd(earlier, value), value), place).align = 4
        return context.get_dummy_value()

    def typed(
        typing_context: Any,
        x_at: Any,
        x_stride: Any,
        panel_at: Any,
        panel_stride: Any,
        sums_at: Any,
        sums_stride: Any,
        depth: Any,
        resume: Any,
        ahead_at: Any,
        ahead_step: Any,
    ) -> Any:
        return types.none(*[types.intp] * 10), generate

    return intrinsic(typed)


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_make_tile(rows) for rows in range(1, TILE_ROWS + 1))


@compiled()
def multiply_tile(
    rows: int,
    x: tuple[int, int],
    panel: tuple[int, int],
    sums: tuple[int, int],
    depth: int,
    resume: int,
    ahead: tuple[int, int],
) -> None:
    """sums[rows, PANEL] = x[rows, depth] @ panel[depth, PANEL], added to what is there if `resume` is 1; rows <= 6.

    x, panel, sums  (address, row stride in elements)
    ahead           (address, bytes): asks for one line after the other from there on, so many bytes further at each
    """
    if rows == 6:
        _tile_6(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
    elif rows == 5:
        _tile_5(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
    elif rows == 4:
        _tile_4(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
    elif rows == 3:
        _tile_3(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
    elif rows == 2:
        _tile_2(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
    else:
        _tile_1(x[0], x[1], panel[0], panel[1], sums[0], sums[1], depth, resume, ahead[0], ahead[1])
