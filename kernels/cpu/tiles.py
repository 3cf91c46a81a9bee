"""One tile of attention on the CPU: a few query rows against the keys that one block table names.

Owns the walk over keys, masking, and the online softmax of Milakov and Gimelshein (2018); `products` owns the inner
loops. Keys are walked `KEY_TILE` at a time, block by block where they lie in the cache, and a block
is read once for all rows. A walk goes on from what its rows have summed up: some keys with rows of other
sequences, the next alone, and a row's result is the same to the bit as if all had been walked alone.
Knows nothing of batches, threads or torch.

Offsets and strides are in elements. Keys and values may be float32, uint16 (bfloat16 bits), int16 (float16 bits) or, of
a quantised cache, uint8 (bytes of either format), see `simd`; everything else is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from octavo.kernels.cpu.products import (
    Matrix,
    accumulate_few,
    dot_rows,
    prefetch_block,
)
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    LOG2_E,
    readable,
    vadd,
    vdiv,
    vexp2,
    vkeep,
    vload,
    vload_lanes,
    vmax,
    vmax_lanes,
    vmul,
    vsplat,
    vsplat_like,
    vstore,
    vstore_lanes,
    vsub,
)

KEY_TILE = 64
"""Keys between two updates of the running maximum, in whole blocks."""
FEW_ROWS = 8
"""Up to so many rows of a sequence their scores are dot products with keys as they lie; above, rows have lanes of their
own, see `lanes`. The two add up in other orders, so rows keep to the way of their sequence whatever is beside them."""


@compiled()
def key_tile_blocks(block_size: int) -> int:
    """Blocks of a key tile."""
    return max(1, KEY_TILE // block_size)


@compiled()
def round_up(count: int) -> int:
    """`count` padded to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


@compiled()
def widen_rows(
    narrow: Matrix, target: Any, target_stride: int, rows: int, columns: int, factor: float
) -> None:
    """target[rows, columns] = factor * narrow[rows, columns] as float32; columns of target up to a whole vector get
    0."""
    source, source_at, source_stride = narrow
    multiplier = vsplat(factor)
    for row in range(rows):
        at = source_at + row * source_stride
        to = row * target_stride
        column = 0
        while column + LANES <= columns:
            vstore(target, to + column, vmul(vload(source, at + column), multiplier))
            column += LANES
        if column < columns:
            last = vload_lanes(source, at + column, columns - column)
            vstore(target, to + column, vmul(last, multiplier))


def block_scale(scales: Any, at: int) -> Any:
    """scales[at] of a quantised cache; 1 where there are none (None), known when the caller is compiled."""
    return np.float32(1.0) if scales is None else scales[at]


@compiled()
def widen_bytes(
    narrow: Matrix, target: Any, target_stride: int, rows: int, columns: int, factor: float, signed: bool
) -> None:
    """`widen_rows` of a quantised cache's bytes: int8 if `signed`, else e4m3. Told apart here, once a block, so that
    all the rest is compiled once for both."""
    if signed:
        as_signed = (narrow[0].view(np.int8), narrow[1], narrow[2])
        widen_rows(as_signed, target, target_stride, rows, columns, factor)
    else:
        widen_rows(narrow, target, target_stride, rows, columns, factor)


def widen(
    narrow: Any, target: Any, target_stride: Any, rows: Any, columns: Any, factor: Any, signed: Any
) -> None:
    """`widen_bytes` of bytes, else `widen_rows`; chosen when the caller is compiled."""
    raise NotImplementedError("for compiled code")


@overload(widen)
def _compile_widen(
    narrow: Any, target: Any, target_stride: Any, rows: Any, columns: Any, factor: Any, signed: Any
) -> Any:
    def of_bytes(
        narrow: Any, target: Any, target_stride: Any, rows: Any, columns: Any, factor: Any, signed: Any
    ) -> None:
        widen_bytes(narrow, target, target_stride, rows, columns, factor, signed)

    def of_words(
        narrow: Any, target: Any, target_stride: Any, rows: Any, columns: Any, factor: Any, signed: Any
    ) -> None:
        widen_rows(narrow, target, target_stride, rows, columns, factor)

    return of_bytes if narrow[0].dtype == types.uint8 else of_words


