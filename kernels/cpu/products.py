"""The matrix products inside attention on the CPU: small, in float32, their sums kept in registers.

Decodes read every key and value once, so memory decides, and blocks lie where no prefetcher of the CPU looks for them:
the products of few rows ask for the block that is wanted next, line by line between their own multiplications. Asked
for in one go, its lines would be waited for one after the other.

Offsets and strides are in elements.
"""

from __future__ import annotations

from typing import Any

from octavo.kernels.cpu.decode_tile import ROWS, STRIP, dot_few, weigh_few
from octavo.kernels.cpu.memory import line_elements, prefetch
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    WIDTH,
    vfma,
    vload,
    vload_splat,
    vsplat,
    vstore,
    vsum_each,
)

Matrix = tuple[Any, int, int]
"""(flat array, offset of [0, 0], row stride)"""


@compiled()
def accumulate(left: Matrix, right: Matrix, result: Matrix, rows: int, columns: int, depth: int) -> None:
    """result[rows, columns] += left[rows, depth] @ right[depth, columns]; `columns` is a multiple of 8.

    Four rows by sixteen columns stay in registers; every element of the result adds its products in the order
    of depth, whatever the shape around it.
    """
    a, a_at, a_stride = left
    b, b_at, b_stride = right
    c, c_at, c_stride = result
    row = 0
    while row + 4 <= rows:
        a0 = a_at + row * a_stride
        a1 = a0 + a_stride
        a2 = a1 + a_stride
        a3 = a2 + a_stride
        column = 0
        while column + 2 * LANES <= columns:
            c0 = c_at + row * c_stride + column
            c1 = c0 + c_stride
            c2 = c1 + c_stride
            c3 = c2 + c_stride
            c00, c01 = vload(c, c0), vload(c, c0 + LANES)
            c10, c11 = vload(c, c1), vload(c, c1 + LANES)
            c20, c21 = vload(c, c2), vload(c, c2 + LANES)
            c30, c31 = vload(c, c3), vload(c, c3 + LANES)
            for k in range(depth):
                b0 = vload(b, b_at + k * b_stride + column)
                b1 = vload(b, b_at + k * b_stride + column + LANES)
                x = vload_splat(a, a0 + k)
                c00, c01 = vfma(x, b0, c00), vfma(x, b1, c01)
                x = vload_splat(a, a1 + k)
                c10, c11 = vfma(x, b0, c10), vfma(x, b1, c11)
                x = vload_splat(a, a2 + k)
                c20, c21 = vfma(x, b0, c20), vfma(x, b1, c21)
                x = vload_splat(a, a3 + k)
                c30, c31 = vfma(x, b0, c30), vfma(x, b1, c31)
            vstore(c, c0, c00)
            vstore(c, c0 + LANES, c01)
            vstore(c, c1, c10)
            vstore(c, c1 + LANES, c11)
            vstore(c, c2, c20)
            vstore(c, c2 + LANES, c21)
            vstore(c, c3, c30)
            vstore(c, c3 + LANES, c31)
            column += 2 * LANES
        if column < columns:
            c0 = c_at + row * c_stride + column
            c1 = c0 + c_stride
            c2 = c1 + c_stride
            c3 = c2 + c_stride
            c00, c10, c20, c30 = vload(c, c0), vload(c, c1), vload(c, c2), vload(c, c3)
            for k in range(depth):
                b0 = vload(b, b_at + k * b_stride + column)
                c00 = vfma(vload_splat(a, a0 + k), b0, c00)
                c10 = vfma(vload_splat(a, a1 + k), b0, c10)
                c20 = vfma(vload_splat(a, a2 + k), b0, c20)
                c30 = vfma(vload_splat(a, a3 + k), b0, c30)
            vstore(c, c0, c00)
            vstore(c, c1, c10)
            vstore(c, c2, c20)
            vstore(c, c3, c30)
        row += 4
    while row < rows:
        a0 = a_at + row * a_stride
        column = 0
        while column + 4 * LANES <= columns:
            c0 = c_at + row * c_stride + column
            c00, c01 = vload(c, c0), vload(c, c0 + LANES)
            c02, c03 = vload(c, c0 + 2 * LANES), vload(c, c0 + 3 * LANES)
            for k in range(depth):
                b0 = b_at + k * b_stride + column
                x = vload_splat(a, a0 + k)
                c00 = vfma(x, vload(b, b0), c00)
                c01 = vfma(x, vload(b, b0 + LANES), c01)
                c02 = vfma(x, vload(b, b0 + 2 * LANES), c02)
                c03 = vfma(x, vload(b, b0 + 3 * LANES), c03)
            vstore(c, c0, c00)
            vstore(c, c0 + LANES, c01)
            vstore(c, c0 + 2 * LANES, c02)
            vstore(c, c0 + 3 * LANES, c03)
            column += 4 * LANES
        while column < columns:
            c0 = c_at + row * c_stride + column
            c00 = vload(c, c0)
            for k in range(depth):
                c00 = vfma(vload_splat(a, a0 + k), vload(b, b_at + k * b_stride + column), c00)
            vstore(c, c0, c00)
            column += LANES
        row += 1


