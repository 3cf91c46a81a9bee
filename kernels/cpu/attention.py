"""Paged attention on the CPU: numba twin of `kernels.paged_attention`.

Owns the cutting of one ragged batch into work items and their handing out; `tiles` owns the arithmetic of an
item, `ops` the tensors.

An item is a tile of query rows (a few tokens times the query heads that share one KV head) against a range of
keys. Items are handed out dynamically, the longest kinds first, since other work shares the cores.

A sequence with no more rows than one tile (a decode, a short chunk) is cut along its keys too, at multiples of
`SPLIT_KEYS`, and the parts are merged as in Flash-Decoding (Dao and others, 2023). Where the cuts fall depends
on that sequence alone, never on its neighbours or the number of threads, so the batch doesn't change a row's
result by one bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from octavo.kernels.cpu.memory import float32_at, int32_at
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    LOG2_E,
    fetch_add,
    vexp2,
    vfma,
    vload,
    vmax_lanes,
    vsplat,
    vstore,
    vsum_lanes,
)
from octavo.kernels.cpu.tiles import attend, load_queries, new_scratch, round_up, store_row

TILE_ROWS = 48
"""Query rows of a tile, at most, unless one token has more heads than that on one KV head."""
SPLIT_KEYS = 512
"""Keys of an item of a short sequence, in whole blocks."""
ALONE_PRODUCTS = 1 << 18
"""Up to so many multiplications (some 30 microseconds) the calling thread works alone: waking a second one
gains little, and where other processes want the core, waiting for it can cost a time slice of theirs."""

# Columns of the item table.
SEQ, TOKEN, NUM_TOKENS, KEY_BEGIN, KEY_END, PART, NUM_PARTS = range(7)
ITEM_FIELDS = 7


@compiled()
def tile_tokens(group: int) -> int:
    """Tokens of a tile, from the query heads on each KV head."""
    return max(1, TILE_ROWS // group)


@compiled()
def plan_items(
    block_tables: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    num_blocks: int,
    block_size: int,
    group: int,
    window: int,
) -> tuple[Any, int, int]:
    """int64 [N, 7] items (each stands for all KV heads), rows of parts to merge, and rows times keys in all.

    Raises ValueError where the batch names a block or a length that cannot be, before anything is read.
    """
    per_tile = tile_tokens(group)
    split = max(1, SPLIT_KEYS // block_size) * block_size
    num_seqs = context_lens.shape[0]
    num_items = 0
    products = 0
    for s in range(num_seqs):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        context = context_lens[s]
        if tokens < 0 or tokens > context:
            raise ValueError("a sequence has more rows than context, or cu_seqlens_q falls")
        blocks = (context + block_size - 1) // block_size
        if blocks > block_tables.shape[1]:
            raise ValueError("a block table is shorter than its context")
        if tokens > 0:
            first = 0 if window <= 0 else max(0, context - tokens - window + 1)
            for i in range(first // block_size, blocks):
                if block_tables[s, i] < 0 or block_tables[s, i] >= num_blocks:
                    raise ValueError("a block table names a block outside the cache")
        products += np.int64(tokens) * context * group
        num_items += (tokens + per_tile - 1) // per_tile + context // split + 1
    items = np.empty((num_items, ITEM_FIELDS), np.int64)
    count = 0
    part_rows = 0
    # Long chunks first, the last and heaviest tile of each first: what is left at the end is small.
    for s in range(num_seqs):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        if tokens <= per_tile:
            continue
        for tile in range((tokens + per_tile - 1) // per_tile - 1, -1, -1):
            token = tile * per_tile
            taken = min(per_tile, tokens - token)
            position = context_lens[s] - tokens + token
            items[count, SEQ] = s
            items[count, TOKEN] = token
            items[count, NUM_TOKENS] = taken
            items[count, KEY_BEGIN] = 0 if window <= 0 else max(0, position - window + 1)
            items[count, KEY_END] = position + taken
            items[count, PART] = -1
            items[count, NUM_PARTS] = 1
            count += 1
    for s in range(num_seqs):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        if tokens == 0 or tokens > per_tile:
            continue
        end = np.int64(context_lens[s])
        begin = np.int64(0) if window <= 0 else max(np.int64(0), end - tokens - window + 1)
        first_part = begin // split
        parts = (end + split - 1) // split - first_part
        for part in range(parts):
            items[count, SEQ] = s
            items[count, TOKEN] = 0
            items[count, NUM_TOKENS] = tokens
            items[count, KEY_BEGIN] = max(begin, (first_part + part) * split)
            items[count, KEY_END] = min(end, (first_part + part + 1) * split)
            items[count, PART] = part_rows if parts > 1 else -1
            items[count, NUM_PARTS] = parts
            if parts > 1:
                part_rows += tokens * group
            count += 1
    return items[:count], part_rows, products


@compiled()
def work(
    counter: Any,
    items: Any,
    batch: tuple[Any, Any, Any],
    q: Any,
    q_strides: tuple[int, int],
    caches: tuple[Any, Any, Any, Any, bool],
    kv_strides: tuple[int, int, int, int],
    shape: tuple[int, int, int, int],
    options: tuple[int, float, float],
    out: Any,
    out_strides: tuple[int, int],
    parts: tuple[Any, Any, Any],
) -> None:
    """Take items until none is left. One call a thread; `counter` [1] is shared by all."""
    table, cu_seqlens_q, context_lens = batch
    num_kv_heads, group, block_size, head_dim = shape
    window, scale, cap = options
    part_outputs, part_maxima, part_sums = parts
    depth = round_up(head_dim)
    tile_rows = tile_tokens(group) * group
    queries = np.empty(tile_rows * depth, np.float32)
    output = np.empty(tile_rows * depth, np.float32)
    maxima = np.empty(tile_rows, np.float32)
    sums = np.empty(tile_rows * LANES, np.float32)
    scratch = new_scratch(tile_rows, block_size, head_dim)
    # Scores in units of log2, so that the exponentials are powers of two.
    factor = np.float32(scale / cap if cap > 0.0 else scale * LOG2_E)
    cap_log2 = np.float32(cap * LOG2_E)
    while True:
        ticket = fetch_add(counter, 1)
        if ticket >= items.shape[0] * num_kv_heads:
            break
        item, kv_head = ticket // num_kv_heads, ticket % num_kv_heads
        sequence, tokens = items[item, SEQ], items[item, NUM_TOKENS]
        token = cu_seqlens_q[sequence] + items[item, TOKEN]
        position = context_lens[sequence] - cu_seqlens_q[sequence + 1] + token
        rows = tokens * group
        q_at = token * q_strides[0] + kv_head * group * q_strides[1]
        load_queries(q, q_at, q_strides[0], q_strides[1], tokens, group, head_dim, factor, queries)
        attend(
            queries, rows, group, position, caches, (kv_strides[0], kv_strides[2], kv_strides[3]), kv_head,
            kv_head * kv_strides[1], table[sequence], block_size, head_dim,
            (items[item, KEY_BEGIN], items[item, KEY_END]), window, cap_log2, (output, maxima, sums), scratch,
        )  # fmt: skip
        if items[item, PART] < 0:
            for row in range(rows):
                at = (token + row // group) * out_strides[0] + (kv_head * group + row % group) * out_strides[
                    1
                ]
                store_row(output, row * depth, vsum_lanes(vload(sums, row * LANES)), head_dim, out, at)
        else:
            first = items[item, PART] * num_kv_heads + kv_head * rows
            for row in range(rows):
                part_maxima[first + row] = maxima[row]
                part_sums[first + row] = vsum_lanes(vload(sums, row * LANES))
            part_outputs[first * depth : (first + rows) * depth] = output[: rows * depth]


@compiled()
def merge_parts(
    items: Any,
    cu_seqlens_q: Any,
    shape: tuple[int, int, int, int],
    out: Any,
    out_strides: tuple[int, int],
    parts: tuple[Any, Any, Any],
) -> None:
    """Add up the parts of each sequence that was cut along its keys, in the order of its keys."""
    num_kv_heads, group, _, head_dim = shape
    part_outputs, part_maxima, part_sums = parts
    depth = round_up(head_dim)
    merged = np.empty(depth, np.float32)
    item = 0
    while item < items.shape[0]:
        num_parts = items[item, NUM_PARTS]
        rows = items[item, NUM_TOKENS] * group if num_parts > 1 else 0
        for row in range(num_kv_heads * rows):
            # Part after part, head after head, row after row: as `work` laid them out.
            first = items[item, PART] * num_kv_heads + row
            places = range(first, first + num_parts * num_kv_heads * rows, num_kv_heads * rows)
            highest = np.float32(-np.inf)
            for place in places:
                highest = max(highest, part_maxima[place])
            merged[:] = 0.0
            total = np.float32(0.0)
            for place in places:
                weight = vexp2(vsplat(part_maxima[place] - highest))
                total += part_sums[place] * vmax_lanes(weight)
                for d in range(0, depth, LANES):
                    vstore(merged, d, vfma(vload(part_outputs, place * depth + d), weight, vload(merged, d)))
            kv_head, own = row // rows, row % rows
            token = cu_seqlens_q[items[item, SEQ]] + own // group
            at = token * out_strides[0] + (kv_head * group + own % group) * out_strides[1]
            store_row(merged, 0, total, head_dim, out, at)
        item += num_parts


@compiled(parallel=True)
def work_together(
    threads: int,
    counter: Any,
    items: Any,
    batch: tuple[Any, Any, Any],
    q: Any,
    q_strides: tuple[int, int],
    caches: tuple[Any, Any, Any, Any, bool],
    kv_strides: tuple[int, int, int, int],
    shape: tuple[int, int, int, int],
    options: tuple[int, float, float],
    out: Any,
    out_strides: tuple[int, int],
    parts: tuple[Any, Any, Any],
) -> None:
    """`work` on every thread. Nothing else stands here: numba would make a parallel loop of any array fill."""
    for _ in prange(threads):
        work(counter, items, batch, q, q_strides, caches, kv_strides, shape, options, out, out_strides, parts)


@compiled()
def paged_attention_kernel(
    q: Any,
    q_strides: tuple[int, int],
    caches: tuple[Any, Any, Any, Any, bool],
    kv_strides: tuple[int, int, int, int],
    batch: tuple[Any, Any, Any],
    shape: tuple[int, int, int, int],
    options: tuple[int, float, float],
    out: Any,
    out_strides: tuple[int, int],
    threads: int,
) -> None:
    """The whole batch. All arrays but the table are flat; strides are in elements.

    q, out      float32, with (token, head) strides
    caches      (k, v, k_scales, v_scales, signed), see `tiles.attend`, with strides kv_strides = (block, head, slot,
                block of the scales); a slot's head_dim elements are neighbours, and so are a block's scales
    batch       (block_tables int32 [S, M], cu_seqlens_q int32 [S + 1], context_lens int32 [S])
    shape       (num_kv_heads, group, block_size, head_dim)
    options     (sliding window, 0 for none; scale; soft cap, 0.0 for none)
    """
    table, cu_seqlens_q, context_lens = batch
    num_kv_heads, group, block_size, head_dim = shape
    # Behind the last block's numbers may be less than a stride.
    num_cache_blocks = (caches[0].shape[0] + kv_strides[0] - 1) // kv_strides[0]
    items, part_rows, products = plan_items(
        table, cu_seqlens_q, context_lens, num_cache_blocks, block_size, group, options[0]
    )
    part_rows *= num_kv_heads
    parts = (
        np.empty(part_rows * round_up(head_dim), np.float32),
        np.empty(part_rows, np.float32),
        np.empty(part_rows, np.float32),
    )
    counter = np.zeros(1, np.int64)
    if threads == 1 or products * num_kv_heads * head_dim * 2 <= ALONE_PRODUCTS:
        work(counter, items, batch, q, q_strides, caches, kv_strides, shape, options, out, out_strides, parts)
    else:
        work_together(
            threads,
            counter,
            items,
            batch,
            q,
            q_strides,
            caches,
            kv_strides,
            shape,
            options,
            out,
            out_strides,
            parts,
        )
    if part_rows > 0:
        merge_parts(items, cu_seqlens_q, shape, out, out_strides, parts)


@compiled()
def paged_attention_float32(
    q: tuple[int, int, int],
    k_cache_at: int,
    v_cache_at: int,
    num_blocks: int,
    tables: tuple[int, int, int],
    cu_seqlens_q_at: int,
    context_lens_at: int,
    shape: tuple[int, int, int, int],
    options: tuple[int, float, float],
    out: tuple[int, int, int],
    num_tokens: int,
    threads: int,
) -> None:
    """`paged_attention_kernel` of float32 tensors given by address.

    q, out  (address, token stride, head stride); tables = (address, sequences, blocks a row)
    """
    num_kv_heads, group, block_size, head_dim = shape
    cache_size = num_blocks * num_kv_heads * block_size * head_dim
    q_size = (num_tokens - 1) * q[1] + (num_kv_heads * group - 1) * q[2] + head_dim
    out_size = (num_tokens - 1) * out[1] + (num_kv_heads * group - 1) * out[2] + head_dim
    table = int32_at(tables[0], tables[1] * tables[2]).reshape((tables[1], tables[2]))
    paged_attention_kernel(
        float32_at(q[0], q_size),
        (q[1], q[2]),
        (float32_at(k_cache_at, cache_size), float32_at(v_cache_at, cache_size), None, None, False),
        (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 0),
        (table, int32_at(cu_seqlens_q_at, tables[1] + 1), int32_at(context_lens_at, tables[1])),
        shape,
        options,
        float32_at(out[0], out_size),
        (out[1], out[2]),
        threads,
    )