@overload(block_scale)
def _compile_block_scale(scales: Any, at: int) -> Any:
    def one(scales: Any, at: int) -> Any:
        return np.float32(1.0)

    def found(scales: Any, at: int) -> Any:
        return scales[at]

    return one if isinstance(scales, types.NoneType) else found


@compiled()
def soft_cap(scores: Any, cap: float) -> Any:
    """cap * tanh(scores), in float32: tanh(x) = 1 - 2 / (exp(2 x) + 1), infinities included."""
    zero, one, two = vsplat_like(scores, 0.0), vsplat_like(scores, 1.0), vsplat_like(scores, 2.0)
    # exp2 is valid below 128, and tanh is 1 in float32 long before.
    limit = vsplat_like(scores, -20.0)
    bounded = vmax(limit, vsub(zero, vmax(limit, vsub(zero, scores))))
    power = vexp2(vmul(bounded, vsplat_like(scores, 2.0 * LOG2_E)))
    return vmul(vsplat_like(scores, cap), vsub(one, vdiv(two, vadd(power, one))))


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
    accumulated: tuple[Any, Any, Any, int],
    columns: int,
) -> None:
    """Turn one key tile of raw scores, in units of log2, into weights, and rescale what was summed before.

    tile = (first block, number of blocks, block_size): the columns of `raw`, each block padded to whole
    vectors. seen = (begin, end) of the keys that any row may see. accumulated: see `attend`, with rows of `columns`.
    """
    scores, begin, stride = raw
    block, num_blocks, block_size = tile
    output, maxima, sums, first_row = accumulated
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
        kept = first_row + row
        if now > maxima[kept]:
            shrink = vexp2(vsplat(maxima[kept] - now))
            maxima[kept] = now
            vstore(sums, kept * LANES, vmul(vload(sums, kept * LANES), shrink))
            for column in range(kept * columns, (kept + 1) * columns, LANES):
                vstore(output, column, vmul(vload(output, column), shrink))
        # Nothing seen yet: any finite base makes the weights of minus infinity 0.
        base = vsplat(maxima[kept]) if maxima[kept] != -np.inf else vsplat(0.0)
        total = vload(sums, kept * LANES)
        for column in range(at, at + num_blocks * padded, LANES):
            weight = vexp2(vsub(vload(scores, column), base))
            vstore(scores, column, weight)
            total = vadd(total, weight)
        vstore(sums, kept * LANES, total)


@compiled()
def new_scratch(rows: int, block_size: int, head_dim: int) -> tuple[Any, Any, Any]:
    """Buffers of `attend`: scores of a key tile, one block of keys, and one of values.

    Of a widened block only its own slots are written; zeros keep the rest from being read unset.
    """
    block = round_up(block_size) * round_up(head_dim)
    scores = np.empty(rows * key_tile_blocks(block_size) * round_up(block_size), np.float32)
    return scores, np.zeros(block, np.float32), np.zeros(block, np.float32)


