"""One tile of attention on the CPU: a few query rows against the keys of one sequence.

Owns the inner loops: products that keep their sums in registers, masking, the online softmax of Milakov and
Gimelshein (2018). Keys are walked `KEY_TILE` at a time, block by block where they lie in the cache, and a block
is read once for all rows of the tile. Knows nothing of batches, threads or torch.

Offsets and strides are in elements. Keys and values may be float32, uint16
(bfloat16 bits) or int16 (float16 bits), see `simd`; everything else is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    LOG2_E,
    prefetch,
    readable,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vkeep,
    vload,
    vload_lanes,
    vload_splat,
    vmax,
    vmax_lanes,
    vmul,
    vsplat,
    vstore,
    vstore_lanes,
    vsub,
    vsum_each,
    vtranspose,
)

Matrix = tuple[Any, int, int]
"""(flat array, offset of [0, 0], row stride)"""

KEY_TILE = 64
"""Keys between two updates of the running maximum, in whole blocks."""
FEW_ROWS = 8
"""Up to so many rows, dot products read keys as they lie; above, transposing them first pays."""


@compiled()
def round_up(count: int) -> int:
    """`count` padded to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


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
def dot_rows(left: Matrix, right: Matrix, result: Matrix, rows: int, columns: int, depth: int) -> None:
    """result[rows, columns] = left[rows, depth] @ right[columns, depth].T; `columns`, `depth` multiples of 8."""
    a, a_at, a_stride = left
    b, b_at, b_stride = right
    c, c_at, c_stride = result
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


@compiled()
def widen_rows(narrow: Matrix, target: Any, target_stride: int, rows: int, columns: int) -> None:
    """target[rows, columns] = narrow[rows, columns] as float32; columns of target up to a whole vector get 0."""
    source, source_at, source_stride = narrow
    for row in range(rows):
        at = source_at + row * source_stride
        to = row * target_stride
        column = 0
        while column + LANES <= columns:
            vstore(target, to + column, vload(source, at + column))
            column += LANES
        if column < columns:
            vstore(target, to + column, vload_lanes(source, at + column, columns - column))


@compiled()
def soft_cap(scores: Any, cap: float) -> Any:
    """cap * tanh(scores), in float32: tanh(x) = 1 - 2 / (exp(2 x) + 1), infinities included."""
    one = vsplat(1.0)
    # exp2 is valid below 128, and tanh is 1 in float32 long before.
    limit = vsplat(-20.0)
    bounded = vmax(limit, vsub(vsplat(0.0), vmax(limit, vsub(vsplat(0.0), scores))))
    power = vexp2(vmul(bounded, vsplat(2.0 * LOG2_E)))
    return vmul(vsplat(cap), vsub(one, vdiv(vsplat(2.0), vadd(power, one))))


@compiled()
def update_softmax(
    raw: Matrix,
    rows: int,
    group: int,
    position: int,
    tile: tuple[int, int, int],
    seen: tuple[int, int],
    window: int,
    cap: float,
    accumulated: tuple[Any, Any, Any],
    columns: int,
) -> None:
    """Turn one key tile of raw scores, in units of log2, into weights, and rescale what was summed before.

    tile = (first block, number of blocks, block_size): the columns of `raw`, each block padded to whole
    vectors. seen = (begin, end) of the keys that any row may see. accumulated = (output [rows, columns], maxima
    [rows], sums [rows, 8], one partial sum a lane), changed in place.
    """
    scores, begin, stride = raw
    block, num_blocks, block_size = tile
    output, maxima, sums = accumulated
    padded = round_up(block_size)
    for row in range(rows):
        own = position + row // group
        own_end = min(own + 1, seen[1])
        own_begin = max(seen[0], own + 1 - window) if window > 0 else seen[0]
        at = begin + row * stride
        highest = vsplat(-np.inf)
        for i in range(num_blocks):
            first = (block + i) * block_size
            end = min(own_end, first + block_size)
            for slot in range(0, padded, LANES):
                score = vload(scores, at + i * padded + slot)
                if cap > 0.0:
                    score = soft_cap(score, cap)
                score = vkeep(score, own_begin - first - slot, end - first - slot)
                vstore(scores, at + i * padded + slot, score)
                highest = vmax(highest, score)
        now = vmax_lanes(highest)
        if now > maxima[row]:
            shrink = vexp2(vsplat(maxima[row] - now))
            maxima[row] = now
            vstore(sums, row * LANES, vmul(vload(sums, row * LANES), shrink))
            for column in range(row * columns, (row + 1) * columns, LANES):
                vstore(output, column, vmul(vload(output, column), shrink))
        # Nothing seen yet: any finite base makes the weights of minus infinity 0.
        base = vsplat(maxima[row]) if maxima[row] != -np.inf else vsplat(0.0)
        total = vload(sums, row * LANES)
        for column in range(at, at + num_blocks * padded, LANES):
            weight = vexp2(vsub(vload(scores, column), base))
            vstore(scores, column, weight)
            total = vadd(total, weight)
        vstore(sums, row * LANES, total)


@compiled()
def score_block(
    queries: Matrix, keys: Matrix, scores: Matrix, rows: int, padded: int, depth: int, transposed: Any
) -> None:
    """scores[rows, padded] = queries[rows, depth] @ keys[padded, depth].T, for one block of keys."""
    if rows <= FEW_ROWS:
        dot_rows(queries, keys, scores, rows, padded, depth)
        return
    k, k_at, k_stride = keys
    for slot in range(0, padded, LANES):
        for d in range(0, depth, LANES):
            vtranspose(k, k_at + slot * k_stride + d, k_stride, transposed, d * padded + slot, padded)
    values, values_at, values_stride = scores
    for row in range(rows):
        values[values_at + row * values_stride : values_at + row * values_stride + padded] = 0.0
    accumulate(queries, (transposed, 0, padded), scores, rows, padded, depth)


