"""Paged attention on the CPU: numba twin of `kernels.paged_attention`.

Owns the handing out of a batch's items and the putting together of their results; `plan` owns what an item is, `tiles`
the arithmetic of its rows, `ops` the tensors. Items are handed out dynamically, the longest kinds first, since other
work shares the cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from octavo.kernels.cpu.lanes import (
    attend_lanes,
    begin_lanes,
    end_lanes,
    new_lanes,
    number_lanes,
    whole_lanes,
)
from octavo.kernels.cpu.memory import float32_at, int32_at
from octavo.kernels.cpu.plan import (
    END,
    FEW,
    FIRST,
    KEY_BEGIN,
    KEY_END,
    NUM_TOKENS,
    PART,
    POSITION,
    ROW,
    SEQ,
    TOGETHER,
    TOKEN,
    check_batch,
    plan_items,
)
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
from octavo.kernels.cpu.tiles import attend, key_tile_blocks, load_queries, new_scratch, round_up, store_row

ALONE_PRODUCTS = 1 << 18
"""Up to so many multiplications (some 30 microseconds) the calling thread works alone: waking a second one
gains little, and where other processes want the core, waiting for it can cost a time slice of theirs."""

TICKETS_PER_THREAD = 4
"""Items times KV heads that are left at least, where sequences that read keys together come into one."""


@compiled()
def count_products(cu_seqlens_q: Any, context_lens: Any) -> int:
    """Rows of tokens times keys, in all."""
    products = 0
    for s in range(context_lens.shape[0]):
        products += np.int64(cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * context_lens[s]
    return products


@compiled()
def attend_members(
    members: Any,
    key_begin: int,
    few: bool,
    table: Any,
    queries: Any,
    lanes: Any,
    caches: tuple[Any, Any, Any, Any, bool],
    head: tuple[int, int, int, int, int],
    shape: tuple[int, int, int, int],
    window: int,
    cap: float,
    accumulated: tuple[Any, Any, Any],
    scratch: tuple[Any, Any, Any],
    upcoming: Any,
) -> None:
    """The rows of one item, loaded, against all their keys: those that members share in one walk for all of them.

    lanes: buffers of `attend_lanes`, for rows that are not few. head = (block, slot, block of the scales: strides; KV
    head; its offset in a block); the rest as in `attend`.
    """
    block_stride, slot_stride, scale_stride, kv_head, head_at = head
    _, group, block_size, head_dim = shape
    strides = (block_stride, slot_stride, scale_stride)
    output, maxima, sums = accumulated
    for member in range(members.shape[0]):
        first_row, own_table = members[member, ROW], table[members[member, SEQ]]
        begin = members[member, TOGETHER] if member > 0 else key_begin
        last = member
        while begin < members[member, KEY_END]:
            # Those that go on together from here; up to here this one has come with the members before.
            last = member
            end = members[member, KEY_END]
            while last + 1 < members.shape[0] and members[last + 1, TOGETHER] > begin:
                last += 1
                end = min(end, members[last, TOGETHER])
            rows = members[last, ROW] + members[last, NUM_TOKENS] * group - first_row
            # All see all that they read together.
            position = members[member, POSITION] if last == member else end - 1
            if few:
                attend(
                    queries, rows, group, position, caches, strides, kv_head, head_at, own_table, block_size,
                    head_dim, (begin, end), window, cap, (output, maxima, sums, first_row), scratch, upcoming,
                )  # fmt: skip
            else:
                attend_lanes(
                    lanes, first_row, rows, position, caches, strides, kv_head, head_at, own_table, block_size,
                    head_dim, (begin, end), window, cap, upcoming,
                )  # fmt: skip
            begin = end


@compiled()
def find_first_keys(
    plan: tuple[Any, Any],
    ticket: int,
    table: Any,
    kv_strides: tuple[int, int, int, int],
    shape: tuple[int, int, int, int],
    upcoming: Any,
) -> None:
    """upcoming [blocks of a key tile]: where a ticket's first keys lie."""
    items, members = plan
    num_kv_heads, _, block_size, _ = shape
    item, kv_head = ticket // num_kv_heads, ticket % num_kv_heads
    member = items[item, FIRST]
    first, last = items[item, KEY_BEGIN] // block_size, (members[member, KEY_END] - 1) // block_size
    for i in range(upcoming.shape[0]):
        block = table[members[member, SEQ], min(first + i, last)]
        upcoming[i] = block * kv_strides[0] + kv_head * kv_strides[1]


@compiled()
def item_rows(plan: tuple[Any, Any], group: int) -> tuple[int, int]:
    """The most rows of an item that are few in each sequence, and of one whose rows are not, in whole vectors."""
    items, members = plan
    few, many = 0, 0
    for item in range(items.shape[0]):
        last = items[item, END] - 1
        rows = members[last, ROW] + members[last, NUM_TOKENS] * group
        if items[item, FEW] != 0:
            few = max(few, rows)
        else:
            many = max(many, whole_lanes(rows))
    return few, many