@compiled()
def prefetch_block(cache: Any, at: int, size: int) -> None:
    """Ask for the `size` elements from `at` on. Blocks lie anywhere, which no prefetcher of the CPU foresees."""
    for offset in range(0, size, line_elements(cache)):
        prefetch(cache, at + offset)


@compiled()
def accumulate_few(
    left: Matrix, right: Matrix, result: Matrix, rows: int, columns: int, depth: int, ahead: tuple[Any, int]
) -> None:
    """`accumulate` for few rows, the same sums in the same order, asking for `ahead` on the way.

    ahead = (array, offset) of a block [depth, columns].
    """
    if columns % STRIP != 0:
        prefetch_block(ahead[0], ahead[1], depth * columns)
        accumulate(left, right, result, rows, columns, depth)
        return
    a, a_at, a_stride = left
    b, b_at, b_stride = right
    c, c_at, c_stride = result
    later = ahead[0].ctypes.data + ahead[1] * ahead[0].itemsize
    step = WIDTH * ahead[0].itemsize
    for row in range(0, rows, ROWS):
        for column in range(0, columns, STRIP):
            block = b.ctypes.data + (b_at + column) * 4
            weigh_few(
                min(ROWS, rows - row),
                (a.ctypes.data + (a_at + row * a_stride) * 4, a_stride),
                (block, b_stride),
                (c.ctypes.data + (c_at + row * c_stride + column) * 4, c_stride),
                depth,
                (later + depth * column * ahead[0].itemsize, step) if row == 0 else (block, 0),
            )


@compiled()
def dot_rows(
    left: Matrix, right: Matrix, result: Matrix, rows: int, columns: int, depth: int, ahead: tuple[Any, int]
) -> None:
    """result[rows, columns] = left[rows, depth] @ right[columns, depth].T; `columns`, `depth` multiples of 8.

    Every element adds its products in the same order, whatever the number of rows. On the way it asks for `ahead`, a
    block of the same size, (array, offset).
    """
    later, later_at = ahead
    a, a_at, a_stride = left
    b, b_at, b_stride = right
    c, c_at, c_stride = result
    if depth % WIDTH == 0:
        block = b.ctypes.data + b_at * 4
        for row in range(0, rows, ROWS):
            dot_few(
                min(ROWS, rows - row),
                (a.ctypes.data + (a_at + row * a_stride) * 4, a_stride),
                (block, b_stride),
                (c.ctypes.data + (c_at + row * c_stride) * 4, c_stride),
                columns,
                depth,
                (later.ctypes.data + later_at * later.itemsize, WIDTH * later.itemsize)
                if row == 0
                else (block, 0),
            )
        return
    prefetch_block(later, later_at, columns * depth)
    for row in range(rows):
        for column in range(0, columns, LANES):
            zero = vsplat(0.0)
            s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
            b0 = b_at + column * b_stride
            for k in range(0, depth, LANES):
                x = vload(a, a_at + row * a_stride + k)
                s0 = vfma(x, vload(b, b0 + k), s0)
                s1 = vfma(x, vload(b, b0 + b_stride + k), s1)
                s2 = vfma(x, vload(b, b0 + 2 * b_stride + k), s2)
                s3 = vfma(x, vload(b, b0 + 3 * b_stride + k), s3)
                s4 = vfma(x, vload(b, b0 + 4 * b_stride + k), s4)
                s5 = vfma(x, vload(b, b0 + 5 * b_stride + k), s5)
                s6 = vfma(x, vload(b, b0 + 6 * b_stride + k), s6)
                s7 = vfma(x, vload(b, b0 + 7 * b_stride + k), s7)
            vstore(c, c_at + row * c_stride + column, vsum_each(s0, s1, s2, s3, s4, s5, s6, s7))