@compiled()
def new_scratch(rows: int, block_size: int, head_dim: int) -> tuple[Any, Any, Any, Any]:
    """Buffers of `attend`: scores of a key tile, and one block of keys, of values and of keys transposed.

    Of a widened block only its own slots are written; zeros keep the rest from being read unset.
    """
    block = round_up(block_size) * round_up(head_dim)
    scores = np.empty(rows * max(1, KEY_TILE // block_size) * round_up(block_size), np.float32)
    return scores, np.zeros(block, np.float32), np.zeros(block, np.float32), np.empty(block, np.float32)


@compiled()
def prefetch_block(cache: Any, at: int, size: int) -> None:
    """Ask for the `size` elements from `at` on. Blocks lie anywhere, which no prefetcher of the CPU foresees."""
    for offset in range(0, size, 64 // cache.itemsize):
        prefetch(cache, at + offset)


@compiled()
def attend(
    queries: Any,
    rows: int,
    group: int,
    position: int,
    caches: tuple[Any, Any],
    strides: tuple[int, int],
    head_at: int,
    table: Any,
    block_size: int,
    head_dim: int,
    seen: tuple[int, int],
    window: int,
    cap: float,
    accumulated: tuple[Any, Any, Any],
    scratch: tuple[Any, Any, Any, Any],
) -> None:
    """One tile against the keys seen = (begin, end) of its sequence, for one KV head.

    queries [rows, padded head_dim] from `load_queries`; row r is the token at `position` + r // group. caches =
    (k, v) flat, strides = (block, slot), head_at = offset of the head in a block, table [M] of this sequence.
    accumulated = (output [rows, padded head_dim], maxima [rows], sums [rows, 8]) is set: output is yet to be
    divided by the sums.

    Of values it reads only the slots of `seen`; of keys it may load other slots of the same block, whose scores
    are masked.
    """
    k, v = caches
    block_stride, slot_stride = strides
    scores, wide_k, wide_v, transposed = scratch
    output, maxima, sums = accumulated
    depth, padded = round_up(head_dim), round_up(block_size)
    # Read in place, unless it is in another format or vectors would run over the end of a row or a block.
    direct = k.itemsize == 4 and depth == head_dim and padded == block_size
    keys_at_hand = readable(k, wide_k) if direct else wide_k
    values_at_hand = readable(v, wide_v) if direct else wide_v
    row_stride = slot_stride if direct else depth
    tile_blocks = max(1, KEY_TILE // block_size)
    stride = tile_blocks * padded
    maxima[:rows] = -np.inf
    sums[: rows * LANES] = 0.0
    output[: rows * depth] = 0.0
    end_block = (seen[1] + block_size - 1) // block_size
    for block in range(seen[0] // block_size, end_block, tile_blocks):
        num_blocks = min(tile_blocks, end_block - block)
        for i in range(num_blocks):
            at = table[block + i] * block_stride + head_at
            prefetch_block(v, at, block_size * slot_stride)
            if not direct:
                widen_rows((k, at, slot_stride), wide_k, depth, block_size, head_dim)
                at = 0
            keys = (keys_at_hand, at, row_stride)
            score_block(
                (queries, 0, depth), keys, (scores, i * padded, stride), rows, padded, depth, transposed
            )
        tile = (block, num_blocks, block_size)
        update_softmax(
            (scores, 0, stride), rows, group, position, tile, seen, window, cap, accumulated, depth
        )
        for i in range(num_blocks):
            following = block + tile_blocks + i
            if following < end_block:
                prefetch_block(k, table[following] * block_stride + head_at, block_size * slot_stride)
            first = (block + i) * block_size
            low = max(seen[0] - first, 0)
            count = min(seen[1] - first, block_size) - low
            at = table[block + i] * block_stride + head_at + low * slot_stride
            if not direct:
                widen_rows((v, at, slot_stride), wide_v, depth, count, head_dim)
                at = 0
            weights, values = (scores, i * padded + low, stride), (values_at_hand, at, row_stride)
            accumulate(weights, values, (output, 0, depth), rows, depth, count)


@compiled()
def load_queries(
    q: Any,
    at: int,
    token_stride: int,
    head_stride: int,
    tokens: int,
    group: int,
    head_dim: int,
    factor: float,
    queries: Any,
) -> None:
    """queries [tokens * group, padded head_dim] = q * factor, zeros in the padding."""
    depth = round_up(head_dim)
    multiplier = vsplat(factor)
    for row in range(tokens * group):
        source = at + (row // group) * token_stride + (row % group) * head_stride
        d = 0
        while d + LANES <= head_dim:
            vstore(queries, row * depth + d, vmul(vload(q, source + d), multiplier))
            d += LANES
        if d < head_dim:
            vstore(queries, row * depth + d, vmul(vload_lanes(q, source + d, head_dim - d), multiplier))


@compiled()
def store_row(row: Any, row_at: int, total: float, head_dim: int, out: Any, out_at: int) -> None:
    """out[head_dim] = row / total."""
    divisor = vsplat(total)
    d = 0
    while d + LANES <= head_dim:
        vstore(out, out_at + d, vdiv(vload(row, row_at + d), divisor))
        d += LANES
    if d < head_dim:
        vstore_lanes(out, out_at + d, vdiv(vload(row, row_at + d), divisor), head_dim - d)