@compiled()
def work(
    counter: Any,
    plan: tuple[Any, Any],
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
    items, members = plan
    num_kv_heads, group, block_size, head_dim = shape
    window, scale, cap = options
    part_outputs, part_maxima, part_sums = parts
    depth = round_up(head_dim)
    few_rows, many_rows = item_rows(plan, group)
    tile_rows = max(few_rows, many_rows)
    queries = np.empty(tile_rows * depth, np.float32)
    output = np.empty(tile_rows * depth, np.float32)
    maxima = np.empty(tile_rows, np.float32)
    sums = np.zeros(tile_rows * LANES, np.float32)
    scratch = new_scratch(few_rows, block_size, head_dim)
    lanes = new_lanes(many_rows, block_size, head_dim)
    # Scores in units of log2, so that the exponentials are powers of two.
    factor = np.float32(scale / cap if cap > 0.0 else scale * LOG2_E)
    cap_log2 = np.float32(cap * LOG2_E)
    upcoming = np.zeros(key_tile_blocks(block_size), np.int64)
    num_tickets = items.shape[0] * num_kv_heads
    ticket = fetch_add(counter, 1)
    while ticket < num_tickets:
        item, kv_head = ticket // num_kv_heads, ticket % num_kv_heads
        own = members[items[item, FIRST] : items[item, END]]
        # Taken early, to know which keys to ask for while this item's last values are read.
        ticket = fetch_add(counter, 1)
        find_first_keys(plan, min(ticket, num_tickets - 1), batch[0], kv_strides, shape, upcoming)
        few = items[item, FEW] != 0
        rows = 0
        for member in range(own.shape[0]):
            tokens, rows = own[member, NUM_TOKENS], own[member, ROW]
            q_at = own[member, TOKEN] * q_strides[0] + kv_head * group * q_strides[1]
            load_queries(q, q_at, q_strides[0], q_strides[1], tokens, group, head_dim, factor, queries, rows)
            if not few:
                number_lanes(lanes, rows, tokens, group)
            rows += tokens * group
        if few:
            maxima[:rows] = -np.inf
            sums[: rows * LANES] = 0.0
            output[: rows * depth] = 0.0
        else:
            begin_lanes(lanes, queries, rows, depth)
        head = (kv_strides[0], kv_strides[2], kv_strides[3], kv_head, kv_head * kv_strides[1])
        attend_members(
            own, items[item, KEY_BEGIN], few, batch[0], queries, lanes, caches, head, shape, window, cap_log2,
            (output, maxima, sums), scratch, upcoming,
        )  # fmt: skip
        if not few:
            end_lanes(lanes, rows, depth, (output, maxima, sums))
        for member in range(own.shape[0]):
            first_row, rows = own[member, ROW], own[member, NUM_TOKENS] * group
            if own[member, PART] < 0:
                for row in range(rows):
                    at = (own[member, TOKEN] + row // group) * out_strides[0]
                    at += (kv_head * group + row % group) * out_strides[1]
                    total = vsum_lanes(vload(sums, (first_row + row) * LANES))
                    store_row(output, (first_row + row) * depth, total, head_dim, out, at)
            else:
                place = own[member, PART] * num_kv_heads + kv_head * rows
                for row in range(rows):
                    part_maxima[place + row] = maxima[first_row + row]
                    part_sums[place + row] = vsum_lanes(vload(sums, (first_row + row) * LANES))
                part_outputs[place * depth : (place + rows) * depth] = output[
                    first_row * depth : (first_row + rows) * depth
                ]


@compiled()
def merge_parts(
    cuts: Any,
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
    for s in range(cuts.shape[0]):
        num_parts = cuts[s, 0]
        rows = (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * group if num_parts > 1 else 0
        for row in range(num_kv_heads * rows):
            # Part after part, head after head, row after row: as `work` laid them out.
            first = cuts[s, 1] * num_kv_heads + row
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
            token = cu_seqlens_q[s] + own // group
            at = token * out_strides[0] + (kv_head * group + own % group) * out_strides[1]
            store_row(merged, 0, total, head_dim, out, at)


@compiled(parallel=True)
def work_together(
    threads: int,
    counter: Any,
    plan: tuple[Any, Any],
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
        work(counter, plan, batch, q, q_strides, caches, kv_strides, shape, options, out, out_strides, parts)


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
    check_batch(table, cu_seqlens_q, context_lens, num_cache_blocks, block_size, options[0])
    items_min = (threads * TICKETS_PER_THREAD + num_kv_heads - 1) // num_kv_heads
    items, members, cuts, part_rows = plan_items(
        table, cu_seqlens_q, context_lens, block_size, group, options[0], items_min
    )
    plan = (items, members)
    products = count_products(cu_seqlens_q, context_lens) * num_kv_heads * group * head_dim * 2
    part_rows *= num_kv_heads
    parts = (
        np.empty(part_rows * round_up(head_dim), np.float32),
        np.empty(part_rows, np.float32),
        np.empty(part_rows, np.float32),
    )
    counter = np.zeros(1, np.int64)
    if threads == 1 or products <= ALONE_PRODUCTS:
        work(counter, plan, batch, q, q_strides, caches, kv_strides, shape, options, out, out_strides, parts)
    else:
        work_together(
            threads,
            counter,
            plan,
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
        merge_parts(cuts, cu_seqlens_q, shape, out, out_strides, parts)


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
