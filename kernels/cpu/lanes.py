"""Attention of many rows on the CPU, each row of queries in a lane of its own: the walk over keys of chunks.

Owns masking and the online softmax of these rows; `lane_products` owns the products, `tiles` the walk of few rows,
whose scores are dot products instead. A key tile is brought together once for all rows, widened to float32; panel after
panel of rows then takes it through both products and the softmax, and of it no keys that none of the panel's rows sees.

Key tiles begin at whole multiples of their size, and sums add in an order that knows nothing but the place of a key in
its tile, with zeros for those that are masked: a row's result is the same to the bit whatever rows stand beside it.

Offsets and strides are in elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.kernels.cpu.lane_products import PANEL, TOGETHER, add_values, score_keys
from octavo.kernels.cpu.products import prefetch_block
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import LANES, WIDTH, vadd, vexp2, vmax, vmul, vsub, vtranspose
from octavo.kernels.cpu.tiles import block_scale, key_tile_blocks, round_up, soft_cap, widen
from octavo.kernels.cpu.wide import (
    wide_between,
    wide_finite_or_zero,
    wide_load,
    wide_splat,
    wide_store,
)

Lanes = tuple[Any, Any, Any, Any, Any, Any, Any, Any]


@compiled()
def whole_lanes(rows: int) -> int:
    """`rows` padded to whole vectors: sequences in one item begin with a vector each."""
    return (rows + WIDTH - 1) // WIDTH * WIDTH


@compiled()
def whole_panels(rows: int) -> int:
    """`rows` padded to whole panels."""
    return (rows + PANEL - 1) // PANEL * PANEL


@compiled()
def new_lanes(rows: int, block_size: int, head_dim: int) -> Lanes:
    """Buffers of `attend_lanes`, next to nothing for no rows.

    queries and output [panels, depth, PANEL]; maxima, sums and tokens [panels, PANEL]; of one key tile the scores
    [keys, PANEL], what outputs shrink by [PANEL], keys and values [2, keys, depth]
    """
    lanes, depth = whole_panels(rows), round_up(head_dim)
    keys = round_up(key_tile_blocks(block_size) * block_size) if rows > 0 else 0
    return (
        np.empty(lanes * depth, np.float32),
        np.empty(lanes * depth, np.float32),
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
        np.empty(keys * PANEL, np.float32),
        np.empty(PANEL, np.float32),
        np.zeros(2 * keys * depth, np.float32),
    )


@compiled()
def number_lanes(buffers: Lanes, first_row: int, tokens: int, group: int) -> None:
    """Which token of its sequence stands in each lane from `first_row` on; the lanes left of the last vector belong to
    the last."""
    numbers = buffers[4]
    for token in range(tokens):
        numbers[first_row + token * group : first_row + (token + 1) * group] = token
    numbers[first_row + tokens * group : first_row + whole_lanes(tokens * group)] = tokens - 1


@compiled()
def begin_lanes(buffers: Lanes, queries: Any, rows: int, depth: int) -> None:
    """Put queries [rows, depth] in their lanes, with nothing seen yet."""
    lane_queries, output, maxima, sums, _, _, _, _ = buffers
    lanes = whole_lanes(rows)
    for row in range(0, lanes, LANES):
        at = row // PANEL * PANEL * depth + row % PANEL
        for d in range(0, depth, LANES):
            vtranspose(queries, row * depth + d, depth, lane_queries, at + d * PANEL, PANEL)
    output[: whole_panels(rows) * depth] = 0.0
    maxima[:lanes] = -np.inf
    sums[:lanes] = 0.0


@compiled()
def end_lanes(buffers: Lanes, rows: int, depth: int, accumulated: tuple[Any, Any, Any]) -> None:
    """Put what `attend_lanes` summed up into accumulated = (output [rows, depth], maxima [rows], sums [rows, 8]), sums
    into the first of the eight lanes.
    """
    _, lane_output, lane_maxima, lane_sums, _, _, _, _ = buffers
    output, maxima, sums = accumulated
    lanes = whole_lanes(rows)
    for row in range(0, lanes, LANES):
        at = row // PANEL * PANEL * depth + row % PANEL
        for d in range(0, depth, LANES):
            vtranspose(lane_output, at + d * PANEL, PANEL, output, row * depth + d, depth)
    maxima[:lanes] = lane_maxima[:lanes]
    sums[: lanes * LANES] = 0.0
    for row in range(rows):
        sums[row * LANES] = lane_sums[row]


@compiled()
def gather(
    cache: Any,
    scales: Any,
    places: tuple[Any, int, int, int],
    strides: tuple[int, int, int],
    sizes: tuple[int, int],
    seen: tuple[int, int],
    signed: bool,
    target: Any,
    target_at: int,
) -> None:
    """Rows seen = (begin, end) of a key tile into target [keys, padded head_dim], as float32.

    places = (block table, first block of the tile, offset of the head in a block, KV head); strides as in
    `tiles.attend`; sizes = (block_size, head_dim).
    """
    table, first_block, head_at, kv_head = places
    block_stride, slot_stride, scale_stride = strides
    block_size, head_dim = sizes
    depth = round_up(head_dim)
    for i in range(seen[0] // block_size, (seen[1] + block_size - 1) // block_size):
        low, high = max(seen[0], i * block_size), min(seen[1], (i + 1) * block_size)
        block = table[first_block + i]
        at = block * block_stride + head_at + (low - i * block_size) * slot_stride
        scale = block_scale(scales, block * scale_stride + kv_head)
        to = target[target_at + low * depth :]
        widen((cache, at, slot_stride), to, depth, high - low, head_dim, scale, signed)


@compiled()
def weigh(
    buffers: Lanes,
    panel: int,
    vectors: int,
    first: int,
    seen: tuple[int, int],
    bounds: tuple[int, int],
    masked: bool,
    cap: float,
) -> None:
    """Turn scores, in units of log2, of `vectors` of a panel from lane `first` on into weights.

    What outputs shrink by is left for `add_values`; maxima and sums are brought up to date.

    seen = (begin, end) of the tile's keys that any of these rows sees; masked says that not all rows see all of them.
    bounds: what a row's token is added to for the first key that it sees, and for the one behind its last, in the tile.
    """
    _, _, maxima, sums, tokens, scores, shrink, _ = buffers
    low, high = seen[0] // TOGETHER * TOGETHER, (seen[1] + TOGETHER - 1) // TOGETHER * TOGETHER
    for v in range(first, first + vectors * WIDTH, WIDTH):
        lane = panel * PANEL + v
        highest = wide_splat(-np.inf)
        highest_1, highest_2, highest_3 = highest, highest, highest
        if masked or cap > 0.0:
            token = wide_load(tokens, lane)
            begin = vmax(vadd(token, wide_splat(bounds[0])), wide_splat(seen[0]))
            # The smaller of two is minus the larger of both negated.
            limit = vsub(wide_splat(0.0), vadd(token, wide_splat(bounds[1])))
            end = vsub(wide_splat(0.0), vmax(limit, wide_splat(-seen[1])))
            for key in range(low, high):
                at = key * PANEL + v
                score = wide_load(scores, at)
                if cap > 0.0:
                    score = soft_cap(score, cap)
                score = wide_between(score, begin, wide_splat(key), end)
                wide_store(scores, at, score)
                highest = vmax(highest, score)
        else:
            for key in range(low, high, TOGETHER):
                at = key * PANEL + v
                highest = vmax(highest, wide_load(scores, at))
                highest_1 = vmax(highest_1, wide_load(scores, at + PANEL))
                highest_2 = vmax(highest_2, wide_load(scores, at + 2 * PANEL))
                highest_3 = vmax(highest_3, wide_load(scores, at + 3 * PANEL))
        highest = vmax(vmax(highest, highest_1), vmax(highest_2, highest_3))
        before = wide_load(maxima, lane)
        now = vmax(before, highest)
        # Nothing seen yet: any finite base makes the weights of minus infinity 0.
        base = wide_finite_or_zero(now)
        wide_store(maxima, lane, now)
        shrinks = vexp2(vsub(before, base))
        wide_store(shrink, v, shrinks)
        total = wide_splat(0.0)
        total_1, total_2, total_3 = total, total, total
        for key in range(low, high, TOGETHER):
            at = key * PANEL + v
            weight = vexp2(vsub(wide_load(scores, at), base))
            weight_1 = vexp2(vsub(wide_load(scores, at + PANEL), base))
            weight_2 = vexp2(vsub(wide_load(scores, at + 2 * PANEL), base))
            weight_3 = vexp2(vsub(wide_load(scores, at + 3 * PANEL), base))
            wide_store(scores, at, weight)
            wide_store(scores, at + PANEL, weight_1)
            wide_store(scores, at + 2 * PANEL, weight_2)
            wide_store(scores, at + 3 * PANEL, weight_3)
            total, total_1 = vadd(total, weight), vadd(total_1, weight_1)
            total_2, total_3 = vadd(total_2, weight_2), vadd(total_3, weight_3)
        total = vadd(vadd(total, total_1), vadd(total_2, total_3))
        wide_store(sums, lane, vadd(vmul(wide_load(sums, lane), shrinks), total))


@compiled()
def attend_lanes(
    buffers: Lanes,
    first_row: int,
    rows: int,
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
    upcoming: Any,
) -> None:
    """Rows [first_row, first_row + rows) of an item against the keys seen = (begin, end), for one KV head.

    buffers: of `new_lanes`, begun by `begin_lanes`; first_row is a whole vector. A row is the token at `position` + its
    entry of tokens. Everything else is as in `tiles.attend`; it reads only slots of `seen`.
    """
    queries, output, _, _, tokens, scores, shrink, key_tile = buffers
    k, v, k_scales, v_scales, signed = caches
    depth = round_up(head_dim)
    sizes = (block_size, head_dim)
    tile_blocks = key_tile_blocks(block_size)
    tile_keys = tile_blocks * block_size
    values_at = key_tile.shape[0] // 2
    end_block = (seen[1] + block_size - 1) // block_size
    last_row = first_row + rows - 1
    # Without a window farther back than the first key, whichever of these sequences has the most tokens.
    reach = window if window > 0 else position + 1 + rows
    for begin in range(seen[0] // tile_keys * tile_keys, seen[1], tile_keys):
        low, high = max(seen[0] - begin, 0), min(seen[1] - begin, tile_keys)
        first_block = begin // block_size
        places = (table, first_block, head_at, kv_head)
        gather(k, k_scales, places, strides, sizes, (low, high), signed, key_tile, 0)
        gather(v, v_scales, places, strides, sizes, (low, high), signed, key_tile, values_at)
        for i in range(tile_blocks):
            following = first_block + tile_blocks + i
            ahead = table[following] * strides[0] + head_at if following < end_block else upcoming[i]
            prefetch_block(k, ahead, block_size * depth)
            prefetch_block(v, ahead, block_size * depth)
        # A row's token added to these gives the first key that it sees, and the one behind its last.
        bounds = (position + 1 - reach - begin, position + 1 - begin)
        for panel in range(first_row // PANEL, last_row // PANEL + 1):
            first = max(first_row - panel * PANEL, 0)
            last = min(last_row - panel * PANEL, PANEL - 1)
            vectors = (last - first) // WIDTH + 1
            first_token = int(tokens[panel * PANEL + first])
            last_token = int(tokens[panel * PANEL + last])
            own_low = max(low, bounds[0] + first_token)
            own_high = min(high, bounds[1] + last_token)
            if own_low >= own_high:
                continue
            whole = own_low // TOGETHER * TOGETHER
            masked = whole != own_low or own_high % TOGETHER != 0
            masked |= bounds[0] + last_token > own_low or bounds[1] + first_token < own_high
            lanes = panel * PANEL * depth + first
            score_keys(
                vectors,
                (key_tile.ctypes.data + whole * depth * 4, depth),
                queries.ctypes.data + lanes * 4,
                scores.ctypes.data + (whole * PANEL + first) * 4,
                own_high - whole,
                depth,
            )
            weigh(buffers, panel, vectors, first, (own_low, own_high), bounds, masked, cap)
            add_values(
                vectors,
                (key_tile.ctypes.data + (values_at + own_low * depth) * 4, depth),
                scores.ctypes.data + (own_low * PANEL + first) * 4,
                output.ctypes.data + lanes * 4,
                shrink.ctypes.data + first * 4,
                own_high - own_low,
                depth,
            )