@compiled()
def attend(
    queries: Any,
    rows: int,
    group: int,
    position: int,
    caches: tuple[Any, Any, Any, Any, bool],
    strides: tuple[int, int, int],
    kv_head: int,
    head_at: int,
    table: Any,
    block_size: int,
    head_dim: int,
    seen: tuple[int, int],
    window: int,
    cap: float,
    accumulated: tuple[Any, Any, Any, int],
    scratch: tuple[Any, Any, Any],
    upcoming: Any,
) -> None:
    """Rows of one tile, few of each sequence, against the keys seen = (begin, end), for one KV head.

    queries [tile rows, padded head_dim] from `load_queries`; row r of these is the token at `position` + r // group.
    caches = (k, v, k_scales, v_scales, signed) flat, the scales None but for quantised ones, whose
    bytes are int8 if signed; strides = (block, slot, block of the scales), head_at = offset of the head in a block,
    table [M] names the blocks.
    accumulated = (output [tile rows, padded head_dim], maxima [tile rows], sums [tile rows, 8], one partial sum a lane,
    first row) is added to, from the first row on, and begins as zeros, maxima as minus infinity; in the end output is
    yet to be divided by the sums. `begin` lies on the edge of a key tile of each row's walk.
    upcoming int64 [blocks of a key tile]: where the keys lie that are wanted after this.

    Of values it reads only the slots of `seen`; of keys it may load other slots of the same block, whose scores
    are masked.
    """
    k, v, k_scales, v_scales, signed = caches
    block_stride, slot_stride, scale_stride = strides
    scores, wide_k, wide_v = scratch
    output, _, _, first_row = accumulated
    depth, padded = round_up(head_dim), round_up(block_size)
    # Read in place, unless it is in another format or vectors would run over the end of a row or a block.
    direct = k.itemsize == 4 and depth == head_dim and padded == block_size
    keys_at_hand = readable(k, wide_k) if direct else wide_k
    values_at_hand = readable(v, wide_v) if direct else wide_v
    row_stride = slot_stride if direct else depth
    tile_blocks = key_tile_blocks(block_size)
    stride = tile_blocks * padded
    own = first_row * depth
    end_block = (seen[1] + block_size - 1) // block_size
    for block in range(seen[0] // block_size, end_block, tile_blocks):
        num_blocks = min(tile_blocks, end_block - block)
        for i in range(num_blocks):
            at = table[block + i] * block_stride + head_at
            values_ahead = (v, at)
            if not direct:
                scale = block_scale(k_scales, table[block + i] * scale_stride + kv_head)
                widen((k, at, slot_stride), wide_k, depth, block_size, head_dim, scale, signed)
                at = 0
            keys = (keys_at_hand, at, row_stride)
            result = (scores, i * padded, stride)
            dot_rows((queries, own, depth), keys, result, rows, padded, depth, values_ahead)
        if block + tile_blocks >= end_block:
            # The values of a short last tile are too few to ask for all of these between them.
            for i in range(num_blocks, tile_blocks):
                prefetch_block(k, upcoming[i], padded * depth)
        tile = (block, num_blocks, block_size)
        update_softmax(
            (scores, 0, stride), rows, group, position, tile, seen, window, cap, accumulated, depth
        )
        for i in range(num_blocks):
            following = block + tile_blocks + i
            ahead = table[following] * block_stride + head_at if following < end_block else upcoming[i]
            keys_ahead = (k, ahead)
            first = (block + i) * block_size
            low = max(seen[0] - first, 0)
            count = min(seen[1] - first, block_size) - low
            at = table[block + i] * block_stride + head_at + low * slot_stride
            if not direct:
                scale = block_scale(v_scales, table[block + i] * scale_stride + kv_head)
                widen((v, at, slot_stride), wide_v, depth, count, head_dim, scale, signed)
                at = 0
            weights, values = (scores, i * padded + low, stride), (values_at_hand, at, row_stride)
            accumulate_few(weights, values, (output, own, depth), rows, depth, count, keys_ahead)


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
    first_row: int,
) -> None:
    """queries [tile rows, padded head_dim] = q * factor, from first_row on, zeros in the padding."""
    depth = round_up(head_dim)
    multiplier = vsplat(factor)
    for row in range(tokens * group):
        source = at + (row // group) * token_stride + (row % group) * head_stride
        target = (first_row + row) * depth
        d = 0
        while d + LANES <= head_dim:
            vstore(queries, target + d, vmul(vload(q, source + d), multiplier))
            d += LANES
        if d < head_dim:
            vstore(queries, target + d, vmul(vload_lanes(q, source + d, head_dim - d), multiplier))


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
